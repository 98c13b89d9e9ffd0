import os
import subprocess
import sys
from pathlib import Path


def test_traced_image_models_give_the_same_answers():
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--show-capture=no",
            "tests/interop/traced_sizes.py",
        ],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "JAXTYPING_DISABLE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
