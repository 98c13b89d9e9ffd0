from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from mmpos.interop.transformers.projections import Move, Widths, moves, widths
from mmpos.positions import check_size
from mmpos.rotary.rotation import LAYOUTS, Layout

Model = TypeVar("Model", bound=nn.Module)


def permute(
    weights: Tensor,
    *,
    head_dim: int,
    to: Layout | Sequence[int],
    rotary_dim: int | None = None,
    trailing: bool = False,
    dim: int = 0,
) -> Tensor:
    """Features of heads in the other layout of pairs: rows of a projection, a bias, a norm's scale.

    Queries and keys that are made with permuted rows, and rotated in the other layout, have the
    scores that they had: the pairs stay the same, and only where they lie changes. Permuting there
    and back gives the same weights, bit for bit.

    Args:
        weights: whose ``dim`` counts the features of all heads, ``H · head_dim``: a projection
            ``[H·D, in]``, its bias ``[H·D]``, a LoRA's ``B [H·D, r]`` (its ``A`` stays), a norm's
            scale ``[D]`` or ``[H·D]``; ``dim=-1`` for ``Conv1D``, whose weight is ``[in, H·D]``.
        head_dim: features of a head.
        to: the layout that it gets, from the other one; or an order of a head's features, such as
            `ChannelPlan.order` gives, of which feature comes where.
        rotary_dim: how many features of a head are turned; the others stay where they are.
        trailing: whether these are the last ones.

    Raises: ValueError for an unknown layout, an order that does not name each feature once, sizes
    that do not fit; TypeError for quantised weights.

    >>> permute(torch.arange(6), head_dim=6, to="interleaved", rotary_dim=4).tolist()
    [0, 2, 1, 3, 4, 5]
    """
    order = _order(to, Widths(head_dim, rotary_dim, trailing))
    if weights.dtype.itemsize < 2 or not (
        weights.is_floating_point() or weights.dtype == torch.int64
    ):
        raise TypeError(f"weights are {weights.dtype}: permute before they are quantised")
    if weights.ndim == 0 or weights.shape[dim] % head_dim:
        raise ValueError(
            f"weights of shape {tuple(weights.shape)} are not of whole heads of {head_dim} "
            f"features along dim {dim}"
        )
    rows = torch.tensor(order, device=weights.device)
    starts = torch.arange(0, weights.shape[dim], head_dim, device=weights.device)
    return weights.index_select(dim, (starts[:, None] + rows).flatten())


@overload
def permute_model(
    model: Model,
    config: Any = None,
    *,
    to: Layout | Sequence[int],
    head_dim: int | None = None,
    heads: int | None = None,
    key_heads: int | None = None,
    rotary_dim: int | None = None,
    trailing: bool | None = None,
) -> Model: ...


@overload
def permute_model(
    model: Mapping[str, Tensor],
    config: Any = None,
    *,
    to: Layout | Sequence[int],
    head_dim: int | None = None,
    heads: int | None = None,
    key_heads: int | None = None,
    rotary_dim: int | None = None,
    trailing: bool | None = None,
) -> dict[str, Tensor]: ...


def permute_model(
    model: nn.Module | Mapping[str, Tensor],
    config: Any = None,
    *,
    to: Layout | Sequence[int],
    head_dim: int | None = None,
    heads: int | None = None,
    key_heads: int | None = None,
    rotary_dim: int | None = None,
    trailing: bool | None = None,
) -> nn.Module | dict[str, Tensor]:
    """All queries and keys of a model, or of a state dict, in the other layout of pairs.

    What makes them is found by its name: projections (``q_proj``, ``k_proj``, ``query``, ``key``),
    fused ones (``qkv_proj``, ``qkv``, ``c_attn``: queries, keys, values; ``query_key_value``:
    these for each key head), their biases, LoRA's ``B``, norms of q and k, and MLA's projections.
    A model is changed in place and returned, before an optimizer takes its parameters; of a state
    dict there is a new one, with the tensors that are not permuted as they are.

    Its own code then rotates in the wrong layout: let an encoding of mmpos with this layout do it.

    Args:
        model: one network, or its weights: of several, give the one (``model.language_model``).
        config: of transformers, from which sizes are read that are not given; a model's own by
            default.
        to, head_dim, rotary_dim, trailing: as in `permute`.
        heads, key_heads: of queries, and of keys; as many by default.

    Raises: ValueError if there is nothing to permute, a tensor has the name but not the shape, or
    sizes are missing or differ between layers; TypeError for quantised weights. Nothing is changed
    then.

    >>> weights = {"q_proj.weight": torch.eye(4), "v_proj.weight": torch.eye(4)}
    >>> permute_model(weights, to="interleaved", head_dim=4)["q_proj.weight"].argmax(1).tolist()
    [0, 2, 1, 3]
    """
    module = isinstance(model, nn.Module)
    held = dict((*model.named_parameters(), *model.named_buffers())) if module else model
    if config is None and module:
        config = getattr(model, "config", None)
    sizes = widths(
        config,
        head_dim=head_dim,
        heads=heads,
        key_heads=key_heads,
        rotary_dim=rotary_dim,
        trailing=trailing,
    )
    if sizes.latent is not None and not isinstance(to, str):
        raise ValueError(f"MLA's queries and keys have no one order: pass one of {LAYOUTS}")
    order = _order(to, sizes.head)
    latent = None if sizes.latent is None else _order(to, sizes.latent)
    found = moves(held, sizes)
    done = {key: _moved(held[key], move, order, latent) for key, move in found.items()}
    if isinstance(model, nn.Module):
        with torch.no_grad():
            for key, weights in done.items():
                held[key].copy_(weights)
        return model
    return {**held, **done}


def _order(to: Layout | Sequence[int], head: Widths) -> list[int]:
    """The feature of a head that comes at each place."""
    check_size("head_dim", head.head_dim)
    if not isinstance(to, str):
        order = [int(feature) for feature in to]
        if sorted(order) != list(range(head.head_dim)):
            raise ValueError(f"an order names each of {head.head_dim} features once, got {order}")
        if head.rotary_dim not in (None, head.head_dim):
            raise ValueError("an order is of all features of a head: pass no rotary_dim")
        return order
    if to not in LAYOUTS:
        raise ValueError(f"to must be one of {LAYOUTS}, or an order, got {to!r}")
    turned = head.head_dim if head.rotary_dim is None else head.rotary_dim
    if not 2 <= turned <= head.head_dim or turned % 2:
        raise ValueError(
            f"rotary_dim must be an even number between 2 and head_dim={head.head_dim}, "
            f"got {turned}"
        )
    start, half = (head.head_dim - turned if head.trailing else 0), turned // 2
    if to == "interleaved":
        own = [pair + which * half for pair in range(half) for which in range(2)]
    else:
        own = [2 * pair + which for which in range(2) for pair in range(half)]
    order = list(range(head.head_dim))
    order[start : start + turned] = [start + feature for feature in own]
    return order


def _moved(
    weights: Tensor, move: Move, order: Sequence[int], latent: Sequence[int] | None
) -> Tensor:
    """One tensor with the features of its heads of queries and keys in another order."""
    own = latent if move.latent else order
    assert own is not None
    rows = torch.arange(weights.shape[move.dim], device=weights.device)
    places = torch.tensor(own, device=weights.device)
    starts = torch.tensor(move.starts, device=weights.device)
    spots = (starts[:, None] + torch.arange(len(own), device=weights.device)).flatten()
    rows[spots] = (starts[:, None] + places).flatten()
    return weights.detach().index_select(move.dim, rows)
