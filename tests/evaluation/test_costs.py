"""Costs by a clock of the test's own: no test depends on the time of day."""

import time

import pytest
import torch
from torch import nn

from mmpos.evaluation import CallableSubject, Session, costs_of
from mmpos.evaluation.rows import decoding, memory, throughput


class Clock:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class Timed(CallableSubject):
    """Takes known seconds for each prefill, and a thousandth for each token of it in each step."""

    def __init__(self, clock, prefills, losses=()):
        model = nn.Embedding(7, 7) if losses else torch.nn.functional.one_hot
        super().__init__(model, 7, 99)
        self.clock, self.prefills, self.losses = clock, list(prefills), list(losses)
        self.rows, self.after = [], 0.0

    def steps(self, tokens, count):
        own = self.prefills.pop(0)
        self.clock.now += own
        yield tokens[:, -1]
        for _ in range(count - 1):
            self.clock.now += 0.001 * own * tokens.shape[-1]
            yield tokens[:, -1]
        self.after = self.clock.now

    def loss(self, tokens):
        self.rows.append(tuple(tokens.shape))
        self.clock.now += self.losses.pop(0)
        return super().loss(tokens)


class Held(Session):
    def __init__(self, total):
        self.parts = []

    def __call__(self, tokens, last=False):
        roomy = torch.zeros(2 * tokens.shape[-1], 3)
        self.parts = [roomy[: tokens.shape[-1]], torch.zeros(tokens.shape[-1], 5).half()]
        return torch.zeros(1, 1, 7)

    def tensors(self):
        return self.parts


def test_times_are_medians_without_the_warm_up(clock):
    subject = Timed(clock, [50.0, 70.0, 3.0, 1.0, 2.0], [90.0, 80.0, 4.0, 8.0, 5.0])
    (cost,) = costs_of(subject, (10,), repeats=3, warm_up=2, decoded=4, train_batch=2)
    assert cost.prefill_seconds == pytest.approx(2.0)
    assert cost.prefill_tokens_per_second == pytest.approx(5.0)
    assert cost.decode_ms_per_token == pytest.approx(20.0)
    assert cost.train_tokens_per_second == pytest.approx(2 * 10 / 5.0)
    assert subject.rows == [(2, 10)] * 5
    assert not subject.prefills
    assert not subject.losses
    assert all(each.grad is None for each in subject.weights())
    assert not cost.cached
    assert cost.peak_of == "process so far"
    assert cost.peak_bytes > 2**20  # bytes, whatever the system counts in


def test_each_length_has_its_own(clock):
    subject = Timed(clock, [1.0, 1.0, 5.0, 5.0])
    found = costs_of(subject, (4, 8), repeats=1, warm_up=1, decoded=2)
    assert [cost.length for cost in found] == [4, 8]
    assert [cost.decode_ms_per_token for cost in found] == pytest.approx([4.0, 40.0])
    assert [cost.train_tokens_per_second for cost in found] == [None, None]


def test_training_is_left_out_where_it_is_not_asked_for(clock):
    subject = Timed(clock, [1.0, 1.0], [1.0])
    (cost,) = costs_of(subject, (4,), repeats=1, warm_up=1, train=False)
    assert cost.train_tokens_per_second is None
    assert subject.losses


def test_memory_of_the_cache_is_that_of_its_tensors(clock):
    subject = Timed(clock, [1.0, 1.0])
    subject.begin = Held
    (cost,) = costs_of(subject, (6,), repeats=1, warm_up=1)
    assert cost.cached
    assert cost.kv_measured == 6 * 3 * 4 + 6 * 5 * 2
    assert cost.kv_reserved == 12 * 3 * 4 + 6 * 5 * 2
    assert cost.kv_formula is None
    row = memory([cost])
    assert row.status == "NOT RUN"
    assert "not known by a formula" in row.evidence
    assert decoding([cost], []).status == throughput([cost]).status == "NOT RUN"


def test_random_numbers_go_on_as_if_nothing_was_measured():
    model = nn.Sequential(nn.Embedding(7, 7), nn.Dropout(0.5))
    subject = CallableSubject(model, 7, 9)
    torch.manual_seed(3)
    costs_of(subject, (5,), repeats=2)
    after = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(2))
    assert all(each.grad is None for each in model.parameters())


def test_what_cannot_be_measured_is_refused(clock):
    for options in ({"repeats": 0}, {"decoded": 0}, {"warm_up": -1}, {"train_batch": 0}):
        with pytest.raises(ValueError, match="are 1 or more and warm_up"):
            costs_of(Timed(clock, []), (4,), **options)
    with pytest.raises(ValueError, match="are 1 or more"):
        costs_of(Timed(clock, []), (0,))


def test_training_that_has_no_room_is_told(clock):
    class Full(Timed):
        def loss(self, tokens):
            if tokens.shape[-1] == 8:
                raise MemoryError("no room")
            return super().loss(tokens)

    found = costs_of(Full(clock, [1.0] * 4, [1.0] * 2), (4, 8), repeats=1)
    assert [cost.train_tokens_per_second for cost in found] == [4.0, None]
    row = throughput(found)
    assert row.status == "PASS"
    assert row.evidence.endswith("4 at 4; not measured at 8: MemoryError: no room")
    assert throughput(found[1:]).evidence == "8: MemoryError: no room"
