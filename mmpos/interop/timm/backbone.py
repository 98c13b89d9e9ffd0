from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from functools import partial
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import timm
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor, nn

from mmpos.interop.timm.describe import describe
from mmpos.interop.timm.parts import tables
from mmpos.interop.timm.replace import KEEP, Additive, Bias, Keep, Rotary, replace
from mmpos.interop.timm.resize import resize
from mmpos.interop.timm.scheme import times
from mmpos.interop.timm.target import multiples

_log = logging.getLogger(__name__)
_BLANK: ContextVar[bool] = ContextVar("blank", default=False)


@contextmanager
def blank() -> Iterator[None]:
    """Make backbones without loading weights, where others are about to take their place."""
    token = _BLANK.set(True)
    try:
        yield
    finally:
        _BLANK.reset(token)


class Backbone(nn.Module):
    """A timm model without its classifier, at any image size, with other positions if wanted.

    Its weights are loaded at the size that they are for, then `resize` takes it to ``image_size``,
    and `replace` fills the places that are given. What it saves holds the size too, so that weights
    saved at another size are resized as they are loaded, and a line of the log says so.

    Args:
        image_size: height and width in pixels.
        channels: of an image; pretrained weights of three are summed or repeated, as timm does.
        name: of the architecture, as `timm.create_model` has it; ``.tag`` names weights.
        pretrained: whether timm downloads the weights that it knows for the name.
        weights: a file of them instead, a timm state dict for the size that timm makes the model
            for; for another size pass that as ``options={"img_size": …}``.
        patch_size: of a plain patch embedding, whose kernel is resized.
        additive, rotary, bias, per_layer: see `replace`.
        options: more arguments of the architecture, such as ``drop_path_rate``.

    Under layer-wise decay, encodings that are put in learn at the rate of the heads: they are new.

    Shape: ``[B, C, H, W]`` → ``[B, dim]``, pooled as the architecture does before its classifier.
    Raises: ValueError for an unknown name, with those near it, or what `resize` and `replace`
        refuse; FileNotFoundError for weights that are not there; OSError where they cannot be
        downloaded.

    >>> model = Backbone((96, 64), name="vit_tiny_patch16_224", options={"depth": 1})
    >>> model.dim, model(torch.zeros(2, 3, 96, 64)).shape
    (192, torch.Size([2, 192]))
    """

    def __init__(
        self,
        image_size: Sequence[int],
        channels: int = 3,
        *,
        name: str,
        pretrained: bool = False,
        weights: str | PathLike | None = None,
        patch_size: int | Sequence[int] | None = None,
        additive: Additive | Keep | None = KEEP,
        rotary: list[Rotary] | Rotary | Keep | None = KEEP,
        bias: list[Bias] | Bias | Keep | None = KEEP,
        per_layer: Sequence[Literal["rotary", "bias"]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if _BLANK.get():
            pretrained, weights = False, None
        own = {"num_classes", "in_chans", "img_size", "pretrained"} & set(options or ())
        if own - ({"img_size"} if weights is not None else set()):
            raise ValueError(
                f"options may not have {', '.join(sorted(own))}: image_size, channels and "
                "pretrained say it, and a backbone has no classes"
            )
        if pretrained and weights is not None:
            raise ValueError(
                "pretrained=True downloads weights, and a file of them is given too: set "
                "pretrained=False (--model.backbone.pretrained false)"
            )
        source: dict[str, Any] = {"pretrained": pretrained}
        if weights is not None:
            path = Path(weights)
            if not path.is_file():
                raise FileNotFoundError(f"there are no weights at {path}")
            source = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(path)}}
        self.model = _made(name, in_chans=channels, num_classes=0, **source, **(options or {}))
        self.arguments = {**({} if channels == 3 else {"in_chans": channels}), **(options or {})}
        there = describe(self.model)
        if there.resizable or there.image_size not in (None, tuple(image_size)):
            there = resize(self.model, image_size, patch_size)
        if there.patch_size is not None:
            multiples(image_size, there.patch_size, f"the patch of {name}")
        replace(self.model, additive=additive, rotary=rotary, bias=bias, per_layer=per_layer)
        self._size = (int(image_size[0]), int(image_size[1]))
        self.register_load_state_dict_pre_hook(_to_stored_size)
        self.register_load_state_dict_post_hook(_to_own_size)

    _own: tuple[int, ...] | None = None

    @property
    def size(self) -> tuple[int, ...]:
        """Height and width of the images that it is made for."""
        return describe(self.model).image_size or self._size

    def get_extra_state(self) -> Tensor:
        """The size that the weights are for, for what loads them."""
        return torch.tensor(self.size)

    def set_extra_state(self, state: Tensor) -> None:
        """Nothing: weights come to the size of this model."""

    def stored_size(self, state: Mapping[str, Tensor], prefix: str) -> tuple[int, ...] | None:
        """The size that stored weights are for, if it is another one and they must be resized."""
        stored = state.get(f"{prefix}_extra_state")
        size = None if stored is None else tuple(stored.tolist())
        return size if size != self.size and describe(self.model).resizable else None

    def resized_from(self, size: Sequence[int]) -> dict[str, Callable[..., Tensor]]:
        """How what is stored of tables for another size comes to this one, by parameters' names.

        Each takes a tensor, and ``positive=True`` for second moments.
        """
        twin = copy.deepcopy(self.model)
        resize(twin, size)
        names = {parameter: f"model.{name}" for name, parameter in twin.named_parameters()}
        return {
            names[old.parameter]: partial(old.resized, grid=new.grid)
            for old, new in zip(tables(twin), tables(self.model), strict=True)
        }

    @property
    def dim(self) -> int:
        """Features of the output."""
        model: Any = self.model
        return getattr(model, "head_hidden_size", model.num_features)

    def forward(
        self, images: Float[Tensor, "batch channel height width"]
    ) -> Float[Tensor, "batch dim"]:
        """The pooled features of images."""
        return self.model(images)


