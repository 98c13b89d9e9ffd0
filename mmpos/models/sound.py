"""Tokens of sound: frames of a spectrogram or a waveform by convolutions, or patches of both axes.

Both take an input ``[B, bins, T]``; where rows are padded at the end a mask ``[B, T]``, True for
what is real; and ``step``, what a frame adds to a token's position in time. By default tokens are
counted. The seconds from a frame to the next, or a multiple of them, give positions that do not
depend on sample rate, hop and stride. A row's tokens are those that it has alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mmpos.models.patches import Tokens
from mmpos.positions import check_size, grid

Rest = Literal["pad", "drop"]


class FrameEmbedding(nn.Module):
    """A stem of convolutions over time, each followed by GELU: as many tokens as strides leave.

    The default is Whisper's (arXiv:2212.04356, sec. 2.2), of half as many tokens as frames. Token
    ``i`` is centred on frame ``i · stride``; beyond a row's ends are zeros, before each
    convolution.

    Args:
        dim: features of a token.
        bins: channels of the input, such as mel bands; 1 for a waveform.
        kernels, strides: of each convolution.
        causal: whether a token is of the frames up to its own alone, for streaming.

    Shape: ``[B, bins, T]`` → `Tokens` with values ``[B, ⌈T / stride⌉, dim]`` on one axis.
    Raises: ValueError for another number of kernels than strides, sizes that are not above 0, or an
    input without frames.
    """

    def __init__(
        self,
        dim: int,
        bins: int,
        *,
        kernels: Sequence[int] = (3, 3),
        strides: Sequence[int] = (1, 2),
        causal: bool = False,
    ) -> None:
        super().__init__()
        check_size("dim", dim)
        check_size("bins", bins)
        if not kernels or len(kernels) != len(strides) or min(*kernels, *strides) < 1:
            raise ValueError(
                f"expected as many kernels as strides, each 1 or more, got {list(kernels)} and "
                f"{list(strides)}"
            )
        self.causal = causal
        sizes = zip([bins, *[dim] * (len(kernels) - 1)], kernels, strides, strict=True)
        self.convolutions = nn.ModuleList(nn.Conv1d(n, dim, k, s) for n, k, s in sizes)

    @property
    def stride(self) -> int:
        """Frames from a token to the next."""
        return math.prod([layer.stride[0] for layer in self._layers])

    @property
    def left(self) -> int:
        """How many frames before its own a token depends on."""
        before, frames = 0, 1
        for layer in self._layers:
            before += self._left(layer) * frames
            frames *= layer.stride[0]
        return before

    @property
    def _layers(self) -> list[nn.Conv1d]:
        return list(self.convolutions)  # type: ignore[arg-type]

    def _left(self, layer: nn.Conv1d) -> int:
        (kernel,) = layer.kernel_size
        return kernel - 1 if self.causal else (kernel - 1) // 2

    def grid(self, bins: int, frames: int) -> tuple[int]:
        """How many tokens there are on each axis, of an input ``[bins, frames]``."""
        return (-(-frames // self.stride),)

    def forward(
        self,
        x: Float[Tensor, "batch bins frames"],
        mask: Bool[Tensor, "batch frames"] | None = None,
        step: float | None = None,
    ) -> Tokens:
        """The tokens of ``x``."""
        _check(x, mask, self._layers[0].in_channels)
        for layer in self._layers:
            if mask is not None:
                x = x.where(mask.unsqueeze(1), 0)
                mask = mask[:, :: layer.stride[0]]
            left = self._left(layer)
            around = (left, layer.kernel_size[0] - 1 - left)
            x = nn.functional.gelu(layer(nn.functional.pad(x, around)))
        steps = None if step is None else (step * self.stride,)
        return Tokens(x.mT, grid(x.shape[-1], step=steps, device=x.device), None, mask)


class SpectrogramPatches(nn.Module):
    """Patches of a spectrogram, which may overlap, on two axes: frequency, then time.

    The default is AST's (Audio Spectrogram Transformer, arXiv:2104.01778, sec. 2.1): 16 × 16 every
    10 bins and frames, bins beyond the last whole patch left out; but frames beyond it are padded
    with 0, so that no sound is lost. Tokens are in row-major order, time the fastest.

    Args:
        dim: features of a token.
        bins: of the spectrogram.
        patch_size: bins and frames of a patch.
        stride: bins and frames from a patch to the next; those of a patch by default.
        rest: what becomes of bins, and of frames, beyond the last whole patch: ``pad`` or ``drop``.

    Shape: ``[B, bins, T]`` → `Tokens` with values ``[B, F' · T', dim]`` on two axes. A patch is
    real where any of what it adds to those before it is.
    Raises: ValueError for sizes that are not above 0, strides longer than the patch, an input
    without frames, or one (on the CPU also a row) that is smaller than a patch where the rest is
    dropped.
    """

    def __init__(
        self,
        dim: int,
        bins: int,
        *,
        patch_size: Sequence[int] = (16, 16),
        stride: Sequence[int] | None = (10, 10),
        rest: Sequence[Rest] = ("drop", "pad"),
    ) -> None:
        super().__init__()
        stride = patch_size if stride is None else stride
        if not len(patch_size) == len(stride) == len(rest) == 2:
            raise ValueError(
                f"patch_size, stride and rest are for bins and frames, two of each, got "
                f"{patch_size}, {stride} and {rest}"
            )
        self.patch_size, self.stride = (patch_size[0], patch_size[1]), (stride[0], stride[1])
        self.rest = tuple(rest)
        check_size("dim", dim)
        check_size("bins", bins)
        if min(patch_size) < 1:
            raise ValueError(f"patch_size is 1 bin and frame or more, got {tuple(patch_size)}")
        if min(stride) < 1 or any(s > p for s, p in zip(stride, self.patch_size, strict=True)):
            raise ValueError(
                f"a stride is from 1 to the patch, so that nothing is left out between patches, "
                f"got {stride} for patches of {self.patch_size}"
            )
        for name in self.rest:
            if name not in get_args(Rest):
                raise ValueError(f"rest must be one of {get_args(Rest)}, got {name!r}")
        self.bins = bins
        self.grid(bins, self.patch_size[1])
        self.project = nn.Conv2d(1, dim, self.patch_size, self.stride)

    def grid(self, bins: int, frames: int) -> tuple[int, int]:
        """How many tokens there are on each axis, of an input ``[bins, frames]``."""
        return self._count(0, bins), self._count(1, frames)

    def _count(self, axis: int, size: int) -> int:
        patch, stride = self.patch_size[axis], self.stride[axis]
        if self.rest[axis] == "pad":
            return 1 + max(0, -(-(size - patch) // stride))
        if size < patch:
            what = ("bins", "frames")[axis]
            raise ValueError(
                f"an input of {size} {what} is smaller than a patch of {patch}: give more, a "
                f"smaller patch_size, or rest='pad' on this axis"
            )
        return 1 + (size - patch) // stride

    def forward(
        self,
        x: Float[Tensor, "batch bins frames"],
        mask: Bool[Tensor, "batch frames"] | None = None,
        step: float | None = None,
    ) -> Tokens:
        """The tokens of ``x``."""
        _check(x, mask, self.bins)
        cells = self.grid(*x.shape[1:])
        missing = [
            max(0, patch + stride * (count - 1) - has)
            for patch, stride, count, has in zip(
                self.patch_size, self.stride, cells, x.shape[1:], strict=True
            )
        ]
        if mask is not None:
            x = x.where(mask.unsqueeze(1), 0)
            mask = self._real(mask, cells)
        x = nn.functional.pad(x, (0, missing[1], 0, missing[0]))
        values = self.project(x.unsqueeze(1)).flatten(2).mT
        steps = None if step is None else (1, step * self.stride[1])
        positions = grid(*cells, step=steps, device=x.device)
        return Tokens(values, positions, None, mask)

    def _real(self, mask: Tensor, cells: tuple[int, int]) -> Tensor:
        """Of each token: whether the row has frames that it adds to those before it."""
        patch, stride = self.patch_size[1], self.stride[1]
        frames = mask.sum(-1, keepdim=True)
        looking_is_free = mask.device.type == "cpu" and not torch.compiler.is_compiling()
        if looking_is_free and self.rest[1] == "drop":
            for own in frames[(frames > 0) & (frames < patch)].tolist():
                self._count(1, own)
        first = grid(cells[1], device=mask.device).squeeze(-1) * stride
        whole = first + patch <= frames
        if self.rest[1] == "pad":
            whole = (first + patch - stride < frames) | ((first == 0) & (frames > 0))
        return whole.repeat(1, cells[0])


def _check(x: Tensor, mask: Tensor | None, bins: int) -> None:
    if x.ndim != 3 or x.shape[1] != bins:
        raise ValueError(
            f"sound has shape {tuple(x.shape)}, expected [batch, {bins}, frames]: the model was "
            f"made for {bins} bins"
        )
    if not x.shape[-1]:
        raise ValueError("sound has no frames, expected 1 or more")
    if mask is not None and mask.shape != (len(x), x.shape[-1]):
        raise ValueError(
            f"the mask of an input {tuple(x.shape)} is {(len(x), x.shape[-1])}, got "
            f"{tuple(mask.shape)}"
        )
