from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmpos.attention.documents import documents
from mmpos.attention.key_bias import split
from mmpos.attention.visibility import Visibility, as_pairs, four
from mmpos.bias import BiasBlocks, ContentTerms


class Prepared(NamedTuple):
    """A bias and a visibility, combined once for all layers of a forward pass by `prepare`."""

    mask: Tensor | None
    """What `scaled_dot_product_attention` takes: a bias with -inf, or True where visible."""
    causal: bool
    """Whether the kernel's own causal mask is all that is needed."""
    blind: Tensor | None
    """True for queries that see nothing; they get zeros."""
    key_bias: Tensor | None = None
    """A number for each head and key that is not in ``mask``, ``[..., H, Lk]``."""
    bias: Tensor | BiasBlocks | ContentTerms | None = None
    """A bias that is not in ``mask``: a learned one, or one that looks at content."""
    visibility: Visibility | None = None
    """What is visible, where ``bias`` is formed by blocks, or ``documents`` attend one by one."""
    documents: tuple[int, ...] | None = None
    """Lengths of packed documents that attend to themselves alone."""


def prepare(
    queries: int,
    keys: int,
    *,
    bias: Float[Tensor, "*batch head query key"] | BiasBlocks | ContentTerms | None = None,
    key_bias: Float[Tensor, "*kbbatch head key"] | None = None,
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
    if not isinstance(bias, Tensor | BiasBlocks | ContentTerms | None):
        way = " call it with positions: bias(positions, positions)" if callable(bias) else ""
        raise TypeError(
            f"bias is a tensor, blocks or content terms, got {type(bias).__name__}:{way}"
        )
    for name, given in (
        ("key_bias", key_bias),
        ("q_index", q_index),
        ("k_index", k_index),
        ("q_segments", q_segments),
        ("k_segments", k_segments),
        ("mask", mask),
    ):
        if given is not None and (not isinstance(given, Tensor) or given.ndim == 0):
            raise TypeError(f"{name} must be a tensor with a number for each token, got {given!r}")
    for name, added in (("bias", bias), ("key_bias", key_bias)):
        if isinstance(added, Tensor) and not added.is_floating_point():
            raise TypeError(f"{name} is added to scores and must be floating, got {added.dtype}")
    for name, along, length in (
        ("q_index", q_index, queries),
        ("q_segments", q_segments, queries),
        ("k_index", k_index, keys),
        ("k_segments", k_segments, keys),
        ("key_bias", key_bias, keys),
    ):
        if along is not None and along.shape[-1] != length:
            raise ValueError(f"{name} is for {along.shape[-1]} tokens, there are {length}")
    if window is not None and (isinstance(window, bool | float) or window < 1):
        raise ValueError(f"window must be a whole number of 1 or more, got {window}")
    if key_bias is not None and _can_look(key_bias) and not key_bias.isfinite().all():
        raise ValueError("key_bias must be finite: hide keys by mask=")
    if (q_segments is None) != (k_segments is None):
        raise ValueError("q_segments and k_segments go together: pass both, or neither")
    if q_segments is not None and k_segments is not None:
        rows = {part.shape[0] for part in (q_segments, k_segments) if part.ndim == 2} - {1}
        if len(rows) > 1:
            raise ValueError(f"q_segments and k_segments are for batches of {sorted(rows)}")
    visibility = Visibility(
        queries,
        keys,
        causal,
        window,
        q_index,
        k_index,
        q_segments,
        k_segments,
        None if mask is None else as_pairs(mask),
        device,
    )
    if _one_document(visibility):
        visibility = visibility._replace(q_segments=None, k_segments=None)
    if bias is None and visibility.ordered and queries == keys:
        return Prepared(None, True, None, key_bias)
    if isinstance(bias, ContentTerms):
        visible, blind = visibility.visible()
        return Prepared(_combined(None, key_bias, visible), False, blind, bias=bias)
    lengths = None
    if key_bias is None and not isinstance(bias, BiasBlocks):
        lengths = documents(visibility)
    if lengths is not None:
        return Prepared(None, False, None, bias=bias, visibility=visibility, documents=lengths)
    learned = _by_blocks(bias, key_bias)
    if learned is not None and not torch.compiler.is_compiling():
        return Prepared(None, False, None, bias=learned, visibility=visibility)
    return as_mask(bias, key_bias, visibility)


def _one_document(visibility: Visibility) -> bool:
    """Whether each row is seen to be a single document."""
    own = visibility.q_segments
    if own is None or own is not visibility.k_segments or not own.numel() or not _can_look(own):
        return False
    return bool((own == own[..., :1]).all())


def _can_look(part: Tensor) -> bool:
    """Whether a look at its values is free."""
    return part.device.type == "cpu" and not torch.compiler.is_compiling()


def as_mask(
    bias: Tensor | BiasBlocks | None, key_bias: Tensor | None, visibility: Visibility
) -> Prepared:
    """Bias and visibility as one tensor, whose gradient, if any, the kernel forms."""
    if isinstance(bias, BiasBlocks):
        bias = bias.form(0, visibility.queries)
    visible, blind = visibility.visible()
    mask = _combined(bias, key_bias, visible)
    if mask is not None and mask.dtype == torch.bool and _can_look(mask):
        # kernels for the CPU add numbers, and would make them of a mask in each layer
        mask = mask.new_zeros(mask.shape, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
    return Prepared(mask, False, blind)


def _by_blocks(
    bias: Tensor | BiasBlocks | None, key_bias: Tensor | None
) -> Tensor | BiasBlocks | None:
    """The bias, if its gradient is to be formed by blocks of queries.

    Kernels for the CPU would keep all weights for the gradient of a mask, those for CUDA do not.
    """
    if isinstance(bias, BiasBlocks):
        return bias if key_bias is None else _with_keys(bias, key_bias)
    learned = [part for part in (bias, key_bias) if part is not None and part.requires_grad]
    if not learned or not torch.is_grad_enabled() or learned[0].is_cuda:
        return None
    if key_bias is None:
        return bias
    if bias is not None:
        return bias + key_bias.to(bias.dtype).unsqueeze(-2)
    zero = BiasBlocks(lambda start, stop: key_bias.new_zeros(1, stop - start, 1), ())
    return _with_keys(zero, key_bias)


def _with_keys(blocks: BiasBlocks, key_bias: Tensor) -> BiasBlocks:
    def form(start: int, stop: int) -> Tensor:
        formed = blocks.form(start, stop)
        return formed + key_bias.to(formed.dtype).unsqueeze(-2)

    return BiasBlocks(form, (*blocks.parameters, key_bias))


def _combined(
    bias: Tensor | None, key_bias: Tensor | None, visible: Tensor | None
) -> Tensor | None:
    if key_bias is not None:
        keys = _centred(key_bias, visible)
        combined = keys if bias is None else bias + keys.to(bias.dtype)
    elif bias is None:
        combined = visible
    else:
        combined = bias if visible is None else torch.where(visible, bias, -torch.inf)
    return None if combined is None else four(combined)


def _centred(key_bias: Tensor, visible: Tensor | None) -> Tensor:
    """``[..., H, Lq or 1, Lk]`` in float32, -inf where hidden, less the most that a query sees.

    Softmax does not see the difference, and numbers near 0 are exact where attention is highest.
    """
    steps, unit = split(key_bias, 16, 2)[0]
    coarse = (steps * unit).float().unsqueeze(-2)
    if visible is not None:
        coarse = torch.where(visible, coarse, -torch.inf)
    fine = (key_bias - steps * unit).float().unsqueeze(-2)
    return coarse - coarse.amax(-1, keepdim=True) + fine
