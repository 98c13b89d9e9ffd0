"""The limits of length around a model: the least of them is what a user meets."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """Five lengths in tokens that are set in five places; None is one that is not known.

    Raises: TypeError for what is no whole number; ValueError for one below 1, or one so large that
        it says "no limit", as tokenizers without one do: leave that out.

    >>> limits = Limits(server=32768, tokenizer=131072, cache=16384)
    >>> limits.minimum, limits.where, limits.unknown
    (16384, ('cache',), ('gateway', 'batcher'))
    >>> print(limits)
    at most 16384 tokens, by the cache; not known: gateway, batcher
    """

    server: int | None = None
    """The length that the model is served with."""
    tokenizer: int | None = None
    """Where the tokenizer cuts off."""
    gateway: int | None = None
    """What a request may have, in tokens rather than characters."""
    batcher: int | None = None
    """Tokens of a batch, or of a sequence in it."""
    cache: int | None = None
    """Tokens for which the cache manager has room."""

    def __post_init__(self) -> None:
        for name, limit in self._given():
            if isinstance(limit, bool) or not isinstance(limit, int):
                raise TypeError(f"{name} is a whole number of tokens or None, got {limit!r}")
            if not 1 <= limit < 10**15:
                raise ValueError(
                    f"{name} is 1 or more tokens, got {limit}: leave it out where there is no limit"
                )

    def _given(self) -> list[tuple[str, int]]:
        pairs = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(name, limit) for name, limit in pairs if limit is not None]

    @property
    def minimum(self) -> int | None:
        """The least of those that are known."""
        return min((limit for _, limit in self._given()), default=None)

    @property
    def where(self) -> tuple[str, ...]:
        """Which have the least."""
        return tuple(name for name, limit in self._given() if limit == self.minimum)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Which are not known: each may be lower than the minimum."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is None)

    def table(self) -> list[tuple[str, int | None]]:
        """A row for each, and one for the minimum."""
        rows = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [*rows, ("minimum", self.minimum)]

    def __str__(self) -> str:
        known = f"at most {self.minimum} tokens, by the {' and '.join(self.where)}"
        parts = [known] if self.where else []
        parts += [f"not known: {', '.join(self.unknown)}"] if self.unknown else []
        return "; ".join(parts)
