"""Positions of longer contexts in training, and RoPE that is left off."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

import mmpos
from mmpos.frequencies import YaRN
from mmpos.models import Transformer
from mmpos.positions import packed
from tasks import LanguageModel
from tasks.lengths import DropRotary, RandomPositions, SkipPositions, warn_of_bases

CONTEXT = 16
ENCODER = partial(Transformer, size="nano", depth=2, causal=True, rotary=mmpos.RotaryEncoding)


def make(encoder: Any = ENCODER, **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(9, CONTEXT, encoder, **{"warmup": 0.0, "lr": 3e-3} | options)


def batches(count: int = 8) -> DataLoader:
    """Two rows each: one document, and two."""
    positions, segments = packed([10, CONTEXT - 10])
    draw = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(count):
        tokens = torch.randint(9, (2, CONTEXT + 1), generator=draw)
        rows.append(
            {
                "tokens": tokens[:, :-1],
                "targets": tokens[:, 1:],
                "positions": torch.stack((torch.arange(CONTEXT)[:, None], positions)),
                "segments": torch.stack((torch.zeros(CONTEXT, dtype=torch.long), segments)),
            }
        )
    return DataLoader(rows, batch_size=None)


def trainer(folder: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    return L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **{"max_epochs": 1, "limit_val_batches": 0, "enable_checkpointing": False} | options,
    )


@pytest.mark.parametrize(
    ("way", "jumps"), [(SkipPositions(50), 1), (SkipPositions(50, chunks=5), 4)]
)
def test_chunks_have_gaps_between_them_and_meet_the_whole_length(way, jumps):
    torch.manual_seed(0)
    drawn = way.draw(4000, CONTEXT, torch.device("cpu"))
    assert drawn.shape == (4000, CONTEXT)
    assert (drawn[:, 0] == 0).all()
    steps = drawn.diff(dim=-1)
    assert steps.min() == 1
    assert int((steps > 1).sum(-1).max()) == jumps
    assert torch.equal(drawn.unique(), torch.arange(50))
    assert ((steps > 1).float().mean(0) > 0.5 * jumps / CONTEXT).all()


def test_the_gaps_of_each_chunk_are_uniform_from_those_of_the_one_before():
    """Both of three chunks of one token each, against the formula: u₁ of 0 … 4, u₂ of u₁ … 4."""
    torch.manual_seed(0)
    drawn = SkipPositions(7, chunks=3).draw(60_000, 3, torch.device("cpu")) - torch.arange(3)
    share = (drawn[:, 1] * 5 + drawn[:, 2]).bincount(minlength=25).view(5, 5) / len(drawn)
    wanted = torch.tensor([[1 / 5 / (5 - u) * (v >= u) for v in range(5)] for u in range(5)])
    assert not drawn[:, 0].any()
    assert ((share - wanted).abs() < 0.005).all()


def test_the_gaps_before_chunks_are_uniform():
    torch.manual_seed(0)
    last = SkipPositions(50).draw(40_000, CONTEXT, torch.device("cpu"))[:, -1] - CONTEXT + 1
    share = last.bincount(minlength=35) / len(last)
    assert share.shape == (35,)
    assert ((share - 1 / 35).abs() < 0.005).all()


def test_random_positions_are_any_in_order():
    torch.manual_seed(0)
    drawn = RandomPositions(50).draw(20_000, CONTEXT, torch.device("cpu"))
    assert drawn.diff(dim=-1).min() == 1
    share = drawn.flatten().bincount(minlength=50) / len(drawn)
    assert share.shape == (50,)
    assert ((share - CONTEXT / 50).abs() < 0.02).all()


@pytest.mark.parametrize("way", [SkipPositions, RandomPositions])
def test_as_long_as_the_rows_is_as_they_are(way):
    drawn = way(CONTEXT).draw(3, CONTEXT, torch.device("cpu"))
    assert torch.equal(drawn, torch.arange(CONTEXT).expand(3, -1))


class Watch(L.Callback):
    """The positions that the model gets in training."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_fit_start(self, trainer, pl_module) -> None:
        transformer = pl_module.network.transformer
        transformer.register_forward_pre_hook(lambda _, given: self.seen.append(given[1]))


