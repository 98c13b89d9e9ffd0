"""Small timm models of each family, with every position table of unit-normal values."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

TINY = {"embed_dim": 24, "depth": 2, "num_heads": 2}
MIXED = {"embed_dim": 32, "depth": 2, "num_heads": 2}
STAGES = {"embed_dim": 12, "depths": (1, 2), "num_heads": (1, 2)}
LEVIT = {"embed_dim": (32, 48), "depth": (1, 1), "num_heads": (2, 3), "key_dim": 8}
# architecture, what makes it small; the sizes it begins at are squares of 64 to 128
MODELS: dict[str, tuple[str, dict]] = {
    "vit": ("vit_tiny_patch16_224", {"img_size": 64, **TINY}),
    "deit": ("deit_tiny_distilled_patch16_224", {"img_size": 64, **TINY}),
    "registers": ("vit_small_patch14_reg4_dinov2", {"img_size": 56, **TINY}),
    "gap": ("vit_base_patch16_siglip_gap_224", {"img_size": 64, **TINY}),
    "hybrid": ("vit_tiny_r_s16_p8_224", {"img_size": 128, **TINY}),
    "eva02": ("eva02_tiny_patch14_224", {"img_size": 56, **TINY}),
    "pe": ("vit_pe_core_tiny_patch16_384", {"img_size": 64, **MIXED}),
    "rope": ("vit_small_patch16_rope_224", {"img_size": 64, **TINY}),
    "rope_mixed_ape": ("vit_small_patch16_rope_mixed_ape_224", {"img_size": 64, **TINY}),
    "dinov3": ("vit_small_patch16_dinov3", {"img_size": 64, **MIXED}),
    "beit": ("beit_base_patch16_224", {"img_size": 64, "patch_size": 8, **TINY}),
    "beit_shared": (
        "beit_base_patch16_224",
        {
            "img_size": 64,
            "patch_size": 8,
            "use_abs_pos_emb": True,
            "use_rel_pos_bias": False,
            "use_shared_rel_pos_bias": True,
            **TINY,
        },
    ),
    "relpos": ("vit_relpos_small_patch16_224", {"img_size": 64, **TINY}),
    "relpos_bias": (
        "vit_relpos_small_patch16_224",
        {"img_size": 64, "patch_size": 8, "rel_pos_type": "bias", "class_token": True, **TINY},
    ),
    "srelpos": ("vit_srelpos_small_patch16_224", {"img_size": 64, **TINY}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 128, "window_size": 8, **STAGES},
    ),
    "swinv2": (
        "swinv2_tiny_window8_256",
        {"img_size": 128, "window_size": 8, "pretrained_window_sizes": (0, 0), **STAGES},
    ),
    "swinv2_cr": ("swinv2_cr_tiny_ns_224", {"img_size": 64, "window_size": 4, **STAGES}),
    "coatnet": ("coatnet_bn_0_rw_224", {"img_size": 64, "embed_dim": (16, 32, 32, 32)}),
    "maxvit_mlp": ("maxvit_rmlp_pico_rw_256", {"img_size": 64, "embed_dim": (32,) * 4}),
    "maxvit_tf": ("maxvit_tiny_tf_224", {"img_size": 64, "embed_dim": (32,) * 4}),
    "msra": ("efficientvit_m0", {"img_size": 64}),
    "levit": ("levit_128s", {"img_size": 64, **LEVIT}),
    "levit_conv": ("levit_conv_128s", {"img_size": 64, **LEVIT}),
    "efficientformer": ("efficientformer_l1", {}),
    "efficientformerv2": ("efficientformerv2_s0", {"img_size": 64}),
    "tiny_vit": ("tiny_vit_5m_224", {"depths": (1, 1, 1, 1)}),
    "gcvit": ("gcvit_xxtiny", {"img_size": 128}),
    "mvitv2": ("mvitv2_tiny", {"img_size": 64}),
    "sam": (
        "samvit_base_patch16_224",
        {
            "img_size": 64,
            "global_attn_indexes": (1,),
            "window_size": 3,
            "use_abs_pos": True,
            **TINY,
        },
    ),
    "hiera": ("hiera_tiny_224", {"img_size": 64, "embed_dim": 12, "stages": (1, 1, 1, 1)}),
    "hiera_abswin": (
        "hiera_small_abswin_256",
        {"img_size": 64, "embed_dim": 12, "stages": (1, 1, 1, 1)},
    ),
    "sam2": (
        "sam2_hiera_tiny",
        {
            "embed_dim": 16,
            "stages": (1, 1, 2, 1),
            "global_att_blocks": (3,),
            "window_spec": (4, 2, 4, 2),
        },
    ),
    "naflex": ("naflexvit_base_patch16_gap", {"pos_embed_grid_size": (4, 4), **TINY}),
    "naflex_square": (
        "naflexvit_base_patch16_par_gap",
        {"pos_embed_grid_size": (4, 4), **TINY},
    ),
    "naflex_factorized": (
        "naflexvit_base_patch16_parfac_gap",
        {"pos_embed_grid_size": (4, 4), **TINY},
    ),
    "cait": ("cait_xxs24_224", {"img_size": 64, **TINY}),
    "convit": (
        "convit_tiny",
        {"img_size": 64, "embed_dim": 12, "depth": 3, "local_up_to_layer": 2},
    ),
    "crossvit": ("crossvit_9_240", {"depth": [[1, 1, 0]], "embed_dim": [16, 24]}),
    "pit": ("pit_ti_224", {"img_size": 64, "depth": (1, 1, 1)}),
    "tnt": ("tnt_s_patch16_224", {"img_size": 64, "depth": 1}),
    "volo": ("volo_d1_224", {"img_size": 64}),
    "visformer": ("visformer_tiny", {"img_size": 64, "depth": (1, 1, 1)}),
    "nest": ("nest_tiny", {"img_size": 64}),
    "coat": ("coat_tiny", {"img_size": 64}),
    "coat_lite": ("coat_lite_tiny", {"img_size": 64}),
    "clip_pool": ("resnet50_clip", {"img_size": 64}),
    "botnet": ("botnet26t_256", {"img_size": 64}),
    "lambda": ("lambda_resnet26rpt_256", {"img_size": 64}),
    "xcit": ("xcit_nano_12_p16_224", {"depth": 1}),
    "twins": ("twins_svt_small", {"depths": (1, 1, 1, 1)}),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "every" in metafunc.fixturenames:
        metafunc.parametrize("every", MODELS)


@pytest.fixture(scope="session")
def make() -> Callable[..., nn.Module]:
    """A model by its name here, with more arguments of timm's; nothing of it is near zero."""

    def call(name: str, **more: object) -> nn.Module:
        architecture, small = MODELS[name]
        torch.manual_seed(0)
        model = timm.create_model(architecture, num_classes=5, **{**small, **more}).eval()
        for key, parameter in model.named_parameters():
            if parameter.is_meta:
                continue
            if parameter.abs().max() < 1e-3 and not key.endswith("bias"):  # zero by design
                vector = parameter.ndim == 1 or "gamma" in key or ".ls" in key
                parameter.data = parameter.data.fill_(1) if vector else parameter.data.normal_() / 3
            if re.search(r"pos_(embed|emb|h|w)|_pos|pos_embed_win|_rel$|bias_table|biases$", key):
                parameter.data.normal_()
        return model

    return call


