"""Records in English text."""

import re

import pytest

from mmpos.evaluation import TextNeedles

RECORD = re.compile(r"Record (R-\d+) of (\d{4}-\d\d-\d\d): the code of the (.+) valve is (\d{5})\.")


class Words:
    """A tokenizer of words, spaces, marks and single digits, which grows as it reads."""

    def __init__(self):
        self.known = {}

    def encode(self, text):
        parts = re.findall(r"\d| ?[A-Za-z]+|\s|.", text)
        return [self.known.setdefault(part, len(self.known)) for part in parts]

    def decode(self, tokens):
        names = list(self.known)
        return "".join(names[token] for token in tokens)


@pytest.fixture
def needles():
    words = Words()
    return TextNeedles(words.encode, words.decode)


def read(needles, sample):
    """Its lines, its records and what is asked, by the text alone."""
    lines = needles.decode(sample.prompt).split("\n")
    records = [match.groups() for line in lines if (match := RECORD.fullmatch(line))]
    asked = re.search(r"code of the (.+) valve by its latest", lines[-2])
    return lines, records, asked[1]


def say(needles, sample, text):
    return needles.judge(sample, needles.encode(text))


@pytest.mark.parametrize("task", ["single", "distractors", "conflict", "unanswerable"])
@pytest.mark.parametrize("length", [237, 700])
def test_the_right_answer_follows_from_the_text(needles, task, length):
    for seed in range(12):
        for depth in (0.0, 0.3, 1.0):
            sample = needles.make(task, length, depth, seed)
            _, records, asked = read(needles, sample)
            own = sorted((r for r in records if r[2] == asked), key=lambda record: record[1])
            value, source = needles.decode(sample.value), needles.decode(sample.source)
            expected = (own[-1][3], own[-1][0]) if own else ("", "")
            assert (value, source) == expected
            versions = {"conflict": {2, 3}, "unanswerable": {0}}.get(task, {1})
            assert len(own) in versions
            others = {"distractors": 3, "unanswerable": 1}.get(task, 0)
            assert len(records) - len(own) == others
            for part in zip(*records, strict=True):
                unique = len(set(part)) == len(part)
                assert unique or (task == "conflict" and set(part) == {asked})


def test_the_length_is_the_tokenizers_and_just_below(needles):
    for task in ("single", "conflict"):
        for length in (170, 171, 300, 1000, 1001):
            sample = needles.make(task, length, 0.5, 1)
            assert sample.length == len(sample.prompt)
            assert length - 16 < sample.length <= length
            text = needles.decode(sample.prompt)
            assert len(needles.encode(text)) == sample.length


def test_only_the_place_depends_on_the_depth(needles):
    for task in ("single", "distractors", "conflict", "unanswerable"):
        texts = [read(needles, needles.make(task, 600, d, 5))[0] for d in (0.0, 0.25, 0.5, 1.0)]
        evidence = RECORD.match(texts[0][0])
        assert evidence  # at depth 0, first of all
        places = [lines.index(evidence[0]) for lines in texts]
        body = len(texts[0]) - 3  # lines without the question, counted from 0
        assert places == [0, round(0.25 * body), round(0.5 * body), body]
        rest = [[line for line in lines if line != evidence[0]] for lines in texts]
        assert all(lines == rest[0] for lines in rest)
        if task != "unanswerable":
            assert evidence[4] == needles.decode(needles.make(task, 600, 0.0, 5).value)


def test_a_longer_prompt_goes_on_where_a_shorter_ends(needles):
    short, long = (read(needles, needles.make("single", n, 0.0, 5))[0] for n in (300, 600))
    assert long[: len(short) - 2] == short[:-2]
    assert long[-2:] == short[-2:]
    assert read(needles, needles.make("single", 300, 0.0, 6))[0] != short


def test_the_latest_is_before_and_behind_older_ones(needles):
    places = set()
    for seed in range(12):
        sample = needles.make("conflict", 400, 0.5, seed)
        own = read(needles, sample)[1]
        places.add([record[3] for record in own].index(needles.decode(sample.value)))
    assert {0, 1} <= places


def test_distractors_are_as_many_as_asked_for(needles):
    for task in ("single", "conflict", "unanswerable", "distractors"):
        sample = needles.make(task, 1200, 0.5, 2, distractors=7)
        _, records, asked = read(needles, sample)
        assert sum(record[2] != asked for record in records) == 7 + (task == "unanswerable")
        assert sample.distractors == 7


