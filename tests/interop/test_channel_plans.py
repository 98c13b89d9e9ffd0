"""Channel plans of vision towers against transformers' own modules, and mmpos' encodings."""

import math
from importlib import import_module

import pytest
import torch
import transformers
from transformers import AutoConfig

import mmpos
from mmpos import RotaryEncoding, VJEPA2Encoding
from mmpos.coordinates import Centered, OneBased, Scaled
from mmpos.frequencies import PositionInterpolation
from mmpos.interop.transformers.plan import ChannelPlan
from mmpos.interop.transformers.towers import channel_plan
from mmpos.positions import absent, grid, join

FAR = torch.tensor([311, 270])


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def heads(length, width, count=3):
    """Queries and keys of unit length, of unlike numbers of heads."""
    normalize = torch.nn.functional.normalize
    return [normalize(torch.randn(2, h, length, width), dim=-1) for h in (count, 1)]


def of(name):
    """transformers' module of a model."""
    return import_module(f"transformers.models.{name}.modeling_{name}")


def config(name, part="vision_config", **sizes):
    return getattr(AutoConfig.for_model(name, **{part: sizes}), part)


def tower(name, cls, heads=3, width=32, part="vision_config", **more):
    """A tower's configuration, its rotary module and what applies it."""
    module = of(name)
    own = config(name, part, hidden_size=heads * width, num_attention_heads=heads, **more)
    return own, getattr(module, cls)(own), module


AXIAL = [
    ("qwen2_5_vl", "Qwen2_5_VLVision"),
    ("qwen3_vl", "Qwen3VLVision"),
    ("qwen3_vl_moe", "Qwen3VLMoeVision"),
    ("qwen3_5", "Qwen3_5Vision"),
    ("qwen3_5_moe", "Qwen3_5MoeVision"),
    ("glm4v", "Glm4vVision"),
    ("glm4v_moe", "Glm4vMoeVision"),
    ("glm_ocr", "GlmOcrVision"),
    ("ernie4_5_vl_moe", "Ernie4_5_VLMoeVision"),
    ("exaone4_5", "Exaone4_5_Vision"),
    ("video_llama_3", "VideoLlama3Vision"),
    ("paddleocr_vl", "PaddleOCRVision"),
    ("lfm3_vl", "Lfm3VlVision"),
    ("kimi_k25", "Kimi_K25Vision"),
    ("step3p7", "Step3p7Vision"),
    ("inkling2", "Inkling2Vision"),
]
OTHERWISE = {"kimi_k25", "step3p7", "inkling2"}


def turned_by_vision(module, rotary, q, k, positions):
    """``[B, H, L, D]`` by a function that takes ``[L, H, D]``."""
    cos, sin = rotary(q, positions)
    apply = module.apply_rotary_pos_emb_vision
    rows = [
        apply(a.transpose(0, 1), b.transpose(0, 1), cos, sin) for a, b in zip(q, k, strict=True)
    ]
    return [torch.stack(part).transpose(1, 2) for part in zip(*rows, strict=True)]


def axial(width, **more):
    return RotaryEncoding(width, 2, layout="half", **more)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize(("name", "cls"), AXIAL)
def test_axial_towers(name, cls):
    own, rotary, module = tower(name, f"{cls}RotaryEmbedding")
    positions = join(grid(3, 7), grid(2, 4) + FAR)
    q, k = heads(len(positions), 32)
    plan = channel_plan(own)
    counted = positions + 1 if name == "inkling2" else positions  # as its forward counts them
    expected = turned_by_vision(module, rotary, q, k, counted)
    for x, turned in zip((q, k), expected, strict=True):
        close(plan(x, positions), turned)
    assert plan.is_rotation
    one_based = OneBased() if name == "inkling2" else None
    same = ChannelPlan.of(axial(32, base=own.rope_parameters["rope_theta"], coordinates=one_based))
    if name in OTHERWISE:
        assert plan.differences(same)
        plan = plan.reorder(plan.order("half"))
    assert plan.differences(same) == []


