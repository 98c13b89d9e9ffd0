from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from mmpos.bias.content import ContentBias, ContentTerms
from mmpos.bias.offsets import looking
from mmpos.bias.table import whole
from mmpos.coordinates import Coordinates
from mmpos.positions import Axes, axis_count

Attention = Literal["c2p", "p2c"]
"""A query's content with the key's place, ``q · K[δ]``; or its place with the key's content."""


class DisentangledBias(ContentBias):
    """Scores of contents with projected vectors of the offset, as in DeBERTa.

    ``scale · (q·k + q·K[δ] + k·Q[δ])``, of which this adds all but the first (DeBERTa,
    arXiv:2006.03654, sec. 3.1, eq. 4). One table has a row ``P[δ]`` for each of ``2 · span``
    offsets; ``K = P W_k`` and ``Q = P W_q + b`` are its projections, for each head. ``δ`` is the
    offset, query minus key, plus ``span``, and what is beyond is in the outermost row. The paper
    writes ``δ(j, i)``, key minus query, in the last term; its published code and weights read
    ``δ(i, j)`` in both, and so does this.

    With ``max_distance`` offsets share rows as in the code of DeBERTa V2 and V3: a distance ``d``
    up to ``m = span // 2`` has a row of its own, and one beyond is in
    ``m + ceil((m - 1) · ln(d / m) / ln((max_distance - 1) / m))``, at most the last.

    DeBERTa divides by ``(head_dim · (1 + number of terms)) ** 0.5``: pass ``scale=bias.scale`` to
    `mmpos.attend`. Its layers read one table through projections of their own: make a bias for
    each, and let all `share_table` with the first. Several axes have tables of their own and one
    projection; what they give is added. A coordinate that either token lacks has no vector.

    Args:
        heads: attention heads.
        axes: number of axes, or a grid (its length counts; `Scaled` coordinates refer to it).
        head_dim: features of a head.
        span: half the number of rows: offsets from ``-span`` to ``span - 1``, or their buckets.
        max_distance: from which on all offsets are in the last bucket, about; None is a row for
            each.
        parts: the terms: ``c2p`` is that of ``K``, ``p2c`` that of ``Q``.
        dim: features of the table; ``heads · head_dim`` by default, the width of the model.
        norm_eps: of a layer norm of the rows before they are projected (V2 and V3); None is none.
        constants: whether the projections to ``K`` and to ``Q`` add a constant. The first adds the
            same to all keys that have a place, which weights do not show; V2 has it nevertheless.
        std: standard deviation of the initial numbers.
        coordinates: how positions are read; differences must be whole numbers.

    Parameters: ``table [A, 2 · span, dim]``, ``key`` and ``query``, linear maps from ``dim`` to
    ``heads · head_dim``, and ``norm``.
    Raises: ValueError for sizes below 1, unknown, repeated or no parts, and, with ``max_distance``,
    an odd span or one that leaves nothing to share; when called, for differences that are not
    whole. Compiled, or away from the CPU, where looking would cost a wait, these give NaN.

    >>> bias, positions = DisentangledBias(3, head_dim=16, span=4), mmpos.positions.sequence(9)
    >>> q, k, v = torch.randn(3, 1, 3, 9, 16).unbind(0)
    >>> mmpos.attend(q, k, v, bias=bias(positions, positions), scale=bias.scale).shape
    torch.Size([1, 3, 9, 16])
    >>> DisentangledBias(3, head_dim=16, span=8, max_distance=32).rows_of([-99, -8, -2, 0, 9, 99])
    [0, 2, 6, 8, 14, 15]
    """

    def __init__(
        self,
        heads: int,
        axes: Axes = 1,
        *,
        head_dim: int | None = None,
        span: int = 512,
        max_distance: int | None = None,
        parts: Sequence[Attention] = ("c2p", "p2c"),
        dim: int | None = None,
        norm_eps: float | None = None,
        constants: Sequence[bool] = (False, True),
        std: float = 0.02,
        coordinates: Coordinates | None = None,
    ) -> None:
        super().__init__(heads, axes, head_dim=head_dim, coordinates=coordinates)
        width = heads * self.head_dim if dim is None else dim
        if span < 1 or width < 1:
            raise ValueError(f"span and dim must be 1 or more, got {span} and {width}")
        self.parts = tuple(parts)
        if not self.parts or len(set(self.parts) & set(get_args(Attention))) != len(self.parts):
            raise ValueError(
                f"parts must be one or both of {get_args(Attention)}, each once, got {self.parts}"
            )
        self.constants = tuple(constants)
        if len(self.constants) != 2:
            raise ValueError(f"constants are two, for keys and for queries, got {constants}")
        self.span = span
        self.max_distance = max_distance
        self.dim = dim
        self.norm_eps = norm_eps
        self.std = std
        self.buckets = None if max_distance is None else _buckets(span, max_distance)
        inner = heads * self.head_dim
        self.table = nn.Parameter(torch.empty(axis_count(axes), 2 * span, width))
        self.key, self.query = (
            _Projection(width, inner, bias=constant) if part in self.parts else None
            for part, constant in zip(get_args(Attention), self.constants, strict=True)
        )
        self.norm = None if norm_eps is None else nn.LayerNorm(width, eps=norm_eps)
        self.reset_parameters()

    @property
    def scale(self) -> float:
        """What DeBERTa multiplies scores by."""
        return (self.head_dim * (1 + len(self.parts))) ** -0.5

    def reset_parameters(self) -> None:
        """Draw the rows and projections anew from a normal distribution; constants begin at 0."""
        nn.init.normal_(self.table, std=self.std)
        for projection in (self.key, self.query):
            if projection is not None:
                nn.init.normal_(projection.weight, std=self.std)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)
        if self.norm is not None:
            self.norm.reset_parameters()

    def share_table(self, other: DisentangledBias) -> None:
        """Read the rows of another bias, and its norm: they are then the same parameters.

        Raises: ValueError for a table of another shape, or where one has a norm alone.
        """
        if self.table.shape != other.table.shape or self.norm_eps != other.norm_eps:
            raise ValueError(
                f"a table {tuple(other.table.shape)} with norm_eps={other.norm_eps} cannot serve "
                f"a bias for {tuple(self.table.shape)} with norm_eps={self.norm_eps}"
            )
        self.table, self.norm = other.table, other.norm

    def rows_of(self, offsets: Sequence[int]) -> list[int]:
        """The rows of offsets, query minus key."""
        return self._rows(torch.tensor(offsets, device="cpu")).tolist()

    def _rows(self, offset: Tensor) -> Tensor:
        if self.buckets is not None:
            reach = len(self.buckets) - 1
            buckets = torch.tensor(self.buckets, device=offset.device)
            offset = offset.sign() * buckets[offset.abs().clamp(max=reach)]
        return offset.clamp(-self.span, self.span - 1) + self.span

    def terms(self, q: Tensor, k: Tensor) -> ContentTerms:
        rows, broken = [], None
        for axis in range(q.shape[-1]):
            distance = q[..., :, None, axis] - k[..., None, :, axis]
            offset, has, exact = whole(distance)
            if looking(q) and not exact.all():
                apart = distance[~exact][0].item()
                raise ValueError(
                    f"a query and a key are {apart} apart, and the table has rows for the "
                    "differences of whole positions only"
                )
            row = torch.where(has, self._rows(offset), 2 * self.span)
            rows.append(row if row.ndim == 2 else row.unsqueeze(-3))
            if not looking(q):
                broken = ~exact if broken is None else broken | ~exact
        if broken is not None and broken.ndim > 2:
            broken = broken.unsqueeze(-3)
        return _DisentangledTerms(self, rows, broken)

    def vectors(self) -> tuple[Tensor | None, Tensor | None]:
        """``K`` and ``Q``, each ``[A, H, 2 · span, head_dim]`` in float32 or better, or None."""
        with torch.autocast(self.table.device.type, enabled=False):
            table = self.table.to(torch.promote_types(self.table.dtype, torch.float32))
            if self.norm is not None:
                weight, offset = self.norm.weight.to(table), self.norm.bias.to(table)
                table = nn.functional.layer_norm(
                    table, table.shape[-1:], weight, offset, self.norm.eps
                )
            key, query = (
                None if projection is None else self._project(table, projection)
                for projection in (self.key, self.query)
            )
        return key, query

    def _project(self, table: Tensor, projection: nn.Linear) -> Tensor:
        constant = None if projection.bias is None else projection.bias.to(table)
        vectors = nn.functional.linear(table, projection.weight.to(table), constant)
        return vectors.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)

    def extra_repr(self) -> str:
        rest = [f"span={self.span}"]
        rest += [f"max_distance={self.max_distance}"] if self.max_distance is not None else []
        return f"{super().extra_repr()}, {', '.join(rest)}, parts={self.parts}"


