"""A bias formed once for each different offset is the bias of each pair."""

import math

import pytest
import torch

import mmpos
from mmpos.bias import (
    ALiBi,
    ClippedRelativeBias,
    KerpleBias,
    LogCPB,
    RelativePositionBias,
    T5Bias,
)
from mmpos.bias.base import AttentionBias
from mmpos.bias.lattice import lattice
from mmpos.positions import absent, grid, join, sequence

BIASES = {
    "alibi": lambda axes: ALiBi(3, axes, learned=True),
    "right": lambda axes: ALiBi(3, right_slopes=(0.1, 0.2, 0.3), slopes=(1, 2, 3), learned=True),
    "clipped": lambda axes: ClippedRelativeBias(3, axes, distance=4),
    "kerple": lambda axes: KerpleBias(3, axes),
    "power": lambda axes: KerpleBias(3, axes, form="power"),
    "cpb": lambda axes: LogCPB(3, axes, window=(5,) * axes, std=0.5),
    "cr": lambda axes: LogCPB(3, axes, form="cr", hidden=7, std=0.5),
    "t5": lambda axes: T5Bias(3, axes),
    "table": lambda axes: RelativePositionBias(3, (8, 9, 40)[-axes:]),
    "prefix": lambda axes: RelativePositionBias(3, (8, 9, 40)[-axes:], prefix_rows=True),
}


def places(axes: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    cells = grid(*(4, 3, 30)[-axes:])
    queries, keys = cells[2:13], cells[3:30]
    if kind == "shifted":
        return queries + 100.5, keys + 100.5
    if kind == "prefix":
        queries, keys = join(absent(1, axes), queries + 300), join(absent(2, axes), keys + 300)
    if kind == "prefix alone":
        queries = absent(2, axes)
    if kind == "rows":
        queries = torch.stack((queries, cells[-11:] + 10_000, cells[:11] - 99)).float()
        keys = torch.stack((keys, cells[:27] + 10_000, cells[-27:] - 99)).float()
        queries[0, 1], keys[1, 2:4], queries[2], keys[2] = (math.nan,) * 4
    if kind == "readings":
        return queries.double() * 0.37 - 3, keys.double() * 0.37 - 3
    return queries, keys


@pytest.mark.parametrize("kind", ["plain", "shifted", "prefix", "prefix alone", "rows", "readings"])
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("name", BIASES)
def test_each_offset_once_is_each_pair(name, axes, kind, monkeypatch):
    if (name == "right" and axes > 1) or (
        kind == "readings" and name in ("clipped", "table", "prefix")
    ):
        pytest.skip("one axis, or whole offsets only")
    bias = BIASES[name](axes)
    queries, keys = places(axes, kind)
    gradient = torch.randn(*queries.shape[:-2], 3, queries.shape[-2], keys.shape[-2])

    def run() -> list[torch.Tensor]:
        out = bias(queries, keys)
        bias.zero_grad()
        out.backward(gradient)
        return [out.detach(), *(weight.grad for weight in bias.parameters())]

    assert bias.columns(*(part.double() for part in (queries, keys))) is not None
    shared = run()
    monkeypatch.setattr(type(bias), "columns", lambda *_: None)
    for a, b in zip(shared, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("positions", "found"),
    [
        (sequence(5), [1.0]),
        (sequence(5) * 0.1, [0.1]),
        (sequence(5) * 0.1 + 1000, None),  # float32: positions are rounded by 1e-4 of a step
        (sequence(5).double() * 0.1 + 7, [0.1]),
        (torch.tensor([[0.0], [0.5], [1.75]]), None),
        (grid(2, 3) * torch.tensor([0.25, 2.0]), [0.25, 1.0]),
        (torch.tensor([[0.0, math.nan], [1.0, 2.0]]), None),
        (join(absent(2, 1), sequence(3)), [1.0]),
        (absent(2, 2), [1.0, 1.0]),
        (sequence(0), None),
    ],
)
def test_which_tokens_are_on_a_grid(positions, found):
    cells = lattice(positions.double(), positions.double())
    assert (cells.steps if cells else None) == (None if found is None else pytest.approx(found))


def test_pairs_are_taken_where_they_are_fewer_than_offsets():
    far = torch.tensor([[0, 0], [1000, -50], [7, 100_000]])
    bias = ALiBi(3, 2, slopes=(1, 1 / 256, 2))
    assert bias.columns(far.double(), far.double()) is None
    for start in (0, 2**24 + 1, 1_700_000_000):
        assert bias(far + start, far + start)[1, 0, 1] == -math.hypot(1000, 50) / 256


@pytest.mark.parametrize("name", BIASES)
def test_blocks_of_queries_are_the_whole(name):
    bias = BIASES[name](1 if name == "right" else 2)
    positions = join(absent(1, 2), grid(6, 7))[:, -1 if name == "right" else 0 :]
    blocks = bias.blocks(positions, positions)
    parts = [blocks.form(start, min(43, start + 10)) for start in range(0, 43, 10)]
    assert isinstance(bias, AttentionBias) and len(blocks.parameters) == len([*bias.parameters()])
    torch.testing.assert_close(
        torch.cat(parts, -2), bias(positions, positions), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["plain", "prefix"])
@pytest.mark.parametrize("name", BIASES)
def test_the_score_mod_is_the_dense_bias(name, kind):
    bias = BIASES[name](1 if name == "right" else 2)
    queries, keys = places(1 if name == "right" else 2, kind)
    dense = bias(queries, keys)
    head, query, key = (torch.arange(size) for size in dense.shape)
    add_bias = bias.score_mod(queries, keys)
    zero = torch.zeros(())
    every = add_bias(zero, zero.long(), head[:, None, None], query[:, None], key)
    torch.testing.assert_close(every, dense, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", BIASES)
def test_learned_positions_have_gradients(name):
    if name in ("t5", "clipped", "table", "prefix"):
        pytest.skip("rows have none")
    axes = 1 if name == "right" else 2
    positions = join(absent(1, axes), grid(*(4, 5)[:axes])).requires_grad_()
    BIASES[name](axes)(positions, positions).square().sum().backward()
    assert positions.grad is not None
    assert positions.grad[1:].isfinite().all() and positions.grad[1:].any()


def test_no_position_gives_an_empty_bias():
    for name, make in BIASES.items():
        assert make(1)(sequence(0), sequence(3)).shape == (3, 0, 3), name
        assert make(1)(sequence(2), sequence(0)).shape == (3, 2, 0), name


@pytest.mark.parametrize("name", BIASES)
def test_on_the_meta_device_shapes_are_known(name):
    axes = 1 if name == "right" else 2
    bias, positions = BIASES[name](axes).to("meta"), grid(*(4, 5)[:axes]).to("meta")
    assert bias(positions, positions).shape == (3, len(positions), len(positions))


def test_a_transformer_takes_each_by_name():
    model = mmpos.models.Transformer((4, 6), size="nano", bias=RelativePositionBias)
    assert model(torch.zeros(1, 24, 64), grid(4, 6)).shape == (1, 24, 64)
