from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from mmpos.additive.base import AdditiveEncoding
from mmpos.coordinates import Coordinates, Extent, reading
from mmpos.frequencies import angles
from mmpos.positions import Axes, axis_count


class FourierEncoding(AdditiveEncoding):
    """Waves along directions of all axes together, through a small network.

    ``F = [cos(x W) | sin(x W)] / sqrt(features)`` with frequencies ``W [A, features / 2]`` from
    N(0, ``std``²), then ``GeLU(F W1 + b1) W2 + b2``, all of it learned (Learnable Fourier Features,
    arXiv:2106.02795, eq. 2 and 6, algorithm 1). The angle mixes the axes, so near means near in
    every direction, while a sinusoidal encoding sees one axis at a time. A coordinate that a token
    lacks counts as 0; a token without a place gets zeros.

    With a ``seed`` the frequencies are fixed, a function of the seed that is computed when needed,
    and with ``hidden=0`` the waves themselves are the encoding, without the root: both together are
    the random features of Tancik et al. (arXiv:2006.10739, sec. 5), and have no parameters.

    Args:
        dim: features of a token.
        axes: number of axes, or a grid (its length counts; `Scaled` coordinates refer to it).
        std: of the frequencies, in radians per unit of the coordinate: the reciprocal of what the
            first paper calls γ, and 2π times what the second calls σ. Tokens look alike up to about
            ``1 / std`` apart, so it goes with the ``coordinates``: 1 suits indices, and coordinates
            from -1 to 1 take as many radians as cells are to be told apart.
        features: waves, cosines and sines; even, ``dim`` by default.
        hidden: width of the hidden layer, ``dim`` by default; 0 for none.
        seed: draws fixed frequencies, a whole number; None for learned ones.
        coordinates: how positions are read.

    Shape: positions ``[..., L, A]`` → ``[..., L, dim]``, float32. Parameters: ``frequencies [A,
    features / 2]``, ``hidden_weight [hidden, features]``, ``hidden_bias``, ``out_weight [dim,
    hidden]``, ``out_bias``. Half precision rounds learned frequencies, and angles far out with
    them: keep this module in float32.
    Raises: ValueError for an odd number of features, one other than ``dim`` without a hidden layer,
    or an ``std`` that is not above 0.

    >>> encoding = FourierEncoding(8, axes=2, seed=0, hidden=0)
    >>> tuple(encoding(mmpos.positions.grid(2, 3)).shape), list(encoding.parameters())
    ((6, 8), [])
    """

    def __init__(
        self,
        dim: int,
        axes: Axes = 1,
        *,
        std: float = 1.0,
        features: int | None = None,
        hidden: int | None = None,
        seed: int | None = None,
        coordinates: Coordinates | None = None,
    ) -> None:
        super().__init__(dim, axes)
        waves = dim if features is None else features
        if waves % 2 or waves < 2:
            raise ValueError(
                f"features must be even for pairs of cosine and sine, got {waves}: pass features="
            )
        if hidden is not None and hidden < 0:
            raise ValueError(f"hidden must be 0 or more, got {hidden}")
        if hidden == 0 and waves != dim:
            raise ValueError(
                f"without a hidden layer the features are the encoding: {waves} features cannot "
                f"fill dim={dim}"
            )
        if not 0 < std < math.inf:
            raise ValueError(f"std must be above 0 and finite, got {std}")
        if seed is not None and not 0 <= seed <= _WORD:
            raise ValueError(f"seed must be a whole number from 0 to {_WORD}, got {seed}")
        self.std = std
        self.features = features
        self.hidden = hidden
        self.seed = seed
        self.coordinates = reading(coordinates)

        def learned(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape))

        width = dim if hidden is None else hidden
        self.frequencies = learned(axis_count(axes), waves // 2) if seed is None else None
        self.hidden_weight = learned(width, waves) if width else None
        self.hidden_bias = learned(width) if width else None
        self.out_weight = learned(dim, width) if width else None
        self.out_bias = learned(dim) if width else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw frequencies from N(0, std²) and weights as Glorot and Bengio do; biases are 0."""
        if self.frequencies is not None:
            nn.init.normal_(self.frequencies, std=self.std)
        for weight in (self.hidden_weight, self.out_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.hidden_bias, self.out_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def _spectrum(self, like: Tensor) -> Tensor:
        """The frequencies ``[A, features / 2]``."""
        if self.frequencies is not None:
            return self.frequencies.to(like.dtype)
        shape = axis_count(self.axes), (self.features or self.dim) // 2
        std = torch.tensor(self.std, dtype=like.dtype, device=like.device)
        return std * _normal(shape, self.seed or 0, like)

    def forward(
        self, positions: Num[Tensor, "*batch length axes"], extent: Extent | None = None
    ) -> Float[Tensor, "*batch length dim"]:
        read = self.coordinates(positions, axes=self.axes, extent=extent, training=self.training)
        angle = angles(read, self._spectrum(read).unsqueeze(0)).squeeze(-3)
        out = torch.cat((angle.cos(), angle.sin()), dim=-1).float()
        if self.hidden != 0:
            out = self._network(out / math.sqrt(out.shape[-1]))
        return torch.where(read.isnan().all(-1, keepdim=True), 0.0, out)

    def _network(self, waves: Tensor) -> Tensor:
        """``GeLU(F W1 + b1) W2 + b2`` in float32, under autocast too."""
        weights = self.hidden_weight, self.hidden_bias, self.out_weight, self.out_bias
        hidden_weight, hidden_bias, out_weight, out_bias = (
            None if own is None else own.float() for own in weights
        )
        assert hidden_weight is not None
        assert out_weight is not None
        device = waves.device.type
        available = torch.amp.is_autocast_available(device)
        with torch.autocast(device, enabled=False) if available else nullcontext():
            hidden = nn.functional.gelu(nn.functional.linear(waves, hidden_weight, hidden_bias))
            return nn.functional.linear(hidden, out_weight, out_bias)

    def extra_repr(self) -> str:
        parts = [f"dim={self.dim}, axes={self.axes}, std={self.std}"]
        parts += [f"{name}={getattr(self, name)}" for name in ("features", "hidden", "seed")]
        return ", ".join(part for part in parts if not part.endswith("=None"))


def _normal(shape: tuple[int, int], seed: int, like: Tensor) -> Tensor:
    """Numbers as if from N(0, 1), a function of the seed alone (Box and Muller's)."""
    rows, columns = shape
    index = torch.arange(1, 2 * rows * columns + 1, device=like.device).reshape(2, rows, columns)
    uniform = (_hashed(_hashed(index) ^ (seed)).to(like.dtype) + 0.5) / 2**32
    turn = torch.tensor(2 * math.pi, dtype=like.dtype, device=like.device)  # ONNX rounds a float
    return (-2 * uniform[0].log()).sqrt() * (turn * uniform[1]).cos()


_WORD = 0xFFFFFFFF


def _hashed(word: Tensor) -> Tensor:
    """Mixes the bits of 32-bit words, one to one; held in int64, in which no product overflows."""
    for _ in range(2):
        word = ((word ^ (word >> 16)) * 0x45D9F3B) & _WORD
    return word ^ (word >> 16)
