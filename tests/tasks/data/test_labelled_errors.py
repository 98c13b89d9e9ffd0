"""Labelled texts: FASTA, folders, tokenizers, sets of `datasets`, and what is refused."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

from tasks.data import LabelledText
from tasks.data.fasta import records


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Files below a new folder, by their paths."""

    def make(files: dict[str, str | bytes]) -> Path:
        for name, content in files.items():
            path = tmp_path / "data" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return tmp_path / "data"

    return make


NUMBERED, AS_BYTES = ("a#3", "a", "a#3#3", "#4"), (b"A", b"C", b"G", b"T")


def fasta(letter: str, count: int = 10) -> str:
    return "".join(f">{letter}{i}\n{letter * (i + 3)}\n" for i in range(count))


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (">a\nacgt\nNN\n>b\nTT", [("a", b"ACGTNN"), ("b", b"TT")]),
        (">a some words\r\n MKV L\r\n\r\nW*\r\n", [("a", b"MKVLW")]),
        (">a\nMK*V\n*\n", [("a", b"MK*V")]),
        ("; a comment\n>a\nAC\n;another\nGT-\n", [("a", b"ACGT-")]),
        (">a\n>b\n\n>\nAC", [("a", b""), ("b", b""), ("#3", b"AC")]),
        (">a\tx\nA\n> a x\nC\n>\ta\nG", [("a", b"A"), ("a#2", b"C"), ("a#3", b"G")]),
        (">a#3\nA\n>a\nC\n>a\nG\n>\t\nT", [*zip(NUMBERED, AS_BYTES, strict=True)]),
        ("\ufeff\n>ä\nAC\n", []),
        ("", []),
    ],
)
def test_records_of_fasta(content: str, wanted: list, tmp_path: Path) -> None:
    path = tmp_path / "x.fa"
    path.write_bytes(content.encode())
    assert records(path) == (wanted or ([("ä", b"AC")] if content else []))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\nACGT\n>a\nAC", r"x\.fa, line 2: text before the first header; in FASTA each"),
        (b">a\nAC\n10 ACGT", r"x\.fa, line 3: '1' is no symbol of a sequence; expected letters"),
        (b">a\nAC\xffGT", r"x\.fa, line 2: 'ÿ' is no symbol"),
        (b">a\nAC\0GT", r"x\.fa, line 2: '\\x00' is no symbol"),
    ],
)
def test_what_is_no_fasta(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.fa").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        records(tmp_path / "x.fa")


@pytest.mark.parametrize("suffix", ["fasta", "fa", "faa", "FNA"])
def test_a_fasta_file_is_a_class_and_a_record_is_a_text(suffix: str, write: Any) -> None:
    root = write({f"x.{suffix}": fasta("A"), f"y.{suffix}": fasta("C"), "README.md": "none"})
    data = LabelledText("files", root, batch_size=2)
    data.setup()
    assert data.classes == {"class": ["x", "y"]}
    texts = [
        (bytes(t), label)
        for d in data._data.values()
        for t, label in zip(d.texts, d.labels, strict=True)
    ]
    assert len(texts) == 20 and all(text[:1] == b"AC"[label : label + 1] for text, label in texts)


def test_splits_of_fasta_files_and_folders(write: Any) -> None:
    parts = {"Train": "A", "valid": "C", "test": "G"}
    files = {f"{part}/x.fa": fasta(letter, 2) for part, letter in parts.items()}
    files |= {f"{part}/y/deep/1.txt": letter.lower() for part, letter in parts.items()}
    files |= {f"{part}/y/2.fna": f">r\n{letter}" for part, letter in parts.items()}
    data = LabelledText("files", write(files | {".hidden/z.txt": "z"}), batch_size=1)
    data.setup()
    for split, letter in zip(("train", "val", "test"), "ACG", strict=True):
        own = data._data[split]
        assert {bytes(text)[:1].upper() for text in own.texts} == {letter.encode()}
        assert sorted(own.labels) == [0, 0, 1, 1]


TEN = {f"a/{i}.txt": "one" for i in range(10)} | {f"b/{i}.txt": "two" for i in range(10)}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a/1.txt": "x"}, r"has 1 classes \(a\); expected two or more, each a folder of texts or"),
        ({"1.txt": "x"}, r"has 0 classes \(\); expected two or more"),
        ({**TEN, "c/x.md": "x"}, r"no file in .*c ends in \.txt, or as FASTA in \.fasta \.fa"),
        ({**TEN, "c/1.txt": "x", "c/2.txt": "x"}, r"class c has 2 texts in train, expected 3 or"),
        ({**TEN, "c.fa": ""}, r"class c has 0 texts in train, expected 3 or more to hold out val"),
        ({**TEN, "a.fa": fasta("A")}, r"a and .*a\.fa are both of class a: rename one"),
        ({**TEN, "a/11.txt": b"\x89PNG\0"}, r"a/11\.txt has a zero byte, so it is binary"),
        ({"val/a.fa": ">r\nA", "val/b.fa": ">r\nA"}, r"no train folder with classes"),
        (
            {**{f"train/{k}": v for k, v in TEN.items()}, "val/a/1.txt": "x", "val/c/1.txt": "x"},
            r"val of .* other classes than train: missing \['b'\], surplus \['c'\]",
        ),
        (
            {f"{part}/{k}.fa": ">r\nA" for part in ("val", "valid", "train") for k in "ab"},
            r"val and .*valid are both for val: remove one",
        ),
    ],
)
def test_folders_that_cannot_be_used(files: dict, message: str, write: Any) -> None:
    root = write(files)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        LabelledText("files", root).setup("fit")


