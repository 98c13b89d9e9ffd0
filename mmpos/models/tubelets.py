from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mmpos.models.patches import PatchEmbedding, Tokens
from mmpos.positions import grid


class TubeletEmbedding(PatchEmbedding):
    """Cut clips into tubelets, patches of one or more frames, on three axes: time, height, width.

    Source: ViViT (arXiv:2103.15691, sec. 3.2). By default tokens are counted. ``step``, the seconds
    from a frame to the next or a multiple of them, gives positions in time that do not depend on
    the frame rate: a tubelet stands where its first frame does, ``i · tubelet · step``, and the
    extent of time is what its tubelets span in this unit.

    Where a row's frames do not fill its last tubelet, its last real frame is repeated, as Qwen2-VL
    does (arXiv:2409.12191); so a row's tokens are those that it has alone.

    Args:
        dim: features of a token.
        patch_size: frames, height and width of a tubelet.
        channels: of a frame.

    Shape: ``[B, C, T, H, W]``; where rows are padded at the end a mask ``[B, T]``, True for what is
    real; ``step`` one number or ``[B]`` → `Tokens` with values ``[B, L, dim]`` in row-major order,
    and positions ``[L, 3]``, or ``[B, L, 3]`` where rows have steps of their own. With a mask the
    extent is still that of the padded clip.
    Raises: ValueError for another number of sizes, a clip without frames, frames that patches do
    not divide, or a mask or steps that do not fit.
    """

    def __init__(self, dim: int, patch_size: Sequence[int], channels: int = 3) -> None:
        if not isinstance(patch_size, Sequence) or len(patch_size) != 3:
            raise ValueError(
                f"a tubelet has three sizes, frames, height and width, got {patch_size}"
            )
        super().__init__(dim, patch_size, channels)

    def grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """How many tokens there are on each axis of a clip.

        Raises: ValueError for frames that patches do not divide.
        """
        time, *patch = self.patch_size
        if frames < 1:
            raise ValueError(f"a clip has 1 frame or more, got {frames}")
        if height % patch[0] or width % patch[1]:
            raise ValueError(
                f"frames of {height} × {width} cannot be cut into patches of "
                f"{patch[0]} × {patch[1]}: each size must be a multiple of the patch"
            )
        return -(-frames // time), height // patch[0], width // patch[1]

    def forward(
        self,
        x: Float[Tensor, "batch channel frames height width"],
        mask: Bool[Tensor, "batch frames"] | None = None,
        step: float | Float[Tensor, " batch"] | None = None,
    ) -> Tokens:
        """The tokens of ``x``."""
        if x.ndim != 5:
            raise ValueError(
                f"clips have shape {tuple(x.shape)}, expected [batch, channel, frames, height, "
                "width]"
            )
        frames, tubelet = x.shape[2], self.patch_size[0]
        cells = self.grid(*x.shape[2:])
        whole = cells[0] * tubelet
        filled = torch.arange(whole, device=x.device)
        if mask is not None:
            x, last = _real(x, mask)
            repeated = torch.minimum(filled, last.unsqueeze(-1))
            repeated = repeated[:, None, :, None, None].expand(-1, x.shape[1], -1, *x.shape[3:])
            x = x.gather(2, repeated)
            mask = mask[:, ::tubelet].repeat_interleave(cells[1] * cells[2], dim=1)
        elif whole != frames:
            x = x.index_select(2, filled.clamp_max(frames - 1))
        values = super().forward(x).values
        if step is None:
            return Tokens(values, grid(*cells, device=x.device), cells, mask)
        return Tokens(values, *self._timed(cells, step, x), mask)

    def _timed(
        self, cells: tuple[int, int, int], step: float | Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Positions and extent, time in units of the step."""
        exact = torch.float32 if x.device.type == "mps" else torch.float64
        along = torch.as_tensor(step, dtype=exact, device=x.device)
        if along.ndim > 1 or (along.ndim == 1 and along.shape[0] != x.shape[0]):
            raise ValueError(
                f"step is one number or one for each of {x.shape[0]} rows, got {tuple(along.shape)}"
            )
        looking_is_free = along.device.type == "cpu" and not torch.compiler.is_compiling()
        if looking_is_free and not (along.isfinite() & (along > 0)).all():
            raise ValueError(f"step must be above 0 and finite, got {along.tolist()}")
        unit = torch.ones_like(along)
        steps = torch.stack((along * self.patch_size[0], unit, unit), dim=-1)
        size = torch.tensor(cells, dtype=along.dtype, device=x.device) * steps
        counted = grid(*cells, device=x.device)
        return _whole(counted * steps.unsqueeze(-2)), _whole(size)


def inflated_kernel(
    kernel: Float[Tensor, "out channel height width"],
    frames: int,
    how: Literal["mean", "central"] = "mean",
) -> Float[Tensor, "out channel {frames} height width"]:
    """A patch kernel of images as one of tubelets of ``frames``.

    ``mean`` shares it out evenly among the frames, so that a still clip gives what its image gave
    (I3D, arXiv:1705.07750, sec. 2.4); ``central`` gives all of it to frame ``frames // 2`` (ViViT,
    arXiv:2103.15691, sec. 3.4).

    >>> inflated_kernel(torch.ones(1, 1, 1, 1), 2).flatten().tolist()
    [0.5, 0.5]

    Raises: ValueError for fewer frames than 1, another name, or a kernel of other axes.
    """
    if frames < 1 or how not in ("mean", "central") or kernel.ndim != 4:
        raise ValueError(
            "expected a kernel [out, channel, height, width], 1 frame or more, and 'mean' or "
            f"'central', got {tuple(kernel.shape)}, {frames} and {how!r}"
        )
    if how == "mean":
        return kernel.unsqueeze(2).repeat(1, 1, frames, 1, 1) / frames
    inflated = kernel.new_zeros(*kernel.shape[:2], frames, *kernel.shape[2:])
    inflated[:, :, frames // 2] = kernel
    return inflated


def _real(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` with 0 where it is padding, and the last real frame of each row."""
    wanted = (x.shape[0], x.shape[2])
    if mask.shape != wanted:
        raise ValueError(f"the mask of clips {tuple(x.shape)} is {wanted}, got {tuple(mask.shape)}")
    looking_is_free = mask.device.type == "cpu" and not torch.compiler.is_compiling()
    if looking_is_free and (mask[:, 1:] & ~mask[:, :-1]).any():
        raise ValueError("padding comes at the end of a row, the mask has real frames after it")
    return x.where(mask[:, None, :, None, None], 0), (mask.sum(-1) - 1).clamp_min(0)


def _whole(numbers: Tensor) -> Tensor:
    """Numbers as they are, but whole where rounding put them beside a whole number."""
    near = numbers.round()
    return torch.where((numbers - near).abs() < 1e-6, near, numbers)
