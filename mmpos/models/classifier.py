from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from mmpos.models.transformer import Transformer

Pool = Literal["mean", "token"]


class Classifier(nn.Module):
    """Answers one or more questions about an input: a tokeniser, a transformer, a linear head each.

    Args:
        tokens: maps an input to `mmpos.models.patches.Tokens`.
        transformer: encodes them.
        questions: how many answers each question has.
        pool: ``mean`` over the tokens that have a place, or the first prefix ``token``.

    Shape: ``[B, C, *sizes]`` → ``{question: [B, answers]}``.
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
        if not questions:
            raise ValueError("a classifier needs at least one question")
        if pool not in ("mean", "token"):
            raise ValueError(f"pool must be 'mean' or 'token', got {pool!r}")
        if pool == "token" and (not transformer.class_token or transformer.causal):
            raise ValueError(
                "pool='token' reads a class token that sees all others: pass class_token=True and "
                "causal=False, or pool='mean'"
            )
        for name, answers in questions.items():
            if not name.isidentifier() or hasattr(nn.ModuleDict, name) or answers < 1:
                raise ValueError(
                    f"a question needs a plain name and 1 answer or more, got {name!r}: {answers}"
                )
        self.tokens = tokens
        self.transformer = transformer
        self.pool: Pool = pool
        self.heads = nn.ModuleDict(
            {name: nn.Linear(transformer.dim, answers) for name, answers in questions.items()}
        )

    def forward(
        self, x: Float[Tensor, "batch channel *size"]
    ) -> dict[str, Float[Tensor, "batch _"]]:
        """The logits of each question."""
        values, positions, extent = self.tokens(x)
        encoded = self.transformer(values, positions, extent=extent)
        if self.pool == "token":
            pooled = encoded[:, 0]
        else:
            pooled = encoded[:, self.transformer.prefix_tokens :].mean(dim=1)
        return {name: head(pooled) for name, head in self.heads.items()}
