from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmpos.coordinates import Coordinates
from mmpos.frequencies import Extension, geometric, split_pairs
from mmpos.positions import Axes, axis_count
from mmpos.rotary.rope import RotaryEncoding
from mmpos.rotary.rotation import Layout
from mmpos.rotary.temperature import LogTemperature


class MRoPE(RotaryEncoding):
    """RoPE with one spectrum, each of whose pairs reads one axis: text and images in one model.

    Pair ``p`` turns by ``x[axis of p] · base ** (-p / P)``, ``P`` pairs in all. Where all
    coordinates of a token are the same number (text), that is 1-D RoPE bit for bit.

    Source: Qwen2-VL (arXiv:2409.12191, sec. 2.1), whose axes have consecutive sections of the
    spectrum, so that time has the fastest pairs. Interleaved (Qwen3-VL, arXiv:2511.21631, sec. 2),
    axis ``a`` of ``A`` has the pairs ``a, a + A, a + 2 A, …``, as many as its section says, and the
    first axis has what is left, the slowest ones among it.

    Args:
        head_dim: features of a head.
        axes: number of axes, or a grid; time, height and width by default.
        sections: pairs of each axis, exactly; evenly by default, what is left over to the first.
            Qwen3-VL has (24, 20, 20) of 64, Qwen2-VL (16, 24, 24).
        interleaved: whether axes take pairs in turn, or have sections one after the other.
        base: of the one spectrum.
        rotary_dim, trailing, layout, coordinates, temperature: as in `RotaryEncoding`. Qwen's
            weights have the layout ``half``.
        extension: context extension of the spectrum, one for all axes, or one or None for each. It
            counts all pairs of the spectrum.

    Shape: positions ``[..., L, A]`` → `Rotation` with ``cos`` and ``sin [..., 1, L, P]``, float32;
    it has no parameters. A coordinate that a token lacks turns its pairs as coordinate 0.
    Raises: ValueError for sections that are not the number of pairs in all, or that interleaving
    cannot give; and as `RotaryEncoding`.

    >>> MRoPE(16, sections=(4, 2, 2)).pair_axes
    [0, 1, 2, 0, 1, 2, 0, 0]
    >>> MRoPE(16, sections=(4, 2, 2), interleaved=False).pair_axes
    [0, 0, 0, 0, 1, 1, 2, 2]
    """

    def __init__(
        self,
        head_dim: int,
        axes: Axes = 3,
        *,
        sections: Sequence[int] | None = None,
        interleaved: bool = True,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        trailing: bool = False,
        layout: Layout = "interleaved",
        coordinates: Coordinates | None = None,
        extension: Extension | Sequence[Extension | None] | None = None,
        temperature: LogTemperature | None = None,
    ) -> None:
        width = head_dim if rotary_dim is None else rotary_dim
        pairs, count = width // 2, axis_count(axes)
        own = None if sections is None else tuple(sections)
        if own is not None and interleaved:
            _check_interleaved(own, pairs, count)
        elif own is not None:
            check_sections(own, pairs, count)
        super().__init__(
            head_dim,
            axes,
            base=base,
            split=own or split_pairs(pairs, count),
            rotary_dim=width,
            trailing=trailing,
            layout=layout,
            coordinates=coordinates,
            extension=extension,
            temperature=temperature,
        )
        self.rotary_dim = rotary_dim
        self.sections = own
        self.interleaved = interleaved

    @property
    def pair_axes(self) -> list[int]:
        """Which axis turns each pair."""
        if self.interleaved:
            return _in_turn(self.pairs, sum(self.pairs))
        return [axis for axis, pairs in enumerate(self.pairs) for _ in range(pairs)]

    def spectrum(self, axis: int) -> list[float]:
        """Frequencies of all pairs before any extension, the same for each axis."""
        return geometric(sum(self.pairs), self._bases()[axis])

    def place(self, row: Tensor, axis: int) -> Tensor:
        """The spectrum ``[..., P]`` where its pairs read ``axis``, 0 at all others."""
        own = torch.tensor([axis == other for other in self.pair_axes], device=row.device)
        return torch.where(own, row, 0)

    def extra_repr(self) -> str:
        own = f"sections={self.pairs}, interleaved={self.interleaved}"
        return f"{super().extra_repr()}, {own}"


def check_sections(sections: Sequence[int], pairs: int, axes: int) -> None:
    """Raise ValueError unless sections give each axis a pair or more, and ``pairs`` in all."""
    if len(sections) != axes or min(sections) < 1 or sum(sections) != pairs:
        raise ValueError(
            f"sections={tuple(sections)} must give each of the {axes} axes 1 pair or more, {pairs} "
            f"in all; evenly they are {split_pairs(pairs, axes)}"
        )


def _check_interleaved(sections: Sequence[int], pairs: int, axes: int) -> None:
    if len(sections) != axes or min(sections) < 1:
        check_sections(sections, pairs, axes)
    real = tuple(_in_turn(sections, pairs).count(axis) for axis in range(axes))
    if real != sections:
        raise ValueError(
            f"sections={sections} interleaved on {pairs} pairs really give {real}: "
            f"pass sections={real}"
        )


def _in_turn(sections: Sequence[int], pairs: int) -> list[int]:
    """The axis of each pair: taking turns until a section is full, the rest to the first axis."""
    axes = len(sections)
    turns = [pair % axes for pair in range(pairs)]
    return [axis if pair < axes * sections[axis] else 0 for pair, axis in enumerate(turns)]
