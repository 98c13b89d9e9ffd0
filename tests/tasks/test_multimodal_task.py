"""Several modalities in one task: layouts, what is missing, the job, tables, two processes."""

import csv
import re
from functools import partial
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import soundfile
import torch
from lightning.pytorch.strategies import DDPStrategy
from PIL import Image

import mmpos
from mmpos.models import FrameEmbedding, Transformer
from tasks import MultimodalClassification, cli
from tasks.data import Multimodal
from tasks.data.features import Features

QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
FEW = ["--data.train_samples=32", "--data.eval_samples=12", "--data.batch_size=8"]
FEW += ["--model.transformer.depth=1", "--trainer.max_epochs=1", *QUIET]
NANO = partial(Transformer, size="nano", depth=2, class_token=True)
ROPE = partial(NANO, rotary=partial(mmpos.RotaryEncoding, base=100))
LAYOUTS = ("missing", "mrope", "sequence")
SIZES = {"vocabulary": 256, "context": 40, "image_size": (32, 32), "channels": 1}
SIZES |= {"bins": 40, "frames": 201, "patch_size": (8, 8), "pool": "token"}


def make(**options) -> MultimodalClassification:
    """With weights that tell inputs apart."""
    torch.manual_seed(0)
    settings = {"classes": ["a", "b", "c"], "transformer": ROPE, **SIZES} | options
    task = MultimodalClassification(**settings).eval()
    for weight in task.network.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return task


@pytest.fixture(scope="module")
def batch():
    data = Multimodal(batch_size=6, eval_samples=6)
    data.setup("test")
    mixed, _ = next(iter(data.test_dataloader()))
    assert not mixed.text_mask.all() and not mixed.audio_mask.all()
    return mixed


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_has_the_answers_that_it_has_alone(batch, layout) -> None:
    task = make(layout=layout)
    together = task(*batch)["class"]
    for row in range(6):
        letters, frames = int(batch.text_mask[row].sum()), int(batch.audio_mask[row].sum())
        alone = task(
            text=batch.text[row : row + 1, :letters],
            image=batch.image[row : row + 1],
            audio=batch.audio[row : row + 1, :, :frames],
        )
        torch.testing.assert_close(together[row], alone["class"][0], atol=2e-5, rtol=1e-5)
    assert together.std(0).min() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("missing", ["text", "image", "audio"])
def test_what_a_row_lacks_is_as_if_nobody_had_it(batch, missing) -> None:
    task = make()
    own = batch._asdict()
    size = own[missing].shape[:1] if missing == "image" else own[f"{missing}_mask"].shape
    masked = task(**own | {f"{missing}_mask": torch.zeros(size, dtype=torch.bool)})["class"]
    left_out = task(**own | {missing: None, f"{missing}_mask": None})["class"]
    torch.testing.assert_close(masked, left_out, atol=2e-5, rtol=1e-5)
    assert (task(*batch)["class"] - left_out).abs().max() > 1e-2


def test_a_batch_without_a_modality_trains_all_parameters(batch) -> None:
    task = make().train()
    logits = task(text=batch.text, text_mask=batch.text_mask, image=batch.image)["class"]
    logits.square().sum().backward()
    audio = [p.grad for n, p in task.named_parameters() if "tokens.audio" in n]
    assert audio and all(grad is not None and not grad.any() for grad in audio)
    assert all(p.grad is not None for p in task.network.parameters())
    with pytest.raises(ValueError, match="no row has any of text, image, audio: give one or more"):
        task()


def test_layouts_have_the_axes_that_their_encodings_need() -> None:
    sine = partial(NANO, additive=mmpos.SinusoidalEncoding)
    axes = {way: make(layout=way, transformer=sine).network.transformer.axes for way in LAYOUTS}
    assert axes == {"missing": (101, 4, 4), "mrope": (145, 145, 145), "sequence": (157,)}
    table = partial(NANO, additive=mmpos.LearnedEncoding)
    assert make(layout="sequence", transformer=table).network.transformer.additive.grid == (157,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transformer": None}, "missing 1 required positional argument: 'transformer'"),
        ({"patch_size": (8,)}, r"patch_size is height and width of a patch, got \[8\]"),
        (
            {"frames_to_tokens": torch.nn.Linear},
            "tokeniser of sound from .*, got Linear, which has",
        ),
        ({"patch_size": (5, 8)}, "an image of 32 × 32 cannot be cut into patches of 5 × 8: choose"),
    ],
)
def test_what_is_refused(options: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make(**options)


def test_the_job_its_checkpoint_and_what_is_blanked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["fit", "--config", "multimodal", *FEW]) == 0
    best = "runs/multimodal/version_0/checkpoints/best.ckpt"
    for blank in ("[text]", "[image]", "[text,audio]"):
        assert cli.main(["test", "--ckpt_path", best, "--data.blank", blank, *QUIET]) == 0
    for over in (
        ["--model.layout=missing"],
        ["--model.layout=sequence", "--config", "encoding/rope"],
    ):
        assert cli.main(["fit", "--config", "multimodal", *over, *FEW]) == 0
    capsys.readouterr()
    assert cli.main(["test", "--ckpt_path", best, "--data.blank", "[audoi]", *QUIET]) == 1
    assert "did you mean audio?" in capsys.readouterr().err


