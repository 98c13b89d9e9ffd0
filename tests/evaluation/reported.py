"""Folders of results made by hand, and what is read from reports of them."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "br", "hr", "img", "input", "link"}
TAG = re.compile(r" \((formula|paper|local): [^()]*(\([^()]*\))?[^()]*\)$")
SENTENCES = re.compile(r"[.!?] +[A-Z]")


class Page(HTMLParser):
    """Elements that must be balanced, and what text each kind has."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.names: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.items: list[dict] = []
        self.links: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.names.append(tag)
        given = dict(attrs)
        if "href" in given:
            self.links.append(given["href"])
        if tag == "li":
            self.items.append({"text": "", "tags": []})
        if tag not in VOID:
            self.open.append("tag" if given.get("class") == "tag" else tag)

    def handle_endtag(self, tag: str) -> None:
        opened = self.open.pop()
        assert tag == ("span" if opened == "tag" else opened)

    def handle_data(self, data: str) -> None:
        if not data.strip():
            return
        self.texts.append((self.open[-1], data))
        if self.open[-1] == "tag":
            self.items[-1]["tags"].append(data)
        elif self.open[-1] == "li":
            self.items[-1]["text"] += data


def untagged(page: str) -> list[str]:
    """Sentences of a page of HTML that do not have exactly one tag."""
    found = Page(page)
    wrong = [
        item["text"]
        for item in found.items
        if len(item["tags"]) != 1
        or item["tags"][0] not in ("formula", "paper", "local")
        or SENTENCES.search(item["text"])
        or not item["text"].strip().endswith(".")
    ]
    places = {"title", "style", "h1", "h2", "h3", "h4", "th", "td", "a", "pre", "li", "tag", "span"}
    wrong += [text for place, text in found.texts if place not in places]
    return wrong + [text for place, text in found.texts if place == "td" and text.endswith(".")]


def untagged_lines(page: str) -> list[str]:
    """The same of Markdown."""
    wrong, fence = [], ""
    for line in page.splitlines():
        if fence:
            fence = "" if line == fence else fence
        elif line.startswith("```"):
            fence = re.match("`+", line)[0]
        elif line.startswith("- "):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line)
            tagged = TAG.search(plain)
            if not tagged or SENTENCES.search(plain[: tagged.start()]):
                wrong.append(line)
        elif line and not line.startswith(("#", "|")):
            wrong.append(line)
    return wrong


def rights(task: str, length: int, depth: float) -> int:
    """1 × passes, 2 × fails at the beginning, 4 × passes by luck."""
    return 30 if (length, depth) == (128, 0.0) and task == "single" else 50


def write_run(folder: Path, name: str = "RoPE", output: object = (3, 4), right=rights) -> Path:
    """A folder as `accept` writes it, by hand."""
    folder.mkdir(parents=True)
    lengths, depths = [64, 128, 256], [0.0, 0.5, 1.0]
    settings = {
        "name": name,
        "claimed": 4096,
        "lengths": lengths,
        "depths": depths,
        "trained": 64,
        "threshold": 0.8,
        "seed": 0,
        "limits": {"server": 300, "tokenizer": None, "cache": 200, "minimum": 200},
        "environment": {"versions": {"torch": "2.9"}, "device": "CPU"},
    }
    cells, failures = [], []
    kinds = [("single", 0), ("distractors", 3), ("conflict", 0), ("unanswerable", 3)]
    for task, distractors in kinds:
        for length in lengths:
            for depth in depths:
                hits = right(task, length, depth)
                own = {"task": task, "length": length, "depth": depth, "distractors": distractors}
                refused = hits if task == "unanswerable" else 0
                counts = {"n": 50, "right": hits, "keyword": 50, "cited": hits, "refused": refused}
                cells.append(own | counts | {"seeds": 50})
                sample = {"seed": 7, "prompt": [8888] * 9, "value": [5], "source": [6]}
                failures += [own | sample | {"asked": length, "output": output}] * (50 - hits)
    rows = {f"A{n}": {"status": "PASS", "evidence": f"all <{n}>"} for n in range(1, 13)}
    rows["A3"] |= {"status": "FAIL", "file": "cells.jsonl"}
    rows["A7"] = {"status": "NOT RUN", "evidence": "no results of before", "tag": "local"}
    rows["A12"]["data"] = {"accepted": 256}
    costs = [
        {
            "length": n,
            "prefill_seconds": n / 1e3,
            "cached": True,
            "kv_measured": 1024 * n,
            "kv_formula": 1024 * n,
            "train_tokens_per_second": None,
            "decode_ms_per_token": 1.5,
            "peak_of": "process so far",
            "peak_bytes": 123456789,
        }
        for n in lengths
    ]
    perplexity = [{"method": "last tokens", "length": n, "nats_per_token": 2.0} for n in lengths]
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "costs.json").write_text(json.dumps(costs))
    (folder / "perplexity.json").write_text(json.dumps(perplexity))
    for file, lines in (("cells", cells), ("failures", failures)):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def table(page: str, head: str) -> list[list[str]]:
    """The rows of the first table in Markdown whose head begins so."""
    lines = iter(page.splitlines())
    for line in lines:
        if line.startswith(f"| {head} |"):
            next(lines)
            rows = []
            for row in lines:
                if not row.startswith("|"):
                    break
                rows.append([cell.strip() for cell in row.strip("|").split(" | ")])
            return rows
    raise AssertionError(f"no table {head}")
