"""Batches of several modalities: what is real in them, and what a job sees when one is blank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from tasks.data import Multimodal
from tasks.data.features import Features
from tasks.data.mixed import MODALITIES, Mixed, Parts, batch
from tasks.data.pages import Pages
from tasks.data.spoken import SpokenDigits

IMAGE = torch.rand(1, 4, 6)
FRAMES = torch.rand(5, 3)


def row(text: str | None = None, image: Any = None, audio: Any = None) -> Any:
    return Parts(None if text is None else torch.tensor(list(text.encode())), image, audio), {
        "a": 1
    }


def test_rows_that_lack_something_have_zeros_and_a_false_mask() -> None:
    items = [row("é", IMAGE), row("abc", None, FRAMES), row(None, IMAGE + 1, FRAMES[:, :1])]
    mixed, labels = batch(items, 0.25)
    assert mixed.step == 0.25 and labels["a"].tolist() == [1, 1, 1]
    assert mixed.text is not None and mixed.text.dtype == torch.int64
    assert mixed.text.tolist() == [[0xC3, 0xA9, 0], [97, 98, 99], [0, 0, 0]]
    assert mixed.text_mask is not None and mixed.text_mask.dtype == torch.bool
    assert mixed.text_mask.tolist() == [[True, True, False], [True] * 3, [False] * 3]
    assert mixed.image is not None and mixed.image_mask is not None
    assert torch.equal(mixed.image, torch.stack([IMAGE, torch.zeros_like(IMAGE), IMAGE + 1]))
    assert mixed.image_mask.tolist() == [True, False, True]
    assert mixed.audio is not None and mixed.audio_mask is not None
    assert mixed.audio.shape == (3, 5, 3) and mixed.audio.is_contiguous()
    assert mixed.audio[0].abs().sum() == 0 and torch.equal(mixed.audio[1], FRAMES)
    assert torch.equal(mixed.audio[2, :, :1], FRAMES[:, :1]) and not mixed.audio[2, :, 1:].any()
    assert mixed.audio_mask.tolist() == [[False] * 3, [True] * 3, [True, False, False]]


def test_what_no_row_has_is_none_and_what_all_have_needs_no_mask() -> None:
    mixed, _ = batch([row("ab"), row("cd")], 1.0)
    assert mixed.text is not None and mixed[1:] == (None,) * 5 + (1.0,)
    mixed, _ = batch([row(None, IMAGE, FRAMES), row(None, IMAGE, FRAMES)], 1.0)
    assert (mixed.text, mixed.text_mask, mixed.image_mask, mixed.audio_mask) == (None,) * 4
    assert mixed.image is not None and mixed.audio is not None
    mixed, _ = batch([row(None, IMAGE), row("a")], 1.0)
    assert mixed.text_mask is not None and mixed.text_mask.tolist() == [[False], [True]]


def of(mixed: Mixed, name: str) -> tuple[Any, Any]:
    return getattr(mixed, name), getattr(mixed, f"{name}_mask")


def first(loader: DataLoader) -> tuple[Mixed, Any]:
    return next(iter(loader))


def test_embedded_rows_are_pages() -> None:
    data = Multimodal(eval_samples=6, batch_size=4, mean=(0.25,), std=(0.5,))
    assert data.classes == Pages.classes and data.vocabulary == 256 and data.channels == 1
    assert data.image_size == (32, 32) and (data.bins, data.frames) == (40, 201)
    (mixed, labels), (rest, _) = list(data.val_dataloader())
    assert len(rest.image) == 2
    pages = Pages("val", 6, mean=0.25, std=0.5)
    for place in range(4):
        asked, answer = pages[place]
        for name, part in (
            ("text", asked.text),
            ("image", asked.image),
            ("audio", data.features(asked.sound)),
        ):
            values, mask = of(mixed, name)
            own = values[place]
            if name != "image" and mask is not None:
                assert mask[place].tolist() == [i < part.shape[-1] for i in range(own.shape[-1])]
                assert not own[..., ~mask[place]].any()
                own = own[..., mask[place]]
            assert torch.equal(own, part)
        assert labels["what"][place] == answer["what"]
    assert mixed.image_mask is None and mixed.step == 0.01


@pytest.mark.parametrize("blank", [["text"], ["image"], ["audio"], ["text", "audio"]])
def test_a_blank_modality_is_in_no_row_and_the_others_are_as_they_were(blank: list[str]) -> None:
    whole, data = Multimodal(batch_size=8), Multimodal(batch_size=8, blank=blank)
    for split in ("train", "val", "test"):
        (mixed, labels), (less, same) = first(whole.loader(split)), first(data.loader(split))
        assert torch.equal(labels["what"], same["what"])
        for name in MODALITIES:
            if name in blank:
                assert of(less, name) == (None, None)
            else:
                (values, mask), (own, own_mask) = of(mixed, name), of(less, name)
                assert torch.equal(values, own)
                assert (mask is None) == (own_mask is None)


def test_the_pages_are_normalised_as_measured() -> None:
    data = Multimodal(train_samples=1000).samples("train")
    values = torch.stack([data[index][0].image for index in range(1000)])
    assert abs(float(values.mean())) < 0.01 and abs(float(values.std()) - 1) < 0.01


def test_training_pages_are_new_in_each_epoch_and_others_never() -> None:
    data = Multimodal(train_samples=8, eval_samples=4, batch_size=4, seed=7)
    loader = data.train_dataloader()
    epochs = []
    for epoch in (0, 1):
        assert not isinstance(loader.sampler, RandomSampler)
        loader.sampler.set_epoch(epoch)  # pyright: ignore
        epochs.append(torch.cat([mixed.image for mixed, _ in loader]))
    pages = Pages("train", 8, seed=7, mean=data.mean[0], std=data.std[0])
    for epoch, seen in enumerate(epochs):
        own = torch.stack([pages[8 * epoch + index][0].image for index in range(8)])
        assert torch.equal(
            own.flatten(1).sum(1).sort().values, seen.flatten(1).sum(1).sort().values
        )
    other = Multimodal(train_samples=8, eval_samples=4, batch_size=4, seed=8)
    for split in ("val", "test"):
        (mixed, _), (same, _) = first(data.loader(split)), first(other.loader(split))
        assert torch.equal(of(mixed, "image")[0], of(same, "image")[0])


def test_processes_see_the_rows_of_one(as_rank: Any) -> None:
    whole, _ = first(Multimodal(train_samples=8, batch_size=8).train_dataloader())
    for rank in (0, 1):
        data = as_rank(Multimodal(train_samples=8, batch_size=4), rank, 2)
        own, _ = first(data.train_dataloader())
        assert torch.equal(of(own, "image")[0], of(whole, "image")[0][rank::2])


def test_workers_and_sounds_at_other_rates() -> None:
    features = Features(rate=16000, bins=20, hop=0.02, window=0.04)
    made = [
        Multimodal(eval_samples=4, batch_size=4, features=features, num_workers=workers)
        for workers in (0, 1)
    ]
    (one, _), (other, _) = (first(data.val_dataloader()) for data in made)
    assert one.step == other.step == 0.02 and made[0].bins == 20 and made[0].frames == 101
    assert one.audio is not None and torch.equal(one.audio, of(other, "audio")[0])
    sounds = [Pages("val", 4)[index][0].sound for index in range(4)]
    assert one.audio.shape == (4, 20, 1 + max(len(sound) for sound in sounds) // 160)


def test_what_is_recorded_is_plain_data(tmp_path: Path) -> None:
    data = Multimodal(
        blank=["text"], image_size=(48, 60), predict_table=tmp_path / "a.csv", features=Features()
    )
    torch.save(dict(data.hparams), tmp_path / "hparams.pt")
    read = torch.load(tmp_path / "hparams.pt", weights_only=True)
    assert read["features"]["rate"] == 16000 and read["blank"] == ["text"]
    assert read["predict_table"] == str(tmp_path / "a.csv") and read["image_size"] == (48, 60)
    again = Multimodal(**read)
    assert again.features == data.features and again.image_size == (48, 60)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "tabel"}, "source is 'tabel'; expected one of"),
        ({"root": "x"}, "root x is given, but the embedded pages need none; .*--data.source table"),
        ({"source": "table"}, "source table needs the folder of its data: --data.root PATH"),
        ({"blank": ["audoi"]}, "blank has no modality 'audoi'; did you mean audio?"),
        ({"blank": ["x"]}, "no modality 'x'; did you mean text or image or audio?"),
        ({"blank": list(MODALITIES)}, "blank leaves out text, image and audio; expected one to"),
        ({"seconds": 1.0}, r"seconds is 1.0; expected 1.45 or more, what a spoken number takes"),
        ({"seconds": float("nan")}, "seconds is nan; expected a frame"),
        ({"context": 20}, "context is 20; expected 3[0-9] or more, the bytes of a question"),
        ({"context": 0}, "context is 0; expected at least 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"train_samples": 0}, "train_samples is 0"),
        ({"eval_samples": 0}, "eval_samples is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"mean": (0.5, 0.5, 0.5)}, "mean is .*expected 1 numbers, one a channel"),
        ({"std": (0.0,)}, "std is .*above 0"),
        ({"image_size": 1}, r"size is \(1, 1\); expected height and width, at least 2"),
        ({"image_size": (1, 2, 3)}, r"image_size is \(1, 2, 3\); expected one number, or"),
    ],
)
def test_bad_options_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Multimodal(**options)
    assert "\n" not in str(error.value)


def test_what_is_blank_sets_no_bound() -> None:
    Multimodal(blank=["audio"], seconds=0.5)
    Multimodal(blank=["text"], context=1)


def test_too_few_rows_and_nothing_to_predict() -> None:
    with pytest.raises(ValueError, match="8 train rows are too few for 1 processes with batches"):
        Multimodal(train_samples=8, batch_size=9).train_dataloader()
    with pytest.raises(
        ValueError, match=r"no rows to predict: give their table, --data.predict_ta"
    ):
        Multimodal().predict_dataloader()


def test_voices_of_the_splits_are_those_of_the_digits() -> None:
    for split in ("train", "val", "test"):
        pages = Multimodal(eval_samples=60).samples(split).pages
        voices = {pages.page(index).said.voice for index in range(60)}
        assert voices == set(SpokenDigits(split, 1).names)


def test_embedded_rows_follow_the_split_seed() -> None:
    for split in ("train", "val"):  # what tests is its own set
        own = Multimodal(split_seed=5, mean=(0.0,), std=(1.0,)).samples(split)[0][0].image
        for seed, same in ((5, True), (0, False)):
            pages = Pages(split, 9, split_seed=seed)  # type: ignore[arg-type]
            assert torch.equal(own, pages[0][0].image) == same


def test_how_many_train_is_of_training_alone() -> None:
    data = Multimodal(train_samples=8, eval_samples=3)
    assert [len(data.samples(split)) for split in ("train", "val", "test")] == [8, 3, 3]
