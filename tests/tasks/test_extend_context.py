"""A trained language model at a longer context, by each shipped extension."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import mmpos
from tasks import LanguageModel, cli, configs

EXTENSIONS = [name for name in configs.shipped() if name.startswith("extension/")]
FEW = ["--data.train_tokens=20000", "--data.eval_tokens=3000", "--trainer.accelerator=cpu"]
FEW += ["--trainer.enable_progress_bar=false"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights of config text, hardly trained, with a layer in two that has no RoPE."""
    folder = tmp_path_factory.mktemp("trained")
    rotary = "[{class_path: mmpos.RotaryEncoding, init_args: {base: 5000}}, torch.nn.Identity]"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        options = [f"--model.transformer.rotary={rotary}", "--trainer.max_epochs=1"]
        assert cli.main(["fit", "--config", "text", *FEW, *options]) == 0
    return str(folder / "runs" / "text" / "version_0" / "checkpoints" / "best.ckpt")


def shown(capsys: Any) -> float:
    found = re.search(r"test/bits_per_byte\D+([\d.]+)", capsys.readouterr().out)
    assert found
    return float(found[1])


def test_all_six_are_shipped() -> None:
    kinds = {name.partition("/")[2] for name in EXTENSIONS}
    assert kinds == {"dynamic", "llama3", "longrope", "ntk", "pi", "yarn"}


@pytest.mark.parametrize("name", [None, *EXTENSIONS])
@pytest.mark.filterwarnings("ignore:RoPE with base")
def test_no_steps_at_four_times_the_context(
    name: str | None, trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    over = [] if name is None else ["--config", name]
    begun = ["--config", "extend_context", *over, "--model.weights", trained]
    assert cli.main(["test", *begun, *FEW]) == 0
    first = shown(capsys)
    assert cli.main(["test", *begun, *FEW, "--model.extension=null"]) == 0
    assert first != shown(capsys)


def test_a_few_steps_and_what_goes_on_from_them(
    trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The pattern and base of the weights stay, and the extension goes with what it made."""
    monkeypatch.chdir(tmp_path)
    begun = ["--config", "extend_context", "--model.weights", trained]
    assert cli.main(["fit", *begun, *FEW]) == 0
    best = tmp_path / "runs" / "extend_context" / "version_0" / "checkpoints" / "best.ckpt"
    task = LanguageModel.load_from_checkpoint(best, map_location="cpu")
    yarn = mmpos.frequencies.YaRN(factor=4, original_length=128)
    transformer = task.network.transformer
    assert [index is None for index in transformer.rotary_of] == [False, True] * 2
    for part in transformer.rotary or []:
        assert (part.base, part.extension) == (5000, yarn)
    assert cli.main(["fit", "--config", "text", "--model.weights", str(best), *FEW]) == 0
    again = torch.load(
        tmp_path / "runs" / "text" / "version_0" / "checkpoints" / "best.ckpt", weights_only=True
    )
    assert again["hyper_parameters"]["extension"]["class_path"] == "mmpos.frequencies.YaRN"


def test_an_extension_without_rope_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    over = ["--config", "text", "--config", "encoding/alibi", "--config", "extension/yarn"]
    assert cli.main(["fit", *over, *FEW]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1
    assert "YaRN changes the frequencies of RoPE, and the transformer has none" in errors[0]


def test_rope_left_off_is_off_in_the_settings_of_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """So that one is tested and gone on from as what it is, without naming the callback."""
    monkeypatch.chdir(tmp_path)
    drop = ["--trainer.callbacks+=tasks.lengths.DropRotary", "--trainer.callbacks.at=0.5"]
    assert cli.main(["fit", "--config", "text", *FEW, *drop, "--trainer.max_epochs=1"]) == 0
    last = tmp_path / "runs" / "text" / "version_0" / "checkpoints" / "last.ckpt"
    settings = of_transformer(last)
    assert settings["rotary"] is None
    assert LanguageModel.load_from_checkpoint(last).network.transformer.rotary is None
    assert cli.main(["test", "--ckpt_path", str(last), *FEW[2:]]) == 0
    with_rope = ["--config", "extend_context", "--model.weights", str(last)]
    assert cli.main(["test", *with_rope, *FEW]) == 1
    assert "changes the frequencies of RoPE" in capsys.readouterr().err


def of_transformer(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)["hyper_parameters"]["transformer"]["init_args"]


def test_rope_left_off_takes_its_extension_and_layers_along_and_brings_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    own = ["--model.transformer.per_layer=[rotary]", "--trainer.max_epochs=2"]
    own += ["--config", "extension/yarn"]
    drop = ["--trainer.callbacks+=tasks.lengths.DropRotary", "--trainer.callbacks.at=0.5"]
    every = "{class_path: ModelCheckpoint, init_args: {monitor: val/perplexity, "
    every += "filename: '{epoch}', save_top_k: -1}}"
    drop += [f"--trainer.callbacks+={every}"]
    assert cli.main(["fit", "--config", "text", *own, *FEW, *drop]) == 0
    folder = tmp_path / "runs" / "text" / "version_0" / "checkpoints"
    before, after = folder / "epoch=0.ckpt", folder / "epoch=1.ckpt"
    for path, extended in ((before, True), (after, False)):
        stored = torch.load(path, weights_only=True)["hyper_parameters"]
        assert (stored["extension"] is not None) == extended
        assert of_transformer(path)["per_layer"] == ["rotary"] * extended
        assert (of_transformer(path)["rotary"] is not None) == extended
        made = LanguageModel.load_from_checkpoint(path).network.transformer
        assert made.rotary_of == ([0, 1, 2, 3] if extended else [None] * 4)
        assert cli.main(["test", "--ckpt_path", str(path), *FEW[2:]]) == 0
    capsys.readouterr()
    # what goes on from before has RoPE and records it, until its time comes again
    late = [f"--trainer.callbacks={every}", "--trainer.callbacks+=tasks.lengths.DropRotary"]
    late += ["--trainer.callbacks.at=0.9", "--trainer.max_epochs=3"]
    assert cli.main(["fit", "--ckpt_path", str(before), *late, *FEW[2:]]) == 0
    again = tmp_path / "runs" / "text" / "version_1" / "checkpoints"
    stored = torch.load(again / "epoch=1.ckpt", weights_only=True)["hyper_parameters"]
    assert stored["extension"]["class_path"] == "mmpos.frequencies.YaRN"
    assert of_transformer(again / "epoch=1.ckpt")["per_layer"] == ["rotary"]
    assert of_transformer(again / "epoch=2.ckpt")["rotary"] is None


def test_going_on_from_no_weights_says_what_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["fit", "--config", "extend_context", *FEW]) == 2
    assert "give one, or --model.weights FILE" in capsys.readouterr().err
