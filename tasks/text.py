from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, NotRequired, TypedDict, cast

import torch
from jaxtyping import Float, Int
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torchmetrics import Metric

from mmpos.attention import KVCache
from mmpos.models import Classifier, Transformer
from mmpos.positions import sequence
from mmpos.rotary import RotaryEncoding
from tasks.base import Task
from tasks.metrics import Perplexity, Ratio


class Batch(TypedDict):
    """Rows of packed documents, as `tasks.data.Text` gives them."""

    tokens: Int[Tensor, "batch length"]
    targets: Int[Tensor, "batch length"]
    """The token that follows in the same document, -100 where there is none."""
    positions: Int[Tensor, "batch length 1"]
    segments: Int[Tensor, "batch length"]
    bytes: NotRequired[Int[Tensor, "batch length"]]
    """How many bytes of text each target stands for; one by default."""


class _Decoder(nn.Module):
    """Tokens to logits of the next: an embedding, a transformer, the embedding again or a head."""

    group_matcher = Classifier.group_matcher  # by the names of transformer and tokens

    def __init__(self, vocabulary: int, transformer: Transformer, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, transformer.dim)
        self.transformer = transformer
        self.head = None if tied else nn.Linear(transformer.dim, vocabulary, bias=False)
        for made in (self.tokens, self.head):
            if made is not None:
                nn.init.trunc_normal_(made.weight, std=0.02)

    def forward(
        self,
        tokens: Int[Tensor, "batch length"],
        positions: Int[Tensor, "*batch length 1"],
        **given: Any,
    ) -> Float[Tensor, "batch length vocabulary"]:
        encoded = self.transformer(self.tokens(tokens), positions, **given)
        return linear(encoded, self.tokens.weight if self.head is None else self.head.weight)


