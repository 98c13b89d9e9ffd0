"""A report as a list of blocks, written in Markdown and as one page of HTML.

There is no block of plain prose: what a report says in sentences are `Claim`s, so that each has its
tag. All texts are escaped, wherever they come from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from mmpos.evaluation.claims import Claim

STYLE = """
:root { color-scheme: light; }
body { font: 1rem/1.5 system-ui, sans-serif; color: #111; background: #fff; margin: 0 auto;
  max-width: 64rem; padding: 1rem; }
h1, h2, h3, p, li { overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; }
th, td { border: 1px solid #999; padding: .25rem .5rem; text-align: left; vertical-align: top; }
th { background: #eee; }
td.shaded { text-align: right; white-space: nowrap; }
td.fails { font-weight: bold; border: 2px dashed #111; }
pre { overflow-x: auto; border: 1px solid #999; padding: .5rem; }
.tag { border: 1px solid #555; border-radius: .25rem; font-size: .8rem; padding: 0 .25rem; }
.source { font-size: .8rem; color: #444; }
"""


@dataclass(frozen=True)
class Heading:
    """The title of a section, or of a part of one (3)."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Entry:
    """A cell of a table; ``share``, from 0 to 1, is how dark it is; ``link`` is where it leads."""

    text: str
    share: float | None = None
    fails: bool = False
    link: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under a head."""

    head: Sequence[str]
    rows: Sequence[Sequence[Entry | str]]


@dataclass(frozen=True)
class Quote:
    """What a model said, as it said it."""

    text: str


Other = Heading | Table | Quote
Block = Claim | Other


def markdown(title: str, blocks: Sequence[Block]) -> str:
    r"""The blocks in Markdown.

    >>> print(markdown("Report", [Heading("Cells"), Table(["a", "b"], [["1", "x|y"]])]), end="")
    # Report
    <BLANKLINE>
    ## Cells
    <BLANKLINE>
    | a | b |
    |---|---|
    | 1 | x\|y |
    """
    parts = [f"# {plain(title)}"]
    for part in _together(blocks):
        if isinstance(part, list):
            parts.append("\n".join(f"- {_claim_in_markdown(claim)}" for claim in part))
        else:
            parts.append(_in_markdown(part))
    return "\n\n".join(parts) + "\n"


def html(title: str, blocks: Sequence[Block]) -> str:
    """The blocks as one page that needs nothing else: no script, no font, no picture.

    >>> "&lt;b&gt;" in html("<b>", []) and "<b>" not in html("<b>", [])
    True
    """
    parts = []
    for part in _together(blocks):
        if isinstance(part, list):
            items = "\n".join(f"<li>{_claim_in_html(claim)}</li>" for claim in part)
            parts.append(f"<ul>\n{items}\n</ul>")
        else:
            parts.append(_in_html(part))
    name, body = _text(title), "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{name}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


def plain(text: str) -> str:
    r"""A text in which Markdown finds nothing to act on, on one line.

    >>> plain("a*b <i> | c_d")
    'a\\*b &lt;i> \\| c_d'
    """
    text = re.sub(r"\s+", " ", _visible(text)).strip()
    text = re.sub(r"&(?=#?\w+;)", "&amp;", text).replace("<", "&lt;")
    return re.sub(r"([\\`*\[\]|~$]|(?<!\w)_|_(?!\w))", r"\\\1", text)


def _together(blocks: Sequence[Block]) -> Iterator[list[Claim] | Other]:
    """Claims that follow each other as one list."""
    claims: list[Claim] = []
    for block in blocks:
        if isinstance(block, Claim):
            claims.append(block)
            continue
        if claims:
            yield claims
            claims = []
        yield block
    if claims:
        yield claims


def _in_markdown(block: Other) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {plain(block.text)}"
    if isinstance(block, Quote):
        longest = max((len(run) for run in re.findall("`+", block.text)), default=0)
        fence = "`" * max(3, longest + 1)
        return f"{fence}text\n{_visible(block.text)}\n{fence}"
    lines = ["| " + " | ".join(map(plain, block.head)) + " |", "|---" * len(block.head) + "|"]
    lines += ["| " + " | ".join(map(_entry_in_markdown, row)) + " |" for row in block.rows]
    return "\n".join(lines)


def _claim_in_markdown(claim: Claim) -> str:
    source = plain(claim.source)
    if claim.link:
        source = f"[{source}]({_address(claim.link)})"
    return f"{plain(claim.text)} ({claim.kind}: {source})"


def _entry_in_markdown(entry: Entry | str) -> str:
    entry = Entry(entry) if isinstance(entry, str) else entry
    text = plain(entry.text)
    text = f"[{text}]({_address(entry.link)})" if entry.link else text
    return f"**{text}**" if entry.fails else text


def _in_html(block: Other) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{_text(block.text)}</h{block.level}>"
    if isinstance(block, Quote):
        return f"<pre>{_text(block.text)}</pre>"
    head = "".join(f'<th scope="col">{_text(each)}</th>' for each in block.head)
    rows = "\n".join(f"<tr>{''.join(map(_entry_in_html, row))}</tr>" for row in block.rows)
    return (
        f'<div class="wide">\n<table>\n<thead>\n<tr>{head}</tr>\n</thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table>\n</div>"
    )


def _claim_in_html(claim: Claim) -> str:
    source = _text(claim.source)
    if claim.link:
        source = f'<a href="{escape(_address(claim.link))}">{source}</a>'
    return (
        f'{_text(claim.text)} <span class="tag">{claim.kind}</span> '
        f'<span class="source">{source}</span>'
    )


def _entry_in_html(entry: Entry | str) -> str:
    entry = Entry(entry) if isinstance(entry, str) else entry
    text = _text(entry.text)
    text = f'<a href="{escape(_address(entry.link))}">{text}</a>' if entry.link else text
    names = ["shaded"] * (entry.share is not None) + ["fails"] * entry.fails
    named = f' class="{" ".join(names)}"' if names else ""
    shade = f' style="{_shade(entry.share)}"' if entry.share is not None else ""
    return f"<td{named}{shade}>{text}</td>"


def _shade(share: float) -> str:
    """White for 0 to a dark blue for 1, and letters that can be read on it."""
    share = min(max(share, 0.0), 1.0)
    red, green, blue = (round(255 + share * (dark - 255)) for dark in (8, 69, 148))
    return (
        f"background: #{red:02x}{green:02x}{blue:02x}; color: {'#fff' if share > 0.7 else '#111'}"
    )


def _address(link: str) -> str:
    """A link without what ends one in Markdown."""
    return re.sub(r"[\s()<>\"|\\]", lambda found: f"%{ord(found[0]):02X}", link)


def _text(text: str) -> str:
    return escape(_visible(text))


def _visible(text: str) -> str:
    r"""A text in which control characters other than line breaks are shown as escapes."""
    lines = text.splitlines() or [""]
    return "\n".join(
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
        for line in lines
    )
