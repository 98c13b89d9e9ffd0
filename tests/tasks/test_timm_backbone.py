"""A timm model in a task: trained, taken to another size, resumed, and exported."""

import csv
import re
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import mmpos
from mmpos.interop.timm import Backbone, replace, resize
from tasks import ImageClassification, cli
from tasks.data import Images
from tasks.export import _state, export
from tasks.weights import load_weights

SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 2}
VIT = partial(Backbone, name="vit_tiny_patch16_224", patch_size=8, options=SMALL)
TUNE = ["fit", "--config", "finetune_timm", "--model.backbone.pretrained=false"]
TUNE += ["--model.backbone.options={embed_dim: 24, depth: 2, num_heads: 2}"]
TUNE += ["--data.image_size=32", "--data.train_samples=64", "--data.batch_size=16"]
TUNE += ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
TUNE += [
    "--trainer.max_epochs=1",
    "--trainer.limit_val_batches=2",
    "--trainer.limit_test_batches=2",
]


def task(size=(32, 32), **options) -> ImageClassification:
    backbone = options.pop("backbone", VIT)
    return ImageClassification(["a", "b", "c"], size, channels=1, backbone=backbone, **options)


def images(*size: int) -> Tensor:
    return torch.randn(3, 1, *size, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the command."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert (
            cli.main([*TUNE, "--model.layer_decay=0.5", "--model.freeze+=backbone.model.cls_token"])
            == 0
        )
    return folder / "runs/finetune_timm/version_0"


