"""Fine-tuning: rates by layer and frozen parts in a run, over processes, after resuming."""

import math
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

import mmpos
from mmpos.models import Transformer
from mmpos.models.block import DropPath
from tasks import ImageClassification

BOTTOM = ("tokens", "transformer.layers.0", "transformer.additive")
ENCODER = partial(
    Transformer, size="nano", depth=3, drop_path=0.5, additive=mmpos.LearnedEncoding, rotary=None
)
pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")


def make(**options) -> ImageClassification:
    options = {"transformer": ENCODER, "lr": 1e-2, "warmup": 0.25} | options
    return ImageClassification(["a", "b", "c"], (8, 12), (4, 4), 1, **options)


def loader(count: int = 16, seed: int = 0) -> DataLoader:
    draw = torch.Generator().manual_seed(seed)
    items = [(torch.randn(1, 8, 12, generator=draw), index % 3) for index in range(count)]
    return DataLoader(items, batch_size=4)


def trainer(folder: Path, **options) -> L.Trainer:
    return L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"max_epochs": 1, "logger": False} | options),
    )


def fit(task, folder: Path, ckpt_path: str | None = None, **options) -> str:
    run = trainer(folder, **options)
    run.fit(task, loader(), loader(seed=1), ckpt_path=ckpt_path)
    return run.checkpoint_callback.best_model_path


def frozen(name: str) -> bool:
    return f"{name}.".removeprefix("network.").startswith(tuple(f"{p}." for p in BOTTOM))


class Watch(L.Callback):
    """The rate, decay and first moment of each parameter before each step, by name."""

    def __init__(self) -> None:
        self.rates: list[dict[str, float]] = []
        self.moments: dict[str, Tensor] = {}
        self.modes: list[dict[str, bool]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        (optimizer,) = trainer.optimizers
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        groups = optimizer.param_groups
        self.rates.append({names[p]: g["lr"] for g in groups for p in g["params"]})
        for group in groups:
            assert [names[p] for p in group["params"]] == group["param_names"]
        if len(self.rates) == 1:
            self.moments = {
                names[p]: state["exp_avg"].clone() for p, state in optimizer.state.items()
            }
        self.modes.append({n: m.training for n, m in pl_module.network.named_modules()})


class StopAfter(L.Callback):
    def on_train_epoch_end(self, trainer, pl_module) -> None:
        trainer.should_stop = trainer.current_epoch == 1


def scale(name: str, layer_decay: float) -> float:
    """lr · decay^(depth − i) for block i, decay^(depth + 1) for what comes before."""
    parts = name.split(".")
    if "layers" in parts:
        return layer_decay ** (3 - int(parts[3]))
    return 1.0 if {"heads", "norm"} & set(parts[1:3]) else layer_decay**4


def rate(step: int, steps: int, lr: float = 1e-2, warmup: float = 0.25) -> float:
    rising = int(warmup * steps)
    if step < rising:
        return lr / rising + step * (lr - lr / rising) / rising
    return lr / 2 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))


def test_rates_by_layer_from_the_first_step_to_the_last_and_in_the_log(tmp_path: Path) -> None:
    watch, monitor = Watch(), LearningRateMonitor("step")
    logger = CSVLogger(tmp_path)
    fit(
        make(layer_decay=0.5),
        tmp_path,
        max_epochs=3,
        logger=logger,
        callbacks=[watch, monitor],
        log_every_n_steps=1,
    )
    assert len(watch.rates) == 12
    for step, rates in enumerate(watch.rates):
        for name, found in rates.items():
            assert found == pytest.approx(rate(step, 12) * scale(name, 0.5)), (step, name)
    logged = {values[5] for values in monitor.lrs.values()}
    assert sorted(logged) == pytest.approx([rate(5, 12) * 0.5**power for power in (4, 3, 2, 1, 0)])


@pytest.mark.parametrize("again", [0.5, 0.8, None])
@pytest.mark.parametrize("first", [0.5, None])
def test_a_resumed_run_has_the_rates_it_is_told_and_its_moments(
    first: float | None, again: float | None, tmp_path: Path
) -> None:
    path = fit(make(layer_decay=first), tmp_path / "first")
    stored = torch.load(path, weights_only=True)["optimizer_states"][0]
    indices = {
        n: i
        for g in stored["param_groups"]
        for n, i in zip(g["param_names"], g["params"], strict=True)
    }
    watch = Watch()
    fit(make(layer_decay=again), tmp_path / "again", path, max_epochs=2, callbacks=[watch])
    assert len(watch.rates) == 4
    for step, rates in enumerate(watch.rates, 4):
        for name, found in rates.items():
            assert found == pytest.approx(rate(step, 8) * scale(name, again or 1.0)), (step, name)
    assert watch.moments.keys() == indices.keys()
    for name, moment in watch.moments.items():
        assert torch.equal(moment, stored["state"][indices[name]]["exp_avg"]), name


@pytest.mark.parametrize("freeze", [(), BOTTOM])
def test_resuming_equals_an_uninterrupted_run(freeze: tuple[str, ...], tmp_path: Path) -> None:
    def run(folder: str, ckpt_path: str | None = None, *callbacks: L.Callback):
        torch.manual_seed(3)
        task = make(layer_decay=0.6, freeze=freeze)
        path = fit(task, tmp_path / folder, ckpt_path, max_epochs=4, callbacks=list(callbacks))
        return task.state_dict(), path

    whole, _ = run("whole")
    _, path = run("half", None, StopAfter())
    rest, _ = run("rest", path)
    for name, value in whole.items():
        assert torch.equal(rest[name], value), name


