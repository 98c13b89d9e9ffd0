"""Resizing against torch, timm, transformers and torchvision, each in its own dialect.

Sizes are 4 to 40: torch 2.14's antialiased kernel is wrong for a single column on a CPU. In float64
the agreement is to 1e-12. In float32, with unit noise, the bound is 3e-5, not 1e-5: torch forms its
coordinates in float32 there, and near cell 40 their last bit is 4e-6, times the slopes of the taps.
Torch itself is up to 2e-5 from its own float64 result; what is here stays within 1e-6 of that.
"""

import random

import pytest
import torch
from timm.layers import resample_abs_pos_embed
from timm.layers.patch_embed import resample_patch_embed
from timm.layers.pos_embed_rel import (
    resize_rel_pos_bias_table_levit,
    resize_rel_pos_bias_table_simple,
)
from torch.nn.functional import interpolate
from torchvision.models.vision_transformer import interpolate_embeddings

from mmpos.resample import (
    Resampling,
    bias_table,
    flat_table,
    grid_table,
    grid_tables,
    patch_kernel,
)

WITHIN = {"rtol": 0, "atol": 3e-5}
seeds = pytest.mark.parametrize("seed", range(4))


def pairs(seed: int, axes: int = 2, largest: int = 40, count: int = 8):
    """Random grids, old and new, neither of them square by design."""
    drawn = random.Random(seed)
    grid = lambda: tuple(drawn.randint(4, largest) for _ in range(axes))  # noqa: E731
    return [(grid(), grid()) for _ in range(count)]


def torchs(table: torch.Tensor, new: tuple[int, ...], **dialect) -> torch.Tensor:
    first = table.movedim(-1, 0).unsqueeze(0)
    return interpolate(first, size=new, **dialect).squeeze(0).movedim(0, -1)


def agree(table: torch.Tensor, new: tuple[int, ...], how: Resampling, peer) -> None:
    """``table`` is float64; ``peer`` resizes a table of either precision."""
    exact, close = grid_table(table, new, how), grid_table(table.float(), new, how)
    torch.testing.assert_close(exact, peer(table), rtol=0, atol=1e-12)
    torch.testing.assert_close(close, peer(table.float()), **WITHIN)
    torch.testing.assert_close(close.double(), exact, rtol=0, atol=1e-6)


@seeds
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_interpolate(seed, mode, antialias, align_corners):
    dialect = {"mode": mode, "antialias": antialias, "align_corners": align_corners}
    how = Resampling(**dialect)
    for old, new in [*pairs(seed), ((12, 7), (12, 20)), ((12, 7), (5, 7))]:
        table = torch.randn(*old, 3, dtype=torch.float64)
        agree(table, new, how, lambda t, new=new: torchs(t, new, **dialect))


@seeds
def test_nearest(seed):
    for old, new in pairs(seed, count=30):
        table = torch.randn(*old, 2)
        out = grid_table(table, new, Resampling(mode="nearest"))
        assert torch.equal(out, torchs(table, new, mode="nearest"))


def test_nearest_of_all_sizes():
    for old in range(1, 41):
        table = torch.arange(float(old)).unsqueeze(-1)
        for new in range(1, 129):
            out = grid_table(table, (new,), Resampling(mode="nearest"))
            assert torch.equal(out, torchs(table, (new,), mode="nearest")), (old, new)
            if old != new:
                out = grid_table(table, (new,), Resampling(mode="nearest", offset=0.1))
                expected = interpolate(table.mT[None], scale_factor=(new + 0.1) / old)
                assert torch.equal(out, expected[0].mT), (old, new)


