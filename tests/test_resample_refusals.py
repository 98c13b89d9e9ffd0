"""What cannot be resized, or means nothing, is refused with the numbers given."""

import pytest
import torch

from mmpos.resample import (
    Resampling,
    bias_table,
    flat_table,
    grid_table,
    grid_tables,
    patch_kernel,
)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "lanczos"}, "mode .*'nearest', 'bilinear', 'bicubic'.* got 'lanczos'"),
        ({"fit": "pad"}, "fit .*'resize', 'crop', 'center'.* got 'pad'"),
        ({"fit": ("crop", "tile")}, "got 'tile'"),
        ({"offset": -0.1}, "offset must be 0 or more, got -0.1"),
        ({"align_corners": True, "offset": 0.1}, "offset .* align_corners .* drop one"),
        ({"align_corners": True, "mode": "nearest"}, "align_corners does nothing .* nearest"),
        ({"cubic": -0.5, "mode": "bilinear"}, "cubic -0.5 does nothing .* bilinear"),
    ],
)
def test_ways_that_mean_nothing(unchecked, given, message):
    with pytest.raises(ValueError, match=message):
        Resampling(**given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grid_table(torch.ones(4, 6, 1), (24,)), "4 × 6 cannot become one of 24"),
        (lambda: grid_table(torch.ones(4, 6, 1), (0, 6)), "1 cell or more, got 4 → 0"),
        (lambda: grid_tables(torch.ones(4, 6, 1), [(4, 6), (3, -1)]), "got 6 → -1"),
        (
            lambda: grid_table(torch.ones(4, 6, 1), (3, 6), Resampling(fit=("crop",) * 3)),
            "'crop'.* is for 3 axes, a grid of 3 × 6 has 2",
        ),
        (
            lambda: flat_table(torch.ones(17, 1), (4, 4), (8, 8)),
            "17 rows is not 0 prefix rows and a grid of 4 × 4 = 16",
        ),
        (lambda: flat_table(torch.ones(195, 1), (14, 14), (8, 8), prefix_rows=1), "195 rows"),
        (lambda: flat_table(torch.ones(15, 1), (4, 4), (8, 8), prefix_rows=-1), "15 .* -1 prefix"),
        (lambda: flat_table(torch.ones(16, 1), (4, 4), (4, 4, 1)), "4 × 4 cannot .* 4 × 4 × 1"),
        (
            lambda: bias_table(torch.ones(169, 1), (4, 4), (7, 7)),
            "169 rows is not the 49 offsets of a window of 4 × 4 and 0 extra rows",
        ),
        (lambda: bias_table(torch.ones(48, 1), (4, 4), (7, 7), extra_rows=-1), "48 .* -1 extra"),
        (lambda: patch_kernel(torch.ones(2, 3, 4, 6), (8,)), "4 × 6 cannot become one of 8"),
        (lambda: patch_kernel(torch.ones(2, 3, 4, 6), (8, 0)), "got 6 → 0"),
    ],
)
def test_refusals(unchecked, call, message):
    with pytest.raises(ValueError, match=message):
        call()
