from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import nn

from mmpos.interop.timm.plain import converted, plain
from mmpos.interop.timm.replace import KEEP, Additive, Bias, Keep, Rotary
from mmpos.interop.timm.target import pair
from mmpos.models import Classifier, TubeletEmbedding
from mmpos.models.classifier import Pool
from mmpos.models.tubelets import inflated_kernel
from mmpos.positions import check_size
from mmpos.resample import Resampling


def video_classifier(
    model: nn.Module,
    frames: int,
    questions: Mapping[str, int],
    *,
    image_size: int | Sequence[int] | None = None,
    tubelet: int = 2,
    inflation: Literal["central", "mean"] = "central",
    pool: Pool | None = None,
    additive: Additive | Keep | None = KEEP,
    rotary: list[Rotary] | Rotary | None = None,
    bias: list[Bias] | Bias | None = None,
    per_layer: Sequence[Literal["rotary", "bias"]] = (),
) -> Classifier:
    """A ViT for images as a `mmpos.models.Classifier` of clips, with its weights.

    The recipe is ViViT's (arXiv:2103.15691, sec. 3.4; all tokens see each other, its model 1): the
    patch kernel is inflated to tubelets, and the table of positions is the same at all times, so
    that time is learned from there; for another image size it is resized as timm does, bicubically
    with antialias. Rows of prefix tokens stay. Heads, and a pooling that is learned, are left
    behind: what the questions need starts untrained. The model is left as it is, and nothing is
    shared with it.

    With the table and ``inflation="mean"`` a still clip of one tubelet is encoded as its image was,
    one of several too where there are no prefix tokens; these, if there are, weigh less against
    more patches.

    Args:
        model: a plain ``VisionTransformer`` (ViT, DeiT, DeiT-III, DINOv2), also distilled; for
            another patch than its own, `resize` it first.
        frames: of the clips that the table is for; a last tubelet that they do not fill is one.
        questions: how many answers each question has.
        image_size: height and width of a frame, or one number for both; the model's by default.
        tubelet: frames of a token.
        inflation: see `mmpos.models.tubelets.inflated_kernel`.
        pool: see `mmpos.models.Classifier`; by default the mean of both prefix tokens of a
            distilled model, the class token of another, the mean of a model that has none.
        additive: in the place of the table; ``"keep"`` is the table, None takes it off. What it
            added to prefix tokens stays with them.
        rotary, bias, per_layer: see `mmpos.models.Transformer`; a plain ViT has none.

    Returns: the classifier, in the model's dtype, mode and place, of which a task starts from its
        state dict as `spectrogram_classifier` tells.
    Raises: TypeError for what is no model of timm, or no size; ValueError for a model with
        something that `mmpos.models.Transformer` does not have, with its name, or an image that
        patches do not divide.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
    >>> network = video_classifier(model, 8, {"action": 5}, image_size=(96, 160))
    >>> network.transformer.additive.grid, network(torch.zeros(1, 3, 8, 96, 160))["action"].shape
    ((4, 6, 10), torch.Size([1, 5]))
    """
    network = plain(model)
    check_size("tubelet", tubelet)
    embed = network.patch_embed
    size = pair(list(embed.img_size) if image_size is None else image_size, "image_size")
    tokens = TubeletEmbedding(
        network.embed_dim, (tubelet, *embed.patch_size), embed.proj.in_channels
    )
    times, *cells = tokens.grid(frames, *size)
    return converted(
        network,
        tokens,
        (times, *cells),
        questions,
        kernel=lambda kernel: inflated_kernel(kernel, tubelet, inflation),
        table=lambda table: table.expand(times, *table.shape),
        resampling=Resampling(),
        pool=pool,
        additive=additive,
        rotary=rotary,
        bias=bias,
        per_layer=per_layer,
    )
