from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Self

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from mmpos import __version__
from tasks.averages import Averages
from tasks.optim import (
    POSITIONS,
    WarmupCosine,
    adamw,
    freeze,
    parameter_groups,
    regroup,
    resize_moments,
)
from tasks.resuming import (
    Shares,
    finish_epoch,
    open_batches,
    rescale,
    rewind,
    validate_first,
)
from tasks.sharding import gather, materialize, shard
from tasks.weights import load_weights


class Task(L.LightningModule):
    """What all tasks share: AdamW with warm-up and cosine by step, starting weights, averaging.

    A subclass sets ``self.network``, the plain module that it trains.

    Args:
        lr: the highest learning rate, after the warm-up.
        weight_decay: of weight matrices; positions, norms and biases are not decayed.
        warmup: the fraction of all steps over which the rate rises.
        weights: file to start from (a checkpoint of a task, a state dict, safetensors); unlike
            resuming from a checkpoint, optimizer and step count start anew.
        leave_out: parts of the network that do not take the starting weights, by the beginning of
            their names, such as ``heads`` for other classes.
        ema: decay of an exponential moving average of the weights, which is what is validated
            and saved; none by default.
        layer_decay: each layer learns at so many times the rate of the one above it, the heads at
            ``lr`` (see `tasks.optim.parameter_groups`); all at ``lr`` by default.
        freeze: parts of the network that are not trained, by the beginnings of their parameters'
            names up to a dot, such as ``tokens`` or ``transformer.layers.0``; a module that is
            frozen whole stays in evaluation mode.
    """

    network: nn.Module

    def __init__(
        self,
        *,
        lr: float,
        weight_decay: float,
        warmup: float,
        weights: str | PathLike | None,
        leave_out: Sequence[str],
        ema: float | None,
        layer_decay: float | None,
        freeze: Sequence[str],
    ) -> None:
        super().__init__()
        if ema is not None and not 0 < ema < 1:
            raise ValueError(f"ema is a decay between 0 and 1, such as 0.999, got {ema}")
        if not (0 <= lr < math.inf and 0 <= weight_decay < math.inf):
            raise ValueError(
                f"lr and weight_decay must be 0 or more and finite, got {lr} and {weight_decay}"
            )
        if layer_decay is not None and not 0 < layer_decay <= 1:
            raise ValueError(
                f"layer_decay is a factor above 0 and up to 1, such as 0.75, got {layer_decay}"
            )
        self.lr, self.weight_decay, self.warmup, self.ema = lr, weight_decay, warmup, ema
        self.batch_changes: list[Callable[[Any], Any]] = []
        self._start = weights
        self.leave_out = leave_out
        self.layer_decay, self.frozen = layer_decay, freeze
        self._resting: list[nn.Module] = []
        self._of_process: int | None = None
        self.seed: int | None = None
        """Of the noise of steps; by default the process's, or that of a run that is resumed."""

    def setup(self, stage: str) -> None:
        """Load the starting weights, once; freeze.

        A checkpoint that the trainer is given replaces them after this, and a task of
        `load_from_checkpoint` has its own. This comes before DistributedDataParallel takes the
        parameters whose gradients it shares. Lightning's `BackboneFinetuning` thaws others later,
        which then differ between processes.
        """
        if self._start is not None:
            materialize(self.network, torch.device("cpu"))
            rank_zero_info(load_weights(self.network, self._start, self.leave_out))
        self._start = None
        if stage == "fit":
            self._at_rest = freeze(self.network, self.frozen)

    def configure_model(self) -> None:
        """Divide the network among processes, if the strategy does (`tasks.sharding.shard`)."""
        shard(self)

    def on_fit_start(self) -> None:
        """Metrics start anew: those that an earlier validation reset are inference tensors."""
        for module in self.modules():
            if isinstance(module, Metric):
                module.reset()
        self._of_process = torch.initial_seed()

    def on_train_start(self) -> None:
        """Let what is frozen whole rest: after Lightning's warning of modules that do. Go on with a
        validation that was due when a run was saved.
        """
        validate_first(self.trainer)
        if self.seed is None:
            self.seed = self._of_process if self._of_process is not None else torch.initial_seed()
        self._resting = self._at_rest
        for module in self._resting:
            module.eval()

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules but those that are frozen whole."""
        super().train(mode)
        for module in self._resting:
            module.eval()
        return self

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed the noise of this step (dropped paths, disturbed coordinates).

        It follows from the run's seed, the step, its batch and the process, so that processes
        differ and a resumed run goes on as if it had not stopped.
        """
        step = self.trainer.global_step
        torch.manual_seed(hash((self.seed, step, batch_idx, self.global_rank)))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients, of 0 for what a step does not use of the encodings, so that it takes
        part in all processes (`DistributedDataParallel` would wait for it).

        Raises: FloatingPointError for a loss that is not finite in one of the processes, before its
        gradients reach the weights; looked for in each step on the CPU, elsewhere as often as the
        trainer logs, since looking costs a wait.
        """
        for part in self.network.modules():
            if isinstance(part, POSITIONS):
                for parameter in part.parameters():
                    if parameter.requires_grad and not isinstance(parameter, DTensor):
                        loss = loss + parameter[:0].sum()
        super().backward(loss, *args, **kwargs)
        log_every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        every = 1 if self.device.type == "cpu" else max(1, log_every)
        if self.trainer.global_step % every == 0:
            total = loss.detach().clone()
            if self.trainer.world_size > 1:
                distributed.all_reduce(total)
            if not torch.isfinite(total):
                raise FloatingPointError(
                    f"the loss is {float(total)} in step {self.trainer.global_step} of epoch "
                    f"{self.current_epoch}: lower --model.lr, clip gradients "
                    "(--trainer.gradient_clip_val 1), or look where it begins "
                    "(--trainer.detect_anomaly true)"
                )

    def on_validation_epoch_start(self) -> None:
        """Gather a network that is divided: processes have other numbers of batches now."""
        gather(self.network, whole=True)

    def on_validation_epoch_end(self) -> None:
        """Divide it again."""
        gather(self.network, whole=False)

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def log_loss(self, loss: Tensor) -> None:
        """Log ``train/loss``: the mean of all processes when the trainer writes it down; in between
        it is only shown, and the own one, since for the mean they wait for one another.
        """
        loss = loss.detach().clone()
        if self._trainer is not None and self.trainer._logger_connector.should_update_logs:
            loss = self.trainer.strategy.reduce(loss, reduce_op="mean")
        self.log("train/loss", loss, prog_bar=True, batch_size=1)

    def changed(self, batch: Any) -> Any:
        """A training batch as callbacks want it; for a subclass to call in its training step."""
        for change in self.batch_changes:
            batch = change(batch)
        return batch

    def configure_optimizers(self) -> Any:
        steps = self.trainer.estimated_stepping_batches
        if not math.isfinite(steps):
            raise ValueError(
                "the learning rate falls over a known number of steps: "
                "pass --trainer.max_epochs or --trainer.max_steps"
            )
        optimizer = adamw(self, self.lr, self.weight_decay, self.layer_decay)
        scheduler = WarmupCosine(optimizer, int(steps), self.warmup)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if isinstance(scheduler, WarmupCosine):
            scheduler.step_update(self.global_step)
        else:  # of a callback, such as StochasticWeightAveraging
            super().lr_scheduler_step(scheduler, metric)

    def configure_callbacks(self) -> list[Callback]:
        if self.ema is None or self.trainer.state.fn != TrainerFn.FITTING:
            return []
        return [Averages(self.ema)]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Let a resumed run decay weights and rates and freeze as it is told to now, not as it was
        then, and take the optimizer's moments to the grid of this model, as its tables will be.

        The starting weights are not loaded over those of a checkpoint. Within an epoch, the run
        goes on with the samples that would have come next, also with other numbers of processes and
        samples (`tasks.resuming.rescale`).
        """
        self._start = None
        if self._trainer is not None and self.trainer.precision == "64-true":
            self.double()  # before its weights are loaded, which would be rounded
        if self.seed is None:
            self.seed = checkpoint.get("mmpos_noise")
        if self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            rewind(checkpoint)
            shares = Shares.of(self.trainer)
            rescale(checkpoint, shares)
            if shares.samples is not None:  # loaders that end where a resumed epoch does
                finish_epoch(checkpoint)
        for state in checkpoint.get("optimizer_states", []):
            regroup(state, parameter_groups(self, self.weight_decay, self.layer_decay))
            resize_moments(self, state, checkpoint.get("state_dict", {}))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record the version of mmpos that wrote the checkpoint, the seed of noise, and how many
        samples a batch of all processes has.

        Raises: FloatingPointError for weights that are not finite: those saved before are kept.
        """
        for name, weight in self.network.named_parameters():
            if not torch.isfinite(weight).all():
                raise FloatingPointError(
                    f"{name} is not finite any more, and is not saved: see the losses of the steps "
                    "before, lower --model.lr, or clip gradients (--trainer.gradient_clip_val 1)"
                )
        checkpoint["mmpos_version"] = __version__
        checkpoint["mmpos_noise"] = self.seed
        checkpoint["mmpos_shares"] = Shares.of(self.trainer)._asdict()
        checkpoint["mmpos_open"] = open_batches(self.trainer)
