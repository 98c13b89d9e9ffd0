"""What goes wrong in the middle of a run ends in one line, loses nothing, and the run goes on."""

import os
import pickle
import resource
import signal
import threading
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from PIL import Image

from tasks import checkpoint_io, cli
from tasks.checkpoint_io import CheckpointIO, check

SMALL = ["--data.image_size=16", "--data.patch_size=8", "--data.train_samples=200"]
SMALL += ["--data.batch_size=50", "--model.transformer.depth=1", "--trainer.max_epochs=3"]
SMALL += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
SMALL += ["--trainer.accelerator=cpu", "--test_after_fit=false", "--trainer.limit_val_batches=1"]
IMAGE = ["fit", "--config", "image", *SMALL]
LAST = Path("runs/image/version_0/checkpoints/last.ckpt")
WAY_ON = f"; to go on: mmpos fit --ckpt_path {LAST.parent}/"


class At(Callback):
    """Does something once, after a step."""

    step, done = 5, staticmethod(lambda trainer: None)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == At.step:
            At.done(trainer)


@pytest.fixture
def at(monkeypatch, tmp_path):
    """Sets what is done; the callback is named in a config."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(At, "__module__", "faults")
    module = type(os)("faults")
    module.At = At
    monkeypatch.setitem(__import__("sys").modules, "faults", module)
    Path("at.yaml").write_text("trainer: {callbacks+: [faults.At]}")

    def set_to(done, step: int = 5) -> list[str]:
        monkeypatch.setattr(At, "done", staticmethod(done))
        monkeypatch.setattr(At, "step", step)
        return ["--config", "at.yaml"]

    return set_to


@pytest.fixture
def weights(monkeypatch, tmp_path):
    """Those that the image job ends with."""

    def of(args: list[str]) -> dict:
        assert cli.main(args) == 0
        return torch.load(LAST, weights_only=True)["state_dict"]

    return of


def told(capsys) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if "mmpos: error: " in line]
    (line,) = lines
    return line.removeprefix("mmpos: error: ")


def same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_loss_that_is_not_finite(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*IMAGE, "--model.lr=1e30", "--trainer.gradient_clip_val=null"]) == 1
    line = told(capsys)
    assert line.startswith("the loss is ") and "in step 1 of epoch 0: lower --model.lr, " in line
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.filterwarnings("ignore:Encountered `nan` values")  # of a metric
def test_weights_that_are_not_finite_are_not_saved(at, capsys) -> None:
    def poison(trainer) -> None:
        with torch.no_grad():
            next(trainer.lightning_module.network.parameters()).fill_(torch.nan)

    assert cli.main([*IMAGE, *at(poison, 8)]) == 1  # the last of its epoch
    assert "is not finite any more, and is not saved" in told(capsys)
    assert torch.load(LAST, weights_only=True)["global_step"] == 4


def test_a_loader_process_that_dies(at, weights, capsys) -> None:
    def murder(trainer) -> None:
        (loader,) = trainer.fit_loop._combined_loader.flattened
        for worker in loader._iterator._workers:
            os.kill(worker.pid, signal.SIGKILL)

    workers = ["--data.num_workers=2"]
    assert cli.main([*IMAGE, *workers, *at(murder)]) == 1
    line = told(capsys)
    assert line.startswith("DataLoader worker") and WAY_ON in line
    resumed = weights([*IMAGE, *workers, "--ckpt_path=last"])
    Path("runs").rename("first")
    same(resumed, weights([*IMAGE, *workers]))


def test_a_file_that_vanishes_within_an_epoch(at, tmp_path, capsys) -> None:
    draw = np.random.default_rng(0)
    for number in range(60):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (16, 16, 3), np.uint8)).save(path)
    job = [*IMAGE, "--data.source=folder", "--data.root=photos", "--data.train_samples=null"]
    job += ["--data.batch_size=8"]

    def move(trainer) -> None:
        (tmp_path / "photos").rename(tmp_path / "elsewhere")

    assert cli.main([*job, *at(move, 8)]) == 1
    line = told(capsys)
    assert "photos/" in line and ".png" in line and WAY_ON in line, line
    (tmp_path / "elsewhere").rename(tmp_path / "photos")
    assert cli.main([*job, "--ckpt_path=last"]) == 0


def test_a_disk_that_is_full_while_it_saves(at, weights, capsys) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(trainer) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))

    try:
        status = cli.main([*IMAGE, *at(fill)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    line = told(capsys)
    assert status == 1 and line.startswith("cannot save the checkpoint ") and WAY_ON in line
    assert "File too large; the one saved there before is kept" in line
    assert {path.suffix for path in LAST.parent.iterdir()} == {".ckpt"}
    for path in LAST.parent.iterdir():
        check(path)
    resumed = weights([*IMAGE, "--ckpt_path=last"])
    Path("runs").rename("first")
    same(resumed, weights(IMAGE))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_signal_ends_the_run_after_its_step(at, weights, capsys, number, ema) -> None:
    before = signal.getsignal(number)
    job = [*IMAGE, f"--model.ema={ema or 'null'}"]
    try:
        status = cli.main([*job, *at(lambda trainer: os.kill(os.getpid(), number), 6)])
        how = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        line = told(capsys)
        assert line == f"stopped by {how}{WAY_ON}last.ckpt"
        assert status == (130 if number == signal.SIGINT else 143)
        assert torch.load(LAST, weights_only=True)["global_step"] == 6
        resumed = weights([*job, "--ckpt_path=last"])
        Path("runs").rename("first")
        same(resumed, weights(job))
    finally:
        signal.signal(number, before)


def test_a_second_ctrl_c_ends_it_at_once(at, capsys) -> None:
    before = signal.getsignal(signal.SIGINT)

    def twice(trainer) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    try:
        assert cli.main([*IMAGE, *at(twice, 6)]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert torch.load(LAST, weights_only=True)["global_step"] == 4


@pytest.mark.parametrize("array", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_under_slurm_it_goes_back_into_the_queue(
    at, weights, capsys, monkeypatch, tmp_path, array, number
) -> None:
    asked = tmp_path / "asked"
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    slurm = {"NTASKS": "1", "NTASKS_PER_NODE": "1", "NNODES": "1", "PROCID": "0", "LOCALID": "0"}
    slurm |= {"NODEID": "0", "JOB_NAME": "job", "JOB_ID": "1234", "NODELIST": "localhost"}
    slurm |= {"ARRAY_JOB_ID": "77", "ARRAY_TASK_ID": "3"} if array else {}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    job = [*IMAGE, "--trainer.logger.version=1234", "--ckpt_path=last"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert cli.main([*job, *at(lambda trainer: os.kill(os.getpid(), number), 6)]) == 143
    assert asked.read_text() == f"requeue {'77_3' if array else '1234'}\n"
    capsys.readouterr()
    assert cli.main(job) == 0
    saved = Path("runs/image/version_1234/checkpoints/last.ckpt")
    assert f"--ckpt_path last: {saved}" in capsys.readouterr().err
    resumed = torch.load(saved, weights_only=True)["state_dict"]
    same(resumed, weights([*IMAGE, "--trainer.logger.version=0"]))
    assert len(list(saved.parents[1].glob("metrics*.csv"))) == 2


class Weapon:
    """A pickle that does something when it is loaded."""

    def __reduce__(self):
        return os.system, ("touch harmed",)


@pytest.mark.parametrize("form", ["torch", "old torch", "pickle", "checkpoint"])
def test_a_malicious_pickle_is_refused_and_executes_nothing(
    form, at, weights, tmp_path, capsys
) -> None:
    state = weights(IMAGE)
    evil: dict = {"state_dict": state, "pytorch-lightning_version": "2.6.6", "extra": Weapon()}
    if form == "checkpoint":
        evil = torch.load(LAST, weights_only=True)
        evil["callbacks"]["x"] = Weapon()
    for name in ("evil.ckpt", "evil.pt", "evil.safetensors"):
        with Path(name).open("wb") as file:
            if form == "pickle":
                pickle.dump(evil, file)
            else:
                torch.save(evil, file, _use_new_zipfile_serialization=form != "old torch")
    for args in (
        [*IMAGE, "--ckpt_path=evil.ckpt"],
        ["fit", "--ckpt_path=evil.ckpt"],
        ["test", "--ckpt_path=evil.ckpt"],
        [*IMAGE, "--model.weights=evil.ckpt"],
        [*IMAGE, "--model.weights=evil.pt"],
        [*IMAGE, "--model.weights=evil.safetensors"],
        ["export", "--ckpt_path=evil.ckpt", "--output=out.safetensors"],
    ):
        assert cli.main(args) in (1, 2)
        assert "evil" in told(capsys)
    os.utime("evil.ckpt", (2e9, 2e9))
    for path in LAST.parent.glob("*.ckpt"):
        path.unlink()
    Path("evil.ckpt").rename(LAST)
    assert cli.main([*IMAGE, "--ckpt_path=last"]) == 1  # passed over
    with pytest.raises(Exception, match=r"damaged|[Ww]eights"):
        CheckpointIO().load_checkpoint(LAST)
    assert not Path("harmed").exists()


def test_a_save_is_whole_or_not_there(tmp_path, monkeypatch) -> None:
    saving, path = CheckpointIO(), tmp_path / "new" / "a.ckpt"
    saving.save_checkpoint({"value": torch.arange(1000)}, path)
    assert saving.load_checkpoint(path)["value"].sum() == 499_500
    whole = path.read_bytes()

    def full(content, file) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_io.torch, "save", full)
    with pytest.raises(OSError, match=r"cannot save .*a\.ckpt: No space left .* before is kept"):
        saving.save_checkpoint({}, path)
    with pytest.raises(OSError, match=r"cannot save .*b\.ckpt: No space left on device$"):
        saving.save_checkpoint({}, tmp_path / "b.ckpt")
    assert path.read_bytes() == whole and [p.name for p in path.parent.iterdir()] == ["a.ckpt"]
    for place in (100, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:place])
        with pytest.raises(ValueError, match="not a checkpoint, or a damaged one"):
            saving.load_checkpoint(path)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(ValueError, match=r"a damaged checkpoint: .*data/0 is not what was written"):
        saving.load_checkpoint(path)


def test_a_process_that_is_not_told_in_its_main_thread_trains(weights, tmp_path, at) -> None:
    """Signals can be listened to in the main thread alone."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(cli.main(IMAGE)))
    thread.start()
    thread.join()
    assert found == [0] and L.__version__
