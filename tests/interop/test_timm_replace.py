"""Encodings of mmpos within timm models: equal ones give timm's own output, and all comes back."""

import copy
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import timm
import torch
from torch import nn

import mmpos
from mmpos.bias import RelativePositionBias, ShawBias
from mmpos.coordinates import Centered, Scaled
from mmpos.interop.timm import describe, replace, resize, restore
from mmpos.interop.timm.attention import PLACED, Placed

PLAIN = ["vit", "registers", "gap", "hybrid", "eva02", "pe", "rope", "rope_mixed_ape", "dinov3"]
BIASED = ["beit", "beit_shared", "relpos", "relpos_bias", "srelpos"]
ROPE = partial(mmpos.RotaryEncoding, base=100)
LEARNED = mmpos.LearnedEncoding


def close(actual, expected):
    scale = expected.abs().max()
    torch.testing.assert_close(actual, expected, rtol=0, atol=float(1e-5 * scale))


def size_of(model):
    size = describe(model).image_size
    assert size is not None
    return size


@pytest.mark.parametrize("name", PLAIN + BIASED)
def test_attention_of_mmpos_gives_what_timms_gives(name, make, image, out):
    model = make(name)
    size = size_of(model)
    x = image(*size, batch=2)
    expected, weights = out(model, x), {k: id(v) for k, v in model.named_parameters()}
    if name in BIASED:
        replace(model, rotary=None)
    else:
        replace(model, bias=None)
    assert all(isinstance(block.attn, Placed) for block in model.blocks)
    close(out(model, x), expected)
    assert {k: id(v) for k, v in model.named_parameters()} == weights


def test_a_learned_table_of_mmpos_is_that_of_timm(make, image, out):
    model = make("gap")
    x, table = image(64, 64), model.pos_embed
    expected = out(model, x)
    encoding = LEARNED(24, (4, 4))
    encoding.table.data = table.data.view(4, 4, 24).clone()
    replace(model, additive=encoding)
    assert model.pos_embed is None
    close(out(model, x), expected)
    resize(model, (96, 128))
    encoded = out(model, image(96, 128))
    restore(model)
    close(out(model, image(96, 128)), encoded)


@pytest.mark.peer("timm")
def test_a_rotation_of_mmpos_is_that_of_timm(make, image, out):
    for name, rotary in (
        ("rope", partial(mmpos.RotaryEncoding, base=100, order=(1, 0))),
        ("eva02", partial(mmpos.RotaryEncoding, coordinates=Scaled((16, 16)))),
        (
            "dinov3",
            partial(
                mmpos.RotaryEncoding, base=100, layout="half", coordinates=Centered(turns=True)
            ),
        ),
    ):
        model = make(name)
        size = size_of(model)
        x = image(*size)
        expected = out(model, x)
        replace(model, rotary=rotary)
        assert model.rope is None
        close(out(model, x), expected)
        restore(model)
        wide = (size[0], 2 * size[1])
        resize(model, wide)
        x = image(*wide)
        expected = out(model, x)
        replace(model, rotary=rotary)
        close(out(model, x), expected)


@pytest.mark.peer("timm")
def test_mixed_rotations_of_mmpos_for_each_layer_are_those_of_timm(make, image, out):
    model = make("rope_mixed_ape")
    x, theirs = image(64, 64), model.rope.freqs
    expected = out(model, x)

    encodings = []
    for layer in range(2):
        encoding = mmpos.MixedRotaryEncoding(12, 2, heads=2)
        encoding.take_frequencies(theirs[:, layer].transpose(0, 1).flip(1))
        encodings.append(encoding)
    replace(model, rotary=encodings)
    assert len(model.mmpos.rotary) == 2
    close(out(model, x), expected)


@pytest.mark.peer("timm")
def test_a_table_of_offsets_is_that_of_timm(make, image, out):
    model = make("beit")
    x, grid = image(64, 64), (8, 8)
    expected = out(model, x)
    biases = []
    for block in model.blocks:
        bias = RelativePositionBias(2, grid, prefix_rows=True)
        table = block.attn.relative_position_bias_table.data
        bias.table.data = table[:-3].view(15, 15, 2).clone()
        assert bias.prefix is not None
        bias.prefix.data = table[-3:].clone()
        biases.append(bias)
    replace(model, bias=biases)
    assert all(block.attn.relative_position_bias_table is None for block in model.blocks)
    close(out(model, x), expected)
    resize(model, (96, 64))
    assert [bias.table.shape[:2] for bias in biases] == [(23, 15)] * 2
    assert out(model, image(96, 64)).isfinite().all()


