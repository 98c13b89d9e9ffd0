"""What `describe` says of each scheme, here written down by hand from timm's sources."""

import pytest
import timm
from torch import nn

from mmpos.interop.timm import Description, Scheme, describe, resize

# for each model: kinds with what is said of the first of them, then tokens and rows
SAID = {
    "vit": (["learned table"], {"grid": (4, 4), "prefix_rows": 1}, 1),
    "deit": (["learned table"], {"grid": (4, 4), "prefix_rows": 2}, 2),
    "registers": (["learned table"], {"grid": (4, 4), "prefix_rows": 0}, 5),
    "gap": (["learned table"], {"grid": (4, 4), "prefix_rows": 0}, 0),
    "hybrid": (["learned table"], {"grid": (4, 4), "prefix_rows": 1}, 1),
    "rope": (
        ["axial RoPE"],
        {"axes": "x, y", "layout": "interleaved", "base": 100.0, "reference": None},
        1,
    ),
    "dinov3": (["DINOv3 RoPE"], {"axes": "y, x", "layout": "half", "base": 100.0}, 5),
    "beit": (["bias table"], {"grid": (8, 8), "prefix_rows": 3, "layers": 2}, 1),
    "beit_shared": (["learned table", "bias table"], {"prefix_rows": 1}, 1),
    "relpos": (["bias MLP"], {"grid": (4, 4), "layers": 2}, 0),
    "relpos_bias": (["bias table"], {"grid": (8, 8), "prefix_rows": 3}, 1),
    "srelpos": (["bias MLP"], {"layers": 1, "where": "shared_rel_pos"}, 0),
    "swin": (["bias table"], {"grid": (8, 8), "layers": 3}, 0),
    "swinv2": (["bias MLP"], {"grid": (8, 8), "layers": 3, "reference": None}, 0),
    "swinv2_cr": (["bias MLP"], {"grid": (4, 4), "layers": 3}, 0),
    "coatnet": (["bias table", "bias table"], {"grid": (4, 4)}, 0),
    "maxvit_tf": (["bias table"], {"grid": (2, 2)}, 0),
    "msra": (["distance table"] * 3, {"grid": (4, 4)}, 0),
    "levit": (["distance table"] * 2, {"grid": (4, 4), "layers": 2}, 0),
    "efficientformer": (["distance table"], {"grid": (7, 7)}, 0),
    "tiny_vit": (["distance table"] * 2, {"grid": (7, 7)}, 0),
    "gcvit": (["bias table"] * 2, {"grid": (4, 4)}, 0),
    "mvitv2": (["decomposed table"] * 8, {"grid": (16,), "axes": "y"}, 0),
    "sam": (["learned table"] + ["decomposed table"] * 4, {"grid": (4, 4)}, 0),
    "hiera": (["learned table"], {"grid": (16, 16)}, 0),
    "hiera_abswin": (["learned table", "window table"], {"grid": (16, 16)}, 0),
    "sam2": (["learned table", "window table"], {"grid": (7, 7)}, 0),
    "naflex": (["learned table"], {"grid": (4, 4), "prefix_rows": 0}, 4),
    "naflex_factorized": (["axis table"] * 2, {"grid": (4,), "axes": "y"}, 4),
    "convit": (["learned table", "relative coordinates"], {"prefix_rows": 0}, 1),
    "crossvit": (["learned table"] * 2, {"grid": (20, 20), "prefix_rows": 1}, 0),
    "nest": (["learned table"] * 3, {"grid": (4, 4)}, 0),
    "clip_pool": (["learned table"], {"grid": (2, 2), "prefix_rows": 1}, 0),
    "lambda": (["bias table"] * 2, {"grid": (4, 4)}, 0),
    "coat_lite": (["convolution"] * 8, {}, 0),
    "xcit": (["Fourier"], {"axes": "y, x", "base": 10000.0}, 1),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_said(name, make):
    kinds, first, tokens = SAID[name]
    said = describe(make(name, device="meta"))
    assert [scheme.kind for scheme in said.schemes] == kinds
    assert {key: getattr(said.schemes[0], key) for key in first} == first
    assert said.prefix_tokens == tokens
    assert said.resizable and len(str(said).splitlines()) == len(kinds) + 2


def test_rotations_by_a_table(make):
    eva, pe, mixed = (describe(make(name)) for name in ("eva02", "pe", "rope_mixed_ape"))
    assert eva.schemes == (
        Scheme(kind="learned table", where="pos_embed", grid=(4, 4), prefix_rows=1, axes="y, x"),
        Scheme(
            kind="axial RoPE",
            where="rope",
            grid=(4, 4),
            axes="y, x",
            layout="interleaved",
            base=10000.0,
            reference=(16, 16),
        ),
    )
    rotation = pe.schemes[1]
    assert (rotation.axes, rotation.offset, rotation.reference) == ("x, y", 1.0, (24, 24))
    assert (mixed.schemes[1].kind, mixed.schemes[1].base) == ("mixed RoPE", 10.0)
    assert "directions learned for each layer and head" in str(mixed)


def test_schemes_of_models_of_any_size():
    kinds = {}
    for name in ("qwen3_vit_88m", "deepseek_vit_412m", "gemma4_vit_167m", "halonet26t"):
        model = timm.create_model(name, device="meta")
        kinds[name] = [scheme.kind for scheme in describe(model).schemes]
        assert describe(model).resizable
    assert kinds == {
        "qwen3_vit_88m": ["learned table", "axial RoPE"],
        "deepseek_vit_412m": ["axial RoPE"],
        "gemma4_vit_167m": ["axis table", "axial RoPE"],
        "halonet26t": ["decomposed table"] * 2,
    }
    mrope = timm.create_model(
        "naflexvit_base_patch16_gap",
        device="meta",
        pos_embed="none",
        rope_type="mrope",
        rope_mrope_section=(8, 12, 12),
    )
    (scheme,) = describe(mrope).schemes
    assert (scheme.kind, scheme.layout) == ("M-RoPE", "half")


def test_after_resizing_it_says_what_is_now(make):
    model = make("swinv2")
    assert describe(model).image_size == (128, 128)
    said = resize(model, (128, 256))
    assert said == describe(model) and said.image_size == (128, 256) and said.grid == (32, 64)
    (scheme,) = said.schemes
    assert scheme.grid == (8, 16) and scheme.reference == (8, 8)


def test_a_model_without_positions_or_of_no_known_class_is_described():
    convolutions = describe(timm.create_model("resnet18", device="meta"))
    assert convolutions.schemes == () and "no positions found" in str(convolutions)
    unknown = describe(timm.create_model("poolformer_s12", device="meta"))
    assert unknown.schemes == () and not unknown.resizable and "not known" in unknown.how
    none = timm.create_model("vit_tiny_patch16_224", device="meta", pos_embed="none", depth=1)
    assert describe(none).schemes == () and "only the size" in describe(none).how
    assert describe(timm.layers.PatchEmbed()).schemes == ()
    assert isinstance(unknown, Description) and hash(unknown) is not None


def test_what_is_not_of_timm_is_refused(make, unchecked):
    with pytest.raises(TypeError, match="a model of timm is needed, got Linear"):
        describe(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"got DataParallel: give its \.module"):
        describe(nn.DataParallel(make("vit")))
    with pytest.raises(TypeError, match="got str"):
        resize("vit_tiny_patch16_224", 224)


def test_subclasses_and_wrappers_for_features(make, image):
    class Mine(timm.models.VisionTransformer):
        """A user's own."""

    mine = Mine(img_size=32, embed_dim=12, depth=1, num_heads=2)
    assert resize(mine, 48).schemes[0].grid == (3, 3)
    features = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, depth=2, features_only=True, out_indices=[1]
    )
    assert resize(features, (64, 96)).grid == (4, 6)
    assert features(image(64, 96))[0].shape[-2:] == (4, 6)
