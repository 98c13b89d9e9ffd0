"""Callbacks that train at several resolutions: the size of images or of patches by step.

What a step uses is a function of the seed, the step and the number of steps, so all processes share
the shape of every step, and a resumed run goes on with the same ones; one that is made longer goes
back in a progressive order. Validation and test keep their own sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.functional import interpolate

from mmpos.additive import TableEncoding
from mmpos.interop.timm import Backbone
from mmpos.models import PatchEmbedding
from tasks.base import Task

Order = Literal["random", "progressive"]
Size = tuple[int, int]


class _Schedule(Callback):
    """One of ``sizes`` for each step: at random, or one after the other in equal shares."""

    salt = 0

    def __init__(
        self, sizes: Sequence[int | Size], *, order: Order = "random", seed: int = 0
    ) -> None:
        if order not in get_args(Order):
            raise ValueError(f"order must be one of {get_args(Order)}, got {order!r}")
        pairs = [(size, size) if isinstance(size, int) else tuple(size) for size in sizes]
        whole = all(isinstance(size, int) and size > 0 for pair in pairs for size in pair)
        if not pairs or not whole or any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"sizes must be one or more of 1 pixel or more, got {list(sizes)}")
        self.sizes: list[Size] = [(height, width) for height, width in pairs]
        self.order = order
        self.seed = seed

    def _check(self, module: LightningModule, grids: Sequence[Size]) -> None:
        """Raise before the first step for a table that will not follow."""
        for part in module.modules():
            if isinstance(part, TableEncoding) and not part.any_grid:
                other = [grid for grid in grids if grid != part.grid]
                if other:
                    raise ValueError(
                        f"the learned table was made for a grid of {part.grid}, and a size gives "
                        f"{other[0]}: make the encoding with dynamic=True"
                    )

    def at(self, step: int, steps: float) -> Size:
        """The size of a step, of so many in all."""
        if self.order == "random":
            draw = torch.Generator().manual_seed(hash((self.salt, self.seed, step)))
            return self.sizes[int(torch.randint(len(self.sizes), (), generator=draw))]
        if not math.isfinite(steps):
            raise ValueError("order='progressive' needs a run of known length: set max_epochs")
        return self.sizes[min(int(step / steps * len(self.sizes)), len(self.sizes) - 1)]

    def now(self, trainer: Trainer) -> Size:
        return self.at(trainer.global_step, trainer.estimated_stepping_batches)


class ImageSizes(_Schedule):
    """Shows each training batch of images at one of several sizes, resampled with antialias.

    An encoding that reads positions as they are needs nothing for it; a learned table must be
    ``dynamic``, and follows with a resized copy.

    Args:
        sizes: heights and widths in pixels, multiples of the patch.
        order: ``random``, or ``progressive``: from the first to the last in equal shares of steps.
        seed: of the random order.

    Raises: ValueError for no sizes, an unknown order, or sizes that are not multiples of the patch;
        before training for a network that takes one size only.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take part in each batch of a task.

        Raises: TypeError for another module than a task of `tasks`.
        """
        if stage != "fit":
            return
        if not isinstance(pl_module, Task):
            raise TypeError(f"ImageSizes needs a tasks.Task, got {type(pl_module).__name__}")
        patch = _patch(pl_module)
        for size in self.sizes:
            if any(pixels % cell for pixels, cell in zip(size, patch, strict=True)):
                raise ValueError(f"size {size} is not a multiple of the patch {tuple(patch)}")
        self._check(pl_module, [(h // patch[0], w // patch[1]) for h, w in self.sizes])
        self._trainer = trainer
        if self._resize not in pl_module.batch_changes:  # as after a run that an error ended
            pl_module.batch_changes.append(self._resize)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the task as it was."""
        if isinstance(pl_module, Task) and self._resize in pl_module.batch_changes:
            pl_module.batch_changes.remove(self._resize)

    def _resize(self, batch: Any) -> Any:
        images, *rest = batch
        size = self.now(self._trainer)
        if tuple(images.shape[-2:]) != size:
            images = interpolate(images, size, mode="bilinear", antialias=True)
        return (images, *rest)


def _patch(module: LightningModule) -> Sequence[int]:
    """The patch of a network that takes images of any size.

    Raises: ValueError for a network that does not.
    """
    hint = ""
    for part in module.modules():
        if isinstance(part, PatchEmbedding):
            return part.patch_size
        if isinstance(part, Backbone):
            model = cast("Any", part.model)
            if not hasattr(model, "patch_embed"):
                return 1, 1
            if getattr(model, "dynamic_img_size", False):
                return model.patch_embed.patch_size
            if hasattr(model, "dynamic_img_size"):
                hint = "; it takes any with --model.backbone.options '{dynamic_img_size: true}'"
    raise ValueError(f"this network takes images of one size{hint}")


class PatchSizes(_Schedule):
    """Cuts each training batch into patches of one of several sizes (FlexiViT, arXiv:2212.08013).

    The patch embedding's kernel is resized by pseudo-inverse, so that it is one set of weights for
    all sizes; the grid of a batch changes with the patch, see `ImageSizes`.

    Args:
        sizes: heights and widths of patches in pixels, that divide the image.
        order: ``random`` or ``progressive``, see `ImageSizes`.
        seed: of the random order.
    """

    salt = 1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise before the first step for patches that do not divide the images."""
        image = getattr(getattr(trainer, "datamodule", None), "image_size", None)
        if stage != "fit":
            return
        if not any(isinstance(part, PatchEmbedding) for part in pl_module.modules()):
            raise ValueError(
                "PatchSizes changes the patches of mmpos's own models, and this network has none"
            )
        if image is None:
            return
        for height, width in self.sizes:
            if image[0] % height or image[1] % width:
                raise ValueError(f"a patch of {(height, width)} does not divide images of {image}")
        self._check(pl_module, [(image[0] // h, image[1] // w) for h, w in self.sizes])

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the patch of this step."""
        for module in pl_module.modules():
            if isinstance(module, PatchEmbedding):
                module.patch_size = self.now(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Give the patch embedding its own size back."""
        for module in pl_module.modules():
            if isinstance(module, PatchEmbedding):
                module.patch_size = module.own_patch_size
