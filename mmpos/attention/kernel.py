from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Torch's own attention, with a back end whose gradients are reliable.

    On CUDA, cuDNN's is avoided wherever there is a mask, for which its gradients are not.
    """
    if mask is not None:
        mask = as_kernel_takes(mask, q)
        if not torch.is_grad_enabled():
            mask = mask.detach()  # a mask with a gradient would have the kernel write all out
    safe = (
        sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
        if mask is not None and q.is_cuda
        else contextlib.nullcontext()
    )
    with safe:
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal,
            scale=scale,
            enable_gqa=bool(q.shape[-3] != k.shape[-3]),
        )


def as_kernel_takes(mask: Tensor, q: Tensor) -> Tensor:
    """A mask in the dtype that the kernel adds: that of ``q``, or float32 where it may be."""
    if mask.dtype == torch.bool:
        return mask
    wide = q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16)
    return mask.to(torch.float32 if wide and mask.dtype.itemsize > 2 else q.dtype)


def math_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Torch's own attention written out, whose gradients have gradients themselves."""
    mask = None if mask is None else as_kernel_takes(mask, q)
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=bool(q.shape[-3] != k.shape[-3])
        )
