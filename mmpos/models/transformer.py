from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor, nn

from mmpos.additive import AdditiveEncoding
from mmpos.attention import KVCache, Prepared, SequenceShards, Whole, prepare
from mmpos.bias import AttentionBias, ContentBias
from mmpos.coordinates import Extent
from mmpos.frequencies import Length
from mmpos.models.block import Attention, Block, Mlp
from mmpos.models.given import check_tokens, frozen_length
from mmpos.models.initial import STD, draw_as_vit
from mmpos.models.lengths import length_for
from mmpos.models.sizes import Size, sizes_of
from mmpos.models.slots import fill, fill_layers, pattern, with_head_dim
from mmpos.positions import Axes, absent, axis_count, join
from mmpos.rotary import RotaryEncoding, Rotation


class Transformer(nn.Module):
    """A pre-norm transformer with the three places where a position can enter.

    ``additive`` is added to the tokens, ``rotary`` turns queries and keys, ``bias`` is added to the
    attention scores; each is computed once per forward pass. All None is a transformer without
    positions (NoPE). A slot takes the encoding itself, or a callable that makes it from
    ``(dim | head_dim | heads, axes)``, such as its class.

    A list in ``rotary``, ``bias`` or ``window`` is a pattern that layers repeat in turn. In
    ``[RotaryEncoding] * 3 + [nn.Identity]`` every fourth layer has no rotation (RNoPE,
    arXiv:2501.18795, sec. 3); two encodings, with a window for the first, make local and global
    layers of different bases (Gemma 3, arXiv:2503.19786, sec. 2). Layers in the same place of a
    pattern share one encoding; a list as long as the depth has one for each layer.

    Args:
        axes: number of axes, or the grid that the model is trained on.
        size: width, depth and heads: ``nano`` 64, 4, 4; ``tiny`` 192, 12, 3; ``small`` 384, 12, 6;
            ``base`` 768, 12, 12 (the last three as in DeiT, arXiv:2012.12877, table 1).
        dim, depth, heads: in place of those of ``size``.
        kv_heads, qk_norm: see `Attention`.
        additive, rotary, bias: the three slots.
        per_layer: slots in which every layer has an encoding of its own (learned ones, such as
            mixed RoPE, are usually not shared); a callable is then called once for each layer.
        window: how many tokens before it (and after, unless causal) a token sees; all if None.
        class_token: whether a learned token without a place comes first.
        registers: how many more learned tokens without a place follow it (arXiv:2309.16588).
        mlp, norm: make the feed-forward part and the norms from ``dim``.
        drop_path: drop rate of the last layer; it grows linearly from 0 at the first.
        causal: whether a token sees only itself and those before it in order.

    Raises: ValueError for an unknown size, heads that do not divide, or an encoding that was made
    for other sizes.

    >>> encoder = Transformer((4, 6), size="nano", rotary=mmpos.RotaryEncoding)
    >>> encoder(torch.zeros(2, 24, 64), mmpos.positions.grid(4, 6)).shape
    torch.Size([2, 24, 64])
    """

    caches: ClassVar[bool] = True
    """Whether it goes on from a `KVCache`."""

    def __init__(
        self,
        axes: Axes,
        *,
        size: Size = "tiny",
        dim: int | None = None,
        depth: int | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        additive: Callable[[int, Sequence[int]], AdditiveEncoding] | None = None,
        rotary: list[Callable[[int, Sequence[int]], RotaryEncoding | nn.Identity]]
        | Callable[[int, Sequence[int]], RotaryEncoding]
        | None = None,
        bias: list[Callable[[int, Sequence[int]], AttentionBias | ContentBias | nn.Identity]]
        | Callable[[int, Sequence[int]], AttentionBias | ContentBias]
        | None = None,
        per_layer: Sequence[Literal["rotary", "bias"]] = (),
        window: list[int | None] | int | None = None,
        class_token: bool = False,
        registers: int = 0,
        mlp: Callable[[int], nn.Module] = Mlp,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        qk_norm: Callable[[int], nn.Module] | None = None,
        drop_path: float = 0.0,
        causal: bool = False,
    ) -> None:
        super().__init__()
        axis_count(axes)
        self.dim, depth, heads = sizes_of(size, dim=dim, depth=depth, heads=heads)
        if registers < 0:
            raise ValueError(f"expected sizes of 1 or more, 0 for registers, got {registers=}")
        if not 0 <= drop_path < 1:
            raise ValueError(f"drop_path must be at least 0 and below 1, got {drop_path}")
        self.axes = axes
        self.class_token = class_token
        self.causal = causal
        self.prefix_tokens = int(class_token) + registers
        layers = [
            Block(
                self.dim,
                Attention(self.dim, heads, kv_heads=kv_heads, qk_norm=qk_norm),
                mlp(self.dim),
                norm=norm,
                drop_path=drop_path * layer / max(1, depth - 1),
            )
            for layer in range(depth)
        ]
        self.layers = nn.ModuleList(layers)
        self.norm = norm(self.dim)
        self.prefix = (
            nn.Parameter(torch.empty(self.prefix_tokens, self.dim)) if self.prefix_tokens else None
        )
        draw_as_vit(self.layers)
        self.reset_parameters()
        own = {"rotary": rotary, "bias": bias}
        for name in [per_layer] if isinstance(per_layer, str) else per_layer:
            if name not in own:
                raise ValueError(f"per_layer names slots among 'rotary' and 'bias', got {name!r}")
            if own[name] is None or isinstance(own[name], nn.Module):
                raise ValueError(
                    f"per_layer makes {name} anew for each layer, which takes its class or a "
                    f"callable in that place, got {own[name]!r}"
                )
        if window is not None and self.prefix_tokens:
            raise ValueError("a window would hide class and register tokens: use one or the other")
        self.windows: list[int | None] = pattern(window, depth, "window")
        head_dim = self.dim // heads
        self.additive: AdditiveEncoding | None = (
            None if additive is None else fill(additive, AdditiveEncoding, "dim", self.dim, axes)
        )
        self.rotary, self.rotary_of = fill_layers(
            rotary,
            lambda slot: fill(slot, RotaryEncoding, "head_dim", head_dim, axes),
            depth,
            "rotary",
            "rotary" in per_layer,
        )
        self.bias, self.bias_of = fill_layers(
            bias,
            lambda slot: fill(
                with_head_dim(slot, head_dim),
                (AttentionBias, ContentBias),
                "heads",
                heads,
                axes,
            ),
            depth,
            "bias",
            "bias" in per_layer,
        )

    def reset_parameters(self) -> None:
        """Draw prefix tokens as ViT does; layers draw their own weights."""
        if self.prefix is not None:
            nn.init.trunc_normal_(self.prefix, std=STD)

    def forward(
        self,
        x: Float[Tensor, "batch length dim"],
        positions: Num[Tensor, "*position_batch length axes"],
        *,
        extent: Extent | None = None,
        mask: Bool[Tensor, "#batch length"] | None = None,
        segments: Int[Tensor, "*#batch length"] | None = None,
        length: Length | None = None,
        cache: KVCache | None = None,
        shards: SequenceShards | None = None,
    ) -> Float[Tensor, "batch prefix_and_length dim"]:
        """Encode tokens ``x`` at ``positions``: shared ``[L, A]``, or a row's own ``[B, L, A]``.

        Args:
            extent: size of the grid that the positions lie on, for readings that need it.
            mask: True for real tokens, False for padding.
            segments: the document of each token, in each row or in all; tokens see their own only.
            length: for context extensions that depend on it; by default the number of tokens, or
                the grid.
            cache: the tokens before these, to which these are added; see `KVCache`.
            shards: the processes that share the tokens, of which these are the own ones.

        Returns: prefix tokens first, then the tokens.
        Raises: ValueError for positions that do not fit, segments together with prefix tokens, or a
            cache together with shards or in a transformer that is not causal or has prefix tokens.
        """
        check_tokens(x, positions, self.dim, self.axes)
        if self.prefix is not None:
            if segments is not None:
                raise ValueError(
                    "segments cannot be combined with class or register tokens, "
                    "which belong to no document"
                )
            x = torch.cat((self.prefix.to(x.dtype).expand(x.shape[0], -1, -1), x), dim=1)
            none = absent(self.prefix_tokens, positions.shape[-1], device=positions.device)
            positions = join(none, positions)
            if mask is not None:
                mask = nn.functional.pad(mask, (self.prefix_tokens, 0), value=True)
        if shards is None or shards.alone:
            return self._through(x, positions, extent, mask, segments, length, cache)
        if cache is not None:
            raise ValueError("a cache holds whole sequences, not shards: pass one of the two")
        whole = shards.whole(
            x,
            positions,
            mask,
            segments,
            extent=extent,
            length=length,
            prefix=self.prefix_tokens,
            training=self.training,
        )
        with whole.alike(x.device):
            return self._through(x, positions, extent, mask, segments, length, whole=whole)

    def _through(
        self,
        x: Tensor,
        positions: Tensor,
        extent: Extent | None,
        mask: Tensor | None,
        segments: Tensor | None,
        length: Length | None,
        cache: KVCache | None = None,
        whole: Whole | None = None,
    ) -> Tensor:
        """The tokens after all layers, prefix tokens among them."""
        if self.additive is not None:
            x = x + self.additive(positions, extent).to(x.dtype)
        keys, k_segments, late, reach = positions, segments, None, extent
        q_index = k_index = None
        if cache is not None:
            length = frozen_length(
                cache,
                length,
                extent,
                growing=self.causal and self.prefix is None,
                needed=any(each.needs_length for each in _modules(self.rotary)),
            )
            late = cache.extended(x.shape[0], positions, mask, segments)
            keys, mask, k_segments, k_index = late
            q_index = k_index[..., -x.shape[-2] :]
        if whole is not None:
            keys, mask, k_segments, k_index, q_index, reach = whole[:6]
        tokens: int | Tensor = keys.shape[-2] - self.prefix_tokens
        if mask is not None and axis_count(self.axes) == 1:
            tokens = mask[..., self.prefix_tokens :].sum(-1).clamp_min(1)
        lengths = [
            length_for(each, tokens, extent, length, segments) for each in _modules(self.rotary)
        ]
        turns = list(zip(_modules(self.rotary), lengths, strict=True))
        rotations = [rotary(positions, extent, length=own) for rotary, own in turns]
        held: list[Rotation] = []
        if cache is not None and not cache.rotated:
            held = [rotary(keys, extent, length=own) for rotary, own in turns]
        biases = [bias(positions, keys, reach) for bias in _modules(self.bias)]
        prepared: dict[tuple[int | None, int | None], Prepared] = {
            (added, window): prepare(
                x.shape[-2],
                keys.shape[-2],
                bias=None if added is None else biases[added],
                causal=self.causal,
                window=window,
                q_index=None if window is None and whole is None else q_index,
                k_index=None if window is None and whole is None else k_index,
                q_segments=segments,
                k_segments=k_segments,
                mask=mask,
                device=x.device,
            )
            for added, window in dict.fromkeys(zip(self.bias_of, self.windows, strict=True))
        }
        if cache is not None and late is not None:
            cache.note(x.shape[0], late, length)
        for index, (layer, turn, added, window) in enumerate(
            zip(self.layers, self.rotary_of, self.bias_of, self.windows, strict=True)
        ):
            x = layer(
                x,
                None if turn is None else rotations[turn],
                prepared[added, window],
                None if cache is None else cache.layer(index),
                held[turn] if held and turn is not None else None,
                whole,
            )
        return self.norm(x)


def _modules(slot: nn.Module | None) -> list[Any]:
    if slot is None:
        return []
    return list(slot) if isinstance(slot, nn.ModuleList) else [slot]
