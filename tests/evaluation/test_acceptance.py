"""Planted models: each fails its own rows, and no others."""

import json
import math
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, one_hot

import mmpos
from mmpos.evaluation import (
    CallableSubject,
    Cell,
    Limits,
    NetworkSubject,
    Session,
    Subject,
    TextNeedles,
    accept,
    read_samples,
    rerun,
)
from mmpos.evaluation.rows import kept
from mmpos.evaluation.symbols import ASK, DISTRACTOR, END, KEY, NONE, VOCABULARY, SymbolNeedles
from mmpos.models import Transformer

LENGTHS = (64, 128, 256)
ASKED = {f"A{row}": "NOT RUN" if row in (2, 7, 8) else "PASS" for row in range(1, 13)}
"""What a perfect model without references and weights gets."""


class Planted(Subject):
    """A causal sum over tokens, turned by their position; answers are read off the prompt."""

    def __init__(self, rule=None, *, leak=0.0, late=0, claimed=256):
        super().__init__("planted", VOCABULARY, claimed, end=END)
        draw = torch.Generator().manual_seed(3)
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=draw)
        self.rule, self.leak, self.late, self.asked = rule, leak, late, []

    def features(self, tokens, start=0):
        turn = torch.cos(torch.arange(start, start + tokens.shape[-1]) * 0.7)
        return self.table[tokens] * turn[:, None]

    def logits(self, tokens):
        mixed = self.features(tokens).cumsum(1)
        mixed[:, :-1] += self.leak * self.table[tokens[:, 1:]]
        return mixed

    def session(self, total):
        return Sum(self)

    def kv_bytes(self, length):
        return 2 * length * VOCABULARY * 4

    def answer(self, prompts, new_tokens):
        self.asked += prompts
        return [self.rule(prompt) if self.rule else right(prompt) for prompt in prompts]


class Sum(Session):
    def __init__(self, subject):
        self.subject, self.held = subject, torch.zeros(1, 0, VOCABULARY)

    def __call__(self, tokens, last=False):
        seen = self.held.shape[1]
        new = self.subject.features(tokens, seen + (self.subject.late if seen else 0))
        self.held = torch.cat((self.held, new), 1)
        logits = self.held.cumsum(1)[:, seen:]
        return logits[:, -1:] if last else logits

    def tensors(self):
        return [self.held, self.held.clone()]


def record(prompt, marker=KEY):
    """The last one of its kind."""
    at = max((i for i, token in enumerate(prompt) if token == marker), default=None)
    return None if at is None else list(prompt[at + 1 : at + 4])


def right(prompt):
    found = record(prompt)
    return [NONE, END] if found is None else [*found, END]


def lucky(prompt):
    return [0, 0, 0, END] if len(prompt) == 128 else right(prompt)


def keyword_only(prompt):
    found = record(prompt)
    return right(prompt) if found is None else [*found[:2], (found[2] + 1) % 16, END]


def blind(prompt):
    return [NONE, END] if prompt[1] == KEY and KEY not in prompt[2:] else right(prompt)


def inventive(prompt):
    return [*(record(prompt) or record(prompt, DISTRACTOR)), END]


def distracted(prompt):
    """Takes the last of all records, if there are more than four of them."""
    marks = [token for token in prompt if token in (KEY, DISTRACTOR)]
    if len(marks) <= 4 or KEY not in marks:
        return right(prompt)
    return [*record(prompt, marks[-1]), END]


def oldest(prompt):
    at = prompt.index(KEY) if KEY in prompt else None
    return [NONE, END] if at is None else [*prompt[at + 1 : at + 4], END]


def judged(subject, tmp_path, **options):
    options = {"samples": 16, "repeats": 1, "decode": 2, "folder": tmp_path / "run"} | options
    return accept(subject, SymbolNeedles(), options.pop("lengths", LENGTHS), **options)


def statuses(found):
    return {name: row.status for name, row in found.rows.items()}