def test_what_is_frozen_does_not_move_and_is_not_in_the_optimizer(tmp_path: Path) -> None:
    task, watch = make(freeze=BOTTOM, weight_decay=0.5, layer_decay=0.5), Watch()
    before = {name: p.detach().clone() for name, p in task.named_parameters()}
    fit(task, tmp_path, callbacks=[watch])
    for name, parameter in task.named_parameters():
        assert torch.equal(parameter, before[name]) == frozen(name), name
        assert parameter.requires_grad != frozen(name)
        assert (name in watch.rates[0]) != frozen(name)
    assert sum(map(frozen, before)) == 15
    assert watch.rates[-1]["network.transformer.layers.1.mlp.up.weight"] == pytest.approx(
        rate(3, 4) * 0.5**2
    )


def test_a_run_that_freezes_more_or_less_goes_on(tmp_path: Path) -> None:
    path = fit(make(freeze=["tokens"]), tmp_path / "first")
    for freeze in (BOTTOM, ()):
        watch = Watch()
        task = make(freeze=freeze)
        fit(task, tmp_path / str(len(freeze)), path, max_epochs=2, callbacks=[watch])
        kept = {n for n in watch.rates[0] if "tokens" not in n}
        assert set(watch.moments) == kept
        assert len(watch.rates[0]) == sum(p.requires_grad for p in task.parameters())


def test_frozen_modules_rest_whatever_sets_the_mode(tmp_path: Path) -> None:
    """At the start, after each validation, and after someone's ``train()``."""

    class Trains(Watch):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            pl_module.train()
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    watch = Trains()
    task = make(freeze=BOTTOM)
    fit(task, tmp_path, max_epochs=2, val_check_interval=1, callbacks=[watch])
    assert len(watch.modes) == 8
    for modes in watch.modes:
        for name, training in modes.items():
            assert training != (frozen(name) and name != ""), name
    rest = task.network.transformer.layers[0]
    assert isinstance(rest.drop_path, DropPath) and not rest.drop_path.training
    assert task.network.transformer.layers[1].drop_path.training


def test_validation_alone_gives_the_mode_back(tmp_path: Path) -> None:
    watch = Watch()
    task = make(freeze=BOTTOM)
    fit(task, tmp_path, max_epochs=2, val_check_interval=1, callbacks=[watch])
    assert not any(modes["transformer.layers.0.mlp"] for modes in watch.modes)
    assert all(modes["transformer.layers.1.mlp"] for modes in watch.modes)


def test_the_average_of_what_is_frozen_is_itself(tmp_path: Path) -> None:
    task = make(freeze=BOTTOM, ema=0.9, layer_decay=0.5)
    before = {name: p.detach().clone() for name, p in task.named_parameters()}
    saved = torch.load(fit(task, tmp_path), weights_only=True)
    for name, value in before.items():
        average, current = saved["state_dict"][name], saved["current_model_state"][name]
        assert torch.equal(average, value) == torch.equal(current, value) == frozen(name), name


def test_starting_weights_are_loaded_before_they_are_frozen(tmp_path: Path) -> None:
    donor = make()
    torch.save(donor.network.state_dict(), tmp_path / "start.pt")
    task = make(weights=tmp_path / "start.pt", freeze=BOTTOM)
    fit(task, tmp_path)
    for name, value in donor.network.named_parameters():
        assert torch.equal(task.network.get_parameter(name), value) == frozen(name), name


class Save(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seeds: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.seeds.append(torch.initial_seed())

    def on_fit_end(self, trainer, pl_module) -> None:
        path = self.folder / f"{trainer.global_rank}.pt"
        weights = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
        torch.save((weights, self.seeds), path)


def test_two_processes_stay_equal(tmp_path: Path) -> None:
    """Without a word of unused parameters; with rates by layer, an average and mixed images."""
    task = make(freeze=BOTTOM, layer_decay=0.5, ema=0.9, mixup=0.8)
    before = {name: p.detach().clone() for name, p in task.named_parameters()}
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo")
    run = trainer(
        tmp_path,
        max_epochs=2,
        devices=2,
        strategy=strategy,
        callbacks=[Save(tmp_path)],
        enable_checkpointing=False,
    )
    run.fit(task, loader(), loader(seed=1))
    (first, seeds), (second, others) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert len({*seeds, *others}) == 2 * 4, "each batch of each process has noise of its own"
    for name, value in before.items():
        assert torch.equal(first[name], second[name]), f"{name} differs between processes"
        assert torch.equal(first[name], value) == frozen(name), name


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        (["token"], r"nothing to freeze is called 'token'; did you mean tokens\?"),
        (["transformer.layer.0"], r"'transformer.layer.0'; did you mean transformer.layers.0\?"),
        (["transformer.layers.1", "xyz"], r"'xyz'; the parts are tokens, transformer, heads"),
        (["tokens", "transformer", "heads"], r"leaves nothing to train"),
        ("tokens", r"a list of names such as \['tokens'\], got 'tokens'"),
        ([""], r"a list of names"),
    ],
)
def test_parts_that_cannot_be_frozen(freeze, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        fit(make(freeze=freeze), tmp_path)


def test_a_part_ends_at_a_dot(tmp_path: Path) -> None:
    encoder = partial(Transformer, size="nano", depth=11)
    task = make(transformer=encoder, freeze=["transformer.layers.1"])
    trainer(tmp_path, fast_dev_run=True).fit(task, loader(), loader())
    assert not any(p.requires_grad for p in task.network.transformer.layers[1].parameters())
    assert all(p.requires_grad for p in task.network.transformer.layers[10].parameters())


@pytest.mark.parametrize("layer_decay", [0.0, -0.5, 1.5])
def test_a_decay_that_is_none(layer_decay: float) -> None:
    with pytest.raises(ValueError, match="a factor above 0 and up to 1"):
        make(layer_decay=layer_decay)
