"""Images of different grids in one batch are to every encoding what each is alone."""

from functools import partial

import pytest
import torch

import mmpos
from mmpos.bias import ClippedRelativeBias, KerpleBias, LogCPB, ShawBias, TransformerXLBias
from mmpos.coordinates import Centered, Index, OneBased, Scaled
from mmpos.models import Transformer
from mmpos.positions import chosen, grid, ragged

GRIDS = [(3, 5), (4, 4), (1, 7), (5, 3)]
SCALED = Scaled((4, 4))
ENCODINGS = {
    "sinusoidal": {"additive": partial(mmpos.SinusoidalEncoding, coordinates=SCALED)},
    "fourier": {"additive": partial(mmpos.FourierEncoding, coordinates=Centered())},
    "learned": {"additive": partial(mmpos.LearnedEncoding, coordinates=Scaled(offset=0.5))},
    "factorized": {"additive": partial(mmpos.FactorizedEncoding, coordinates=Scaled(offset=0.5))},
    "rope": {"rotary": partial(mmpos.RotaryEncoding, base=100)},
    "rope scaled": {"rotary": partial(mmpos.RotaryEncoding, base=100, coordinates=SCALED)},
    "rope centred": {"rotary": partial(mmpos.RotaryEncoding, coordinates=Centered(turns=True))},
    "rope longest": {"rotary": partial(mmpos.RotaryEncoding, coordinates=Centered(side="longest"))},
    "mixed": {"rotary": partial(mmpos.MixedRotaryEncoding, heads=3, coordinates=SCALED)},
    "alibi": {"bias": partial(mmpos.ALiBi, coordinates=SCALED)},
    "t5": {"bias": mmpos.T5Bias},
    "t5 scaled": {"bias": partial(mmpos.T5Bias, coordinates=SCALED)},
    "kerple": {"bias": partial(KerpleBias, coordinates=SCALED)},
    "clipped": {"bias": partial(ClippedRelativeBias, distance=2)},
    "log": {"bias": LogCPB},
    "shaw": {"bias": partial(ShawBias, head_dim=16, distance=2)},
    "xl": {"bias": partial(TransformerXLBias, head_dim=16, coordinates=SCALED)},
}


def model(**slots) -> Transformer:
    torch.manual_seed(0)
    made = Transformer((8, 8), dim=48, depth=2, heads=3, **slots).eval()
    for parameter in made.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return made


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("slots", ENCODINGS.values(), ids=list(ENCODINGS))
@torch.no_grad()
def test_each_image_is_what_it_is_alone(slots):
    made = model(**slots)
    samples = [torch.randn(1, h * w, 48) for h, w in GRIDS]
    alone = [made(x, grid(*size), extent=size) for x, size in zip(samples, GRIDS, strict=True)]

    rows = ragged(GRIDS)
    x = torch.nn.utils.rnn.pad_sequence([each[0] for each in samples], batch_first=True)
    out = made(x, rows.positions, extent=rows.extent, mask=rows.mask)
    for row, expected in zip(out, alone, strict=True):
        close(row[: expected.shape[1]], expected[0])

    row = ragged(GRIDS, pack=True)
    out = made(torch.cat(samples, 1), row.positions, extent=row.extent, segments=row.segments)
    close(out, torch.cat(alone, 1))


@pytest.mark.parametrize("slots", ENCODINGS.values(), ids=list(ENCODINGS))
@torch.no_grad()
def test_a_subset_of_patches_keeps_its_places(slots):
    made = model(**slots)
    size, kept = (5, 6), torch.stack([torch.randperm(30)[:9] for _ in range(2)])
    x = torch.randn(2, 9, 48)
    out = made(x, chosen(grid(*size), kept), extent=size)
    for row in range(2):
        close(out[row], made(x[row : row + 1], grid(*size)[kept[row]], extent=size)[0])
    assert not torch.allclose(out[0], made(x[:1], grid(3, 3), extent=size)[0], atol=1e-3)


@pytest.mark.parametrize(
    "reading", [Index(), OneBased(), SCALED, Centered(), Centered(side="shortest")]
)
def test_an_extent_for_each_token_is_that_of_its_image(reading):
    row = ragged(GRIDS, pack=True)
    read = reading(row.positions, axes=2, extent=row.extent)
    apart = [reading(grid(*size), axes=2, extent=size) for size in GRIDS]
    assert torch.equal(read[0], torch.cat(apart))


@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit():
    row = ragged(GRIDS, pack=True)
    with pytest.raises(ValueError, match="extent is for 53 tokens of a row, there are 52"):
        SCALED(row.positions[:, 1:], axes=2, extent=row.extent)
    bias = mmpos.ALiBi(2, 2, coordinates=SCALED)
    with pytest.raises(ValueError, match="as many queries as keys, got 52 and 53"):
        bias(row.positions[:, 1:], row.positions, row.extent)
    for grids in ([], [(2, 3), (2,)], [(2, 0)]):
        with pytest.raises(ValueError, match="sizes of 1 or more for the same axes"):
            ragged(grids)
