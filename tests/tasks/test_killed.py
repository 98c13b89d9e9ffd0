import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="forks its runs")
def test_a_run_killed_20_times_ends_as_if_it_had_been_left_alone(tmp_path: Path) -> None:
    """Bit for bit; also within saves, whose halves are never read."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("killed.py"), tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kills, halves, steps = map(int, done.stdout.split()[-3:])
    assert kills == 20 and halves >= 3 and steps == 40
