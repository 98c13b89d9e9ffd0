"""Published sinusoidal encodings, as installed libraries or their definitions give them."""

import math

import pytest
import torch
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed
from transformers.models.detr.modeling_detr import DetrSinePositionEmbedding
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.omdet_turbo.modeling_omdet_turbo import OmDetTurboHybridEncoder
from transformers.models.speech_to_text.modeling_speech_to_text import (
    Speech2TextSinusoidalPositionalEmbedding,
)
from transformers.models.videomae.modeling_videomae import get_sinusoid_encoding_table
from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding
from transformers.models.whisper.modeling_whisper import sinusoids

from mmpos import SinusoidalEncoding
from mmpos.coordinates import OneBased
from mmpos.positions import absent, grid, join, sequence

GRID = (5, 290)


def close(ours, theirs, atol=1e-5):
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=atol)


def exactly(positions, pairs, base, endpoint=False):
    """Sines and cosines ``[L, P]`` of one axis, from a definition, in float64."""
    exponents = torch.arange(pairs, dtype=torch.float64) / (pairs - endpoint)
    angle = positions.double().unsqueeze(-1) / base**exponents
    return angle.sin(), angle.cos()


@pytest.mark.peer("transformers")
@pytest.mark.parametrize(("length", "dim"), [(300, 384), (77, 2 * 12), (40, 6)])
def test_whisper(length, dim):
    encoding = SinusoidalEncoding(dim, layout="half", endpoint=True)
    close(encoding(sequence(length)), sinusoids(length, dim), atol=3e-5)
    near = min(length, 100)  # their float32 angles are off by up to an ulp of the position
    close(encoding(sequence(near)), sinusoids(near, dim))


@pytest.mark.parametrize(
    "peer", [M2M100SinusoidalPositionalEmbedding, Speech2TextSinusoidalPositionalEmbedding]
)
def test_fairseq_counts_from_beyond_its_padding(peer):
    padding, words = 1, torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 1, 1]])
    theirs = peer(num_positions=30, embedding_dim=48, padding_idx=padding)(words)
    positions = sequence(5, start=padding + 1).float().repeat(2, 1, 1)
    positions[words == padding] = math.nan
    close(SinusoidalEncoding(48, layout="half", endpoint=True)(positions), theirs)


@pytest.mark.peer("transformers")
def test_marian_has_the_papers_frequencies():
    theirs = MarianSinusoidalPositionalEmbedding(300, 48)
    close(SinusoidalEncoding(48, layout="half")(sequence(300)), theirs.create_weight())


@pytest.mark.peer("transformers")
def test_videomae_counts_its_tokens():
    close(SinusoidalEncoding(48)(sequence(300)), get_sinusoid_encoding_table(300, 48)[0])


@pytest.mark.peer("timm")
@pytest.mark.parametrize(("sizes", "base"), [(GRID, 10000.0), ((90, 7), 100.0), ((1, 4), 100.0)])
def test_timm(sizes, base):
    plain = build_sincos2d_pos_embed(list(sizes), dim=48, temperature=base)
    close(SinusoidalEncoding(48, 2, layout="half", base=base)(grid(*sizes)), plain)
    per_axis = build_sincos2d_pos_embed(
        list(sizes), dim=48, temperature=base, interleave_sin_cos=True
    )
    close(SinusoidalEncoding(48, 2, layout="half_per_axis", base=base)(grid(*sizes)), per_axis)


@pytest.mark.peer("timm")
@pytest.mark.parametrize("interleave", [False, True])
def test_timm_width_first_puts_columns_first_among_tokens_too(interleave):
    theirs = build_sincos2d_pos_embed(
        list(GRID), dim=48, reverse_coord=True, interleave_sin_cos=interleave
    )
    columns = grid(*GRID[::-1]).flip(-1)
    layout = "half_per_axis" if interleave else "half"
    close(SinusoidalEncoding(48, 2, layout=layout, order=(1, 0))(columns), theirs)


