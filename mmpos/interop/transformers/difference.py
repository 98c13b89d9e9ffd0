from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """One thing that two models do otherwise.

    Args:
        name: what it is: base, type, factor, layout, …
        first, second: what each has.
        layers: where, if not everywhere.
    """

    name: str
    first: str
    second: str
    layers: str = ""

    def __str__(self) -> str:
        where = f" (layers {self.layers})" if self.layers else ""
        both = " and ".join(filter(None, (self.first, self.second)))
        return f"{self.name}{where}: {both}"
