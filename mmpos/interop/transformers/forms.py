"""How a transformers model turns queries and keys, found by looking at what it makes of some."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mmpos.interop.transformers.attention import seen
from mmpos.interop.transformers.sites import Site, by_type
from mmpos.rotary import Rotation, rotate
from mmpos.rotary.rotation import LAYOUTS, Layout

Spread = Literal["halves", "neighbours", "once", "complex"]

LAYOUT_OF: dict[str, Layout] = {
    "falcon": "half",
    "hunyuan_v1_dense": "half",
    "hunyuan_v1_moe": "half",
}
"""Layouts of models whose queries are not seen right after they are turned."""

_TOKENS = 4
"""How many a model is looked at with, up to the position `_FAR` if it is made for that many."""

_FAR = 100


@dataclass(frozen=True)
class Form:
    """How a model turns queries and keys of layers of one type.

    Args:
        spread: how the cosines of ``pairs`` pairs lie in what its rotary module returns: twice, one
            half after the other or side by side, once, or as complex numbers with the sines.
        sine_first: whether the sines come before the cosines.
        exact: whether they are float32 whatever the model's dtype is.
        layout: which features of its weights form a pair.
        seen_layout: which do where the attention interface gets them.
        start: the first feature that is turned.
        head_dim: features of a head.
    """

    spread: Spread
    sine_first: bool
    exact: bool
    pairs: int
    layout: Layout
    seen_layout: Layout
    start: int
    head_dim: int
    moved: bool = False
    """Whether the weights were brought into another layout than the model's code has."""

    def of_weights(self, layout: Layout) -> Form:
        """The form of a model whose weights were brought into a layout."""
        if layout == self.layout:
            return self
        return replace(self, layout=layout, seen_layout=layout, moved=True)

    def give(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Any:
        """Cosines and sines ``[..., L, P]`` as the model has them."""
        if self.spread == "complex":
            return torch.complex(cos, sin)
        if self.spread == "halves":
            cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        elif self.spread == "neighbours":
            cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        if not self.exact:
            cos, sin = cos.to(dtype), sin.to(dtype)
        return (sin, cos) if self.sine_first else (cos, sin)

    def none(self, positions: Tensor, dtype: torch.dtype) -> Any:
        """What turns nothing, for tokens at ``positions [..., L, A]``."""
        one = torch.ones(*positions.shape[:-1], self.pairs, device=positions.device)
        return self.give(one, torch.zeros_like(one), dtype)

    def misfit(self, rotation: Rotation, head_dim: int) -> str | None:
        """What keeps the weights from being turned by a rotation; None if nothing does."""
        pairs = rotation.cos.shape[-1]
        if head_dim != self.head_dim:
            return f"a layer with heads of {self.head_dim} features got an encoding for {head_dim}"
        if rotation.layout != self.layout:
            return (
                f"the weights are laid out {self.layout}: make the encoding with "
                f"layout={self.layout!r}; if permute_model reordered them, pass "
                f"layout={rotation.layout!r} to replace"
            )
        if pairs != self.pairs:
            return (
                f"the encoding turns {2 * pairs} features of a head, the model turns "
                f"{2 * self.pairs}: make it with rotary_dim={2 * self.pairs}"
            )
        if rotation.start != self.start:
            where = "last" if self.start else "first"
            return f"the model turns the {where} features of a head: trailing={self.start > 0}"
        return None

    def carries(self, rotation: Rotation) -> bool:
        """Whether the model's own cosines and sines can say all that a rotation does."""
        plain = rotation.second is None and rotation.scale is None and rotation.keys is None
        return plain and rotation.cos.shape[-3] == 1 and not self.moved


def forms(site: Site) -> dict[str | None, Form]:
    """The form of each type of layer.

    Raises: ValueError where it cannot be told.
    """
    found: dict[str | None, Form] = {}
    for kind in dict.fromkeys(site.types):
        if kind is None or hasattr(site.turning.module, f"{kind}_inv_freq"):
            attentions = [
                attention
                for attention, own in zip(site.attentions, site.types, strict=True)
                if own == kind and attention is not None
            ]
            found[kind] = _form(site, kind, attentions)
    return found


def sizes(site: Site, known: dict[str | None, Form]) -> tuple[int, bool, set[int]]:
    """Heads, whether each has keys of its own, and features of a head, which may be several.

    Raises: ValueError where layers have different heads, or it cannot be told.
    """
    found = set()
    for attention, kind in zip(site.attentions, site.types, strict=True):
        if attention is None or getattr(attention, "is_kv_shared_layer", False):
            continue
        hidden, given = asked(site, attention, known.get(kind))
        own = seen(attention, hidden, **given)
        found.add((own.query.shape[1], own.key.shape[1], own.query.shape[-1]))
    if not found:
        config = site.stack.config
        heads = config.num_attention_heads
        found.add((heads, heads, config.hidden_size // heads))
    heads = {each[0] for each in found}
    if len(heads) > 1:
        raise ValueError(f"layers have different numbers of heads: {sorted(heads)}")
    return heads.pop(), all(q == k for q, k, _ in found), {each[2] for each in found}


def _form(site: Site, kind: str | None, attentions: list[Any]) -> Form:
    cos, sin, spread, sine_first = _own(site, kind)
    exact = spread == "complex" or _call(site, kind, torch.bfloat16)[0].dtype != torch.bfloat16
    pairs = cos.shape[-1]

    def form(layout: Layout, start: int, head_dim: int) -> Form:
        swapped = getattr(site.stack.config, "rope_interleave", False)
        own: Layout = "interleaved" if swapped else layout
        return Form(spread, sine_first, exact, pairs, own, layout, start, head_dim)

    known = LAYOUT_OF.get(site.kind)
    if known is not None:
        config = site.stack.config
        head_dim = getattr(config, "head_dim", None)
        return form(known, 0, head_dim or config.hidden_size // config.num_attention_heads)
    for attention in attentions:
        hidden = _hidden(site, attention)
        blank = Form(spread, sine_first, exact, pairs, "half", "half", 0, 0)
        where = torch.zeros(1, _TOKENS, 1, device=hidden.device)
        scores = []
        for turned in (False, True):
            given = (
                blank.give(cos.to(hidden.device), sin.to(hidden.device), hidden.dtype)
                if turned
                else blank.none(where, hidden.dtype)
            )
            found = seen(attention, hidden, position_embeddings=given)
            q, k = found.query.double(), found.key.double()
            scores.append((q, k, _scores(q, k)))
        (q, k, plain), (_, _, real) = scores
        change = (real - plain).abs().max()
        if change <= 1e-3 * plain.abs().max():
            continue  # a layer that is not turned
        width = q.shape[-1]
        for layout in LAYOUTS[::-1]:
            for start in dict.fromkeys((0, width - 2 * pairs)):
                if start < 0:
                    continue
                turns = [part.to(q.device).unsqueeze(-3) for part in (cos, sin)]
                rotation = Rotation(turns[0], turns[1], layout, start)
                expected = _scores(rotate(q, rotation), rotate(k, rotation))
                if (expected - real).abs().max() < 0.05 * change:
                    return form(layout, start, width)
    raise ValueError(
        f"how {type(site.stack).__name__} turns its queries and keys cannot be told: its own "
        "rotation can only be kept"
    )


def _own(site: Site, kind: str | None) -> tuple[Tensor, Tensor, Spread, bool]:
    """Cosines and sines ``[1, L, P]`` of the model, and how they lie in what it returns."""
    out = _call(site, kind, torch.float32)
    if isinstance(out, Tensor) and out.is_complex():
        return out.real, out.imag, "complex", False
    if not (isinstance(out, tuple) and len(out) == 2):
        raise ValueError(
            f"the rotary module of {type(site.stack).__name__} gives no cosines and sines, but "
            f"{type(out).__name__}"
        )
    sine_first = bool((out[0][..., 0, :] == 0).all())
    cos, sin = out[::-1] if sine_first else out
    half = cos.shape[-1] // 2
    if torch.equal(sin[..., :half], sin[..., half:]):
        return cos[..., :half], sin[..., :half], "halves", sine_first
    if torch.equal(sin[..., ::2], sin[..., 1::2]):
        return cos[..., ::2], sin[..., ::2], "neighbours", sine_first
    return cos, sin, "once", sine_first


def _call(site: Site, kind: str | None, dtype: torch.dtype) -> Any:
    """What the model's rotary module returns."""
    like = next(site.stack.parameters())
    if like.is_meta:
        raise ValueError(
            f"{type(site.stack).__name__} is on the meta device: load its weights first"
        )
    most = site.axes[0] if isinstance(site.axes, tuple) else _FAR
    ids = torch.tensor([[0, 1, 3, max(4, min(_FAR, most - 1))]], device=like.device)
    if not isinstance(site.axes, tuple) and site.axes > 1:
        ids = ids.expand(site.axes, 1, -1)
    x = torch.zeros(1, dtype=dtype, device=like.device)
    rotary = site.turning.module
    with torch.no_grad():
        return rotary(x, ids, kind) if by_type(rotary) else rotary(x, ids)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)


def asked(site: Site, attention: Any, form: Form | None) -> tuple[Tensor, dict[str, Any]]:
    """Hidden states, and what else attention of this form is called with to turn nothing."""
    hidden = _hidden(site, attention)
    if form is None:
        return hidden, {}
    where = torch.zeros(*hidden.shape[:2], 1, device=hidden.device)
    return hidden, {"position_embeddings": form.none(where, hidden.dtype)}


def _hidden(site: Site, attention: nn.Module) -> Tensor:
    like = next(p for p in attention.parameters() if p.is_floating_point())
    if like.is_meta:
        raise ValueError(
            f"{type(attention).__name__} is on the meta device: load its weights first"
        )
    chance = torch.Generator().manual_seed(0)
    drawn = torch.randn(1, _TOKENS, site.stack.config.hidden_size, generator=chance)
    return drawn.to(like.device, like.dtype)
