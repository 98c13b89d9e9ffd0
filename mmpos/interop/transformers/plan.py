from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float, Num
from torch import Tensor

from mmpos.coordinates import Coordinates, Extent, Index
from mmpos.frequencies import Length
from mmpos.interop.transformers.contrast import compare, described, fault
from mmpos.interop.transformers.probe import probe
from mmpos.positions import Axes, axis_count
from mmpos.rotary import RotaryEncoding
from mmpos.rotary.rotation import LAYOUTS, Layout


@dataclass(frozen=True, repr=False, eq=False)
class ChannelPlan:
    """What a rotary scheme does to each feature of a head, whether it is a rotation or not.

    Feature ``c`` becomes ``magnitude[c] · (x[c] cos θ + sign[c] · x[partner[c]] sin θ)`` with
    ``θ = position[axis[c]] · frequency[c]``. A feature that passes is its own partner and has no
    axis. Every published scheme with fixed axes has such a plan, also those whose weights were
    trained with something that is no rotation (V-JEPA 2, HunyuanVL).

    Args:
        partner: the other feature of each feature's pair.
        sign: -1 for the first of a pair, 1 for the second, 0 for a feature that passes.
        axis: which coordinate each feature reads, or None.
        frequency: radians per unit of that coordinate.
        magnitude: multiplies cos and sin (YaRN's and LongRoPE's); 1 for all features by default.
        axes: number of axes, or the grid to which `Scaled` coordinates refer.
        coordinates: how positions are read; as they are by default.

    Raises: ValueError for entries that are not one for each feature, or name what is not there.

    >>> plan = ChannelPlan.of(mmpos.RotaryEncoding(8, axes=2, layout="half"))
    >>> print(plan)
    8 features: h 0–1, 4–5; w 2–3, 6–7; pairs (c, c + 4); frequencies 1 to 0.01; a rotation
    """

    partner: tuple[int, ...]
    sign: tuple[int, ...]
    axis: tuple[int | None, ...]
    frequency: tuple[float, ...]
    magnitude: tuple[float, ...] = ()
    axes: Axes = 1
    coordinates: Coordinates = field(default_factory=Index)

    def __post_init__(self) -> None:
        if not self.magnitude:
            object.__setattr__(self, "magnitude", (1.0,) * self.width)
        count = axis_count(self.axes)
        for name in ("sign", "axis", "frequency", "magnitude"):
            if len(getattr(self, name)) != self.width:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries, partner has {self.width}: "
                    "each has one for each feature of a head"
                )
        for feature, (other, sign, axis) in enumerate(
            zip(self.partner, self.sign, self.axis, strict=True)
        ):
            if not 0 <= other < self.width or sign not in (-1, 0, 1):
                raise ValueError(
                    f"feature {feature} has partner {other} and sign {sign}, expected a partner "
                    f"from 0 to {self.width - 1} and a sign of -1, 0 or 1"
                )
            if axis is not None and not 0 <= axis < count:
                raise ValueError(f"feature {feature} reads axis {axis}, there are {count} axes")
            if axis is None and self.frequency[feature] != 0:
                raise ValueError(
                    f"feature {feature} turns by {self.frequency[feature]} and reads no axis: "
                    "its frequency must be 0"
                )

    @classmethod
    def of(cls, encoding: RotaryEncoding, length: Length | None = None) -> ChannelPlan:
        """The plan of an encoding, read off the rotations that it gives.

        ``length`` is for extensions that depend on it.
        Raises: TypeError for what is no RotaryEncoding; ValueError for one whose features do not
        each turn with one axis, alike in all heads, for queries and keys: mixed RoPE, a
        temperature, xPos.

        >>> print(ChannelPlan.of(mmpos.VJEPA2Encoding(16)).faults[0])
        features 0 and 1 are a pair, and turn by different frequencies (1 and 0.01)
        """
        return cls(**probe(encoding, length), axes=encoding.axes, coordinates=encoding.coordinates)

    @classmethod
    def of_pairs(
        cls,
        width: int,
        pairs: Layout | Sequence[tuple[int, int]],
        axis: Sequence[int],
        frequency: Sequence[float],
        *,
        axes: Axes = 1,
        coordinates: Coordinates | None = None,
    ) -> ChannelPlan:
        """A rotation of ``width`` features, by the axis and the frequency of each pair.

        ``pairs`` is a layout of the first features of a head, or names the two features of each.
        Raises: ValueError for pairs that are too many, or of features that are not there.

        >>> ChannelPlan.of_pairs(5, "half", [0, 0], [1.0, 0.1]).partner
        (2, 3, 0, 1, 4)
        """
        count = len(frequency)
        if isinstance(pairs, str):
            _check_layout(pairs)
            half = pairs == "half"
            pairs = [(p, p + count) if half else (2 * p, 2 * p + 1) for p in range(count)]
        named = [feature for pair in pairs for feature in pair]
        if len({*named}) != 2 * count or not {*named} <= {*range(width)} or len(axis) != count:
            raise ValueError(
                f"{len(axis)} axes, {count} frequencies and the features {named} are no "
                f"{count} pairs of {width} features"
            )
        partner, sign = list(range(width)), [0] * width
        reads: list[int | None] = [None] * width
        speed = [0.0] * width
        for (first, second), own, turn in zip(pairs, axis, frequency, strict=True):
            partner[first], partner[second] = second, first
            sign[first], sign[second] = -1, 1
            reads[first] = reads[second] = own
            speed[first] = speed[second] = float(turn)
        return cls(
            tuple(partner),
            tuple(sign),
            tuple(reads),
            tuple(speed),
            axes=axes,
            coordinates=Index() if coordinates is None else coordinates,
        )

    @property
    def width(self) -> int:
        """Features of a head."""
        return len(self.partner)

    @property
    def turned(self) -> tuple[int, ...]:
        """The features that do not always stay as they are."""
        return tuple(
            feature
            for feature in range(self.width)
            if self.frequency[feature] != 0 or self.magnitude[feature] != 1
        )

    @property
    def faults(self) -> tuple[str, ...]:
        """Why it is no rotation, a line for each pair; nothing for a rotation.

        A magnitude that both features of each pair share is no fault: then it is a rotation up to
        this factor.
        """
        return tuple(filter(None, (fault(self, feature) for feature in self.turned)))

    @property
    def is_rotation(self) -> bool:
        """Whether it turns pairs, up to a factor: so that scores depend on differences alone."""
        return not self.faults

    def __call__(
        self,
        x: Float[Tensor, "*batch head length features"],
        positions: Num[Tensor, "*#batch length axes"],
        extent: Extent | None = None,
    ) -> Float[Tensor, "*batch head length features"]:
        """Do it to ``x [..., H, L, D]`` at positions ``[L, A]`` or ``[..., L, A]``.

        Angles are formed in float64, products in float32 or the wider dtype of ``x``; a coordinate
        that is NaN leaves the features that read it as they are. ``extent`` is for coordinates that
        need the size of the grid.

        Raises: ValueError for another number of features, axes or tokens; TypeError for positions
        that are not exact.
        """
        if x.ndim < 3 or x.shape[-1] != self.width:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, expected [..., head, length, {self.width}]"
            )
        read = self.coordinates(positions, axes=self.axes, extent=extent)
        if read.shape[-2] not in (1, x.shape[-2]):
            raise ValueError(f"positions are of {read.shape[-2]} tokens, x has {x.shape[-2]}")

        def row(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=read.dtype, device=read.device)

        own = read[..., [axis or 0 for axis in self.axis]]
        absent = own.isnan() | row([axis is None for axis in self.axis]).bool()
        angle = torch.where(absent, 0, own) * row(self.frequency)
        magnitude = torch.where(absent, 1, row(self.magnitude))
        wide = torch.promote_types(x.dtype, torch.float32)
        cos = (magnitude * angle.cos()).float().to(wide).unsqueeze(-3)
        sin = (magnitude * angle.sin() * row(self.sign)).float().to(wide).unsqueeze(-3)
        return (x * cos + x[..., list(self.partner)] * sin).to(x.dtype)

    def order(self, layout: Layout, *, by: Literal["axis", "pair"] = "axis") -> tuple[int, ...]:
        """Which feature comes where, for the pairs to lie as a layout of mmpos has them.

        Reordering the rows of q and k by it (`permute`) makes an encoding with this layout do the
        same. Pairs go axis by axis, the fastest first, as in `RotaryEncoding`; ``by="pair"`` keeps
        their own order, as `MRoPE` needs it. Features that pass go behind them, or before them if
        they all were before them.

        Raises: ValueError if it is no rotation, or the layout is not known.

        >>> plan = ChannelPlan.of_pairs(6, [(0, 1), (2, 3), (4, 5)], [1, 0, 1], [1, 1, 0.1], axes=2)
        >>> plan.order("half")
        (2, 0, 4, 3, 1, 5)
        """
        _check_layout(layout)
        if by not in ("axis", "pair"):
            raise ValueError(f"by must be axis or pair, got {by!r}")
        if self.faults:
            raise ValueError(f"no layout makes it a rotation: {self.faults[0]}")
        first = [f for f in range(self.width) if self.sign[f] == -1 and self.partner[f] != f]
        if by == "axis":
            first.sort(key=lambda f: (_last(self.axis[f]), -self.frequency[f]))
        pairs = [(feature, self.partner[feature]) for feature in first]
        columns = list(zip(*pairs, strict=True)) if layout == "half" else pairs
        found = [feature for group in columns for feature in group]
        rest = [feature for feature in range(self.width) if feature not in found]
        trailing = bool(rest) and max(rest) < min(found, default=0)
        return tuple(rest + found if trailing else found + rest)

    def reorder(self, order: Sequence[int]) -> ChannelPlan:
        """The plan of the same scheme where feature ``c`` was feature ``order[c]``.

        Raises: ValueError for an order that does not name each feature once.
        """
        if sorted(order) != list(range(self.width)):
            raise ValueError(f"an order names each of {self.width} features once, got {order}")
        where = {feature: place for place, feature in enumerate(order)}
        moved = {
            name: tuple(getattr(self, name)[feature] for feature in order)
            for name in ("sign", "axis", "frequency", "magnitude")
        }
        partner = tuple(where[self.partner[feature]] for feature in order)
        return replace(self, partner=partner, **moved)

    def differences(self, other: ChannelPlan, tolerance: float = 1e-6) -> list[str]:
        """Where another plan does otherwise, in lines; none where both do the same.

        Numbers may differ by a relative ``tolerance``. What happens to features that pass in one of
        the two is said once, as which features are turned.

        >>> fast, slow = (ChannelPlan.of(mmpos.RotaryEncoding(4, base=b)) for b in (100, 10000))
        >>> fast.differences(slow)
        ['frequency of features 2–3: the largest ratio is 10, at feature 2 (0.1 and 0.01)']
        """
        return compare(self, other, tolerance)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChannelPlan) and not self.differences(other, 0.0)

    def __hash__(self) -> int:
        return hash((self.width, self.turned))

    def __str__(self) -> str:
        return described(self)

    def __repr__(self) -> str:
        return f"ChannelPlan({self})"


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")


def _last(axis: int | None) -> float:
    return float("inf") if axis is None else axis
