import pytest
import torch

import mmpos
from mmpos.models import Classifier, PatchEmbedding, Transformer
from mmpos.models.classifier import Pool

QUESTIONS = {"what": 10, "where": 4}


def classifier(pool: Pool = "mean", **arguments) -> Classifier:
    transformer = Transformer(
        (4, 6), dim=24, depth=1, heads=3, rotary=mmpos.RotaryEncoding, **arguments
    )
    return Classifier(PatchEmbedding(24, (2, 2)), transformer, QUESTIONS, pool=pool).eval()


@pytest.mark.parametrize("pool", ["mean", "token"])
def test_every_question_has_a_head_on_the_pooled_tokens(pool):
    model = classifier(pool, class_token=True, registers=2)
    x = torch.randn(2, 3, 8, 12)
    values, positions, extent, mask = model.tokens(x)
    assert mask is None
    encoded = model.transformer(values, positions, extent=extent)
    pooled = encoded[:, 0] if pool == "token" else encoded[:, 3:].mean(1)
    answers = model(x)
    assert {name: tuple(answer.shape) for name, answer in answers.items()} == {
        "what": (2, 10),
        "where": (2, 4),
    }
    for name, answer in answers.items():
        head = model.heads[name]
        torch.testing.assert_close(answer, pooled @ head.weight.T + head.bias)


@pytest.mark.parametrize("size", [(8, 12), (4, 14), (12, 8)])
def test_any_grid_of_whole_patches(size):
    assert classifier()(torch.randn(2, 3, *size))["what"].shape == (2, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"questions": {}}, "at least one question"),
        ({"pool": "max"}, "pool must be one of"),
        (
            {"pool": "token"},
            "pool='token' reads a class token that sees all others: pass class_token=True",
        ),
    ],
)
def test_bad_arguments(unchecked, arguments, message):
    parts = {"tokens": PatchEmbedding(8, (2, 2)), "transformer": Transformer(2, dim=8, heads=2)}
    with pytest.raises(ValueError, match=message):
        Classifier(**parts, **{"questions": QUESTIONS, **arguments})
