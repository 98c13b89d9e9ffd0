"""How pairs are turned: by the formula, or on CPUs in one pass or in blocks; and the derivative."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

BLOCK = 2**21
"""Features that are turned at once where there are temporaries: few enough to stay in the cache."""


def formula(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    layout: str,
    start: int,
    second: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """``(a cos - b sin, a sin + b cos)`` in the dtype of ``cos``, as ``x`` where it is not turned.

    What compilers, other devices and subclasses of tensors are given.
    """
    if not torch.compiler.is_compiling() and _is_autocast(x.device.type):  # it cannot join float16
        with torch.autocast(x.device.type, enabled=False):
            return formula(x, cos, sin, layout, start, second)
    pairs, end = cos.shape[-1], start + 2 * cos.shape[-1]
    cos_b, sin_b = (cos, sin) if second is None else second
    turned = x.narrow(-1, start, 2 * pairs)
    if layout == "interleaved" and x.dtype != cos.dtype:  # half as long as below once compiled
        swapped = turned.reshape(*x.shape[:-1], pairs, 2).flip(-1).reshape(turned.shape)
        own, other = (torch.stack(t, -1).flatten(-2) for t in ((cos, cos_b), (-sin, sin_b)))
        parts = [(turned.to(cos.dtype) * own + swapped.to(cos.dtype) * other).to(x.dtype)]
    else:
        a, b = (part.to(cos.dtype) for part in split(turned, layout))
        parts = [(a * cos - b * sin).to(x.dtype), (a * sin_b + b * cos_b).to(x.dtype)]
        if layout == "interleaved":
            parts = [torch.stack(parts, -1).view(turned.shape)]
    parts = [part for part in (x[..., :start], *parts, x[..., end:]) if part.shape[-1]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def split(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The first and the second features of all pairs."""
    if layout == "interleaved":
        return x[..., ::2], x[..., 1::2]
    pairs = x.shape[-1] // 2
    return x[..., :pairs], x[..., pairs:]


def _is_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


class Turn(Function):
    """`turn` into a new tensor. Its derivative turns back, so it keeps no activation for it.

    ``x`` is kept only where cos or sin have a gradient (learned frequencies).
    """

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor, layout: str, start: int) -> Tensor:
        batched = not all(map(torch._C._has_storage, (x, cos, sin)))  # by `torch.autograd.grad`
        if batched or x.device.type != "cpu":
            return formula(x, cos, sin, layout, start)
        return turn(x, x.new_empty(x.shape), cos, sin, layout, start)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        x, cos, sin, ctx.layout, ctx.start = inputs
        ctx.save_for_backward(cos, sin, x if any(ctx.needs_input_grad[1:3]) else None)
        ctx.save_for_forward(x, cos, sin)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple:
        (grad,), (cos, sin, x) = grads, ctx.saved_tensors
        back = by_cos = by_sin = None
        if ctx.needs_input_grad[0]:
            back = Turn.apply(grad, cos, -sin, ctx.layout, ctx.start)
        if x is not None:
            turned = (t.narrow(-1, ctx.start, 2 * cos.shape[-1]).to(cos.dtype) for t in (x, grad))
            (a, b), (grad_a, grad_b) = (split(t, ctx.layout) for t in turned)
            by_cos = (grad_a * a + grad_b * b).sum_to_size(cos.shape)
            by_sin = (grad_b * a - grad_a * b).sum_to_size(sin.shape)
        return back, by_cos, by_sin, None, None

    @staticmethod
    def jvp(ctx, *tangents: Tensor | None) -> Tensor:
        (x_dot, cos_dot, sin_dot, *_), (x, cos, sin) = tangents, ctx.saved_tensors
        turned = x.narrow(-1, ctx.start, 2 * cos.shape[-1])
        by_angle = Turn.apply(turned, cos_dot, sin_dot, ctx.layout, 0)
        around = ctx.start, x.shape[-1] - ctx.start - turned.shape[-1]
        by_angle = torch.nn.functional.pad(by_angle, around)
        return Turn.apply(x_dot, cos, sin, ctx.layout, ctx.start) + by_angle

    @staticmethod
    def vmap(info, in_dims: tuple, *inputs) -> tuple[Tensor, int]:
        (x, cos, sin, layout, start), (own, *tables) = inputs, in_dims[:3]
        x = x.expand(info.batch_size, *x.shape) if own is None else x.movedim(own, 0)
        cos, sin = (
            t if at is None else t.movedim(at, 0)[(slice(None),) + (None,) * (x.ndim - t.ndim)]
            for t, at in zip((cos, sin), tables, strict=True)
        )
        return Turn.apply(x, cos, sin, layout, start), 0


