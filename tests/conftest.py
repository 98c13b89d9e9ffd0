"""Shapes are checked at each call; the encodings under test, and plain references for them."""

from __future__ import annotations

import inspect
import math
import os
import runpy
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import jaxtyping
import pytest
from beartype import BeartypeConf, beartype

if not os.environ.get("JAXTYPING_DISABLE"):  # tests/traced.py: torch cannot trace the checks
    checks = sys.modules["checks"] = types.ModuleType("checks")  # the hook takes a name only
    checks.typed = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int does for a float
    jaxtyping.install_import_hook("mmpos", "checks.typed")

import torch
from torch import Tensor, nn

import mmpos
from mmpos import additive, bias, rotary

torch.set_num_threads(1)

HEADS, HEAD_DIM = 3, 16  # heads: no power of two, and no length used below
GRIDS = {1: (700,), 2: (5, 290), 3: (2, 3, 270)}  # an axis above 256, none as long as another
VARIANTS = runpy.run_path(str(Path(__file__).with_name("variants.py")))
WIDTHS = {
    additive.AdditiveEncoding: HEADS * HEAD_DIM,
    rotary.RotaryEncoding: HEAD_DIM,
    bias.AttentionBias: HEADS,
}


def concrete(base: type) -> list[type]:
    """``base`` and all that derive from it in the package, without the abstract ones."""
    found = [] if inspect.isabstract(base) else [base]
    for derived in base.__subclasses__():
        found += concrete(derived)
    return [cls for cls in found if cls.__module__.startswith("mmpos.")]


@dataclass
class Case:
    """An encoding, or none, in the place it belongs to."""

    base: type | None
    encoding: nn.Module | None
    grid: tuple[int, ...]
    named: dict

    def cells(self, count: int, seed: int = 0, part: int = 1) -> Tensor:
        """Different cells of the grid in random order, of its first ``1 / part`` on each axis."""
        cells = mmpos.positions.grid(*(max(1, size // part) for size in self.grid))
        order = torch.randperm(len(cells), generator=torch.Generator().manual_seed(seed))
        return cells[order[:count]]


class Layer:
    """One attention layer with random weights around a case: its slot and nothing else."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.width = HEADS * HEAD_DIM
        weights = torch.Generator().manual_seed(1)
        shape = (3, HEADS, self.width, HEAD_DIM)
        self.weights = torch.randn(shape, generator=weights) / math.sqrt(self.width)

    def tokens(self, batch: int, length: int, seed: int = 2) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, length, self.width, generator=generator)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[B, H, L, D]`` as a cache would keep them."""
        base, encoding = self.case.base, self.case.encoding or nn.Identity()
        if base is additive.AdditiveEncoding:
            x = x + encoding(positions)
        q, k, v = torch.einsum("bld,phdc->pbhlc", x, self.weights)
        if base is rotary.RotaryEncoding:
            rotation = encoding(positions)
            q, k = mmpos.rotate(q, rotation), mmpos.rotate(k, rotation.dual)
        return q, k, v

    def attend(self, q, k, v, q_positions: Tensor, k_positions: Tensor, **visible) -> Tensor:
        if self.case.encoding and self.case.base is bias.AttentionBias:
            visible["bias"] = self.case.encoding(q_positions, k_positions)
        return mmpos.attend(q, k, v, **visible)

    def __call__(self, x: Tensor, positions: Tensor, **visible) -> Tensor:
        return self.attend(*self.project(x, positions), positions, positions, **visible)


def _cases(*bases: type, none: bool = False) -> list:
    """Every class of the package, in each of its variants, on each number of axes it has."""
    cases: list = [
        pytest.param(
            (base, cls, named, axes), id="-".join([cls.__name__, *map(str, named), f"{axes}d"])
        )
        for base in bases
        for cls in concrete(base)
        for named in VARIANTS["ARGUMENTS"].get(cls.__name__, [{}])
        for axes in VARIANTS["AXES"].get(cls.__name__, GRIDS)
    ]
    return cases + [pytest.param((None, None, {}, 2), id="none-2d")] * none


def _make(param) -> Case:
    base, cls, named, axes = param
    torch.manual_seed(0)
    named = {name: value(axes) if callable(value) else value for name, value in named.items()}
    encoding = None if cls is None else cls(WIDTHS[base], GRIDS[axes], **named).eval()
    return Case(base, encoding, GRIDS[axes], named)


@pytest.fixture(params=_cases(*WIDTHS, none=True))
def case(request) -> Case:
    return _make(request.param)


@pytest.fixture(params=_cases(*WIDTHS))
def encoding_case(request) -> Case:
    return _make(request.param)


@pytest.fixture(params=_cases(additive.AdditiveEncoding))
def additive_case(request) -> Case:
    return _make(request.param)


@pytest.fixture(params=_cases(rotary.RotaryEncoding))
def rotary_case(request) -> Case:
    return _make(request.param)


@pytest.fixture(params=_cases(bias.AttentionBias))
def bias_case(request) -> Case:
    return _make(request.param)


@pytest.fixture
def layer(case) -> Layer:
    return Layer(case)


@pytest.fixture
def unchecked():
    """What users run: without the shape checks, which would speak up before our own messages."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def values():
    """What an encoding gives, as one tuple of tensors, whatever its place."""

    def call(case: Case, positions: Tensor, encoding: nn.Module | None = None) -> tuple:
        encoding = encoding or case.encoding
        assert encoding is not None
        if case.base is bias.AttentionBias:
            return (encoding(positions, positions),)
        out = encoding(positions)
        if not isinstance(out, mmpos.Rotation):
            return (out,)
        parts = [(out.cos, out.sin)] + [out.dual[:2]] * (out.keys is not None)
        parts += [] if out.second is None else [out.second]
        return tuple(tensor for part in parts for tensor in part)

    return call


@pytest.fixture
def softmax_attention():
    """Attention as a plain formula in float64: no kernel, no mask that is not a loop's."""

    def call(q, k, v, *, bias=0.0, visible=None, scale=None) -> Tensor:
        q, k, v = (part.double() for part in (q, k, v))
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        weights = (scores + bias).exp()
        if visible is not None:
            weights = weights * visible
        total = weights.sum(-1, keepdim=True)
        return torch.where(total > 0, weights / total.clamp_min(1e-300), 0.0) @ v

    return call


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
