"""Where labelled sounds are found, in layouts written by hand, and what is said of faulty ones."""

import csv
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torchaudio.datasets import SPEECHCOMMANDS

from tasks.data import audio_sources
from tasks.data.audio_sources import (
    Clip,
    Found,
    audioset,
    complete,
    download_speechcommands,
    esc50,
    folder,
    speechcommands,
    table,
)


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def write(path: Path, *rows: Sequence[object], encoding: str = "utf-8") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding=encoding) as file:
        csv.writer(file).writerows(rows)


def named(found: Found, root: Path) -> dict[str, list[tuple[str, list[str]]]]:
    """Paths below the root, and the names of labels."""
    return {
        split: [
            (str(Path(path).relative_to(root)), [found.classes[label] for label in labels])
            for path, labels in clips
        ]
        for split, clips in found.splits.items()
    }


def says(error: type[Exception], *words: str) -> Callable[[Callable[[], object]], None]:
    """A check that an error of one line says all of ``words``."""

    def check(call: Callable[[], object]) -> None:
        with pytest.raises(error) as raised:
            call()
        text = str(raised.value)
        assert "\n" not in text
        for word in words:
            assert word in text

    return check


# folders


def test_folders_of_classes_in_any_depth(tmp_path: Path) -> None:
    touch(tmp_path, "été/2.wav", "été/x/y/1.FLAC", "bee/1.mp3", "bee/.2.mp3", "bee/note.txt")
    found = folder(tmp_path)
    assert found.classes == ["bee", "été"] and not found.multilabel
    assert named(found, tmp_path) == {
        "train": [("bee/1.mp3", ["bee"]), ("été/2.wav", ["été"]), ("été/x/y/1.FLAC", ["été"])]
    }


