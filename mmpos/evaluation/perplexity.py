"""How likely a text is to a model, by the context that each token has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from mmpos.evaluation.subjects import Subject


@dataclass(frozen=True)
class Perplexity:
    """Nats of a number of tokens, and how they were measured."""

    method: str
    length: int
    """Tokens of the context with the last target, or of the window."""
    nats: float
    """The sum over all targets; by the rule of windows, their mean times the targets."""
    tokens: int
    """How many targets."""
    windows: int

    @property
    def nats_per_token(self) -> float:
        """The mean."""
        return self.nats / self.tokens

    @property
    def bits_per_token(self) -> float:
        """The mean, in bits."""
        return self.nats_per_token / math.log(2)

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean; infinite where no float holds it."""
        return math.exp(self.nats_per_token) if self.nats_per_token < 709 else math.inf

    def to_dict(self) -> dict[str, Any]:
        """All numbers, those that follow from others too."""
        return asdict(self) | {
            "nats_per_token": self.nats_per_token,
            "bits_per_token": self.bits_per_token,
        }


def sliding_window(
    subject: Subject,
    tokens: Int[Tensor, "batch length"],
    window: int,
    *,
    stride: int = 256,
    first: int = 1,
    weights: Literal["tokens", "windows"] = "tokens",
) -> Perplexity:
    """Windows that move on by a stride; of each, only tokens that none before it had are targets.

    The first window scores all its tokens, so early ones have little context: to compare windows
    of different lengths, let ``first`` be the longest.

    Args:
        tokens: texts of one length.
        window: the most tokens that the model sees at once.
        first: the first token that counts, from 1 on.
        weights: ``tokens`` weighs all targets alike; ``windows`` takes the mean of the windows'
            means, as YaRN's evaluation does (arXiv:2309.00071, sec. 4.3.1, in its code).

    Raises: ValueError for a window, stride or first token that leave nothing, or leave some out.

    >>> subject = mmpos.evaluation.CallableSubject(lambda x: torch.zeros(*x.shape, 8), 8, 100)
    >>> found = sliding_window(subject, torch.arange(40).view(1, -1) % 8, 16, stride=8)
    >>> round(found.bits_per_token, 5), found.tokens
    (3.0, 39)
    """
    length = tokens.shape[-1]
    if window < 2 or not 1 <= stride < window or not 1 <= first < length:
        raise ValueError(
            "a window has 2 or more tokens, a stride from 1 to below the window, first from 1 to "
            f"below {length} tokens, got {window=}, {stride=}, {first=}"
        )
    if weights not in ("tokens", "windows"):
        raise ValueError(f"weights is 'tokens' or 'windows', got {weights!r}")
    total, count, means, seen = 0.0, 0, [], first
    for start in range(0, length, stride):
        end = min(start + window, length)
        if end > seen:
            own = max(seen, start + 1)
            nats = subject.nll(tokens[:, start:end])[:, own - start - 1 :].double()
            total += float(nats.sum())
            count += nats.numel()
            means += nats.mean(-1).tolist()
            seen = end
        if end == length:
            break
    if weights == "windows":
        total = count * math.fsum(means) / len(means)
    return Perplexity(f"sliding window, {weights} alike", window, total, count, len(means))


def last_k(
    subject: Subject,
    tokens: Int[Tensor, "batch length"],
    lengths: Sequence[int],
    *,
    k: int = 256,
    name: str = "last tokens",
) -> list[Perplexity]:
    """The last ``k`` tokens of each text, the same for all lengths, with what is before them.

    A context of N is the last N tokens, targets included. Lower at a longer length means that the
    model uses what is far; the same says nothing (DAPE, arXiv:2405.14722, sec. 4).
    Raises: ValueError for a length that the texts do not have, or without context for the targets.

    >>> subject = mmpos.evaluation.CallableSubject(lambda x: torch.zeros(*x.shape, 8), 8, 100)
    >>> found = last_k(subject, torch.arange(80).view(2, -1) % 8, [16, 40], k=8)
    >>> [(each.length, each.tokens, round(each.bits_per_token, 5)) for each in found]
    [(16, 16, 3.0), (40, 16, 3.0)]
    """
    have = tokens.shape[-1]
    if k < 1 or not lengths or min(lengths) <= k or max(lengths) > have:
        raise ValueError(
            f"lengths are above the {k} targets and at most the {have} tokens of the texts, got "
            f"{list(lengths)}"
        )
    found = []
    for length in lengths:
        nats = torch.stack([subject.nll(text[None, -length:])[0, -k:] for text in tokens]).double()
        found.append(Perplexity(name, length, float(nats.sum()), nats.numel(), len(tokens)))
    return found


def control(
    subject: Subject,
    tokens: Int[Tensor, "batch length"],
    lengths: Sequence[int],
    *,
    trained: int,
    k: int = 256,
) -> list[Perplexity] | None:
    """As `last_k`, where no token sees farther than the trained length; None if it cannot be.

    A model that is no better without the control does not use the longer context.
    """
    seen = subject.windowed(trained)
    if seen is None:
        return None
    return last_k(seen, tokens, lengths, k=k, name=f"last tokens, window {trained}")


def non_overlapping(
    subject: Subject, tokens: Int[Tensor, "batch length"], length: int
) -> Perplexity:
    """Pieces of one length, each by itself.

    Cheap, and worse than the model is: the early tokens of each piece have little context (the
    early token curse; ALiBi, arXiv:2108.12409, appendix B). It falls with the length for any model.
    Raises: ValueError for a length below 2, or above that of the texts.

    >>> subject = mmpos.evaluation.CallableSubject(lambda x: torch.zeros(*x.shape, 8), 8, 100)
    >>> non_overlapping(subject, torch.arange(40).view(1, -1) % 8, 16).tokens
    30
    """
    have = tokens.shape[-1]
    if not 2 <= length <= have:
        raise ValueError(f"a piece has 2 to {have} tokens, got {length}")
    pieces = tokens[:, : have - have % length].reshape(-1, length)
    total = math.fsum(float(subject.nll(piece[None]).double().sum()) for piece in pieces)
    count = len(pieces) * (length - 1)
    return Perplexity("non-overlapping, early token curse", length, total, count, len(pieces))


def by_context(
    subject: Subject,
    tokens: Int[Tensor, "batch length"],
    lengths: Sequence[int],
    trained: int,
    targets: int = 256,
    stride: int = 256,
) -> list[Perplexity]:
    """All ways, at those lengths that the texts have: `last_k`, its `control`, and windows.

    Args:
        trained: the length of training, of which the windows are.
        targets, stride: at most half the trained length is taken.
    """
    k, stride = (max(1, min(each, trained // 2)) for each in (targets, stride))
    have = tokens.shape[-1]
    fit = [length for length in lengths if k < length <= have]
    if not fit:
        return []
    found = last_k(subject, tokens, fit, k=k)
    found += control(subject, tokens, fit, trained=trained, k=k) or []
    if 2 <= trained <= min(have, max(lengths)):
        for weights in ("tokens", "windows"):
            found.append(sliding_window(subject, tokens, trained, stride=stride, weights=weights))
        found.append(non_overlapping(subject, tokens, trained))
    return found