def test_the_command_tunes_and_goes_to_another_size(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    best = str(run / "checkpoints/best.ckpt")
    few = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    assert cli.main(["test", "--ckpt_path", best, "--data.image_size=48", *few]) == 0
    assert "test/class_accuracy" in capsys.readouterr().out
    more = ["--data.image_size=48", "--trainer.max_epochs=2", "--trainer.limit_test_batches=1"]
    last = str(run / "checkpoints/last.ckpt")
    assert cli.main(["fit", "--ckpt_path", last, *more, *few]) == 0
    with (tmp_path / "runs/finetune_timm/version_0/metrics.csv").open() as file:
        assert {row["epoch"] for row in csv.DictReader(file)} == {"1", "2"}


def test_weights_of_another_size_are_resized_as_they_are_loaded(tmp_path: Path) -> None:
    trained = task()
    torch.save(trained.network.state_dict(), tmp_path / "weights.pt")
    larger = task((48, 64))
    kept = {name: id(each) for name, each in larger.named_parameters()}
    report = load_weights(larger.network, tmp_path / "weights.pt")
    assert "resized: backbone.model.pos_embed 1 × 17 × 24 → 1 × 49 × 24" in report
    assert {name: id(each) for name, each in larger.named_parameters()} == kept
    assert larger.network.backbone.size == (48, 64)
    resize(trained.network.backbone.model, (48, 64))
    for model in (trained, larger):
        model.eval()
    assert torch.equal(larger(images(48, 64))["class"], trained(images(48, 64))["class"])


def test_moments_go_to_another_size_with_a_run(tmp_path: Path) -> None:
    def fit(size: int, epochs: int, ckpt: str | None = None) -> L.Trainer:
        data = Images(
            scene="plain", image_size=size, patch_size=None, train_samples=40, batch_size=20
        )
        model = ImageClassification(data.classes, (size, size), channels=1, backbone=VIT)
        trainer = L.Trainer(
            default_root_dir=tmp_path,
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            limit_val_batches=0,
            enable_model_summary=False,
        )
        trainer.fit(model, data, ckpt_path=ckpt)
        trainer.save_checkpoint(tmp_path / f"{size}.ckpt")
        return trainer

    fit(32, 1)
    trainer = fit(48, 2, str(tmp_path / "32.ckpt"))
    table = trainer.lightning_module.network.backbone.model.pos_embed
    moments = trainer.optimizers[0].state[table]
    assert moments["exp_avg"].shape == moments["exp_avg_sq"].shape == table.shape == (1, 37, 24)
    assert (moments["exp_avg_sq"] >= 0).all()
    assert int(moments["step"]) == 4


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_an_exported_state_dict_is_timms_own(run: Path, suffix: str, tmp_path: Path) -> None:
    path, checkpoint = tmp_path / f"model.{suffix}", run / "checkpoints/best.ckpt"
    lines = export(checkpoint, path)
    call = lines[1].partition("model = ")[2].partition("; ")[0]
    model = eval(call, {"timm": timm}).eval()
    assert "img_size=(32, 32)" in call
    state = load_file(path) if suffix == "safetensors" else torch.load(path, weights_only=True)
    model.load_state_dict(state)
    tuned = ImageClassification.load_from_checkpoint(checkpoint).eval()
    with torch.no_grad():
        assert torch.equal(model(images(32, 32)), tuned(images(32, 32))["class"])
    if suffix == "safetensors":
        with safe_open(path, "pt") as file:
            assert file.metadata()["image_size"] == "[32, 32]"
            assert file.metadata()["architecture"] == "vit_tiny_patch16_224"


def test_an_exported_graph_gives_the_same(run: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    checkpoint = run / "checkpoints/best.ckpt"
    export(checkpoint, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    tuned = ImageClassification.load_from_checkpoint(checkpoint).eval()
    for batch in (1, 3):
        (logits,) = session.run(["class"], {"images": images(32, 32)[:batch].numpy()})
        with torch.no_grad():
            expected = tuned(images(32, 32)[:batch])["class"]
        torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=0, atol=1e-5)


def test_replaced_positions_are_saved_under_their_own_names() -> None:
    rope = partial(mmpos.RotaryEncoding, base=100)
    model = task(backbone=partial(VIT, additive=None, rotary=rope, bias=mmpos.T5Bias))
    state = model.network.backbone.model.state_dict()
    assert [name for name in state if name.startswith("mmpos.")] == ["mmpos.bias.table"]
    own = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, in_chans=1, num_classes=0, **SMALL
    )
    replace(own, additive=None, rotary=rope, bias=mmpos.T5Bias)
    own.load_state_dict(state)
    with torch.no_grad():
        features = model.eval().network.backbone(images(32, 32))
        torch.testing.assert_close(own.eval()(images(32, 32)), features)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "required: --ckpt_path, --output"),
        (["--ckpt_path", "x", "--output", "m.bin"], "names the form, one of .*got m.bin"),
        (["--ckpt_path", "x", "--output", "m.pt"], "there is no checkpoint at x"),
        (["--ckpt_path", "notes.txt", "--output", "m.pt"], "is no checkpoint of an image task"),
        (["--ckpt_path", "notes.txt", "--output", "none/m.pt"], "there is no folder"),
        (["--ckpt_path", "notes.txt", "--to", "m.pt"], "--output"),
    ],
)
def test_what_cannot_be_exported(args, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("no checkpoint")
    assert cli.main(["export", *args]) in (1, 2)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("mmpos: error: ")
    assert re.search(message, line)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"name": "vit_tiny_patch16_22"}, ValueError, "did you mean vit_tiny_patch16_224"),
        ({"name": "vit_tiny_patch16_224.best"}, ValueError, "no weights 'best' .* it has augreg"),
        (
            {"name": "vit_tiny_patch16_224", "options": {"bla": 1}},
            ValueError,
            "these options: .*bla",
        ),
        ({"name": "vit_tiny_patch16_224", "weights": "nowhere"}, FileNotFoundError, "at nowhere"),
        ({"name": "vit_tiny_patch16_224", "weights": __file__}, ValueError, "holds no weights of"),
        ({"name": "mixer_s32_224"}, ValueError, "cannot be resized"),
        (
            {"name": "vit_tiny_patch16_224", "weights": "x", "pretrained": True},
            ValueError,
            "pretrained=True downloads",
        ),
    ],
)
def test_backbones_that_cannot_be(options, error, message) -> None:
    with pytest.raises(error, match=message):
        Backbone((32, 32), **options)


