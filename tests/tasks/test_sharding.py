"""Networks divided among processes, as they are in one; the meta device; folders of shards.

As a program it is the processes: ``python test_sharding.py FOLDER`` runs all jobs.
"""

import os
import pickle
import shutil
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Dataset

import mmpos
from mmpos.models import Modalities, PatchEmbedding, SwiGLU, Symbols, Transformer, TubeletEmbedding
from tasks import ImageClassification, LanguageModel, cli
from tasks.data import Images
from tasks.decoder import Decoder
from tasks.sharding import FullySharded, consolidated, is_sharded, materialize
from tasks.shards import Reader, check_shards
from tasks.weights import load_weights

STEPS, CLIP = 10, 0.3
ENCODINGS = {
    "learned and alibi": {
        "additive": partial(mmpos.LearnedEncoding, prefix_rows=1),
        "bias": partial(mmpos.ALiBi, learned=True),
    },
    "rope": {"rotary": mmpos.RotaryEncoding},
    "factorized, mixed and T5": {
        "additive": mmpos.FactorizedEncoding,
        "rotary": partial(mmpos.MixedRotaryEncoding, heads=4),
        "bias": mmpos.T5Bias,
        "per_layer": ["rotary"],
    },
}
FIRST, LAST = "learned and alibi", "factorized, mixed and T5"


class Record(L.Callback):
    """What a process sees of a run."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        grads = [whole(p.grad).double() for p in pl_module.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack([grad.norm() for grad in grads]).norm()))
        loss = outputs["loss"].detach().clone()
        self.losses.append(float(trainer.strategy.reduce(loss, reduce_op="mean")))


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Nine(Dataset):
    """The first nine samples."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return 9

    def __getitems__(self, indices: list[int]) -> Any:
        return self.data.__getitems__(indices)


class Odd(Images):
    """Evaluates on so many that processes have other numbers of batches."""

    def samples(self, split: str) -> Any:
        data = super().samples(split)
        return data if split == "train" else Nine(data)


