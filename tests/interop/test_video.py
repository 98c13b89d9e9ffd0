"""A ViT for images becomes one for clips: timm's own blocks on the tokens of all tubelets."""

from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import nn

import mmpos
from mmpos.interop.timm import replace, resize, spectrogram_classifier, video_classifier
from mmpos.models import Classifier, Transformer, TubeletEmbedding
from tasks.weights import load_weights

KINDS = {"kind": 5}
MODELS: list[tuple[str, dict]] = [
    ("vit", {}),
    ("deit", {}),
    ("registers", {}),
    ("vit", {"class_token": False, "global_pool": "avg", "fc_norm": False}),
    ("vit", {"class_token": False, "reg_tokens": 2, "global_pool": "avg", "fc_norm": False}),
    ("vit", {"no_embed_class": True, "pre_norm": False}),
    ("vit", {"pos_embed": "none", "dynamic_img_size": True}),
    ("vit", {"in_chans": 1, "qk_norm": True, "init_values": 0.1, "global_pool": "map"}),
]


def close(actual, expected):
    scale = expected.detach().abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * scale)


def made(model, frames, questions=KINDS, **named) -> Any:
    return video_classifier(model, frames, questions, **named)


def clip(model, frames, size=None, batch=2):
    draw = torch.Generator().manual_seed(5)
    channels, size = model.patch_embed.proj.in_channels, size or model.patch_embed.img_size
    return torch.randn(batch, channels, frames, *size, generator=draw)


def hidden(network, x, mask=None):
    tokens = network.tokens(x, mask)
    return network.transformer(tokens.values, tokens.positions, mask=tokens.mask)


