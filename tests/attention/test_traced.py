import os
import subprocess
import sys
from pathlib import Path


def test_compiled_and_exported_attention_gives_the_same():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--show-capture=no", "tests/attention/traced.py"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "JAXTYPING_DISABLE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