@pytest.mark.parametrize("ending", ["gz", "GZ", "bz2", "zip"])
def test_a_compressed_fasta_file_is_not_passed_over(ending: str, write: Any) -> None:
    root = write({**TEN, f"c.fasta.{ending}": b"\x1f\x8b"})
    message = rf"c\.fasta\.{ending} is compressed: write it as c\.fasta"
    with pytest.raises(ValueError, match=message):
        LabelledText("files", root).setup("fit")
    with pytest.raises(ValueError, match=message):
        LabelledText(predict_path=root / f"c.fasta.{ending}").setup("predict")
    (root / f"c.fasta.{ending}").rename(root / "a" / f"c.fasta.{ending}")
    with pytest.raises(ValueError, match=message):
        LabelledText("files", root).setup("fit")
    (root / "a" / "c.fasta").write_text(fasta("A"))  # beside what it was made of
    data = LabelledText("files", root)
    data.setup("fit")
    assert len(data._data["train"]) == 8 + 16
    (root / "a" / "c.fasta").unlink()
    (root / "a" / f"c.fasta.{ending}").rename(root / "a" / f"notes.{ending}")
    LabelledText("files", root).setup("fit")


def test_empty_texts_are_left_out_with_one_warning(write: Any) -> None:
    root = write({**TEN, "a/void.txt": "", "c.fa": fasta("A") + ">none\n>star\n*\n"})
    data = LabelledText("files", root, batch_size=2)
    with pytest.warns(
        UserWarning, match=r"3 empty texts: a/void\.txt, c\.fa:none, c\.fa:star"
    ) as w:
        data.setup("fit")
        data.setup("test")
    assert len(w) == 1
    assert all(len(text) for samples in data._data.values() for text in samples.texts)
    with pytest.raises(
        FileNotFoundError, match=r"no folder of classes at .*none: give --data.root"
    ):
        LabelledText("files", root / "none").setup("fit")


