import logging
import math

import pytest
import torch
from timm.layers.pos_embed_rel import gen_relative_position_index
from timm.models.beit import Attention
from torchvision.models.swin_transformer import ShiftedWindowAttention
from torchvision.models.video.swin_transformer import ShiftedWindowAttention3d

import mmpos
from mmpos.bias import RelativePositionBias
from mmpos.positions import absent, grid, join, sequence
from mmpos.resample import Resampling, bias_table


def by_index(table: torch.Tensor, queries, keys, key_grid) -> torch.Tensor:
    """Row ``query - key + keys - 1`` on each axis, one pair after the other."""
    offsets = [
        [
            tuple(a - b + own - 1 for a, b, own in zip(q, k, key_grid, strict=True))
            for k in keys.tolist()
        ]
        for q in queries.tolist()
    ]
    rows = torch.stack([torch.stack([table[offset] for offset in row]) for row in offsets])
    return rows.permute(2, 0, 1)


@pytest.mark.parametrize(
    ("sizes", "keys"), [((300,), None), ((3, 5), None), ((2, 3, 4), None), ((3, 9), (5, 2))]
)
def test_a_number_for_each_offset(sizes, keys):
    bias = RelativePositionBias(5, sizes, key_grid=keys)
    other = keys or sizes
    assert bias.table.shape == (*(a + b - 1 for a, b in zip(sizes, other, strict=True)), 5)
    queries, others = grid(*sizes)[-25:], grid(*other)[:25]
    expected = by_index(bias.table, queries, others, other)
    assert torch.equal(bias(queries, others), expected)
    assert torch.equal(bias(queries + 7.25, others + 7.25), expected)
    assert len({*bias(grid(*sizes), grid(*other))[0].flatten().tolist()}) == math.prod(
        bias.table.shape[:-1]
    ), "every row is read"


@pytest.mark.peer("timm")
def test_rows_have_the_published_order():
    """Window 3 × 4: (Δh + 2) · 7 + (Δw + 3), 35 rows."""
    bias = RelativePositionBias(1, (3, 4))
    with torch.no_grad():
        bias.table.copy_(torch.arange(35.0).reshape(5, 7, 1))
    window = grid(3, 4)
    index = gen_relative_position_index((3, 4))
    assert torch.equal(bias(window, window)[0].long(), index)
    assert index.max() == 34


@pytest.mark.peer("torchvision")
@pytest.mark.parametrize("window", [[7, 7], [3, 5], [1, 4]])
def test_it_is_torchvisions_swin(window):
    peer = ShiftedWindowAttention(28, window, [0, 0], num_heads=14)
    bias = RelativePositionBias(14, window)
    offsets = bias.table.shape
    bias.load_state_dict({"table": peer.relative_position_bias_table.reshape(offsets)})
    out = bias(grid(*window), grid(*window))
    assert torch.equal(out, peer.get_relative_position_bias()[0])
    # windows keep their own places in the image: only differences count
    windows = torch.stack([grid(*window), grid(*window) + torch.tensor([70, 300])])
    assert torch.equal(bias(windows, windows)[1], out)


@pytest.mark.peer("torchvision")
@pytest.mark.parametrize("window", [[2, 3, 4], [3, 2, 2]])
def test_it_is_torchvisions_video_swin(window):
    peer = ShiftedWindowAttention3d(24, window, [0, 0, 0], num_heads=12)
    bias = RelativePositionBias(12, window)
    table = peer.relative_position_bias_table.reshape(bias.table.shape)
    bias.load_state_dict({"table": table})
    assert torch.equal(
        bias(grid(*window), grid(*window)), peer.get_relative_position_bias(window)[0]
    )


