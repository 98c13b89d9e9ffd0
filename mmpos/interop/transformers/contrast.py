"""Where two plans differ, and what one is, in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mmpos.coordinates import Index
from mmpos.interop.transformers.words import axis_name, number, ranges
from mmpos.positions import axis_count

if TYPE_CHECKING:
    from mmpos.interop.transformers.plan import ChannelPlan


def compare(one: ChannelPlan, other: ChannelPlan, tolerance: float) -> list[str]:
    """A line for each respect in which plans differ by more than a relative tolerance."""
    if one.width != other.width:
        return [f"features of a head: {one.width} and {other.width}"]
    lines = []
    counts = [axis_count(plan.axes) for plan in (one, other)]
    if counts[0] != counts[1]:
        lines.append(f"axes: {counts[0]} and {counts[1]}")
    turned = [plan.turned for plan in (one, other)]
    if turned[0] != turned[1]:
        lines.append("turned features: " + " and ".join(ranges(each) or "none" for each in turned))
    both = [feature for feature in turned[0] if feature in turned[1]]

    def tell(what: str, differ: Callable[[int], bool], say: Callable[[ChannelPlan, int], str]):
        found = [feature for feature in both if differ(feature)]
        if found:
            worst = found[0]
            lines.append(
                f"{what} of features {ranges(found)}: feature {worst} "
                f"{say(one, worst)} and {say(other, worst)}"
            )

    tell(
        "partners",
        lambda c: one.partner[c] != other.partner[c],
        lambda plan, c: f"with {plan.partner[c]}",
    )
    tell("signs", lambda c: one.sign[c] != other.sign[c], lambda plan, c: f"has {plan.sign[c]}")
    tell(
        "axes",
        lambda c: one.axis[c] != other.axis[c],
        lambda plan, c: f"reads {axis_name(plan.axis[c], axis_count(plan.axes))}",
    )
    for name in ("frequency", "magnitude"):
        mine, theirs = getattr(one, name), getattr(other, name)
        line = _numbers(name, mine, theirs, both, tolerance)
        lines += [line] if line else []
    readings = [plan.coordinates.spec() for plan in (one, other)]
    if readings[0] != readings[1]:
        lines.append("coordinates: " + " and ".join(_reading(plan) for plan in (one, other)))
    return lines


def _numbers(
    name: str, mine: Sequence[float], theirs: Sequence[float], both: list[int], tolerance: float
) -> str:
    """The largest ratio of two numbers, and how many differ."""

    def ratio(feature: int) -> float:
        low, high = sorted((abs(mine[feature]), abs(theirs[feature])))
        opposite = mine[feature] * theirs[feature] < 0
        return float("inf") if opposite or (low == 0 and high > 0) else high / low if high else 1.0

    far = [feature for feature in both if ratio(feature) > 1 + tolerance]
    if not far:
        return ""
    worst = max(far, key=ratio)
    a, b = mine[worst], theirs[worst]
    return (
        f"{name} of features {ranges(far)}: the largest ratio is {ratio(worst):.4g}, at feature "
        f"{worst} ({number(a, b)} and {number(b, a)})"
    )


def fault(plan: ChannelPlan, one: int) -> str:
    """Why a feature is no part of a rotation, for the first of a pair; empty for a sound one."""
    other = plan.partner[one]
    if other == one:
        return f"feature {one} turns by frequency {number(plan.frequency[one])} without a pair"
    if plan.partner[other] != one:
        return f"feature {one} turns with {other}, which turns with {plan.partner[other]}"
    if other in plan.turned and other < one:
        return ""
    pair, said = sorted((one, other)), []
    if plan.sign[one] * plan.sign[other] != -1:
        said.append(f"have the signs {plan.sign[pair[0]]} and {plan.sign[pair[1]]}")
    for name, values in (("frequencies", plan.frequency), ("magnitudes", plan.magnitude)):
        a, b = (values[feature] for feature in pair)
        if a != b:
            verb = "turn by" if name == "frequencies" else "have"
            said.append(f"{verb} different {name} ({number(a, b)} and {number(b, a)})")
    a, b = (plan.axis[feature] for feature in pair)
    if a != b:
        names = (axis_name(axis, axis_count(plan.axes)) for axis in (a, b))
        said.append(f"read different axes ({' and '.join(names)})")
    what = " and ".join(said)
    return f"features {pair[0]} and {pair[1]} are a pair, and {what}" if said else ""


def described(plan: ChannelPlan) -> str:
    """What turns, how and by how much, in one line."""
    turned, parts = plan.turned, []
    for axis in dict.fromkeys(plan.axis[feature] for feature in turned):
        own = [feature for feature in turned if plan.axis[feature] == axis]
        parts.append(f"{axis_name(axis, axis_count(plan.axes))} {ranges(own)}")
    passing = [feature for feature in range(plan.width) if feature not in turned]
    parts += [f"passing {ranges(passing)}"] if passing else []
    if turned:
        steps = sorted({abs(plan.partner[feature] - feature) for feature in turned})
        parts.append("pairs " + " or ".join(f"(c, c + {step})" for step in steps))
        speeds = [plan.frequency[feature] for feature in turned]
        parts.append(f"frequencies {max(speeds):.4g} to {min(speeds):.4g}")
    if plan.coordinates.spec() != Index().spec():
        parts.append(f"positions read by {_reading(plan)}")
    sizes = [plan.magnitude[feature] for feature in turned] or [1.0]
    factor = " to ".join(dict.fromkeys(f"{size:.4g}" for size in (min(sizes), max(sizes))))
    sound = "a rotation" if factor == "1" else f"a rotation times {factor}"
    faults = plan.faults
    more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
    parts.append(f"no rotation: {faults[0]}{more}" if faults else sound)
    return f"{plan.width} features: {'; '.join(parts)}"


def _reading(plan: ChannelPlan) -> str:
    """The class of coordinates, and the arguments that are not its defaults."""
    spec = plan.coordinates.spec()
    named = ", ".join(f"{name}={value}" for name, value in spec["init_args"].items())
    return f"{spec['class_path'].rpartition('.')[2]}({named})"
