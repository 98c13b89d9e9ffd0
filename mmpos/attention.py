"""Who may see whom, and the scores that positions add: scaled dot-product attention.

Order decides who may see whom, never position: the tokens of an image share a time, and the
positions of a video may pass those of the text that follows it.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


class Prepared(NamedTuple):
    """A bias and a visibility, combined once for all layers of a forward pass by `prepare`."""

    mask: Tensor | None
    """What `scaled_dot_product_attention` takes: a bias with -inf, or True where visible."""
    causal: bool
    """Whether the kernel's own causal mask is all that is needed."""
    blind: Tensor | None
    """True for queries that see nothing; they get zeros."""


def prepare(
    queries: int,
    keys: int,
    *,
    bias: Float[Tensor, "*batch head query key"] | None = None,
    causal: bool = False,
    window: int | None = None,
    q_index: Int[Tensor, "*qbatch query"] | None = None,
    k_index: Int[Tensor, "*kbatch key"] | None = None,
    q_segments: Int[Tensor, "*qsbatch query"] | None = None,
    k_segments: Int[Tensor, "*ksbatch key"] | None = None,
    mask: Bool[Tensor, "..."] | None = None,
    device: torch.device | str | None = None,
) -> Prepared:
    """Combine a bias with what queries may see; the arguments are those of `attend`."""
    if causal and q_index is None and queries > keys:
        raise ValueError(
            f"causal attention of {queries} queries to {keys} keys: the last query is aligned with "
            "the last key, so there must be as many keys; pass q_index to say otherwise"
        )
    if bias is not None and not bias.is_floating_point():
        raise TypeError(f"bias is added to scores and must be floating, got {bias.dtype}")
    for name, along, length in (
        ("q_index", q_index, queries),
        ("q_segments", q_segments, queries),
        ("k_index", k_index, keys),
        ("k_segments", k_segments, keys),
    ):
        if along is not None and along.shape[-1] != length:
            raise ValueError(f"{name} is for {along.shape[-1]} tokens, there are {length}")
    if window is not None and window < 1:
        raise ValueError(f"window must be 1 or more, got {window}")
    if (q_segments is None) != (k_segments is None):
        raise ValueError("q_segments and k_segments go together: pass both, or neither")
    aligned = q_index is None and k_index is None
    only_causal = causal and window is None and q_segments is None and mask is None
    if only_causal and aligned and queries == keys and bias is None:
        return Prepared(None, True, None)

    visible = None
    if window is not None or (causal and not (aligned and queries == 1)):
        if k_index is None:
            k_index = torch.arange(keys, device=device)
        if q_index is None:
            q_index = k_index[..., -1:] + torch.arange(1 - queries, 1, device=device)
        behind = q_index.unsqueeze(-1) - k_index.unsqueeze(-2)
        behind = behind if behind.ndim == 2 else behind.unsqueeze(-3)
        visible = behind >= 0 if causal else behind > -(window or 0)
        if window is not None:
            visible = visible & (behind < window)
    if q_segments is not None and k_segments is not None:
        same = q_segments.unsqueeze(-1) == k_segments.unsqueeze(-2)
        same = same if same.ndim == 2 else same.unsqueeze(-3)
        visible = same if visible is None else visible & same
    if mask is not None:
        seen = _keys_mask(mask)
        visible = seen if visible is None else visible & seen

    blind = None
    if visible is not None and not (only_causal and aligned):
        blind = ~visible.any(-1, keepdim=True)
        visible = visible | blind
    if bias is None:
        combined = visible
    elif visible is None:
        combined = bias
    else:
        combined = torch.where(visible, bias, -torch.inf)
    if combined is not None:
        combined = combined[(None,) * (4 - combined.ndim)]
    return Prepared(combined, False, blind)


