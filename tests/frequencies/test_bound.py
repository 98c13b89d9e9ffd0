"""The known bound of the base, against the property it is a fit of, and bases of spectra."""

import math

import pytest
import torch

from mmpos import RotaryEncoding
from mmpos.frequencies import NTKAware, PositionInterpolation, YaRN, base_bound, base_of, geometric


@pytest.mark.parametrize("length", [1024, 2048, 8192])
def test_the_published_bases_are_near_the_fit_and_have_the_property(length):
    published = {1024: 4.3e3, 2048: 1.6e4, 8192: 8.4e4}[length]
    assert 0.6 < base_bound(length) / published < 1.4
    spectrum = torch.tensor(geometric(64, published), dtype=torch.float64)
    sums = (torch.arange(length)[:, None] * spectrum).cos().sum(-1)
    assert sums.min() > 0
    far_below = torch.tensor(geometric(64, published / 8), dtype=torch.float64)
    assert (torch.arange(length)[:, None] * far_below).cos().sum(-1).min() < 0


@pytest.mark.parametrize("pairs", [2, 3, 64])
@pytest.mark.parametrize("base", [10, 1e4, 5e5])
def test_the_base_of_a_plain_spectrum_is_its_own(pairs, base):
    assert base_of(geometric(pairs, base)) == pytest.approx(base)


def test_the_base_of_an_extended_spectrum_is_that_of_its_slowest_pair():
    def base(extension):
        encoding = RotaryEncoding(64, base=1e4, extension=extension)
        spectrum = encoding.frequencies(torch.float64, torch.device("cpu"))
        return base_of(spectrum.flatten().tolist())

    grown = 1e4 * 8 ** (32 / 31)
    assert base(NTKAware(factor=8)) == pytest.approx(grown)
    assert base(PositionInterpolation(factor=8)) == pytest.approx(grown)
    assert base(YaRN(factor=8, original_length=128)) == pytest.approx(grown)


def test_pairs_at_rest_reach_any_length():
    assert base_of([1.0, 0.1, 0.0]) == math.inf


def test_what_tells_nothing_is_refused():
    with pytest.raises(ValueError, match="length must be above 0, got 0"):
        base_bound(0)
    with pytest.raises(ValueError, match="2 pairs or more, got 1"):
        base_of([1.0])
