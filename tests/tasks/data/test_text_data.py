"""Text: which documents there are, how they are packed, and in which order."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmpos.positions import packed
from tasks.data import Text
from tasks.data.documents import complete
from tasks.data.tokens import Bytes, Rows

END = 256
TEXTS = [b"one", b"a longer document", b"x", b"", "größer €".encode(), b"\xff\xfe broken"]


def rows(texts: list[bytes], context: int, **options: Any) -> Rows:
    return Rows([Bytes().encode("", text) for text in texts], context, END, **options)


def plain(texts: list[bytes], context: int) -> list[tuple[list[tuple], int]]:
    """Rows of ``(token, target, position, document, bytes)``, written down token by token."""
    stream = []
    for document, text in enumerate(texts):
        tokens = [END, *text]
        for place, token in enumerate(tokens):
            last = place + 1 == len(tokens)
            stream.append((token, END if last else tokens[place + 1], document, int(not last)))
    out = []
    for begin in range(0, len(stream), context):
        row, cells, begun = stream[begin : begin + context], [], {}
        for token, target, document, count in row:
            begun[document] = begun.get(document, -1) + 1
            cells.append((token, target, begun[document], len(begun) - 1, count))
        real = len(cells)
        cells += [(END, -100, 0, len(begun), 0)] * (context - real)
        out.append((cells, real))
    return out


def cells(row: dict[str, torch.Tensor]) -> list[tuple]:
    positions = row["positions"].squeeze(-1)
    columns = (row["tokens"], row["targets"], positions, row["segments"], row["bytes"])
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty documents of different lengths, each of one letter of its own."""
    root = tmp_path / "texts"
    root.mkdir()
    for number in range(40):
        (root / f"{number:02}.txt").write_bytes(bytes([65 + number]) * (5 + 7 * number % 90))
    return root


@pytest.fixture
def make(folder: Path) -> Callable[..., Text]:
    def text(**options: Any) -> Text:
        given = {"root": folder, "context": 16, "batch_size": 4, **options}
        return Text(source="files", **given)

    return text


@pytest.mark.parametrize("context", [1, 2, 5, 16, 100])
def test_packing_is_that_of_a_plain_loop(context: int) -> None:
    data, wanted = rows(TEXTS, context), plain(TEXTS, context)
    assert len(data) == len(wanted)
    for index, (row, real) in enumerate(wanted):
        if len(wanted) == 1:  # which is not padded
            row = row[:real]
        assert cells(data[index]) == row
        lengths = [len(list(each)) for _, each in itertools.groupby(cell[3] for cell in row)]
        positions, segments = packed(lengths)
        positions[real:] = 0
        assert torch.equal(data[index]["positions"], positions)
        assert torch.equal(data[index]["segments"], segments)


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_an_epoch_packs_the_documents_in_its_order(epoch: int) -> None:
    data = rows(TEXTS, 5, seed=3)
    order = np.random.default_rng((3, epoch)).permutation(len(TEXTS))
    wanted = plain([TEXTS[i] for i in order], 5)
    assert len(data) == len(wanted) - (wanted[-1][1] < 5)
    for index in range(len(data)):
        assert cells(data[epoch * len(data) + index]) == wanted[index][0]


def test_no_target_is_of_another_document(make: Callable[..., Text]) -> None:
    data = make()
    data.setup()
    seen = 0
    for split in ("train", "val", "test"):
        for batch in data.loader(split):
            inside = (batch["tokens"] != END) & (batch["targets"] >= 0) & (batch["targets"] != END)
            assert torch.equal(batch["tokens"][inside], batch["targets"][inside])
            for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True):
                for segment in segments.unique():
                    letters = set(tokens[segments == segment].tolist()) - {END}
                    assert len(letters) <= 1
            seen += int(inside.sum())
    assert seen > 500


def test_every_byte_is_a_target_once_in_evaluation(
    make: Callable[..., Text], folder: Path, as_rank: Any
) -> None:
    for split in ("val", "test"):
        found: list[int] = []
        for rank in range(3):
            data = as_rank(make(batch_size=2), rank, 3)
            for batch in data.loader(split):
                targets = batch["targets"]
                found += targets[(targets >= 0) & (targets != END)].tolist()
        names = {chr(letter) for letter in found}
        contents = [path.read_bytes() for path in folder.iterdir()]
        wanted = [byte for each in contents if chr(each[0]) in names for byte in each]
        assert sorted(found) == sorted(wanted) and found


def train_rows(data: Text, epoch: int, count: int | None = None) -> list[tuple]:
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    return [
        tuple(row.tolist()) for batch in itertools.islice(loader, count) for row in batch["tokens"]
    ]


