"""Resizing against the formula in plain Python, and its laws."""

import math
import random

import pytest
import torch

from mmpos.resample import (
    Resampling,
    bias_table,
    flat_table,
    grid_table,
    grid_tables,
    patch_kernel,
)

HOWS = [
    Resampling(mode="nearest"),
    Resampling(mode="nearest", offset=0.1),
    Resampling(mode="bilinear"),
    Resampling(mode="bilinear", antialias=False),
    Resampling(mode="bilinear", antialias=False, align_corners=True),
    Resampling(),
    Resampling(cubic=-0.75),
    Resampling(offset=0.1),
    Resampling(align_corners=True),
    Resampling(antialias=False),
    Resampling(antialias=False, cubic=-0.5),
    Resampling(antialias=False, offset=0.1),
    Resampling(antialias=False, align_corners=True),
]
every_how = pytest.mark.parametrize("how", HOWS, ids=str)
WIDE = [(2, 8), (7, 3), (12, 5)]  # rectangles both ways


def formula(how: Resampling, old: int, new: int) -> torch.Tensor:
    """The weights cell by cell and tap by tap, from torch's description of its kernels."""
    rows = [[0.0] * old for _ in range(new)]
    if how.align_corners:
        ratio = (old - 1) / (new - 1) if new > 1 else 0.0
    else:
        ratio = old / (new + how.offset)
    a = how.cubic or (-0.5 if how.antialias else -0.75)

    def kernel(x):
        x = abs(x)
        if how.mode == "bilinear":
            return max(0.0, 1 - x)
        if x < 1:
            return (a + 2) * x**3 - (a + 3) * x**2 + 1
        return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0

    reach = {"nearest": 0, "bilinear": 1, "bicubic": 2}[how.mode]
    for i, row in enumerate(rows):
        if how.mode == "nearest":
            row[min(old - 1, math.floor(i * ratio))] = 1.0
        elif how.antialias:
            stretch, center = max(1.0, ratio), (i + 0.5) * ratio
            first = max(0, int(center - reach * stretch + 0.5))
            last = min(old, int(center + reach * stretch + 0.5))
            taps = [kernel((j + 0.5 - center) / stretch) for j in range(first, last)]
            row[first:last] = [tap / sum(taps) for tap in taps]
        else:
            source = i * ratio if how.align_corners else (i + 0.5) * ratio - 0.5
            for j in range(math.floor(source) - reach + 1, math.floor(source) + reach + 1):
                row[min(old - 1, max(0, j))] += kernel(source - j)
    return torch.tensor(rows, dtype=torch.float64)


def by_formula(table: torch.Tensor, grid: tuple[int, ...], how: Resampling) -> torch.Tensor:
    out = table.double()
    for axis, (old, new) in enumerate(zip(table.shape, grid, strict=False)):
        out = torch.tensordot(formula(how, old, new), out, ([1], [axis])).movedim(0, axis)
    return out


@every_how
def test_matrices_of_all_sizes(how):
    """Right shape, rows that sum to 1, and the formula's weights."""
    drawn = random.Random(0)
    for old in range(1, 41):
        for new in range(1, 41):
            weights = how.matrix(old, new)
            assert weights.shape == (new, old)
            assert (weights.sum(-1) - 1).abs().max() < 1e-12
            if drawn.random() < 0.1 or min(old, new) == 1:
                if how.mode == "nearest" and old % new:  # torch rounds a ratio in float32
                    continue
                difference = weights - formula(how, old, new)
                assert difference.abs().max() < 1e-12, (old, new)


