"""What prompts of symbols hold, found by a reader of its own, and how answers are judged."""

import itertools

import pytest

from mmpos.evaluation.samples import Sample
from mmpos.evaluation.symbols import ASK, END, KEY, NONE, SYMBOLS, TASKS, SymbolNeedles

NEEDLES = SymbolNeedles()
DEPTHS = (0.0, 0.13, 0.5, 0.87, 1.0)


def records(prompt: tuple[int, ...]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Where each record begins in the body, by which token, and what it holds."""
    body = prompt[1:-1]
    return [(at, token, body[at + 1 : at + 4]) for at, token in enumerate(body) if token >= SYMBOLS]


@pytest.mark.parametrize("length", [24, 61, 300])
@pytest.mark.parametrize("task", TASKS)
def test_the_right_answer_is_the_last_key(task: str, length: int) -> None:
    for seed in range(40):
        for depth in DEPTHS:
            sample = NEEDLES.make(task, length, depth, seed)
            assert len(sample.prompt) == sample.length == length
            assert sample.prompt[0] == END and sample.prompt[-1] == ASK
            found = records(sample.prompt)
            assert all(max(own) < SYMBOLS and len(own) == 3 for _, _, own in found)
            assert all(b[0] - a[0] >= 4 for a, b in itertools.pairwise(found))
            keys = [own for _, token, own in found if token == KEY]
            expected = {"single": (1, 0), "distractors": (1, 3), "conflict": (2, 0)}
            assert (len(keys), len(found) - len(keys)) == expected.get(task, (0, 3))
            assert sample.value + sample.source == (keys[-1] if keys else ())
            assert sample.distractors == len(found) - len(keys)
            answer = (*keys[-1], END) if keys else (NONE, END)
            assert NEEDLES.answer(sample) == answer and len(answer) <= NEEDLES.new_tokens


def test_depth_alone_moves_the_evidence() -> None:
    for task in TASKS[:3]:
        at = []
        for depth in DEPTHS:
            sample = NEEDLES.make(task, 200, depth, 5)
            place, _, own = [each for each in records(sample.prompt) if each[1] == KEY][-1]
            at.append(place)
            assert own == NEEDLES.make(task, 200, 0.0, 5).value + sample.source
        first = 4 if task == "conflict" else 0
        assert at[0] == first and at[-1] == 200 - 2 - 4 and at == sorted(at)
    one, two = (NEEDLES.make("single", 200, depth, 5).prompt for depth in (0.0, 1.0))
    assert sum(a != b for a, b in zip(one, two, strict=True)) <= 8, "the fillers stay"
    assert one != NEEDLES.make("single", 200, 0.0, 6).prompt


def test_verdicts() -> None:
    sample = Sample("single", 6, 0.0, 0, (END, KEY, 1, 2, 3, ASK), (1, 2), (3,))
    judged = {
        (1, 2, 3, END): (True, True, True, False),
        (1, 2, 3, END, NONE): (True, True, True, False),
        (1, 2, 3): (False, True, True, False),
        (1, 2, 3, 3, END): (False, True, True, False),
        (1, 2, 4, END): (False, True, False, False),
        (4, 1, 2, END): (False, True, False, False),
        (2, 1, 3, END): (False, False, True, False),
        (NONE, END): (False, False, False, True),
        (END, 1, 2, 3): (False, False, False, False),
        (): (False, False, False, False),
    }
    for output, expected in judged.items():
        own = NEEDLES.judge(sample, output)
        assert (own.exact, own.keyword, own.cited, own.refused) == expected, output
        assert own.output == output
    nothing = NEEDLES.make("unanswerable", 40, 0.5, 0)
    assert NEEDLES.judge(nothing, (NONE, END)).exact
    wrong = NEEDLES.judge(nothing, (1, 2, 3, END))
    assert not (wrong.exact or wrong.keyword or wrong.cited or wrong.refused)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("many", 40, 0.5, 0), "task must be one of"),
        (("single", 40, 1.5, 0), "depth is from 0 to 1"),
        (("single", 5, 0.5, 0), "1 records of 4 tokens do not go into a prompt of 5"),
        (("conflict", 9, 0.5, 0), "2 records"),
        (("distractors", 17, 0.5, 0), "4 records"),
    ],
)
def test_what_cannot_be_made(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NEEDLES.make(*arguments)
