"""Plans of mmpos' own encodings, and what a plan says, does, orders and refuses."""

import math

import pytest
import torch

import mmpos
from mmpos import MixedRotaryEncoding, MRoPE, RotaryEncoding, XPosEncoding
from mmpos.coordinates import Scaled
from mmpos.frequencies import DynamicNTK, LongRoPE, NTKAware, Proportional, YaRN
from mmpos.interop.transformers.plan import ChannelPlan
from mmpos.positions import absent, grid, join, sequence
from mmpos.rotary.temperature import LogTemperature

YARN = YaRN(factor=8.0, original_length=64)
LONG = LongRoPE(
    short_factor=(1.0,) * 8, long_factor=(1.0, 1.5, 2.0, 2.0, 3.0, 5.0, 8.0, 8.0),
    original_length=64, max_length=512,
)  # fmt: skip
ENCODINGS = {
    "plain": RotaryEncoding(16),
    "half": RotaryEncoding(16, 2, layout="half"),
    "split": RotaryEncoding(16, 3, split=(1, 5, 2), order=(2, 0, 1)),
    "partial": RotaryEncoding(18, 2, rotary_dim=12, base=(100, 5e5), layout="half"),
    "trailing": RotaryEncoding(18, rotary_dim=12, trailing=True, layout="half"),
    "fast": RotaryEncoding(16, base=1e-2),
    "slow": RotaryEncoding(16, base=1e9),
    "yarn": RotaryEncoding(16, 3, extension=[YARN, None, YaRN(factor=2.0, original_length=9)]),
    "ntk": RotaryEncoding(16, extension=NTKAware(factor=3.0), layout="half"),
    "dynamic": RotaryEncoding(16, extension=DynamicNTK(factor=2.0, original_length=64)),
    "longrope": RotaryEncoding(16, extension=LONG),
    "proportional": RotaryEncoding(16, 2, extension=Proportional(fraction=0.5), layout="half"),
    "mrope": MRoPE(16, sections=(4, 2, 2), layout="half"),
    "chunked": MRoPE(20, rotary_dim=16, sections=(2, 3, 3), interleaved=False),
    "vjepa2": mmpos.VJEPA2Encoding(16),
    "xdrope": mmpos.XDRoPE(16, sections=(1, 3, 2, 2)),
}
NO_ROTATION = {"vjepa2", "xdrope"}


def close(actual, expected, tolerance=2e-6):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def places(axes):
    """Positions far out, one token without a place, one that lacks its first coordinate."""
    numbers = torch.randint(0, 3000, (2, 7, axes)).double()
    numbers[0, 2] = math.nan
    numbers[1, 3, 0] = math.nan
    return numbers


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_plan_does_what_its_encoding_does(name):
    encoding = ENCODINGS[name]
    length = 300 if encoding.needs_length else None
    plan = ChannelPlan.of(encoding, length)
    positions = places(len(encoding.pairs))
    x = torch.randn(2, 3, 7, encoding.head_dim)
    expected = mmpos.rotate(x, encoding(positions, length=length))
    for _ in range(2):
        close(plan(x, positions), expected)
    close(plan(x[:, :, :, :], positions[1]), mmpos.rotate(x, encoding(positions[1], length=length)))
    assert plan.is_rotation == (name not in NO_ROTATION)
    assert plan(x.bfloat16(), positions).dtype == torch.bfloat16
    close(plan(x.bfloat16(), positions).float(), plan(x.bfloat16().float(), positions), 0.02)
    close(plan(x.double(), positions).float(), plan(x, positions), 1e-6)
    assert torch.equal(plan(x, positions)[0, :, 2], x[0, :, 2])
    assert plan == ChannelPlan.of(encoding, length) and hash(plan) == hash(
        ChannelPlan.of(encoding, length)
    )


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("name", sorted(ENCODINGS.keys() - NO_ROTATION))
def test_reordered_features_are_those_of_an_encoding_with_the_layout(name, layout):
    encoding = ENCODINGS[name]
    length = 300 if encoding.needs_length else None
    plan = ChannelPlan.of(encoding, length)
    own = plan.order(encoding.layout, by="pair")
    assert own == tuple(range(encoding.head_dim))
    order = plan.order(layout, by="pair")
    moved = plan.reorder(order)
    other = mmpos.build(encoding.spec())
    other.layout = layout
    assert moved.differences(ChannelPlan.of(other, length)) == []
    positions, x = places(len(encoding.pairs)), torch.randn(2, 3, 7, encoding.head_dim)
    close(moved(x[..., list(order)], positions), plan(x, positions)[..., list(order)])
    if name == "split":
        by_axis = plan.reorder(plan.order(layout))
        axial = RotaryEncoding(16, 3, split=(1, 5, 2), layout=layout)
        assert by_axis.differences(ChannelPlan.of(axial)) == []


