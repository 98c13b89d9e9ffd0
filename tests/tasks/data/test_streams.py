"""Training text that is read as it is needed: each document once a pass, in any number of parts."""

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from tasks.data import Text
from tasks.data.streams import FileStream, SetStream, Stream
from tasks.data.token_stream import TokenStream
from tasks.data.tokens import Bytes, Rows

END = 256
COUNT = 60


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Sixty documents of different lengths, each of one byte of its own, and an empty one."""
    (tmp_path / "texts").mkdir()
    for number in range(COUNT):
        path = tmp_path / "texts" / f"{number:02}.txt"
        path.write_bytes(bytes([65 + number]) * (1 + 7 * number % 40))
    (tmp_path / "texts" / "empty.txt").touch()
    return tmp_path / "texts"


@pytest.fixture
def make(root: Path) -> Callable[..., Text]:
    """A module as rank of several processes sees it; no trainer runs it."""

    def text(rank: int = 0, processes: int = 1, **options: Any) -> Text:
        data = Text(
            "files", **{"root": root, "context": 16, "batch_size": 3, **options}, streaming=True
        )
        data.trainer = SimpleNamespace(  # type: ignore
            world_size=processes,
            global_rank=rank,
            training=False,
            limit_train_batches=1.0,
            max_steps=9,
            accumulate_grad_batches=1,
        )
        return data

    return text


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def taken(loader: Any, count: int = 100) -> list[Any]:
    """Batches of a loader, by default more than are in one pass, whose processes then end."""
    try:
        return list(itertools.islice(loader, count))
    finally:
        getattr(loader._iterator, "_shutdown_workers", int)()


def reference(stream: Stream, part: int, parts: int, passes: int) -> Rows:
    """The same documents, held in memory."""
    found = [each for number in range(passes) for each in stream.passed(number, part, parts)]
    return Rows([Bytes().encode(*each) for each in found], 16, END)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("first", [0, 1, 6])
def test_processes_and_their_loaders_pack_what_each_part_reads(
    make: Callable[..., Text], workers: int, first: int
) -> None:
    parts = 2 * max(1, workers)
    for rank in range(2):
        data = make(rank, 2, num_workers=workers)
        loader = data.train_dataloader()
        loader._seen = lambda: first
        stream: Any = data.samples("train")
        rows = {part: reference(stream, part, parts, 4) for part in range(parts)}
        for number, batch in enumerate(taken(loader, 10), first):
            turn, worker = divmod(number, max(1, workers))
            own = rows[rank * max(1, workers) + worker]
            for place in range(3):
                row = {name: values[place] for name, values in batch.items()}
                assert same(row, own[3 * turn + place])


class Pairs:
    """Tokens of two bytes each, of which a last odd one has none."""

    def encode(self, name: str, content: bytes) -> tuple[np.ndarray, np.ndarray, int]:
        whole = np.frombuffer(content[: len(content) // 2 * 2], np.uint16)
        return whole, np.full(len(whole), 2), len(content) % 2


def test_bytes_without_a_token_are_those_of_the_end(root: Path) -> None:
    stream, pairs = FileStream(root, [".txt"], seed=0), Pairs()
    rows: Any = TokenStream(stream, pairs, 8, 2**16, batch_size=1)  # type: ignore[arg-type]
    wanted = Rows([pairs.encode(*each) for each in stream.passed(0, 0, 1)], 8, 2**16)
    count = len(wanted) - 1
    assert all(same(row, wanted[i]) for i, row in enumerate(itertools.islice(rows, count)))
    assert count > 20


def test_a_loader_without_a_trainer_begins_anew(make: Callable[..., Text]) -> None:
    loader = make().train_dataloader()
    first, again = taken(loader, 5), taken(loader, 5)
    assert all(same(*each) for each in zip(first, again, strict=True))


def test_parts_share_out_the_documents_of_each_pass(root: Path) -> None:
    stream = FileStream(root, [".txt"], seed=0)
    held = [name for split in ("val", "test") for name, _ in stream.held(split)]
    orders = []
    for number in range(3):
        parts = [list(stream.passed(number, part, 4)) for part in range(4)]
        names = [name for part in parts for name, _ in part]
        assert len(set(names)) == len(names)
        assert sorted(names + held) == [f"{index:02}.txt" for index in range(COUNT)]
        read = [document for part in parts for document in part]
        assert all(content == (root / name).read_bytes() for name, content in read)
        orders.append(names)
    assert orders[0] != orders[1] != orders[2]
    again = FileStream(root, [".txt"], seed=0).passed(2, 1, 4)
    assert list(again) == list(stream.passed(2, 1, 4))
    other = FileStream(root, [".txt"], seed=1).passed(2, 1, 4)
    assert list(other) != list(stream.passed(2, 1, 4))


def test_held_out_documents_are_those_without_streaming(
    make: Callable[..., Text], root: Path
) -> None:
    whole = Text("files", root, context=16, batch_size=3)
    with pytest.warns(UserWarning, match="left out 1 empty"):
        whole.setup()
    for split in ("val", "test"):
        own, wanted = make().samples(split), whole.samples(split)
        assert len(own) == len(wanted) > 1
        assert all(same(own[index], wanted[index]) for index in range(len(own)))
    read = {
        token
        for batch in taken(make().train_dataloader())
        for token in batch["tokens"].unique().tolist()
    }
    assert read == set(whole.samples("train").tokens.tolist())


class Endless:
    """Documents of 40 bytes; ``read`` counts them."""

    read = 0

    def passed(self, number: int, part: int, parts: int) -> Iterator[tuple[str, bytes]]:
        for index in itertools.count(part, parts):
            self.read += 1
            yield str(index), b"x" * 40

    def held(self, split: str) -> Iterator[tuple[str, bytes]]:
        return iter(())


def test_no_more_is_read_than_is_needed(
    make: Callable[..., Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Endless()
    rows = iter(TokenStream(source, Bytes(), 16, END, batch_size=2))
    for count in range(1, 200):
        assert next(rows)["tokens"].shape == (16,)
        assert source.read == -(-count * 16 // 41)
    data = make()
    data.setup("fit")
    opened = []
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path) or read(path))
    batches = iter(data.train_dataloader())
    assert not opened
    tokens = torch.stack([next(batches)["tokens"] for _ in range(3)])
    assert len(opened) <= 1 + (tokens == END).sum() < COUNT / 2


def test_what_cannot_be_read_is_named(make: Callable[..., Text], root: Path, tmp_path) -> None:
    for workers in (0, 2):
        loader = make(num_workers=workers, batch_size=2).train_dataloader()
        (root / "31.txt").rename(tmp_path / "moved")
        with pytest.raises(FileNotFoundError, match=r"No such file or directory: '.*31.txt'"):
            taken(loader)
        (tmp_path / "moved").rename(root / "31.txt")
    (root / "40.txt").write_bytes(b"a\0b")
    with pytest.raises(ValueError, match=r"40.txt has a zero byte"):
        taken(make().train_dataloader())
    (root / "40.txt").write_bytes(b"\xff\xfe")
    vocabulary: Any = {chr(65 + number): number for number in range(COUNT)} | {"?": COUNT}
    Tokenizer(models.BPE(vocabulary, [], unk_token="?")).save(str(tmp_path / "tokens.json"))
    with pytest.raises(ValueError, match=r"40.txt is not UTF-8 \(byte 0\)"):
        taken(make(tokenizer=tmp_path / "tokens.json").train_dataloader())


def test_what_is_refused(make: Callable[..., Text], root: Path, tmp_path: Path) -> None:
    data = make()
    data.trainer.max_steps = -1
    with pytest.raises(ValueError, match=r"no end: give steps, --trainer.max_steps N, or batches"):
        data.train_dataloader()
    data.trainer.limit_train_batches = 7
    assert len(data.train_dataloader()) == 7
    data.trainer.max_steps, data.trainer.accumulate_grad_batches = 5, 2
    assert len(data.train_dataloader()) == 10
    with pytest.raises(ValueError, match=r"train_tokens is 9, but .* expected --data.train_tokens"):
        make(train_tokens=9)
    with pytest.raises(ValueError, match=r"streaming is of text of your own: give --data.source"):
        Text(streaming=True)
    few = rf"{len(data.samples('train'))} training files are too few for 64 loader processes"
    with pytest.raises(ValueError, match=few):
        make(0, 16, num_workers=4).train_dataloader()
    with pytest.raises(ValueError, match=r"streaming opens one file after another, and .* has one"):
        make(root=root / "05.txt").setup("fit")
    for folder in ("train", "val", "test"):
        (tmp_path / "split" / folder).mkdir(parents=True)
        (tmp_path / "split" / folder / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"part 1 of 1 of the training text has no documents"):
        taken(make(root=tmp_path / "split").train_dataloader())


class Rowed:
    """A split as `datasets` streams it: so many files, each of some rows, shuffled as told."""

    def __init__(self, files: list[list[str]], seed: int | None = None) -> None:
        self.files, self.seed = files, seed

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> "Rowed":
        assert num_shards <= len(self.files) and self.seed is None
        return Rowed(self.files[index::num_shards])

    def shuffle(self, seed: int, buffer_size: int) -> "Rowed":
        assert buffer_size < 10_000
        return Rowed(self.files, seed)

    def iter(self, batch_size: int) -> Iterator[dict[str, list]]:
        rows = [text for file in self.files for text in file]
        if self.seed is not None:
            np.random.default_rng(self.seed).shuffle(rows)
        for text in rows:
            yield {"text": [text], "label": [0]}


TEXTS = [f"document {number} " * (1 + number % 5) for number in range(90)]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def give(**splits: Rowed) -> None:
        def load(name: str, subset: str | None, streaming: bool) -> dict[str, Rowed]:
            assert streaming
            return splits

        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))

    return give


def files_of(texts: list[str], count: int) -> list[list[str]]:
    return [texts[index::count] for index in range(count)]


def check_parts(stream: SetStream, parts: int, wanted: list[str]) -> None:
    orders = []
    for number in range(2):
        read = [list(stream.passed(number, part, parts)) for part in range(parts)]
        contents = [content.decode() for part in read for _, content in part]
        assert sorted(contents) == sorted(wanted) and all(read)
        orders.append(contents)
    assert orders[0] != orders[1]
    assert [c.decode() for p in range(parts) for _, c in stream.passed(1, p, parts)] == orders[1]


@pytest.mark.parametrize("parts", [1, 3, 4, 7])
def test_parts_share_out_the_rows_of_a_set(stand_in: Callable[..., None], parts: int) -> None:
    stand_in(train=Rowed(files_of([*TEXTS, ""], 4)), validation=Rowed([["v"]]), test=Rowed([["t"]]))
    stream = SetStream("some/set", None, "text", seed=0)
    check_parts(stream, parts, TEXTS)
    assert [content for _, content in stream.held("val")] == [b"v"]


def test_rows_of_a_set_are_held_out_by_their_content(stand_in: Callable[..., None]) -> None:
    held: list[set] = []
    for texts in (TEXTS, TEXTS[::-1]):
        stand_in(train=Rowed(files_of(texts, 2)))
        stream = SetStream("some/set", None, "text", seed=0)
        held.append({(s, content) for s in ("val", "test") for _, content in stream.held(s)})
        out = {content.decode() for _, content in held[-1]}
        check_parts(stream, 2, [text for text in TEXTS if text not in out])
        assert len(out) == len(held[-1]) and {split for split, _ in held[-1]} == {"val", "test"}
    assert held[0] == held[1]
    data = Text("datasets", dataset="some/set", context=8, batch_size=2, streaming=True)
    with pytest.raises(ValueError, match=r"some/set has no split for val, .* --data.eval_tokens N"):
        data.setup("fit")
    data = Text(
        "datasets",
        dataset="some/set",
        context=8,
        batch_size=2,
        streaming=True,
        eval_tokens=20,
        num_workers=2,
    )
    data.setup("fit")
    assert data.samples("val").total == 20
    batches = taken(data.train_dataloader(), 4)
    assert all(batch["tokens"].shape == (2, 8) for batch in batches)
    data = Text("datasets", dataset="s", column="label", streaming=True, eval_tokens=9)
    with pytest.raises(ValueError, match=r"s has no text in a column 'label': name one of text, l"):
        data.setup("fit")


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_library_datasets_shares_out_all_rows(
    tmp_path: Path, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert library.__version__
    for number, texts in enumerate(files_of(TEXTS, 2)):
        (tmp_path / f"train-{number}.txt").write_text("\n".join(texts) + "\n")
    (tmp_path / "validation.txt").write_text("v\n")
    (tmp_path / "test.txt").write_text("t\n")
    check_parts(SetStream(str(tmp_path), None, "text", seed=0), parts, TEXTS)
    workers = min(parts, 2)
    options: Any = {"context": 8, "batch_size": 1, "num_workers": workers, "streaming": True}
    data = Text("datasets", dataset=str(tmp_path), **options)
    data.setup("fit")
    stream: Any = data.samples("train")
    rows = [reference(stream, part, workers, 1) for part in range(workers)]
    for number, batch in enumerate(taken(data.train_dataloader(), 6)):
        turn, worker = divmod(number, workers)
        wanted = rows[worker].tokens[8 * turn : 8 * turn + 8]
        assert batch["tokens"][0].tolist() == wanted.tolist()
