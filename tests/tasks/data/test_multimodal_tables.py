"""Tables of text, images and sounds: cells that are empty, and what is refused by its line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from tasks.data import Images, Multimodal
from tasks.data.features import Features
from tasks.data.tables import rows_of

RATE = 8000
FEATURES = Features(rate=RATE, bins=10)
Make = Callable[..., Multimodal]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with images a.png (red) to c.png and sounds of 0.2, 0.4 and 0.6 seconds."""
    draw = np.random.default_rng(0)
    for number, name in enumerate("abc"):
        noise = draw.integers(0, 255, (20 + number, 30, 3)).astype(np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{name}.png")
        sound = draw.uniform(-0.5, 0.5, round(0.2 * (number + 1) * RATE))
        soundfile.write(tmp_path / f"{name}.wav", sound, RATE, subtype="FLOAT")
    return tmp_path


@pytest.fixture
def table(root: Path) -> Make:
    """The data of tables of the lines given, the same for all splits."""

    def make(*lines: str, **options: Any) -> Multimodal:
        for split in ("train", "val", "test"):
            (root / f"{split}.csv").write_text("\n".join([*lines, ""]), encoding="utf-8")
        settings = {"features": FEATURES, "seconds": 1.0, "image_size": 8, "batch_size": 4}
        return Multimodal("table", root, **settings | options)

    return make


ALL = (
    "label,text,image,audio",
    "x,grün,a.png,a.wav",
    "y,,b.png,",
    "x,,,c.wav",
    'y," two, ""quoted""",,',
)


def only(loader: Any) -> Any:
    (one,) = loader
    return one


def expected_image(root: Path, name: str) -> torch.Tensor:
    """What the data module of images shows of a file, without augmentation."""
    folder = root / f"shown {name}"
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes((root / name).read_bytes())
    images = Images("folder", root, image_size=8, predict_folder=folder)
    return only(images.predict_dataloader())[0][0]


def test_rows_have_what_their_cells_say(table: Make, root: Path) -> None:
    data = table(*ALL)
    assert data.classes == {"class": ["x", "y"]} and data.channels == 3
    assert (data.bins, data.frames, data.vocabulary) == (10, 101, 256)
    for split in ("val", "test"):
        mixed, labels = only(data.loader(split))
        assert labels["class"].tolist() == [0, 1, 0, 1] and labels["class"].dtype == torch.int64
        texts = ["grün".encode(), b"", b"", b' two, "quoted"']
        for values, mask, text in zip(mixed.text, mixed.text_mask, texts, strict=True):
            assert bytes(values[mask].tolist()) == text and not values[~mask].any()
        assert mixed.image.shape == (4, 3, 8, 8) and mixed.image_mask.tolist() == [1, 1, 0, 0]
        for place, name in ((0, "a.png"), (1, "b.png")):
            assert torch.equal(mixed.image[place], expected_image(root, name))
        assert not mixed.image[2:].any()
        for place, name in ((0, "a.wav"), (2, "c.wav")):
            sound = torch.from_numpy(soundfile.read(root / name, dtype="float32")[0])
            frames = mixed.audio[place][:, mixed.audio_mask[place]]
            assert torch.equal(frames, FEATURES(sound))
        assert not mixed.audio_mask[[1, 3]].any() and not mixed.audio[[1, 3]].any()
        assert mixed.step == 0.01


def test_a_batch_without_a_modality_has_none_of_it(table: Make) -> None:
    data = table(*ALL, batch_size=1)
    rows = [mixed for mixed, _ in data.val_dataloader()]
    present = [[rows[i][2 * part] is not None for part in range(3)] for i in range(4)]
    assert present == [[True] * 3, [False, True, False], [False, False, True], [True, False, False]]
    assert all(mixed[2 * part + 1] is None for mixed in rows for part in range(3))
    text = table("label,text", "x,a", "y,b")
    mixed, _ = only(text.val_dataloader())
    assert mixed.image is mixed.audio is mixed.image_mask is mixed.audio_mask is None


def test_a_file_may_be_in_many_rows_and_training_rows_are_each_seen_once(table: Make) -> None:
    lines = [f"{'xy'[k % 2]},row {k},{'abc'[k % 3]}.png" for k in range(8)]
    data = table("label,text,image", *lines)
    loader = data.train_dataloader()
    seen = {
        bytes(row[row > 0].tolist()).decode(): int(label)
        for mixed, labels in loader
        for row, label in zip(mixed.text, labels["class"], strict=True)
    }
    assert seen == {f"row {k}": k % 2 for k in range(8)}
    assert data.samples("train")[9][0].text.tolist() == list(b"row 1")


def test_absent_tables_are_held_out_of_every_class(table: Make, root: Path) -> None:
    data = table("label,text", *[f"{'xy'[k % 2]},row {k}" for k in range(60)])
    (root / "val.csv").unlink()
    (root / "test.csv").unlink()
    parts = {split: data.samples(split) for split in ("train", "val", "test")}
    places = [entry.place for part in parts.values() for entry in part.entries]
    assert len(places) == len(set(places)) == 60
    for split, count in (("train", 24), ("val", 3), ("test", 3)):
        labels = [entry.label for entry in parts[split].entries]
        assert labels.count("x") == labels.count("y") == count
    again = table("label,text", *[f"{'xy'[k % 2]},row {k}" for k in range(60)], train_samples=10)
    assert len(again.samples("train")) == 10 and len(again.samples("val")) == 60


def test_blank_modalities_are_left_out_and_not_even_looked_for(table: Make, root: Path) -> None:
    (root / "b.png").unlink()
    data = table("label,text,image", "x,a,a.png", "y,b,b.png", blank=["image"])
    mixed, _ = only(data.val_dataloader())
    assert mixed.image is None and mixed.text.tolist() == [[97], [98]]
    message = r"line 3 of .*train.csv has no text, image or audio besides text, which --data.blank"
    with pytest.raises(ValueError, match=message):
        _ = table(*ALL[:2], "y,word,,", blank=["text"]).classes


def test_predicting_names_each_row(table: Make, root: Path) -> None:
    path = root / "more.csv"
    path.write_text("image,text,label\na.png,one,unheard of\n,two,\n")
    for source, channels in (("table", 3), ("embedded", 1)):
        if source == "table":
            data = table(*ALL, predict_table=path)
        else:
            data = Multimodal(predict_table=path)
        mixed, names = only(data.predict_dataloader())
        assert names == [f"line {k} of {path}" for k in (2, 3)]
        assert mixed.image.shape[1] == channels and mixed.image_mask.tolist() == [True, False]
        assert mixed.audio is None and mixed.text.tolist() == [list(b"one"), list(b"two")]


def test_images_are_normalised_by_imagenet_or_as_told(table: Make, root: Path) -> None:
    plain = only(table(*ALL, mean=(0, 0, 0), std=(1, 1, 1)).val_dataloader())[0].image[:2]
    default = only(table(*ALL).val_dataloader())[0].image[:2]
    mean, std = (
        torch.tensor(v)[:, None, None] for v in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    )
    assert 0 <= plain.min() < plain.max() <= 1
    torch.testing.assert_close(default, (plain - mean) / std)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ("label,image", "x,a.png", "y,z.png"),
            r"line 3 of .*train.csv: there is no .*z.png \(1 of",
        ),
        (("label,text", "x,a", ",b"), "line 3 of .*train.csv has no label: give one, or remove"),
        (
            ("label,text,image", "x,a,", "y, ,"),
            "line 3 of .*train.csv has no text, image or audio: ",
        ),
        (("label,imge", "x,a.png"), "train.csv has a column 'imge'; did you mean image?"),
        (("Label,text", "x,a"), "has a column 'Label'; did you mean label?"),
        (
            ("label,text,id", "x,a,1"),
            "a column 'id'; expected label and any of text, image, audio: r",
        ),
        (("text", "a"), "has the columns text; expected label and any of text, image, audio"),
        (("label", "x"), "has the columns label; expected label and any of text, image, audio"),
        (("label,text,text", "x,a,b"), "two columns of one name"),
        (("label,text", "x,a"), r"the table train of .* has one label \(x\); expected two or more"),
        (
            ("label,text", "x,a,b"),
            "line 2 of .* has other than 2 values; put values that have commas",
        ),
        (
            ("label,text", "x,a", f"y,{'é' * 129}"),
            "line 3 of .*: text has 258 bytes, and the .* 256: ",
        ),
    ],
)
def test_bad_tables_are_one_line(table: Make, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message) as error:
        table(*lines).setup()
    assert "\n" not in str(error.value)


