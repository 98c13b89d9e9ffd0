"""timm's attention with encodings of mmpos: the same modules and weights, another forward.

A class below is that of timm with `Placed` before it. An attention becomes one in place, by its
class, so that its parameters, their names and its place in the model stay; it is an instance of
timm's own class still.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers.attention import Attention, AttentionRope
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models import beit, eva, vision_transformer_relpos
from torch import Tensor
from torch.nn.functional import linear

from mmpos.interop.timm.places import Places
from mmpos.rotary import rotate


class Placed:
    """Attention whose rotation and bias come from `Places`, and what is not replaced from timm."""

    layer: int
    """Which block it is in."""
    places: tuple[Places]
    """Held so, for it to be no submodule of each block."""

    def forward(
        self: Any,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        shared_rel_pos: Tensor | None = None,
        shared_rel_pos_bias: Tensor | None = None,
    ) -> Tensor:
        """As that of each of timm's classes, which name their arguments apart."""
        q, k, v = _heads(self, x)
        q = getattr(self, "q_norm", _same)(q)
        k = getattr(self, "k_norm", _same)(k)
        (places,) = self.places
        rotation = places.rotation(self.layer)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation.dual)
        elif rope is not None:
            q, k = (_turned(self, part, rope).type_as(v) for part in (q, k))
        shared = shared_rel_pos if shared_rel_pos is not None else shared_rel_pos_bias
        own = _own_bias(self, shared)
        out = places.attended(self.layer, q, k, v, own, attn_mask, is_causal)
        out = out.transpose(1, 2).flatten(2)
        out = getattr(self, "norm", _same)(out)
        gate = getattr(self, "gate", None)
        if gate is not None:
            out = out * gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


class PlacedAttention(Placed, Attention):  # pyright: ignore[reportIncompatibleMethodOverride]
    """That of ViT, DeiT, CLIP and DINOv2."""


class PlacedAttentionRope(Placed, AttentionRope):  # pyright: ignore[reportIncompatibleMethodOverride]
    """That of DINOv3 and PE."""


class PlacedEvaAttention(Placed, eva.EvaAttention):  # pyright: ignore[reportIncompatibleMethodOverride]
    """That of EVA."""


class PlacedBeitAttention(Placed, beit.Attention):  # pyright: ignore[reportIncompatibleMethodOverride]
    """That of BEiT."""


class PlacedRelPosAttention(Placed, vision_transformer_relpos.RelPosAttention):  # pyright: ignore[reportIncompatibleMethodOverride]
    """That of ViTs with relative positions."""


PLACED: dict[type, type] = {cls.__bases__[1]: cls for cls in Placed.__subclasses__()}
"""The class below for each of timm's."""


def _same(x: Tensor) -> Tensor:
    return x


def _heads(attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[B, H, N, head_dim]``."""
    heads = attention.num_heads
    if attention.qkv is None:
        shared = getattr(attention, "num_kv_heads", heads)
        q, k, v = (
            project(x).unflatten(-1, (count, -1)).transpose(1, 2)
            for project, count in (
                (attention.q_proj, heads),
                (attention.k_proj, shared),
                (attention.v_proj, shared),
            )
        )
        return q, k, v
    if getattr(attention, "q_bias", None) is None:
        qkv = attention.qkv(x)
    else:
        bias = torch.cat((attention.q_bias, attention.k_bias, attention.v_bias))
        qkv = linear(x, attention.qkv.weight, bias)
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _turned(attention: Any, x: Tensor, rope: Tensor) -> Tensor:
    """By timm's own rotation, prefix tokens left as they are."""
    prefix, half = attention.num_prefix_tokens, getattr(attention, "rotate_half", False)
    turned = apply_rot_embed_cat(x[:, :, prefix:], rope, half=half)
    return torch.cat((x[:, :, :prefix], turned), dim=2)


def _own_bias(attention: Any, shared: Tensor | None) -> Tensor | None:
    """The bias of timm's that is left, ``[1, H, N, N]``."""
    if getattr(attention, "rel_pos", None) is not None:
        return attention.rel_pos.get_bias()
    if getattr(attention, "relative_position_bias_table", None) is not None:
        own = attention._get_rel_pos_bias()
        return own if shared is None else own + shared
    return shared
