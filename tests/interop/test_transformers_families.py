"""Queries and keys turned by encodings read from configurations, as each model's own code does."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig

import mmpos
from mmpos.interop.transformers import encodings
from mmpos.interop.transformers.families import FAMILIES

LAYERS = 8
LATENT = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 24, "kv_lora_rank": 16}


def configuration(kind, **options):
    """A small one of a family, with heads of 16 features and as many M-RoPE pairs as they have."""
    family, known = FAMILIES[kind], CONFIG_MAPPING[kind].__dataclass_fields__
    small = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    small["num_hidden_layers"] = LAYERS
    if family.latent:
        small |= LATENT
    elif "head_dim" in known:
        small["head_dim"] = 16
    if family.sections:
        fraction = 0.5 if family.partial else 1.0
        sections = [2, 1, 1] if family.partial else [3, 3, 2]
        small["rope_parameters"] = {"rope_theta": 1e4, "mrope_section": sections}
        small["rope_parameters"] |= {"partial_rotary_factor": fraction} if family.partial else {}
    return AutoConfig.for_model(kind, **{**small, **options})


def turned_by_its_own(config, layer_type, q, k, ids):
    """What the modelling code of a family makes of q and k ``[B, H, L, D]``."""
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    found = [
        cls
        for own, cls in vars(module).items()
        if own.endswith("RotaryEmbedding") and "Vision" not in own and inspect.isclass(cls)
    ]
    rotary = found[0](config)
    asks = "layer_type" in inspect.signature(rotary.forward).parameters
    turns = rotary(q, ids, **({"layer_type": layer_type} if asks else {}))
    if config.model_type == "llama4_text":
        turned = module.apply_rotary_emb(q.transpose(1, 2), k.transpose(1, 2), turns)
        return [x.transpose(1, 2) for x in turned]
    pairs = isinstance(turns, torch.Tensor) or config.model_type == "gpt_oss"
    width = 2 * turns[0].shape[-1] if pairs else turns[0].shape[-1]
    start = q.shape[-1] - width if FAMILIES[config.model_type].latent else 0
    parts = [x.split((start, width, x.shape[-1] - start - width), -1) for x in (q, k)]
    spans = [part[1] for part in parts]
    if config.model_type == "deepseek_v2":
        turned = module.apply_rotary_emb(*spans, turns)
    elif config.model_type == "deepseek_v3":  # which leaves the pairs in another order
        turned = module.apply_rotary_pos_emb_interleave(*spans, *turns)
        turned = [x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for x in turned]
    elif "q" in inspect.signature(module.apply_rotary_pos_emb).parameters:
        turned = module.apply_rotary_pos_emb(*spans, *turns)
    else:
        turned = [module.apply_rotary_pos_emb(x, *turns) for x in spans]
    return [
        torch.cat((before, x, after), -1)
        for (before, _, after), x in zip(parts, turned, strict=True)
    ]


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_every_family_turns_as_its_own_code(kind):
    config = configuration(kind)
    found = encodings(config)
    ids = torch.tensor([[0, 1, 5, 300, 4000], [7, 0, 2, 1000, 3]])
    positions = ids.unsqueeze(-1)
    if FAMILIES[kind].sections:
        ids = torch.stack((ids, ids.flip(1), ids + 3))
        positions = ids.movedim(0, -1)
    kinds = getattr(config, "layer_types", None)
    for rotary, layers in found.each("rotary"):
        if rotary.rotary_dim == 0:
            continue
        q, k = torch.randn(2, 2, 3, 5, rotary.head_dim).unbind(0)
        expected = turned_by_its_own(config, kinds[layers[0]] if kinds else None, q, k, ids)
        length = positions.amax((1, 2)) + 1 if rotary.needs_length else None
        rotation = rotary(positions, length=length)
        for x, own in zip((q, k), expected, strict=True):
            torch.testing.assert_close(mmpos.rotate(x, rotation), own, atol=2e-3, rtol=0)
            near = positions.amax(-1) < 10
            mine = mmpos.rotate(x, rotation).transpose(1, 2)[near]
            torch.testing.assert_close(mine, own.transpose(1, 2)[near], atol=2e-6, rtol=1e-5)


POSITIONS = torch.tensor([[0, 1, 5, 300, 1000], [7, 0, 2, 900, 3]])


def close(rotary, theirs, positions=None):
    q, k = torch.randn(2, 2, 3, 5, 16).unbind(0)
    rotation = rotary(POSITIONS.unsqueeze(-1) if positions is None else positions)
    for x, own in zip((q, k), theirs(q, k), strict=True):
        torch.testing.assert_close(mmpos.rotate(x, rotation), own, atol=2e-4, rtol=0)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("kind", ["gptj", "codegen"])
def test_gptj_and_codegen(kind):
    config = AutoConfig.for_model(kind, n_embd=96, n_head=6, n_layer=2, rotary_dim=12)
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    made = getattr(module, {"gptj": "GPTJ", "codegen": "CodeGen"}[kind] + "RotaryEmbedding")
    sin, cos = made(config)(torch.zeros(1), POSITIONS)

    def turn(*given):
        for x in given:
            spans = x.transpose(1, 2).split((12, 4), -1)
            yield torch.cat((module.apply_rotary_pos_emb(spans[0], sin, cos), spans[1]), -1)

    rotary = encodings(config).rotary
    assert (rotary.rotary_dim, rotary.layout) == (12, "interleaved")
    close(rotary, lambda q, k: [x.transpose(1, 2) for x in turn(q, k)])


@pytest.mark.peer("transformers")
def test_esm_conformer_and_hunyuan():
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 2}
    esm = AutoConfig.for_model("esm", position_embedding_type="rotary", **sizes)
    module = importlib.import_module("transformers.models.esm.modeling_esm")
    turns = module.EsmRotaryEmbedding(esm)(torch.zeros(1), POSITIONS)
    close(encodings(esm).rotary, lambda q, k: module.apply_rotary_pos_emb(q, k, *turns))

    conformer = AutoConfig.for_model(
        "wav2vec2-conformer", position_embeddings_type="rotary", rotary_embedding_base=500, **sizes
    )
    module = importlib.import_module(
        "transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer"
    )
    cos, sin = module.Wav2Vec2ConformerRotaryPositionalEmbedding(conformer)(torch.zeros(1, 9, 96))
    attention = module.Wav2Vec2ConformerSelfAttention(conformer)
    states = torch.randn(2, 9, 96)
    turned = attention._apply_rotary_embedding(states, torch.stack((cos, sin)))
    rotation = encodings(conformer).rotary(mmpos.positions.sequence(9))
    mine = mmpos.rotate(states.unflatten(-1, (6, 16)).transpose(1, 2), rotation)
    torch.testing.assert_close(mine.transpose(1, 2).flatten(2), turned, atol=1e-5, rtol=0)

    rope = {"rope_type": "dynamic", "alpha": 100.0, "factor": 1.0, "rope_theta": 1e4}
    rope["mrope_section"] = [3, 3, 2]
    hunyuan = AutoConfig.for_model(
        "hunyuan_vl_text", head_dim=16, num_key_value_heads=6, rope_parameters=rope, **sizes
    )
    module = importlib.import_module("transformers.models.hunyuan_vl.modeling_hunyuan_vl")
    ids = torch.stack((POSITIONS, POSITIONS.flip(1), POSITIONS + 3))
    turns = module.HunYuanVLRotaryEmbedding(hunyuan)(torch.zeros(1), ids)
    theirs = lambda q, k: module.apply_rotary_pos_emb(q, k, *turns)  # noqa: E731
    close(encodings(hunyuan).rotary, theirs, ids.movedim(0, -1))


@pytest.mark.peer("transformers")
def test_roformer():
    config = AutoConfig.for_model(
        "roformer", hidden_size=96, num_attention_heads=6, num_hidden_layers=1, vocab_size=9
    )
    module = importlib.import_module("transformers.models.roformer.modeling_roformer")
    waves = module.RoFormerSinusoidalPositionalEmbedding(1001, 16)
    waves.weight.data = waves.create_weight()
    table = waves.weight[POSITIONS][:, None]
    apply = module.RoFormerSelfAttention.apply_rotary_position_embeddings
    close(encodings(config).rotary, lambda q, k: apply(table, q, k))
