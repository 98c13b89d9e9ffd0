"""Where timm's models keep what they add to attention scores, and the rotations of q and k."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from mmpos.interop.timm import tables as forms
from mmpos.interop.timm.absolute import Finder, Found
from mmpos.interop.timm.scheme import Scheme
from mmpos.interop.timm.tables import LINEAR, Form, Table
from mmpos.resample import Resampling


def _bias(form: Form, name: str, extra: int = 0):
    """A table with a row for each offset in ``module.window_size``."""

    def find(module: Any, path: str) -> Iterator[Found]:
        if getattr(module, name, None) is not None:
            yield _one(module, path, name, "bias table", module.window_size, form, extra)

    return find


def _one(
    module: Any,
    path: str,
    name: str,
    kind: str,
    grid: Sequence[int],
    form: Form,
    extra: int = 0,
    how: Resampling | None = None,
    note: str = "",
) -> Found:
    scheme = Scheme(kind=kind, where=path + name, grid=tuple(grid), prefix_rows=extra, axes="y, x")
    return scheme, Table.of(module, name, grid, form, how, note)


def _rel_pos_bias(module: Any, path: str) -> Iterator[Found]:
    extra = 3 * module.prefix_tokens
    find = _bias(partial(forms.offsets, extra=extra), "relative_position_bias_table", extra)
    yield from find(module, path)


def _distances(form: Form):
    note = "as signed offsets" if form is forms.distances else ""

    def find(module: Any, path: str) -> Iterator[Found]:
        name, kind, how = "attention_biases", "distance table", forms.BICUBIC
        yield _one(module, path, name, kind, resolution(module), form, how=how, note=note)

    return find


def resolution(module: Any) -> tuple[int, int]:
    """The grid of a table of distances; one that timm does not keep is a square."""
    kept = getattr(module, "resolution", math.isqrt(len(module.attention_bias_idxs)))
    return (kept, kept) if isinstance(kept, int) else (kept[0], kept[1])


def _decomposed(*names: str, of: str = "image"):
    """Two tables ``[2 S - 1, D]``, one for each axis, multiplied by the queries."""

    def find(module: Any, path: str) -> Iterator[Found]:
        for index, name in enumerate(names):
            rows = getattr(module, name, None)
            if rows is None:
                continue
            grid, form = ((len(rows) + 1) // 2,), partial(forms.axis, index=index)
            kind, axis = "decomposed table", "yx"[index]
            scheme = Scheme(kind=kind, where=path + name, grid=grid, axes=axis)
            if of == "image":
                yield scheme, Table.of(module, name, grid, form, LINEAR)
            else:
                yield scheme.with_note(f"of the offsets in a {of}"), None

    return find


def _lambda(module: Any, path: str) -> Iterator[Found]:
    if module.pos_emb is not None:
        how = forms.BICUBIC
        form, kind = forms.offset_grid, "bias table"
        yield _one(module, path, "pos_emb", kind, module.feat_size, form, how=how)
    else:
        yield Scheme(kind="convolution", where=f"{path}conv_lambda"), None


def _mlp(formula: str):
    def find(module: Any, path: str) -> Iterator[Found]:
        pretrained = tuple(getattr(module, "pretrained_window_size", None) or ())
        scheme = Scheme(
            kind="bias MLP",
            where=path.removesuffix("."),
            grid=tuple(module.window_size),
            axes="y, x",
            reference=pretrained if any(pretrained) else None,
            note=formula,
        )
        yield scheme, None

    return find


def _rel_pos_mlp(module: Any, path: str) -> Iterator[Found]:
    yield from _mlp(_SWIN if module.mode == "swin" else _PLAIN)(module, path)


def _relative_coordinates(module: Any, path: str) -> Iterator[Found]:
    note = "dx, dy and dx² + dy² of each pair, weighed by a learned layer"
    where = path.removesuffix(".")
    yield Scheme(kind="relative coordinates", where=where, axes="x, y", note=note), None


_SWIN = "of log-spaced offsets, as fractions of the window"
_PLAIN = "of log-spaced offsets"


def _rope(kind: str):
    def find(rope: Any, path: str) -> Iterator[Found]:
        note = "centred, each axis scaled to -1 … 1" if kind == "DINOv3 RoPE" else ""
        if getattr(rope, "in_pixels", False):
            note = "frequencies of pixels, each axis scaled to -1 … 1"
        if kind == "mixed RoPE":
            note = "directions learned for each layer and head"
        if kind == "M-RoPE":
            note = "time at 0; pairs go to time, height and width in turn"
        base = getattr(rope, "temperature", None)
        reference = getattr(rope, "ref_feat_shape", None)
        half = kind == "M-RoPE" or getattr(rope, "rotate_half", False)
        shape = getattr(rope, "feat_shape", None)
        scheme = Scheme(
            kind=kind,
            where=path.removesuffix("."),
            grid=tuple(shape) if shape is not None else None,
            axes="y, x" if rope.grid_indexing == "ij" else "x, y",
            layout="half" if half else "interleaved",
            base=float(base) if base is not None else None,
            reference=tuple(reference) if reference is not None else None,
            offset=float(getattr(rope, "grid_offset", 0.0)),
            note=note,
        )
        yield scheme, None

    return find


def _gemma4(rope: Any, path: str) -> Iterator[Found]:
    base, where = float(rope.rope_theta), path.removesuffix(".")
    note = "each axis rotates its own half of a head"
    scheme = Scheme(kind="axial RoPE", where=where, axes="x, y", layout="half", base=base)
    yield scheme.with_note(note), None


_TABLE = "relative_position_bias_table"
_BEIT = _bias(partial(forms.offsets, extra=3), _TABLE, 3)

FINDERS: dict[str, Finder] = {
    "models.swin_transformer.WindowAttention": _bias(forms.offsets, _TABLE),
    "models.beit.Attention": _BEIT,
    "models.beit.RelativePositionBias": _BEIT,
    "layers.pos_embed_rel.RelPosBias": _rel_pos_bias,
    "layers.pos_embed_rel.RelPosBiasTf": _bias(forms.offsets_by_head, _TABLE),
    "layers.pos_embed_rel.RelPosMlp": _rel_pos_mlp,
    "models.swin_transformer_v2.WindowAttention": _mlp(_SWIN),
    "models.swin_transformer_v2_cr.WindowMultiHeadAttention": _mlp(_PLAIN),
    "models.levit.Attention": _distances(forms.distances),
    "models.levit.AttentionDownsample": _distances(forms.distances),
    "models.efficientformer.Attention": _distances(forms.distances),
    "models.efficientformer_v2.Attention2d": _distances(forms.distances),
    "models.efficientformer_v2.Attention2dDownsample": _distances(forms.distances),
    "models.tiny_vit.Attention": _distances(forms.distance_grid),
    "models.efficientvit_msra.CascadedGroupAttention": _distances(forms.distance_grid),
    "models.vision_transformer_sam.Attention": _decomposed("rel_pos_h", "rel_pos_w"),
    "models.mvitv2.MultiScaleAttention": _decomposed("rel_pos_h", "rel_pos_w"),
    "models.mvitv2.MultiScaleAttentionPoolFirst": _decomposed("rel_pos_h", "rel_pos_w"),
    "layers.bottleneck_attn.PosEmbedRel": _decomposed("height_rel", "width_rel"),
    "layers.halo_attn.PosEmbedRel": _decomposed("height_rel", "width_rel", of="neighbourhood"),
    "layers.lambda_layer.LambdaLayer": _lambda,
    "models.convit.GPSA": _relative_coordinates,
    "layers.pos_embed_sincos.RotaryEmbedding": _rope("axial RoPE"),
    "layers.pos_embed_sincos.RotaryEmbeddingCat": _rope("axial RoPE"),
    "layers.pos_embed_sincos.RotaryEmbeddingMixed": _rope("mixed RoPE"),
    "layers.pos_embed_sincos.RotaryEmbeddingDinoV3": _rope("DINOv3 RoPE"),
    "layers.pos_embed_sincos.RotaryEmbeddingMRope": _rope("M-RoPE"),
    "models.gemma4_vit.Gemma4RotaryEmbedding2D": _gemma4,
}
