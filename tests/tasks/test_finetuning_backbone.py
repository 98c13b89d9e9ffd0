"""A network of any other library in place of the transformer: in a run, and in the command."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mmpos.models import Transformer
from tasks import ImageClassification, cli
from tasks.optim import parameter_groups


class Normed(nn.Module):
    """A backbone with batch norm and dropout."""

    def __init__(self, image_size: Sequence[int], channels: int, *, dim: int = 5) -> None:
        super().__init__()
        assert tuple(image_size) == (8, 12)
        self.dim = dim
        self.stem = nn.Sequential(nn.Conv2d(channels, dim, 4, 4), nn.BatchNorm2d(dim))
        self.top = nn.Sequential(nn.Conv2d(dim, dim, 1), nn.BatchNorm2d(dim), nn.Dropout(0.5))
        self.scale = nn.Parameter(torch.ones(1, dim))

    def forward(self, images: Tensor) -> Tensor:
        return self.top(self.stem(images)).mean((-2, -1)) * self.scale

    def group_matcher(self, coarse: bool = False):
        return {"stem": "^stem", "blocks": [(r"^(?:top|scale)", (0,))]}

    def no_weight_decay(self) -> set[str]:
        return {"scale"}


class Rates(L.Callback):
    """The rate of each parameter in the first step."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        for group in trainer.optimizers[0].param_groups if not self.seen else ():
            self.seen |= dict.fromkeys(group["param_names"], group["lr"])


ENCODER = partial(Transformer, size="nano", depth=1)


def with_backbone(**options) -> ImageClassification:
    return ImageClassification(["a", "b", "c"], (8, 12), channels=1, backbone=Normed, **options)


def test_a_backbone_in_place_of_a_transformer(tmp_path: Path) -> None:
    task = with_backbone(layer_decay=0.5, freeze=["backbone.stem"], lr=1e-2, warmup=0.0)
    assert {q: tuple(v.shape) for q, v in task(torch.zeros(2, 1, 8, 12)).items()} == {
        "class": (2, 3)
    }
    before = {name: value.clone() for name, value in task.state_dict().items()}
    draw = torch.Generator().manual_seed(0)
    items = [(torch.randn(1, 8, 12, generator=draw), index % 3) for index in range(16)]
    rates = Rates()
    trainer = L.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=2,
        callbacks=[rates],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, DataLoader(items, batch_size=4), DataLoader(items, batch_size=4))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = ImageClassification.load_from_checkpoint(tmp_path / "last.ckpt", backbone=Normed)
    torch.testing.assert_close(again.state_dict(), task.state_dict(), rtol=0, atol=0)
    with pytest.raises(TypeError, match="a checkpoint does not hold one that was made in Python"):
        ImageClassification.load_from_checkpoint(tmp_path / "last.ckpt")
    for name, value in task.state_dict().items():
        if name.startswith("network."):
            assert torch.equal(value, before[name]) == ("stem" in name), name
    for name, found in rates.seen.items():
        share = 1.0 if name.startswith("network.heads") else 0.5
        assert found == pytest.approx(1e-2 * share), name


def test_what_a_backbone_says_is_not_decayed() -> None:
    groups = parameter_groups(with_backbone(), 0.1)
    decayed = {n for g in groups if g["weight_decay"] for n in g["param_names"]}
    assert decayed == {
        "network.backbone.stem.0.weight",
        "network.backbone.top.0.weight",
        "network.heads.class_.weight",
    }


def test_one_of_transformer_and_backbone() -> None:
    with pytest.raises(TypeError, match="takes a transformer or a backbone, got both"):
        with_backbone(transformer=ENCODER, patch_size=(4, 4))
    with pytest.raises(TypeError, match=r"'transformer' \(or a backbone in its place"):
        ImageClassification(["a", "b"], (8, 12), (4, 4))
    with pytest.raises(TypeError, match=r"'patch_size' \(or a backbone in its place"):
        ImageClassification(["a", "b"], (8, 12), transformer=ENCODER)
    with pytest.raises(ValueError, match="a backbone pools by itself"):
        with_backbone(pool="token")
    with pytest.raises(TypeError, match="Identity has None"):
        ImageClassification(["a", "b"], (8, 12), backbone=lambda size, channels: nn.Identity())


