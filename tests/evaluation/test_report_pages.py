"""The pages of a report: from its folder alone, every sentence tagged, every text escaped."""

import re
import runpy
import shutil
from pathlib import Path

import pytest

from mmpos.evaluation.claims import Claim
from mmpos.evaluation.report import report

SHARED = runpy.run_path(str(Path(__file__).with_name("reported.py")))
Page = SHARED["Page"]
change = SHARED["change"]
table = SHARED["table"]
untagged = SHARED["untagged"]
untagged_lines = SHARED["untagged_lines"]
write_run = SHARED["write_run"]
EVIL = "<script>alert('x')</script> & | `code` *a* [b](c) ```\n# no heading\x1b[31m"


def test_every_sentence_has_one_tag(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "a-0"), write_run(tmp_path / "b-0", "ALiBi")
    for text, page in (report(one), report(one, two, output=tmp_path / "both")):
        assert untagged(page) == []
        assert untagged_lines(text) == []
        assert {tag for item in Page(page).items for tag in item["tags"]} == {
            "formula",
            "paper",
            "local",
        }
    assert untagged("<p>It is good.</p>") and untagged("<li>It is good.</li>")
    assert untagged_lines("It is good.") and untagged_lines("- It is. Good. (local: here)")


def test_the_folder_alone_gives_the_same_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "here" / "run")
    first = report(folder)
    files = [(folder / name).read_bytes() for name in ("report.md", "report.html")]
    assert files == [page.encode() for page in first]
    assert report(folder) == first
    moved = shutil.copytree(folder, tmp_path / "elsewhere" / "run")
    shutil.rmtree(folder)
    (moved / "report.md").unlink()
    assert report(str(moved)) == first
    assert [(moved / name).read_bytes() for name in ("report.md", "report.html")] == files
    lines = (moved / "cells.jsonl").read_text().splitlines()
    (moved / "cells.jsonl").write_text("\n".join(lines[::-1]) + "\n")  # of another order
    assert report(moved) == first


def test_what_a_model_says_stays_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", EVIL, output=EVIL)
    change(folder / "settings.json", note=EVIL)
    text, page = report(folder)
    found = Page(page)
    assert not {"script", "a-b"} & set(found.names)
    assert set(found.names) <= {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "h1",
        "h2",
        "h3",
        "ul",
        "li",
        "span",
        "a",
        "div",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "pre",
    }
    quoted = [each for place, each in found.texts if place == "pre"]
    assert len(quoted) == 5 and "<script>alert('x')</script> & | `code`" in quoted[0]
    assert "\x1b" not in page + text and "\\x1b[31m" in quoted[0]
    assert untagged(page) == [] and untagged_lines(text) == []
    outside = re.sub(r"(?ms)^(`{3,})text$.*?^\1$", "", text)
    assert "<script" not in outside and "\n# no heading" not in outside
    note = next(line for line in outside.splitlines() if line.startswith("| note"))
    assert len(re.findall(r"(?<!\\)\|", note)) == 3
    assert "````text" in text  # longer than the fence within


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda f: (f / "rows.json").unlink(), "has no rows.json: give the folder of a run"),
        (lambda f: (f / "cells.jsonl").write_text("{\n"), "cells.jsonl, line 1 is damaged"),
        (lambda f: (f / "cells.jsonl").write_text('{"task": "single"}\n'), "cells.jsonl is dam"),
        (lambda f: (f / "rows.json").write_text("{}"), "expected A1 to A12"),
        (lambda f: (f / "settings.json").write_text('{"claimed": 1}'), "lacks lengths, threshold"),
        (lambda f: (f / "costs.json").write_text("{"), "costs.json is damaged"),
        (lambda f: change(f / "rows.json", A3={"status": "OK", "evidence": ""}), "A3 is 'OK'"),
        (
            lambda f: (f / "cells.jsonl").write_text(
                (f / "cells.jsonl").read_text().splitlines()[0] * 1
                + "\n"
                + (f / "cells.jsonl").read_text()
            ),
            "it has a cell twice",
        ),
    ],
)
def test_damage_is_one_line(tmp_path: Path, damage, line: str) -> None:
    folder = write_run(tmp_path / "run")
    damage(folder)
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        report(folder)
    assert "\n" not in str(error.value)
    assert not (folder / "report.md").exists()


def test_folders_that_cannot_be_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for given, line in (
        ([], "got none"),
        ([folder] * 2, "output="),
    ):
        with pytest.raises(ValueError, match=line):
            report(*given)
    with pytest.raises(ValueError, match="given twice"):
        report(folder, f"{folder}/", output=tmp_path)


def test_a_claim_needs_its_kind_sentence_and_source(unchecked) -> None:
    for given in (("hope", "It is.", "here"), ("local", "It is", "here"), ("local", "It is.", " ")):
        with pytest.raises(ValueError, match=r"claim"):
            Claim(*given)
