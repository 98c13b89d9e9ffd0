from __future__ import annotations

import torch
from torch import Tensor

from mmpos.bias import ContentTerms


def attend_by_content(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: ContentTerms,
    mask: Tensor | None,
    blind: Tensor | None,
    scale: float,
) -> Tensor:
    """Attention written out, with all ``[B, H, Lq, Lk]`` scores and weights, in float32 or more."""
    dtype = q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    share = q.shape[1] // k.shape[1]
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    if share > 1:
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = (q * scale) @ k.mT + terms.scores(q, k, scale)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1)
    if blind is not None:
        weights = weights.masked_fill(blind, 0.0)
    out = weights @ v
    more = terms.values(weights)
    if more is not None and more.shape != out.shape:
        raise ValueError(
            f"values have {out.shape[-1]} features, what the bias adds to them {more.shape[-1]}: "
            "make it with their head_dim"
        )
    return (out if more is None else out + more).to(dtype)
