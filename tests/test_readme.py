"""The README's code runs, its commands parse, and its table names what there is."""

import re
from pathlib import Path

import pytest

import mmpos
from tasks import cli

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_reuse_example_runs_and_is_ten_lines() -> None:
    (code,) = blocks("python")
    names: dict = {}
    exec(code, names)
    assert names["out"].shape == (8, 6, 196, 64)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10


def test_every_encoding_has_its_row() -> None:
    kinds = (mmpos.AdditiveEncoding, mmpos.RotaryEncoding, mmpos.AttentionBias)
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
    line.split("#")[0].split()[1:]
    for block in blocks("bash")
    for line in block.splitlines()
    if line.startswith("mmpos fit --config") and "--print_config" not in line
]


@pytest.mark.parametrize("args", FITS, ids=" ".join)
def test_every_job_of_the_readme_parses(args: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*args, "--print_config"])
    assert stopped.value.code in (0, None)
    assert "class_path: tasks.ImageClassification" in capsys.readouterr().out
