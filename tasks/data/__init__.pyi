from .images import Images as Images
from .text import Text as Text

__all__ = ["Images", "Text"]
