"""A ViT for images becomes one for spectrograms: its own output on its grid, AST's on another."""

import copy
from functools import partial
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import mlp as layers
from torch import nn

import mmpos
from mmpos.interop.timm import replace, resize, spectrogram_classifier
from mmpos.models import Classifier, SpectrogramPatches, Transformer
from mmpos.resample import Resampling
from tasks.weights import load_weights

DROP = ("drop", "drop")
OWN = {"stride": None, "rest": DROP}
KINDS = {"kind": 5}


def close(actual, expected):
    scale = expected.detach().abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * scale)


def made(model, *sizes, questions=KINDS, **named) -> Any:
    arguments: Any = (*sizes, questions)
    return spectrogram_classifier(model, *arguments, **named)


def sound(*size, batch=2):
    return torch.randn(batch, *size, generator=torch.Generator().manual_seed(5))


def hidden(network, x, mask=None):
    tokens = network.tokens(x, mask)
    return network.transformer(tokens.values, tokens.positions, mask=tokens.mask)


def published(table, frequency, time):
    """AST's table ``[frequency, time, D]`` of one ``[H, W, D]``: time first, then frequency."""
    new = table.movedim(-1, 0).unsqueeze(0)
    height, width = new.shape[2:]
    if time <= width:
        new = new[..., width // 2 - time // 2 :][..., :time]
    else:
        new = nn.functional.interpolate(new, (height, time), mode="bilinear", align_corners=False)
    if frequency <= height:
        new = new[:, :, height // 2 - frequency // 2 :][:, :, :frequency]
    else:
        new = nn.functional.interpolate(
            new, (frequency, time), mode="bilinear", align_corners=False
        )
    return new[0].movedim(0, -1)


@pytest.mark.peer("timm")
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("vit", {"img_size": 224}),
        ("deit", {"img_size": 224}),
        ("registers", {}),
        ("vit", {"in_chans": 1}),
        ("vit", {"qkv_bias": False, "proj_bias": False, "mlp_ratio": 2.7}),
        ("vit", {"embed_dim": 22, "mlp_ratio": 4.46, "drop_rate": 0.1}),  # 98 / 22 · 22 < 98
        ("vit", {"qk_norm": True, "init_values": 0.1}),
        ("vit", {"class_token": False, "global_pool": "avg", "fc_norm": False}),
        ("vit", {"class_token": False, "reg_tokens": 2, "global_pool": "avg", "fc_norm": False}),
        ("vit", {"no_embed_class": True, "pre_norm": False}),
        ("vit", {"pos_embed": "none", "dynamic_img_size": True}),
        ("vit", {"global_pool": "map"}),
        ("vit", {"norm_layer": partial(nn.LayerNorm, eps=1e-3)}),
    ],
)
def test_on_its_own_grid_it_is_the_model_on_grey_images(name, more, make):
    model = make(name, **more)
    for vector in (each for each in model.parameters() if each.ndim == 1):
        vector.data += 0.3 * torch.randn_like(vector)
    network = made(model, *model.patch_embed.img_size, **OWN)
    x = sound(*model.patch_embed.img_size)
    images = x.unsqueeze(1).repeat(1, model.patch_embed.proj.in_channels, 1, 1)
    with torch.no_grad():
        close(hidden(network, x), model.forward_features(images))
        if name == "deit":
            model.head_dist = model.head
        if more.get("global_pool") != "map":
            network.heads.kind = model.head
            close(network(x)["kind"], model(images))


def test_two_prefix_tokens_are_pooled_together(make):
    for name, count, pool in (
        ("deit", 2, "prefix"),
        ("vit", 1, "token"),
        ("registers", 5, "token"),
    ):
        network = made(make(name), 32, 64)
        assert (network.transformer.prefix_tokens, network.pool) == (count, pool)
        x = sound(32, 64)
        tokens = hidden(network, x)[:, : 2 if pool == "prefix" else 1]
        close(network(x)["kind"], network.heads.kind(tokens.sum(1) / tokens.shape[1]))
    assert made(make("vit"), 32, 64, pool="mean").pool == "mean"


