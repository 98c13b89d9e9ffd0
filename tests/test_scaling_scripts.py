"""The scripts about devices run, and count what there is to count."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return lambda name: SimpleNamespace(**runpy.run_path(str(SCRIPTS / f"{name}.py")))


@pytest.mark.filterwarnings("ignore")
def test_communication_is_that_of_the_parameters(script, capsys) -> None:
    names = ["none", "learned", "RoPE", "T5"]
    args = ["--size", "nano", "--grid", "4", "6", "--encodings", *names]
    script("communication").main(args)
    out = capsys.readouterr().out
    rows = {}
    for line in out.splitlines():
        cells = [cell.strip() for cell in line.strip("│ ").split("│")]
        if cells[0] in names:
            rows[cells[0]] = [float(cell) * 1e6 for cell in cells[1:]]
    assert list(rows) == names
    learned = 4 * 24 * 64
    assert rows["none"][0] == rows["RoPE"][0] == 0 and rows["learned"][0] == learned
    for name, (own, everything, ddp, fsdp, shards) in rows.items():
        assert everything == pytest.approx(rows["none"][1] + own, rel=1e-3), name
        assert ddp == everything and fsdp == pytest.approx(3 * everything, rel=0.01), name
        keys_and_values = 4 * 2 * 24 * 64 * 4  # layers, two, tokens, width, bytes
        assert shards == pytest.approx(keys_and_values + 24 * 2 * 8, rel=1e-3), name


def test_the_check_of_a_gpu_runs_without_one(tmp_path) -> None:
    """In a process of its own, since shapes that are checked cannot be traced."""
    found = tmp_path / "found.json"
    args = ["--device", "cpu", "--small", "--json", str(found)]
    root = str(SCRIPTS.parent)
    done = subprocess.run(
        [sys.executable, SCRIPTS / "check_gpu.py", *args],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = {each["name"]: each for each in json.loads(found.read_text())["found"]}
    assert rows["resumed run, greatest difference of weights"]["figure"] == 0
    assert len(rows) > 25 and all(each["holds"] for each in rows.values())


def test_it_wants_a_gpu(script, capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        script("check_gpu").main([])
    assert "no CUDA device is here" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_the_bench_of_processes_runs(script, capsys) -> None:
    threads = torch.get_num_threads()
    args = ["--turns", "1", "--steps", "2", "--warm_up", "1", "--batch_size", "4"]
    script("bench_processes").main(args)
    torch.set_num_threads(threads)
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("1 process: ") and out[1].startswith("2 processes: ")
    assert float(out[2].removeprefix("ratio: ")) > 0
