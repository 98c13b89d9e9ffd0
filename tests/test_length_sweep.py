"""The sweep over contexts: the same bytes at each, by every way, against a plain computation."""

import csv
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import mmpos
from mmpos.frequencies import YaRN
from mmpos.models import Transformer
from tasks import LanguageModel, cli
from tasks.data import documents

SCRIPTS = Path(__file__).parents[1] / "scripts"
TRAINED, CONTEXTS, TEXTS, SCORED = 32, (32, 64, 128), 5, 4
FEW = ["--data.train_tokens=3000", "--data.eval_tokens=500", "--trainer.max_epochs=1"]
FEW += ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Callable[..., None]]:
    """Two models as ``--train`` makes them, and the script's main."""
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(SCRIPTS)
        for name, over in (("RoPE-0", []), ("learned-0", ["--config", "encoding/learned"])):
            run = [f"--data.context={TRAINED}", f"--trainer.logger.name={name}"]
            assert cli.main(["fit", "--config", "text", *over, *FEW, *run]) == 0
        main = runpy.run_path(str(SCRIPTS / "length_sweep.py"))["main"]
    return folder, main


def checkpoint(folder: Path, name: str) -> Path:
    return folder / "runs" / name / "version_0" / "checkpoints" / "best.ckpt"


def plainly(task: LanguageModel, context: int, transformer: Transformer | None = None) -> float:
    """Bits of the last bytes of the first texts that are long enough."""
    longest = max(CONTEXTS)
    texts = [t for _, t in documents.complete(documents.stdlib())["test"] if len(t) >= longest]
    network = task.network.eval()
    bits = 0.0
    for text in texts[:TEXTS]:
        ids = torch.tensor([[256, *text[:longest]]])[:, -context - 1 :]
        with torch.no_grad():
            x = (transformer or network.transformer)(
                network.tokens(ids[:, :-1]), torch.arange(context)[:, None]
            )
            logits = x @ network.tokens.weight.T
        nats = cross_entropy(logits[0, -SCORED:], ids[0, -SCORED:], reduction="sum")
        bits += float(nats) / 0.6931471805599453
    return bits / TEXTS / SCORED


def test_each_way_is_what_it_says(sweep, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder, main = sweep
    paths = [str(checkpoint(folder, name)) for name in ("RoPE-0", "learned-0")]
    few = ["--lengths", *map(str, CONTEXTS[1:]), "--texts", str(TEXTS), "--scored", str(SCORED)]
    main([*paths, *few, "--output", str(tmp_path)])
    with (tmp_path / "lengths.csv").open() as file:
        found = {
            (row["model"], row["way"], int(row["context"])): float(row["bits"])
            for row in csv.DictReader(file)
        }
    assert (tmp_path / "lengths.png").stat().st_size > 10_000
    said = capsys.readouterr().out
    assert "32*" in said and "YaRN" in said

    task = LanguageModel.load_from_checkpoint(checkpoint(folder, "RoPE-0"), map_location="cpu")
    weights = task.network.transformer.state_dict()

    def rope(**options) -> Transformer:
        extension = options.pop("extension", None)
        turn = partial(mmpos.RotaryEncoding, extension=extension)
        made = Transformer((TRAINED,), size="nano", causal=True, rotary=turn, **options).eval()
        made.load_state_dict(weights)
        return made

    ways = {(way, context) for model, way, context in found if model == "RoPE"}
    for context in CONTEXTS:
        wanted = {
            "": rope(),
            "window 32": rope(window=TRAINED),
            "YaRN, fixed": rope(extension=YaRN(factor=4, original_length=TRAINED)),
        }
        if context > TRAINED:
            factor = context / TRAINED
            wanted["YaRN"] = rope(extension=YaRN(factor=factor, original_length=TRAINED))
            wanted["NTK, 2 ×"] = rope(extension=mmpos.frequencies.NTKAware(factor=2 * factor))
        for way, transformer in wanted.items():
            expected = plainly(task, context, transformer)
            assert found["RoPE", way, context] == pytest.approx(expected, rel=1e-4), (way, context)
        assert (("YaRN", context) in ways) == (context > TRAINED)
    for context in CONTEXTS:
        table = LanguageModel.load_from_checkpoint(
            checkpoint(folder, "learned-0"), map_location="cpu", context=context
        )
        assert found["learned", "", context] == pytest.approx(plainly(table, context), rel=1e-4)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ([], "name checkpoints, or give --train"),
        (["FILE", "--train"], "name checkpoints, or give --train"),
        (["FILE", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["nowhere.ckpt"], "nowhere.ckpt is no checkpoint of a language model"),
        (["FILE", "--texts", "99999999"], "fewer --texts or shorter --lengths"),
        (["FILE", "--scored", "33"], "33 tokens are scored, a context has 32"),
    ],
)
def test_mistakes_are_one_line(sweep, args, line, capsys: pytest.CaptureFixture) -> None:
    folder, main = sweep
    given = [str(checkpoint(folder, "RoPE-0")) if arg == "FILE" else arg for arg in args]
    with pytest.raises(SystemExit):
        main(given)
    assert line in capsys.readouterr().err
