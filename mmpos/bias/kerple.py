from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from mmpos.bias.base import by_axis
from mmpos.bias.distance import Distance, between, known
from mmpos.bias.offsets import OffsetBias
from mmpos.coordinates import Coordinates
from mmpos.positions import Axes

Form = Literal["log", "power"]
_LEAST = 0.01


class KerpleBias(OffsetBias):
    """Attention falls with distance by a learned kernel, one for each head.

    ``log``: ``-r1 · ln(1 + r2 · d)``; ``power``: ``-r1 · d ** r2`` with ``r2`` at most 2, of which
    ALiBi is ``r2 = 1`` (KERPLE, arXiv:2205.09921, sec. 4). Several axes have the distances of
    `ALiBi`. As in the published code ``r1`` and ``r2`` are held at 0.01 or more; their gradient
    passes there as soon as it leads inwards, so that a head never stays behind.

    A token without a place has bias 0 to and from every other; an axis that one of the two tokens
    lacks does not count.

    Args:
        heads: attention heads.
        axes: number of axes, or a grid (its length counts; `Scaled` coordinates refer to it).
        form: ``log`` or ``power``.
        distance: ``euclidean``, ``l1`` (city blocks) or ``linf`` (the longest axis).
        coordinates: how positions are read.

    Shape: ``[..., Lq, A]`` and ``[..., Lk, A]`` → ``[..., H, Lq, Lk]``, float32. Parameters: ``r1``
    and ``r2 [H]``, the published code's ``bias_p`` and ``bias_a`` (log) or ``bias_a`` and
    ``bias_p`` (power).
    Raises: ValueError for an unknown form or distance.

    >>> bias = KerpleBias(2)
    >>> _ = bias.load_state_dict({"r1": torch.tensor([1.0, 2.0]), "r2": torch.ones(2)})
    >>> bias(mmpos.positions.sequence(1), mmpos.positions.sequence(3))[:, 0]
    tensor([[-0.0000, -0.6931, -1.0986],
            [-0.0000, -1.3863, -2.1972]], grad_fn=<SelectBackward0>)
    """

    def __init__(
        self,
        heads: int,
        axes: Axes = 1,
        *,
        form: Form = "log",
        distance: Distance = "euclidean",
        coordinates: Coordinates | None = None,
    ) -> None:
        super().__init__(heads, axes, coordinates=coordinates)
        if form not in get_args(Form):
            raise ValueError(f"form must be one of {get_args(Form)}, got {form!r}")
        self.form: Form = form
        self.distance: Distance = known(distance)
        self.r1 = nn.Parameter(torch.empty(heads))
        self.r2 = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw them anew as the published code does: the factor of ``log``, and the power, from
        U(0, 2), the other from U(0, 1).
        """
        log = self.form == "log"
        nn.init.uniform_(self.r1, 0, 2 if log else 1)
        nn.init.uniform_(self.r2, 0, 1 if log else 2)

    def score(self, query: Sequence[Tensor], key: Sequence[Tensor], head: Tensor) -> Tensor:
        return self._fall(query, key, head, *self._held())

    def lookup(self, q: Tensor, k: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        r1, r2 = self._held()
        queries, keys = by_axis(q), by_axis(k)
        return lambda query, key, head: self._fall(
            [axis[query] for axis in queries], [axis[key] for axis in keys], head, r1, r2
        )

    def _held(self) -> tuple[Tensor, Tensor]:
        most = torch.inf if self.form == "log" else 2.0
        return _held(self.r1.float(), torch.inf), _held(self.r2.float(), most)

    def _fall(
        self,
        query: Sequence[Tensor],
        key: Sequence[Tensor],
        head: Tensor,
        r1: Tensor,
        r2: Tensor,
    ) -> Tensor:
        far = between(query, key, self.distance)
        if self.form == "log":
            return -r1[head] * (r2[head] * far).log1p()
        apart = far > 0  # a power below 1 has no gradient at 0
        return -r1[head] * torch.where(apart, torch.where(apart, far, 1) ** r2[head], 0)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, axes={self.axes}, form={self.form}, distance={self.distance}"


class _Hold(torch.autograd.Function):
    """Clamps; where it does, a gradient passes if a step against it leads inwards.

    The bounds are tensors: with ``dynamic=True`` `torch.compile` fails on numbers here.
    """

    @staticmethod
    def forward(value: Tensor, least: Tensor, most: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(value, least), most)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        value, least, most = ctx.saved_tensors
        outwards = ((value < least) & (gradient > 0)) | ((value > most) & (gradient < 0))
        return torch.where(outwards, 0, gradient), None, None


def _held(value: Tensor, most: float) -> Tensor:
    return _Hold.apply(value, torch.full_like(value, _LEAST), torch.full_like(value, most))