@pytest.mark.peer("timm")
@pytest.mark.parametrize("window", [(14, 14), (3, 5)])
def test_it_is_timms_beit_with_a_class_token(window):
    peer = Attention(48, num_heads=12, window_size=window)
    rows = peer.relative_position_bias_table
    assert rows is not None
    torch.nn.init.normal_(rows)
    bias = RelativePositionBias(12, window, prefix_rows=True)
    assert len(rows) == math.prod(bias.table.shape[:-1]) + 3
    bias.load_state_dict({"table": rows[:-3].reshape(bias.table.shape), "prefix": rows[-3:]})
    positions = join(absent(1, 2), grid(*window))
    assert torch.equal(bias(positions, positions), peer._get_rel_pos_bias()[0])


def test_pairs_with_several_prefix_tokens_share_three_numbers():
    bias = RelativePositionBias(2, (2, 3), prefix_rows=True)
    prefix = bias.prefix
    assert prefix is not None
    positions = join(absent(2, 2), grid(2, 3), absent(1, 2))
    out = bias(positions, positions)
    none = [0, 1, 8]
    for i in range(9):
        for j in range(9):
            row = 2 if i in none and j in none else 0 if i in none else 1 if j in none else None
            if row is not None:
                assert torch.equal(out[:, i, j], prefix[row])
    assert torch.equal(out[:, 2:8, 2:8], bias(grid(2, 3), grid(2, 3)))
    for index in ([0, 0], [4, 8], [1, 5]):
        one = bias.score_mod(positions, positions)(
            torch.tensor(0.0), *(torch.tensor(at) for at in (0, 1, *index))
        )
        assert one == out[1, index[0], index[1]]
    out.sum().backward()
    assert prefix.grad is not None
    assert prefix.grad[:, 0].tolist() == [18, 18, 9]


def test_an_axis_that_one_token_lacks_counts_as_no_offset():
    for prefix_rows in (False, True):
        bias = RelativePositionBias(2, (3, 4), prefix_rows=prefix_rows)
        out = bias(torch.tensor([[2.0, 3.0]]), torch.tensor([[math.nan, 1.0], [0.0, math.nan]]))
        assert torch.equal(out[:, 0, 0], bias.table[2, 3 + 2])
        assert torch.equal(out[:, 0, 1], bias.table[2 + 2, 3])
        nothing = bias(torch.tensor([[2.0, math.nan]]), torch.tensor([[math.nan, 1.0]]))
        assert not nothing.any(), "no axis is shared"


@pytest.mark.parametrize(
    ("moved", "offset"),
    [((3, 0), r"\(3.0, -1.0\)"), ((-5, 2), r"\(-5.0, 0.0\)"), ((0, 0.5), r"\(0.0, -0.5\)")],
)
def test_offsets_without_a_number_are_refused(unchecked, moved, offset):
    bias = RelativePositionBias(2, (3, 4), prefix_rows=True)
    queries = torch.tensor(moved) + torch.zeros(1, 2)
    message = f"are {offset} apart, .* differences of whole positions on the grid 3 × 4 only"
    for call in (bias, bias.score_mod):
        with pytest.raises(ValueError, match=message):
            call(queries, grid(1, 4)[[2, 1, 3]] if moved[0] < 0 else grid(1, 4)[[1, 2]])
    other = RelativePositionBias(2, (4,), key_grid=(2,))
    with pytest.raises(ValueError, match="grid 4 for queries and 2 for keys only: resize"):
        other(sequence(4), sequence(3))


def test_offsets_without_a_number_give_nan_where_looking_is_not_free(monkeypatch):
    bias = RelativePositionBias(2, (2, 3))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    keys = torch.tensor([[0.0, 0.0], [0, 3], [2, 0], [0, 0.5], [-1, -2], [math.nan, math.nan]])
    out = bias(torch.zeros(1, 2), keys)[0, 0]
    assert out.isnan().tolist() == [False, True, True, True, False, False]


