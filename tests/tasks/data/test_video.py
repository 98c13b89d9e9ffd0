"""The data module of video: which frames are in a clip, and what is refused."""

import io
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tasks.data import Video
from tasks.data.clips import Augmentation, Clips
from tasks.data.files import without_broken
from tasks.data.motion import Motion
from tasks.data.video_sources import Labelled

av: Any = pytest.importorskip("av")
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A video whose frame n is grey of the level 10 + 4 n."""

    def file(name: str, frames: int, rate: Any = 20, size: tuple[int, int] = (32, 48)) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264", rate=rate)
            (stream.height, stream.width), stream.pix_fmt, stream.gop_size = size, "yuv420p", 6
            for number in range(frames):
                picture = np.full((*size, 3), 10 + 4 * number, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
            container.mux(stream.encode())
        return path

    return file


@pytest.fixture
def two(tmp_path: Path, write: Write) -> Path:
    """Two classes of 6 videos of 2 seconds at 20 frames a second."""
    for label in "ab":
        for k in range(6):
            write(f"data/{label}/deep/{k}.mp4", 40)
    return tmp_path / "data"


def made(root: Path | None, source: Any = "folder", **options: Any) -> Video:
    settings: dict[str, Any] = {"frames": 8, "fps": 10, "image_size": 8, "batch_size": 1}
    settings |= {"mean": (0, 0, 0), "std": (1, 1, 1)}
    return Video(source, root, **settings | options)


def numbers(clip: Tensor) -> list[int]:
    """Which frames a clip ``[C, T, H, W]`` of these shows."""
    levels = clip.double().mean((0, 2, 3)) * 255
    found = ((levels - 10) / 4).round()
    assert (levels - 10 - 4 * found).abs().max() < 1.5
    return found.int().tolist()


def only(loader: DataLoader) -> list[tuple[Clips, Any]]:
    return list(loader)


def predicted(folder: Path, **options: Any) -> tuple[Clips, list[str]]:
    data = made(folder, predict_folder=folder, batch_size=9, **options)
    ((clips, paths),) = only(data.predict_dataloader())
    return clips, [Path(path).name for path in paths]


def test_a_batch_of_files(two: Path) -> None:
    data = made(two, batch_size=4)
    assert data.classes == {"class": ["a", "b"]}
    assert (data.channels, data.frames, data.image_size) == (3, 8, (8, 8))
    seen = 0
    for clips, labels in only(data.train_dataloader()):
        assert clips.values.shape == (4, 3, 8, 8, 8) and clips.values.dtype == torch.float32
        assert clips.mask is None and clips.owner is None and clips.step == 0.1
        assert labels["class"].dtype == torch.int64 and labels["class"].shape == (4,)
        assert all(np.diff(numbers(clip)).tolist() == [2] * 7 for clip in clips.values)
        seen += 4
    assert seen == 8  # of 12, one of each class validates and one tests
    names = [p for s in ("train", "val", "test") for p in data.samples(s).source.paths]
    assert len(names) == len(set(names)) == 12


def test_evaluation_takes_the_middle_or_views_from_end_to_end(two: Path) -> None:
    assert numbers(only(made(two).val_dataloader())[0][0].values[0]) == list(range(12, 28, 2))
    for views, starts in ((2, [0, 24]), (3, [0, 12, 24]), (4, [0, 8, 16, 24])):
        for clips, labels in only(made(two, views=views, batch_size=2).test_dataloader()):
            assert [numbers(clip) for clip in clips.values] == [
                list(range(start, start + 16, 2)) for start in starts * 2
            ]
            assert clips.owner is not None and len(labels["class"]) == 2
            assert clips.owner.tolist() == [0] * views + [1] * views


@pytest.mark.parametrize("fps", [1, 2, 5, 10, 20])
def test_a_moment_looks_the_same_at_any_rate(tmp_path: Path, write: Write, fps: int) -> None:
    for n, rate in enumerate([20, 30, Fraction(30000, 1001)]):
        write(f"p/{n}.mp4", 2 * round(rate), rate=rate)
    options = {"frames": 2 * fps, "fps": fps}
    clips, _ = predicted(tmp_path / "p", **options)
    fine, _ = predicted(tmp_path / "p", frames=40, fps=20)
    for rows in (slice(0, 2), slice(2, 3)):
        seen, all_of_it = clips.values[rows], fine.values[rows]
        assert [numbers(clip)[:1] for clip in seen] == [[0]] * len(seen)
        assert torch.equal(seen, all_of_it[:, :, :: 20 // fps])
    assert clips.step == 1 / fps and clips.mask is None
    assert numbers(clips.values[0]) == list(range(0, 40, 20 // fps))


def test_without_fps_frames_follow_and_steps_are_each_files_own(
    tmp_path: Path, write: Write
) -> None:
    for name, rate in (("a", 20), ("b", Fraction(30000, 1001)), ("c", 5)):
        write(f"p/{name}.mp4", 20, rate=rate)
    clips, names = predicted(tmp_path / "p", fps=None)
    assert names == ["a.mp4", "b.mp4", "c.mp4"]
    assert [numbers(clip) for clip in clips.values] == [list(range(6, 14))] * 3
    assert clips.step == pytest.approx((0.05, 1001 / 30000, 0.2), rel=1e-9)
    clips, _ = predicted(tmp_path / "p", fps=None, views=3)
    assert [numbers(clip)[0] for clip in clips.values] == [0, 6, 12] * 3
    assert isinstance(clips.step, tuple) and clips.step.count(min(clips.step)) == 3


def test_a_video_shorter_than_a_clip_keeps_what_it_has(tmp_path: Path, write: Write) -> None:
    for frames in (1, 5, 15, 16, 17):
        write(f"p/{frames:02}.mp4", frames)
    for fps, expected in (
        (10, [[0], [0, 2, 4], list(range(0, 15, 2)), list(range(0, 16, 2))]),
        (None, [[0], list(range(5)), list(range(4, 12)), list(range(4, 12))]),
    ):
        clips, _ = predicted(tmp_path / "p", fps=fps)
        mask = torch.ones(5, 8, dtype=torch.bool) if clips.mask is None else clips.mask
        for row, own in enumerate(expected):
            assert mask[row].tolist() == [k < len(own) for k in range(8)]
            assert numbers(clips.values[row, :, : len(own)]) == own
            assert clips.values[row, :, len(own) :].abs().sum() == 0
        several, _ = predicted(tmp_path / "p", fps=fps, views=3)
        assert several.owner is not None
        counts = several.owner.bincount().tolist()
        assert counts == ([1, 1, 1, 1, 3] if fps else [1, 1, 3, 3, 3])  # what is one is once


def test_training_takes_clips_from_random_places_anew_in_each_epoch(two: Path) -> None:
    for fps, last in ((10, 24), (None, 32)):
        data = made(two, fps=fps).samples("train")
        firsts = [numbers(data[index][0][0].frames)[0] for index in range(200)]
        assert min(firsts) < 3 and max(firsts) > last - 3 and max(firsts) <= last
        assert np.mean(firsts) == pytest.approx(last / 2, abs=2)
        again = made(two, fps=fps).samples("train")
        assert [numbers(again[index][0][0].frames)[0] for index in range(9)] == firsts[:9]
        assert len({firsts[index] for index in range(0, 200, len(data))}) > 5
        other = made(two, fps=fps, seed=1).samples("train")
        assert [numbers(other[index][0][0].frames)[0] for index in range(9)] != firsts[:9]
        views = made(two, fps=fps, views=4).samples("train")
        assert len(views[0][0]) == 1


def test_processes_see_together_what_one_sees(two: Path, as_rank: Callable) -> None:
    def seen(batch: int, rank: int, processes: int, epoch: int) -> list[Tensor]:
        loader = as_rank(made(two, batch_size=batch), rank, processes).train_dataloader()
        loader.sampler.set_epoch(epoch)
        return [clip for clips, _ in loader for clip in clips.values]

    one, parts = seen(4, 0, 1, 1), [seen(2, rank, 2, 1) for rank in (0, 1)]
    for k, clip in enumerate(one):
        assert torch.equal(clip, parts[k % 2][k // 2])
    assert not all(torch.equal(*pair) for pair in zip(one, seen(4, 0, 1, 0), strict=True))


def test_augmentation_is_of_training_alone(tmp_path: Path, write: Write) -> None:
    for label in "ab":
        for k in range(3):
            path = write(f"d/{label}/{k}.mp4", 1, size=(32, 64))
            half = np.zeros((32, 64, 3), np.uint8)
            half[:, :32] = 255
            with av.open(str(path), "w") as container:
                stream = container.add_stream("libx264", rate=20)
                (stream.height, stream.width), stream.pix_fmt = (32, 64), "yuv420p"
                container.mux(stream.encode(av.VideoFrame.from_ndarray(half, "rgb24")))
                container.mux(stream.encode())
    options: dict[str, Any] = {"image_size": (8, 16), "frames": 1}
    for given in (Augmentation(flip=1.0), {"flip": 1.0}):
        data = made(tmp_path / "d", augmentation=given, **options)
        for split, left in (("train", 0), ("val", 1), ("test", 1)):
            frames = data.samples(split)[0][0][0].frames
            assert frames[..., :7].mean() == pytest.approx(left, abs=0.02)
            assert frames[..., 9:].mean() == pytest.approx(1 - left, abs=0.02)


def test_shuffled_clips_are_the_same_frames_in_another_order(two: Path) -> None:
    for split in ("train", "val", "test"):
        real, mixed = made(two).samples(split), made(two, order="shuffled").samples(split)
        changed = 0
        for index in range(len(real)):
            own, other = (numbers(data[index][0][0].frames) for data in (real, mixed))
            assert sorted(other) == own
            changed += other != own
            assert numbers(mixed[index][0][0].frames) == other
        assert changed == len(real)
    val = [made(two, order="shuffled", split_seed=0, seed=s).samples("val")[0][0] for s in (0, 1)]
    assert torch.equal(val[0][0].frames, val[1][0].frames)


@pytest.mark.parametrize(
    ("frames", "fps", "size"),
    [(16, 8.0, 32), (8, 4, (16, 24)), (5, 3.0, 16), (7, 29.97, 16), (1, 8, 16)],
)
def test_embedded_clips_are_those_of_motion(
    frames: int, fps: float, size: int | tuple[int, int]
) -> None:
    data = Video(
        frames=frames,
        fps=fps,
        image_size=size,
        train_samples=8,
        eval_samples=6,
        batch_size=4,
        mean=(0.25,),
        std=(0.5,),
        seed=3,
    )
    assert data.classes == Motion.classes
    assert (data.channels, data.frames) == (1, frames)
    seconds: Any = frames / Fraction(str(fps))
    for split, count in (("train", 8), ("val", 6), ("test", 6)):
        motion = Motion(
            split,  # type: ignore[arg-type]
            count,
            data.image_size,
            fps,
            seconds,
            seed=3 if split == "train" else 0,
            mean=0.25,
            std=0.5,
        )
        videos = data.samples(split)
        assert len(videos) == count
        clips, labels = videos.batch([videos[index] for index in (0, 5)])
        assert clips.values.shape == (2, 1, frames, *data.image_size)
        assert clips.mask is None and clips.owner is None and clips.step == 1 / fps
        for row, index in enumerate((0, 5)):
            frames_of, answers = motion[index]
            assert torch.equal(clips.values[row], frames_of)
            assert {q: int(labels[q][row]) for q in labels} == {
                q: int(v) for q, v in answers.items()
            }


def test_embedded_clips_are_normalised_and_as_many_as_pictures() -> None:
    data = Video()
    assert (data.image_size, data.frames, len(data.samples("train"))) == ((32, 32), 16, 7200)
    assert len(data.samples("val")) == len(data.samples("test")) == 500
    train = data.samples("train")
    frames = torch.stack([train[index][0][0].frames for index in range(0, 7200, 24)])
    assert abs(frames.mean()) < 0.02 and abs(frames.std() - 1) < 0.02
    assert not torch.equal(train[0][0][0].frames, train[7200][0][0].frames)


def test_a_model_of_grey_clips_predicts_grey(tmp_path: Path, write: Write) -> None:
    write("p/a.mp4", 40)
    data = Video(predict_folder=tmp_path / "p", mean=(0.0,), std=(1.0,))
    ((clips, paths),) = only(data.predict_dataloader())
    assert clips.values.shape == (1, 1, 16, 32, 32) and paths == [str(tmp_path / "p" / "a.mp4")]
    assert numbers(clips.values[0]) == [int(k * 2.5) for k in range(16)]


def test_tables(tmp_path: Path, write: Write) -> None:
    for k in range(8):
        write(f"v/{k}.mp4", 4)
    rows = [f"v/{k}.mp4,{'yes' if k % 2 else 'no'}" for k in range(8)]
    (tmp_path / "train.csv").write_text("\n".join(["file,label", *rows[:6]]))
    (tmp_path / "test.csv").write_text("\n".join(["label,file", "no,v/6.mp4", "yes,v/7.mp4"]))
    data = made(tmp_path, "table")
    assert data.classes == {"class": ["no", "yes"]}
    sizes = {split: len(data.samples(split)) for split in ("train", "val", "test")}
    assert sizes == {"train": 4, "val": 2, "test": 2}
    for split in sizes:
        source = data.samples(split).source
        for path, label in zip(source.paths, source.targets, strict=True):
            assert int(Path(path).stem) % 2 == label
    (tmp_path / "test.csv").write_text("file,label\nv/6.mp4,maybe\n")
    with pytest.raises(ValueError, match=r"line 2 of .*test.csv: no row .* has the label maybe"):
        made(tmp_path, "table").setup()
    (tmp_path / "test.csv").write_text("file,label\nv/6.mp4,\n")
    with pytest.raises(ValueError, match=r"line 2 of .*test.csv: it has none; expected one label"):
        made(tmp_path, "table").setup()
    (tmp_path / "train.csv").write_text("file,label\nv/6.mp4,a\n")
    with pytest.raises(ValueError, match=r"train of .* has 1 labels \(a\); expected two"):
        assert made(tmp_path, "table").classes


def test_splits_of_folders_and_classes_too_small(tmp_path: Path, write: Write) -> None:
    for split in ("train", "Validation", "test"):
        for label in "ab":
            write(f"s/{split}/{label}/0.mp4", 4)
    data = made(tmp_path / "s")
    assert [len(data.samples(split)) for split in ("train", "val", "test")] == [2, 2, 2]
    for label in "ab":
        write(f"t/{label}/0.mp4", 4)
    with pytest.raises(ValueError, match="train has 1 videos of a, expected 3 or more, to hold"):
        made(tmp_path / "t").setup()
    with pytest.raises(
        FileNotFoundError, match=r"no videos in the folder .*expected files of type"
    ):
        (tmp_path / "t" / "c").mkdir()
        made(tmp_path / "t").setup()


def test_what_cannot_be_read_is_named_or_skipped(two: Path, tmp_path: Path, write: Write) -> None:
    (two / "a" / "empty.mp4").write_bytes(b"")
    (two / "b" / "text.mkv").write_text("no video")
    write("data/b/bare.h264", 4)
    with pytest.raises(ValueError, match=r"cannot read the video .*(empty.mp4|text.mkv|bare.h264)"):
        made(two).setup()
    with pytest.warns(UserWarning, match=r"left out \d of \d+ files in \w+ that") as told:
        data = made(two, on_error="skip")
        data.setup()
    text = " ".join(str(each.message) for each in told)
    assert "empty.mp4 (it has 0 bytes)" in text and "text.mkv (" in text
    assert "bare.h264 (it does not tell when its frames are shown)" in text
    assert sum(len(data.samples(split)) for split in ("train", "val", "test")) == 12
    for path in (two / "b").rglob("*.*"):
        path.write_bytes(b"\0")
    with pytest.raises(ValueError, match=r"no video of class b in train can be read \(.*repair"):
        made(two, on_error="skip").setup("fit")
    for path in two.rglob("*.*"):
        path.write_bytes(b"\0")
    with pytest.raises(
        ValueError, match=r"none of the \d+ files in train can be read: .*and \d more"
    ):
        made(two, on_error="skip").setup("fit")


def test_the_rate_of_files_without_one(tmp_path: Path, write: Write) -> None:
    write("p/a.h264", 40)
    write("p/b.mp4", 40)
    with pytest.raises(ValueError, match=r"a.h264 .*--data.file_fps FPS"):
        predicted(tmp_path / "p")
    clips, _ = predicted(tmp_path / "p", file_fps=10)
    assert numbers(clips.values[0]) == list(range(16, 24))
    assert numbers(clips.values[1]) == list(range(12, 28, 2))


def test_workers_read_the_same(two: Path) -> None:
    ((own, _),) = only(made(two, batch_size=2).val_dataloader())
    ((other, _),) = only(made(two, batch_size=2, num_workers=1).val_dataloader())
    assert torch.equal(own.values, other.values)


def test_settings_are_plain_data(two: Path) -> None:
    for data in (
        Video(),
        made(two, augmentation=Augmentation(scale=(0.5, 1.0)), predict_folder=two),
    ):
        file = io.BytesIO()
        torch.save(dict(data.hparams), file)
        file.seek(0)
        read = torch.load(file, weights_only=True)
        assert read == dict(data.hparams)
        again = Video(**read)
        assert dict(again.hparams) == read and again.augmentation == data.augmentation
    assert (Video().hparams["image_size"], made(two, image_size=None).image_size) == (
        32,
        (112, 112),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "mp4"}, "source is 'mp4'; expected one of"),
        ({"order": "random"}, "order is 'random'; expected one of"),
        ({"on_error": "ignore"}, "on_error is 'ignore'"),
        ({"root": "x"}, "the embedded clips need none; .*--data.source folder"),
        ({"source": "table"}, "needs the folder of its data: --data.root"),
        ({"source": "folder", "root": "nowhere"}, "nowhere does not exist; give --data.root"),
        ({"source": "table", "root": "nowhere"}, "nowhere does not exist; give --data.root"),
        ({"fps": None}, "fps is null, but embedded clips have no rate"),
        ({"fps": 0}, "fps is 0; expected frames a second, above 0"),
        ({"fps": float("nan")}, "fps is nan; expected"),
        ({"file_fps": -1.0}, "file_fps is -1.0; expected"),
        ({"frames": 0}, "frames is 0; expected at least 1"),
        ({"views": 0}, "views is 0; expected at least 1"),
        ({"batch_size": 0}, "batch_size is 0; expected at least 1"),
        ({"eval_samples": 0}, "eval_samples is 0"),
        ({"train_samples": 0}, "train_samples is 0"),
        ({"image_size": 0}, "image_size 0: expected positive"),
        ({"mean": (0.1, 0.2)}, "mean is .*; expected 1 numbers"),
        ({"augmentation": {"flip": 0.5}}, "augmentation is of videos in files"),
        ({"views": 3}, "views is of videos in files, but the source is embedded"),
        ({"file_fps": 9.0}, "file_fps is of videos in files"),
        ({"on_error": "skip"}, "on_error is of videos in files"),
    ],
)
def test_bad_options_are_one_line(options: dict, message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message) as error:
        Video(**options).setup()
    assert "\n" not in str(error.value)


def test_too_few_and_nothing_to_predict(two: Path) -> None:
    with pytest.raises(ValueError, match=r"8 train videos are too few .* batches of 32; give more"):
        made(two, batch_size=32).train_dataloader()
    assert len(made(two, train_samples=4).samples("train")) == 4
    with pytest.raises(ValueError, match=r"no videos to predict: .*--data.predict_folder"):
        made(two).setup("predict")


def test_the_library_is_needed_for_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    assert len(Video(eval_samples=2).samples("val")) == 2
    needing: list[dict[str, Any]] = [
        {"source": "folder", "root": tmp_path},
        {"predict_folder": tmp_path},
    ]
    for options in needing:
        with pytest.raises(ImportError, match=r"pip install 'mmpos\[video\]'"):
            Video(**options)


def test_what_is_held_out_and_chosen_follows_from_the_split_seed_alone(
    tmp_path: Path, write: Write
) -> None:
    file = write("one.mp4", 1).read_bytes()
    for label, count in (("a", 20), ("b", 5)):
        (tmp_path / "data" / label).mkdir(parents=True)
        for k in range(count):
            (tmp_path / "data" / label / f"{k}.mp4").write_bytes(file)

    def chosen(**seeds: int) -> dict[str, list[str]]:
        data = made(tmp_path / "data", train_samples=6, **seeds)
        return {split: data.samples(split).source.paths for split in ("train", "val", "test")}

    own, other = chosen(), chosen(split_seed=1)
    assert own == chosen(seed=1)
    assert all(own[split] != other[split] for split in own)
    assert [Path(path).parent.name for path in own["train"]] == list("aaabbb")


def test_embedded_clips_follow_the_split_seed() -> None:
    frames = Video(split_seed=5, mean=(0.0,), std=(1.0,)).samples("val")[0][0][0].frames
    for seed, same in ((5, True), (0, False)):
        assert torch.equal(frames, Motion("val", 9, split_seed=seed)[0][0]) == same


def test_a_video_is_of_one_row_of_one_table_and_spaces_do_not_count(
    tmp_path: Path, write: Write
) -> None:
    for k in range(4):
        write(f"{k}.mp4", 1)
    (tmp_path / "val.csv").write_text("file,label\n3.mp4,a\n")
    (tmp_path / "train.csv").write_text("file,label\n0.mp4, b\n 1.mp4,a \n")
    (tmp_path / "test.csv").write_text("file,label\n2.mp4,b\n")
    data = made(tmp_path, "table")
    assert data.classes == {"class": ["a", "b"]} and data.samples("test").source.targets == [1]
    (tmp_path / "test.csv").write_text("file,label\n1.mp4,b\n")
    with pytest.raises(ValueError, match=r"line 2 of .*test.csv and line 3 of .* are both of"):
        made(tmp_path, "table").setup()


def test_a_class_that_training_has_may_be_broken_elsewhere(tmp_path: Path, write: Write) -> None:
    for split in ("train", "val", "test"):
        for label in "ab":
            write(f"d/{split}/{label}/0.mp4", 1)
    (tmp_path / "d" / "val" / "b" / "0.mp4").write_bytes(b"no video")
    with pytest.warns(UserWarning, match="left out 1 of 2 files in val that cannot be read"):
        assert made(tmp_path / "d", on_error="skip").samples("val").source.targets == [0]


def test_all_that_is_left_out_is_named_and_each_file_once(tmp_path: Path, write: Write) -> None:
    write("p/whole.mp4", 1)
    for k in range(7):
        (tmp_path / "p" / f"{k}.mp4").write_bytes(b"no video")
    with pytest.warns(UserWarning, match="left out 7 of 8 files that") as told:
        predicted(tmp_path / "p", on_error="skip")
    named = str(told[0].message)
    assert all(named.count(f"{k}.mp4 (") == 1 for k in range(7)) and "more" not in named
    item = Labelled("a", 0)
    items, broken = [item, item, Labelled("b", 1), Labelled("c", 0)], {"a": "cut off"}
    with pytest.warns(UserWarning, match=r"left out 1 of 3 files that .*: a \(cut off\)"):
        kept = without_broken(items, broken, lambda own: [own.label], what="video")
    assert kept == items[2:]
