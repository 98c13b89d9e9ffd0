import math

import pytest
import torch
from timm.models.naflexvit import NaFlexEmbeds
from transformers import Pix2StructVisionConfig, ReformerConfig
from transformers.models.detr.modeling_detr import DetrLearnedPositionEmbedding
from transformers.models.pix2struct.modeling_pix2struct import Pix2StructVisionEmbeddings
from transformers.models.reformer.modeling_reformer import AxialPositionEmbeddings

import mmpos
from mmpos.additive import FactorizedEncoding
from mmpos.coordinates import Centered, Index, Scaled
from mmpos.positions import absent, grid, join, sequence
from mmpos.resample import Resampling

COMBINE = ["sum", "concat", "product"]


def formula(tables, position, combine):
    """One token's vector in plain Python; a missing coordinate is NaN."""
    rows = [
        None if math.isnan(x) else table[int(x)].tolist()
        for table, x in zip(tables, position, strict=True)
    ]
    if combine == "concat":
        blocks = [row or [0.0] * table.shape[-1] for row, table in zip(rows, tables, strict=True)]
        return [x for block in blocks for x in block]
    known = [row for row in rows if row is not None]
    if not known:
        return [0.0] * tables[0].shape[-1]
    merge = math.prod if combine == "product" else sum
    return [merge(values) for values in zip(*known, strict=True)]


@pytest.mark.parametrize("combine", COMBINE)
@pytest.mark.parametrize("sizes", [(700,), (5, 290), (2, 3, 270)])
def test_formula(combine, sizes):
    encoding = FactorizedEncoding(13, sizes, combine=combine, std=1.0)
    cells = grid(*sizes)[torch.randperm(math.prod(sizes))[:50]].float()
    for axis in range(len(sizes)):
        cells[axis, axis] = math.nan
    positions = join(absent(2, len(sizes)), cells)
    expected = torch.tensor([formula(encoding.table, row, combine) for row in positions.tolist()])
    torch.testing.assert_close(encoding(positions), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(encoding(positions), expected, rtol=1e-6, atol=1e-7)


def test_one_axis_is_a_learned_table_whatever_is_combined():
    for combine in COMBINE:
        encoding = FactorizedEncoding(6, (300,), combine=combine)
        assert torch.equal(encoding(sequence(300)), encoding.table[0])


def test_the_features_of_each_axis():
    widths = [
        table.shape[-1] for table in FactorizedEncoding(14, (2, 3, 4), combine="concat").table
    ]
    assert widths == [6, 4, 4]
    encoding = FactorizedEncoding(14, (2, 3, 4), combine="concat", split=(2, 5, 7))
    out = encoding(torch.tensor([[1, 2, 3]]))[0]
    parts = out.split([2, 5, 7])
    assert all(torch.equal(a, t[-1]) for a, t in zip(parts, encoding.table, strict=True))


@pytest.mark.parametrize("combine", COMBINE)
def test_initial_rows_give_the_deviation_that_was_asked(combine):
    encoding = FactorizedEncoding(64, (60, 50), combine=combine, std=0.05)
    kept = 0.88  # of a normal distribution cut at two deviations
    std = {"sum": 0.05 * math.sqrt(2), "concat": 0.05, "product": 0.05 * kept}[combine] * kept
    assert encoding(grid(60, 50)).std().item() == pytest.approx(std, rel=0.05)
    bound = 2 * (math.sqrt(0.05) if combine == "product" else 0.05)
    assert all(table.abs().max() <= bound for table in encoding.table)


@pytest.mark.parametrize("combine", COMBINE)
def test_gradients_reach_the_rows_of_known_coordinates_only(combine):
    encoding = FactorizedEncoding(6, (3, 4), combine=combine)
    positions = torch.tensor([[2.0, math.nan], [math.nan, 1.0], [math.nan, math.nan]])
    encoding(positions).sum().backward()
    rows, columns = (table.grad for table in encoding.table)
    assert rows is not None and columns is not None
    assert rows[2].eq(1).all() and columns[1].eq(1).all()
    assert not rows[:2].any() and not columns[[0, 2, 3]].any()


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ([3, 0], r"position \(3, 0\) is no cell of the table.*whole position of the grid 3 × 4"),
        ([0, -1], r"position \(0, -1\) is no cell"),
        ([math.nan, 4.0], r"position \(nan, 4.0\) is no cell"),
        ([math.nan, 0.5], r"position \(nan, 0.5\) is no cell"),
    ],
)
@pytest.mark.parametrize("combine", COMBINE)
def test_positions_that_are_no_cells(position, message, combine, monkeypatch):
    encoding = FactorizedEncoding(6, (3, 4), combine=combine)
    positions = torch.tensor([[0, 0], position])
    with pytest.raises(ValueError, match=message):
        encoding(positions)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    out = encoding(positions)
    assert out[1].isnan().any() and not out[0].isnan().any()


@pytest.mark.parametrize("combine", COMBINE)
def test_between_rows_each_axis_is_read_on_its_own(combine):
    encoding = FactorizedEncoding(6, (3, 4), combine=combine, coordinates=Index(), std=1.0)
    rows, columns = (table.detach() for table in encoding.table)
    y, x = rows[:2].mean(0), columns[2] * 0.75 + columns[3] * 0.25
    out = encoding(torch.tensor([[0.5, 2.25], [math.nan, 2.25], [0.5, math.nan]]))
    merged = {"sum": y + x, "concat": torch.cat((y, x)), "product": y * x}[combine]
    torch.testing.assert_close(out[0], merged, rtol=0, atol=1e-6)
    zero = torch.zeros(3)
    alone = {"concat": (torch.cat((zero, x)), torch.cat((y, zero)))}.get(combine, (x, y))
    torch.testing.assert_close(out[1:], torch.stack(alone), rtol=0, atol=1e-6)


