"""Algorithmic tasks: what the examples are, by checkers of their own, and who sees which."""

import collections
import itertools
import re
from typing import Any

import pytest
import torch

from mmpos.positions import packed
from tasks.data import Algorithms

TASKS = ["copy", "reverse", "addition", "missing_duplicate", "flip_flop"]


def examples(data: Algorithms, split: str) -> list[tuple[int, str, str]]:
    """Length, prompt and answer of each, in words; the answer with ``·`` where none is asked."""
    found = []
    loader = {"train": data.train_dataloader, "val": data.val_dataloader}
    for batch in loader.get(split, data.test_dataloader)():
        for row, n in enumerate(batch["length"].tolist()):
            real = batch["segments"][row] == 0
            tokens, targets = batch["tokens"][row][real], batch["targets"][row][real]
            first = int((targets >= 0).nonzero()[0])
            asked = [data.decode(t[None]) if t >= 0 else "·" for t in targets[first:]]
            after = data.decode(tokens[first + 1 :]).split()
            assert all(a in (b, "·") for a, b in zip(asked, after, strict=False)), "shifted by one"
            found.append((n, data.decode(tokens[: first + 1]), " ".join(asked)))
    return found


def right(task: str, n: int, prompt: str, answer: str, base: int) -> bool:
    """Whether an example is one of the task, decided on its text alone."""
    if task in ("copy", "reverse"):
        word = re.fullmatch(rf"END((?: \d+){{{n}}}) =", prompt)
        assert word
        parts = word[1].split()
        return answer.split() == [*(parts if task == "copy" else parts[::-1]), "END"]
    if task == "addition":
        terms = re.fullmatch(rf"END((?: \d){{{n}}}) \+((?: \d){{{n}}}) =", prompt)
        assert terms
        texts = [part.replace(" ", "")[::-1] for part in (*terms.groups(), answer[:-4])]
        assert n == 1 or not any(text.startswith("0") for text in texts), "has its own digits only"
        a, b, c = (int(text, base) for text in texts)
        return a + b == c and answer.endswith(" END")
    assert task == "missing_duplicate"
    parts = prompt.split()[1:-1]
    assert len(parts) == 2 * n and prompt.startswith("END") and prompt.endswith("=")
    place = parts.index("?")
    whole = [answer if part == "?" else part for part in parts]
    return parts[place - n] == answer and whole[:n] == whole[n:] and "?" not in whole


@pytest.mark.parametrize("base", [2, 7, 10])
@pytest.mark.parametrize("task", TASKS[:4])
def test_examples_are_right(task: Any, base: int) -> None:
    data = Algorithms(
        task, 6, test_lengths=[3, 15], symbols=base, train_samples=400, eval_samples=40
    )
    for split, lengths in (("train", range(1, 7)), ("val", range(1, 7)), ("test", (3, 15))):
        found = examples(data, split)
        assert {n for n, _, _ in found} == set(lengths)
        assert all(right(task, *example, base) for example in found)
        digits = {word for _, prompt, _ in found for word in prompt.split() if word.isdigit()}
        assert digits == {str(digit) for digit in range(base)}
        if task == "missing_duplicate" and split == "test":
            places = {prompt.split().index("?") for n, prompt, _ in found if n == 3}
            assert places == set(range(1, 7)), "both of the two are hidden"
        if task == "addition" and base > 2:  # two numbers that begin with 1 always carry
            assert {len(answer.split()) - 1 - n for n, _, answer in found} == {0, 1}, "carries"


@pytest.mark.parametrize("symbols", [2, 5])
def test_a_flip_flop_reads_what_was_written_last(symbols: int) -> None:
    data = Algorithms("flip_flop", 8, test_lengths=[1, 200], symbols=symbols, eval_samples=60)
    counts = collections.Counter()
    for batch in data.test_dataloader():
        assert set(batch["length"].tolist()) <= {1, 200}
        for row, n in enumerate(batch["length"].tolist()):
            tokens, targets = batch["tokens"][row], batch["targets"][row]
            words = data.decode(tokens[: 2 * n + 2]).split()
            assert words[:2] == ["END", "w"] and words[-1] == "r"
            held = ""
            for place in range(1, 2 * n + 2):
                word, target = words[place], int(targets[place])
                if word == "r":
                    assert data.words[target] == held
                    assert place == 2 * n + 1 or words[place + 1] == held
                else:
                    assert target == -100
                held = words[place + 1] if word == "w" else held
            assert (targets[2 * n + 2 :] == -100).all() and targets[0] == -100
            counts.update(words[3:-1:2])
    total = sum(counts[mark] for mark in "wri")
    assert total == sum(counts.values()) == 60 * 199, "instructions and symbols alternate"
    for mark, share in (("i", 0.8), ("w", 0.1), ("r", 0.1)):
        assert counts[mark] / total == pytest.approx(share, abs=0.015)


@pytest.mark.parametrize("task", TASKS)
def test_batches_are_rows_of_one_example(task: Any) -> None:
    data = Algorithms(task, 9, train_samples=64, batch_size=32)
    widest = 0
    for batch in data.train_dataloader():
        assert set(batch) == {"tokens", "targets", "positions", "segments", "length"}
        assert all(value.dtype == torch.int64 for value in batch.values())
        rows, width = batch["tokens"].shape
        assert int(batch["tokens"].max()) <= data.end == data.vocabulary - 1
        sizes = []
        for row in range(rows):
            asked = (batch["targets"][row] >= 0).nonzero()
            real = int(asked[-1]) + 1  # the last token of an example always has a target
            sizes.append(real)
            lengths = [real, width - real] if real < width else [real]
            positions, segments = packed(lengths)
            positions[real:] = 0  # so that the last position of a row is that of its example
            assert torch.equal(batch["positions"][row], positions)
            assert torch.equal(batch["segments"][row], segments)
        widest = max(widest, *sizes)
        assert max(sizes) == width, "padded to the longest, no further"
    assert widest <= data.context, "the model is made for the longest"
    full = Algorithms(task, 9, min_length=9, train_samples=32, batch_size=32)
    assert next(iter(full.train_dataloader()))["tokens"].shape[-1] == full.context


