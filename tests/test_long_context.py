"""The script on a model of each kind, on folders of results, and on what it cannot test."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from tasks import cli

SCRIPT = Path(__file__).parents[1] / "scripts" / "long_context.py"
FEW = ["--lengths", "64", "--samples", "16", "--repeats", "0", "--depths", "0", "0.5", "1"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("long_context", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def run(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["long_context.py", *arguments])
        status = script.main()
        said = capsys.readouterr()
        return status, said.out + said.err

    return call


def test_a_checkpoint_of_ours_its_report_and_its_failures_again(run, tmp_path) -> None:
    job = ["fit", "--config", "needles", "--trainer.max_steps=1", "--trainer.accelerator=cpu"]
    job += ["--trainer.limit_val_batches=1", "--data.train_samples=64", "--data.eval_samples=64"]
    assert cli.main([*job, "--trainer.enable_progress_bar=false"]) == 0
    path = next(tmp_path.glob("runs/needles/version_0/checkpoints/last.ckpt"))
    relative = str(path.relative_to(tmp_path))
    status, said = run(relative, *FEW)
    folder = tmp_path / "runs" / "long_context" / "needles-0"
    rows = json.loads((folder / "rows.json").read_text())
    assert status == 1 and "claimed 64, accepted 64, works up to 0" in said
    assert rows["A1"]["status"] == rows["A9"]["status"] == "PASS"
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["name"] == relative and settings["claimed"] == 64
    pages = [(folder / f"report.{kind}").read_bytes() for kind in ("md", "html")]
    for page in folder.glob("report.*"):
        page.unlink()
    assert run("--report", str(folder))[0] == 0
    assert [(folder / f"report.{kind}").read_bytes() for kind in ("md", "html")] == pages
    status, said = run(relative, "--rerun", str(folder))
    failed = len((folder / "failures.jsonl").read_text().splitlines())
    assert status == 1 and f"of {failed} failed samples 0 are right now; {failed} answers" in said
    status, said = run(relative, *FEW)
    assert status == 2 and "has results already" in said and said.count("\n") == 1


def test_a_folder_of_transformers_is_asked_in_its_own_tokens(run, tmp_path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1,
        vocab_size=256, max_position_embeddings=4096, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    few = ["--lengths", "1500", *FEW[2:], "--limit", "server=2048", "cache=1024"]
    status, said = run(str(tmp_path), *few, "--output", "out")
    assert status == 1 and "claimed 4096, accepted 1500" in said, said
    page = (tmp_path / "out" / "report.md").read_text()
    assert "1024" in page and "cache" in page
    cells = map(json.loads, (tmp_path / "out" / "cells.jsonl").read_text().splitlines())
    assert {cell["task"] for cell in cells} == {"single", "distractors", "conflict", "unanswerable"}


def test_a_function(run, tmp_path, monkeypatch) -> None:
    (tmp_path / "planted.py").write_text(
        "from torch.nn.functional import one_hot\n\ndef model(tokens):\n"
        "    return one_hot(tokens, 21).float()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    status, said = run("planted:model", "--vocabulary", "21", "--claimed", "64", *FEW)
    assert status == 1 and "works up to 0" in said
    assert (tmp_path / "runs" / "long_context" / "planted.model" / "report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a model"),
        (("nothing",), "is no checkpoint, no folder and no module:function"),
        (("planted:none",), "there is no planted:none"),
        (("math:sqrt",), "give --vocabulary and --claimed"),
        ((".",), "has no tokenizer.json"),
        (("empty.ckpt",), "is no checkpoint of a language model"),
        (("math:sqrt", "--vocabulary", "9", "--claimed", "9", "--limit", "a=b"), "a limit is"),
        (("math:sqrt", "--vocabulary", "9", "--claimed", "9", "--limit", "a=1"), "limits are of"),
        (("--report", "nothing"), "nothing"),
        (("empty.ckpt", "--rerun", "nowhere"), "is no checkpoint"),
    ],
)
def test_what_cannot_be_tested(run, tmp_path, arguments, message: str) -> None:
    (tmp_path / "empty.ckpt").write_bytes(b"")
    status, said = run(*arguments)
    assert status == 2 and message in said and said.count("\n") == 1


def test_names_of_folders(script) -> None:
    names = {
        "runs/needles_rope/seed2/checkpoints/last.ckpt": "needles_rope-2",
        "/a/runs/needles/version_1/checkpoints/best.ckpt": "needles_best-1",
        "models/llama": "llama",
        "package.module:function": "package.module.function",
    }
    assert {model: script.name_of(model) for model in names} == names
