"""Sizes and families that cannot be: one line that says why, and a model that is what it was."""

import pytest
import timm
import torch
from torch import nn
from torch.optim import AdamW

from mmpos.interop.timm import describe, resize
from mmpos.interop.timm.change import Change
from mmpos.interop.timm.parts import tables

SIZES = [
    ("vit", 8, "image_size 8 × 8 is less than a patch of 16 × 16"),
    ("gcvit", 240, "no multiple of 32 × 32, as stage 0.*: give 224 × 224 or 256 × 256"),
    ("hiera", (80, 96), "no multiple of 32 × 32.*: give 64 × 96 or 96 × 96"),
    ("sam2", 72, "no multiple of 16 × 16, as a tiled table needs: give 64 × 64 or 80 × 80"),
    ("efficientformerv2", 80, "no multiple of 32 × 32"),
    ("coatnet", 80, "no multiple of 32 × 32, as halving it in each stage needs"),
    ("coat", 80, "no multiple of 32 × 32, as the exchange between four scales"),
    ("nest", (64, 128), "NesT puts square blocks into a square"),
    ("nest", 72, "no multiple of 16 × 16, as a cut into 4 × 4 blocks needs"),
    ("crossvit", 250, "not of whole patches in each branch.*nearest to 250 that is, is 240"),
    ("tnt", 72, "no multiple of 16 × 16"),
    ("naflex", 72, "no multiple of 16 × 16"),
    ("sam", 72, "no multiple of 16 × 16"),
    ("visformer", 8, "less than a patch"),
    ("clip_pool", 80, "the model cannot take an image of 80 × 80"),
]


@pytest.mark.parametrize("name,size,said", SIZES)
def test_a_size_that_cannot_be(name, size, said, make, image, out):
    model = make(name)
    own = describe(model).image_size or (64, 64)
    before = {key: (value, value.clone()) for key, value in model.state_dict().items()}
    described, kept = describe(model), [dict(vars(module)) for module in model.modules()]
    expected = out(model, image(*own))
    with pytest.raises(ValueError, match=said) as raised:
        resize(model, size)
    assert "\n" not in str(raised.value)
    assert describe(model) == described
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key][1])
    for module, attributes in zip(model.modules(), kept, strict=True):
        assert vars(module).keys() == attributes.keys()
    assert torch.equal(out(model, image(*own)), expected)


def test_windows_that_do_not_divide_the_features(make):
    model = make("maxvit_mlp", img_size=128)
    with pytest.raises(ValueError, match=r"stage 0 has 24 × 32 features.*windows of 5 × 5"):
        resize(model, (96, 128), window_size=5)
    assert describe(model).image_size == (128, 128)
    assert resize(model, (192, 128), window_size=(3, 4)).schemes[0].grid == (3, 4)


def test_a_dynamic_patch_embedding_takes_whole_patches_only(make, image, out):
    with pytest.raises(ValueError, match=r"no multiple of 16 × 16.*give 64 × 64 or 80 × 80"):
        resize(make("vit", dynamic_img_size=True), 72)
    strict = make("vit")  # as timm: what is left below a patch is dropped
    assert resize(strict, 72).grid == (4, 4) and out(strict, image(72, 72)).shape == (1, 5)


def test_families_that_cannot_change():
    mixer = timm.create_model("mixer_s16_224", device="meta")
    with pytest.raises(ValueError, match="MlpMixer cannot be resized: its token-mixing layers"):
        resize(mixer, 256)
    with pytest.raises(ValueError, match="MetaFormer is not known; if it takes any size"):
        resize(timm.create_model("poolformer_s12", device="meta"), 256)


@pytest.mark.parametrize("size", [(224,), "224", 224.0, (224, 2.0), (1, 2, 3), None, True])
def test_no_size(size, make, unchecked):
    with pytest.raises(TypeError, match=r"image_size is a whole number or \(height, width\), got"):
        resize(make("vit"), size)


