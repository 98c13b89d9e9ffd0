"""How fast pairs of features turn: spectra, their division among axes, context extension."""

from mmpos.frequencies.bound import base_bound, base_of
from mmpos.frequencies.extension import Extension, Length, axis_lengths
from mmpos.frequencies.interpolation import PositionInterpolation
from mmpos.frequencies.llama3 import Llama3
from mmpos.frequencies.longrope import LongRoPE
from mmpos.frequencies.ntk import DynamicNTK, NTKAware
from mmpos.frequencies.proportional import Proportional
from mmpos.frequencies.spectrum import angles, geometric, split_pairs
from mmpos.frequencies.yarn import YaRN

__all__ = [
    "DynamicNTK",
    "Extension",
    "Length",
    "Llama3",
    "LongRoPE",
    "NTKAware",
    "PositionInterpolation",
    "Proportional",
    "YaRN",
    "angles",
    "axis_lengths",
    "base_bound",
    "base_of",
    "geometric",
    "split_pairs",
]
