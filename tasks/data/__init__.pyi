from .algorithms import Algorithms as Algorithms
from .audio import Audio as Audio
from .images import Images as Images
from .labelled_text import LabelledText as LabelledText
from .multimodal import Multimodal as Multimodal
from .needles import Needles as Needles
from .text import Text as Text
from .video import Video as Video

__all__ = [
    "Algorithms",
    "Audio",
    "Images",
    "LabelledText",
    "Multimodal",
    "Needles",
    "Text",
    "Video",
]