def test_pairs_at_rest_stay_with_their_axis():
    plan = ChannelPlan.of(ENCODINGS["proportional"])
    assert plan.turned == (0, 1, 4, 5, 8, 9, 12, 13)
    assert plan.axis == 2 * (0, 0, 0, 0, 1, 1, 1, 1)
    assert plan.order("half") == tuple(range(16))


def test_frequencies_are_exact_to_thirteen_digits():
    for base in (1e-2, 100.0, 1e9):
        plan = ChannelPlan.of(RotaryEncoding(16, base=base))
        expected = [base ** -(p / 8) for p in range(8) for _ in range(2)]
        assert all(abs(a - b) < 2e-13 for a, b in zip(plan.frequency, expected, strict=True))
        assert plan.magnitude == (1.0,) * 16


def test_the_formula_in_float64():
    plan = ChannelPlan(
        partner=(2, 1, 0, 4, 3),
        sign=(1, 0, -1, -1, 1),
        axis=(1, None, 1, 0, 0),
        frequency=(0.7, 0.0, 0.7, 1.0, 1.0),
        magnitude=(1.5, 1.0, 1.5, 1.0, 1.0),
        axes=2,
    )
    positions = join(grid(2, 3) + torch.tensor([300, 411]), absent(1, 2))
    x = torch.randn(1, 2, 7, 5)
    expected = x.double().clone()
    for token in range(6):
        at = positions[token].double().tolist()
        for c, (partner, sign, axis) in enumerate(
            zip(plan.partner, plan.sign, plan.axis, strict=True)
        ):
            if axis is None:
                continue
            angle = at[axis] * plan.frequency[c]
            a, b = x[:, :, token, c].double(), x[:, :, token, partner].double()
            turned = a * math.cos(angle) + sign * b * math.sin(angle)
            expected[:, :, token, c] = plan.magnitude[c] * turned
    close(plan(x, positions), expected.float())
    assert plan.is_rotation  # that turns one pair backwards
    assert plan.order("half") == (3, 2, 4, 0, 1)
    assert plan.order("interleaved") == (3, 4, 2, 0, 1)


def test_coordinates_are_read_as_the_encoding_reads_them():
    encoding = RotaryEncoding(16, (4, 6), coordinates=Scaled())
    plan, x = ChannelPlan.of(encoding), torch.randn(1, 3, 40, 16)
    close(plan(x, grid(5, 8), (5, 8)), mmpos.rotate(x, encoding(grid(5, 8), (5, 8))))
    assert isinstance(encoding.coordinates, Scaled)
    assert plan.differences(ChannelPlan.of(RotaryEncoding(16, 2))) == [
        "coordinates: Scaled() and Index()"
    ]