def _to_stored_size(backbone: Backbone, state: Mapping[str, Tensor], prefix: str, *_: Any) -> None:
    """Take the model to the size of what is about to be loaded."""
    stored = backbone.stored_size(state, prefix)
    if stored is not None:
        backbone._own = backbone.size
        resize(backbone.model, stored)
        _log.warning("%smodel: resized from %s to %s", prefix, times(stored), times(backbone._own))


def _to_own_size(backbone: Backbone, _: Any) -> None:
    """Take what was loaded to the model's own size."""
    if backbone._own is not None:
        resize(backbone.model, backbone._own)
        backbone._own = None


def _made(name: str, **arguments: Any) -> nn.Module:
    """A model of timm, whose faults say what is to be done."""
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        near = get_close_matches(architecture, timm.list_models(), cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() names all"
        raise ValueError(f"timm has no model {architecture!r}: {hint}")
    tags = [each.partition(".")[2] for each in timm.list_pretrained(f"{architecture}.*")]
    if tag and tag not in tags:
        known = f"it has {', '.join(tags)}" if tags else "it has none"
        raise ValueError(f"timm has no weights {tag!r} of {architecture}: {known}")
    file = (arguments.get("pretrained_cfg_overlay") or {}).get("file")
    loaded: list[Any] = []
    try:
        with _noted(loaded):
            model = timm.create_model(name, **arguments)
    except TypeError as error:
        raise ValueError(f"{architecture} does not take these options: {error}") from error
    except OSError as error:
        raise OSError(
            f"the weights of {name} cannot be downloaded ({type(error).__name__}): give a file of "
            "them as weights, or leave pretrained out"
        ) from error
    except (RuntimeError, KeyError, SafetensorError, UnpicklingError) as error:
        if file is None:
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(
            f"{file} holds no weights of {architecture}: {' '.join(lines[:2])}"
        ) from error
    if file is not None:
        _check_loaded(model, file, loaded)
    return model


@contextmanager
def _noted(results: list[Any]) -> Iterator[None]:
    """Note what loading state dicts gives, which timm logs at most."""
    load = nn.Module.load_state_dict

    def noting(module: nn.Module, *args: Any, **named: Any) -> Any:
        results.append(load(module, *args, **named))
        return results[-1]

    nn.Module.load_state_dict = noting  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module.load_state_dict = load


def _check_loaded(model: nn.Module, file: str, loaded: Sequence[Any]) -> None:
    """Raise ValueError unless a file had all weights but the classifier's, and no others."""
    heads = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ()
    heads = tuple(f"{head}." for head in ((heads,) if isinstance(heads, str) else heads))
    for what, names in (
        ("lacks", [name for each in loaded[-1:] for name in each.missing_keys]),
        ("has unknown", [name for each in loaded[-1:] for name in each.unexpected_keys]),
    ):
        others = [name for name in names if not name.startswith(heads)]
        if others or not loaded:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise ValueError(
                f"{file} {what} {others[0] if others else 'weights'}{more}: give the name and the "
                "options of the model that they are of"
            )
