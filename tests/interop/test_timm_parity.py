"""At 1.5 × and on a rectangle: parameters, buffers and output are those of timm where it is right.

timm's own ways are `set_input_size`, `dynamic_img_size`, and models that take any size. It is wrong
for tables of offsets of which an axis stays or shrinks, or grows more than twofold, which here are
held against BEiT's formula in numpy, and for the scale of Swin V2.
"""

import copy

import pytest
import timm
import torch

from mmpos.interop.timm import describe, resize
from mmpos.interop.timm.parts import tables

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:timm.layers.interpolate")

PLAIN = ["vit", "deit", "registers", "gap", "hybrid", "eva02", "pe", "rope", "rope_mixed_ape"]
BIASES = ["beit", "beit_shared", "relpos_bias", "swin", "coatnet", "maxvit_tf"]
SET = [*PLAIN, "dinov3", *BIASES, "relpos", "srelpos", "swinv2_cr", "maxvit_mlp", "msra"]
FREE = [
    "sam",
    "sam2",
    "naflex",
    "naflex_square",
    "naflex_factorized",
    "tiny_vit",
    "clip_pool",
    "xcit",
    "twins",
]
SHAPES = {"larger": lambda side: (side * 3 // 2,) * 2, "rectangle": lambda side: (side, 2 * side)}
shapes = pytest.mark.parametrize("shape", SHAPES)


def target(model, shape: str) -> tuple[int, ...]:
    return SHAPES[shape]((describe(model).image_size or (64, 64))[0])


def named(model) -> dict:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[table.parameter]: table for table in tables(model)}


@shapes
@pytest.mark.parametrize("name", SET)
def test_as_set_input_size(name, shape, make, alike, spread):
    ours = make(name)
    theirs, size = copy.deepcopy(ours), target(ours, shape)
    before = {key: (table.parameter.clone(), table.grid) for key, table in named(ours).items()}
    resize(ours, size)
    theirs.set_input_size(img_size=size)
    if shape == "rectangle" or name == "coatnet":
        for key, table in named(theirs).items():
            data, grid = before[key]
            if "bias_table" in key and data.ndim == 2:
                extra = len(data) - (2 * grid[0] - 1) * (2 * grid[1] - 1)
                table.parameter.data = spread(data, grid, table.grid, extra)
    assert ours._model_args == theirs._model_args
    assert ours._traits == theirs._traits
    alike(ours, theirs, size)


def test_tables_of_an_axis_that_stays_are_where_timm_is_wrong(make, spread):
    """The columns of a BEiT table that only grows in height: 0.7 of a cell off in timm's."""
    from timm.layers.pos_embed_rel import resize_rel_pos_bias_table

    columns = torch.arange(27.0).repeat(27).unsqueeze(1)
    timms = resize_rel_pos_bias_table(columns, (20, 14), (39 * 27, 1), (14, 14))
    formula = spread(columns, (14, 14), (20, 14))
    assert (timms - formula).abs().max() > 0.7
    torch.testing.assert_close(formula, torch.arange(27.0).repeat(39).unsqueeze(1))


@shapes
@pytest.mark.parametrize("name", ["vit", "registers", "eva02", "pe", "rope", "rope_mixed_ape"])
def test_as_dynamic_img_size(name, shape, make, image, out):
    ours, dynamic = make(name), make(name, dynamic_img_size=True)
    size = target(ours, shape)
    x = image(*size)
    resize(ours, size)
    torch.testing.assert_close(out(ours, x), out(dynamic, x), rtol=1e-4, atol=1e-5)
    resize(dynamic, size)
    torch.testing.assert_close(out(ours, x), out(dynamic, x), rtol=1e-4, atol=1e-5)


@shapes
@pytest.mark.parametrize("name", ["swin", "swinv2", "swinv2_cr"])
def test_windows_that_are_kept_are_those_of_dynamic_img_size(name, shape, make, image, out):
    ours, dynamic = make(name), make(name, dynamic_img_size=True)
    size = target(ours, shape)
    window = 4 if name == "swinv2_cr" else 8
    resize(ours, size, window_size=window)
    x = image(*size)
    torch.testing.assert_close(out(ours, x), out(dynamic, x), rtol=1e-4, atol=1e-5)


@shapes
@pytest.mark.parametrize("name", FREE)
def test_as_the_model_does_itself_at_each_pass(name, shape, make, image, out):
    model = make(name)
    size = target(model, shape)
    x = image(*size)
    expected = out(model, x)
    resize(model, size)
    torch.testing.assert_close(out(model, x), expected, rtol=1e-4, atol=1e-5)


@shapes
def test_swin_v2_stays_on_the_scale_of_the_windows_it_knows(shape, make, alike):
    ours = make("swinv2")
    size = target(ours, shape)
    resize(ours, size)
    windows = ours._model_args["window_size"]
    known = ((8, 8), (8, 8))
    assert ours._model_args["pretrained_window_sizes"] == known
    built = make("swinv2", img_size=size, window_size=windows, pretrained_window_sizes=known)
    built.load_state_dict(ours.state_dict())
    alike(ours, built, size)
    squeezed = make("swinv2", img_size=size, window_size=windows)
    table = "layers.0.blocks.0.attn.relative_coords_table"
    assert not torch.allclose(squeezed.get_buffer(table), ours.get_buffer(table), atol=0.1)


@pytest.mark.parametrize("name", ["swinv2", "relpos"])
def test_offsets_keep_the_coordinates_that_their_mlp_knows(name, make):
    more = {"rel_pos_type": "mlp_swin"} if name == "relpos" else {}
    model = make(name, **more)
    buffer = "relative_coords_table" if name == "swinv2" else "rel_coords_log"
    before = [value for key, value in model.named_buffers() if buffer in key]
    resize(model, target(model, "rectangle"))
    after = [value for key, value in model.named_buffers() if buffer in key]
    for old, new in zip(before, after, strict=True):
        (_, height, width), (_, tall, wide) = ((0, *x.squeeze(0).shape[:2]) for x in (old, new))
        top, left = (tall - height) // 2, (wide - width) // 2
        kept = new.squeeze(0)[top : top + height, left : left + width]
        torch.testing.assert_close(kept, old.squeeze(0))
        assert wide > width


@pytest.mark.parametrize("name", ["vit", "eva02", "beit", "relpos", "swin"])
def test_another_patch_size(name, make, alike, spread):
    ours = make(name)
    size, patch = target(ours, "larger"), ours.patch_embed.patch_size[0] * 2
    theirs, kernel = copy.deepcopy(ours), ours.patch_embed.proj.weight
    before = {key: (table.parameter.clone(), table.grid) for key, table in named(ours).items()}
    described = resize(ours, size, patch)
    assert described.patch_size == (patch, patch) and ours.patch_embed.proj.weight is kernel
    theirs.set_input_size(img_size=size, patch_size=(patch, patch))
    for key, table in named(theirs).items():
        if "bias_table" in key:
            data, grid = before[key]
            extra = len(data) - (2 * grid[0] - 1) * (2 * grid[1] - 1)
            table.parameter.data = spread(data, grid, table.grid, extra)
    for info, wrong in zip(ours.feature_info, theirs.feature_info, strict=True):
        if name != "swin":  # timm leaves these as they were
            assert info["reduction"] == 2 * wrong["reduction"]
            wrong["reduction"] *= 2
    alike(ours, theirs, size)
    assert ours.feature_info[-1]["reduction"] == patch * (2 if name == "swin" else 1)


def test_it_can_be_made_anew_from_what_timm_noted(make, alike):
    plain = ("vit", "registers", "beit", "levit", "pit", "naflex", "naflex_square")
    for name in (*plain, "swin", "swinv2", "maxvit_mlp"):
        model = make(name)
        size = target(model, "rectangle")
        resize(model, size)
        anew = timm.create_model(model.pretrained_cfg["architecture"], **model._model_args).eval()
        anew.load_state_dict(model.state_dict())
        alike(model, anew, size)
        assert timm.models.get_model_input_config(model)["input_size"] == (3, *size)