@seeds
@pytest.mark.parametrize("antialias", [False, True])
def test_the_offset_of_dinov2(seed, antialias):
    """Its first release passed a ratio that 0.1 had been added to, on both axes.

    It had no antialias; with it, torch on a CPU passes over an axis whose size stays.
    """
    how = Resampling(antialias=antialias, offset=0.1)
    for old, new in [*pairs(seed), ((16, 16), (21, 34)), ((16, 16), (16, 21))]:
        if antialias and (old[0] == new[0] or old[1] == new[1]):
            continue
        table = torch.randn(*old, 3, dtype=torch.float64)
        ratios = tuple((after + 0.1) / before for before, after in zip(old, new, strict=True))
        dialect = {"mode": "bicubic", "antialias": antialias, "scale_factor": ratios}

        def peer(t, dialect=dialect):
            first = t.movedim(-1, 0).unsqueeze(0)
            return interpolate(first, **dialect).squeeze(0).movedim(0, -1)

        agree(table, new, how, peer)
        plain = grid_table(table, new, Resampling(antialias=antialias))
        assert (plain - grid_table(table, new, how)).abs().max() > 1e-3


@seeds
@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("linear", Resampling(mode="bilinear", antialias=False)),
        ("linear", Resampling(mode="bilinear", antialias=False, align_corners=True)),
        ("trilinear", Resampling(mode="bilinear", antialias=False)),
        ("trilinear", Resampling(mode="bilinear", antialias=False, align_corners=True)),
    ],
    ids=str,
)
def test_one_axis_and_three(seed, mode, how):
    axes = {"linear": 1, "trilinear": 3}[mode]
    dialect = {"mode": mode, "align_corners": how.align_corners}
    for old, new in pairs(seed, axes, largest=40 if axes == 1 else 14):
        table = torch.randn(*old, 3, dtype=torch.float64)
        agree(table, new, how, lambda t, new=new: torchs(t, new, **dialect))


@pytest.mark.peer("timm")
@seeds
@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_timm(seed, prefix, antialias, mode):
    how = Resampling(mode=mode, antialias=antialias)
    for old, new in [*pairs(seed, count=5), ((2, 8), (4, 4)), ((4, 9), (9, 4))]:
        rows = torch.randn(1, prefix + old[0] * old[1], 3)
        expected = resample_abs_pos_embed(
            rows, list(new), list(old), prefix, interpolation=mode, antialias=antialias
        )
        out = flat_table(rows, old, new, prefix_rows=prefix, how=how)
        torch.testing.assert_close(out, expected, **WITHIN)


@pytest.mark.peer("transformers")
@seeds
@pytest.mark.parametrize("name", ["vit", "dinov2"])
def test_transformers(seed, name):
    """Without antialias; a square table whose class token has a row."""
    if name == "vit":
        from transformers.models.vit.modeling_vit import ViTConfig as Config
        from transformers.models.vit.modeling_vit import ViTEmbeddings as Embeddings
    else:
        from transformers.models.dinov2.modeling_dinov2 import Dinov2Config as Config
        from transformers.models.dinov2.modeling_dinov2 import Dinov2Embeddings as Embeddings
    for (side, _), (height, width) in pairs(seed, count=4):
        model = Embeddings(Config(hidden_size=4, image_size=2 * side, patch_size=2))
        rows = torch.randn(1, 1 + side * side, 4)
        model.position_embeddings.data = rows
        tokens = torch.zeros(1, 1 + height * width, 4)
        expected = model.interpolate_pos_encoding(tokens, 2 * height, 2 * width)
        how = Resampling(antialias=False)
        out = flat_table(rows, (side, side), (height, width), prefix_rows=1, how=how)
        torch.testing.assert_close(out, expected, **WITHIN)


