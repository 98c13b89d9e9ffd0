import functools
from typing import Any

import pytest
import torch
from torch import nn

import mmpos
from mmpos.coordinates import Index, Scaled
from mmpos.models import Block, SwiGLU, Transformer
from mmpos.positions import absent, grid, join, sequence

SLOTS = {
    "none": {},
    "additive": {"additive": functools.partial(mmpos.LearnedEncoding, prefix_rows=1, std=1.0)},
    "rotary": {"rotary": functools.partial(mmpos.RotaryEncoding, base=10)},
    "bias": {"bias": mmpos.ALiBi},
    "all": {
        "additive": mmpos.SinusoidalEncoding,
        "rotary": mmpos.RotaryEncoding,
        "bias": mmpos.ALiBi,
    },
}


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


@pytest.fixture(params=SLOTS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def make(kind):
    def call(axes=(4, 6), **arguments) -> Transformer:
        model = Transformer(axes, dim=48, depth=2, heads=3, **{**SLOTS[kind], **arguments})
        for weight in model.layers.parameters():  # as initialised, attention is nearly uniform
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.15)
        return model.eval()

    return call


@pytest.mark.parametrize(("class_token", "registers"), [(False, 0), (True, 0), (True, 3)])
def test_prefix_tokens_come_first_and_have_no_place(make, class_token, registers):
    model = make(class_token=class_token, registers=registers)
    n = class_token + registers
    x, positions = torch.randn(2, 24, 48), grid(4, 6)
    out = model(x, positions, extent=(4, 6))
    assert out.shape == (2, n + 24, 48)
    if model.prefix is None:
        return
    explicit = make(class_token=False)
    explicit.load_state_dict(
        {name: value for name, value in model.state_dict().items() if name != "prefix"}
    )
    joined = torch.cat((model.prefix.expand(2, -1, -1), x), 1)
    close(out, explicit(joined, join(absent(n, 2), positions), extent=(4, 6)))


def test_permuting_patches_with_their_positions_permutes_the_output(make, kind):
    model = make(class_token=True)
    x, positions, order = torch.randn(2, 24, 48), grid(4, 6), torch.randperm(24)
    out = model(x, positions)
    close(model(x[:, order], positions[order])[:, 1:], out[:, 1:][:, order])
    moved = (model(x[:, order], positions)[:, 1:] - out[:, 1:][:, order]).abs().max()
    assert moved < 1e-4 if kind == "none" else moved > 1e-2


@pytest.mark.parametrize(
    ("slot", "encoding"),
    [
        ("additive", mmpos.SinusoidalEncoding),
        ("rotary", mmpos.RotaryEncoding),
        ("bias", mmpos.ALiBi),
    ],
)
def test_the_size_of_the_grid_reaches_every_slot(slot, encoding):
    x, positions = torch.randn(2, 24, 48), grid(8, 12)[::4]
    outputs = []
    for reading, where in ((Scaled(), positions), (Index(), positions / 2)):
        torch.manual_seed(0)
        slots: dict[str, Any] = {slot: functools.partial(encoding, coordinates=reading)}
        model = Transformer((4, 6), dim=48, depth=1, heads=3, **slots)
        nn.init.normal_(model.layers[0].get_parameter("attention.qkv.weight"), std=0.15)
        outputs.append(model(x, where, extent=(8, 12)))
    close(*outputs)


def test_a_masked_autoencoders_subset_keeps_its_places(make):
    model = make(class_token=True)
    x, positions, kept = torch.randn(1, 24, 48), grid(4, 6), torch.tensor([23, 3, 7, 11])
    hidden = torch.zeros(1, 24, dtype=torch.bool)
    hidden[:, kept] = True
    whole = model(x, positions, mask=hidden)
    part = model(x[:, kept], positions[kept])
    close(part[:, 0], whole[:, 0])
    close(part[:, 1:], whole[:, 1:][:, kept])


