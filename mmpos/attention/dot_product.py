from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmpos.attention.content import attend_by_content
from mmpos.attention.documents import attend_by_documents
from mmpos.attention.kernel import kernel
from mmpos.attention.key_bias import attend_with_key_bias
from mmpos.attention.learned import attend_learned
from mmpos.attention.prepared import Prepared, as_mask, prepare
from mmpos.attention.visibility import four
from mmpos.bias import BiasBlocks, ContentTerms


def attend(
    q: Float[Tensor, "batch head query head_dim"],
    k: Float[Tensor, "batch kv_head key head_dim"],
    v: Float[Tensor, "batch kv_head key value_dim"],
    *,
    bias: Float[Tensor, "*bias_batch head query key"] | BiasBlocks | ContentTerms | None = None,
    key_bias: Float[Tensor, "*kbbatch head key"] | None = None,
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

    Source: Attention Is All You Need (arXiv:1706.03762, sec. 3.2.1), with a bias as in T5
    (arXiv:1910.10683, sec. 2.1).

    Args:
        q, k, v: already turned by `mmpos.rotate` if they are; fewer heads in k and v are shared.
        bias: added to the scaled scores, never scaled itself. A tensor ``[..., H, Lq, Lk]``; the
            same by blocks of queries (`AttentionBias.blocks`); or the terms of a `ContentBias`.
        key_bias: a number for each head and key, ``[..., H, Lk]``, added for every query that sees
            the key (`ALiBi.key_bias`); finite.
        causal: a query sees the keys whose index is not above its own.
        window: a query sees keys less than this many indices away (before it, if causal).
        q_index, k_index: place of each token in the sequence, ``[..., L]``; by default the last
            query is aligned with the last key, as in decoding against a cache.
        q_segments, k_segments: the document of each token; only the same one is visible.
        mask: True where visible: keys of each row ``[B, Lk]``, or pairs ``[B, H, Lq, Lk]``, each
            of whose sizes may be 1.
        scale: ``head_dim ** -0.5`` by default.
        prepared: all of these but ``scale``, combined by `prepare` for several layers.

    A query that sees no key gets zeros; a key that is not seen has weight 0.

    The gradient of a bias that is learned is formed by blocks of queries, for a tensor on the CPU
    and for `BiasBlocks` everywhere; nothing of the size ``B · H · Lq · Lk`` is kept, and for
    `BiasBlocks` nothing of the size ``H · Lq · Lk``. Content terms do keep all weights. A key bias
    under a causal order alone (as many queries as keys, no mask, window, segments or indices) goes
    into more features of q and k, and forms no ``Lq · Lk`` tensor either; float64 is worth passing,
    for what float32 rounds at thousands is seen in the weights.

    A tensor is rounded to the dtype of ``q``, except that half precision on the CPU adds float32.
    On CUDA, cuDNN's attention is avoided wherever there is a mask or bias, for which its gradients
    are not reliable.
    Raises: ValueError for heads that do not divide, more causal queries than keys, shapes that do
    not fit, or arguments beside ``prepared``; TypeError for a mask that is not boolean.

    >>> q, k, v = torch.randn(3, 1, 8, 5, 16).unbind(0)
    >>> alibi, positions = mmpos.ALiBi(8), mmpos.positions.sequence(5)
    >>> pairs = mmpos.attend(q, k, v, bias=alibi(positions, positions), causal=True)
    >>> keys = mmpos.attend(q, k, v, key_bias=alibi.key_bias(positions), causal=True)
    >>> torch.allclose(pairs, keys, atol=1e-5)
    True
    """
    if k.shape[:-1] != v.shape[:-1] or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "expected q [batch, head, query, dim], k and v [batch, kv_head, key, …] of one batch, "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if not q.shape[-1]:
        raise ValueError(f"heads have no features: q has shape {tuple(q.shape)}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale}")
    if not k.shape[-3] or q.shape[-3] % k.shape[-3]:
        raise ValueError(f"{q.shape[-3]} query heads cannot share {k.shape[-3]} key heads evenly")
    if prepared is None:
        prepared = prepare(
            q.shape[-2],
            k.shape[-2],
            bias=bias,
            key_bias=key_bias,
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
        for given in (bias, key_bias, window, q_index, k_index, q_segments, k_segments, mask)
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
    plain = contextlib.nullcontext()
    if torch.is_autocast_enabled(q.device.type):
        lower = torch.get_autocast_dtype(q.device.type)
        q, k, v = (part if part.dtype == torch.float64 else part.to(lower) for part in (q, k, v))
        plain = torch.autocast(q.device.type, enabled=False)
    with plain:
        return _attend(q, k, v, prepared, scale)


def _attend(q: Tensor, k: Tensor, v: Tensor, prepared: Prepared, scale: float | None) -> Tensor:
    bias, visibility = prepared.bias, prepared.visibility
    _check_fit(prepared, q, k)
    number = q.shape[-1] ** -0.5 if scale is None else scale
    if number < 0:  # kernels that hide keys by order do so before they scale
        q, number = -q, -number
    if prepared.documents is not None and visibility is not None:
        assert not isinstance(bias, BiasBlocks | ContentTerms)

        def alone(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
            order = {"causal": visibility.causal, "window": visibility.window}
            once = prepare(q.shape[-2], q.shape[-2], bias=bias, device=q.device, **order)
            return _attend(q, k, v, once, number)

        return attend_by_documents(q, k, v, bias, prepared.documents, alone)
    if isinstance(bias, ContentTerms):
        return attend_by_content(q, k, v, bias, prepared.mask, prepared.blind, number)
    if prepared.key_bias is not None:
        return attend_with_key_bias(q, k, v, prepared.key_bias, number)
    if bias is not None and visibility is not None:
        if not torch.compiler.is_compiling():
            return attend_learned(q, k, v, bias, visibility, number)
        prepared = as_mask(bias, None, visibility)
    out = kernel(q, k, v, prepared.mask, causal=prepared.causal, scale=number)
    return out if prepared.blind is None else out.masked_fill(prepared.blind, 0.0)


def _check_fit(prepared: Prepared, q: Tensor, k: Tensor) -> None:
    wanted = (*q.shape[:-1], k.shape[-2])
    if prepared.visibility is not None and wanted[2:] != prepared.visibility[:2]:
        raise ValueError(
            f"prepared is for {prepared.visibility.queries} queries and "
            f"{prepared.visibility.keys} keys, given are {wanted[2]} and {wanted[3]}"
        )
    if prepared.visibility is not None and prepared.visibility.rows not in (1, wanted[0]):
        raise ValueError(
            f"what is visible is given for a batch of {prepared.visibility.rows}, "
            f"the batch has {wanted[0]}"
        )
    mask, bias = prepared.mask, prepared.bias
    shapes: dict[str, Sequence[int] | None] = {
        "bias and all that hides keys combine to": None if mask is None else mask.shape
    }
    if isinstance(bias, ContentTerms):
        shapes["the bias is for"] = bias.shape
    if isinstance(bias, Tensor) and prepared.visibility is not None:
        mask = prepared.visibility.mask
        shapes = {"bias is": four(bias).shape, "mask is": None if mask is None else mask.shape}
    if prepared.key_bias is not None:
        shapes = {"key_bias for all queries is": four(prepared.key_bias.unsqueeze(-2)).shape}
    for name, shape in shapes.items():
        if shape is not None and (
            len(shape) != 4
            or any(have not in (1, want) for have, want in zip(shape, wanted, strict=True))
        ):
            raise ValueError(
                f"{name} {tuple(shape)}, which does not fit [batch, head, query, key] = {wanted}"
            )
