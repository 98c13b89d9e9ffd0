import pytest
import torch

from mmpos.models import PatchEmbedding


@pytest.mark.parametrize(
    ("patch", "grid"), [((4,), (9,)), ((2, 3), (4, 5)), ((3, 2), (5, 4)), ((2, 2, 3), (2, 3, 4))]
)
def test_each_patch_becomes_the_token_of_its_position(patch, grid):
    tokens = PatchEmbedding(6, patch, channels=2)
    x = torch.randn(3, 2, *(size * count for size, count in zip(patch, grid, strict=True)))
    values, positions, extent, mask = tokens(x)
    assert extent == grid and mask is None
    assert values.shape == (3, len(positions), 6)
    weight, bias = tokens.project.weight.flatten(1), tokens.project.bias
    for token, position in enumerate(positions.tolist()):
        window = [slice(i * size, (i + 1) * size) for i, size in zip(position, patch, strict=True)]
        cut = x[:, :, *window].flatten(1)
        expected = cut @ weight.T + bias
        torch.testing.assert_close(values[:, token], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("patch", "shape", "message"),
    [
        ((4, 4), (1, 3, 16, 18), r"\(16, 18\) cannot be cut into patches of \(4, 4\).*multiple"),
        ((4, 4), (1, 3, 2, 4), r"\(2, 4\) cannot be cut"),
        ((4, 4), (1, 3, 16), r"\(1, 3, 16\), expected.*2 sizes, as many as patch_size=\(4, 4\)"),
    ],
)
def test_inputs_that_cannot_be_cut(patch, shape, message):
    with pytest.raises(ValueError, match=message):
        PatchEmbedding(6, patch)(torch.zeros(shape))


@pytest.mark.parametrize("patch", [(), (0, 4), (1, 1, 1, 1)])
def test_patches_that_are_none(patch):
    with pytest.raises(ValueError, match="one to three sizes above 0, got"):
        PatchEmbedding(6, patch)


@pytest.mark.parametrize("fill", [torch.nan, torch.inf, 1e30])
def test_what_is_padding_is_nothing(fill: float) -> None:
    made, x = PatchEmbedding(8, (2, 3)), torch.randn(2, 3, 6, 9)
    mask = torch.zeros(2, 6, 9, dtype=torch.bool)
    mask[0, :4, :6], mask[1, :3, :7] = True, True
    tokens = made(x.where(mask[:, None], fill), mask)
    torch.testing.assert_close(tokens.values, made(x.where(mask[:, None], 0)).values)
    assert tokens.mask[0].view(3, 3).int().tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0]]
    alone = made(x[:1, :, :4, :6]).values[0]
    torch.testing.assert_close(tokens.values[0, tokens.mask[0]], alone)
    assert tokens.mask[1].view(3, 3).int().tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