OWN = """
from collections.abc import Sequence

from torch import Tensor, nn


class Own(nn.Module):
    def __init__(self, image_size: Sequence[int], channels: int, *, name: str, width: int = 5):
        super().__init__()
        self.size, self.name, self.dim = tuple(image_size), name, width
        self.stem = nn.Conv2d(channels, width, 5)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x).relu()
        return x.mean((-2, -1))

    def group_matcher(self, coarse: bool = False):
        return {"stem": "^stem", "blocks": [("^blocks.([0-9]+)", None)]}

    def no_weight_decay(self) -> set[str]:
        return set()
"""
SMALL = [
    "--data.image_size=[16, 24]",
    "--data.train_samples=64",
    "--data.batch_size=32",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
]
IN_PLACE = ["--model.transformer=null", "--model.backbone=own_backbone.Own"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_backbone.py").write_text(OWN)
    return tmp_path


def test_a_backbone_is_named_on_the_command_line(here: Path, capsys: pytest.CaptureFixture) -> None:
    """And its checkpoint is enough to test it, to go on, and to predict."""
    own = ["--model.backbone.name=any", "--model.backbone.width=7", "--model.layer_decay=0.5"]
    own += [
        "--model.freeze+=backbone.stem",
        "--trainer.max_epochs=1",
        "--model.label_smoothing=0.1",
    ]
    assert cli.main(["fit", "--config", "image", *SMALL, *IN_PLACE, *own]) == 0
    capsys.readouterr()
    path = here / "runs" / "image" / "version_0" / "checkpoints" / "last.ckpt"
    stored = torch.load(path, weights_only=True)
    assert stored["hyper_parameters"]["backbone"] == {
        "class_path": "own_backbone.Own",
        "init_args": {"name": "any", "width": 7},
    }
    assert stored["state_dict"]["network.heads.what.weight"].shape == (10, 7)
    groups = stored["optimizer_states"][0]["param_groups"]
    assert {g["lr_scale"] for g in groups} == {0.25, 0.5, 1.0}
    assert not [n for g in groups for n in g["param_names"] if "stem" in n]
    quiet = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    assert cli.main(["test", f"--ckpt_path={path}", *quiet]) == 0
    assert "test/what_accuracy" in capsys.readouterr().out
    on = ["fit", f"--ckpt_path={path}", "--trainer.max_epochs=2", "--test_after_fit=false"]
    with pytest.warns(UserWarning, match="dirpath has changed"):
        assert cli.main([*on, "--model.freeze=[]", "--model.layer_decay=0.9", *quiet]) == 0
    again = torch.load(
        here / "runs" / "image" / "version_1" / "checkpoints" / "last.ckpt", weights_only=True
    )
    weight = "network.backbone.stem.weight"
    assert not torch.equal(again["state_dict"][weight], stored["state_dict"][weight])
    scales = {g["lr_scale"] for g in again["optimizer_states"][0]["param_groups"]}
    assert sorted(scales) == pytest.approx([0.9**3, 0.9**2, 0.9, 1.0])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (IN_PLACE, "model.backbone: a value is needed for name"),
        ([*IN_PLACE[1:], "--model.backbone.name=x"], "got both: set one to null"),
        (IN_PLACE[:1], "'transformer' (or a backbone in its place"),
        (["--model.freeze+=token"], "nothing to freeze is called 'token'; did you mean tokens?"),
        (["--model.layer_decay=2"], "layer_decay is a factor above 0 and up to 1"),
        (["--model.mixup=0.8"], "need a single question, the data has what, where"),
        (["--model.mixup=no"], "model.mixup: expected float, got 'no'"),
    ],
)
def test_mistakes_are_one_line(
    args: list[str], message: str, here: Path, capsys: pytest.CaptureFixture
) -> None:
    assert cli.main(["fit", "--config", "image", *SMALL, *args]) in (1, 2)
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "mmpos: error" in text]
    assert message in line
