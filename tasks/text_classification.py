from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike

from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmpos.models import Classifier, Symbols, Transformer
from mmpos.models.classifier import Pool
from tasks.classification import Classification


class TextClassification(Classification):
    """Train a transformer to tell the class of a text, or of any sequence of symbols.

    A batch is ``((tokens [B, L], mask [B, L]), labels)``, as `tasks.data.LabelledText` gives it:
    rows are padded at their ends, and the mask is True for what is real. Every token sees all
    others of its row. What is logged is that of `tasks.classification.Classification`.

    Args:
        classes: names of the classes, in the order of labels; or of the answers by question.
        vocabulary: the number of tokens.
        context: most tokens of a row, the length that the transformer is made for.
        transformer: makes the transformer from ``(context,)``, such as the class `Transformer`.
        pool: ``mean`` over a row's real tokens, or the class ``token``.
        label_smoothing: see `tasks.classification.Classification`.
        lr, weight_decay, warmup, weights, leave_out, ema, layer_decay, freeze: see `Task`.

    Raises: TypeError without a transformer; ValueError for one that is causal, fewer than two
    classes, or a vocabulary or context below 1.
    """

    def __init__(
        self,
        classes: Mapping[str, Sequence[str]] | Sequence[str],
        vocabulary: int,
        context: int,
        transformer: Callable[[Sequence[int]], Transformer] | None = None,
        *,
        pool: Pool = "mean",
        label_smoothing: float = 0.0,
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
            classes,
            label_smoothing=label_smoothing,
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
        if transformer is None:
            raise TypeError(
                "TextClassification is missing 1 required positional argument: 'transformer' (a "
                "checkpoint does not hold one that was made in Python)"
            )
        encoder = transformer((context,))
        if encoder.causal:
            raise ValueError(
                "a classifier of text needs a transformer whose tokens see all others, and this "
                "one is causal: set causal to false"
            )
        symbols = Symbols(encoder.dim, vocabulary)
        self.network = Classifier(symbols, encoder, self.questions, pool=pool)

    def forward(
        self,
        tokens: Int[Tensor, "batch length"],
        mask: Bool[Tensor, "batch length"] | None = None,
    ) -> dict[str, Float[Tensor, "batch _"]]:
        """The logits of each question; ``mask`` is True for real tokens, all by default."""
        return self.network(tokens, mask)
