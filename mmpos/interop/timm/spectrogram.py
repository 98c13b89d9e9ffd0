from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from timm.layers.activations import GELU
from timm.layers.attention import Attention
from timm.layers.mlp import Mlp as TimmMlp
from timm.layers.patch_dropout import PatchDropout
from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from mmpos.additive import LearnedEncoding
from mmpos.interop.timm.describe import inner
from mmpos.interop.timm.places import NAME
from mmpos.interop.timm.replace import KEEP, Additive, Bias, Keep, Rotary
from mmpos.models import Classifier, Mlp, SpectrogramPatches, Transformer
from mmpos.models.classifier import Pool
from mmpos.models.sound import Rest
from mmpos.resample import Fit, Resampling

_PREFIX = ("cls_token", "dist_token", "reg_token")
_LEFT = ("head.", "head_dist.", "attn_pool.")  # what reads the tokens after the last norm
_PARTS = {  # of a block: what it is here, and the layer scale after it
    "norm1": ("attention_norm", ""),
    "attn.qkv": ("attention.qkv", ""),
    "attn.q_norm": ("attention.q_norm", ""),
    "attn.k_norm": ("attention.k_norm", ""),
    "attn.proj": ("attention.out", "ls1"),
    "norm2": ("mlp_norm", ""),
    "mlp.fc1": ("mlp.up", ""),
    "mlp.fc2": ("mlp.down", "ls2"),
}
_KINDS = {
    "": Block,
    ".attn": Attention,
    ".mlp": TimmMlp,
    ".mlp.act": nn.GELU | GELU,
    ".norm1": nn.LayerNorm,
    ".norm2": nn.LayerNorm,
    ".attn.q_norm": nn.LayerNorm | nn.Identity,
}


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
    network: Any = inner(model)
    _check(network)
    embed, first, last = network.patch_embed, network.blocks[0], network.blocks[-1]
    dim, prefix = network.embed_dim, network.num_prefix_tokens
    rows = 0 if network.no_embed_class else prefix
    how = Resampling(mode="bilinear", antialias=False, fit=fit)
    keep = isinstance(additive, str)
    if isinstance(additive, str):
        learned = partial(LearnedEncoding, prefix_rows=rows, resampling=how)
        additive = None if network.pos_embed is None else learned
    slots: dict[str, Any] = {"rotary": rotary, "bias": bias, "per_layer": per_layer}
    tokens = SpectrogramPatches(dim, bins, patch_size=embed.patch_size, stride=stride, rest=rest)
    transformer = Transformer(
        tokens.grid(bins, frames),
        dim=dim,
        depth=len(network.blocks),
        heads=first.attn.num_heads,
        additive=additive,
        **slots,
        class_token=network.has_class_token,
        registers=prefix - network.has_class_token,
        mlp=partial(Mlp, ratio=(first.mlp.fc1.out_features + 0.5) / dim),
        norm=partial(nn.LayerNorm, eps=network.norm.eps),
        qk_norm=_like(first.attn.q_norm),
        drop_path=getattr(last.drop_path1, "drop_prob", 0.0),
    )
    if pool is None:
        alone = "token" if network.has_class_token else "mean"
        pool = "prefix" if hasattr(network, "dist_token") else alone
    classifier = Classifier(tokens, transformer, questions, pool=pool)
    state = {
        name: value for name, value in network.state_dict().items() if not name.startswith(_LEFT)
    }
    table = state.pop("pos_embed", None)
    ours = _weights(state, len(network.blocks))
    if table is not None:
        added, cells = table[0].split([rows, table.shape[1] - rows])
        if keep and isinstance(transformer.additive, LearnedEncoding):
            own = cells.reshape(*embed.grid_size, dim)
            ours["transformer.additive.table"] = transformer.additive.resized(own)
            ours |= {"transformer.additive.prefix": added} if rows else {}
        elif rows:
            ours["transformer.prefix"] += added
    if state:
        raise ValueError(_lacking(network, next(iter(state))))
    classifier.load_state_dict({**classifier.state_dict(), **ours})
    return classifier.to(embed.proj.weight).train(network.training)


def _weights(state: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    """The weights of timm's by our names, but tables; what is understood is taken off ``state``."""
    kernel = state.pop("patch_embed.proj.weight")
    ours = {"tokens.project.weight": kernel.sum(1, keepdim=True)}
    ours["tokens.project.bias"] = state.pop("patch_embed.proj.bias", kernel.new_zeros(len(kernel)))
    prefix = [state.pop(name)[0] for name in _PREFIX if name in state]
    if prefix:
        ours["transformer.prefix"] = torch.cat(prefix)
    parts = [
        (f"blocks.{i}.{theirs}", f"transformer.layers.{i}.{own}", f"blocks.{i}.{scale}.gamma")
        for i in range(depth)
        for theirs, (own, scale) in _PARTS.items()
    ]
    for theirs, own, scale in [*parts, ("norm", "transformer.norm", "")]:
        if f"{theirs}.weight" not in state:
            continue
        weight = state.pop(f"{theirs}.weight")
        bias = state.pop(f"{theirs}.bias", weight.new_zeros(len(weight)))
        if scale in state:
            gain = state.pop(scale)
            weight, bias = weight * gain.unsqueeze(-1), bias * gain
        ours |= {f"{own}.weight": weight, f"{own}.bias": bias}
    return ours


def _like(norm: nn.Module) -> Callable[[int], nn.Module] | None:
    """Makes norms as this one is, which may be none."""
    return partial(nn.LayerNorm, eps=norm.eps) if isinstance(norm, nn.LayerNorm) else None


def _check(network: Any) -> None:
    """Raise ValueError for what has no weights that would tell of it."""
    if not isinstance(network, VisionTransformer):
        raise ValueError(
            f"{type(network).__name__} is no VisionTransformer of timm, whose weights a "
            "mmpos.models.Transformer can take"
        )
    if getattr(network, NAME, None) is not None:
        raise ValueError("encodings of this model were replaced: restore(model) first")
    if not isinstance(network.norm, nn.LayerNorm):
        after = "a norm after pooling, or none"
        kind = after if isinstance(network.norm, nn.Identity) else type(network.norm).__name__
        raise ValueError(_lacking(network, f"{kind} (norm)"))
    if type(network.patch_embed) is not PatchEmbed:
        raise ValueError(_lacking(network, f"{type(network.patch_embed).__name__} (patch_embed)"))
    for index, (name, kind) in product(range(len(network.blocks)), _KINDS.items()):
        part = network.get_submodule(f"blocks.{index}{name}")
        tanh = getattr(part, "approximate", "none") != "none"
        if not isinstance(part, kind) or tanh:
            raise ValueError(_lacking(network, f"{type(part).__name__} (blocks.{index}{name})"))
    epsilons = {part.eps for part in network.modules() if isinstance(part, nn.LayerNorm)}
    if len(epsilons) > 1:
        raise ValueError(_lacking(network, f"norms of several eps ({sorted(epsilons)})"))
    for name, part in network.named_modules():
        rate = getattr(part, "p" if isinstance(part, nn.Dropout) else "prob", 0.0)
        if isinstance(part, nn.Dropout | PatchDropout) and rate > 0 and name != "head_drop":
            raise ValueError(_lacking(network, f"dropout of {rate} ({name})"))


def _lacking(network: nn.Module, what: str) -> str:
    return f"this {type(network).__name__} has {what}, which mmpos.models.Transformer has not"
