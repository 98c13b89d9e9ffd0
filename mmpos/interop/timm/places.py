"""Encodings of mmpos within a timm model: where they are kept, and asked once per forward pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmpos.additive import (
    AdditiveEncoding,
    FactorizedEncoding,
    LearnedEncoding,
    TableEncoding,
)
from mmpos.attention import Prepared, attend, prepare
from mmpos.attention.visibility import four
from mmpos.bias import BiasBlocks, ContentTerms, RelativePositionBias
from mmpos.interop.timm import tables as forms
from mmpos.interop.timm.scheme import Scheme
from mmpos.interop.timm.tables import Table
from mmpos.positions import absent, grid, join
from mmpos.rotary import Rotation

NAME = "mmpos"
"""The name in a model under which `Places` lies."""


class Now:
    """What the encodings give for the images at hand; it is not copied or saved with a model."""

    def __init__(self) -> None:
        self.length = 0
        self.rotations: list[Rotation] = []
        self.biases: list[Tensor | BiasBlocks | ContentTerms] = []
        self.prepared: dict[int | None, Prepared] = {}

    def __reduce__(self) -> tuple:
        return Now, ()


class Taken(NamedTuple):
    """What a model had of its own, and where."""

    module: nn.Module
    name: str
    value: Any


class Places(nn.Module):
    """The three places of a timm model. A place that is not replaced is the model's own.

    Args:
        prefix_tokens: class and register tokens before the patches.

    `enter` is the hook of the patch embedding: there a model knows its grid, by whichever of its
    methods it is called; `arrive` is that of the blocks.
    """

    def __init__(self, prefix_tokens: int, depth: int) -> None:
        super().__init__()
        self.prefix_tokens = prefix_tokens
        self.additive: AdditiveEncoding | None = None
        self.rotary: Any = None
        self.bias: Any = None
        self.rotary_of: list[int | None] = [None] * depth
        self.bias_of: list[int | None] = [None] * depth
        self.taken: dict[str, list[Taken]] = {}
        self.now = Now()

    def take_over(self, other: Places, place: str) -> None:
        """Have in a place what other places have."""
        setattr(self, place, getattr(other, place))
        if place != "additive":
            setattr(self, f"{place}_of", getattr(other, f"{place}_of"))
        if place in other.taken:
            self.taken[place] = other.taken[place]

    def encodings(self, place: str) -> list[Any]:
        """The encodings of a place."""
        held = getattr(self, place)
        return [] if held is None else list(held) if isinstance(held, nn.ModuleList) else [held]

    def give_back(self) -> None:
        """Let the model have its own schemes again, until it is told to `take` them."""
        for module, name, value in itertools.chain.from_iterable(self.taken.values()):
            setattr(module, name, value)

    def take(self) -> None:
        """Take the model's own schemes off, as they are now."""
        self.taken = {
            place: [Taken(module, name, getattr(module, name)) for module, name, _ in parts]
            for place, parts in self.taken.items()
        }
        for module, name, _ in itertools.chain.from_iterable(self.taken.values()):
            setattr(module, name, None)

    def arrive(self, block: nn.Module, args: tuple) -> None:
        """Have a block that is computed again, for its gradient, ask for what it was given first.

        The tokens that enter a block are marked with that: they are the same tensor both times.
        """
        if torch.compiler.is_compiling():
            return
        held = getattr(args[0], "_mmpos_now", None)
        if held is None:
            args[0]._mmpos_now = self.now
        else:
            self.now = held

    def enter(self, embed: Any, images: tuple, patches: Tensor) -> Tensor:
        """Ask all encodings for the grid of ``patches``, and add what is added to them.

        Raises: ValueError for patches whose grid cannot be told.
        """
        size = _numbers(patches.shape[1:3])
        if patches.ndim == 3:
            size = tuple(embed.dynamic_feat_size(_numbers(images[0].shape[-2:])))
            if size[0] * size[1] != patches.shape[1]:
                raise ValueError(
                    f"images of {tuple(images[0].shape[-2:])} gave {patches.shape[1]} patches, "
                    f"which are no grid of {size}"
                )
        where = grid(*size, device=patches.device)
        if self.additive is not None:
            added = self.additive(where, size).to(patches.dtype)
            patches = patches + added.view(*patches.shape[1:])
        if self.prefix_tokens:
            none = absent(self.prefix_tokens, len(size), device=where.device)
            where = join(none, where)
        now = Now()
        now.length = where.shape[0]
        length = {
            id(each): size if each.needs_length else None for each in self.encodings("rotary")
        }
        now.rotations = [
            each(where, size, length=length[id(each)]) for each in self.encodings("rotary")
        ]
        now.biases = [each(where, where, size) for each in self.encodings("bias")]
        self.now = now
        return patches

    def rotation(self, layer: int) -> Rotation | None:
        """That of a layer, for the images at hand."""
        index = self.rotary_of[layer]
        return None if index is None else self.now.rotations[index]

    def attended(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own: Tensor | None,
        mask: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """Attention with the bias of a layer, beside the model's ``own`` and what hides keys."""
        now, index, length = self.now, self.bias_of[layer], q.shape[-2]
        if length != now.length and (index is not None or self.rotary_of[layer] is not None):
            raise ValueError(
                f"attention got {length} tokens and the patch embedding {now.length}: "
                "encodings of mmpos need all tokens, in their order"
            )
        if own is None and mask is None and not causal:
            if index not in now.prepared:
                bias = None if index is None else now.biases[index]
                now.prepared[index] = prepare(length, length, bias=bias, device=q.device)
            return attend(q, k, v, prepared=now.prepared[index])
        if mask is not None:
            mask = four(mask)
        visible = mask if mask is not None and mask.dtype == torch.bool else None
        parts: list[Any] = [] if index is None else [now.biases[index]]
        parts += [part for part in (own, mask if visible is None else None) if part is not None]
        if len(parts) > 1 and not all(isinstance(part, Tensor) for part in parts):
            raise ValueError(
                "a bias that looks at content cannot be added to another bias or a float mask"
            )
        total: Any = sum(parts[1:], parts[0]) if parts else None
        return attend(q, k, v, bias=total, mask=visible, causal=causal)

    def found(self) -> Iterator[tuple[Scheme, Table | None]]:
        """The schemes and tables of all encodings."""
        for place in ("additive", "rotary", "bias"):
            for encoding in self.encodings(place):
                scheme = Scheme(
                    kind=type(encoding).__name__,
                    where=f"{NAME}.{place}",
                    axes="y, x",
                    layout=getattr(encoding, "layout", "") if place == "rotary" else "",
                    note=self._layers(place, encoding),
                )
                yield from _with_tables(scheme, encoding)

    def on(self, grid: tuple[int, ...]) -> bool:
        """Whether all tables are of a grid, which timm's own `set_input_size` changes alone."""
        return all(table is None or table.grid == grid for _, table in self.found())

    def settle(self, grid: tuple[int, ...]) -> None:
        """Note the grid that tables were resized to."""
        for encoding in (*self.encodings("additive"), *self.encodings("bias")):
            if isinstance(encoding, TableEncoding | RelativePositionBias):
                encoding.axes = tuple(grid)

    def _layers(self, place: str, encoding: nn.Module) -> str:
        if place == "additive":
            return ""
        of = getattr(self, f"{place}_of")
        index = next(i for i, each in enumerate(self.encodings(place)) if each is encoding)
        layers = [layer for layer, own in enumerate(of) if own == index]
        if len(layers) == len(of):
            return ""
        return f"layers {', '.join(map(str, layers))}"


def _numbers(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Sizes as numbers, where a trace of `torch.jit` has tensors."""
    return tuple(int(size) if isinstance(size, Tensor) else size for size in sizes)


def _with_tables(scheme: Scheme, encoding: Any) -> Iterator[tuple[Scheme, Table | None]]:
    """A scheme and what of it is resized with the images, for each axis if they have their own."""
    if isinstance(encoding, FactorizedEncoding):
        for index, name in enumerate(encoding.tables):
            form = partial(forms.place_cells, index=index)
            own = name.removeprefix("table.")
            table = Table.of(encoding.table, own, encoding.grid, form, encoding.resampling)
            where = f"{scheme.where}.{name}"
            yield (
                replace(scheme, where=where, axes="yx"[index], grid=(encoding.grid[index],)),
                table,
            )
    elif isinstance(encoding, LearnedEncoding | RelativePositionBias):
        form = forms.cells if isinstance(encoding, LearnedEncoding) else forms.offset_grid
        table = Table.of(encoding, "table", encoding.grid, form, encoding.resampling)
        yield replace(scheme, grid=encoding.grid), table
    else:
        yield scheme, None
