"""timm's models: what they know of positions, and another image size for them."""

from mmpos.interop.timm.backbone import Backbone as Backbone
from mmpos.interop.timm.describe import Description as Description
from mmpos.interop.timm.describe import describe as describe
from mmpos.interop.timm.replace import replace as replace
from mmpos.interop.timm.replace import restore as restore
from mmpos.interop.timm.resize import resize as resize
from mmpos.interop.timm.scheme import Scheme as Scheme
from mmpos.interop.timm.spectrogram import spectrogram_classifier as spectrogram_classifier
from mmpos.interop.timm.video import video_classifier as video_classifier
