"""Other encodings in a timm model, and its own again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from torch import nn

from mmpos.additive import AdditiveEncoding
from mmpos.bias import AttentionBias, ContentBias
from mmpos.interop.timm.attention import PLACED, Placed
from mmpos.interop.timm.describe import Description, describe, inner
from mmpos.interop.timm.parts import of_class
from mmpos.interop.timm.places import NAME, Places, Taken
from mmpos.interop.timm.scheme import times
from mmpos.models.slots import fill, fill_layers, with_head_dim
from mmpos.rotary import RotaryEncoding

Keep = Literal["keep"]
KEEP: Keep = "keep"
Additive = Callable[[int, Sequence[int]], AdditiveEncoding]
Rotary = Callable[[int, Sequence[int]], RotaryEncoding | nn.Identity]
Bias = Callable[[int, Sequence[int]], AttentionBias | ContentBias | nn.Identity]


def replace(
    model: nn.Module,
    *,
    additive: Additive | Keep | None = KEEP,
    rotary: list[Rotary] | Rotary | Keep | None = KEEP,
    bias: list[Bias] | Bias | Keep | None = KEEP,
    per_layer: Sequence[Literal["rotary", "bias"]] = (),
) -> Description:
    """Put encodings of mmpos into a timm model in place, and take off those that were there.

    Each of the three places is what is given for it: ``"keep"`` leaves what the model has, None
    leaves it empty, and an encoding, its class or a callable fills it, as in
    `mmpos.models.Transformer`, lists and ``per_layer`` included. ``additive`` stands for learned
    tables, ``rotary`` for rotations, ``bias`` for relative position biases. All weights but those
    of positions stay the same objects under the same names; new ones lie under ``mmpos.``, on the
    model's device and in its dtype. They start untrained, and a model whose positions were taken
    must be fine-tuned: what it had learned to read is gone. Make the optimizer afterwards.

    Class and register tokens have no place, so nothing is added to them and they are not turned.
    `restore` gives a model its own scheme back; `resize` and `describe` know both.

    For vision transformers of plain blocks: ``VisionTransformer`` (ViT, DeiT, CLIP, DINOv2,
    SigLIP), ``Eva`` (EVA, RoPE-ViT, DINOv3, PE), ``Beit`` and ``VisionTransformerRelPos``.

    Returns: what the model now is.
    Raises: ValueError for a model of another family, or whose blocks are of another kind; for
        dropout of attention or patches, which these places do not have; for an encoding that does
        not fit, or prefix rows, which nothing would read. The model is then what it was.

    >>> import timm
    >>> from functools import partial
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
    >>> print(replace(model, additive=None, rotary=partial(RotaryEncoding, base=100)))
    vit_tiny_patch16_224: image 224 × 224, patch 16 × 16, grid 14 × 14, 1 prefix token
      RotaryEncoding (mmpos.rotary): axes y, x; layout interleaved
      resize: RotaryEncoding: formed for the new grid
    """
    network: Any = inner(model)
    if all(map(_kept, (additive, rotary, bias))):
        return describe(network)
    take = of_class(_FAMILIES, network)
    if take is None:
        names = ", ".join(name.split(".")[-1] for name in _FAMILIES)
        raise ValueError(
            f"encodings can be replaced in {names}, not in {type(network).__name__}; "
            "make a transformer with mmpos.models.Transformer, or call mmpos.rotate and "
            "mmpos.attend in yours"
        )
    held: Places | None = getattr(network, NAME, None)
    attentions = _attentions(network)
    _refuse_dropout(network, attentions, tables=additive != KEEP)
    heads, head_dim = _sizes(attentions)
    axes = tuple(network.patch_embed.grid_size)
    places = Places(network.num_prefix_tokens, len(attentions))
    own = [per_layer] if isinstance(per_layer, str) else per_layer
    given: dict[str, Any] = {"additive": additive, "rotary": rotary, "bias": bias}
    for place, (kind, size, needed) in {
        "additive": (AdditiveEncoding, "dim", network.embed_dim),
        "rotary": (RotaryEncoding, "head_dim", head_dim),
        "bias": ((AttentionBias, ContentBias), "heads", heads),
    }.items():
        if _kept(given[place]):
            if held is not None:
                places.take_over(held, place)
            continue

        def make(slot: Any, kind: Any = kind, size: str = size, needed: int = needed) -> Any:
            return fill(with_head_dim(slot, head_dim), kind, size, needed, axes)

        if place == "additive":
            places.additive = None if additive is None else make(additive)
        else:
            filled, of = fill_layers(given[place], make, len(attentions), place, place in own)
            setattr(places, place, filled)
            setattr(places, f"{place}_of", of)
        before = held.taken if held is not None else {}
        places.taken[place] = before.get(place) or [
            Taken(module, name, getattr(module, name))
            for module, name in take(network, place)
            if getattr(module, name, None) is not None
        ]
    if getattr(places.additive, "prefix_rows", 0):
        raise ValueError(
            "prefix rows would be read by no token: a timm model adds positions to its patches "
            "before class and register tokens come; make the encoding with prefix_rows=0"
        )
    for table in (places.additive, *places.encodings("bias")):
        grid = getattr(table, "grid", axes)
        if grid != axes and not getattr(table, "any_grid", False):
            raise ValueError(
                f"{type(table).__name__} was made for a grid of {times(grid)}, the model has "
                f"{times(axes)}: pass its class, or make it for that grid"
            )
    _put(network, places, attentions)
    return describe(network)


def restore(model: nn.Module) -> Description:
    """Give a timm model the scheme of its own back that `replace` took, with the weights it had.

    All other weights stay as they are now. If the model was resized meanwhile, so were its tables.

    Returns: what the model now is.
    Raises: ValueError for a model in which nothing was replaced.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
    >>> table = model.pos_embed
    >>> description = replace(model, additive=None)
    >>> description = restore(model)
    >>> model.pos_embed is table
    True
    """
    network: Any = inner(model)
    places: Places | None = getattr(network, NAME, None)
    if places is None:
        raise ValueError(f"nothing was replaced in this {type(network).__name__}")
    like = next(network.parameters())
    for value in (taken.value for parts in places.taken.values() for taken in parts):
        if isinstance(value, nn.Parameter):
            value.data = value.data.to(like)
        elif isinstance(value, nn.Module):
            value.to(like).train(network.training)
    places.give_back()
    for module in network.modules():
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = value.to(like.device)
    _remove(network)
    for block in network.blocks:
        if isinstance(block.attn, Placed):
            block.attn.__class__ = type(block.attn).__bases__[1]
            del block.attn.layer, block.attn.places
    return describe(network)


def _kept(given: Any) -> bool:
    return isinstance(given, str) and given == KEEP


def _put(network: Any, places: Places, attentions: Sequence[Any]) -> None:
    """Let a model ask ``places``, without what they stand for."""
    like = next(network.parameters())
    places.to(device=like.device, dtype=like.dtype).train(network.training)
    places.give_back()  # what an earlier call took
    places.take()
    _remove(network)
    network.add_module(NAME, places)
    network.patch_embed.register_forward_hook(places.enter)
    for block in network.blocks:
        block.register_forward_pre_hook(places.arrive)
    if places.taken.keys() & {"rotary", "bias"}:
        for layer, attention in enumerate(attentions):
            attention.__class__ = PLACED.get(type(attention), type(attention))
            attention.layer, attention.places = layer, (places,)


def _remove(network: Any) -> None:
    """Take places off a model, if it has some."""
    held = network._modules.pop(NAME, None)
    blocks = [block._forward_pre_hooks for block in network.blocks]
    for hooks in (network.patch_embed._forward_hooks, *blocks):
        for key, hook in list(hooks.items()):
            if held is not None and getattr(hook, "__self__", None) is held:
                del hooks[key]


def _attentions(network: Any) -> list[Any]:
    """The attention of each block.

    Raises: ValueError for blocks that have none, or one of another kind.
    """
    found = [getattr(block, "attn", None) for block in network.blocks]
    known = {*PLACED, *PLACED.values()}
    for block, attention in zip(network.blocks, found, strict=True):
        if type(attention) not in known:
            what = type(block if attention is None else attention).__name__
            raise ValueError(
                f"encodings cannot be put into a {what}: expected blocks with one of "
                f"{', '.join(sorted({cls.__name__ for cls in PLACED}))}"
            )
    return found


def _sizes(attentions: Sequence[Any]) -> tuple[int, int]:
    """Heads, and features of a head, which all blocks share.

    Raises: ValueError where they do not.
    """
    sizes = {(each.num_heads, each.proj.in_features // each.num_heads) for each in attentions}
    if len(sizes) != 1:
        raise ValueError(f"blocks have different heads: {sorted(sizes)}")
    return sizes.pop()


def _refuse_dropout(network: Any, attentions: Sequence[Any], *, tables: bool) -> None:
    dropped = {
        "attn_drop_rate": any(attention.attn_drop.p for attention in attentions),
        "pos_drop_rate": tables and getattr(getattr(network, "pos_drop", None), "p", 0),
        "patch_drop_rate": getattr(getattr(network, "patch_drop", None), "prob", 0),
    }
    for name, there in dropped.items():
        if there:
            raise ValueError(
                f"{name} is above 0, which replaced encodings know nothing of: drop it"
            )


Where = Iterator[tuple[nn.Module, str]]


def _vit(model: Any, place: str) -> Where:
    if place == "additive":
        yield model, "pos_embed"


def _distilled(model: Any, place: str) -> Where:
    if place == "additive":
        raise ValueError(f"{type(model).__name__} cannot do without its table: keep additive")
    return iter(())


def _eva(model: Any, place: str) -> Where:
    yield from _vit(model, place)
    if place == "rotary":
        yield model, "rope"


def _beit(model: Any, place: str) -> Where:
    yield from _vit(model, place)
    if place == "bias":
        yield model, "rel_pos_bias"
        for block in model.blocks:
            for name in ("relative_position_bias_table", "relative_position_index", "window_size"):
                yield block.attn, name


def _relpos(model: Any, place: str) -> Where:
    if place == "bias":
        yield model, "shared_rel_pos"
        for block in model.blocks:
            yield block.attn, "rel_pos"


_FAMILIES: dict[str, Callable[[Any, str], Where]] = {
    "models.vision_transformer.VisionTransformer": _vit,
    "models.deit.VisionTransformerDistilled": _distilled,
    "models.eva.Eva": _eva,
    "models.beit.Beit": _beit,
    "models.vision_transformer_relpos.VisionTransformerRelPos": _relpos,
}
