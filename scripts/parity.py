"""How far mmpos is from what other installed libraries give: applied q and k, biases and tables.

    python scripts/parity.py            # needs '.[test]'; peers that are not installed are left out

It runs the tests that are marked with a peer and reports the largest absolute difference that each
compared. Whether a difference is too large is said by the test itself.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table

TESTS = Path(__file__).parents[1] / "tests"


class Recorder:
    """A pytest plugin that measures what the marked tests compare."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], dict] = {}
        self.now: dict | None = None
        self.compare = torch.testing.assert_close

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list) -> None:
        marked = [item for item in items if item.get_closest_marker("peer")]
        config.hook.pytest_deselected(items=[item for item in items if item not in marked])
        items[:] = marked

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item):
        marker = item.get_closest_marker("peer")
        assert marker is not None
        what = item.name.split("[")[0].removeprefix("test_").replace("_", " ")
        where = str(item.path.relative_to(TESTS).with_suffix(""))
        empty = {"cases": 0, "largest": 0.0, "failed": 0, "left_out": 0}
        row = self.rows.setdefault((marker.args[0], f"{where}: {what}"), empty)
        self.now, row["cases"] = row, row["cases"] + 1
        try:
            return (yield)
        except pytest.skip.Exception:
            row["left_out"] += 1
            raise
        except BaseException:
            row["failed"] += 1
            raise
        finally:
            self.now = None

    def measure(self, actual, expected, *args, **named) -> None:
        """`torch.testing.assert_close`, noting the difference."""
        if self.now is not None and isinstance(actual, torch.Tensor):
            apart = (actual.detach().double() - expected.detach().double()).abs()
            apart = apart[apart.isfinite()]
            if apart.numel():
                self.now["largest"] = max(self.now["largest"], float(apart.max()))
        self.compare(actual, expected, *args, **named)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--select", default="", help="only tests whose names hold this")
    args = parser.parse_args(argv)
    recorder = Recorder()
    torch.testing.assert_close = recorder.measure
    try:
        options = ["-q", "-p", "no:cacheprovider", "--no-header", "--no-summary", str(TESTS)]
        code = pytest.main([*options, *(["-k", args.select] if args.select else [])], [recorder])
    finally:
        torch.testing.assert_close = recorder.compare
    table = Table("peer", "what", "cases", "largest difference", "")
    count = defaultdict(int)
    for (peer, what), row in sorted(recorder.rows.items()):
        count[peer] += 1
        state = "FAILED" if row["failed"] else "not installed" if row["left_out"] else ""
        table.add_row(peer, what, str(row["cases"]), f"{row['largest']:.1e}", state)
    Console(width=150).print(table)
    for peer in sorted(count):
        try:
            print(f"{peer} {metadata.version(peer)}: {count[peer]} comparisons")
        except metadata.PackageNotFoundError:
            print(f"{peer} is not installed")
    if args.json:
        rows = [{"peer": p, "what": w, **row} for (p, w), row in sorted(recorder.rows.items())]
        args.json.write_text(json.dumps(rows, indent=1))
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main())
