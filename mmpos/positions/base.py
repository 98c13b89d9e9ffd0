"""Positions of sequences and grids, and what is to be known of axes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

Axes = int | Sequence[int]
"""How many axes there are, or the grid they span, whose length is that number."""


def sequence(
    length: int,
    *,
    start: int | Int[Tensor, " batch"] = 0,
    device: torch.device | str | None = None,
) -> Int[Tensor, "*batch {length} 1"]:
    """Positions ``start … start + length - 1`` of a sequence: one axis.

    A tensor of starts gives each row its own: those of a chunk after what a cache holds, say.

    >>> sequence(3, start=5).tolist()
    [[5], [6], [7]]
    >>> sequence(2, start=torch.tensor([0, 7])).squeeze(-1).tolist()
    [[0, 1], [7, 8]]

    Raises: ValueError for a negative length; TypeError for starts that are no whole numbers.
    """
    if not isinstance(length, int | torch.SymInt) or length < 0:
        raise ValueError(f"a sequence has a whole number of tokens, 0 or more, got {length!r}")
    if isinstance(start, Tensor):
        if start.is_floating_point() or start.ndim != 1:
            raise TypeError(
                f"starts are whole numbers, one for each row, got {start.dtype} of shape "
                f"{tuple(start.shape)}"
            )
        ticks = torch.arange(length, device=start.device)
        return (start.unsqueeze(-1) + ticks).unsqueeze(-1)
    return torch.arange(start, start + length, device=device).unsqueeze(-1)


def grid(
    *sizes: int,
    start: Sequence[float] | None = None,
    step: Sequence[float] | None = None,
    device: torch.device | str | None = None,
) -> Num[Tensor, "length axes"]:
    """Positions of every cell of a grid in row-major order, the last axis fastest.

    Args:
        start: position of the first cell on each axis: where a crop lies in a larger grid.
        step: from a cell to the next on each axis; fractions, or negative, if need be.

    Positions are integers unless a start or a step is fractional, and float64 then (float32 on
    devices without it).

    >>> grid(2, 3).tolist()
    [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    >>> grid(1, 3, start=(4, 0), step=(1, 0.5)).tolist()
    [[4.0, 0.0], [4.0, 0.5], [4.0, 1.0]]

    Raises: ValueError without sizes, for a negative size, or a start or step for other axes;
        TypeError for sizes that are no whole numbers.
    """
    if any(not isinstance(size, int | torch.SymInt) for size in sizes):
        raise TypeError(f"sizes are whole numbers, one argument for each axis, got {sizes}")
    if not sizes or any(size < 0 for size in sizes):
        raise ValueError(f"a grid needs one size of 0 or more for each axis, got {sizes}")
    ticks = [torch.arange(size, device=device) for size in sizes]
    if start is not None or step is not None:
        ticks = _moved(ticks, start or (0,) * len(sizes), step or (1,) * len(sizes))
    return torch.stack(torch.meshgrid(*ticks, indexing="ij"), dim=-1).reshape(-1, len(sizes))


def _moved(ticks: list[Tensor], start: Sequence[float], step: Sequence[float]) -> list[Tensor]:
    if len(start) != len(ticks) or len(step) != len(ticks):
        raise ValueError(
            f"start and step have a number for each of {len(ticks)} axes, got {tuple(start)} and "
            f"{tuple(step)}"
        )
    if not all(isinstance(number, int) for number in (*start, *step)):
        exact = torch.float32 if ticks[0].device.type == "mps" else torch.float64
        ticks = [tick.to(exact) for tick in ticks]
    return [first + tick * by for tick, first, by in zip(ticks, start, step, strict=True)]


def absent(
    count: int, axes: int, *, device: torch.device | str | None = None
) -> Float[Tensor, "{count} {axes}"]:
    """Positions of tokens without a place (class and register tokens): all NaN.

    >>> absent(1, 2).tolist()
    [[nan, nan]]
    """
    return torch.full((count, axes), torch.nan, dtype=torch.float32, device=device)


def join(*parts: Num[Tensor, "*#batch _ _"]) -> Num[Tensor, "*batch length axes"]:
    """Positions of consecutive runs of tokens, one after the other; batches are broadcast.

    As soon as one part is floating, all become float64, which is exact for every integer in use;
    float32 if no part is an integer, or on devices without float64 (exact up to 2**24).

    >>> join(absent(1, 1), sequence(2)).tolist()
    [[nan], [0.0], [1.0]]

    Raises: ValueError for parts with different numbers of axes; TypeError for half precision.
    """
    for part in parts:
        if not isinstance(part, Tensor) or part.ndim < 2:
            got = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise TypeError(f"parts are tensors [..., length, axes], one by one, got {got}")
    axes = {int(part.shape[-1]) for part in parts}
    if len(axes) != 1:
        raise ValueError(f"cannot join positions with different numbers of axes: {sorted(axes)}")
    for part in parts:
        check(part, part.shape[-1])
    floating = [part.dtype for part in parts if part.is_floating_point()]
    if floating:
        dtype = functools.reduce(torch.promote_types, floating)
        if len(floating) < len(parts) and parts[0].device.type != "mps":
            dtype = torch.float64
        parts = tuple(part.to(dtype) for part in parts)
    batch = torch.broadcast_shapes(*(part.shape[:-2] for part in parts))
    return torch.cat([part.expand(*batch, *part.shape[-2:]) for part in parts], dim=-2)


def check(positions: Tensor, axes: int) -> None:
    """Raise unless ``positions`` is an exact ``[..., L, axes]`` tensor.

    Raises: TypeError for half precision (which merges integers above 256), booleans and complex
    numbers; ValueError for another number of axes.
    """
    if not isinstance(positions, Tensor):
        raise TypeError(
            f"positions must be a tensor [..., length, {axes}], got {type(positions).__name__}: "
            "see mmpos.positions"
        )
    exact = (torch.int32, torch.int64, torch.float32, torch.float64)
    if positions.dtype not in exact:
        raise TypeError(
            f"positions are {positions.dtype}, which is not exact: "
            "pass int32, int64, float32 or float64"
        )
    if positions.ndim < 2 or positions.shape[-1] != axes:
        raise ValueError(
            f"positions have shape {tuple(positions.shape)}, expected [..., length, {axes}]: "
            f"this encoding was made for {axes} axes"
        )


def axis_count(axes: Axes) -> int:
    """The number of axes, given that number or a grid.

    >>> axis_count(3), axis_count((14, 14))
    (3, 2)

    Raises: ValueError if there is none, or a size is below 1.
    """
    sizes = [axes] if isinstance(axes, int) else axes
    if (
        not isinstance(sizes, Sequence)
        or not sizes
        or any(not isinstance(size, int) or size < 1 for size in sizes)
    ):
        raise ValueError(
            f"axes must be a whole number of 1 or more, or a grid of such sizes, got {axes!r}"
        )
    return axes if isinstance(axes, int) else len(axes)


def check_size(name: str, size: int) -> None:
    """Raise ValueError unless ``size`` is a whole number of 1 or more."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{name} must be a whole number of 1 or more, got {size!r}")


def grid_of(axes: Axes) -> tuple[int, ...] | None:
    """The grid, if ``axes`` is one rather than a number."""
    return None if isinstance(axes, int) else tuple(axes)
