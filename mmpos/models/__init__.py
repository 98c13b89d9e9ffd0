"""Tokenisers, blocks and one transformer with three places for positions."""

from mmpos.models.block import Attention, Block, DropPath, Mlp, SwiGLU
from mmpos.models.classifier import BackboneClassifier, Classifier
from mmpos.models.modalities import Modalities
from mmpos.models.patches import PatchEmbedding
from mmpos.models.sound import FrameEmbedding, SpectrogramPatches
from mmpos.models.stream import ClassifierStream, Stream
from mmpos.models.symbols import Symbols
from mmpos.models.transformer import Transformer
from mmpos.models.tubelets import TubeletEmbedding

__all__ = [
    "Attention",
    "BackboneClassifier",
    "Block",
    "Classifier",
    "ClassifierStream",
    "DropPath",
    "FrameEmbedding",
    "Mlp",
    "Modalities",
    "PatchEmbedding",
    "SpectrogramPatches",
    "Stream",
    "SwiGLU",
    "Symbols",
    "Transformer",
    "TubeletEmbedding",
]
