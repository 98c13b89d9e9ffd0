from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from keyword import iskeyword
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor, nn

from mmpos.models.transformer import Transformer

Pool = Literal["mean", "token", "prefix"]


class Classifier(nn.Module):
    """Answers one or more questions about an input: a tokeniser, a transformer, a linear head each.

    Args:
        tokens: maps an input, and a mask where it is padded, to `mmpos.models.patches.Tokens`.
        transformer: encodes them.
        questions: how many answers each question has.
        pool: ``mean`` over the real tokens that have a place, the first prefix ``token``, or the
            mean of all ``prefix`` tokens (AST's two, arXiv:2104.01778).

    Padding is neither seen nor pooled: a row's answers are those that it has alone. Of a row of
    padding alone the mean is 0.

    Shape: what ``tokens`` takes, such as ``[B, C, *sizes]`` → ``{question: [B, answers]}``.
    Raises: ValueError without questions, for names that a module cannot have, or for pooling by a
    class token that is not there or sees nothing.
    """

    transformer: Transformer

    def __init__(
        self,
        tokens: nn.Module,
        transformer: Transformer,
        questions: Mapping[str, int],
        *,
        pool: Pool = "mean",
    ) -> None:
        super().__init__()
        if pool not in get_args(Pool):
            raise ValueError(f"pool must be one of {get_args(Pool)}, got {pool!r}")
        if pool != "mean" and (not transformer.class_token or transformer.causal):
            raise ValueError(
                f"pool={pool!r} reads a class token that sees all others: pass class_token=True "
                "and causal=False, or pool='mean'"
            )
        self.tokens = tokens
        self.transformer = transformer
        self.pool: Pool = pool
        self.questions = tuple(questions)
        self.heads = _heads(transformer.dim, questions)

    def forward(
        self,
        x: Num[Tensor, "batch *_"] | Mapping[str, Tensor | None],
        mask: Bool[Tensor, "batch *_"] | Mapping[str, Tensor | None] | None = None,
        **named: Any,
    ) -> dict[str, Float[Tensor, "batch _"]]:
        """The logits of each question.

        Args:
            x: what the tokeniser takes: of `mmpos.models.Modalities` a mapping, and of masks too.
            mask: True for what is real of a padded ``x``.
            named: what else the tokeniser takes, such as the ``step`` of a
                `mmpos.models.FrameEmbedding`.
        """
        tokens = self.tokens(x, **named) if mask is None else self.tokens(x, mask, **named)
        encoded = self.transformer(
            tokens.values, tokens.positions, extent=tokens.extent, mask=tokens.mask
        )
        return self.answers(self.pooled(encoded, tokens.mask))

    def pooled(
        self,
        encoded: Float[Tensor, "batch prefix_and_length dim"],
        mask: Bool[Tensor, "batch length"] | None = None,
    ) -> Float[Tensor, "batch dim"]:
        """What the heads see of encoded tokens, of which those in ``mask`` are real."""
        prefix = self.transformer.prefix_tokens
        if self.pool == "token":
            return encoded[:, 0]
        if self.pool == "prefix":
            return encoded[:, :prefix].mean(1)
        return _mean(encoded[:, prefix:], mask)

    def answers(self, pooled: Float[Tensor, "batch dim"]) -> dict[str, Float[Tensor, "batch _"]]:
        """The logits of each question, of what was pooled."""
        return _answers(self.questions, self.heads, pooled)

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """The layer of each parameter by its name, in timm's sense: for layer-wise learning rates.

        Layer 0 is the tokeniser, prefix tokens, and encodings of all layers together; the blocks
        are 1 to depth, each with the encodings that it alone uses; the last norm and the heads come
        last (as in BEiT, arXiv:2106.08254). It is the same for ``coarse`` groups.
        """
        own: dict[str, int] = {}
        for slot in ("rotary", "bias"):
            used = getattr(self.transformer, f"{slot}_of")
            if isinstance(getattr(self.transformer, slot), nn.ModuleList):
                alone = {layer: i for layer, i in enumerate(used) if used.count(i) == 1}
                own |= {f"transformer.{slot}.{i}": layer + 1 for layer, i in alone.items()}
        own |= {f"transformer.layers.{i}": i + 1 for i in range(len(self.transformer.layers))}
        stem = ("tokens.", *(f"transformer.{p}" for p in ("prefix", "additive", "rotary", "bias")))

        def match(name: str) -> int:
            part = ".".join(name.split(".")[:3])
            last = len(self.transformer.layers) + 1
            return own.get(part, 0 if name.startswith(stem) else last)

        return match


class BackboneClassifier(nn.Module):
    """Answers one or more questions about an input: any backbone, a linear head each.

    Args:
        backbone: maps an input to ``[B, dim]`` and has this ``dim``.
        questions: how many answers each question has.

    Shape: ``[B, C, *sizes]`` → ``{question: [B, answers]}``.
    Raises: as `Classifier` for its questions; TypeError for a backbone without ``dim``.
    """

    def __init__(self, backbone: nn.Module, questions: Mapping[str, int]) -> None:
        super().__init__()
        dim = getattr(backbone, "dim", None)
        if not isinstance(dim, int):
            raise TypeError(
                f"a backbone has the number of its features as dim, {type(backbone).__name__} "
                f"has {dim!r}"
            )
        self.backbone = backbone
        self.questions = tuple(questions)
        self.heads = _heads(dim, questions)

    def forward(
        self, x: Float[Tensor, "batch channel *size"]
    ) -> dict[str, Float[Tensor, "batch _"]]:
        """The logits of each question."""
        features = self.backbone(x)
        return _answers(self.questions, self.heads, features)


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Over the real tokens of each row, 0 where there are none."""
    if mask is None:
        return x.mean(dim=1)
    real = mask.unsqueeze(-1)
    total = x.where(real, 0).sum(1, dtype=torch.promote_types(x.dtype, torch.float32))
    return (total / real.sum(1).clamp_min(1)).to(x.dtype)


def check_questions(questions: Mapping[str, int]) -> None:
    """Raises ValueError without questions, or for names that a module cannot have."""
    if not questions:
        raise ValueError("a classifier needs at least one question")
    for name, answers in questions.items():
        if not name.isidentifier() or hasattr(nn.ModuleDict, name) or answers < 1:
            raise ValueError(
                f"a question needs a plain name and 1 answer or more, got {name!r}: {answers}"
            )


def _heads(dim: int, questions: Mapping[str, int]) -> nn.ModuleDict:
    check_questions(questions)
    return nn.ModuleDict(
        # a keyword cannot be a name in the code that exporters write
        {
            f"{name}_" if iskeyword(name) else name: nn.Linear(dim, n)
            for name, n in questions.items()
        }
    )


def _answers(questions: Sequence[str], heads: nn.ModuleDict, features: Tensor) -> dict[str, Tensor]:
    return {name: head(features) for name, head in zip(questions, heads.values(), strict=True)}
