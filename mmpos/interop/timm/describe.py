from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from mmpos.interop.timm.families import family
from mmpos.interop.timm.parts import parts
from mmpos.interop.timm.scheme import Scheme, counted, times
from mmpos.interop.timm.tables import Grid


@dataclass(frozen=True)
class Description:
    """How a timm model knows positions; ``str`` of it is a line for each scheme.

    Args:
        model: the architecture, or the class.
        schemes: the ways it knows positions, alike layers as one; none found is an empty tuple.
        image_size: what the model is made for, if it says so.
        patch_size, grid: of a plain patch embedding.
        prefix_tokens: class, register and distillation tokens in the sequence. Rows for them in a
            table are a scheme's ``prefix_rows``: there may be none of these, for some of those.
        resizable: whether `resize` can change the size.
        how: what becomes of positions then, or the reason why it cannot.
    """

    model: str
    schemes: tuple[Scheme, ...]
    image_size: Grid | None
    patch_size: Grid | None
    grid: Grid | None
    prefix_tokens: int
    resizable: bool
    how: str

    def __str__(self) -> str:
        words = [f"image {times(self.image_size)}"] if self.image_size else []
        words += [f"patch {times(self.patch_size)}"] if self.patch_size else []
        words += [f"grid {times(self.grid)}"] if self.grid else []
        words += [counted(self.prefix_tokens, "prefix token")] if self.prefix_tokens else []
        lines = [f"{self.model}: {', '.join(words) or 'of no fixed size'}"]
        lines += [f"  {scheme}" for scheme in self.schemes] or ["  no positions found"]
        lines.append(f"  {'resize: ' if self.resizable else 'cannot be resized: '}{self.how}")
        return "\n".join(lines)


def describe(model: nn.Module) -> Description:
    """What a timm model knows of positions, and how it can be resized.

    A model that has no positions, or of a class that is not known, is described as such.
    Raises: TypeError for what is no model of timm; give the one inside a wrapper.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
    >>> print(describe(model))
    vit_tiny_patch16_224: image 224 × 224, patch 16 × 16, grid 14 × 14, 1 prefix token
      learned table (pos_embed): grid 14 × 14; 1 prefix row; axes y, x
      resize: learned table: bicubic, antialias
    """
    network: Any = inner(model)
    kind = family(network)
    size = kind.size(network) if kind is not None else None
    embed = getattr(network, "patch_embed", None)
    patch, grid = (getattr(embed, name, None) for name in ("patch_size", "grid_size"))
    plain = isinstance(patch, tuple) and grid is not None
    tokens = getattr(network, "num_prefix_tokens", getattr(network, "num_tokens", 0))
    found = parts(network)
    if kind is None:
        how = f"{type(network).__name__} is not known; if it takes any size, nothing is to be done"
    else:
        ways = [f"{scheme.kind}: {table or _ways(scheme.kind)}" for scheme, table in found]
        said = [*dict.fromkeys(ways if kind.rebuild else []), kind.note]
        how = "; ".join(filter(None, said)) or "only the size that the model checks changes"
    config = getattr(network, "pretrained_cfg", None) or {}
    return Description(
        model=config.get("architecture") or type(network).__name__,
        schemes=_alike([scheme for scheme, _ in found]),
        image_size=tuple(size) if size is not None else None,
        patch_size=tuple(patch) if plain and isinstance(patch, tuple) else None,
        grid=tuple(grid) if plain and grid is not None else None,
        prefix_tokens=tokens if isinstance(tokens, int) else 0,
        resizable=kind is not None and kind.rebuild is not None,
        how=how,
    )


def inner(model: object) -> nn.Module:
    """The model itself, also of timm's wrapper for features.

    Raises: TypeError for what is no module of timm.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model of timm is needed, got {type(model).__name__}")
    of_timm = [cls for cls in type(model).__mro__ if cls.__module__.split(".")[0] == "timm"]
    if not of_timm:
        within = [name for name in ("module", "_orig_mod", "network") if hasattr(model, name)]
        hint = f": give its .{within[0]}" if within else ""
        raise TypeError(f"a model of timm is needed, got {type(model).__name__}{hint}")
    if of_timm[0].__name__ == "FeatureGetterNet":
        return inner(model.model)
    return model


def _ways(kind: str) -> str:
    """What becomes of positions that are in no table."""
    if kind.endswith(("RoPE", "Encoding", "Bias")) or kind == "relative coordinates":
        return "formed for the new grid"
    if kind == "bias MLP":
        return "asked for the new offsets"
    by_itself = ("learned table", "window table", "Fourier")
    return "fitted by the model, each time" if kind in by_itself else "as it is"


def _alike(schemes: list[Scheme]) -> tuple[Scheme, ...]:
    """Schemes that differ only by their place as one, with their number."""
    first: dict[Scheme, Scheme] = {}
    for scheme in schemes:
        key = replace(scheme, where=scheme.where.split(".")[-1])
        known = first.get(key)
        first[key] = replace(known, layers=known.layers + 1) if known is not None else scheme
    return tuple(first.values())
