"""What every test and doctest shares: shapes are checked at each call, on one thread."""

import os

import jaxtyping
import pytest
from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int will do for a float

if not os.environ.get("JAXTYPING_DISABLE"):  # tests/traced.py: torch cannot trace the checks
    jaxtyping.install_import_hook("mmpos", f"{__name__}.checked")

import torch  # noqa: E402

import mmpos  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _names_in_doctests(doctest_namespace):
    doctest_namespace.update(torch=torch, mmpos=mmpos)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
