"""Classification of video: the task, its job, other rates and sizes, weights of images."""

import csv
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision

import mmpos
from mmpos.models import Transformer
from tasks import VideoClassification, cli, faults
from tasks.data import Video
from tasks.data.clips import Clips

QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
FEW = ["--data.train_samples=40", "--data.eval_samples=8", "--data.batch_size=8"]
FEW += ["--model.transformer.depth=1", "--trainer.max_epochs=1", *QUIET]
ROPE = partial(Transformer, size="nano", depth=2, rotary=partial(mmpos.RotaryEncoding, base=10))


def make(**options) -> VideoClassification:
    """With weights that tell inputs apart."""
    settings = {"transformer": ROPE, "classes": ["a", "b", "c"], "frames": 8}
    settings |= {"image_size": (12, 8), "channels": 1, "patch_size": (2, 4, 4)}
    torch.manual_seed(0)
    task = VideoClassification(**settings | options).eval()
    for weight in task.network.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return task


def clips(rows: int, frames: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 1, frames, 12, 8, generator=torch.manual_seed(seed))


@torch.no_grad()
def test_views_of_a_video_are_averaged_and_padding_is_not_seen() -> None:
    task = make()
    values, mask = clips(5, 8), torch.arange(8) < torch.tensor([8, 8, 5, 3, 8])[:, None]
    values[2, :, 5:] = torch.nan
    owner = torch.tensor([0, 1, 1, 1, 2])
    together = task(values, mask, 0.1, owner)["class"]
    alone = [task(values[i : i + 1, :, : int(mask[i].sum())])["class"][0] for i in range(5)]
    expected = [alone[0], torch.stack(alone[1:4]).mean(0), alone[4]]
    torch.testing.assert_close(together, torch.stack(expected), atol=1e-5, rtol=1e-5)
    assert (alone[1] - alone[2]).abs().max() > 0.1


@torch.no_grad()
def test_times_do_not_depend_on_the_rate() -> None:
    task = make(ticks=8.0, patch_size=(1, 4, 4))
    still = clips(1, 1).repeat(1, 1, 8, 1, 1)
    fast, slow = task(still, None, 1 / 8)["class"], task(still, None, 1 / 2)["class"]
    assert (fast - slow).abs().max() > 1e-3  # eight frames of a longer clip
    rows = torch.cat((still, still))
    both = task(rows, None, (1 / 8, 1 / 2))["class"]
    torch.testing.assert_close(both, torch.cat((fast, slow)))
    counted = make(patch_size=(1, 4, 4))
    torch.testing.assert_close(counted(still, None, 1 / 2)["class"], fast)


@torch.no_grad()
def test_times_stay_exact_in_half_precision() -> None:
    """Lightning casts the tensors of a batch; steps are none."""
    batch = Clips(clips(2, 8), None, (1 / 3, 1 / 7))
    moved = HalfPrecision("bf16-true").convert_input(batch)
    assert moved.values.dtype == torch.bfloat16 and moved.step == batch.step
    seen = []
    task = make(ticks=8.0, patch_size=(1, 4, 4))
    task.network.transformer.rotary.register_forward_pre_hook(
        lambda _, given: seen.append(given[0])
    )
    task.bfloat16()(*moved)
    expected = torch.arange(8) * 8 * torch.tensor([[1 / 3], [1 / 7]], dtype=torch.float64)
    torch.testing.assert_close(seen[0][:, ::6, 0], expected, atol=1e-12, rtol=0)


def test_a_table_is_as_long_as_its_clips_in_seconds() -> None:
    """So a slower rate reads every second row, and needs no other table."""
    learned = partial(ROPE, rotary=None, additive=mmpos.LearnedEncoding)
    own = {"transformer": learned, "ticks": 8.0, "patch_size": (1, 4, 4)}
    trained, slow = make(**own, step=1 / 8), make(**own, step=1 / 4, frames=4)
    assert trained.network.transformer.axes == slow.network.transformer.axes == (8, 3, 2)
    slow.load_state_dict(trained.state_dict())
    x = clips(2, 8)
    with torch.no_grad():
        assert slow(x[:, :, ::2], None, 1 / 4)["class"].shape == (2, 3)
        with pytest.raises(ValueError, match="a grid of 8 × 3 × 2, the input has 4 × 3 × 2"):
            trained(x, None, 1 / 16)


