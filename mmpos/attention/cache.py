from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from mmpos.frequencies import Length
from mmpos.positions import chosen, join


class LayerCache:
    """Keys and values of one layer, in memory that doubles as it fills.

    What has a gradient is joined instead, so that a cache may be trained through.
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
        elif torch.is_grad_enabled() and (keys.requires_grad or self._memory[0].requires_grad):
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
        self._layers: list[LayerCache] = []
        self._evicted: Int[Tensor, " batch"] | int = 0

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
        """The length of a call, frozen from the first on if keys are kept turned.

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
        if not self.rotated:
            return length
        if needed and length is None:
            raise ValueError(
                "a context extension here depends on the length, and cached keys that were turned "
                "for one length do not fit another: pass KVCache(length=…) for all calls, or "
                "KVCache(rotated=False) to turn keys at each"
            )
        self.length = length
        return length

    def extended(
        self,
        positions: Num[Tensor, "*batch length axes"],
        mask: Bool[Tensor, "batch length"] | None = None,
        segments: Int[Tensor, "batch length"] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Positions, mask and segments of all keys, those of further tokens last.

        Raises: ValueError for segments of some calls only.
        """
        if self.positions is None:
            return positions, mask, segments
        if (segments is None) != (self.segments is None):
            raise ValueError(
                "segments are for all tokens or for none: a cache with"
                f"{'' if self.segments is not None else 'out'} segments got tokens "
                f"with{'' if segments is not None else 'out'} them"
            )
        if mask is not None or self.mask is not None:
            held = _mask(self.mask, mask, self.tokens)
            mask = torch.cat((held, _mask(mask, held, positions.shape[-2])), -1)
        if segments is not None and self.segments is not None:
            segments = torch.cat((self.segments, segments), -1)
        return join(self.positions, positions), mask, segments

    def note(self, positions: Tensor, mask: Tensor | None, segments: Tensor | None) -> None:
        """Hold what `extended` gave, before layers append the keys."""
        self.positions, self.mask, self.segments = positions, mask, segments

    def keep(self, index: Int[Tensor, "*#batch kept"]) -> None:
        """Evict all but some tokens, of all rows or of each.

        Their positions stay theirs, and ``seen`` goes on counting.
        Raises: ValueError for an index that is no token.
        """
        if self.positions is None:
            raise ValueError("there is nothing to keep: the cache is empty")
        seen = self.seen
        self.positions = chosen(self.positions, index)
        for name in ("mask", "segments"):
            held = getattr(self, name)
            if held is not None:
                setattr(self, name, held.gather(-1, index.expand(held.shape[0], -1)))
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
        if isinstance(self._evicted, Tensor):
            self._evicted = self._evicted[rows]
        for layer in self._layers:
            layer.replace(layer.keys[rows], layer.values[rows])


def _same(length: Length, other: Length) -> bool:
    return torch.equal(torch.as_tensor(length), torch.as_tensor(other))


def _written(memory: Tensor, tokens: int, new: Tensor) -> Tensor:
    """Memory with more tokens, in place where there is room."""
    after = tokens + new.shape[-2]
    if after > memory.shape[-2]:
        roomy = memory.new_empty(*memory.shape[:-2], 2 * after, memory.shape[-1])
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
