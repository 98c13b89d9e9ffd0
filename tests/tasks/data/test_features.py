"""Frames against what they are by definition, and torchaudio's own."""

import math
import warnings

import pytest
import torch
from torchaudio.compliance import kaldi

from tasks.data.features import FLOOR, Features, SpecAugment

RATES = [(8000, 40), (16000, 64), (22050, 32)]


def noise(samples: int) -> torch.Tensor:
    return 0.1 * torch.randn(samples, generator=torch.Generator().manual_seed(0))


def plain_mel(sound: torch.Tensor, features: Features) -> torch.Tensor:
    """Logarithms of triangular mel bands of Hann windows, frame by frame, in double precision."""
    window, hop = round(features.window * features.rate), round(features.hop * features.rate)
    fft = 2 ** math.ceil(math.log2(window))
    shape = torch.hann_window(window, dtype=torch.float64)
    middles = range(0, len(sound) + 1, hop)
    around = torch.nn.functional.pad(sound.double(), (window, window))
    power = []
    for middle in middles:
        start = middle + window - (window + 1) // 2
        power.append(torch.fft.rfft(around[start : start + window] * shape, n=fft).abs() ** 2)
    mel = [
        2595 * math.log10(1 + f / 700)
        for f in (features.low, features.high or sound.new_tensor(features.rate / 2).item())
    ]
    edges = [
        700 * (10 ** ((mel[0] + (mel[1] - mel[0]) * i / (features.bins + 1)) / 2595) - 1)
        for i in range(features.bins + 2)
    ]
    bands = torch.zeros(features.bins, fft // 2 + 1, dtype=torch.float64)
    for band, (low, peak, high) in enumerate(zip(edges, edges[1:], edges[2:], strict=False)):
        for k in range(fft // 2 + 1):
            f = k * features.rate / fft
            bands[band, k] = max(0.0, min((f - low) / (peak - low), (high - f) / (high - peak)))
    return (bands @ torch.stack(power, 1) + FLOOR).log()


@pytest.mark.parametrize(("rate", "bins"), RATES)
def test_log_mel_is_its_definition(rate: int, bins: int) -> None:
    features = Features(rate=rate, bins=bins, mean=0.0, std=1.0)
    sound = noise(rate // 2 + 17)
    made = features(sound)
    torch.testing.assert_close(made.double(), plain_mel(sound, features), atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["log_mel", "kaldi", "waveform"])
@pytest.mark.parametrize("center", [True, False])
def test_any_length_has_as_many_frames_as_said(kind, center: bool) -> None:
    features = Features(kind=kind, rate=8000, bins=24, center=center)
    for samples in (1, 79, 80, 199, 200, 201, 279, 280, 399, 8000, 8039, 8041):
        count = features.frames(samples)
        if count:
            made = features(noise(samples))
            assert made.shape == (features.height, count) and made.isfinite().all()
        else:
            with pytest.raises(ValueError, match=f"a sound of {samples} samples has no frame"):
                features(noise(samples))


def test_kaldi_frames_are_torchaudios_of_whole_windows() -> None:
    """With AST's arguments (its feature extractor's in transformers)."""
    sound = noise(16000)
    features = Features(kind="kaldi", bins=128, center=False, mean=0.0, std=1.0)
    expected = kaldi.fbank(
        sound[None], sample_frequency=16000, window_type="hanning", num_mel_bins=128
    )
    torch.testing.assert_close(features(sound), expected.T, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["log_mel", "kaldi", "waveform"])
def test_what_follows_a_frame_does_not_change_it_without_center(kind) -> None:
    features = Features(kind=kind, rate=8000, bins=24, center=False, mean=0.0, std=1.0)
    whole = features(noise(4000))
    part = features(noise(4000)[:1500])
    assert torch.equal(whole[:, : part.shape[1]], part)


def test_each_clip_has_mean_0_and_deviation_1_unless_numbers_are_given() -> None:
    sound = noise(8000)
    own, raw = Features(rate=8000, bins=24), Features(rate=8000, bins=24, mean=0.0, std=1.0)
    given = Features(rate=8000, bins=24, mean=-3.0, std=2.0)
    torch.testing.assert_close(given(sound), (raw(sound) + 3) / 2)
    for gain in (1.0, 0.3):
        made = own(gain * sound)
        assert made.mean().abs() < 1e-5 and abs(made.std(correction=0) - 1) < 1e-5
    assert own(torch.zeros(8000)).abs().max() == 0
    bins = Features(rate=8000, bins=24, per_bin=True)
    low, high = raw(sound), bins(sound)
    centred = low - low.mean(1, keepdim=True)
    torch.testing.assert_close(high, centred / centred.std(correction=0), atol=1e-5, rtol=0)
    assert bins(torch.zeros(8000)).abs().max() == 0


def test_a_hop_is_whole_samples_and_the_step_says_so() -> None:
    features = Features(rate=22050, hop=0.01)
    assert features.samples(0.01) == 220 and features.step == 220 / 22050
    assert Features(kind="waveform", rate=8000).step == 1 / 8000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "mfcc"}, "features.kind is 'mfcc'"),
        ({"rate": 0}, "features.rate is 0; expected above 0"),
        ({"hop": -0.01}, "features.hop is -0.01"),
        ({"window": float("nan")}, "features.window is nan"),
        ({"hop": 1e-6}, "less than a sample at 16000 Hz"),
        ({"high": 9000.0}, "0 <= low < high <= 8000, half the rate"),
        ({"bins": 400}, "more bands than 512 samples at 16000 Hz tell apart: give fewer"),
        ({"mean": 1.0}, "mean and std are given together"),
        ({"mean": 1.0, "std": 0.0}, "std above 0"),
        (
            {"mean": 1.0, "std": 2.0, "per_bin": True},
            r"leave mean and std out, or set --data.features.per_bin false",
        ),
    ],
)
def test_bad_settings_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Features(**settings)


def test_no_warning_of_torchaudio_comes_through() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Features(rate=8000, bins=40)(noise(4000))


def test_masks_are_stretches_and_bands_of_the_mean() -> None:
    masks = SpecAugment(time=0.2, bins=5, masks=2)
    torch.manual_seed(0)
    silent, most = [], [0, 0]
    for _ in range(50):
        masked = masks(torch.ones(40, 100), step=0.01) == 0
        bands, times = masked.all(1), masked.all(0)
        assert torch.equal(masked, bands[:, None] | times)
        most = [max(most[0], int(bands.sum())), max(most[1], int(times.sum()))]
        silent.append(masked.float().mean())
    assert 5 < most[0] <= 10 and 20 < most[1] <= 40
    one = [SpecAugment(bins=1, masks=1)(torch.ones(40, 9), 0.01).eq(0).any() for _ in range(40)]
    widths = [SpecAugment(bins=3, masks=1)(torch.ones(40, 9), 0.01) for _ in range(200)]
    assert 5 < sum(one) < 35
    assert {int(w.eq(0).all(1).sum()) for w in widths} == {0, 1, 2, 3}
    assert torch.equal(SpecAugment()(torch.ones(4, 9), 0.01), torch.ones(4, 9))
    short = SpecAugment(time=5.0, bins=99)(torch.ones(4, 9), 0.01)
    assert short.shape == (4, 9)
    with pytest.raises(ValueError, match="0 or more, and 1 mask or more"):
        SpecAugment(time=-1.0)
