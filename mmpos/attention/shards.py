"""Sequences whose tokens are shared out over processes: each attends to the keys of all."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor
from torch import distributed as dist

from mmpos.coordinates import Extent


class Whole(NamedTuple):
    """What a process knows of the tokens of all, once per forward pass, in the order of keys."""

    positions: Num[Tensor, "*batch length axes"]
    mask: Bool[Tensor, "rows length"] | None
    segments: Int[Tensor, "*rows length"] | None
    k_index: Int[Tensor, " length"]
    q_index: Int[Tensor, " own"]
    """The places of the own tokens in the whole order."""
    reach: Extent | None
    """The extent for a bias: if each token has its own, those of queries, then those of keys."""
    lengths: tuple[int, ...]
    """How many keys each process gives."""
    skipped: int
    """Of the own tokens, the first that are keys of another process: its prefix tokens."""
    seed: int | None
    """From which all draw what is random, in training."""
    group: Any

    def gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, H, L, D]`` of all processes, in one exchange; sums gradients."""
        both = torch.stack((k.to(v.dtype), v))
        keys, values = _gathered(both, -2, self.lengths, self.group, self.skipped).unbind(0)
        return keys, values

    @contextlib.contextmanager
    def alike(self, device: torch.device) -> Iterator[None]:
        """Random numbers that all processes draw alike; afterwards each goes on with its own."""
        if self.seed is None:
            yield
            return
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            torch.manual_seed(self.seed)
            yield


