"""Sampling with the cache against full passes."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmpos
from mmpos.frequencies import DynamicNTK
from mmpos.models import Transformer
from mmpos.positions import sequence
from tasks import LanguageModel
from tasks.decoder import drawn

ENCODER = partial(Transformer, size="nano", depth=2, causal=True, rotary=mmpos.RotaryEncoding)


def make(**options: Any) -> LanguageModel:
    torch.manual_seed(0)
    task = LanguageModel(**{"vocabulary": 257, "context": 16, "transformer": ENCODER, **options})
    with torch.no_grad():
        for parameter in task.network.parameters():  # a model that has opinions
            if parameter.ndim > 1:
                parameter.mul_(5)
    return task


@pytest.mark.parametrize(
    "slots",
    [{}, {"bias": mmpos.ALiBi, "rotary": None}, {"additive": mmpos.SinusoidalEncoding}],
    ids=["rope", "alibi", "sinusoidal"],
)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {}, {"temperature": 0.5, "top_k": 3}])
def test_sampling_is_that_of_full_passes(slots: dict, sampling: dict) -> None:
    task = make(transformer=partial(ENCODER, **slots), context=64)
    prompt = torch.randint(257, (3, 7), generator=torch.Generator().manual_seed(1))
    draws = torch.Generator().manual_seed(2)
    found = task.generate(prompt, 20, generator=draws, **sampling)
    draws.manual_seed(2)
    tokens, temperature = prompt, sampling.get("temperature", 1.0)
    task.eval()
    for _ in range(20):
        with torch.no_grad():
            logits = task(tokens)[:, -1]
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            chances = (logits / temperature).softmax(-1)
            if "top_k" in sampling:
                best = chances.topk(sampling["top_k"])
                chances = torch.zeros_like(chances).scatter(-1, best.indices, best.values)
                chances = chances / chances.sum(-1, keepdim=True)
            new = chances.multinomial(1, generator=draws)
        tokens = torch.cat((tokens, new), -1)
    assert torch.equal(found, tokens)
    assert len(set(found[:, 7:].flatten().tolist())) > 3


def test_sampling_leaves_the_mode_and_draws_the_rest_out() -> None:
    task = make(transformer=partial(ENCODER, drop_path=0.9), context=64).train()
    prompt = torch.tensor([[1, 2, 3]])
    found = [task.generate(prompt, 10, temperature=0) for _ in range(2)]
    assert torch.equal(*found) and task.training and task.network.training
    assert torch.equal(task.generate(prompt, 0), prompt)


def test_a_length_that_an_extension_depends_on_is_that_of_the_whole() -> None:
    rotary = partial(mmpos.RotaryEncoding, extension=DynamicNTK(factor=4.0, original_length=8))
    task = make(transformer=partial(ENCODER, rotary=rotary), context=64).eval()
    prompt = torch.randint(257, (1, 6), generator=torch.Generator().manual_seed(1))
    found = task.generate(prompt, 30, temperature=0)
    with torch.no_grad():
        logits = task.network(found[:, :-1], sequence(35), length=36)
    assert torch.equal(logits[:, 5:].argmax(-1), found[:, 6:])


def test_beyond_the_trained_length_it_warns_once_and_goes_on() -> None:
    task = make()
    with pytest.warns(UserWarning, match=r"prompt of 20 tokens and 3 more reach beyond the 16 "):
        found = task.generate(torch.ones(1, 20, dtype=torch.long), 3)
    assert found.shape == (1, 23)
    task.generate(torch.ones(1, 20, dtype=torch.long), 3)
    within = make()
    assert within.generate(torch.ones(1, 13, dtype=torch.long), 3).shape == (1, 16)


@pytest.mark.parametrize("temperature", [1e-40, 1e-300, 5e-324])
def test_a_temperature_near_0_takes_the_likeliest(temperature: float) -> None:
    task = make(context=64)
    prompt = torch.tensor([[1, 2, 3], [200, 100, 50]])
    found = task.generate(prompt, 9, temperature=temperature)
    assert torch.equal(found, task.generate(prompt, 9, temperature=0))
    assert drawn(torch.tensor([[90.0, 91.0, -5.0]]), temperature, None, None).tolist() == [[1]]


def test_a_high_temperature_takes_any() -> None:
    torch.manual_seed(0)
    new = drawn(torch.tensor([[0.0, 90.0, -90.0]]).expand(9000, -1), 1e300, None, None)
    assert ((new.flatten().bincount() / 9000 - 1 / 3).abs() < 0.02).all()


def test_as_many_tokens_are_drawn_from_as_top_k_says_where_they_are_equally_likely() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([[2.0, 3.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    for top_k in (1, 2, 3, 4):
        new = drawn(logits.repeat(400, 1), 1.0, top_k, None).view(400, 2)
        for row in range(2):
            assert len(new[:, row].unique()) == top_k
        assert 1 in new[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.complex64])
def test_a_prompt_is_whole_numbers(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"whole numbers of tokens, got {dtype}"):
        make().generate(torch.ones(1, 2, dtype=dtype), 1)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([[1, 257]], {}, r"token 257, the model has 257 tokens"),
        ([[-1]], {}, r"token -1, the model has 257 tokens"),
        ([[]], {}, r"a prompt is \[batch, length\] tokens, got \(1, 0\)"),
        ([1, 2], {}, r"a prompt is \[batch, length\] tokens, got \(2,\)"),
        ([[1]], {"count": -1}, r"count and a temperature of 0 or more"),
        ([[1]], {"temperature": -0.5}, r"got 1, -0.5 and None"),
        ([[1]], {"top_k": 0}, r"a top_k of 1 or more"),
    ],
)
def test_bad_prompts(prompt: list, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make().generate(torch.tensor(prompt, dtype=torch.long), **{"count": 1, **options})


def test_predictions_end_where_the_document_does() -> None:
    task = make(context=64)
    data = SimpleNamespace(end=256, decode=lambda tokens: bytes(tokens.tolist()).decode())
    task._trainer = SimpleNamespace(datamodule=data)  # type: ignore[assignment]
    task.generate = lambda prompt, **_: torch.tensor([[1, *b"ab", 256, *b"c", 256]])  # type: ignore
    found = task.predict_step({"prompt": ["x"], "tokens": torch.tensor([[1]])}, 0)
    assert found == {"prompt": ["x"], "text": ["ab"]}
