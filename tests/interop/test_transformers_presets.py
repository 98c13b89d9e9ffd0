"""Presets, by what papers, cards and original code say of each model."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import CONFIG_MAPPING

from mmpos.interop.transformers.comparison import compare
from mmpos.interop.transformers.configuration import configuration, encodings
from mmpos.interop.transformers.presets import PRESETS, preset
from mmpos.rotary import MRoPE

PARTS = {"t5-base": ("encoder", "decoder"), "whisper-small": ("encoder", "decoder")}
MODELS = [(name, part) for name in PRESETS for part in PARTS.get(name, ("",))]
READ_BESIDE = {"model_type", "rope_parameters"}  # not a field of every configuration

SIZES = {  # layers, heads, those of keys, head dim, features that turn, base of layer 0, length
    "llama-2-7b": (32, 32, 32, 128, 128, 1e4, 4096),
    "llama-3-8b": (32, 32, 8, 128, 128, 5e5, 8192),
    "llama-3.1-8b": (32, 32, 8, 128, 128, 5e5, 131072),
    "llama-3.2-1b": (16, 32, 8, 64, 64, 5e5, 131072),
    "llama-3.2-3b": (28, 24, 8, 128, 128, 5e5, 131072),
    "code-llama-7b": (32, 32, 32, 128, 128, 1e6, 16384),
    "mistral-7b-v0.1": (32, 32, 8, 128, 128, 1e4, 32768),
    "mistral-7b-v0.3": (32, 32, 8, 128, 128, 1e6, 32768),
    "mixtral-8x7b": (32, 32, 8, 128, 128, 1e6, 32768),
    "qwen2.5-7b": (28, 28, 4, 128, 128, 1e6, 32768),
    "qwen2.5-7b-yarn": (28, 28, 4, 128, 128, 1e6, 32768),
    "qwen3-8b": (36, 32, 8, 128, 128, 1e6, 40960),
    "qwen2-vl-7b": (28, 28, 4, 128, 128, 1e6, 32768),
    "qwen2.5-vl-7b": (28, 28, 4, 128, 128, 1e6, 128000),
    "qwen3-vl-8b": (36, 32, 8, 128, 128, 5e6, 262144),
    "gemma-7b": (28, 16, 16, 256, 256, 1e4, 8192),
    "gemma-2-9b": (42, 16, 8, 256, 256, 1e4, 8192),
    "gemma-3-4b": (34, 8, 4, 256, 256, 1e4, 131072),
    "phi-2": (32, 32, 32, 80, 32, 1e4, 2048),
    "phi-3-mini-4k": (32, 32, 32, 96, 96, 1e4, 4096),
    "phi-3-mini-128k": (32, 32, 32, 96, 96, 1e4, 131072),
    "phi-4": (40, 40, 10, 128, 128, 2.5e5, 16384),
    "phi-4-mini": (32, 24, 8, 128, 96, 1e4, 131072),
    "gpt-neox-20b": (44, 64, None, 96, 24, 1e4, 2048),
    "pythia-6.9b": (32, 32, None, 128, 32, 1e4, 2048),
    "gpt-j-6b": (28, 16, None, 256, 64, 1e4, 2048),
    "falcon-7b": (32, 71, None, 64, 64, 1e4, 2048),
    "deepseek-v2-lite": (27, 16, 16, 192, 64, 1e4, 163840),
    "deepseek-v2": (60, 128, 128, 192, 64, 1e4, 163840),
    "deepseek-v3": (61, 128, 128, 192, 64, 1e4, 163840),
    "gpt-oss-20b": (24, 64, 8, 64, 64, 1.5e5, 131072),
    "smollm3-3b": (36, 16, 4, 128, 128, 5e6, 65536),
    "olmo-2-7b": (32, 32, 32, 128, 128, 5e5, 4096),
    "modernbert-base": (22, 12, None, 64, 64, 1.6e5, 8192),
    "dinov3-vits16": (12, 6, None, 64, 64, 100.0, None),
    "vjepa2-vitl": (24, 16, None, 64, 60, 1e4, None),
    "pixtral-12b-vision": (24, 16, None, 64, 64, 1e4, None),
}


def ratios(name):
    """How much faster pairs would turn without the extension, for each pair."""
    rotary = encodings(preset(name)).rotary
    plain = torch.tensor(rotary.spectrum(0), dtype=torch.float64)
    return plain / rotary.frequencies(torch.float64, torch.device("cpu")).flatten()


def magnitude(rotary, length=None):
    return float(rotary(torch.zeros(1, 1), length=length).cos.flatten()[0])


@pytest.mark.parametrize(("name", "part"), MODELS)
def test_every_preset_is_read(name, part):
    found = encodings(preset(name), part)
    assert any(getattr(found, place) is not None for place in ("additive", "rotary", "bias"))


@pytest.mark.parametrize("name", PRESETS)
def test_every_entry_is_one_that_transformers_knows(name):
    data = preset(name)
    kind = CONFIG_MAPPING[data["model_type"]]
    known = {*kind.__dataclass_fields__, *getattr(kind, "attribute_map", {}), *READ_BESIDE}
    assert set(data) <= known
    read = configuration(data)
    for key in set(data) - READ_BESIDE - {"attn_config"}:
        assert getattr(read, key) == data[key]


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    layers, heads, groups, head_dim, turned, base, length = SIZES[name]
    found, read = encodings(preset(name)), configuration(preset(name))
    rotary = found.by_layer("rotary")[0]
    assert (found.layers, read.num_attention_heads) == (layers, heads)
    assert groups is None or read.num_key_value_heads == groups
    assert (rotary.head_dim, 2 * sum(rotary.pairs), rotary.base) == (head_dim, turned, base)
    assert length is None or getattr(read, "max_position_embeddings", None) == length


def test_llama_3_bands():
    ratio = ratios("llama-3.1-8b")
    assert torch.allclose(ratio[:29], torch.ones(29).double(), rtol=1e-6)
    assert ((ratio[29:35] > 1.001) & (ratio[29:35] < 7.999)).all()
    assert torch.allclose(ratio[35:], torch.full((29,), 8.0).double(), rtol=1e-6)
    frequencies = 5e5 ** (-torch.arange(64).double() / 64) / ratio
    known = {30: 0.0013718935677611381, 32: 0.0005248461609929547, 34: 0.0001785078127679964}
    for pair, frequency in known.items():
        assert float(frequencies[pair]) == pytest.approx(frequency, rel=1e-6)
    more = ratios("llama-3.2-3b")
    assert torch.allclose(more[:29], torch.ones(29).double(), rtol=1e-6)
    assert torch.allclose(more[35:], torch.full((29,), 32.0).double(), rtol=1e-6)
    small = ratios("llama-3.2-1b")
    assert torch.allclose(small[:15], torch.ones(15).double(), rtol=1e-6)
    assert ((small[15:18] > 1.001) & (small[15:18] < 31.99)).all()
    assert torch.allclose(small[18:], torch.full((14,), 32.0).double(), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "low", "high", "factor"),
    [
        ("gpt-oss-20b", 8.092779115512402, 17.39802450158856, 32),
        ("deepseek-v2-lite", 10, 23, 40),
        ("deepseek-v2", 10, 23, 40),
        ("deepseek-v3", 10, 23, 40),
        ("qwen2.5-7b-yarn", 23, 40, 4),
    ],
)
def test_yarn_ramps(name, low, high, factor):
    ratio = ratios(name)
    slow = ((torch.arange(len(ratio)).double() - low) / (high - low)).clamp(0, 1)
    assert torch.allclose(1 / ratio, 1 - slow + slow / factor, rtol=1e-6)


def test_what_yarn_does_to_scores():
    attention_factor = 1.3688879454113936  # 0.1 ln 40 + 1
    third = encodings(preset("deepseek-v3"))
    assert magnitude(third.rotary) == 1.0
    assert third.scale == pytest.approx(192**-0.5 * attention_factor**2)
    for name in ("deepseek-v2-lite", "deepseek-v2"):
        second = encodings(preset(name))
        assert magnitude(second.rotary) == 1.0
        assert second.scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    oss = encodings(preset("gpt-oss-20b"))
    assert magnitude(oss.rotary) == pytest.approx(1.3465735902799727, rel=1e-6)
    assert oss.scale is None


def test_phi_3_is_extended_by_two_lists():
    rotary = encodings(preset("phi-3-mini-128k")).rotary
    assert magnitude(rotary, length=131072) == pytest.approx(1.1902380714238083, rel=1e-6)
    plain = torch.tensor(rotary.spectrum(0), dtype=torch.float64)
    device = torch.device("cpu")
    short, long = (
        plain / rotary.frequencies(torch.float64, device, length=length).flatten()
        for length in (4096, 4097)
    )
    assert [round(float(own), 2) for own in (short[0], short[-1])] == [1.1, 3.05]
    assert [round(float(own), 2) for own in (long[0], long[-1])] == [1.07, 64.76]
    for factors in (short, long):
        assert (factors.diff() > -1e-12).all()
    extension = encodings(preset("phi-4-mini")).rotary.extension
    assert set(extension.short_factor) == {1.0}
    assert (extension.long_factor[-1], extension.magnitude) == (47.77, rotary.extension.magnitude)
    assert extension.original_length == rotary.extension.original_length == 4096
    assert list(extension.long_factor) == sorted(extension.long_factor)


def test_sections_of_mrope():
    for name in ("qwen2-vl-7b", "qwen2.5-vl-7b"):
        rotary = encodings(preset(name)).rotary
        assert isinstance(rotary, MRoPE)
        assert rotary.pair_axes == [0] * 16 + [1] * 24 + [2] * 24
    interleaved = encodings(preset("qwen3-vl-8b")).rotary
    assert interleaved.pair_axes == [0, 1, 2] * 20 + [0] * 4


def test_layers_that_differ():
    gemma = encodings(preset("gemma-3-4b"))
    bases = [own.base for own in gemma.by_layer("rotary")]
    assert bases == ([1e4] * 5 + [1e6]) * 5 + [1e4] * 4
    every = gemma.by_layer("rotary")[5]
    assert float(every.frequencies(torch.float64, torch.device("cpu")).max()) == 1 / 8
    smol = encodings(preset("smollm3-3b")).by_layer("rotary")
    assert [own is None for own in smol] == [False, False, False, True] * 9
    assert smol[0].base == 5e6
    modern = encodings(preset("modernbert-base")).by_layer("rotary")
    assert [own.base for own in modern] == ([1.6e5, 1e4, 1e4] * 8)[:22]


def test_scales_of_gemma():
    assert encodings(preset("gemma-2-9b")).scale == 256**-0.5
    assert encodings(preset("gemma-3-4b")).scale == 256**-0.5
    assert encodings(preset("gemma-7b")).scale is None


def test_tables_and_biases():
    rows = {"gpt2": (1024, 0), "bert-base-uncased": (512, 0), "roberta-base": (514, 2)}
    rows["opt-1.3b"] = (2050, 2)
    for name, (count, offset) in rows.items():
        found = encodings(preset(name))
        assert found.additive.table.shape == (count, 2048 if name == "opt-1.3b" else 768)
        assert (found.position_offset, found.layers) == (offset, 24 if name == "opt-1.3b" else 12)
    for name, layers in (("bloom-7b1", 30), ("mpt-7b", 32)):
        found = encodings(preset(name))
        slopes = [2 ** (-head / 4) for head in range(1, 33)]
        assert found.layers == layers
        apart = found.bias(torch.tensor([[300]]), torch.tensor([[299]]))
        assert (-apart).flatten().tolist() == pytest.approx(slopes)
    whisper = encodings(preset("whisper-small"), "decoder")
    assert (whisper.additive.table.shape, whisper.layers) == ((448, 768), 12)
    assert "1500" in encodings(preset("whisper-small"), "encoder").note
    for part in PARTS["t5-base"]:
        found = encodings(preset("t5-base"), part)
        assert (found.layers, found.bias.heads, found.bias.buckets) == (12, 12, 32)
        assert (found.bias.max_distance, found.scale) == (128, 1.0)


def test_towers():
    film = encodings(preset("vjepa2-vitl"))
    assert (film.layers, film.rotary.head_dim, film.rotary.pairs) == (24, 64, (10, 10, 10))
    assert film.rotary.axes == (32, 16, 16)
    assert encodings(preset("dinov3-vits16")).rotary.coordinates.rescale == 2.0


def test_a_preset_is_a_copy():
    for name in PRESETS:
        given = preset(name)
        assert given == PRESETS[name]
        for value in given.values():
            if isinstance(value, dict):
                value["factor"] = 3.0
            elif isinstance(value, list):
                value.clear()
        given["hidden_size"] = -1
        assert preset(name) == PRESETS[name] != given
    assert preset("pythia-6.9b")["rope_parameters"] == preset("gpt-neox-20b")["rope_parameters"]


def test_presets_compare():
    found = compare(preset("llama-3-8b"), preset("llama-3.1-8b"))
    assert [own.name for own in found] == ["type", "factor", "original length", "angles"]
    assert [own.second for own in found[:3]] == ["llama3", "8", "8192"]
    bases = compare(preset("llama-2-7b"), preset("code-llama-7b"))
    assert any((own.name, own.first, own.second) == ("base", "10000", "1e+06") for own in bases)
    assert compare(preset("llama-3.1-8b"), preset("LLAMA-3.1-8B")) == []


def test_names():
    assert preset("Llama-3-8B") == preset("llama-3-8b")
    with pytest.raises(ValueError, match=r"'llama3-8b' is not known: did you mean llama-3-8b"):
        preset("llama3-8b")
    with pytest.raises(ValueError, match=r"'zzz' is not known: known are llama-2-7b, .*vision$"):
        preset("zzz")
    assert all(name == name.lower() for name in PRESETS)
