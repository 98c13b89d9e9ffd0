"""Samples as lines, as they were."""

import json

import pytest

from mmpos.evaluation import CallableSubject, Sample, Verdict, outcomes
from mmpos.evaluation.judging import counted, made
from mmpos.evaluation.samples import (
    check_task,
    from_json,
    read_lines,
    read_samples,
    to_json,
    write_lines,
)

SAMPLE = Sample("conflict", 300, 0.25, 7, tuple(range(300)), (5, 6), (), 2)


def test_a_sample_is_the_same_after_its_line(tmp_path):
    line = to_json(SAMPLE, output=[1, 2], error="ß\n")
    assert "\n" not in line
    assert from_json(line) == SAMPLE
    assert isinstance(from_json(line).prompt, tuple)
    path = tmp_path / "lines.jsonl"
    write_lines(path, [line, line])
    assert read_samples(path) == [SAMPLE, SAMPLE]
    assert read_lines(path)[1]["output"] == [1, 2]


def test_a_line_that_is_damaged_is_refused(tmp_path):
    held = json.loads(to_json(SAMPLE))
    del held["depth"]
    with pytest.raises(ValueError, match="a line lacks depth"):
        from_json(json.dumps(held))
    with pytest.raises(ValueError, match="a line lacks task"):
        from_json("[1]")
    with pytest.raises(ValueError, match="its own depth, task"):
        to_json(SAMPLE, task="x", depth=1)
    (tmp_path / "bad").write_text('{"a": 1}\n{"a"')
    with pytest.raises(ValueError, match=r"line 2 of .* is not JSON"):
        read_lines(tmp_path / "bad")
    (tmp_path / "bad").write_text("3\n")
    with pytest.raises(ValueError, match=r"line 1 of .* is a int, no object"):
        read_lines(tmp_path / "bad")


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "lines.jsonl"
    write_lines(path, ["{}"])

    def broken():
        yield "{}"
        raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        write_lines(path, broken())
    assert path.read_text() == "{}\n"
    with path.open() as reader:  # who reads the old one is not disturbed
        write_lines(path, ["[]", "[]"])
        assert reader.read() == "{}\n"
    assert path.read_text() == "[]\n[]\n"
    assert list(tmp_path.iterdir()) == [path]


def test_tasks_depths_and_distractors_are_checked():
    for task, depth, number in (("x", 0, 0), ("single", 1.1, 0), ("distractors", 0, 0)):
        with pytest.raises(ValueError, match=r"got '?\w"):
            check_task(task, depth, number)
    check_task("single", 1, 0)


class Echo:
    """Right is the last token."""

    new_tokens = 2

    def make(self, task, length, depth, seed, *, distractors=0):
        prompt = tuple(range(length - seed % 2))
        return Sample(task, len(prompt), depth, seed, prompt, prompt[-1:], prompt[-1:], distractors)

    def judge(self, sample, output):
        told = tuple(output[:1])
        return Verdict(told == sample.value, False, told == sample.source, not output, told)


class Counting(CallableSubject):
    def __init__(self):
        super().__init__(lambda tokens: tokens, 100, 100)
        self.batches = []

    def answer(self, prompts, new_tokens):
        self.batches.append([len(prompt) for prompt in prompts])
        if any(len(prompt) == 8 for prompt in prompts):
            raise ValueError("eight\nis too much")
        return [[prompt[-1]] * new_tokens for prompt in prompts]


def test_batches_have_a_size_and_errors_are_kept():
    subject, needles = Counting(), Echo()
    samples = [*made(needles, "single", 5, 0.0, 0, range(5))]
    samples += [*made(needles, "single", 8, 0.0, 0, range(2))]
    found = list(outcomes(subject, needles, samples, 10))
    assert subject.batches == [[5, 4], [5, 4], [5], [8], [7]]
    assert [each.sample for each in found] == samples
    assert [each.verdict.exact for each in found] == [True] * 5 + [False, True]
    assert [each.error for each in found] == [""] * 5 + ["ValueError: eight is too much", ""]
    cell = counted(found, 8)
    assert (cell.n, cell.right, cell.cited, cell.refused, cell.seeds) == (7, 6, 6, 1, 5)
    assert cell.length == 8
    list(outcomes(subject, needles, samples[:2], 1))
    assert subject.batches[-2:] == [[5], [4]]


def test_a_cell_is_of_one_kind():
    needles = Echo()
    samples = [next(made(needles, "single", 5, depth, 0, range(1))) for depth in (0.0, 1.0)]
    with pytest.raises(ValueError, match="one task and depth"):
        counted(list(outcomes(Counting(), needles, samples)), 5)


def test_needles_that_make_too_much_are_refused():
    class Long(Echo):
        def make(self, task, length, depth, seed, *, distractors=0):
            return super().make(task, length + 1, depth, seed, distractors=distractors)

    with pytest.raises(ValueError, match=r"asked for 5 tokens and 0 .* prompt of 6"):
        next(made(Long(), "single", 5, 0.0, 0, range(1)))
