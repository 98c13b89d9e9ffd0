"""Text: tokenizers, sets of `datasets`, and what is refused."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch

from tasks.data import LabelledText, Text
from tasks.data.tokens import Subwords

END = 256


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


@pytest.fixture
def subwords(tmp_path: Path) -> str:
    """Byte-level pairs, that split characters of several bytes."""
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(["the cat sat on the mat, größer als € 5"] * 5, vocab_size=270)
    made.enable_truncation(4)
    path = str(tmp_path / "tokenizer.json")
    made.save(path)
    return path


@pytest.mark.parametrize("text", ["the größer 🙂 €, the end\n", "  ", "€", "plain"])
def test_bytes_of_subwords_are_those_of_the_text(text: str, subwords: str) -> None:
    made = Subwords(subwords)
    tokens, counts, rest = made.encode("x", text.encode())
    assert made.decode(tokens.tolist()) == text and tokens.max() < made.size
    assert counts.min() >= 0 and (counts.sum(), rest) == (len(text.encode()), 0)


def test_bytes_of_words_are_those_up_to_their_ends(tmp_path: Path) -> None:
    """Of one to four bytes a character; spaces count with the word after them, or with the end."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "end": 1, "?": 9}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    words.save(str(tmp_path / "words.json"))
    text = "ö ߿ € 🙂\n the \n"
    made = Subwords(str(tmp_path / "words.json"))
    tokens, counts, rest = made.encode("x", text.encode())
    assert (tokens.tolist(), counts.tolist(), rest) == ([9, 9, 9, 9, 0], [2, 3, 4, 5, 5], 2)
    assert made.size == 10
    (tmp_path / "text.txt").write_text(text * 50)
    path = str(tmp_path / "words.json")
    data = Text("files", tmp_path / "text.txt", tokenizer=path, context=8, batch_size=1)
    batches = [batch for split in ("val", "test") for batch in data.loader(split)]
    counted = sum(int(batch["bytes"].sum()) for batch in batches)
    data.setup("fit")
    held: Any = data._data["train"]
    assert counted + held.bytes.sum() == len(text.encode()) * 50


def test_a_tokenizer_gives_vocabulary_targets_and_bytes(subwords: str, tmp_path: Path) -> None:
    text = "the cat sat on the größer mat\n" * 20
    (tmp_path / "text.txt").write_text(text)
    data = Text("files", tmp_path / "text.txt", tokenizer=subwords, context=8, batch_size=2)
    data.setup()
    library = tokenizers.Tokenizer.from_file(subwords)
    library.no_truncation()
    assert data.vocabulary == library.get_vocab_size() + 1
    counts, found = 0, []
    for split in ("train", "val", "test"):
        held: Any = data._data[split]
        counts += held.bytes.sum()
        found += [token for token in held.tokens.tolist() if token != data.end]
    assert counts == len(text.encode())
    assert library.decode(found, skip_special_tokens=False) == text
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(ValueError, match=r"broken.json is not a file that tokenizers"):
        _ = Text(tokenizer=broken).vocabulary
    for path, kind in (("none.json", "not there"), (str(tmp_path), "a folder")):
        with pytest.raises(FileNotFoundError, match=rf"{path} is {kind}: .* --data.tokenizer FILE"):
            _ = Text(tokenizer=path).vocabulary


def test_a_checkpoint_knows_what_its_tokens_stand_for(subwords: str, tmp_path: Path) -> None:
    """Not another vocabulary of the same size; the same one in another file is."""
    vocabulary = tokenizers.Tokenizer.from_file(subwords).get_vocab()
    saved = {}
    for name, numbers in (("same", 0), ("other", 1)):
        turned = {word: (n + numbers) % len(vocabulary) for word, n in vocabulary.items()}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(turned, next(iter(turned))))
        saved[name] = str(tmp_path / f"{name}.json")
        made.save(saved[name])
    for kind in (Text, LabelledText):
        trained, same, other, plain = (
            kind(tokenizer=path) for path in (subwords, saved["same"], saved["other"], None)
        )
        assert trained.tokens.size == other.tokens.size
        for data in (trained, same):
            data.load_state_dict(trained.state_dict())
        plain.load_state_dict(kind().state_dict())
        for data, name in ((other, r"other\.json"), (plain, "bytes .tokenizer is null.")):
            with pytest.raises(
                ValueError, match=rf"than those of .*{name}: give .* --data.tokenizer"
            ):
                data.load_state_dict(trained.state_dict())