@every_how
def test_float32_and_float64_are_the_formula(how):
    drawn = random.Random(1)
    for _ in range(10):
        *old, height, width = (drawn.choice((4, 8, 16, 32)) for _ in range(4))
        if how.mode != "nearest":
            *old, height, width = (drawn.randint(1, 40) for _ in range(4))
        table = torch.randn(*old, 3, dtype=torch.float64)
        if tuple(old) == (height, width):
            continue
        expected = by_formula(table, (height, width), how)
        close = grid_table(table.float(), (height, width), how)
        exact = grid_table(table, (height, width), how)
        torch.testing.assert_close(exact, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(close.double(), expected, rtol=0, atol=1e-6)


@every_how
@pytest.mark.parametrize(
    ("old", "new"),
    [((9,), (20,)), ((20,), (9,)), ((2, 6, 4), (4, 3, 7)), ((1, 7), (1, 9)), ((5, 1), (8, 1))],
    ids=str,
)
def test_any_number_of_axes_and_single_rows(how, old, new):
    if how.mode == "nearest":
        new = tuple(2 * size for size in old)
    table = torch.randn(*old, 5, dtype=torch.float64)
    expected = by_formula(table, new, how)
    torch.testing.assert_close(grid_table(table, new, how), expected, rtol=0, atol=1e-12)


@every_how
def test_its_own_grid_is_returned_as_it_is(how):
    for table in (torch.randn(6, 9, 4), torch.randn(6, 9, 4).bfloat16()):
        assert grid_table(table, (6, 9), how) is table
    rows = torch.randn(1, 5 + 54, 4)
    assert torch.equal(flat_table(rows, (6, 9), (6, 9), prefix_rows=5, how=how), rows)
    kernel = torch.randn(4, 3, 6, 9)
    assert patch_kernel(kernel, (6, 9), how) is kernel
    table = torch.randn(11 * 17 + 3, 2)
    assert torch.equal(bias_table(table, (6, 9), (6, 9), extra_rows=3, how=how), table)


def test_every_grid_has_its_shape():
    table = torch.randn(14, 37, 2)
    for height in range(1, 41):
        for width in range(1, 41):
            assert grid_table(table, (height, width)).shape == (height, width, 2)
    for old, new in [(14, 61), (14, 115), (14, 122), (37, 39), (37, 43), (37, 78), (37, 123)]:
        assert len(grid_table(torch.randn(old, 1), (new,))) == new  # a float ratio loses a cell


@every_how
def test_rows_stay_rows_and_columns_columns(how):
    for old in [(6, 6), *WIDE]:
        for new in [(4, 8), (8, 4), (9, 9), (1, 3)]:
            rows = torch.arange(float(old[0])).reshape(-1, 1, 1).repeat(1, old[1], 1)
            columns = torch.arange(float(old[1])).reshape(1, -1, 1).repeat(old[0], 1, 1)
            down, right = grid_table(rows, new, how), grid_table(columns, new, how)
            torch.testing.assert_close(down, down[:, :1].expand(*new, 1))
            torch.testing.assert_close(right, right[:1].expand(*new, 1))
            assert len(down.unique()) > 1 or new[0] == 1
            assert len(right.unique()) > 1


@every_how
def test_as_many_cells_is_not_the_same_grid(how):
    table = torch.randn(2, 8, 3, dtype=torch.float64)
    assert not torch.equal(grid_table(table, (4, 4), how).flatten(0, 1), table.flatten(0, 1))
    turned = bias_table(torch.arange(105.0).unsqueeze(-1), (4, 8), (8, 4), how=how)
    assert not torch.equal(turned, torch.arange(105.0).unsqueeze(-1))


@every_how
@pytest.mark.parametrize(("old", "new"), [((9, 5), (4, 12)), ((9, 9), (2, 2)), ((2, 3), (7, 8))])
def test_gradients_sum_to_the_number_of_cells(how, old, new):
    table = torch.randn(*old, 3, requires_grad=True)
    grid_table(table, new, how).sum().backward()
    assert table.grad is not None
    expected = torch.full((3,), float(math.prod(new)))
    torch.testing.assert_close(table.grad.sum((0, 1)), expected, rtol=1e-5, atol=0)
    mass = torch.outer(how.matrix(old[0], new[0]).sum(0), how.matrix(old[1], new[1]).sum(0))
    torch.testing.assert_close(table.grad[..., 0].double(), mass, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    table = torch.randn(14, 9, 8).to(dtype)
    out = grid_table(table, (5, 20))
    assert out.dtype == dtype
    assert torch.equal(out, grid_table(table.float(), (5, 20)).to(dtype))
    kernel = torch.randn(4, 3, 6, 9).to(dtype)
    assert torch.equal(patch_kernel(kernel, (8, 8)), patch_kernel(kernel.float(), (8, 8)).to(dtype))


def test_the_same_answer_under_autocast_and_on_meta():
    table, kernel = torch.randn(14, 9, 8), torch.randn(4, 3, 6, 9)
    with torch.autocast("cpu", torch.bfloat16):
        cast = grid_table(table, (5, 20)), patch_kernel(kernel, (8, 8))
    assert torch.equal(cast[0], grid_table(table, (5, 20)))
    assert torch.equal(cast[1], patch_kernel(kernel, (8, 8)))
    with torch.device("meta"):  # stored weights, loaded while the model is built on meta
        assert torch.equal(grid_table(table, (5, 20)), cast[0])
    assert grid_table(table.to("meta"), (5, 20)).shape == (5, 20, 8)


@pytest.mark.parametrize(
    ("fit", "kept"),
    [("crop", (slice(0, 3), slice(0, 4))), ("center", (slice(3, 6), slice(2, 6)))],
)
def test_cropped_rows_are_left_as_they_are(fit, kept):
    table = torch.randn(8, 9, 3)  # the centre: cell 4 of 8 at 1 of 3, cell 4 of 9 at 2 of 4
    assert torch.equal(grid_table(table, (3, 4), Resampling(fit=fit)), table[kept])
    assert torch.equal(grid_table(table, (3, 9), Resampling(fit=fit)), table[kept[0]])
    grown = grid_table(table, (10, 4), Resampling(fit=fit))
    torch.testing.assert_close(grown, grid_table(table[:, kept[1]], (10, 4)))


def test_each_axis_has_its_own_fit():
    table = torch.randn(8, 9, 3)
    mixed = grid_table(table, (4, 5), Resampling(fit=("crop", "resize")))
    torch.testing.assert_close(mixed, grid_table(table[:4], (4, 5)))
    mixed = grid_table(table, (4, 5), Resampling(fit=["resize", "center"]))
    torch.testing.assert_close(mixed, grid_table(table[:, 2:7], (4, 5)))


def test_many_grids_are_each_formed_once(monkeypatch):
    table = torch.randn(6, 7, 4, dtype=torch.float64, requires_grad=True)
    grids = [(3, 9), (6, 7), (9, 3), (3, 9), [6, 7], (1, 1), (3, 9)]
    expected = torch.cat([grid_table(table, grid).flatten(0, 1) for grid in grids])
    (wanted,) = torch.autograd.grad(expected.square().sum(), table)
    seen, formed = [], Resampling.matrix
    spy = lambda self, *sizes: seen.append(sizes) or formed(self, *sizes)  # noqa: E731
    monkeypatch.setattr(Resampling, "matrix", spy)
    out = grid_tables(table, grids)
    assert torch.equal(out, expected)
    assert len(seen) == 2 * 3  # two axes of the three grids that are not the table's own
    (given,) = torch.autograd.grad(out.square().sum(), table)
    torch.testing.assert_close(given, wanted)
    assert grid_tables(table, []).shape == (0, 4)


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("batch", [(), (1,), (2, 3)], ids=str)
def test_flat_tables_carry_their_prefix_rows(prefix, batch):
    rows = torch.randn(*batch, prefix + 16, 3)
    for new in [(4, 4), (8, 2), (3, 7)]:
        out = flat_table(rows, (2, 8), new, prefix_rows=prefix)
        assert out.shape == (*batch, prefix + math.prod(new), 3)
        assert torch.equal(out[..., :prefix, :], rows[..., :prefix, :])
        tables = out.reshape(-1, *out.shape[-2:]), rows.reshape(-1, *rows.shape[-2:])
        for one, given in zip(*tables, strict=True):
            expected = grid_table(given[prefix:].reshape(2, 8, 3), new).flatten(0, 1)
            torch.testing.assert_close(one[prefix:], expected)


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("new", [(3, 4), (4, 1), (7, 3)], ids=str)
def test_a_smaller_window_keeps_the_rows_of_its_offsets(extra, new):
    old, how = (7, 5), Resampling(fit="center")
    table = torch.randn(13 * 9 + extra, 2)
    out = bias_table(table, old, new, extra_rows=extra, how=how)
    assert len(out) == (2 * new[0] - 1) * (2 * new[1] - 1) + extra

    def row(window, down, right):
        return (down + window[0] - 1) * (2 * window[1] - 1) + right + window[1] - 1

    for down in range(1 - new[0], new[0]):
        for right in range(1 - new[1], new[1]):
            assert torch.equal(out[row(new, down, right)], table[row(old, down, right)])
    assert torch.equal(out[len(out) - extra :], table[len(table) - extra :])


@pytest.mark.parametrize("how", [Resampling(), Resampling(mode="bilinear", antialias=False)])
def test_kernels_give_a_resized_patch_its_token(how):
    kernel = torch.randn(5, 3, 4, 6, dtype=torch.float64)
    patch = torch.randn(4, 6, 3, dtype=torch.float64)
    for size in [(8, 9), (4, 12), (16, 6), (5, 7)]:
        grown = by_formula(patch, size, how)
        tokens = torch.einsum("dchw,hwc->d", patch_kernel(kernel, size, how), grown)
        expected = torch.einsum("dchw,hwc->d", kernel, patch)
        torch.testing.assert_close(tokens, expected, rtol=0, atol=1e-9)


def test_kernels_of_smaller_patches_are_nearest_in_squares():
    kernel = torch.randn(5, 2, 8, 6, dtype=torch.float64)
    resize = torch.kron(formula(Resampling(), 8, 3), formula(Resampling(), 6, 4))
    best = torch.linalg.lstsq(resize.mT, kernel.flatten(2).flatten(0, 1).mT).solution
    small = patch_kernel(kernel, (3, 4))
    torch.testing.assert_close(small.flatten(2).flatten(0, 1).mT, best)
    assert torch.equal(patch_kernel(kernel[:, :, 0], (4,)), patch_kernel(kernel, (8, 4))[:, :, 0])
    clip = torch.randn(5, 3, 2, 8, 6)  # a video's
    torch.testing.assert_close(
        patch_kernel(clip, (2, 3, 4))[:, :, 1], patch_kernel(clip[:, :, 1], (3, 4))
    )


def test_a_way_is_named_in_a_few_words():
    assert str(Resampling()) == "bicubic, antialias"
    assert str(Resampling(mode="nearest", offset=0.1)) == "nearest, offset 0.1"
    way = Resampling(antialias=False, align_corners=True, cubic=-0.6, fit=("crop", "resize"))
    assert str(way) == "bicubic, align_corners, cubic -0.6, fit crop/resize"
