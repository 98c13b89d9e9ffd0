"""What is put to the test: one face for models of this package, of transformers, and callables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Session(ABC):
    """One sequence, or several of the same length, that a model goes through with its cache."""

    @abstractmethod
    def __call__(self, tokens: Int[Tensor, "batch new"], last: bool = False) -> Tensor:
        """Logits ``[B, new, V]`` of tokens that follow; of the last alone, ``[B, 1, V]``."""

    def tensors(self) -> list[Tensor]:
        """Keys and values that the cache holds, those of all layers."""
        return []


class Subject(ABC):
    """A causal language model under test.

    Only `logits` must be there; what needs a cache, weights or a window is None without. Nothing
    here changes the model: its mode and its gradients are afterwards what they were.

    Args:
        name: what reports call it.
        vocabulary: the number of tokens.
        claimed: the length that the model is said to have.
        end: a token that ends an answer, the last that it has, or several.

    Raises: ValueError for sizes below 1.
    """

    def __init__(
        self, name: str, vocabulary: int, claimed: int, *, end: int | Sequence[int] | None = None
    ) -> None:
        if vocabulary < 1 or claimed < 1:
            raise ValueError(
                f"vocabulary and claimed length are 1 or more, got {vocabulary} and {claimed}"
            )
        self.name, self.vocabulary, self.claimed, self.end = name, vocabulary, claimed, end
        self.ends = frozenset([end] if isinstance(end, int) else end or ())

    @abstractmethod
    def logits(self, tokens: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length _"]:
        """Those of each next token, in one pass over all, without gradients."""

    def loss(self, tokens: Int[Tensor, "batch length"]) -> Tensor | None:
        """What a training step takes the gradient of, in training mode; None without weights."""
        del tokens
        return None

    def session(self, total: int) -> Session | None:
        """Begin with an empty cache, for so many tokens in all; None without a cache."""
        del total
        return None

    def kv_bytes(self, length: int) -> int | None:
        """Memory of the cache of one sequence by the formula; None where none is known.

        ``2 · layers · kv heads · head dim · length · bytes of a number``.
        """
        del length
        return None

    def windowed(self, window: int) -> Subject | None:
        """The same weights where no token sees farther than a window; None if it cannot be."""
        del window
        return None

    def weights(self) -> list[nn.Parameter]:
        """All parameters."""
        return []

    @property
    def parameters(self) -> int:
        """How many numbers are learned."""
        return sum(each.numel() for each in self.weights())

    @property
    def device(self) -> torch.device:
        """Where the tokens must be."""
        return next((each.device for each in self.weights()), torch.device("cpu"))

    def steps(self, tokens: Int[Tensor, "batch length"], count: int) -> Iterator[Tensor]:
        """The likeliest tokens ``[B]`` that follow, one at a time, with its cache if it has one.

        The first takes a pass over the prompt, each other one of a single token.
        """
        session = self.session(tokens.shape[-1] + count)
        seen = new = tokens.to(self.device)
        for _ in range(count):
            logits = self.logits(seen) if session is None else session(new, last=True)
            new = logits[:, -1].argmax(-1, keepdim=True)
            if session is None:
                seen = torch.cat((seen, new), -1)
            yield new[:, 0]

    def answer(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """The likeliest tokens that follow each prompt; those of one length go as one batch."""
        groups: dict[int, list[int]] = defaultdict(list)
        for row, prompt in enumerate(prompts):
            groups[len(prompt)].append(row)
        answers: list[list[int]] = [[] for _ in prompts]
        for rows in groups.values():
            tokens = torch.tensor([list(prompts[row]) for row in rows])
            open_rows = set(rows)
            for new in self.steps(tokens, new_tokens):
                for row, token in zip(rows, new.tolist(), strict=True):
                    if row in open_rows:
                        answers[row].append(token)
                    if token in self.ends:
                        open_rows.discard(row)
                if not open_rows:
                    break
        return answers

    def nll(self, tokens: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length_less_one"]:
        """Nats of each token but the first, given those before it, in float64."""
        tokens = tokens.to(self.device)
        return _nats(self.logits(tokens), tokens)

    def cached_logits(
        self, tokens: Int[Tensor, "batch length"], prefill: int
    ) -> Float[Tensor, "batch decoded _"] | None:
        """Those from token ``prefill`` on, step by step with the cache; None without a cache.

        Raises: ValueError where no token is left to decode.
        """
        tokens = tokens.to(self.device)
        if not 0 <= prefill < tokens.shape[-1]:
            raise ValueError(
                f"of {tokens.shape[-1]} tokens, from 0 to all but one are prefilled, got {prefill}"
            )
        session = self.session(tokens.shape[-1])
        if session is None:
            return None
        if prefill:
            session(tokens[:, :prefill], last=True)
        steps = [session(new) for new in tokens[:, prefill:].split(1, dim=-1)]
        return torch.cat(steps, 1)

    def kv_held(self, length: int) -> tuple[int, int] | None:
        """Bytes that the cache of one sequence holds, and those it keeps reserved for them.

        Of the real tensors, after a pass over so many tokens; the second counts whole storages.
        None without a cache.
        """
        session = self.session(length)
        if session is None:
            return None
        tokens = torch.arange(length, device=self.device)[None] % self.vocabulary
        session(tokens, last=True)
        held = session.tensors()
        if not held:
            return None
        stores = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in held}
        numbers = sum(each.numel() * each.element_size() for each in held)
        return numbers, sum(store.nbytes() for store in stores.values())


class CallableSubject(Subject):
    """Any callable from tokens ``[B, L]`` to logits ``[B, L, V]``.

    Args:
        call: the callable.
        vocabulary, claimed, name, end: as in `Subject`.
        session: begins a `Session` for so many tokens, if it has a cache.

    >>> copy = lambda tokens: torch.nn.functional.one_hot(tokens, 5).float()
    >>> CallableSubject(copy, 5, 100).answer([[1, 3]], 2)
    [[3, 3]]
    """

    def __init__(
        self,
        call: Callable[[Tensor], Tensor],
        vocabulary: int,
        claimed: int,
        *,
        name: str = "callable",
        end: int | Sequence[int] | None = None,
        session: Callable[[int], Session] | None = None,
    ) -> None:
        super().__init__(name, vocabulary, claimed, end=end)
        self.call, self.begin = call, session

    def logits(self, tokens: Tensor) -> Tensor:
        with torch.no_grad(), _mode_of(self.call, False):
            return self.call(tokens)

    def loss(self, tokens: Tensor) -> Tensor | None:
        if not any(each.requires_grad for each in self.weights()):
            return None
        with _mode_of(self.call, True):
            return _loss(self.call(tokens), tokens)

    def session(self, total: int) -> Session | None:
        return None if self.begin is None else self.begin(total)

    def weights(self) -> list[nn.Parameter]:
        return list(self.call.parameters()) if isinstance(self.call, nn.Module) else []


class ModuleSubject(Subject):
    """What models of any library share: a mode, weights, a loss.

    Args:
        model: the module; what a derived class makes logits with is `through`.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        vocabulary: int,
        claimed: int,
        end: int | Sequence[int] | None,
    ) -> None:
        super().__init__(name, vocabulary, claimed, end=end)
        self.model = model

    @abstractmethod
    def through(self, tokens: Tensor) -> Tensor:
        """Logits of all tokens, in whatever mode the model is."""

    def weights(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def logits(self, tokens: Tensor) -> Tensor:
        with torch.no_grad(), mode(self.model, False):
            return self.through(tokens.to(self.device))

    def loss(self, tokens: Tensor) -> Tensor | None:
        if not any(each.requires_grad for each in self.weights()):
            return None
        tokens = tokens.to(self.device)
        with mode(self.model, True):
            return _loss(self.through(tokens), tokens)


@contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """A mode for a while; each module has its own again afterwards."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was in before:
            module.training = was


def _mode_of(call: object, training: bool) -> AbstractContextManager[None]:
    return mode(call, training) if isinstance(call, nn.Module) else nullcontext()


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(_wide(logits[:, :-1].flatten(0, 1)), tokens[:, 1:].flatten())


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _nats(logits: Tensor, tokens: Tensor, rows: int = 4096) -> Tensor:
    """In parts, since float32 copies of all logits of a long text need much memory."""
    parts = [
        cross_entropy(_wide(part), targets, reduction="none").double()
        for part, targets in zip(
            logits[:, :-1].flatten(0, 1).split(rows),
            tokens[:, 1:].flatten().split(rows),
            strict=True,
        )
    ]
    nats = torch.cat(parts) if parts else logits.new_zeros(0, dtype=torch.float64)
    return nats.view(len(tokens), -1)
