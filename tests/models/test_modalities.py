"""Several modalities in one sequence: where their tokens are, and what is missing is missing."""

from math import nan
from typing import Any

import pytest
import torch
from torch import nn

import mmpos
from mmpos.models import (
    Classifier,
    FrameEmbedding,
    Modalities,
    PatchEmbedding,
    Symbols,
    Transformer,
    TubeletEmbedding,
)
from mmpos.positions import Audio, Counting, Image, Text, Video, of_rows

LAYOUTS = ("missing", "mrope", "sequence")
NAMES = ("text", "image", "video", "audio")
DIM, BINS = 48, 3


def tokenisers(dim: int = DIM) -> dict[str, nn.Module]:
    return {
        "text": Symbols(dim, 11),
        "image": PatchEmbedding(dim, (2, 2), 1),
        "video": TubeletEmbedding(dim, (2, 2, 2), 1),
        "audio": FrameEmbedding(dim, BINS, kernels=(3,), strides=(2,)),
    }


def of(layout, dim: int = DIM, **named) -> Modalities:
    torch.manual_seed(0)
    return Modalities(tokenisers(dim), layout, **named).double()


Row = dict[str, tuple[int, ...]]
"""The size of what a row has of each modality: of text and sound, their length."""


def row_of(sizes: Row, seed: int) -> dict[str, torch.Tensor]:
    """A row's own inputs, without a batch."""
    draw = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    made = {
        "text": lambda n: torch.randint(11, (n,), generator=draw),
        "image": lambda h, w: noise(1, h, w),
        "video": lambda t, h, w: noise(1, t, h, w),
        "audio": lambda n: noise(BINS, n),
    }
    return {name: made[name](*sizes[name]) for name in NAMES if name in sizes}


def batch_of(rows: list[Row], fill: float = nan) -> tuple[dict, dict]:
    """Inputs and masks of rows of any sizes, garbage where there is nothing."""
    found = [row_of(sizes, seed) for seed, sizes in enumerate(rows)]
    inputs: dict[str, Any] = {}
    masks: dict[str, Any] = {}
    for name in NAMES:
        parts = [row.get(name) for row in found]
        some = [part for part in parts if part is not None]
        if not some:
            continue
        size = [max(sizes) for sizes in zip(*(part.shape for part in some), strict=True)]
        garbage = 7 if name == "text" else fill
        inputs[name] = torch.full((len(rows), *size), garbage, dtype=some[0].dtype)
        axes = {"text": [0], "image": [1, 2], "video": [1], "audio": [1]}[name]
        masks[name] = torch.zeros(len(rows), *(size[axis] for axis in axes), dtype=torch.bool)
        for row, part in enumerate(parts):
            if part is not None:
                inputs[name][(row, *map(slice, part.shape))] = part
                masks[name][(row, *(slice(part.shape[axis]) for axis in axes))] = True
    return inputs, masks


def drawn(count: int, seed: int) -> list[Row]:
    """Rows that lack any of the four, none all; clips of one height and width, and images whole."""
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    rows = []
    while len(rows) < count:
        row = {
            "text": (number(1, 6),),
            "image": (2 * number(1, 3), 2 * number(1, 4)),
            "video": (number(1, 7), 4, 6),
            "audio": (number(1, 9),),
        }
        row = {name: size for name, size in row.items() if number(0, 2)}
        rows += [row] if row else []
    return rows


