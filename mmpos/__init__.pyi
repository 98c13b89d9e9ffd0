from . import attention as attention
from . import coordinates as coordinates
from . import frequencies as frequencies
from . import models as models
from . import positions as positions
from . import resample as resample
from ._version import __version__ as __version__
from .additive import AdditiveEncoding as AdditiveEncoding
from .additive import LearnedEncoding as LearnedEncoding
from .additive import SinusoidalEncoding as SinusoidalEncoding
from .attention import attend as attend
from .bias import ALiBi as ALiBi
from .bias import AttentionBias as AttentionBias
from .rotary import RotaryEncoding as RotaryEncoding
from .rotary import Rotation as Rotation
from .rotary import rotate as rotate

__all__: list[str]
