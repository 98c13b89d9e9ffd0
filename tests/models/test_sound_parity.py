"""The front ends for sound with a transformer, next to transformers' AST and Whisper."""

import importlib.util
import re
import struct
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ASTConfig, ASTModel, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder, sinusoids

from mmpos import LearnedEncoding, SinusoidalEncoding
from mmpos.models import Classifier, FrameEmbedding, SpectrogramPatches, Transformer
from mmpos.positions import sequence

pytestmark = pytest.mark.peer("transformers")
SMALL: Any = {"dim": 24, "depth": 3, "heads": 3}
SCRIPT = Path(__file__).parents[2] / "scripts" / "whisper_encoder.py"
WHISPER = partial(SinusoidalEncoding, layout="half", endpoint=True)


def close(actual, expected, atol=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def drawn(model) -> Any:
    """The model with weights, biases and tables of which none is near zero or one."""
    torch.manual_seed(0)
    for name, value in model.named_parameters():
        if value.requires_grad:
            value.data.normal_(1.0 if "norm" in name and "weight" in name else 0.0, 0.2)
    return model.eval()


def blocks(state, kinds, norms, mlp, own):
    """Our weights of layers, of a state whose parts are called so; no bias is a bias of zero."""
    out = {}
    for i in range(SMALL["depth"]):
        names = {"attention_norm": norms[0], "attention.out": kinds[3], "mlp_norm": norms[1]}
        names |= {"mlp.up": mlp[0], "mlp.down": mlp[1]}
        for end in ("weight", "bias"):
            for ours, theirs in names.items():
                out[f"layers.{i}.{ours}.{end}"] = state[f"layers.{i}.{theirs}.{end}"]
            zero = torch.zeros(SMALL["dim"])
            parts = [state.get(f"layers.{i}.{kind}.{end}", zero) for kind in kinds[:3]]
            out[f"layers.{i}.attention.qkv.{end}"] = torch.cat(parts)
    return out | {f"norm.{end}": state[f"{own}.{end}"] for end in ("weight", "bias")}


@pytest.mark.parametrize(
    ("bins", "frames", "strides", "grid"),
    [
        (128, 1024, (10, 10), (12, 101)),
        (64, 100, (10, 10), (5, 9)),
        (40, 77, (8, 16), (4, 4)),
        (16, 16, (16, 16), (1, 1)),
    ],
)
def test_patches_and_two_prefix_tokens_are_ast(bins, frames, strides, grid):
    config = ASTConfig(
        hidden_size=SMALL["dim"],
        num_hidden_layers=SMALL["depth"],
        num_attention_heads=SMALL["heads"],
        intermediate_size=4 * SMALL["dim"],
        num_mel_bins=bins,
        max_length=frames,
        frequency_stride=strides[0],
        time_stride=strides[1],
        layer_norm_eps=1e-5,
    )
    ast = drawn(ASTModel(config))
    tokens: Any = SpectrogramPatches(SMALL["dim"], bins, stride=strides, rest=("drop", "drop"))
    assert tokens.grid(bins, frames) == grid
    table = partial(LearnedEncoding, prefix_rows=2)
    transformer = Transformer(grid, **SMALL, class_token=True, registers=1, additive=table)
    network: Any = Classifier(tokens, transformer, {"kind": 7}, pool="prefix").eval()
    state = ast.state_dict()
    embed = {k.removeprefix("embeddings."): v for k, v in state.items() if k.startswith("embed")}
    tokens.project.weight.data = embed["patch_embeddings.projection.weight"]
    tokens.project.bias.data = embed["patch_embeddings.projection.bias"]
    kinds = [f"attention.{kind}_proj" for kind in "qkvo"]
    norms = ("layernorm_before", "layernorm_after")
    ours = blocks(state, kinds, norms, ("mlp.fc1", "mlp.fc2"), "layernorm")
    ours["prefix"] = torch.cat((embed["cls_token"][0], embed["distillation_token"][0]))
    ours["additive.prefix"], cells = embed["position_embeddings"][0].split([2, grid[0] * grid[1]])
    transformer.load_state_dict({**ours, "additive.table": cells.reshape(*grid, -1)})
    x = torch.randn(2, bins, frames, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = ast(x.mT)  # which has time first
        placed = tokens(x)
        close(transformer(placed.values, placed.positions), theirs.last_hidden_state)
        close(network(x)["kind"], network.heads.kind(theirs.pooler_output))


@pytest.mark.parametrize("length", [1, 7, 150])
def test_frames_and_sinusoids_are_whispers_encoder(length):
    config = WhisperConfig(
        d_model=SMALL["dim"],
        encoder_layers=SMALL["depth"],
        encoder_attention_heads=SMALL["heads"],
        encoder_ffn_dim=4 * SMALL["dim"],
        num_mel_bins=20,
        max_source_positions=length,
    )
    whisper = drawn(WhisperEncoder(config))
    close(whisper.embed_positions.weight, sinusoids(length, SMALL["dim"]), atol=0)
    assert not whisper.layers[0].self_attn.k_proj.bias  # it has none
    tokens: Any = FrameEmbedding(SMALL["dim"], 20)
    transformer = Transformer(1, **SMALL, additive=WHISPER).eval()
    state = whisper.state_dict()
    for layer, name in zip(tokens.convolutions, ("conv1", "conv2"), strict=True):
        layer.weight.data, layer.bias.data = state[f"{name}.weight"], state[f"{name}.bias"]
    kinds = [f"self_attn.{kind}_proj" for kind in ("q", "k", "v", "out")]
    norms = ("self_attn_layer_norm", "final_layer_norm")
    transformer.load_state_dict(blocks(state, kinds, norms, ("fc1", "fc2"), "layer_norm"))
    x = torch.randn(2, 20, 2 * length, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        placed = tokens(x)
        assert placed.values.shape[1] == length
        encoded = transformer(placed.values, placed.positions)
        close(encoded, whisper(x).last_hidden_state)
        short = tokens(x[..., : 2 * length - 1])  # an odd length, which has as many tokens
        assert short.values.shape[1] == length
        mask = torch.ones(2, 2 * length, dtype=torch.bool)
        close(transformer(*tokens(x, mask)[:2]), encoded)


@pytest.mark.parametrize(("length", "dim"), [(1500, 384), (1500, 1280), (448, 24)])
def test_whispers_table_is_its_formula_to_the_last_digits(length, dim):
    ours = WHISPER(dim)(sequence(length))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # in which transformers then forms its table
    try:
        exact = sinusoids(length, dim)
    finally:
        torch.set_default_dtype(default)
    assert exact.dtype == torch.float64
    close(ours.double(), exact, atol=1e-7)
    near = sinusoids(length, dim)  # in float32 its angles are off by some ulps of the position
    assert (near - exact).abs().max() < 2e-4
    close(ours, near, atol=2e-4)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("whisper_encoder", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def written(path, arrays, version=6):
    """A model in CTranslate2's format, of float32, 8-bit, 32-bit and float16 arrays."""
    codes = {torch.float32: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.float16: 4}

    def text(words):
        return struct.pack("<H", len(words) + 1) + words.encode() + b"\0"

    parts = [struct.pack("<I", version), text("WhisperSpec"), struct.pack("<II", 3, len(arrays))]
    for name, array in arrays.items():
        values = array.numpy().tobytes()
        parts += [text(name), struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)]
        parts += [struct.pack("<BI", codes[array.dtype], len(values)), values]
    path.write_bytes(b"".join([*parts, struct.pack("<I", 1), text("alias"), text("of")]))
    return path


def whisper_of(length=50, dim=24, depth=11, bins=20):
    """Arrays of a Whisper encoder as CTranslate2 names them, in 16 bits."""
    parts = {"layer_norm": (dim,), "conv1": (dim, bins, 3), "conv2": (dim, dim, 3)}
    for layer in range(depth):
        parts |= {f"layer_{layer}/{part}/layer_norm": (dim,) for part in ("self_attention", "ffn")}
        parts[f"layer_{layer}/self_attention/linear_0"] = (3 * dim, dim)
        parts[f"layer_{layer}/self_attention/linear_1"] = (dim, dim)
        parts[f"layer_{layer}/ffn/linear_0"] = (4 * dim, dim)
        parts[f"layer_{layer}/ffn/linear_1"] = (dim, 4 * dim)
    torch.manual_seed(0)
    arrays = {"encoder/num_heads": torch.tensor(2, dtype=torch.int16)}
    for name, shape in parts.items():
        ends = ("gamma", "beta") if name.endswith("layer_norm") else ("weight", "bias")
        weight, bias = torch.randn(shape) / shape[-1] ** 0.5, torch.randn(shape[0])
        if name.endswith("self_attention/linear_0"):
            bias[dim : 2 * dim] = 0
        arrays |= {f"encoder/{name}/{end}": v for end, v in zip(ends, (weight, bias), strict=True)}
    arrays["encoder/position_encodings/encodings"] = WHISPER(dim)(sequence(length))
    return {k: v.half() if v.is_floating_point() else v for k, v in arrays.items()}


def test_the_script_reads_what_is_in_a_file(script, tmp_path):
    arrays = whisper_of(depth=1) | {
        "decoder/flag": torch.tensor(-3, dtype=torch.int8),
        "decoder/wide": torch.randn(2, 3, 4),
        "decoder/counts": torch.tensor([[7, -9]], dtype=torch.int32),
    }
    for version in (4, 6):
        found = script.read(written(tmp_path / "model.bin", arrays, version))
        assert found.keys() == arrays.keys()
        for name, value in arrays.items():
            assert found[name].dtype == value.dtype and torch.equal(found[name], value)


def test_the_script_refuses_what_it_cannot_read(script, tmp_path, capsys):
    path = tmp_path / "model.bin"
    whole = written(path, whisper_of(depth=1)).read_bytes()
    for data, words in (
        (whole[:-2000], "is no model of CTranslate2 that can be read"),
        (whole[:30], "is no model of CTranslate2 that can be read"),
        (b"", "is no model of CTranslate2 that can be read"),
        (struct.pack("<I", 3) + whole[4:], "version 3, expected one of [4, 5, 6]"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=re.escape(words)):
            script.read(path)
    whole = whisper_of(depth=1)
    name = "encoder/layer_0/ffn/linear_0/weight"
    for arrays, words in (
        ({"decoder/counts": torch.ones(2)}, "it is no Whisper"),
        (whole | {name: whole[name].char()}, "no weight of encoder/layer_0/ffn/linear_0 in flo"),
        (
            whole | {"encoder/layer_0/self_attention/linear_0/bias": torch.ones(72)},
            "layers.0.self_attn has a bias of keys, which Whisper has not",
        ),
    ):
        with pytest.raises(SystemExit):
            script.main([str(written(path, arrays))])
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script.main([str(tmp_path / "none.bin")])
    assert "none.bin" in capsys.readouterr().err


def test_the_script_compares_every_encoder_with_every_table(script, tmp_path, capsys):
    path = written(tmp_path / "model.bin", whisper_of())
    script.main([str(path)])
    shown = capsys.readouterr().out
    assert "11 layers of 24, 50 positions, 100 frames" in shown and "closed form in 16" in shown
    stored = script.read(path)
    rows = {row[:2]: row for row in script.measured(stored, script.features(stored))}
    assert {encoder for encoder, _ in rows} == {"transformers", "mmpos"} and len(rows) == 10
    for encoder in ("transformers", "mmpos"):
        for positions in ("stored", "closed form in 16 bits"):  # which are the same
            row = rows[encoder, positions]
            assert row.table == 0 and row.output < 1e-5
        form, none = rows[encoder, "closed form"], rows[encoder, "none"]
        assert 1e-4 < form.table < 2.5e-4 and 1e-7 < form.relative < 1e-4
        assert none.table == 1 and none.relative > 10 * form.relative
