"""A plain ViT of timm's, with its weights, as a classifier of something else than images."""

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
from mmpos.interop.timm.replace import Additive, Bias, Keep, Rotary
from mmpos.models import Classifier, Mlp, Transformer
from mmpos.models.classifier import Pool
from mmpos.resample import Resampling

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


def plain(model: nn.Module) -> Any:
    """The ViT in ``model``, whose every part a `mmpos.models.Transformer` has too.

    Raises: TypeError for what is no model of timm; ValueError for one with something that it does
        not have, with its name.
    """
    network = inner(model)
    _check(network)
    return network


def converted(
    network: Any,
    tokens: nn.Module,
    grid: Sequence[int],
    questions: Mapping[str, int],
    *,
    kernel: Callable[[Tensor], Tensor],
    table: Callable[[Tensor], Tensor],
    resampling: Resampling,
    pool: Pool | None,
    additive: Additive | Keep | None,
    rotary: list[Rotary] | Rotary | None,
    bias: list[Bias] | Bias | None,
    per_layer: Sequence[Literal["rotary", "bias"]],
) -> Classifier:
    """A `plain` ViT behind another tokeniser, in its dtype, mode and place; nothing is shared.

    Args:
        tokens: with a ``project`` for the patch kernel.
        grid: of its tokens.
        kernel: that of images → that of ``tokens.project``.
        table: that of images, ``[H, W, D]`` → one of as many axes as ``grid``, which ``resampling``
            takes to its sizes.
        pool, additive, rotary, bias, per_layer: as of those who call this.

    Raises: ValueError for weights that `mmpos.models.Transformer` does not have.
    """
    embed, first, last = network.patch_embed, network.blocks[0], network.blocks[-1]
    dim, prefix = network.embed_dim, network.num_prefix_tokens
    rows = 0 if network.no_embed_class else prefix
    keep = isinstance(additive, str)
    if isinstance(additive, str):
        learned = partial(LearnedEncoding, prefix_rows=rows, resampling=resampling)
        additive = None if network.pos_embed is None else learned
    slots: dict[str, Any] = {"rotary": rotary, "bias": bias, "per_layer": per_layer}
    transformer = Transformer(
        grid,
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
    stored = state.pop("pos_embed", None)
    ours = _weights(state, len(network.blocks), kernel)
    if stored is not None:
        added, cells = stored[0].split([rows, stored.shape[1] - rows])
        if keep and isinstance(transformer.additive, LearnedEncoding):
            own = cells.reshape(*embed.grid_size, dim)
            ours["transformer.additive.table"] = transformer.additive.resized(table(own))
            ours |= {"transformer.additive.prefix": added} if rows else {}
        elif rows:
            ours["transformer.prefix"] += added
    if state:
        raise ValueError(_lacking(network, next(iter(state))))
    classifier.load_state_dict({**classifier.state_dict(), **ours})
    return classifier.to(embed.proj.weight).train(network.training)


def _weights(
    state: dict[str, Tensor], depth: int, kernel: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """The weights of timm's by our names, but tables; what is understood is taken off ``state``."""
    patch = state.pop("patch_embed.proj.weight")
    ours = {"tokens.project.weight": kernel(patch)}
    ours["tokens.project.bias"] = state.pop("patch_embed.proj.bias", patch.new_zeros(len(patch)))
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
