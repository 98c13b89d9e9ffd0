"""The report of a run on long contexts, made from its folder alone."""

from __future__ import annotations

import os
from pathlib import Path

from mmpos.evaluation import document
from mmpos.evaluation.comparison import compared
from mmpos.evaluation.document import Heading
from mmpos.evaluation.results import Results, read
from mmpos.evaluation.samples import write_text
from mmpos.evaluation.sections import told


def report(
    *folders: str | os.PathLike[str], output: str | os.PathLike[str] | None = None
) -> tuple[str, str]:
    """Write ``report.md`` and ``report.html`` and return them.

    Of one folder, beside its results. Of several, models by seeds, a comparison goes before the
    report of each, and ``output`` is the folder that they are written to. A folder called
    ``NAME-SEED`` is a seed of a model; any other, a model of its own.

    The same folders give the same report, byte for byte.

    Raises: ValueError for no folder, several without ``output``, one that is not a run's, and one
    whose files are damaged.
    """
    if not folders:
        raise ValueError("a report is of one folder of results or more, got none")
    if output is None and len(folders) > 1:
        raise ValueError(f"a report of {len(folders)} folders needs output=…, where to write it")
    if len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise ValueError(f"a folder is given twice: {', '.join(map(str, folders))}")
    runs = [read(folder) for folder in folders]
    target = Path(next(iter(folders)) if output is None else output)
    links = [_relative(results.folder, target) for results in runs]
    if len(runs) == 1:
        title, blocks = f"Long contexts: {runs[0].model}", told(runs[0], links[0])
    else:
        groups: dict[str, dict[str, Results]] = {}
        for results, link in zip(runs, links, strict=True):
            name = results.model
            others = [own for own in runs if own.model == name and not _alike(own, results)]
            name = f"{name} ({link or 'here'})" if others else name
            groups.setdefault(name, {})[link or "here"] = results
        title, blocks = f"Long contexts: {' / '.join(groups)}", compared(groups)
        for results, link in zip(runs, links, strict=True):
            blocks += [Heading(f"Run {link or 'here'}"), *told(results, link, level=3)]
    pages = document.markdown(title, blocks), document.html(title, blocks)
    target.mkdir(parents=True, exist_ok=True)
    for name, page in zip(("report.md", "report.html"), pages, strict=True):
        write_text(target / name, page)
    return pages


def _alike(one: Results, two: Results) -> bool:
    """Whether two runs can be of seeds of one model."""
    return all(
        one.settings.get(name) == two.settings.get(name)
        for name in ("parameters", "vocabulary", "claimed")
    )


def _relative(folder: Path, target: Path) -> str:
    """Where a folder is, seen from the report."""
    path = os.path.relpath(folder, target)
    return "" if path == os.curdir else path.replace(os.sep, "/")
