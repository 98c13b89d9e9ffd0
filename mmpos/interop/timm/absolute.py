"""Where timm's models keep what they add to tokens: learned tables and fixed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from mmpos.interop.timm import tables as forms
from mmpos.interop.timm.scheme import Scheme, counted, times
from mmpos.interop.timm.tables import LINEAR, Form, Table
from mmpos.resample import Resampling

Found = tuple[Scheme, Table | None]
Finder = Callable[[Any, str], Iterator[Found]]


def _table(
    owner: Any,
    path: str,
    name: str,
    grid: Any,
    form: Form,
    *,
    prefix: int = 0,
    note: str = "",
    how: Resampling = forms.BICUBIC,
    way: str = "",
) -> Iterator[Found]:
    if getattr(owner, name, None) is None:
        return
    scheme = Scheme(
        kind="learned table",
        where=path + name,
        grid=tuple(grid),
        prefix_rows=prefix,
        axes="y, x",
        note=note,
    )
    yield scheme, Table.of(owner, name, grid, form, how, way)


def _flat(prefix: Callable[[Any], int], name: str = "pos_embed", embed: str = "patch_embed"):
    """A table of rows ``[1, prefix + H · W, D]`` for the grid of a patch embedding."""

    def find(model: Any, path: str) -> Iterator[Found]:
        count, grid = prefix(model), getattr(model, embed).grid_size
        rows = partial(forms.rows, prefix=count)
        yield from _table(model, path, name, grid, rows, prefix=count)

    return find


def _own_shape(*names: str, first: bool):
    """Tables with their grid in their own shape, channels first or last."""

    def find(model: Any, path: str) -> Iterator[Found]:
        form = forms.channels_first if first else forms.channels_last
        for name in names:
            data = getattr(model, name, None)
            if data is not None:
                grid = data.shape[2:] if first else data.shape[1:-1]
                yield from _table(model, path, name, grid, form)

    return find


def _vit(model: Any) -> int:
    return 0 if model.no_embed_class else model.num_prefix_tokens


def _crossvit(model: Any, path: str) -> Iterator[Found]:
    for index, embed in enumerate(model.patch_embed):
        grid = [side // cell for side, cell in zip(embed.img_size, embed.patch_size, strict=True)]
        rows = partial(forms.rows, prefix=1)
        yield from _table(model, path, f"pos_embed_{index}", grid, rows, prefix=1)


def _mvit(model: Any, path: str) -> Iterator[Found]:
    first = model.stages[0].blocks[0].attn
    if model.pos_embed is None or not hasattr(first, "rel_pos_h"):
        return
    grid = [(len(rows) + 1) // 2 for rows in (first.rel_pos_h, first.rel_pos_w)]
    count = model.num_prefix_tokens
    rows = partial(forms.rows, prefix=count)
    yield from _table(model, path, "pos_embed", grid, rows, prefix=count)


def _pool(pool: Any, path: str) -> Iterator[Found]:
    rows = partial(forms.rows, prefix=1)
    yield from _table(pool, path, "pos_embed", pool.feat_size, rows, prefix=1)


def _nest(level: Any, path: str) -> Iterator[Found]:
    note = f"{counted(level.pos_embed.shape[1], 'block')}, each with its own cells"
    grid, way = (level.block_size, level.block_size), "each block by itself"
    yield from _table(level, path, "pos_embed", grid, forms.blocks, note=note, way=way)


def _hiera(model: Any, path: str) -> Iterator[Found]:
    grid, window = model.tokens_spatial_shape, tuple(model.mask_unit_size)
    if model.pos_embed_win is not None:
        yield from _with_windows(model, path, "pos_embed_win", "bicubic, antialias")
    elif model.pos_embed is None:
        yield Scheme(kind="learned table", where=f"{path}pos_embed_spatial", grid=tuple(grid)), None
    else:
        note = f"with a part that repeats in each window of {times(window)}"
        form, way = partial(forms.windows, window=window), "what repeats tiled, the rest resized"
        yield from _table(model, path, "pos_embed", grid, form, note=note, way=way)


def _sam2(model: Any, path: str) -> Iterator[Found]:
    yield from _with_windows(model, path, "pos_embed_window", "bicubic")


def _with_windows(model: Any, path: str, window: str, how: str) -> Iterator[Found]:
    for kind, name, note in (
        ("learned table", "pos_embed", f"resized to the tokens at each pass ({how})"),
        ("window table", window, "tiled over the tokens"),
    ):
        grid = tuple(getattr(model, name).shape[2:])
        yield Scheme(kind=kind, where=path + name, grid=grid, axes="y, x", note=note), None


def _naflex(embeds: Any, path: str) -> Iterator[Found]:
    cropped = ", as a square that is cropped" if embeds.pos_embed_ar_preserving else ""
    note = f"resized to the grid of each image{cropped}"
    if embeds.pos_embed is not None:
        how = Resampling(
            mode=embeds.pos_embed_interp_mode,
            antialias=embeds.pos_embed_antialias,
            align_corners=embeds.pos_embed_align_corners,
        )
        grid, form = embeds.pos_embed.shape[1:3], forms.channels_last
        yield from _table(embeds, path, "pos_embed", grid, form, note=note, how=how)
    if embeds.pos_embed_y is not None:
        tables = (embeds.pos_embed_y, embeds.pos_embed_x)
        grid = tuple(table.shape[1] for table in tables)
        for index, axis in enumerate("yx"):
            name, form = f"pos_embed_{axis}", partial(forms.along, index=index)
            scheme = Scheme(
                kind="axis table", where=path + name, grid=(grid[index],), axes=axis, note=note
            )
            yield scheme, Table.of(embeds, name, grid, form, LINEAR)


def _qwen3(model: Any, path: str) -> Iterator[Found]:
    grid = (model.pos_embed_grid_size,) * 2
    note = "resized to the grid of each image (bilinear, align_corners)"
    yield (
        Scheme(kind="learned table", where=f"{path}pos_embed", grid=grid, axes="y, x", note=note),
        None,
    )


def _gemma4(embed: Any, path: str) -> Iterator[Found]:
    grid, where = (embed.position_embedding_size,), f"{path}position_embedding_table"
    note = "one row for each place on either axis, never resized"
    yield Scheme(kind="axis table", where=where, layers=2, grid=grid, axes="x, y", note=note), None


def _fourier(embed: Any, path: str) -> Iterator[Found]:
    note = "places 1 … n of each axis scaled to 0 … 2π, projected by a learned layer"
    where = path.removesuffix(".")
    base = float(embed.temperature)
    yield Scheme(kind="Fourier", where=where, axes="y, x", base=base, note=note), None


def _convolution(module: Any, path: str) -> Iterator[Found]:
    yield Scheme(kind="convolution", where=path.removesuffix(".")), None


FINDERS: dict[str, Finder] = {
    "models.vision_transformer.VisionTransformer": _flat(_vit),
    "models.eva.Eva": _flat(_vit),
    "models.beit.Beit": _flat(lambda model: model.num_prefix_tokens),
    "models.cait.Cait": _flat(lambda model: 0),
    "models.convit.ConVit": _flat(lambda model: 0),
    "models.tnt.TNT": _flat(lambda model: 1, "patch_pos", "pixel_embed"),
    "models.crossvit.CrossVit": _crossvit,
    "models.mvitv2.MultiScaleVit": _mvit,
    "models.pit.PoolingVisionTransformer": _own_shape("pos_embed", first=True),
    "models.visformer.Visformer": _own_shape("pos_embed1", "pos_embed2", "pos_embed3", first=True),
    "models.volo.VOLO": _own_shape("pos_embed", first=False),
    "models.vision_transformer_sam.VisionTransformerSAM": _own_shape("pos_embed", first=False),
    "models.nest.NestLevel": _nest,
    "models.hiera.Hiera": _hiera,
    "models.hieradet_sam2.HieraDet": _sam2,
    "models.naflexvit.NaFlexEmbeds": _naflex,
    "models.qwen3_vit.Qwen3VitEncoder": _qwen3,
    "models.gemma4_vit.Gemma4PatchEmbed": _gemma4,
    "layers.attention_pool2d.AttentionPool2d": _pool,
    "models.xcit.PositionalEncodingFourier": _fourier,
    "models.edgenext.PositionalEncodingFourier": _fourier,
    "models.coat.ConvPosEnc": _convolution,
    "models.coat.ConvRelPosEnc": _convolution,
    "models.twins.PosConv": _convolution,
    "models.davit.ConvPosEnc": _convolution,
    "models.fastvit.RepConditionalPosEnc": _convolution,
    "models.csatv2.PosConv": _convolution,
}
