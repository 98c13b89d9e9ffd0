"""What the report of a run says, and that of several."""

import json
import runpy
from pathlib import Path

from mmpos.evaluation.report import report

SHARED = runpy.run_path(str(Path(__file__).with_name("reported.py")))
Page = SHARED["Page"]
change = SHARED["change"]
rights = SHARED["rights"]
table = SHARED["table"]
untagged = SHARED["untagged"]
write_run = SHARED["write_run"]


def test_the_report_says_what_is_effective_and_why(tmp_path: Path) -> None:
    text, page = report(write_run(tmp_path / "run"))
    assert "claimed to take 4,096 tokens. (local: settings.json)" in text
    assert "interface accepts 256 tokens. (local:" in text
    assert "effective length is 64 tokens. (local: cells.jsonl)" in text
    assert "single at depth 0% at 128: 30 of 50 right" in text
    cells = table(text, "task | length | depth")
    assert ["single", "128", "0 %", "50", "30", "**0.462 ✗**"] in cells
    assert ["single", "64", "0 %", "50", "50", "0.929"] in cells
    assert len(cells) == 36
    heat = table(text, "length | depth 0 % | depth 50 % | depth 100 %")
    assert heat[1] == ["128", "**60 (46) ✗**", "100 (92)", "100 (92)"]
    assert [row[0] for row in heat] == ["64", "128", "256"]
    acceptance = {row[0]: row for row in table(text, "row")}
    assert len(acceptance) == 12
    assert acceptance["A3"][2:5] == ["**FAIL**", "all &lt;3>", "local"]
    assert acceptance["A3"][5] == "[cells.jsonl](cells.jsonl)"
    assert "Of 12 checks 10 pass, 1 fail and 1 were not run." in text
    answers = table(text, "task | length | exact")
    assert answers[1] == ["single", "128", "86", "100", "86", "0"]
    assert "Of 450 questions without an answer 450 were refused." in text
    assert "least that is known is 200 tokens, by the cache." in text
    assert ["tokenizer", "not known"] in table(text, "limit of")
    assert ["environment.versions.torch", "2.9"] in table(text, "name")
    costs = table(text, "length | prefill seconds")
    assert costs[1] == [
        "128",
        "0.128",
        "yes",
        "131,072",
        "131,072",
        "–",
        "1.5",
        "process so far",
        "123,456,789",
    ]
    assert "Of 20 failed samples 20 are kept" in text and "[failures.jsonl](failures.jsonl)" in text
    assert "failures.jsonl" in Page(page).links
    assert text.count("```text\n") == 5 and "8888" not in text and "output: [3, 4]" in text
    assert "background: #" in page and "overflow-x: auto" in page and "viewport" in page


def test_several_folders_are_compared(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / f"RoPE-{seed}", right=by)
        for seed, by in enumerate(
            (rights, lambda *place: 50, lambda task, *_: 40 if task == "conflict" else 50)
        )
    ]
    folders.append(write_run(tmp_path / "ALiBi-0", right=lambda *place: 50))
    out = tmp_path / "both"
    text, page = report(*folders, output=out)
    assert text.startswith("# Long contexts: RoPE / ALiBi")
    assert "With RoPE it is 0 at the least of the seeds, at the most 256 tokens." in text
    assert "With ALiBi it is 256 tokens." in text
    worst = table(text, "task | length | RoPE | ALiBi")
    assert ["single", "128", "86 (60–100)", "100"] in worst
    assert ["conflict", "64", "93 (80–100)", "100"] in worst
    heat = table(text, "length | depth 0 %")
    assert heat[1] == ["128", "**86 (60–100) ✗**", "100 (100–100)", "100 (100–100)"]
    accepted = {row[0]: row[2:] for row in table(text, "row")}
    assert accepted["A3"] == ["3 FAIL", "FAIL"] and accepted["A12"] == ["3 PASS", "PASS"]
    assert "| length 64, last tokens: nats per token | 2 (2–2) | 2 |" in text
    assert "last tokens: length" not in text
    ranges = table(text, "model | seed")
    assert [row[1:5] for row in ranges] == [
        ["../RoPE-0", "4096", "256", "64"],
        ["../RoPE-1", "4096", "256", "256"],
        ["../RoPE-2", "4096", "256", "0"],
        ["../ALiBi-0", "4096", "256", "256"],
    ]
    assert "../RoPE-0/failures.jsonl" in Page(page).links
    assert (out / "report.html").read_text() == page and not (folders[0] / "report.md").exists()
    assert report(*folders, output=out) == (text, page)


def test_the_mark_is_by_the_bound(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", right=lambda *place: 43)  # 86 %, at least 73.8 %
    text, _ = report(folder)
    assert text.count("**86 (73) ✗**") == 36


def test_the_range_is_that_of_the_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", right=lambda *place: 50)
    assert "effective length is 256 tokens." in report(folder)[0]
    rows = json.loads((folder / "rows.json").read_text())
    change(folder / "rows.json", A7=rows["A7"] | {"status": "FAIL"})
    text, _ = report(folder)
    assert "effective length is 0 tokens." in text and "(regression)" in text
    change(folder / "rows.json", A7=rows["A7"])
    change(folder / "settings.json", depths=[0.0, 0.25])
    text, _ = report(folder)
    assert "effective length is 0 tokens." in text and "depth 25% was not tested at 64" in text


def test_what_was_not_tested_alike_is_said(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "a-0"), write_run(tmp_path / "b-0")
    lines = (two / "cells.jsonl").read_text().splitlines()
    (two / "cells.jsonl").write_text("\n".join(lines[1:]) + "\n")
    change(two / "settings.json", seed=9)
    text, _ = report(one, two, output=tmp_path / "both")
    assert "All have 35 cells with as many samples in common, and a others too." in text
    assert "The runs differ in their seed, and are not compared cleanly." in text


def test_a_gap_in_the_folder_is_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for name in ("failures.jsonl", "costs.json"):
        (folder / name).unlink()
    (folder / "perplexity.json").write_text("null")
    text, page = report(folder)
    assert "The failed samples were not kept. (local: no failures.jsonl)" in text
    assert "Nothing was measured. (local: no costs.json)" in text
    assert "Nothing was measured. (local: perplexity.json)" in text
    assert "The folder lacks failures.jsonl and costs.json." in text
    assert untagged(page) == []
    (folder / "failures.jsonl").write_text("")
    assert "The file is not complete." in report(folder)[0]
