"""Makes the speech that mmpos carries: the ten English digits, one word a clip, by many voices.

    python scripts/make_spoken_digits.py DIGITS [OUTPUT] [--flite PROGRAM]

DIGITS holds ``0.wav`` … ``9.wav`` of the Asterisk core sounds (8 kHz, mono, 16 bits), as packaged
by Debian; espeakng-loader is on PyPI, flite in Debian::

    apt-get download asterisk-core-sounds-en-wav && dpkg-deb -x asterisk-core-sounds-en-wav_*.deb u
    pip install espeakng-loader==0.2.4 && apt-get install flite
    python scripts/make_spoken_digits.py u/usr/share/asterisk/sounds/en_US_f_Allison/digits

Synthetic voices are the variants of eSpeak NG, each with an accent and one drawn pitch and speed
for each word, and four voices of flite at several speeds. Training hears nothing of those in
``HELD_OUT``. The only recorded voice is Allison Smith's. Two runs give the same bytes.

Output, for N clips of V voices: ``samples`` uint8 ``[T]``, all clips in a row at 8 kHz in the
256 levels of mu-law, without the silence around them and with their highest sample at ``PEAK``;
``offsets [N + 1]``, ``digit [N]`` and ``voice [N]``; ``names [V]``, ``split [V]`` (train, val, test
or recorded) and ``recorded [V]``.
"""

import argparse
import ctypes
import io
import itertools
import subprocess
import tempfile
import wave
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torchaudio.functional import mu_law_encoding, resample

OUTPUT = Path(__file__).parents[1] / "tasks" / "data" / "spoken_digits.npz"
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
RATE = 8000
PEAK = 0.5
SILENCE = 10 ** (-35 / 20)
"""What is below this part of a clip's loudest 10 ms, before and after the word, is cut off."""

ACCENTS = ["en-US", "en", "en-US", "en-GB-scotland", "en-US", "en-GB-x-rp", "en-US", "en-US-nyc"]
VARIANTS = """
Alex Alicia Andrea Andy Annie AnxiousAndy Denis Diogo Gene Henrique Hugo Jacky Lee Marco Mario
Michael Mike Nguyen Reed RicishayMax Storm Tweaky adam anika announcer antonio aunty belinda
benjamin boris caleb david ed edward f1 f2 f3 f4 f5 grandma grandpa gustave ian iven john
kaukovalta klatt linda m1 m2 m3 m4 m5 m6 m7 m8 marcelo max michel miguel norbert pablo paul pedro
quincy rob robert sandro shelby steph travis victor zac
"""
"""Of eSpeak NG's variants those that are neither whispers nor robots, one of each name."""
FLITE = {"awb": "train", "kal16": "train", "slt": "train", "rms": "test"}
HELD_OUT = {
    "val": "Annie adam boris grandpa iven Lee linda quincy",
    "test": "Alicia Storm belinda caleb Denis edward gustave klatt marcelo Mike pablo steph",
}
TAKES = 3
"""Clips of a word by each voice of flite."""


class Clip(NamedTuple):
    """One word as it was made: float32 ``[samples]`` in -1 … 1, and what is known of it."""

    samples: torch.Tensor
    rate: int
    digit: int
    voice: str
    split: str
    recorded: bool


class Espeak:
    """The little of eSpeak NG's C interface that says a word."""

    RATE, PITCH, WAVES, UTF8 = 1, 3, 2, 1  # of speak_lib.h

    def __init__(self) -> None:
        import espeakng_loader  # pyright: ignore[reportMissingImports]

        self.espeak = ctypes.CDLL(espeakng_loader.get_library_path())
        data = espeakng_loader.get_data_path().encode()
        self.rate = self.espeak.espeak_Initialize(self.WAVES, 0, data, 0)
        self.said: list[np.ndarray] = []
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
        )
        self.callback = kind(self._hear)  # kept, as the library keeps no reference
        self.espeak.espeak_SetSynthCallback(self.callback)

    def _hear(self, samples, count: int, events) -> int:
        if count:
            self.said.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def say(self, word: str, voice: str, pitch: int, speed: int) -> torch.Tensor:
        """``pitch`` is 0 … 100, ``speed`` in words a minute."""
        if self.espeak.espeak_SetVoiceByName(voice.encode()):
            raise ValueError(f"eSpeak NG has no voice {voice}")
        self.espeak.espeak_SetParameter(self.RATE, speed, 0)
        self.espeak.espeak_SetParameter(self.PITCH, pitch, 0)
        self.espeak.espeak_ng_SetRandSeed(ctypes.c_long(1))  # else it is the clock
        self.said.clear()
        text = word.encode() + b"\0"
        self.espeak.espeak_Synth(text, len(text), 0, 1, 0, self.UTF8, None, None)
        self.espeak.espeak_Synchronize()
        return torch.from_numpy(np.concatenate(self.said)).float() / 2**15