@pytest.mark.parametrize("name", PLAIN + BIASED)
def test_a_scheme_comes_back_after_training_and_resizing(name, make, image, out):
    model, twin = make(name), make(name)
    size = size_of(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    replace(model, additive=None, rotary=ROPE, bias=mmpos.ALiBi)
    assert {scheme.kind for scheme in describe(model).schemes} == {"RotaryEncoding", "ALiBi"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()(image(*size, batch=2)).square().sum().backward()
    optimizer.step()
    model.eval()
    double = [2 * side for side in size]
    resize(model, double)
    assert out(model, image(*double)).isfinite().all()
    restore(model)
    assert not hasattr(model, "mmpos")
    assert not model.patch_embed._forward_hooks
    assert model.state_dict().keys() == before.keys()
    resize(twin, double)
    twin.load_state_dict(
        {
            key: twin.state_dict()[key] if key.startswith(("pos_embed", "rope")) else value
            for key, value in model.state_dict().items()
        }
    )
    x = image(*double)
    assert torch.equal(out(model, x), out(twin, x))


def test_every_way_into_a_model_knows_its_positions(make, image, out):
    model = make("vit", dynamic_img_size=True)
    replace(model, additive=LEARNED, rotary=ROPE, bias=mmpos.ALiBi)
    x = image(64, 64)
    whole = out(model, x)
    with torch.no_grad():
        by_parts = model.forward_head(model.forward_features(x))
        last = model.forward_intermediates(x, intermediates_only=True, norm=True)[-1]
        hidden = model.forward_features(x)[:, 1:]
        close(last.flatten(2).mT, hidden)
    assert torch.equal(by_parts, whole)
    with pytest.raises(ValueError, match=r"made for a grid of 4 × 4, the input has 4 × 6"):
        model(image(64, 96))
    replace(model, additive=None)
    assert out(model, image(64, 96)).isfinite().all()
    assert torch.equal(out(model, image(64, 64)), out(copy.deepcopy(model), image(64, 64)))


def test_positions_are_heard(make, image, out):
    model = make("gap").double()
    replace(model, additive=None)
    x = image(64, 64).double()
    swapped = x.clone()
    swapped[..., :16, :16], swapped[..., :16, 16:32] = (
        x[..., :16, 16:32],
        x[..., :16, :16],
    )
    steps: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"rotary": ROPE}, True),
        ({"rotary": None, "bias": mmpos.ALiBi}, True),
        ({"bias": None, "additive": LEARNED}, True),
    ]
    for slots, differs in steps:
        replace(model, **slots)
        with torch.no_grad():
            gap = (model(x) - model(swapped)).abs().max() / model(x).abs().max()
        assert (gap > 1e-9) if differs else (gap < 1e-14), slots


def test_patterns_and_layers_of_their_own(make, image, out):
    model = make("vit")
    replace(model, rotary=[ROPE, nn.Identity], bias=mmpos.T5Bias, per_layer=["bias"])
    assert model.mmpos.rotary_of == [0, None]
    assert model.mmpos.bias_of == [0, 1]
    text = str(describe(model))
    assert "RotaryEncoding (mmpos.rotary): axes y, x; layout interleaved; layers 0" in text
    assert out(model, image(64, 64)).isfinite().all()
    replace(model, bias=partial(ShawBias, head_dim=12))
    assert model.mmpos.rotary_of == [0, None]
    assert out(model, image(64, 64)).isfinite().all()


