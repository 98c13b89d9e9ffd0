"""Sequences of spoken digits: questions that only their order answers, at any length."""

import functools
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchaudio.functional import mu_law_decoding

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CANDIDATES = 3
"""Zero, one and two are each said once; all other words are of the digits from three on."""
FEWEST = 2 * CANDIDATES + 1
"""The fewest digits that keep the candidates apart and away from both ends."""
SAMPLE_RATE = 8000

GAP = (0.05, 0.25)
"""Least and greatest silence before, between and after the words, in seconds."""
GAIN = (-6.0, 6.0)
"""How loud a word is, in decibels, around the level of the stored clips."""
SPEED = (0.8, 1.25)
"""How fast a word of the training voices is played; its pitch turns with it. Others are not."""
NOISE = (-60.0, -35.0)
"""Level of the white noise under a whole sequence, in decibels of full scale."""

Voices = Literal["train", "val", "test", "recorded"]
VOICES: tuple[Voices, ...] = get_args(Voices)


class Clips(NamedTuple):
    """The embedded clips of N words by V voices.

    ``words`` are N float32 ``[samples]`` at 8 kHz, with ``digit [N]`` and ``voice [N]``;
    ``names``, ``split`` and ``recorded`` are of the V voices: True are people, False synthetic.
    """

    words: list[np.ndarray]
    digit: np.ndarray
    voice: np.ndarray
    names: list[str]
    split: list[str]
    recorded: np.ndarray


@functools.cache
def embedded_clips() -> Clips:
    """All clips that come with the package (see ``spoken_digits.LICENSE``), read once."""
    with np.load(Path(__file__).with_name("spoken_digits.npz")) as arrays:
        levels = torch.from_numpy(arrays["samples"].astype(np.int64))
        words = np.split(mu_law_decoding(levels, 256).numpy(), arrays["offsets"][1:-1])
        names, split = arrays["names"].tolist(), arrays["split"].tolist()
        return Clips(words, arrays["digit"], arrays["voice"], names, split, arrays["recorded"])


class Utterance(NamedTuple):
    """What is said and when, before it is heard: n words, and ``samples`` of the whole."""

    voice: str
    digits: np.ndarray
    clips: np.ndarray
    starts: np.ndarray
    """First sample of each word."""
    ends: np.ndarray
    """One past the last sample of each word."""
    gains: np.ndarray
    noise: float
    samples: int


@functools.cache
def voices_of(voices: Voices) -> dict[str, list[np.ndarray]]:
    """The voices of a split by name, and of each the clips in which it says each of ten digits."""
    clips = embedded_clips()
    return {
        name: [np.flatnonzero((clips.voice == v) & (clips.digit == d)) for d in range(10)]
        for v, name in enumerate(clips.names)
        if clips.split[v] == voices
    }


def utterance(
    draw: np.random.Generator, voices: Voices, number: int, digits: np.ndarray
) -> Utterance:
    """Digits said by voice ``number`` (modulo their number) of a split: takes, gaps, gains and
    noise, in training also speeds, all uniform and independent of what is said.
    """
    names = list(voices_of(voices))
    voice = names[number % len(names)]
    takes, words = voices_of(voices)[voice], embedded_clips().words
    clips = np.array([draw.choice(takes[digit]) for digit in digits])
    lengths = np.array([len(words[clip]) for clip in clips])
    if voices == "train":
        speeds = np.exp(draw.uniform(np.log(SPEED[0]), np.log(SPEED[1]), len(digits)))
        lengths = np.rint(lengths / speeds).astype(np.int64)
    gaps = np.rint(draw.uniform(*GAP, len(digits) + 1) * SAMPLE_RATE).astype(np.int64)
    ends = np.cumsum(gaps[:-1] + lengths)
    gains = 10 ** (draw.uniform(*GAIN, len(digits)) / 20)
    noise = 10 ** (draw.uniform(*NOISE) / 20)
    return Utterance(
        voice, digits, clips, ends - lengths, ends, gains, noise, int(ends[-1] + gaps[-1])
    )


