"""Families that timm can resize: its own method, with the parameters kept and its faults mended."""

from __future__ import annotations

from typing import Any

from mmpos.interop.timm.change import Change
from mmpos.interop.timm.parts import of_class, tables
from mmpos.interop.timm.places import Places
from mmpos.interop.timm.scheme import times
from mmpos.interop.timm.target import Target, divided, multiples, one_patch, pair, quiet


def patches(change: Change, model: Any, target: Target) -> None:
    """Plain ViTs: ViT, DeiT, EVA, BEiT and those of relative positions."""
    embed = model.patch_embed
    _new_patches(change, embed, target)
    step = embed.feat_ratio(as_scalar=False)
    one_patch(target.size, step)
    if embed.dynamic_img_pad or not embed.strict_img_size:
        multiples(target.size, step, "a patch embedding that takes any size")
    _keep_scale(model)
    _set_input_size(change, model, img_size=target.size, patch_size=target.patch)
    for module in model.children():
        if isinstance(module, Places):
            for _, table in module.found():
                if table is not None:
                    change.table(table, embed.grid_size)
            module.settle(embed.grid_size)
    for info in model.feature_info:
        info["reduction"] = embed.feat_ratio()


def windows(change: Change, model: Any, target: Target) -> None:
    """Swin transformers: windows keep their share of the grid unless they are given."""
    _new_patches(change, model.patch_embed, target)
    one_patch(target.size, model.patch_embed.patch_size)
    _keep_scale(model)
    named = {"img_size": target.size, "window_size": target.window}
    if target.patch is not None:
        named["patch_size"] = target.patch
    _set_input_size(change, model, **named)
    scales = [getattr(stage.blocks[0].attn, _SCALE, None) for stage in _stages(model)]
    if all(scales):
        model._model_args = {**model._model_args, "pretrained_window_sizes": tuple(scales)}


def partitions(change: Change, model: Any, target: Target) -> None:
    """CoAtNet and MaxViT: windows and grids are a fraction of the image unless they are given."""
    window = None if target.window is None else pair(target.window, "window_size")
    named = {"img_size": target.size, "window_size": window, "grid_size": window}
    _set_input_size(change, model, **named)
    multiples(target.size, model.stem.stride * 2 ** len(model.stages), "halving it in each stage")
    step = model.stem.stride
    for index, stage in enumerate(model.stages):
        step *= 2
        features = divided(target.size, (step, step))
        for module in stage.modules():
            window = getattr(module, "partition_size", None)
            if window and any(side % each for side, each in zip(features, window, strict=True)):
                raise ValueError(
                    f"stage {index} has {times(features)} features for an image of "
                    f"{times(target.size)}, which windows of {times(window)} do not divide: "
                    f"give another image_size, or a window_size"
                )


def whole(change: Change, model: Any, target: Target) -> None:
    """EfficientViT (MSRA): windows shrink where features do; nothing else follows the size."""
    one_patch(target.size, (model.patch_embed.patch_size,) * 2)
    _set_input_size(change, model, img_size=target.size)


def _set_input_size(change: Change, model: Any, **named: Any) -> None:
    """Call the method of timm, and give its new parameters' places back to the old, resized."""
    method = getattr(model, "set_input_size", None)
    if method is None:
        raise ValueError(
            f"this version of timm cannot set the size of {type(model).__name__}: 1.0.31 can"
        )
    before = tables(model)
    with quiet():
        method(**named)
    change.tables(before, tables(model))


def _new_patches(change: Change, embed: Any, target: Target) -> None:
    if target.patch is None:
        return
    if hasattr(embed, "backbone"):
        raise ValueError(
            "patch_size cannot change: the patches are features of a convolutional stem"
        )
    change.kernel(embed.proj, target.patch)
    embed.patch_size = target.patch


_SCALE = "pretrained_window_size"
_SCALED = {
    "models.swin_transformer_v2.WindowAttention": True,
    "layers.pos_embed_rel.RelPosMlp": True,
}


def _keep_scale(model: Any) -> None:
    """Let offsets go on as fractions of the window that the weights know.

    timm takes them as fractions of the new window, so that a larger one would squeeze all of them
    (Swin V2, arXiv:2111.09883, sec. 3.3, and the ``PRETRAINED_WINDOW_SIZES`` of its authors).
    """
    for module in model.modules():
        scaled = of_class(_SCALED, module) and getattr(module, "mode", "swin") == "swin"
        if scaled and not any(getattr(module, _SCALE)):
            setattr(module, _SCALE, tuple(module.window_size))


def _stages(model: Any) -> Any:
    return model.layers if hasattr(model, "layers") else model.stages
