"""The conservative range."""

import math

import pytest

from mmpos.evaluation import Cell, Limits, effective_range, samples_needed, wilson_lower

TASKS = (("single", 0), ("distractors", 3), ("conflict", 0))


def cells(rates, n=50, depths=(0.0, 0.5, 1.0), kinds=TASKS):
    """All of each length at one rate, or what a function of task and depth says."""
    return [
        Cell(
            task,
            length,
            depth,
            n,
            round(n * (rate(task, depth) if callable(rate) else rate)),
            distractors=number,
        )
        for length, rate in rates.items()
        for task, number in kinds
        for depth in depths
    ]


def reached(rates, n=50, accepted=10**6, claimed=10**6, **options):
    made = {name: options.pop(name) for name in ("depths", "kinds") if name in options}
    return effective_range(cells(rates, n, **made), claimed=claimed, accepted=accepted, **options)


def test_wilson_is_the_root_of_its_equation():
    assert round(wilson_lower(20, 20), 3) == 0.839
    assert round(wilson_lower(10, 10), 3) == 0.722
    assert round(wilson_lower(19, 20), 3) == 0.764  # one miss
    assert wilson_lower(0, 7) == 0
    for right, n, z in ((1, 3, 1.96), (45, 50, 1.96), (7, 9, 1.0), (499, 500, 2.58)):
        low = wilson_lower(right, n, z)  # |p - low| = z √(low (1 - low) / n), below p
        assert low < right / n
        assert math.isclose(right / n - low, z * math.sqrt(low * (1 - low) / n), rel_tol=1e-9)
    for right, n in ((2, 1), (-1, 1), (0, 0)):
        with pytest.raises(ValueError, match="0 to n of n"):
            wilson_lower(right, n)


def test_samples_that_are_needed():
    for threshold in (0.5, 0.8, 0.856, 0.95):
        n = samples_needed(threshold)
        assert wilson_lower(n, n) >= threshold > wilson_lower(n - 1, n - 1)
    with pytest.raises(ValueError, match="above 0 and below 1"):
        samples_needed(1.0)


def test_a_later_pass_does_not_count():
    found = reached({64: 1.0, 128: 0.5, 256: 1.0}, claimed=256, accepted=256)
    assert (found.claimed, found.accepted, found.effective, found.ruler) == (256, 256, 64, 64)
    assert (found.first_failing.length, found.first_failing.right) == (128, 25)
    assert reached({256: 1.0, 128: 1.0, 64: 1.0}).effective == 256
    assert reached({64: 0.5, 128: 1.0}).effective == 0


def test_the_worst_position_and_task_decide_not_their_mean():
    def far(task, depth):
        return 0.05 if (task, depth) == ("single", 0.0) else 1.0

    found = reached({64: 1.0, 128: far})
    assert (found.effective, found.ruler) == (64, 128)  # the mean over tasks is 0.89
    first = found.first_failing
    assert (first.task, first.depth, first.right, first.n) == ("single", 0.0, 2, 50)
    assert "single at depth 0%" in first.reason


def test_a_bound_decides_not_the_rate():
    assert reached({64: 0.9}).effective == 0  # 45 of 50: at least 0.786
    assert reached({64: 0.92}).effective == 64
    assert reached({64: 0.9}, n=200).effective == 64
    assert reached({64: 0.9}, threshold=0.78).effective == 64


def test_the_mean_of_tasks_is_of_tasks():
    kinds = (("single", 0), ("distractors", 1), ("distractors", 3), ("conflict", 0))
    rates = {64: lambda task, _: 0.6 if task == "distractors" else 1.0}
    assert reached(rates, kinds=kinds).ruler == 64  # 0.867; of cells it is 0.8
    rates = {64: lambda task, _: 0.7 if task == "single" else 0.92}
    assert reached(rates, kinds=kinds).ruler == 0


def test_few_samples_are_told():
    found = reached({64: 1.0}, n=10)
    assert (found.effective, found.needed, found.n) == (0, 16, {"64": (10, 10)})
    assert "10 samples cannot certify it, even all right; 16 can" in str(found)


def test_what_was_not_tested_does_not_pass():
    found = reached({64: 1.0}, kinds=TASKS[:2])
    assert found.effective == found.ruler == 0
    assert found.first_failing.reason == "conflict at depth 0% was not tested at 64"
    assert reached({64: 1.0}, kinds=TASKS[:2], tasks=("single",)).effective == 64
    assert reached({64: 1.0}, depths=(0.0, 0.5)).effective == 0
    held = cells({64: 1.0, 128: 1.0})
    found = effective_range(held[:-1], claimed=128, accepted=128)
    assert found.effective == 64
    assert found.untested == ("1 cells at 128, such as conflict at depth 100%",)
    more = [*held, Cell("unanswerable", 64, 0.0, 50, 50)]
    assert "unanswerable" in effective_range(more, claimed=128, accepted=128).first_failing.reason


def test_gaps_between_lengths_are_told():
    found = reached({64: 1.0, 128: 1.0, 512: 1.0}, claimed=2048)
    assert found.effective == 512
    assert found.untested == (
        "lengths between 128 and 512",
        "lengths between 512 and 2048",
        "the claimed length 2048",
    )
    assert reached({64: 1.0, 128: 1.0}, claimed=128).untested == ()


def test_what_the_interface_refuses_ends_it():
    found = reached({64: 1.0, 128: 1.0}, accepted=64, lengths=(64, 128, 256))
    assert (found.effective, found.ruler) == (64, 64)
    assert found.first_failing.reason == "the interface does not take 128 tokens"
    assert reached({64: 1.0}, lengths=(32, 64)).effective == 0


def test_a_regression_leaves_nothing():
    found = reached({64: 1.0}, regression=False)
    assert found.effective == 0
    assert "regression" in found.first_failing.reason
    assert reached({64: 1.0}, regression=True).effective == 64


def test_cells_that_cannot_be():
    for right, n in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="of 1 or more samples"):
            Cell("single", 64, 0.0, n, right)
    with pytest.raises(ValueError, match="twice"):
        effective_range(cells({64: 1.0}) * 2, claimed=64, accepted=64)


def test_limits():
    limits = Limits(server=100, tokenizer=300, gateway=90, batcher=90, cache=200)
    assert (limits.minimum, limits.where, limits.unknown) == (90, ("gateway", "batcher"), ())
    assert limits.table() == [
        ("server", 100),
        ("tokenizer", 300),
        ("gateway", 90),
        ("batcher", 90),
        ("cache", 200),
        ("minimum", 90),
    ]
    assert str(limits) == "at most 90 tokens, by the gateway and batcher"
    none = Limits()
    assert (none.minimum, none.where) == (None, ())
    assert str(none) == "not known: server, tokenizer, gateway, batcher, cache"


def test_limits_that_cannot_be(unchecked):
    with pytest.raises(ValueError, match="where there is no limit"):
        Limits(tokenizer=int(1e30))
    with pytest.raises(ValueError, match="cache is 1 or more tokens, got 0"):
        Limits(cache=0)
    for wrong in (1e3, True, "8k"):
        with pytest.raises(TypeError, match="server is a whole number"):
            Limits(server=wrong)
