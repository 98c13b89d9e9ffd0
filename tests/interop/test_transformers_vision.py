"""Towers of patches: the encodings of their configurations do what their channel plans say."""

import pytest
import torch
from transformers import AutoConfig, CLIPVisionModel, Dinov2Model, SiglipVisionModel, ViTModel

from mmpos.interop.transformers import ChannelPlan, channel_plan, encodings


@pytest.mark.peer("transformers")
@pytest.mark.parametrize(
    "kind",
    [
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llama4"),
        *("pixtral", "dinov3_vit", "vjepa2", "qwen2_vl_text", "qwen3_vl_text"),
    ],
)
def test_encodings_are_the_plans_of_their_towers(kind):
    config = AutoConfig.for_model(kind)
    config = getattr(config, "vision_config", config)
    rotary = encodings(config).rotary
    assert ChannelPlan.of(rotary).differences(channel_plan(config)) == []
    assert ChannelPlan.of(rotary).is_rotation == (kind != "vjepa2")


@pytest.mark.peer("transformers")
@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("vit", ViTModel),
        ("dinov2", Dinov2Model),
        ("clip_vision_model", CLIPVisionModel),
        ("siglip_vision_model", SiglipVisionModel),
    ],
)
def test_tables_have_the_rows_of_the_model(kind, model):
    config = AutoConfig.for_model(
        kind, hidden_size=12, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8
    )
    found = encodings(config)
    with torch.device("meta"):
        state = model(config).state_dict()
    (table,) = (own for name, own in state.items() if "position_embedding" in name)
    rows = found.additive.prefix_rows + found.additive.table.flatten(0, 1).shape[0]
    assert table.shape[-2:] == (rows, 12)


def test_rectangles_of_patches():
    config = AutoConfig.for_model("vit", image_size=(224, 160), patch_size=(16, 32))
    assert encodings(config).additive.grid == (14, 5)


def test_a_network_within_another(unchecked):
    config = AutoConfig.for_model("qwen2_vl")
    assert encodings(config, "vision").model_type == "qwen2_vl_vision"
    assert encodings(config, "text").rotary.sections == (16, 24, 24)
    with pytest.raises(ValueError, match="part must be one of"):
        encodings(config, "sight")  # pyright: ignore[reportArgumentType]
