"""What is heard in chunks is what one pass over all of it gives."""

import inspect
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import mmpos
from mmpos.frequencies import DynamicNTK, LongRoPE
from mmpos.models import Classifier, FrameEmbedding, PatchEmbedding, Transformer
from mmpos.models.stream import ClassifierStream, Stream

VARIANTS = runpy.run_path(str(Path(__file__).parents[1] / "variants.py"))
SLOTS = {
    mmpos.AdditiveEncoding: "additive",
    mmpos.RotaryEncoding: "rotary",
    mmpos.AttentionBias: "bias",
    mmpos.ContentBias: "bias",
}
GRID, DIM, BINS, LENGTH = (700,), 48, 6, 47
CHUNKS = [
    [LENGTH],
    [1] * LENGTH,
    [2, 1, 1, 3, 0, 20, 5, 1, 14],  # within a stride, on it, and none
    [30, 17],
]
STEMS = [
    {},
    {"kernels": (4, 3), "strides": (2, 2)},
    {"kernels": (5, 2, 3), "strides": (2, 3, 2)},
    {"kernels": (1,), "strides": (3,)},
    {"kernels": (2,), "strides": (5,)},
    {"kernels": (7, 7), "strides": (1, 1)},
]
DYNAMIC = DynamicNTK(factor=2.0, original_length=8)


def concrete(base: type) -> list[type]:
    found = [] if inspect.isabstract(base) else [base]
    found += [cls for derived in base.__subclasses__() for cls in concrete(derived)]
    return [cls for cls in found if cls.__module__.startswith("mmpos.")]


def encodings() -> list:
    """Every class of the package on one axis, as an option of a transformer."""
    cases = [pytest.param({}, id="none")]
    for base, slot in SLOTS.items():
        for cls in concrete(base):
            named = VARIANTS["ARGUMENTS"].get(cls.__name__, [{}])
            for each in named if 1 in VARIANTS["AXES"].get(cls.__name__, (1,)) else []:
                made = {key: value(1) if callable(value) else value for key, value in each.items()}
                name = "-".join([cls.__name__, *map(str, each)])
                cases.append(pytest.param({slot: partial(cls, **made)}, id=name))
    return cases


def parts(stem=None, **options) -> tuple[FrameEmbedding, Transformer]:
    options = {"dim": DIM, "depth": 2, "heads": 3, "causal": True, **options}
    made = Transformer(GRID, **options).eval()
    for parameter in made.parameters():  # attention that looks
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return FrameEmbedding(DIM, BINS, causal=True, **(stem or {})), made


def frames(length: int = LENGTH, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, BINS, length, generator=torch.Generator().manual_seed(length))


def offline(stem, transformer, x, step=None, **named) -> torch.Tensor:
    values, positions, *_ = stem(x, step=step)
    return transformer(values, positions, **named)


def close(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("step", "window"), [(None, None), (0.25, 5), (3, 5)])
@pytest.mark.parametrize("slots", encodings())
def test_every_encoding_in_chunks_is_as_in_one_pass(slots, step, window) -> None:
    stem, transformer = parts(**slots, window=window)
    x = frames()
    try:
        whole = offline(stem, transformer, x, step)
    except ValueError as refused:
        assert step == 0.25 and "whole position" in str(refused)
        stream = Stream(stem, transformer, step=step)
        with pytest.raises(ValueError, match="whole position"):
            stream(x)
        assert stream.heard == 0 == stream.cache.tokens
        return
    for chunks in CHUNKS:
        stream = Stream(stem, transformer, step=step)
        close(torch.cat([stream(chunk) for chunk in x.split(chunks, -1)], 1), whole)
        assert stream.heard == LENGTH


