"""Axial encodings of vision models, feature by feature."""

import math

import pytest
import torch
from transformers import DINOv3ViTConfig, Llama4VisionConfig, PixtralVisionConfig
from transformers.models.dinov3_vit import modeling_dinov3_vit
from transformers.models.llama4 import modeling_llama4
from transformers.models.pixtral import modeling_pixtral
from transformers.models.qwen2_vl import configuration_qwen2_vl, modeling_qwen2_vl

import mmpos
from mmpos import RotaryEncoding
from mmpos.coordinates import Centered, OneBased
from mmpos.frequencies import PositionInterpolation
from mmpos.positions import absent, grid, join


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def heads(length, width=64):
    return torch.nn.functional.normalize(torch.randn(2, 2, 3, length, width), dim=-1)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("sizes", [(3, 40), (20, 4), (14, 14)])
def test_dinov3(sizes, training):
    config = DINOv3ViTConfig(
        hidden_size=192,
        num_attention_heads=3,
        patch_size=16,
        pos_embed_shift=0.3,
        pos_embed_jitter=1.5,
        pos_embed_rescale=2.0,
    )
    peer = modeling_dinov3_vit.DINOv3ViTRopePositionEmbedding(config).train(training)
    torch.manual_seed(3)
    cos, sin = peer(torch.zeros(1, 3, *(16 * size for size in sizes)))
    reading = Centered(turns=True, shift=0.3, jitter=1.5, rescale=2.0)
    encoding = RotaryEncoding(64, 2, base=100, layout="half", coordinates=reading)
    torch.manual_seed(3)
    rotation = encoding.train(training)(join(absent(5, 2), grid(*sizes)), sizes)
    q, k = heads(5 + math.prod(sizes))
    expected = modeling_dinov3_vit.apply_rotary_pos_emb(q, k, cos, sin)
    for x, turned in zip((q, k), expected, strict=True):
        close(mmpos.rotate(x, rotation), turned)
        assert torch.equal(mmpos.rotate(x, rotation)[:, :, :5], x[:, :, :5])


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("sizes", [(4, 30), (16, 6)])
def test_qwen_vision(sizes):
    config = configuration_qwen2_vl.Qwen2VLVisionConfig(embed_dim=192, num_heads=3)
    config.num_attention_heads, config.head_dim = 3, 64
    peer = modeling_qwen2_vl.Qwen2VLVisionRotaryEmbedding(config)
    rows, columns = (
        part.reshape(-1)
        for part in torch.meshgrid(torch.arange(sizes[0]), torch.arange(sizes[1]), indexing="ij")
    )
    blocks = torch.stack((rows, columns)).unflatten(1, sizes)
    blocks = blocks.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).transpose(2, 3).reshape(2, -1)
    q, k = heads(math.prod(sizes))
    cos, sin = peer(q, blocks.T)
    expected = modeling_qwen2_vl.apply_rotary_pos_emb_vision(
        *(x.transpose(1, 2) for x in (q, k)), cos, sin
    )
    base = config.rope_parameters["rope_theta"]
    rotation = RotaryEncoding(64, 2, base=base, layout="half")(blocks.T)
    for x, turned in zip((q, k), expected, strict=True):
        close(mmpos.rotate(x, rotation).transpose(1, 2), turned)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("sizes", [(4, 30), (16, 6)])
def test_pixtral_gives_columns_the_frequencies_between_those_of_the_rows(sizes):
    config = PixtralVisionConfig(hidden_size=192, num_attention_heads=3, head_dim=64)
    peer = modeling_pixtral.PixtralVisionRotaryEmbedding(config)
    q, k = heads(math.prod(sizes))
    cos, sin = peer(q, grid(*sizes))
    expected = modeling_pixtral.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=0)
    base = config.rope_parameters["rope_theta"]
    between = PositionInterpolation(factor=base ** (2 / 64))
    encoding = RotaryEncoding(64, 2, base=base, layout="half", extension=[None, between])
    rotation = encoding(grid(*sizes))
    for x, turned in zip((q, k), expected, strict=True):
        close(mmpos.rotate(x, rotation), turned)


@pytest.mark.peer("transformers")
def test_llama4_counts_from_one_with_the_columns_first():
    config = Llama4VisionConfig(
        hidden_size=192, num_attention_heads=3, image_size=196, patch_size=14
    )
    turns = modeling_llama4.Llama4VisionRotaryEmbedding(config)(torch.zeros(1))
    q, k = heads(197)
    expected = modeling_llama4.vision_apply_rotary_emb(*(x.transpose(1, 2) for x in (q, k)), turns)
    base = config.rope_parameters["rope_theta"]
    encoding = RotaryEncoding(64, 2, base=base, order=(1, 0), coordinates=OneBased())
    rotation = encoding(join(grid(14, 14), absent(1, 2)))
    for x, turned in zip((q, k), expected, strict=True):
        close(mmpos.rotate(x, rotation).transpose(1, 2), turned)
        assert torch.equal(mmpos.rotate(x, rotation)[:, :, -1], x[:, :, -1])


@pytest.mark.peer("rotary-embedding-torch")
@pytest.mark.parametrize("sizes", [(270,), (3, 40), (2, 5, 9), (2, 3, 2, 5)])
def test_rotary_embedding_torch(sizes):
    peer = pytest.importorskip("rotary_embedding_torch")
    turns = peer.RotaryEmbedding(16).get_axial_freqs(*sizes)
    axes = len(sizes)
    x = heads(math.prod(sizes), 16 * axes)[0]
    expected = peer.apply_rotary_emb(turns, x.unflatten(2, sizes)).flatten(2, -2)
    close(mmpos.rotate(x, RotaryEncoding(16 * axes, axes)(grid(*sizes))), expected)