def test_tokenizers_and_what_is_no_utf8(write: Any, tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "two": 1, "?": 9}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    path = str(tmp_path / "words.json")
    words.save(path)
    data = LabelledText("files", write(TEN), tokenizer=path, batch_size=2)
    data.setup()
    assert data.vocabulary == 10
    assert {text.tolist()[0] for text in data._data["train"].texts} == {0, 1}
    latin = write({"a/latin.txt": "größer".encode("latin-1")})
    with pytest.raises(ValueError, match=r"a/latin\.txt is not UTF-8 \(byte 2\): convert it"):
        LabelledText("files", latin, tokenizer=path).setup()
    data = LabelledText("files", latin, batch_size=2)
    data.setup()
    assert any(0xF6 in text for samples in data._data.values() for text in samples.texts)
    blank = write({"a/latin.txt": "  "})
    with pytest.raises(ValueError, match=r"a/latin\.txt has no tokens"):
        LabelledText("files", blank, tokenizer=path).setup()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "web"}, r"source is 'web'; expected one of"),
        ({"source": "files"}, r"source files needs --data.root"),
        ({"source": "datasets"}, r"source datasets needs --data.dataset"),
        ({"root": "x"}, r"root x is given, but source stdlib needs none; .*--data.source files"),
        ({"context": 0}, r"context is 0; expected at least 1"),
        ({"eval_samples": 0}, r"eval_samples is 0"),
        ({"source": "files", "root": "x", "suffixes": []}, r"suffixes is empty"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LabelledText(**options)


def test_too_few_samples_and_nothing_to_predict(write: Any, as_rank: Any) -> None:
    root = write(TEN | {"c/x.txt": ""})
    data = LabelledText("files", write({**TEN, "c/x.txt": "", "c/1.txt": "", "c/2.txt": ""}))
    with (
        pytest.warns(UserWarning, match="left out 3 empty"),
        pytest.raises(ValueError, match="class c has 0 texts"),
    ):
        data.setup()
    with pytest.raises(ValueError, match="no texts to predict: give a file, a FASTA file or a"):
        LabelledText().setup("predict")
    with pytest.raises(FileNotFoundError, match=r"no file or folder at .*nowhere"):
        LabelledText(predict_path=root / "nowhere").setup("predict")
    with pytest.raises(ValueError, match=r"has no text: x\.txt is empty"):
        LabelledText(predict_path=root / "c" / "x.txt").setup("predict")
    (root / "c").rename(root / ".c")
    with pytest.raises(ValueError, match="16 train samples are too few for 1 processes with batch"):
        LabelledText("files", root, batch_size=17).train_dataloader()


class Rows(dict):
    """A split as `datasets` has it."""

    def __init__(self, names: list[str] | None, **columns: list) -> None:
        super().__init__(columns)
        self.column_names = list(columns)
        self.features = {"label": SimpleNamespace(names=names) if names else SimpleNamespace()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LabelledText]:
    def make(names: list[str] | None = None, **splits: list) -> LabelledText:
        sets = {
            split: Rows(names, text=[f"text {label}" for label in labels], label=labels)
            for split, labels in splits.items()
        }
        library = SimpleNamespace(load_dataset=lambda name, subset: sets)
        monkeypatch.setitem(sys.modules, "datasets", library)
        return LabelledText("datasets", dataset="some/set", batch_size=2)

    return make


def test_sets_of_the_library_datasets(hub: Callable[..., LabelledText]) -> None:
    data = hub(["bad", "good"], train=[0, 1] * 10, validation=[1, 0, 1], test=[-1, -1])
    with pytest.warns(UserWarning, match="some/set hides the labels of test: it is held out of tr"):
        data.setup()
    assert data.classes == {"class": ["bad", "good"]}
    for split, count in {"train": 18, "val": 3, "test": 2}.items():
        own = data._data[split]
        assert [bytes(text) for text in own.texts] == [b"text %d" % label for label in own.labels]
        assert len(own) == count
    assert hub(train=["x", "a"] * 9).classes == {"class": ["a", "x"]}
    assert hub(train=[10, 9] * 9).classes == {"class": ["9", "10"]}
    for splits, message in [
        ({"train": [0, 1] * 9, "validation": [2]}, "val of some/set has the label 2, expected one"),
        ({"train": [[0], [1]]}, r"train of some/set has \[0\] in the column 'label'"),
        ({"train": [1] * 9}, r"the data has one class \(1\); expected two or more"),
    ]:
        with pytest.raises(ValueError, match=message):
            hub(**splits).setup()
    other = hub(train=[0, 1] * 9)
    other.label = "target"
    with pytest.raises(ValueError, match=r"no column 'target': name that of its labels, one of te"):
        other.prepare_data()
