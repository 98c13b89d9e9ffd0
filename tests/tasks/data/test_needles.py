"""Training prompts of records: which there are, and that ends are covered."""

import collections

import pytest
import torch

from mmpos.evaluation.symbols import ASK, DISTRACTOR, END, KEY, NONE
from tasks.data import Needles


def rows(data: Needles, split: str):
    loader = {"train": data.train_dataloader, "val": data.val_dataloader}
    for batch in loader.get(split, data.test_dataloader)():
        for row in range(len(batch["length"])):
            real = batch["segments"][row] == 0
            tokens, targets = batch["tokens"][row][real].tolist(), batch["targets"][row][real]
            yield int(batch["length"][row]), tokens, targets.tolist()


def test_the_answer_alone_is_asked_for() -> None:
    data = Needles(eval_samples=30)
    for length, tokens, targets in rows(data, "test"):
        assert tokens[0] == END and tokens.index(ASK) == length - 1
        assert set(targets[: length - 1]) == {-100}
        answer = targets[length - 1 :]
        assert answer[:-1] == tokens[length:] and answer[-1] == END
        keys = [at for at, token in enumerate(tokens[:length]) if token == KEY]
        assert answer == ([*tokens[keys[-1] + 1 : keys[-1] + 4], END] if keys else [NONE, END])
    lengths = [length for length, *_ in rows(data, "test")]
    assert collections.Counter(lengths) == {64: 30, 128: 30, 256: 30}


def test_training_covers_depths_tasks_and_lengths() -> None:
    data = Needles(length=40, train_samples=3000)
    first = last = 0
    kinds: collections.Counter = collections.Counter()
    lengths = set()
    for length, tokens, _ in rows(data, "train"):
        lengths.add(length)
        keys = [at for at, token in enumerate(tokens[:length]) if token == KEY]
        others = tokens.count(DISTRACTOR)
        kinds[len(keys), others] += 1
        if len(keys) == 1:
            first += keys[0] == 1
            last += keys[0] == length - 5
    assert lengths == set(range(24, 41))
    assert set(kinds) == {(2, 0), (1, 0), *((k, n) for k in (0, 1) for n in (1, 2, 3))}
    one = sum(count for (keys, _), count in kinds.items() if keys == 1)
    assert 0.1 < first / one < 0.25 and 0.1 < last / one < 0.25
    assert 0.35 < kinds[1, 0] / 3000 < 0.45 and 0.16 < kinds[2, 0] / 3000 < 0.24


def test_who_sees_what() -> None:
    def all_of(split: str, **options) -> list:
        data = Needles(train_samples=128, eval_samples=8, **options)
        return [tokens for _, tokens, _ in rows(data, split)]

    assert all_of("train") == all_of("train") != all_of("train", seed=1)
    assert all_of("test") == all_of("test", seed=1)
    assert not {*map(tuple, all_of("val"))} & {*map(tuple, all_of("test"))}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_length": 19}, "min_length is 19; expected at least 20"),
        ({"length": 20}, "length is 20; expected at least 24"),
        ({"test_lengths": [64, 64]}, "expected different lengths"),
        ({"test_lengths": [8]}, "expected different lengths of 20 or more"),
        ({"train_samples": 0}, "train_samples is 0"),
    ],
)
def test_bad_options(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Needles(**options)
    with pytest.raises(ValueError, match="nothing to predict"):
        Needles().predict_dataloader()


def test_a_learned_table_has_a_row_for_each_token() -> None:
    data = Needles(length=32)
    longest = max(
        len(tokens) for _, tokens, _ in rows(Needles(length=32, train_samples=256), "train")
    )
    assert longest <= data.context == 36 and torch.tensor(data.vocabulary) == 21
