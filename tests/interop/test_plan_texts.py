"""Channel plans of multimodal text models, and of configurations that have none."""

from importlib import import_module

import pytest
import torch
import transformers
from transformers import AutoConfig

import mmpos
from mmpos import MRoPE
from mmpos.coordinates import Index
from mmpos.frequencies import NTKAware
from mmpos.interop.transformers.plan import ChannelPlan
from mmpos.interop.transformers.towers import channel_plan
from mmpos.positions import grid, join
from mmpos.rotary.xdrope import XDRoPE


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def heads(length, width):
    """Queries and keys of unit length, of unlike numbers of heads."""
    normalize = torch.nn.functional.normalize
    return [normalize(torch.randn(2, h, length, width), dim=-1) for h in (3, 1)]


def of(name):
    """transformers' module of a model."""
    return import_module(f"transformers.models.{name}.modeling_{name}")


def config(name, part, **sizes):
    return getattr(AutoConfig.for_model(name, **{part: sizes}), part)


TEXTS = [
    ("qwen2_vl", "Qwen2VLRotaryEmbedding", (6, 5, 5), False, 1),
    ("qwen2_5_vl", "Qwen2_5_VLRotaryEmbedding", (4, 6, 6), False, 1),
    ("qwen3_vl", "Qwen3VLTextRotaryEmbedding", (6, 5, 5), True, 1),
    ("qwen3_vl", "Qwen3VLTextRotaryEmbedding", (12, 2, 2), True, 1),
    ("qwen3_vl_moe", "Qwen3VLMoeTextRotaryEmbedding", (6, 5, 5), True, 1),
    ("qwen3_5", "Qwen3_5TextRotaryEmbedding", (3, 3, 2), True, 0.5),
    ("glm4v", "Glm4vTextRotaryEmbedding", (3, 2, 3), False, 0.5),
    ("glm_ocr", "GlmOcrTextRotaryEmbedding", (3, 2, 3), False, 0.5),
    ("glm4v_moe", "Glm4vMoeTextRotaryEmbedding", (3, 2, 3), False, 0.5),
]


@pytest.mark.peer("transformers")
@pytest.mark.parametrize(("name", "cls", "sections", "interleaved", "share"), TEXTS)
def test_multimodal_text(name, cls, sections, interleaved, share):
    given = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": list(sections)}
    given |= {"partial_rotary_factor": share} if share != 1 else {}
    own = config(
        name,
        "text_config",
        hidden_size=96,
        num_attention_heads=3,
        num_key_value_heads=1,
        rope_parameters=given,
        **({"head_dim": 32} if name.startswith(("qwen3", "glm_ocr")) else {}),
    )
    module = of(name)
    positions = join(grid(2, 3, 4), grid(2, 1, 4) + torch.tensor([320, 300, 411]))
    q, k = heads(len(positions), 32)
    ids = positions.T[:, None].expand(3, 2, -1)
    cos, sin = getattr(module, cls)(own)(q, ids.clone())
    plan = channel_plan(own)
    for x, turned in zip((q, k), module.apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        close(plan(x, positions), turned)
    encoding = MRoPE(
        32,
        sections=sections,
        interleaved=interleaved,
        base=5e5,
        rotary_dim=None if share == 1 else 16,
        layout="interleaved" if name in ("glm4v", "glm_ocr") else "half",
    )
    assert plan.differences(ChannelPlan.of(encoding)) == []
    if share == 1:
        assert plan.order("half", by="pair") == tuple(range(32))


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("alpha", [None, 1000.0])
def test_hunyuan_is_no_rotation(alpha):
    given = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4, 4]}
    given |= {} if alpha is None else {"rope_type": "dynamic", "alpha": alpha, "factor": 1.0}
    own = config(
        "hunyuan_vl",
        "text_config",
        hidden_size=96,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        rope_parameters=given,
    )
    module = of("hunyuan_vl")
    positions = torch.randint(0, 500, (2, 9, 4))
    q, k = heads(9, 32)
    cos, sin = module.HunYuanVLRotaryEmbedding(own)(q, positions.permute(2, 0, 1))
    plan = channel_plan(own)
    for x, turned in zip((q, k), module.apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        close(plan(x, positions), turned)
    encoding = XDRoPE(32, 4, extension=None if alpha is None else NTKAware(factor=alpha))
    assert plan.differences(ChannelPlan.of(encoding)) == []
    close(mmpos.rotate(q, encoding(positions)), plan(q, positions))
    assert (
        plan.faults[0]
        == "features 0 and 16 are a pair, and read different axes (axis 0 and axis 2)"
    )
    assert plan.coordinates.spec() == Index().spec()


def test_configurations_without_a_plan():
    with pytest.raises(ValueError, match="'qwen2_vl_visio': did you mean qwen2_vl_vision or"):
        channel_plan(_named("qwen2_vl_visio"))
    with pytest.raises(ValueError, match="siglip_vision_model has a table, and rotates nothing"):
        channel_plan(AutoConfig.for_model("gemma3"))
    with pytest.raises(ValueError, match="names its model_type"):
        channel_plan({})
    with pytest.raises(TypeError, match="got int"):
        channel_plan(3)
    own = transformers.PixtralVisionConfig(hidden_size=96, num_attention_heads=3)
    own.rope_parameters = {"rope_type": "yarn", "rope_theta": 1e4}
    with pytest.raises(ValueError, match="pixtral has rope_type 'yarn'"):
        channel_plan(own)
    own = config("qwen2_vl", "text_config", hidden_size=96, num_attention_heads=3)
    with pytest.raises(ValueError, match=r"mrope_section \[16, 24, 24\], expected .* 16 in all"):
        channel_plan(own)


def _named(kind):
    own = transformers.PixtralVisionConfig()
    own.model_type = kind
    return own