def is_watched(*tensors: Tensor) -> bool:
    """Whether a derivative is taken of what happens to them, or it is batched."""
    grad, dual = torch.is_grad_enabled(), forward_ad._current_level >= 0
    for t in tensors:
        if (grad and t.requires_grad) or not torch._C._has_storage(t):  # wrapped by `torch.func`
            return True
        if dual and forward_ad.unpack_dual(t).tangent is not None:
            return True
    return False


def turn(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, layout: str, start: int) -> Tensor:
    """Write the turned ``x`` into ``out``, which may be ``x`` itself; on CPUs, without gradient."""
    source, target, width = x, out, 2 * cos.shape[-1]
    if x.shape[-1] > width:
        end = start + width
        source, target = x[..., start:end], out[..., start:end]
        if out is not x:
            out[..., :start].copy_(x[..., :start])
            out[..., end:].copy_(x[..., end:])
    if layout == "half":
        _turn_halves(source, target, cos, sin, in_place=out is x)
    else:
        _turn_neighbours(source, target, torch.complex(cos, sin))
    return out


def _turn_neighbours(source: Tensor, target: Tensor, turns: Tensor) -> None:
    """A pair is a complex number: one pass where both tensors can be seen so, else in blocks."""
    exact = turns.dtype.to_real()
    if source.dtype == exact and _is_complex(source):
        pairs = _as_complex(source)
        if target is source:
            pairs.mul_(turns)
            return
        if _is_complex(target):
            torch.mul(pairs, turns, out=_as_complex(target))
            return
    turns = turns.expand(*source.shape[:-1], -1)
    scratch = _scratch(source, exact)
    for block in _blocks(source.shape):
        wide = _like(source[block], scratch).copy_(source[block].contiguous())
        _as_complex(wide).mul_(turns[block])
        target[block] = wide


def _turn_halves(
    source: Tensor, target: Tensor, cos: Tensor, sin: Tensor, *, in_place: bool
) -> None:
    """In blocks: from a copy if ``x`` is narrower than float32 or is overwritten."""
    pairs, lead, narrow = cos.shape[-1], source.shape[:-1], source.dtype != cos.dtype
    cos, sin = torch.cat((cos, cos), -1).expand(*lead, -1), sin.expand(*lead, -1)
    scratch = [_scratch(source, cos.dtype) for wanted in (narrow or in_place, narrow) if wanted]
    for block in _blocks(source.shape):
        old, new = source[block], target[block]
        wide = [_like(old, own) for own in scratch]
        given = wide[0].copy_(old.contiguous()) if scratch else old
        turned = wide[1] if narrow else new
        torch.mul(given, cos[block], out=turned)
        turned[..., :pairs].addcmul_(given[..., pairs:], sin[block], value=-1)
        turned[..., pairs:].addcmul_(given[..., :pairs], sin[block])
        if narrow:
            new.copy_(turned)


def _blocks(shape: torch.Size) -> Iterator[tuple[int | slice, ...]]:
    """Indices that cut ``shape`` into blocks of `BLOCK` features at most, along its first axes."""
    axis = 0
    while axis < len(shape) - 2 and prod(shape[axis + 1 :]) > BLOCK:
        axis += 1
    count = -(-shape[axis] // max(1, BLOCK // max(1, prod(shape[axis + 1 :]))))
    step = -(-shape[axis] // max(1, count))
    for first in product(*map(range, shape[:axis])):
        for begin in range(0, shape[axis], max(1, step)):
            yield (*first, slice(begin, begin + step))


def _scratch(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(min(x.numel(), max(BLOCK, x.shape[-1])), dtype=dtype)


def _like(x: Tensor, scratch: Tensor) -> Tensor:
    return scratch[: x.numel()].view(x.shape)


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.view(*x.shape[:-1], x.shape[-1] // 2, 2))


def _is_complex(x: Tensor) -> bool:
    """Whether it can be seen as complex."""
    if x.is_contiguous():
        return not x.storage_offset() % 2
    *strides, last = x.stride()
    return last == 1 and not any(step % 2 for step in (*strides, x.storage_offset()))