@pytest.mark.peer("transformers")
def test_qwen2_vl_and_omni_towers():
    module = of("qwen2_vl")
    own = config("qwen2_vl", embed_dim=96, num_heads=3)
    rotary = module.Qwen2VLVisionRotaryEmbedding(own)
    positions = grid(2, 5) + FAR
    q, k = heads(10, 32)
    for x, expected in zip((q, k), turned_by_vision(module, rotary, q, k, positions), strict=True):
        close(channel_plan(own)(x, positions), expected)
    assert channel_plan(own).differences(ChannelPlan.of(axial(32))) == []

    module = of("qwen2_5_omni")
    sizes = {"hidden_size": 96, "num_heads": 3}
    whole = transformers.Qwen2_5OmniThinkerConfig(vision_config=sizes)
    rotary = module.Qwen2_5OmniVisionRotaryEmbedding(whole.vision_config)
    expected = turned_by_vision(module, rotary, q, k, positions)
    close(channel_plan(whole)(q, positions), expected[0])


@pytest.mark.peer("transformers")
def test_pixtral():
    module = of("pixtral")
    own = transformers.PixtralVisionConfig(hidden_size=96, num_attention_heads=3)
    positions = grid(3, 5) + FAR
    q, k = heads(15, 32)
    cos, sin = module.PixtralVisionRotaryEmbedding(own)(q, positions)
    expected = module.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=0)
    plan = channel_plan(own)
    for x, turned in zip((q, k), expected, strict=True):
        close(plan(x, positions), turned)
    same = axial(32, extension=[None, PositionInterpolation(factor=10000 ** (2 / 32))])
    assert plan.differences(ChannelPlan.of(same)) == []
    assert "ratio is 1.778" in plan.differences(ChannelPlan.of(axial(32)))[0]
    llava = transformers.LlavaConfig(vision_config=own)
    assert channel_plan(llava) == plan


@pytest.mark.peer("transformers")
def test_gemma4():
    own, rotary, module = tower("gemma4", "Gemma4VisionRotaryEmbedding", head_dim=32)
    positions = join(grid(3, 5), grid(2, 3) + FAR)
    columns_first = positions.flip(-1)[None]
    q, k = heads(len(positions), 32)
    cos, sin = rotary(q, columns_first.expand(2, -1, -1))
    plan = channel_plan(own)
    for x in (q, k):
        expected = module.apply_multidimensional_rope(
            x.transpose(1, 2), cos, sin, columns_first
        ).transpose(1, 2)
        close(plan(x, positions), expected)
    encoding = RotaryEncoding(32, 2, base=100, order=(1, 0))
    for by, order in (("axis", (0, 1)), ("pair", (1, 0))):
        moved = plan.reorder(plan.order("interleaved", by=by))
        encoding = RotaryEncoding(32, 2, base=100, order=order)
        assert moved.differences(ChannelPlan.of(encoding)) == []
    assert "w 0–15; h 16–31; pairs (c, c + 8)" in str(plan)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("sizes", [(3, 40), (20, 4)])
