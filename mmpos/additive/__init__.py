"""Encodings that are added to tokens."""

from mmpos.additive.base import AdditiveEncoding
from mmpos.additive.learned import LearnedEncoding
from mmpos.additive.sinusoidal import SinusoidalEncoding

__all__ = ["AdditiveEncoding", "LearnedEncoding", "SinusoidalEncoding"]