def read_wave(content: bytes) -> tuple[torch.Tensor, int]:
    with wave.open(io.BytesIO(content)) as file:
        if (file.getnchannels(), file.getsampwidth()) != (1, 2):
            raise ValueError("expected one channel of 16 bits")
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        return torch.from_numpy(samples.astype(np.float32)) / 2**15, file.getframerate()


def by_espeak():
    espeak, drawn = Espeak(), np.random.default_rng(0)
    split_of = {name: split for split, names in HELD_OUT.items() for name in names.split()}
    for variant, accent in zip(VARIANTS.split(), itertools.cycle(ACCENTS)):
        split = split_of.get(variant, "train")
        for digit, word in enumerate(WORDS):
            pitch, speed = int(drawn.integers(30, 71)), int(drawn.integers(110, 201))
            samples = espeak.say(word, f"{accent}+{variant}", pitch, speed)
            yield Clip(samples, espeak.rate, digit, f"espeak {accent}+{variant}", split, False)


def by_flite(program: str):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "said.wav"
        for (voice, split), (digit, word) in itertools.product(FLITE.items(), enumerate(WORDS)):
            for stretch in np.linspace(0.8, 1.2, TAKES):
                speed = ["--setf", f"duration_stretch={stretch:.2f}"]
                subprocess.run([program, "-voice", voice, *speed, "-t", word, path], check=True)
                yield Clip(*read_wave(path.read_bytes()), digit, f"flite {voice}", split, False)


def by_allison(folder: Path):
    for digit in range(10):
        said = read_wave((folder / f"{digit}.wav").read_bytes())
        yield Clip(*said, digit, "asterisk Allison Smith", "recorded", True)


def prepare(clip: Clip) -> np.ndarray:
    """Mu-law levels of the word alone."""
    samples = resample(clip.samples, clip.rate, RATE)
    cell = RATE // 100
    frames = samples[: len(samples) // cell * cell].view(-1, cell).square().mean(1).sqrt()
    heard = (frames > SILENCE * frames.max()).nonzero().flatten()
    samples = samples[max(0, int(heard[0]) - 1) * cell : (int(heard[-1]) + 2) * cell]
    samples = samples * PEAK / samples.abs().max()
    ramp = torch.linspace(0, 1, cell // 2)
    samples[: len(ramp)] *= ramp
    samples[-len(ramp) :] *= ramp.flip(0)
    return mu_law_encoding(samples, 256).to(torch.uint8).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of Asterisk's 0.wav … 9.wav")
    parser.add_argument("output", type=Path, nargs="?", default=OUTPUT)
    parser.add_argument("--flite", default="flite", help="the program")
    arguments = parser.parse_args()
    clips = [*by_espeak(), *by_flite(arguments.flite), *by_allison(arguments.folder)]
    levels = [prepare(clip) for clip in clips]
    voices = {clip.voice: clip for clip in clips}
    number = {voice: index for index, voice in enumerate(voices)}
    np.savez_compressed(
        arguments.output,
        samples=np.concatenate(levels),
        offsets=np.cumsum([0, *map(len, levels)], dtype=np.int64),
        digit=np.array([clip.digit for clip in clips], np.uint8),
        voice=np.array([number[clip.voice] for clip in clips], np.uint8),
        names=np.array(list(voices)),
        split=np.array([clip.split for clip in voices.values()]),
        recorded=np.array([clip.recorded for clip in voices.values()]),
    )
    seconds = sum(map(len, levels)) / RATE
    print(f"{arguments.output}: {len(clips)} clips of {len(voices)} voices, {seconds:.0f} seconds,")
    print(f"{arguments.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
