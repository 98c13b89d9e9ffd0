from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import Parameter

from mmpos.rotary.turn import Turn, formula, is_watched, turn

Layout = Literal["interleaved", "half"]
"""Which features form a pair: ``(2p, 2p + 1)``, or ``(p, p + P)`` with ``P`` pairs in all."""

LAYOUTS: tuple[Layout, ...] = get_args(Layout)


class Rotation(NamedTuple):
    """How far each pair of features is turned, for tokens at given positions.

    Shape: ``cos`` and ``sin`` are ``[..., 1 or H, L, P]`` and broadcast against heads
    ``[..., H, L, head_dim]``; ``P`` pairs are turned, those from feature ``start`` on.
    """

    cos: Float[Tensor, "*batch head length pairs"]
    sin: Float[Tensor, "*batch head length pairs"]
    layout: Layout
    start: int = 0
    """The first feature that is turned; those before and after the ``2 P`` pass unchanged."""
    second: tuple[Tensor, Tensor] | None = None
    """Other cos and sin for the second feature of each pair, in schemes that are no rotation."""
    scale: Float[Tensor, "*batch 1 length 1"] | None = None
    """Multiplies all features of a head."""
    keys: Rotation | None = None
    """How keys are turned, where it is not as queries are."""

    @property
    def dual(self) -> Rotation:
        """The rotation of keys; ordinary rotations are their own."""
        return self if self.keys is None else self.keys

    @property
    def inverse(self) -> Rotation:
        """What undoes it: ``(cos, -sin) / (cos² + sin²)``, for xPos too, which scales as it turns.

        Raises: ValueError for a scheme that is no rotation.
        """
        if self.second is not None:
            raise ValueError("this scheme is no rotation, and what it does cannot be undone")
        size = torch.hypot(self.cos, self.sin)  # its square would overflow far from xPos's center
        scale = None if self.scale is None else 1 / self.scale
        cos, sin = self.cos / size / size, -self.sin / size / size
        return self._replace(cos=cos, sin=sin, scale=scale, keys=None)


def rotate(
    x: Float[Tensor, "*batch head length head_dim"], rotation: Rotation
) -> Float[Tensor, "*batch head length head_dim"]:
    """Turn the pairs of ``x`` by the angles of ``rotation``: queries by it, keys by its ``dual``.

    A pair ``(a, b)`` becomes ``(a cos - b sin, a sin + b cos)`` (RoFormer, arXiv:2104.09864,
    eq. 34). Half precision is turned in float32 and rounded once, to the dtype of ``x``. The
    derivative turns back, so ``x`` is not kept for it.

    Raises: ValueError if ``x`` has fewer features than are turned, another length or batch, or the
    layout is unknown; TypeError if ``x`` is not floating.

    >>> rotation = mmpos.RotaryEncoding(4)(torch.tensor([[torch.pi / 2]]))
    >>> mmpos.rotate(torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]), rotation).round().abs().tolist()
    [[[0.0, 1.0, 0.0, 0.0]]]
    """
    _check(x, rotation)
    cos, sin, scale = _tables(x, rotation)
    wide = x if scale is None else x.to(cos.dtype) * scale
    if cos.shape[-1] == 0:
        return wide.to(x.dtype)
    layout, start, second = rotation[2:5]
    if second is None and not _is_traced(x):
        turned = Turn.apply if is_watched(wide, cos, sin) else Turn.forward
        return turned(wide, cos, sin, layout, start).to(x.dtype)
    if torch.compiler.is_compiling() and not (torch.compiler.is_exporting() or cos.requires_grad):
        # tables in memory of their own: inductor would compute a cosine for each head and feature
        cos, sin = (table.as_strided(table.shape, table.stride()) for table in (cos, sin))
    return formula(wide, cos, sin, layout, start, second).to(x.dtype)


