import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_rotary.py"


def test_the_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main = runpy.run_path(str(SCRIPT))["main"]
    tiny = ["--size", "2", "3", "5", "8", "--repeats", "2", "--threads", "1"]
    main([*tiny, "--rows", "eager", "halved", "peers", "--json", str(tmp_path / "bench.json")])
    written = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert written["size"] == [2, 3, 5, 8] and written["threads"] == 1
    rows = {row["row"]: row for row in written["rows"]}
    targets = {row["target"] for row in rows.values()}
    assert {1.3, 1.7, 0.8, 1.5, 3.3, 3.5, 5.0, "eager half", "eager interleaved"} == targets
    assert all(row["copies"] == row["ms"] / row["copy_ms"] for row in rows.values())
    assert all(isinstance(row["met"], bool) for row in rows.values())
    shown = capsys.readouterr().out
    assert "copies" in shown and "transformers" in shown


def test_rows_that_there_are_not() -> None:
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT))["main"](["--rows", "quick"])
