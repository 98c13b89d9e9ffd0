"""Which images train, validate and test."""

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
