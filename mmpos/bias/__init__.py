"""Encodings that are added to attention scores."""

from mmpos.bias.alibi import ALiBi
from mmpos.bias.base import AttentionBias

__all__ = ["ALiBi", "AttentionBias"]
