"""What is padded has the answers that it has alone."""

import copy
from functools import partial

import pytest
import torch

import mmpos
from mmpos.models import Classifier, PatchEmbedding, Symbols, Transformer
from mmpos.models.classifier import Pool, _mean

CONTEXT, LENGTHS = 24, (5, 17, 1, 9)
ENCODINGS = {
    "none": {},
    "learned": {"additive": mmpos.LearnedEncoding},
    "sinusoidal": {"additive": mmpos.SinusoidalEncoding},
    "rope": {"rotary": mmpos.RotaryEncoding},
    "dynamic": {
        "rotary": partial(
            mmpos.RotaryEncoding, extension=mmpos.frequencies.DynamicNTK(original_length=4)
        )
    },
    "alibi": {"bias": mmpos.ALiBi},
    "shaw": {"bias": mmpos.ShawBias},
}


def classifier(pool: Pool = "mean", **options) -> Classifier:
    encoder = Transformer((CONTEXT,), size="nano", depth=2, **options)
    model = Classifier(Symbols(64, 11), encoder, {"kind": 3}, pool=pool).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def batch(longest: int, fill: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The same rows, padded by ``fill`` to any length."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.full((len(LENGTHS), longest), fill)
    for row, length in enumerate(LENGTHS):
        ids[row, :length] = torch.randint(11, (length,), generator=draw)
    return ids, torch.arange(longest) < torch.tensor(LENGTHS)[:, None]


@pytest.mark.parametrize("pool", ["mean", "token"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_answers_do_not_depend_on_padding(encoding: str, pool: Pool) -> None:
    model = classifier(pool, class_token=pool == "token", registers=1, **ENCODINGS[encoding])
    answers = model(*batch(17))["kind"]
    torch.testing.assert_close(model(*batch(CONTEXT, fill=7))["kind"], answers)
    for row, (ids, length) in enumerate(zip(batch(17)[0], LENGTHS, strict=True)):
        alone = model(ids[None, :length])["kind"][0]
        torch.testing.assert_close(answers[row], alone)
    assert (answers[0] - answers[1]).abs().max() > 1e-3


def test_the_mean_is_over_real_tokens() -> None:
    model = classifier(registers=2, rotary=mmpos.RotaryEncoding)
    ids, mask = batch(17)
    values, positions, extent, real = model.tokens(ids, mask)
    assert extent is None and real is mask and positions.squeeze(-1).tolist() == list(range(17))
    encoded = model.transformer(values, positions, mask=mask)[:, 2:]
    head = model.heads["kind"]
    for row, length in enumerate(LENGTHS):
        pooled = sum(encoded[row, place] for place in range(length)) / length
        torch.testing.assert_close(model(ids, mask)["kind"][row], head(pooled))
    whole = torch.ones_like(mask)
    torch.testing.assert_close(model(ids, whole)["kind"], model(ids)["kind"])


def test_half_precision_counts_all_tokens() -> None:
    """bfloat16 has no 257, and the mean is rounded once."""
    x = torch.randn(1, 601, 64).bfloat16()
    mask = torch.arange(601) < 257
    wanted = x[:, :257].double().mean(1).bfloat16()
    assert torch.equal(_mean(x, mask[None]), wanted)


@pytest.mark.parametrize("pool", ["mean", "token"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_row_of_padding_alone_is_finite_with_its_gradient(encoding: str, pool: Pool) -> None:
    model = classifier(pool, class_token=pool == "token", **ENCODINGS[encoding])
    ids, mask = batch(17)
    others = model(ids, mask)["kind"].detach()
    mask[1] = False
    answers = model(ids, mask)["kind"]
    assert answers.isfinite().all()
    torch.testing.assert_close(answers[[0, 2, 3]], others[[0, 2, 3]])
    if pool == "mean":
        torch.testing.assert_close(answers[1], model.heads["kind"].bias)
    answers.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_padding_has_no_gradient() -> None:
    """The embedding of a symbol that stands in padding alone learns nothing."""
    model = classifier(rotary=mmpos.RotaryEncoding)
    ids = torch.tensor([[1, 2, 9, 9], [3, 4, 5, 6]])
    mask = ids != 9
    model(ids, mask)["kind"].sum().backward()
    gradient = model.tokens.embedding.weight.grad
    assert gradient is not None
    assert gradient[9].eq(0).all() and gradient[[1, 2, 3, 4, 5, 6]].abs().amax(-1).gt(0).all()


@pytest.mark.parametrize(
    ("patch", "sizes"), [((4,), (12,)), ((2, 3), (4, 9)), ((1, 2, 2), (2, 4, 4))]
)
def test_a_patch_is_real_where_any_of_it_is(patch, sizes) -> None:
    tokens = PatchEmbedding(6, patch, channels=1)
    draw = torch.Generator().manual_seed(0)
    mask = torch.rand(3, *sizes, generator=draw) < 0.15
    made = tokens(torch.zeros(3, 1, *sizes), mask)
    assert made.mask.shape == (3, len(made.positions)) and 0 < made.mask.float().mean() < 1
    for token, position in enumerate(made.positions.tolist()):
        window = [slice(i * size, (i + 1) * size) for i, size in zip(position, patch, strict=True)]
        assert torch.equal(made.mask[:, token], mask[:, *window].flatten(1).any(1))


def test_padded_frames_do_not_change_the_answer() -> None:
    """Spectrograms, padded in time by whole patches."""
    encoder = Transformer((2, 8), size="nano", depth=1, rotary=mmpos.RotaryEncoding)
    model = Classifier(PatchEmbedding(64, (4, 4), channels=1), encoder, {"kind": 3}).double()
    clip = torch.randn(2, 1, 8, 20).double()
    longer = torch.nn.functional.pad(clip, (0, 12), value=5.0)
    mask = (torch.arange(32) < 20).expand(2, 8, 32)
    torch.testing.assert_close(model(longer, mask)["kind"], model(clip)["kind"])


def test_what_does_not_fit(unchecked) -> None:
    with pytest.raises(ValueError, match=r"the mask of an input \(1, 3, 4, 4\) is \(1, 4, 4\)"):
        PatchEmbedding(6, (2, 2))(torch.zeros(1, 3, 4, 4), torch.ones(1, 4, dtype=torch.bool))
    for wrong in (-1, 11):
        with pytest.raises(ValueError, match=rf"a symbol {wrong}, the model has 11, from 0 on"):
            Symbols(8, 11)(torch.tensor([[0, wrong]]))
    with pytest.raises(ValueError, match="vocabulary is 1 or more, got 0"):
        Symbols(8, 0)


def test_symbols_by_their_rows() -> None:
    symbols = Symbols(8, 11)
    ids = torch.randint(11, (2, 5))
    made = copy.deepcopy(symbols)(ids)
    assert made.mask is None and torch.equal(made.values, symbols.embedding.weight[ids])
