"""For contexts beyond the rows that are trained on: positions of longer ones, and RoPE left off.

What a step uses follows from the seed and the step alone, as all that is drawn in training does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Int
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from mmpos.frequencies import base_bound, base_of
from mmpos.models import Transformer
from mmpos.positions import axis_count
from mmpos.rotary import RotaryEncoding
from tasks.base import Task


class _Longer(Callback, ABC):
    """In training, gives the tokens of a row positions of a row of ``length`` tokens."""

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ValueError(f"length is the context to train for, 1 token or more, got {length}")
        self.length = length

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take part in each batch of a task.

        Raises: TypeError for another module than a task of `tasks`.
        """
        if stage != "fit":
            return
        if not isinstance(pl_module, Task):
            raise TypeError(
                f"{type(self).__name__} needs a tasks.Task, got {type(pl_module).__name__}"
            )
        warn_of_bases(pl_module, self.length)
        if self._change not in pl_module.batch_changes:  # as after a run that an error ended
            pl_module.batch_changes.append(self._change)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the task as it was."""
        if isinstance(pl_module, Task) and self._change in pl_module.batch_changes:
            pl_module.batch_changes.remove(self._change)

    def _change(self, batch: Any) -> Any:
        positions = batch["positions"] if isinstance(batch, dict) else None
        if not isinstance(positions, Tensor) or positions.ndim != 3 or positions.shape[-1] != 1:
            raise ValueError(
                f"{type(self).__name__} is for batches with positions [batch, length, 1], such as "
                "those of tasks.data.Text"
            )
        rows, context = positions.shape[:2]
        if context > self.length:
            raise ValueError(
                f"{type(self).__name__} trains rows of {context} tokens for contexts of length="
                f"{self.length}: give a length above {context}"
            )
        given = positions.squeeze(-1)
        if given.is_floating_point() or int(given.max()) >= context:
            raise ValueError(
                f"{type(self).__name__} reads positions as indices from 0 in each row, got one of "
                f"{given.max()} in a row of {context}"
            )
        drawn = self.draw(rows, context, positions.device)
        return {**batch, "positions": drawn.gather(-1, given).unsqueeze(-1)}

    @abstractmethod
    def draw(self, rows: int, context: int, device: torch.device) -> Int[Tensor, "rows context"]:
        """What stands for the positions 0 … ``context - 1`` of each row: rising, below length."""


class SkipPositions(_Longer):
    """Rows of a short context have positions of a long one: chunks with gaps between them.

    A row is cut into chunks at random places, and each begins a random number of positions after
    the end of the one before, so that all of ``length`` is met: the context then costs no more
    memory than the rows. Documents of a row are read at the same chunks, each from its start.

    The first chunk skips nothing, each other one ``u[i]`` positions in all, uniform over ``u[i - 1]
    … length - context``: of many chunks the later ones lie close together at the end.

    Source: PoSE (arXiv:2309.10400, sec. 3.2), positions only: the text of a row stays in one piece.

    Args:
        length: the context to train for, in tokens.
        chunks: of a row.

    Raises: ValueError for a length or number of chunks below 1; in training for rows that are
    longer, have fewer tokens than chunks, or come without positions that count.
    """

    def __init__(self, length: int, chunks: int = 2) -> None:
        super().__init__(length)
        if chunks < 1:
            raise ValueError(f"chunks must be 1 or more, got {chunks}")
        self.chunks = chunks

    def draw(self, rows: int, context: int, device: torch.device) -> Int[Tensor, "rows context"]:
        if context < self.chunks:
            raise ValueError(f"rows of {context} tokens cannot be cut into {self.chunks} chunks")
        inner = torch.rand(rows, context - 1, device=device).argsort(-1)[:, : self.chunks - 1] + 1
        left = torch.full((rows, 1), self.length - context, device=device)
        jumps = torch.zeros(rows, context, dtype=torch.long, device=device)
        for begin in inner.sort(-1).values.split(1, dim=-1):
            gap = (torch.rand(rows, 1, device=device) * (left + 1)).long().minimum(left)
            jumps.scatter_(-1, begin, gap)
            left = left - gap
        return torch.arange(context, device=device) + jumps.cumsum(-1)


class RandomPositions(_Longer):
    """Rows of a short context have positions drawn from a long one, without repetition, in order.

    Source: Randomized positional encodings (arXiv:2305.16843, sec. 3). Test at positions from 0
    on, as usual.

    Args:
        length: the context to train for, in tokens.

    Raises: ValueError for a length below 1; in training for rows that are longer, or come without
    positions that count.
    """

    def draw(self, rows: int, context: int, device: torch.device) -> Int[Tensor, "rows context"]:
        chosen = torch.rand(rows, self.length, device=device).argsort(-1)[:, :context]
        return chosen.sort(-1).values


class DropRotary(Callback):
    """Leaves RoPE off from a fraction of the run's steps on, to finish without positions.

    Checkpoints record the model as it is: those from then on have no rotary encoding.

    Source: DroPE (arXiv:2512.12167), which does so at the end of pre-training and then trains a
    little more, for contexts that RoPE does not reach. Additive encodings and biases stay.

    Args:
        at: the fraction of all steps after which it is left off.

    Raises: ValueError for a fraction that is not above 0 and below 1, and before training for a
    model without RoPE, or with one that has parameters.
    """

    def __init__(self, at: float = 0.9) -> None:
        if not 0 < at < 1:
            raise ValueError(f"at is a fraction of all steps between 0 and 1, got {at}")
        self.at = at
        self.dropped = False
        self._kept: list[tuple[Transformer, nn.Module | None, list[int | None]]] = []
        self._recorded: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find what to leave off."""
        if self._kept and self._kept[0][0] in set(pl_module.modules()):
            return
        self._kept, self.dropped = [], False
        for part in pl_module.modules():
            if isinstance(part, Transformer) and part.rotary is not None:
                if stage == "fit" and any(True for _ in part.rotary.parameters()):
                    raise ValueError("DropRotary is for RoPE without parameters of its own")
                self._kept.append((part, part.rotary, part.rotary_of))
        self._recorded = {"extension": pl_module.hparams.get("extension"), **_settings(pl_module)}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise for a model without RoPE, unless it is resumed after RoPE was left off."""
        if not self._kept and not self.dropped:
            raise ValueError(
                "DropRotary has nothing to leave off: the model has no rotary encoding"
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Leave RoPE off when its time has come."""
        late = trainer.global_step >= self.at * trainer.estimated_stepping_batches
        if late and not self.dropped:
            rank_zero_info(f"RoPE is left off from step {trainer.global_step} on")
            self._set(pl_module, True)

    def state_dict(self) -> dict[str, Any]:
        """Whether it is left off."""
        return {"dropped": self.dropped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """That of the checkpoint; the model follows as it is loaded."""
        self.dropped = state_dict["dropped"]

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Give the model RoPE, or leave it off, as the checkpoint had it."""
        own = checkpoint.get("callbacks", {}).get(self.state_key)
        if own is not None:
            self._set(pl_module, own["dropped"])

    def _set(self, module: LightningModule, dropped: bool) -> None:
        self.dropped = dropped
        for transformer, rotary, rotary_of in self._kept:
            nowhere: list[int | None] = [None] * len(rotary_of)
            transformer.rotary = None if dropped else rotary
            transformer.rotary_of = nowhere if dropped else rotary_of
        layers = [name for name in self._recorded.get("per_layer") or () if name != "rotary"]
        own = {"rotary": None, "per_layer": layers, "extension": None}
        now = self._recorded | own if dropped else self._recorded
        for settings, names in ((_settings(module), own), (module.hparams, ["extension"])):
            settings.update({name: now[name] for name in names if name in settings})


def _settings(module: LightningModule) -> dict[str, Any]:
    """The transformer's arguments as checkpoints record them; none for one made in Python."""
    recorded = module.hparams.get("transformer")
    return recorded.get("init_args", {}) if isinstance(recorded, dict) else {}


def warn_of_bases(module: nn.Module, length: int) -> None:
    """Warn where the spectrum of a rotary encoding is known not to reach as far as it is used in
    ``length`` tokens (`base_bound`): where all its layers have a window, over the largest.
    """
    reaches = _reaches(module, length)
    for part in module.modules():
        if not isinstance(part, RotaryEncoding) or axis_count(part.axes) != 1 or part.pairs[0] < 2:
            continue
        reach = reaches.get(part, length)
        spectrum = part.frequencies(torch.float64, torch.device("cpu"), length)
        base, least = base_of(spectrum.flatten().tolist()), base_bound(reach)
        if base < least:
            own = part._bases()[0]
            as_if = "" if part.extension is None else f", extended as if {base:.3g}"
            rank_zero_warn(
                f"RoPE with base {own:g}{as_if}: contexts of {reach} tokens are known to "
                f"need {least:.2g} or more, below which far tokens are not found "
                "(arXiv:2405.14591); give a larger base, or extend more"
            )
            return


def _reaches(module: nn.Module, length: int) -> dict[nn.Module, int]:
    """How far tokens see with each rotary encoding of the transformers in ``module``."""
    found: dict[nn.Module, int] = {}
    for part in module.modules():
        if not isinstance(part, Transformer) or part.rotary is None:
            continue
        own = list(part.rotary) if isinstance(part.rotary, nn.ModuleList) else [part.rotary]
        for index, window in zip(part.rotary_of, part.windows, strict=True):
            if index is not None:
                reach = length if window is None else min(window, length)
                found[own[index]] = max(reach, found.get(own[index], 0))
    return found
