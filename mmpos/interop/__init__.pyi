from . import timm as timm
from . import transformers as transformers

__all__: list[str]
