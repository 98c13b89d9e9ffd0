from .images import Images as Images

__all__ = ["Images"]
