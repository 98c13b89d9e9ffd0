"""A rotary module for a transformers model that gives mmpos' rotations in the model's own form."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mmpos.interop.transformers.forms import Form


class Turns(nn.Module):
    """In place of a model's rotary module: cosines and sines of mmpos, in the model's form.

    Called with hidden states, for their dtype, and position ids ``[B, L]``, or ``[A, B, L]`` on
    several axes.
    """

    def __init__(self, places: Any, forms: dict[str | None, Form]) -> None:
        super().__init__()
        self.places = (places,)
        self.forms = forms

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        (places,) = self.places
        form = self.forms[layer_type]
        positions = places.read(position_ids)
        encoding = None if places.in_attention else places.of_type(layer_type)
        if encoding is None:
            return form.none(positions, x.dtype)
        rotation = encoding(positions, length=places.length_of(encoding, positions))
        cos, sin = rotation.cos.squeeze(-3), rotation.sin.squeeze(-3)
        return form.give(cos, sin, x.dtype)
