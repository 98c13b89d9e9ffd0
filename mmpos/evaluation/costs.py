"""Time and memory: training, prefill, decoding, the cache."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from mmpos.evaluation.judging import told
from mmpos.evaluation.subjects import Subject


@dataclass(frozen=True)
class Cost:
    """What one sequence of a length costs; seconds are medians, None is what could not be had."""

    length: int
    prefill_seconds: float
    """To the first new token."""
    prefill_tokens_per_second: float
    decode_ms_per_token: float
    cached: bool
    """Whether tokens are decoded with a cache, or by a pass over all for each."""
    peak_bytes: int
    peak_of: str
    """Of what: the process so far, on the CPU; the allocator for this length, on CUDA."""
    kv_measured: int | None
    kv_reserved: int | None
    """Of the whole storages that the cache keeps alive."""
    kv_formula: int | None
    train_tokens_per_second: float | None = None
    """Forward and backward, without an optimizer."""
    error: str = ""
    """What kept training from being measured, such as too little memory."""


def costs_of(
    subject: Subject,
    lengths: Sequence[int],
    *,
    repeats: int = 5,
    warm_up: int = 1,
    decoded: int = 16,
    train: bool = True,
    train_batch: int = 1,
    seed: int = 0,
) -> list[Cost]:
    """What each length costs, with random tokens.

    Args:
        repeats: measurements of which the median is taken.
        warm_up: measurements before them that are thrown away.
        decoded: tokens that are decoded after each prefill.
        train: whether to measure training too, where the subject has weights with gradients.
        train_batch: sequences of a training step.
        seed: of the tokens.

    Raises: ValueError for numbers below 1, or below 0 for warm_up.

    >>> subject = mmpos.evaluation.CallableSubject(torch.nn.Embedding(8, 8), 8, 100)
    >>> [cost] = costs_of(subject, [16], repeats=1, decoded=2)
    >>> cost.cached, cost.train_tokens_per_second > 0
    (False, True)
    """
    if min(repeats, decoded, train_batch, *lengths) < 1 or warm_up < 0:
        raise ValueError(
            "lengths, repeats, decoded and train_batch are 1 or more and warm_up 0 or more, got "
            f"{list(lengths)}, {repeats}, {decoded}, {train_batch}, {warm_up}"
        )
    return [
        _cost(subject, length, repeats, warm_up, decoded, train_batch if train else 0, seed)
        for length in lengths
    ]


def peak_bytes(device: torch.device) -> tuple[int, str]:
    """The most memory that was in use, and of what."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "CUDA allocator"
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024), "process so far"


def _cost(
    subject: Subject,
    length: int,
    repeats: int,
    warm_up: int,
    decoded: int,
    train_batch: int,
    seed: int,
) -> Cost:
    device = subject.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    draw = torch.Generator().manual_seed(seed)
    rows = max(1, train_batch)
    tokens = torch.randint(subject.vocabulary, (rows, length), generator=draw).to(device)
    prefills, decodes = [], []
    for _ in range(warm_up + repeats):
        first, others = _generation(subject, tokens[:1], decoded)
        prefills.append(first)
        decodes.append(others / decoded)
    prefill, decode = median(prefills[warm_up:]), median(decodes[warm_up:])
    held = subject.kv_held(length)
    trained, error = None, ""
    if train_batch and length > 1:
        try:
            steps = [_training(subject, tokens) for _ in range(warm_up + repeats)]
        except (RuntimeError, MemoryError) as raised:
            steps, error = [], told(raised)
        known = [step for step in steps[warm_up:] if step is not None]
        trained = tokens.numel() / median(known) if known else None
    peak, of = peak_bytes(device)
    return Cost(
        length=length,
        prefill_seconds=prefill,
        prefill_tokens_per_second=length / prefill,
        decode_ms_per_token=1e3 * decode,
        cached=held is not None,
        peak_bytes=peak,
        peak_of=of,
        kv_measured=None if held is None else held[0],
        kv_reserved=None if held is None else held[1],
        kv_formula=subject.kv_bytes(length),
        train_tokens_per_second=trained,
        error=error,
    )


def _generation(subject: Subject, tokens: Tensor, decoded: int) -> tuple[float, float]:
    """Seconds of the first new token, and of all after it."""
    begin = _now(tokens.device)
    steps = subject.steps(tokens, decoded + 1)
    next(steps)
    middle = _now(tokens.device)
    for _ in steps:
        pass
    return middle - begin, _now(tokens.device) - middle


def _training(subject: Subject, tokens: Tensor) -> float | None:
    """Seconds of a loss and its gradients, which are thrown away; None where there are none."""
    weights = [each for each in subject.weights() if each.requires_grad]
    if not weights:
        return None
    devices = [tokens.device] if tokens.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        begin = _now(tokens.device)
        loss = subject.loss(tokens)
        if loss is None:
            return None
        torch.autograd.grad(loss, weights, allow_unused=True)
        return _now(tokens.device) - begin


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
