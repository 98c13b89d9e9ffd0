"""Every encoding as plain data, and rebuilt from it."""

import json
from typing import Literal

import pytest
import torch

import mmpos
from mmpos import coordinates, frequencies
from mmpos.frequencies import YaRN
from mmpos.resample import Resampling
from mmpos.spec import Specified


def test_an_encoding_is_rebuilt_from_json(encoding_case, values):
    encoding = encoding_case.encoding
    text = json.dumps(encoding.spec())
    twin = mmpos.build(json.loads(text)).eval()
    assert type(twin) is type(encoding)
    assert twin.spec() == encoding.spec()
    twin.load_state_dict(encoding.state_dict())
    positions = encoding_case.cells(11)
    for a, b in zip(
        values(encoding_case, positions, twin), values(encoding_case, positions), strict=True
    ):
        assert torch.equal(a, b)


def test_what_is_default_is_left_out_and_paths_are_public(encoding_case):
    spec = encoding_case.encoding.spec()
    assert spec["class_path"] == f"mmpos.{type(encoding_case.encoding).__name__}"
    given = {name for name, value in encoding_case.named.items() if value is not None}
    assert given <= set(spec["init_args"]) <= {"dim", "head_dim", "heads", "axes", *given}


def test_parts_have_a_spec_too():
    rope = mmpos.RotaryEncoding(
        64,
        (8, 14),
        coordinates=coordinates.Scaled((4, 7), offset=0.5, jitter=2.0),
        extension=[None, frequencies.PositionInterpolation(factor=2.0)],
        temperature=mmpos.LogTemperature(length=64),
    )
    spec = rope.spec()
    assert spec["init_args"] == {
        "head_dim": 64,
        "axes": [8, 14],
        "coordinates": {
            "class_path": "mmpos.coordinates.Scaled",
            "init_args": {"reference": [4, 7], "offset": 0.5, "jitter": 2.0},
        },
        "extension": [
            None,
            {
                "class_path": "mmpos.frequencies.PositionInterpolation",
                "init_args": {"factor": 2.0},
            },
        ],
        "temperature": {"class_path": "mmpos.LogTemperature", "init_args": {"length": 64}},
    }
    positions = mmpos.positions.grid(8, 14)
    twin = mmpos.build(spec).eval()
    assert twin.spec() == spec
    for a, b in zip(twin(positions, (8, 14)), rope.eval()(positions, (8, 14)), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else type(a) is type(b)


def test_what_stands_for_none_is_left_out():
    table = mmpos.LearnedEncoding(8, (2, 3), resampling=Resampling())
    assert table.spec()["init_args"] == {"dim": 8, "axes": [2, 3]}
    other = mmpos.LearnedEncoding(8, (2, 3), resampling=Resampling(mode="bilinear"))
    assert mmpos.build(other.spec()).resampling == Resampling(mode="bilinear")


def test_a_resized_table_says_its_new_grid():
    table = mmpos.LearnedEncoding(8, (2, 3), prefix_rows=2)
    table.resize((4, 5))
    twin = mmpos.build(table.spec())
    twin.load_state_dict(table.state_dict())
    assert twin.grid == (4, 5)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ({}, ValueError, "a spec has class_path and init_args, got {}"),
        ({"class_path": "mmpos.ALiBi", "x": 1}, ValueError, "has class_path and init_args"),
        ([("class_path", "mmpos.ALiBi")], ValueError, "has class_path and init_args"),
        ({"class_path": "mmpos.Alibi"}, ValueError, "no class 'mmpos.Alibi', did you mean mmpos"),
        ({"class_path": "nowhere.ALiBi"}, ValueError, "no class 'nowhere.ALiBi'"),
        ({"class_path": "ALiBi"}, ValueError, "no class 'ALiBi'"),
        ({"class_path": "os.system", "init_args": {}}, TypeError, "os.system is not an encoding"),
        ({"class_path": "mmpos.models.Mlp"}, TypeError, "it has no spec"),
        (
            {"class_path": "mmpos.frequencies.YaRN", "init_args": {"beta_fas": 1}},
            ValueError,
            "mmpos.frequencies.YaRN has no argument 'beta_fas': did you mean beta_fast?",
        ),
        (
            {"class_path": "mmpos.ALiBi", "init_args": {"heads": 8, "qqq": 1}},
            ValueError,
            "no argument 'qqq': it takes heads, axes",
        ),
        ({"class_path": "mmpos.ALiBi"}, ValueError, "mmpos.ALiBi: missing a required.*'heads'"),
    ],
)
def test_refusals(spec, error, message, unchecked):
    with pytest.raises(error, match=message):
        mmpos.build(spec)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: YaRN(factor=None, original_length=8), "YaRN takes factor as a number, got None"),
        (lambda: YaRN(factor=4, original_length="8"), "original_length as a number, got '8'"),
        (lambda: mmpos.RotaryEncoding(8, base="100"), "base as a number or a list of numbers, got"),
        (lambda: mmpos.RotaryEncoding("8"), "head_dim as a whole number, got '8'"),
        (lambda: mmpos.RotaryEncoding(8, rotary_dim=4.0), "rotary_dim as a whole number or None"),
        (lambda: mmpos.RotaryEncoding(8, split=4), "split as a list of whole numbers or None"),
        (lambda: mmpos.RotaryEncoding(8, trailing="yes"), "trailing as true or false, got 'yes'"),
        (lambda: mmpos.MRoPE(16, base=(1e4, 1e4, 1e2)), "base as a number, got"),
        (lambda: mmpos.XDRoPE(16, base=(1.0, 2.0, 3.0, 4.0)), "base as a number, got"),
        (lambda: mmpos.T5Bias(2, buckets=32.0), "buckets as .*, got 32.0"),
        (lambda: mmpos.MRoPE(8, sections=4), "sections as a list of whole numbers or None, got 4"),
        (lambda: mmpos.ALiBi(8, distance=3), "distance as 'euclidean' or 'l1' or 'linf', got 3"),
        (lambda: mmpos.ALiBi(heads=True), "heads as a whole number, got True"),
        (
            lambda: mmpos.coordinates.Scaled(3),
            "reference as a list of whole numbers and None or None",
        ),
    ],
)
def test_a_value_of_another_type_is_named(make, match):
    with pytest.raises(TypeError, match=match):
        make()