def test_weights_of_timm_from_a_file(tmp_path: Path) -> None:
    own = timm.create_model("vit_tiny_patch16_224", **SMALL).eval()
    torch.save(own.state_dict(), tmp_path / "own.pth")
    backbone = Backbone(
        (224, 112), name="vit_tiny_patch16_224", weights=tmp_path / "own.pth", options=SMALL
    ).eval()
    own.reset_classifier(0)
    resize(own, (224, 112))
    x = torch.randn(1, 3, 224, 112)
    with torch.no_grad():
        assert torch.equal(backbone(x), own(x))
    with pytest.raises(ValueError, match="holds no weights of vit_tiny_patch16_224"):
        Backbone((224, 224), name="vit_tiny_patch16_224", weights=tmp_path / "own.pth")


@pytest.mark.parametrize("part", ["other", "deeper", "foreign", "nested"])
def test_weights_of_another_model_are_refused(part: str, tmp_path: Path) -> None:
    own = timm.create_model("vit_tiny_patch16_224", **SMALL)
    states = {
        "other": timm.create_model("resnet18").state_dict(),
        "deeper": timm.create_model("vit_tiny_patch16_224", **{**SMALL, "depth": 3}).state_dict(),
        "foreign": {"foo": torch.zeros(3)},
        "nested": {f"net.{key}": value for key, value in own.state_dict().items()},
    }
    torch.save(states[part], tmp_path / "own.pth")
    with pytest.raises(ValueError, match=r"lacks|has unknown"):
        Backbone(
            (224, 224), name="vit_tiny_patch16_224", weights=tmp_path / "own.pth", options=SMALL
        )


@pytest.mark.parametrize(
    ("name", "size", "options", "head"),
    [
        ("swinv2_tiny_window8_256", (192, 192), {"depths": (1, 1, 1, 1)}, True),
        ("vit_tiny_patch16_224", (64, 96), {"depth": 1}, True),
        ("levit_128s", (224, 224), {}, False),
    ],
)
def test_what_is_exported_is_tried_first(name: str, size: tuple, options: dict, head: bool) -> None:
    patch = {"patch_size": 8} if name.startswith("vit") else {}
    backbone = partial(Backbone, name=name, options=options, **patch)
    model = ImageClassification(["a", "b", "c"], size, backbone=backbone).eval()
    state, lines = _state(model)
    twin = eval(lines[-1].partition("model = ")[2].partition("; ")[0], {"timm": timm}).eval()
    twin.load_state_dict(state)
    assert (lines[0].startswith("head left out")) != head
    with torch.no_grad():
        x = torch.randn(1, 3, *size)
        expected = model(x)["class"] if head else model.network.backbone(x)
        torch.testing.assert_close(twin(x), expected)


def test_the_size_is_that_of_the_model() -> None:
    one = Backbone((32, 32), name="vit_tiny_patch16_224", patch_size=8, options=SMALL)
    resize(one.model, (48, 64))
    assert one.size == (48, 64)
    other = Backbone((48, 64), name="vit_tiny_patch16_224", patch_size=8, options=SMALL)
    other.load_state_dict(one.state_dict())
    one.load_state_dict(one.state_dict())
    assert one.size == other.size == (48, 64)
    assert torch.equal(one.model.pos_embed, other.model.pos_embed)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "32-true"])
