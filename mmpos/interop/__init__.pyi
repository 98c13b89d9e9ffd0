from . import timm as timm

__all__: list[str]
