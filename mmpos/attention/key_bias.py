"""A bias of keys alone as features of queries and keys: no ``[Lq, Lk]`` tensor is formed.

``q·k + b`` is ``[q, 1]·[k, b]``. In float32 that is not enough: ALiBi's ``b`` grows with the
length, and a score of thousands has lost the digits that tell neighbours apart. Under a causal
mask, softmax does not see a number that is subtracted from a whole row, so each query subtracts
the bias of its own key, and the difference is exact because the coarse digits are whole multiples
of one unit: ``[unit, -own steps, …, q]·[steps, unit, …, k]``. They come first, for the sum to start
from small numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.attention.kernel import kernel

_PIECES = {torch.bfloat16: (8, 3), torch.float16: (11, 3), torch.float32: (16, 2)}
_COPY = 1 << 20  # numbers in a widened copy of q, k or v, where several go one after the other


def split(x: Tensor, bits: int, pieces: int) -> list[tuple[Tensor, Tensor]]:
    """``x = Σ steps · unit``, where all but the last steps are whole, and units powers of 2.

    The first steps are at most ``2 ** bits`` in size; each unit is ``2 ** (bits + 1)`` times the
    next. Gradients flow through the last steps.
    """
    if x.numel() == 0:
        return [(x, x.new_ones(()))] * pieces
    mantissa, _ = torch.frexp(x.detach().abs().amax())
    power = torch.where(mantissa > 0, x.detach().abs().amax() / mantissa, 1.0)
    unit = power * 2.0**-bits
    found = []
    for _ in range(pieces - 1):
        steps = (x.detach() / unit).round()
        found.append((steps, unit))
        x = x - steps * unit
        unit = unit * 2.0 ** -(bits + 1)
    return [*found, (x / unit, unit)]


def attend_with_key_bias(q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, scale: float) -> Tensor:
    """Causal attention of as many queries as keys, with ``key_bias [..., H, L]`` on the scores."""
    heads, length = q.shape[-3], q.shape[-2]
    if scale == 0:
        q, scale = torch.zeros_like(q), 1.0
    exact = key_bias if key_bias.dtype.itemsize > 2 else key_bias.float()
    exact = (exact / scale).expand(*key_bias.shape[:-2], heads, length)
    bits, pieces = _PIECES.get(q.dtype, (24, 2))
    columns = [
        (steps.to(q.dtype).unsqueeze(-1), unit.to(q.dtype))
        for steps, unit in split(exact, bits, pieces)
    ]
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, key_bias))
    if torch.compiler.is_compiling() or graph:
        return _some_heads(q, k, v, columns, scale, 0, heads)
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    width = q.shape[-1] + 2 * pieces
    some = max(1, _COPY // max(1, q.shape[0] * length * width))
    for first in range(0, heads, some):
        last = min(heads, first + some)
        out[:, first:last] = _some_heads(q, k, v, columns, scale, first, last)
    return out


def _some_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    columns: list[tuple[Tensor, Tensor]],
    scale: float,
    first: int,
    last: int,
) -> Tensor:
    share = q.shape[1] // k.shape[1]
    if share > 1:
        keys = torch.arange(first, last, device=k.device) // share
        k, v = k[:, keys], v[:, keys]
    else:
        k, v = k[:, first:last], v[:, first:last]
    q = q[:, first:last]
    one = (*q.shape[:-1], 1)
    more_q, more_k = [], []
    for steps, unit in columns:
        steps, unit = steps[..., first:last, :, :].expand(one), unit.expand(one)
        more_q += [unit, -steps]
        more_k += [steps, unit]
    q, k = torch.cat((*more_q, q), -1), torch.cat((*more_k, k), -1)
    width = max(q.shape[-1], v.shape[-1])
    if q.device.type != "cpu":
        width = -(-width // 8) * 8
    features = v.shape[-1]
    q, k, v = (torch.nn.functional.pad(part, (0, width - part.shape[-1])) for part in (q, k, v))
    return kernel(q, k, v, causal=True, scale=scale)[..., :features]