def test_averages_follow_the_precision(precision: str, tmp_path: Path) -> None:
    data = Images(scene="plain", image_size=32, patch_size=None, train_samples=40, batch_size=20)
    model = ImageClassification(
        data.classes, (32, 32), channels=1, backbone=VIT, ema=0.5, freeze=["backbone.model.norm"]
    )
    frozen = model.network.backbone.model.norm.weight.detach().clone()
    trainer = L.Trainer(
        default_root_dir=tmp_path,
        max_epochs=1,
        accelerator="cpu",
        precision=precision,
        logger=False,
        enable_progress_bar=False,
        limit_val_batches=1,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    assert torch.equal(model.network.backbone.model.norm.weight.float(), frozen.to(torch.float32))


def test_a_checkpoint_needs_no_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    own = timm.create_model("vit_tiny_patch16_224", **SMALL)
    torch.save(own.state_dict(), "own.pth")
    assert cli.main([*TUNE, "--model.backbone.weights=own.pth"]) == 0
    Path("own.pth").unlink()
    best = "runs/finetune_timm/version_0/checkpoints/best.ckpt"
    few = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    few += ["--trainer.limit_test_batches=1"]
    assert cli.main(["test", "--ckpt_path", best, *few]) == 0
    # the config's own pretrained: true stands for nothing where a checkpoint has the weights
    assert cli.main(["test", "--config", "finetune_timm", "--ckpt_path", best, *few]) == 0
    assert cli.main(["export", "--ckpt_path", best, "--output", "m.onnx"]) == 0
    again = [each for each in TUNE if "pretrained" not in each]
    assert cli.main([*again, "--model.weights", best]) == 0
    assert "pretrained" not in capsys.readouterr().err


def test_a_size_that_the_patch_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"60 × 60 is no multiple of 16 × 16.*48 × 48 or 64 × 64"):
        Backbone((60, 60), name="vit_tiny_patch16_224", options=SMALL)


def test_another_normalisation_is_named(tmp_path: Path) -> None:
    data = Images(scene="plain", image_size=32, patch_size=None, train_samples=20, batch_size=20)
    data.mean, data.std = (0.4, 0.5, 0.6), (0.5, 0.5, 0.5)
    model = ImageClassification(data.classes, (32, 32), channels=1, backbone=VIT)
    trainer = L.Trainer(
        default_root_dir=tmp_path,
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        limit_val_batches=0,
    )
    trainer.datamodule = data
    model._trainer = trainer
    with pytest.warns(UserWarning, match=r"mean \[0.4, 0.5, 0.6\], and .* know \[0.5, 0.5, 0.5\]"):
        model.on_fit_start()


def test_exported_encodings_are_written_down(tmp_path: Path) -> None:
    rope = [partial(mmpos.RotaryEncoding, base=50), torch.nn.Identity]
    model = task(backbone=partial(VIT, additive=None, rotary=rope, bias=mmpos.T5Bias)).eval()
    state, lines = _state(model)
    steps = lines[-1].removeprefix("load: ").split("; ")
    names = {"timm": timm, "mmpos": mmpos, "torch": torch}
    exec("\n".join(["import mmpos.interop.timm", *steps[:2]]), names)
    twin = names["model"].eval()
    twin.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(twin(images(32, 32)), model(images(32, 32))["class"])


@pytest.mark.parametrize(
    ("slot", "line"),
    [
        ("bias=mmpos.Alibi", "no such class: mmpos.Alibi; did you mean mmpos.ALiBi?"),
        ("rotary=mmpos.RotaryEncodin", "no such class: .*did you mean mmpos.RotaryEncoding"),
        ("rotary=mmpos.ALiBi", "mmpos.ALiBi is a class of another kind than RotaryEncoding"),
        ("bias=foo.Bar", "no such module: foo"),
        ("bias=keepit", "expected .*AttentionBias or ContentBias.*got 'keepit'; did you mean keep"),
    ],
)
def test_an_encoding_that_is_none_is_named(slot, line, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*TUNE, f"--model.backbone.{slot}"]) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(line, said)


def test_an_augmentation_that_timm_has_not_is_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*TUNE, "--data.augmentation={auto_augment: foo}"]) in (1, 2)
    assert "timm takes no augmentation {'auto_augment': 'foo'}" in capsys.readouterr().err
