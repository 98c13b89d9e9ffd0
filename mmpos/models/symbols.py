from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from mmpos.models.initial import draw_as_vit
from mmpos.models.patches import Tokens
from mmpos.positions import sequence


class Symbols(nn.Module):
    """Embed the symbols of sequences: bytes or tokens of a text, nucleotides, amino acids.

    Positions count from 0 at the start of each row, so padding comes at the end, as any symbol.

    Args:
        dim: features of a token.
        vocabulary: how many symbols there are.

    Shape: ids ``[B, L]``, and where rows are padded a mask ``[B, L]``, True for what is real
    → `Tokens` with values ``[B, L, dim]``.
    Raises: ValueError without symbols, or, on the CPU, for ids beyond them.
    """

    def __init__(self, dim: int, vocabulary: int) -> None:
        super().__init__()
        if vocabulary < 1:
            raise ValueError(f"vocabulary is 1 or more, got {vocabulary}")
        self.embedding = nn.Embedding(vocabulary, dim)
        draw_as_vit(self.embedding)

    def forward(
        self,
        ids: Int[Tensor, "batch length"],
        mask: Bool[Tensor, "batch length"] | None = None,
    ) -> Tokens:
        """The tokens of ``ids``."""
        looking_is_free = ids.device.type == "cpu" and not torch.compiler.is_compiling()
        if looking_is_free and ids.numel():
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.embedding.num_embeddings:
                raise ValueError(
                    f"the data has a symbol {low if low < 0 else high}, the model has "
                    f"{self.embedding.num_embeddings}, from 0 on: give the model the vocabulary of "
                    "the data"
                )
        positions = sequence(ids.shape[-1], device=ids.device)
        return Tokens(self.embedding(ids), positions, None, mask)
