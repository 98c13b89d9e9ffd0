from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import nn

from mmpos.interop.timm.plain import converted, plain
from mmpos.interop.timm.replace import KEEP, Additive, Bias, Keep, Rotary
from mmpos.models import Classifier, SpectrogramPatches
from mmpos.models.classifier import Pool
from mmpos.models.sound import Rest
from mmpos.resample import Fit, Resampling


def spectrogram_classifier(
    model: nn.Module,
    bins: int,
    frames: int,
    questions: Mapping[str, int],
    *,
    stride: Sequence[int] | None = (10, 10),
    rest: Sequence[Rest] = ("drop", "pad"),
    fit: Fit | Sequence[Fit] = "center",
    pool: Pool | None = None,
    additive: Additive | Keep | None = KEEP,
    rotary: list[Rotary] | Rotary | None = None,
    bias: list[Bias] | Bias | None = None,
    per_layer: Sequence[Literal["rotary", "bias"]] = (),
) -> Classifier:
    """A ViT for images as a `mmpos.models.Classifier` of spectrograms, with its weights.

    The recipe is AST's (Audio Spectrogram Transformer, arXiv:2104.01778, sec. 2.2): the patch
    kernel is summed over the colours, so that a spectrogram is seen as a grey image; the table of
    positions goes to the new grid, height as frequency and width as time, bilinearly without
    antialias; rows of prefix tokens stay. Heads, and a pooling that is learned, are left behind:
    what the questions need starts untrained. AST itself has ``rest=("drop", "drop")`` and one more
    norm before its head. The model is left as it is, and nothing is shared with it.

    Of prefix tokens there are as many as the model has: two in a distilled DeiT, as in AST. A model
    with a class token alone is given no second one, which would be untrained. Layer scale is
    multiplied into the layers before it, which gives the same output.

    Args:
        model: a plain ``VisionTransformer`` (ViT, DeiT, DeiT-III, DINOv2), also distilled; for
            another patch than its own, `resize` it first.
        bins, frames: of the spectrograms that the table is for.
        questions: how many answers each question has.
        stride, rest: see `mmpos.models.SpectrogramPatches`.
        fit: how the table changes on both axes, or on frequency and on time, see
            `mmpos.resample.Resampling`: by default the middle where an axis shrinks, resized where
            it grows (AST); ``("center", "extend")`` repeats the rows of time instead.
        pool: see `mmpos.models.Classifier`; by default the mean of both prefix tokens of a
            distilled model (AST), the class token of another, the mean of a model that has none.
        additive: in the place of the table; ``"keep"`` is the table, None takes it off. What it
            added to prefix tokens stays with them.
        rotary, bias, per_layer: see `mmpos.models.Transformer`; a plain ViT has none.

    Returns: the classifier, in the model's dtype, mode and place. Its state dict, as
        ``safetensors.torch.save_file(network.state_dict(), "vit.safetensors")`` writes it, is one
        that a task of a network of these sizes starts from (``--model.weights vit.safetensors``).
        A `mmpos.models.Transformer` made there has an eps of 1e-5 in its norms, timm's ViT 1e-6.
    Raises: TypeError for what is no model of timm; ValueError for one with something that
        `mmpos.models.Transformer` does not have, with its name.

    >>> import timm
    >>> model = timm.create_model("deit_tiny_distilled_patch16_224", depth=1)
    >>> network = spectrogram_classifier(model, 128, 1024, {"kind": 50}, rest=("drop", "drop"))
    >>> network.transformer.additive.grid, network.transformer.prefix_tokens, network.pool
    ((12, 101), 2, 'prefix')
    """
    network = plain(model)
    patch = network.patch_embed.patch_size
    tokens = SpectrogramPatches(network.embed_dim, bins, patch_size=patch, stride=stride, rest=rest)
    return converted(
        network,
        tokens,
        tokens.grid(bins, frames),
        questions,
        kernel=lambda kernel: kernel.sum(1, keepdim=True),
        table=lambda table: table,
        resampling=Resampling(mode="bilinear", antialias=False, fit=fit),
        pool=pool,
        additive=additive,
        rotary=rotary,
        bias=bias,
        per_layer=per_layer,
    )
