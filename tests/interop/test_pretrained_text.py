"""The script on a pretrained BERT, on a small one with weights drawn by chance."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrained_text.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("pretrained_text", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "the", "a", "is", "of", "and", "to", "in", "."]
    tokenizer = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=12, hidden_size=24, num_hidden_layers=1, num_attention_heads=3,
        intermediate_size=16,
    )  # fmt: skip
    BertModel(config).save_pretrained(tmp_path)
    return tmp_path


def test_the_same_outputs_and_more_rows(script, folder, monkeypatch, capsys) -> None:
    monkeypatch.setattr(
        sys, "argv", ["x", "--weights", str(folder), "--documents", "2", "--json", f"{folder}/o"]
    )
    script.main()
    figures = json.loads((folder / "o").read_text())
    assert figures["outputs are the same"] and figures["documents"] == 2
    kept = {name: value for name, value in figures.items() if name.endswith(("touched", "same"))}
    assert [name for name, value in kept.items() if not value] == [
        "interpolated: old rows untouched",
        "interpolated: short texts are the same",
    ]
    assert set(figures["found"]) >= {"cut at 512", "two of 512", "1024 rows, interpolated"}
    assert all(0 <= value <= 100 for value in figures["found"].values())
    assert "1024 rows, first rows again" in capsys.readouterr().out


def test_another_table_is_noticed(script, folder) -> None:
    model, _ = script.load(folder)
    table = script.table_of(model)
    texts = [[1, 4, 5, 2], [1, 9, 2]]
    assert script.same(model, model, texts)
    with torch.no_grad():
        table.table[2, 0] += 1e-3
    other, _ = script.load(folder)
    script.replace(other, additive=table)
    assert not script.same(model, other, texts)
    assert script.recall([torch.eye(2)[0], torch.eye(2)[1]], [torch.eye(2)[0]] * 2) == 50
