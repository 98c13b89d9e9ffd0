"""Options of images, checked."""

import math


def sizes(
    image: int | tuple[int, int], patch: int | tuple[int, int] | None
) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """Height and width of image and patch. Raises ValueError where patches do not fill it."""
    if patch is None:
        (height, width), _ = sizes(image, image)
        return (height, width), None
    for name, given in (("image_size", image), ("patch_size", patch)):
        if not isinstance(given, int) and len(given) != 2:
            raise ValueError(f"{name} is {given}; expected one number, or height and width")
    (height, width), (rows, columns) = (
        (size, size) if isinstance(size, int) else tuple(size) for size in (image, patch)
    )
    if min(height, width, rows, columns) < 1:
        both = f"image_size {image}" + (f" and patch_size {patch}" if patch != image else "")
        raise ValueError(f"{both}: expected positive numbers")
    if height % rows or width % columns:
        smaller = max(height // rows, 1) * rows, max(width // columns, 1) * columns
        larger = -(-height // rows) * rows, -(-width // columns) * columns
        options = [size[0] if size[0] == size[1] else size for size in (smaller, larger)]
        raise ValueError(
            f"image_size {image} is not a multiple of patch_size {patch}; the nearest are "
            + " and ".join(dict.fromkeys(str(option) for option in options))
        )
    return (height, width), (rows, columns)


def per_channel(
    name: str, given: tuple[float, ...] | None, default: tuple[float, ...]
) -> tuple[float, ...]:
    """What each channel is normalised by. Raises ValueError for a ``name`` it cannot be."""
    if given is not None and len(given) != len(default):
        raise ValueError(f"{name} is {given}; expected {len(default)} numbers, one a channel")
    values = tuple(given or default)
    least = 0 if name == "std" else -math.inf
    if not all(math.isfinite(value) and value > least for value in values):
        raise ValueError(f"{name} is {given}; expected finite numbers{', above 0' * (least == 0)}")
    return values
