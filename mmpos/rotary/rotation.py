from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

Layout = Literal["interleaved", "half"]
"""Which features form a pair: ``(2p, 2p + 1)``, or ``(p, p + P)`` with ``P`` pairs in all."""


class Rotation(NamedTuple):
    """How far each pair of features is turned, for tokens at given positions.

    Shape: ``cos`` and ``sin`` are ``[..., 1 or H, L, P]`` and broadcast against heads
    ``[..., H, L, head_dim]``; ``P`` pairs are turned, the features beyond ``2 P`` are not.
    """

    cos: Float[Tensor, "*batch head length pairs"]
    sin: Float[Tensor, "*batch head length pairs"]
    layout: Layout


def rotate(
    x: Float[Tensor, "*batch head length head_dim"], rotation: Rotation
) -> Float[Tensor, "*batch head length head_dim"]:
    """Turn the pairs of ``x`` by the angles of ``rotation``; both q and k take the same call.

    A pair ``(a, b)`` becomes ``(a cos - b sin, a sin + b cos)`` (RoFormer, arXiv:2104.09864,
    eq. 34). Half precision is turned in float32 and rounded once, to the dtype of ``x``.

    Raises: ValueError if ``x`` has fewer features than are turned, another length or batch, or the
    layout is unknown; TypeError if ``x`` is not floating.
    """
    cos, sin, layout = rotation
    if not x.is_floating_point():
        raise TypeError(f"x must be floating to be turned, got {x.dtype}")
    if layout not in get_args(Layout):
        raise ValueError(f"layout must be one of {get_args(Layout)}, got {layout!r}")
    width = 2 * cos.shape[-1]
    if x.shape[-1] < width:
        raise ValueError(
            f"x has {x.shape[-1]} features in a head, the rotation turns {width}: "
            "make the encoding with this head_dim, or a smaller rotary_dim"
        )
    given, turns = x.shape[:-1], cos.shape[:-1]
    if len(turns) > len(given) or any(
        have not in (1, want) for have, want in zip(turns[::-1], given[::-1], strict=False)
    ):
        raise ValueError(
            f"x has shape {tuple(x.shape)}, read as [..., head, length, head_dim], "
            f"the rotation is for [..., head, length] = {tuple(turns)}"
        )
    turned = x[..., :width].to(torch.promote_types(x.dtype, cos.dtype))
    if layout == "interleaved":
        a, b = turned.unflatten(-1, (-1, 2)).unbind(-1)
        out = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        out = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    out = out.to(x.dtype)
    return out if width == x.shape[-1] else torch.cat((out, x[..., width:]), dim=-1)