def test_dinov3(sizes):
    module = of("dinov3_vit")
    own = transformers.DINOv3ViTConfig(
        hidden_size=96, num_attention_heads=3, patch_size=4, pos_embed_rescale=2.0
    )
    cos, sin = module.DINOv3ViTRopePositionEmbedding(own).eval()(
        torch.zeros(1, 3, 4 * sizes[0], 4 * sizes[1])
    )
    q, k = heads(5 + math.prod(sizes), 32)
    positions = join(absent(5, 2), grid(*sizes))
    plan = channel_plan(own)
    for x, turned in zip((q, k), module.apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        close(plan(x, positions, sizes), turned)
        assert torch.equal(plan(x, positions, sizes)[:, :, :5], x[:, :, :5])
    reading = Centered(turns=True, rescale=2.0)
    encoding = axial(32, base=100, coordinates=reading)
    assert plan.differences(ChannelPlan.of(encoding)) == []
    close(mmpos.rotate(q, encoding.eval()(positions, sizes)), plan(q, positions, sizes))
    assert plan.differences(ChannelPlan.of(axial(32, base=100))) == [
        "coordinates: Centered(turns=True, rescale=2.0) and Index()"
    ]
    with pytest.raises(ValueError, match="Centered coordinates need the size of the grid"):
        plan(q, positions)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("width", [16, 22, 34])
def test_vjepa2_is_no_rotation(width):
    own = transformers.VJEPA2Config(hidden_size=3 * width, num_attention_heads=3, crop_size=80)
    peer = of("vjepa2").VJEPA2RopeAttention(own, 3 * width, 3)
    sizes = (40, peer.grid_size, peer.grid_size)
    q = heads(math.prod(sizes), width)[0]
    expected = peer.apply_rotary_embeddings(q, peer.get_position_ids(q[:, 0]))
    plan = channel_plan(own)
    close(plan(q, grid(*sizes)), expected)
    assert plan.differences(ChannelPlan.of(VJEPA2Encoding(width))) == []
    close(mmpos.rotate(q, VJEPA2Encoding(width)(grid(*sizes))), plan(q, grid(*sizes)))
    meant = ChannelPlan.of(RotaryEncoding(width, 3, split=(width // 6,) * 3))
    if width == 16:  # two pairs an axis
        assert "features 0 and 1 are a pair, and turn by different frequencies" in plan.faults[0]
    assert not plan.is_rotation and meant.is_rotation
    assert len(plan.differences(meant)) == 1
    with pytest.raises(ValueError, match="no layout makes it a rotation: features 0 and 1"):
        plan.order("half")


@pytest.mark.peer("transformers")
def test_llama4():
    module = of("llama4")
    own = transformers.Llama4VisionConfig(
        hidden_size=96, num_attention_heads=3, image_size=20 * 4, patch_size=4
    )
    table = module.Llama4VisionRotaryEmbedding(own)(torch.zeros(1))
    q, k = (x.transpose(1, 2) for x in heads(401, 32))
    positions = join(grid(20, 20), absent(1, 2))
    plan = channel_plan(own)
    for x, turned in zip((q, k), module.vision_apply_rotary_emb(q, k, table), strict=True):
        close(plan(x.transpose(1, 2), positions), turned.transpose(1, 2))
    encoding = RotaryEncoding(32, 2, order=(1, 0), coordinates=OneBased())
    assert plan.differences(ChannelPlan.of(encoding)) == []


@pytest.mark.peer("transformers")
def test_minimax():
    own, rotary, module = tower("minimax_m3_vl", "MiniMaxM3VLVisionRotaryEmbedding")
    positions = join(grid(2, 3, 5), grid(2, 1, 4) + torch.tensor([7, 300, 411]))
    q, k = heads(len(positions), 32)
    turned = turned_by_vision(module, rotary, q, k, positions)
    plan = channel_plan(own)
    for x, expected in zip((q, k), turned, strict=True):
        close(plan(x, positions), expected)
        assert torch.equal(plan(x, positions)[..., 30:], x[..., 30:])
    encoding = RotaryEncoding(32, 3, split=(5, 5, 5), layout="half")
    assert plan.differences(ChannelPlan.of(encoding)) == []
    assert "t 0–4, 15–19; h 5–9, 20–24; w 10–14, 25–29; passing 30–31" in str(plan)


@pytest.mark.peer("transformers")
def test_sam():
    q, k = heads(36, 32)
    positions = grid(4, 9) + FAR
    same = ChannelPlan.of(RotaryEncoding(32, 2, order=(1, 0)))
    for name, cls in (("sam2_video", "Sam2Video"), ("sam3_tracker_video", "Sam3TrackerVideo")):
        module = of(name)
        own = AutoConfig.for_model(
            name, memory_attention_hidden_size=64, memory_attention_downsample_rate=2
        )
        cos, sin = getattr(module, f"{cls}VisionRotaryEmbedding")(own)(q, positions.flip(-1))
        turned = module.apply_rotary_pos_emb_2d(q, k, cos, sin)
        close(channel_plan(own)(q, positions), turned[0])
        close(channel_plan(own)(k, positions), turned[1])
        assert channel_plan(own).differences(same) == []

    module = of("sam3")
    own = transformers.Sam3ViTConfig(
        hidden_size=96, num_attention_heads=3, image_size=24, patch_size=4, window_size=3
    )
    for window, size in ((0, 6), (3, 3)):
        layer = module.Sam3ViTLayer(own, window)
        x = q[:, :, : size * size]
        cos, sin = layer.rotary_emb(x, layer.position_ids)
        turned = module.apply_rotary_pos_emb_2d(x, x, cos, sin)[0]
        plan = channel_plan(own)
        close(plan(x, grid(size, size), (size, size)), turned)
    encoding = RotaryEncoding(32, 2, order=(1, 0), coordinates=Scaled((3, 3)))
    assert plan.differences(ChannelPlan.of(encoding)) == []
