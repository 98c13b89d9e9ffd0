"""Encodings that turn queries and keys."""

from mmpos.rotary.mixed import MixedRotaryEncoding
from mmpos.rotary.mrope import MRoPE
from mmpos.rotary.rope import RotaryEncoding
from mmpos.rotary.rotation import Rotation, rerotate, rotate, rotate_
from mmpos.rotary.temperature import LogTemperature
from mmpos.rotary.vjepa2 import VJEPA2Encoding
from mmpos.rotary.xdrope import XDRoPE
from mmpos.rotary.xpos import XPosEncoding

__all__ = [
    "LogTemperature",
    "MRoPE",
    "MixedRotaryEncoding",
    "RotaryEncoding",
    "Rotation",
    "VJEPA2Encoding",
    "XDRoPE",
    "XPosEncoding",
    "rerotate",
    "rotate",
    "rotate_",
]
