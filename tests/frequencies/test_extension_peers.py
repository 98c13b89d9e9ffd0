"""Frequencies, and queries and keys turned by them, are those of transformers."""

import pytest
import torch
from transformers import GPTNeoXConfig, GptOssConfig, LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

import mmpos
from mmpos import RotaryEncoding
from mmpos.frequencies import (
    DynamicNTK,
    Llama3,
    LongRoPE,
    PositionInterpolation,
    Proportional,
    YaRN,
)

SHORT = [1 + 0.01 * i for i in range(32)]
LONG = [1 + i**1.5 / 4 for i in range(32)]

CASES = {
    # name: their parameters, ours
    "linear": ({"factor": 4.0}, PositionInterpolation(factor=4)),
    "dynamic": ({"factor": 2.0}, DynamicNTK(factor=2, original_length=256)),
    "dynamic of 1": ({"factor": 1.0}, DynamicNTK(original_length=256)),
    "yarn": (
        {"factor": 16.0, "original_max_position_embeddings": 256},
        YaRN(factor=16, original_length=256),
    ),
    "yarn, not rounded": (
        {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        YaRN(factor=32, original_length=4096, truncate=False),
    ),
    "yarn, other ends": (
        {
            "factor": 8.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 0.75,
        },
        YaRN(factor=8, original_length=1024, beta_fast=16, beta_slow=2, attention_factor=0.75),
    ),
    "yarn, mscales": (
        {
            "factor": 40.0,
            "original_max_position_embeddings": 256,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
        },
        YaRN(factor=40, original_length=256, mscale=1.0, mscale_all_dim=0.707),
    ),
    "yarn, hardly extended": (
        {"factor": 1.0, "original_max_position_embeddings": 256},
        YaRN(factor=1, original_length=256),
    ),
    "longrope": (
        {
            "short_factor": SHORT,
            "long_factor": LONG,
            "original_max_position_embeddings": 256,
            "factor": 32.0,
        },
        LongRoPE(short_factor=SHORT, long_factor=LONG, original_length=256, factor=32),
    ),
    "llama3": (
        {
            "factor": 8.0,
            "original_max_position_embeddings": 256,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        Llama3(factor=8, original_length=256),
    ),
    "proportional": ({"partial_rotary_factor": 0.25}, Proportional(fraction=0.25)),
    "proportional, slower": (
        {"partial_rotary_factor": 0.3, "factor": 2.0},
        Proportional(fraction=0.3, factor=2),
    ),
}


def llama(name, theirs, base=10000.0, length=256):
    kind = name.split(",")[0].split(" ")[0]
    rope = {"rope_type": kind, "rope_theta": base, **theirs}
    return LlamaConfig(
        hidden_size=192,
        num_attention_heads=3,
        head_dim=64,
        max_position_embeddings=length,
        rope_parameters=rope,
    )


def heads(length):
    return torch.nn.functional.normalize(torch.randn(2, 2, 3, length, 64), dim=-1)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("length", [1, 256, 257, 700])
@pytest.mark.parametrize("name", CASES)
def test_frequencies(name, length, base):
    theirs, ours = CASES[name]
    config = llama(name, theirs, base)
    kind = config.rope_parameters["rope_type"]
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
    given = RotaryEncoding(64, base=base, extension=ours).frequencies(
        torch.float64, torch.device("cpu"), length
    )
    torch.testing.assert_close(given[0, 0].float(), frequencies, rtol=2e-6, atol=0)
    assert ours.magnitude == pytest.approx(factor, rel=1e-12)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("length", [200, 270])
@pytest.mark.parametrize("name", CASES)
def test_llama_turns_queries_and_keys_so(name, length):
    theirs, ours = CASES[name]
    positions = torch.stack((torch.arange(length), torch.arange(length).flip(0)))
    q, k = heads(length)
    cos, sin = modeling_llama.LlamaRotaryEmbedding(llama(name, theirs))(q, positions)
    expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    encoding = RotaryEncoding(64, layout="half", extension=ours)
    rotation = encoding(positions.unsqueeze(-1), length=length)
    interleaved = RotaryEncoding(64, extension=ours)(positions.unsqueeze(-1), length=length)
    order = torch.arange(64).reshape(2, 32).T.flatten()
    for x, turned in zip((q, k), expected, strict=True):
        torch.testing.assert_close(mmpos.rotate(x, rotation), turned, rtol=0, atol=1e-5)
        pairs = mmpos.rotate(x[..., order], interleaved)
        torch.testing.assert_close(pairs, turned[..., order], rtol=0, atol=1e-5)


PARTS = {
    "default": ({}, None),
    "linear": ({"factor": 3.0}, PositionInterpolation(factor=3)),
    "dynamic": ({"factor": 2.0}, DynamicNTK(factor=2, original_length=256)),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 128},
        YaRN(factor=4, original_length=128),
    ),
}


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("part", [0.25, 0.75])
@pytest.mark.parametrize("length", [100, 400])
@pytest.mark.parametrize("kind", PARTS)
def test_a_part_of_the_head_is_extended_by_its_own_width(kind, length, part):
    theirs, ours = PARTS[kind]
    config = GPTNeoXConfig(
        hidden_size=192,
        num_attention_heads=3,
        max_position_embeddings=256,
        rotary_pct=part,
        rope_parameters={
            "rope_type": kind,
            "rope_theta": 10000.0,
            "partial_rotary_factor": part,
            **theirs,
        },
    )
    positions = torch.arange(length).expand(2, -1)
    q, k = heads(length)
    cos, sin = modeling_gpt_neox.GPTNeoXRotaryEmbedding(config)(q, positions)
    assert cos.shape[-1] == 64 * part
    expected = modeling_gpt_neox.apply_rotary_pos_emb(q, k, cos, sin)
    encoding = RotaryEncoding(64, rotary_dim=int(64 * part), layout="half", extension=ours)
    rotation = encoding(positions.unsqueeze(-1), length=length)
    for x, turned in zip((q, k), expected, strict=True):
        torch.testing.assert_close(mmpos.rotate(x, rotation), turned, rtol=0, atol=1e-5)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("length", [100, 400])
