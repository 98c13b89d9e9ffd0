"""Perplexity by plain loops over windows, and costs by a clock of the test's own."""

import math

import pytest
import torch

from mmpos.evaluation import (
    CallableSubject,
    Subject,
    by_context,
    control,
    last_k,
    non_overlapping,
    sliding_window,
)

VOCABULARY = 11
TEXTS = torch.randint(VOCABULARY, (3, 97), generator=torch.Generator().manual_seed(4))
TABLE = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(6))


def logits(tokens):
    """Of all tokens before, so that each context has its own."""
    steps = torch.arange(1, tokens.shape[-1] + 1)[:, None]
    return TABLE[tokens].cumsum(1) / steps.sqrt()


SUBJECT = CallableSubject(logits, VOCABULARY, 32)


def nats(context, target):
    """Of one token after a context, in float64."""
    row = logits(torch.tensor([context]))[0, -1].double()
    return float(row.exp().sum().log() - row[target])


def windows(window, stride, first=1):
    """The nats of each window of each text."""
    found = []
    for text in TEXTS.tolist():
        done = first
        for start in range(0, len(text), stride):
            end = min(start + window, len(text))
            own = [nats(text[start:at], text[at]) for at in range(max(done, start + 1), end)]
            found += [own] if own else []
            done = max(done, end)
            if end == len(text):
                break
    return found


@pytest.mark.parametrize(("window", "stride", "first"), [(20, 7, 1), (20, 19, 30), (97, 5, 1)])
def test_windows_are_those_of_plain_loops(window, stride, first):
    expected = windows(window, stride, first)
    total = math.fsum(map(math.fsum, expected))
    count = sum(map(len, expected))
    found = sliding_window(SUBJECT, TEXTS, window, stride=stride, first=first)
    assert math.isclose(found.nats, total, rel_tol=1e-6)
    assert (found.tokens, found.windows) == (count, len(expected))
    assert count == 3 * (97 - first)
    means = [math.fsum(own) / len(own) for own in expected]
    other = sliding_window(SUBJECT, TEXTS, window, stride=stride, first=first, weights="windows")
    mean = math.fsum(means) / len(means)
    assert math.isclose(other.perplexity, math.exp(mean), rel_tol=1e-6)
    if window < 97:
        assert not math.isclose(other.perplexity, found.perplexity, rel_tol=1e-4)


def test_the_last_tokens_are_the_same_at_all_lengths():
    found = last_k(SUBJECT, TEXTS, (20, 60, 97), k=8)
    for each, length in zip(found, (20, 60, 97), strict=True):
        expected = [
            nats(text[97 - length : at], text[at])
            for text in TEXTS.tolist()
            for at in range(89, 97)
        ]
        assert math.isclose(each.nats, math.fsum(expected), rel_tol=1e-6)
        assert (each.tokens, each.length, each.method) == (24, length, "last tokens")
        assert math.isclose(each.bits_per_token, each.nats / 24 / math.log(2))
        assert math.isclose(each.to_dict()["nats_per_token"], each.nats / 24)


def test_pieces_are_by_themselves_and_named_so():
    found = non_overlapping(SUBJECT, TEXTS, 30)
    expected = [
        nats(text[start:at], text[at])
        for text in TEXTS.tolist()
        for start in (0, 30, 60)
        for at in range(start + 1, start + 30)
    ]
    assert math.isclose(found.nats, math.fsum(expected), rel_tol=1e-6)
    assert (found.tokens, found.windows) == (len(expected), 9)
    assert found.method == "non-overlapping, early token curse"


class Windowed(CallableSubject):
    def windowed(self, window):
        def call(tokens):
            before = TABLE[tokens].cumsum(1)
            late = before.clone()
            late[:, window:] -= before[:, :-window]
            return late

        return CallableSubject(call, VOCABULARY, 32)


def test_the_control_sees_no_farther_than_in_training():
    assert control(SUBJECT, TEXTS, (40,), trained=32, k=8) is None
    subject = Windowed(logits, VOCABULARY, 32)
    far = control(subject, TEXTS, (60, 97), trained=32, k=8)
    assert math.isclose(far[0].nats, far[1].nats, rel_tol=1e-5)
    assert {each.method for each in far} == {"last tokens, window 32"}
    methods = [each.method for each in by_context(subject, TEXTS, (32, 60), 32)]
    assert methods == [
        "last tokens",
        "last tokens",
        "last tokens, window 32",
        "last tokens, window 32",
        "sliding window, tokens alike",
        "sliding window, windows alike",
        "non-overlapping, early token curse",
    ]
    found = by_context(subject, TEXTS, (32, 60, 400), 32, targets=5, stride=9)
    assert [each.length for each in found[:2]] == [32, 60]
    assert found[0].tokens == 15
    assert by_context(subject, TEXTS, (400,), 32) == []


def test_sums_do_not_round_away_what_is_small():
    text = torch.zeros(1, 4097, dtype=torch.long)
    level = torch.tensor([[0.0, -9.0]])
    subject = CallableSubject(lambda x: level.expand(*x.shape, 2), 2, 4096)
    found = non_overlapping(subject, text, 4097)
    one = float(subject.nll(text[:, :2])[0, 0])
    assert math.isclose(found.nats, 4096 * one, rel_tol=1e-12)


def test_a_perplexity_that_no_float_holds_is_infinite():
    subject = CallableSubject(lambda x: torch.tensor([0.0, 1e4]).expand(*x.shape, 2), 2, 9)
    assert non_overlapping(subject, torch.zeros(1, 9, dtype=torch.long), 9).perplexity == math.inf


def test_windows_that_leave_nothing_or_something_out_are_refused():
    for options in (
        {"window": 1, "stride": 1},
        {"window": 8, "stride": 8},
        {"window": 8, "stride": 0},
        {"window": 8, "stride": 4, "first": 97},
        {"window": 8, "stride": 4, "first": 0},
    ):
        with pytest.raises(ValueError, match="a window has 2 or more"):
            sliding_window(SUBJECT, TEXTS, **options)
    for lengths, k in (((8,), 8), ((98,), 8), ((), 8), ((20,), 0)):
        with pytest.raises(ValueError, match="lengths are above"):
            last_k(SUBJECT, TEXTS, lengths, k=k)
    for length in (1, 98):
        with pytest.raises(ValueError, match="a piece has 2 to 97"):
            non_overlapping(SUBJECT, TEXTS, length)


def test_weights_that_are_none_are_refused(unchecked):
    with pytest.raises(ValueError, match="'tokens' or 'windows'"):
        sliding_window(SUBJECT, TEXTS, 8, stride=4, weights="texts")


def test_an_adapter_needs_logits_alone():
    with pytest.raises(TypeError, match="logits"):
        Subject("none", 3, 3)
