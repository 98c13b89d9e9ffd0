"""The size that a model is resized to, and what of it a model keeps."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mmpos.interop.timm.scheme import times
from mmpos.interop.timm.tables import Grid


@dataclass(frozen=True)
class Target:
    """What a model is resized to; ``window`` is one size, one for each axis, or one a stage."""

    size: Grid
    patch: Grid | None = None
    window: int | Sequence[Any] | None = None


def pair(value: Any, name: str) -> Grid:
    """Two sizes, from one or two.

    Raises: TypeError for what is no whole number, or not one or two of them; ValueError below 1.
    """
    sizes = [value, value] if isinstance(value, int) else value
    whole = isinstance(sizes, Sequence) and all(type(size) is int for size in sizes)
    if not whole or len(sizes) != 2:
        raise TypeError(f"{name} is a whole number or (height, width), got {value!r}")
    grid = tuple(int(size) for size in sizes)
    if min(grid) < 1:
        raise ValueError(f"{name} must be 1 or more, got {value!r}")
    return grid


def divided(size: Sequence[int], steps: Sequence[int]) -> Grid:
    """A grid of patches, of which a remainder is dropped."""
    return tuple(side // step for side, step in zip(size, steps, strict=True))


def halved(size: Sequence[int], step: int = 2) -> Grid:
    """A grid after a step of ``step`` that keeps a remainder."""
    return tuple(-(-side // step) for side in size)


def convolved(size: Sequence[int], convolution: Any) -> Grid:
    """A grid after a convolution or a pooling with padding in numbers."""
    numbers = (convolution.kernel_size, convolution.stride, convolution.padding)
    kernel, stride, padding = ((n, n) if isinstance(n, int) else n for n in numbers)
    return tuple(
        (side + 2 * padding[axis] - kernel[axis]) // stride[axis] + 1
        for axis, side in enumerate(size)
    )


def multiples(size: Sequence[int], step: int | Sequence[int], why: str) -> None:
    """Raise ValueError for a size that is no multiple of ``step`` on each axis."""
    steps = (step, step) if isinstance(step, int) else step
    pairs = list(zip(size, steps, strict=True))
    if any(side % each for side, each in pairs):
        low = [max(side // each, 1) * each for side, each in pairs]
        high = [-(-side // each) * each for side, each in pairs]
        raise ValueError(
            f"image_size {times(size)} is no multiple of {times(steps)}, as {why} needs: "
            f"give {times(low)} or {times(high)}"
        )


def record(model: Any, size: Grid, **arguments: Any) -> None:
    """Note the size where timm looks for it: data configs, and arguments to make the model anew."""
    model._traits = {**getattr(model, "_traits", {}), "img_size": size}
    taken = {
        name
        for cls in type(model).__mro__
        if "__init__" in vars(cls)
        for name in inspect.signature(cls.__init__).parameters
    }
    named = {"img_size": size, **arguments}
    kept = {name: value for name, value in named.items() if name in taken}
    model._model_args = {**getattr(model, "_model_args", {}), **kept}


def recorded(model: Any) -> Grid | None:
    """The size that timm noted when it made the model, if it did."""
    size = getattr(model, "_traits", {}).get("img_size")
    return tuple(size) if size is not None else None


def one_patch(size: Grid, step: Sequence[int]) -> None:
    """Raise ValueError for a size that is less than a patch."""
    if any(side < each for side, each in zip(size, step, strict=True)):
        raise ValueError(f"image_size {times(size)} is less than a patch of {times(step)}")


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of timm's own way with bias tables, whose results are not used."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="timm.layers.interpolate")
        yield
