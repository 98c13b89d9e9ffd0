from __future__ import annotations

from typing import Literal, get_args

Size = Literal["nano", "tiny", "small", "base"]
_SIZES: dict[Size, tuple[int, int, int]] = {
    "nano": (64, 4, 4),
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
}


def sizes_of(size: Size, **given: int | None) -> tuple[int, int, int]:
    """Width, depth and heads of a size, those that are given by ``dim``, ``depth``, ``heads``.

    Raises: ValueError for an unknown size, or a number below 1.
    """
    if size not in _SIZES:
        raise ValueError(f"size must be one of {get_args(Size)}, got {size!r}")
    sizes = dict(zip(("dim", "depth", "heads"), _SIZES[size], strict=True))
    sizes |= {name: value for name, value in given.items() if value is not None}
    if min(sizes.values()) < 1:
        raise ValueError(f"expected sizes of 1 or more, got {sizes}")
    return sizes["dim"], sizes["depth"], sizes["heads"]
