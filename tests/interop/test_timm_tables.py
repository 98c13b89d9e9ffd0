"""The forms of tables: what is a row stays a row on a rectangle, and formulas hold by hand."""

from functools import partial

import pytest
import torch

from mmpos.interop.timm import tables as forms
from mmpos.interop.timm.tables import progression
from mmpos.resample import Resampling

OLD, NEW = (6, 4), (9, 10)


def stored(form: str, values: torch.Tensor, *, prefix: int = 0) -> torch.Tensor:
    """Cells or offsets ``[H, W, D]`` as a form has them."""
    flat = values.flatten(0, 1)
    return {
        "rows": lambda: torch.cat((torch.full((prefix, flat.shape[1]), 9.0), flat))[None],
        "windows": lambda: flat[None],
        "channels_last": lambda: values[None],
        "channels_first": lambda: values.movedim(-1, 0)[None],
        "blocks": lambda: torch.stack((flat, 2 * flat))[None],
        "offsets": lambda: torch.cat((flat, torch.full((prefix, flat.shape[1]), 9.0))),
        "offsets_by_head": lambda: values.movedim(-1, 0),
        "offset_grid": lambda: values,
        "distances": lambda: flat.T,
        "distance_grid": lambda: flat.T,
    }[form]()


def cells(form: str, data: torch.Tensor, new: tuple[int, int], prefix: int = 0) -> torch.Tensor:
    """``[H, W, D]`` of what a form stores."""
    return {
        "rows": lambda: data[0, prefix:].reshape(*new, -1),
        "windows": lambda: data[0].reshape(*new, -1),
        "channels_last": lambda: data[0],
        "channels_first": lambda: data[0].movedim(0, -1),
        "blocks": lambda: data[0, 0].reshape(*new, -1),
        "offsets": lambda: data[: len(data) - prefix].reshape(*new, -1),
        "offsets_by_head": lambda: data.movedim(0, -1),
        "offset_grid": lambda: data,
        "distances": lambda: data.T.reshape(*new, -1),
        "distance_grid": lambda: data.T.reshape(*new, -1),
    }[form]()


FORMS = {
    "rows": partial(forms.rows, prefix=2),
    "windows": partial(forms.windows, window=(3, 2)),
    "channels_last": forms.channels_last,
    "channels_first": forms.channels_first,
    "blocks": forms.blocks,
    "offsets": partial(forms.offsets, extra=3),
    "offsets_by_head": forms.offsets_by_head,
    "offset_grid": forms.offset_grid,
    "distances": forms.distances,
    "distance_grid": forms.distance_grid,
}
signed = {"offsets", "offsets_by_head", "offset_grid"}
ways = [Resampling(), Resampling(mode="bilinear", antialias=False), None]


