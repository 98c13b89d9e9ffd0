"""What a timm model knows of positions, part by part.

Classes are named, not imported: a version of timm without one of them is no error, and a subclass
is found as what it derives from.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from mmpos.interop.timm import absolute, relative
from mmpos.interop.timm.absolute import Found
from mmpos.interop.timm.places import Places
from mmpos.interop.timm.tables import Table

FINDERS = {**absolute.FINDERS, **relative.FINDERS}


def parts(model: nn.Module) -> list[Found]:
    """The schemes of a model, with their tables, in the order of its modules."""
    found: list[Found] = []
    for path, module in model.named_modules():
        if isinstance(module, Places):
            found += module.found()
        finder = of_class(FINDERS, module)
        if finder is not None:
            found += finder(module, f"{path}." if path else "")
    return found


def tables(model: nn.Module) -> list[Table]:
    """The tables of a model."""
    return [table for _, table in parts(model) if table is not None]


def of_class(entries: dict[str, Any], module: nn.Module) -> Any | None:
    """The entry of the module's class, or of the nearest of timm's that it derives from."""
    for cls in type(module).__mro__:
        name = f"{cls.__module__}.{cls.__qualname__}"
        if name.startswith("timm.") and name[5:] in entries:
            return entries[name[5:]]
    return None
