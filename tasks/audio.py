from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mmpos.models import Classifier, FrameEmbedding, Transformer
from mmpos.models.classifier import Pool
from tasks.classification import Classification
from tasks.windows import averaged


class AudioClassification(Classification):
    """Train a transformer to answer one or more questions about a sound.

    A batch is ``(tasks.data.sounds.Sound(values [W, bins, T], mask [W, T], step, owner), labels)``,
    as `tasks.data.Audio` gives it: rows are padded at their ends, the mask is True for what is
    real, ``step`` is the seconds from a frame to the next, and ``owner [W]`` the clip that each row
    is a window of, over which logits are averaged. What is logged is that of
    `tasks.classification.Classification`.

    Args:
        classes: names of the classes, in the order of labels; or of the answers by question.
        bins: of a frame.
        frames: of the longest clip that the model is made for.
        transformer: makes the transformer from the grid of tokens of such a clip, such as the class
            `Transformer`.
        tokens: makes the tokeniser from ``(dim, bins)``: the class `FrameEmbedding`, by default, or
            `SpectrogramPatches`, or another with their ``grid`` and call.
        ticks: positions in a second. With a number, tokens stand at their time, whatever sample
            rate, hop and stride; by default they are counted. The number of tokens in a second of
            the training data gives the same positions as counting there.
        pool: ``mean`` over a row's real tokens, the class ``token``, or the mean of all ``prefix``
            tokens.
        multilabel: whether a clip has any number of classes.
        label_smoothing: see `tasks.classification.Classification`.
        lr, weight_decay, warmup, weights, leave_out, ema, layer_decay, freeze: see `Task`.

    Raises: TypeError without a transformer; ValueError for fewer than two classes, bins or frames
    below 1, or ticks that are not above 0.
    """

    def __init__(
        self,
        classes: Mapping[str, Sequence[str]] | Sequence[str],
        bins: int,
        frames: int,
        transformer: Callable[[Sequence[int]], Transformer] | None = None,
        *,
        tokens: Callable[[int, int], nn.Module] | None = None,
        ticks: float | None = None,
        pool: Pool = "mean",
        multilabel: bool = False,
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
            multilabel=multilabel,
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
        objects = [n for n in ("transformer", "tokens") if callable(self.hparams.get(n))]
        if objects:
            # Given from Python, where they cannot be stored as plain data in a checkpoint.
            self.save_hyperparameters(ignore=["transformer", "tokens"])
        if bins < 1 or frames < 1:
            raise ValueError(f"bins and frames are 1 or more, got {bins} and {frames}")
        if ticks is not None and not 0 < ticks < math.inf:
            raise ValueError(f"ticks are positions in a second, above 0 and finite, got {ticks}")
        if transformer is None:
            raise TypeError(
                "AudioClassification is missing 1 required positional argument: 'transformer' (a "
                "checkpoint does not hold one that was made in Python)"
            )
        self.ticks = ticks
        make: Callable[[int, int], Any] = FrameEmbedding if tokens is None else tokens
        encoder = transformer(cells(make, bins, frames, "tokens"))
        self.network = Classifier(make(encoder.dim, bins), encoder, self.questions, pool=pool)

    def forward(
        self,
        values: Float[Tensor, "rows bins frames"],
        mask: Bool[Tensor, "rows frames"] | None = None,
        step: float | None = None,
        owner: Int[Tensor, " rows"] | None = None,
    ) -> dict[str, Float[Tensor, "batch _"]]:
        """The logits of each question.

        Args:
            mask: True for what is real; all by default.
            step: seconds from a frame to the next, needed where the model has ``ticks``.
            owner: the clip of each row, rising from 0; each row is one by default.
        """
        if self.ticks is not None and step is None:
            raise ValueError(
                f"this model stands at {self.ticks:g} positions in a second: give the step, the "
                "seconds from a frame to the next"
            )
        along = None if self.ticks is None or step is None else self.ticks * step
        return averaged(lambda x, real: self.network(x, real, step=along), owner, values, mask)


def cells(make: Callable[[int, int], Any], bins: int, frames: int, name: str) -> Sequence[int]:
    """How many tokens of sound there are on each axis, of the tokeniser that ``make`` makes.

    Raises: TypeError for one without a grid, as setting ``name``.
    """
    made = make(1, bins)
    if not callable(getattr(made, "grid", None)):
        raise TypeError(
            f"{name} makes a tokeniser of sound from (dim, bins), such as "
            f"mmpos.models.FrameEmbedding, got {type(made).__name__}, which has no grid"
        )
    return made.grid(bins, frames)
