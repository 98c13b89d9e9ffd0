from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmpos.bias.content import ContentBias, ContentTerms
from mmpos.bias.offsets import looking
from mmpos.bias.table import whole
from mmpos.coordinates import Coordinates
from mmpos.positions import Axes, axis_count


class ShawBias(ContentBias):
    """A learned vector for each clipped offset, added to keys, and another to values.

    ``e_ij = q_i · (k_j + K[r]) · scale`` and ``o_i = Σ_j w_ij (v_j + V[r])`` with
    ``r = clip(j - i, -distance, distance)`` (Self-Attention with Relative Position
    Representations, arXiv:1803.02155, sec. 3.1 and 3.2). Heads share the vectors. Several axes have
    tables of their own, whose vectors are added. Without ``clip`` offsets beyond the distance get
    nothing, as in VITS (arXiv:2106.06103) and its code. A coordinate that either token lacks has no
    vector.

    The products ``q · K`` are formed for each row of the table and then gathered, and weights are
    summed for each row before they meet ``V``: nothing is as large as ``Lq · Lk · head_dim``.

    Args:
        heads: attention heads.
        axes: number of axes, or a grid (its length counts; `Scaled` coordinates refer to it).
        head_dim: features of a head.
        distance: the largest offset that has a vector of its own, one number or two: for keys
            before the query and after it.
        values: whether values get vectors too.
        clip: whether offsets beyond the distance get the outermost vectors, or none.
        std: standard deviation of the initial vectors.
        coordinates: how positions are read; differences must be whole numbers.

    Parameters: ``key_table`` and ``value_table``, ``[A, behind + 1 + ahead, head_dim]``.
    Raises: ValueError for a distance below 0, and when called for differences that are not whole.
    Compiled, or away from the CPU, where looking would cost a wait, these give NaN.

    >>> bias, positions = ShawBias(3, head_dim=16, distance=4), mmpos.positions.sequence(9)
    >>> q, k, v = torch.randn(3, 1, 3, 9, 16).unbind(0)
    >>> mmpos.attend(q, k, v, bias=bias(positions, positions)).shape
    torch.Size([1, 3, 9, 16])
    """

    def __init__(
        self,
        heads: int,
        axes: Axes = 1,
        *,
        head_dim: int | None = None,
        distance: int | Sequence[int] = 16,
        values: bool = True,
        clip: bool = True,
        std: float = 0.02,
        coordinates: Coordinates | None = None,
    ) -> None:
        super().__init__(heads, axes, head_dim=head_dim, coordinates=coordinates)
        self.distance = distance if isinstance(distance, int) else tuple(distance)
        self.reach = (distance, distance) if isinstance(distance, int) else tuple(distance)
        if len(self.reach) != 2 or min(self.reach) < 0:
            raise ValueError(
                "distance must be one number of 0 or more, or two, for keys before the query and "
                f"after it, got {distance}"
            )
        self.values = values
        self.clip = clip
        self.std = std
        shape = (axis_count(axes), sum(self.reach) + 1, self.head_dim)
        self.key_table = nn.Parameter(torch.empty(shape))
        self.value_table = nn.Parameter(torch.empty(shape)) if values else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors anew from a normal distribution."""
        for table in self.parameters():
            nn.init.normal_(table, std=self.std)

    def terms(self, q: Tensor, k: Tensor) -> ContentTerms:
        behind, ahead = self.reach
        rows, broken = [], None
        for axis in range(q.shape[-1]):
            distance = k[..., None, :, axis] - q[..., :, None, axis]
            offset, has, exact = whole(distance)
            if looking(q) and not exact.all():
                apart = distance[~exact][0].item()
                raise ValueError(
                    f"a query and a key are {apart} apart, and the table has rows for the "
                    "differences of whole positions only"
                )
            if not self.clip:
                has = has & (offset >= -behind) & (offset <= ahead)
            row = torch.where(has, offset.clamp(-behind, ahead) + behind, behind + ahead + 1)
            rows.append(row if row.ndim == 2 else row.unsqueeze(-3))
            if not looking(q):
                broken = ~exact if broken is None else broken | ~exact
        if broken is not None and broken.ndim > 2:
            broken = broken.unsqueeze(-3)
        return _ShawTerms(self.key_table, self.value_table, rows, broken)

    def extra_repr(self) -> str:
        rest = f"distance={self.distance}, values={self.values}, clip={self.clip}"
        return f"{super().extra_repr()}, {rest}"


class _ShawTerms(ContentTerms):
    """The row of each pair on each axis; the last, after those of the table, stands for none."""

    def __init__(
        self, keys: Tensor, values: Tensor | None, rows: list[Tensor], broken: Tensor | None
    ) -> None:
        self.key_table, self.value_table, self.rows, self.broken = keys, values, rows, broken

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        if q.shape[-1] != self.key_table.shape[-1]:
            raise ValueError(
                f"heads have {q.shape[-1]} features, the vectors {self.key_table.shape[-1]}: "
                f"make the bias with head_dim={q.shape[-1]}"
            )
        total = q.new_zeros(())
        for table, rows in zip(self.key_table.to(q.dtype), self.rows, strict=True):
            near = (q * scale) @ nn.functional.pad(table, (0, 0, 0, 1)).mT
            total = total + near.gather(-1, rows.expand(*q.shape[:-1], k.shape[-2]))
        return total if self.broken is None else torch.where(self.broken, torch.nan, total)

    def values(self, weights: Tensor) -> Tensor | None:
        if self.value_table is None:
            return None
        total = weights.new_zeros(())
        for table, rows in zip(self.value_table.to(weights.dtype), self.rows, strict=True):
            sums = weights.new_zeros(*weights.shape[:-1], len(table) + 1)
            sums = sums.scatter_add(-1, rows.expand(weights.shape), weights)
            total = total + sums[..., :-1] @ table
        return total