@pytest.mark.parametrize("side", [14, 24])
@pytest.mark.parametrize("bins", [64, 128, 256])
@pytest.mark.parametrize("frames", [98, 100, 256, 1024])  # 1 s as 8, 9; 24; and 101 of time
def test_the_table_goes_as_ast_has_it(side, bins, frames, make):
    model = make("deit", img_size=16 * side, depth=1)
    network = made(model, bins, frames, rest=DROP)
    grid = ((bins - 16) // 10 + 1, (frames - 16) // 10 + 1)
    own = model.pos_embed[0, 2:].reshape(side, side, -1)
    table = network.transformer.additive
    assert table.grid == grid
    wanted = published(own.double(), *grid)  # torch forms its ratios in the table's dtype
    torch.testing.assert_close(table.table.double(), wanted, rtol=0, atol=1e-6)
    assert torch.equal(table.prefix, model.pos_embed[0, :2])


@pytest.mark.parametrize(
    ("fit", "expected"),
    [
        (("crop", "center"), lambda table: table[:5, 1:13]),
        ("crop", lambda table: table[:5, :12]),
        (("resize", "extend"), lambda table: spread(table, 5)[:, [*range(14), *range(9)]]),
        (("center", "extend"), lambda table: table[5:10, [*range(14), *range(9)]]),
        (("center", "resize"), lambda table: spread(table[5:10].mT, 23, axis=2).mT),
    ],
)
def test_each_axis_has_its_own_rule(fit, expected, make):
    model = make("vit", img_size=224, depth=1)
    wanted = expected(model.pos_embed[0, 1:].reshape(14, 14, -1))
    bins, frames = (16 + 10 * (size - 1) for size in wanted.shape[:2])
    network = made(model, bins, frames, fit=fit)
    torch.testing.assert_close(network.transformer.additive.table, wanted, rtol=0, atol=2e-6)


def spread(table, count, axis=0):
    """The table with ``count`` rows on an axis, by numpy's definition of linear interpolation."""
    old = table.shape[axis]
    places = ((torch.arange(count) + 0.5) * old / count - 0.5).clamp(0, old - 1)
    low = places.floor().long().clamp_max(old - 2)
    rest = (places - low).reshape([-1 if place == axis else 1 for place in range(table.ndim)])
    return table.index_select(axis, low) * (1 - rest) + table.index_select(axis, low + 1) * rest


@pytest.mark.peer("timm")
def test_the_whole_recipe_is_that_of_the_paper(make):
    model = make("deit", img_size=384)
    network = made(model, 128, 1024, rest=DROP)
    ast, x = copy.deepcopy(model), sound(128, 1024, batch=1)
    proj = nn.Conv2d(1, model.embed_dim, 16, 10)
    proj.weight.data, proj.bias.data = (
        ast.patch_embed.proj.weight.data.sum(1, True),
        (ast.patch_embed.proj.bias.data),
    )
    ast.patch_embed.proj, ast.patch_embed.strict_img_size = proj, False
    own = ast.pos_embed.data[0, 2:].reshape(24, 24, -1)
    cells = published(own, 12, 101).flatten(0, 1)
    ast.pos_embed.data = torch.cat((ast.pos_embed.data[0, :2], cells)).unsqueeze(0)
    with torch.no_grad():
        encoded = ast.forward_features(x.unsqueeze(1))
        assert encoded.shape[1] == 2 + 12 * 101
        close(hidden(network, x), encoded)
        close(network(x)["kind"], network.heads.kind((encoded[:, 0] + encoded[:, 1]) / 2))


def test_frames_beyond_the_last_patch_are_kept_unless_dropped(make):
    model = make("deit", depth=1)
    for rest, width in ((DROP, 101), (("drop", "pad"), 102)):
        network = made(model, 128, 1024, rest=rest)
        assert network.transformer.additive.grid == (12, width)


def test_a_padded_clip_is_what_it_is_alone(make):
    network = made(make("deit"), 64, 120)
    x, mask = sound(64, 120), torch.ones(2, 120, dtype=torch.bool)
    mask[1, 57:] = False
    with torch.no_grad():
        close(network(x, mask)["kind"][1:], network(x[1:, :, :57])["kind"])


@pytest.mark.parametrize("name", ["deit", "vit", "registers"])
def test_what_a_table_gave_prefix_tokens_stays_without_it(name, make):
    model = make(name)
    network = made(model, *model.patch_embed.img_size, **OWN, additive=None)
    assert network.transformer.additive is None
    x = sound(*model.patch_embed.img_size)
    model.pos_embed.data[:, 0 if model.no_embed_class else model.num_prefix_tokens :] = 0
    with torch.no_grad():
        images = x.unsqueeze(1).expand(-1, 3, -1, -1)
        close(hidden(network, x), model.forward_features(images))


def test_other_encodings_work_with_the_weights(make):
    model = make("deit")
    network = made(
        model,
        64,
        120,
        additive=partial(mmpos.SinusoidalEncoding, layout="half"),
        rotary=partial(mmpos.RotaryEncoding, base=100),
        bias=[mmpos.RelativePositionBias, mmpos.RelativePositionBias],
        per_layer=["bias"],
    )
    parts = network.transformer
    assert isinstance(parts.additive, mmpos.SinusoidalEncoding) and len(parts.bias) == 2
    assert torch.equal(parts.layers[1].mlp.down.weight, model.blocks[1].mlp.fc2.weight)
    assert network(sound(64, 120))["kind"].shape == (2, 5)
    other = made(model, 64, 120, rotary=mmpos.RotaryEncoding)
    assert other.transformer.rotary is not None
    assert isinstance(other.transformer.additive, mmpos.LearnedEncoding)


def test_the_model_is_left_as_it_is(make):
    model = make("deit", drop_path_rate=0.25).bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    network = made(model, 64, 64)
    assert not network.training
    assert {value.dtype for value in network.state_dict().values()} == {torch.bfloat16}
    assert [layer.drop_path.rate for layer in network.transformer.layers] == [0, 0.25]
    for parameter in network.parameters():
        parameter.data.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert made(model.train(), 64, 64).training


def test_a_task_starts_from_its_state(make, tmp_path):
    network = made(make("deit"), 64, 120)
    save_file(network.state_dict(), tmp_path / "vit.safetensors")
    rule = Resampling(mode="bilinear", antialias=False, fit="center")
    table = partial(mmpos.LearnedEncoding, prefix_rows=2, resampling=rule)
    for frames in (120, 90):
        tokens = SpectrogramPatches(24, 64)
        parts = {"dim": 24, "depth": 2, "heads": 2, "class_token": True, "registers": 1}
        transformer = Transformer(tokens.grid(64, frames), **parts, additive=table)
        other = Classifier(tokens, transformer, {"other": 3}, pool="prefix").eval()
        said = load_weights(other, tmp_path / "vit.safetensors", ["heads"])
        assert ("5 × 12 → 5 × 9" in said) == (frames == 90)
        other.heads.other = network.heads.kind
        x = sound(64, frames)
        with torch.no_grad():
            theirs = network if frames == 120 else at(network, frames)
            got, wanted = other(x)["other"], theirs(x)["kind"]
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)  # eps: 1e-5 there, 1e-6 here


