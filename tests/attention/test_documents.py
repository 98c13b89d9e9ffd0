"""Packed documents attend one by one where that pays, with the numbers of one call for all."""

from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

import mmpos
from mmpos.attention import documents as by_documents
from mmpos.attention import prepare
from mmpos.models import Transformer
from mmpos.positions import packed

LENGTHS = [3, 1, 40, 7, 90]
L = sum(LENGTHS)
SEGMENTS = packed(LENGTHS).segments


def both(monkeypatch, run):
    """What ``run`` gives document by document, and in one call."""
    results = []
    for least in (0, 10**9):
        monkeypatch.setattr(by_documents, "LEAST", least)
        results.append(run(least == 0))
    return results


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kind", ["none", "fixed", "learned", "rows"])
def test_it_is_the_masked_attention_with_its_gradients(monkeypatch, causal, window, kind):
    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, L, 8), torch.randn(2, 2, L, 8), torch.randn(2, 2, L, 8)]
    bias = {
        "none": None,
        "fixed": torch.randn(4, L, L),
        "learned": torch.randn(4, L, L),
        "rows": torch.randn(2, 1, L, L),
    }[kind]

    def run(one_by_one):
        own = [each.clone().requires_grad_() for each in tensors]
        added = None if bias is None else bias.clone().requires_grad_(kind == "learned")
        prepared = prepare(
            L,
            L,
            bias=added,
            causal=causal,
            window=window,
            q_segments=SEGMENTS,
            k_segments=SEGMENTS,
        )
        assert (prepared.documents == tuple(LENGTHS)) == one_by_one
        out = mmpos.attend(*own, prepared=prepared)
        out.square().sum().backward()
        grads = [each.grad for each in own]
        return out.detach(), *grads, *([added.grad] if kind == "learned" else [])

    for a, b in zip(*both(monkeypatch, run), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 2.0])
@pytest.mark.parametrize("sizes", [(L, L), (1, L), (L, 1)])
@pytest.mark.usefixtures("unchecked")
def test_scales_and_biases_of_one_row_or_column(monkeypatch, scale, sizes):
    q, k, v = torch.randn(3, 2, 4, L, 8)
    bias = torch.randn(4, *sizes)

    def run(_):
        prepared = prepare(L, L, bias=bias, causal=True, q_segments=SEGMENTS, k_segments=SEGMENTS)
        return (mmpos.attend(q, k, v, prepared=prepared, scale=scale),)

    for a, b in zip(*both(monkeypatch, run), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": torch.ones(1, L, dtype=torch.bool)},
        {"q_segments": SEGMENTS.expand(2, -1), "k_segments": SEGMENTS.expand(2, -1)},
        {"q_segments": SEGMENTS.flip(0)},
        {"q_segments": SEGMENTS % 2, "k_segments": SEGMENTS % 2},
        {"q_index": torch.arange(L), "k_index": torch.arange(L)},
        {"key_bias": torch.zeros(4, L)},
    ],
)
def test_other_rows_are_masked(monkeypatch, options):
    monkeypatch.setattr(by_documents, "LEAST", 0)
    given = {"q_segments": SEGMENTS, "k_segments": SEGMENTS, **options}
    assert prepare(L, L, **given).documents is None


def test_many_short_documents_are_masked_together():
    short = torch.arange(64).repeat_interleave(2)
    assert prepare(128, 128, q_segments=short, k_segments=short).documents is None
    long = torch.arange(4).repeat_interleave(64)
    assert prepare(256, 256, q_segments=long, k_segments=long).documents == (64,) * 4


@pytest.mark.parametrize(
    "slots",
    [
        {"rotary": mmpos.RotaryEncoding},
        {"bias": mmpos.ALiBi},
        {"bias": mmpos.T5Bias},
        {"additive": mmpos.SinusoidalEncoding},
        {"rotary": mmpos.RotaryEncoding, "window": 8},
    ],
)
def test_training_on_packed_documents_is_training_on_padded_ones(slots):
    torch.manual_seed(0)
    model = Transformer(1, dim=48, depth=2, heads=3, causal=True, **slots)
    embed, head = torch.nn.Embedding(17, 48), torch.nn.Linear(48, 17)
    parts = [*model.parameters(), *embed.parameters(), *head.parameters()]
    texts = [torch.randint(17, (length + 1,)) for length in LENGTHS]

    def step(packing):
        for part in parts:
            part.grad = None
        if packing:
            tokens = torch.cat([text[:-1] for text in texts])[None]
            targets = torch.cat([text[1:] for text in texts])[None]
            positions, segments = packed(LENGTHS)
            out = model(embed(tokens), positions, segments=segments[None])
        else:
            pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
            tokens = pad([text[:-1] for text in texts])
            targets = pad([text[1:] for text in texts], padding_value=-100)
            mask = targets != -100
            out = model(embed(tokens), mmpos.positions.padded(mask), mask=mask)
        loss = cross_entropy(head(out).flatten(0, 1), targets.flatten())
        loss.backward()
        return [loss.detach(), *[part.grad.clone() for part in parts]]

    for a, b in zip(step(True), step(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
