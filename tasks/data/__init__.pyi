from .algorithms import Algorithms as Algorithms
from .images import Images as Images
from .labelled_text import LabelledText as LabelledText
from .text import Text as Text

__all__ = ["Algorithms", "Images", "LabelledText", "Text"]