def test_labels_that_train_does_not_have_and_classes_that_are_too_small(
    table: Make, root: Path
) -> None:
    data = table("label,text", "cat,a", "dog,b")
    (root / "val.csv").write_text("label,text\ncat,a\ndgo,b\n")
    message = (
        r"line 3 of .*val.csv: no row of the table train has the label dgo; did you mean dog\?"
    )
    with pytest.raises(ValueError, match=message):
        data.setup()
    data = table("label,text", "x,a", "y,b")
    (root / "val.csv").unlink()
    with pytest.raises(
        ValueError, match="train has 1 rows of x, expected 2 or more, to hold out val"
    ):
        data.setup()
    (root / "train.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"no train.csv in"):
        Multimodal("table", root).setup()
    with pytest.raises(
        FileNotFoundError, match=r"does not exist; give --data.root one with train.csv"
    ):
        Multimodal("table", root / "no").setup()
    with pytest.raises(FileNotFoundError, match=r"no no.csv in"):
        Multimodal(predict_table=root / "no.csv").setup("predict")


def test_a_longer_sound_is_refused_before_anything_is_trained(table: Make) -> None:
    message = (
        r"line 4 of .*train.csv: .*c.wav is 0.60 seconds long, and the model is made for 0.5: "
    )
    with pytest.raises(ValueError, match=message):
        table(*ALL, seconds=0.5).setup()
    table(*ALL, seconds=0.6).setup()


def test_what_cannot_be_read_is_told_with_its_line(table: Make, root: Path) -> None:
    for workers in (0, 1):
        (root / "a.png").write_bytes(b"no image")
        with pytest.raises(
            ValueError, match=r"line 2 of .*: cannot read the image .*a.png \("
        ) as told:
            list(table(*ALL, num_workers=workers).val_dataloader())
        last = str(told.value).splitlines()[-1]
        assert "repair it, or remove the line" in last and "skip_broken" not in last
    (root / "c.wav").write_bytes(b"")
    with pytest.raises(ValueError, match=r"line 4 of .*: cannot read the sound .*c.wav \(it has 0"):
        table(*ALL).setup()
    soundfile.write(root / "c.wav", np.zeros(100), RATE)
    short = Features(rate=RATE, bins=10, center=False)
    with pytest.raises(
        ValueError, match=r"line 4 of .*c.wav \(its 100 samples are less than a fra"
    ):
        list(table("label,audio", "x,b.wav", "y,b.wav", "y,c.wav", features=short).val_dataloader())


def test_rows_of_several_lines_are_named_by_their_first_and_quotes_must_close(
    tmp_path: Path,
) -> None:
    path = tmp_path / "train.csv"
    path.write_text('text,label\n"a\nb",x\nc,y\n')
    assert [place.split(" of ")[0] for place, _ in rows_of(path, ("label",))] == [
        "line 2",
        "line 4",
    ]
    path.write_text('text,label\n"a,x\nc,y\n')
    with pytest.raises(ValueError, match="is no CSV of UTF-8"):
        rows_of(path, ("label",))
    with pytest.raises(IsADirectoryError, match="is a folder, expected a table"):
        rows_of(tmp_path, ("label",))


def test_what_is_held_out_and_chosen_follows_from_the_split_seed_alone(
    table: Make, root: Path
) -> None:
    lines = [f"{'y' if k % 5 else 'x'},row {k}" for k in range(40)]

    def chosen(**seeds: int) -> dict[str, list[str]]:
        data = table("label,text", *lines, train_samples=8, **seeds)
        for split in ("val", "test"):
            (root / f"{split}.csv").unlink()
        entries = {split: data.samples(split).entries for split in ("train", "val", "test")}
        assert sorted(e.label for e in entries["train"]) == list("xxxxyyyy")
        return {split: [e.place for e in own] for split, own in entries.items()}

    own, other = chosen(), chosen(split_seed=1)
    assert own == chosen(seed=1)
    assert all(own[split] != other[split] for split in own)


def test_classes_are_sorted_whatever_the_order_of_rows(table: Make) -> None:
    data = table("label,text", "y,a", "x,b", "y,c")
    assert data.classes == {"class": ["x", "y"]}
    assert only(data.val_dataloader())[1]["class"].tolist() == [1, 0, 1]


def test_a_blank_modality_is_not_predicted_from_either(table: Make, root: Path) -> None:
    path = root / "more.csv"
    path.write_text("image,text\nnowhere.png,one\na.png,two\n")
    data = table(*ALL, predict_table=path, blank=["image"])
    mixed, _ = only(data.predict_dataloader())
    assert mixed.image is None and mixed.text.tolist() == [list(b"one"), list(b"two")]


def test_how_many_train_does_not_stand_in_the_way_of_a_test(table: Make) -> None:
    data = table("label,text", "x,a", "y,b", train_samples=9)
    data.setup("test")
    with pytest.raises(ValueError, match=r"train_samples is 9; expected 2 \(one a class\) to 2"):
        data.setup("fit")


def test_a_sound_may_be_a_sample_longer_and_no_more_whatever_its_header_says(
    table: Make, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soundfile.write(root / "d.wav", np.zeros(4001), RATE)
    soundfile.write(root / "e.wav", np.zeros(4080), RATE)
    for name in ("d", "e"):
        data = table("label,audio", "x,a.wav", f"y,{name}.wav", seconds=0.5)
        if name == "d":
            assert only(data.val_dataloader())[0].audio.shape[-1] == data.frames
            monkeypatch.setattr("tasks.data.mixed_tables.seconds_of", lambda _: 0.1)
        else:
            with pytest.raises(ValueError, match=r"line 3 of .*e.wav is 0.51 seconds long"):
                only(data.val_dataloader())
