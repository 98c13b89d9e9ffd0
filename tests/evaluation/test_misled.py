"""Verdicts that were wrong once."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mmpos.evaluation import (
    CallableSubject,
    Cell,
    SymbolNeedles,
    TransformersSubject,
    accept,
    effective_range,
    taken,
)
from mmpos.evaluation.ablation import ablation
from mmpos.evaluation.report import report
from mmpos.evaluation.runs import Run
from mmpos.evaluation.symbols import VOCABULARY

TASKS = ("single", "distractors", "conflict")


def cells(length: int, right: int, depths=(0.0, 0.5, 1.0), tasks=TASKS) -> list[Cell]:
    return [
        Cell(task=task, distractors=0, length=length, depth=depth, n=100, right=right)
        for task in tasks
        for depth in depths
    ]


def test_a_model_that_takes_no_length_has_a_verdict(tmp_path) -> None:
    assert effective_range([], claimed=64, accepted=0, lengths=[64]).effective == 0

    def refuses(tokens: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("too long")

    subject = CallableSubject(refuses, VOCABULARY, 64)
    found = accept(subject, SymbolNeedles(), [64], folder=tmp_path, samples=16, repeats=0)
    assert found.rows["A1"].status == "FAIL" and "too long" in found.rows["A1"].evidence
    assert found.range.accepted == found.range.effective == 0
    report(tmp_path)


def test_the_middle_alone_is_no_range() -> None:
    held = effective_range(
        cells(64, 100, (0.5,)), claimed=64, accepted=64, lengths=[64], depths=(0.5,)
    )
    assert held.effective == 0 and any("depth 0%" in own for own in held.untested)
    assert effective_range(cells(64, 100), claimed=64, accepted=64).effective == 64


def test_refusing_does_not_help_by_the_rule_of_means() -> None:
    answered, refused = cells(64, 82), cells(64, 100, tasks=("unanswerable",))
    assert effective_range([*answered, *refused], claimed=64, accepted=64).ruler == 0
    assert effective_range([*cells(64, 86), *refused], claimed=64, accepted=64).ruler == 64


def masked(mask) -> CallableSubject:
    """Attention by a mask ``[L, L]`` of who sees whom."""
    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(0))

    def call(tokens: torch.Tensor) -> torch.Tensor:
        seen = mask(tokens.shape[-1]).float()
        return (seen / seen.sum(-1, keepdim=True)) @ table[tokens]

    return CallableSubject(call, 9, 256)


def causal(length: int) -> torch.Tensor:
    return torch.ones(length, length).tril() > 0


def prefix(length: int, size: int = 16) -> torch.Tensor:
    mask = causal(length)
    mask[:size, :size] = True
    return mask


def blocks(length: int, size: int = 16) -> torch.Tensor:
    block = torch.arange(length) // size
    return causal(length) | (block[:, None] == block)


@pytest.mark.parametrize("length", [64, 65, 128])
def test_leaks_away_from_the_middle(length: int) -> None:
    tokens = torch.randint(9, (length,), generator=torch.Generator().manual_seed(length))
    assert taken(masked(causal), tokens).causal
    for leaky in (prefix, blocks, lambda n: blocks(n, 2), lambda n: prefix(n, n // 2)):
        assert not taken(masked(leaky), tokens).causal


def test_answers_end_where_a_model_ends_its_texts() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=20, eos_token_id=[3, 7])
    model = LlamaForCausalLM(config).eval()
    subject = TransformersSubject(model)
    assert subject.ends == {3, 7} and TransformersSubject(model, end=5).ends == {5}
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[7] = 1
        model.model.norm.weight.fill_(0.1)
        model.model.embed_tokens.weight.fill_(1.0)
    assert subject.answer([[1, 2]], 6) == [[7]]


def test_a_loss_over_several_lengths_is_not_that_of_the_trained_one() -> None:
    def run(name: str, loss: float) -> Run:
        numbers = {"test/perplexity": loss, "test/exact_match_64": 1.0, "test/exact_match_128": 0.1}
        rotary = None if name == "none" else "mmpos.RotaryEncoding"
        transformer = {"init_args": {"rotary": rotary}}
        config = {"seed_everything": 0, "model": {"init_args": {"transformer": transformer}}}
        return Run(
            name=name, config=config, parameters=1, metrics=numbers, environment={}, results=None
        )

    page, _ = ablation([run("rope", 30.0), run("none", 1.1)])
    assert "pools examples of 64 and 128 tokens" in page and "apart where" not in page


def test_two_models_are_no_seeds_of_one(tmp_path) -> None:
    subject = torch.nn.Embedding(VOCABULARY, VOCABULARY)
    wide = torch.nn.Sequential(subject, torch.nn.Linear(VOCABULARY, VOCABULARY))
    for name, call in (("llama-2", subject), ("llama-3", wide)):
        made = CallableSubject(call, VOCABULARY, 64)
        accept(made, SymbolNeedles(), [64], folder=tmp_path / name, samples=2, repeats=0)
    page, _ = report(tmp_path / "llama-2", tmp_path / "llama-3", output=tmp_path / "both")
    assert "seeds, 2 of" not in page and "llama (" in page