@pytest.fixture(scope="session")
def image() -> Callable[..., Tensor]:
    def call(*size: int, batch: int = 1) -> Tensor:
        return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(3))

    return call


@pytest.fixture(scope="session")
def out() -> Callable[..., Tensor]:
    """What a model makes of an image, as one tensor."""

    def call(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = model(x)
        return torch.cat(y, -1) if isinstance(y, tuple) else y

    return call


@pytest.fixture(scope="session")
def alike(out: Callable, image: Callable) -> Callable[..., None]:
    """Whether two models have the same parameters, buffers and sizes, and make the same of it."""

    def call(one: nn.Module, other: nn.Module, size: tuple[int, ...]) -> None:
        for kind in ("named_parameters", "named_buffers"):
            ours, theirs = (dict(getattr(each, kind)()) for each in (one, other))
            assert ours.keys() == theirs.keys()
            for key, value in ours.items():
                torch.testing.assert_close(
                    value, theirs[key], rtol=1e-5, atol=2e-4, msg=lambda m, k=key: f"{k}: {m}"
                )
        for ours, theirs in zip(one.modules(), other.modules(), strict=True):
            assert sizes(ours) == sizes(theirs), type(ours)
        x = image(*size)
        expected = out(other, x)
        scale = float(expected.abs().max())
        torch.testing.assert_close(out(one, x), expected, rtol=0, atol=1e-3 * scale)

    return call


def sizes(module: nn.Module) -> dict:
    """What a module keeps in numbers, and in tuples and lists of them.

    Not the shift of a window that timm keeps from how a model was made, and forms anew from.
    """
    kept = {}
    for key, value in vars(module).items():
        plain = isinstance(value, int | tuple | list | dict) and "tensor" not in str(value)
        if plain and key[0] != "_" and key != "target_shift_size":
            kept[key] = str(value).replace("[", "(").replace("]", ")")
    return kept


def mirrored(data: np.ndarray, old: int, new: int) -> np.ndarray:
    """Rows of offsets, the first axis, spread from the centre by BEiT's formula."""
    reach, target = old - 1, new - 1
    places = np.arange(-target, target + 1)
    ratio = 1.0
    if 1 < reach < target:
        roots = np.roots([1.0] * (reach - 1) + [1.0 - target])  # 1 + q + … = target
        ratio = max(root.real for root in roots if abs(root.imag) < 1e-9)
    steps = np.cumsum(ratio ** np.arange(reach))
    nodes = np.concatenate((-steps[::-1], [0], steps))
    columns = [np.interp(places, nodes, column) for column in data.reshape(len(data), -1).T]
    return np.stack(columns, 1).reshape(len(places), *data.shape[1:])


@pytest.fixture(scope="session")
def spread() -> Callable[..., Tensor]:
    """A table of offsets for another window, by BEiT's formula in numpy."""

    def call(table: Tensor, old: tuple, new: tuple, extra: int = 0) -> Tensor:
        count = len(table) - extra
        cells = table[:count].detach().double().numpy().reshape(2 * old[0] - 1, 2 * old[1] - 1, -1)
        rows = mirrored(cells, old[0], new[0])
        cells = mirrored(rows.swapaxes(0, 1), old[1], new[1]).swapaxes(0, 1)
        flat = torch.from_numpy(cells.reshape(-1, cells.shape[-1]).copy()).to(table.dtype)
        return torch.cat((flat, table[count:].detach()))

    return call
