"""From a sound to frames: filter banks by torchaudio, or its samples as they are."""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torchaudio.compliance import kaldi
from torchaudio.functional import mask_along_axis
from torchaudio.transforms import MelSpectrogram

Kind = Literal["log_mel", "kaldi", "waveform"]
FLOOR = 1e-6
"""Added to the power of a mel band before the logarithm: nothing is quieter than -60 dB."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """What frames are made of a sound, and how many.

    Args:
        kind: ``log_mel``, natural logarithms of mel bands of the power; ``kaldi``, the filter banks
            of that toolkit, with ``center=False, mean=-4.2677, std=9.138, bins=128`` as AST takes
            them (arXiv:2104.01778, sec. 2.1); or ``waveform``, each sample a frame of one bin.
        rate: samples in a second, which all sounds are brought to.
        window, hop: length of a frame, and from a frame to the next, in seconds (of whole samples;
            the FFT has the next power of two).
        bins: mel bands; so many of Kaldi's that low ones hold no frequency, as AST's do, are
            constant there.
        low, high: of the bands, in Hz; half the rate by default.
        center: whether frame ``i`` has its middle at ``i · hop`` (``(i + ½) · hop`` in Kaldi's),
            with zeros around the sound (in Kaldi's its mirror image); else its start, and what does
            not fill a window at the end is left out, as streaming must.
        mean, std: what features are normalised by; each clip's own by default, over all frames and
            bins.
        per_bin: take each bin's own mean over the clip instead: what remains of speech hardly
            depends on voice and microphone (cepstral mean normalisation; Atal, J. Acoust. Soc. Am.
            55, 1974, p. 1304); of a steady sound nothing remains.

    Shape: a sound ``[samples]`` in -1 … 1 → ``[bins, frames]``, float32.
    Raises: ValueError for an unknown kind, numbers that are not above 0, more bins than the window
    resolves, one of mean and std alone, or both with per_bin; in the call for a sound shorter than
    a frame.
    """

    kind: Kind = "log_mel"
    rate: int = 16000
    window: float = 0.025
    hop: float = 0.01
    bins: int = 64
    low: float = 20.0
    high: float | None = None
    center: bool = True
    mean: float | None = None
    std: float | None = None
    per_bin: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"features.kind is {self.kind!r}; expected one of {get_args(Kind)}")
        for name in ("rate", "window", "hop", "bins"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"features.{name} is {getattr(self, name)}; expected above 0")
        if (self.mean is None) != (self.std is None) or (self.std is not None and self.std <= 0):
            raise ValueError(
                f"features.mean and std are given together, std above 0, or neither, got "
                f"{self.mean} and {self.std}"
            )
        if self.per_bin and self.mean is not None:
            raise ValueError(
                "features.per_bin takes the means of each clip: leave mean and std out, or set "
                "--data.features.per_bin false"
            )
        if self.kind == "waveform":
            return
        if min(self.samples(self.window), self.samples(self.hop)) < 1:
            raise ValueError(
                f"features.window and hop are {self.window} and {self.hop} seconds, less than a "
                f"sample at {self.rate} Hz"
            )
        if not 0 <= self.low < self._high <= self.rate / 2:
            raise ValueError(
                f"features.low and high are {self.low:g} and {self._high:g} Hz; expected 0 <= low "
                f"< high <= {self.rate / 2:g}, half the rate"
            )
        if self.kind == "log_mel":
            _mel(self)

    def samples(self, seconds: float) -> int:
        """How many samples ``seconds`` are."""
        return round(seconds * self.rate)

    @property
    def height(self) -> int:
        """Bins of a frame."""
        return 1 if self.kind == "waveform" else self.bins

    @property
    def step(self) -> float:
        """Seconds from a frame to the next."""
        return 1 / self.rate if self.kind == "waveform" else self.samples(self.hop) / self.rate

    @property
    def _high(self) -> float:
        return self.rate / 2 if self.high is None else self.high

    def frames(self, samples: int) -> int:
        """How many frames a sound of ``samples`` has."""
        if self.kind == "waveform":
            return samples
        hop, window = self.samples(self.hop), self.samples(self.window)
        if not self.center:
            return max(0, 1 + (samples - window) // hop)
        return 1 + samples // hop if self.kind == "log_mel" else max(1, (samples + hop // 2) // hop)

    def __call__(self, sound: Float[Tensor, " samples"]) -> Float[Tensor, "bins frames"]:
        """The frames of a sound."""
        if not self.frames(len(sound)):
            raise ValueError(
                f"a sound of {len(sound)} samples has no frame of {self.window} seconds at "
                f"{self.rate} Hz"
            )
        made = {"log_mel": self._log_mel, "kaldi": self._kaldi, "waveform": self._waveform}
        features = made[self.kind](sound.float())
        if self.mean is None or self.std is None:
            exact = features.double()  # so that silence is 0
            exact = exact - (exact.mean(1, keepdim=True) if self.per_bin else exact.mean())
            return (exact / exact.std(correction=0).clamp_min(1e-5)).float()
        return (features - self.mean) / self.std

    def _waveform(self, sound: Tensor) -> Tensor:
        return sound.unsqueeze(0)

    def _log_mel(self, sound: Tensor) -> Tensor:
        if not self.center:
            hop = self.samples(self.hop)
            sound = sound[: (self.frames(len(sound)) - 1) * hop + self.samples(self.window)]
            before = (_fft(self.samples(self.window)) - self.samples(self.window)) // 2
            after = _fft(self.samples(self.window)) - self.samples(self.window) - before
            sound = torch.nn.functional.pad(sound, (before, after))
        return (_mel(self)(sound) + FLOOR).log()

    def _kaldi(self, sound: Tensor) -> Tensor:
        hop, window = self.samples(self.hop), self.samples(self.window)
        count = self.frames(len(sound))
        if self.center and len(sound) < 2 * window:  # its mirror image would be too short
            sound = torch.nn.functional.pad(sound, (0, 2 * window - len(sound)))
        banks = kaldi.fbank(
            sound.unsqueeze(0),
            sample_frequency=self.rate,
            frame_length=1000 * window / self.rate,
            frame_shift=1000 * hop / self.rate,
            num_mel_bins=self.bins,
            low_freq=self.low,
            high_freq=self._high,
            window_type="hanning",
            htk_compat=True,
            snip_edges=not self.center,
        )
        return banks.T[:, :count]


def _fft(window: int) -> int:
    return 1 << (window - 1).bit_length()


@functools.lru_cache(8)
def _mel(features: Features) -> MelSpectrogram:
    window = features.samples(features.window)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "At least one mel filterbank has all zero values")
        try:
            return MelSpectrogram(
                features.rate,
                n_fft=_fft(window),
                win_length=window,
                hop_length=features.samples(features.hop),
                f_min=features.low,
                f_max=features._high,
                n_mels=features.bins,
                center=features.center,
                pad_mode="constant",
            )
        except UserWarning as warning:
            raise ValueError(
                f"features.bins is {features.bins}, more bands than {_fft(window)} samples at "
                f"{features.rate} Hz tell apart: give fewer bins, or a longer window"
            ) from warning


@dataclass(frozen=True, kw_only=True)
class SpecAugment:
    """Stretches of time and bands of frequency set to 0, the mean, in training.

    Source: SpecAugment (arXiv:1904.08779), without warping.

    Args:
        time: longest stretch in seconds; each is uniform from 0 to it.
        bins: widest band.
        masks: how many of each.

    Raises: ValueError for negative numbers.
    """

    time: float = 0.0
    bins: int = 0
    masks: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.time < math.inf or self.bins < 0 or self.masks < 1:
            raise ValueError(
                f"spec_augment has seconds and bins of 0 or more, and 1 mask or more, got {self}"
            )

    def __call__(self, features: Tensor, step: float) -> Tensor:
        """Features ``[bins, frames]`` with masks, drawn from torch's global generator."""
        for _ in range(self.masks):
            for axis, most in ((1, self.bins), (2, round(self.time / step))):
                if most:
                    bound = min(most + 1, features.shape[axis - 1])  # which is never reached
                    features = mask_along_axis(features.unsqueeze(0), bound, 0.0, axis).squeeze(0)
        return features
