"""Attention with a learned bias, whose gradient is formed by blocks of queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpos.attention.gradients import Learned, gradients, hidden
from mmpos.attention.kernel import kernel, math_kernel
from mmpos.attention.prepared import as_mask
from mmpos.attention.visibility import Visibility, cut, four
from mmpos.bias import BiasBlocks


def attend_learned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | BiasBlocks,
    visibility: Visibility,
    scale: float,
) -> Tensor:
    """Attention with gradients to ``bias``; no ``[B, H, Lq, Lk]`` tensor is formed.

    Raises: ValueError for blocks of a bias that do not fit; in the backward pass RuntimeError if
    they depend on learned numbers that they do not name.
    """
    call = Learned(None, None, visibility, scale)
    if isinstance(bias, BiasBlocks):
        return _Learned.apply(q, k, v, None, call._replace(form=bias.form), *bias.parameters)
    return _Learned.apply(q, k, v, four(bias), call)


class _Learned(torch.autograd.Function):
    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, dense: Tensor | None, call: Learned, *parameters: Tensor
    ) -> Tensor:
        call = call._replace(dense=dense)
        if dense is not None and call.visibility.everything:
            return kernel(q, k, v, dense, scale=call.scale)
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        for start, stop in call.blocks(q, k):
            rows, keys = slice(start, stop), slice(*call.visibility.span(start, stop))
            added = cut(call.formed(q, k, start, stop), -1, keys)
            visible, blind = call.visibility.visible(rows, keys)
            if visible is not None:
                added = added + hidden(visible, added.dtype)
            part = kernel(q[:, :, rows], k[:, :, keys], v[:, :, keys], added, scale=call.scale)
            out[:, :, rows] = part if blind is None else part.masked_fill(blind, 0.0)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        q, k, v, dense, ctx.call, *ctx.parameters = inputs
        ctx.save_for_backward(q, k, v, dense, output, *ctx.parameters)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, dense, out, *_ = ctx.saved_tensors
        call = ctx.call._replace(dense=dense)
        needed = [*ctx.needs_input_grad[:4], *ctx.needs_input_grad[5:]]
        with torch.autocast(q.device.type, enabled=False):
            if torch.is_grad_enabled():
                found = _differentiable(q, k, v, call, ctx.parameters, needed, *gradient)
            else:
                found = gradients(q, k, v, out, call, ctx.parameters, needed, *gradient)
        return (*found[:4], None, *found[4:])


def _differentiable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Learned,
    parameters: list[Tensor],
    needed: list[bool],
    gradient: Tensor,
) -> list[Tensor | None]:
    """The gradients as functions that have gradients themselves, at the cost of all weights."""
    bias = call.dense if call.form is None else BiasBlocks(call.form, tuple(parameters))
    prepared = as_mask(bias, None, call.visibility)
    out = math_kernel(q, k, v, prepared.mask, call.scale)
    if prepared.blind is not None:
        out = out.masked_fill(prepared.blind, 0.0)
    inputs = [q, k, v, call.dense, *parameters]
    wanted = [part for part, need in zip(inputs, needed, strict=True) if need and part is not None]
    found = iter(torch.autograd.grad(out, wanted, gradient, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needed]
