"""Weights of a network for images start one for clips, which answers a still clip alike."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mmpos
from mmpos.models import Classifier, PatchEmbedding, Transformer, TubeletEmbedding
from tasks.inflation import inflated
from tasks.weights import load_weights

SIZE, PATCH, DIM = (4, 6), (2, 2), 24
SLOTS: dict[str, dict] = {
    "none": {},
    "learned": {"additive": mmpos.LearnedEncoding},
    "factorised": {"additive": mmpos.FactorizedEncoding},
    "offsets": {"bias": mmpos.RelativePositionBias},
    "offsets of each layer": {"bias": mmpos.RelativePositionBias, "per_layer": ["bias"]},
    "both": {"additive": mmpos.LearnedEncoding, "bias": mmpos.RelativePositionBias},
    "buckets": {"bias": mmpos.T5Bias},
}
TOLD = {
    "none": [],
    "learned": ["transformer.additive.table"],
    "factorised": ["transformer.additive.table"],
    "offsets": ["transformer.bias.table"],
    "offsets of each layer": ["transformer.bias.0.table", "transformer.bias.1.table"],
    "both": ["transformer.additive.table", "transformer.bias.table"],
    "buckets": ["transformer.bias.table"],
}


def classifier(tokens: PatchEmbedding, grid, seed: int, slots: dict, **named) -> Classifier:
    torch.manual_seed(seed)
    pool = "token" if named.get("class_token") else "mean"
    encoder = Transformer(grid, dim=DIM, depth=2, heads=2, **slots, **named)
    network = Classifier(tokens, encoder, {"kind": 5}, pool=pool).eval()
    for parameter in network.parameters():  # tables that are seen, attention that looks
        nn.init.normal_(parameter, std=0.3)
    return network


def of_images(slots: dict, size=SIZE, **named) -> Classifier:
    grid = [side // patch for side, patch in zip(size, PATCH, strict=True)]
    return classifier(PatchEmbedding(DIM, PATCH), grid, 0, slots, **named)


def of_clips(slots: dict, frames: int, tubelet: int, size=SIZE, **named) -> Classifier:
    tokens = TubeletEmbedding(DIM, (tubelet, *PATCH))
    return classifier(tokens, tokens.grid(frames, *size), 1, slots, **named)


def picture(size=SIZE, rows: int = 2) -> Tensor:
    return torch.randn(rows, 3, *size, generator=torch.Generator().manual_seed(2))


def still(image: Tensor, frames: int) -> Tensor:
    return image.unsqueeze(2).expand(-1, -1, frames, -1, -1)


@pytest.fixture
def file(tmp_path: Path):
    def save(network: nn.Module) -> Path:
        torch.save(network.state_dict(), tmp_path / "weights.pt")
        return tmp_path / "weights.pt"

    return save


@pytest.mark.parametrize(("frames", "tubelet"), [(4, 1), (6, 2), (5, 2), (6, 3), (7, 3), (3, 3)])
@pytest.mark.parametrize("slots", SLOTS)
def test_a_still_clip_is_answered_as_its_image(slots: str, frames: int, tubelet: int, file) -> None:
    images, clips = of_images(SLOTS[slots]), of_clips(SLOTS[slots], frames, tubelet)
    said = load_weights(clips, file(images))
    names = ", ".join(["tokens.project.weight", *TOLD[slots]])
    assert f"resized: none; inflated: {names}; left out: none" in said
    x = picture()
    with torch.no_grad():
        wanted = images(x)["kind"]
        torch.testing.assert_close(clips(still(x, frames))["kind"], wanted, rtol=0, atol=1e-5)
    assert wanted.std() > 0.1 and all(weight.is_contiguous() for weight in clips.parameters())


@pytest.mark.parametrize("slots", SLOTS)
def test_a_class_token_weighs_the_same_against_one_tubelet_alone(slots: str, file) -> None:
    named = {"class_token": True, "registers": 2}
    own = dict(SLOTS[slots])
    if own.get("additive") is mmpos.LearnedEncoding:
        own["additive"] = partial(mmpos.LearnedEncoding, prefix_rows=3)
    if "bias" in own:
        own["bias"] = partial(mmpos.RelativePositionBias, prefix_rows=True)
    images, x = of_images(own, **named), picture()
    for frames, same in ((3, True), (6, False)):
        clips = of_clips(own, frames, 3, **named)
        load_weights(clips, file(images))
        with torch.no_grad():
            apart = (clips(still(x, frames))["kind"] - images(x)["kind"]).abs().max()
        assert (apart < 1e-5) == same


@pytest.mark.parametrize("slots", ["learned", "factorised", "offsets", "both"])
def test_another_size_of_image_is_resized_as_for_images(slots: str, file) -> None:
    path, size = file(of_images(SLOTS[slots])), (8, 10)
    images, clips = of_images(SLOTS[slots], size), of_clips(SLOTS[slots], 6, 2, size)
    load_weights(images, path)
    said = load_weights(clips, path)
    grids = {"learned": "3 × 2 × 3 → 3 × 4 × 5", "offsets": "5 × 3 × 5 → 5 × 7 × 9"}
    assert grids.get(slots, "2 → 4" if slots == "factorised" else grids["learned"]) in said
    x = picture(size)
    with torch.no_grad():
        wanted = images(x)["kind"]
        torch.testing.assert_close(clips(still(x, 6))["kind"], wanted, rtol=0, atol=1e-5)


def test_what_has_time_already_stays_as_it_is(file) -> None:
    slots = SLOTS["both"]
    clips, other = of_clips(slots, 6, 2), of_clips(slots, 6, 2)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    said = load_weights(other, file(clips))
    assert "inflated" not in said
    for name, value in clips.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    images = of_images(slots)
    assert "inflated" not in load_weights(images, file(of_images(slots)))


def test_the_state_that_was_read_is_left_as_it_is() -> None:
    state = of_images(SLOTS["factorised"]).state_dict()
    before = {name: value.clone() for name, value in state.items()}
    taken, told = inflated(of_clips(SLOTS["factorised"], 6, 2), state)
    assert told and taken.keys() == {*state, "transformer.additive.table.2"}
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], value) for name, value in before.items())
    for axis in (0, 1):
        own = taken[f"transformer.additive.table.{axis + 1}"]
        assert torch.equal(own, state[f"transformer.additive.table.{axis}"])
    assert not taken["transformer.additive.table.0"].any()


def test_parts_that_are_left_out_keep_their_start(file) -> None:
    clips = of_clips(SLOTS["both"], 6, 2)
    own = clips.transformer.additive.table.detach().clone()
    parts = ["heads", "transformer.additive"]
    said = load_weights(clips, file(of_images(SLOTS["both"])), parts)
    assert "inflated: tokens.project.weight, transformer.bias.table; left out: tr" in said
    assert torch.equal(clips.transformer.additive.table, own)


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        (
            {"additive": partial(mmpos.FactorizedEncoding, combine="concat")},
            r"transformer.additive.table.0 is 2 × 12 there and 3 × 8 here",
        ),
        (
            {"additive": partial(mmpos.FactorizedEncoding, combine="product")},
            r"transformer.additive.table.2 is missing there",
        ),
        ({"bias": mmpos.LogCPB}, r"transformer.bias.* is .* there and .* here"),
    ],
)
def test_what_cannot_be_inflated_is_refused(slots: dict, words: str, file) -> None:
    clips = of_clips(slots, 6, 2)
    before = {name: value.clone() for name, value in clips.state_dict().items()}
    with pytest.raises(ValueError, match=words) as caught:
        load_weights(clips, file(of_images(slots)))
    assert "\n" not in str(caught.value)
    assert all(torch.equal(clips.state_dict()[name], value) for name, value in before.items())


def test_a_patch_of_another_size_is_refused(file) -> None:
    tokens = TubeletEmbedding(DIM, (2, 4, 2))
    clips = classifier(tokens, tokens.grid(6, 4, 6), 1, {})
    with pytest.raises(ValueError, match=r"24 × 3 × 2 × 2 × 2 there and 24 × 3 × 2 × 4 × 2 here"):
        load_weights(clips, file(of_images({})))