@pytest.mark.parametrize("size", [0, -16, (64, 0)])
def test_sizes_below_one(size, make):
    with pytest.raises(ValueError, match="image_size must be 1 or more, got"):
        resize(make("vit"), size)


def test_patches_and_windows_of_models_that_have_none_to_choose(make):
    with pytest.raises(ValueError, match="patch_size cannot change in LevitDistilled"):
        resize(make("levit"), 64, 8)
    with pytest.raises(ValueError, match=r"patch_size cannot change: .* convolutional stem"):
        resize(make("hybrid"), 128, 4)
    with pytest.raises(ValueError, match="window_size cannot be chosen in VisionTransformer"):
        resize(make("vit"), 64, window_size=7)
    with pytest.raises(ValueError, match="window_size is one number or 4"):
        resize(make("tiny_vit"), 64, window_size=(7, 7))
    with pytest.raises(
        ValueError, match="SwinTransformer cannot be resized to 64 × 64: Expected 2"
    ):
        resize(make("swin"), 64, window_size=(4, 4, 4))


def test_a_resampling_of_other_axes_changes_nothing(make):
    from mmpos.resample import Resampling

    model = make("vit")
    before = model.pos_embed.clone()
    with pytest.raises(ValueError, match=r"fit .* is for 1 axes"):
        resize(model, 96, 8, resampling=Resampling(fit=("crop",)))
    assert torch.equal(model.pos_embed, before)
    assert model.patch_embed.proj.kernel_size == (16, 16) == model.patch_embed.patch_size


def test_an_optimizer_is_what_it_was_after_a_refusal(make, image):
    model = make("maxvit_mlp").train()
    optimizer = AdamW(model.parameters())
    model(image(64, 64, batch=2)).sum().backward()
    optimizer.step()
    held = [
        (key, value)
        for state in optimizer.state_dict()["state"].values()
        for key, value in state.items()
    ]
    with pytest.raises(ValueError, match="windows"):
        resize(model, 96, window_size=5, optimizer=optimizer)
    again = [value for state in optimizer.state.values() for value in state.values()]
    assert all(one is other for (_, one), other in zip(held, again, strict=True))


def test_a_change_that_fails_leaves_no_trace(make):
    model = make("swin")
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(ZeroDivisionError), Change(model, None, None):
        model.patch_embed.proj.new = 1
        model.feature_info[0]["reduction"] = 0
        model.layers[0].blocks[0].attn.relative_position_index = torch.zeros(1)
        model.head = nn.Identity()
        model.norm.weight.data = torch.zeros(2)
        1 / 0  # noqa: B018
    assert [vars(module).keys() for module in model.modules()] == [each.keys() for each in before]
    assert model.feature_info[0]["reduction"] == 4 and len(model.norm.weight) == 24
    assert model.layers[0].blocks[0].attn.relative_position_index.shape == (64, 64)


def test_an_optimizer_is_what_it_was_after_a_change_that_fails(make, image):
    model = make("vit").train()
    optimizer = AdamW(model.parameters())
    model(image(64, 64, batch=2)).sum().backward()
    optimizer.step()
    held = {p: dict(state) for p, state in optimizer.state.items()}
    gradient = model.pos_embed.grad
    with pytest.raises(ZeroDivisionError), Change(model, None, optimizer) as change:
        change.table(tables(model)[0], (6, 6))
        change.kernel(model.patch_embed.proj, (8, 8))
        assert model.pos_embed.shape[1] == 37 and model.pos_embed.grad is None
        1 / 0  # noqa: B018
    assert model.pos_embed.grad is gradient and model.pos_embed.shape[1] == 17
    assert model.patch_embed.proj.stride == (16, 16)
    for parameter, state in held.items():
        assert optimizer.state[parameter].keys() == state.keys()
        assert all(optimizer.state[parameter][key] is value for key, value in state.items())


def test_a_version_of_timm_without_the_method(make, monkeypatch):
    model = make("beit")
    monkeypatch.delattr(type(model), "set_input_size")
    with pytest.raises(ValueError, match="this version of timm cannot set the size of Beit"):
        resize(model, 96)