def write_table(folder: Path, rows: int) -> None:
    """A label that any of the three tells, each of which some rows lack."""
    draw = np.random.default_rng(0)
    lines = []
    for k in range(rows):
        label = k % 2
        level, pitch = (40, 300) if label else (200, 1500)
        noise = draw.integers(-20, 20, (32, 32, 3))
        Image.fromarray((level + noise).astype(np.uint8)).save(folder / f"{k}.png")
        tone = np.sin(2 * np.pi * pitch * np.arange(2000) / 8000)
        soundfile.write(folder / f"{k}.wav", tone, 8000)
        cells = [("dark" if label else "light"), f"{k}.png", f"{k}.wav"]
        for lost in draw.choice(3, draw.integers(0, 3), replace=False):
            cells[lost] = ""
        lines.append(",".join([*cells, "low" if label else "high"]))
    (folder / "train.csv").write_text("\n".join(["text,image,audio,label", *lines, ""]))


def test_a_table_is_trained_on_and_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path, 60)
    (tmp_path / "new.csv").write_text("text,image\ndark,\n,0.png\n")
    monkeypatch.chdir(tmp_path)
    own = ["--data.source=table", "--data.root=.", "--data.batch_size=8", "--data.image_size=32"]
    own += ["--data.features.rate=8000", "--data.features.bins=20", *QUIET]
    own += ["--trainer.max_epochs=8", "--model.transformer.depth=1", "--model.lr=0.003"]
    assert cli.main(["fit", "--config", "multimodal", *own]) == 0
    best = "runs/multimodal/version_0/checkpoints/best.ckpt"
    assert cli.main(["predict", "--ckpt_path", best, "--data.predict_table=new.csv", *QUIET]) == 0
    with (tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == ["low", "high"]
    assert [row["file"].split(" of ")[0] for row in rows] == ["line 2", "line 3"]


class Record(L.Callback):
    """Writes the weights, the metrics, and how often this process had no sound, to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.silent = folder, 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.silent += batch[0].audio is None

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loss = float(trainer.callback_metrics["val/loss"])
        state = pl_module.network.state_dict()
        torch.save((state, loss, self.silent), self.folder / f"{trainer.global_rank}.pt")


def test_two_processes_that_lack_different_modalities_are_one(tmp_path: Path) -> None:
    write_table(tmp_path, 40)
    found = []
    for name, devices in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        data = Multimodal(
            "table",
            tmp_path,
            image_size=16,
            features=Features(rate=8000, bins=20),
            batch_size=2 // devices,
        )
        task = (
            make(classes=data.classes, image_size=data.image_size, channels=3, bins=20, context=256)
            .double()
            .train()
        )
        trainer = L.Trainer(
            default_root_dir=tmp_path,
            accelerator="cpu",
            devices=devices,
            strategy=DDPStrategy(process_group_backend="gloo", start_method="fork")
            if devices == 2
            else "auto",
            precision="64-true",
            callbacks=[Record(tmp_path / name)],
            max_epochs=1,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(task, datamodule=data)
        found.append([torch.load(tmp_path / name / f"{r}.pt") for r in range(devices)])
    ((weights, loss, _),), ((first, metric, silent), (second, _, other)) = found
    assert silent and other and silent + other < 32
    for name, weight in weights.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], weight, atol=1e-8, rtol=1e-6)
    assert metric == pytest.approx(loss, abs=1e-8)


def test_the_grid_is_of_height_and_width_and_of_the_tokens_of_the_given_tokeniser() -> None:
    sine = partial(NANO, additive=mmpos.SinusoidalEncoding)
    fine = partial(FrameEmbedding, kernels=(1,), strides=(1,))
    for options, axes in (
        ({"image_size": (32, 16)}, (101, 4, 2)),
        ({"patch_size": (8, 4)}, (101, 4, 8)),
        ({"frames_to_tokens": fine}, (201, 4, 4)),
    ):
        own = make(layout="missing", transformer=sine, **options)
        assert own.network.transformer.axes == axes
    seen = []
    own.network.transformer.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
    own(audio=torch.randn(1, 40, 201))
    assert seen[0][1] == 201


@torch.no_grad()
def test_pooling_is_as_told_and_a_transformer_of_python_is_in_no_checkpoint(batch) -> None:
    means, first = make(pool="mean"), make(pool="token")
    assert "transformer" not in first.hparams and first.hparams["pool"] == "token"
    assert (means(*batch)["class"] - first(*batch)["class"]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--model.context=9", "model.context comes from the data: use --data.context 9"),
        ("--model.bins=9", "model.bins comes from the data: use --data.features.bins 9"),
        (
            "--model.patch_size=8",
            r"model.patch_size: expected Sequence\[int\], got '8'",
        ),
    ],
)
def test_settings_that_come_from_the_data_are_one_line(
    given: str, message: str, capsys: pytest.CaptureFixture
) -> None:
    assert cli.main(["fit", "--config", "multimodal", given, *QUIET]) in (1, 2)
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "mmpos: error" in x]
    assert re.search(message, line)
