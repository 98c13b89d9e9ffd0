"""The data module of sound: what is in a batch, of clips of any length, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torch.utils.data import DataLoader

from tasks.data import Audio
from tasks.data.features import Features, SpecAugment
from tasks.data.spoken import SpokenDigits

RATE = 8000
FEATURES = Features(rate=RATE, bins=20, mean=0.0, std=1.0)
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A file of noise of so many seconds."""

    def file(name: str, seconds: float, seed: int = 0, rate: int = RATE) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        sound = np.random.default_rng(seed).uniform(-0.5, 0.5, round(seconds * rate))
        soundfile.write(path, sound, rate, subtype="FLOAT")
        return path

    return file


@pytest.fixture
def two(tmp_path: Path, write: Write) -> Path:
    """Two classes of clips of 0.1 to 1 second."""
    for label in "ab":
        for k in range(10):
            write(f"data/{label}/{k}.wav", 0.1 * (k + 1), seed=k)
    return tmp_path / "data"


def folder(root: Path, **options) -> Audio:
    return Audio(
        "folder", root, **{"features": FEATURES, "seconds": 1.0, "batch_size": 4} | options
    )


def only(loader: DataLoader):
    return list(loader)


def test_a_clip_has_the_frames_that_it_has_alone(two: Path) -> None:
    data = folder(two)
    seen = 0
    for sound, labels in only(data.train_dataloader()):
        assert sound.values.shape[1] == 20 and sound.step == 0.01 and sound.owner is None
        assert labels["class"].shape == (4,)
        for values, mask, label in zip(sound.values, sound.mask, labels["class"], strict=True):
            length = int(mask.sum())
            assert mask[:length].all() and values[:, length:].abs().sum() == 0
            clip = Path(two, "ab"[label], f"{(length - 1) // 10 - 1}.wav")
            alone = FEATURES(torch.from_numpy(soundfile.read(clip, dtype="float32")[0]))
            assert torch.equal(values[:, :length], alone)
            seen += 1
    assert seen == 16  # of 20, a tenth of each class validates and one tests


def test_every_clip_is_in_one_split(two: Path) -> None:
    data = folder(two, batch_size=1)
    names = [
        data.samples(split).source.name(i)
        for split in ("train", "val", "test")
        for i in range(len(data.samples(split)))
    ]
    assert len(names) == len(set(names)) == 20


def test_a_longer_clip_is_refused_by_name_before_anything_is_trained(
    two: Path, write: Write
) -> None:
    write("data/a/long.wav", 1.5)
    message = r"long.wav is 1.50 seconds long, and the model is made for 1: --data.longer windows"
    with pytest.raises(ValueError, match=message):
        folder(two).setup()
    write("data/a/long.wav", 1.0)
    folder(two).setup()


def test_windows_cover_a_clip_and_keep_their_owner(two: Path, write: Write, tmp_path: Path) -> None:
    write("more/long.wav", 2.35)
    write("more/short.wav", 0.3)
    for overlap, starts in ((0.0, [0, 8000, 10800]), (0.5, [0, 4000, 8000, 10800])):
        data = folder(two, longer="windows", overlap=overlap, predict_folder=tmp_path / "more")
        ((sound, files),) = only(data.predict_dataloader())
        assert [Path(file).name for file in files] == ["long.wav", "short.wav"]
        assert sound.owner.tolist() == [0] * len(starts) + [1]
        whole = torch.from_numpy(soundfile.read(tmp_path / "more/long.wav", dtype="float32")[0])
        assert len(whole) == 18800
        for row, start in enumerate(starts):
            assert sound.mask[row].all()
            assert torch.equal(sound.values[row], FEATURES(whole[start : start + 8000]))


def test_training_takes_a_random_window(two: Path, write: Write) -> None:
    for path in two.rglob("*.wav"):
        write(str(path.relative_to(two.parent)), 3.0)
    data = folder(two, longer="windows", batch_size=1)
    sounds = data.samples("train")
    parts = [sounds[i][0] for i in (0, len(sounds), 2 * len(sounds))]
    assert all(len(own) == 1 and own[0].shape == (20, 101) for own in parts)
    assert not torch.equal(parts[0][0], parts[1][0])
    assert torch.equal(sounds[0][0][0], parts[0][0])  # and again the same
    assert folder(two, longer="windows", seed=1).samples("train")[0][0][0].ne(parts[0][0]).any()


def test_extend_passes_a_clip_on_whole(two: Path, write: Write) -> None:
    write("data/a/long.wav", 2.0)
    data = folder(two, longer="extend", batch_size=17)
    data.setup()
    lengths = [
        int(sound.mask.sum(-1).max())
        for split in ("train", "val", "test")
        for sound, _ in only(data.loader(split))
    ]
    assert max(lengths) == 201


def test_masks_are_of_training_alone_and_follow_from_seed_and_index(two: Path) -> None:
    plain, masked = folder(two), folder(two, spec_augment=SpecAugment(time=0.05, bins=5))
    for split, same in (("train", False), ("val", True), ("test", True)):
        pairs = [(plain.samples(split)[i][0][0], masked.samples(split)[i][0][0]) for i in (0, 1)]
        assert all(torch.equal(*pair) for pair in pairs) == same
    state = torch.get_rng_state()
    first = masked.samples("train")[3][0][0]
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(5)
    assert torch.equal(first, masked.samples("train")[3][0][0])
    assert not torch.equal(first, masked.samples("train")[3 + len(plain.samples("train"))][0][0])