def test_phi3(length):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": SHORT[:24],
        "long_factor": LONG[:24],
        "original_max_position_embeddings": 128,
    }
    config = Phi3Config(
        hidden_size=192,
        num_attention_heads=3,
        max_position_embeddings=4096,
        original_max_position_embeddings=128,
        rope_parameters=rope,
        pad_token_id=0,
    )
    extension = LongRoPE(
        short_factor=SHORT[:24], long_factor=LONG[:24], original_length=128, max_length=4096
    )
    positions = torch.arange(length).expand(2, -1)
    q, k = heads(length)
    cos, sin = modeling_phi3.Phi3RotaryEmbedding(config)(q, positions)
    expected = modeling_phi3.apply_rotary_pos_emb(q, k, cos, sin)
    encoding = RotaryEncoding(64, rotary_dim=48, layout="half", extension=extension)
    rotation = encoding(positions.unsqueeze(-1), length=length)
    for x, turned in zip((q, k), expected, strict=True):
        torch.testing.assert_close(mmpos.rotate(x, rotation), turned, rtol=0, atol=1e-5)


@pytest.mark.peer("transformers")
def test_gpt_oss_does_not_round_the_ramp():
    config = GptOssConfig(num_hidden_layers=1)
    assert config.rope_parameters["truncate"] is False
    rope = config.rope_parameters
    extension = YaRN(
        factor=rope["factor"],
        original_length=rope["original_max_position_embeddings"],
        beta_fast=rope["beta_fast"],
        beta_slow=rope["beta_slow"],
        truncate=False,
    )
    positions = torch.arange(400).expand(2, -1)
    q, k = heads(400)
    cos, sin = modeling_gpt_oss.GptOssRotaryEmbedding(config)(q, positions)
    expected = modeling_gpt_oss.apply_rotary_pos_emb(q, k, cos, sin)
    for truncate in (False, True):
        own = YaRN(**{**vars(extension), "truncate": truncate})
        encoding = RotaryEncoding(64, base=rope["rope_theta"], layout="half", extension=own)
        rotation = encoding(positions.unsqueeze(-1))
        apart = max(
            (mmpos.rotate(x, rotation) - turned).abs().max().item()
            for x, turned in zip((q, k), expected, strict=True)
        )
        assert apart > 1e-2 if truncate else apart < 1e-5