def rotate_(
    x: Float[Tensor, "*batch head length head_dim"], rotation: Rotation
) -> Float[Tensor, "*batch head length head_dim"]:
    """`rotate` (RoFormer, arXiv:2104.09864, eq. 34), in place and without a derivative: to infer.

    Raises: as `rotate`; ValueError if ``x``, or in training the rotation, requires a gradient, or
    if features of ``x`` share memory, as expanded tensors' do.

    >>> x = torch.ones(1, 3, 4)
    >>> mmpos.rotate_(x, mmpos.RotaryEncoding(4)(torch.zeros(3, 1))) is x
    True
    """
    _check(x, rotation)
    if x.requires_grad or (torch.is_grad_enabled() and _requires_grad(rotation)):
        raise ValueError(
            "rotate_ overwrites x, and "
            f"{'x' if x.requires_grad else 'the rotation'} requires a gradient: use rotate"
        )
    traced = _is_traced(x)
    if not traced and _overlaps(x):
        raise ValueError(
            f"rotate_ overwrites x, but features of x share memory: it has shape {tuple(x.shape)} "
            f"and strides {x.stride()}; use rotate, or x.contiguous()"
        )
    cos, sin, scale = _tables(x, rotation)
    plain = rotation.second is None and scale is None and x.device.type == "cpu"
    if plain and not traced and not is_watched(x, cos, sin):
        return turn(x, x, cos, sin, rotation.layout, rotation.start)
    return x.copy_(rotate(x, rotation))


def rerotate(
    keys: Float[Tensor, "*batch head length head_dim"], old: Rotation, new: Rotation
) -> Float[Tensor, "*batch head length head_dim"]:
    """Keys that were turned by the dual of ``old``, turned by that of ``new`` instead.

    For keys in a cache whose frequencies change (a context extension), or whose positions do (a
    window that slides).
    Raises: as `rotate`; ValueError for a scheme that is no rotation: keep its keys unturned.

    >>> old, new = (mmpos.RotaryEncoding(4, base=base)(torch.ones(3, 1)) for base in (10, 20))
    >>> k = torch.randn(1, 3, 4)
    >>> again = rerotate(mmpos.rotate(k, old), old, new)
    >>> torch.allclose(again, mmpos.rotate(k, new), atol=1e-6)
    True
    """
    return rotate(rotate(keys, old.dual.inverse), new.dual)


def _tables(x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cos and sin in the dtype to compute in, times the scale, or the scale if it is for more."""
    cos, sin, _, _, second, scale, _ = rotation
    if x.dtype != cos.dtype or cos.dtype.itemsize < 4:
        wide = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
        cos, sin = cos.to(wide), sin.to(wide)
    if scale is None or second is not None or 2 * cos.shape[-1] != x.shape[-1]:
        return cos, sin, scale
    return cos * scale, sin * scale, None


def _is_traced(x: Tensor) -> bool:
    """Whether what happens to ``x`` is recorded, or done by a subclass in its own way."""
    tracing = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    return torch.compiler.is_compiling() or tracing or type(x) not in (Tensor, Parameter)


def _requires_grad(rotation: Rotation) -> bool:
    tables = (*rotation[:2], rotation.scale, *(rotation.second or ()))
    return any(table is not None and table.requires_grad for table in tables)


def _overlaps(x: Tensor) -> bool:
    """Whether elements of ``x`` may share memory: an axis steps over less than the finer ones."""
    if x.is_contiguous():
        return False
    reach = 1
    for step, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and step < reach:
            return x.numel() > 0
        reach = max(reach, step * size)
    return False


def _check(x: Tensor, rotation: Rotation) -> None:
    if not x.is_floating_point():
        raise TypeError(f"x must be floating to be turned, got {x.dtype}")
    if rotation.layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {rotation.layout!r}")
    end = rotation.start + 2 * rotation.cos.shape[-1]
    if x.shape[-1] < end:
        raise ValueError(
            f"x has {x.shape[-1]} features in a head, the rotation turns those up to {end}: "
            "make the encoding with this head_dim, or a smaller rotary_dim"
        )
    given, turns = x.shape[:-1], rotation.cos.shape[:-1]
    if (
        not given
        or len(turns) > len(given)
        or any(have not in (1, want) for have, want in zip(turns[::-1], given[::-1], strict=False))
    ):
        raise ValueError(
            f"x has shape {tuple(x.shape)}, read as [..., head, length, head_dim], "
            f"the rotation is for [..., head, length] = {tuple(turns)}"
        )
