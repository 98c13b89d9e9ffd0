"""Who may see whom, and the scores that positions add: scaled dot-product attention.

Order decides who may see whom, never position: the tokens of an image share a time, and the
positions of a video may pass those of the text that follows it.
"""

from mmpos.attention.cache import KVCache, LayerCache
from mmpos.attention.dot_product import attend
from mmpos.attention.prepared import Prepared, prepare
from mmpos.attention.shards import SequenceShards, Whole

__all__ = [
    "KVCache",
    "LayerCache",
    "Prepared",
    "SequenceShards",
    "Whole",
    "attend",
    "prepare",
]