def test_resizing_is_that_of_a_table_of_offsets():
    bias = RelativePositionBias(3, (3, 5), prefix_rows=True)
    table, rows = bias.table, bias.table.detach().clone()
    bias.resize((3, 5))
    assert torch.equal(bias.table, rows)
    bias.resize((6, 4))
    assert bias.table is table and bias.axes == bias.grid == (6, 4)
    expected = bias_table(rows.flatten(0, 1), (3, 5), (6, 4))
    assert torch.equal(bias.table.flatten(0, 1), expected)
    assert bias(grid(6, 4), grid(6, 4)).shape == (3, 24, 24)


def test_a_smaller_window_may_keep_the_numbers_of_its_offsets():
    whole = RelativePositionBias(3, (7, 7), resampling=Resampling(fit="center"))
    small = RelativePositionBias(3, (4, 4), resampling=Resampling(fit="center"))
    small.load_state_dict(whole.state_dict())
    assert torch.equal(small(grid(4, 4), grid(4, 4)), whole(grid(4, 4), grid(4, 4)))


def test_weights_of_another_window_are_resized_as_they_are_loaded(caplog):
    old = RelativePositionBias(3, (4, 8), prefix_rows=True)
    new = RelativePositionBias(3, (8, 4), prefix_rows=True)  # as many rows
    model = torch.nn.ModuleDict({"bias": new})
    stored = {f"bias.{name}": own for name, own in old.state_dict().items()}
    with caplog.at_level(logging.WARNING, "mmpos"):
        model.load_state_dict(stored)
    assert "bias.table: resized from 7 × 15 offsets to 15 × 7, for the grid 8 × 4" in caplog.text
    expected = bias_table(old.table.detach().flatten(0, 1), (4, 8), (8, 4))
    assert torch.equal(new.table.flatten(0, 1), expected)
    assert new.prefix is not None and old.prefix is not None
    assert torch.equal(new.prefix, old.prefix)
    with pytest.raises(RuntimeError, match="size mismatch for table"):
        new.load_state_dict({**new.state_dict(), "table": torch.zeros(15, 7, 4)})


def test_queries_and_keys_of_two_grids_are_resized_together(unchecked):
    bias = RelativePositionBias(3, (4, 6), key_grid=(2, 3))
    with pytest.raises(ValueError, match="two grids: pass key_grid too"):
        bias.resize((8, 12))
    bias.resize((8, 12), key_grid=(4, 6))
    assert bias.table.shape == (11, 17, 3)
    assert bias(grid(8, 12), grid(4, 6)).shape == (3, 96, 24)
    with pytest.raises(ValueError, match=r"grid of 2 axes, got \(8,\)"):
        bias.resize((8,), key_grid=(4,))


@pytest.mark.parametrize(
    ("axes", "arguments", "error", "message"),
    [
        (2, {}, TypeError, r"needs its grid, .* such as \(7, 7\) or \(2,\), got 2"),
        ((4, 4), {"key_grid": (4,)}, ValueError, r"key_grid must have 2 sizes.*got \(4,\)"),
        ((4, 4), {"key_grid": (4, 0)}, ValueError, r"2 sizes of 1 or more.*got \(4, 0\)"),
        ((4, 0), {}, ValueError, "axes must be a whole number of 1 or more"),
        ((4, 4), {"resampling": Resampling(fit="crop")}, ValueError, "fit must be.*got 'crop'"),
        (
            (4, 4),
            {"resampling": Resampling(fit="center"), "key_grid": (2, 2)},
            ValueError,
            "center where queries and keys have one grid",
        ),
    ],
)
def test_bad_arguments(unchecked, axes, arguments, error, message):
    with pytest.raises(error, match=message):
        RelativePositionBias(3, axes, **arguments)


def test_it_is_rebuilt_from_its_spec():
    bias = RelativePositionBias(3, [4, 6], key_grid=[2, 3], prefix_rows=True)
    bias.resize((5, 6), (3, 3))
    again = mmpos.build(bias.spec())
    assert repr(again) == repr(bias) and again.table.shape == bias.table.shape
    assert mmpos.build(RelativePositionBias(3, (4, 6)).spec()).resampling == Resampling()
