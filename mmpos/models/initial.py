from __future__ import annotations

from torch import nn

STD = 0.02


class Linear(nn.Linear):
    """A linear layer whose initial values are ViT's: weights of ``STD``, biases 0."""

    def reset_parameters(self) -> None:
        """Draw the weights anew from a truncated normal distribution."""
        _draw(self)


class Embedding(nn.Embedding):
    """An embedding whose initial values are ViT's: of ``STD``."""

    def reset_parameters(self) -> None:
        """Draw the rows anew from a truncated normal distribution."""
        _draw(self)


def draw_as_vit(module: nn.Module) -> None:
    """Draw the linear layers and embeddings in ``module`` as ViT does, truncated normal of ``STD``.

    They do so again whenever they are reset, each by itself in whatever order, as they are after a
    model was made on the meta device: torch's own would draw other values.
    """
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__class__ = Linear
        elif type(part) is nn.Embedding:
            part.__class__ = Embedding
        if isinstance(part, nn.Linear | nn.Embedding):
            _draw(part)


def _draw(part: nn.Linear | nn.Embedding) -> None:
    nn.init.trunc_normal_(part.weight, std=STD)
    if isinstance(part, nn.Linear) and part.bias is not None:
        nn.init.zeros_(part.bias)
