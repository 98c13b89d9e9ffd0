from __future__ import annotations

from collections.abc import Callable

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import silu

from mmpos.attention import LayerCache, Prepared, Whole, attend
from mmpos.rotary import Rotation, rotate


class Attention(nn.Module):
    """Multi-head self-attention whose queries and keys may be turned.

    Args:
        dim: features of a token.
        heads: query heads; must divide ``dim``.
        kv_heads: key and value heads, each shared by ``heads / kv_heads`` query heads (GQA,
            arXiv:2305.13245); as many as ``heads`` by default.
        qk_norm: makes a norm of a head's features for queries and one for keys, before they are
            turned (ViT-22B, arXiv:2302.05442, sec. 2).

    Raises: ValueError for heads that do not divide.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        qk_norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        shared = heads if kv_heads is None else kv_heads
        if min(dim, heads, shared) < 1 or dim % heads or heads % shared:
            raise ValueError(
                f"dim={dim} must be a multiple of heads={heads}, and heads of kv_heads={shared}"
            )
        self.head_dim = dim // heads
        self.split = [heads * self.head_dim, shared * self.head_dim, shared * self.head_dim]
        self.qkv = nn.Linear(dim, sum(self.split))
        self.q_norm = qk_norm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = qk_norm(self.head_dim) if qk_norm else nn.Identity()
        self.out = nn.Linear(dim, dim)

    def forward(
        self,
        x: Float[Tensor, "batch length dim"],
        rotation: Rotation | None = None,
        prepared: Prepared | None = None,
        cache: LayerCache | None = None,
        held: Rotation | None = None,
        whole: Whole | None = None,
    ) -> Float[Tensor, "batch length dim"]:
        """Attend within ``x``; ``rotation`` and ``prepared`` come once per forward pass.

        With a ``cache``, also to the keys that it has; ``held`` turns all of them if they are kept
        unturned. With ``whole``, to the keys of all processes that share the tokens.
        """
        q, k, v = (
            rearrange(part, "b l (h d) -> b h l d", d=self.head_dim)
            for part in self.qkv(x).split(self.split, dim=-1)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q = rotate(q, rotation)
            k = rotate(k, rotation.dual) if held is None else k
        if cache is not None:
            k, v = cache.append(k, v)
        if held is not None:
            k = rotate(k, held.dual)
        if whole is not None:
            k, v = whole.gather(k, v)
        out = attend(q, k, v, prepared=prepared)
        return self.out(rearrange(out, "b h l d -> b l (h d)"))


class Mlp(nn.Module):
    """Two layers with GELU between, four times as wide inside."""

    def __init__(self, dim: int, *, ratio: float = 4.0) -> None:
        super().__init__()
        self.up = nn.Linear(dim, int(ratio * dim))
        self.down = nn.Linear(int(ratio * dim), dim)
        self.activation = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class SwiGLU(nn.Module):
    """``W₃ (silu(W₁ x) ⊙ W₂ x)`` (arXiv:2002.05202); as many parameters as `Mlp` at ratio 8/3."""

    def __init__(self, dim: int, *, ratio: float = 8 / 3) -> None:
        super().__init__()
        hidden = int(ratio * dim)
        self.up = nn.Linear(dim, 2 * hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(silu(gate) * value)


class DropPath(nn.Module):
    """In training, drops a residual branch of whole samples, and scales up the kept ones.

    Source: Deep Networks with Stochastic Depth (arXiv:1603.09382).
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"drop path must be at least 0 and below 1, got {rate}")
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        kept = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device) >= self.rate
        return x * kept.to(x.dtype) / (1 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


class Block(nn.Module):
    """A pre-norm layer: attention, then a feed-forward part, each on a residual branch."""

    def __init__(
        self,
        dim: int,
        attention: Attention,
        mlp: nn.Module,
        *,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm = norm(dim)
        self.attention = attention
        self.mlp_norm = norm(dim)
        self.mlp = mlp
        self.drop_path = DropPath(drop_path)

    def forward(
        self,
        x: Float[Tensor, "batch length dim"],
        rotation: Rotation | None = None,
        prepared: Prepared | None = None,
        cache: LayerCache | None = None,
        held: Rotation | None = None,
        whole: Whole | None = None,
    ) -> Float[Tensor, "batch length dim"]:
        """One layer."""
        attended = self.attention(self.attention_norm(x), rotation, prepared, cache, held, whole)
        x = x + self.drop_path(attended)
        return x + self.drop_path(self.mlp(self.mlp_norm(x)))