def test_a_clip_without_a_rate_asks_for_one() -> None:
    with pytest.raises(ValueError, match=r"8 positions in a second: give the step.*1 / frames a"):
        make(ticks=8.0)(clips(1, 8))
    assert make()(clips(1, 8))["class"].shape == (1, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transformer": None}, "missing 1 required positional argument: 'transformer'"),
        ({"ticks": 0.0}, "ticks are positions in a second, above 0 and finite, got 0"),
        ({"image_size": (12, 9)}, "frames of 12 × 9 cannot be cut into patches of 4 × 4"),
        ({"frames": 0}, "a clip has 1 frame or more, got 0"),
        ({"patch_size": (4, 4)}, r"a tubelet has three sizes, frames, height and width, got"),
    ],
)
def test_what_is_refused(options: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make(**options)


@torch.no_grad()
def test_other_frame_counts_and_sizes_are_right_or_refused() -> None:
    task = make()
    for frames in (1, 3, 7, 9, 16):
        x = clips(1, frames)
        filled = torch.cat((x, x[:, :, -1:]), 2) if frames % 2 else x
        torch.testing.assert_close(task(x)["class"], task(filled)["class"])
    assert task(torch.randn(1, 1, 8, 16, 20))["class"].shape == (1, 3)
    with pytest.raises(ValueError, match="frames of 10 × 8 cannot be cut into patches of 4 × 4"):
        task(torch.randn(1, 1, 8, 10, 8))
    table = make(transformer=partial(ROPE, rotary=None, additive=mmpos.LearnedEncoding))
    with pytest.raises(ValueError, match=r"a grid of 4 × 3 × 2, the input has 5 × 3 × 2: resize"):
        table(clips(1, 9))


@torch.no_grad()
def test_without_positions_the_order_of_frames_is_not_seen() -> None:
    bag = make(patch_size=(1, 4, 4), transformer=partial(ROPE, rotary=None))
    turned = make(patch_size=(1, 4, 4))
    x, order = clips(2, 8), torch.randperm(8, generator=torch.manual_seed(1))
    torch.testing.assert_close(bag(x)["class"], bag(x[:, :, order])["class"], atol=1e-5, rtol=1e-5)
    assert (turned(x)["class"] - turned(x[:, :, order])["class"]).abs().max() > 1e-2


def test_the_job_its_checkpoint_and_other_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["fit", "--config", "video", *FEW]) == 0
    best = "runs/video/version_0/checkpoints/best.ckpt"
    capsys.readouterr()
    for over in (
        ["--data.frames=9"],
        ["--data.fps=16", "--data.frames=32", "--model.ticks=8"],
        ["--data.image_size=64"],
        ["--data.order=shuffled"],
    ):
        assert cli.main(["test", "--ckpt_path", best, *over, *QUIET]) == 0
    assert "model.ticks: checkpoint null, now 8.0" in "".join(capsys.readouterr())
    task = VideoClassification.load_from_checkpoint(best, map_location="cpu").eval()
    data = Video(eval_samples=8, batch_size=3)
    with torch.no_grad():
        for batch, labels in data.test_dataloader():
            assert isinstance(batch, Clips) and batch.step == 1 / 8 and batch.mask is None
            assert task(*batch)["how"].shape == (len(labels["how"]), 4)
    assert cli.main(["test", "--ckpt_path", best, "--data.image_size=40", *QUIET]) == 1
    assert "frames of 40 × 40 cannot be cut into patches of 16 × 16" in capsys.readouterr().err


def test_weights_of_an_image_job_are_inflated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    over = ["--config", "encoding/learned", "--model.transformer.depth=1", *QUIET]
    run = ["--data.train_samples=64", "--trainer.max_epochs=1", "--data.patch_size=16"]
    assert cli.main(["fit", "--config", "image", *over, *run]) == 0
    start = "runs/image/version_0/checkpoints/best.ckpt"
    begin = ["--model.weights", start, "--model.leave_out+=heads", "--test_after_fit=false"]
    assert cli.main(["fit", "--config", "video", *over, *FEW, *begin]) == 0
    trained = VideoClassification.load_from_checkpoint(
        "runs/video/version_0/checkpoints/best.ckpt", map_location="cpu"
    )
    old = torch.load(start, weights_only=True)["state_dict"]
    kernel, own = old["network.tokens.project.weight"], trained.network.tokens.project.weight
    assert own.shape == (64, 1, 1, 16, 16)
    moved = torch.nn.functional.cosine_similarity(own.flatten(), kernel.flatten(), dim=0)
    assert moved > 0.9  # five steps later