@torch.no_grad()
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("named", STEMS)
def test_every_stem_in_chunks_is_as_in_one_pass(named, chunks) -> None:
    stem, transformer = parts(named, rotary=mmpos.RotaryEncoding)
    for layer in stem.convolutions:  # a first layer that gives more than zeros before the start
        nn.init.normal_(layer.bias)
    x, heard, stream = frames(), 0, Stream(stem, transformer)
    whole = offline(stem, transformer, x)
    for chunk in x.split(chunks, -1):
        done = stem.grid(BINS, heard)[0]
        heard += chunk.shape[-1]
        close(stream(chunk), whole[:, done : stem.grid(BINS, heard)[0]])
    assert heard == LENGTH


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"rotary": mmpos.RotaryEncoding, "window": 1},
        {"rotary": mmpos.RotaryEncoding, "window": [3, 6], "kv_heads": 1},
        {
            "rotary": [mmpos.RotaryEncoding, nn.Identity],
            "bias": partial(mmpos.T5Bias, bidirectional=False),
            "window": [4, None],
        },
        {"rotary": partial(mmpos.MixedRotaryEncoding, heads=3), "per_layer": ["rotary"]},
    ],
)
def test_every_kind_of_layer_in_chunks_is_as_in_one_pass(options) -> None:
    stem, transformer = parts(**options)
    whole = offline(stem, transformer, frames())
    for chunks in CHUNKS:
        stream = Stream(stem, transformer)
        close(torch.cat([stream(chunk) for chunk in frames().split(chunks, -1)], 1), whole)


def held(stream: Stream) -> int:
    """Numbers that a stream keeps, in memory that is its own."""
    kept = [stream._held, stream.cache.positions, stream.cache.index]
    for layer in stream.cache._layers:
        kept += layer._memory
    return sum(each.untyped_storage().nbytes() for each in kept if each is not None)


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 3, 64])
def test_memory_does_not_grow_where_all_layers_have_a_window(size: int) -> None:
    stem, transformer = parts(rotary=mmpos.RotaryEncoding, window=[4, 7])
    stream, sizes = Stream(stem, transformer, step=0.01), []
    for _ in range(120):
        stream(frames(size))
        sizes.append(held(stream))
        assert stream.cache.tokens <= 6
    assert stream.heard == 120 * size and int(stream.cache.seen) == 60 * size
    assert max(sizes[60:]) <= max(sizes[30:60]) and stream._held.shape[-1] <= stem.left + 2
    stem, transformer = parts(rotary=mmpos.RotaryEncoding, window=[4, None])
    growing = Stream(stem, transformer)
    for _ in range(20):
        growing(frames(size))
    assert growing.cache.tokens == 10 * size


@torch.no_grad()
def test_a_stream_far_out_is_as_its_last_frames_alone() -> None:
    """With windows a token depends on no more than a reach, wherever that is."""
    stem, transformer = parts(rotary=mmpos.RotaryEncoding, window=4)
    stream, x = Stream(stem, transformer, step=0.01), frames(4001)
    for chunk in x[..., :3990].split(190, -1):
        stream(chunk)
    heard = stream(x[..., 3990:])
    close(heard, offline(stem, transformer, x[..., 3900:], 0.01)[:, 45:])
    assert torch.equal(stream.cache.positions, stem(x, step=0.01).positions[-3:])


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    "extension",
    [
        DYNAMIC,
        LongRoPE(
            short_factor=[1.0] * 8,
            long_factor=[1 + i / 2 for i in range(8)],
            original_length=8,
            factor=4.0,
        ),
    ],
)
def test_extensions_have_one_length_for_all_chunks(extension, window) -> None:
    rotary = partial(mmpos.RotaryEncoding, extension=extension)
    stem, transformer = parts(rotary=rotary, window=window)
    x = frames()
    for length in (4, 24, torch.tensor([4, 24])):
        stream = Stream(stem, transformer, length=length)
        whole = offline(stem, transformer, x, length=length)
        close(torch.cat([stream(chunk) for chunk in x.split(10, -1)], 1), whole)
    with pytest.raises(ValueError, match=r"^a context extension here .* pass length=…"):
        Stream(stem, transformer)


