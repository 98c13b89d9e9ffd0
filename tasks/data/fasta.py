"""FASTA files of nucleotides or amino acids."""

import re
from pathlib import Path

SUFFIXES = (".fasta", ".fa", ".faa", ".fna")

_COMPRESSED = (".gz", ".bgz", ".bz2", ".xz", ".zst", ".zip")
_SYMBOLS = re.compile(rb"[A-Z*-]*\Z")


def is_fasta(path: Path) -> bool:
    """Whether a file is one, by the ending of its name.

    Raises: ValueError for one that is compressed and not there without that.
    """
    packed = path.suffix.lower() in _COMPRESSED and path.with_suffix("").suffix.lower() in SUFFIXES
    if packed and not path.with_suffix("").exists():
        raise ValueError(
            f"{path} is compressed: write it as {path.with_suffix('').name}, such as by gunzip"
        )
    return path.suffix.lower() in SUFFIXES


def records(path: Path) -> list[tuple[str, bytes]]:
    """Name and sequence of each record of a file, in order.

    A record is a line that begins with ``>``, whose first word is the name, and the lines up to the
    next, joined in upper case without white space. A record without a name, or with that of one
    before, has its number after it: ``#3`` or ``name#3`` for the third. ``*`` is a stop and ``-`` a
    gap, and both are symbols, but for a ``*`` at the very end, which ends a sequence (as in PIR's
    files). Lines that begin with ``;`` are comments. Sequences may be empty.

    Raises: ValueError with the line for a sequence before the first header, or for anything but
    letters, ``*`` and ``-`` in one.
    """
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    found: list[tuple[str, list[bytes]]] = []
    known: set[str] = set()
    for number, line in enumerate(content.splitlines(), 1):
        if line.startswith(b">"):
            name = b"".join(line[1:].split(None, 1)[:1]).decode("utf-8", "replace")
            while not name or name in known:
                name = f"{name}#{len(found) + 1}"
            known.add(name)
            found.append((name, []))
            continue
        symbols = b"".join(line.split()).upper()
        if line.startswith(b";") or not symbols:
            continue
        if not found:
            raise ValueError(
                f"{path}, line {number}: text before the first header; in FASTA each sequence "
                "follows a line that begins with >"
            )
        if not _SYMBOLS.match(symbols):
            wrong = next(bytes([code]) for code in symbols if not _SYMBOLS.match(bytes([code])))
            raise ValueError(
                f"{path}, line {number}: {wrong.decode('latin-1')!r} is no symbol of a sequence; "
                "expected letters, * and -"
            )
        found[-1][1].append(symbols)
    return [(name, b"".join(parts).removesuffix(b"*")) for name, parts in found]