@pytest.mark.peer("transformers")
@seeds
def test_a_batch_of_grids_in_transformers(seed):
    """SigLIP 2 resizes for each image, Qwen3-VL gathers for a packed row of them."""
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights as gather

    table = torch.randn(16, 16, 3)
    grids = [new for _, new in pairs(seed)]
    expected = Siglip2VisionEmbeddings.resize_positional_embeddings(
        table, torch.tensor(grids), max_length=1600
    )
    rows = [row[: h * w] for row, (h, w) in zip(expected, grids, strict=True)]
    out = grid_tables(table, grids, Resampling(mode="bilinear"))
    torch.testing.assert_close(out, torch.cat(rows), **WITHIN)
    for mode in ("bilinear", "bicubic"):
        for align_corners in (False, True):
            how = Resampling(mode=mode, antialias=False, align_corners=align_corners)
            frames = torch.tensor([(1, *grid) for grid in grids])
            index, weight = gather(frames, 16, mode, align_corners)
            expected = (table.flatten(0, 1)[index] * weight.unsqueeze(-1)).sum(1)
            torch.testing.assert_close(grid_tables(table, grids, how), expected, **WITHIN)


@pytest.mark.peer("torchvision")
@seeds
def test_torchvision(seed):
    for (side, _), (size, _) in pairs(seed):
        rows = torch.randn(1, 1 + side * side, 3)
        state = interpolate_embeddings(2 * size, 2, {"encoder.pos_embedding": rows})
        how = Resampling(antialias=False, align_corners=True)
        out = flat_table(rows, (side, side), (size, size), prefix_rows=1, how=how)
        torch.testing.assert_close(out, state["encoder.pos_embedding"], **WITHIN)


@pytest.mark.peer("timm")
@seeds
@pytest.mark.parametrize("extra", [0, 3])
def test_bias_tables_of_timm(seed, extra):
    for (old, _), (new, _) in pairs(seed, largest=20):
        table = torch.randn((2 * old - 1) ** 2 + extra, 3)
        shape = ((2 * new - 1) ** 2 + extra, 3)
        expected = resize_rel_pos_bias_table_simple(table, (new, new), shape)
        how = Resampling(antialias=False)
        out = bias_table(table, (old, old), (new, new), extra_rows=extra, how=how)
        torch.testing.assert_close(out, expected, **WITHIN)
        if not extra:
            expected = resize_rel_pos_bias_table_levit(table, shape)
            torch.testing.assert_close(
                bias_table(table, (old, old), (new, new)), expected, **WITHIN
            )


@pytest.mark.peer("timm")
@seeds
def test_patch_kernels_of_timm(seed):
    """Its pseudo-inverse is of one large matrix in float32, here of two small ones."""
    for old, new in pairs(seed, largest=18):
        kernel = torch.randn(4, 3, *old)
        expected = resample_patch_embed(kernel, list(new))
        torch.testing.assert_close(patch_kernel(kernel, new), expected, **WITHIN)


@seeds
def test_the_spectrogram_transformer(seed):
    """AST (arXiv:2104.01778): each axis is cut from the centre or, where it grows, resized."""
    drawn = random.Random(seed)
    for new in [
        (12, 101),
        (8, 24),
        *((drawn.randint(4, 40), drawn.randint(4, 99)) for _ in "1234"),
    ]:
        height, width = new
        table = torch.randn(24, 24, 3)
        expected = table.permute(2, 0, 1).unsqueeze(0)
        if width <= 24:
            first = 24 // 2 - width // 2
            expected = expected[..., first : first + width]
        else:
            expected = interpolate(expected, size=(24, width), mode="bilinear")
        if height <= 24:
            first = 24 // 2 - height // 2
            expected = expected[..., first : first + height, :]
        else:
            expected = interpolate(expected, size=new, mode="bilinear")
        how = Resampling(mode="bilinear", antialias=False, fit="center")
        out = grid_table(table, new, how)
        torch.testing.assert_close(out, expected[0].permute(1, 2, 0), **WITHIN)


def test_extend_keeps_the_rows_and_goes_on_with_copies():
    table = torch.arange(6.0).reshape(3, 2, 1)
    grown = grid_table(table, (7, 2), Resampling(fit=("extend", "resize")))
    assert grown[:, 0, 0].tolist() == [0, 2, 4, 0, 2, 4, 0]
    cut = grid_table(table, (2, 2), Resampling(fit="extend"))
    assert torch.equal(cut, table[:2])