def naflex(sizes, encoding, **named):
    """What timm's model adds to the patches of a grid, and ``encoding`` with its tables."""
    peer = NaFlexEmbeds(
        proj_type="linear",
        patch_size=2,
        embed_dim=24,
        pos_embed="factorized",
        pos_embed_grid_size=encoding.grid,
        **named,
    )
    for weight in (peer.proj.weight, peer.proj.bias):
        torch.nn.init.zeros_(weight)
    patches = torch.zeros(1, math.prod(sizes), 12)
    out = peer(patches, patch_coord=grid(*sizes).unsqueeze(0))[0][0, peer.num_prefix_tokens :]
    for table, weight in zip(encoding.table, (peer.pos_embed_y, peer.pos_embed_x), strict=True):
        table.data = weight.data[0]
    return out.detach()


@pytest.mark.peer("timm")
@pytest.mark.parametrize("sizes", [(4, 6), (9, 5), (2, 13)])
@pytest.mark.parametrize(
    "way",
    [
        {"dynamic": True, "resampling": Resampling(mode="bilinear", antialias=False)},
        {"coordinates": Scaled(offset=0.5)},
        {"coordinates": Centered()},
    ],
)
def test_timms_naflex_resizes_each_axis(sizes, way):
    encoding = FactorizedEncoding(24, (4, 6), **way)
    theirs = naflex(sizes, encoding)
    torch.testing.assert_close(encoding(grid(*sizes), extent=sizes), theirs, rtol=0, atol=1e-6)


@pytest.mark.peer("timm")
@pytest.mark.parametrize("sizes", [(6, 6), (9, 5), (2, 13)])
def test_timms_naflex_keeps_proportions_by_the_longest_side(sizes):
    encoding = FactorizedEncoding(24, (6, 6), coordinates=Centered(side="longest"))
    theirs = naflex(sizes, encoding, pos_embed_ar_preserving=True)
    torch.testing.assert_close(encoding(grid(*sizes), extent=sizes), theirs, rtol=0, atol=1e-6)


@pytest.mark.peer("transformers")
def test_pix2struct_sums_rows_and_columns():
    config = Pix2StructVisionConfig(
        hidden_size=24, patch_embed_hidden_size=3, seq_len=300, dropout_rate=0.0
    )
    peer = Pix2StructVisionEmbeddings(config)
    for weight in peer.patch_projection.parameters():
        torch.nn.init.zeros_(weight)
    cells = grid(2, 290) + torch.tensor([5, 7])
    theirs = peer(torch.cat((cells, torch.zeros(580, 3)), -1).unsqueeze(0))[0]
    encoding = FactorizedEncoding(24, (300, 300))
    encoding.table[0].data = peer.row_embedder.weight.data
    encoding.table[1].data = peer.column_embedder.weight.data
    assert torch.equal(encoding(cells), theirs)


@pytest.mark.peer("transformers")
def test_reformer_puts_its_axes_side_by_side():
    config = ReformerConfig(
        axial_pos_shape=(5, 7),
        axial_pos_embds_dim=(10, 14),
        hidden_size=24,
        hidden_dropout_prob=0.0,
    )
    peer = AxialPositionEmbeddings(config).train()
    for weight in peer.weights:
        torch.nn.init.normal_(weight)
    theirs = peer(torch.arange(35).unsqueeze(0))[0]
    encoding = FactorizedEncoding(24, (5, 7), combine="concat", split=(10, 14))
    for table, weight in zip(encoding.table, peer.weights, strict=True):
        table.data = weight.data.flatten(0, 1)
    assert torch.equal(encoding(grid(5, 7)), theirs)


@pytest.mark.peer("transformers")
def test_detr_puts_columns_before_rows():
    peer = DetrLearnedPositionEmbedding(12)
    theirs = peer(torch.Size((1, 3, 4, 7)), torch.device("cpu"), torch.float32)[0].flatten(1).T
    encoding = FactorizedEncoding(24, (50, 50), combine="concat")
    encoding.table[0].data = peer.row_embeddings.weight.data
    encoding.table[1].data = peer.column_embeddings.weight.data
    rows_first = theirs.roll(12, dims=-1)
    assert torch.equal(encoding(grid(4, 7)), rows_first)


def test_it_is_rebuilt_from_its_spec():
    encoding = FactorizedEncoding(9, [2, 3], combine="concat", split=[4, 5], std=0.1)
    twin = mmpos.build(encoding.spec())
    assert repr(twin) == repr(encoding)
    twin.load_state_dict(encoding.state_dict())
    assert torch.equal(twin(grid(2, 3)), encoding(grid(2, 3)))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"axes": 2}, TypeError, r"a table needs its grid.*got 2"),
        ({"axes": (4, 0)}, ValueError, r"a grid of such sizes, got \(4, 0\)"),
        ({"combine": "mean"}, ValueError, "combine must be one of.*'product'.*got 'mean'"),
        ({"split": (2, 4)}, ValueError, r"split=\(2, 4\) divides.*a sum gives all 6.*'concat'"),
        ({"combine": "concat", "split": (2, 5)}, ValueError, r"split=\(2, 5\) must.*6 in all"),
        ({"combine": "concat", "split": (6,)}, ValueError, r"split=\(6,\) must give each of the 2"),
        ({"combine": "concat", "split": (6, 0)}, ValueError, r"split=\(6, 0\).*1 feature or more"),
        ({"combine": "concat", "dim": 1}, ValueError, "dim=1 cannot be divided among 2 axes"),
    ],
)
def test_bad_arguments(unchecked, arguments, error, message):
    with pytest.raises(error, match=message):
        FactorizedEncoding(**{"dim": 6, "axes": (2, 3), **arguments})
