"""Every example in a docstring of the library runs, with ``torch`` and ``mmpos`` at hand."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import mmpos

MODULES = [
    module.name
    for module in pkgutil.walk_packages(mmpos.__path__, "mmpos.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch, "mmpos": mmpos})
    assert result.failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [
        test.name
        for name in MODULES
        for test in finder.find(importlib.import_module(name))
        if test.examples
    ]
    assert len(found) >= 14, found
