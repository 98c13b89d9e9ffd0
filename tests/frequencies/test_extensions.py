"""Context extensions against their formulas in plain Python, and against numbers of elsewhere."""

import math

import pytest
import torch

import mmpos
from mmpos import RotaryEncoding
from mmpos.frequencies import (
    DynamicNTK,
    Llama3,
    LongRoPE,
    NTKAware,
    PositionInterpolation,
    Proportional,
    YaRN,
)
from mmpos.positions import absent, grid, join
from mmpos.rotary import MixedRotaryEncoding, MRoPE, XDRoPE, XPosEncoding


def spectrum(pairs, base=10000.0):
    return [base ** (-2 * i / (2 * pairs)) for i in range(pairs)]


def extended(extension, pairs=64, base=10000.0, length=None):
    encoding = RotaryEncoding(2 * pairs, base=base, extension=extension)
    return encoding.frequencies(torch.float64, torch.device("cpu"), length)[0, 0].tolist()


def paper_yarn(pairs, base, factor, original):
    """The ramp of the paper, linear in the number of turns (sec. 3.2, eq. 18)."""
    out = []
    for f in spectrum(pairs, base):
        kept = min(max((original * f / (2 * math.pi) - 1) / (32 - 1), 0), 1)
        out.append((1 - kept) * f / factor + kept * f)
    return out