def rows(data: Algorithms, epoch: int) -> list[tuple]:
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    return [tuple(real(batch, row)) for batch in loader for row in range(len(batch["tokens"]))]


def real(batch: dict[str, torch.Tensor], row: int) -> list[int]:
    return batch["tokens"][row][batch["segments"][row] == 0].tolist()


def make(**options: Any) -> Algorithms:
    return Algorithms(**{"train_samples": 96, "batch_size": 8, "length": 12, **options})


def test_epochs_differ_and_repeat_by_seed() -> None:
    first = rows(make(), 0)
    assert len(first) == 96 and first == rows(make(), 0)
    for other in (rows(make(), 1), rows(make(seed=1), 0)):
        assert len(set(first) & set(other)) < 20, "short ones may be drawn twice"
    assert rows(make(seed=1), 1) == rows(make(seed=1), 1)


def test_lengths_are_drawn_uniformly() -> None:
    data = make(train_samples=6000, min_length=3)
    drawn = collections.Counter(
        n for batch in data.train_dataloader() for n in batch["length"].tolist()
    )
    assert sorted(drawn) == list(range(3, 13))
    assert all(abs(count - 600) < 120 for count in drawn.values())


@pytest.mark.filterwarnings("ignore:.*fork")
def test_workers_change_nothing() -> None:
    assert rows(make(num_workers=1), 2) == rows(make(), 2)


def test_processes_share_the_rows_of_one(as_rank: Any) -> None:
    whole = rows(make(batch_size=16), 1)
    parts = [rows(as_rank(make(), rank, 2), 1) for rank in (0, 1)]
    assert len(parts[0]) == len(parts[1]) == 48
    for step in range(6):
        both = [row for part in parts for row in part[8 * step : 8 * step + 8]]
        assert sorted(both) == sorted(whole[16 * step : 16 * step + 16])


@pytest.mark.parametrize("split", ["val", "test"])
def test_evaluation_sees_each_once_whatever_the_seed(split: str, as_rank: Any) -> None:
    options = {"length": 3, "test_lengths": [5, 2], "eval_samples": 11, "batch_size": 4}
    one = examples(make(**options), split)
    assert [n for n, _, _ in one] == [
        n for n in ((1, 2, 3) if split == "val" else (5, 2)) for _ in range(11)
    ]
    ranks = [as_rank(make(**options, seed=r), r, 3) for r in range(3)]
    found = itertools.chain(*(examples(data, split) for data in ranks))
    assert sorted(found) == sorted(one)


def test_what_training_and_test_share() -> None:
    """Nothing beyond the trained lengths; single symbols, of which there are few, surely."""
    data = make(train_samples=3000, test_lengths=[1, 12, 13])
    trained = {prompt for _, prompt, _ in examples(data, "train")}
    tested = examples(data, "test")
    assert {n for n, prompt, _ in tested if prompt in trained} == {1}
    validated = {prompt for n, prompt, _ in examples(data, "val") if n == 12}
    assert not validated & {prompt for _, prompt, _ in tested}


def test_sizes_follow_from_the_task() -> None:
    found = {task: Algorithms(task) for task in TASKS}  # type: ignore[arg-type]
    assert {task: (data.vocabulary, data.context) for task, data in found.items()} == {
        "copy": (12, 42),
        "reverse": (12, 42),
        "addition": (13, 64),
        "missing_duplicate": (5, 42),
        "flip_flop": (6, 42),
    }
    assert found["copy"].test_lengths == [20, 24, 28, 40]
    assert Algorithms(length=1).test_lengths == [1, 2]
    assert Algorithms(context=99).context == 99
    assert found["addition"].words == [*"0123456789", "+", "=", "END"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "sort"}, r"task is 'sort'; expected one of \('copy', 'reverse', "),
        ({"length": 0}, r"length is 0; expected at least 1"),
        ({"length": 3, "min_length": 4}, r"length is 3; expected at least 4"),
        ({"min_length": 0}, r"min_length is 0; expected at least 1"),
        ({"symbols": 1}, r"symbols is 1; expected at least 2"),
        ({"batch_size": 0}, r"batch_size is 0"),
        ({"eval_samples": 0}, r"eval_samples is 0"),
        ({"seed": -1}, r"seed is -1"),
        ({"test_lengths": []}, r"test_lengths is \[\]; expected different lengths of 1 or more"),
        ({"test_lengths": [4, 0]}, r"test_lengths is \[4, 0\]"),
        ({"test_lengths": [4, 4]}, r"test_lengths is \[4, 4\]; expected different"),
        ({"context": 41}, r"context is 41, and .* length 20 have 42 tokens: give --data.context"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Algorithms(**options)


def test_too_few_examples(as_rank: Any) -> None:
    with pytest.raises(ValueError, match=r"train_samples 63 makes 63 train examples, and 64 are"):
        Algorithms(train_samples=63).train_dataloader()
    data = as_rank(Algorithms(eval_samples=1, test_lengths=[5, 7]), 0, 3)
    with pytest.raises(ValueError, match=r"eval_samples 1 makes 2 test examples, and 3 are needed"):
        data.test_dataloader()


def test_there_is_nothing_to_predict() -> None:
    with pytest.raises(ValueError, match=r"Algorithms has nothing to predict: .* mmpos test"):
        Algorithms().predict_dataloader()