SOUND = {"partner": (1, 0), "sign": (-1, 1), "axis": (0, 0), "frequency": (1.0, 1.0)}
WRONG = [
    ({"frequency": (1.0, 0.32)}, "turn by different frequencies (1 and 0.32)"),
    ({"frequency": (1.0, 1.0 + 1e-9)}, "turn by different frequencies (1 and 1.000000001)"),
    ({"frequency": (1.0, 0.0)}, "turn by different frequencies (1 and 0)"),
    ({"axis": (0, 1)}, "read different axes (h and w)"),
    ({"sign": (1, 1)}, "have the signs 1 and 1"),
    ({"magnitude": (1.0, 2.0)}, "have different magnitudes (1 and 2)"),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_faults(change, said):
    plan = ChannelPlan(**{**SOUND, **change}, axes=2)
    assert plan.faults == (f"features 0 and 1 are a pair, and {said}",)
    assert not plan.is_rotation and "no rotation: features 0 and 1" in str(plan)
    assert ChannelPlan(**SOUND, axes=2).faults == ()
    with pytest.raises(ValueError, match="no layout makes it a rotation"):
        plan.order("half")


def test_faults_of_features_without_a_pair():
    alone = ChannelPlan((0,), (-1,), (0,), (1.0,))
    assert alone.faults == ("feature 0 turns by frequency 1 without a pair",)
    chain = ChannelPlan((1, 2, 1), (-1, -1, 1), (0,) * 3, (1.0,) * 3)
    assert chain.faults == ("feature 0 turns with 1, which turns with 2",)


def test_a_plan_in_words():
    said = str(ChannelPlan.of(ENCODINGS["mrope"]))
    assert said == (
        "16 features: t 0, 3, 6–8, … 14–15 (8); h 1, 4, 9, 12; w 2, 5, 10, 13; pairs (c, c + 8); "
        "frequencies 1 to 0.0003162; a rotation"
    )
    assert "a rotation times 1.208" in str(ChannelPlan.of(RotaryEncoding(16, extension=YARN)))
    assert str(ChannelPlan.of(RotaryEncoding(6, rotary_dim=2, trailing=True))) == (
        "6 features: position 4–5; passing 0–3; pairs (c, c + 1); frequencies 1 to 1; a rotation"
    )
    assert str(ChannelPlan.of(ENCODINGS["xdrope"])).endswith(
        "no rotation: features 0 and 8 are a pair, and read different axes (axis 0 and axis 2), "
        "and 7 more"
    )


def test_differences_in_words():
    plain, half = (ChannelPlan.of(RotaryEncoding(8, layout=x)) for x in ("interleaved", "half"))
    assert plain.differences(plain) == []
    lines = plain.differences(half)
    assert lines[0].startswith("partners of features 0–7: feature 0 with 1 and with 4")
    assert lines[1].startswith("signs of features 1, 3–4, 6: feature 1 has 1 and has -1")
    assert lines[2].startswith("frequency of features 1–6: the largest ratio is 100, at feature ")
    assert plain.differences(ChannelPlan.of(RotaryEncoding(16))) == ["features of a head: 8 and 16"]
    two = ChannelPlan.of(RotaryEncoding(8, 2, rotary_dim=4))
    assert plain.differences(two)[:2] == [
        "axes: 1 and 2",
        "turned features: 0–7 and 0–3",
    ]
    swapped, straight = (
        ChannelPlan.of(RotaryEncoding(8, 2, order=order)) for order in ((1, 0), None)
    )
    assert straight.differences(swapped) == ["axes of features 0–7: feature 0 reads h and reads w"]
    slower = ChannelPlan.of(RotaryEncoding(8, base=10000 * (1 + 1e-7)))
    assert plain.differences(slower) == [] and plain != slower
    assert len(plain.differences(slower, 1e-9)) == 1
    grown = ChannelPlan.of(RotaryEncoding(8, extension=YaRN(factor=8.0, original_length=10**9)))
    assert plain.differences(grown)[0].startswith("magnitude of features 0–7: the largest ratio")


@pytest.mark.usefixtures("unchecked")
def test_refusals():
    with pytest.raises(TypeError, match="a plan is of a RotaryEncoding, got ALiBi"):
        ChannelPlan.of(mmpos.ALiBi(4))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="MixedRotaryEncoding has directions"):
        ChannelPlan.of(MixedRotaryEncoding(16))
    with pytest.raises(ValueError, match="whose heads are all turned alike"):
        ChannelPlan.of(MixedRotaryEncoding(16, heads=3))
    with pytest.raises(ValueError, match="XPosEncoding turns keys otherwise than queries"):
        ChannelPlan.of(XPosEncoding(16))
    with pytest.raises(ValueError, match="a temperature grows queries, not keys"):
        ChannelPlan.of(RotaryEncoding(16, temperature=LogTemperature(length=8192)))
    with pytest.raises(ValueError, match="DynamicNTK depends on the length"):
        ChannelPlan.of(ENCODINGS["dynamic"])
    with pytest.raises(ValueError, match="a plan is for one sequence"):
        ChannelPlan.of(ENCODINGS["dynamic"], torch.tensor([100, 200]))
    plan = ChannelPlan.of(RotaryEncoding(8))
    with pytest.raises(ValueError, match=r"layout must be one of .* got 'neox'"):
        plan.order("neox")
    with pytest.raises(ValueError, match="by must be axis or pair, got 'head'"):
        plan.order("half", by="head")
    with pytest.raises(ValueError, match="an order names each of 8 features once"):
        plan.reorder([0, 0, 1, 2, 3, 4, 5, 6])
    with pytest.raises(ValueError, match=r"expected \[..., head, length, 8\]"):
        plan(torch.randn(2, 3, 5, 6), sequence(5))
    with pytest.raises(TypeError, match="which is not exact"):
        plan(torch.randn(2, 3, 5, 8), sequence(5).half())
    with pytest.raises(ValueError, match="sign has 1 entries, partner has 2"):
        ChannelPlan(**{**SOUND, "sign": (1,)})
    with pytest.raises(ValueError, match="feature 1 has partner 2 and sign 1"):
        ChannelPlan(**{**SOUND, "partner": (1, 2)})
    with pytest.raises(ValueError, match="feature 0 reads axis 1, there are 1 axes"):
        ChannelPlan(**{**SOUND, "axis": (1, 1)})
    with pytest.raises(ValueError, match=r"feature 0 turns by 1\.0 and reads no axis"):
        ChannelPlan(**{**SOUND, "axis": (None, None)})
    with pytest.raises(ValueError, match="are no 2 pairs of 4 features"):
        ChannelPlan.of_pairs(4, [(0, 1), (1, 2)], [0, 0], [1.0, 1.0])
    with pytest.raises(ValueError, match="positions are of 4 tokens, x has 5"):
        plan(torch.randn(2, 3, 5, 8), sequence(4))
