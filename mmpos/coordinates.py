"""How an encoding reads positions: the index itself, scaled to a reference grid, or centred.

A reading belongs to the encoding that uses it, so that a table and a rotation of the same model may
read the same positions differently. In training a reading may be disturbed, so that the model meets
coordinates other than those of its training grid (DINOv3, arXiv:2508.10104, sec. 3.2): shifted per
axis, jittered (scaled per axis) and rescaled (scaled together).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float, Num
from torch import Tensor

from mmpos.positions import Axes, axis_count, check, grid_of, join
from mmpos.spec import Specified

Extent = Sequence[int] | Tensor
"""How many cells the grid at hand has on each axis: ``A`` integers, or a tensor ``[B, A]`` where
samples have their own, or ``[B, L, A]`` where tokens have, those of samples packed in a row.
"""


class Coordinates(Specified, ABC):
    """A reading of positions, with its disturbances in training.

    Args:
        shift: largest shift, in the units of the coordinate, drawn per axis from U(-shift, shift).
        jitter: largest factor per axis, drawn log-uniformly from [1 / jitter, jitter].
        rescale: largest factor common to all axes, drawn log-uniformly from [1 / rescale, rescale].

    Each call in training draws once for all tokens. NaN stays NaN. Coordinates are float64, so
    that angles and distances stay exact far out (float32 on devices without it).
    Raises: ValueError for a negative shift, or a jitter or rescale below 1.
    """

    def __init__(self, *, shift: float = 0.0, jitter: float = 1.0, rescale: float = 1.0) -> None:
        if not (0 <= shift < math.inf and 1 <= jitter < math.inf and 1 <= rescale < math.inf):
            raise ValueError(
                "expected shift >= 0, jitter >= 1 and rescale >= 1, "
                f"got shift={shift}, jitter={jitter}, rescale={rescale}"
            )
        self.shift, self.jitter, self.rescale = shift, jitter, rescale

    def __call__(
        self,
        positions: Num[Tensor, "*batch length axes"],
        *,
        axes: Axes,
        extent: Extent | None = None,
        training: bool = False,
    ) -> Float[Tensor, "*batch length axes"]:
        """Read ``positions``; ``axes`` is their number, or the grid the encoding was made for.

        Raises: TypeError, ValueError as `mmpos.positions.check`; ValueError if the reading needs an
        extent or a grid that is not there.
        """
        check(positions, axis_count(axes))
        exact = positions.float() if positions.device.type == "mps" else positions.double()
        read = self.read(exact, axes, extent)
        return self._disturb(read) if training else read

    @abstractmethod
    def read(self, positions: Tensor, axes: Axes, extent: Extent | None) -> Tensor:
        """The undisturbed coordinates of floating-point positions."""

    def _disturb(self, read: Tensor) -> Tensor:
        def uniform(bound: float, count: int) -> Tensor:
            draws = torch.empty(count, dtype=torch.float32, device=read.device)
            return draws.uniform_(-bound, bound)

        if self.shift > 0:
            read = read + uniform(self.shift, read.shape[-1])
        if self.jitter > 1:
            read = read * uniform(math.log(self.jitter), read.shape[-1]).exp()
        if self.rescale > 1:
            read = read * uniform(math.log(self.rescale), 1).exp()
        return read


class Index(Coordinates):
    """The position itself: ``i``.

    >>> Index()(torch.tensor([[0], [3]]), axes=1).flatten().tolist()
    [0.0, 3.0]
    """

    @property
    def neutral(self) -> bool:
        return (self.shift, self.jitter, self.rescale) == (0, 1, 1)

    def read(self, positions: Tensor, axes: Axes, extent: Extent | None) -> Tensor:
        return positions


class OneBased(Coordinates):
    """Counted from one: ``i + 1`` (Llama 4's and the Perception Encoder's patches).

    >>> OneBased()(torch.tensor([[0], [3]]), axes=1).flatten().tolist()
    [1.0, 4.0]
    """

    def read(self, positions: Tensor, axes: Axes, extent: Extent | None) -> Tensor:
        return positions + 1


class Scaled(Coordinates):
    """Scaled to a reference grid: ``(i + offset) · reference / extent`` (EVA-02, arXiv:2303.11331).

    A grid of another size spans the coordinates of the reference grid: interpolation on every axis.

    Args:
        reference: cells of the reference grid on each axis; by default the grid that the encoding
            was made for. An axis with None is left as it is: time beside height and width, say.
        offset: of the place that is read within a cell; 0 is its start, 0.5 its centre.

    Raises: in the call, ValueError without ``extent``, or without a reference where the encoding
    was made for a number of axes instead of a grid.

    >>> Scaled((4,))(torch.tensor([[0], [3], [7]]), axes=1, extent=(8,)).flatten().tolist()
    [0.0, 1.5, 3.5]
    """

    def __init__(
        self,
        reference: Sequence[int | None] | None = None,
        *,
        offset: float = 0.0,
        shift: float = 0.0,
        jitter: float = 1.0,
        rescale: float = 1.0,
    ) -> None:
        super().__init__(shift=shift, jitter=jitter, rescale=rescale)
        if reference is not None:
            axis_count(tuple(1 if size is None else size for size in reference))
        self.reference = None if reference is None else tuple(reference)
        self.offset = offset

    def read(self, positions: Tensor, axes: Axes, extent: Extent | None) -> Tensor:
        reference = self.reference or grid_of(axes)
        if reference is None:
            raise ValueError(
                "Scaled() has no reference grid: pass Scaled(reference=(height, width)), "
                "or make the encoding with a grid instead of a number of axes"
            )
        if len(reference) != axis_count(axes):
            raise ValueError(
                f"Scaled(reference={reference}) has {len(reference)} axes, "
                f"the encoding has {axis_count(axes)}"
            )
        sizes = [size or 1 for size in reference]
        wanted = torch.tensor(sizes, dtype=positions.dtype, device=positions.device)
        scaled = (positions + self.offset) * (wanted / _extent(self, extent, positions))
        if None not in reference:
            return scaled
        fixed = torch.tensor([size is None for size in reference], device=positions.device)
        return torch.where(fixed, positions, scaled)


Side = Literal["own", "longest", "shortest"]


class Centered(Coordinates):
    """From -1 to 1 over the grid, read at cell centres: ``2 (i + 0.5) / extent - 1`` (DINOv3).

    Args:
        turns: whether the coordinate counts whole turns rather than radians: it is multiplied by
            2π, after the disturbances. So DINOv3's RoPE reads it (arXiv:2508.10104, sec. 3.2):
            ``RotaryEncoding(head_dim, 2, base=100, layout="half",
            coordinates=Centered(turns=True))``.
        side: ``extent`` of each axis itself, or of the longest or the shortest axis for all, which
            keeps the proportions of a rectangle (DINOv3's ``max`` and ``min``).

    Raises: ValueError for an unknown side; in the call, without ``extent``.

    >>> Centered()(torch.tensor([[0], [1]]), axes=1, extent=(2,)).flatten().tolist()
    [-0.5, 0.5]
    """

    def __init__(
        self,
        *,
        turns: bool = False,
        side: Side = "own",
        shift: float = 0.0,
        jitter: float = 1.0,
        rescale: float = 1.0,
    ) -> None:
        super().__init__(shift=shift, jitter=jitter, rescale=rescale)
        if side not in get_args(Side):
            raise ValueError(f"side must be one of {get_args(Side)}, got {side!r}")
        self.turns = turns
        self.side: Side = side

    def __call__(
        self,
        positions: Num[Tensor, "*batch length axes"],
        *,
        axes: Axes,
        extent: Extent | None = None,
        training: bool = False,
    ) -> Float[Tensor, "*batch length axes"]:
        read = super().__call__(positions, axes=axes, extent=extent, training=training)
        return 2 * math.pi * read if self.turns else read

    def read(self, positions: Tensor, axes: Axes, extent: Extent | None) -> Tensor:
        size = _extent(self, extent, positions)
        if self.side != "own":
            longest, shortest = size.amax(-1, keepdim=True), size.amin(-1, keepdim=True)
            size = longest if self.side == "longest" else shortest
        return 2 * (positions + 0.5) / size - 1


def reading(given: Coordinates | None) -> Coordinates:
    """``given``, or the plain index; raises TypeError for anything but an instance."""
    if given is None:
        return Index()
    if not isinstance(given, Coordinates):
        raise TypeError(
            f"coordinates must be an instance such as Index() or Scaled(), got {given!r}"
        )
    return given


def read_both(
    reading: Coordinates,
    queries: Tensor,
    keys: Tensor,
    *,
    axes: Axes,
    extent: Extent | None,
    training: bool,
) -> Sequence[Tensor]:
    """The coordinates of queries and keys, by one reading: a disturbance is the same for both."""
    for positions in (queries, keys):
        check(positions, axis_count(axes))
    counts = [queries.shape[-2], keys.shape[-2]]
    if isinstance(extent, Tensor) and extent.ndim == 3 and extent.shape[-2] != sum(counts):
        # else it is of the queries, then of the keys
        if counts[0] != counts[1]:
            raise ValueError(
                f"an extent for each token needs as many queries as keys, got {counts[0]} and "
                f"{counts[1]}"
            )
        extent = torch.cat((extent, extent), -2)
    read = reading(join(queries, keys), axes=axes, extent=extent, training=training)
    return read.split(counts, dim=-2)


def _extent(reading: Coordinates, extent: Extent | None, positions: Tensor) -> Tensor:
    """The extent as a tensor that broadcasts against ``positions [..., L, A]``."""
    name = type(reading).__name__
    if extent is None:
        raise ValueError(
            f"{name} coordinates need the size of the grid: pass extent, a number of cells per axis"
        )
    size = torch.as_tensor(extent, dtype=positions.dtype, device=positions.device)
    if size.shape[-1:] != positions.shape[-1:]:
        raise ValueError(
            f"extent has {size.shape[-1] if size.ndim else 0} axes, "
            f"the positions have {positions.shape[-1]}"
        )
    if not isinstance(extent, Tensor) and not all(cells >= 1 for cells in extent):
        raise ValueError(f"extent must be 1 cell or more on each axis, got {tuple(extent)}")
    if size.ndim < 3:
        return size.unsqueeze(-2)
    if size.shape[-2] != positions.shape[-2]:
        raise ValueError(
            f"extent is for {size.shape[-2]} tokens of a row, there are {positions.shape[-2]}"
        )
    return size
