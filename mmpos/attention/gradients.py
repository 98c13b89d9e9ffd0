"""The backward pass of attention with a learned bias, by blocks of queries.

Of the forward pass only ``q``, ``k``, ``v`` and the output ``O`` are kept, as in FlashAttention
(arXiv:2205.14135, sec. 3.1 and appendix B.4). The scores of some queries are formed again, from
them the weights ``P = softmax(scale · q kᵀ + bias)``, and with ``dO``, the gradient of ``O``:

    dV = Pᵀ dO,  dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O)),  dQ = scale · dS K,  dK = scale · dSᵀ Q

``dS``, summed over whatever shares the bias, is the gradient of the bias of those queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mmpos.attention.kernel import as_kernel_takes
from mmpos.attention.visibility import Visibility, cut, four

_FORMED = 1 << 22  # numbers in the bias of a block of queries, or what 64 queries need
_SCORES = 1 << 21  # numbers among the scores that are worked on at a time
_ROWS = 64  # queries in a block at least


class Learned(NamedTuple):
    """A bias with a gradient, as a whole or by blocks, and what else attention is given."""

    dense: Tensor | None
    """The bias, each of ``[B, H, Lq, Lk]`` or 1."""
    form: Callable[[int, int], Tensor] | None
    visibility: Visibility
    scale: float

    def blocks(self, q: Tensor, k: Tensor) -> Iterator[tuple[int, int]]:
        """The first query of each block, and that after its last."""
        rows = max(1 if self.dense is None else self.dense.shape[0], self.visibility.rows)
        width = max(1, rows * q.shape[1] * k.shape[-2])
        size = max(_ROWS, _FORMED // width // _ROWS * _ROWS)
        for start in range(0, q.shape[-2], size):
            yield start, min(start + size, q.shape[-2])

    def formed(self, q: Tensor, k: Tensor, start: int, stop: int) -> Tensor:
        """The bias of some queries, each of ``[B, H, stop - start, Lk]`` or 1.

        Raises: ValueError for blocks of another shape.
        """
        if self.dense is not None:
            return cut(self.dense, -2, slice(start, stop))
        assert self.form is not None
        bias = four(self.form(start, stop))
        wanted = (*q.shape[:2], stop - start, k.shape[-2])
        if bias.ndim != 4 or any(
            have not in (1, want) for have, want in zip(bias.shape, wanted, strict=True)
        ):
            raise ValueError(
                f"the bias of queries {start} to {stop} has shape {tuple(bias.shape)}, which does "
                f"not fit [batch, head, query, key] = {wanted}"
            )
        return bias


def hidden(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, and -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, -torch.inf
    )


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    call: Learned,
    parameters: Sequence[Tensor],
    needed: Sequence[bool],
    gradient: Tensor,
) -> list[Tensor | None]:
    """Gradients to ``q``, ``k``, ``v``, the dense bias, and what is learned in its blocks.

    Raises: RuntimeError for blocks that depend on learned numbers which are not ``parameters``.
    """
    sums = _Sums(q, k, v, out, gradient, call.scale)
    whole = None
    if needed[3] and call.dense is not None:
        whole = torch.zeros_like(call.dense, dtype=sums.dq.dtype)
    learned = [part for part, need in zip(parameters, needed[4:], strict=True) if need]
    totals: list[Tensor | None] = [None] * len(learned)
    for start, stop in call.blocks(q, k):
        rows, keys = slice(start, stop), slice(*call.visibility.span(start, stop))
        with torch.set_grad_enabled(bool(learned)):
            formed = call.formed(q, k, start, stop)
        visible, blind = call.visibility.visible(rows, keys)
        slope = torch.zeros_like(formed) if learned else None
        target = slope if whole is None else cut(whole, -2, rows)
        sums.add(
            rows,
            keys,
            cut(as_kernel_takes(formed.detach(), q), -1, keys),
            None if visible is None else hidden(four(visible), sums.dq.dtype),
            None if blind is None else four(blind),
            None if target is None else cut(target, -1, keys),
        )
        if slope is not None and formed.requires_grad:
            if start == 0:
                _check_named(formed, parameters)
            found = torch.autograd.grad(
                formed, learned, slope, retain_graph=True, allow_unused=True
            )
            totals = [
                old if new is None else new if old is None else old + new
                for old, new in zip(totals, found, strict=True)
            ]
    found = iter(totals)
    return [
        sums.dq.flatten(1, 2).mul_(call.scale).to(q.dtype),
        sums.dk.to(k.dtype),
        sums.dv.to(v.dtype),
        None if whole is None or call.dense is None else whole.to(call.dense.dtype),
        *(next(found) if need else None for need in needed[4:]),
    ]


class _Sums:
    """The gradients to queries, keys and values, to which blocks of queries are added."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, gradient: Tensor, scale: float
    ) -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        sharing = (k.shape[1], q.shape[1] // k.shape[1])
        gradient = gradient.to(wide)
        delta = (gradient * out.to(wide)).sum(-1, keepdim=True)
        self.q = (q.to(wide) * scale).unflatten(1, sharing)
        self.k, self.v = k.to(wide), v.to(wide)
        # dO Vᵀ - rowsum(dO ∘ O) is one product of these
        self.more_gradient = torch.cat((gradient, -delta), -1).unflatten(1, sharing)
        self.more_v = torch.nn.functional.pad(self.v, (0, 1), value=1.0)
        self.dq = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        self.dk = torch.zeros_like(self.k, memory_format=torch.contiguous_format)
        self.dv = torch.zeros_like(self.v, memory_format=torch.contiguous_format)
        self.room = [torch.empty(0, dtype=wide, device=q.device) for _ in range(2)]

    def add(
        self,
        rows: slice,
        keys: slice,
        added: Tensor,
        hidden: Tensor | None,
        blind: Tensor | None,
        target: Tensor | None,
    ) -> None:
        """Add a block of queries; the gradient of its bias is added to ``target``."""
        batch, shared, share = self.q.shape[:3]
        count, width = rows.stop - rows.start, keys.stop - keys.start
        some = min(shared, max(1, _SCORES // max(1, share * count * width)))
        for row in range(batch):
            for first in range(0, shared, some):
                heads = slice(first, min(shared, first + some))
                shape = (heads.stop - first, share, count, width)
                own = [
                    None if part is None else _part(part, row, heads, share)
                    for part in (hidden, blind, target)
                ]
                self._add(row, heads, rows, keys, shape, _part(added, row, heads, share), *own)

    def _add(
        self,
        row: int,
        heads: slice,
        rows: slice,
        keys: slice,
        shape: tuple[int, int, int, int],
        added: Tensor,
        hidden: Tensor | None,
        blind: Tensor | None,
        target: Tensor | None,
    ) -> None:
        q = self.q[row, heads, :, rows].flatten(1, 2)
        gradient = self.more_gradient[row, heads, :, rows]
        gradient = gradient if blind is None else gradient.masked_fill(blind, 0.0)
        gradient = gradient.flatten(1, 2)
        k, v = self.k[row, heads, keys], self.more_v[row, heads, keys]
        scores, weights = (self._space(i, shape) for i in range(2))
        if hidden is None:
            scores.copy_(added)
        else:
            torch.add(added.expand(shape), hidden, out=scores)
        scores, weights = scores.flatten(1, 2), weights.flatten(1, 2)
        torch.softmax(scores.baddbmm_(q, k.mT), -1, out=weights)
        slope = torch.bmm(gradient, v.mT, out=scores).mul_(weights)
        self.dv[row, heads, keys].baddbmm_(weights.mT, gradient[..., :-1])
        self.dk[row, heads, keys].baddbmm_(slope.mT, q)
        self.dq[row, heads, :, rows] = torch.bmm(slope, k).unflatten(1, shape[1:3])
        if target is not None:
            target.add_(slope.view(shape).sum_to_size(target.shape))

    def _space(self, which: int, shape: tuple[int, ...]) -> Tensor:
        size = 1
        for length in shape:
            size *= length
        if self.room[which].numel() < size:
            self.room[which] = self.room[which].new_empty(size)
        return self.room[which][:size].view(shape)


def _part(whole: Tensor, row: int, heads: slice, share: int) -> Tensor:
    """Some heads of a row, ``[shared, share, query, key]``, of what has these sizes or 1."""
    part = whole[row if whole.shape[0] > 1 else 0]
    if part.shape[0] == 1:
        return part.unsqueeze(0)
    return part[heads.start * share : heads.stop * share].unflatten(0, (-1, share))


def _check_named(formed: Tensor, parameters: Sequence[Tensor]) -> None:
    """Raise if ``formed`` depends on leaves other than through ``parameters``."""
    ends = [part if part.is_leaf else part.grad_fn for part in parameters]
    seen, stack = set(), [formed.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen or any(node is end for end in ends):
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not any(leaf is end for end in ends):
            raise RuntimeError(
                "the blocks of a bias depend on a learned tensor of shape "
                f"{tuple(leaf.shape)} that is not among their parameters, and its gradient would "
                "be lost: name it in BiasBlocks(form, parameters). Parameters that were replaced "
                "for the forward pass only (torch.func.functional_call) need a dense bias"
            )
        stack += [below for below, _ in node.next_functions]
