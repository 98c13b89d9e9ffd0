"""What a user is told who got something wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tasks.data import Images


def broken_image(folder: Path) -> Path:
    path = folder / "ant" / "03.png"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:5000])
    return path


def test_a_truncated_image_is_named(folder: Path, plain: Any) -> None:
    path = broken_image(folder)
    data = plain(folder)
    data.setup()
    with pytest.raises(ValueError, match=f"{path}.*skip_broken true") as error:
        for split in ("train", "val", "test"):
            list(getattr(data, f"{split}_dataloader")())
    assert "\n" not in str(error.value)


def test_truncated_images_are_left_out_when_asked_with_one_warning(
    folder: Path, plain: Any, files: Any
) -> None:
    path = broken_image(folder)
    (folder / "ant" / "04.png").write_bytes(b"no image at all")
    data = plain(folder, skip_broken=True)
    with pytest.warns(UserWarning) as warned:
        data.setup()
    told = " ".join(str(warning.message) for warning in warned)
    assert told.count(str(path)) == told.count(str(folder / "ant" / "04.png")) == 1
    kept = [file for split in ("train", "val", "test") for file in files(data, split)]
    assert len(kept) == len(set(kept)) == 58 and str(path) not in kept
    for split in ("train", "val", "test"):
        list(getattr(data, f"{split}_dataloader")())
    predict = plain(folder, skip_broken=True, predict_folder=folder)
    with pytest.warns(UserWarning, match="left out 2 images"):
        predict.setup("predict")
    assert sum(len(paths) for _, paths in predict.predict_dataloader()) == 58


def test_a_class_of_broken_images_is_not_left_out(
    tmp_path: Path, plain: Any, write_images: Any
) -> None:
    for split, count in (("train", 4), ("val", 1), ("test", 2)):
        for name in ("a", "b"):
            write_images(tmp_path / split / name, count)
    (tmp_path / "val" / "b" / "00.png").write_bytes(b"no image at all")
    (tmp_path / "train" / "b" / "00.png").write_bytes(b"no image at all")
    data = plain(tmp_path, skip_broken=True)
    with (
        pytest.warns(UserWarning, match="left out 1 images"),
        pytest.raises(ValueError, match="no image of class b in val can be read"),
    ):
        data.setup("fit")
    (tmp_path / "val" / "b" / "00.png").unlink()
    write_images(tmp_path / "val" / "b" / "more", 1)
    with pytest.warns(UserWarning, match="left out 1 images"):
        plain(tmp_path, skip_broken=True).setup("fit")


def raises(expected: str, make: Any, kind: type[Exception] = ValueError) -> None:
    with pytest.raises(kind, match=expected) as error:
        made = make()
        for stage in ("fit", "test"):
            made.setup(stage)
        made.train_dataloader()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"image_size": 30}, "image_size 30 .* patch_size 4; the nearest are 28 and 32"),
        ({"image_size": (32, 30)}, r"nearest are \(32, 28\) and 32"),
        ({"image_size": 3}, "the nearest are 4$"),
        ({"image_size": 0}, "positive"),
        ({"image_size": (32, 32, 32)}, "image_size is .*; expected one number, or height and wi"),
        ({"patch_size": (4,)}, "patch_size is .*; expected one number, or height and width"),
        ({"source": "foo"}, "source is 'foo'; expected one of .*'folder'"),
        ({"scene": "foo"}, "scene is 'foo'; expected one of .*'plain'"),
        ({"std": (0.0,)}, r"std is \(0.0,\); expected finite numbers, above 0"),
        ({"std": (float("nan"),)}, "std is .*; expected finite numbers, above 0"),
        ({"mean": (float("nan"),)}, "mean is .*; expected finite numbers$"),
        ({"source": "folder"}, "--data.root PATH"),
        ({"source": "CIFAR10"}, "--data.root PATH"),
        ({"root": "photos"}, "photos .* --data.source folder"),
        ({"download": True}, "embedded .* FashionMNIST, CIFAR10, CIFAR100"),
        ({"source": "CIFAR10", "root": ".", "scene": "placed"}, "CIFAR10; use --data.scene plain"),
        ({"augmentation": {"hflip": 0}}, "--data.scene plain"),
        ({"scene": "plain", "augmentation": {"autoaugment": "x"}}, "mean auto_augment"),
        ({"mean": (0.5, 0.5, 0.5)}, "expected 1 numbers"),
        ({"batch_size": 0}, "batch_size is 0; expected at least 1"),
        ({"seed": -1}, "seed is -1"),
        ({"train_samples": 9}, r"9; expected 10 \(one a class\) to 7200"),
        ({"train_samples": 7201}, "7201; expected"),
        ({"train_samples": 63}, "63 train images are too few .* batches of 64"),
    ],
)
def test_an_impossible_option_is_explained(options: dict[str, Any], expected: str) -> None:
    raises(expected, lambda: Images(**options))


def test_a_folder_that_cannot_be_used_is_explained(
    tmp_path: Path, plain: Any, write_images: Any
) -> None:
    root = tmp_path / "data"
    root.touch()
    raises(f"{root} is a file, expected a folder", lambda: plain(root), NotADirectoryError)
    with pytest.raises(NotADirectoryError, match=f"{root} is a file, expected a folder"):
        plain(tmp_path, predict_folder=root).setup("predict")
    root.unlink()
    raises(f"{root} does not exist.*--data.root", lambda: plain(root), FileNotFoundError)
    write_images(root / "train" / "a", 4)
    raises("1 class folders .a.*at least two", lambda: plain(root))
    (root / "train" / "b").mkdir()
    raises(f"no images in {root}/train/b;", lambda: plain(root))
    write_images(root / "train" / "b" / "sub", 4)
    write_images(root / "val" / "a", 4)
    write_images(root / "val" / "c", 4)
    raises(r"val has other .*missing \['b'\], surplus \['c'\]", lambda: plain(root))
    write_images(root / "Validation" / "a", 1)
    raises("Validation and .*val are both for val: remove one", lambda: plain(root))
    flat = tmp_path / "flat"
    write_images(flat / "val" / "a", 2)
    raises("no train folder", lambda: plain(flat))
    few = tmp_path / "few"
    write_images(few / "a", 2)
    write_images(few / "b", 5)
    raises("2 images is too small to hold out val and test", lambda: plain(few))


@pytest.mark.parametrize("source", ["FashionMNIST", "CIFAR10", "CIFAR100"])
def test_a_set_that_is_not_there_is_offered_for_download(tmp_path: Path, source: Any) -> None:
    raises(
        f"{source} .*{tmp_path}.*--data.download true",
        lambda: Images(source=source, root=tmp_path),
        FileNotFoundError,
    )


def test_predict_without_images_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give their folder"):
        Images().setup("predict")
    for folder, expected in ((tmp_path / "none", "does not exist"), (tmp_path, "no images")):
        with pytest.raises(FileNotFoundError, match=expected):
            Images(predict_folder=folder).setup("predict")


def test_too_few_evaluation_images_for_the_processes_are_explained(
    folder: Path, plain: Any, as_rank: Any
) -> None:
    data = as_rank(plain(folder), 0, 7)
    data.setup("test")
    with pytest.raises(ValueError, match="6 test images are too few for 7 processes"):
        data.test_dataloader()
