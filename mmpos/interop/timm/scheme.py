from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmpos.interop.timm.tables import Grid


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One way in which a model knows positions.

    Args:
        kind: ``learned table``, ``axis table``, ``window table``, ``axial RoPE``, ``mixed RoPE``,
            ``DINOv3 RoPE``, ``M-RoPE``, ``bias table``, ``bias MLP``, ``distance table``,
            ``decomposed table``, ``relative coordinates``, ``Fourier`` or ``convolution``.
        where: the parameter or module, the first of several.
        layers: how many modules have one like this.
        grid: the cells of a table, the window or the grid of a bias.
        prefix_rows: rows of a table for tokens without a place: before the cells of a learned
            table, after the offsets of a bias table.
        axes: their order in the features of a rotation, or in a table.
        layout: of pairs of features: ``interleaved`` or ``half``.
        base: of the frequencies, timm's temperature.
        reference: the grid that positions are scaled to.
        offset: added to positions.
        note: what else there is to know.

    >>> print(Scheme(kind="axial RoPE", where="rope", axes="y, x", layout="half", base=100.0))
    axial RoPE (rope): axes y, x; layout half; base 100
    """

    kind: str
    where: str
    layers: int = 1
    grid: Grid | None = None
    prefix_rows: int = 0
    axes: str = ""
    layout: str = ""
    base: float | None = None
    reference: Grid | None = None
    offset: float = 0.0
    note: str = ""

    def with_note(self, note: str) -> Scheme:
        return replace(self, note=note)

    def __str__(self) -> str:
        where = self.where if self.layers == 1 else f"{self.where} and {self.layers - 1} more"
        words = [f"grid {times(self.grid)}"] if self.grid else []
        words += [f"{counted(self.prefix_rows, 'prefix row')}"] if self.prefix_rows else []
        words += [f"axes {self.axes}"] if self.axes else []
        words += [f"layout {self.layout}"] if self.layout else []
        words += [f"base {self.base:g}"] if self.base is not None else []
        words += [f"scaled to {times(self.reference)}"] if self.reference else []
        words += [f"offset {self.offset:g}"] if self.offset else []
        words += [self.note] if self.note else []
        return f"{self.kind} ({where})" + (f": {'; '.join(words)}" if words else "")


def times(sizes: Sequence[int]) -> str:
    """Sizes as they are written."""
    return " × ".join(str(size) for size in sizes)


def counted(number: int, what: str) -> str:
    """A number of things."""
    return f"{number} {what}" + "s" * (number != 1)
