"""Checkpoints move between sizes through every loader, with moments and averages."""

import logging
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader

import mmpos
from mmpos.models import Transformer
from mmpos.resample import grid_table
from tasks import ImageClassification
from tasks.resolution import ImageSizes, PatchSizes
from tasks.weights import load_weights

TABLE = "network.transformer.additive.table"
EPOCHS = 40
OLD, NEW, THIRD = (16, 24), (32, 48), (24, 16)  # pixels; patches of 4


def make(size: tuple[int, int], **options) -> ImageClassification:
    torch.manual_seed(0)
    encoder = partial(Transformer, size="nano", depth=1, additive=mmpos.LearnedEncoding)
    options = {"warmup": 0.0, "lr": 3e-3, "weight_decay": 0.0} | options
    return ImageClassification(["a", "b", "c", "d"], size, (4, 4), 1, encoder, **options)


def loader(size: tuple[int, int], count: int = 64) -> DataLoader:
    """A bright quarter of a dark image, the same picture at any size: which quarter?"""
    images = torch.zeros(count, 1, *size)
    labels = torch.arange(count) % 4
    for image, label in zip(images, labels, strict=True):
        rows = slice(0, size[0] // 2) if label < 2 else slice(size[0] // 2, None)
        columns = slice(0, size[1] // 2) if label % 2 == 0 else slice(size[1] // 2, None)
        image[:, rows, columns] = 1.0
    return DataLoader(list(zip(images, labels, strict=True)), batch_size=16)


class Watch(L.Callback):
    """The loss at each step, and the table before and after the first."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.tables: list[Tensor] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        table = pl_module.state_dict().get(TABLE)
        if table is not None:
            self.tables.append(table.clone())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(outputs["loss"].item())


def fit(task, size, folder: Path, epochs: int, ckpt_path=None) -> tuple[Watch, str]:
    watch = Watch()
    trainer = L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[watch],
        logger=False,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, loader(size), ckpt_path=ckpt_path)
    return watch, trainer.checkpoint_callback.best_model_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.warns(UserWarning, match="no `val_dataloader`"):
        return fit(make(OLD), OLD, tmp_path_factory.mktemp("old"), EPOCHS)[1]


pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


def stored(path: str) -> dict:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    "way", ["load_state_dict", "load_from_checkpoint", "weights", "safetensors"]
)
def test_every_loader_resizes_the_table(way: str, trained: str, tmp_path: Path) -> None:
    old = stored(trained)["state_dict"]
    encoder = partial(Transformer, size="nano", depth=1, additive=mmpos.LearnedEncoding)
    if way == "load_state_dict":
        task = make(NEW)
        task.load_state_dict(old)
    elif way == "load_from_checkpoint":
        task = ImageClassification.load_from_checkpoint(
            trained, image_size=NEW, transformer=encoder
        )
    else:
        start: str | Path = trained
        if way == "safetensors":
            start = tmp_path / "old.safetensors"
            save_file({k.removeprefix("network."): v for k, v in old.items()}, start)
        task = make(NEW, weights=start, lr=0.0)
        fit(task, NEW, tmp_path / "run", 1)
    new = task.state_dict()
    assert new[TABLE].shape == (8, 12, 64)
    torch.testing.assert_close(new[TABLE], grid_table(old[TABLE], (8, 12)), rtol=0, atol=0)
    for name, value in old.items():
        assert name == TABLE or torch.equal(new[name], value), name


def test_the_log_names_both_grids_and_the_way(
    trained: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="mmpos"):
        make(NEW).load_state_dict(stored(trained)["state_dict"])
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{TABLE}: resized from the grid 4 × 6 to 8 × 12 (bicubic, antialias)"
    )
    caplog.clear()
    make(OLD).load_state_dict(stored(trained)["state_dict"])
    assert not caplog.records


def test_the_report_of_starting_weights(
    trained: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from tasks.weights import load_weights

    task = make(NEW)
    head = task.network.heads["class_"].weight.detach().clone()
    report = load_weights(task.network, trained, ["heads"])
    assert "resized: transformer.additive.table 4 × 6 → 8 × 12 (bicubic, antialias)" in report
    assert "left out: heads.class_.weight, heads.class_.bias" in report
    assert torch.equal(task.network.heads["class_"].weight, head)
    with pytest.raises(ValueError, match=r"called 'head2': the parts are tokens, transformer"):
        load_weights(task.network, trained, ["head2"])


def test_a_run_goes_on_at_twice_the_resolution_without_a_jump(trained: str, tmp_path: Path) -> None:
    before = stored(trained)
    resized, path = fit(make(NEW), NEW, tmp_path / "on", EPOCHS + 20, ckpt_path=trained)

    dropped = {**before, "optimizer_states": [{**before["optimizer_states"][0], "state": {}}]}
    torch.save(dropped, tmp_path / "dropped.ckpt")
    anew, _ = fit(
        make(NEW), NEW, tmp_path / "anew", EPOCHS + 20, ckpt_path=str(tmp_path / "dropped.ckpt")
    )

    step = [(watch.tables[1] - watch.tables[0]).abs().mean() for watch in (resized, anew)]
    assert step[0] < step[1] / 3, "moments that go on take a small step, new ones a whole one"
    assert max(resized.losses) < max(anew.losses)
    assert resized.losses[-1] < 2 * resized.losses[0]

    after = stored(path)
    moments = after["optimizer_states"][0]["state"]
    shapes = {tuple(m["exp_avg"].shape) for m in moments.values()}
    assert (8, 12, 64) in shapes and (4, 6, 64) not in shapes
    assert all((m["exp_avg_sq"] >= 0).all() for m in moments.values())

    third = make(THIRD)
    third.load_state_dict(after["state_dict"])
    assert third.state_dict()[TABLE].shape == (6, 4, 64)
    watch, _ = fit(make(THIRD), THIRD, tmp_path / "third", EPOCHS + 21, ckpt_path=path)
    assert len(watch.losses) == 4


def test_moments_go_the_way_of_the_table(trained: str, tmp_path: Path) -> None:
    from tasks.optim import resize_moments

    state = stored(trained)["optimizer_states"][0]
    (index,) = [i for i, m in state["state"].items() if m["exp_avg"].shape == (4, 6, 64)]
    old = {k: v.clone() for k, v in state["state"][index].items()}
    others = {i: m["exp_avg"].clone() for i, m in state["state"].items() if i != index}
    resize_moments(make(NEW), state, {})
    new = state["state"][index]
    torch.testing.assert_close(new["exp_avg"], grid_table(old["exp_avg"], (8, 12)))
    assert new["step"] == old["step"]
    assert (new["exp_avg_sq"] >= 0).all() and new["exp_avg_sq"].shape == (8, 12, 64)
    for i, moment in others.items():
        assert torch.equal(state["state"][i]["exp_avg"], moment)


def test_an_average_follows(tmp_path: Path) -> None:
    _, path = fit(make(OLD, ema=0.9), OLD, tmp_path / "old", 2)
    before = stored(path)
    watch, after = fit(make(NEW, ema=0.9), NEW, tmp_path / "new", 3, ckpt_path=path)
    first = watch.tables[0]
    torch.testing.assert_close(first, grid_table(before["current_model_state"][TABLE], (8, 12)))
    saved = stored(after)
    for state in ("state_dict", "current_model_state"):
        assert saved[state][TABLE].shape == (8, 12, 64)
    moved = grid_table(before["state_dict"][TABLE], (8, 12))
    average, current = saved["state_dict"][TABLE], saved["current_model_state"][TABLE]
    assert not torch.equal(average, current)
    torch.testing.assert_close(average, moved, rtol=0, atol=0.01)


@pytest.mark.parametrize("shape", [(24, 64), (4, 6, 32), (1, 25, 64), (1, 24, 64)])
def test_what_cannot_be_resized_is_refused(shape: tuple[int, ...], trained: str) -> None:
    """A flat table has no grid, and another width is another model."""
    state = stored(trained)["state_dict"] | {TABLE: torch.zeros(shape)}
    with pytest.raises(RuntimeError, match=r"size mismatch for .*additive\.table"):
        make(OLD).load_state_dict(state)


def grids_seen(task: ImageClassification) -> list[tuple[int, ...]]:
    seen: list[tuple[int, ...]] = []
    task.network.tokens.register_forward_hook(lambda *call: seen.append(call[2].extent))
    return seen


@pytest.mark.parametrize("order", ["random", "progressive"])
@pytest.mark.parametrize("kind", ["images", "patches"])
def test_a_run_at_several_resolutions(kind: str, order: str, tmp_path: Path) -> None:
    table = partial(mmpos.LearnedEncoding, dynamic=True)
    torch.manual_seed(0)
    task = ImageClassification(
        ["a", "b", "c", "d"],
        OLD,
        (4, 4),
        1,
        partial(Transformer, size="nano", depth=1, additive=table, rotary=mmpos.RotaryEncoding),
    )
    schedule: ImageSizes | PatchSizes
    if kind == "images":
        schedule, wanted = ImageSizes([OLD, NEW, THIRD], order=order), {(4, 6), (8, 12), (6, 4)}
    else:
        schedule, wanted = PatchSizes([8, 4, 2], order=order), {(2, 3), (4, 6), (8, 12)}
    seen = grids_seen(task)
    trainer = L.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=3,
        callbacks=[schedule],
        logger=False,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, loader(OLD), loader(OLD, 16))
    training, validation = seen[:4] + seen[5:9] + seen[10:14], [seen[4], seen[9], seen[14]]
    assert set(training) == wanted and set(validation) == {(4, 6)}
    assert training == [
        tuple(
            a // b
            for a, b in zip(
                schedule.at(step, 12) if kind == "images" else OLD,
                (4, 4) if kind == "images" else schedule.at(step, 12),
                strict=True,
            )
        )
        for step in range(12)
    ]
    if order == "progressive":
        assert [training.index(grid) for grid in dict.fromkeys(training)] == [0, 4, 8]
    assert task.network.transformer.additive.grid == (4, 6)
    assert task.network.tokens.patch_size == (4, 4)


def test_a_table_that_is_not_dynamic_says_so(tmp_path: Path) -> None:
    trainer = L.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=1,
        callbacks=[ImageSizes([NEW])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(ValueError, match=r"grid of \(4, 6\).*gives \(8, 12\).*dynamic=True"):
        trainer.fit(make(OLD), loader(OLD))


@pytest.mark.parametrize(
    ("sizes", "order", "message"),
    [
        ([], "random", r"one or more of 1 pixel or more, got \[\]"),
        ([0], "random", r"1 pixel or more, got \[0\]"),
        ([(16,)], "random", r"1 pixel or more, got \[\(16,\)\]"),
        (["16"], "random", r"1 pixel or more, got \['16'\]"),
        ([8], "up", r"order must be one of .* got 'up'"),
    ],
)
def test_bad_schedules(sizes: list[int], order: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageSizes(sizes, order=order)  # type: ignore[arg-type]


def test_sizes_of_images_and_patches_are_drawn_independently() -> None:
    images, patches = ImageSizes([16, 24]), PatchSizes([8, 4])
    drawn = {(images.at(step, 100), patches.at(step, 100)) for step in range(100)}
    assert len(drawn) == 4


def test_a_task_is_left_as_it_was(tmp_path: Path) -> None:
    task = make(OLD)
    task.network.transformer.additive.dynamic = True
    seen = grids_seen(task)
    for callbacks in ([ImageSizes([NEW])], []):
        trainer = L.Trainer(
            default_root_dir=tmp_path,
            accelerator="cpu",
            max_steps=1,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(task, loader(OLD))
    assert seen == [(8, 12), (4, 6)]


def test_another_module_than_a_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"needs a tasks.Task, got LightningModule"):
        ImageSizes([8]).setup(None, L.LightningModule(), "fit")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("slot", "encoding", "names"),
    [
        ("additive", mmpos.FactorizedEncoding, {"additive.table.0", "additive.table.1"}),
        (
            "additive",
            partial(mmpos.FactorizedEncoding, combine="concat"),
            {"additive.table.0", "additive.table.1"},
        ),
        ("bias", mmpos.RelativePositionBias, {"bias.table"}),
    ],
)
def test_other_tables_move_with_their_moments_and_by_file(slot, encoding, names, tmp_path):
    def build(size) -> ImageClassification:
        torch.manual_seed(1)
        slots = {slot: encoding}
        encoder = partial(Transformer, size="nano", depth=1, **slots)
        return ImageClassification(["a", "b", "c", "d"], size, (4, 4), 1, encoder, warmup=0.0)

    task = build(OLD)
    _, path = fit(task, OLD, tmp_path / "old", 1)
    wider = build(NEW)
    state = torch.load(path, weights_only=True)
    watch, _ = fit(wider, NEW, tmp_path / "new", 2, ckpt_path=path)
    assert len(watch.losses) == 4
    moments = wider.trainer.optimizers[0].state
    shapes = {tuple(m["exp_avg"].shape) for m in moments.values()}
    for name in names:
        table = wider.network.transformer.get_parameter(name)
        assert table.shape != state["state_dict"][f"network.transformer.{name}"].shape
        assert tuple(table.shape) in shapes
        assert (moments[table]["exp_avg_sq"] >= 0).all()
    fresh = build(NEW)
    report = load_weights(fresh.network, path)
    assert all(f"transformer.{name} " in report for name in names)
    for name in names:
        table = fresh.network.transformer.get_parameter(name)
        stored = state["state_dict"][f"network.transformer.{name}"]
        torch.testing.assert_close(table, grid_table(stored, table.shape[:-1]))
