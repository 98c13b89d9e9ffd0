from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmpos.bias.offsets import OffsetBias
from mmpos.coordinates import Coordinates
from mmpos.positions import Axes, axis_count, grid_of

Form = Literal["swin", "cr"]
_AT_ONCE = 2**24  # numbers of the hidden layer


class LogCPB(OffsetBias):
    """A learned function of the offset on a logarithmic scale, for any window (log-CPB).

    ``swin``: ``16 · σ(f(x))`` with ``x = sign(d) · log2(1 + 8 |d| / (W - 1)) / log2(8)`` on each
    axis, ``d = query - key`` and ``f`` one hidden layer of ReLU, without a bias at the end, as in
    Swin V2's code (arXiv:2111.09883, sec. 3.3). ``cr``: ``f(x)`` with ``x = sign(d) · ln(1 + |d|)``
    as in that paper's text and timm's ``swinv2_cr`` models, with a bias at the end.

    Nothing depends on the number of tokens: another window needs other positions only. The window
    ``W`` that scales offsets must stay that of the training, however (``pretrained_window_size`` in
    Swin V2's code); with a grid of another size pass it as ``window``.

    A token without a place has bias 0 to and from every other; on an axis that one of the two
    tokens lacks the offset is 0.

    Args:
        heads: attention heads.
        axes: the grid or window, a size for each axis, or the number of axes.
        form: ``swin`` or ``cr``.
        window: the window that scales the offsets of ``swin``; by default the grid.
        hidden: width of the hidden layer; 512 in Swin V2, 384 in timm's ``swinv2_cr``.
        std: standard deviation of the initial weights.
        coordinates: how positions are read.

    Shape: ``[..., Lq, A]`` and ``[..., Lk, A]`` → ``[..., H, Lq, Lk]``, float32. Parameters:
    ``weight_in [hidden, A]``, ``bias_in [hidden]``, ``weight_out [H, hidden]`` and, for ``cr``,
    ``bias_out [H]``. The hidden layer is formed once for each different offset, not for each pair;
    compiled, where their number is not known, for each pair.
    Raises: TypeError if ``swin`` has neither a grid nor a window; ValueError for an unknown form, a
    window of other axes or for ``cr``, which has no use for it, and a hidden width below 1.

    >>> bias = LogCPB(3, (4, 6))
    >>> bias(mmpos.positions.grid(4, 6), mmpos.positions.grid(4, 6)).shape
    torch.Size([3, 24, 24])
    """

    waits: ClassVar[bool] = True

    def __init__(
        self,
        heads: int,
        axes: Axes,
        *,
        form: Form = "swin",
        window: Sequence[int] | None = None,
        hidden: int = 512,
        std: float = 0.02,
        coordinates: Coordinates | None = None,
    ) -> None:
        super().__init__(heads, axes, coordinates=coordinates)
        if form not in get_args(Form):
            raise ValueError(f"form must be one of {get_args(Form)}, got {form!r}")
        if hidden < 1:
            raise ValueError(f"hidden must be 1 or more, got {hidden}")
        count = axis_count(axes)
        self.form: Form = form
        self.window = None if window is None else tuple(window)
        self.hidden = hidden
        self.std = std
        if form == "cr" and window is not None:
            raise ValueError("the form cr does not scale offsets by a window: drop it")
        if form == "swin" and self.window is None and grid_of(axes) is None:
            raise TypeError(
                "offsets are scaled by the window: make the bias with a grid instead of a number "
                "of axes, or pass window, a size for each axis"
            )
        if self.window is not None and (len(self.window) != count or min(self.window) < 1):
            raise ValueError(f"window must have {count} sizes of 1 or more, got {window}")
        self.weight_in = nn.Parameter(torch.empty(hidden, count))
        self.bias_in = nn.Parameter(torch.empty(hidden))
        self.weight_out = nn.Parameter(torch.empty(heads, hidden))
        self.bias_out = nn.Parameter(torch.empty(heads)) if form == "cr" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights anew as Swin V2 does: truncated normal, and biases 0."""
        for weight in (self.weight_in, self.weight_out):
            nn.init.trunc_normal_(weight, std=self.std, a=-2 * self.std, b=2 * self.std)
        for bias in (self.bias_in, self.bias_out):
            if bias is not None:
                nn.init.zeros_(bias)

    def of_offsets(self, offsets: Sequence[Tensor]) -> Tensor:
        """The bias of offsets, query minus key, a tensor ``[...]`` for each axis → ``[H, ...]``.

        It has the dtype of the offsets, float32 or float64; the weights are taken to it.
        """
        scaled = [self._scaled(offset, axis) for axis, offset in enumerate(offsets)]
        x = torch.stack(torch.broadcast_tensors(*scaled))
        device = x.device.type
        available = torch.amp.is_autocast_available(device)
        with torch.autocast(device, enabled=False) if available else contextlib.nullcontext():
            inner = self.weight_in.to(x) @ x.flatten(1) + self.bias_in.to(x).unsqueeze(-1)
            out = self.weight_out.to(x) @ inner.relu()
        if self.bias_out is not None:
            out = out + self.bias_out.to(x).unsqueeze(-1)
        bias = out if self.form == "cr" else 16 * out.sigmoid()
        return bias.reshape(self.heads, *x.shape[1:])

    def _scaled(self, offset: Tensor, axis: int) -> Tensor:
        if self.form == "cr":
            return offset.sign() * offset.abs().log1p()
        window = self.window or grid_of(self.axes)
        assert window is not None
        share = 8 / max(window[axis] - 1, 1) * offset.abs()
        return offset.sign() * (share.log1p() / math.log(8))

    def score(self, query: Sequence[Tensor], key: Sequence[Tensor], head: Tensor) -> Tensor:
        offsets, seen = _offsets(query, key)
        heads_last = self.of_offsets(offsets).movedim(0, -1)
        heads_last, head = torch.broadcast_tensors(heads_last, head.unsqueeze(-1))
        own = heads_last.gather(-1, head[..., :1]).squeeze(-1)
        return torch.where(seen, own, 0).float()

    def lookup(self, q: Tensor, k: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        found = self.columns(q, k)
        if found is None:
            bias = self.dense(q, k)
            return lambda query, key, head: bias[head, query, key]
        nothing = found.bias.shape[-1] - 1

        def own(query: Tensor, key: Tensor, head: Tensor) -> Tensor:
            absent = found.absent[0][query] | found.absent[1][key]
            column = torch.where(absent, nothing, found.queries[query] - found.keys[key])
            return found.bias[head, column]

        return own

    def pairs(self, q: Tensor, k: Tensor) -> Tensor:
        rows = max(1, _AT_ONCE // (self.hidden * q.shape[:-2].numel() * max(1, k.shape[-2])))
        if torch.compiler.is_compiling() or q.shape[-2] <= rows:
            return self._pairs(q, k)
        parts = q.split(rows, dim=-2)
        parts = [checkpoint(self._pairs, part, k, use_reentrant=False) for part in parts]
        return torch.cat(parts, dim=-2)

    def _pairs(self, q: Tensor, k: Tensor) -> Tensor:
        """The dense bias, with a hidden layer for each pair."""
        offsets, seen = _offsets(q.unsqueeze(-2).unbind(-1), k.unsqueeze(-3).unbind(-1))
        if torch.compiler.is_compiling():
            offsets = [offset.float() for offset in offsets]
        return torch.where(seen, self.of_offsets(offsets), 0).float().movedim(0, -3)

    def extra_repr(self) -> str:
        parts = [f"heads={self.heads}, axes={self.axes}, form={self.form}"]
        parts += [f"window={self.window}"] if self.window is not None else []
        return ", ".join([*parts, f"hidden={self.hidden}"])


def _offsets(query: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Offsets, 0 on an axis that a token lacks, and whether there is an axis that both have."""
    offsets, seen = [], None
    for q, k in zip(query, key, strict=True):
        offset = q - k
        known = ~offset.isnan()
        offsets.append(torch.where(known, offset, 0))
        seen = known if seen is None else seen | known
    assert seen is not None
    return offsets, seen
