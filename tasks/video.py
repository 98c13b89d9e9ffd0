from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from os import PathLike

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmpos.models import Classifier, Transformer, TubeletEmbedding
from mmpos.models.classifier import Pool
from tasks.classification import Classification
from tasks.windows import averaged


class VideoClassification(Classification):
    """Train a transformer to answer one or more questions about a video.

    A batch is ``(tasks.data.clips.Clips(values [W, C, T, H, W'], mask [W, T], step, owner),
    labels)``, as `tasks.data.Video` gives it: rows are padded at their ends, the mask is True for
    real frames (None where all are), ``step`` is the seconds from a frame to the next, one number
    or one for each row, and ``owner [W]`` the video that each row is a view of, over which logits
    are averaged. What is logged is that of `tasks.classification.Classification`.

    Args:
        classes: names of the classes, in the order of labels; or of the answers by question.
        frames: of a clip.
        image_size: height and width in pixels.
        channels: of a frame.
        patch_size: frames, height and width of a tubelet.
        step: seconds from a frame to the next in clips that the model is made for; with ``ticks``
            the grid of its transformer is as long as these are, in positions.
        transformer: makes the transformer from its grid of tokens, such as the class `Transformer`.
        ticks: positions in a second. With a number, tubelets stand at their time, whatever frame
            rate; by default they are counted. The number of tubelets in a second of the training
            data gives the same positions as counting there.
        pool: ``mean`` over a clip's real tokens, the class ``token``, or the mean of all ``prefix``
            tokens.
        label_smoothing: see `tasks.classification.Classification`.
        lr, weight_decay, warmup, weights, leave_out, ema, layer_decay, freeze: see `Task`; weights
            of a network for images are inflated (`tasks.inflation.inflated`).

    Raises: TypeError without a transformer; ValueError for frames that patches do not divide, or
    ticks that are not above 0; in the call, without a step that ticks need.
    """

    def __init__(
        self,
        classes: Mapping[str, Sequence[str]] | Sequence[str],
        frames: int,
        image_size: Sequence[int],
        channels: int = 3,
        patch_size: Sequence[int] = (2, 16, 16),
        step: float | None = None,
        transformer: Callable[[Sequence[int]], Transformer] | None = None,
        *,
        ticks: float | None = None,
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
        if ticks is not None and not 0 < ticks < math.inf:
            raise ValueError(f"ticks are positions in a second, above 0 and finite, got {ticks}")
        if transformer is None:
            raise TypeError(
                "VideoClassification is missing 1 required positional argument: 'transformer' (a "
                "checkpoint does not hold one that was made in Python)"
            )
        self.ticks = ticks
        height, width = image_size
        time, *space = TubeletEmbedding(1, patch_size, 1).grid(frames, height, width)
        if ticks is not None and step is not None:
            time = max(1, math.ceil(time * patch_size[0] * step * ticks - 1e-6))
        encoder = transformer((time, *space))
        tokens = TubeletEmbedding(encoder.dim, patch_size, channels)
        self.network = Classifier(tokens, encoder, self.questions, pool=pool)

    def forward(
        self,
        values: Float[Tensor, "rows channel frames height width"],
        mask: Bool[Tensor, "rows frames"] | None = None,
        step: float | Sequence[float] | Float[Tensor, " rows"] | None = None,
        owner: Int[Tensor, " rows"] | None = None,
    ) -> dict[str, Float[Tensor, "batch _"]]:
        """The logits of each question.

        Args:
            mask: True for real frames; all by default.
            step: seconds from a frame to the next, one number or one for each row; needed where
                the model has ``ticks``.
            owner: the video of each row, rising from 0; each row is one by default.
        """
        along = None
        if self.ticks is not None:
            if step is None:
                raise ValueError(
                    f"this model stands at {self.ticks:g} positions in a second: give the step, "
                    "the seconds from a frame to the next (1 / frames a second)"
                )
            if isinstance(step, Sequence):
                exact = torch.float32 if values.device.type == "mps" else torch.float64
                step = torch.tensor(step, dtype=exact, device=values.device)
            along = self.ticks * step
        return averaged(self._answer, owner, values, mask, along)

    def _answer(
        self, values: Tensor, mask: Tensor | None, along: float | Tensor | None
    ) -> dict[str, Tensor]:
        return self.network(values, mask, step=along)
