from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from mmpos.additive import AdditiveEncoding
from mmpos.bias import AttentionBias, ContentBias
from mmpos.interop.transformers.words import ranges
from mmpos.rotary import RotaryEncoding

Part = Literal["", "encoder", "decoder", "text", "vision", "audio"]
"""Which of several networks of a model is meant; the empty word for a model that is one network."""

Place = Literal["additive", "rotary", "bias"]
Bias = AttentionBias | ContentBias


@dataclass(frozen=True)
class Encodings:
    """How a model of transformers knows positions, as encodings of mmpos.

    Args:
        model_type: its name in transformers.
        part: which of its networks, where it has several.
        layers: how many there are.
        additive: what is added to tokens.
        rotary, bias: one for all layers, or one or None for each, the same object where layers
            share it.
        scale: what scores are multiplied by, where that is not ``head_dim ** -0.5``: pass it to
            `mmpos.attend`.
        position_offset: what the model adds to the index of a token before it reads ``additive``.
            RoBERTa's positions begin at 2, and so do OPT's: its table has rows that no token gets.
        max_length: how many positions the model is configured for, where its code has a number.
        heads, key_heads: of queries, and of keys and values, where the model turns these.
        note: what else there is to know.

    The three places are those of `mmpos.models.Transformer`, which takes them as they are.
    """

    model_type: str
    part: Part
    layers: int
    additive: AdditiveEncoding | None = None
    rotary: RotaryEncoding | tuple[RotaryEncoding | None, ...] | None = None
    bias: Bias | tuple[Bias | None, ...] | None = None
    scale: float | None = None
    position_offset: int = 0
    max_length: int | None = None
    heads: int | None = None
    key_heads: int | None = None
    note: str = ""

    def by_layer(self, place: Place) -> list[Any]:
        """The encoding of a place in each layer, or None; what is added is added once, before."""
        held = getattr(self, place)
        if place == "additive":
            return [held]
        return list(held) if isinstance(held, tuple) else [held] * self.layers

    def each(self, place: Place) -> Iterator[tuple[Any, list[int]]]:
        """The different encodings of a place, each with its layers."""
        found: dict[int, tuple[Any, list[int]]] = {}
        for layer, encoding in enumerate(self.by_layer(place)):
            if encoding is not None:
                found.setdefault(id(encoding), (encoding, []))[1].append(layer)
        yield from found.values()

    def __str__(self) -> str:
        lines = [f"{self.model_type}{f' ({self.part})' if self.part else ''}: {self.layers} layers"]
        for place in ("additive", "rotary", "bias"):
            for encoding, layers in self.each(place):
                whole = place == "additive" or len(layers) == self.layers
                where = "" if whole else f" in layers {ranges(layers)}"
                lines.append(f"  {place}: {encoding}{where}")
        if len(lines) == 1:
            lines.append("  no positions")
        if self.scale is not None:
            lines.append(f"  scores times {self.scale:g}")
        if self.position_offset:
            lines.append(f"  positions of the table begin at {self.position_offset}")
        lines += [f"  {self.note}"] if self.note else []
        return "\n".join(lines)
