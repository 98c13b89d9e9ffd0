"""Batches of samples of similar length: a function of seed, epoch and lengths on any processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from tasks.data import Audio, LabelledText
from tasks.data.samplers import BucketSampler, EpochSampler

COUNT = 1003
LENGTHS = np.random.default_rng(5).integers(1, 60, COUNT)


def lengths(epoch: int) -> np.ndarray:
    """Others in each epoch."""
    return np.roll(LENGTHS, 7 * epoch)


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return COUNT


def sampler(processes: int = 1, rank: int = 0, batch: int = 12, **options: Any) -> BucketSampler:
    given: dict[str, Any] = {"seed": 3, "buckets": 5, "lengths": lengths, **options}
    return BucketSampler(
        Numbers(), num_replicas=processes, rank=rank, batch_size=batch // processes, **given
    )


def indices(of: EpochSampler, epoch: int) -> np.ndarray:
    of.set_epoch(epoch)
    return np.array(list(of)) - epoch * COUNT


@pytest.mark.parametrize("buckets", [1, 5, 1000])
def test_batches_are_those_of_a_plain_sort_of_the_shuffled_samples(buckets: int) -> None:
    shuffled = EpochSampler(Numbers(), num_replicas=1, rank=0, seed=3)
    for epoch in range(3):
        order = indices(shuffled, epoch).tolist()
        order = order[: COUNT - COUNT % 12]
        wanted = []
        for start in range(0, len(order), 12 * buckets):
            run = sorted(order[start : start + 12 * buckets], key=lambda i: lengths(epoch)[i])
            wanted += [run[place : place + 12] for place in range(0, len(run), 12)]
        own = sampler(buckets=buckets)
        batches = indices(own, epoch).reshape(-1, 12)
        assert len(own) == batches.size == COUNT // 12 * 12
        assert sorted(batches.tolist()) == sorted(wanted) and batches.tolist() != wanted
        longest = lengths(epoch)[batches].max(1)
        assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.4


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_processes_see_at_each_step_the_samples_of_one(processes: int) -> None:
    seen = []
    for epoch in range(2):
        whole = indices(sampler(), epoch).reshape(-1, 12)
        ranks = [sampler(processes, rank) for rank in range(processes)]
        parts = [indices(own, epoch).reshape(len(whole), -1) for own in ranks]
        assert {len(own) for own in ranks} == {whole.size // processes}
        assert np.array_equal(np.sort(np.concatenate(parts, 1), 1), np.sort(whole, 1))
        assert len(np.unique(whole)) == whole.size
        seen.append(whole)
    assert not np.array_equal(*seen)
    assert np.array_equal(seen[0], indices(sampler(), 0).reshape(-1, 12))
    assert not np.array_equal(seen[0], indices(sampler(seed=4), 0).reshape(-1, 12))


def test_what_is_left_out_is_not_what_is_long() -> None:
    left = [np.setdiff1d(np.arange(COUNT), indices(sampler(), epoch)) for epoch in range(60)]
    assert {len(each) for each in left} == {COUNT % 12}
    means = [lengths(epoch)[each].mean() for epoch, each in enumerate(left)]
    assert abs(np.mean(means) - LENGTHS.mean()) < 3


def test_a_resumed_epoch_goes_on_with_the_next_batch() -> None:
    for rank in range(2):
        whole = indices(sampler(2, rank), 1)
        assert np.array_equal(indices(sampler(2, rank, seen=lambda: 18), 1), whole[18:])


@pytest.fixture
def texts(tmp_path: Path) -> Callable[..., LabelledText]:
    """Two classes of 60 texts of 1 to 80 bytes each; with buckets, in batches of six."""
    draw = np.random.default_rng(1)
    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        for number in range(60):
            (tmp_path / name / f"{number}.txt").write_text("x" * int(draw.integers(1, 80)))

    def make(**options: Any) -> LabelledText:
        given = {"root": tmp_path, "context": 64, "batch_size": 6, "buckets": 4, **options}
        return LabelledText("files", **given)

    return make


def padding(data: Any) -> float:
    """The share of an epoch's cells that stand for nothing."""
    masks = [values[0][1] for values in data.train_dataloader()]
    return 1 - sum(int(m.sum()) for m in masks) / sum(m.numel() for m in masks)


@pytest.mark.parametrize("snippets", [False, True])
@pytest.mark.parametrize("crop", [False, True])
def test_lengths_of_texts_are_those_of_their_tokens(
    texts: Callable[..., LabelledText], snippets: bool, crop: bool
) -> None:
    data = texts(snippets=snippets, crop=crop, context=30, train_samples=40).samples("train")
    for epoch in (0, 2):
        items = [data[index + epoch * len(data)] for index in range(len(data))]
        assert data.lengths(epoch).tolist() == [len(tokens) for tokens, _ in items]


def test_lengths_of_sounds_are_those_of_their_frames(tmp_path: Path) -> None:
    digits = Audio(train_samples=20, buckets=2, batch_size=2).samples("train")
    for name, seconds in {"a": (0.3, 1.7, 0.9), "b": (0.5, 0.2, 1.2)}.items():
        (tmp_path / name).mkdir()
        for number, each in enumerate(seconds * 3):
            sound = np.random.default_rng(number).normal(size=int(8000 * each)) / 9
            soundfile.write(tmp_path / name / f"{number}.wav", sound, 8000)
    options: Any = {"features": {"rate": 8000, "bins": 8}, "seconds": 1.0, "batch_size": 2}
    files = Audio("folder", tmp_path, longer="windows", **options).samples("train")
    for data in (digits, files):
        for epoch in (0, 3):
            seconds = data.lengths(epoch)
            start = epoch * len(data)
            frames = [data[start + index][0][0].shape[-1] for index in range(len(data))]
            counts = [data.features.frames(data.features.samples(each)) for each in seconds]
            assert np.abs(np.subtract(counts, frames)).max() <= 1 and len(set(frames)) > 3


def test_less_is_padded(texts: Callable[..., LabelledText]) -> None:
    assert padding(texts()) < padding(texts(buckets=None)) / 2
    sounds: list[Any] = [Audio(train_samples=64, batch_size=8, buckets=b) for b in (None, 8)]
    plain, sorted_ = (
        [sound.mask.float().mean() for sound, _ in data.train_dataloader()] for data in sounds
    )
    assert 1 - np.mean(sorted_) < (1 - np.mean(plain)) / 3


def test_no_buckets_are_refused(texts: Callable[..., LabelledText]) -> None:
    with pytest.raises(ValueError, match="buckets is 0; expected at least 1"):
        texts(buckets=0)
    with pytest.raises(ValueError, match="buckets is 0; expected at least 1"):
        Audio(buckets=0)
