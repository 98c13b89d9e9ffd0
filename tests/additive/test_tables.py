"""Tables that go to another grid: resized, loaded, or as copies at each call."""

import copy
import logging

import pytest
import torch
from torch import nn

from mmpos.additive import FactorizedEncoding, LearnedEncoding
from mmpos.positions import grid
from mmpos.resample import Resampling, grid_table

OLD, NEW = (4, 7), (9, 5)
LINEAR = Resampling(mode="bilinear", antialias=False)
CLASSES = [LearnedEncoding, FactorizedEncoding]


def expected(encoding, how=None) -> list[torch.Tensor]:
    """What each table is on the new grid, by `grid_table`, whose own tests are elsewhere."""
    if isinstance(encoding, LearnedEncoding):
        return [grid_table(encoding.table.detach(), NEW, how)]
    return [
        grid_table(table.detach(), (size,), how)
        for table, size in zip(encoding.table, NEW, strict=True)
    ]


@pytest.mark.parametrize("how", [None, LINEAR])
@pytest.mark.parametrize("cls", CLASSES)
def test_resizing_in_place(cls, how):
    encoding = cls(6, OLD, resampling=how)
    wanted, own = expected(encoding, how), list(encoding.parameters())
    encoding.resize(NEW)
    for table, want in zip(encoding.parameters(), wanted, strict=True):
        assert torch.equal(table, want)
        assert table.requires_grad and table.is_leaf
    assert all(a is b for a, b in zip(encoding.parameters(), own, strict=True))
    assert encoding.grid == encoding.axes == NEW
    assert encoding(grid(*NEW), extent=NEW).shape == (45, 6)
    with pytest.raises(ValueError, match="9 × 5 cannot become one of 3: other axes"):
        encoding.resize((3,))
    before = [table.detach().clone() for table in encoding.parameters()]
    encoding.resize(NEW)
    assert all(torch.equal(a, b) for a, b in zip(encoding.parameters(), before, strict=True))


@pytest.mark.parametrize("cls", CLASSES)
def test_loading_weights_of_another_grid(cls, caplog):
    old, new = cls(6, OLD), nn.ModuleDict({"encoder": cls(6, NEW)})
    state = {f"encoder.{name}": table for name, table in old.state_dict().items()}
    stored = {name: table.clone() for name, table in state.items()}
    with caplog.at_level(logging.WARNING):
        new.load_state_dict(state)
    for table, want in zip(new.parameters(), expected(old), strict=True):
        assert torch.equal(table, want)
    assert all(torch.equal(state[name], stored[name]) for name in stored)
    lines = [record.getMessage() for record in caplog.records]
    if cls is LearnedEncoding:
        assert lines == ["encoder.table: resized from the grid 4 × 7 to 9 × 5 (bicubic, antialias)"]
    else:
        assert lines == [
            "encoder.table.0: resized from the grid 4 to 9 (bicubic, antialias)",
            "encoder.table.1: resized from the grid 7 to 5 (bicubic, antialias)",
        ]
    caplog.clear()
    new.load_state_dict(new.state_dict())
    assert not caplog.records


@pytest.mark.parametrize("cls", CLASSES)
def test_weights_of_another_width_are_not_touched(cls):
    with pytest.raises(RuntimeError, match="size mismatch for table"):
        cls(6, NEW).load_state_dict(cls(8, OLD).state_dict())


def test_a_change_of_the_field_of_view_is_told_for_each_axis():
    how = Resampling(fit=("crop", "resize"))
    for cls in CLASSES:
        encoding = cls(6, (9, 4), resampling=how)
        first = encoding(torch.tensor([[0, 0], [3, 0]]))
        other = cls(6, (4, 4), resampling=how)
        other.load_state_dict(encoding.state_dict())
        assert torch.equal(other(torch.tensor([[0, 0], [3, 0]])), first)


@pytest.mark.parametrize("cls", CLASSES)
def test_dynamic_copies_are_the_resized_tables(cls):
    encoding = cls(6, OLD, dynamic=True, resampling=LINEAR)
    twin = copy.deepcopy(encoding)
    twin.resize(NEW)
    out = encoding(grid(*NEW), extent=NEW)
    assert torch.equal(out, twin(grid(*NEW)))
    assert encoding.grid == OLD
    out.sum().backward()
    for table in encoding.parameters():
        assert table.grad is not None
        rows = 45 if cls is LearnedEncoding else 2 * 45  # each token reads a row of every table
        total = sum(own.grad.sum() for own in encoding.parameters() if own.grad is not None)
        assert total.item() == pytest.approx(rows * 6)
    with pytest.raises(ValueError, match=r"position \(9, 0\) is no cell.*9 × 5"):
        encoding(torch.tensor([[9, 0]]), extent=NEW)


def test_what_fits():
    table = LearnedEncoding(6, OLD)
    assert table.fits(torch.zeros(2, 2, 6)) and table.fits(torch.zeros(2, 2, 6), "table")
    assert not table.fits(torch.zeros(1, 196, 6))
    assert not table.fits(torch.zeros(2, 2, 5)) and not table.fits(torch.zeros(4, 6))
    parts = FactorizedEncoding(6, OLD, combine="concat", split=(4, 2))
    assert list(parts.tables) == ["table.0", "table.1"] == list(parts.state_dict())
    assert parts.fits(torch.zeros(30, 4), "table.0") and parts.fits(torch.zeros(1, 2), "table.1")
    assert not parts.fits(torch.zeros(30, 2), "table.0")
    assert not parts.fits(torch.zeros(1, 30, 4), "table.0")


def test_moments_go_where_the_tables_go():
    parts = FactorizedEncoding(6, OLD, resampling=Resampling(fit=("resize", "crop")))
    moment = torch.rand(12, 6)
    assert torch.equal(parts.resized(moment, "table.0"), grid_table(moment, (4,)))
    assert torch.equal(parts.resized(moment, "table.1"), moment[:7])
    assert torch.equal(parts.resized(moment, "table.0", LINEAR), grid_table(moment, (4,), LINEAR))
    table = LearnedEncoding(6, OLD)
    moment = torch.rand(3, 3, 6)
    assert torch.equal(table.resized(moment), grid_table(moment, OLD))