def at(network, frames):
    """A copy whose table is for so many frames, by the rule that it has."""
    network = copy.deepcopy(network)
    network.transformer.additive.resize(network.tokens.grid(64, frames))
    return network


def test_another_patch_comes_by_way_of_resize(make):
    model = make("vit")
    resize(model, 32, 8)
    network = made(model, 32, 32, **OWN)
    x = sound(32, 32)
    with torch.no_grad():
        close(hidden(network, x), model.forward_features(x.unsqueeze(1).expand(-1, 3, -1, -1)))


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("vit", {"pre_norm": True}, "norm_pre.weight"),
        ("vit", {"global_pool": "avg"}, "a norm after pooling, or none"),
        ("vit", {"final_norm": False}, "a norm after pooling, or none"),
        ("vit", {"scale_attn_norm": True}, "blocks.0.attn.norm.weight"),
        ("vit", {"scale_mlp_norm": True}, "blocks.0.mlp.norm.weight"),
        ("vit", {"embed_norm_layer": partial(nn.LayerNorm, eps=1e-6)}, "patch_embed.norm.weight"),
        ("vit", {"act_layer": "quick_gelu"}, r"QuickGELU \(blocks.0.mlp.act\)"),
        ("vit", {"act_layer": partial(nn.GELU, approximate="tanh")}, r"GELU \(blocks.0.mlp.act\)"),
        ("vit", {"norm_layer": "rmsnorm"}, r"RmsNorm \(norm\)"),
        ("vit", {"attn_drop_rate": 0.1}, r"dropout of 0.1 \(blocks.0.attn.attn_drop\)"),
        ("vit", {"patch_drop_rate": 0.2}, r"dropout of 0.2 \(patch_drop\)"),
        ("vit", {"block_fn": timm.models.vision_transformer.ResPostBlock}, "ResPostBlock"),
        ("vit", {"mlp_layer": layers.SwiGLU}, "SwiGLU"),
        ("vit", {"attn_layer": "diff"}, "DiffAttention"),
        ("hybrid", {}, r"HybridEmbed \(patch_embed\)"),
        ("eva02", {}, "Eva is no VisionTransformer of timm"),
    ],
)
def test_what_a_transformer_has_not_is_refused(name, more, words, make):
    with pytest.raises(ValueError, match=words) as caught:
        made(make(name, **more), 64, 64)
    assert "\n" not in str(caught.value)


def test_other_faults_say_what_is_to_be_done(make):
    model = make("vit")
    with pytest.raises(ValueError, match="smaller than a patch of 16"):
        made(model, 8, 64)
    with pytest.raises(ValueError, match="is for 1 axes, a grid of 5 × 6 has 2"):
        made(model, 64, 64, fit=("center",))
    with pytest.raises(ValueError, match="needs at least one question"):
        made(model, 64, 64, questions={})
    with pytest.raises(TypeError, match="a model of timm is needed, got Linear"):
        made(nn.Linear(2, 2), 64, 64)
    model.blocks[1].norm2.eps = 1e-3
    with pytest.raises(ValueError, match="norms of several eps"):
        made(model, 64, 64)
    model = make("vit")
    replace(model, additive=mmpos.SinusoidalEncoding)
    with pytest.raises(ValueError, match=r"were replaced: restore\(model\) first"):
        made(model, 64, 64)