@pytest.mark.usefixtures("unchecked")
def test_whole_numbers_are_numbers_and_what_a_class_makes_of_the_rest_is_its_own():
    assert YaRN(factor=4, original_length=8).factor == 4
    assert mmpos.ALiBi(2, axes=[3, 4]).axes in ((3, 4), [3, 4])
    with pytest.raises(TypeError, match="unexpected keyword argument 'bogus'"):
        mmpos.ALiBi(8, bogus=1)  # pyright: ignore[reportCallIssue]


def test_a_class_whose_annotations_cannot_be_read_is_made_as_it_is():
    class Own(mmpos.AttentionBias):
        def __init__(self, heads: "Unknown", strength: "Unknown" = "much") -> None:
            super().__init__(heads)
            self.strength = strength

        def score(self, query, key, head):
            return 0.0 * head

    assert Own(2).strength == "much"


@pytest.mark.usefixtures("unchecked")
def test_classes_of_a_users_own_are_made_as_they_are_written():
    class Renamed(mmpos.ALiBi):
        def __init__(self, *args, name: str = "x", **options) -> None:
            super().__init__(*args, **options)
            self.name = name

    class Chosen(Specified):
        def __init__(
            self,
            level: Literal[1, 2] = 1,
            word: Literal["a", None] = None,
            pair: tuple[int, str] = (1, "a"),
            items: list = [],  # noqa: B006
        ) -> None:
            self.level, self.word, self.pair, self.items = level, word, pair, items

    class Bare(Specified):
        pass

    assert Renamed(8, 2).axes == 2
    with pytest.raises(TypeError, match="takes name as str, got 3"):
        Renamed(8, name=3)
    assert Chosen(2, None, (1, "a"), [3]).spec()["init_args"] == {"level": 2, "items": [3]}
    with pytest.raises(TypeError, match="takes level as 1 or 2, got 3"):
        Chosen(3)
    assert Bare().spec()["init_args"] == {}
