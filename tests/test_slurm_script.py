"""The script for SLURM, with commands of that name in place of a cluster's."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "slurm.sh"


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_what_it_starts(tmp_path: Path, sharded: bool, again: bool) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nfor each in "$@"; do echo "$each"; done\n')
    srun.chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_ID": "17"}
    slurm |= {"SLURM_RESTART_COUNT": "1"} if again else {}
    given = ["--config", "image", "--data.root", "a b"]
    given += ["--config", "trainer/fsdp"] if sharded else []
    done = subprocess.run(
        ["bash", SCRIPT, *given],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **slurm},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = ["--kill-on-bad-exit=1", "mmpos", "fit", *given]
    expected += [] if sharded else ["--config", "trainer/ddp"]
    expected += ["--config", "trainer/cluster", "--trainer.num_nodes", "2"]
    expected += ["--trainer.devices", "8", "--trainer.logger.version", "17"]
    assert done.stdout.splitlines() == expected + (["--ckpt_path", "last"] if again else [])
    directives = [line for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --signal=SIGUSR1@90" in directives and "#SBATCH --requeue" in directives
