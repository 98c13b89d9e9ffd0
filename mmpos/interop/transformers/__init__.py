"""Models of transformers: their encodings as encodings of mmpos, and other encodings in them."""

from mmpos.interop.transformers.comparison import compare as compare
from mmpos.interop.transformers.configuration import encodings as encodings
from mmpos.interop.transformers.difference import Difference as Difference
from mmpos.interop.transformers.encodings import Encodings as Encodings
from mmpos.interop.transformers.entries import config_entries as config_entries
from mmpos.interop.transformers.entries import rope_parameters as rope_parameters
from mmpos.interop.transformers.layouts import permute as permute
from mmpos.interop.transformers.layouts import permute_model as permute_model
from mmpos.interop.transformers.parameters import rotary_encoding as rotary_encoding
from mmpos.interop.transformers.plan import ChannelPlan as ChannelPlan
from mmpos.interop.transformers.presets import PRESETS as PRESETS
from mmpos.interop.transformers.presets import preset as preset
from mmpos.interop.transformers.replace import replace as replace
from mmpos.interop.transformers.replace import restore as restore
from mmpos.interop.transformers.towers import channel_plan as channel_plan
from mmpos.interop.transformers.weights import give_weights as give_weights
from mmpos.interop.transformers.weights import take_weights as take_weights

__all__ = [
    "PRESETS",
    "ChannelPlan",
    "Difference",
    "Encodings",
    "channel_plan",
    "compare",
    "config_entries",
    "encodings",
    "give_weights",
    "permute",
    "permute_model",
    "preset",
    "replace",
    "restore",
    "rope_parameters",
    "rotary_encoding",
    "take_weights",
]