@pytest.mark.parametrize("way", [partial(SkipPositions, 64), partial(RandomPositions, 64)])
@pytest.mark.filterwarnings("ignore:.*no `val_dataloader`", "ignore:The .*_dataloader")
def test_training_sees_long_positions_by_seed_and_step_and_nothing_else_does(way, tmp_path):
    runs = []
    for _ in range(2):
        watch = Watch()
        task = make()
        L.seed_everything(5)
        fitted = trainer(tmp_path, way(), watch)
        fitted.fit(task, batches())
        runs.append(torch.stack(watch.seen))
        assert not task.batch_changes
        watch.seen.clear()
        fitted.test(task, batches(1), verbose=False)
        assert int(torch.stack(watch.seen).max()) == CONTEXT - 1
    assert torch.equal(*runs)
    (run, _) = runs
    assert run.shape == (8, 2, CONTEXT, 1)
    assert run.max() > 40
    assert len(run.flatten(1).unique(dim=0)) == 8
    # a document in the middle of a row begins at what stands for position 0
    assert torch.equal(run[:, 1, 10:].diff(dim=1), run[:, 1, :6].diff(dim=1))


@pytest.mark.parametrize(
    ("make_it", "line"),
    [
        (partial(SkipPositions, 0), "length is the context to train for, 1 token or more, got 0"),
        (partial(SkipPositions, 9, chunks=0), "chunks must be 1 or more, got 0"),
        (partial(RandomPositions, -1), "1 token or more, got -1"),
        (partial(DropRotary, 1.0), "between 0 and 1, got 1.0"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(make_it, line):
    with pytest.raises(ValueError, match=line):
        make_it()


@pytest.mark.parametrize(
    ("way", "change", "line"),
    [
        (SkipPositions(CONTEXT - 1), {}, f"give a length above {CONTEXT}"),
        (SkipPositions(99, chunks=CONTEXT + 1), {}, "cannot be cut into 17 chunks"),
        (RandomPositions(99), {"positions": None}, "is for batches with positions"),
        (RandomPositions(99), {"positions": torch.rand(2, CONTEXT, 1)}, "as indices from 0"),
        (
            SkipPositions(99),
            {"positions": torch.arange(CONTEXT)[:, None].expand(2, -1, -1) + 1},
            "got one of 16 in a row of 16",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused(way, change, line):
    (batch,) = batches(1)
    with pytest.raises(ValueError, match=line):
        way._change({**batch, **change})


def without_positions(task: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    bare = make(partial(ENCODER, rotary=None)).eval()
    bare.load_state_dict(task.state_dict())
    return bare(tokens)


@pytest.mark.filterwarnings("ignore:.*no `val_dataloader`", "ignore:Be aware that when using")
def test_rope_is_left_off_late_and_checkpoints_know(tmp_path):
    tokens = torch.randint(9, (2, CONTEXT))
    saved = ModelCheckpoint(
        dirpath=tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}"
    )
    task = make()
    twice = {"max_epochs": 2, "enable_checkpointing": True}
    fitted = trainer(tmp_path, DropRotary(at=0.75), saved, **twice)
    fitted.fit(task, batches(4))
    with torch.no_grad():
        torch.testing.assert_close(task.eval()(tokens), without_positions(task, tokens))
        for step, dropped in ((4, False), (8, True)):
            path = str(tmp_path / f"step={step}.ckpt")
            fitted.validate(task, batches(1), ckpt_path=path, verbose=False)
            assert (task.network.transformer.rotary is None) == dropped
            same = torch.allclose(task.eval()(tokens), without_positions(task, tokens))
            assert same == dropped
    # what goes on from before goes on with RoPE until its time comes
    resumed = make()
    longer = trainer(tmp_path, DropRotary(at=0.75), max_epochs=2)
    longer.fit(resumed, batches(4), ckpt_path=str(tmp_path / "step=4.ckpt"))
    expected = torch.load(tmp_path / "step=8.ckpt", weights_only=True)["state_dict"]
    torch.testing.assert_close(dict(resumed.state_dict()), dict(expected))
    again = make()
    trainer(tmp_path, DropRotary(at=0.75), max_epochs=3).fit(
        again, batches(4), ckpt_path=str(tmp_path / "step=8.ckpt")
    )
    assert again.network.transformer.rotary is None
    bare = make(partial(ENCODER, rotary=None))  # as the command makes it of such a checkpoint
    trainer(tmp_path, DropRotary(at=0.75), max_epochs=3).fit(
        bare, batches(4), ckpt_path=str(tmp_path / "step=8.ckpt")
    )
    torch.testing.assert_close(dict(bare.state_dict()), dict(again.state_dict()))


@pytest.mark.filterwarnings("ignore:.*no `val_dataloader`")
def test_rope_that_learns_or_is_not_there_is_not_left_off(tmp_path):
    learned = make(partial(ENCODER, rotary=mmpos.MixedRotaryEncoding))
    with pytest.raises(ValueError, match="without parameters"):
        trainer(tmp_path, DropRotary()).fit(learned, batches())
    with pytest.raises(ValueError, match="no rotary encoding"):
        trainer(tmp_path, DropRotary()).fit(make(partial(ENCODER, rotary=None)), batches())


class Fails(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        raise KeyError("of a user")


@pytest.mark.filterwarnings("ignore:.*no `val_dataloader`", "ignore:The .*_dataloader")
def test_a_run_that_an_error_ended_is_begun_again_with_each_change_once(tmp_path):
    way, task, watch = SkipPositions(64), make(), Watch()
    with pytest.raises(KeyError):
        trainer(tmp_path, way, Fails()).fit(task, batches())
    trainer(tmp_path, way, watch).fit(task, batches())
    assert len(watch.seen) == 8 and not task.batch_changes


@pytest.mark.filterwarnings("ignore:.*no `val_dataloader`", "ignore:The .*_dataloader")
def test_rope_is_left_off_from_each_model_of_a_callback(tmp_path):
    drop = DropRotary(at=0.5)
    for _ in range(2):
        task = make()
        trainer(tmp_path, drop).fit(task, batches(4))
        assert drop.dropped and task.network.transformer.rotary is None


def test_other_modules_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"needs a tasks\.Task"):
        SkipPositions(99).setup(trainer(tmp_path), L.LightningModule(), "fit")


def test_a_base_below_the_known_bound_is_warned_of():
    plain = nn.ModuleList([mmpos.RotaryEncoding(128, base=1e4)])
    with pytest.warns(UserWarning, match="base 10000: contexts of 4096 tokens .* need 3.2e"):
        warn_of_bases(plain, 4096)
    with pytest.warns(UserWarning, match="RoPE with base 100"):
        warn_of_bases(mmpos.RotaryEncoding(128, base=[100.0]), 4096)
    extended = YaRN(factor=1.5, original_length=2048)
    with pytest.warns(UserWarning, match=r"10000, extended as if 1\.51e\+04: contexts of 4096"):
        warn_of_bases(mmpos.RotaryEncoding(128, extension=extended), 4096)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_bases(plain, 1024)
        warn_of_bases(mmpos.RotaryEncoding(128, base=5e5), 8192)
        enough = YaRN(factor=4, original_length=2048)
        warn_of_bases(mmpos.RotaryEncoding(128, extension=enough), 4096)
        warn_of_bases(mmpos.RotaryEncoding(128, axes=2), 10**6)
        warn_of_bases(mmpos.RotaryEncoding(2), 10**6)


def test_a_base_is_judged_by_the_largest_window_of_its_layers():
    """Bases of 100 are enough for 116 tokens, 10,000 for 2,000; 0.0424 · L ** 1.628 by hand."""
    bases = [partial(mmpos.RotaryEncoding, base=base) for base in (100, 1e4)]

    def warned(length: int, **options: Any) -> list[str]:
        made = Transformer((length,), size="nano", depth=4, causal=True, **options)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            warn_of_bases(made, length)
        return [str(each.message) for each in told]

    assert not warned(1024, rotary=bases, window=[100, None])  # local and global layers
    assert not warned(1024, rotary=bases, window=[100, 500, 60, 1024])
    assert not warned(80, rotary=bases, window=[100, None])
    (line,) = warned(1024, rotary=bases, window=[None, 100])
    assert "base 100: contexts of 1024 tokens" in line
    for windows in ([100, None, 200, None], [200, None, 100, None]):
        (line,) = warned(1024, rotary=bases, window=windows)
        assert "base 100: contexts of 200 tokens" in line
    (line,) = warned(150, rotary=bases, window=[100, None, 200, None])
    assert "base 100: contexts of 150 tokens" in line
    (line,) = warned(1024, rotary=[*bases, nn.Identity, nn.Identity], window=[200, None])
    assert "base 100: contexts of 200 tokens" in line
    (line,) = warned(1024, rotary=bases[0], per_layer=["rotary"], window=[99, 99, 99, None])
    assert "base 100: contexts of 1024 tokens" in line
