from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, get_args

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from mmpos.coordinates import Coordinates, Extent, reading
from mmpos.frequencies import Extension, Length, angles, axis_lengths, geometric, split_pairs
from mmpos.positions import Axes, axis_count, check_size
from mmpos.rotary.rotation import Layout, Rotation
from mmpos.rotary.temperature import LogTemperature
from mmpos.spec import Specified


class RotaryEncoding(Specified, nn.Module):
    """RoPE: turns pair ``p`` of a head by ``Σ_a x[a] · frequency[a, p]`` radians.

    Source: RoFormer (arXiv:2104.09864, sec. 3.2). Several axes divide the pairs (axial RoPE,
    arXiv:2403.13298, sec. 3.2), the first axis first. An axis with ``P`` pairs has the frequencies
    ``base ** (-p / P)``.

    Args:
        head_dim: features of a head.
        axes: number of axes, or a grid (its length counts; `Scaled` coordinates refer to it).
        base: longest wavelength, over 2π; 10000 for text, 100 is usual for patches. One for all
            axes, or one for each.
        split: pairs of each axis; evenly by default, what is left over to the first axis.
        rotary_dim: how many features of a head are turned; the exponent counts only these, as in
            GPT-NeoX. All of them by default. (For an exponent that counts all features, with the
            slowest pairs at rest, see `mmpos.frequencies.Proportional`.)
        trailing: turn the last features of a head rather than the first (DeepSeek-V2's MLA).
        order: which axis turns the first pairs, which the next: ``(1, 0)`` for models that put the
            columns first (timm's ``xy``). In the order of the axes by default.
        layout: which features form a pair: ``interleaved``, or ``half`` as in Llama's weights.
        coordinates: how positions are read.
        extension: context extension: one for all axes, or one or None for each.
        temperature: grows queries with their position; with rotary_dim=0 it is all that is done
            (Llama 4's layers without RoPE).

    Shape: positions ``[..., L, A]`` → `Rotation` with ``cos`` and ``sin [..., 1, L, P]``, float32;
    it has no parameters. A token without a place passes unchanged, as do the pairs of an axis that
    it lacks.
    Raises: ValueError for an odd number of features to turn, more than there are, fewer than 2 for
    each axis, or a split, order, bases or extensions that do not fit; TypeError for extensions that
    are none; in the call, ValueError for a missing length that an extension needs.

    >>> rotation = RotaryEncoding(64, axes=2, base=100)(mmpos.positions.grid(4, 6))
    >>> tuple(rotation.cos.shape)
    (1, 24, 32)
    """

    relative: ClassVar[bool] = True
    """Whether scores depend on differences of positions alone."""

    def __init__(
        self,
        head_dim: int,
        axes: Axes = 1,
        *,
        base: float | Sequence[float] = 10000.0,
        split: Sequence[int] | None = None,
        rotary_dim: int | None = None,
        trailing: bool = False,
        order: Sequence[int] | None = None,
        layout: Layout = "interleaved",
        coordinates: Coordinates | None = None,
        extension: Extension | Sequence[Extension | None] | None = None,
        temperature: LogTemperature | None = None,
    ) -> None:
        super().__init__()
        check_size("head_dim", head_dim)
        if not isinstance(temperature, LogTemperature | None):
            raise TypeError(f"temperature must be a LogTemperature(…) or None, got {temperature!r}")
        if layout not in get_args(Layout):
            raise ValueError(f"layout must be one of {get_args(Layout)}, got {layout!r}")
        self.head_dim = head_dim
        self.axes = axes
        self.rotary_dim = rotary_dim
        self.split = None if split is None else tuple(split)
        self.base = tuple(base) if isinstance(base, list | tuple) else base
        self.trailing = trailing
        self.order = None if order is None else tuple(order)
        self.layout: Layout = layout
        self.coordinates = reading(coordinates)
        self.extension = tuple(extension) if isinstance(extension, list | tuple) else extension
        self.temperature = temperature
        self.pairs = self._pairs()
        self._check()

    def _check(self) -> None:
        axes = len(self.pairs)
        if self.order is not None and sorted(self.order) != list(range(axes)):
            raise ValueError(f"order={self.order} must name each of the axes 0 … {axes - 1} once")
        extensions = _per_axis("extension", self.extension, axes)
        for axis, (base, own) in enumerate(zip(self._bases(), extensions, strict=True)):
            spectrum = self.spectrum(axis)
            if own is not None and not isinstance(own, Extension):
                raise TypeError(f"extension must be an instance such as YaRN(…), got {own!r}")
            if own is not None and spectrum:
                own.check(len(spectrum), base)
        if self.temperature is not None and not 0 <= self.temperature.axis < axes:
            raise ValueError(
                f"temperature reads axis {self.temperature.axis}, the encoding has {axes} axes"
            )

    def _bases(self) -> list[float]:
        return _per_axis("base", self.base, len(self.pairs))

    def _pairs(self) -> tuple[int, ...]:
        """Pairs of each axis."""
        axes, split, width = axis_count(self.axes), self.split, self.rotary_dim
        if width is None:
            width = self.head_dim if split is None else 2 * sum(split)
        if width == 0 and self.temperature is not None:
            return (0,) * axes
        if split is not None and self.rotary_dim is None and width > self.head_dim:
            raise ValueError(
                f"split={split} gives {sum(split)} pairs in all, and head_dim={self.head_dim} has "
                f"{self.head_dim // 2}"
            )
        if width % 2 or not 2 <= width <= self.head_dim:
            raise ValueError(
                f"RoPE turns an even number of features between 2 and head_dim={self.head_dim}, "
                f"got {width}: pass rotary_dim={max(2, min(width, self.head_dim) // 2 * 2)}"
            )
        if split is None:
            return split_pairs(width // 2, axes)
        if len(split) != axes or min(split) < 1 or 2 * sum(split) != width:
            raise ValueError(
                f"split={split} must give each of the {axes} axes 1 pair or more, {width // 2} in "
                f"all (half of the {width} features that are turned)"
            )
        return split

    def extend(self, extension: Extension | Sequence[Extension | None] | None) -> None:
        """Take another context extension, in place of the one it has.

        Raises: ValueError or TypeError as for a new encoding, which leave this one as it was.
        """
        before = self.extension
        self.extension = tuple(extension) if isinstance(extension, list | tuple) else extension
        try:
            self._check()
        except (TypeError, ValueError):
            self.extension = before
            raise

    @property
    def needs_length(self) -> bool:
        """Whether an extension asks how long the sequence is."""
        extensions = _per_axis("extension", self.extension, len(self.pairs))
        return any(own is not None and own.needs_length for own in extensions)

    @property
    def pair_axes(self) -> list[int]:
        """Which axis turns each pair."""
        order = self.order or range(len(self.pairs))
        return [axis for axis in order for _ in range(self.pairs[axis])]

    def spectrum(self, axis: int) -> list[float]:
        """Frequencies of an axis before any extension, radians per unit."""
        return geometric(self.pairs[axis], self._bases()[axis])

    def frequencies(
        self, dtype: torch.dtype, device: torch.device, length: Length | None = None
    ) -> Float[Tensor, "*batch head axes pairs"]:
        """Radians per unit of each axis, for each pair."""
        axes = len(self.pairs)
        bases, extensions = self._bases(), _per_axis("extension", self.extension, axes)
        rows = []
        for axis, own in enumerate(axis_lengths(length, axes, dtype, device)):
            row = torch.tensor(self.spectrum(axis), dtype=dtype, device=device)
            if extensions[axis] is not None:
                row = extensions[axis](row, base=bases[axis], length=own)
            rows.append(self.place(row, axis))
        return torch.stack(torch.broadcast_tensors(*rows), dim=-2).unsqueeze(-3)

    def place(self, row: Tensor, axis: int) -> Tensor:
        """The spectrum of an axis at the pairs ``[..., P]`` that it turns, 0 at all others."""
        before = self.pair_axes.index(axis) if self.pairs[axis] else 0
        return nn.functional.pad(row, (before, sum(self.pairs) - before - row.shape[-1]))

    def forward(
        self,
        positions: Num[Tensor, "*batch length axes"],
        extent: Extent | None = None,
        *,
        length: Length | None = None,
    ) -> Rotation:
        """The rotation of tokens at ``positions``, on a grid of ``extent`` cells.

        ``length`` is read by extensions that depend on it: tokens along the extended axes, one
        number, one for each axis, or a tensor with one for each sequence.
        """
        read = self.coordinates(positions, axes=self.axes, extent=extent, training=self.training)
        frequencies = self.frequencies(read.dtype, read.device, length)
        _check_batch(frequencies, positions)
        angle = angles(read, frequencies)
        cos, sin = angle.cos(), angle.sin()
        magnitudes = self._magnitudes()
        if magnitudes is not None:
            magnitude = torch.tensor(magnitudes, dtype=cos.dtype, device=cos.device)
            absent = read[..., self.pair_axes].isnan()
            magnitude = torch.where(absent, 1, magnitude).unsqueeze(-3)
            cos, sin = cos * magnitude, sin * magnitude
        rotation = self._turn(cos, sin, read)
        if self.temperature is None:
            return rotation
        return rotation._replace(scale=self.temperature(positions), keys=rotation.dual)

    def _magnitudes(self) -> list[float] | None:
        extensions = _per_axis("extension", self.extension, len(self.pairs))
        each = [1.0 if own is None else own.magnitude for own in extensions]
        return None if set(each) == {1.0} else [each[axis] for axis in self.pair_axes]

    def _turn(self, cos: Tensor, sin: Tensor, read: Tensor) -> Rotation:
        """The rotation that has these, for tokens at the coordinates ``read``."""
        start = self.head_dim - 2 * sum(self.pairs) if self.trailing else 0
        return Rotation(cos.float(), sin.float(), self.layout, start)

    def extra_repr(self) -> str:
        parts = [f"head_dim={self.head_dim}, axes={self.axes}, base={self.base}"]
        parts += [f"rotary_dim={2 * sum(self.pairs)}, layout={self.layout}"]
        parts += ["trailing=True"] if self.trailing else []
        parts += [f"order={self.order}"] if self.order is not None else []
        parts += [f"extension={self.extension}"] if self.extension is not None else []
        return ", ".join(parts)


def _per_axis(name: str, given, axes: int) -> list:
    if not isinstance(given, tuple):
        return [given] * axes
    if len(given) != axes:
        raise ValueError(f"{name} has {len(given)} entries, the encoding has {axes} axes")
    return list(given)


def _check_batch(frequencies: Tensor, positions: Tensor) -> None:
    batch, given = frequencies.shape[:-3], positions.shape[:-2]
    if any(a != b and 1 not in (a, b) for a, b in zip(batch[::-1], given[::-1], strict=False)):
        raise ValueError(
            f"length is for sequences {tuple(batch)}, the positions are for {tuple(given)}"
        )
