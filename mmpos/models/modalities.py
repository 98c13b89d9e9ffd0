from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from mmpos.models.patches import Tokens
from mmpos.positions import padded, sequence

Layout = Literal["missing", "mrope", "sequence"]
AXES = ("time", "height", "width")
_OWN = {1: (0,), 2: (1, 2), 3: (0, 1, 2)}


class Modalities(nn.Module):
    """Tokens of several modalities in one sequence: text, images, sound and video, say.

    Each has a tokeniser of its own, and they come in the order of ``tokens``. Their places on the
    shared axes, time, height and width, are laid out in one of three ways:

    - ``missing``: a token has the coordinates of its own axes, counted from 0, and NaN on the axes
      that it lacks, which contributes nothing to any encoding: text and sound have a time, an image
      has height and width.
    - ``mrope``: Qwen2-VL's counting (arXiv:2409.12191, sec. 2.1), for `mmpos.MRoPE` and others: a
      modality begins after the largest position of the one before it, on all axes; tokens of a line
      have the same number on each, those of an image the same time. See
      `mmpos.positions.of_parts`, which gives the same.
    - ``sequence``: one axis, on which real tokens are counted through.

    Args:
        tokens: name → tokeniser, which maps an input, and a mask where it is padded, to `Tokens`,
            such as `Symbols`, `PatchEmbedding`, `FrameEmbedding` or `TubeletEmbedding`.
        layout: see above.
        axes: which of the shared axes those of a modality are; by default time for one axis, height
            and width for two, all for three.

    Shape: a mapping of name → input, None or left out where no row has this modality → `Tokens`
    with values ``[B, L, dim]``, positions ``[L, A]`` or ``[B, L, A]``, and a mask where any has
    one. Masks are a mapping of name → mask, as the tokeniser takes it, or ``[B]``: the rows that
    have the modality at all. Parameters of a modality that a batch lacks take part with a gradient
    of 0, as if its rows were all padding, so that processes with other batches agree (DDP).
    Raises: ValueError without tokenisers, for an unknown layout or axes; in the call for an unknown
    name, no input at all, modalities or masks of other rows, or axes that a modality's tokens do
    not have.

    >>> from mmpos.models import PatchEmbedding, Symbols
    >>> both = Modalities({"text": Symbols(8, 256), "image": PatchEmbedding(8, (4, 4))})
    >>> page = torch.zeros(1, 3, 4, 8)
    >>> both({"text": torch.zeros(1, 2, dtype=torch.long), "image": page}).positions.tolist()
    [[0.0, nan, nan], [1.0, nan, nan], [nan, 0.0, 0.0], [nan, 0.0, 1.0]]
    """

    def __init__(
        self,
        tokens: Mapping[str, nn.Module],
        layout: Layout = "missing",
        *,
        axes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        if not tokens:
            raise ValueError("expected a tokeniser for each modality, by its name, got none")
        if layout not in get_args(Layout):
            raise ValueError(f"layout must be one of {get_args(Layout)}, got {layout!r}")
        self.tokens = nn.ModuleDict(tokens)
        self.layout: Layout = layout
        self.axes = {name: tuple(own) for name, own in (axes or {}).items()}
        self._check_names("axes", self.axes)
        for name, own in self.axes.items():
            if len(set(own)) != len(own) or not own or not set(own) <= set(range(len(AXES))):
                raise ValueError(
                    f"axes of {name} are some of 0 (time), 1 (height) and 2 (width), got {own}"
                )

    def _check_names(self, what: str, given: Mapping[str, Any]) -> None:
        for name in given:
            if name not in self.tokens:
                raise ValueError(f"{what} are for {', '.join(self.tokens)}, got {name!r}")

    def grid(self, sizes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        """The grid that positions lie on, for tokens of these sizes by modality.

        >>> from mmpos.models import PatchEmbedding, Symbols
        >>> both = {"text": Symbols(8, 256), "image": PatchEmbedding(8, (4, 4))}
        >>> sizes = {"text": (20,), "image": (6, 6)}
        >>> [Modalities(both, way).grid(sizes) for way in ("missing", "mrope", "sequence")]
        [(20, 6, 6), (26, 26, 26), (56,)]
        """
        self._check_names("sizes", sizes)
        if self.layout == "sequence":
            return (sum(torch.Size(size).numel() for size in sizes.values()),)
        if self.layout == "mrope":
            return (sum(max(size) for size in sizes.values()),) * len(AXES)
        grid = [1] * len(AXES)
        for name, size in sizes.items():
            for axis, cells in zip(self._own(name, len(size)), size, strict=True):
                grid[axis] = max(grid[axis], cells)
        return tuple(grid)

    def forward(
        self,
        inputs: Mapping[str, Tensor | None],
        masks: Mapping[str, Tensor | None] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Tokens:
        """The tokens of all inputs.

        Args:
            options: what else a tokeniser takes, by its name: ``{"audio": {"step": 0.01}}``.
        """
        masks, options = masks or {}, options or {}
        for what, given in (("inputs", inputs), ("masks", masks), ("options", options)):
            self._check_names(what, given)
        found = {
            name: self._of(name, x, masks.get(name), options.get(name, {}))
            for name in self.tokens
            if (x := inputs.get(name)) is not None
        }
        if not found:
            raise ValueError(f"no row has any of {', '.join(self.tokens)}: give one or more")
        _check_rows({name: part.values.shape[0] for name, part in found.items()})
        values = torch.cat([part.values for part in found.values()], dim=1)
        if torch.is_grad_enabled():
            for name in self.tokens:
                for weight in self.tokens[name].parameters() if name not in found else ():
                    values = values + weight.flatten()[:0].sum().to(values.dtype)
        mask = _joined([(part.mask, part.values) for part in found.values()])
        return Tokens(values, self._places(found, mask), None, mask)

    def _of(self, name: str, x: Tensor, mask: Tensor | None, options: Mapping[str, Any]) -> Tokens:
        if mask is None or mask.ndim > 1:
            return (
                self.tokens[name](x, **options)
                if mask is None
                else (self.tokens[name](x, mask, **options))
            )
        if mask.shape[0] != x.shape[0]:
            raise ValueError(
                f"a mask of {name} says of each of {x.shape[0]} rows whether it has any, got "
                f"{mask.shape[0]}"
            )
        present = mask.view(-1, *[1] * (x.ndim - 1))
        own = self.tokens[name](x.where(present, 0), **options)
        return own._replace(mask=mask.unsqueeze(-1).expand(own.values.shape[:2]))

    def _own(self, name: str, count: int) -> tuple[int, ...]:
        own = self.axes.get(name) or _OWN.get(count, ())
        if len(own) != count:
            raise ValueError(
                f"tokens of {name} have {count} axes, and it was given {len(own)} of the shared "
                f"ones, {', '.join(AXES)}"
            )
        return own

    def _places(self, found: Mapping[str, Tokens], mask: Tensor | None) -> Tensor:
        if self.layout == "sequence":
            if mask is not None:
                return padded(mask)
            values = [part.values for part in found.values()]
            return sequence(sum(v.shape[1] for v in values), device=values[0].device)
        if self.layout == "mrope":
            parts, reaches = zip(*(self._block(n, part) for n, part in found.items()), strict=True)
            starts = [0, *accumulate(reaches[:-1])]
            places = [_after(start, part) for start, part in zip(starts, parts, strict=True)]
        else:
            places = [self._placed(n, part.positions, torch.nan) for n, part in found.items()]
        rows = [part.shape[:-2] for part in places]
        batch = torch.broadcast_shapes(*rows)
        return torch.cat([part.expand(*batch, *part.shape[-2:]) for part in places], dim=-2)

    def _placed(self, name: str, positions: Tensor, rest: float) -> Tensor:
        """Positions on the shared axes, ``rest`` on those that the modality has not."""
        own = self._own(name, positions.shape[-1])
        floating = positions if positions.is_floating_point() else positions.to(_exact(positions))
        placed = torch.full_like(floating[..., :1], rest).repeat_interleave(len(AXES), dim=-1)
        placed[..., list(own)] = floating
        return placed

    def _block(self, name: str, part: Tokens) -> tuple[Tensor, Any]:
        """A modality's positions from 0, and how far from its start the next begins."""
        if part.positions.shape[-1] == 1:
            own = part.positions.expand(*part.positions.shape[:-1], len(AXES))
        else:
            own = self._placed(name, part.positions, 0)
        last = own.amax(-1)
        if part.mask is not None:
            last = last.where(part.mask, -1)
        return own, last.amax(-1).floor().long() + 1


def _check_rows(rows: Mapping[str, int]) -> None:
    first, *others = rows.values()
    if any(count != first for count in others):
        raise ValueError(
            f"all modalities have the same rows, got {dict(rows)}: give a mask [batch] for those "
            "that some rows lack"
        )


def _after(start: Any, own: Tensor) -> Tensor:
    return own + (start.view(-1, 1, 1) if isinstance(start, Tensor) and start.ndim else start)


def _exact(positions: Tensor) -> torch.dtype:
    return torch.float32 if positions.device.type == "mps" else torch.float64


def _joined(masks: Sequence[tuple[Tensor | None, Tensor]]) -> Bool[Tensor, "batch length"] | None:
    """One mask, if any part has one; a part without is all real."""
    if all(mask is None for mask, _ in masks):
        return None
    return torch.cat(
        [x.new_ones(x.shape[:2], dtype=torch.bool) if m is None else m for m, x in masks], dim=1
    )
