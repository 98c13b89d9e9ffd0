"""Encodings that turn queries and keys."""

from mmpos.rotary.rope import RotaryEncoding
from mmpos.rotary.rotation import Rotation, rotate

__all__ = ["RotaryEncoding", "Rotation", "rotate"]
