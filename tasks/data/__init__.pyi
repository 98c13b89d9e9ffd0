from .algorithms import Algorithms as Algorithms
from .audio import Audio as Audio
from .images import Images as Images
from .labelled_text import LabelledText as LabelledText
from .text import Text as Text

__all__ = ["Algorithms", "Audio", "Images", "LabelledText", "Text"]
