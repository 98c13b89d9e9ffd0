"""Queries and keys turned by mmpos are those turned by timm and transformers."""

import math

import pytest
import torch
from timm.layers.pos_embed_sincos import (
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    apply_rot_embed_cat,
)
from transformers import GPTNeoXConfig, LlamaConfig
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

import mmpos
from mmpos import RotaryEncoding
from mmpos.coordinates import Centered, Index, OneBased, Scaled
from mmpos.positions import absent, grid, join

SIZES = [(3, 300), (300, 2), (14, 14), (5, 7)]


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.fixture
def qk():
    """q and k ``[B, H, L, D]`` of length 1: peers round their frequencies to float32 as they go."""

    def call(length):
        return torch.nn.functional.normalize(torch.randn(2, 2, 3, length, 64), dim=-1)

    return call


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


@pytest.mark.parametrize("sizes", SIZES)
def test_timm_axial_with_the_columns_first(qk, sizes):
    theirs = RotaryEmbeddingCat(
        64, temperature=100.0, in_pixels=False, grid_indexing="xy"
    ).get_embed(list(sizes))
    rotation = RotaryEncoding(64, 2, base=100.0)(grid(*sizes).flip(-1))
    for x in qk(math.prod(sizes)):
        close(mmpos.rotate(x, rotation), apply_rot_embed_cat(x, theirs))


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


def test_timm_leaves_out_the_class_token_as_no_place_does(qk):
    theirs = RotaryEmbeddingCat(
        64, temperature=100.0, in_pixels=False, grid_indexing="ij"
    ).get_embed([5, 7])
    rotation = RotaryEncoding(64, 2, base=100.0)(join(absent(2, 2), grid(5, 7)))
    for x in qk(37):
        out = mmpos.rotate(x, rotation)
        assert torch.equal(out[:, :, :2], x[:, :, :2])
        close(out[:, :, 2:], apply_rot_embed_cat(x[:, :, 2:].contiguous(), theirs))


@pytest.mark.parametrize("training", [False, True])
def test_dinov3_is_centred_coordinates_in_whole_turns(qk, training):
    theirs = RotaryEmbeddingDinoV3(
        64, temperature=100.0, shift_coords=0.3, jitter_coords=1.5, rescale_coords=2.0
    ).train(training)
    torch.manual_seed(3)
    embed = theirs.get_embed([5, 300])
    torch.manual_seed(3)
    reading = Centered(shift=0.3, jitter=1.5, rescale=2.0)
    read = reading(grid(5, 300), axes=2, extent=(5, 300), training=training)
    rotation = RotaryEncoding(64, 2, base=100.0, layout="half")(2 * math.pi * read)
    for x in qk(1500):
        close(mmpos.rotate(x, rotation), apply_rot_embed_cat(x, embed, half=True))


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


@pytest.mark.parametrize("part", [0.25, 0.5, 1.0])
def test_gpt_neox_turns_a_part_of_the_head(qk, part):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": part}
    old = {"hidden_size": 192, "num_attention_heads": 3, "rotary_pct": part}
    config = GPTNeoXConfig(**old, rope_parameters=rope)
    positions = torch.arange(500).expand(2, -1)
    q, k = qk(500)
    cos, sin = modeling_gpt_neox.GPTNeoXRotaryEmbedding(config)(q, positions)
    expected = modeling_gpt_neox.apply_rotary_pos_emb(q, k, cos, sin)
    encoding = RotaryEncoding(64, rotary_dim=int(64 * part), layout="half")
    rotation = encoding(positions.unsqueeze(-1))
    for x, turned in zip((q, k), expected, strict=True):
        close(mmpos.rotate(x, rotation), turned)
        width = int(64 * part)
        assert torch.equal(mmpos.rotate(x, rotation)[..., width:], x[..., width:])
