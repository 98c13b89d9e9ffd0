"""Models of this package and of transformers, put to the test with their own caches."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.attention import KVCache
from mmpos.evaluation.subjects import ModuleSubject, Session, mode
from mmpos.models import Transformer
from mmpos.positions import sequence


class NetworkSubject(ModuleSubject):
    """A causal network around a `mmpos.models.Transformer`: embedding, transformer, head.

    A context extension that depends on the length takes that of all tokens, in a cached run that of
    the prompt and all that is to follow.

    Args:
        network: has the transformer as ``network.transformer``, and makes logits ``[B, L, V]`` by
            ``network(tokens, positions, cache=…, length=…)``.
        claimed: the length that it was trained for.
        vocabulary: by default the rows of the embedding ``network.tokens``.
        name, end: as in `Subject`.

    Raises: TypeError for a network without such a transformer; ValueError for one that is not
        causal or has class tokens, or whose vocabulary is not known.

    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         options = {"size": "nano", "rotary": mmpos.RotaryEncoding, "causal": True}
    ...         self.tokens, self.transformer = nn.Embedding(9, 64), Transformer(1, **options)
    ...
    ...     def forward(self, tokens, positions, **given):
    ...         return self.transformer(self.tokens(tokens), positions, **given)[..., :9]
    >>> subject = NetworkSubject(Model(), claimed=32)
    >>> len(subject.answer([[1, 2, 3]], 4)[0]), subject.kv_bytes(10) == subject.kv_held(10)[0]
    (4, True)
    """

    def __init__(
        self,
        network: nn.Module,
        claimed: int,
        *,
        vocabulary: int | None = None,
        name: str = "network",
        end: int | Sequence[int] | None = None,
    ) -> None:
        transformer = getattr(network, "transformer", None)
        if not isinstance(transformer, Transformer):
            raise TypeError(
                "a network under test has a mmpos.models.Transformer as its .transformer, got "
                f"{type(network).__name__} with {type(transformer).__name__}"
            )
        if not transformer.causal or transformer.prefix_tokens:
            raise ValueError(
                "a language model has a causal transformer without class and register tokens, got "
                f"causal={transformer.causal} and {transformer.prefix_tokens} such tokens"
            )
        if vocabulary is None:
            table = getattr(network, "tokens", None)
            if not isinstance(table, nn.Embedding):
                raise ValueError(
                    f"{type(network).__name__} has no embedding as its .tokens to count the "
                    "vocabulary by: pass vocabulary=…"
                )
            vocabulary = table.num_embeddings
        super().__init__(network, name, vocabulary, claimed, end)
        self.transformer = transformer

    def through(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, sequence(tokens.shape[-1], device=tokens.device))

    def session(self, total: int) -> Session | None:
        return _NetworkSession(self, total) if self.transformer.caches else None

    def needs_length(self) -> bool:
        """Whether a context extension depends on the length."""
        return any(getattr(each, "needs_length", False) for each in self.model.modules())

    def windowed(self, window: int) -> NetworkSubject | None:
        if not self.transformer.caches:
            return None
        if window < 1:
            raise ValueError(f"a window is 1 or more tokens, got {window}")
        # shares all weights, so that only the list of windows is another
        network = copy.copy(self.model)
        network._modules = dict(self.model._modules)
        transformer = copy.copy(self.transformer)
        transformer.windows = [
            window if own is None else min(own, window) for own in transformer.windows
        ]
        network._modules["transformer"] = transformer
        return NetworkSubject(
            network,
            self.claimed,
            vocabulary=self.vocabulary,
            name=f"{self.name}, window {window}",
            end=self.end,
        )

    def kv_bytes(self, length: int) -> int | None:
        if not self.transformer.caches:
            return None
        parts: list[Any] = [layer.attention for layer in self.transformer.layers]
        numbers = [sum(part.split[1:]) * part.qkv.weight.element_size() for part in parts]
        return length * sum(numbers)


class _NetworkSession(Session):
    def __init__(self, subject: NetworkSubject, total: int) -> None:
        self.model, self.tokens = subject.model, 0
        self.cache = KVCache(length=total if subject.needs_length() else None)
        self.layers = len(subject.transformer.layers)

    def __call__(self, tokens: Tensor, last: bool = False) -> Tensor:
        positions = sequence(tokens.shape[-1], start=self.tokens, device=tokens.device)
        with torch.no_grad(), mode(self.model, False):
            logits = self.model(tokens, positions, cache=self.cache)
        self.tokens += tokens.shape[-1]
        return logits[:, -1:] if last else logits

    def tensors(self) -> list[Tensor]:
        held = [self.cache.layer(index) for index in range(self.layers)]
        return [part for layer in held for part in (layer.keys, layer.values)]


class TransformersSubject(ModuleSubject):
    """A causal language model of the library transformers.

    Args:
        model: such as ``AutoModelForCausalLM`` gives.
        claimed: by default ``max_position_embeddings`` of its configuration.
        name, end: as in `Subject`; by default the name of its class, and the tokens that end its
            texts by its configuration.

    Raises: ValueError without a length that is known; TypeError for what has no configuration.
    """

    def __init__(
        self,
        model: nn.Module,
        claimed: int | None = None,
        *,
        name: str | None = None,
        end: int | Sequence[int] | None = None,
    ) -> None:
        find = getattr(getattr(model, "config", None), "get_text_config", None)
        if find is None:
            raise TypeError(
                f"expected a causal model of transformers with a config, got {type(model).__name__}"
            )
        self.config: Any = find(decoder=True)
        if claimed is None:
            claimed = getattr(self.config, "max_position_embeddings", None)
        if claimed is None:
            raise ValueError(
                f"the configuration of {type(model).__name__} tells no length, as its positions "
                "end nowhere: pass claimed=…"
            )
        if end is None:
            ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
            ends = self.config.eos_token_id if ends is None else ends
            end = ends[0] if isinstance(ends, list | tuple) and len(ends) == 1 else ends
        super().__init__(model, name or type(model).__name__, self.config.vocab_size, claimed, end)

    def through(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits

    def session(self, total: int) -> Session | None:
        del total
        name = _cache_name(self.model)
        return None if name is None else _TransformersSession(self.model, name)

    def kv_bytes(self, length: int) -> int | None:
        config = self.config
        layers = getattr(config, "num_hidden_layers", None)
        heads = getattr(config, "num_attention_heads", None)
        if not layers or not heads or getattr(config, "kv_lora_rank", None):
            return None
        shared = getattr(config, "num_key_value_heads", None) or heads
        if getattr(config, "multi_query", False):
            shared = 1
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        if not isinstance(shared, int) or not isinstance(head_dim, int):
            return None
        lengths = _held(config, layers, length)
        if lengths is None:
            return None
        size = next(self.model.parameters()).element_size()
        return 2 * shared * head_dim * sum(lengths) * size


class _TransformersSession(Session):
    def __init__(self, model: nn.Module, name: str) -> None:
        self.model, self.name, self.cache = model, name, None
        self.keeps = "logits_to_keep" in signature(model.forward).parameters

    def __call__(self, tokens: Tensor, last: bool = False) -> Tensor:
        given: dict[str, Any] = {self.name: self.cache}
        if last and self.keeps:
            given["logits_to_keep"] = 1
        with torch.no_grad(), mode(self.model, False):
            said = self.model(input_ids=tokens, use_cache=True, **given)
        self.cache = getattr(said, self.name, None)
        if self.cache is None:
            raise ValueError(f"{type(self.model).__name__} gives back no {self.name} to go on from")
        return said.logits[:, -1:] if last else said.logits

    def tensors(self) -> list[Tensor]:
        layers: Iterable[Any] = getattr(self.cache, "layers", ())
        found = [held for layer in layers for held in vars(layer).values()]
        return [each for each in found if isinstance(each, Tensor) and each.is_floating_point()]


def _cache_name(model: nn.Module) -> str | None:
    """What its forward pass calls the cache, here and in the output; None without one."""
    known = signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in known), None)


def _held(config: Any, layers: int, length: int) -> list[int] | None:
    """How many tokens each layer keeps: a window of n keeps n - 1 for the token to come."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * layers
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        return None
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    short = min(length, max(window - 1, 0)) if window else length
    kept = [short if kind == "sliding_attention" else length for kind in kinds]
    return kept[: len(kept) - shared]
