from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Bool, Float, Num
from torch import Tensor, nn

from mmpos.coordinates import Extent
from mmpos.positions import grid
from mmpos.resample import patch_kernel

_CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_FUNCTIONS = {1: nn.functional.conv1d, 2: nn.functional.conv2d, 3: nn.functional.conv3d}


class Tokens(NamedTuple):
    """Tokens with their positions, the grid that these span, and which are real."""

    values: Float[Tensor, "batch length dim"]
    positions: Num[Tensor, "*rows length axes"]
    """Shared, or each row's own."""
    extent: Extent | None
    """None for a sequence, whose encodings read its positions as they are."""
    mask: Bool[Tensor, "batch length"] | None = None
    """True for real tokens, False for padding; None where all are real."""


class PatchEmbedding(nn.Module):
    """Cut an input into patches and project each to a token; positions are the patches' indices.

    Args:
        dim: features of a token.
        patch_size: a size for each axis, one to three: spectrogram frames, image patches, tubelets.
        channels: of the input.

    ``patch_size`` may be set to another size later; the kernel is then resized at each call
    (`mmpos.resample.patch_kernel`), with gradients to the one that is kept.

    Shape: ``[B, C, *sizes]``, and where it is padded a mask ``[B, *sizes]``, True for what is real
    → `Tokens` with values ``[B, L, dim]`` in row-major order; a patch is real where any of it is,
    and what of it is not is 0.
    Raises: ValueError for an input whose sizes are not multiples of the patch, or a mask of others.
    """

    def __init__(self, dim: int, patch_size: Sequence[int], channels: int = 3) -> None:
        super().__init__()
        if not isinstance(patch_size, Sequence):
            raise TypeError(f"patch_size is a size for each axis, one to three, got {patch_size!r}")
        self.patch_size = tuple(patch_size)
        if len(self.patch_size) not in _CONVOLUTIONS or min(self.patch_size) < 1:
            raise ValueError(f"patch_size must be one to three sizes above 0, got {patch_size}")
        convolution = _CONVOLUTIONS[len(self.patch_size)]
        self.project = convolution(channels, dim, self.patch_size, self.patch_size)

    @property
    def own_patch_size(self) -> tuple[int, ...]:
        """The patch that the kernel was made for."""
        return tuple(self.project.weight.shape[2:])

    def forward(
        self,
        x: Float[Tensor, "batch channel *size"],
        mask: Bool[Tensor, "batch *size"] | None = None,
    ) -> Tokens:
        """The tokens of ``x``."""
        sizes = tuple(x.shape[2:])
        if len(sizes) != len(self.patch_size):
            raise ValueError(
                f"input has shape {tuple(x.shape)}, expected [batch, channel] and "
                f"{len(self.patch_size)} sizes, as many as patch_size={self.patch_size}"
            )
        if any(size % patch for size, patch in zip(sizes, self.patch_size, strict=True)):
            raise ValueError(
                f"input of {sizes} cannot be cut into patches of {self.patch_size}: "
                "each size must be a multiple of the patch"
            )
        if mask is not None:
            if mask.shape != (x.shape[0], *sizes):
                raise ValueError(
                    f"the mask of an input {tuple(x.shape)} is {(x.shape[0], *sizes)}, got "
                    f"{tuple(mask.shape)}"
                )
            x = x.where(mask.unsqueeze(1), 0)
            for axis, patch in enumerate(self.patch_size, 1):
                mask = mask.unflatten(axis, (-1, patch)).any(axis + 1)
            mask = mask.flatten(1)
        if self.patch_size == self.own_patch_size:
            cells = self.project(x)
        else:
            kernel = patch_kernel(self.project.weight, self.patch_size)
            convolve = _FUNCTIONS[len(self.patch_size)]
            cells = convolve(x, kernel, self.project.bias, self.patch_size)
        extent = tuple(cells.shape[2:])
        return Tokens(cells.flatten(2).mT, grid(*extent, device=x.device), extent, mask)