@pytest.mark.parametrize("how", ways, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_a_table_of_rows_stays_one_of_rows_on_a_rectangle(name, how):
    if how is None and name not in signed - {"offset_grid"}:
        pytest.skip("BEiT's way is for offsets")
    sizes = [
        tuple(2 * side - 1 for side in size) if name in signed else size for size in (OLD, NEW)
    ]
    (height, width), new = sizes
    prefix = {"rows": 2, "offsets": 3}.get(name, 0)
    for axis in (0, 1):
        line = torch.randn((height, width)[axis], 5)
        grid = (line[:, None] if axis == 0 else line[None]).expand(height, width, 5)
        data = stored(name, grid.contiguous(), prefix=prefix)
        out = FORMS[name](data, OLD, NEW, how)
        grown = cells(name, out, new, prefix)
        constant = grown.movedim(1 - axis, 0)
        torch.testing.assert_close(constant, constant[:1].expand_as(constant))
        assert constant[0].std(0).min() > 0.1
        if prefix:
            extra = out[0, :prefix] if name == "rows" else out[-prefix:]
            assert extra.eq(9).all()
        assert out.dtype == data.dtype and out.is_contiguous()
    if name == "blocks":
        torch.testing.assert_close(out[:, 1], 2 * out[:, 0])


def test_windows_repeat_and_the_rest_is_resized():
    tile, slope = torch.randn(4, 2, 3), torch.linspace(0, 1, 8)[:, None, None].expand(8, 4, 3)
    table = (tile.tile(2, 2, 1) + slope).reshape(1, 32, 3)
    out = forms.windows(table, (8, 4), (16, 6), Resampling(), window=(4, 2)).reshape(16, 6, 3)
    rest = out - tile.tile(4, 3, 1)
    torch.testing.assert_close(rest, rest[:, :1].expand_as(rest))
    inner = rest[2:-2, 0, 0].diff()
    assert inner.min() > 0
    plain = forms.rows(table, (8, 4), (16, 6), Resampling()).reshape(16, 6, 3)
    assert (plain - out).abs().max() > 0.1


def test_distance_zero_stays_distance_zero():
    line = torch.arange(5.0)
    table = (line[:, None] + 10 * torch.arange(4.0)).reshape(1, 20)
    linear = Resampling(mode="bilinear", antialias=False)
    out = forms.distances(table, (5, 4), (10, 4), linear).reshape(10, 4)
    assert out[0, 0] == 0
    torch.testing.assert_close(out[:, 0], (torch.arange(10.0) * 9 / 19).clamp(max=4))
    torch.testing.assert_close(out[0], 10 * torch.arange(4.0))


@pytest.mark.parametrize("old,new", [(7, 12), (14, 21), (3, 9), (2, 5), (1, 4)])
def test_offsets_spread_geometrically(old, new):
    weights = progression(old, new)
    assert weights.shape == (2 * new - 1, 2 * old - 1)
    torch.testing.assert_close(weights.sum(1), torch.ones(2 * new - 1, dtype=torch.float64))
    torch.testing.assert_close(weights, weights.flip(0, 1))
    assert weights.min() >= 0 and weights[new - 1, old - 1] == 1
    if old > 2:
        places = (weights @ torch.arange(1 - old, old, dtype=torch.float64))[new - 1 :]
        torch.testing.assert_close(places[-1].item(), old - 1.0)
        assert abs(places[1] - 1) < 1e-6 and (places.diff().diff() < 1e-9).all()
        assert places[-2] < old - 1 - 1e-6  # none but the last is beyond the last


@pytest.mark.parametrize("old,new", [(7, 7), (7, 4), (12, 1), (1, 1)])
def test_offsets_of_a_window_that_does_not_grow_are_kept(old, new):
    rows = progression(old, new)
    offsets = torch.arange(1 - old, old, dtype=torch.float64)
    assert torch.equal(rows @ offsets, torch.arange(1 - new, new, dtype=torch.float64))
    assert set(rows.unique().tolist()) <= {0.0, 1.0}


def test_float64_stays_exact():
    table = torch.randn(13 * 7, 2, dtype=torch.float64)
    out = forms.offsets(table, (7, 4), (9, 4), None)
    exact = torch.einsum("ab,bcd->acd", progression(7, 9), table.reshape(13, 7, 2)).flatten(0, 1)
    assert out.dtype == torch.float64 and (out - exact).abs().max() < 1e-12
    half = forms.offsets(table.half(), (7, 4), (9, 4), None)
    assert half.dtype == torch.float16 and (half.double() - exact).abs().max() < 5e-3


def test_on_its_own_grid_a_table_is_itself():
    module = torch.nn.Module()
    module.table = torch.nn.Parameter(torch.randn(1, 16, 3))
    table = forms.Table.of(module, "table", (4, 4), partial(forms.windows, window=(2, 2)))
    moments = torch.rand(1, 16, 3)
    assert table.resized(moments, (4, 4), positive=True) is moments
    assert table.resized(moments, (6, 8), positive=True).min() >= 0