def parts_of(row: Row) -> list:
    made = {
        "text": lambda n: Text(n),
        "image": lambda h, w: Image(h // 2, w // 2),
        "video": lambda t, h, w: Video(-(-t // 2), h // 2, w // 2),
        "audio": lambda n: Audio(-(-n // 2)),
    }
    return [made[name](*row[name]) for name in NAMES if name in row]


@pytest.mark.parametrize("seed", range(12))
def test_mrope_counts_as_the_parts_of_rows_do(seed: int) -> None:
    rows = drawn(5, seed)
    tokens = of("mrope")(*batch_of(rows))
    wanted = of_rows([parts_of(row) for row in rows])
    for row in range(len(rows)):
        real = tokens.positions[row, tokens.mask[row]]
        assert torch.equal(real, wanted.positions[row, wanted.mask[row]].double())


def test_mrope_counts_fractions_of_seconds_as_the_parts_do() -> None:
    rows: list[Row] = [{"text": (2,), "video": (5, 4, 6), "audio": (9,)}, {"audio": (4,)}]
    inputs, masks = batch_of(rows)
    options = {"video": {"step": 25 / 8}, "audio": {"step": 25 / 40}}
    tokens = of("mrope")(inputs, masks, options)
    parts = [
        [Text(2), Video(3, 2, 3, rate=4), Audio(5, rate=20)],
        [Audio(2, rate=20)],
    ]
    wanted = of_rows(parts, Counting(ticks=25, rounding=None))
    for row in range(2):
        real = tokens.positions[row, tokens.mask[row]]
        torch.testing.assert_close(real, wanted.positions[row, wanted.mask[row]].double())


def test_without_masks_all_rows_are_at_the_same_places() -> None:
    row: Row = {"text": (3,), "image": (4, 6), "audio": (5,)}
    inputs, masks = batch_of([row, row])
    for layout, axes in (("missing", 3), ("mrope", 3), ("sequence", 1)):
        one, other = of(layout)(inputs), of(layout)(inputs, masks)
        assert one.mask is None and one.positions.shape == (12, axes) and one.extent is None
        each = other.positions.expand(2, -1, -1)
        torch.testing.assert_close(
            one.positions.expand(2, -1, -1).double(), each.double(), equal_nan=True
        )
        assert torch.equal(one.values, other.values) and other.mask.all()


def test_missing_coordinates_by_value() -> None:
    inputs, masks = batch_of([{"text": (2,), "image": (2, 4), "video": (3, 2, 4), "audio": (3,)}])
    text = [[0, nan, nan], [1, nan, nan]]
    image = [[nan, 0, 0], [nan, 0, 1]]
    video = [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]
    wanted = torch.tensor([*text, *image, *video, *text], dtype=torch.float64)
    found = of("missing")(inputs, masks).positions
    torch.testing.assert_close(found.double().squeeze(0), wanted, equal_nan=True)
    other = of("missing", axes={"text": [2], "image": [1, 0]})({k: inputs[k] for k in NAMES[:2]})
    wanted = torch.tensor([[nan, nan, 0], [nan, nan, 1], [0, 0, nan], [1, 0, nan]]).double()
    torch.testing.assert_close(other.positions.double(), wanted, equal_nan=True)
    timed = of("missing")(inputs, masks, {"audio": {"step": 0.25}, "video": {"step": 0.75}})
    times = timed.positions[..., 0].flatten().tolist()
    assert times[:2] + times[4:] == [0, 1, 0, 0, 1.5, 1.5, 0, 0.5]


def test_missing_coordinates_of_rows_with_steps_of_their_own() -> None:
    inputs, masks = batch_of([{"text": (2,), "video": (2, 2, 2)}] * 2)
    steps = torch.tensor([0.5, 2.0], dtype=torch.float64)
    tokens = of("missing")({**inputs, "video": inputs["video"]}, masks, {"video": {"step": steps}})
    assert tokens.positions.shape == (2, 3, 3)
    longer, masks = batch_of([{"text": (1,), "video": (5, 2, 2)}] * 2)
    tokens = of("mrope")(longer, masks, {"video": {"step": steps}})
    assert tokens.positions[..., 0].tolist() == [[0, 1, 2, 3], [0, 1, 5, 9]]


@pytest.mark.parametrize("seed", range(4))
def test_a_sequence_counts_real_tokens(seed: int) -> None:
    rows = drawn(5, seed)
    tokens = of("sequence")(*batch_of(rows))
    for row, sizes in enumerate(rows):
        alone = of("sequence")(*batch_of([sizes]))
        count = int(tokens.mask[row].sum())
        assert count == len(alone.positions.flatten(0, -2))
        assert tokens.positions[row, tokens.mask[row], 0].tolist() == list(range(count))


SLOTS: dict[str, dict] = {
    "none": {},
    "factorised": {"additive": mmpos.FactorizedEncoding},
    "sinusoidal": {"additive": mmpos.SinusoidalEncoding},
    "rope": {"rotary": mmpos.RotaryEncoding},
    "mrope": {"rotary": mmpos.MRoPE},
    "alibi": {"bias": mmpos.ALiBi},
    "t5": {"bias": mmpos.T5Bias},
    "table": {"bias": mmpos.RelativePositionBias},
}
LONGEST = {"text": (6,), "image": (3, 4), "video": (4, 2, 3), "audio": (5,)}


def classifier(layout, pool="mean", **slots) -> Classifier:
    torch.manual_seed(0)
    tokens = of(layout)
    shape: dict[str, Any] = {"dim": DIM, "depth": 2, "heads": 3, "class_token": pool != "mean"}
    encoder = Transformer(tokens.grid(LONGEST), **shape, **slots)
    model = Classifier(tokens, encoder, {"kind": 5, "where": 2}, pool=pool).double().eval()
    for name, parameter in model.named_parameters():  # attention that looks
        if parameter.ndim > 1 and ".layers." in name:
            nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("pool", ["mean", "token"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slots", SLOTS)
def test_a_row_is_what_it_is_where_nobody_has_what_it_lacks(slots, layout, pool) -> None:
    model = classifier(layout, pool, **SLOTS[slots])
    rows = drawn(6, 3)
    assert {name for row in rows for name in row} == set(NAMES)
    assert all(any(name not in row for row in rows) for name in NAMES)
    with torch.no_grad():
        together = model(*batch_of(rows))
        for index in range(len(rows)):
            inputs, masks = batch_of(rows)
            own = {name: inputs[name][index : index + 1] for name in rows[index]}
            real = {name: masks[name][index : index + 1] for name in rows[index]}
            for cut in (1, 2):  # padded as in the batch; as it is
                if cut == 2:
                    alone = row_of(rows[index], index)
                    own, real = {name: part[None] for name, part in alone.items()}, None
                for question, answer in model(own, real).items():
                    torch.testing.assert_close(
                        answer[0], together[question][index], rtol=0, atol=1e-6
                    )
    assert (together["kind"][0] - together["kind"][1]).abs().max() > 1e-3


def test_rows_that_have_a_modality_or_not() -> None:
    """Masks ``[B]``, with garbage where nothing is."""
    model = classifier("mrope", rotary=mmpos.MRoPE)
    rows: list[Row] = [{"text": (4,), "image": (4, 6)}, {"text": (4,)}, {"image": (4, 6)}]
    inputs, masks = batch_of(rows)
    some = {name: mask.flatten(1).any(1) for name, mask in masks.items()}
    inputs["text"][2] = 10_000  # no symbol
    torch.testing.assert_close(model(inputs, some)["kind"], model(inputs, masks | some)["kind"])
    wanted = [
        model({n: part[None] for n, part in row_of(r, i).items()}) for i, r in enumerate(rows)
    ]
    for index, alone in enumerate(wanted):
        torch.testing.assert_close(model(inputs, some)["kind"][index], alone["kind"][0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lacking", NAMES)
def test_what_a_batch_lacks_has_a_gradient_of_zero(lacking: str, layout) -> None:
    sizes: Row = {"text": (3,), "image": (4, 4), "video": (3, 4, 6), "audio": (5,)}
    inputs, masks = batch_of([sizes] * 2)
    found = []
    for whole in (True, False):
        model = classifier(layout, rotary=mmpos.RotaryEncoding)
        if whole:  # all its rows are padding
            given = inputs, {**masks, lacking: torch.zeros_like(masks[lacking])}
        else:
            given = ({n: x for n, x in inputs.items() if n != lacking}, masks)
        answers = model(*given)
        sum(logits.square().sum() for logits in answers.values()).backward()
        found.append((answers["kind"], {n: p.grad for n, p in model.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0])
    for name, gradient in found[1][1].items():
        assert gradient is not None, name
        torch.testing.assert_close(gradient, found[0][1][name], rtol=1e-9, atol=1e-12)
        assert gradient.any() == (f"tokens.{lacking}." not in name), name


def test_idle_weights_that_are_no_numbers_do_no_harm() -> None:
    model = of("sequence")
    model.tokens["audio"].requires_grad_(False)
    for parameter in model.tokens["image"].parameters():
        parameter.data.fill_(torch.inf)
    values = model({"text": torch.zeros(2, 3, dtype=torch.long)}).values
    assert values.isfinite().all() and values.requires_grad


def test_the_grid_is_that_of_the_longest_inputs() -> None:
    sizes: Row = {"text": (6,), "image": (6, 8), "video": (7, 4, 6), "audio": (9,)}
    inputs, masks = batch_of([sizes])
    made = of("missing")
    assert made.grid(LONGEST) == (6, 3, 4)
    table = mmpos.FactorizedEncoding(DIM, made.grid(LONGEST)).double()
    tokens = made(inputs, masks)
    parts = table(tokens.positions, tokens.extent)
    rows = [table.table[axis].float() for axis in range(3)]
    torch.testing.assert_close(parts[:6].float(), rows[0])
    torch.testing.assert_close(parts[6 + 12 - 1].float(), rows[1][2] + rows[2][3])
    with pytest.raises(ValueError, match="is no cell of the table"):
        mmpos.FactorizedEncoding(DIM, (5, 3, 4))(tokens.positions)
    made = of("sequence")
    assert made.grid(LONGEST) == (6 + 12 + 24 + 5,)
    line = mmpos.LearnedEncoding(DIM, made.grid(LONGEST))
    tokens = made(inputs, masks)
    assert torch.equal(line(tokens.positions, tokens.extent)[0], line.table)
    made = of("mrope")
    assert made.grid(LONGEST) == (6 + 4 + 4 + 5,) * 3
    assert made(inputs, masks).positions.max() == 18
    assert of("missing", axes={"text": (2,)}).grid({"text": (9,), "image": (6, 4)}) == (1, 6, 9)


@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit() -> None:
    made, (inputs, _) = of("missing"), batch_of([{"text": (3,), "image": (4, 4)}] * 2)
    cases: list[tuple[str, Any]] = [
        (r"^inputs are for text, image, video, audio, got 'smell'$", lambda: made({"smell": None})),
        (r"^masks are for text, .*, got 'smell'$", lambda: made(inputs, {"smell": None})),
        (r"^options are for text, .* 'smell'$", lambda: made(inputs, None, {"smell": {}})),
        (r"^sizes are for text, .*, got 'smell'$", lambda: made.grid({"smell": (2,)})),
        (r"^no row has any of text, image, video, audio: give", lambda: made({"text": None})),
        (r"^no row has any of text", lambda: made({})),
        (r"^expected a tokeniser for each modality", lambda: Modalities({})),
        (r"^layout must be one of \(.*\), got 'line'$", lambda: of("line")),
        (r"^axes are for text, .*, got 'smell'$", lambda: of("missing", axes={"smell": [0]})),
        *(
            (
                r"^axes of text are some of 0 \(time\), 1 \(h",
                lambda a=a: of("mrope", axes={"text": a}),
            )
            for a in ([3], [], [0, 0], [-1])
        ),
        (
            r"^tokens of image have 2 axes, and it was given 1 of the shared ones, time, height, w",
            lambda: of("missing", axes={"image": [1]})(inputs),
        ),
        (
            r"^all modalities have the same rows, got \{'text': 1, 'image': 2\}: give a mask",
            lambda: made({**inputs, "text": inputs["text"][:1]}),
        ),
        (
            r"^a mask of image says of each of 2 rows whether it has any, got 1$",
            lambda: made(inputs, {"image": torch.ones(1, dtype=torch.bool)}),
        ),
    ]
    for words, call in cases:
        with pytest.raises(ValueError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
