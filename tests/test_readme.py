"""The code of the README and the guides runs, commands parse, and the table names what there is."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

import mmpos
from tasks import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TRANSFORMERS = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "timm.md").read_text(encoding="utf-8")
SEQUENCES = (ROOT / "docs" / "sequences.md").read_text(encoding="utf-8")
AUDIO = (ROOT / "docs" / "audio.md").read_text(encoding="utf-8")
TEXT = (ROOT / "docs" / "text.md").read_text(encoding="utf-8")
VIDEO = (ROOT / "docs" / "video.md").read_text(encoding="utf-8")
MULTIMODAL = (ROOT / "docs" / "multimodal.md").read_text(encoding="utf-8")
SCALING = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
LONG = (ROOT / "docs" / "long_context.md").read_text(encoding="utf-8")
PAGES = (GUIDE, TRANSFORMERS, SEQUENCES, LONG, TEXT, AUDIO, VIDEO, MULTIMODAL, SCALING)


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_examples_run_and_the_first_is_ten_lines() -> None:
    first, model, layers, own = blocks("python")
    assert len([line for line in first.splitlines() if line.strip()]) <= 10
    names: dict = {}
    exec(first, names)
    assert names["out"].shape == (8, 6, 196, 64)
    exec(model, names)
    assert names["encoded"].shape == (1, 400, 384)
    exec(layers, names)
    assert names["again"].spec() == names["plain"] and names["mixture"].windows[:3] == [
        64,
        64,
        None,
    ]
    exec(own, names)
    places = mmpos.positions.join(mmpos.positions.absent(1, 2), mmpos.positions.grid(2, 4))
    bias = names["Nearby"](3, 2)(places, places)
    assert bias.shape == (3, 9, 9) and bias[0, 0].eq(0).all() and bias[0, 1, -1] == -1


def test_the_guide_to_timm_runs(capsys: pytest.CaptureFixture) -> None:
    (code,) = blocks("python", GUIDE)
    names: dict = {}
    exec(code, names)
    said = capsys.readouterr().out
    assert "grid 14 × 14" in said and "RotaryEncoding (mmpos.rotary)" in said
    model = names["model"]
    assert tuple(model.pos_embed.shape) == (1, 1 + 20 * 15, 192)


def test_the_guide_to_transformers_runs(capsys: pytest.CaptureFixture) -> None:
    models, sizes, plans = blocks("python", TRANSFORMERS)
    names: dict = {}
    exec(models, names)
    said = capsys.readouterr().out
    assert "type: default and llama3" in said and "factor: none and 8" in said
    assert names["entries"]["rope_parameters"]["rope_type"] == "yarn"
    assert (names["model"](names["tokens"]).logits - names["logits"]).abs().max() == 0
    exec(sizes, names)
    assert "'max_position_embeddings': 16384" in capsys.readouterr().out
    table = names["bert"].embeddings.position_embeddings.weight
    assert (names["longer"].embeddings.position_embeddings.weight[:512] - table).abs().max() == 0
    exec(plans, names)
    assert "no rotation" in capsys.readouterr().out


def test_the_example_of_sequences_writes_what_its_command_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the two classes differ in the order of the motifs alone."""
    (code,) = blocks("python", SEQUENCES)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    for name, (first, second) in {"AB": ("GGG", "CCC"), "BA": ("CCC", "GGG")}.items():
        rows = (tmp_path / "order" / f"{name}.fna").read_text().splitlines()[1::2]
        assert len(rows) == 2000 and max(map(len, rows)) <= 126
        assert all(re.fullmatch(f"[AT]+{first}[AT]+{second}[AT]+", row) for row in rows)
    (line, *_) = [line for line in blocks("bash", SEQUENCES)[0].splitlines() if "fit" in line]
    few = ["--trainer.fast_dev_run=1", "--trainer.accelerator=cpu"]
    assert cli.main([*shlex.split(line)[1:], *few]) == 0


def test_the_guide_to_sound_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, stream = blocks("python", AUDIO)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(recipe, names)
    grid = tuple(names["network"].transformer.additive.table.shape[:2])
    assert grid == (12, 102) and Path("ast.safetensors").is_file()
    exec(stream, names)
    assert names["whole"].shape == (1, 50, 64) and len(names["chunks"]) == 7


def test_the_guides_to_video_and_to_several_modalities_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    clips, timm = blocks("python", VIDEO)
    names: dict = {}
    exec(clips, names)
    assert names["counted"].shape == names["timed"].shape == (2, 5)
    assert (names["counted"] - names["timed"]).abs().max() > 1e-5
    exec(timm, names)
    assert tuple(names["network"].transformer.additive.table.shape) == (8, 7, 7, 192)
    assert Path("vit.safetensors").is_file()
    (mixed,) = blocks("python", MULTIMODAL)
    exec(mixed, names)
    assert names["answers"].shape == names["silent"].shape == (2, 5)


def test_the_guide_to_many_devices_runs() -> None:
    """But for the folder of shards, which test_sharding makes."""
    _, shared = blocks("python", SCALING)
    names: dict = {}
    exec(shared, names)
    assert names["out"].shape == (2, 6, 64)
    assert all(weight.grad is not None for weight in names["model"].parameters())


def test_links_of_the_pages_lead_somewhere() -> None:
    pages = [(page, ROOT / "docs") for page in PAGES]
    for text, folder in [(README, ROOT), *pages]:
        links = re.findall(r"\]\(([^)#:]+)(?:#\w+)?\)", text)
        assert links
        assert not [link for link in links if not (folder / link).exists()]


def test_the_config_of_an_encoding_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (config,) = blocks("yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_bias.py").write_text(blocks("python")[3])
    (tmp_path / "mine.yaml").write_text(config)
    args = ["fit", "--config", "image", "--config", "mine.yaml", "--trainer.fast_dev_run=1"]
    assert cli.main([*args, "--trainer.accelerator=cpu"]) == 0


def test_every_encoding_has_its_row() -> None:
    kinds = (
        mmpos.AdditiveEncoding,
        mmpos.RotaryEncoding,
        mmpos.AttentionBias,
        mmpos.ContentBias,
    )
    public = {
        name
        for name in mmpos.__all__
        if isinstance(value := getattr(mmpos, name), type)
        and issubclass(value, kinds)
        and not getattr(value, "__abstractmethods__", None)
    }
    rows = set(re.findall(r"^\| `(\w+)`", README, re.MULTILINE))
    assert rows == public


FITS = [
    shlex.split(line, comments=True)[1:]
    for block in blocks("bash", "".join([README, *PAGES]))
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("mmpos fit --config") and "--print_config" not in line
    if "--ckpt_path last" not in line  # which needs a run: see test_checkpoints
]


@pytest.mark.parametrize("args", FITS, ids=" ".join)
def test_every_job_of_the_readme_parses(
    args: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        cli.main([*args, "--print_config"])
    assert stopped.value.code in (0, None)
    said = capsys.readouterr().out
    tasks = set(importlib.import_module("tasks").__all__) - {"Task"}
    assert any(f"class_path: tasks.{task}" in said for task in tasks)