def attend(
    q: Float[Tensor, "batch head query head_dim"],
    k: Float[Tensor, "batch kv_head key head_dim"],
    v: Float[Tensor, "batch kv_head key value_dim"],
    *,
    bias: Float[Tensor, "*bias_batch head query key"] | None = None,
    causal: bool = False,
    window: int | None = None,
    q_index: Int[Tensor, "*qbatch query"] | None = None,
    k_index: Int[Tensor, "*kbatch key"] | None = None,
    q_segments: Int[Tensor, "*qsbatch query"] | None = None,
    k_segments: Int[Tensor, "*ksbatch key"] | None = None,
    mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    prepared: Prepared | None = None,
) -> Float[Tensor, "batch head query value_dim"]:
    """``softmax(scale · q kᵀ + bias) v`` over the keys that each query may see.

    Args:
        q, k, v: already turned by `mmpos.rotate` if they are; fewer heads in k and v are shared.
        bias: ``[..., H, Lq, Lk]``, never scaled; rounded to the dtype of ``q``.
        causal: a query sees the keys whose index is not above its own.
        window: a query sees keys less than this many indices away (before it, if causal).
        q_index, k_index: place of each token in the sequence, ``[..., L]``; by default the last
            query is aligned with the last key, as in decoding against a cache.
        q_segments, k_segments: the document of each token; only the same one is visible.
        mask: True where visible: keys of each row ``[B, Lk]``, or pairs ``[B, H, Lq, Lk]``, each
            of whose sizes may be 1.
        scale: ``head_dim ** -0.5`` by default.
        prepared: all of these but ``scale``, combined by `prepare` for several layers.

    A query that sees no key gets zeros. On CUDA, cuDNN's attention is avoided wherever there is a
    mask or bias, for which its gradients are not reliable.
    Raises: ValueError for heads that do not divide, more causal queries than keys, shapes that do
    not fit, or arguments beside ``prepared``; TypeError for a mask that is not boolean.
    """
    if k.shape[:-1] != v.shape[:-1] or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "expected q [batch, head, query, dim], k and v [batch, kv_head, key, …] of one batch, "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if not k.shape[-3] or q.shape[-3] % k.shape[-3]:
        raise ValueError(f"{q.shape[-3]} query heads cannot share {k.shape[-3]} key heads evenly")
    if prepared is None:
        prepared = prepare(
            q.shape[-2],
            k.shape[-2],
            bias=bias,
            causal=causal,
            window=window,
            q_index=q_index,
            k_index=k_index,
            q_segments=q_segments,
            k_segments=k_segments,
            mask=mask,
            device=q.device,
        )
    elif causal or any(
        given is not None
        for given in (bias, window, q_index, k_index, q_segments, k_segments, mask)
    ):
        raise ValueError(
            "prepared already combines bias, causal, window, indices, segments and mask, "
            "and none of these can be given beside it: pass them to prepare"
        )
    if prepared.causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(
            "prepared is for as many queries as keys, "
            f"given are {q.shape[-2]} queries and {k.shape[-2]} keys"
        )
    scores = prepared.mask
    if scores is not None:
        _check_fit(scores, q, k)
        scores = scores if scores.dtype == torch.bool else scores.to(q.dtype)
    safe = (
        sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
        if scores is not None and q.is_cuda
        else contextlib.nullcontext()
    )
    with safe:
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=scores,
            is_causal=prepared.causal,
            scale=scale,
            enable_gqa=q.shape[-3] != k.shape[-3],
        )
    return out if prepared.blind is None else out.masked_fill(prepared.blind, 0.0)


def _keys_mask(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        raise TypeError(
            f"mask must be boolean, True where visible, got {mask.dtype}; "
            "numbers that are added to scores go into bias"
        )
    if mask.ndim == 2:
        return mask[:, None, None, :]
    if mask.ndim != 4:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, expected keys [batch, key] "
            "or pairs [batch, head, query, key]"
        )
    return mask


def _check_fit(scores: Tensor, q: Tensor, k: Tensor) -> None:
    wanted = (*q.shape[:-1], k.shape[-2])
    if scores.ndim != 4 or any(
        have not in (1, want) for have, want in zip(scores.shape, wanted, strict=True)
    ):
        raise ValueError(
            f"bias and mask combine to {tuple(scores.shape)}, which does not fit "
            f"[batch, head, query, key] = {wanted}"
        )