def test_embedded_sequences_are_those_of_the_digits() -> None:
    data = Audio(train_samples=8, eval_samples=5, batch_size=4)
    assert (data.bins, data.frames, data.multilabel) == (40, 1001, False)
    assert data.classes == {q: ["zero", "one", "two"] for q in ("first", "last")}
    ((sound, labels),) = only(data.val_dataloader())[:1]
    digits = SpokenDigits("val", 5)
    for row in range(4):
        wave, label = digits[row]
        frames = data.features(wave)
        assert torch.equal(sound.values[row, :, : frames.shape[1]], frames)
        assert {q: int(labels[q][row]) for q in labels} == {q: int(v) for q, v in label.items()}
    recorded = Audio(test_voices="recorded", eval_samples=5).samples("test").source.digits
    assert recorded.voices == "recorded"
    assert Audio(train_digits=(7, 7), digits=(9, 9)).samples("val").source.digits.digits == (9, 9)


def test_rates_change_what_is_heard_and_not_how_long_it_is() -> None:
    high = Audio(eval_samples=2, features=Features(rate=16000, bins=40, hop=0.02))
    low = Audio(eval_samples=2, features=Features(rate=8000, bins=40, hop=0.02))
    (a, _), (b, _) = (only(data.test_dataloader())[0] for data in (high, low))
    assert a.values.shape == b.values.shape and a.step == b.step == 0.02
    assert not torch.allclose(a.values, b.values, atol=0.1)


def test_several_labels_are_rows_of_0_and_1(tmp_path: Path, write: Write) -> None:
    rows = {"x.wav": "a;b", "y.wav": "b", "z.wav": "", "w.wav": "a"}
    for name in rows:
        write(f"t/{name}", 0.2)
    lines = [f"{name},{labels}" for name, labels in rows.items()]
    for split in ("train", "val", "test"):
        (tmp_path / "t").joinpath(f"{split}.csv").write_text(
            "\n".join(["file,labels", *(lines if split == "train" else lines[:0]), ""])
        )
    (tmp_path / "t" / "val.csv").unlink()
    (tmp_path / "t" / "test.csv").unlink()
    data = Audio("table", tmp_path / "t", features=FEATURES, batch_size=1)
    assert data.multilabel and data.classes == {"class": ["a", "b"]}
    rows = {
        Path(s.source.name(i)).name: s[i][1]["class"].tolist()
        for s in (data.samples(split) for split in ("train", "val", "test"))
        for i in range(len(s))
    }
    assert rows == {"x.wav": [1, 1], "y.wav": [0, 1], "z.wav": [0, 0], "w.wav": [1, 0]}


def test_what_cannot_be_read_is_named_or_skipped_and_counted(two: Path) -> None:
    (two / "a" / "empty.wav").write_bytes(b"")
    (two / "b" / "text.flac").write_text("no sound")
    with pytest.raises(ValueError, match=r"cannot read the sound .*(empty.wav|text.flac) \("):
        data = folder(two)
        data.setup()
    with pytest.warns(UserWarning, match=r"left out 1 of \d+ files in \w+ that") as told:
        data = folder(two, on_error="skip")
        data.setup()
    text = " ".join(str(each.message) for each in told)
    assert text.count("left out") == len(told) <= 2
    assert "empty.wav (it has 0 bytes)" in text and "text.flac (" in text
    assert sum(len(data.samples(split)) for split in ("train", "val", "test")) == 20


def test_a_class_of_broken_files_is_named(two: Path) -> None:
    for path in (two / "b").iterdir():
        path.write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=r"no clip of class b in .* can be read .*: repair"):
        folder(two, on_error="skip").setup()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "wav"}, "source is 'wav'; expected one of"),
        ({"root": "x"}, "the embedded digits need none; .*--data.source folder"),
        ({"source": "ESC50"}, "needs the folder of its data: --data.root"),
        ({"download": True}, "embedded has nothing to download; expected SpeechCommands"),
        ({"longer": "cut"}, "longer is 'cut'; expected one of"),
        ({"on_error": "ignore"}, "on_error is 'ignore'"),
        ({"test_voices": "mine"}, "test_voices is 'mine'"),
        ({"seconds": 0.0}, "seconds is 0.0; expected a frame"),
        ({"overlap": 1.0}, "from 0 to below 1, got 1.0"),
        ({"batch_size": 0}, "batch_size is 0; expected at least 1"),
        ({"train_samples": 0}, "train_samples is 0"),
        ({"digits": (3, 4)}, r"digits is \(3, 4\); expected the fewest, at least 7"),
    ],
)
def test_bad_options_are_one_line(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Audio(**options).setup()
    assert "\n" not in str(error.value)


def test_too_few_clips(two: Path) -> None:
    with pytest.raises(ValueError, match=r"16 train clips are too few .* batches of 32; give more"):
        folder(two, batch_size=32).train_dataloader()