def theirs(model, x, tubelet, inflation, size=None):
    """timm's blocks on the patches of all frames, those of a tubelet joined: with timm's table."""
    frames = [*x.unbind(2)]
    frames += [frames[-1]] * (-len(frames) % tubelet)
    parts, table, prefix = [], model.pos_embed, model.num_prefix_tokens
    rows = 0 if model.no_embed_class else prefix
    if size is not None and table is not None:
        grid = [
            side // patch for side, patch in zip(size, model.patch_embed.patch_size, strict=True)
        ]
        old = list(model.patch_embed.grid_size)
        table = resample_abs_pos_embed(table, grid, old, num_prefix_tokens=rows)
    model.patch_embed.strict_img_size = False
    cells = torch.stack([model.patch_embed.proj(frame).flatten(2).mT for frame in frames], 1)
    cells = cells.unflatten(1, (-1, tubelet))
    cells = cells.mean(2) if inflation == "mean" else cells[:, :, tubelet // 2]
    if table is not None:
        cells = cells + table[:, rows:]
    for name in ("cls_token", "dist_token", "reg_token"):
        if getattr(model, name, None) is not None:
            parts.append(getattr(model, name).expand(len(x), -1, -1))
    first = torch.cat(parts, 1) if parts else cells.new_zeros(len(x), 0, cells.shape[-1])
    if table is not None and rows:
        first = first + table[:, :rows]
    return model.norm(model.blocks(torch.cat((first, cells.flatten(1, 2)), 1)))


@pytest.fixture
def moved(make):
    def call(name, **more):
        model = make(name, **more)
        for vector in (each for each in model.parameters() if each.ndim == 1):
            vector.data += 0.3 * torch.randn_like(vector)
        for matrix in (each for each in model.blocks.parameters() if each.ndim == 2):
            matrix.data *= 10  # attention that looks
        return model

    return call


@pytest.mark.peer("timm")
@pytest.mark.parametrize(("name", "more"), MODELS)
@pytest.mark.parametrize("inflation", ["mean", "central"])
@pytest.mark.parametrize(("frames", "tubelet"), [(3, 1), (4, 2), (5, 2), (6, 3)])
def test_it_is_timms_own_blocks_on_all_tubelets(frames, tubelet, inflation, name, more, moved):
    model = moved(name, **more)
    network, x = made(model, frames, tubelet=tubelet, inflation=inflation), clip(model, frames)
    with torch.no_grad():
        close(hidden(network, x), theirs(model, x, tubelet, inflation))


@pytest.mark.peer("timm")
@pytest.mark.parametrize(("name", "more"), MODELS)
@pytest.mark.parametrize("inflation", ["mean", "central"])
def test_a_still_clip_is_pooled_as_its_image(inflation, name, more, moved):
    """Of one tubelet; and of more, where no prefix token weighs less against more patches."""
    model = moved(name, **more)
    image = clip(model, 1)[:, :, 0]
    for frames, tubelet in ((1, 1), (2, 2), (3, 3), (6, 2)):
        if frames > tubelet and model.num_prefix_tokens:
            continue
        network = made(model, frames, tubelet=tubelet, inflation=inflation)
        still = image.unsqueeze(2).expand(-1, -1, frames, -1, -1)
        with torch.no_grad():
            encoded = model.forward_features(image)
            pooled = network.pooled(hidden(network, still))
            if more.get("global_pool") == "map":
                wanted = encoded[:, 0]
            elif name == "deit":
                wanted = encoded[:, :2].mean(1)
            else:
                wanted = model.forward_head(encoded, pre_logits=True)
            close(pooled, wanted)
            close(network(still)["kind"], network.heads.kind(wanted))


@pytest.mark.peer("timm")
@pytest.mark.parametrize("name", ["vit", "deit", "registers"])
@pytest.mark.parametrize("cells", [(2, 6), (6, 5), (4, 4), (1, 1)])
def test_the_table_goes_to_another_size_as_timm_has_it(cells, name, moved):
    model = moved(name)
    size = [count * patch for count, patch in zip(cells, model.patch_embed.patch_size, strict=True)]
    network, x = made(model, 5, image_size=size), clip(model, 5, size)
    assert network.transformer.additive.grid == (3, *cells)
    with torch.no_grad():
        close(hidden(network, x), theirs(model, x, 2, "central", size))


@pytest.mark.peer("timm")
def test_the_table_is_the_same_at_all_times(make):
    model = make("vit")
    table = made(model, 8).transformer.additive
    own = model.pos_embed[0, 1:].reshape(4, 4, -1)
    assert table.table.shape == (4, 4, 4, 24) and table.table.is_contiguous()
    assert all(torch.equal(rows, own) for rows in table.table)
    assert torch.equal(table.prefix, model.pos_embed[0, :1])
    side = made(model, 8, image_size=96).transformer.additive
    wanted = resample_abs_pos_embed(model.pos_embed, [6, 6], [4, 4], num_prefix_tokens=1)
    torch.testing.assert_close(side.table[3].flatten(0, 1), wanted[0, 1:], rtol=0, atol=2e-6)


def test_a_padded_clip_is_what_it_is_alone(make):
    model = make("deit")
    network, x = made(model, 8), clip(model, 8)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 5:] = False
    garbage = x.where(mask[:, None, :, None, None], torch.nan)
    with torch.no_grad():
        alone = network.pooled(hidden(network, x[1:, :, :5]))
        close(network(garbage, mask)["kind"][1:], network.heads.kind(alone))


@pytest.mark.parametrize("name", ["deit", "vit", "registers"])
def test_what_a_table_gave_prefix_tokens_stays_without_it(name, make):
    model = make(name)
    network, x = made(model, 4, additive=None), clip(model, 4)
    assert network.transformer.additive is None
    model.pos_embed.data[:, 0 if model.no_embed_class else model.num_prefix_tokens :] = 0
    with torch.no_grad():
        close(hidden(network, x), theirs(model, x, 2, "central"))


def test_other_encodings_work_with_the_weights(moved):
    model = moved("vit")
    network = made(
        model,
        6,
        additive=mmpos.SinusoidalEncoding,
        rotary=partial(mmpos.RotaryEncoding, base=100),
        bias=[mmpos.RelativePositionBias, mmpos.RelativePositionBias],
        per_layer=["bias"],
    )
    parts = network.transformer
    assert isinstance(parts.additive, mmpos.SinusoidalEncoding) and len(parts.bias) == 2
    assert torch.equal(parts.layers[1].mlp.down.weight, model.blocks[1].mlp.fc2.weight)
    timed = made(model, 6, additive=None, rotary=mmpos.RotaryEncoding)
    x = clip(model, 6)
    assert timed(x, step=2)["kind"].shape == network(x)["kind"].shape == (2, 5)
    assert (timed(x, step=2)["kind"] - timed(x)["kind"]).abs().max() > 1e-4


