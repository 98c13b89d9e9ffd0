"""Encodings of mmpos in a transformers model, and its own again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import nn

from mmpos.additive import AdditiveEncoding
from mmpos.bias import AttentionBias
from mmpos.interop.transformers.attention import NAME, base_of, choose, implementation, register
from mmpos.interop.transformers.fitting import KEEP, Keep, kept, planned
from mmpos.interop.transformers.places import Places, arrive, enter
from mmpos.interop.transformers.sites import Site, network, read
from mmpos.rotary import RotaryEncoding
from mmpos.rotary.rotation import LAYOUTS, Layout

Additive = Callable[[int, Any], AdditiveEncoding]
Rotary = Callable[[int, Any], RotaryEncoding | nn.Identity]
Bias = Callable[[int, Any], AttentionBias | nn.Identity]


def replace(
    model: nn.Module,
    *,
    additive: Additive | Keep | None = KEEP,
    rotary: Sequence[Rotary | None] | Rotary | Keep | None = KEEP,
    bias: Sequence[Bias | None] | Bias | Keep | None = KEEP,
    per_layer: Sequence[Literal["rotary", "bias"]] = (),
    length: int | None = None,
    layout: Layout | None = None,
) -> Places:
    """Put encodings of mmpos into a transformers model in place, and take off its own.

    Each of the three places is what is given for it: ``"keep"`` leaves what the model has, None
    leaves it empty, and an encoding, its class or a callable fills it, as in
    `mmpos.models.Transformer`, lists and ``per_layer`` included. All weights but those of positions
    stay the same objects under the same names; new ones lie under ``mmpos.`` in the network of
    layers, on its device and in its dtype. A model whose positions were taken must be fine-tuned,
    unless the new ones are the same. `restore` gives it its own again.

    Rotations go through the model's own rotary module where that can say them: attention, caches
    and generation then stay as they are, and layers that the model does not turn stay unturned.
    Else, and for all biases, attention goes through ``sdpa`` or ``eager`` by the interface for
    attention of transformers; caches then hold keys as they are, which are turned at each step.
    Weights that were trained with a rotation are only turned in its layout and at its width.

    Positions are those that the model's own module is asked for, less its offset, so that the first
    token is at 0; a learned table with all the rows that the model's has, or more, is read as that
    one is. Attention asks at ``position_ids``, else counts what ``attention_mask`` shows, else from
    0; keys in a cache follow each other up to the first query. One pass at a time: threads need a
    copy of the model each.

    Args:
        model: with one network, or one of several: ``model.encoder``, ``model.decoder``.
        additive: for learned and sinusoidal tables. Where there is none, it is added to what the
            first layer gets.
        rotary: for rotations.
        bias: for T5's bias and ALiBi.
        per_layer: places in which a callable makes an encoding for each layer.
        length: what dynamic NTK and LongRoPE are told. By default each sequence has its own last
            position and one, in each call (transformers takes the longest of a batch for all);
            freeze it for keys in a cache to stay comparable across the original length.
        layout: of the weights of queries and keys, if `permute_model` brought them into another one
            than that of the model's code; attention then goes through the interface.

    Returns: the module that holds the encodings, ``additive``, ``rotary`` and ``bias``. It lies in
        the network of layers: ``model.model.mmpos`` of a ``LlamaForCausalLM``. Neither a state dict
        nor ``save_pretrained`` records a rotation: see `config_entries`.
    Raises: TypeError for what is no model of transformers; ValueError for a model with several
        networks or of patches, attention off the interface, a bias that looks at content, an
        encoding that does not fit. The model is then what it was.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> config = LlamaConfig(
    ...     hidden_size=32, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1,
    ...     num_key_value_heads=2, vocab_size=50,
    ... )
    >>> model = LlamaModel(config)
    >>> replace(model, rotary=mmpos.RotaryEncoding(16, layout="half", base=500000)).rotary
    RotaryEncoding(head_dim=16, axes=1, base=500000, rotary_dim=16, layout=half)
    """
    stack = network(model)
    held: Places | None = getattr(stack, NAME, None)
    given: dict[str, Any] = {"additive": additive, "rotary": rotary, "bias": bias}
    if length is not None and (isinstance(length, bool) or length < 1):
        raise ValueError(f"length must be 1 token or more, got {length}")
    if all(map(kept, given.values())):
        raise ValueError("nothing is given to replace: pass additive, rotary or bias")
    if layout not in (None, *LAYOUTS):
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    if held is not None:
        _lift(stack, held)
    own = [per_layer] if isinstance(per_layer, str) else per_layer
    try:
        places, site = planned(stack, given, own, length, layout, held)
    except BaseException:
        if held is not None:
            _put(read(stack), held)
        raise
    _put(site, places)
    return places


def restore(model: nn.Module) -> None:
    """Give a transformers model its own scheme back that `replace` took, with the weights it had.

    They are moved to the device and the dtype that the model has now; all others stay as they are.

    Raises: ValueError for a model in which nothing was replaced.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=50))
    >>> table = model.wpe
    >>> places = replace(model, additive=None)
    >>> restore(model)
    >>> model.wpe is table
    True
    """
    stack = network(model)
    held: Places | None = getattr(stack, NAME, None)
    if held is None:
        raise ValueError(f"nothing was replaced in this {type(stack).__name__}")
    _lift(stack, held)


def _put(site: Site, places: Places) -> None:
    """Let a model ask ``places``, in place of what these stand for."""
    stack = site.stack
    like = next(p for p in stack.parameters() if p.is_floating_point())
    places.to(device=like.device, dtype=like.dtype).train(stack.training)
    for module, name, _, instead in places.taken:
        setattr(module, name, None)  # a module's place first, for another kind of thing
        setattr(module, name, instead)
    stack.add_module(NAME, places)
    if places.hooked:
        stack.register_forward_pre_hook(enter, with_kwargs=True)
    for index, (layer, attention) in enumerate(zip(site.layers, site.attentions, strict=True)):
        if places.hooked:
            layer.mmpos = (places, index)
            layer.register_forward_pre_hook(arrive, with_kwargs=True)
        if places.uses_interface:
            attention.mmpos = (places, index)
    if places.uses_interface:
        register()
        places.configs = _configs(site)
        for config in places.configs:
            choose(config, implementation(base_of(config._attn_implementation)))


def _lift(stack: Any, places: Places) -> None:
    """Take places off a model, and give it its own scheme as it was, where the model is now."""
    like = next(p for p in stack.parameters() if p.is_floating_point())
    for module, name, value, _ in places.taken:
        if isinstance(value, nn.Module):
            value.to(like.device).train(stack.training)
            for parameter in value.parameters():
                parameter.data = parameter.data.to(like.dtype)
        setattr(module, name, None)
        setattr(module, name, value)
    stack._modules.pop(NAME, None)
    site = read(stack)
    for module in (stack, *site.layers):
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook in (enter, arrive):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
    for module in (*site.layers, *site.attentions):
        if NAME in vars(module or stack):
            delattr(module, NAME)
    for config in places.configs:
        choose(config, base_of(config._attn_implementation))


def _configs(site: Site) -> list[Any]:
    configs = {id(site.stack.config): site.stack.config}
    for attention in site.attentions:
        if attention is not None:
            configs[id(attention.config)] = attention.config
    return list(configs.values())
