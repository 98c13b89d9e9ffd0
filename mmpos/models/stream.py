"""Sound that is still being heard: chunk by chunk, what one pass over all of it gives."""

from __future__ import annotations

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from mmpos.attention import KVCache
from mmpos.frequencies import Length
from mmpos.models.classifier import Classifier
from mmpos.models.sound import FrameEmbedding
from mmpos.models.transformer import Transformer
from mmpos.positions import sequence


class Stream:
    """Encodes frames as they come, each token once, as one pass over all frames would.

    A causal stem and transformer only look back, so what is held of the past is enough: the frames
    that later tokens of the stem depend on (`FrameEmbedding.left`), and keys and values of each
    layer. Token ``i`` is complete with frame ``i · stride``: ``n`` frames have ``⌈n / stride⌉``
    tokens, whatever the chunks in which they came.

    If all layers have a window, keys that no later token sees are evicted (the rolling buffer of
    Mistral 7B, arXiv:2310.06825, sec. 2), and memory does not grow. Otherwise it does, by what each
    layer holds of a token. A stream hears one sound, or as many rows as the first chunk has; of a
    row that has ended, later tokens mean nothing. Gradients flow through, if they are enabled.

    Args:
        tokens: a causal `FrameEmbedding`.
        transformer: a causal `Transformer` on one axis, without class and register tokens; in
            ``eval``, since dropped paths and disturbed positions are drawn anew for each chunk.
        step: what a frame adds to a token's position, as in `FrameEmbedding`.
        length: what context extensions that depend on the length (dynamic NTK, LongRoPE) take for
            it, in all chunks: keys that were turned for one length do not fit another (`KVCache`).
            The one pass with the same result is that of ``transformer(…, length=length)``.

    Shape: frames ``[B, bins, t]``, any number → ``[B, tokens that they complete, dim]``, maybe 0.
    Raises: TypeError for another tokeniser or model; ValueError for one that is not causal or has
        prefix tokens, or without a length that an extension needs; in the call, for other rows or
        bins than before, and as the transformer does, with the stream as it was.

    >>> stem = mmpos.models.FrameEmbedding(64, 80, causal=True)
    >>> options = {"rotary": mmpos.RotaryEncoding, "window": 8, "causal": True}
    >>> encoder = mmpos.models.Transformer(1, size="nano", **options)
    >>> sound, stream = torch.randn(1, 80, 50), Stream(stem, encoder)
    >>> heard = torch.cat([stream(chunk) for chunk in sound.split(7, dim=-1)], dim=1)
    >>> values, positions, *_ = stem(sound)
    >>> torch.allclose(heard, encoder(values, positions), atol=1e-5), stream.cache.tokens
    (True, 7)
    """

    def __init__(
        self,
        tokens: nn.Module,
        transformer: nn.Module,
        *,
        step: float | None = None,
        length: Length | None = None,
    ) -> None:
        if not isinstance(tokens, FrameEmbedding) or not isinstance(transformer, Transformer):
            raise TypeError(
                "a stream is of the frames of a FrameEmbedding and a Transformer, got "
                f"{type(tokens).__name__} and {type(transformer).__name__}"
            )
        if not tokens.causal or not transformer.causal:
            raise ValueError(
                "a token of a stream cannot wait for what comes after it: both are made with "
                f"causal=True, got {tokens.causal} in the stem, {transformer.causal} in the "
                "transformer"
            )
        if transformer.prefix_tokens:
            raise ValueError(
                "class and register tokens are of all tokens, which a stream has not heard yet: "
                f"make the transformer without, it has {transformer.prefix_tokens}"
            )
        if length is None and any(
            getattr(module, "needs_length", False) for module in transformer.modules()
        ):
            raise ValueError(
                "a context extension here depends on the length, which a stream does not know "
                "before its end: pass length=…, the one for all chunks"
            )
        self.stem, self.transformer, self.step = tokens, transformer, step
        self.cache = KVCache(length=length)
        self.heard = 0
        """How many frames came."""
        self._held: Float[Tensor, "batch bins frames"] | None = None
        windows = [window for window in transformer.windows if window is not None]
        bounded = len(windows) == len(transformer.windows)
        self._window = max(windows, default=0) if bounded else None

    def __call__(
        self, frames: Float[Tensor, "batch bins frames"]
    ) -> Float[Tensor, "batch length dim"]:
        """The tokens that these frames complete, encoded."""
        held = frames
        if self._held is not None:
            rows, bins, _ = self._held.shape
            if frames.ndim != 3 or frames.shape[:2] != (rows, bins):
                raise ValueError(
                    f"a chunk has shape {tuple(frames.shape)}, expected [{rows}, {bins}, frames] "
                    "as before: another sound takes a new stream"
                )
            held = torch.cat((self._held, frames), -1)
        stride, heard = self.stem.stride, self.heard + frames.shape[-1]
        done, after = (-(-count // stride) for count in (self.heard, heard))
        first = self._first(self.heard)
        if done == after:
            encoded = frames.new_zeros(len(frames), 0, self.transformer.dim)
        else:
            new = self.stem(held).values[:, done - first :]
            positions = self._positions(done, after, new.device)
            encoded = self.transformer(new, positions, cache=self.cache)
            self._evict()
        # a copy, for the caller may use the memory of a chunk again
        self._held = held[..., (self._first(heard) - first) * stride :].clone()
        self.heard = heard
        return encoded

    def _first(self, heard: int) -> int:
        """The token with whose own frame those begin that are held, after so many were heard."""
        stride = self.stem.stride
        return max(0, heard // stride - -(-self.stem.left // stride))

    def _positions(self, start: int, stop: int, device: torch.device) -> Num[Tensor, "length 1"]:
        """Those of tokens, the very numbers that the stem gives them in one pass."""
        ticks = sequence(stop - start, start=start, device=device)
        if self.step is None:
            return ticks
        if not isinstance(self.step, int):
            ticks = ticks.float() if device.type == "mps" else ticks.double()
        return ticks * (self.step * self.stem.stride)

    def _evict(self) -> None:
        if self._window is not None and self.cache.tokens >= self._window:
            kept = torch.arange(self.cache.tokens - self._window + 1, self.cache.tokens)
            assert self.cache.positions is not None
            self.cache.keep(kept.to(self.cache.positions.device))


class ClassifierStream:
    """Answers about frames as they come: after each chunk, what is to be said of all so far.

    The mean over tokens goes on with them, so that answers are those of the classifier for all
    frames that were heard, at one step for each chunk.

    Args:
        model: a `Classifier` of a causal `FrameEmbedding` and a causal `Transformer`.
        step, length: as in `Stream`.

    Shape: frames ``[B, bins, t]`` → ``{question: [B, answers]}``. Before any frame the mean is 0.
    Raises: TypeError for another model, and as `Stream`.

    >>> encoder = mmpos.models.Transformer(1, size="nano", bias=mmpos.ALiBi, causal=True)
    >>> stem = mmpos.models.FrameEmbedding(64, 80, causal=True)
    >>> model = mmpos.models.Classifier(stem, encoder, {"word": 10})
    >>> sound, stream = torch.randn(1, 80, 50), ClassifierStream(model)
    >>> answers = [stream(chunk)["word"] for chunk in sound.split(20, dim=-1)]
    >>> [torch.allclose(answers[i], model(sound[..., :n])["word"], atol=1e-5)
    ...     for i, n in enumerate((20, 40, 50))]
    [True, True, True]
    """

    def __init__(
        self, model: nn.Module, *, step: float | None = None, length: Length | None = None
    ) -> None:
        if not isinstance(model, Classifier):
            raise TypeError(f"answers to a stream are a Classifier's, got {type(model).__name__}")
        self.model = model
        self.stream = Stream(model.tokens, model.transformer, step=step, length=length)
        self._total: Tensor | float = 0.0
        self._tokens = 0

    def __call__(
        self, frames: Float[Tensor, "batch bins frames"]
    ) -> dict[str, Float[Tensor, "batch _"]]:
        """The logits of each question, of all that was heard."""
        encoded = self.stream(frames)
        wide = torch.promote_types(encoded.dtype, torch.float32)
        self._total = self._total + encoded.sum(1, dtype=wide)
        self._tokens += encoded.shape[1]
        mean = (self._total / max(1, self._tokens)).to(encoded.dtype)
        return self.model.answers(mean)