class _Projection(nn.Linear):
    """A linear map whose numbers the bias draws."""

    def reset_parameters(self) -> None:
        pass


class _DisentangledTerms(ContentTerms):
    """The row of each pair on each axis; the last, after those of the table, stands for none."""

    def __init__(self, bias: DisentangledBias, rows: list[Tensor], broken: Tensor | None) -> None:
        self.rows, self.broken = rows, broken
        self.heads, self.features = bias.heads, bias.head_dim
        self.keys, self.queries = bias.vectors()

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        if (q.shape[1], q.shape[-1]) != (self.heads, self.features):
            raise ValueError(
                f"{q.shape[1]} heads of {q.shape[-1]} features, the bias has {self.heads} of "
                f"{self.features}: make it with heads={q.shape[1]} and head_dim={q.shape[-1]}"
            )
        total = q.new_zeros(())
        for axis, rows in enumerate(self.rows):
            index = rows.expand(*q.shape[:-1], k.shape[-2])
            if self.keys is not None:
                total = total + _near(q * scale, self.keys[axis]).gather(-1, index)
            if self.queries is not None:
                total = total + _near(k * scale, self.queries[axis]).gather(-1, index.mT).mT
        return total if self.broken is None else torch.where(self.broken, torch.nan, total)


def _near(content: Tensor, vectors: Tensor) -> Tensor:
    """Products ``[B, H, L, rows + 1]`` of contents with the vectors of a head, then 0 for none."""
    return content @ nn.functional.pad(vectors.to(content.dtype), (0, 0, 0, 1)).mT


def _buckets(span: int, max_distance: int) -> list[int]:
    """The bucket of each distance, up to the first that is beyond the rows.

    The formula is evaluated as the published code does, in float32 on the CPU, whatever the device:
    distances at whole powers fall on a boundary, and their rounding decides.
    """
    middle = span // 2
    if span < 2 or span % 2 or max_distance - 1 <= middle:
        raise ValueError(
            f"with max_distance={max_distance}, span must be even and half of it below "
            f"{max_distance - 1}, since half is for one distance each; got span={span}"
        )
    distance = torch.arange(middle + 1, max_distance + 1, device="cpu").float()
    last = torch.tensor((max_distance - 1) / middle, dtype=torch.float32, device="cpu")
    whole_range = torch.log(last)
    share = torch.log(distance / middle) / whole_range
    far = torch.ceil(share * (middle - 1)).long() + middle
    return [*range(middle + 1), *far.clamp(max=span).tolist()]
