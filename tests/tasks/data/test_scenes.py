"""Scenes: what is drawn, where, and which samples a process sees."""

import numpy as np
import pytest
import torch

from tasks.data.samplers import EpochSampler
from tasks.data.scenes import CENTRE, PARTS, SIDE, Scenes, already_batched

WHITE = np.full((1, 28, 28), 255, dtype=np.uint8)
NOISE = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
LABELS = np.array([4, 3, 2, 1, 0])


def scenes(
    size: tuple[int, int] = (32, 32), images: np.ndarray = NOISE, seed: int = 0, stream: int = 0
) -> Scenes:
    return Scenes(images, LABELS[: len(images)], size, seed=seed, stream=stream)


def test_a_scene_depends_on_seed_stream_and_index_alone() -> None:
    data = scenes()
    image, labels = data[1234567]
    torch.manual_seed(1)
    np.random.seed(1)
    data.__getitems__([3, 0])
    again, same = data[1234567]
    batch, many = data.__getitems__([7, 1234567, 8])
    assert torch.equal(image, again) and torch.equal(image, batch[1])
    assert labels == same == {question: values[1] for question, values in many.items()}
    assert labels["what"] == LABELS[1234567 % 5]
    for other in (data[1234572], scenes(seed=1)[1234567], scenes(stream=1)[1234567]):
        assert other[1]["what"] == labels["what"]  # the same image, placed elsewhere
        assert not torch.equal(other[0], image)
    assert image.shape == (1, 32, 32) and image.dtype == torch.float32
    assert {values.dtype for values in many.values()} == {torch.int64}


@pytest.mark.parametrize("size", [(32, 32), (24, 48), (7, 5)])
def test_a_scene_is_the_same_picture_at_any_resolution(size: tuple[int, int]) -> None:
    indices = range(20)
    coarse, labels = scenes(size).__getitems__(indices)
    fine, same = scenes((2 * size[0], 2 * size[1])).__getitems__(indices)
    finest, _ = scenes((6 * size[0], 6 * size[1])).__getitems__(indices)
    assert torch.allclose(torch.nn.functional.avg_pool2d(fine, 2), coarse, atol=1e-5)
    assert torch.allclose(torch.nn.functional.avg_pool2d(finest, 6), coarse, atol=1e-5)
    assert all(torch.equal(labels[question], same[question]) for question in labels)


def test_an_image_at_its_own_size_on_whole_pixels_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = scenes((56, 70))
    monkeypatch.setattr(data, "place", lambda indices: (np.array([0.5]), np.array([[0.375, 0.5]])))
    image = data[2][0].squeeze(0)
    assert torch.allclose(image[7:35, 21:49] * 255, torch.from_numpy(NOISE[2]).float(), atol=1e-3)
    assert image.sum() * 255 == pytest.approx(float(NOISE[2].sum()), rel=1e-5)


@pytest.mark.parametrize("size", [(32, 32), (96, 48), (40, 200)])
def test_a_white_square_shows_size_place_and_part(size: tuple[int, int]) -> None:
    count = 400
    data = scenes(size, WHITE)
    images, labels = data.__getitems__(range(count))
    image = images[:, 0].double()
    side, centre = data.place(range(count))
    # the whole object is on the canvas: none of its area is cut off
    assert torch.allclose(image.sum((1, 2)), torch.from_numpy(side**2 * min(size) ** 2), rtol=1e-4)
    for axis, pixels in enumerate(size):
        mass = image.sum(2 - axis)
        found = (mass * (torch.arange(pixels) + 0.5)).sum(1) / mass.sum(1) / pixels
        assert torch.allclose(found, torch.from_numpy(centre[:, axis]), atol=0.05 / pixels)
        seen = mass > 1e-4
        extent = (seen.sum(1) - torch.from_numpy(side) * min(size)).abs()
        assert extent.max() <= 2  # square in pixels, also on a rectangle
        sure = (found - 0.5).abs() > 0.05 / pixels
        part = labels["where"] // 2 if axis == 0 else labels["where"] % 2
        assert torch.equal(part[sure], (found[sure] > 0.5).long())
        assert sure.float().mean() > 0.95


def test_parts_are_uniform_and_independent_of_size_and_patch() -> None:
    count = 8000
    data = scenes()
    side, centre = data.place(range(count))
    part = data.__getitems__(range(count))[1]["where"].numpy()
    bins = [
        np.zeros(count, dtype=int),
        (4 * (side - SIDE[0]) / (SIDE[1] - SIDE[0])).astype(int),
        (centre[:, 0] * 32 % 4).astype(int),
        (centre[:, 1] * 64 % 4).astype(int),
        np.arange(count) % 5,
    ]
    for group in bins:
        table = np.zeros((group.max() + 1, len(PARTS)))
        np.add.at(table, (group, part), 1)
        expected = count / table.size
        chi_square = float(((table - expected) ** 2 / expected).sum())
        assert chi_square < table.size + 4 * (2 * table.size) ** 0.5, table
    assert side.min() >= SIDE[0] and side.max() <= SIDE[1]
    assert side.max() / 2 <= CENTRE[0] <= centre.min() <= centre.max() <= CENTRE[1]


def test_a_scene_is_normalised() -> None:
    plain = scenes()[9][0]
    data = Scenes(NOISE, LABELS, (32, 32), seed=0, mean=0.25, std=0.5)
    assert torch.allclose(data[9][0], (plain - 0.25) / 0.5)


def indices(replicas: int, rank: int, epoch: int, count: int = 23, seed: int = 0) -> list[int]:
    data = scenes(images=np.zeros((count, 28, 28), dtype=np.uint8))
    sampler = EpochSampler(data, num_replicas=replicas, rank=rank, seed=seed)
    sampler.set_epoch(epoch)
    assert len(sampler) == len(list(sampler))
    return list(sampler)


def test_every_epoch_has_new_indices_of_every_image_in_a_new_order() -> None:
    first, second = indices(1, 0, 0), indices(1, 0, 1)
    assert sorted(first) == list(range(23)) and sorted(second) == list(range(23, 46))
    assert [index % 23 for index in second] != first
    assert indices(1, 0, 1) == second
    assert indices(1, 0, 0, seed=1) != first


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("batch", [1, 4])
def test_processes_together_see_the_batches_of_one(replicas: int, batch: int) -> None:
    whole = indices(1, 0, 3)
    shards = [indices(replicas, rank, 3) for rank in range(replicas)]
    steps = len(whole) // (batch * replicas)
    for step in range(steps):
        together = {i for shard in shards for i in shard[step * batch : (step + 1) * batch]}
        assert together == set(whole[step * batch * replicas : (step + 1) * batch * replicas])
    assert {len(shard) // batch for shard in shards} == {steps}


def test_batches_pass_the_loader_unchanged() -> None:
    loader = torch.utils.data.DataLoader(scenes(), 3, collate_fn=already_batched)
    sizes = [(len(images), len(labels["where"])) for images, labels in loader]
    assert sizes == [(3, 3), (2, 2)]
