"""What a model's interface does with a length, whether or not its answers are right."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from mmpos.evaluation.judging import told
from mmpos.evaluation.subjects import Subject


@dataclass(frozen=True)
class Taken:
    """What a full pass over a length gave."""

    length: int
    finite: bool = False
    leak: float = math.inf
    """The most that logits changed with tokens that come later."""
    allowed: float = 0.0
    """What rounding can change: twice what a second same pass did, and some units of rounding."""
    error: str = ""

    @property
    def accepted(self) -> bool:
        """Whether the interface takes it: no error, finite logits."""
        return not self.error and self.finite

    @property
    def causal(self) -> bool:
        """Whether no logit depends on what comes later."""
        return self.leak <= self.allowed


@dataclass(frozen=True)
class Decoded:
    """How far decoding with the cache is from a full pass."""

    length: int
    difference: float
    allowed: float
    """The root of the unit of rounding, times the deviation of the logits."""

    @property
    def same(self) -> bool:
        """Whether they agree."""
        return self.difference <= self.allowed


def taken(subject: Subject, tokens: Int[Tensor, " length"], seed: int = 0) -> Taken:
    """Pass tokens through, then with other ones from some places on: the first, the middle, the
    last and drawn ones.

    A mask that leaks shows in logits before those that were changed. An error of the subject is
    kept, as what its interface says of the length.

    >>> both = torch.nn.Conv1d(4, 4, 3, padding=1)  # sees the next token too
    >>> call = lambda x: both(torch.nn.functional.one_hot(x, 4).float().mT).mT
    >>> found = taken(mmpos.evaluation.CallableSubject(call, 4, 100), torch.arange(20) % 4)
    >>> found.accepted, found.causal
    (True, False)
    """
    length = len(tokens)
    try:
        logits = subject.logits(tokens[None])
        wrong = tuple(logits.shape) != (1, length, subject.vocabulary)
        if wrong:
            return Taken(length, error=f"logits of shape {tuple(logits.shape)}")
        if not logits.isfinite().all():
            return Taken(length)
        again = _most(subject.logits(tokens[None]) - logits)
        leak = 0.0
        if subject.vocabulary > 1:
            draw = torch.Generator().manual_seed(seed)
            drawn = torch.randint(1, length, (4,), generator=draw).tolist()
            for cut in {1, 2, 3, length // 2, length - 2, length - 1, *drawn} & set(
                range(1, length)
            ):
                steps = torch.randint(1, subject.vocabulary, (length - cut,), generator=draw)
                other = tokens.clone()
                other[cut:] = (other[cut:] + steps.to(other.device)) % subject.vocabulary
                later = subject.logits(other[None])[:, :cut]
                leak = max(leak, _most(later - logits[:, :cut]))
        allowed = 2 * again + 16 * torch.finfo(logits.dtype).eps * _most(logits)
    except Exception as raised:
        return Taken(length, error=told(raised))
    return Taken(length, True, leak, allowed)


def decoded(subject: Subject, tokens: Int[Tensor, " length"], steps: int = 8) -> Decoded | None:
    """Decode the last tokens with the cache, as a full pass sees them; None without a cache.

    >>> call = torch.nn.Embedding(4, 4)
    >>> decoded(mmpos.evaluation.CallableSubject(call, 4, 100), torch.arange(20) % 4) is None
    True
    """
    steps = min(steps, len(tokens))
    cached = subject.cached_logits(tokens[None], len(tokens) - steps)
    if cached is None:
        return None
    full = subject.logits(tokens[None])[:, -steps:]
    if cached.shape != full.shape:
        return Decoded(len(tokens), math.inf, 0.0)
    dtypes = {full.dtype, cached.dtype, *(each.dtype for each in subject.weights()[:1])}
    unit = max((torch.finfo(each).eps for each in dtypes if each.is_floating_point), default=0.0)
    full = full.double()
    difference = _most(cached.double() - full)
    return Decoded(len(tokens), difference, math.sqrt(unit) * float(full.std(correction=0)))


def _most(difference: Tensor) -> float:
    """The largest magnitude; infinite where it is no number."""
    most = float(difference.abs().max()) if difference.numel() else 0.0
    return math.inf if math.isnan(most) else most
