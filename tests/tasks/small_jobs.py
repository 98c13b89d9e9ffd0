"""Each task on a little of its data, with an encoding in each of the three places."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mmpos
from mmpos.models import FrameEmbedding, Transformer
from tasks import (
    AudioClassification,
    ImageClassification,
    LanguageModel,
    MultimodalClassification,
    TextClassification,
    VideoClassification,
)
from tasks.data import Algorithms, Audio, Images, LabelledText, Multimodal, Text, Video

NANO = partial(
    Transformer,
    size="nano",
    depth=1,
    additive=mmpos.SinusoidalEncoding,
    rotary=mmpos.RotaryEncoding,
    bias=mmpos.T5Bias,
)
SAMPLES = 160


def texts(folder: Path) -> Path:
    """Folders ``a`` and ``b`` of texts of other letters; written once."""
    draw = np.random.default_rng(0)
    for label, letters in (("a", "abcde "), ("b", "cdefg ")):
        for number in range(12):
            path = folder / label / f"{number}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_text("".join(draw.choice(list(letters), draw.integers(200, 900))))
    return folder


def job(name: str, batch_size: int, folder: Path, workers: int = 0, **options: Any) -> tuple:
    """A task and its data; ``options`` are the task's."""
    torch.manual_seed(0)
    drop_path = options.pop("drop_path", 0.0)
    nano = partial(NANO, drop_path=drop_path, depth=2 if drop_path else 1)  # the first drops none
    common = {"batch_size": batch_size, "num_workers": workers}
    few = {"train_samples": SAMPLES, **common}
    if name == "image":
        data = Images(image_size=(16, 24), patch_size=8, **few)
        return ImageClassification(
            data.classes, data.image_size, data.patch_size, 1, nano, **options
        ), data
    if name == "text":
        tokens = SAMPLES * 24
        data = Text("files", texts(folder), context=24, train_tokens=tokens, **common)
        causal = partial(nano, causal=True)
        return LanguageModel(data.vocabulary, data.context, causal, **options), data
    if name == "algorithm":
        data = Algorithms("addition", length=5, eval_samples=4, **few)
        causal = partial(nano, causal=True)
        return LanguageModel(data.vocabulary, data.context, causal, **options), data
    if name == "text_classification":
        data = LabelledText("files", texts(folder), context=48, snippets=True, **few)
        return TextClassification(
            data.classes, data.vocabulary, data.context, nano, **options
        ), data
    if name == "audio":
        data = Audio(eval_samples=9, **few)
        return AudioClassification(data.classes, data.bins, data.frames, nano, **options), data
    if name == "video":
        data = Video(frames=4, image_size=16, eval_samples=9, **few)
        return VideoClassification(
            data.classes,
            data.frames,
            data.image_size,
            data.channels,
            (2, 8, 8),
            data.step,
            nano,
            **options,
        ), data
    assert name == "multimodal"
    data = Multimodal(eval_samples=9, **few)
    return MultimodalClassification(
        data.classes,
        vocabulary=data.vocabulary,
        context=data.context,
        image_size=data.image_size,
        channels=data.channels,
        bins=data.bins,
        frames=data.frames,
        patch_size=(16, 16),
        transformer=nano,
        frames_to_tokens=partial(FrameEmbedding, strides=(2, 2)),
        **options,
    ), data


NAMES = ["image", "text", "algorithm", "text_classification", "audio", "video", "multimodal"]
Make = Callable[..., tuple]
