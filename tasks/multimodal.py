from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mmpos.models import (
    Classifier,
    FrameEmbedding,
    Modalities,
    PatchEmbedding,
    Symbols,
    Transformer,
)
from mmpos.models.classifier import Pool
from mmpos.models.modalities import Layout
from tasks.audio import cells
from tasks.classification import Classification


class MultimodalClassification(Classification):
    """Train one transformer to answer questions about text, an image and sound in one sequence.

    A batch is ``(tasks.data.multimodal.Mixed(text, text_mask, image, image_mask, audio, audio_mask,
    step), labels)``, as `tasks.data.Multimodal` gives it. Any of the three may be missing, from a
    row (its mask is False there) or from all of them (None): parameters of what a batch lacks have
    a gradient of 0, so that processes whose batches differ train together. What is logged is that
    of `tasks.classification.Classification`.

    Args:
        classes: names of the classes, in the order of labels; or of the answers by question.
        vocabulary: symbols of text, such as 256 bytes.
        context: symbols of the longest text.
        image_size: height and width in pixels.
        channels: of an image.
        bins, frames: of the longest sound.
        patch_size: height and width of an image's patch.
        transformer: makes the transformer from its grid, such as the class `Transformer`; the grid
            is that of `mmpos.models.Modalities` for the longest inputs: one axis for the layout
            ``sequence``, three for others.
        layout: where tokens are: ``missing``, ``mrope`` or ``sequence``, see
            `mmpos.models.Modalities`.
        frames_to_tokens: makes the tokeniser of sound from ``(dim, bins)``; `FrameEmbedding` by
            default.
        pool: ``mean`` over a row's real tokens, the class ``token``, or the mean of all ``prefix``
            tokens.
        label_smoothing: see `tasks.classification.Classification`.
        lr, weight_decay, warmup, weights, leave_out, ema, layer_decay, freeze: see `Task`.

    Raises: TypeError without a transformer; ValueError for an image that patches do not divide, or
    an unknown layout.
    """

    def __init__(
        self,
        classes: Mapping[str, Sequence[str]] | Sequence[str],
        vocabulary: int,
        context: int,
        image_size: Sequence[int],
        channels: int,
        bins: int,
        frames: int,
        patch_size: Sequence[int] = (16, 16),
        transformer: Callable[[Sequence[int]], Transformer] | None = None,
        *,
        layout: Layout = "mrope",
        frames_to_tokens: Callable[[int, int], nn.Module] | None = None,
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
        given = ("transformer", "frames_to_tokens")
        if any(callable(self.hparams.get(name)) for name in given):
            # Given from Python, where they cannot be stored as plain data in a checkpoint.
            self.save_hyperparameters(ignore=list(given))
        if transformer is None:
            raise TypeError(
                "MultimodalClassification is missing 1 required positional argument: "
                "'transformer' (a checkpoint does not hold one that was made in Python)"
            )
        if len(patch_size) != 2 or min(patch_size) < 1:
            raise ValueError(f"patch_size is height and width of a patch, got {list(patch_size)}")
        if any(size % patch for size, patch in zip(image_size, patch_size, strict=True)):
            raise ValueError(
                f"an image of {' × '.join(map(str, image_size))} cannot be cut into patches of "
                f"{' × '.join(map(str, patch_size))}: choose --data.image_size as a multiple, or "
                "another --model.patch_size"
            )
        sound = frames_to_tokens or FrameEmbedding

        def tokenisers(dim: int) -> Modalities:
            tokens = {
                "text": Symbols(dim, vocabulary),
                "image": PatchEmbedding(dim, patch_size, channels),
                "audio": sound(dim, bins),
            }
            return Modalities(tokens, layout)

        small = tokenisers(1)
        page = [size // patch for size, patch in zip(image_size, patch_size, strict=True)]
        heard = cells(sound, bins, frames, "frames_to_tokens")
        encoder = transformer(small.grid({"text": (context,), "image": page, "audio": heard}))
        self.network = Classifier(tokenisers(encoder.dim), encoder, self.questions, pool=pool)

    def forward(
        self,
        text: Int[Tensor, "batch symbols"] | None = None,
        text_mask: Bool[Tensor, "batch symbols"] | None = None,
        image: Float[Tensor, "batch channel height width"] | None = None,
        image_mask: Bool[Tensor, " batch"] | None = None,
        audio: Float[Tensor, "batch bins frames"] | None = None,
        audio_mask: Bool[Tensor, "batch frames"] | None = None,
        step: float | None = None,
    ) -> dict[str, Float[Tensor, "batch _"]]:
        """The logits of each question.

        Args:
            text_mask, image_mask, audio_mask: True for what is real; all by default.
            step: seconds from a frame of sound to the next; its tokens are counted.
        """
        inputs = {"text": text, "image": image, "audio": audio}
        masks = {"text": text_mask, "image": image_mask, "audio": audio_mask}
        return self.network(inputs, masks)