PLANTED = {
    "perfect": (Planted(), {}, 256),
    "lucky": (Planted(lucky), dict.fromkeys(("A3", "A4", "A5", "A6", "A12"), "FAIL"), 64),
    "late cache": (Planted(late=1), {"A9": "FAIL"}, 256),
    "leak": (Planted(leak=1e-3), {"A1": "FAIL", "A9": "NOT RUN"}, 256),
    "small leak": (Planted(leak=3e-5), {"A1": "FAIL", "A9": "NOT RUN"}, 256),
    "keyword": (
        Planted(keyword_only),
        dict.fromkeys(("A3", "A4", "A5", "A6", "A12"), "FAIL"),
        0,
    ),
    "blind": (Planted(blind), {"A3": "FAIL", "A4": "FAIL", "A6": "FAIL", "A12": "FAIL"}, 0),
    "inventive": (Planted(inventive), {"A6": "FAIL", "A12": "FAIL"}, 0),
    "distracted": (Planted(distracted), {"A4": "FAIL", "A6": "FAIL", "A12": "FAIL"}, 0),
    "oldest": (Planted(oldest), {"A5": "FAIL", "A6": "FAIL", "A12": "FAIL"}, 0),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_model_fails_its_own_rows(name, tmp_path):
    subject, failing, effective = PLANTED[name]
    found = judged(subject, tmp_path)
    assert statuses(found) == ASKED | failing
    assert found.range.effective == effective
    assert found.range.accepted == 256
    assert found.accepted == ("FAIL" not in failing.values())


def test_a_lucky_model_is_told_where_it_fails(tmp_path):
    found = judged(Planted(lucky), tmp_path)
    failing = found.range.first_failing
    assert (failing.length, failing.right, failing.n) == (128, 0, 16)
    assert found.range.ruler == 64
    # with 64 required, what is beyond does not count against it
    other = judged(Planted(lucky), tmp_path, required=64, folder=tmp_path / "other")
    assert statuses(other) == ASKED


def test_the_keyword_is_reported_beside_the_citation(tmp_path):
    row = judged(Planted(keyword_only), tmp_path).rows["A6"]
    assert row.data == {"exact": 0.0, "keyword": 1.0, "cited": 0.0}
    assert "keyword 100.0%" in row.evidence


def test_a_blind_model_shows_its_gap(tmp_path):
    row = judged(Planted(blind), tmp_path).rows["A3"]
    assert row.data == {"gap": 1.0, "by_depth": {"0.0": 0.0, "0.5": 1.0, "1.0": 1.0}}
    assert "depth 0%" in row.evidence


def test_failures_are_kept_and_asked_again_as_they_are(tmp_path):
    found = judged(Planted(lucky), tmp_path)
    path = found.folder / "failures.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    failed = sum(cell.n - cell.right for cell in found.cells)
    assert len(lines) == failed == 16 * 6 * 3
    assert all(line["asked"] == 128 and line["output"] == [0, 0, 0, END] for line in lines)
    again = Planted(keyword_only)
    results = rerun(found.folder, again, SymbolNeedles())
    assert again.asked == [tuple(line["prompt"]) for line in lines]
    assert [each.sample for each in results] == read_samples(path)
    assert {each.before for each in results} == {(0, 0, 0, END)}
    assert all(each.verdict.exact == (each.sample.task == "unanswerable") for each in results)
    again.vocabulary += 1
    with pytest.raises(ValueError, match=r"of 21 tokens, and planted has 22"):
        rerun(found.folder, again, SymbolNeedles())


def test_the_folder_has_all_that_a_report_needs(tmp_path):
    limits = Limits(server=200, cache=128)
    found = judged(Planted(lucky), tmp_path, limits=limits)
    names = {path.name for path in found.folder.iterdir()}
    lists = {"cells.jsonl", "failures.jsonl"}
    assert names == lists | {"settings.json", "rows.json", "costs.json", "perplexity.json"}
    settings = json.loads((found.folder / "settings.json").read_text())
    assert settings["limits"]["minimum"] == 128
    assert settings["limits"]["gateway"] is None
    assert settings["environment"]["versions"]["torch"] == torch.__version__
    assert settings["seed"] == 0
    rows = json.loads((found.folder / "rows.json").read_text())
    assert list(rows) == [f"A{row}" for row in range(1, 13)]
    assert {row["tag"] for row in rows.values()} == {"local"}
    assert rows["A12"]["data"]["effective"] == 64
    costs = json.loads((found.folder / "costs.json").read_text())
    assert list(costs) == ["64", "128", "256"]
    assert costs["128"]["kv_measured"] == costs["128"]["kv_formula"] == 2 * 128 * VOCABULARY * 4
    with pytest.raises(ValueError, match="has results already"):
        judged(Planted(), tmp_path)


def test_a_perfect_model_has_an_empty_file_of_failures(tmp_path):
    found = judged(Planted(), tmp_path)
    assert (found.folder / "failures.jsonl").read_text() == ""
    assert rerun(found.folder, Planted(), SymbolNeedles()) == []


def test_too_few_samples_certify_nothing(tmp_path):
    found = judged(Planted(), tmp_path, samples=10)
    for row in ("A3", "A4", "A5", "A6", "A12"):
        assert found.rows[row].status == "NOT RUN"
        assert "10 samples cannot certify 0.8" in found.rows[row].evidence
    assert found.range.effective == 0


def test_a_length_that_is_refused_ends_the_range(tmp_path):
    class Short(Planted):
        def logits(self, tokens):
            if tokens.shape[-1] == 128:
                raise RuntimeError("at most 100 tokens")
            return super().logits(tokens)

    found = judged(Short(), tmp_path)
    assert found.rows["A1"].status == found.rows["A12"].status == "FAIL"
    assert "128: RuntimeError: at most 100 tokens" in found.rows["A1"].evidence
    assert (found.range.accepted, found.range.effective) == (64, 64)
    assert "does not take 128" in found.range.first_failing.reason
    assert {cell.length for cell in found.cells} == {64, 256}


def test_logits_that_are_not_finite_are_refused(tmp_path):
    class Broken(Planted):
        def logits(self, tokens):
            logits = super().logits(tokens)
            logits[:, 200:] = math.nan
            return logits

    found = judged(Broken(), tmp_path)
    assert found.rows["A1"].evidence == "256: logits are not finite"
    assert found.range.accepted == 128


def test_an_error_while_answering_is_a_failure_that_is_kept(tmp_path):
    def broken(prompt):
        if len(prompt) == 256:
            raise MemoryError("no room")
        return right(prompt)

    found = judged(Planted(broken), tmp_path)
    assert found.range.effective == 128
    lines = [json.loads(x) for x in (found.folder / "failures.jsonl").read_text().splitlines()]
    assert {line["error"] for line in lines} == {"MemoryError: no room"}
    assert found.rows["A11"].status == "PASS"


def test_a_cache_that_holds_more_than_the_formula_fails(tmp_path):
    class Fat(Planted):
        def kv_bytes(self, length):
            return 2 * (length - 1) * VOCABULARY * 4

    assert statuses(judged(Fat(), tmp_path)) == ASKED | {"A10": "FAIL"}


def test_failures_that_are_not_all_kept_fail():
    cells = [Cell("single", 64, 0.0, 20, 18), Cell("conflict", 64, 1.0, 20, 20)]
    line = {"task": "single", "distractors": 0, "asked": 64, "depth": 0.0}
    first, second = line | {"seed": 3}, line | {"seed": 4}
    assert kept(cells, [first, second]).status == "PASS"
    for lines in (
        [],
        [first],
        [first, first],
        [first, second, second],
        [first, line | {"seed": 4, "task": "conflict"}],
        [first, second | {"asked": 128}],
    ):
        row = kept(cells, lines)
        assert row.status == "FAIL"
        assert row.evidence.startswith(f"{len(lines)} of 2 failed")


def test_short_contexts_are_compared_with_those_of_before(tmp_path):
    before = judged(Planted(), tmp_path, lengths=(64, 128), folder=tmp_path / "before").folder
    same = judged(Planted(lucky), tmp_path, before=before, folder=tmp_path / "same")
    assert same.rows["A7"].status == "PASS"  # it fails at 128 alone
    assert same.range.effective == 64
    forgot = Planted(lambda prompt: [NONE, END] if len(prompt) == 64 else right(prompt))
    worse = judged(forgot, tmp_path, before=before, folder=tmp_path / "worse")
    assert worse.rows["A7"].status == "FAIL"
    assert worse.range.effective == 0
    assert "regression" in worse.range.first_failing.reason
    with pytest.raises(ValueError, match="its seed is 0, here it is 5"):
        judged(Planted(), tmp_path, before=before, seed=5, folder=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_base_quality_is_against_a_reference(tmp_path):
    texts = torch.randint(VOCABULARY, (2, 256))
    options = {"texts": texts, "targets": 16, "lengths": (64,)}
    first = judged(Planted(), tmp_path, **options)
    read = json.loads((first.folder / "perplexity.json").read_text())
    nats = read["last tokens"]["64"]["nats_per_token"]
    for times, status in ((0.99, "PASS"), (0.97, "FAIL")):
        reference = {"perplexity": math.exp(nats) * times, "accuracy": 1.0}
        options |= {"reference": reference, "folder": tmp_path / status}
        assert judged(Planted(), tmp_path, **options).rows["A2"].status == status
    options |= {"reference": {"accuracy": 1.0}, "folder": tmp_path / "third"}
    assert judged(Planted(lambda _: [ASK]), tmp_path, **options).rows["A2"].status == "FAIL"
    del options["texts"]
    options |= {"reference": {"perplexity": 9.0}, "folder": tmp_path / "fourth"}
    assert "no texts" in judged(Planted(), tmp_path, **options).rows["A2"].evidence


def test_bad_options_are_refused_before_anything_is_written(tmp_path):
    for options, message in (
        ({"tasks": ("many",)}, "tasks among"),
        ({"samples": 0}, "1 or more samples"),
        ({"lengths": ()}, "lengths of 2 or more"),
        ({"distractors": (0,)}, "distractors are 1 or more"),
        ({"reference": {"loss": 1.0}}, "perplexity and accuracy, got loss"),
        ({"trained": 0}, "trained is 2 or more"),
        ({"lengths": (16, 64)}, "do not go into a prompt"),
    ):
        with pytest.raises(ValueError, match=message):
            judged(Planted(), tmp_path, **options)
    assert not (tmp_path / "run").exists()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 24)
        rotary = mmpos.RotaryEncoding
        self.transformer = Transformer(
            1, dim=24, depth=2, heads=6, kv_heads=3, rotary=rotary, causal=True
        )

    def forward(self, tokens, positions, **given):
        return linear(self.transformer(self.tokens(tokens), positions, **given), self.tokens.weight)


def test_a_network_goes_through_all_rows(tmp_path):
    subject = NetworkSubject(Net(), 64, end=END)
    texts = torch.randint(VOCABULARY, (2, 70))
    options = {"texts": texts, "targets": 8, "samples": 16, "distractors": (1,)}
    found = judged(subject, tmp_path, lengths=(40, 64), **options)
    wrong = dict.fromkeys(("A3", "A4", "A5", "A6", "A12"), "FAIL")
    assert statuses(found) == ASKED | wrong | {"A8": "PASS"}
    read = json.loads((found.folder / "perplexity.json").read_text())
    assert list(read["last tokens"]) == list(read["last tokens, window 40"]) == ["40", "64"]
    assert len(read) == 5
    costs = json.loads((found.folder / "costs.json").read_text())
    assert costs["64"]["kv_measured"] == 2 * 2 * 3 * 4 * 64 * 4


def test_a_model_reads_a_text(tmp_path):
    class Reader(CallableSubject):
        def answer(self, prompts, new_tokens):
            texts = [bytes(prompt).decode() for prompt in prompts]
            asked = [re.search("code of the (.+) valve by", text)[1] for text in texts]
            told = [
                re.findall(f"(R-.+) of (.+): the code of the {name} valve is (.+)\\.", text)
                for name, text in zip(asked, texts, strict=True)
            ]
            latest = [max(own, key=lambda record: record[1], default=None) for own in told]
            said = [f"{own[2]} ({own[0]})" if own else "not in the text" for own in latest]
            return [list(text.encode()) for text in said]

    needles = TextNeedles(lambda text: list(text.encode()), lambda ids: bytes(ids).decode())
    subject = Reader(lambda tokens: one_hot(tokens, 256).float(), 256, 900)
    options = {"samples": 16, "distractors": (1,), "repeats": 0}
    found = accept(subject, needles, (900,), folder=tmp_path / "run", **options)
    unknown = dict.fromkeys(("A8", "A9", "A10"), "NOT RUN")
    assert statuses(found) == ASKED | unknown
    assert found.range.effective == 900
    settings = json.loads((found.folder / "settings.json").read_text())
    assert settings["needles"]["kind"] == "TextNeedles"