def test_packed_documents_are_the_separate_ones(make):
    model = make((40,), causal=True)
    x, lengths = torch.randn(1, 11, 48), (3, 1, 7)
    positions = torch.cat([sequence(length) for length in lengths])
    segments = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    packed = model(x, positions, segments=segments)
    separate = [
        model(part, sequence(length))
        for part, length in zip(x.split(lengths, 1), lengths, strict=True)
    ]
    close(packed, torch.cat(separate, 1))


@pytest.mark.parametrize("causal", [False, True])
def test_left_padding_changes_no_real_token(make, causal):
    model = make((40,), causal=causal, class_token=True)
    x, lengths = torch.randn(3, 7, 48), (3, 7, 5)
    positions, mask = torch.zeros(3, 7, 1, dtype=torch.long), torch.zeros(3, 7, dtype=torch.bool)
    for row, length in enumerate(lengths):
        positions[row, 7 - length :], mask[row, 7 - length :] = sequence(length), True
    padded = model(x, positions, mask=mask)
    for row, length in enumerate(lengths):
        alone = model(x[row : row + 1, 7 - length :], sequence(length))
        close(padded[row : row + 1, 8 - length :], alone[:, 1:])
        close(padded[row : row + 1, :1], alone[:, :1])


def test_a_later_token_changes_no_earlier_output(make):
    model = make((40,), causal=True, class_token=True)
    x = torch.randn(2, 11, 48)
    other = x.clone()
    other[:, 7:] = 100.0
    before, after = model(x, sequence(11)), model(other, sequence(11))
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_meta_device_then_materialised(make, kind):
    with torch.device("meta"):
        model = make(class_token=True)
    model = model.to_empty(device="cpu")
    for weight in model.parameters():
        nn.init.constant_(weight, torch.nan)

    def reset(module):
        if callable(own := getattr(module, "reset_parameters", None)):
            own()

    model.apply(reset)
    assert model(torch.randn(2, 24, 48), grid(4, 6)).isfinite().all()
    fresh = Transformer((4, 6), dim=48, depth=2, heads=3, class_token=True, **SLOTS[kind])
    for (name, a), b in zip(model.named_parameters(), fresh.parameters(), strict=True):
        spread = pytest.approx(b.std().item(), rel=0.5, abs=1e-6)
        assert a.std().item() == spread, name
        assert a.mean().item() == pytest.approx(b.mean().item(), abs=0.5), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_true_half_precision(make, dtype):
    model, x = make(class_token=True), torch.randn(2, 24, 48)
    expected = model(x, grid(4, 6), extent=(4, 6))
    torch.set_default_dtype(dtype)  # as Lightning's bf16-true does around a step
    try:
        out = model.to(dtype)(x.to(dtype), grid(4, 6), extent=(4, 6))
    finally:
        torch.set_default_dtype(torch.float32)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.15)


def test_autocast(make):
    model, x = make(class_token=True), torch.randn(2, 24, 48)
    expected = model(x, grid(4, 6))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x, grid(4, 6))
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.15)


def test_inference_then_training(make):
    model, x = make(class_token=True, drop_path=0.2), torch.randn(2, 24, 48)
    with torch.inference_mode():
        model(x, grid(4, 6))
    model.train()(x, grid(4, 6)).square().sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize(
    ("size", "shape"),
    [("tiny", (192, 12, 3)), ("small", (384, 12, 6)), ("base", (768, 12, 12))],
)
def test_presets(size, shape):
    with torch.device("meta"):
        model = Transformer((4, 6), size=size, rotary=mmpos.RotaryEncoding, bias=mmpos.ALiBi)
    assert isinstance(model.rotary, mmpos.RotaryEncoding)
    assert isinstance(model.bias, mmpos.ALiBi)
    assert (model.dim, len(model.layers), model.bias.heads) == shape
    assert model.rotary.head_dim == 64
    assert model.bias.axes == (4, 6)


