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

LISTS = {"short_factor": [1.0, 1.0], "long_factor": [1.0, 8.0]}
NEEDED = {
    PositionInterpolation: {},
    NTKAware: {},
    DynamicNTK: {"original_length": 64},
    YaRN: {"original_length": 64},
    LongRoPE: {"original_length": 64, **LISTS},
    Llama3: {"original_length": 64},
    Proportional: {"fraction": 0.5},
}


@pytest.mark.parametrize("cls", NEEDED)
def test_factors_that_extend_nothing(cls):
    for factor in (-2.0, 0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"factor must be above 0 and finite, got {factor}"):
            cls(factor=factor, **NEEDED[cls])
    with pytest.raises(ValueError, match=rf"{cls.__name__} only extends.*got 0.25.*mean 4\?"):
        cls(factor=0.25, **NEEDED[cls])


@pytest.mark.parametrize("cls", [DynamicNTK, YaRN, LongRoPE, Llama3])
@pytest.mark.parametrize("length", [0, -64.0])
def test_lengths_in_training_that_are_none(cls, length):
    arguments = {**NEEDED[cls], "original_length": length}
    with pytest.raises(
        ValueError, match=f"original_length must be above 0 and finite, got {length}"
    ):
        cls(factor=2, **arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: YaRN(factor=2, original_length=9, beta_fast=0.5), "beta_slow <= beta_fast.*0.5"),
        (lambda: YaRN(factor=2, original_length=9, beta_slow=0), "0 < beta_slow.*beta_slow=0"),
        (lambda: YaRN(factor=2, original_length=9, attention_factor=0), "attention_factor must be"),
        (lambda: YaRN(factor=2, original_length=9, mscale=1), "two numbers.*both None.*1 and None"),
        (
            lambda: YaRN(factor=2, original_length=9, mscale=1, mscale_all_dim=-1),
            "two numbers of 0 or more.*got 1 and -1",
        ),
        (
            lambda: Llama3(factor=2, original_length=9, low_frequency_factor=5),
            "low_frequency_factor <= high_frequency_factor, got 5 and 4.0",
        ),
        (lambda: Proportional(fraction=0), "fraction must be above 0, and 1 at most, got 0"),
        (lambda: Proportional(fraction=1.5), "fraction must be above 0, and 1 at most, got 1.5"),
        (lambda: LongRoPE(original_length=9, **LISTS), "pass factor, max_length or attention"),
        (
            lambda: LongRoPE(original_length=9, factor=2, max_length=18, **LISTS),
            "factor=2 and max_length=18 say the same: pass one",
        ),
        (
            lambda: LongRoPE(original_length=9, max_length=8, **LISTS),
            "max_length=8 must be original_length=9 or more",
        ),
        (lambda: LongRoPE(original_length=1, factor=2, **LISTS), "must be above 1, got 1"),
        (
            lambda: LongRoPE(original_length=9, attention_factor=-1.0, **LISTS),
            "attention_factor must be above 0, got -1.0",
        ),
        (
            lambda: LongRoPE(short_factor=[1, 0], long_factor=[1], original_length=9, factor=2),
            r"short_factor must be above 0 for each pair, got \(1, 0\)",
        ),
    ],
)  # fmt: skip
def test_arguments_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"head_dim": 8, "extension": LongRoPE(factor=2, **NEEDED[LongRoPE])},
            "short_factor has 2 numbers, the axis has 4 pairs: pass one for each",
        ),
        (
            {"head_dim": 4, "extension": LongRoPE(
                short_factor=[1, 1], long_factor=[1], original_length=9, factor=2
            )},
            "long_factor has 1 numbers, the axis has 2 pairs",
        ),
        (
            {"head_dim": 8, "axes": 3, "extension": NTKAware(factor=2)},
            "NTKAware.*needs 2 pairs or more, it has 1; PositionInterpolation works",
        ),
        (
            {"head_dim": 2, "extension": DynamicNTK(factor=2, original_length=9)},
            "DynamicNTK.*needs 2 pairs or more, it has 1",
        ),
        (
            {"head_dim": 8, "base": 1, "extension": YaRN(factor=2, original_length=9)},
            "YaRN needs a base above 1, got 1",
        ),
        (
            {"head_dim": 8, "extension": YaRN(factor=2, original_length=6)},
            r"no pair turns beta_slow=1.0 times in .*=6.*is PositionInterpolation\(factor=2\)",
        ),
        (
            {"head_dim": 8, "extension": Proportional(fraction=0.2)},
            "fraction=0.2 of 4 pairs turns none: it must be 0.25 or more",
        ),
        (
            {"head_dim": 8, "axes": 2, "extension": [NTKAware(factor=2)] * 3},
            "extension has 3 entries, the encoding has 2 axes",
        ),
    ],
)  # fmt: skip
def test_extensions_that_do_not_fit_the_encoding(arguments, message):
    with pytest.raises(ValueError, match=message):
        RotaryEncoding(**arguments)


@pytest.mark.parametrize("given", ["yarn", YaRN, {"rope_type": "yarn"}, [None, 4.0]])
def test_what_is_no_extension(unchecked, given):
    with pytest.raises(TypeError, match=r"extension must be an instance such as YaRN\(…\), got"):
        RotaryEncoding(16, 2, extension=given)


def test_unknown_names():
    for name, message in (("Yarn", "no class 'mmpos.frequencies.Yarn'"), ("geometric", "no spec")):
        with pytest.raises((ValueError, TypeError), match=message):
            mmpos.build({"class_path": f"mmpos.frequencies.{name}"})
    with pytest.raises(ValueError, match="'beta_fats': did you mean beta_fast"):
        mmpos.build(
            {
                "class_path": "mmpos.frequencies.YaRN",
                "init_args": {"factor": 2, "original_length": 64, "beta_fats": 1},
            }
        )


@pytest.mark.parametrize("cls", [DynamicNTK, LongRoPE])
def test_a_missing_length(cls):
    encoding = RotaryEncoding(4, extension=cls(factor=2, **NEEDED[cls]))
    assert encoding.needs_length
    with pytest.raises(ValueError, match=f"{cls.__name__} depends on the length.*pass length"):
        encoding(torch.tensor([[3]]))


def test_lengths_that_do_not_fit(unchecked):
    encoding = RotaryEncoding(16, 2, extension=DynamicNTK(factor=2, original_length=9))
    positions = torch.zeros(5, 7, 2)
    for length in ((7,), [7, 7, 7]):
        with pytest.raises(
            ValueError, match=rf"length has {len(length)} numbers.*2 axes.*a tensor"
        ):
            encoding(positions, length=length)
    for length in (0, -3, (7, 0)):
        with pytest.raises(ValueError, match="length must be 1 token or more, got"):
            encoding(positions, length=length)
    with pytest.raises(
        ValueError, match=r"length is for sequences \(3,\).*positions are for \(5,\)"
    ):
        encoding(positions, length=torch.tensor([7, 7, 7]))
