"""How each of timm's families is taken to another size, or why it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from mmpos.interop.timm import convnets, delegated, grids, pyramids
from mmpos.interop.timm.change import Change
from mmpos.interop.timm.parts import of_class
from mmpos.interop.timm.relative import resolution
from mmpos.interop.timm.tables import Grid
from mmpos.interop.timm.target import Target, recorded

Rebuild = Callable[[Change, Any, Target], None]


@dataclass(frozen=True)
class Family:
    """How models of a class change their size.

    Args:
        rebuild: takes a model there; None where it cannot be.
        note: what is to be known besides of how tables change, or the reason why they cannot.
        size: the size a model is made for, where it keeps it or its grids tell.
        patch: whether the patch size can change.
        window: whether windows can be chosen.
    """

    rebuild: Rebuild | None
    note: str = ""
    size: Callable[[Any], Any] = recorded
    patch: bool = False
    window: bool = False


def family(model: nn.Module) -> Family | None:
    """The family of a model; None for a class that is not known."""
    return of_class(_FAMILIES, model)


def _embed(model: Any) -> Any:
    return model.patch_embed.img_size


def _pixel(model: Any) -> Any:
    return model.pixel_embed.img_size


def _own(model: Any) -> Any:
    return model.img_size


def _steps(grid: Callable[[Any], Any], step: Callable[[Any], int]) -> Callable[[Any], Grid]:
    """The least size of a grid, unless timm noted one."""

    def size(model: Any) -> Grid:
        return recorded(model) or tuple(side * step(model) for side in grid(model))

    return size


def _first(model: Any) -> Grid:
    """The grid of the first table of distances."""
    return next(resolution(each) for each in model.modules() if hasattr(each, "attention_biases"))


_LEVIT = _steps(_first, lambda model: getattr(model.stem, "stride", 16))
_FORMER = _steps(_first, lambda model: 32)
_HIERA = _steps(lambda model: model.tokens_spatial_shape, lambda model: model.patch_stride[0])
_GCVIT = _steps(lambda model: model.stages[0].feat_size, lambda model: 4)

_SHARE = "windows keep their share of the grid unless they are given"
_PLAIN = Family(delegated.patches, size=_embed, patch=True)
_NOTHING = Family(convnets.flexible, "nothing is made for a size: the model takes any")
_CONVNET = Family(
    convnets.convnet, "convolutions take any size; what attention there is must be able to follow"
)

_FAMILIES: dict[str, Family] = {
    "models.vision_transformer.VisionTransformer": _PLAIN,
    "models.eva.Eva": _PLAIN,
    "models.beit.Beit": _PLAIN,
    "models.vision_transformer_relpos.VisionTransformerRelPos": _PLAIN,
    "models.swin_transformer.SwinTransformer": Family(
        delegated.windows, _SHARE, _embed, patch=True, window=True
    ),
    "models.swin_transformer_v2.SwinTransformerV2": Family(
        delegated.windows,
        f"{_SHARE}; offsets stay on the scale of the windows that the weights know",
        _embed,
        patch=True,
        window=True,
    ),
    "models.swin_transformer_v2_cr.SwinTransformerV2Cr": Family(
        delegated.windows, _SHARE, _own, window=True
    ),
    "models.maxxvit.MaxxVit": Family(
        delegated.partitions,
        "windows are a fraction of the image unless they are given",
        _own,
        window=True,
    ),
    "models.efficientvit_msra.EfficientVitMsra": Family(
        delegated.whole, "windows shrink and grow with the features, up to their own size"
    ),
    "models.levit.Levit": Family(pyramids.levit, size=_LEVIT),
    "models.efficientformer.EfficientFormer": Family(pyramids.efficientformer, size=_FORMER),
    "models.efficientformer_v2.EfficientFormerV2": Family(
        pyramids.efficientformer_v2, size=_FORMER
    ),
    "models.tiny_vit.TinyVit": Family(
        pyramids.tiny_vit,
        "the model takes any size; windows stay unless they are given",
        window=True,
    ),
    "models.gcvit.GlobalContextVit": Family(
        pyramids.gcvit, "windows keep their share of the features", _GCVIT
    ),
    "models.mvitv2.MultiScaleVit": Family(pyramids.mvit),
    "models.vision_transformer_sam.VisionTransformerSAM": Family(
        grids.sam, "offsets of windows stay", _embed, patch=True
    ),
    "models.hiera.Hiera": Family(grids.hiera, "to whole windows", _HIERA),
    "models.hieradet_sam2.HieraDet": Family(grids.sam2, "to whole windows"),
    "models.naflexvit.NaFlexVit": Family(grids.naflex, "the model takes any size besides"),
    "models.cait.Cait": Family(grids.rows, size=_embed, patch=True),
    "models.convit.ConVit": Family(grids.rows, size=_embed, patch=True),
    "models.crossvit.CrossVit": Family(
        grids.crossvit, "each branch keeps its scale of the image", _own
    ),
    "models.pit.PoolingVisionTransformer": Family(grids.pit, size=_embed),
    "models.tnt.TNT": Family(grids.tnt, "the table of pixels in a patch stays", _pixel),
    "models.volo.VOLO": Family(grids.volo),
    "models.visformer.Visformer": Family(grids.visformer, size=_own),
    "models.nest.Nest": Family(grids.nest, "squares only", _embed),
    "models.coat.CoaT": Family(grids.coat, "only the size that the model checks changes"),
    "models.byobnet.ByobNet": _CONVNET,
    "models.resnet.ResNet": _CONVNET,
    "models.xcit.Xcit": _NOTHING,
    "models.twins.Twins": _NOTHING,
    "models.davit.DaVit": _NOTHING,
    "models.edgenext.EdgeNeXt": _NOTHING,
    "models.pvt_v2.PyramidVisionTransformerV2": _NOTHING,
    "models.fastvit.FastVit": _NOTHING,
    "models.csatv2.CSATv2": _NOTHING,
    "models.qwen3_vit.Qwen3VitEncoder": _NOTHING,
    "models.qwen3_vit.Qwen3VitClassifier": _NOTHING,
    "models.deepseek_vit.DeepseekVitEncoder": _NOTHING,
    "models.deepseek_vit.DeepseekVitClassifier": _NOTHING,
    "models.gemma4_vit.Gemma4VitEncoder": _NOTHING,
    "models.gemma4_vit.Gemma4VitClassifier": _NOTHING,
    "models.mlp_mixer.MlpMixer": Family(
        None, "its token-mixing layers have a weight for each pair of positions"
    ),
}