def test_copies_and_pickles_are_whole(make, image, out):
    model = make("vit")
    replace(model, additive=LEARNED, rotary=ROPE, bias=mmpos.T5Bias)
    x = image(64, 64)
    model.train()(x)  # leaves a graph behind
    expected = out(model.eval(), x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(out(other, x), expected)
        assert other.mmpos is not model.mmpos
        assert all(block.attn.places[0] is other.mmpos for block in other.blocks)
        nn.init.normal_(other.mmpos.additive.table)
        assert not torch.equal(out(other, x), expected)
    assert torch.equal(out(model, x), expected)


def test_weights_go_from_one_replaced_model_to_another(make, image, out):
    one, other = make("vit"), make("vit")
    for model in (one, other):
        replace(model, additive=LEARNED, bias=mmpos.T5Bias)
    resize(one, (96, 64))
    nn.init.normal_(one.mmpos.additive.table)
    resize(other, (96, 64))
    other.load_state_dict(one.state_dict())
    assert torch.equal(out(one, image(96, 64)), out(other, image(96, 64)))


def test_moments_of_new_tables_are_resized_with_them(make, image):
    model = make("vit")
    replace(model, additive=partial(mmpos.FactorizedEncoding, combine="sum"), bias=None)
    optimizer = torch.optim.AdamW(model.parameters())
    model(image(64, 64)).sum().backward()
    optimizer.step()
    resize(model, (96, 128), optimizer=optimizer)
    rows, columns = model.mmpos.additive.table
    assert (rows.shape, columns.shape) == ((6, 24), (8, 24))
    assert model.mmpos.additive.axes == (6, 8)
    assert optimizer.state[columns]["exp_avg_sq"].shape == (8, 24)
    optimizer.zero_grad()
    model(image(96, 128)).sum().backward()
    optimizer.step()


def test_recomputed_activations_give_the_same_gradients(make, image):
    grads = []
    for recomputing in (False, True):
        model = make("vit")
        torch.manual_seed(1)
        replace(model, additive=LEARNED, rotary=ROPE, bias=mmpos.T5Bias)
        model.set_grad_checkpointing(recomputing)
        model.train()(image(64, 64)).square().sum().backward()
        grads.append({name: each.grad for name, each in model.named_parameters()})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        assert grad is not None, name
        torch.testing.assert_close(grads[1][name], grad)


def test_a_mask_is_heard_beside_them(make, image):
    model = make("vit")
    replace(model, bias=mmpos.ALiBi)
    x = image(64, 64)
    seen = torch.ones(17, 17, dtype=torch.bool)
    seen[:, -1] = False
    with torch.no_grad():
        hidden = model.forward_features(x, attn_mask=seen)
        added = model.forward_features(x, attn_mask=torch.zeros(17, 17).masked_fill(~seen, -1e9))
        other = x.clone()
        other[..., 48:, 48:] += 1
        same = model.forward_features(other, attn_mask=seen)
    torch.testing.assert_close(hidden, added)
    torch.testing.assert_close(hidden[:, :-1], same[:, :-1])


def test_devices_and_dtypes_are_those_of_the_model(make, image):
    model = make("vit").to(torch.bfloat16)
    replace(model, additive=LEARNED, rotary=ROPE)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert model(image(64, 64).to(torch.bfloat16)).dtype == torch.bfloat16


def state(model):
    held = {name: (id(each), type(each)) for name, each in model.named_modules()}
    return held | {name: id(each) for name, each in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "more", "slots", "match"),
    [
        ("swin", {}, {"bias": mmpos.ALiBi}, "can be replaced in VisionTransformer, .* not in Swin"),
        ("deit", {}, {"additive": None}, "cannot do without its table"),
        ("vit", {"attn_drop_rate": 0.1}, {"bias": None}, "attn_drop_rate is above 0"),
        ("vit", {"pos_drop_rate": 0.1}, {"additive": None}, "pos_drop_rate is above 0"),
        ("vit", {"patch_drop_rate": 0.1}, {"rotary": ROPE}, "patch_drop_rate is above 0"),
        ("vit", {}, {"rotary": mmpos.ALiBi}, "place takes a kind of RotaryEncoding, got ALiBi"),
        ("vit", {}, {"rotary": mmpos.RotaryEncoding(64, 2)}, "head_dim=64, .* needs 12"),
        ("vit", {}, {"bias": mmpos.ALiBi(5, 2)}, "heads=5, .* needs 2"),
        ("vit", {}, {"additive": LEARNED(24, (4,))}, "made for 1 axes"),
        ("vit", {}, {"rotary": [ROPE] * 3}, "pattern of 3 layers"),
        ("vit", {}, {"additive": partial(LEARNED, prefix_rows=1)}, "prefix_rows=0"),
    ],
)
def test_refused(name, more, slots, match, make):
    model = make(name, **more)
    before = state(model)
    with pytest.raises((ValueError, TypeError), match=match):
        replace(model, **{"additive": None, **slots} if name == "vit" else slots)
    assert state(model) == before


def test_blocks_of_another_kind_are_refused(make):
    model = make("vit")
    model.blocks[1].attn = nn.Identity()
    with pytest.raises(ValueError, match=r"cannot be put into a Identity: expected .* Eva"):
        replace(model, rotary=ROPE)
    with pytest.raises(ValueError, match="nothing was replaced"):
        restore(model)


def test_nothing_is_replaced_by_default(make):
    model = make("vit")
    before = state(model)
    assert replace(model) == describe(model)
    assert state(model) == before


