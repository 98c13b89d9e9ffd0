"""Texts with labels: which there are, what a sample is, and in which order."""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.data import LabelledText
from tasks.data.labelled import Labelled, complete
from tasks.data.padding import padded
from tasks.data.snippets import Samples


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes of 20, 30 and 10 texts of different lengths, each of letters of its own."""
    for label, (name, count) in enumerate({"ant": 20, "bee": 30, "cow": 10}.items()):
        (tmp_path / "texts" / name).mkdir(parents=True)
        for number in range(count):
            text = bytes([65 + label]) + bytes([97 + number % 26]) * (1 + 7 * number % 40)
            (tmp_path / "texts" / name / f"{number:02}.txt").write_bytes(text)
    return tmp_path / "texts"


@pytest.fixture
def make(folder: Path) -> Callable[..., LabelledText]:
    def text(**options: Any) -> LabelledText:
        return LabelledText("files", **{"root": folder, "context": 16, "batch_size": 4, **options})

    return text


def flat(parts: Iterable[list]) -> list:
    return sorted(chain.from_iterable(parts))


def seen(data: LabelledText, split: str) -> list[tuple[bytes, int]]:
    """Every sample that the loader gives, without its padding."""
    out = []
    for (tokens, mask), labels in data.loader(split):
        assert mask.any(-1).all() and mask.shape[1] == mask.sum(-1).max()
        assert tokens[~mask].eq(0).all() and tokens.dtype == torch.int64
        rows = [bytes(row[real].tolist()) for row, real in zip(tokens, mask, strict=True)]
        out += zip(rows, labels["class"].tolist(), strict=True)
    return out


def test_every_text_is_in_one_split_with_the_label_of_its_folder(make: Any, folder: Path) -> None:
    data = make(context=100)
    data.setup()
    assert data.classes == {"class": ["ant", "bee", "cow"]} and data.vocabulary == 256
    found = {s: [bytes(text) for text in data._data[s].texts] for s in ("train", "val", "test")}
    everything = [path.read_bytes() for path in folder.rglob("*.txt")]
    assert flat(found.values()) == sorted(everything)
    for split in ("val", "test"):
        assert Counter(text[:1] for text in found[split]) == {b"A": 2, b"B": 3, b"C": 1}
        assert all(text[0] == 65 + label for text, label in seen(data, split))
        assert [text for text, _ in seen(data, split)] == found[split]


def test_a_tenth_by_the_hash_whatever_the_order_and_the_seed(make: Any) -> None:
    data, other = make(), make(seed=5)
    names, found = data._found
    parts = complete(names, found)
    turned = complete(names, {"train": found["train"][::-1]})
    assert parts == turned == complete(*other._found)
    without = [text for text in found["train"] if text is not parts["train"][-1]]
    assert complete(names, {"train": without})["val"] == parts["val"]


def test_by_bytes_what_is_held_out_is_a_tenth_of_them() -> None:
    sizes = np.random.default_rng(0).integers(1, 400, 200)
    texts = [Labelled(f"{i}", b"x" * int(size), 0) for i, size in enumerate(sizes)]
    parts = complete(["a"], {"train": texts}, by_bytes=True)
    assert flat(parts.values()) == sorted(texts)
    shares = {s: sum(len(t.content) for t in own) / sizes.sum() for s, own in parts.items()}
    assert shares == pytest.approx({"train": 0.8, "val": 0.1, "test": 0.1}, abs=0.005)
    large = [Labelled(name, b"x" * 100, 0) for name in "abc"]  # none fits
    assert [len(own) for own in complete(["a"], {"train": large}, by_bytes=True).values()] == [
        1
    ] * 3


def test_longer_texts_give_their_beginning_or_in_training_any_part(make: Any) -> None:
    data = make(context=5)
    data.setup()
    assert all(text[0] == 65 + label and len(text) <= 5 for text, label in seen(data, "test"))
    whole = np.arange(30)
    samples = Samples([whole], [0], 10, seed=3)
    starts = {int(samples[epoch][0][0]) for epoch in range(400)}
    assert starts == set(range(21))
    assert all(torch.equal(samples[i][0], samples[i][0]) for i in range(5))
    assert Samples([whole], [0], 10)[7][0].tolist() == list(range(10))
    uncropped = make(context=5, crop=False)
    assert all(text[0] == 65 + label for text, label in seen(uncropped, "train"))


@pytest.mark.parametrize("length", [1, 9, 10, 11, 30])
def test_snippets_are_all_of_a_text_once(length: int) -> None:
    texts = [np.arange(length), np.arange(100, 104)]
    samples = Samples(texts, [0, 1], 10, snippets=True)
    rows = [samples[i] for i in range(len(samples))]
    assert torch.cat([row for row, _ in rows]).tolist() == [*range(length), *range(100, 104)]
    assert [label for _, label in rows] == [0] * -(-length // 10) + [1]


def test_no_source_file_is_in_two_splits_of_the_standard_library() -> None:
    data = LabelledText()
    names, found = data._found
    parts = complete(names, found, by_bytes=data.snippets)
    files = {split: {text.name for text in own} for split, own in parts.items()}
    assert not files["train"] & files["val"] | files["train"] & files["test"]
    assert not files["val"] & files["test"] and len(names) == 8
    data.setup()
    for split, own in parts.items():
        assert all(text.name.split("/")[0] == names[text.label] for text in own)
        assert len(data._data[split]) == sum(-(-len(text.content) // 256) for text in own)
        assert {text.label for text in own} == set(range(8))


def test_samples_are_even_over_the_classes(make: Any) -> None:
    data = make(train_samples=18, eval_samples=3)
    assert Counter(label for _, label in seen(data, "train")).total() == 16  # whole batches
    assert [len(data._data[s]) for s in ("train", "val")] == [18, 3]
    labels = [data._data["train"][i][1] for i in range(18)]
    assert Counter(labels) == {0: 6, 1: 6, 2: 6}
    assert {label for _, label in seen(data, "val")} == {0, 1, 2}
    with pytest.raises(ValueError, match=r"train_samples is 99; expected 3 \(one a class\) to 48"):
        make(train_samples=99).setup("fit")


def test_padding_is_to_the_longest_of_the_batch() -> None:
    values, mask = padded([torch.tensor([3, 4]), torch.tensor([5]), torch.tensor([], dtype=int)])
    assert values.tolist() == [[3, 4], [5, 0], [0, 0]]
    assert mask.tolist() == [[True, True], [True, False], [False, False]]
    assert padded([torch.ones(2, 3), torch.ones(1, 3)]).values.shape == (2, 2, 3)


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_what_one_sees(make: Any, as_rank: Any, processes: int) -> None:
    def batches(data: LabelledText, split: str, epoch: int) -> list:
        loader = data.loader(split)
        if split == "train":
            loader.sampler.set_epoch(epoch)  # type: ignore[union-attr]
        return [
            sorted(
                (bytes(row[real].tolist()), int(label))
                for row, real, label in zip(*x, y["class"], strict=True)
            )
            for x, y in loader
        ]

    for epoch in (0, 3):
        whole = batches(make(batch_size=12, context=5), "train", epoch)
        shares = [
            batches(
                as_rank(make(batch_size=12 // processes, context=5), r, processes), "train", epoch
            )
            for r in range(processes)
        ]
        joined = [flat(parts) for parts in zip(*shares, strict=True)]
        assert joined == whole and whole
    assert whole != batches(make(batch_size=12, context=5), "train", 0)
    alone = flat(batches(make(), "test", 0))
    parts = [flat(batches(as_rank(make(), r, processes), "test", 0)) for r in range(processes)]
    assert flat(parts) == alone


def test_workers_give_the_same(make: Any) -> None:
    assert seen(make(num_workers=2), "train") == seen(make(), "train")


def test_what_is_predicted(make: Any, tmp_path: Path) -> None:
    (tmp_path / "new" / "deep").mkdir(parents=True)
    (tmp_path / "new" / "deep" / "a.txt").write_text("hello " * 9)
    (tmp_path / "new" / "b.fa").write_text(">one more\nac\n>two\nGT\n>three\n")
    with pytest.warns(UserWarning, match="left out 1 empty texts: b.fa:three"):
        ((tokens, mask), names) = next(
            iter(make(predict_path=tmp_path / "new").predict_dataloader())
        )
    rows = [bytes(row[real].tolist()) for row, real in zip(tokens, mask, strict=True)]
    assert dict(zip(names, rows, strict=True)) == {
        "b.fa:one": b"AC",
        "b.fa:two": b"GT",
        "deep/a.txt": b"hello hello hell",
    }
    single = make(predict_path=tmp_path / "new" / "deep" / "a.txt").predict_dataloader()
    assert [names for _, names in single] == [["a.txt"]]