@pytest.mark.peer("transformers")
def test_transformers_image_grids():
    theirs = build_2d_sinusoidal_position_embedding(*GRID, embed_dim=48, cls_token=True)
    encoding = SinusoidalEncoding(48, 2, layout="half_per_axis")
    close(encoding(join(absent(1, 2), grid(*GRID))), theirs, atol=1e-6)
    height, width = GRID
    theirs = OmDetTurboHybridEncoder.build_2d_sincos_position_embedding(width, height, 48)[0]
    encoding = SinusoidalEncoding(48, 2, layout="half_per_axis", order=(1, 0))
    close(encoding(grid(width, height).flip(-1)), theirs, atol=3e-5)


def test_mae_has_the_width_first():
    height, width = 4, 7
    h, w = grid(height, width).T
    parts = [*exactly(w, 12, 10000.0), *exactly(h, 12, 10000.0)]
    encoding = SinusoidalEncoding(48, 2, layout="half_per_axis", order=(1, 0))
    close(encoding(grid(height, width)), torch.cat(parts, -1), atol=1e-6)


@pytest.mark.peer("transformers")
def test_detr_counts_from_one():
    theirs = DetrSinePositionEmbedding(24)(torch.Size((1, 3, 4, 70)), "cpu", torch.float32)
    encoding = SinusoidalEncoding(48, 2, coordinates=OneBased())
    close(encoding(grid(4, 70)), theirs[0].flatten(1).T)


def test_vjepa_gives_time_half_of_the_features():
    t, h, w = grid(3, 4, 5).T
    dim = 48
    widths = (dim // 4, dim // 8, dim // 8)
    parts = [
        wave
        for x, pairs in zip((t, h, w), widths, strict=True)
        for wave in exactly(x, pairs, 10000.0)
    ]
    encoding = SinusoidalEncoding(dim, 3, layout="half_per_axis", split=widths)
    close(encoding(grid(3, 4, 5)), torch.cat(parts, -1), atol=1e-6)


def test_vjepa_in_equal_parts_loses_the_last_cosines():
    dim, pairs = 64, 11
    parts = [wave for x in grid(3, 4, 5).T for wave in exactly(x, pairs, 10000.0)]
    encoding = SinusoidalEncoding(dim, 3, layout="half_per_axis", split=3 * (pairs,))
    close(encoding(grid(3, 4, 5)), torch.cat(parts, -1)[:, :dim], atol=1e-6)


def test_vit_pytorch():
    h, w = grid(5, 90).T
    parts = [*exactly(w, 12, 10000.0, True), *exactly(h, 12, 10000.0, True)]
    flat = SinusoidalEncoding(48, 2, layout="half_per_axis", endpoint=True, order=(1, 0))
    close(flat(grid(5, 90)), torch.cat(parts, -1), atol=1e-6)
    dim = 64  # no multiple of 6: four zeros at the end
    parts = [wave for x in grid(3, 4, 5).T.flip(0) for wave in exactly(x, 10, 10000.0, True)]
    solid = SinusoidalEncoding(
        dim, 3, layout="half_per_axis", endpoint=True, order=(2, 1, 0), split=3 * (dim // 6,)
    )
    out = solid(grid(3, 4, 5))
    close(out[:, :60], torch.cat(parts, -1), atol=1e-6)
    assert not out[:, 60:].any()


@pytest.mark.peer("positional-encodings")
@pytest.mark.parametrize("dim", [64, 46, 66, 6])
@pytest.mark.parametrize("sizes", [(300,), (5, 90), (2, 3, 40)])
def test_positional_encodings_rounds_its_parts_up(dim, sizes):
    peer = pytest.importorskip("positional_encodings.torch_encodings")
    axes = len(sizes)
    theirs = getattr(peer, f"PositionalEncoding{axes}D")(dim)(torch.zeros(1, *sizes, dim))
    encoding = SinusoidalEncoding(dim, axes, split=axes * (math.ceil(dim / (2 * axes)),))
    close(encoding(grid(*sizes)), theirs.reshape(-1, dim), atol=2e-5)
    near = grid(*(min(size, 90) for size in sizes))
    flat = theirs[0][tuple(slice(90) for _ in sizes)]
    close(encoding(near), flat.reshape(-1, dim))
    if (dim, axes) == (64, 3):
        blocks = encoding(torch.tensor([[0.0, math.nan, math.nan]])).count_nonzero()
        assert blocks == 11, "the cosines of the first 22 features"
