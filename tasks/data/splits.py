"""Which images train, validate and test."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SPLITS = ("train", "val", "test")


def hold_out(targets: np.ndarray, splits: list[str], seed: int) -> dict[str, np.ndarray]:
    """Indices of "train" and of each of ``splits``: a tenth of every class, at least one image."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("train", *splits)}
    generator = np.random.default_rng(seed)
    for label in np.unique(targets):
        members = generator.permutation(np.flatnonzero(targets == label))
        share = max(1, round(len(members) / 10))
        if len(members) <= share * len(splits):
            raise ValueError(
                f"a class with {len(members)} images is too small to hold out "
                f"{' and '.join(splits)}; give it {1 + share * len(splits)} or make folders "
                "train, val and test"
            )
        for place, name in enumerate(splits):
            parts[name].append(members[place * share : (place + 1) * share])
        parts["train"].append(members[len(splits) * share :])
    return {name: np.sort(np.concatenate(part)) for name, part in parts.items()}


def completed(
    splits: Mapping[str, list[Any]],
    labels: Sequence[int],
    classes: Sequence[str],
    seed: int,
    what: str,
) -> dict[str, list[Any]]:
    """All three splits: each that is absent has a tenth of the training items of every class, at
    least one, chosen by ``seed``. ``labels`` are the training items' classes.

    Raises: ValueError for a class with too few of ``what`` it is.
    """
    absent = [split for split in SPLITS if split not in splits]
    targets = np.array(labels, dtype=int)
    for name, count in zip(classes, np.bincount(targets, minlength=len(classes)), strict=True):
        if count <= len(absent):
            why = f", to hold out {' and '.join(absent)}: give more, or such splits"
            raise ValueError(
                f"train has {count} {what} of {name}, expected {1 + len(absent)} or more"
                f"{why if absent else ''}"
            )
    held = hold_out(targets, absent, seed)
    all_three = {**splits, **{s: [splits["train"][i] for i in own] for s, own in held.items()}}
    return {split: all_three[split] for split in SPLITS}


def balanced(targets: np.ndarray, indices: np.ndarray, count: int, seed: int) -> np.ndarray:
    """``count`` of ``indices``, class counts as equal as can be."""
    classes = len(np.unique(targets))
    if not classes <= count <= len(indices):
        raise ValueError(
            f"train_samples is {count}; expected {classes} (one a class) to {len(indices)}"
        )
    shuffled = np.random.default_rng(seed).permutation(indices)
    rank = np.empty(len(shuffled), dtype=np.int64)
    for label in np.unique(targets):
        members = targets[shuffled] == label
        rank[members] = np.arange(members.sum())
    return np.sort(shuffled[np.argsort(rank, kind="stable")[:count]])
