"""The example of a multimodal model: it runs, learns, and takes nothing but positions from here."""

import ast
import runpy
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "scripts" / "custom_multimodal.py"


def test_it_imports_only_torch_and_mmpos_and_fits_on_a_page() -> None:
    source = SCRIPT.read_text()
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    names += [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} == {"torch", "mmpos"}
    assert not any(name.startswith("mmpos.models") for name in names)
    assert len(source.splitlines()) < 110


def test_it_learns_what_needs_all_three(capsys: pytest.CaptureFixture) -> None:
    main = runpy.run_path(str(SCRIPT))["main"]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert main() > 0.95
    finally:
        torch.set_num_threads(threads)
    assert "of 1,000 new pages (chance 33.3)" in capsys.readouterr().out


def test_each_part_is_seen() -> None:
    script = runpy.run_path(str(SCRIPT))
    torch.manual_seed(0)
    model = script["PageReader"](answers=3)
    inputs, _ = script["pages"](4)
    with torch.no_grad():
        whole = model(*inputs)
        for part in range(3):
            changed = [x.roll(1, 0) if i == part else x for i, x in enumerate(inputs)]
            assert (model(*changed) - whole).abs().max() > 1e-6
        turned = [inputs[0], inputs[1].flip(-1), inputs[2]]
        assert (model(*turned) - whole).abs().max() > 1e-6
