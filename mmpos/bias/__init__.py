"""Encodings that are added to attention scores."""

from mmpos.bias.alibi import ALiBi
from mmpos.bias.base import AttentionBias, BiasBlocks
from mmpos.bias.clipped import ClippedRelativeBias
from mmpos.bias.content import ContentBias, ContentTerms
from mmpos.bias.disentangled import DisentangledBias
from mmpos.bias.fire import FIREBias
from mmpos.bias.kerple import KerpleBias
from mmpos.bias.log_cpb import LogCPB
from mmpos.bias.relative import RelativePositionBias
from mmpos.bias.shaw import ShawBias
from mmpos.bias.t5 import T5Bias
from mmpos.bias.transformer_xl import TransformerXLBias

__all__ = [
    "ALiBi",
    "AttentionBias",
    "BiasBlocks",
    "ClippedRelativeBias",
    "ContentBias",
    "ContentTerms",
    "DisentangledBias",
    "FIREBias",
    "KerpleBias",
    "LogCPB",
    "RelativePositionBias",
    "ShawBias",
    "T5Bias",
    "TransformerXLBias",
]
