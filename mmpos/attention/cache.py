from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from mmpos.frequencies import Length
from mmpos.positions import chosen, join


class LayerCache:
    """Keys and values of one layer, in memory that doubles as it fills.

    With gradients enabled, tokens are joined instead, so that a cache may be trained through.
    """

    def __init__(self) -> None:
        self._memory: list[Tensor] = []
        self._tokens = 0

    @property
    def keys(self) -> Float[Tensor, "batch kv_head length head_dim"]:
        """All keys."""
        return self._memory[0][..., : self._tokens, :]

    @property
    def values(self) -> Float[Tensor, "batch kv_head length value_dim"]:
        """All values."""
        return self._memory[1][..., : self._tokens, :]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of further tokens; returns all."""
        if not self._memory:
            self._memory = [keys, values]
        elif torch.is_grad_enabled():
            self._memory = [
                torch.cat(pair, -2) for pair in ((self.keys, keys), (self.values, values))
            ]
        else:
            self._memory = [
                _written(memory, self._tokens, new)
                for memory, new in zip(self._memory, (keys, values), strict=True)
            ]
        self._tokens += keys.shape[-2]
        return self.keys, self.values

    def replace(self, keys: Tensor, values: Tensor) -> None:
        """Hold these in place of all that was there."""
        self._memory, self._tokens = [keys, values], keys.shape[-2]


class Held(NamedTuple):
    """What is known of all keys of a cache: of its own, and of those that are about to come."""

    positions: Num[Tensor, "*batch length axes"]
    mask: Bool[Tensor, "batch length"] | None
    segments: Int[Tensor, "batch length"] | None
    order: Int[Tensor, "*batch length"]


class KVCache:
    """What tokens that come later see of those before them: keys, values, positions, segments.

    A transformer that is called with a cache encodes further tokens as if all had been given at
    once, whatever its encodings. Positions are the caller's: a row's next token is at ``seen``,
    also after eviction. `mmpos.models.Transformer` fills it; another model prepares attention
    from ``extended``, tells it to ``note``, and appends keys and values to ``layer(i)``.

    Context extensions that depend on the length (dynamic NTK, LongRoPE) choose frequencies for a
    whole sequence, and keys that were turned by one choice do not fit queries turned by another.
    There are two ways, and one must be named: ``length`` is frozen for all calls, or keys are kept
    as they are before they are turned (``rotated=False``), and turned at each call for the length
    at hand, as without a cache.

    Args:
        length: what such extensions take for the length, from the first call on.
        rotated: whether keys are kept turned.

    >>> model = mmpos.models.Transformer(1, size="nano", rotary=mmpos.RotaryEncoding, causal=True)
    >>> x, positions, cache = torch.randn(2, 6, 64), mmpos.positions.sequence(6), KVCache()
    >>> first = model(x[:, :5], positions[:5], cache=cache)
    >>> last = model(x[:, 5:], positions[5:], cache=cache)
    >>> torch.allclose(torch.cat((first, last), 1), model(x, positions), atol=1e-5)
    True
    """

    def __init__(self, *, length: Length | None = None, rotated: bool = True) -> None:
        self.length = length
        self.rotated = rotated
        self.positions: Num[Tensor, "*batch length axes"] | None = None
        self.mask: Bool[Tensor, "batch length"] | None = None
        self.segments: Int[Tensor, "batch length"] | None = None
        self.index: Int[Tensor, "*batch length"] | None = None
        """Each token's place among all real tokens of its row, those that were evicted included."""
        self._layers: list[LayerCache] = []
        self._evicted: Int[Tensor, " batch"] | int = 0
        self._rows: int | None = None

    @property
    def tokens(self) -> int:
        """How many tokens each row holds, padding included."""
        return 0 if self.positions is None else self.positions.shape[-2]

    @property
    def seen(self) -> Int[Tensor, " batch"] | int:
        """How many real tokens each row has had, those that were evicted included."""
        held = self.tokens if self.mask is None else self.mask.sum(-1)
        return held + self._evicted

    def layer(self, index: int) -> LayerCache:
        """That of a layer."""
        while len(self._layers) <= index:
            self._layers.append(LayerCache())
        return self._layers[index]

    def frozen(self, length: Length | None, needed: bool) -> Length | None:
        """The length of a call, that of the first if keys are kept turned.

        Args:
            length: what the call gives.
            needed: whether a context extension depends on it.

        Raises: ValueError for another one than before, or none where one must be.
        """
        if length is None:
            length = self.length
        elif self.length is not None and not _same(length, self.length):
            raise ValueError(
                f"the cache's length is {self.length} from its first call on, got {length}"
            )
        if self.rotated and needed and length is None:
            raise ValueError(
                "a context extension here depends on the length, and cached keys that were turned "
                "for one length do not fit another: pass KVCache(length=…) for all calls, or "
                "KVCache(rotated=False) to turn keys at each"
            )
        return length

    def extended(
        self,
        rows: int,
        positions: Num[Tensor, "*batch length axes"],
        mask: Bool[Tensor, "*mask_batch length"] | None = None,
        segments: Int[Tensor, "*segment_batch length"] | None = None,
    ) -> Held:
        """What is known of all keys, those of further tokens of so many rows last.

        Raises: ValueError for another number of rows than before, or segments of some calls only.
        """
        if self._rows not in (None, rows):
            raise ValueError(f"the cache holds {self._rows} rows, and {rows} were given")
        if self.positions is not None and (segments is None) != (self.segments is None):
            raise ValueError(
                "segments are for all tokens or for none: a cache with"
                f"{'' if self.segments is not None else 'out'} segments got tokens "
                f"with{'' if segments is not None else 'out'} them"
            )
        new = positions.shape[-2]
        mask = None if mask is None else mask.expand(rows, new)
        segments = None if segments is None else segments.expand(rows, new)
        steps = torch.arange(1, new + 1, device=positions.device)
        steps = steps if mask is None else mask.long().cumsum(-1)
        seen = self.seen
        index = steps - 1 + (seen.unsqueeze(-1) if isinstance(seen, Tensor) else seen)
        if self.positions is None or self.index is None:
            return Held(positions, mask, segments, index)
        if mask is not None or self.mask is not None:
            held = _mask(self.mask, mask, self.tokens)
            mask = torch.cat((held, _mask(mask, held, new)), -1)
        if segments is not None and self.segments is not None:
            segments = torch.cat((self.segments, segments), -1)
        batch = torch.broadcast_shapes(self.index.shape[:-1], index.shape[:-1])
        index = torch.cat([each.expand(*batch, -1) for each in (self.index, index)], -1)
        return Held(join(self.positions, positions), mask, segments, index)

    def note(self, rows: int, held: Held, length: Length | None = None) -> None:
        """Hold what `extended` and `frozen` gave, before layers append the keys."""
        self._rows = rows
        if self.rotated:
            self.length = length
        self.positions, self.mask, self.segments, self.index = held

    def keep(self, index: Int[Tensor, "*#batch kept"]) -> None:
        """Evict all but some tokens, of all rows or of each.

        Their positions stay theirs, and ``seen`` goes on counting.
        Raises: ValueError for an index that is no token.
        """
        if self.positions is None or self._rows is None or self.index is None:
            raise ValueError("there is nothing to keep: the cache is empty")
        if index.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"tokens are kept by their indices, got {index.dtype}")
        if index.ndim == 2 and index.shape[0] not in (1, self._rows):
            raise ValueError(f"the cache holds {self._rows} rows, and {index.shape[0]} were given")
        seen = self.seen
        self.positions = chosen(self.positions, index)
        for name in ("mask", "segments", "index"):
            held = getattr(self, name)
            if held is not None:
                alone = held.ndim == index.ndim == 1
                rows = held if alone else held.expand(self._rows, -1)
                kept = index if alone else index.expand(self._rows, -1)
                setattr(self, name, rows.gather(-1, kept.long()))
        self._evicted = 0
        self._evicted = seen - self.seen
        for layer in self._layers:
            layer.replace(_rows(layer.keys, index), _rows(layer.values, index))

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Go on with some rows, in this order, each as often as it is named: beams, for example."""
        if self.positions is not None and self.positions.ndim == 3 and len(self.positions) > 1:
            self.positions = self.positions[rows]
        self.mask = None if self.mask is None else self.mask[rows]
        self.segments = None if self.segments is None else self.segments[rows]
        if self.index is not None and self.index.ndim == 2:
            self.index = self.index[rows]
        self.length = _of_rows(self.length, rows)
        self._rows = len(rows)
        if isinstance(self._evicted, Tensor):
            self._evicted = self._evicted[rows]
        for layer in self._layers:
            layer.replace(layer.keys[rows], layer.values[rows])


def _of_rows(length: Any, rows: Tensor) -> Any:
    """A length of each row, for some of them; one for all, or one for each axis, as it is."""
    if isinstance(length, Tensor):
        return length[rows] if length.ndim and len(length) > 1 else length
    if isinstance(length, list | tuple):
        return tuple(_of_rows(each, rows) for each in length)
    return length


def _same(length: Length, other: Length) -> bool:
    return torch.equal(torch.as_tensor(length), torch.as_tensor(other))


def _written(memory: Tensor, tokens: int, new: Tensor) -> Tensor:
    """Memory with more tokens, in place where there is room."""
    after, dtype = tokens + new.shape[-2], torch.promote_types(memory.dtype, new.dtype)
    if after > memory.shape[-2] or memory.dtype != dtype or memory.is_inference():
        size = (*memory.shape[:-2], 2 * after, memory.shape[-1])
        roomy = memory.new_empty(size, dtype=dtype)
        roomy[..., :tokens, :] = memory[..., :tokens, :]
        memory = roomy
    memory[..., tokens:after, :] = new
    return memory


def _mask(mask: Tensor | None, other: Tensor | None, tokens: int) -> Tensor:
    """A mask, or that of tokens that are all real, in as many rows as another."""
    if mask is not None:
        return mask
    assert other is not None
    return other.new_ones(other.shape[0], tokens)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Tokens ``[B, H, L, D]`` by an index ``[K]`` or ``[B, K]``."""
    index = index.expand(x.shape[0], -1)[:, None, :, None]
    return x.gather(-2, index.expand(-1, x.shape[1], -1, x.shape[-1]))