def test_what_is_no_utf8_is_read_as_bytes_or_refused(subwords: str, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("größer\n".encode("latin-1") * 40)
    data = Text("files", tmp_path / "latin.txt", context=8, batch_size=2)
    assert 0xF6 in next(iter(data.train_dataloader()))["tokens"]
    with pytest.raises(ValueError, match=r"latin.txt is not UTF-8 \(byte 2\): convert it"):
        Text("files", tmp_path / "latin.txt", tokenizer=subwords).setup("fit")


def test_empty_binary_and_tiny_files(make: Callable[..., Text], folder: Path) -> None:
    (folder / "dot.txt").write_bytes(b".")
    before = make()
    before.setup()
    totals = {split: before._data[split].total for split in before._data}  # type: ignore[union-attr]
    for name in ("nothing.txt", "void.txt"):
        (folder / name).touch()
    data = make()
    with pytest.warns(UserWarning, match=r"left out 2 empty documents: (nothing|void)") as told:
        data.setup("fit")
        data.setup("test")
    assert len(told) == 1
    assert totals == {s: data._data[s].total for s in totals}  # type: ignore[union-attr]
    assert any(46 in data._data[s].tokens for s in totals)  # type: ignore[union-attr]
    (folder / "picture.txt").write_bytes(b"\x89PNG\0\0")
    with pytest.raises(ValueError, match=r"picture.txt has a zero byte, so it is binary"):
        make().setup("fit")


def test_no_text_at_all_is_said(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    data = Text("files", tmp_path, train_tokens=100)
    with (
        pytest.warns(UserWarning, match="left out 2 empty documents"),
        pytest.raises(
            ValueError, match=r"there is no text to train on in .*: all of its documents"
        ),
    ):
        data.setup("fit")


def test_too_little_text(tmp_path: Path, as_rank: Any) -> None:
    (tmp_path / "short.txt").write_bytes(b"abc\n" * 10)
    data = Text("files", tmp_path / "short.txt", context=8, batch_size=5)
    message = r"train text has 33 tokens, which make 4 rows of 8, and 5 are needed for 1 processes"
    with pytest.raises(ValueError, match=message):
        data.train_dataloader()
    (tmp_path / "short.txt").write_bytes(b"a")
    data = Text("files", tmp_path / "short.txt", context=8, batch_size=1)
    with pytest.raises(ValueError, match="train text has 0 tokens, which make 0 rows of 8, and 1"):
        data.train_dataloader()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "web"}, r"source is 'web'; expected one of"),
        ({"source": "files"}, r"source files needs --data.root"),
        ({"source": "datasets"}, r"source datasets needs --data.dataset"),
        ({"root": "x"}, r"root x is given, but source stdlib needs none; .*--data.source files"),
        ({"dataset": "x"}, r"dataset x is given, but source stdlib needs none"),
        ({"context": 0}, r"context is 0; expected at least 1"),
        ({"batch_size": 0}, r"batch_size is 0"),
        ({"eval_tokens": 0}, r"eval_tokens is 0"),
        ({"source": "files", "root": "x", "suffixes": []}, r"suffixes is empty"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Text(**options)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file or folder of text at"):
        Text("files", tmp_path / "none").setup("fit")
    (tmp_path / "a.md").write_text("x")
    with pytest.raises(FileNotFoundError, match=r"no file in .* ends in .txt: name the endings"):
        Text("files", tmp_path).setup("fit")


def test_prompts_begin_with_the_end_of_what_was_before() -> None:
    data = Text(prompts=["def ", "ö"])
    found = [(b["prompt"], b["tokens"].tolist()) for b in data.predict_dataloader()]
    assert found == [(["def "], [[END, *b"def "]]), (["ö"], [[END, *"ö".encode()]])]
    assert data.decode(torch.tensor([END, 0x61, 0xFF, END])) == "a�"
    raw = b"gr\xf6\xdfer".decode("utf-8", "surrogateescape")  # as Python reads arguments
    (found,) = Text(prompts=[raw]).predict_dataloader()
    assert found["tokens"].tolist() == [[END, *b"gr\xf6\xdfer"]]
    assert found["prompt"] == ["gr\ufffd\ufffder"]
    with pytest.raises(ValueError, match="no prompts to go on with"):
        Text().setup("predict")


class Column(list):
    column_names: tuple[str, ...] = ("text", "label")

    def __getitem__(self, key: Any) -> Any:
        return list(self) if key == "text" else [0] * len(self) if key == "label" else None


def test_sets_of_the_library_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    data = Text("datasets", dataset="some/set", context=4, batch_size=1)
    with pytest.raises(ImportError, match=r"pip install 'mmpos\[datasets\]'"):
        data.prepare_data()
    asked = []

    def load(name: str, subset: str | None) -> dict[str, Column]:
        asked.append((name, subset))
        return {"train": Column(["hello", "", "there"] * 9), "validation": Column(["val", "id"])}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    with pytest.warns(UserWarning, match="left out 9 empty documents: 000000001, .*25$"):
        data.setup()
    assert asked == [("some/set", None)]
    held: dict[str, Any] = data._data
    assert sorted(held["val"].tokens.tolist()) == sorted([*b"valid", END, END, END])
    assert held["test"].total % 6 == 0 and held["train"].total + held["test"].total == 6 * 18
    with pytest.raises(ValueError, match=r"no text in a column 'label': name one of text, label"):
        Text("datasets", dataset="x", column="label").setup("fit")