def test_parts_are_passed_in():
    model = Transformer(
        1,
        dim=48,
        depth=3,
        heads=6,
        kv_heads=2,
        mlp=functools.partial(SwiGLU, ratio=2),
        norm=nn.RMSNorm,
        qk_norm=nn.RMSNorm,
        drop_path=0.3,
    )
    blocks = [block for block in model.layers if isinstance(block, Block)]
    assert [block.drop_path.rate for block in blocks] == [0.0, 0.15, 0.3]
    assert all(isinstance(block.mlp, SwiGLU) for block in blocks)
    assert all(isinstance(block.attention_norm, nn.RMSNorm) for block in blocks)
    assert model(torch.randn(2, 5, 48), sequence(5)).shape == (2, 5, 48)


def test_a_part_without_biases():
    model = Transformer(1, dim=8, depth=1, heads=2, mlp=lambda dim: nn.Linear(dim, dim, bias=False))
    assert model(torch.randn(2, 5, 8), sequence(5)).isfinite().all()


def test_a_slot_takes_the_encoding_itself():
    rotary = mmpos.RotaryEncoding(16, 2)
    model = Transformer((4, 6), dim=48, depth=1, heads=3, rotary=rotary)
    assert model.rotary is rotary


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": "huge"}, "size must be one of.*'base'.*got 'huge'"),
        ({"registers": -1}, "sizes of 1 or more.*registers=-1"),
        ({"depth": 0}, "sizes of 1 or more, got .*'depth': 0"),
        ({"heads": -4}, "sizes of 1 or more, got .*'heads': -4"),
        ({"kv_heads": 0}, "heads of kv_heads=0"),
        ({"depth": 1, "drop_path": 5.0}, "at least 0 and below 1, got 5.0"),
        ({"dim": 50, "heads": 3}, "dim=50 must be a multiple of heads=3"),
        ({"drop_path": 1.0, "depth": 2}, "at least 0 and below 1, got 1.0"),
        ({"rotary": mmpos.RotaryEncoding(32)}, "RotaryEncoding.*head_dim=32.*needs 16"),
        ({"bias": mmpos.ALiBi(1)}, "ALiBi.*heads=1.*needs 3"),
        ({"additive": mmpos.SinusoidalEncoding(2)}, "SinusoidalEncoding.*dim=2.*needs 48"),
    ],
)
def test_bad_arguments(unchecked, arguments, message):
    with pytest.raises(ValueError, match=message):
        Transformer(1, **{"dim": 48, "depth": 1, "heads": 3, **arguments})


@pytest.mark.parametrize("shape", [(5, 1), (6, 2), (2, 5, 1), (1,), (3, 6, 1)])
def test_positions_that_do_not_fit(unchecked, shape):
    model = Transformer(1, dim=8, depth=1, heads=2)
    with pytest.raises(
        ValueError, match=r"2 rows of 6 tokens have positions of.*expected \(6, 1\) or \(2, 6, 1\)"
    ):
        model(torch.randn(2, 6, 8), torch.zeros(shape))


def test_segments_with_prefix_tokens():
    model = Transformer(1, dim=8, depth=1, heads=2, class_token=True)
    with pytest.raises(ValueError, match="segments cannot be combined with class or register"):
        model(torch.randn(1, 4, 8), sequence(4), segments=torch.zeros(1, 4).long())


@pytest.mark.parametrize(
    ("place", "encoding", "message"),
    [
        ("additive", mmpos.ALiBi, "takes a kind of AdditiveEncoding, got ALiBi"),
        (
            "rotary",
            mmpos.SinusoidalEncoding,
            "takes a kind of RotaryEncoding, got SinusoidalEncoding",
        ),
        ("bias", mmpos.RotaryEncoding, "takes a kind of AttentionBias, got RotaryEncoding"),
    ],
)
def test_an_encoding_in_the_wrong_place(unchecked, place, encoding, message):
    with pytest.raises(TypeError, match=message):
        Transformer((2, 3), dim=48, heads=4, depth=1, **{place: encoding})
