"""Families that timm cannot resize, against a model that timm builds at the new size.

Its tables are resized by torch's own `interpolate` on the right grid, or by a formula; indices,
masks and coordinates are timm's own, or counted pair by pair where timm cannot build the model.
"""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from timm.layers.patch_embed import resample_patch_embed
from torch.nn.functional import interpolate

from mmpos.interop.timm import describe, resize
from mmpos.resample import Resampling

SHAPES = {"larger": lambda side: (side * 3 // 2,) * 2, "rectangle": lambda side: (side, 2 * side)}
shapes = pytest.mark.parametrize("shape", SHAPES)


def picture(cells, new, **dialect):
    """``[*grid, D]`` on another grid; bicubic with antialias unless told."""
    dialect = {"mode": "bicubic", "antialias": True, **dialect}
    first = cells.movedim(-1, 0).unsqueeze(0)
    return interpolate(first, size=tuple(new), **dialect)[0].movedim(0, -1)


def rows(data, old, new, prefix=0):
    head, cells = data[:, :prefix], data[:, prefix:].reshape(*old, -1)
    return torch.cat((head, picture(cells, new).reshape(1, math.prod(new), -1)), 1)


def first(data, old, new):
    return picture(data[0].movedim(0, -1), new).movedim(-1, 0).unsqueeze(0)


def last(data, old, new):
    return picture(data[0], new).unsqueeze(0)


def blocks(data, old, new):
    return torch.stack([rows(data[:, i], old, new) for i in range(data.shape[1])], 1)


def distances(data, old, new):
    """The table of all signed offsets, filled pair by pair, resized, and read from its centre."""
    signed = data.new_empty(2 * old[0] - 1, 2 * old[1] - 1, len(data))
    for y, x in itertools.product(range(1 - old[0], old[0]), range(1 - old[1], old[1])):
        signed[y + old[0] - 1, x + old[1] - 1] = data[:, abs(y) * old[1] + abs(x)]
    wide = picture(signed, [2 * side - 1 for side in new])
    cells = itertools.product(range(new[0]), range(new[1]))
    return torch.stack([wide[new[0] - 1 + y, new[1] - 1 + x] for y, x in cells], 1)


def axis(data, old, new):
    return interpolate(data.T.unsqueeze(0), size=2 * new - 1, mode="linear")[0].T


def offsets(data, old, new):
    return picture(data, [2 * side - 1 for side in new])


def line(means, window):
    """Straight lines through the means of windows along the first axis, and beyond the outer."""
    means = np.concatenate((2 * means[:1] - means[1:2], means, 2 * means[-1:] - means[-2:-1]))
    centres = (np.arange(len(means)) - 0.5) * window
    places = np.arange((len(means) - 2) * window) + 0.5
    flat = means.reshape(len(means), -1)
    columns = [np.interp(places, centres, column) for column in flat.T]
    return np.stack(columns, 1).reshape(-1, *means.shape[1:])


def windowed(data, old, new, window):
    cells = data[0].reshape(*old, -1).double().numpy()
    means = np.stack([strip.mean(0) for strip in np.split(cells, old[0] // window[0])])
    means = np.stack([strip.mean(1) for strip in np.split(means, old[1] // window[1], 1)], 1)
    smooth = line(means, window[0]).swapaxes(0, 1)
    rough = torch.from_numpy(cells - line(smooth, window[1]).swapaxes(0, 1))
    tile = torch.zeros(*window, cells.shape[-1], dtype=torch.float64)
    for y, x in itertools.product(*map(range, old)):
        tile[y % window[0], x % window[1]] += rough[y, x] / (math.prod(old) / math.prod(window))
    before, after = (tile.tile(g[0] // window[0], g[1] // window[1], 1) for g in (old, new))
    whole = picture(torch.from_numpy(cells) - before, new) + after
    return whole.reshape(1, math.prod(new), -1).float()


# for each model: parts of the names of its tables, how they are stored, and pixels a cell
ONE = partial(rows, prefix=1)
LEVIT = [("stages.0", distances, 16), ("downsample", distances, 16), ("stages.1.b", distances, 32)]
TABLES = {
    "cait": [("pos_embed", rows, 16)],
    "convit": [("pos_embed", rows, 16)],
    "tnt": [("patch_pos", ONE, 16)],
    "pit": [("pos_embed", first, lambda side: (side - 16) // 8 + 1)],
    "volo": [("pos_embed", last, 16)],
    "visformer": [("pos_embed1", first, 8), ("pos_embed2", first, 16), ("pos_embed3", first, 32)],
    "crossvit": [("pos_embed_0", ONE, 12), ("pos_embed_1", ONE, lambda side: side * 14 // 240)],
    "nest": [("pos_embed", blocks, 16)],
    "levit": LEVIT,
    "levit_conv": LEVIT,
    "efficientformerv2": [
        ("stages.2", distances, 32),
        ("downsample", distances, 16),
        ("stages.3.b", distances, 32),
    ],
    "botnet": [("stages.2", axis, 16), ("stages.3.0", axis, 16), ("stages.3.1", axis, 32)],
    "lambda": [("stages.2", offsets, 16), ("stages.3.0", offsets, 16), ("s.3.1", offsets, 32)],
    "gcvit": [("stages.2", None, 16), ("bias_table", None, 32)],
    "hiera": [("pos_embed", partial(windowed, window=(8, 8)), 4)],
    "sam": [("pos_embed", last, 16), ("blocks.1.attn.rel_pos", axis, 16)],
    "hiera_abswin": [],
    "coat": [],
    "coat_lite": [],
}
STORED = ("pos_emb", "patch_pos", "rel_pos", "attention_biases", "bias_table")


def grid(size, step):
    return tuple(step(side) if callable(step) else side // step for side in size)


def resized(name, state, old, new, spread):
    """A state dict with its tables on the grids of another size."""
    out = dict(state)
    for key, data in state.items():
        kinds = [kind for kind in TABLES[name] if kind[0] in key]
        if not kinds or not any(part in key for part in STORED) or "mlp" in key:
            continue
        _, form, step = kinds[0]
        before, after = grid(old, step), grid(new, step)
        if form is axis:
            place = 0 if "height" in key or key.endswith("_h") else 1
            before, after = before[place], after[place]
        out[key] = (form or spread)(data, before, after)
    return out


@shapes
@pytest.mark.parametrize("name", TABLES)
def test_as_built_at_the_size(name, shape, make, alike, spread):
    ours = make(name)
    old = describe(ours).image_size
    new = SHAPES[shape](old[0])
    if name == "nest" and shape == "rectangle":
        pytest.skip("squares only")
    state = resized(name, ours.state_dict(), old, new, spread)
    named = {"window_size": None} if name == "gcvit" else {}
    built = make(name, img_size=new, **named)
    built.load_state_dict(state)
    if name == "convit":
        cells = list(itertools.product(*map(range, grid(new, 16))))
        pairs = [[(k[1] - q[1], k[0] - q[0]) for k in cells] for q in cells]
        apart = torch.tensor([[(x, y, x * x + y * y) for x, y in row] for row in pairs]).float()
        for block in built.blocks[:2]:
            block.attn.rel_indices = apart.unsqueeze(0)
    resize(ours, new)
    alike(ours, built, new)


@pytest.mark.parametrize("name", ["cait", "convit", "sam"])
def test_another_patch_size(name, make, alike):
    ours, built = make(name), make(name, img_size=96, patch_size=32)
    state = ours.state_dict()
    kernel = "patch_embed.proj.weight"
    state[kernel] = resample_patch_embed(state[kernel], [32, 32])
    table = last if name == "sam" else rows
    state["pos_embed"] = table(state["pos_embed"], (4, 4), (3, 3))
    if name == "sam":
        for axis_name in ("h", "w"):
            key = f"blocks.1.attn.rel_pos_{axis_name}"
            state[key] = axis(state[key], 4, 3)
    built.load_state_dict(state)
    if name == "convit":
        built(torch.zeros(1, 3, 96, 96))  # forms its coordinates
    described = resize(ours, 96, 32)
    assert described.patch_size == (32, 32) and described.grid == (3, 3)
    alike(ours, built, (96, 96))
    assert ours._model_args["patch_size"] == (32, 32)


def test_another_resampling(make):
    plain = Resampling(mode="bilinear", antialias=False)
    vit, swin, mvit = make("vit"), make("swin"), make("mvitv2")
    table = vit.pos_embed.detach().clone()
    bias = swin.layers[0].blocks[0].attn.relative_position_bias_table.detach().clone()
    line = mvit.stages[0].blocks[0].attn.rel_pos_w.detach().clone()
    resize(vit, (96, 64), resampling=plain)
    cells = table[0, 1:].reshape(4, 4, -1)
    expected = picture(cells, (6, 4), mode="bilinear", antialias=False).reshape(24, -1)
    torch.testing.assert_close(vit.pos_embed[0, 1:], expected)
    resize(swin, 192, resampling=Resampling())
    bias = bias.reshape(15, 15, -1)
    expected = picture(bias, (23, 23)).reshape(23 * 23, -1)
    torch.testing.assert_close(
        swin.layers[0].blocks[0].attn.relative_position_bias_table, expected, atol=3e-5, rtol=0
    )
    resize(swin, 128, resampling=Resampling(fit="center"))  # the rows of its own offsets
    expected = expected.reshape(23, 23, -1)[4:-4, 4:-4].reshape(225, -1)
    torch.testing.assert_close(
        swin.layers[0].blocks[0].attn.relative_position_bias_table, expected, atol=3e-5, rtol=0
    )
    resize(mvit, 32, resampling=Resampling(fit=("resize", "crop")))
    torch.testing.assert_close(mvit.stages[0].blocks[0].attn.rel_pos_w, line[:15])


@shapes
def test_mvit(shape, make, alike):
    """timm builds squares only: its forward pass takes any table of the right length."""
    ours = make("mvitv2")
    state, old = ours.state_dict(), (64, 64)
    new = SHAPES[shape](64)
    built = make("mvitv2", img_size=max(new))
    for key, parameter in built.named_parameters():
        parameter.data = state[key]
        if "rel_pos" in key:
            place = 0 if key.endswith("h") else 1
            stage, block = int(key.split(".")[1]), int(key.split(".")[3])
            keys = 4 * 2 ** (stage if block else max(stage - 1, 0)) * (4, 2, 1, 1)[stage]
            step = min(4 * 2**stage, keys)  # the longer of queries and keys counts
            parameter.data = axis(state[key], old[place] // step, new[place] // step)
    for index, stage in enumerate(built.stages):
        stage.feat_size = tuple(side // (4 * 2**index) for side in new)
    resize(ours, new)
    alike(ours, built, new)


def test_efficientformer(make, alike):
    """Made for 7 × 7 cells only: the index of its pairs is counted here."""
    ours, built = make("efficientformer"), make("efficientformer")
    old, new = (7, 7), (6, 9)
    attention = built.stages[3].blocks[-1].token_mixer
    attention.attention_biases.data = distances(attention.attention_biases.data, old, new)
    cells = list(itertools.product(*map(range, new)))
    index = [[abs(q[0] - k[0]) * 9 + abs(q[1] - k[1]) for k in cells] for q in cells]
    attention.attention_bias_idxs, attention.resolution = torch.tensor(index), new
    resize(ours, (192, 288))
    alike(ours, built, (192, 288))
    for size in ((32, 160), (160, 32), (64, 64)):
        resize(ours, size)
        assert describe(ours).schemes[0].grid == (size[0] // 32, size[1] // 32)


def test_windows_of_tiny_vit(make, alike):
    """Tables are pictures of distances, as timm resizes them when weights are loaded."""
    from timm.models.tiny_vit import checkpoint_filter_fn

    ours = make("tiny_vit")
    built = make("tiny_vit", window_sizes=(7, 10, 20, 10))
    built.load_state_dict(checkpoint_filter_fn(ours.state_dict(), built), strict=False)
    resize(ours, 320, window_size=(7, 10, 20, 10))
    alike(ours, built, (320, 320))
    assert ours._model_args["window_sizes"] == (7, 10, 20, 10)