def test_the_model_is_left_as_it_is(make):
    model = make("deit", drop_path_rate=0.25).bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    network = made(model, 4)
    assert not network.training and network.pool == "prefix"
    assert {value.dtype for value in network.state_dict().values()} == {torch.bfloat16}
    assert [layer.drop_path.rate for layer in network.transformer.layers] == [0, 0.25]
    for parameter in network.parameters():
        parameter.data.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert made(model.train(), 4).training
    assert [made(make(name), 4).pool for name in ("vit", "registers")] == ["token"] * 2
    assert made(make("vit"), 4, pool="mean").pool == "mean"


def test_a_task_starts_from_its_state(make, tmp_path):
    network = made(make("vit"), 8)
    save_file(network.state_dict(), tmp_path / "vit.safetensors")
    table = partial(mmpos.LearnedEncoding, prefix_rows=1)
    for frames in (8, 16):
        tokens = TubeletEmbedding(24, (2, 16, 16))
        norm: Any = partial(nn.LayerNorm, eps=1e-6)
        parts: Any = {"dim": 24, "depth": 2, "heads": 2, "class_token": True, "norm": norm}
        transformer = Transformer(tokens.grid(frames, 64, 64), **parts, additive=table)
        other = Classifier(tokens, transformer, KINDS, pool="token").eval()
        said = load_weights(other, tmp_path / "vit.safetensors")
        assert ("4 × 4 × 4 → 8 × 4 × 4" in said) == (frames == 16) and "inflated" not in said
        x = torch.randn(1, 3, frames, 64, 64)
        with torch.no_grad():
            if frames == 8:
                close(other(x)["kind"], network(x)["kind"])
            assert other(x)["kind"].isfinite().all()


def test_another_patch_comes_by_way_of_resize(make):
    model = make("vit")
    resize(model, 32, 8)
    x = clip(model, 4)
    assert x.shape[-2:] == (32, 32)
    with torch.no_grad():
        close(hidden(made(model, 4), x), theirs(model, x, 2, "central"))


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("vit", {"pre_norm": True}, "norm_pre.weight"),
        ("vit", {"global_pool": "avg"}, "a norm after pooling, or none"),
        ("vit", {"act_layer": "quick_gelu"}, r"QuickGELU \(blocks.0.mlp.act\)"),
        ("hybrid", {}, r"HybridEmbed \(patch_embed\)"),
        ("eva02", {}, "Eva is no VisionTransformer of timm"),
    ],
)
def test_what_a_transformer_has_not_is_refused(name, more, words, make):
    with pytest.raises(ValueError, match=words) as caught:
        made(make(name, **more), 4)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("unchecked")
def test_other_faults_say_what_is_to_be_done(make):
    model = make("vit")
    cases = [
        (r"^frames of 72 × 64 cannot be cut into patches of 16 × 16", {"image_size": (72, 64)}),
        (r"^a clip has 1 frame or more, got 0$", {"frames": 0}),
        (r"^tubelet must be a whole number of 1 or more, got 0$", {"tubelet": 0}),
        (r"'mean' or 'central', got .*'middle'$", {"inflation": "middle"}),
        (r"^a classifier needs at least one question$", {"questions": {}}),
        (r"^pool must be one of", {"pool": "max"}),
        (r"^image_size must be 1 or more, got 0$", {"image_size": 0}),
    ]
    for words, named in cases:
        with pytest.raises(ValueError, match=words):
            made(model, **{"frames": 4, **named})
    with pytest.raises(TypeError, match=r"image_size is a whole number or \(height, width\)"):
        made(model, 4, image_size=(1, 2, 3))
    with pytest.raises(TypeError, match="a model of timm is needed, got Linear"):
        made(nn.Linear(2, 2), 4)
    replace(model, additive=mmpos.SinusoidalEncoding)
    for convert in (partial(made, frames=4), partial(spectrogram_classifier, bins=64, frames=64)):
        with pytest.raises(ValueError, match=r"were replaced: restore\(model\) first"):
            convert(model, questions=KINDS)
