from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, NotRequired, TypedDict, cast

import torch
from jaxtyping import Float, Int
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torchmetrics import Metric

from mmpos import build
from mmpos.attention import KVCache
from mmpos.frequencies import Extension
from mmpos.models import Transformer
from mmpos.positions import sequence
from mmpos.rotary import RotaryEncoding
from tasks.accumulation import MeanOfStep
from tasks.base import Task
from tasks.decoder import Decoder, causal, check_known, check_prompt, check_sampling, drawn, extend
from tasks.lengths import warn_of_bases
from tasks.metrics import ExactMatch, Perplexity, Ratio


class Batch(TypedDict):
    """Rows of packed documents, as `tasks.data.Text` gives them, or of an example each, as
    `tasks.data.Algorithms` does.
    """

    tokens: Int[Tensor, "batch length"]
    targets: Int[Tensor, "batch length"]
    """The token that follows in the same document, -100 where there is none."""
    positions: Int[Tensor, "batch length 1"]
    segments: Int[Tensor, "batch length"]
    bytes: NotRequired[Int[Tensor, "batch length"]]
    """How many bytes of text each target stands for; one by default."""
    length: NotRequired[Int[Tensor, " batch"]]
    """Of the example that each row is; exact match is counted by it."""


class LanguageModel(Task):
    """Train a causal transformer to tell the next token of a text.

    A batch is a `Batch`. Logs ``train/loss``; of validation and test ``loss`` (nats a token),
    ``perplexity`` (its ``exp``) and ``bits_per_byte``: the bits of all targets by the bytes of
    their text, which compares models of any tokens. Where rows are examples with a ``length``, also
    ``exact_match``, the part of them whose targets are all the likeliest tokens (`ExactMatch`), and
    ``exact_match_<n>`` of those of each length n. All are exact over rows with any number of
    targets, and over all processes. The loss of a step is the mean over the targets of all batches
    that it accumulates, in all processes.

    Args:
        vocabulary: the number of tokens.
        context: tokens of a row, the length that the transformer is made for.
        transformer: makes the transformer from ``(context,)``, such as the class `Transformer`
            with ``causal=True``.
        extension: what all rotary encodings of the transformer take in place of their own, to go on
            from trained weights at a longer context; a checkpoint has it.
        tied: whether the logits are products with the embedding of the tokens; else with a matrix
            of their own.
        count, temperature, top_k: how ``predict`` goes on with prompts: see `generate`.
        lr, weight_decay, warmup, weights, leave_out, ema, layer_decay, freeze: see `Task`.

    Raises: TypeError without what makes a transformer; ValueError for one that is not causal or has
    class or register tokens, a vocabulary or context that cannot be, an extension without RoPE, and
    options that `generate` refuses.
    """

    network: Decoder

    def __init__(
        self,
        vocabulary: int,
        context: int,
        transformer: Callable[[Sequence[int]], Transformer] | None = None,
        *,
        extension: Extension | None = None,
        tied: bool = True,
        count: int = 256,
        temperature: float = 1.0,
        top_k: int | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        warmup: float = 0.1,
        weights: str | PathLike | None = None,
        leave_out: Sequence[str] = (),
        ema: float | None = None,
        layer_decay: float | None = None,
        freeze: Sequence[str] = (),
    ) -> None:
        super().__init__(
            lr=lr,
            weight_decay=weight_decay,
            warmup=warmup,
            weights=weights,
            leave_out=leave_out,
            ema=ema,
            layer_decay=layer_decay,
            freeze=freeze,
        )
        weights = None if weights is None else str(weights)  # plain data for the checkpoint
        self.save_hyperparameters()
        if callable(self.hparams.get("transformer")):
            # Given from Python, where it cannot be stored as plain data in a checkpoint.
            self.save_hyperparameters(ignore=["transformer", "extension"])
        if vocabulary < 1 or context < 1:
            raise ValueError(
                f"vocabulary and context are 1 or more, got {vocabulary} and {context}"
            )
        if context > 2**53:
            raise ValueError(f"context is at most 2**53, to count positions by, got {context}")
        check_sampling(count, temperature, top_k)
        self.vocabulary, self.context, self.extension = vocabulary, context, extension
        self.sampling = {"count": count, "temperature": temperature, "top_k": top_k}
        self.network = Decoder(  # type: ignore[assignment]
            vocabulary, causal(transformer, context, extension), tied
        )
        with torch.device("cpu"):  # whatever the weights are made on
            self.metrics = nn.ModuleDict({stage: _metrics() for stage in ("val", "test")})
            self.exact_match = ExactMatch()
        self._told = False
        self._mean = MeanOfStep()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """As every task; record an extension that was given beside a transformer from Python."""
        super().on_save_checkpoint(checkpoint)
        turning = any(isinstance(part, RotaryEncoding) for part in self.modules())
        if self.extension is not None and turning and "extension" not in self.hparams:
            checkpoint["mmpos_extension"] = self.extension.spec()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """As every task; take the extension recorded there, unless one is given here."""
        super().on_load_checkpoint(checkpoint)
        recorded = checkpoint.get("mmpos_extension")
        if recorded is not None and self.extension is None:
            self.extension = build(recorded)
            extend(self.network, self.extension)

    def forward(
        self,
        tokens: Int[Tensor, "batch length"],
        positions: Int[Tensor, "*batch length 1"] | None = None,
        segments: Int[Tensor, "batch length"] | None = None,
    ) -> Float[Tensor, "batch length vocabulary"]:
        """The logits of each next token; of one document a row, unless ``segments`` tell them.

        A context extension that depends on the length takes one for each row, that of its longest
        document: the last position, counted from 1.
        """
        if positions is None:
            positions = sequence(tokens.shape[-1], device=tokens.device)
        length = positions.amax((-2, -1)) + 1 if self._needs_length() else None
        return self.network(tokens, positions, segments=segments, length=length)

    def setup(self, stage: str) -> None:
        """As every task; warn of a base of RoPE that the context is known to be too long for."""
        super().setup(stage)
        warn_of_bases(self.network, self.context)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        batch = self.changed(batch)
        nats, count, _ = self._nats(batch, self._logits(batch, batch_idx))
        count = self.trainer.strategy.reduce(count.float(), reduce_op="mean")
        loss = (nats / count.clamp_min(1)).detach()
        self.log_loss(loss)
        return self._mean(nats, count)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Weigh all targets of the accumulated batches alike."""
        self._mean.finish(self.parameters(), self.trainer.accumulate_grad_batches)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, "test")

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, list[str]]:
        """Prompts and what the model goes on with, up to the end of the document: as text of the
        datamodule's ``decode``.
        """
        tokens = batch["tokens"]
        new = self.generate(tokens, **self.sampling)[:, tokens.shape[-1] :]  # type: ignore[arg-type]
        data = cast("Any", self.trainer).datamodule
        ended = (new == data.end).cumsum(-1) > 0
        rows = zip(new.cpu(), ended.cpu(), strict=True)
        text = [data.decode(row[~after]) for row, after in rows]
        return {"prompt": list(batch["prompt"]), "text": text}

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self._log_exact_match("val")

    def on_test_epoch_end(self) -> None:
        super().on_test_epoch_end()
        self._log_exact_match("test")

    def _log_exact_match(self, stage: str) -> None:
        if not self.exact_match.update_called:  # text
            return
        whole, by_length = self.exact_match.compute()
        self.exact_match.reset()
        found = {"": whole} | {f"_{length}": part for length, part in by_length.items()}
        for name, value in found.items():  # the same in all processes
            self.log(f"{stage}/exact_match{name}", value, prog_bar=not name, sync_dist=True)

    def _evaluate(self, batch: Batch, batch_idx: int, stage: str) -> None:
        logits = self._logits(batch, batch_idx)
        nats, count, text = self._nats(batch, logits)
        metrics = cast("dict[str, Metric]", self.metrics[stage])
        for name in ("loss", "perplexity"):
            metrics[name].update(nats, count)
        metrics["bits_per_byte"].update(nats / math.log(2), text)
        if "length" in batch:
            self.exact_match.update(logits.argmax(-1), batch["targets"], batch["length"])
        for name in metrics:  # objects, which Lightning computes over all processes
            self.log(f"{stage}/{name}", metrics[name], prog_bar=name != "loss", batch_size=1)

    def _logits(self, batch: Batch, batch_idx: int) -> Tensor:
        self._check(batch["tokens"], batch["targets"], batch_idx)
        return self(batch["tokens"], batch["positions"], batch["segments"])

    def _nats(self, batch: Batch, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss summed over all targets, their number, and the bytes of their text."""
        targets = batch["targets"]
        nats = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        real = targets != -100
        text = (batch["bytes"] * real).sum() if "bytes" in batch else real.sum()
        return nats, real.sum(), text

    def _check(self, tokens: Tensor, targets: Tensor, batch_idx: int) -> None:
        """In each batch on the CPU, elsewhere in the first alone, since looking costs a wait."""
        if batch_idx and self.device.type != "cpu":
            return
        check_known("token", tokens, self.vocabulary)
        check_known("target", targets[targets != -100], self.vocabulary)

    @torch.no_grad()
    def generate(
        self,
        prompt: Int[Tensor, "batch length"],
        count: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "batch length_and_count"]:
        """A prompt of one document a row, and ``count`` tokens that the model goes on with.

        Each costs a pass of one token, those before it being in a `KVCache` (or of all, where the
        network takes none). What is drawn is what full passes over all tokens give with the same
        draws; an extension that depends on the length (dynamic NTK, LongRoPE) takes that of the
        whole for each.

        Args:
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: draws from this many likeliest tokens only.
            generator: of the draws, on the device of the prompt.

        Warns: once, where tokens lie beyond the length that the model was trained on.
        Raises: ValueError for an empty prompt, tokens that the model has not, a negative count or
            temperature, or a ``top_k`` below 1.
        """
        check_sampling(count, temperature, top_k)
        check_prompt(prompt)
        self._check(prompt, prompt[:, :0], 0)
        length = prompt.shape[-1]
        if length + count > self.context and not self._told:
            rank_zero_warn(
                f"a prompt of {length} tokens and {count} more reach beyond the {self.context} "
                "that the model was trained on, where it may fail: shorten them, or train with a "
                "longer context"
            )
            self._told = True
        cache = KVCache(length=length + count if self._needs_length() else None)
        cached = self.network.transformer.caches
        tokens, new = prompt, prompt
        training = self.training
        self.eval()
        try:
            for _ in range(count):
                new = new if cached else tokens
                seen = tokens.shape[-1] - new.shape[-1]
                positions = sequence(new.shape[-1], start=seen, device=new.device)
                logits = self.network(new, positions, cache=cache if cached else None)[:, -1]
                new = drawn(logits.float(), temperature, top_k, generator)
                tokens = torch.cat((tokens, new), -1)
        finally:
            self.train(training)
        return tokens

    def _needs_length(self) -> bool:
        return any(m.needs_length for m in self.modules() if isinstance(m, RotaryEncoding))


def _metrics() -> nn.ModuleDict:
    return nn.ModuleDict({"loss": Ratio(), "perplexity": Perplexity(), "bits_per_byte": Ratio()})