def test_every_class_of_attention_is_timms_own_still():
    assert len(PLACED) == 5
    for theirs, ours in PLACED.items():
        assert issubclass(ours, theirs)
        assert theirs.__module__.startswith("timm.")


def trained(model, x):
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    model.train()(x).square().sum().backward()
    optimizer.step()
    model.eval()


def test_what_is_kept_is_resized_once_and_what_was_taken_with_the_model(make, image, out):
    kept, twin = make("vit"), make("vit")
    replace(kept, rotary=ROPE)
    for model in (kept, twin):
        resize(model, (256, 256))
    restore(kept)
    assert torch.equal(kept.pos_embed, twin.pos_embed)

    taken, twin = make("beit"), make("beit")
    replace(taken, additive=None, bias=None)
    replace(taken, rotary=ROPE)
    for size in ((32, 64), (128, 96)):
        for model in (taken, twin):
            resize(model, size)
    replace(taken, bias=mmpos.ALiBi)
    restore(taken)
    for (name, one), (_, other) in zip(
        taken.named_parameters(), twin.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    assert torch.equal(out(taken, image(128, 96)), out(twin, image(128, 96)))


def test_a_scheme_comes_back_whatever_the_size_and_the_mode():
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=72, dynamic_img_size=True, dynamic_img_pad=True, depth=1
    )
    table = model.pos_embed
    replace(model, additive=None, rotary=ROPE)
    restore(model)
    assert model.pos_embed is table
    eva = timm.create_model("eva02_tiny_patch14_224", depth=1).train()
    replace(eva, rotary=ROPE)
    restore(eva.eval())
    assert not any(module.training for module in eva.modules())


def test_a_resize_that_fails_leaves_what_was_taken(make):
    model = make("vit", dynamic_img_size=True, dynamic_img_pad=True)
    table, before = model.pos_embed, model.pos_embed.detach().clone()
    replace(model, additive=LEARNED, rotary=ROPE)
    with pytest.raises(ValueError, match="is no multiple of"):
        resize(model, (65, 64))
    assert model.pos_embed is None
    restore(model)
    assert model.pos_embed is table
    assert torch.equal(table, before)


def test_recomputed_blocks_know_the_images_that_they_were_given(make, image):
    grads = []
    for recomputing in (False, True):
        model = make("vit", dynamic_img_size=True)
        torch.manual_seed(1)
        replace(model, additive=None, rotary=ROPE, bias=mmpos.T5Bias)
        model.set_grad_checkpointing(recomputing)
        wide, tall = image(32, 128), image(128, 32)
        (model.train()(wide).square().sum() + 2 * model(tall).square().sum()).backward()
        grads.append({name: each.grad for name, each in model.named_parameters()})
    for name, grad in grads[0].items():
        if grad is not None:
            torch.testing.assert_close(grads[1][name], grad, msg=name)


@pytest.mark.usefixtures("unchecked")
def test_a_replaced_model_is_traced(make, image, out):
    for more in ({}, {"dynamic_img_size": True}):
        model = make("vit", **more)
        replace(model, additive=None, rotary=ROPE, bias=mmpos.ALiBi)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(model, image(64, 64), check_trace=False)
        close(out(traced, image(64, 64)), out(model, image(64, 64)))


@pytest.mark.parametrize(
    "slots",
    [
        {"additive": LEARNED(24, (3, 3))},
        {"bias": RelativePositionBias(2, (3, 3))},
    ],
)
def test_tables_of_another_grid_are_refused(slots, make):
    model = make("vit")
    before = state(model)
    with pytest.raises(ValueError, match="made for a grid of 3 × 3, the model has 4 × 4"):
        replace(model, **slots)
    assert state(model) == before
    replace(model, additive=LEARNED(24, (3, 3), dynamic=True))


def test_a_size_that_timm_set_is_made_up_for(make, image, out):
    model = make("vit")
    replace(model, additive=LEARNED, rotary=ROPE)
    model.set_input_size((96, 128))
    with pytest.raises(ValueError, match="made for a grid of 4 × 4, the input has 6 × 8"):
        model(image(96, 128))
    resize(model, (96, 128))
    assert out(model, image(96, 128)).isfinite().all()


@pytest.mark.usefixtures("unchecked")
def test_what_resizes_is_of_its_kind(make):
    with pytest.raises(TypeError, match=r"resampling is a .*, got 'bicubik'"):
        resize(make("vit"), 96, resampling="bicubik")
    with pytest.raises(TypeError, match=r"optimizer is one of torch.optim, got 'adam'"):
        resize(make("vit"), 96, optimizer="adam")