def test_files_are_trained_on_and_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    av = pytest.importorskip("av")
    draw = np.random.default_rng(0)
    for label, level in (("dark", 40), ("light", 200)):
        (tmp_path / "videos" / label).mkdir(parents=True)
        for k in range(20):
            with av.open(str(tmp_path / "videos" / label / f"{k}.mp4"), "w") as file:
                stream = file.add_stream("mpeg4", rate=10)
                stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
                for _ in range(12):
                    noise = draw.integers(-20, 20, (32, 48, 3))
                    frame = av.VideoFrame.from_ndarray((level + noise).astype(np.uint8))
                    file.mux(stream.encode(frame))
                file.mux(stream.encode())
    monkeypatch.chdir(tmp_path)
    own = ["--data.source=folder", "--data.root=videos", "--data.frames=8", "--data.batch_size=4"]
    own += ["--data.image_size=32", "--model.transformer.depth=1", "--trainer.max_epochs=2", *QUIET]
    assert cli.main(["fit", "--config", "video", *own]) == 0
    best = "runs/video/version_0/checkpoints/best.ckpt"
    (tmp_path / "new").mkdir()
    (tmp_path / "videos" / "light" / "0.mp4").rename(tmp_path / "new" / "one.mp4")
    assert cli.main(["predict", "--ckpt_path", best, "--data.predict_folder=new", *QUIET]) == 0
    with (tmp_path / "predictions.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["file"].endswith("one.mp4") and row["class"] == "light"


@pytest.fixture
def videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two classes of two short videos, all of which test."""
    av = pytest.importorskip("av")
    for split in ("train", "test"):
        for label, level in (("dark", 40), ("light", 200)):
            for k in range(3):
                path = tmp_path / "own" / split / label / f"{k}.mp4"
                path.parent.mkdir(parents=True, exist_ok=True)
                with av.open(str(path), "w") as file:
                    stream = file.add_stream("mpeg4", rate=8)
                    stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
                    for _ in range(4):
                        frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), level, np.uint8))
                        file.mux(stream.encode(frame))
                    file.mux(stream.encode())
    monkeypatch.chdir(tmp_path)
    return tmp_path / "own"


def test_how_many_trained_does_not_stand_in_the_way_of_a_test(videos: Path) -> None:
    own = ["--data.source=folder", f"--data.root={videos}", "--data.frames=4"]
    own += ["--data.image_size=16", "--model.transformer.depth=1", *QUIET]
    few = ["--data.train_samples=4", "--data.batch_size=2", "--trainer.max_epochs=1"]
    assert cli.main(["fit", "--config", "video", *own, *few]) == 0
    best = "runs/video/version_0/checkpoints/best.ckpt"
    for path in (videos / "train" / "dark").glob("2.mp4"):
        path.unlink()
    assert cli.main(["test", "--ckpt_path", best, *QUIET]) == 0


def test_a_broken_file_is_one_line_from_a_worker_process_too(
    videos: Path, capsys: pytest.CaptureFixture
) -> None:
    path = videos / "train" / "dark" / "0.mp4"
    data = bytearray(path.read_bytes())
    data[len(data) // 8 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 8)
    path.write_bytes(data)
    own = ["--data.source=folder", f"--data.root={videos}", "--data.frames=4", *QUIET]
    own += ["--data.image_size=16", "--data.batch_size=6", "--data.num_workers=1"]
    assert cli.main(["fit", "--config", "video", *own, "--trainer.max_epochs=1"]) == 1
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "mmpos: error" in x]
    assert line.startswith("mmpos: error: cannot read the video") and "0.mp4" in line


def test_without_the_library_of_video_its_extra_is_named(
    videos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    own = ["--data.source=folder", f"--data.root={videos}", *QUIET]
    assert cli.main(["fit", "--config", "video", *own]) == 1
    assert "pip install 'mmpos[video]'" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--model.patch_size=16", "model.patch_size: expected Sequence[int], got '16'"),
        ("--model.patch_size=[16,16]", "a tubelet has three sizes, frames, height and width"),
        ("--model.frames=9", "use --data.frames 9 for video"),
        ("--model.step=0.5", "use --data.fps"),
    ],
)
def test_settings_that_the_job_does_not_have_are_one_line(
    given: str, message: str, capsys: pytest.CaptureFixture
) -> None:
    assert cli.main(["fit", "--config", "video", given, *QUIET]) in (1, 2)
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "mmpos: error" in x]
    assert message in line


def test_the_grid_in_positions_counts_the_frames_of_tubelets() -> None:
    """And a length that only rounding makes longer has no place more."""
    for frames, size, step, ticks, time in ((8, 2, 1 / 8, 8.0, 8), (3, 1, 0.1, 10.0, 3)):
        own = make(frames=frames, patch_size=(size, 4, 4), step=step, ticks=ticks)
        assert own.network.transformer.axes == (time, 3, 2)


@torch.no_grad()
def test_pooling_is_as_told_and_a_transformer_of_python_is_in_no_checkpoint() -> None:
    token = partial(ROPE, class_token=True)
    means, first = make(transformer=token), make(transformer=token, pool="token")
    assert "transformer" not in first.hparams and first.hparams["pool"] == "token"
    x = clips(2, 8)
    assert (means(x)["class"] - first(x)["class"]).abs().max() > 1e-2


def test_what_else_cannot_be_imported_keeps_its_traceback() -> None:
    assert faults.early(ImportError("cannot import name 'x' from 'y'"), []) is None
    assert str(faults.early(ImportError("do: pip install 'z'"), [])) == "do: pip install 'z'"