def test_a_hidden_folder_is_no_class(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.wav", "b/1.wav", ".cache/1.wav")
    assert folder(tmp_path).classes == ["a", "b"]


def test_folders_of_splits(tmp_path: Path) -> None:
    touch(tmp_path, "Train/a/1.wav", "Train/b/2.wav", "validation/a/3.wav", "validation/b/4.wav")
    assert named(folder(tmp_path), tmp_path) == {
        "train": [("Train/a/1.wav", ["a"]), ("Train/b/2.wav", ["b"])],
        "val": [("validation/a/3.wav", ["a"]), ("validation/b/4.wav", ["b"])],
    }


def test_folders_with_faults(tmp_path: Path) -> None:
    says(FileNotFoundError, "nowhere does not exist", "--data.root")(
        lambda: folder(tmp_path / "nowhere")
    )
    touch(tmp_path, "one/a/1.wav", "empty/a/1.wav", "empty/b/text.txt", "file.wav")
    says(FileNotFoundError, "file.wav is a file", "--data.root")(
        lambda: folder(tmp_path / "file.wav")
    )
    says(ValueError, "1 class folders (a)", "at least two")(lambda: folder(tmp_path / "one"))
    says(FileNotFoundError, "no sounds in", str(tmp_path / "empty/b"))(
        lambda: folder(tmp_path / "empty")
    )
    touch(tmp_path, "s/train/a/1.wav", "s/train/b/1.wav", "s/val/a/1.wav", "s/val/c/1.wav")
    says(ValueError, "missing ['b'], surplus ['c']")(lambda: folder(tmp_path / "s"))


# SpeechCommands


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    base = tmp_path / "SpeechCommands" / "speech_commands_v0.02"
    for word in ("yes", "no", "up"):
        for speaker in range(5):
            touch(base, f"{word}/{speaker:08x}_nohash_0.wav", f"{word}/{speaker:08x}_nohash_1.wav")
    touch(base, "_background_noise_/pink_noise.wav", "_background_noise_/0_nohash_0.wav")
    touch(base, "README.md", "yes/other.wav")
    for name, speaker in (("validation", 1), ("testing", 3)):
        lines = [f"{w}/{speaker:08x}_nohash_{n}.wav\n" for w in ("yes", "no", "up") for n in (0, 1)]
        (base / f"{name}_list.txt").write_text("".join(lines))
    return tmp_path


def test_speechcommands_are_those_of_torchaudio(commands: Path) -> None:
    found = speechcommands(commands)
    assert found.classes == ["no", "up", "yes"] and not found.multilabel
    theirs = {}
    for split, subset in (("train", "training"), ("val", "validation"), ("test", "testing")):
        data = SPEECHCOMMANDS(commands, subset=subset)
        items = [data.get_metadata(number) for number in range(len(data))]
        theirs[split] = sorted((f"SpeechCommands/{path}", [label]) for path, _, label, *_ in items)
    ours = named(found, commands)
    assert {split: sorted(own) for split, own in ours.items()} == theirs
    assert [len(ours[split]) for split in ("train", "val", "test")] == [18, 6, 6]
    base = commands / "SpeechCommands" / "speech_commands_v0.02"
    assert speechcommands(base) == found
    assert complete(found, 0) == found.splits


def test_speechcommands_not_whole(commands: Path) -> None:
    base = commands / "SpeechCommands" / "speech_commands_v0.02"
    says(FileNotFoundError, "not in the folder", "--data.download true")(
        lambda: speechcommands(commands / "elsewhere")
    )
    (base / "yes" / f"{3:08x}_nohash_1.wav").unlink()
    says(
        FileNotFoundError, f"yes/{3:08x}_nohash_1.wav", "remove this folder", "--data.download true"
    )(lambda: speechcommands(commands))
    (base / "validation_list.txt").unlink()
    says(FileNotFoundError, "lacks validation_list.txt", "--data.download true")(
        lambda: speechcommands(commands)
    )


def test_speechcommands_are_fetched_once(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fetch(root: Path, download: bool) -> None:
        calls.append((root, root.is_dir(), download))
        raise RuntimeError("no network")

    monkeypatch.setattr(audio_sources, "SPEECHCOMMANDS", fetch)
    download_speechcommands(commands)
    download_speechcommands(commands / "SpeechCommands" / "speech_commands_v0.02")
    assert calls == []
    new = commands / "new" / "er"
    says(ConnectionError, "no network", str(new), "try again")(lambda: download_speechcommands(new))
    assert calls == [(new, True, True)]


# ESC-50


def write_esc50(root: Path, folds: int = 5, **changed: str) -> None:
    names = {0: "dog", 3: "rooster", 11: "sea waves"}  # as in ESC-10, with gaps
    rows: list[tuple[object, ...]] = [
        (f"{fold}-{take}-A-{target}.wav", fold, target, name, "True", 1, "A")
        for take in (1, 2)
        for target, name in sorted(names.items(), reverse=True)
        for fold in range(1, folds + 1)
    ]
    columns = ("filename", "fold", "target", "category", "esc10", "src_file", "take")
    rows[4] = tuple(changed.get(c, v) for c, v in zip(columns, rows[4], strict=True))
    write(root / "meta" / "esc50.csv", columns, *rows)
    touch(root / "audio", *(str(row[0]) for row in rows))


@pytest.mark.parametrize(("fold", "val"), [(5, 4), (1, 5), (3, 2)])
def test_esc50_by_folds(tmp_path: Path, fold: int, val: int) -> None:
    write_esc50(tmp_path)
    found = esc50(tmp_path, fold)
    assert found.classes == ["dog", "rooster", "sea waves"] and not found.multilabel
    by_fold = {}
    for split, clips in named(found, tmp_path / "audio").items():
        by_fold[split] = {name[0] for name, _ in clips}
        targets = {"0": "dog", "3": "rooster", "11": "sea waves"}
        for name, labels in clips:
            assert labels == [targets[name[:-4].rpartition("-")[2]]]
    rest = {"1", "2", "3", "4", "5"} - {str(fold), str(val)}
    assert by_fold == {"train": rest, "val": {str(val)}, "test": {str(fold)}}
    assert sum(map(len, found.splits.values())) == 30


def test_esc50_with_faults(tmp_path: Path) -> None:
    says(FileNotFoundError, "does not exist", "esc50.csv", "--data.root")(
        lambda: esc50(tmp_path / "x")
    )
    says(FileNotFoundError, "no esc50.csv in", "meta")(lambda: esc50(tmp_path))
    write_esc50(tmp_path)
    says(ValueError, "fold is 6", "1, 2, 3, 4, 5", "--data.fold")(lambda: esc50(tmp_path, 6))
    for name in ("1-1-A-0.wav", "2-1-A-0.wav"):
        (tmp_path / "audio" / name).unlink()
    says(FileNotFoundError, "1-1-A-0.wav", "2 of 30", "line 12 of")(lambda: esc50(tmp_path))
    cases: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
        ({"fold": "five"}, ("line 6 of", "fold is 'five'", "whole number")),
        ({"target": "0"}, ("target 0 was sea waves before",)),
        ({"filename": "1-1-A-11.wav"}, ("line 6 of", "line 2 of", "both of", "1-1-A-11.wav")),
    )
    for changed, words in cases:
        write_esc50(tmp_path, **changed)
        says(ValueError, *words)(lambda: esc50(tmp_path))
    write_esc50(tmp_path, folds=2)
    says(ValueError, "has 1, 2", "three folds")(lambda: esc50(tmp_path, 2))


# AudioSet

IDS = ["--PJHxphWEs", "Yx_1_23_456", "abc_12345_6", "Y0000000000", "-1---------", "eeeeeeeeeee"]


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    (tmp_path / "class_labels_indices.csv").write_text(
        'index,mid,display_name\n0,/m/09x0r,"Speech"\n1,/t/dd00088,"Gush"\n'
        '2,/m/05zppz,"Male speech, man speaking"\n'
    )
    head = "# Segments csv created Sun Mar  5 10:54:31 2017\n# num_ytids=3\n# YTID, start_seconds\n"
    (tmp_path / "balanced_train_segments.csv").write_text(
        f'{head}{IDS[0]}, 30.000, 40.000, "/t/dd00088,/m/09x0r"\n'
        f'{IDS[1]}, 0.000, 10.000, "/m/09x0r"\n'
        f'{IDS[4]}, 0.000, 8.000, "/m/05zppz"\n'
    )
    (tmp_path / "unbalanced_train_segments.csv").write_text(
        f'{head}{IDS[2]}, 30.000, 40.000, "/m/05zppz"\n'
    )
    (tmp_path / "eval_segments.csv").write_text(
        f'{head}{IDS[3]}, 30.000, 40.000, "/m/09x0r"\n{IDS[5]}, 0.000, 10.000, "/m/09x0r"\n'
    )
    touch(tmp_path, f"train/{IDS[0]}.wav", f"train/Y{IDS[1]}.flac", f"train/{IDS[2]}_30.000.wav")
    touch(tmp_path, f"eval/x/Y{IDS[3]}_30000_40000.ogg", "other/music.wav")
    return tmp_path


def test_audioset(videos: Path) -> None:
    with pytest.warns(UserWarning, match=rf"left out 2 of 6 .*: {IDS[4]}, {IDS[5]}$"):
        found = audioset(videos)
    assert found.classes == ["Speech", "Gush", "Male speech, man speaking"] and found.multilabel
    assert named(found, videos) == {
        "train": [
            (f"train/{IDS[0]}.wav", ["Speech", "Gush"]),
            (f"train/Y{IDS[1]}.flac", ["Speech"]),
            (f"train/{IDS[2]}_30.000.wav", ["Male speech, man speaking"]),
        ],
        "test": [(f"eval/x/Y{IDS[3]}_30000_40000.ogg", ["Speech"])],
    }


@pytest.mark.parametrize("video", IDS)
@pytest.mark.parametrize("form", ["{}", "Y{}", "{}_30", "Y{}_0.000", "{}_30.000_40.000", "Y{}_1-2"])
def test_an_id_in_a_name_is_not_mistaken(videos: Path, video: str, form: str) -> None:
    touch(videos / "only", f"{form.format(video)}.wav")
    assert list(audio_sources._by_video(videos / "only")) == [video]


def test_all_files_there_is_no_warning(videos: Path) -> None:
    touch(videos, f"{IDS[4]}.wav", f"Y{IDS[5]}.wav")
    assert {split: len(own) for split, own in audioset(videos).splits.items()} == {
        "train": 4,
        "test": 2,
    }


def test_audioset_with_faults(videos: Path) -> None:
    touch(videos, f"{IDS[4]}.wav", f"{IDS[5]}.wav", f"again/Y{IDS[0]}.wav")
    says(ValueError, f"Y{IDS[0]}.wav", f"train/{IDS[0]}.wav", "remove one")(
        lambda: audioset(videos)
    )
    (videos / f"again/Y{IDS[0]}.wav").unlink()
    more = videos / "unbalanced_train_segments.csv"
    good = more.read_text()
    for line, words in (
        (f'{IDS[0]}, 0.000, 9.000, "/m/09x0r"\n', ("line 5", IDS[0], "before")),
        ('fffffffffff, 0.000, 9.000, "/m/nope"\n', ("line 5", "/m/nope", "class_labels_indices")),
        ("fffffffffff, 0.000, 9.000\n", ("line 5", "3 values", "positive_labels")),
    ):
        more.write_text(good + line)
        says(ValueError, str(more), *words)(lambda: audioset(videos))
    more.write_text(good)
    labels = videos / "class_labels_indices.csv"
    rows = labels.read_text().splitlines(keepends=True)
    labels.write_text("".join([rows[0], *rows[:0:-1]]))
    assert audioset(videos).classes[0] == "Speech"
    labels.write_text("index,mid,display_name\nx,/m/09x0r,Speech\n")
    says(ValueError, "line 2", "index is 'x'")(lambda: audioset(videos))
    labels.unlink()
    says(FileNotFoundError, "no class_labels_indices.csv")(lambda: audioset(videos))


def test_audioset_with_nothing_to_train_on(videos: Path) -> None:
    for name in ("balanced_train_segments.csv", "unbalanced_train_segments.csv"):
        (videos / name).unlink()
    says(FileNotFoundError, "nothing to train on", "balanced_train_segments.csv")(
        lambda: audioset(videos)
    )


# tables


def test_a_table_of_one_label_each(tmp_path: Path) -> None:
    touch(tmp_path, "ü/1.wav", "2.wav", "3.flac")
    write(
        tmp_path / "train.csv",
        ("file", "labels", "note"),
        ("ü/1.wav", "dog", 1),
        ("2.wav", " 9 ", 2),
    )
    write(tmp_path / "Validation.csv", ("labels", "file"), ("dog", "3.flac"))
    write(tmp_path / "other.csv", ("x",))
    found = table(tmp_path)
    assert found.classes == ["9", "dog"] and not found.multilabel
    assert named(found, tmp_path) == {
        "train": [("ü/1.wav", ["dog"]), ("2.wav", ["9"])],
        "val": [("3.flac", ["dog"])],
    }


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("labels", ["b,ö", "ö ; b", "b;;ö", "ö;b;ö"])
def test_a_table_of_many_labels(tmp_path: Path, encoding: str, labels: str) -> None:
    touch(tmp_path, "1.wav", "2.wav", "3.wav")
    write(
        tmp_path / "train.csv",
        ("file", "labels"),
        ("1.wav", labels),
        ("2.wav", ""),
        encoding=encoding,
    )
    write(tmp_path / "test.csv", ("file", "labels"), ("3.wav", "b"), encoding=encoding)
    found = table(tmp_path)
    assert found.multilabel and found.classes == ["b", "ö"]
    assert named(found, tmp_path) == {
        "train": [("1.wav", ["b", "ö"]), ("2.wav", [])],
        "test": [("3.wav", ["b"])],
    }


@pytest.mark.parametrize("labels", ["", "a;b"])
def test_one_row_makes_a_table_multilabel(tmp_path: Path, labels: str) -> None:
    touch(tmp_path, "1.wav", "2.wav", "3.wav")
    write(tmp_path / "train.csv", ("file", "labels"), ("1.wav", "a"), ("2.wav", "b"))
    assert not table(tmp_path).multilabel
    write(tmp_path / "val.csv", ("file", "labels"), ("3.wav", labels))
    if labels:
        assert table(tmp_path).multilabel
        return
    with pytest.warns(UserWarning, match=r"line 2 of .*val.csv has no label \(1 rows have none\)"):
        assert table(tmp_path).multilabel


def test_one_tag_or_none_is_multilabel(tmp_path: Path) -> None:
    touch(tmp_path, "1.wav", "2.wav")
    write(tmp_path / "train.csv", ("file", "labels"), ("1.wav", "a"), ("2.wav", ""))
    with pytest.warns(UserWarning, match="any number of labels, here one or none"):
        found = table(tmp_path)
    assert found.multilabel and found.classes == ["a"]


def test_tables_with_faults(tmp_path: Path) -> None:
    touch(tmp_path, "1.wav", "2.wav", "3.wav")
    train, val = tmp_path / "train.csv", tmp_path / "val.csv"
    says(FileNotFoundError, "no train.csv in", "file and labels")(lambda: table(tmp_path))
    good = "file,labels\n1.wav,a\n2.wav,b\n"
    for text, words in (
        ("path,class\n1.wav,a\n", ("['path', 'class']", "expected file, labels")),
        ("file;labels\n1.wav;a\n", ("['file;labels']", "separated by commas")),
        ("", ("columns []",)),
        ("file,labels\n", ("no rows",)),
        (f"{good}3.wav,a,b\n", ("line 4 of", "other than 2 values", "quotes")),
        (f"{good}3.wav\n", ("line 4 of", "other than 2 values")),
        (f"{good}x/../1.wav,b\n", ("line 4 of", "line 2 of", "1.wav: remove one")),
        ("file,labels\n1.wav,a\n2.wav,a\n", ("1 labels (a)", "two or more")),
    ):
        train.write_text(text)
        says(ValueError, str(train if "two or" not in words[-1] else tmp_path), *words)(
            lambda: table(tmp_path)
        )
    train.write_bytes(b"file,labels\n1.wav,\xe4\n2.wav,b\n")
    says(ValueError, "UTF-8", str(train))(lambda: table(tmp_path))
    train.write_text(f"{good}nowhere.wav,a\n,a\n")
    says(FileNotFoundError, "line 4 of", "nowhere.wav", "2 of 4 files")(lambda: table(tmp_path))
    train.write_text(good)
    val.write_text("file,labels\n3.wav,c\n")
    says(ValueError, f"line 2 of {val}", "has the label c")(lambda: table(tmp_path))
    val.write_text("file,labels\n2.wav,a\n")
    says(ValueError, f"line 2 of {val}", f"line 3 of {train}")(lambda: table(tmp_path))
    val.rename(tmp_path / "valid.csv")
    val.write_text("file,labels\n3.wav,a\n")
    says(ValueError, "two tables for val")(lambda: table(tmp_path))


# splits


def clips(*counts: int) -> list[Clip]:
    return [Clip(f"{label}/{n}", (label,)) for label, c in enumerate(counts) for n in range(c)]


def test_absent_splits_are_a_tenth_of_every_class() -> None:
    found = Found(["a", "b", "c"], {"train": clips(40, 3, 20)}, multilabel=False)
    whole = complete(found, 0)
    counts = {split: Counter(clip.labels[0] for clip in own) for split, own in whole.items()}
    assert counts["val"] == counts["test"] == {0: 4, 1: 1, 2: 2} and list(whole) == [
        "train",
        "val",
        "test",
    ]
    assert sorted(clip for own in whole.values() for clip in own) == sorted(found.splits["train"])
    assert complete(found, 0) == whole != complete(found, 1)


def test_what_a_source_has_is_kept() -> None:
    test = [Clip("t", (1,))]
    whole = complete(Found(["a", "b"], {"train": clips(10, 20), "test": test}, multilabel=False), 0)
    assert whole["test"] == test
    assert Counter(clip.labels[0] for clip in whole["val"]) == {0: 1, 1: 2}
    assert len(whole["train"]) == 27


def test_of_many_labels_a_tenth_of_all_is_held_out() -> None:
    train = [Clip(str(n), tuple(range(n % 2, n % 3 + 1))) for n in range(50)]
    whole = complete(Found(["a", "b"], {"train": train}, multilabel=True), 3)
    assert [len(own) for own in whole.values()] == [40, 5, 5]
    assert sorted(clip for own in whole.values() for clip in own) == sorted(train)


@pytest.mark.parametrize(("counts", "told"), [((9, 2), "2 sounds of b"), ((0, 9), "0 sounds of a")])
def test_too_few_to_hold_out(counts: tuple[int, int], told: str) -> None:
    found = Found(["a", "b"], {"train": clips(*counts)}, multilabel=False)
    says(ValueError, f"train has {told}", "3 or more", "val and test")(lambda: complete(found, 0))
    whole = found._replace(splits=found.splits | {"val": clips(1, 1), "test": clips(1, 1)})
    if 0 in counts:
        says(ValueError, f"train has {told}", "1 or more")(lambda: complete(whole, 0))
    else:
        assert complete(whole, 0) == whole.splits
    few = Found(["a"], {"train": [Clip("x", ())] * 2}, multilabel=True)
    says(ValueError, "2 sounds of all classes")(lambda: complete(few, 0))
