"""Queries and keys turned by mmpos are those turned by timm and transformers."""

import math

import pytest
import torch
from timm.layers.pos_embed_sincos import (
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    apply_rot_embed_cat,
)
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

import mmpos
from mmpos import RotaryEncoding
from mmpos.coordinates import Centered, Index, OneBased, Scaled
from mmpos.positions import absent, grid, join

SIDES = {"own": "separate", "longest": "max", "shortest": "min"}
SIZES = [(3, 300), (300, 2), (14, 14), (5, 7)]


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.fixture
def qk():
    """q and k ``[B, H, L, D]`` of length 1: peers round their frequencies to float32 as they go."""

    def call(length):
        return torch.nn.functional.normalize(torch.randn(2, 2, 3, length, 64), dim=-1)

    return call


@pytest.mark.peer("timm")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("temperature", [100.0, 10000.0])
def test_timm_axial(qk, sizes, temperature, half):
    theirs = RotaryEmbeddingCat(
        64, temperature=temperature, in_pixels=False, grid_indexing="ij", rotate_half=half
    ).get_embed(list(sizes))
    ours = RotaryEncoding(64, 2, base=temperature, layout="half" if half else "interleaved")
    rotation = ours(grid(*sizes))
    for x in qk(math.prod(sizes)):
        close(mmpos.rotate(x, rotation), apply_rot_embed_cat(x, theirs, half=half))


@pytest.mark.peer("timm")
@pytest.mark.parametrize("sizes", SIZES)
def test_timm_axial_with_the_columns_first(qk, sizes):
    theirs = RotaryEmbeddingCat(
        64, temperature=100.0, in_pixels=False, grid_indexing="xy"
    ).get_embed(list(sizes))
    flipped = RotaryEncoding(64, 2, base=100.0)(grid(*sizes).flip(-1))
    ordered = RotaryEncoding(64, 2, base=100.0, order=(1, 0))(grid(*sizes))
    for x in qk(math.prod(sizes)):
        expected = apply_rot_embed_cat(x, theirs)
        close(mmpos.rotate(x, flipped), expected)
        close(mmpos.rotate(x, ordered), expected)


@pytest.mark.peer("timm")
@pytest.mark.parametrize(
    ("options", "reading"),
    [
        ({}, Index()),
        ({"grid_offset": 1.0}, OneBased()),
        ({"ref_feat_shape": (16, 12)}, Scaled((16, 12))),
        ({"ref_feat_shape": (110, 120)}, Scaled((110, 120))),
        ({"ref_feat_shape": (16, 12), "grid_offset": 0.5}, Scaled((16, 12), offset=0.5)),
    ],
    ids=["index", "one-based", "scaled", "scaled up", "scaled, offset"],
)
@pytest.mark.parametrize("sizes", SIZES)
def test_timm_coordinates(qk, sizes, options, reading):
    theirs = RotaryEmbeddingCat(
        64, temperature=10000.0, in_pixels=False, grid_indexing="ij", **options
    ).get_embed(list(sizes))
    rotation = RotaryEncoding(64, 2, coordinates=reading)(grid(*sizes), extent=sizes)
    for x in qk(math.prod(sizes)):
        close(mmpos.rotate(x, rotation), apply_rot_embed_cat(x, theirs))


@pytest.mark.peer("timm")
def test_timm_leaves_out_the_class_token_as_no_place_does(qk):
    theirs = RotaryEmbeddingCat(
        64, temperature=100.0, in_pixels=False, grid_indexing="ij"
    ).get_embed([5, 7])
    rotation = RotaryEncoding(64, 2, base=100.0)(join(absent(2, 2), grid(5, 7)))
    for x in qk(37):
        out = mmpos.rotate(x, rotation)
        assert torch.equal(out[:, :, :2], x[:, :, :2])
        close(out[:, :, 2:], apply_rot_embed_cat(x[:, :, 2:].contiguous(), theirs))


@pytest.mark.peer("timm")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("side", "theirs"), SIDES.items())
@pytest.mark.parametrize("sizes", [(5, 60), (14, 14), (30, 7)])
def test_timm_dinov3(qk, sizes, side, theirs, training):
    disturbed = {"shift_coords": 0.3, "jitter_coords": 1.5, "rescale_coords": 2.0}
    peer = RotaryEmbeddingDinoV3(64, temperature=100.0, normalize_coords=theirs, **disturbed)
    torch.manual_seed(3)
    embed = peer.train(training).get_embed(list(sizes))
    reading = Centered(turns=True, side=side, shift=0.3, jitter=1.5, rescale=2.0)
    ours = RotaryEncoding(64, 2, base=100.0, layout="half", coordinates=reading)
    torch.manual_seed(3)
    rotation = ours.train(training)(grid(*sizes), sizes)
    for x in qk(math.prod(sizes)):
        close(mmpos.rotate(x, rotation), apply_rot_embed_cat(x, embed, half=True))


@pytest.mark.peer("transformers")
@pytest.mark.parametrize(("base", "tolerance"), [(10000.0, 1e-5), (500000.0, 5e-5)])
def test_llama(qk, base, tolerance):
    rope = {"rope_type": "default", "rope_theta": base}
    old = {"hidden_size": 192, "num_attention_heads": 3, "head_dim": 64, "rope_theta": base}
    config = LlamaConfig(**old, rope_parameters=rope)
    positions = torch.stack((torch.arange(700), torch.randint(0, 700, (700,))))
    q, k = qk(700)
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, positions)
    expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    rotation = RotaryEncoding(64, base=base, layout="half")(positions.unsqueeze(-1))
    for x, turned in zip((q, k), expected, strict=True):
        close(mmpos.rotate(x, rotation), turned, tolerance)