@dataclass(frozen=True, eq=False)
class SequenceShards:
    """Each process of a group has some tokens of every sequence, and their positions beside them.

    What is given along the tokens (``x``, positions, mask, segments, an extent of each token) is
    cut the same way; all else (extent, length) is that of the whole. A `mmpos.models.Transformer`
    then gives the own rows of the whole's output, whatever its encodings: queries stay, keys and
    values are gathered after they are turned, and positions once per forward pass. Shards may
    differ in length. Prefix tokens are in every process, alike up to rounding; as keys they count
    once. Another model prepares attention from ``whole``, and lets that gather keys and values.

    The loss is the sum of what the processes compute, and a parameter's gradient the sum of theirs,
    for the caller to form over the group. So the mean over all tokens is
    ``loss(…, reduction="sum") / shards.total(tokens)``, and a loss that each process computes of
    prefix tokens, or of outputs it gathered, is divided by ``size``. `DistributedDataParallel` over
    the same processes averages gradients: multiply each loss by ``size``, or a mean over own tokens
    by ``own * size / shards.total(own)``. All processes run the same passes, backward too. In
    training, they draw the same random numbers (disturbances of coordinates, drop path).

    Args:
        group: of processes; by default all, and a single one without `torch.distributed`.
        index: the place of each own token in the whole order, for causality and windows; by
            default the shards follow one another by rank.

    >>> shards = SequenceShards()  # in each process; here it is the only one
    >>> x, positions = torch.randn(2, 6, 64), mmpos.positions.sequence(6)
    >>> own = shards.cut(6)
    >>> model = mmpos.models.Transformer(1, size="nano", rotary=mmpos.RotaryEncoding, causal=True)
    >>> out = model(x[:, own], positions[own], shards=shards)
    >>> loss = out.square().sum() / shards.total(out.numel())
    """

    group: Any = None
    index: Int[Tensor, " length"] | None = None

    @property
    def size(self) -> int:
        """How many processes share the tokens."""
        if not dist.is_available() or not dist.is_initialized():
            return 1
        size = dist.get_world_size(self.group)
        if size < 1:
            raise ValueError("this process is not in the group that shares the tokens")
        return size

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return 0 if self.size == 1 else dist.get_rank(self.group)

    @property
    def alone(self) -> bool:
        """Whether this process has all tokens, in order."""
        return self.size == 1 and self.index is None

    def cut(self, tokens: int) -> slice:
        """The own tokens of so many, if shares follow one another by rank and are nearly equal."""
        return slice(*(tokens * rank // self.size for rank in (self.rank, self.rank + 1)))

    def gather(self, x: Float[Tensor, "batch _ *rest"]) -> Float[Tensor, "batch length *rest"]:
        """The tokens of all processes, ``[B, L, …]`` in the whole order, with gradients."""
        if self.alone:
            return x
        given = {"the tokens": _kind(x, 1), "index": _kind(self.index, -1)}
        lengths = [tokens for tokens, _ in self._exchange(x.device, x.shape[1], given)]
        x = _gathered(x, 1, lengths, self.group)
        if self.index is None:
            return x
        return x[:, _gathered(self.index.to(x.device), -1, lengths, self.group).argsort()]

    def total(self, number: float | Tensor) -> Tensor:
        """The sum of a number over the processes, without gradients: of tokens, for example."""
        summed = torch.as_tensor(number).detach().clone()
        if self.size > 1:
            on_device = isinstance(number, Tensor) or dist.get_backend(self.group) != "nccl"
            summed = summed if on_device else summed.cuda()
            dist.all_reduce(summed, group=self.group)
        return summed

    def whole(
        self,
        x: Float[Tensor, "batch own dim"],
        positions: Num[Tensor, "*position_batch own axes"],
        mask: Bool[Tensor, "#batch own"] | None = None,
        segments: Int[Tensor, "*#batch own"] | None = None,
        *,
        extent: Extent | None = None,
        length: Any = None,
        prefix: int = 0,
        training: bool = False,
    ) -> Whole:
        """What is known of all tokens, of which these are the own, prefix tokens first.

        Raises: ValueError in all processes if they disagree about what is given, its batch or its
        dtype, or if ``index`` is not each place once.
        """
        sizes = extent if isinstance(extent, Tensor) and extent.ndim == 3 else None
        own, index, device = x.shape[1] - prefix, self.index, x.device
        given = {
            "the tokens": _kind(x, 1),
            "prefix tokens": prefix,
            "positions": _kind(positions, -2),
            "mask": _kind(mask, -1),
            "segments": _kind(segments, -1),
            "extent": _kind(extent, None if sizes is None else -2),
            "length": _kind(length),
            "index": _kind(index, -1),
            "training": training,
            "lengths of index": index is None or len(index) == own,
            "lengths of mask": mask is None or mask.shape[-1] == x.shape[1],
            "lengths of segments": segments is None or segments.shape[-1] == x.shape[1],
        }
        seed = int(torch.randint(2**63 - 1, ())) if training else 0
        seen = self._exchange(device, own, given, seed)
        tokens = [count for count, _ in seen]
        if index is None:
            index = torch.arange(own, device=device) + sum(tokens[: self.rank])
        elif len(index) != own:
            raise ValueError(f"index is for {len(index)} tokens, the process has {own}")
        for name, part in (("mask", mask), ("segments", segments)):
            if part is not None and part.shape[-1] != x.shape[1]:
                raise ValueError(
                    f"{name} is for {part.shape[-1]} tokens, the process has {x.shape[1]}: cut it "
                    "as the tokens are"
                )
        lengths = (tokens[0] + prefix, *tokens[1:])
        skipped = prefix if self.rank else 0

        def of_all(part: Any, dim: int) -> Any:
            return None if part is None else _gathered(part, dim, lengths, self.group, skipped)

        q_index = torch.cat(
            (torch.arange(prefix, device=device), index.to(device, torch.int64) + prefix)
        )
        k_index = torch.arange(sum(lengths), device=device)
        if self.index is not None:
            ordered, k_index = k_index, of_all(q_index, -1)
            if device.type == "cpu" and not torch.equal(k_index.sort().values, ordered):
                raise ValueError(
                    f"index must be each place from 0 to {sum(tokens) - 1} once over all "
                    f"processes, got {(k_index[prefix:] - prefix).tolist()}"
                )
        return Whole(
            of_all(positions, -2),
            of_all(mask, -1),
            of_all(segments, -1),
            k_index,
            q_index,
            extent if sizes is None else torch.cat((sizes, of_all(sizes, -2)), -2),
            lengths,
            skipped,
            seen[0][1] if training else None,
            self.group,
        )

    def _exchange(
        self, device: torch.device, tokens: int, given: dict[str, int], seed: int = 0
    ) -> list[tuple[int, int]]:
        """The tokens and the seed of each process; raises in all of them if they disagree."""
        mine = torch.tensor([tokens, seed, *given.values()], device=device)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        if self.size > 1:
            dist.all_gather(parts, mine, group=self.group)
        else:
            parts = [mine]
        table = torch.stack(parts).tolist()
        for name, numbers in zip(given, list(zip(*table, strict=True))[2:], strict=True):
            other = [rank for rank, number in enumerate(numbers) if number != numbers[0]]
            if other:
                raise ValueError(
                    f"processes 0 and {other[0]} that share sequences disagree about {name}: all "
                    "that is given along the tokens is cut alike, and the rest is that of the whole"
                )
        return [(row[0], row[1]) for row in table]


def _kind(part: Any, along: int | None = None) -> int:
    """A number that parts of one tensor share, cut along a dimension, and all that is equal."""
    if isinstance(part, Tensor):
        shape = list(part.shape)
        if along is not None:
            del shape[along]
        part = (part.dtype, shape)
    return zlib.crc32(repr(part).encode())


def _gathered(x: Tensor, dim: int, lengths: Sequence[int], group: Any, skipped: int = 0) -> Tensor:
    """``x`` without what is skipped, of all processes one after the other along a dimension."""
    own = x.narrow(dim, skipped, x.shape[dim] - skipped)
    if len(lengths) == 1:
        return own
    longest = max(lengths)
    if own.shape[dim] < longest:  # equal parts are what every back end gathers
        shape = list(own.shape)
        shape[dim] = longest - own.shape[dim]
        own = torch.cat((own, own.new_zeros(shape)), dim)
    parts = _Gather.apply(own, group)
    return torch.cat(
        [part.narrow(dim, 0, length) for part, length in zip(parts, lengths, strict=True)], dim
    )


class _Gather(torch.autograd.Function):
    """One tensor of each process to all; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> tuple[Tensor, ...]:
        ctx.group = group
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(parts, x.contiguous(), group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Scatter.apply(ctx.group, *gradients), None


class _Scatter(torch.autograd.Function):
    """The sum over the processes of the part that each has for this one."""

    @staticmethod
    def forward(ctx: Any, group: Any, *parts: Tensor) -> Tensor:
        ctx.group = group
        own = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter(own, [part.contiguous() for part in parts], group=group)
        return own

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, *_Gather.apply(gradients[0], ctx.group)
