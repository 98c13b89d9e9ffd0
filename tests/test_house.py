"""The house rules: who imports whom, what is public, and that it says what it does."""

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import mmpos

PACKAGE = Path(mmpos.__file__).parent
LAYERS = [
    {"positions", "coordinates", "frequencies", "spec"},
    {"resample"},
    {"additive", "rotary", "bias"},
    {"attention"},
    {"models"},
    {"interop", "evaluation", "checks"},
]
OUTSIDE = {"torch", "einops", "jaxtyping", "numpy", "lazy_loader"}
FOREIGN = {"interop": {"timm", "safetensors", "transformers"}}  # their models and files
PUBLIC = [
    "ALiBi",
    "AdditiveEncoding",
    "AttentionBias",
    "ClippedRelativeBias",
    "ContentBias",
    "DisentangledBias",
    "FIREBias",
    "FactorizedEncoding",
    "FourierEncoding",
    "KerpleBias",
    "LearnedEncoding",
    "LogCPB",
    "LogTemperature",
    "MRoPE",
    "MixedRotaryEncoding",
    "RelativePositionBias",
    "RotaryEncoding",
    "Rotation",
    "ShawBias",
    "SinusoidalEncoding",
    "T5Bias",
    "TransformerXLBias",
    "VJEPA2Encoding",
    "XDRoPE",
    "XPosEncoding",
    "__version__",
    "attend",
    "attention",
    "build",
    "coordinates",
    "frequencies",
    "interop",
    "models",
    "positions",
    "resample",
    "rotate",
    "rotate_",
]
ENTRY = {"__init__", "__main__", "_version"}  # of the package itself


def modules() -> list[str]:
    found = pkgutil.walk_packages([str(PACKAGE)], "mmpos.")
    return [module.name for module in found if not module.name.endswith("__main__")]


def part(path: Path) -> str:
    """The first name below the package: a folder, or a module."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            names.add(node.module or "")
            if node.module == "mmpos":
                names |= {f"mmpos.{alias.name}" for alias in node.names}
    return names


SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if part(path) not in ENTRY]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    own = part(path)
    names = imports(path)
    foreign = {name.split(".")[0] for name in names} - {"mmpos"} - set(sys.stdlib_module_names)
    assert foreign <= OUTSIDE | FOREIGN.get(own, set())
    level = next((i for i, layer in enumerate(LAYERS) if own in layer), None)
    assert level is not None, f"{own} has no place in the order"
    below = set().union(*LAYERS[:level]) | {own} | (LAYERS[0] if level == 0 else set())
    used = {name.split(".")[1] for name in names if name.startswith("mmpos.")}
    assert used <= below, f"{own} imports {used - below}"


def test_the_foundations_import_in_one_order():
    order = ["spec", "positions", "frequencies", "coordinates"]
    for path in SOURCES:
        if part(path) in order:
            used = {name.split(".")[1] for name in imports(path) if name.startswith("mmpos.")}
            assert used & set(order) <= set(order[: order.index(part(path)) + 1])


def test_importing_the_package_imports_no_torch():
    code = (
        "import sys, mmpos; mmpos.__version__; dir(mmpos);"
        "heavy = {'torch', 'timm', 'lightning', 'numpy'} & set(sys.modules);"
        "assert not heavy, heavy; mmpos.ALiBi; assert 'torch' in sys.modules;"
        "more = {'timm', 'lightning', 'torchvision', 'transformers'} & set(sys.modules);"
        "assert not more, more"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_public_names_are_frozen():
    assert sorted(mmpos.__all__) == PUBLIC
    assert all(getattr(mmpos, name) is not None for name in PUBLIC)
    assert set(PUBLIC) <= set(dir(mmpos))


@pytest.mark.parametrize("name", modules())
def test_every_public_class_and_function_says_what_it_does(name):
    module = importlib.import_module(name)
    own = [
        thing
        for key, thing in vars(module).items()
        if not key.startswith("_")
        and (inspect.isclass(thing) or inspect.isfunction(thing))
        and thing.__module__ == name
    ]
    missing = [thing.__name__ for thing in own if not inspect.getdoc(thing)]
    inherited = [
        cls.__name__
        for cls in own
        if inspect.isclass(cls) and issubclass(cls, nn.Module) and "__doc__" not in vars(cls)
    ]
    assert not missing
    assert not inherited


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_stay_short_and_own_no_buffer(path):
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") < 300
    assert "register_buffer" not in source
