"""Encodings that are added to tokens."""

from mmpos.additive.base import AdditiveEncoding
from mmpos.additive.factorized import FactorizedEncoding
from mmpos.additive.fourier import FourierEncoding
from mmpos.additive.learned import LearnedEncoding
from mmpos.additive.sinusoidal import SinusoidalEncoding
from mmpos.additive.table import TableEncoding

__all__ = [
    "AdditiveEncoding",
    "FactorizedEncoding",
    "FourierEncoding",
    "LearnedEncoding",
    "SinusoidalEncoding",
    "TableEncoding",
]
