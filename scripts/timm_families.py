"""What timm does with another image size, family by family, and what mmpos does: a table.

    python scripts/timm_families.py > docs/timm_families.md

For each family an architecture of random weights, its tables of unit-normal values, is taken to
1.5 × its size (or the next that its windows divide) and to a rectangle of twice the width, by timm
and by `mmpos.interop.timm.resize`. timm's way is `set_input_size`, else a forward pass as it is.
What they give is compared: the positions, and the outputs relative to the largest.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import timm
import torch
from rich.progress import track
from torch import Tensor, nn

from mmpos.interop.timm import describe, resize
from mmpos.interop.timm.parts import tables
from mmpos.interop.timm.scheme import counted, times

ANY = "takes any size"
STAYS = "timm moves the rows of an axis that stays"
WHY = {
    "BEiT": STAYS,
    "Swin": STAYS,
    "CoAtNet": STAYS,
    "MaxViT": STAYS,
    "Swin V2": "timm takes offsets as fractions of the new window",
    "CrossViT": "timm's model scales the image back to its own size",
}
# family, architecture, what makes it quick, its 1.5 × where that is not one
FAMILIES: list[tuple[str, str, dict[str, Any], int | None]] = [
    ("ViT", "vit_tiny_patch16_224", {"depth": 2}, None),
    ("ViT, dynamic", "vit_tiny_patch16_224", {"depth": 2, "dynamic_img_size": True}, None),
    ("DeiT", "deit_tiny_distilled_patch16_224", {"depth": 2}, None),
    ("DINOv2, registers", "vit_small_patch14_reg4_dinov2", {"depth": 2, "img_size": 224}, None),
    ("ViT on ResNet", "vit_tiny_r_s16_p8_224", {"depth": 2}, None),
    ("ViTamin", "vitamin_small_224", {}, None),
    ("EVA-02", "eva02_tiny_patch14_224", {"depth": 2}, None),
    ("PE", "vit_pe_core_tiny_patch16_384", {"depth": 2}, None),
    ("ViT, axial RoPE", "vit_small_patch16_rope_224", {"depth": 2}, None),
    ("ViT, mixed RoPE", "vit_small_patch16_rope_mixed_ape_224", {"depth": 2}, None),
    ("DINOv3", "vit_small_patch16_dinov3", {"depth": 2}, None),
    ("BEiT", "beit_base_patch16_224", {"depth": 2}, None),
    ("ViT, bias MLP", "vit_relpos_small_patch16_224", {"depth": 2}, None),
    ("Swin", "swin_tiny_patch4_window7_224", {}, None),
    ("Swin V2", "swinv2_tiny_window8_256", {}, None),
    ("Swin V2 (cr)", "swinv2_cr_tiny_ns_224", {}, None),
    ("CoAtNet", "coatnet_0_rw_224", {}, 320),
    ("MaxViT, bias MLP", "maxvit_rmlp_pico_rw_256", {}, None),
    ("MaxViT", "maxvit_tiny_tf_224", {}, 320),
    ("EfficientViT (MSRA)", "efficientvit_m0", {}, None),
    ("LeViT", "levit_128s", {}, None),
    ("EfficientFormer", "efficientformer_l1", {}, None),
    ("EfficientFormer V2", "efficientformerv2_s0", {}, 320),
    ("TinyViT", "tiny_vit_5m_224", {}, None),
    ("GCViT", "gcvit_xxtiny", {}, 320),
    ("MViT V2", "mvitv2_tiny", {}, None),
    ("SAM", "samvit_base_patch16_224", {"depth": 3, "global_attn_indexes": (2,)}, None),
    ("Hiera", "hiera_tiny_224", {}, 320),
    ("Hiera, window table", "hiera_small_abswin_256", {}, None),
    ("SAM 2", "sam2_hiera_tiny", {}, 320),
    ("NaFlexViT", "naflexvit_base_patch16_gap", {"depth": 2}, None),
    ("CaiT", "cait_xxs24_224", {"depth": 2}, None),
    ("ConViT", "convit_tiny", {"depth": 2, "local_up_to_layer": 1}, None),
    ("CrossViT", "crossvit_9_240", {}, None),
    ("PiT", "pit_ti_224", {}, None),
    ("TNT", "tnt_s_patch16_224", {"depth": 2}, None),
    ("VOLO", "volo_d1_224", {}, None),
    ("Visformer", "visformer_tiny", {}, None),
    ("NesT", "nest_tiny", {}, None),
    ("CoaT", "coat_tiny", {}, 320),
    ("XCiT", "xcit_nano_12_p16_224", {}, None),
    ("Twins", "twins_svt_small", {}, None),
    ("CLIP ResNet", "resnet50_clip", {}, 320),
    ("BoTNet", "botnet26t_256", {}, None),
    ("LambdaNet", "lambda_resnet26rpt_256", {}, None),
    ("HaloNet", "halonet26t", {}, 512),
    ("MLP-Mixer", "mixer_s16_224", {}, None),
]


def made(architecture: str, small: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(architecture, **small).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1 and parameter.abs().max() < 1e-3 and parameter.numel() > 1:
            parameter.data.fill_(0.5)  # layer scales and norms that begin as nothing
    for table in tables(model):
        table.parameter.data.normal_()
    return model


def given(model: nn.Module, size: tuple[int, int]) -> Tensor:
    x = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = model(x)
    return torch.cat(y, -1) if isinstance(y, tuple) else y


def timms(model: nn.Module, size: tuple[int, int]) -> tuple[str, Tensor | None]:
    """Its way, in words, and what the model then makes of an image."""
    before, way = dict(model.named_parameters()), ANY
    method: Any = getattr(model, "set_input_size", None)
    try:
        if method is not None:
            way = "`set_input_size`"
            method(img_size=size)
            replaced = sum(p is not before[key] for key, p in model.named_parameters())
            way += f", {counted(replaced, 'parameter')} replaced" if replaced else ""
        return way, given(model, size)
    except (AssertionError, RuntimeError, IndexError, ValueError) as error:
        return f"fails, {type(error).__name__}", None


def compared(name: str, small: dict[str, Any], size: tuple[int, int]) -> tuple[str, str]:
    """What timm does, and what mmpos does other than that."""
    model = made(name, small)
    other = copy.deepcopy(model)
    way, expected = timms(other, size)
    try:
        resize(model, size)
    except ValueError as error:
        return way, f"refused: {error}"
    got = given(model, size)
    if expected is None:
        return way, "resized"
    apart = 0.0 if way == ANY else positions_apart(model, other)
    if apart > 1e-3:
        return way, f"positions differ by up to {apart:.1f}"
    apart = float((got - expected).abs().max() / expected.abs().max())
    return way, "same" if apart < 1e-3 else f"output differs by {apart:.1%}"


def positions_apart(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of tables, of unit-normal values, or of what is formed for them."""
    both = [(a.named_parameters(), a.named_buffers()) for a in (one, other)]
    ours, theirs = ({**dict(parameters), **dict(buffers)} for parameters, buffers in both)
    return max(float((ours[key] - theirs[key]).detach().abs().max()) for key in ours)


def main() -> None:
    warnings.filterwarnings("ignore", module="timm.layers.interpolate")
    print("| family | example | positions | timm | mmpos |")
    print("|---|---|---|---|---|")
    for family, name, small, larger in track(FAMILIES, transient=True):
        said = describe(made(name, small))
        side = (said.image_size or (256, 256))[0]
        sizes = [((larger or side * 3 // 2),) * 2, (side, 2 * side)]
        done = [compared(name, small, (height, width)) for height, width in sizes]
        columns = []
        for each in zip(*done, strict=True):
            named = [f"{cell} at {times(size)}" for cell, size in zip(each, sizes, strict=True)]
            columns.append(each[0] if each[0] == each[1] else "; ".join(named))
        if family in WHY:
            columns[1] += f" ({WHY[family]})"
        kinds = dict.fromkeys(scheme.kind for scheme in said.schemes)
        print("| " + " | ".join([family, f"`{name}`", ", ".join(kinds) or "none", *columns]) + " |")


if __name__ == "__main__":
    main()
