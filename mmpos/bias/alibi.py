from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from mmpos.bias.base import by_axis
from mmpos.bias.distance import Distance, between, known
from mmpos.bias.offsets import OffsetBias
from mmpos.coordinates import Coordinates, Extent
from mmpos.positions import Axes, axis_count


def alibi_slopes(heads: int) -> list[float]:
    """The published slopes: ``2 ** (-8 h / n)``, ``h = 1 … n``, for ``n`` heads, a power of two.

    For other head counts, the slopes of the next lower power of two ``n``, then every second one of
    ``2 n`` (ALiBi, arXiv:2108.12409, sec. 3, and its code).

    >>> alibi_slopes(3)
    [0.0625, 0.00390625, 0.25]
    """
    full = 1 << (heads.bit_length() - 1)
    steps = [2 * (head + 1) for head in range(full)]
    steps += [2 * head + 1 for head in range(heads - full)]
    return [2 ** (-4 * step / full) for step in steps]


class ALiBi(OffsetBias):
    """Attention falls with distance: ``-slope[head] · |query - key|``.

    One axis: ALiBi (arXiv:2108.12409, sec. 3), in its symmetric form, which equals the published
    causal one wherever a causal mask lets a query see. Two axes: the Euclidean distance between
    patches (CROMA, arXiv:2311.00566, sec. 3.2), in patches. A token without a place has bias 0 to
    and from every other; an axis that one of the two tokens lacks does not count.

    Args:
        heads: attention heads, any number.
        axes: number of axes, or a grid (its length counts; `Scaled` coordinates refer to it).
        distance: ``euclidean``, ``l1`` (city blocks) or ``linf`` (the longest axis).
        axis_scale: a factor for the differences on each axis, so that a frame may count for more
            cells than one.
        slopes: one for each head, instead of the published ones of `alibi_slopes`.
        right_slopes: others for keys after the query, one for each head; one axis only.
        learned: whether the slopes are learned: the given ones times ``exp(log_factor)``, which
            begins at 1 and stays positive.
        coordinates: how positions are read.

    Shape: ``[..., Lq, A]`` and ``[..., Lk, A]`` → ``[..., H, Lq, Lk]``, float32. Parameters: none,
    or if learned ``log_factor [H]``, and ``right_log_factor [H]`` with ``right_slopes``.
    Raises: ValueError for an unknown distance, another number of slopes than heads or factors than
    axes, slopes below 0 (or of 0, if learned), factors that are not above 0, and ``right_slopes``
    on several axes, where no key is before or after.

    >>> ALiBi(8)(mmpos.positions.sequence(3), mmpos.positions.sequence(3))[0].tolist()
    [[-0.0, -0.5, -1.0], [-0.5, -0.0, -0.5], [-1.0, -0.5, -0.0]]
    """

    def __init__(
        self,
        heads: int,
        axes: Axes = 1,
        *,
        distance: Distance = "euclidean",
        axis_scale: Sequence[float] | None = None,
        slopes: Sequence[float] | None = None,
        right_slopes: Sequence[float] | None = None,
        learned: bool = False,
        coordinates: Coordinates | None = None,
    ) -> None:
        super().__init__(heads, axes, coordinates=coordinates)
        self.distance: Distance = known(distance)
        self.axis_scale = None if axis_scale is None else tuple(axis_scale)
        self.slopes = None if slopes is None else tuple(slopes)
        self.right_slopes = None if right_slopes is None else tuple(right_slopes)
        self.learned = learned
        for name, given in (("slopes", self.slopes), ("right_slopes", self.right_slopes)):
            if given is not None:
                _check_slopes(name, given, heads, learned)
        count = axis_count(axes)
        if self.right_slopes is not None and count != 1:
            raise ValueError(
                f"right_slopes are for keys after the query on one axis, this bias has {count}: "
                "drop them"
            )
        if self.axis_scale is not None and (
            len(self.axis_scale) != count or not all(0 < own < math.inf for own in self.axis_scale)
        ):
            raise ValueError(
                f"axis_scale must be {count} factors above 0, one for each axis, got {axis_scale}"
            )
        self.log_factor = nn.Parameter(torch.empty(heads)) if learned else None
        two_sided = learned and right_slopes is not None
        self.right_log_factor = nn.Parameter(torch.empty(heads)) if two_sided else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Take learned slopes back to the given ones."""
        for factor in self.parameters():
            nn.init.zeros_(factor)

    def head_slopes(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """The slopes ``[H]``, and those for keys after the query if they are others."""
        given = self.slopes or alibi_slopes(self.heads)
        left = _tensor(given, self.log_factor, device)
        if self.right_slopes is None:
            return left, None
        return left, _tensor(self.right_slopes, self.right_log_factor, device)

    def score(self, query: Sequence[Tensor], key: Sequence[Tensor], head: Tensor) -> Tensor:
        return self._fall(query, key, head, *self.head_slopes(query[0].device))

    def lookup(self, q: Tensor, k: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        slopes = self.head_slopes(q.device)
        queries, keys = by_axis(q), by_axis(k)
        return lambda query, key, head: self._fall(
            [axis[query] for axis in queries], [axis[key] for axis in keys], head, *slopes
        )

    def _fall(
        self,
        query: Sequence[Tensor],
        key: Sequence[Tensor],
        head: Tensor,
        left: Tensor,
        right: Tensor | None,
    ) -> Tensor:
        slope = left[head]
        if right is not None:
            slope = torch.where(key[0] > query[0], right[head], slope)
        return -slope * between(query, key, self.distance, self.axis_scale)

    def key_bias(
        self, keys: Num[Tensor, "*batch key axes"], extent: Extent | None = None
    ) -> Float[Tensor, "*batch head key"]:
        """The same bias as one number for each head and key: ``slope[head] · (key - last key)``.

        It differs from the bias by ``slope · (query - last key)``, the same for all keys of a
        query, which softmax does not see. That holds on one axis, for keys that are not after the
        query: under a causal mask, for tokens in the order of their positions. It is 0 at the last
        key and grows in size away from it, so that rounding is finest where attention is highest.

        Shape: ``[..., Lk, 1]`` → ``[..., H, Lk]``, float64, for float32 rounds what is thousands
        away by more than `attend` does; float32 on devices without it.
        Raises: ValueError on several axes, for positions that go back, and for keys without a
        place, whose bias to every query
        is 0, which no number of their own can give. Compiled, or away from the CPU, where looking
        would cost a wait, these give NaN.

        >>> ALiBi(8).key_bias(mmpos.positions.sequence(3))[0].tolist()
        [-1.0, -0.5, 0.0]
        """
        if axis_count(self.axes) != 1:
            raise ValueError(
                f"a key has a bias of its own on one axis only, this bias has "
                f"{axis_count(self.axes)}: call the bias for pairs"
            )
        read = self.coordinates(keys, axes=self.axes, extent=extent, training=self.training)
        place = read.squeeze(-1)
        looking = keys.device.type == "cpu" and not torch.compiler.is_compiling()
        if looking and place.isnan().any():
            raise ValueError(
                "a key without a place has bias 0 to every query, which no number of its own can "
                "give: call the bias for pairs"
            )
        if looking and (place.diff(dim=-1) < 0).any():
            raise ValueError(
                "keys stand in the order of their positions for a bias of their own, and these go "
                "back (packed documents do): call the bias for pairs"
            )
        behind = place - place.amax(-1, keepdim=True) if place.shape[-1] else place
        if self.axis_scale is not None:
            behind = behind * self.axis_scale[0]
        slopes, _ = self.head_slopes(keys.device)
        return slopes.to(behind.dtype).unsqueeze(-1) * behind.unsqueeze(-2)

    def extra_repr(self) -> str:
        parts = [f"heads={self.heads}, axes={self.axes}, distance={self.distance}"]
        parts += [
            f"{name}={value}"
            for name in ("axis_scale", "slopes", "right_slopes", "learned")
            if (value := getattr(self, name))
        ]
        return ", ".join(parts)


def _check_slopes(name: str, slopes: Sequence[float], heads: int, learned: bool) -> None:
    if len(slopes) != heads:
        raise ValueError(f"{name} must be one for each of the {heads} heads, got {len(slopes)}")
    bad = [slope for slope in slopes if not (slope > 0 if learned else slope >= 0)]
    if bad or math.inf in slopes:
        least = "above 0, since they are learned as factors" if learned else "0 or more"
        raise ValueError(f"{name} must be finite and {least}, got {list(slopes)}")


def _tensor(slopes: Sequence[float], log_factor: Tensor | None, device: torch.device) -> Tensor:
    fixed = torch.tensor(slopes, dtype=torch.float32, device=device)
    return fixed if log_factor is None else fixed * log_factor.float().exp()
