import runpy
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_batches.py"


def test_the_benchmark_of_batches(capsys: pytest.CaptureFixture) -> None:
    threads = torch.get_num_threads()
    main = runpy.run_path(str(SCRIPT))["main"]
    tiny = ["--documents", "3", "--longest", "40", "--cached", "4", "9"]
    main([*tiny, "--depth", "1", "--repeats", "1", "--threads", "1"])
    torch.set_num_threads(threads)
    said = capsys.readouterr().out
    assert "packed" in said and "one more token" in said
