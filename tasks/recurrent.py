"""Recurrence in place of attention: a baseline without explicit positions."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor, nn

from mmpos.models import Transformer
from mmpos.models.block import Mlp
from mmpos.models.transformer import Size
from mmpos.positions import Axes, axis_count


class Mamba2(nn.Module):
    """Mamba-2's mixer, as the library `transformers` has it: a gated state-space recurrence.

    Source: Transformers are SSMs (arXiv:2405.21060, sec. 7). Without expansion it has about as many
    parameters as attention.

    Args:
        dim: features of a token.
        head_dim: features that share one decay; must divide ``expand · dim``.
        state: numbers that a feature keeps of what came before.
        expand: features inside for each outside.

    Shape: ``[B, L, dim]`` → ``[B, L, dim]``, each from those up to it.
    Raises: ImportError without the library; ValueError for heads that do not divide.
    """

    def __init__(self, dim: int, *, head_dim: int = 16, state: int = 16, expand: int = 1) -> None:
        super().__init__()
        if min(dim, head_dim, state, expand) < 1 or expand * dim % head_dim:
            raise ValueError(f"head_dim={head_dim} must divide expand · dim = {expand * dim}")
        try:
            library: Any = importlib.import_module("transformers")
            code: Any = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
        except ImportError as error:
            raise ImportError(
                "Mamba2 is that of the library transformers: pip install 'mmpos[recurrent]'"
            ) from error
        settings = library.Mamba2Config(
            hidden_size=dim,
            num_heads=expand * dim // head_dim,
            head_dim=head_dim,
            state_size=state,
            expand=expand,
            n_groups=1,
            chunk_size=64,
            num_hidden_layers=1,
        )
        self.mixer = code.Mamba2Mixer(settings, 0)

    def forward(self, x: Float[Tensor, "batch length dim"]) -> Float[Tensor, "batch length dim"]:
        """Mix along the length."""
        return self.mixer(x)


class _InPlaceOfAttention(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor, *_: None) -> Tensor:
        return self.mixer(x)


class Recurrent(Transformer):
    """The layers of a `Transformer` with a recurrent mixer in place of attention.

    Order is in how it goes along the tokens, so it takes no encoding. Each document of a packed row
    is mixed by itself: a run of tokens of the same segment, so that a segment which comes back
    after another is a new document (attention would see both of its parts).

    Args:
        axes: one, or its length.
        size, dim, depth: as in `Transformer`.
        mixer: makes a causal mixer ``[B, L, dim]`` → ``[B, L, dim]`` from ``dim``.
        mlp, norm, drop_path: as in `Transformer`.
        causal: always.

    Raises: ValueError for another order or more axes; in the call for a cache, which it has not, or
    a mask, which a row that is padded on its right does not need.
    """

    caches: ClassVar[bool] = False

    def __init__(
        self,
        axes: Axes,
        *,
        size: Size = "tiny",
        dim: int | None = None,
        depth: int | None = None,
        mixer: Callable[[int], nn.Module] = Mamba2,
        mlp: Callable[[int], nn.Module] = Mlp,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        drop_path: float = 0.0,
        causal: bool = True,
    ) -> None:
        if not causal or axis_count(axes) != 1:
            raise ValueError("a recurrent network goes along one axis, and is causal")
        super().__init__(
            axes,
            size=size,
            dim=dim,
            depth=depth,
            heads=1,
            mlp=mlp,
            norm=norm,
            drop_path=drop_path,
            causal=True,
        )
        for layer in self.layers:
            layer.attention = _InPlaceOfAttention(mixer(self.dim))

    def forward(
        self,
        x: Float[Tensor, "batch length dim"],
        positions: Num[Tensor, "*position_batch length axes"],
        *,
        segments: Int[Tensor, "*#batch length"] | None = None,
        **given: Any,
    ) -> Float[Tensor, "batch length dim"]:
        """Encode tokens ``x``; positions are not looked at."""
        wrong = [name for name in ("cache", "mask", "shards") if given.get(name) is not None]
        if wrong:
            raise ValueError(f"a recurrent network takes no {wrong[0]}")
        if segments is None:
            return self._encoded(x)
        rows = segments.expand(x.shape[:2])
        begins = torch.ones_like(rows, dtype=torch.bool)
        begins[:, 1:] = rows[:, 1:] != rows[:, :-1]
        document = begins.flatten().cumsum(0) - 1
        lengths = document.bincount()
        place = (
            torch.arange(len(document), device=x.device) - (lengths.cumsum(0) - lengths)[document]
        )
        padded = x.new_zeros(len(lengths), int(lengths.max()), x.shape[-1])
        padded[document, place] = x.flatten(0, 1)
        return self._encoded(padded)[document, place].view(x.shape)

    def _encoded(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)
