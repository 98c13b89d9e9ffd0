"""The learned numbers of positions, from a state dict of transformers and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmpos.additive import SinusoidalEncoding
from mmpos.interop.transformers.encodings import Encodings
from mmpos.interop.transformers.names import Held, names_of, table_name
from mmpos.positions import sequence

_PLAIN = torch.contiguous_format


@torch.no_grad()
def take_weights(encodings: Encodings, state_dict: Mapping[str, Tensor]) -> None:
    """Copy what a model of transformers has learned of positions into its encodings, in place.

    ``state_dict`` is that of the model or of any model around it: names may stand behind one prefix
    (``bert.``, ``model.``, or what a wrapper adds), and what is no position is passed over. A table
    is taken at the size that it has; grow it afterwards, by its ``resize``. Sinusoids have nothing
    to take, and where a state dict keeps them as a table they are compared.

    Raises: ValueError for numbers that are missing, of another shape, there under several prefixes,
    or of a dtype that the parameters would round; for a table of sinusoids that were trained on;
    and for encodings whose numbers no model of that type has. Nothing has changed then.

    >>> import transformers
    >>> from mmpos.interop.transformers import encodings
    >>> config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, n_positions=6, vocab_size=9)
    >>> model, found = transformers.GPT2LMHeadModel(config), encodings(config)
    >>> take_weights(found, model.state_dict())
    >>> torch.equal(found.additive.table, model.transformer.wpe.weight)
    True
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state dict is needed, got {type(state_dict).__name__}")
    within = f".{encodings.part}." if encodings.part else "."
    if any(".mmpos." in f".{name}" and within in f".{name}" for name in state_dict):
        raise ValueError(
            "the state dict has encodings of mmpos in the place of the model's own (mmpos.…): "
            "restore the model first, or read them there"
        )
    held = _held(encodings)
    if not any(within in f".{name}" for name in state_dict):
        state_dict = {f"{encodings.part}.{name}": own for name, own in state_dict.items()}
    prefix = _prefix(encodings, held, state_dict)
    copies: list[tuple[Tensor, Tensor]] = []
    for each in held:
        name = prefix + each.name
        stored = state_dict.get(name)
        if stored is None:
            name = prefix + each.other
            stored = state_dict[name]
        total = sum(own.seen.shape[-2] for own in held if own.name == each.name and own.rows)
        _check(name, stored, each, total)
        rows = stored if each.rows is None else stored[..., each.rows, :]
        copies.append((each.seen, rows))
    if isinstance(encodings.additive, SinusoidalEncoding):
        _compare(encodings, encodings.additive, state_dict)
    for own, stored in copies:
        own.copy_(stored)


def give_weights(encodings: Encodings) -> dict[str, Tensor]:
    """Copies of the learned numbers under transformers' own names, without a prefix.

    ``model.base_model.load_state_dict(give_weights(encodings), strict=False)`` puts them back, and
    what `take_weights` took comes back as it was. A model takes a resized table if its
    configuration says the new number of rows. DeBERTa's projections of positions go by names that
    a model has with ``share_att_key=False``: where it shares them, they stay with its contents.

    Raises: ValueError for encodings whose numbers no model of that type has, or of which two stand
    for one.

    >>> import transformers
    >>> from mmpos.interop.transformers import encodings
    >>> config = transformers.T5Config(num_heads=2, num_layers=3)
    >>> list(give_weights(encodings(config, "encoder")))
    ['encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight']
    """
    parts: dict[str, list[Tensor]] = {}
    for each in _held(encodings):
        parts.setdefault(each.name, []).append(each.seen)
    return {
        name: torch.cat(own, dim=-2) if len(own) > 1 else own[0].clone(memory_format=_PLAIN)
        for name, own in parts.items()
    }


def _held(encodings: Encodings) -> list[Held]:
    """All learned numbers of encodings, each once."""
    found: dict[tuple[str, int], Held] = {}
    for place in ("additive", "rotary", "bias"):
        for encoding, layers in encodings.each(place):
            own = list(names_of(encodings, encoding, layers))
            known = {id(each.parameter) for each in own}
            lost = [name for name, each in encoding.named_parameters() if id(each) not in known]
            if lost:
                raise ValueError(
                    f"{encodings.model_type} has no name for {lost[0]} of {type(encoding).__name__}"
                    f" as its {place} encoding: give these numbers by hand"
                )
            for each in own:
                first = each.rows.start if each.rows else 0
                before = found.setdefault((each.name, first), each)
                if before.parameter is not each.parameter:
                    raise ValueError(
                        f"{each.name} is one for all layers, and the encodings of layers have "
                        "different ones: let them share it"
                    )
    return list(found.values())


def _compare(encodings: Encodings, waves: SinusoidalEncoding, state: Mapping[str, Tensor]) -> None:
    """Raise for a stored table of sinusoids that is not the encoding's."""
    name = table_name(encodings)
    for key, stored in state.items() if name else ():
        if key != name and not key.endswith(f".{name}"):
            continue
        where = sequence(len(stored), device=stored.device)
        apart = (waves(where) - stored).abs().max()
        if not apart <= 1e-4 + 4 * torch.finfo(stored.dtype).eps:
            raise ValueError(
                f"{key} is up to {apart:.2g} away from the sinusoids that the configuration says: "
                "it was trained on, so take it as the table of a LearnedEncoding"
            )


def _prefix(encodings: Encodings, held: list[Held], state: Mapping[str, Tensor]) -> str:
    """What stands before all names, the empty word where nothing does."""
    where = f"{encodings.model_type}{f' ({encodings.part})' if encodings.part else ''}"
    common: set[str] | None = None
    for each in held:
        own = {
            key.removesuffix(name)
            for name in filter(None, (each.name, each.other))
            for key in state
            if key == name or key.endswith(f".{name}")
        }
        left = own if common is None else common & own
        if not left:
            raise ValueError(
                f"the state dict has no {each.name}, which {where} learns: it is of another model, "
                "or not whole"
            )
        common = left
    for word in ("text_model", "vision_model"):  # two networks of CLIP have one name
        of_word = {own for own in common or () if own.endswith(f"{word}.")}
        if encodings.model_type.endswith(word) and of_word:
            common = of_word
    if common is not None and len(common) > 1:
        names = ", ".join(repr(prefix) for prefix in sorted(common))
        raise ValueError(
            f"the state dict has positions of {where} behind {names}: give that of one network"
        )
    return common.pop() if common else ""


def _check(name: str, stored: Tensor, held: Held, rows: int) -> None:
    """Raise for numbers that the parameter cannot hold; ``rows`` of the whole table, if not 0."""
    own = held.seen
    shape = (*own.shape[:-2], rows, own.shape[-1]) if rows else tuple(own.shape)
    if tuple(stored.shape) != shape:
        raise ValueError(
            f"{name} has shape {tuple(stored.shape)}, the encoding {shape}: read the "
            "configuration of these weights, and resize afterwards"
        )
    if stored.is_meta or own.is_meta:
        raise ValueError(f"{name} has no numbers on the meta device: materialise both sides first")
    if not stored.is_floating_point() or torch.promote_types(stored.dtype, own.dtype) != own.dtype:
        raise ValueError(
            f"{name} is {stored.dtype}, which the encoding's {own.dtype} would round: cast the "
            "encoding first, or the state dict"
        )