def code_yarn(pairs, base, factor, original, truncate=True, fast=32, slow=1):
    """The ramp of the code: linear in the index of the pair."""
    width = 2 * pairs
    low, high = (
        width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (fast, slow)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0
    out = []
    for i, f in enumerate(spectrum(pairs, base)):
        ramp = min(max((i - low) / (high - low), 0), 1)
        out.append(f / factor * ramp + f * (1 - ramp))
    return out


def test_position_interpolation_divides_each_position_once():
    plain = RotaryEncoding(64)(torch.tensor([[2.0], [75.25]]))
    longer = RotaryEncoding(64, extension=PositionInterpolation(factor=4))
    rotation = longer(torch.tensor([[8.0], [301.0]]))
    torch.testing.assert_close(rotation[:2], plain[:2], rtol=0, atol=1e-7)
    assert extended(PositionInterpolation(factor=8)) == pytest.approx([f / 8 for f in spectrum(64)])


@pytest.mark.parametrize(
    ("pairs", "factor", "base"), [(64, 8, 82684.62264056221), (64, 4, 40889.94), (2, 3, None)]
)
def test_ntk_is_another_base(pairs, factor, base):
    base = base or 10000 * factor ** (2 * pairs / (2 * pairs - 2))
    given = extended(NTKAware(factor=factor), pairs)
    assert given == pytest.approx(spectrum(pairs, base), rel=1e-6)
    assert given[0] == 1.0
    assert given[-1] == pytest.approx(spectrum(pairs)[-1] / factor, rel=1e-12)


@pytest.mark.parametrize(
    ("factor", "length", "base"),
    [
        (2, 1, 10000.0),
        (2, 2048, 10000.0),
        (2, 4096, 30527.7367488067),
        (2, 8192, 72195.86),
        (1, 4096, 20221.261689737912),
    ],
)
def test_dynamic_ntk_is_a_base_that_grows_from_the_trained_length_on(factor, length, base):
    extension = DynamicNTK(factor=factor, original_length=2048)
    assert extended(extension, length=length) == pytest.approx(spectrum(64, base), rel=1e-7)


YARN = [
    # pairs, base, factor, original, truncate; low, high, factor of cos, f[20], last f, from paper's
    (64, 1e4, 16, 4096, True, 20, 46, 1.2772588722, 5.623413251903491e-2, 7.217387404309114e-6,
     0.6712056601947188),
    (64, 1e4, 32, 4096, True, 20, 46, 1.3465735903, 5.623413251903491e-2, 3.608693702154557e-6,
     0.747176425835875),
    (32, 1.5e5, 32, 4096, False, 8.092779115512402, 17.39802450158856, 1.3465735903,
     1.818833668168956e-5, 3.0235114281192144e-7, 0.7282432667940727),
    (32, 1e4, 40, 4096, True, 10, 23, 1.3688879454, 7.905694150420946e-4, 3.3338035804083097e-6,
     0.7664583981155104),
    (64, 1e6, 4, 32768, True, 23, 40, 1.1386294361, 1.333521432163324e-2, 3.102344401879299e-7,
     0.4162276570125911),
]  # fmt: skip


@pytest.mark.parametrize("row", YARN, ids=lambda row: "-".join(map(str, row[:5])))
def test_yarn(row):
    pairs, base, factor, original, truncate, low, high, magnitude, f20, last, far = row
    extension = YaRN(factor=factor, original_length=original, truncate=truncate)
    assert extension.ramp(pairs, base) == pytest.approx((low, high), rel=1e-14)
    assert extension.magnitude == pytest.approx(magnitude, abs=1e-10)
    given = extended(extension, pairs, base)
    assert given == pytest.approx(code_yarn(pairs, base, factor, original, truncate), rel=1e-12)
    assert given[20] == pytest.approx(f20, rel=1e-12)
    assert given[-1] == pytest.approx(last, rel=1e-12)
    paper = paper_yarn(pairs, base, factor, original)
    apart = max(abs(a - b) / a for a, b in zip(given, paper, strict=True))
    assert apart == pytest.approx(far, rel=1e-9)


@pytest.mark.parametrize(
    ("pairs", "base", "original", "ends", "rounded"),
    [
        (32, 1.5e5, 4096, (8.0928, 17.3980), (8, 18)),
        (32, 1e4, 131072, (22.513, 34.555), (22, 35)),
        (8, 100.0, 4096, (5.2366, 11.2569), (5, 12)),
        (8, 10.0, 10**9, (53.6, 65.6), (53, 15)),
        (8, 100.0, 14, (-4.63, 1.392), (0, 2)),
    ],
)
def test_ends_of_the_ramp(pairs, base, original, ends, rounded):
    exact = YaRN(factor=2, original_length=original, truncate=False).ramp(pairs, base)
    clamped = (max(ends[0], 0), min(ends[1], 2 * pairs - 1))
    assert exact == pytest.approx(clamped, abs=0.06 if original == 10**9 else 6e-4)
    assert YaRN(factor=2, original_length=original).ramp(pairs, base) == rounded


def test_pairs_that_all_turn_often_are_not_interpolated_at_all():
    extension = YaRN(factor=2, original_length=10**9)
    assert extended(extension, 8, 10.0) == pytest.approx(spectrum(8, 10.0), rel=1e-15)


@pytest.mark.parametrize(
    ("factor", "magnitude"),
    [(1, 1), (2, 1.0693), (4, 1.1386), (8, 1.2079), (16, 1.2773), (32, 1.3466), (64, 1.4159),
     (128, 1.4852)],
)  # fmt: skip
def test_yarn_sharpens_scores(factor, magnitude):
    extension = YaRN(factor=factor, original_length=4096)
    assert extension.magnitude == pytest.approx(magnitude, abs=6e-5)


@pytest.mark.parametrize(
    ("arguments", "magnitude"),
    [
        ({"factor": 64, "attention_factor": 1.0}, 1.0),
        ({"factor": 64, "attention_factor": 0.7, "mscale": 1.0, "mscale_all_dim": 0.5}, 0.7),
        ({"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        (
            {"factor": 16, "mscale": 1.0, "mscale_all_dim": 0.5},
            (0.1 * math.log(16) + 1) / (0.05 * math.log(16) + 1),
        ),
        ({"factor": 16, "mscale": 2, "mscale_all_dim": 0}, 0.2 * math.log(16) + 1),
    ],
)
def test_a_given_attention_factor_precedes_the_mscales(arguments, magnitude):
    extension = YaRN(original_length=4096, **arguments)
    assert extension.magnitude == pytest.approx(magnitude, rel=1e-14)


@pytest.mark.parametrize(
    ("extent", "expected"),
    [
        ({"factor": 32}, 1.1902380714238083),
        ({"max_length": 131072}, 1.1902380714238083),
        ({"factor": 1}, 1.0),
        ({"factor": 32, "attention_factor": 1.25}, 1.25),
        ({"attention_factor": 1.25}, 1.25),
    ],
)
def test_longrope(extent, expected):
    short, long = [1 + i / 100 for i in range(4)], [1 + 3.5 * i for i in range(4)]
    extension = LongRoPE(short_factor=short, long_factor=long, original_length=4096, **extent)
    assert extension.magnitude == pytest.approx(expected, rel=1e-14)
    for length, factors in ((1, short), (4096, short), (4097, long), (10**6, long)):
        wanted = [f / factor for f, factor in zip(spectrum(4), factors, strict=True)]
        assert extended(extension, 4, length=length) == pytest.approx(wanted, rel=1e-14)


def test_longrope_of_another_length():
    extension = LongRoPE(
        short_factor=[1.0], long_factor=[2.0], original_length=8192, max_length=65536
    )
    assert extension.magnitude == pytest.approx(1.1094003924504583, rel=1e-14)


def test_llama3():
    golden = {
        0: 1.0, 20: 0.016560440080994446, 28: 0.003211445994752591, 30: 0.0013718935677611381,
        32: 0.0005248461609929547, 34: 0.0001785078127679964, 36: 7.78465527393245e-05,
        40: 3.428102195952591e-05, 63: 3.068925988914511e-07,
    }  # fmt: skip
    given = extended(Llama3(factor=8, original_length=8192), 64, 5e5)
    for pair, frequency in golden.items():
        assert given[pair] == pytest.approx(frequency, rel=1e-12)


@pytest.mark.parametrize(
    ("pairs", "factor", "kept", "blended"), [(64, 8, 29, 35), (32, 32, 15, 18), (64, 32, 29, 35)]
)
def test_bands_of_llama3(pairs, factor, kept, blended):
    given = extended(Llama3(factor=factor, original_length=8192), pairs, 5e5)
    ratio = [a / b for a, b in zip(spectrum(pairs, 5e5), given, strict=True)]
    assert ratio[:kept] == pytest.approx([1] * kept, rel=1e-14)
    assert all(1 < r < factor for r in ratio[kept:blended])
    assert ratio[blended:] == pytest.approx([factor] * (pairs - blended), rel=1e-12)


@pytest.mark.parametrize(
    ("fraction", "pairs", "turning"), [(0.25, 256, 64), (0.3, 16, 4), (1.0, 5, 5), (0.99, 5, 4)]
)
def test_proportional_keeps_the_exponent_of_all_pairs(fraction, pairs, turning):
    given = extended(Proportional(fraction=fraction, factor=2), pairs)
    assert given[:turning] == pytest.approx([f / 2 for f in spectrum(pairs)[:turning]], rel=1e-15)
    assert given[turning:] == [0.0] * (pairs - turning)


def test_two_ways_to_turn_a_part_have_other_frequencies():
    partial = RotaryEncoding(128, rotary_dim=32).frequencies(torch.float64, torch.device("cpu"))
    assert partial[0, 0, 1].item() == pytest.approx(0.56234, abs=5e-6)
    assert extended(Proportional(fraction=0.25))[1] == pytest.approx(0.86596, abs=5e-6)


def test_magnitudes_multiply_cos_and_sin_of_their_own_axis():
    positions = torch.tensor([[301.5, -7.0]])
    plain = RotaryEncoding(16, 2)
    sharper = RotaryEncoding(
        16, 2, extension=[None, YaRN(factor=1, original_length=99, attention_factor=1.5)]
    )
    for a, b in zip(sharper(positions)[:2], plain(positions)[:2], strict=True):
        assert torch.equal(a[..., :4], b[..., :4])
        torch.testing.assert_close(a[..., 4:], 1.5 * b[..., 4:])


@pytest.mark.parametrize("cls", [RotaryEncoding, MRoPE, MixedRotaryEncoding, XPosEncoding, XDRoPE])
def test_magnitudes_leave_alone_what_has_no_place(cls):
    encoding = cls(24, 3, extension=YaRN(factor=8, original_length=99))
    positions = join(absent(2, 3), torch.tensor([[math.nan, 301.5, -7.0]]), grid(2, 3, 4))
    x = torch.randn(2, 3, 27, 24)
    rotation = encoding(positions)
    for one in (rotation, rotation.dual):
        out = mmpos.rotate(x, one)
        assert torch.equal(out[:, :, :2], x[:, :, :2])
        assert (out[:, :, 2:].norm(dim=-1) > 1.05 * x[:, :, 2:].norm(dim=-1)).any()
        if cls is not MixedRotaryEncoding:
            still = [pair for pair, axis in enumerate(encoding.pair_axes[:12]) if axis == 0]
            assert (one.cos[0, 2, still] == 1).all()


@pytest.mark.parametrize(
    "extension",
    [
        PositionInterpolation(factor=2),
        NTKAware(factor=2),
        DynamicNTK(factor=2, original_length=8),
        YaRN(factor=2, original_length=16),
        LongRoPE(short_factor=[1, 2], long_factor=[3, 4], original_length=8, factor=2),
        Llama3(factor=2, original_length=16),
        Proportional(fraction=0.5),
    ],
    ids=lambda extension: type(extension).__name__,
)
def test_every_extension_works_on_any_axis_alone(extension):
    for axis in range(3):
        own = [extension if other == axis else None for other in range(3)]
        encoding = RotaryEncoding(12, 3, base=50.0, extension=own)
        plain = RotaryEncoding(12, 3, base=50.0)
        table, before = (
            e.frequencies(torch.float64, torch.device("cpu"), (9, 10, 11))[0]
            for e in (encoding, plain)
        )
        alone = extended(extension, 2, 50.0, length=9 + axis)
        assert table[axis, 2 * axis : 2 * axis + 2].tolist() == pytest.approx(alone, rel=1e-15)
        table[axis] = before[axis]
        assert torch.equal(table, before)
        assert mmpos.build(encoding.spec()).extension == tuple(own)
        assert hash(extension) == hash(mmpos.build(extension.spec()))
