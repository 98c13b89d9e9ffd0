"""A transformers model with encodings of mmpos is trained, saved, cast, copied and given back."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
import transformers

import mmpos
from mmpos.interop.transformers.attention import BASES, implementation
from mmpos.interop.transformers.replace import replace, restore

hf: Any = transformers
pytestmark = pytest.mark.peer("transformers")

ROPE = partial(mmpos.RotaryEncoding, layout="half")
SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}


def made(config: Any, cls: Any = None) -> Any:
    torch.manual_seed(0)
    return (hf.AutoModel.from_config(config) if cls is None else cls(config)).eval()


def llama(**own: Any) -> Any:
    return made(hf.LlamaConfig(**SMALL | own), hf.LlamaForCausalLM)


def gpt2(**own: Any) -> Any:
    config = hf.GPT2Config(n_embd=48, n_head=3, n_layer=2, n_inner=32, vocab_size=50, **own)
    return made(config, hf.GPT2LMHeadModel)


def bloom() -> Any:
    return made(hf.BloomConfig(hidden_size=48, n_head=3, n_layer=2, vocab_size=50))


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 50, shape, generator=torch.Generator().manual_seed(1))


def out(model: Any, tokens: torch.Tensor, **given: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, **given)[0]


def filled(model: Any) -> Any:
    """All three places, with something learned in each kind of them."""
    if isinstance(model, hf.GPT2LMHeadModel):
        replace(
            model,
            additive=mmpos.LearnedEncoding,
            rotary=partial(mmpos.MixedRotaryEncoding, heads=3, layout="half"),
            bias=[mmpos.T5Bias, mmpos.KerpleBias],
        )
    else:
        replace(model, rotary=ROPE, bias=mmpos.T5Bias)
    return model


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_reach_the_encodings(make, checkpointed):
    model, tokens = filled(make()), ids(2, 20)
    grads = []
    for again in (False, True):
        model.train()
        for dropout in model.modules():
            if isinstance(dropout, torch.nn.Dropout):
                dropout.p = 0.0
        model.zero_grad()
        if again and checkpointed:
            model.activation_checkpointing_enable()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        if again and checkpointed:
            out(model, ids(2, 11), use_cache=False)  # something else in between
        loss.backward()
        own = [p.grad for name, p in model.named_parameters() if "mmpos" in name]
        assert own and all(grad is not None and grad.abs().max() > 0 for grad in own)
        grads.append(own)
    for first, second in zip(*grads, strict=True):
        torch.testing.assert_close(first, second)


def test_checkpointing_that_would_lose_gradients():
    model, tokens = llama(), ids(2, 20)
    filled(model).train()
    model.activation_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant=True gives no gradients to encodings"):
        model(tokens, use_cache=False)
    out(model, tokens, use_cache=False)
    restore(model)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("make", [llama, gpt2])
def test_weights_saved_and_loaded(make, tmp_path):
    model, tokens = filled(make()), ids(2, 20)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other = filled(make())
    for parameter in other.parameters():
        parameter.data.normal_()
    other.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert torch.equal(out(other, tokens), out(model, tokens))
    model.save_pretrained(tmp_path)
    assert "mmpos" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("make", [llama, gpt2, bloom])
def test_copies_are_separate(make):
    model, tokens = make(), ids(2, 20)
    own = out(model, tokens)
    if make is bloom:
        replace(model, bias=mmpos.T5Bias)
    else:
        filled(model)
    expected = out(model, tokens)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    restore(model)
    assert torch.equal(out(model, tokens), own)
    for other in (copied, pickled):
        assert torch.equal(out(other, tokens), expected)
        restore(other)
        assert torch.equal(out(other, tokens), own)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_model_cast_after_it_was_filled(make):
    tokens = ids(2, 20)
    plain = make().to(torch.bfloat16)
    own = out(plain, tokens)
    model = filled(make()).to(torch.bfloat16)
    assert out(model, tokens).dtype == torch.bfloat16
    given = out(model, tokens)
    model.to(torch.float32)
    assert (out(model, tokens) - given).abs().max() < 0.1
    restore(model.to(torch.bfloat16))
    assert (out(model, tokens) - own).abs().max() < 0.02
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    early = filled(make().to(torch.bfloat16))
    assert all(p.dtype == torch.bfloat16 for p in early.parameters())
    assert torch.equal(out(early, tokens), out(early, tokens))


def test_cosines_are_formed_in_float32_and_rounded_once():
    model = llama().to(torch.bfloat16)
    replace(model, rotary=ROPE)
    where = torch.tensor([[300, 301, 4097]])
    cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.bfloat16), where)
    frequency = 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    angle = where[..., None] * frequency.repeat(2)
    torch.testing.assert_close(cos.double(), angle.cos(), rtol=0, atol=2**-8)
    torch.testing.assert_close(sin.double(), angle.sin(), rtol=0, atol=2**-8)
    assert cos.dtype == sin.dtype == torch.bfloat16


def test_a_second_call_changes_what_it_names():
    model, tokens = gpt2(), ids(2, 20)
    own, table = out(model, tokens), model.transformer.wpe
    replace(model, additive=mmpos.SinusoidalEncoding)
    added = out(model, tokens)
    replace(model, bias=mmpos.ALiBi)
    both = out(model, tokens)
    assert not torch.equal(added, both)
    replace(model, bias=None)
    torch.testing.assert_close(out(model, tokens), added)
    replace(model, additive=None, bias=mmpos.ALiBi)
    assert not torch.equal(out(model, tokens), both)
    restore(model)
    assert model.transformer.wpe is table and torch.equal(out(model, tokens), own)
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._forward_pre_hooks_with_kwargs
        assert "mmpos" not in vars(module)
    with pytest.raises(ValueError, match="nothing was replaced in this GPT2Model"):
        restore(model)


def test_other_models_of_a_configuration_are_not_touched():
    config, tokens = hf.LlamaConfig(**SMALL), ids(2, 20)
    first, second = made(config), made(config)
    expected = out(second, tokens)
    replace(first, bias=mmpos.ALiBi)
    assert torch.equal(out(second, tokens), expected)
    assert not torch.equal(out(first, tokens), expected)


def test_another_implementation_chosen_afterwards():
    model, tokens = llama(), ids(2, 20)
    replace(model, bias=mmpos.ALiBi)
    expected = out(model, tokens)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(out(model, tokens), expected)
    assert model.config._attn_implementation == implementation("eager")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="was set to 'flex_attention', which takes no encodings"):
        model(tokens)
    assert BASES == ("sdpa", "eager")


def test_compiled_as_a_whole():
    without = os.environ | {"JAXTYPING_DISABLE": "1"}  # torch cannot trace the checks
    program = [sys.executable, "-c", COMPILED]
    done = subprocess.run(program, env=without, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


COMPILED = """
from functools import partial
import torch, mmpos
from transformers import LlamaConfig, LlamaModel
from mmpos.interop.transformers.replace import replace

