"""Adapters give what their models give, and leave them as they were."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import linear

import mmpos
from mmpos.evaluation import (
    CallableSubject,
    NetworkSubject,
    Session,
    TransformersSubject,
    decoded,
    taken,
)
from mmpos.frequencies import DynamicNTK
from mmpos.models import Transformer
from mmpos.positions import sequence

VOCABULARY = 23
LONG = 290  # above 256


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        options = {"dim": 24, "depth": 2, "heads": 6, "causal": True} | options
        self.transformer = Transformer(1, **options)
        self.tokens = nn.Embedding(VOCABULARY, 24)
        with torch.no_grad():
            for each in self.parameters():
                each.mul_(4)  # so that positions matter

    def forward(self, tokens, positions, **given):
        encoded = self.transformer(self.tokens(tokens), positions, **given)
        return linear(encoded, self.tokens.weight)


def ntk(head_dim, axes):
    return mmpos.RotaryEncoding(
        head_dim, axes, extension=DynamicNTK(factor=2.0, original_length=16)
    )


NETS = {
    "rope": {"rotary": mmpos.RotaryEncoding, "kv_heads": 2},
    "alibi": {"bias": mmpos.ALiBi},
    "none": {},
    "ntk": {"rotary": ntk, "kv_heads": 3},
    "window": {"rotary": mmpos.RotaryEncoding, "window": 9},
}


def net(name="rope"):
    torch.manual_seed(1)
    return Net(**NETS[name])


def tokens(length=LONG, rows=2):
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", NETS)
def test_a_network_decodes_with_its_cache_as_in_one_pass(name):
    subject = NetworkSubject(net(name), 64)
    x = tokens()
    full = subject.logits(x)
    assert full.shape == (2, LONG, VOCABULARY)
    cached = subject.cached_logits(x, LONG - 3)
    torch.testing.assert_close(cached, full[:, -3:], atol=2e-4, rtol=1e-4)
    short = x[:, :40]
    torch.testing.assert_close(
        subject.cached_logits(short, 0), subject.logits(short), atol=2e-4, rtol=1e-4
    )
    assert decoded(subject, x[0]).same
    check = taken(subject, x[0])
    assert check.accepted
    assert check.causal
    measured, reserved = subject.kv_held(31)
    heads = NETS[name].get("kv_heads", 6)
    assert subject.kv_bytes(31) == measured == 2 * 2 * heads * 4 * 31 * 4
    assert reserved >= measured


@pytest.mark.parametrize("name", ["rope", "ntk"])
def test_a_network_answers_with_the_likeliest_tokens(name):
    model = net(name)
    subject = NetworkSubject(model, 64)
    prompts = [row.tolist() for row in tokens(40, 3)]
    prompts[1] = prompts[1][:33]
    answers = subject.answer(prompts, 5)
    for prompt, answer in zip(prompts, answers, strict=True):
        seen = list(prompt)
        for _ in range(5):
            x = torch.tensor([seen])
            given = {"length": len(prompt) + 5} if name == "ntk" else {}
            seen.append(int(model(x, sequence(len(seen)), **given)[0, -1].argmax()))
        assert answer == seen[len(prompt) :]


def test_an_answer_stops_with_its_end():
    free = NetworkSubject(net(), 64).answer([row.tolist() for row in tokens(40, 3)], 6)
    end = free[0][2]
    answers = NetworkSubject(net(), 64, end=end).answer([row.tolist() for row in tokens(40, 3)], 6)
    for answer, whole in zip(answers, free, strict=True):
        stop = whole.index(end) + 1 if end in whole else len(whole)
        assert answer == whole[:stop]
    assert answers[0][-1] == end


@pytest.mark.parametrize(("error", "same"), [(1e-4, True), (1e-3, False)])
def test_a_cache_may_be_off_by_rounding_alone(error, same):
    table = torch.randn(VOCABULARY, VOCABULARY)
    std = float(table[tokens()[0]][-8:].std())

    class Held(Session):
        def __call__(self, x, last=False):
            assert x.shape[-1] in (1, LONG - 8)
            return table[x[:, -1:] if last else x] + error * std

    subject = CallableSubject(lambda x: table[x], VOCABULARY, 9, session=lambda total: Held())
    assert decoded(subject, tokens()[0]).same == same


class Late(NetworkSubject):
    """Its cache goes on one position too late."""

    def session(self, total):
        session = super().session(total)

        class Wrong:
            def __call__(self, x, last=False):
                session.tokens += session.tokens == self.first
                logits = session(x, last)
                self.first = session.tokens
                return logits

            first = -1

        return Wrong()


def test_a_cache_that_is_late_is_seen():
    assert not decoded(Late(net(), 64), tokens()[0]).same
    assert decoded(Late(net("none"), 64), tokens()[0]).same  # without positions it is no error


def test_a_mask_that_leaks_is_seen():
    model = net()
    model.transformer.causal = True
    subject = NetworkSubject(model, 64)
    model.transformer.causal = False
    check = taken(subject, tokens()[0])
    assert check.accepted
    assert not check.causal


def test_a_leak_of_the_next_token_at_the_end_alone_is_seen():
    table = torch.randn(VOCABULARY, VOCABULARY)

    def call(x):
        logits = table[x].cumsum(1)
        logits[:, -2] += 1e-3 * table[x[:, -1]]
        return logits

    assert not taken(CallableSubject(call, VOCABULARY, 9), tokens()[0]).causal


def test_logits_of_another_shape_are_no_interface():
    check = taken(CallableSubject(lambda x: torch.zeros(1, 3, 4), 4, 9), tokens()[0] % 4)
    assert not check.accepted
    assert check.error == "logits of shape (1, 3, 4)"


def test_a_windowed_network_sees_no_farther_and_leaves_the_other():
    model = net()
    subject = NetworkSubject(model, 64)
    seen = subject.windowed(9)
    other = net("rope")
    native = Net(**NETS["rope"], window=9)
    native.load_state_dict(other.state_dict())
    x = tokens()
    torch.testing.assert_close(seen.logits(x), native.eval()(x, sequence(LONG)))
    assert model.transformer.windows == [None, None]
    torch.testing.assert_close(subject.logits(x), other.eval()(x, sequence(LONG)))
    assert seen.model.tokens.weight is model.tokens.weight
    narrow = NetworkSubject(net("window"), 64)
    assert narrow.windowed(99).transformer.windows == [9, 9]
    assert CallableSubject(lambda x: x, 3, 3).windowed(4) is None


def test_a_model_is_left_as_it_was():
    model = net().train()
    model.transformer.layers[0].eval()
    before = {name: each.clone() for name, each in model.named_parameters()}
    modes = [each.training for each in model.modules()]
    subject = NetworkSubject(model, 64)
    subject.logits(tokens())
    subject.answer([[1, 2]], 2)
    loss = subject.loss(tokens())
    assert loss.requires_grad
    assert [each.training for each in model.modules()] == modes
    assert all(each.grad is None for each in model.parameters())
    for name, each in model.named_parameters():
        assert torch.equal(each, before[name])
    assert subject.parameters == sum(each.numel() for each in model.parameters())


def test_nats_are_those_of_the_formula():
    subject = NetworkSubject(net(), 64)
    x = tokens(50)
    logits = subject.logits(x).double()
    log = logits - logits.exp().sum(-1, keepdim=True).log()
    expected = -log[:, :-1].gather(-1, x[:, 1:, None])[..., 0]
    nats = subject.nll(x)
    assert nats.dtype == torch.float64
    torch.testing.assert_close(nats, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(subject.loss(x).double(), expected.mean(), atol=1e-5, rtol=1e-5)


def llama(**options):
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def mistral():
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        sliding_window=17,
        initializer_range=0.3,
    )
    return transformers.MistralForCausalLM(config)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=3, n_positions=300
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("make", [llama, mistral, gpt2], ids=["llama", "mistral", "gpt2"])
def test_a_model_of_transformers_is_judged_by_its_own_cache(make):
    torch.manual_seed(2)
    model = make().train()
    subject = TransformersSubject(model)
    x = tokens()
    model.eval()
    expected = model(x, use_cache=False).logits.detach()
    model.train()
    torch.testing.assert_close(subject.logits(x), expected)
    cached = subject.cached_logits(x, LONG - 4)
    torch.testing.assert_close(cached, expected[:, -4:], atol=1e-4, rtol=1e-4)
    assert decoded(subject, x[0]).same
    assert taken(subject, x[0]).causal
    answers = subject.answer(x.tolist(), 4)
    model.eval()
    made = model.generate(
        x,
        attention_mask=torch.ones_like(x),
        do_sample=False,
        max_new_tokens=4,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert answers == made[:, LONG:].tolist()
    for length in (9, 200):
        assert subject.kv_held(length)[0] == subject.kv_bytes(length)
    assert subject.vocabulary == VOCABULARY
    assert subject.claimed == model.config.max_position_embeddings
    assert subject.loss(x).requires_grad


def test_the_cache_of_transformers_by_its_formula():
    sizes = TransformersSubject(llama()).kv_bytes(100), TransformersSubject(mistral()).kv_bytes(100)
    assert sizes == (2 * 2 * 2 * 8 * 100 * 4, 2 * 3 * 1 * 8 * 16 * 4)
    half = TransformersSubject(llama().to(torch.bfloat16))
    assert half.kv_bytes(100) == half.kv_held(100)[0] == sizes[0] // 2
    assert decoded(half, tokens()[0]).same


def test_what_is_no_subject_is_refused():
    with pytest.raises(TypeError, match=r"as its \.transformer, got Linear with NoneType"):
        NetworkSubject(nn.Linear(2, 2), 9)
    with pytest.raises(ValueError, match="causal=False"):
        NetworkSubject(Net(causal=False), 9)
    without = net()
    without.tokens = nn.Identity()
    with pytest.raises(ValueError, match=r"pass vocabulary=…"):
        NetworkSubject(without, 9)
    assert NetworkSubject(without, 9, vocabulary=7).vocabulary == 7
    with pytest.raises(TypeError, match="with a config, got Linear"):
        TransformersSubject(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="1 or more, got 5 and 0"):
        CallableSubject(lambda x: x, 5, 0)
    with pytest.raises(ValueError, match="from 0 to all but one are prefilled, got 9"):
        NetworkSubject(net(), 9).cached_logits(tokens(9), 9)


def test_a_length_that_is_not_told_is_asked_for():
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=2)
    model = transformers.BloomForCausalLM(config)
    with pytest.raises(ValueError, match=r"pass claimed=…"):
        TransformersSubject(model)
    subject = TransformersSubject(model, 100)
    assert decoded(subject, tokens()[0]).same
    assert subject.kv_held(31)[0] == subject.kv_bytes(31)


def test_a_callable_is_a_module_or_any():
    table = nn.Sequential(nn.Embedding(VOCABULARY, VOCABULARY), nn.Dropout(0.5)).train()
    subject = CallableSubject(table, VOCABULARY, 9)
    x = tokens(20)
    torch.testing.assert_close(subject.logits(x), table[0](x).detach())
    assert subject.parameters == VOCABULARY**2
    assert subject.loss(x).requires_grad
    assert subject.cached_logits(x, 3) is None
    assert decoded(subject, x[0]) is None
    assert subject.kv_held(3) is None
    assert subject.kv_bytes(3) is None
    likeliest = table[0].weight.argmax(-1)
    assert subject.answer([[4]], 2) == [[int(likeliest[4]), int(likeliest[likeliest[4]])]]
    assert CallableSubject(lambda x: x, 3, 3).loss(x) is None
