"""Trained models that differ in their encoding alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmpos.evaluation import fingerprint
from mmpos.evaluation.results import Results


@dataclass(frozen=True)
class Run:
    """A trained model: its settings, its parameters, and what is known of how good it is.

    Args:
        name: its folder.
        config: the settings of the command, as ``config.yaml`` has them.
        parameters: how many numbers it has learned; None if that is not known.
        metrics: of the test at the trained length, by name.
        environment: versions, device and commit; none if they are not known.
        results: of long contexts.
    """

    name: str
    config: Mapping[str, Any]
    parameters: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    results: Results | None = None

    @property
    def seed(self) -> str:
        """The seed of the weights, and that of the data where it is another."""
        return fingerprint.seed(self.config)


Groups = Mapping[str, Mapping[str, Run]]
"""Runs by the name of their encoding and by their seed."""


def grouped(runs: Sequence[Run]) -> dict[str, dict[str, Run]]:
    """The runs by encoding and seed.

    Raises: ValueError for runs that differ in more than the encoding, for one encoding alone, for
    two runs of the same encoding and seed, and where no seed was run with every encoding.
    """
    encodings: list[fingerprint.Leaves] = []
    groups: list[dict[str, Run]] = []
    for run in runs:
        if (found := fingerprint.difference(runs[0].config, run.config)) is not None:
            raise ValueError(
                f"{runs[0].name} and {run.name} differ in {found}: an ablation changes the "
                "encoding alone"
            )
        encoding = fingerprint.encoding(run.config)
        if encoding not in encodings:
            encodings.append(encoding)
            groups.append({})
        own = groups[encodings.index(encoding)]
        if run.seed in own:
            raise ValueError(
                f"{own[run.seed].name} and {run.name} are the same encoding with the same seed, "
                f"{run.seed}: give one of them"
            )
        own[run.seed] = run
    names = fingerprint.labels(encodings)
    if len(names) < 2:
        said = f"all runs have one encoding, {names[0]}" if names else "there are no runs"
        raise ValueError(f"{said}: give runs of two encodings or more")
    out = {
        name: {seed: own[seed] for seed in _sorted(own)}
        for name, own in zip(names, groups, strict=True)
    }
    if not shared(out):
        seeds = "; ".join(f"{name}: {', '.join(own)}" for name, own in out.items())
        raise ValueError(f"no seed was run with every encoding ({seeds}): train with the same")
    return out


def shared(groups: Groups) -> list[str]:
    """The seeds that every encoding was run with."""
    return _sorted(set.intersection(*(set(own) for own in groups.values())))


def _sorted(seeds: Iterable[str]) -> list[str]:
    return sorted(seeds, key=lambda seed: (len(seed), seed))