model = LlamaModel(LlamaConfig(
    hidden_size=48, intermediate_size=32, num_attention_heads=3, num_key_value_heads=1,
    num_hidden_layers=2, vocab_size=50,
)).eval()
half = {"layout": "half"}
for given in (
    {"rotary": partial(mmpos.RotaryEncoding, **half)},
    {"rotary": partial(mmpos.XPosEncoding, **half), "bias": mmpos.ALiBi},
):
    replace(model, **given)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for length in (20, 15):
        tokens = torch.randint(0, 50, (2, length))
        with torch.no_grad():
            expected = model(tokens, use_cache=False)[0]
            torch.testing.assert_close(compiled(tokens, use_cache=False)[0], expected)
    assert torch._dynamo.utils.counters["graph_break"] == {}
"""


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "layout": (llama, {"rotary": mmpos.RotaryEncoding}, "the weights are laid out half: make the"),
    "width": (
        llama,
        {"rotary": partial(ROPE, rotary_dim=8)},
        "turns 8 features of a head, the model turns 16: make it with rotary_dim=16",
    ),
    "head": (llama, {"rotary": ROPE(8)}, "was made for head_dim=8, the transformer needs 16"),
    "heads": (llama, {"bias": mmpos.ALiBi(4)}, "was made for heads=4, the transformer needs 3"),
    "kind": (gpt2, {"bias": mmpos.RotaryEncoding(16)}, "this place takes a kind of AttentionBias"),
    "pattern": (llama, {"rotary": [ROPE] * 3}, "a pattern of 3 layers, which does not divide"),
    "content": (
        llama,
        {"bias": mmpos.ShawBias(3, head_dim=16, distance=4)},
        "ShawBias looks at queries and keys",
    ),
    "content class": (
        llama,
        {"bias": partial(mmpos.ShawBias, distance=4)},
        "ShawBias looks at queries and keys",
    ),
    "length": (llama, {"rotary": ROPE, "length": 9}, "length=9 is for frequencies that depend"),
    "no length": (llama, {"rotary": ROPE, "length": 0}, "length must be 1 token or more, got 0"),
    "axes": (llama, {"bias": partial(mmpos.ALiBi, axes=2)}, "multiple values|made for 2 axes"),
    "prefix rows": (
        gpt2,
        {"additive": partial(mmpos.LearnedEncoding, prefix_rows=1)},
        "prefix rows would be read by padding",
    ),
    "dim": (gpt2, {"additive": mmpos.SinusoidalEncoding(8)}, "was made for dim=8"),
    "off the interface": (bloom, {"rotary": mmpos.RotaryEncoding}, "attention in a way of its own"),
    "flash": (
        partial(llama, attn_implementation="flex_attention"),
        {"bias": mmpos.ALiBi},
        "attention by 'flex_attention' takes no encodings of mmpos: load the model with",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("filled_before", [False, True])
def test_what_cannot_be_is_said_before_anything_changes(name, filled_before):
    make, given, said = REFUSED[name]
    model, tokens = make(), ids(2, 20)
    own = out(model, tokens) if name != "flash" else None
    if filled_before and make is bloom:
        replace(model, bias=mmpos.ALiBi)
    elif filled_before:
        replace(model, rotary=ROPE if make is not gpt2 else mmpos.RotaryEncoding)
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    names = [set(vars(module)) for module in model.modules()]
    expected = out(model, tokens) if own is not None else None
    with pytest.raises((ValueError, TypeError), match=said) as raised:
        replace(model, **given)
    assert "\n" not in str(raised.value)
    assert model.state_dict().keys() == kept.keys()
    assert [set(vars(module)) for module in model.modules()] == names
    if expected is not None and own is not None:
        assert torch.equal(out(model, tokens), expected)
        if filled_before:
            restore(model)
            assert torch.equal(out(model, tokens), own)


def test_what_is_no_such_model():
    with pytest.raises(TypeError, match="a model of transformers is needed, got Linear"):
        replace(torch.nn.Linear(2, 2), rotary=None)
    model = llama()
    with pytest.raises(TypeError, match=r"got DataParallel: give its \.module"):
        replace(torch.nn.DataParallel(model), rotary=None)
    with torch.device("meta"):
        empty = hf.LlamaModel(hf.LlamaConfig(**SMALL))
    with pytest.raises(ValueError, match="is on the meta device: load its weights first"):
        replace(empty, rotary=ROPE)


OF_ANOTHER_KIND: dict[str, tuple[Any, dict[str, Any], str]] = {
    "own bias": (
        lambda: made(hf.MPNetConfig(**SMALL)),
        {"bias": mmpos.ALiBi},
        "has a bias of its own .*that cannot be taken off: keep it",
    ),
    "own attention": (
        lambda: made(hf.FalconConfig(hidden_size=48, num_attention_heads=3, num_hidden_layers=1)),
        {"bias": mmpos.ALiBi},
        "computes attention in a way of its own",
    ),
    "alibi in two ways": (
        lambda: made(
            hf.FalconConfig(hidden_size=48, num_attention_heads=3, num_hidden_layers=1, alibi=True)
        ),
        {"bias": mmpos.ALiBi},
        "has a bias of its own .alibi. that cannot be taken off",
    ),
    "a rotation that is not used": (
        lambda: made(
            hf.FalconConfig(hidden_size=48, num_attention_heads=3, num_hidden_layers=1, alibi=True)
        ),
        {"rotary": ROPE},
        "has a rotation of its own .rotary_emb. that cannot be taken off",
    ),
    "nothing handed on": (
        lambda: made(hf.StableLmConfig(**SMALL)),
        {"bias": mmpos.ALiBi},
        "StableLmDecoderLayer does not hand on to its attention",
    ),
    "images": (
        lambda: made(
            hf.ViTConfig(
                hidden_size=48,
                intermediate_size=32,
                num_attention_heads=3,
                num_hidden_layers=1,
                image_size=32,
            )
        ),
        {"additive": None},
        "ViTModel is a tower of patches",
    ),
    "a table of its own kind": (
        lambda: (
            made(
                hf.M2M100Config(
                    d_model=48,
                    encoder_layers=1,
                    decoder_layers=1,
                    encoder_attention_heads=3,
                    decoder_attention_heads=3,
                    encoder_ffn_dim=32,
                    decoder_ffn_dim=32,
                    vocab_size=50,
                )
            ).encoder
        ),
        {"additive": None},
        "is called in a way of its own, with input_ids, inputs_embeds, cache_length",
    ),
    "a rotation of its own kind": (
        lambda: made(
            hf.RoFormerConfig(
                hidden_size=48,
                intermediate_size=32,
                num_attention_heads=3,
                num_hidden_layers=1,
                vocab_size=50,
                max_position_embeddings=64,
            )
        ),
        {"rotary": mmpos.RotaryEncoding},
        "RoFormerModel",
    ),
}


@pytest.mark.parametrize("name", OF_ANOTHER_KIND)
def test_models_that_cannot_be_filled(name):
    make, given, said = OF_ANOTHER_KIND[name]
    model = make()
    names = [set(vars(module)) for module in model.modules()]
    with pytest.raises(ValueError, match=said) as raised:
        replace(model, **given)
    assert "\n" not in str(raised.value)
    assert [set(vars(module)) for module in model.modules()] == names
