"""Train the image job with every encoding and several seeds, beside logistic regression on pixels.

    python scripts/compare_encodings.py --seeds 0 1 2

Each run is ``mmpos fit --config image --config encoding/NAME`` in a process of its own; options
that the script does not know are passed on to it. Writes ``runs.csv`` with a row for each run and
prints the table of the README: mean test accuracy with the lowest and highest seed, CPU-seconds.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy

from tasks.data import Images

ENCODINGS = ("none", "sinusoidal", "learned", "rope", "alibi")
BASELINE = "logistic regression"
Row = dict[str, str | float]


def train(model: str, seed: int, folder: Path, options: Sequence[str]) -> Row:
    """One run of ``mmpos fit`` with options; its test results and the CPU-seconds of its process.

    It goes to ``folder / "MODEL-SEED"``.
    """
    name = f"{model}-{seed}"
    command = [sys.executable, "-m", "mmpos", "fit", *options, f"--seed_everything={seed}"]
    command += [f"--data.seed={seed}", f"--trainer.logger.save_dir={folder}"]
    command += [f"--trainer.logger.name={name}"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed: see {folder / name}.log")
    latest = max(
        (folder / name).glob("version_*/metrics.csv"), key=lambda path: path.stat().st_mtime
    )
    with latest.open() as file:
        last = [row for row in csv.DictReader(file) if row.get("test/loss")][-1]
    found = {
        key.removeprefix("test/").removesuffix("_accuracy"): float(value)
        for key, value in last.items()
        if key.startswith("test/") and value
    }
    return {"model": model, "seed": seed, "cpu": usage.ru_utime + usage.ru_stime, **found}


def train_all(
    models: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    folder: Path,
    jobs: int,
    options: Sequence[str],
) -> list[Path]:
    """Train each model, by its options and those of all, with each seed; their best checkpoints.

    What is trained is left as it is. Adds a row for each new run to ``runs.csv``.
    """

    def one(model: str, seed: int) -> tuple[Path, Row]:
        known = sorted((folder / f"{model}-{seed}").glob("version_*/checkpoints/best.ckpt"))
        if known:
            return known[-1], {}
        row = train(model, seed, folder, [*models[model], *options])
        (best,) = (folder / f"{model}-{seed}").glob("version_*/checkpoints/best.ckpt")
        return best, row

    with ThreadPoolExecutor(jobs) as pool:
        runs = [pool.submit(one, model, seed) for seed in seeds for model in models]
        done = [run.result() for run in runs]
    rows = [row for _, row in done if row]
    if rows:
        with (folder / "runs.csv").open("a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            if not file.tell():
                writer.writeheader()
            writer.writerows(rows)
    return [path for path, _ in done]


def regress(seed: int, epochs: int) -> Row:
    """Multinomial logistic regression on the pixels of the same scenes, by Adam."""
    begun = time.process_time()
    torch.manual_seed(seed)
    data = Images(seed=seed)
    data.setup("fit")
    data.setup("test")
    pixels = data.image_size[0] * data.image_size[1]
    heads = {question: torch.nn.Linear(pixels, len(a)) for question, a in data.classes.items()}
    optimizer = torch.optim.Adam([p for head in heads.values() for p in head.parameters()], lr=1e-3)
    loader = data.train_dataloader()
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for images, labels in loader:
            flat = images.flatten(1)
            loss = sum(cross_entropy(head(flat), labels[q]) for q, head in heads.items())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[union-attr]
            optimizer.step()
    right = dict.fromkeys(heads, 0)
    count = 0
    with torch.no_grad():
        for images, labels in data.test_dataloader():
            count += len(images)
            for question, head in heads.items():
                right[question] += int(
                    (head(images.flatten(1)).argmax(-1) == labels[question]).sum()
                )
    found = {question: hits / count for question, hits in right.items()}
    return {"model": BASELINE, "seed": seed, "cpu": time.process_time() - begun, **found}


def table(rows: Sequence[Row]) -> Table:
    """Mean, lowest and highest seed of each encoding."""
    out = Table("encoding", "what, %", "where, %", "CPU-seconds")
    for encoding in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == encoding]
        cells = []
        for question in ("what", "where"):
            values = [100 * float(row[question]) for row in own]
            cells.append(f"{mean(values):.1f} ({min(values):.1f}–{max(values):.1f})")
        out.add_row(str(encoding), *cells, f"{mean(float(row['cpu']) for row in own):.0f}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare encodings on the image job.")
    parser.add_argument("--encodings", nargs="+", default=ENCODINGS, choices=ENCODINGS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/compare"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--baseline-epochs", type=int, default=30)
    chosen, options = parser.parse_known_args()
    with ThreadPoolExecutor(chosen.jobs) as pool:
        runs = [
            pool.submit(
                train,
                encoding,
                seed,
                chosen.folder,
                ["--config", "image", "--config", f"encoding/{encoding}", *options],
            )
            for encoding in chosen.encodings
            for seed in chosen.seeds
        ]
        rows = [run.result() for run in runs]
    rows += [regress(seed, chosen.baseline_epochs) for seed in chosen.seeds]
    with (chosen.folder / "runs.csv").open("w", newline="") as file:
        columns = dict.fromkeys(key for row in rows for key in row)
        writer = csv.DictWriter(file, fieldnames=list(columns))
        writer.writeheader()
        writer.writerows(rows)
    Console().print(table(rows))


if __name__ == "__main__":
    main()
