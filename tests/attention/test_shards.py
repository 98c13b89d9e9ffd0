"""Sequences whose tokens are shared out over processes: those are in ``sharded.py``."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mmpos
from mmpos.attention import KVCache, SequenceShards
from mmpos.positions import sequence


@pytest.mark.skipif(sys.platform != "linux", reason="forks its processes")
def test_shards_in_two_and_three_processes_are_the_whole(tmp_path):
    program = Path(__file__).with_name("sharded.py")
    run = subprocess.run(
        [sys.executable, "-W", "error", str(program), str(tmp_path / "store")],
        cwd=program.parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-4000:]


@pytest.fixture
def model():
    return mmpos.models.Transformer(
        1, dim=48, depth=2, heads=3, rotary=mmpos.RotaryEncoding, causal=True, window=[3, None]
    )


def test_one_process_has_the_whole(model):
    x, positions, shards = torch.randn(2, 9, 48), sequence(9), SequenceShards()
    assert (shards.size, shards.rank, shards.cut(9)) == (1, 0, slice(0, 9))
    assert torch.equal(model(x, positions, shards=shards), model(x, positions))
    assert shards.gather(x) is x
    assert shards.total(3) == 3


def test_an_order_of_its_own_is_that_of_causality_and_windows(model):
    x, positions, order = torch.randn(2, 9, 48), sequence(9), torch.randperm(9)
    shards, whole = SequenceShards(index=order), model(x, positions)
    own = model(x[:, order], positions[order], shards=shards)
    torch.testing.assert_close(own, whole[:, order])
    assert torch.equal(shards.gather(x[:, order]), x)
    unordered = model(x[:, order], positions[order])
    assert (unordered - own).abs().max() > 1e-3


def test_a_cache_holds_whole_sequences(model):
    with pytest.raises(ValueError, match="cache holds whole sequences, not shards"):
        shards = SequenceShards(index=torch.arange(9))
        model(torch.randn(2, 9, 48), sequence(9), cache=KVCache(), shards=shards)


@pytest.mark.parametrize("index", [[0, 1, 1], [0, 1, 3], [-1, 0, 1]])
def test_an_index_is_each_place_once(model, index):
    with pytest.raises(ValueError, match=r"each place from 0 to 2 once.*got \["):
        model(torch.randn(2, 3, 48), sequence(3), shards=SequenceShards(index=torch.tensor(index)))
