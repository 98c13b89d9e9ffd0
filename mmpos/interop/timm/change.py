"""A change of a model in place that is made whole or not at all."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mmpos.interop.timm.tables import Grid, Table
from mmpos.resample import Resampling, patch_kernel

_NAMES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class Change:
    """Resizes parameters of a model, each of which stays the same object.

    Left with an error, the model is what it was. The moments that an optimizer holds of a table are
    resized with it, first ones as the table, second ones bilinearly; those of a parameter that is
    no table are dropped, and so begin anew.
    """

    def __init__(
        self, model: nn.Module, resampling: Resampling | None, optimizer: Optimizer | None
    ) -> None:
        self.model = model
        self.resampling = resampling
        self.optimizer = optimizer
        self._modules = [(module, _copied(module)) for module in model.modules()]
        self._parameters = [(each, each.data, each.grad) for each in model.parameters()]
        self._moments: list[tuple[nn.Parameter, dict[str, Any]]] = []

    def table(self, table: Table, grid: Sequence[int]) -> None:
        """Take a table to another grid, and its parameter back to where it was."""
        new = tuple(grid)
        table.module._parameters[table.name] = table.parameter
        if new == table.grid:
            return
        before = table.parameter.shape
        data = table.resized(table.parameter.data, new, self.resampling)
        self._set(table.parameter, data)
        moments = self._moments_of(table.parameter)
        for name, moment in moments.items():
            if isinstance(moment, Tensor) and moment.shape == before and moment.ndim:
                second = "sq" in name or name == "sum"  # Adam, RMSprop, Adagrad
                moments[name] = table.resized(moment, new, self.resampling, positive=second)

    def tables(self, old: Sequence[Table], new: Sequence[Table]) -> None:
        """Take tables to the grids of those that a model has for them now."""
        for before, after in zip(old, new, strict=True):
            assert (before.module, before.name) == (after.module, after.name)
            self.table(before, after.grid)

    def kernel(self, convolution: nn.Conv2d, patch_size: Grid) -> None:
        """Take the kernel of a patch embedding, and its stride, to another patch size."""
        if tuple(convolution.kernel_size) == patch_size:
            return
        weight = convolution._parameters["weight"]
        assert weight is not None
        self._set(weight, patch_kernel(weight.data, patch_size))
        self._moments_of(weight).clear()
        convolution.kernel_size = convolution.stride = (patch_size[0], patch_size[1])

    def _set(self, parameter: nn.Parameter, data: Tensor) -> None:
        if parameter.grad is not None and data.shape != parameter.shape:
            parameter.grad = None
        parameter.data = data

    def _moments_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        if self.optimizer is None or parameter not in self.optimizer.state:
            return {}
        moments = self.optimizer.state[parameter]
        self._moments.append((parameter, dict(moments)))
        return moments

    def __enter__(self) -> Change:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            return
        for module, attributes in self._modules:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for parameter, data, grad in self._parameters:
            parameter.data, parameter.grad = data, grad
        for parameter, moments in reversed(self._moments):
            assert self.optimizer is not None
            self.optimizer.state[parameter].clear()
            self.optimizer.state[parameter].update(moments)


def _copied(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, with copies of what is changed in place; tensors are not copied."""
    attributes = dict(module.__dict__)
    for name in _NAMES:
        attributes[name] = copy.copy(attributes[name])
    if isinstance(attributes.get("feature_info"), list):
        attributes["feature_info"] = copy.deepcopy(attributes["feature_info"])
    return attributes