def test_answers_are_judged_whole(needles):
    sample = needles.make("distractors", 400, 0.5, 3)
    value, source = needles.decode(sample.value), needles.decode(sample.source)
    other = next(r for r in read(needles, sample)[1] if r[0] != source)
    cases = {  # exact, keyword, cited, refused
        f" {value} ({source})": (1, 1, 1, 0),
        f"\n The code is {value}, by {source}.\n Record R-1": (1, 1, 1, 0),
        f"{value}": (0, 1, 0, 0),
        f"{value} ({other[0]})": (0, 1, 0, 0),
        f"{value} ({source}, {other[0]})": (0, 1, 0, 0),
        f"{value} {other[3]} ({source})": (0, 1, 1, 0),
        f"{other[3]} ({source})": (0, 0, 1, 0),
        f"{value}7 ({source})": (0, 0, 1, 0),
        f"{value} ({source}7)": (0, 1, 0, 0),
        f"{source}": (0, 0, 1, 0),
        f"Not in the TEXT, {value} ({source})": (0, 1, 1, 1),
        "It is not in the text.": (0, 0, 0, 1),
        "": (0, 0, 0, 0),
    }
    for text, expected in cases.items():
        found = say(needles, sample, text)
        seen = (found.exact, found.keyword, found.cited, found.refused)
        assert seen == tuple(map(bool, expected)), text
        assert found.output == tuple(needles.encode(text))


def test_only_a_refusal_is_right_without_a_record(needles):
    sample = needles.make("unanswerable", 400, 0.5, 3)
    other = read(needles, sample)[1][0]
    cases = {
        "Not in the text": (1, 1),
        "The text does not mention it.": (1, 1),
        f"Not in the text, but {other[3]}": (0, 1),
        f"Not in the text ({other[0]})": (0, 1),
        f"{other[3]} ({other[0]})": (0, 0),
        "I do not like it": (0, 0),
        "": (0, 0),
    }
    for text, expected in cases.items():
        found = say(needles, sample, text)
        assert (found.exact, found.refused) == tuple(map(bool, expected)), text
        assert not found.keyword
        assert not found.cited


def test_tokens_of_a_turn_are_around_and_count():
    words = Words()
    begin, end = words.encode("<>")
    needles = TextNeedles(words.encode, words.decode, before=[begin], after=[end, begin])
    sample = needles.make("single", 300, 1.0, 0)
    assert sample.prompt[0] == begin
    assert sample.prompt[-2:] == (end, begin)
    assert 285 < sample.length <= 300
    assert needles.settings["before"] == [begin]


def test_a_tokenizer_that_merges_over_lines_stays_below_the_length():
    known = {}

    def encode(text):  # an end of a line and what begins the next are one token
        parts = re.findall(r"\n?[A-Z]?[a-z]*|.", text)
        return [known.setdefault(part, len(known)) for part in parts if part]

    def decode(tokens):
        return "".join(list(known)[token] for token in tokens)

    needles = TextNeedles(encode, decode)
    for length in range(300, 320):
        sample = needles.make("single", length, 0.35, 1)
        assert length - 40 < sample.length == len(sample.prompt) <= length


def test_fillers_are_the_same_where_tokens_depend_on_the_place():
    def encode(text):  # as many more as a place costs
        lines = text.split("\n")
        first = [n for n, line in enumerate(lines) if line.startswith("Record") and len(lines) > 2]
        cost = {0: 90, 1: 250}.get(first[0], 0) if first else 0
        return [ord(each) for each in text] + [0] * cost

    needles = TextNeedles(encode, lambda tokens: "".join(map(chr, filter(None, tokens))))
    samples = [needles.make("single", 2000, depth, 4) for depth in (0.0, 0.5, 0.7, 1.0)]
    assert max(sample.length for sample in samples) == samples[0].length <= 2000
    texts = [sorted(read(needles, sample)[0]) for sample in samples]
    assert all(lines == texts[0] for lines in texts)
    body = len(texts[0]) - 3
    second = needles.make("single", 2000, 1 / body, 4)  # it costs the most: the last ones go
    assert second.length <= 2000
    lines = read(needles, second)[0]
    assert lines[1].startswith("Record")
    assert set(lines) < set(texts[0])


def test_refusals(needles):
    with pytest.raises(ValueError, match=r"60 tokens are too few .* 'distractors' with 3"):
        needles.make("distractors", 60, 0.0, 0)
    with pytest.raises(ValueError, match="takes 1 or more distractors, got 0"):
        needles.make("distractors", 600, 0.0, 0, distractors=0)
    with pytest.raises(ValueError, match=r"from 0, first, to 1, .* got 1.5"):
        needles.make("single", 600, 1.5, 0)
    words = Words()
    with pytest.raises(ValueError, match="adds no tokens"):
        TextNeedles(lambda text: words.encode(f"<s>{text}"), words.decode)
    with pytest.raises(ValueError, match="1 or more tokens"):
        TextNeedles(words.encode, words.decode, new_tokens=0)