def heard(said: Utterance, draw: np.random.Generator) -> Tensor:
    """The sound of an utterance, float32 ``[samples]`` in -1 … 1, in noise that is drawn."""
    words = embedded_clips().words
    sound = said.noise * draw.standard_normal(said.samples, np.float32)
    for clip, start, end, gain in zip(said.clips, said.starts, said.ends, said.gains, strict=True):
        word = words[clip]
        places = np.linspace(0, len(word) - 1, end - start)
        sound[start:end] += gain * np.interp(places, np.arange(len(word)), word)
    return torch.from_numpy(sound.clip(-1, 1).astype(np.float32))


def draw_digits(draw: np.random.Generator, count: int) -> np.ndarray:
    """``count`` digits: each candidate once, in one of all orders, each alone in a gap between
    two of the others; gaps, order and others are uniform and independent.
    """
    others = draw.integers(CANDIDATES, 10, count - CANDIDATES)
    gaps = 1 + draw.choice(len(others) - 1, CANDIDATES, replace=False)
    return np.insert(others, gaps, draw.permutation(CANDIDATES))


def answers(digits: np.ndarray) -> dict[str, int]:
    """Which of the candidates comes first, and which last."""
    order = digits[digits < CANDIDATES]
    return {"first": int(order[0]), "last": int(order[-1])}


class SpokenDigits(Dataset[tuple[Tensor, dict[str, Tensor]]]):
    """Says digits in a row, and asks which of zero, one and two came "first" and which "last".

    Each of the three is said exactly once, among others from three to nine, whatever the number of
    digits: so the answers stay defined at any length. They depend on order alone: whatever words
    are said, all orders of the three are equally likely, so that every answer has probability 1/3
    given the bag of words, with loudness, speed and noise independent of the order; and silence
    between all words keeps each spectrogram frame of up to 50 ms within one word. Candidates
    are neither at an end nor beside each other, so that no window shorter than a word shows one
    together with the start or end of the sequence, or with another candidate: what a convolution
    sees at the edges does not answer either, as it would if the first word could be a candidate.

    Sequence ``index`` follows from ``(voices, seed, index)`` alone, by one voice: the split's
    voices in turn. The number of digits is uniform in ``digits``, words come at random gaps and
    gains, in training also at random speeds. Indices beyond the length are further sequences: item
    i of epoch e is ``e · samples + i``.

    ``voices``: "train", "val" and "test" are disjoint sets of synthetic voices, "recorded" is a
    person who read the ten words once each: a second test set.

    Shape: an item is float32 ``[samples]`` at ``sample_rate``, in -1 … 1, and int64 scalars
    ``{"first": …, "last": …}``.

    Args:
        samples: sequences in an epoch.
        digits: fewest and most words of a sequence, at least 7.
        seed: of everything drawn.
    """

    sample_rate = SAMPLE_RATE
    classes: ClassVar = {question: list(WORDS[:CANDIDATES]) for question in ("first", "last")}

    def __init__(
        self, voices: Voices, samples: int, digits: tuple[int, int] = (7, 10), *, seed: int = 0
    ) -> None:
        if voices not in VOICES:
            raise ValueError(f"voices is {voices!r}; expected one of {VOICES}")
        if samples < 1:
            raise ValueError(f"samples is {samples}; expected at least 1")
        if seed < 0:
            raise ValueError(f"seed is {seed}; expected at least 0")
        if not FEWEST <= digits[0] <= digits[1]:
            raise ValueError(
                f"digits is {digits}; expected the fewest, at least {FEWEST}, and the most"
            )
        self.voices: Voices = voices
        self.samples = samples
        self.digits = digits
        self.seed = seed
        self.names = list(voices_of(voices))

    def __len__(self) -> int:
        return self.samples

    def _draw(self, index: int, purpose: int) -> np.random.Generator:
        return np.random.default_rng((VOICES.index(self.voices), self.seed, index, purpose))

    def utterance(self, index: int) -> Utterance:
        """The plan of sequence ``index``: its digits, its length and all else but the sound."""
        draw = self._draw(index, 0)
        digits = draw_digits(draw, int(draw.integers(self.digits[0], self.digits[1] + 1)))
        return utterance(draw, self.voices, index, digits)

    def labels(self, index: int) -> dict[str, int]:
        """The answers, without the sound."""
        return answers(self.utterance(index).digits)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        said = self.utterance(index)
        labels = {name: torch.tensor(label) for name, label in answers(said.digits).items()}
        return heard(said, self._draw(index, 1)), labels
