"""Biases that are read from learned rows, one number for each head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from mmpos.bias.base import by_axis
from mmpos.bias.offsets import Columns, OffsetBias, looking


class TableBias(OffsetBias):
    """A bias that is the sum of the rows that the offset of a pair names."""

    @abstractmethod
    def rows(self) -> Tensor:
        """All rows ``[R, H]``, ended by `ended`."""

    @abstractmethod
    def read(self, query: Sequence[Tensor], key: Sequence[Tensor], last: int) -> list[Tensor]:
        """Which rows a pair reads, for coordinates that broadcast.

        ``last - 1`` is the row of zeros, and ``last`` that of NaN, for pairs that have no row.
        """

    def refuse(self, offset: Sequence[float]) -> None:
        """Raise for a pair that has no row; ``offset`` is query minus key, NaN where unknown."""

    def score(self, query: Sequence[Tensor], key: Sequence[Tensor], head: Tensor) -> Tensor:
        return self._score(query, key, head, self.rows())

    def lookup(self, q: Tensor, k: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        with torch.no_grad():  # to refuse what has no row, which a score_mod cannot do
            if looking(q) and self.columns(q, k) is None:
                self.pairs(q, k)
        rows = self.rows()
        queries, keys = by_axis(q), by_axis(k)
        return lambda query, key, head: self._score(
            [axis[query] for axis in queries], [axis[key] for axis in keys], head, rows
        )

    def _score(
        self, query: Sequence[Tensor], key: Sequence[Tensor], head: Tensor, rows: Tensor
    ) -> Tensor:
        parts = [rows[index, head] for index in self.read(query, key, len(rows) - 1)]
        return sum(parts[1:], parts[0])

    def of_offsets(self, offsets: Sequence[Tensor]) -> Tensor:
        return self._select(offsets, [torch.zeros_like(axis) for axis in offsets], False)

    def columns(self, q: Tensor, k: Tensor) -> Columns | None:
        found = super().columns(q, k)
        # an offset without a row may be that of no pair: `pairs` knows
        return None if found is None or found.bias.isnan().any() else found

    def pairs(self, q: Tensor, k: Tensor) -> Tensor:
        query, key = q.unsqueeze(-2).unbind(-1), k.unsqueeze(-3).unbind(-1)
        return self._select(query, key, looking(q)).movedim(0, -3)

    def _select(self, query: Sequence[Tensor], key: Sequence[Tensor], refuse: bool) -> Tensor:
        """The bias ``[H, ...]`` of coordinates that broadcast to ``[...]``."""
        columns = self.rows().t().contiguous()
        bias = None
        for index in self.read(query, key, columns.shape[1] - 1):
            if refuse and (lost := index == columns.shape[1] - 1).any():
                offsets = [q - k for q, k in zip(query, key, strict=True)]
                self.refuse([offset.expand_as(lost)[lost][0].item() for offset in offsets])
            part = columns.index_select(1, index.flatten()).reshape(self.heads, *index.shape)
            bias = part if bias is None else bias + part
        assert bias is not None
        return bias


def ended(rows: Tensor) -> Tensor:
    """``rows`` in float32, then one of zeros and one of NaN."""
    zeros = nn.functional.pad(rows.float(), (0, 0, 0, 1))
    return nn.functional.pad(zeros, (0, 0, 0, 1), value=torch.nan)


def whole(offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An offset as an integer, 0 where it is not known; where it is known, and where it is whole.

    What is not known counts as whole.
    """
    seen = ~offset.isnan()
    offset = torch.where(seen, offset, 0)
    rounded = offset.round()
    return rounded.long(), seen, rounded == offset