def test_epochs_differ_and_repeat_by_seed(make: Callable[..., Text]) -> None:
    first, again = train_rows(make(), 0), train_rows(make(), 0)
    assert first == again != train_rows(make(), 1)
    assert first != train_rows(make(seed=1), 0)
    assert sorted(first) != sorted(train_rows(make(), 1)), "documents are packed anew"
    assert train_rows(make(), 1) == train_rows(make(), 1)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_workers_change_nothing(make: Callable[..., Text]) -> None:
    assert train_rows(make(num_workers=1), 2) == train_rows(make(), 2)


def test_processes_share_the_rows_of_one(make: Callable[..., Text], as_rank: Any) -> None:
    one = make(batch_size=8)
    whole = train_rows(one, 1)
    parts = [train_rows(as_rank(make(batch_size=4), rank, 2), 1) for rank in (0, 1)]
    steps = len(parts[0]) // 4
    assert steps and len(parts[0]) == len(parts[1]) == 4 * steps
    for step in range(steps):
        both = [row for part in parts for row in part[4 * step : 4 * step + 4]]
        assert sorted(both) == sorted(whole[8 * step : 8 * step + 8])


def test_a_number_of_tokens_is_of_the_first_documents() -> None:
    data, part = rows(TEXTS, 4), rows(TEXTS, 4, most=10)
    assert part.total == 10 and len(part) == 3
    for index in (0, 1):
        assert cells(part[index]) == cells(data[index])
    assert cells(part[2])[:2] == cells(data[2])[:2]
    assert part[2]["targets"].tolist()[2:] == [-100, -100]
    drawn = rows(TEXTS, 5, seed=1, most=10)
    for epoch in range(3):
        found = torch.cat([drawn[2 * epoch + row]["tokens"] for row in (0, 1)])
        assert sorted(found.tolist()) == sorted(data.tokens[:10].tolist())
    with pytest.raises(ValueError, match=r"train_tokens is 99999999, and .* has \d+ tokens: give"):
        Text(train_tokens=99999999).setup("fit")


def test_rows_of_a_context_beyond_the_text_cost_no_more_than_it(folder: Path) -> None:
    data = Text("files", folder, context=10**15, batch_size=1)
    wanted = Text("files", folder, context=100, batch_size=1)
    for split in ("val", "test"):
        (batch,) = data.loader(split)
        rest = torch.cat([each["targets"].flatten() for each in wanted.loader(split)])
        assert torch.equal(batch["targets"].flatten(), rest[rest != -100])
    with pytest.raises(
        ValueError, match=r"which make 0 rows of 1000000000000000, and 1 are needed"
    ):
        data.train_dataloader()


def test_the_library_is_split_by_name_without_its_tests() -> None:
    data = Text()
    parts = complete(data._found())
    names = {split: [name for name, _ in chosen] for split, chosen in parts.items()}
    assert {s: sorted(n) for s, n in names.items()} != names, "the hash mixes the names"
    everything = [name for each in names.values() for name in each]
    assert len(everything) == len(set(everything)) > 300
    assert not any("test" in name.split("/") for name in everything)
    assert {"argparse.py", "json/decoder.py", "pydoc_data/topics/lambda"} <= set(everything)
    assert not any("site-packages" in name or name.startswith("_sysconf") for name in everything)
    assert 0.05 < len(names["val"]) / len(everything) < 0.2
    other = {"train": dict(sorted(data._found()["train"].items()))}
    assert names == {s: [n for n, _ in chosen] for s, chosen in complete(other).items()}
    assert (data.vocabulary, data.end, data.context) == (257, 256, 128)


def test_splits_of_a_folder_and_of_a_single_file(tmp_path: Path) -> None:
    for split, letter in (("train", b"a"), ("val", b"b"), ("test", b"c")):
        (tmp_path / "own" / split).mkdir(parents=True)
        (tmp_path / "own" / split / "x.txt").write_bytes(letter * 50)
        (tmp_path / "own" / split / "x.md").write_bytes(b"z")
    data = Text(source="files", root=tmp_path / "own", context=8, batch_size=2)
    data.setup()
    for split, letter in (("train", 97), ("val", 98), ("test", 99)):
        assert set(data._data[split].tokens.tolist()) == {letter, END}  # type: ignore[union-attr]
    lines = [f"line {number}\n" for number in range(100)]
    (tmp_path / "single").write_text("".join(lines))
    data = Text(source="files", root=tmp_path / "single", context=8, batch_size=2)
    data.setup()
    texts = [
        data.decode(torch.from_numpy(data._data[s].tokens[:-1].astype(int)))
        for s in ("train", "val", "test")  # type: ignore[union-attr]
    ]
    assert "".join(texts) == "".join(lines)
    assert [text.count("\n") for text in texts] == pytest.approx([80, 10, 10], abs=2)
    assert all(text.endswith("\n") for text in texts)
    cut = complete({"train": {"one": "€".encode() * 101}})
    assert all(content.decode() for (_, content) in itertools.chain(*cut.values()))