class LanguageModel(Task):
    """Train a causal transformer to tell the next token of a text.

    A batch is a `Batch`. Logs ``train/loss``; of validation and test ``loss`` (nats a token),
    ``perplexity`` (its ``exp``) and ``bits_per_byte``: the bits of all targets by the bytes of
    their text, which compares models of any tokens. All are exact over rows with any number of
    targets, and over all processes.

    Args:
        vocabulary: the number of tokens.
        context: tokens of a row, the length that the transformer is made for.
        transformer: makes the transformer from ``(context,)``, such as the class `Transformer`
            with ``causal=True``.
        tied: whether the logits are products with the embedding of the tokens; else with a matrix
            of their own.
        count, temperature, top_k: how ``predict`` goes on with prompts: see `generate`.
        lr, weight_decay, warmup, weights, leave_out, ema, layer_decay, freeze: see `Task`.

    Raises: TypeError without a transformer; ValueError for one that is not causal or has class or
        register tokens, a vocabulary or context below 1, and options that `generate` refuses.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        transformer: Callable[[Sequence[int]], Transformer] | None = None,
        *,
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
            self.save_hyperparameters(ignore=["transformer"])
        if vocabulary < 1 or context < 1:
            raise ValueError(
                f"vocabulary and context are 1 or more, got {vocabulary} and {context}"
            )
        _check_sampling(count, temperature, top_k)
        self.vocabulary, self.context = vocabulary, context
        self.sampling = {"count": count, "temperature": temperature, "top_k": top_k}
        self.network = _Decoder(vocabulary, _causal(transformer, context), tied)
        self.metrics = nn.ModuleDict(
            {
                stage: nn.ModuleDict(
                    {
                        "loss": Ratio(),
                        "perplexity": Perplexity(),
                        "bits_per_byte": Ratio(),
                    }
                )
                for stage in ("val", "test")
            }
        )
        self._told = False

    def forward(
        self,
        tokens: Int[Tensor, "batch length"],
        positions: Int[Tensor, "*batch length 1"] | None = None,
        segments: Int[Tensor, "batch length"] | None = None,
    ) -> Float[Tensor, "batch length vocabulary"]:
        """The logits of each next token; of one document a row, unless ``segments`` tell them."""
        if positions is None:
            positions = sequence(tokens.shape[-1], device=tokens.device)
        return self.network(tokens, positions, segments=segments)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        nats, count, _ = self._nats(self.changed(batch), batch_idx)
        loss = nats / count.clamp_min(1)
        self.log("train/loss", loss, prog_bar=True, sync_dist=True, batch_size=1)
        return loss

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

    def _evaluate(self, batch: Batch, batch_idx: int, stage: str) -> None:
        nats, count, text = self._nats(batch, batch_idx)
        metrics = cast("dict[str, Metric]", self.metrics[stage])
        for name in ("loss", "perplexity"):
            metrics[name].update(nats, count)
        metrics["bits_per_byte"].update(nats / math.log(2), text)
        for name in metrics:  # objects, which Lightning computes over all processes
            self.log(f"{stage}/{name}", metrics[name], prog_bar=name != "loss", batch_size=1)

    def _nats(self, batch: Batch, batch_idx: int) -> tuple[Tensor, Tensor, Tensor]:
        """The loss summed over all targets, their number, and the bytes of their text."""
        tokens, targets = batch["tokens"], batch["targets"]
        self._check(tokens, targets, batch_idx)
        logits = self(tokens, batch["positions"], batch["segments"])
        nats = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        real = targets != -100
        text = (batch["bytes"] * real).sum() if "bytes" in batch else real.sum()
        return nats, real.sum(), text

    def _check(self, tokens: Tensor, targets: Tensor, batch_idx: int) -> None:
        """In each batch on the CPU, elsewhere in the first alone, since looking costs a wait."""
        if batch_idx and self.device.type != "cpu":
            return
        for name, ids in (("token", tokens), ("target", targets[targets != -100])):
            low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
            if low < 0 or high >= self.vocabulary:
                raise ValueError(
                    f"the data has a {name} {low if low < 0 else high}, the model has "
                    f"{self.vocabulary} tokens, from 0 on: give the model the vocabulary of the "
                    "data"
                )

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

        Each costs one pass of one token: those before it are in a `KVCache`. What is drawn is what
        full passes over all tokens give with the same draws; an extension that depends on the
        length (dynamic NTK, LongRoPE) takes that of the whole for each.

        Args:
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: draws from this many likeliest tokens only.
            generator: of the draws, on the device of the prompt.

        Warns: once, where tokens lie beyond the length that the model was trained on.
        Raises: ValueError for an empty prompt, tokens that the model has not, a negative count or
            temperature, or a ``top_k`` below 1.
        """
        _check_sampling(count, temperature, top_k)
        if prompt.ndim != 2 or not prompt.numel():
            raise ValueError(f"a prompt is [batch, length] tokens, got {tuple(prompt.shape)}")
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
        tokens, new = prompt, prompt
        training = self.training
        self.eval()
        try:
            for _ in range(count):
                seen = tokens.shape[-1] - new.shape[-1]
                positions = sequence(new.shape[-1], start=seen, device=new.device)
                logits = self.network(new, positions, cache=cache)[:, -1]
                new = _drawn(logits.float(), temperature, top_k, generator)
                tokens = torch.cat((tokens, new), -1)
        finally:
            self.train(training)
        return tokens

    def _needs_length(self) -> bool:
        return any(m.needs_length for m in self.modules() if isinstance(m, RotaryEncoding))


def _drawn(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    return (logits / temperature).softmax(-1).multinomial(1, generator=generator)


def _check_sampling(count: int, temperature: float, top_k: int | None) -> None:
    if count < 0 or not 0 <= temperature < math.inf or (top_k is not None and top_k < 1):
        raise ValueError(
            "sampling takes a count and a temperature of 0 or more and a top_k of 1 or more, got "
            f"{count}, {temperature} and {top_k}"
        )


def _causal(
    transformer: Callable[[Sequence[int]], Transformer] | None, context: int
) -> Transformer:
    if transformer is None:
        raise TypeError(
            "LanguageModel is missing 1 required positional argument: 'transformer' (a checkpoint "
            "does not hold one that was made in Python)"
        )
    made = transformer((context,))
    if not made.causal:
        raise ValueError(
            "a language model needs a causal transformer, else tokens see their own targets: "
            "set causal to true"
        )
    if made.prefix_tokens:
        raise ValueError(
            "a language model has no class and register tokens, which belong to no document, "
            f"got {made.prefix_tokens}: leave them out"
        )
    return made