def train(
    folder: Path,
    name: str,
    processes: int,
    *,
    encoding: str = FIRST,
    strategy: Any = None,
    resume: Path | None = None,
    device: str = "cpu",
    precision: Any = "32-true",
    seed: int = 0,
    tested: bool = False,
    odd: bool = False,
    **options: Any,
) -> None:
    """One process of a run, in which rank 0 writes what it found."""
    L.seed_everything(seed, verbose=False)
    sizes = {"image_size": (16, 24), "patch_size": 8, "batch_size": 8 // processes}
    data = (Odd if odd else Images)(train_samples=400, **sizes)
    with torch.device(device):
        task = ImageClassification(
            data.classes,
            data.image_size,
            data.patch_size,
            data.channels,
            partial(Transformer, size="nano", depth=2, class_token=True, **ENCODINGS[encoding]),
            **options,
        )
    record = Record()
    saving = ModelCheckpoint(
        folder / name, filename="{step}", every_n_train_steps=STEPS // 2, save_top_k=-1
    )
    trainer = L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=processes,
        strategy="auto" if strategy is None else strategy(),
        precision=precision,
        max_steps=STEPS,
        limit_val_batches=1.0 if odd else 0,
        val_check_interval=4,
        gradient_clip_val=CLIP,
        callbacks=[record, saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, datamodule=data, ckpt_path=resume, weights_only=True)
    own = list(task.network.parameters())
    found = {
        "weights": {k: whole(v).clone() for k, v in task.network.state_dict().items()},
        "norms": record.norms,
        "losses": record.losses,
        "units": [n for n, m in task.network.named_modules() if isinstance(m, FSDPModule)],
        "share": sum(getattr(p, "_local_tensor", p).numel() for p in own)
        / sum(p.numel() for p in own),
        "metrics": trainer.test(task, datamodule=data, verbose=False) if tested else [],
    }
    if trainer.is_global_zero:
        torch.save(found, folder / f"{name}.pt")


def processes(folder: Path, name: str, count: int, job: Any = train, **options: Any) -> None:
    """Fork them; a failure is written down."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    children = []
    for rank in range(count):
        child = os.fork()
        if not child:
            named = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": count}
            named |= {"LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({key: str(value) for key, value in named.items()})
            os.environ["TORCHELASTIC_RUN_ID"] = name
            try:
                torch.set_num_threads(1)
                job(folder, name, count, **options)
            except BaseException as error:
                (folder / f"{name}.{rank}.error").write_text(f"{type(error).__name__}: {error}")
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def all_jobs(folder: Path) -> None:
    run = partial(processes, folder)
    for encoding in ENCODINGS:
        run(f"one {encoding}", 1, encoding=encoding, tested=encoding == FIRST)
        two = {"strategy": FullySharded, "tested": encoding == FIRST}
        run(f"two {encoding}", 2, encoding=encoding, **two)
    run("one odd", 1, odd=True, tested=True)
    run("two odd", 2, odd=True, tested=True, strategy=FullySharded)
    half = folder / f"two {LAST}" / f"step={STEPS // 2}.ckpt"
    again = partial(run, encoding=LAST, resume=half, seed=1)
    again("on two", 2, strategy=FullySharded)
    again("on one", 1, strategy=FullySharded)
    run("consolidate", 1, job=write, source=half)
    run("on a plain one", 1, encoding=LAST, resume=folder / "consolidate.ckpt", seed=1)
    file = folder / f"one {LAST}" / f"step={STEPS // 2}.ckpt"
    run("from a file", 2, encoding=LAST, resume=file, seed=1, strategy=FullySharded)
    for count in (1, 2):
        meta = {"encoding": LAST, "device": "meta", "strategy": FullySharded, "tested": True}
        run(f"meta {count}", count, **meta)
    start = {"weights": folder / "consolidate.ckpt", "lr": 0.0}
    run("meta weights", 2, encoding=LAST, device="meta", strategy=FullySharded, **start)
    run("bf16", 2, strategy=FullySharded, precision="bf16-mixed")
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    run("lightning", 2, strategy=partial(ModelParallelStrategy, **sizes))
    run("tensor parallel", 2, strategy=ModelParallelStrategy)
    run("ema", 1, strategy=FullySharded, ema=0.9)
    run("another", 1, encoding="rope", strategy=FullySharded, resume=half)
    evil = folder / "evil.ckpt"
    shutil.copytree(half, evil)
    (evil / ".metadata").write_bytes(pickle.dumps(Evil(folder / "executed")))
    run("evil", 1, encoding=LAST, strategy=FullySharded, resume=evil)


def write(folder: Path, name: str, _: int, *, source: Path) -> None:
    torch.save(consolidated(source), folder / f"{name}.ckpt")


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


if __name__ == "__main__":
    all_jobs(Path(sys.argv[1]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all jobs wrote to."""
    if sys.platform != "linux":
        pytest.skip("forks its processes")
    folder = tmp_path_factory.mktemp("runs")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, __file__, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    (folder / "log").write_text(done.stdout + done.stderr)
    return folder


def found(runs: Path, name: str) -> dict[str, Any]:
    path = runs / f"{name}.pt"
    assert path.is_file(), (runs / "log").read_text()[-6000:]
    return torch.load(path)


def fault(runs: Path, name: str) -> str:
    assert not (runs / f"{name}.pt").exists()
    return (runs / f"{name}.0.error").read_text()


def assert_same(one: dict[str, Any], other: dict[str, Any], within: float) -> None:
    assert one["weights"].keys() == other["weights"].keys()
    for name, value in one["weights"].items():
        torch.testing.assert_close(other["weights"][name], value, rtol=0, atol=within, msg=name)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_two_processes_are_one_with_twice_the_batch(runs, encoding) -> None:
    one, two = found(runs, f"one {encoding}"), found(runs, f"two {encoding}")
    assert len(set(one["losses"])) == STEPS
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert_same(one, two, 1e-5)
    assert two["units"] == ["", "transformer.layers.0", "transformer.layers.1"]
    assert two["share"] == pytest.approx(0.5, abs=0.02)
    assert bool(two["metrics"]) == (encoding == FIRST)
    for theirs, ours in zip(one["metrics"], two["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_processes_may_evaluate_other_numbers_of_batches(runs) -> None:
    one, two = found(runs, "one odd"), found(runs, "two odd")
    assert_same(one, two, 1e-5)
    for name, value in one["metrics"][0].items():
        assert two["metrics"][0][name] == pytest.approx(value, abs=1e-5), name


def test_the_norm_that_is_clipped_is_of_the_whole(runs) -> None:
    for name in (f"one {FIRST}", f"two {FIRST}", "bf16"):
        assert found(runs, name)["norms"] == pytest.approx([CLIP] * STEPS, rel=1e-4)


def test_half_precision_and_lightnings_strategy(runs) -> None:
    two, half = found(runs, f"two {FIRST}"), found(runs, "bf16")
    assert_same(two, half, 1e-2)
    assert half["losses"] != two["losses"]
    assert {value.dtype for value in half["weights"].values()} == {torch.float32}
    assert_same(two, found(runs, "lightning"), 0)


def test_a_run_goes_on_from_shards_with_any_number_of_processes(runs) -> None:
    two = found(runs, f"two {LAST}")
    assert_same(two, found(runs, "on two"), 0)
    for name in ("on one", "on a plain one"):
        assert_same(two, found(runs, name), 1e-6)
    assert_same(found(runs, f"one {LAST}"), found(runs, "from a file"), 1e-6)
    assert sorted(path.name for path in (runs / f"two {LAST}").iterdir()) == [
        f"step={STEPS}.ckpt",
        f"step={STEPS // 2}.ckpt",
    ]


def test_shards_become_a_checkpoint_as_any_other(runs) -> None:
    shards = runs / f"two {LAST}" / f"step={STEPS}.ckpt"
    content = consolidated(shards)
    plain = torch.load(runs / f"one {LAST}" / shards.name, weights_only=True)
    assert content.keys() == plain.keys()
    (ours,), (theirs,) = content["optimizer_states"], plain["optimizer_states"]
    for group, own in zip(theirs["param_groups"], ours["param_groups"], strict=True):
        assert own == group
    for number, moments in theirs["state"].items():
        torch.testing.assert_close(ours["state"][number], moments, rtol=1e-3, atol=1e-5)
    file = runs / "whole.ckpt"
    torch.save(content, file)
    transformer = partial(Transformer, size="nano", depth=2, class_token=True, **ENCODINGS[LAST])
    task = ImageClassification.load_from_checkpoint(file, transformer=transformer)
    weights = found(runs, f"two {LAST}")["weights"]
    assert all(torch.equal(v, weights[name]) for name, v in task.network.state_dict().items())
    for weight in task.network.parameters():
        nn.init.zeros_(weight)
    load_weights(task.network, file)
    assert all(torch.equal(v, weights[name]) for name, v in task.network.state_dict().items())


def test_what_is_made_on_the_meta_device_trains(runs) -> None:
    one, two = found(runs, "meta 1"), found(runs, "meta 2")
    assert_same(one, two, 1e-5)
    assert two["metrics"][0] == pytest.approx(one["metrics"][0], rel=1e-5)
    usual = found(runs, f"one {LAST}")
    assert two["losses"] == pytest.approx(usual["losses"], rel=0.1)
    state = torch.load(runs / "consolidate.ckpt", weights_only=True)["state_dict"]
    for name, value in found(runs, "meta weights")["weights"].items():
        assert torch.equal(value, state[f"network.{name}"]), name


def test_refusals_say_the_way_out(runs) -> None:
    assert "trainer/fsdp" in fault(runs, "tensor parallel")
    assert "--trainer.strategy ddp" in fault(runs, "ema")
    assert "of another network: network.transformer.additive.table.0 is" in fault(runs, "another")
    assert fault(runs, "evil").startswith("ValueError: cannot read the shards in")
    assert not (runs / "executed").exists()


@pytest.mark.parametrize("where", ["meta.pt", ".metadata", "shards"])
def test_nothing_in_a_folder_of_shards_is_executed(where, tmp_path) -> None:
    folder, mark = tmp_path / "shards", tmp_path / "executed"
    rest = {"evil": Evil(mark)} if where == "shards" else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        save({"state_dict": {"a": torch.ones(2)}, **rest}, checkpoint_id=folder, no_dist=True)
    torch.save({"epoch": Evil(mark) if where == "meta.pt" else 1}, folder / "meta.pt")
    if where == ".metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(ValueError, match="tensors and plain settings"):
        consolidated(folder)
    assert not mark.exists()
    if where != "meta.pt":
        with suppress(Exception, CheckpointException):
            _load_distributed_checkpoint(folder)
        assert mark.exists(), "what torch reads is executed"


def test_a_flipped_bit_in_a_shard_is_seen(runs, tmp_path) -> None:
    folder = tmp_path / "last.ckpt"
    shutil.copytree(runs / f"two {LAST}" / f"step={STEPS // 2}.ckpt", folder)
    check_shards(folder)
    (shard, *_) = folder.glob("*.distcp")
    content = bytearray(shard.read_bytes())
    described = Reader(folder).read_metadata().storage_data.values()
    last = max(
        (each for each in described if each.relative_path == shard.name), key=lambda e: e.length
    )
    content[last.offset + last.length // 2] ^= 1
    shard.write_bytes(content)
    for read in (check_shards, consolidated):
        with pytest.raises(ValueError, match=r"cannot read the shards .* or a damaged one"):
            read(folder)


def test_what_is_no_folder_of_shards(tmp_path) -> None:
    assert not is_sharded(tmp_path)
    with pytest.raises(ValueError, match="no folder of shards"):
        consolidated(tmp_path)


def made_on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        bare = make()
    assert all(weight.is_meta for weight in bare.parameters())
    torch.manual_seed(0)
    materialize(bare, torch.device("cpu"))
    return bare


def test_encodings_begin_as_if_the_meta_device_had_not_been(encoding_case) -> None:
    encoding, case = encoding_case.encoding, encoding_case
    size = {"AdditiveEncoding": 48, "RotaryEncoding": 16, "AttentionBias": 3}
    make = partial(type(encoding), size[case.base.__name__], case.grid, **case.named)
    bare = made_on_meta(make)
    for (name, weight), own in zip(encoding.named_parameters(), bare.parameters(), strict=True):
        assert weight.ndim and torch.equal(own, weight), name


PARTS = {
    "transformer": partial(Transformer, (4, 6), size="nano", class_token=True, mlp=SwiGLU),
    "norms and a part of its own": partial(
        Transformer,
        (4, 6),
        size="nano",
        norm=nn.RMSNorm,
        qk_norm=nn.RMSNorm,
        mlp=lambda dim: nn.Sequential(nn.Linear(dim, dim, bias=False), nn.GELU()),
    ),
    "content": partial(
        Transformer, (20,), size="nano", bias=[mmpos.ShawBias, mmpos.TransformerXLBias]
    ),
    "decoder": lambda: Decoder(99, Transformer((20,), size="nano", causal=True), False),
    "modalities": lambda: Modalities(
        {
            "text": Symbols(64, 99),
            "image": PatchEmbedding(64, (4, 4)),
            "video": TubeletEmbedding(64, (2, 4, 4)),
            "audio": mmpos.models.FrameEmbedding(64, 40),
            "sound": mmpos.models.SpectrogramPatches(64, 40),
        }
    ),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("first", ["outer", "inner"])
def test_models_begin_as_if_the_meta_device_had_not_been(part, first) -> None:
    usual, bare = PARTS[part](), made_on_meta(PARTS[part])
    if first == "inner":  # whoever resets all parts, in whatever order
        for module in reversed(list(bare.modules())):
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
    for (name, own), other in zip(usual.named_parameters(), bare.parameters(), strict=True):
        assert own.ndim
        assert other.std().item() == pytest.approx(own.std().item(), rel=0.3, abs=1e-6), name
        assert other.mean().item() == pytest.approx(
            own.mean().item(), abs=0.3 * own.std().item() + 1e-6 if own.ndim > 1 else 0.1
        ), name
        if own.ndim > 1 and own.numel() > 1000:
            assert other.abs().max() < 1.5 * own.abs().max(), name


def test_a_language_model_begins_on_the_meta_device() -> None:
    make = partial(
        LanguageModel, 99, 20, partial(Transformer, size="nano", causal=True, bias=mmpos.FIREBias)
    )
    usual, bare = make(), made_on_meta(make)
    bare.load_state_dict(usual.state_dict())
    ids = torch.randint(99, (2, 20))
    assert torch.equal(usual.eval()(ids), bare.eval()(ids))
    assert float(bare.metrics["val"]["loss"].over) == 0


def test_a_part_without_a_beginning_is_named() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        bare = nn.Sequential(Own())
    with pytest.raises(ValueError, match="Own has no reset_parameters"):
        materialize(bare, torch.device("cpu"))


def test_the_config_through_the_command(tmp_path, monkeypatch) -> None:
    """A folder of shards is as good as a file for all that reads checkpoints."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-m", "mmpos", "fit", "--config", "image"]
    command += ["--config", "trainer/fsdp", "--trainer.accelerator=cpu", "--trainer.devices=2"]
    command += ["--data.image_size=16", "--data.patch_size=8", "--data.train_samples=64"]
    command += ["--data.batch_size=16", "--trainer.max_epochs=1", "--test_after_fit=false"]
    command += ["--trainer.num_sanity_val_steps=0", "--trainer.enable_progress_bar=false"]
    command += ["--trainer.limit_val_batches=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (path,) = tmp_path.glob("runs/image/version_0/checkpoints/last.ckpt")
    torch.save(consolidated(path), tmp_path / "whole.ckpt")
    task = ImageClassification.load_from_checkpoint(tmp_path / "whole.ckpt")
    assert all(weight.isfinite().all() for weight in task.parameters())
    monkeypatch.chdir(tmp_path)
    few = ["--trainer.limit_test_batches=1", "--trainer.accelerator=cpu", "--trainer.devices=1"]
    assert cli.main(["test", "--ckpt_path", str(path), *few]) == 0
    assert cli.main(["export", "--ckpt_path", str(path), "--output", "out.safetensors"]) == 0
    written = load_file("out.safetensors")
    assert all(torch.equal(v, written[n]) for n, v in task.network.state_dict().items())
    on = ["--trainer.strategy=auto", "--trainer.max_epochs=2", "--data.batch_size=32", *few]
    assert cli.main(["fit", "--ckpt_path", "last", *on]) == 0
    (last,) = (file for file in path.parent.glob("last.ckpt") if file.is_file())
    assert torch.load(last, weights_only=True)["global_step"] == 4
