"""``mmpos export``: the model of a checkpoint as a file that others read."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from safetensors.torch import save
from torch import Tensor, nn

from mmpos.interop.timm import Backbone, describe, replace
from mmpos.interop.timm.backbone import blank
from mmpos.interop.timm.places import NAME, Places
from mmpos.models import BackboneClassifier
from tasks.checkpoints import architecture
from tasks.configs import CommandError
from tasks.image import ImageClassification
from tasks.shards import consolidated, is_sharded

KINDS = {".safetensors": "safetensors", ".pth": "torch", ".pt": "torch", ".onnx": "onnx"}


def export(checkpoint: str | Path, output: str | Path) -> list[str]:
    """Write the model of an image checkpoint, in the form that the suffix of ``output`` names.

    ``.safetensors``, ``.pth`` and ``.pt`` hold a state dict: a backbone's as `timm.create_model`
    loads it, with the head if there is one question; another model's as its own. ``.onnx`` is the
    whole model for one image size and any batch; its outputs are the logits of each question.

    Returns: what was written, and how it is loaded, in lines.
    Raises: CommandError for another suffix, a file that is no checkpoint of an image task, or
    packages that are missing.
    """
    target = Path(output)
    if target.suffix not in KINDS:
        raise CommandError(
            f"the suffix of --output names the form, one of {', '.join(KINDS)}: got {target}", 2
        )
    if not target.absolute().parent.is_dir():
        raise CommandError(f"there is no folder {target.absolute().parent} to write to")
    task = _loaded(Path(checkpoint))
    if target.suffix == ".onnx":
        return _onnx(task, target)
    state, lines = _state(task)
    state = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    if target.suffix == ".safetensors":
        target.write_bytes(save(state, _about(task)))
    else:
        torch.save(state, target)
    return [f"weights: {target}, {len(state)} tensors", *lines]


def _loaded(path: Path) -> ImageClassification:
    if not path.is_file() and not is_sharded(path):
        raise CommandError(f"there is no checkpoint at {path}")
    kind = yaml.safe_load(architecture(str(path)) or "{}").get("model", {}).get("class_path")
    if kind and kind.startswith("tasks.") and kind != "tasks.ImageClassification":
        raise CommandError(f"{path} is of {kind}: export is for tasks.ImageClassification")
    try:
        source: Path | BytesIO = path
        if path.is_dir():
            source = BytesIO()
            torch.save(consolidated(path), source)
            source.seek(0)
        with blank():
            task = ImageClassification.load_from_checkpoint(source, map_location="cpu")
    except Exception as error:  # of a file of something else, Lightning raises anything
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CommandError(f"{path} is no checkpoint of an image task: {first}") from error
    return task.eval()


def _size(task: ImageClassification) -> list[int]:
    return [int(side) for side in task.hparams["image_size"]]


def _about(task: ImageClassification) -> dict[str, str]:
    """The metadata of a safetensors file."""
    about: dict[str, Any] = {"image_size": _size(task), "classes": task.classes}
    if isinstance(task.network, BackboneClassifier):
        about["architecture"] = describe(_backbone(task.network).model).model
    return {name: v if isinstance(v, str) else json.dumps(v) for name, v in about.items()}


def _backbone(network: BackboneClassifier) -> Backbone:
    if not isinstance(network.backbone, Backbone):
        name = type(network.backbone).__name__
        raise CommandError(f"the backbone {name} is none of timm's: export to .onnx")
    return network.backbone


def _state(task: ImageClassification) -> tuple[Mapping[str, Tensor], list[str]]:
    """A plain state dict, and how it is loaded."""
    network = task.network
    if not isinstance(network, BackboneClassifier):
        return network.state_dict(), ["load: mmpos fit --model.weights, or load_state_dict"]
    backbone = _backbone(network)
    model: Any = backbone.model
    known = {**backbone.arguments, **(getattr(model, "_model_args", None) or {})}
    known = {key: value for key, value in known.items() if key not in ("num_classes", "pretrained")}
    name, state = describe(model).model, dict(model.state_dict())
    heads = list(network.heads.values())
    lines: list[str] = []
    if len(heads) == 1:
        (head,) = heads
        assert isinstance(head, nn.Linear)
        where = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or "head"
        whole = {**known, "num_classes": head.out_features}
        if isinstance(where, str):
            named = {f"{where}.{key}": value for key, value in head.state_dict().items()}
            if _is_right(task, name, whole, state | named, logits=True):
                return state | named, [_call(name, whole, model)]
        lines.append(f"head left out: that of timm's {name} is made otherwise")
    else:
        lines.append(f"heads of {len(heads)} questions left out: timm has one")
    known["num_classes"] = 0
    if not _is_right(task, name, known, state, logits=False):
        raise CommandError(
            f"timm makes no {name} from {_named(known)} that gives what this one does: export to "
            ".onnx"
        )
    return state, [*lines, _call(name, known, model)]


def _is_right(
    task: ImageClassification, name: str, arguments: dict, state: dict, *, logits: bool
) -> bool:
    """Whether timm's model with these weights gives what the task's does."""
    network = task.network
    assert isinstance(network, BackboneClassifier)
    model: Any = _backbone(network).model
    size = _size(task)
    images = torch.randn(2, task.hparams["channels"], *size)
    try:
        twin: Any = timm.create_model(name, **arguments).eval()
        if hasattr(model, NAME):
            held = copy.deepcopy(getattr(model, NAME))
            replace(twin, **{place: _again(held, place) for place in held.taken})
        twin.load_state_dict(state)
        with torch.no_grad():
            (expected,) = network(images).values() if logits else (network.backbone(images),)
            got = twin(images)
    except (RuntimeError, TypeError, ValueError, AssertionError):
        return False
    return isinstance(got, Tensor) and torch.allclose(got, expected, rtol=1e-4, atol=1e-5)


def _again(held: Places, place: str) -> Any:
    """What fills a place alike: an encoding, or one for each layer."""
    own = getattr(held, place)
    if not isinstance(own, nn.ModuleList):
        return own
    layers = getattr(held, f"{place}_of")
    return [nn.Identity() if index is None else own[index] for index in layers]


def _written(held: Places, place: str) -> str:
    """The code that fills a place alike."""
    again = _again(held, place)
    code = [
        "None"
        if each is None
        else "torch.nn.Identity"
        if isinstance(each, nn.Identity)
        else f"mmpos.build({each.spec()})"
        for each in (again if isinstance(again, list) else [again])
    ]
    return f"[{', '.join(code)}]" if isinstance(again, list) else code[0]


def _named(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def _call(name: str, arguments: Mapping[str, Any], model: nn.Module) -> str:
    """How a user makes the model that the weights are for."""
    steps = [f"model = timm.create_model({name!r}, {_named(arguments)})"]
    held: Places | None = getattr(model, NAME, None)
    if held is not None:
        filled = ", ".join(f"{place}={_written(held, place)}" for place in held.taken)
        steps.append(f"mmpos.interop.timm.replace(model, {filled})")
    return f"load: {'; '.join([*steps, 'model.load_state_dict(…)'])}"


class _Logits(nn.Module):
    """The logits of each question in turn: what a graph gives has an order, not names."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.network(images).values())


def _onnx(task: ImageClassification, target: Path) -> list[str]:
    size = _size(task)
    images = torch.zeros(2, task.hparams["channels"], *size)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                _Logits(task.network).eval(),
                (images,),
                dynamo=True,
                verbose=False,
                input_names=["images"],
                output_names=list(task.classes),
                dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            )
    except (ImportError, torch.onnx.OnnxExporterError) as error:
        if "onnx" in str(error) and isinstance(error.__cause__ or error, ImportError):
            raise CommandError(
                "to export to .onnx install onnx and onnxscript (pip install 'mmpos[onnx]')"
            ) from error
        raise
    assert program is not None
    program.save(target)
    shape = f"[batch, {images.shape[1]}, {size[0]}, {size[1]}]"
    return [f"onnx: {target}, images {shape} → logits of {', '.join(task.classes)}"]
