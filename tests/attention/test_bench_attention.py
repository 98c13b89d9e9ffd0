import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_attention.py"


@pytest.fixture
def bench():
    spec = importlib.util.spec_from_file_location("bench_attention", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_table(bench, tmp_path, capsys):
    written = tmp_path / "bench.json"
    arguments = ["--repeats", "1", "--threads", "1", "--size", "1", "2", "40", "8", "--no-memory"]
    bench.main([*arguments, "--json", str(written)])
    assert "torch, 3-D" in capsys.readouterr().out
    tables = json.loads(written.read_text())["tables"]
    assert set(tables) == set(bench.KINDS)
    for kind in tables.values():
        assert kind["rows"][0]["ratio"] == 1
        assert all(row["ms"] > 0 for row in kind["rows"])
    errors = [row["error"] for row in tables["keys"]["rows"][1:]]
    assert len(errors) == 2
    assert max(errors) < 3e-6


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory(bench, capsys):
    size = bench.Sizes(1, 2, 40, 8)
    peaks = [bench.peak_of("keys", way, size, 1) for way in ("no bias", "for each key")]
    assert all(50 < peak < 2000 for peak in peaks)
    bench.main(["--rows", "keys", "--peak", "no bias", "--size", "1", "2", "40", "8"])
    assert float(capsys.readouterr().out) > 50
