"""What models of transformers add to scores: attention of their layers from their own q and k."""

import dataclasses
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModel
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

import mmpos
from mmpos.bias import DisentangledBias, ShawBias, T5Bias, TransformerXLBias
from mmpos.interop.transformers.relative import READERS
from mmpos.interop.transformers.weights import give_weights, take_weights
from mmpos.positions import sequence

HEADS, WIDTH = 3, 24
PLAIN = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 16,
    "vocab_size": 50,
    "max_position_embeddings": 48,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_act": "gelu",
}
T5 = {
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": HEADS,
    "vocab_size": 50,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 24,
    "decoder_start_token_id": 0,
}
BERTA = {**PLAIN, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
V3 = {
    **BERTA,
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "layer_norm_eps": 1e-7,
    "position_biased_input": False,
}
SOUND = {
    **PLAIN,
    "conv_dim": (8,),
    "conv_kernel": (3,),
    "conv_stride": (2,),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 1,
    "feature_projection_input_dim": 8,
    "conv_depthwise_kernel_size": 3,
    "max_source_positions": 60,
}
VITS = {
    **PLAIN,
    "ffn_dim": 16,
    "flow_size": WIDTH,
    "window_size": 4,
    "upsample_initial_channel": 32,
    "spectrogram_bins": 17,
    "wavenet_dilation_rate": 1,
    "prior_encoder_num_flows": 1,
    "prior_encoder_num_wavenet_layers": 1,
    "posterior_encoder_num_wavenet_layers": 1,
    "duration_predictor_num_flows": 1,
    "depth_separable_num_layers": 1,
    "hidden_act": "relu",
}
CASES = {
    "t5-encoder": ("t5", "encoder", T5),
    "t5-decoder": ("t5", "decoder", T5),
    "mt5-encoder": ("mt5", "encoder", T5),
    "mt5-decoder": ("mt5", "decoder", T5),
    "umt5-encoder": ("umt5", "encoder", T5),
    "umt5-decoder": ("umt5", "decoder", T5),
    "switch-encoder": ("switch_transformers", "encoder", {**T5, "num_experts": 2}),
    "switch-decoder": ("switch_transformers", "decoder", {**T5, "num_experts": 2}),
    "longt5-decoder": ("longt5", "decoder", T5),
    "mpnet": ("mpnet", "", PLAIN),
    "bloom": ("bloom", "", {"hidden_size": WIDTH, "n_layer": 2, "n_head": HEADS, "vocab_size": 50}),
    "mpt": (
        "mpt",
        "",
        {"d_model": WIDTH, "n_layers": 2, "n_heads": HEADS, "vocab_size": 50, "max_seq_len": 64},
    ),
    "mpt-scale": (
        "mpt",
        "",
        {
            "d_model": WIDTH,
            "n_layers": 2,
            "n_heads": HEADS,
            "vocab_size": 50,
            "attn_config": {"softmax_scale": 0.7},
        },
    ),
    "falcon": ("falcon", "", {**PLAIN, "num_attention_heads": 4, "alibi": True}),
    "deberta": ("deberta", "", BERTA),
    "deberta-near": ("deberta", "", {**BERTA, "max_relative_positions": 9}),
    "deberta-c2p": ("deberta", "", {**BERTA, "pos_att_type": "c2p"}),
    "deberta-none": ("deberta", "", {**BERTA, "relative_attention": False}),
    "deberta-v2": ("deberta-v2", "", BERTA),
    "deberta-v2-p2c": ("deberta-v2", "", {**BERTA, "pos_att_type": ["p2c"], "position_buckets": 6}),
    "deberta-v3": ("deberta-v2", "", V3),
    "deberta-v3-own": ("deberta-v2", "", {**V3, "share_att_key": False}),
    "xlnet": (
        "xlnet",
        "",
        {"d_model": WIDTH, "n_layer": 2, "n_head": HEADS, "d_inner": 16, "vocab_size": 50},
    ),
    "conformer": (
        "wav2vec2-conformer",
        "",
        {**SOUND, "position_embeddings_type": "relative"},
    ),
    "conformer-bert": (
        "wav2vec2-bert",
        "",
        {
            **SOUND,
            "position_embeddings_type": "relative_key",
            "left_max_position_embeddings": 11,
            "right_max_position_embeddings": 4,
        },
    ),
    "conformer-bert-relative": (
        "wav2vec2-bert",
        "",
        {**SOUND, "position_embeddings_type": "relative"},
    ),
    "vits": ("vits", "text", VITS),
}


def configure(case, **more):
    name, part, given = {**CASES, "longt5-encoder": ("longt5", "encoder", T5)}[case]
    return AutoConfig.for_model(name, **{**given, **more}), part


def build(config):
    plain = config.model_type in (
        "deberta",
        "xlnet",
        "falcon",
    )  # or has no eager form that is right
    eager = {} if plain else {"attn_implementation": "eager"}
    model = AutoModel.from_config(config, **eager).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model


def taken(model, config, part):
    found = READERS[config.model_type, part](config)
    take_weights(found, model.state_dict())
    return found


def heads(x, count, head_dim):
    return x.unflatten(-1, (count, head_dim)).transpose(1, 2)


SEPARATE = {
    "t5": "{part}.block.{layer}.layer.0.SelfAttention.{end}",
    "mt5": "{part}.block.{layer}.layer.0.SelfAttention.{end}",
    "umt5": "{part}.block.{layer}.layer.0.SelfAttention.{end}",
    "switch_transformers": "{part}.block.{layer}.layer.0.SelfAttention.{end}",
    "longt5": "{part}.block.{layer}.layer.0.SelfAttention.{end}",
    "mpnet": "encoder.layer.{layer}.attention.attn.{end}",
    "deberta-v2": "encoder.layer.{layer}.attention.self.{end}",
    "wav2vec2-conformer": "encoder.layers.{layer}.self_attn.{end}",
    "wav2vec2-bert": "encoder.layers.{layer}.self_attn.{end}",
    "vits": "text_encoder.encoder.layers.{layer}.attention.{end}",
}
ENDS = {
    "deberta-v2": ("query_proj", "key_proj"),
    "wav2vec2-conformer": ("linear_q", "linear_k"),
    "wav2vec2-bert": ("linear_q", "linear_k"),
    "vits": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "falcon": ("query_key_value", "dense"),
}
LAST = ("out_proj", "dense")
FUSED = {
    "bloom": "h.{layer}.self_attention.query_key_value",
    "mpt": "blocks.{layer}.attn.Wqkv",
    "falcon": "h.{layer}.self_attention.{end}",
    "deberta": "encoder.layer.{layer}.attention.self.in_proj",
}


def watch(model, config, part, layers, kept):
    """Keep what projections give, and what XLNet's attention gets."""
    name = config.model_type

    def keep(module, args, out, layer, end):
        kept.setdefault((layer, end), out)  # DeBERTa V3 projects its table afterwards

    for layer in range(layers):
        if name == "xlnet":
            model.layer[layer].rel_attn.register_forward_pre_hook(
                lambda module, args, layer=layer: kept.__setitem__((layer, "h"), args[0])
            )
            continue
        ends = ENDS.get(name, ("q", "k") if name in SEPARATE else ("fused",))
        for end in ends:
            path = SEPARATE.get(name, FUSED.get(name, "")).format(part=part, layer=layer, end=end)
            hook = partial(keep, layer=layer, end=end)
            own = model.get_submodule(path)
            if end in LAST:
                own.register_forward_pre_hook(
                    lambda m, args, layer=layer: kept.__setitem__((layer, "out"), args[0])
                )
            else:
                own.register_forward_hook(hook)


def queries_and_keys(model, config, kept, layer, count, head_dim):
    """``[B, H, L, head_dim]`` each, as a layer has them."""
    name = config.model_type
    if name == "xlnet":
        attention = model.layer[layer].rel_attn
        return [
            torch.einsum("lbf,fnd->bnld", kept[layer, "h"], own)
            for own in (attention.q, attention.k)
        ]
    if name in SEPARATE:
        ends = ENDS.get(name, ("q", "k"))
        return [heads(kept[layer, end], count, head_dim) for end in ends if end not in LAST]
    if name == "falcon":  # one key for all heads, and one value
        own = heads(kept[layer, "query_key_value"], count + 2, head_dim)
        return own.split((count, 1, 1), dim=1)
    fused = kept[layer, "fused"]
    if name == "mpt":
        return [heads(own, count, head_dim) for own in fused.chunk(3, -1)[:2]]
    q, k, _ = heads(fused, count, 3 * head_dim).chunk(3, -1)
    if name == "deberta":
        own = model.encoder.layer[layer].attention.self.q_bias
        q = q + own.view(count, 1, head_dim)
    return [q, k]


def run(model, config, part, length, kept, layers, **named):
    watch(model, config, part, layers, kept)
    tokens = torch.arange(2 * length).view(2, length) % 40 + 5
    name = config.model_type
    with torch.no_grad():
        if hasattr(config, "num_decoder_layers"):
            out = model(input_ids=tokens, decoder_input_ids=tokens, output_attentions=True)
            return out[f"{part}_attentions"]
        if "wav2vec2" in name:
            found = []
            for layer in model.encoder.layers:
                layer.self_attn.register_forward_hook(lambda m, args, out: found.append(out[1]))
            model.encoder(torch.randn(2, length, WIDTH))
            return tuple(found)
        if name == "vits":
            mask = torch.ones(2, length, 1)
            out = model.text_encoder(tokens, mask, mask[..., 0].long(), output_attentions=True)
            return out.attentions
        out = model(input_ids=tokens, output_attentions=name != "falcon", **named)
        return out.attentions if name != "falcon" else [None] * layers


def bias_of(found, layer):
    return found.bias[layer] if isinstance(found.bias, tuple) else found.bias


def apart(case, length=37):
    """The largest differences of attention weights and of scores, in all layers of a model."""
    config, part = configure(case)
    model = build(config)
    found = taken(model, config, part)
    kept = {}
    attentions = run(model, config, part, length, kept, found.layers)
    assert len(attentions) == found.layers
    causal = part == "decoder" or config.model_type in ("bloom", "mpt", "falcon")
    count = 4 if config.model_type == "falcon" else HEADS
    head_dim = WIDTH // count
    worst = 0.0
    for layer, expected in enumerate(attentions):
        q, k, *v = queries_and_keys(model, config, kept, layer, count, head_dim)
        own = bias_of(found, layer)
        terms = None if own is None else own(sequence(length), sequence(length))
        eye = torch.eye(length).expand(2, k.shape[1], length, length)
        values = v[0] if v else eye
        got = mmpos.attend(q, k, values, bias=terms, causal=causal, scale=found.scale)
        plain = mmpos.attend(q, k, values, causal=causal, scale=found.scale)
        if v:
            expected = heads(kept[layer, "out"], count, head_dim)
        worst = max(worst, float((got - expected).abs().max().detach()))
        if own is not None:
            assert (plain - expected).abs().max() > 1e-3  # the bias is seen
    return worst


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("case", CASES)
def test_attention_weights_of_every_layer(case):
    assert apart(case) < 1e-5


@pytest.mark.parametrize("case", ["deberta", "deberta-v3", "vits", "conformer-bert"])
@pytest.mark.parametrize("length", [2, 60])
def test_sequences_shorter_and_longer_than_the_tables(case, length):
    if case == "deberta":
        CASES["deberta-long"] = ("deberta", "", {**BERTA, "max_position_embeddings": 64})
        case = "deberta-long"
    if case == "deberta-v3":
        CASES["v3-long"] = ("deberta-v2", "", {**V3, "max_relative_positions": 20})
        case = "v3-long"
    assert apart(case, length) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_numbers_come_back_bit_for_bit_and_a_model_takes_them(case):
    config, part = configure(case)
    model = build(config)
    found = taken(model, config, part)
    given, state = give_weights(found), model.state_dict()
    shared = getattr(config, "share_att_key", False)
    learned = {
        id(own)
        for place in ("additive", "bias")
        for each, _ in found.each(place)
        for own in each.parameters()
    }
    assert len(given) == len(learned)
    for name, value in given.items():
        own = state[name.replace(".pos_", ".") if shared else name]
        assert torch.equal(value, own)
        assert value.is_contiguous()
        assert value.data_ptr() != own.data_ptr()
    other = build(config)
    message = other.base_model.load_state_dict(given, strict=False)
    assert all(shared and ".pos_" in name for name in message.unexpected_keys)
    again = taken(model, config, part)
    take_weights(again, given)
    for name, value in give_weights(again).items():
        assert torch.equal(value, given[name])
    for name, value in other.state_dict().items():
        if name in given:
            assert torch.equal(value, given[name])


@pytest.mark.parametrize(
    ("case", "kind", "tables"),
    [
        ("t5-encoder", T5Bias, 1),
        ("t5-decoder", T5Bias, 1),
        ("umt5-encoder", T5Bias, 2),
        ("umt5-decoder", T5Bias, 3),
        ("mpnet", T5Bias, 1),
        ("bloom", mmpos.ALiBi, 1),
        ("xlnet", TransformerXLBias, 2),
        ("conformer-bert", ShawBias, 2),
        ("deberta-v3", DisentangledBias, 2),
    ],
)
def test_layers_that_share(case, kind, tables):
    config, part = configure(case)
    found = READERS[config.model_type, part](config)
    held = [each for each, _ in found.each("bias")]
    assert len(held) == tables
    assert all(type(each) is kind for each in held)
    assert str(found).count(kind.__name__) == tables
    if kind is DisentangledBias:
        assert held[0].table is held[1].table
        assert held[0].norm is held[1].norm
        assert held[0].key is not held[1].key


@pytest.mark.parametrize("count", [1, 3, 4, 12, 20])
def test_alibi_as_published_far_out(count):
    length = 700
    where = sequence(length)
    config = AutoConfig.for_model("bloom", n_head=count, hidden_size=8 * count, n_layer=1)
    bias = READERS["bloom", ""](config).bias(where[-1:], where)
    peer = build_alibi_tensor(torch.ones(1, length), count, torch.float32)
    torch.testing.assert_close(bias - bias[..., :1], peer, rtol=1e-6, atol=1e-4)
    for most in (8, 16, 5):
        config = AutoConfig.for_model(
            "mpt",
            n_heads=count,
            d_model=8 * count,
            n_layers=1,
            attn_config={"alibi_bias_max": most},
        )
        found = READERS["mpt", ""](config)
        peer = build_mpt_alibi_tensor(count, length, alibi_bias_max=most)
        torch.testing.assert_close(found.bias(where[-1:], where), peer, rtol=1e-6, atol=1e-5)
        assert ("transformers computes with 8" in found.note) == (most != 8)


def test_longt5_attends_within_a_window():
    config = AutoConfig.for_model("longt5", **T5, local_radius=6, encoder_attention_type="local")
    model = build(config)
    found = taken(model, config, "encoder")
    name = "encoder.block.0.layer.0.LocalSelfAttention"
    assert list(give_weights(found)) == [f"{name}.relative_attention_bias.weight"]
    assert found.note == "attention has window=7"
    kept = {}
    for end in ("q", "k", "v", "o"):
        own = model.get_submodule(f"{name}.{end}")
        own.register_forward_hook(lambda m, args, out, end=end: kept.update({end: (args[0], out)}))
    with torch.no_grad():
        model.encoder(input_ids=torch.arange(30).view(1, 30) + 5)
    q, k, v = (heads(kept[end][1], HEADS, 8) for end in "qkv")
    bias = found.bias(sequence(30), sequence(30))
    out = mmpos.attend(q, k, v, bias=bias, window=7, scale=found.scale)
    expected = kept["o"][0]
    torch.testing.assert_close(out.transpose(1, 2).flatten(2), expected, rtol=1e-5, atol=1e-5)


def test_falcon_is_rounded_by_transformers_and_not_here():
    config = AutoConfig.for_model(
        "falcon", num_attention_heads=12, hidden_size=48, num_hidden_layers=1, alibi=True
    )
    length = 700
    bias = READERS["falcon", ""](config).bias(sequence(length)[-1:], sequence(length))
    peer = falcon_alibi(torch.ones(1, length), 12, torch.float32) / 2
    gap = ((bias - bias[..., :1]) - peer).abs().max()
    assert 0.01 < gap < 2
    exact = build_alibi_tensor(torch.ones(1, length), 12, torch.float32) / 2
    torch.testing.assert_close(bias - bias[..., :1], exact, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("case", ["bloom", "falcon"])
def test_left_padding_does_not_count(case):
    config, part = configure(case)
    model = build(config)
    found, kept, length, padding = taken(model, config, part), {}, 12, 5
    mask = torch.ones(2, length, dtype=torch.long)
    mask[:, :padding] = 0
    expected = run(model, config, part, length, kept, 2, attention_mask=mask)[0]
    count = 4 if case == "falcon" else HEADS
    q, k, *v = (
        each[:, :, padding:]
        for each in queries_and_keys(model, config, kept, 0, count, WIDTH // count)
    )
    where = sequence(length - padding)
    eye = torch.eye(len(where)).expand(2, k.shape[1], len(where), len(where))
    got = mmpos.attend(q, k, v[0] if v else eye, bias=found.bias(where, where), causal=True)
    if v:
        expected = heads(kept[0, "out"], count, WIDTH // count)[:, :, padding:]
    else:
        expected = expected[:, :, padding:, padding:]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_deberta_buckets_are_those_of_the_model():
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

    for span, longest, length in ((256, 512, 700), (8, 20, 60), (10, 7, 50), (2, 9, 20)):
        bias = DisentangledBias(3, head_dim=8, span=span, max_distance=longest)
        tokens = torch.zeros(1, length, 1)
        peer = build_relative_position(tokens, tokens, span, longest)[0]
        peer = (peer + span).clamp(0, 2 * span - 1)
        assert bias.rows_of(range(length)) == peer[:, 0].tolist()
        assert bias.rows_of([-offset for offset in range(length)]) == peer[0].tolist()


def test_names_behind_a_prefix_of_other_heads():
    from transformers import DebertaV2ForMaskedLM, MT5ForConditionalGeneration

    for case, cls in (
        ("deberta-v3", DebertaV2ForMaskedLM),
        ("mt5-decoder", MT5ForConditionalGeneration),
    ):
        config, part = configure(case)
        whole = cls(config)
        found = taken(whole, config, part)
        state = whole.base_model.state_dict()
        for name, value in give_weights(found).items():
            assert torch.equal(value, state[name.replace(".pos_", ".")])


def test_a_tied_projection_is_taken_where_there_is_none_of_its_own():
    config, part = configure("deberta-v2")
    model = build(config)
    found = taken(model, config, part)
    attention = model.encoder.layer[1].attention.self
    assert torch.equal(found.bias[1].key.weight, attention.pos_key_proj.weight)
    assert torch.equal(found.bias[1].query.bias, attention.pos_query_proj.bias)


def refused(found, state, message):
    parameters = [own for each, _ in found.each("bias") for own in each.parameters()]
    before = [own.detach().clone() for own in parameters]
    with pytest.raises(ValueError, match=message) as raised:
        take_weights(found, state)
    assert "\n" not in str(raised.value)
    assert all(map(torch.equal, parameters, before))


def test_weights_that_do_not_fit(unchecked):
    config, _ = configure("xlnet")
    state, found = build(config).state_dict(), READERS["xlnet", ""](config)
    whole = dict(state)
    del state["layer.1.rel_attn.r_r_bias"]
    refused(found, state, r"no layer\.1\.rel_attn\.r_r_bias, which xlnet learns")
    whole["layer.1.rel_attn.r"] = whole["layer.1.rel_attn.r"].flatten(1)
    refused(found, whole, r"shape \(24, 24\), the encoding \(24, 3, 8\)")
    config, _ = configure("t5-decoder")
    refused(READERS["t5", "decoder"](config), state, r"no decoder\.block.*t5 \(decoder\)")


def test_layers_with_tables_of_their_own_where_the_model_has_one(unchecked):
    config, _ = configure("deberta")
    found = READERS["deberta", ""](config)
    other = DisentangledBias(HEADS, head_dim=8, span=48)
    split = dataclasses.replace(found, bias=(found.bias[0], other))
    with pytest.raises(ValueError, match=r"encoder\.rel_embeddings\.weight is one for all layers"):
        give_weights(split)
    alone = dataclasses.replace(found, bias=mmpos.KerpleBias(HEADS))
    with pytest.raises(ValueError, match=r"deberta has no name for .* of KerpleBias"):
        give_weights(alone)


@pytest.mark.parametrize(
    ("case", "more", "message"),
    [
        ("longt5-encoder", {"encoder_attention_type": "transient-global"}, "a second table"),
        ("mpnet", {"relative_attention_num_buckets": 16}, "buckets=16.*reads 32"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi=False stands for a table"),
        ("falcon", {"alibi": False}, "alibi=False rotates"),
        ("xlnet", {"clamp_len": 9}, "clamp_len=9 and bi_data=False"),
        ("xlnet", {"bi_data": True}, "bi_data=True"),
        ("conformer", {"position_embeddings_type": "rotary"}, "'rotary' has no bias"),
        ("deberta", {"pos_att_type": "c2p|p2p"}, r"got \['c2p', 'p2p'\]"),
        ("deberta", {"pos_att_type": "c2p|c2p"}, r"each once at most"),
        ("deberta", {"talking_head": True}, "talking_head=True mixes"),
    ],
)
def test_options_that_change_it_are_refused(case, more, message):
    config, part = configure(case, **more)
    with pytest.raises(ValueError, match=message) as raised:
        READERS[config.model_type, part](config)
    assert "\n" not in str(raised.value)


def test_what_has_no_bias_has_none():
    config, part = configure("vits", window_size=0)
    assert READERS["vits", part](config).bias is None
    config, _ = configure("conformer", position_embeddings_type=None)
    assert READERS["wav2vec2-conformer", ""](config).bias is None
    config, _ = configure("deberta", pos_att_type=None)
    found = READERS["deberta", ""](config)
    assert found.bias is None
    assert found.scale == 8**-0.5