@torch.no_grad()
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("step", [None, 0.25])
@pytest.mark.parametrize("window", [None, 5])
def test_running_answers_are_of_all_that_was_heard(window, step, chunks) -> None:
    stem, transformer = parts(rotary=mmpos.RotaryEncoding, bias=mmpos.ALiBi, window=window)
    model = Classifier(stem, transformer, {"word": 4, "class": 2}).eval()
    stream, x, heard = ClassifierStream(model, step=step), frames(), 0
    for chunk in x.split(chunks, -1):
        answers = stream(chunk)
        heard += chunk.shape[-1]
        wanted = model(x[..., :heard], step=step)
        assert answers.keys() == wanted.keys() == {"word", "class"}
        for name in wanted:
            close(answers[name], wanted[name])
    empty = ClassifierStream(model)(x[..., :0])
    close(empty["word"], model.heads["word"].bias.expand(2, -1))


def test_gradients_are_those_of_one_pass() -> None:
    stem, transformer = parts(rotary=mmpos.RotaryEncoding, bias=mmpos.T5Bias, window=5)
    model = Classifier(stem, transformer, {"word": 4})
    x, found = frames().requires_grad_(), []
    for way in (model, ClassifierStream(model)):
        cut = [x] if way is model else x.split(CHUNKS[2], -1)
        for chunk in cut:
            answers = way(chunk)["word"]
        found.append(torch.autograd.grad(answers.square().sum(), [x, *model.parameters()]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_memory_of_a_chunk_may_be_used_again() -> None:
    stem, transformer = parts(rotary=mmpos.RotaryEncoding)
    x, stream, heard = frames(), Stream(stem, transformer), []
    buffer = torch.empty(2, BINS, 3)
    for chunk in x.split(3, -1):
        heard.append(stream(buffer[..., : chunk.shape[-1]].copy_(chunk)))
        buffer.fill_(torch.nan)
    close(torch.cat(heard, 1), offline(stem, transformer, x))


@torch.no_grad()
@pytest.mark.usefixtures("unchecked")
def test_a_chunk_that_fails_leaves_the_stream_as_it_was() -> None:
    stem, transformer = parts(additive=partial(mmpos.LearnedEncoding, std=1.0))
    transformer.additive = mmpos.LearnedEncoding(DIM, (12,))
    stream, x = Stream(stem, transformer), frames(24)
    with pytest.raises(ValueError, match=r"^sound has shape \(2, 3, 5\), expected \[batch, 6, fr"):
        stream(x[:, :3, :5])
    heard = [stream(x[..., :7])]
    for wrong in (x[:1], x[:, :3], x[0]):
        with pytest.raises(
            ValueError, match=r"^a chunk has shape .*, expected \[2, 6, frames\] as"
        ):
            stream(wrong)
    with pytest.raises(ValueError, match="is no cell of the table"):
        stream(frames(40))
    heard += [stream(x[..., 7:])]
    close(torch.cat(heard, 1), offline(stem, transformer, x))


@pytest.mark.usefixtures("unchecked")
def test_models_that_cannot_hear_a_stream() -> None:
    stem, transformer = parts()
    for wrong in ((FrameEmbedding(DIM, BINS), transformer), (stem, parts(causal=False)[1])):
        with pytest.raises(
            ValueError, match=r"^a token of a stream cannot wait .* causal=True, got"
        ):
            Stream(*wrong)
    for prefix in ({"class_token": True}, {"registers": 2}):
        with pytest.raises(ValueError, match=r"^class and register tokens .* it has [12]$"):
            Stream(stem, parts(**prefix)[1])
    patches = PatchEmbedding(DIM, (4,), channels=BINS)
    for wrong in ((patches, transformer), (stem, nn.GRU(DIM, DIM))):
        with pytest.raises(
            TypeError, match=r"^a stream is of the frames of a FrameEmbedding and a T"
        ):
            Stream(*wrong)
    with pytest.raises(
        TypeError, match=r"^answers to a stream are a Classifier's, got Transformer"
    ):
        ClassifierStream(transformer)
    with pytest.raises(TypeError, match="got PatchEmbedding and Transformer"):
        ClassifierStream(Classifier(patches, transformer, {"word": 2}))
