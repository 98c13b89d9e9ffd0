from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.optim import Optimizer

from mmpos.interop.timm.change import Change
from mmpos.interop.timm.describe import Description, describe, inner
from mmpos.interop.timm.families import family
from mmpos.interop.timm.places import NAME, Places
from mmpos.interop.timm.scheme import times
from mmpos.interop.timm.target import Target, pair
from mmpos.resample import Resampling


def resize(
    model: nn.Module,
    image_size: int | Sequence[int],
    patch_size: int | Sequence[int] | None = None,
    *,
    window_size: int | Sequence[int | Sequence[int]] | None = None,
    resampling: Resampling | None = None,
    optimizer: Optimizer | None = None,
) -> Description:
    """Take a timm model to another image size in place; its parameters stay the same objects.

    Tables of positions are resized from the grid they are of, which is never guessed; indices,
    masks, coordinates and rotations are formed anew, and timm's own record of the size follows, so
    that its `set_input_size` and `get_model_input_config` go on working, and the model can be made
    anew; `pretrained_cfg` stays what the weights were trained at. Weights saved afterwards load
    into a model that timm makes for the size, or that was resized alike. What is done in each
    family is what `describe` says. At the model's own size nothing changes.

    Args:
        image_size: height and width, or one number for both.
        patch_size: of a plain patch embedding, whose kernel is resized by pseudo-inverse
            (FlexiViT, arXiv:2212.08013). What is left of the image below a patch is dropped, as
            timm does.
        window_size: of windowed attention: one number, (height, width), or one of these for each
            stage. By default windows grow with the image where timm's do.
        resampling: how tables go from grid to grid; by default as timm does where that is right:
            learned tables bicubic with antialias, bias tables as BEiT's authors.
        optimizer: whose moments are resized with the tables, second moments bilinearly, and dropped
            for a patch kernel. Without it, an optimizer that has stepped fails at resized ones.

    Returns: what the model now is.
    Raises: TypeError for what is no model of timm, or no size; ValueError for a size that the model
        cannot have, with the reason and the sizes near it, and for a family that cannot change.
        The model is then what it was.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
    >>> table = model.pos_embed
    >>> resize(model, (160, 320)).grid
    (10, 20)
    >>> model.pos_embed is table, tuple(table.shape)
    (True, (1, 201, 192))
    """
    network = inner(model)
    kind = family(network)
    name = type(network).__name__
    if kind is None or kind.rebuild is None:
        raise ValueError(f"{name} cannot be resized: {describe(network).how}")
    size = pair(image_size, "image_size")
    patch = None if patch_size is None else pair(patch_size, "patch_size")
    if patch is not None and not kind.patch:
        raise ValueError(f"patch_size cannot change in {name}: it has no plain patch embedding")
    if window_size is not None and not kind.window:
        raise ValueError(f"window_size cannot be chosen in {name}: drop it")
    if not isinstance(resampling, Resampling | None):
        raise TypeError(f"resampling is a mmpos.resample.Resampling(…), got {resampling!r}")
    if not isinstance(optimizer, Optimizer | None):
        raise TypeError(f"optimizer is one of torch.optim, got {optimizer!r}")
    now = describe(network)
    places: Places | None = getattr(network, NAME, None)
    settled = places is None or now.grid is None or places.on(now.grid)
    if (
        settled
        and size == now.image_size
        and patch in (None, now.patch_size)
        and window_size is None
    ):
        return now
    target = Target(size, patch if patch != now.patch_size else None, window_size)
    device = next((each.device.type for each in network.parameters()), "cpu")
    autocast = torch.amp.is_autocast_available(device)
    with (
        nullcontext() if places is None else _own(places),
        torch.no_grad(),
        torch.autocast(device if autocast else "cpu", enabled=False),
        Change(network, resampling, optimizer) as change,
    ):
        try:
            kind.rebuild(change, network, target)
        except (AssertionError, RuntimeError, IndexError) as error:
            raise ValueError(
                f"{name} cannot be resized to {times(size)}: {error or 'timm refuses it'}"
            ) from error
    return describe(network)


@contextmanager
def _own(places: Places) -> Iterator[None]:
    """Have a model's own schemes, which `replace` took, resized with it."""
    places.give_back()
    try:
        yield
    finally:
        places.take()
