"""What a language model is made of and how it draws tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

from mmpos.frequencies import Extension
from mmpos.models import Classifier, Transformer
from mmpos.models.initial import draw_as_vit
from mmpos.rotary import RotaryEncoding


class Decoder(nn.Module):
    """Tokens to logits of the next: an embedding, a transformer, the embedding again or a head."""

    transformer: Transformer
    group_matcher = Classifier.group_matcher  # by the names of transformer and tokens

    def __init__(self, vocabulary: int, transformer: Transformer, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, transformer.dim)
        self.transformer = transformer
        self.head = None if tied else nn.Linear(transformer.dim, vocabulary, bias=False)
        for made in (self.tokens, self.head):
            if made is not None:
                draw_as_vit(made)

    def forward(
        self,
        tokens: Int[Tensor, "batch length"],
        positions: Int[Tensor, "*batch length 1"],
        **given: Any,
    ) -> Float[Tensor, "batch length vocabulary"]:
        encoded = self.transformer(self.tokens(tokens), positions, **given)
        return linear(encoded, self.tokens.weight if self.head is None else self.head.weight)


def drawn(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """One token a row ``[B, 1]``, from logits ``[B, V]``."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        best = logits.topk(top_k)
        logits = torch.full_like(logits, -math.inf).scatter(-1, best.indices, best.values)
    least = torch.finfo(logits.dtype).tiny  # 1 / least is finite
    behind = logits - logits.amax(-1, keepdim=True)
    return (behind / max(temperature, least)).softmax(-1).multinomial(1, generator=generator)


def check_known(name: str, ids: Tensor, vocabulary: int) -> None:
    """Raises ValueError for what is no token of a vocabulary."""
    low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"the data has a {name} {low if low < 0 else high}, the model has {vocabulary} tokens, "
            "from 0 on: give the model the vocabulary of the data"
        )


def check_prompt(prompt: Tensor) -> None:
    """Raises ValueError for a prompt that is no rows of tokens."""
    if prompt.ndim != 2 or not prompt.numel():
        raise ValueError(f"a prompt is [batch, length] tokens, got {tuple(prompt.shape)}")
    if prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool:
        raise ValueError(f"a prompt is [batch, length] whole numbers of tokens, got {prompt.dtype}")


def check_sampling(count: int, temperature: float, top_k: int | None) -> None:
    """Raises ValueError for options that nothing can be drawn by."""
    if count < 0 or not 0 <= temperature < math.inf or (top_k is not None and top_k < 1):
        raise ValueError(
            "sampling takes a count and a temperature of 0 or more and a top_k of 1 or more, got "
            f"{count}, {temperature} and {top_k}"
        )


def causal(
    transformer: Callable[[Sequence[int]], Transformer] | None,
    context: int,
    extension: Extension | None,
) -> Transformer:
    """The transformer of a context, its RoPE extended.

    Raises: TypeError without one, or for what does not make one; ValueError for one that a language
    model cannot have.
    """
    if transformer is None:
        raise TypeError(
            "LanguageModel is missing 1 required positional argument: 'transformer' (a checkpoint "
            "does not hold one that was made in Python)"
        )
    if isinstance(transformer, nn.Module):
        raise TypeError(
            f"transformer makes a network from (context,), got a {type(transformer).__name__} that "
            "is made: give its class or a function, such as partial(Transformer, causal=True)"
        )
    made = transformer((context,))
    if not isinstance(made, Transformer):
        raise TypeError(
            f"transformer makes a {type(made).__name__}, expected a mmpos.models.Transformer"
        )
    if not made.causal:
        raise ValueError(
            "a language model needs a causal transformer, else tokens see their own targets: "
            "set causal to true"
        )
    if made.prefix_tokens:
        raise ValueError(
            "a language model has no class and register tokens, which belong to no document, "
            f"got {made.prefix_tokens}: leave them out"
        )
    if extension is not None and not extend(made, extension):
        raise ValueError(
            f"{type(extension).__name__} changes the frequencies of RoPE, and the transformer has "
            "none: leave model.extension out"
        )
    return made


def extend(module: nn.Module, extension: Extension) -> int:
    """Gives all rotary encodings an extension; returns how many there are."""
    turning = [part for part in module.modules() if isinstance(part, RotaryEncoding)]
    for part in turning:
        part.extend(extension)
    return len(turning)
