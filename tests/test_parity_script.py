"""The report on parity runs, and says what it compared."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "parity.py"


def test_it_reports_what_the_marked_tests_compare(tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "--select", "gpt_oss_does_not", "--json", str(out)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (row,) = json.loads(out.read_text())
    assert row["peer"] == "transformers" and row["cases"] == 1
    assert row["failed"] == row["left_out"] == 0 and 0 <= row["largest"] < 1e-5
    assert "1 comparisons" in run.stdout
