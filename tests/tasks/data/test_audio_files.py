"""Sounds of files, against what was written into them; and files that are not what they say."""

import math
import os
import pickle
import resource
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torchaudio.functional import resample

from tasks.data import audio_files as module
from tasks.data.audio_files import Broken, audio_files, read_audio, seconds_of, unreadable


def sine(frequency: float, rate: int, seconds: float, amplitude: float = 0.5) -> np.ndarray:
    return amplitude * np.sin(2 * np.pi * frequency * np.arange(round(rate * seconds)) / rate)


def write(path: Path, sound: np.ndarray, rate: int = 16000, **options: Any) -> Path:
    if path.suffix == ".mp3":
        options = {"format": "MP3", "subtype": "MPEG_LAYER_III"} | options
    if path.suffix == ".opus":
        options = {"format": "OGG", "subtype": "OPUS"} | options
    soundfile.write(path, sound, rate, **options)
    return path


def reason(path: Path, rate: int = 16000, *part: float) -> str:
    """Why a file is not read, of an error of one line that names it and the way out."""
    with pytest.raises(Broken) as error:
        read_audio(path, rate, *part)
    text = str(error.value)
    assert text.startswith(f"cannot read the sound {path} (") and "\n" not in text
    assert "repair or remove it" in text and "--data.on_error skip" in text
    assert str(pickle.loads(pickle.dumps(error.value))) == text  # as loader processes send it
    assert error.value.reason in text
    return error.value.reason


@pytest.mark.parametrize(
    ("subtype", "suffix", "bits"),
    [
        *(
            ("PCM_U8", "wav", 8),
            ("PCM_S8", "aiff", 8),
            ("PCM_16", "wav", 16),
            ("PCM_24", "wav", 24),
        ),
        *(
            ("PCM_24", "flac", 24),
            ("PCM_32", "wav", 32),
            ("PCM_16", "au", 16),
            ("PCM_16", "caf", 16),
        ),
    ],
)
def test_integers_are_scaled_by_their_bits(
    tmp_path: Path, subtype: str, suffix: str, bits: int
) -> None:
    values = torch.tensor([-1, -0.5, 0, 2 / 128, 0.5, 127 / 128])  # whole in 8 bits
    path = write(tmp_path / f"a.{suffix}", values.numpy(), subtype=subtype)
    assert soundfile.info(path).subtype == subtype
    read = read_audio(path, 16000)
    assert read.dtype == torch.float32 and torch.equal(read, values)
    step = 2.0 ** (1 - bits)
    path = write(tmp_path / f"b.{suffix}", np.array([step, -step]), subtype=subtype)
    assert torch.equal(read_audio(path, 16000), torch.tensor([step, -step]))


def test_the_bytes_of_8_and_24_bits_are_read_as_wav_defines_them(tmp_path: Path) -> None:
    for bits, data, values in (
        (8, bytes([0, 64, 128, 255]), [-1, -0.5, 0, 127 / 128]),  # unsigned, 128 is silence
        (24, b"\0\0\x80\0\0\x40\1\0\0\xff\xff\xff", [-1, 0.5, 2**-23, -(2**-23)]),
    ):
        form = struct.pack("<HHIIHH", 1, 1, 8000, 8000 * bits // 8, bits // 8, bits)
        chunks = b"WAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", len(data))
        path = tmp_path / f"{bits}.wav"
        path.write_bytes(b"RIFF" + struct.pack("<I", len(chunks) + len(data)) + chunks + data)
        assert torch.equal(read_audio(path, 8000), torch.tensor(values))


def test_floats_are_as_they_are(tmp_path: Path) -> None:
    values = np.array([0.1, -1.25, 3, 1e-12], np.float32)
    for subtype in ("FLOAT", "DOUBLE"):
        path = write(tmp_path / "a.wav", values, subtype=subtype)
        assert torch.equal(read_audio(path, 16000), torch.from_numpy(values))


@pytest.mark.parametrize("channels", [2, 6])
def test_channels_are_averaged(tmp_path: Path, channels: int) -> None:
    levels = np.linspace(-0.5, 1, channels) * np.linspace(0, 0.9, 50)[:, None]
    path = write(tmp_path / "a.wav", levels, subtype="FLOAT")
    expected = torch.from_numpy(levels).mean(1).float()
    assert expected.abs().max() > 0.2
    torch.testing.assert_close(read_audio(path, 16000), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("old", "new"), [(44100, 16000), (48000, 16000), (8000, 16000), (22050, 16000), (11025, 44100)]
)
def test_a_sine_stays_what_it_is_at_another_rate(tmp_path: Path, old: int, new: int) -> None:
    path = write(tmp_path / "a.wav", sine(1000, old, 1.2345), old, subtype="FLOAT")
    read = read_audio(path, new)
    assert len(read) == -(-round(old * 1.2345) * new // old)
    expected = torch.from_numpy(sine(1000, new, 1.3)[: len(read)]).float()
    inner = slice(new // 50, -new // 50)
    assert (read - expected)[inner].abs().max() < 2e-3  # torchaudio's filter: 0.1 % of 0.5
    spectrum = torch.fft.rfft(read * torch.hann_window(len(read)))
    assert abs(spectrum.abs().argmax() * new / len(read) - 1000) < 1


def test_a_sine_above_half_the_new_rate_is_gone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", sine(10500, 44100, 0.5), 44100, subtype="FLOAT")
    assert read_audio(path, 44100).abs().max() > 0.49
    assert read_audio(path, 16000)[400:-400].abs().max() < 5e-3


@pytest.mark.parametrize(
    ("old", "new"), [(441, 160), (3, 1), (1, 3), (160, 441), (7, 5), (1, 2), (2, 1)]
)
@pytest.mark.parametrize("count", [1, 2, 440, 441, 442, 5000, 12347])
def test_pieces_are_resampled_as_the_whole(
    monkeypatch: pytest.MonkeyPatch, old: int, new: int, count: int
) -> None:
    monkeypatch.setattr(module, "PIECE", 1000)
    sound = torch.randn(count)
    expected = resample(sound.double(), 100 * old, 100 * new).float()
    read = module.resample(sound, 100 * old, 100 * new)
    assert len(read) == math.ceil(count * new / old)
    torch.testing.assert_close(read, expected, rtol=0, atol=2e-6)


def test_the_length_is_exact_where_float32_is_not() -> None:
    for count in (2646080, 441 * 6000 + pow(160, -1, 441)):  # the last sample is 1 / 441 long
        exact = -(-count * 160 // 441)
        assert len(resample(torch.zeros(count), 44100, 16000)) != exact  # torchaudio 2.11
        assert len(module.resample(torch.zeros(count), 44100, 16000)) == exact


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "opus", "mp3"])
def test_a_part_is_that_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(module, "BLOCK", 3001)
    time = np.arange(160000) / 16000  # a tone that rises; mp3: of variable bit rate
    sound = 0.5 * np.sin(2 * np.pi * (200 + 100 * time) * time)
    path = write(tmp_path / f"a.{suffix}", np.stack([sound, sound], 1))
    whole = read_audio(path, 16000)
    assert len(whole) == 160000 and seconds_of(path) == 10
    inner = slice(2000, 130000)
    assert (whole - torch.from_numpy(sound).float())[inner].abs().max() < 0.1  # lossy codecs
    for start, seconds in ((0, 0.5), (0.0001, 1), (1.0009, 2), (6.25, 0.25), (9, 1)):
        part = read_audio(path, 16000, start, seconds)
        first = round(16000 * start)
        assert len(part) == round(16000 * seconds)
        torch.testing.assert_close(part, whole[first : first + len(part)], rtol=0, atol=1e-6)
    assert torch.equal(read_audio(path, 16000, 9.5, 3), read_audio(path, 16000, 9.5))
    assert len(read_audio(path, 16000, 9.5, 3)) == 8000
    assert len(read_audio(path, 16000, 9.99994)) == 1 and len(read_audio(path, 16000, 1, 1e-9)) == 1
    assert reason(path, 16000, 10) == "it ends at 10 s, but a part from 10 s is asked"


def test_options_out_of_range(tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", np.zeros(10))
    for rate, start, seconds, told in (
        (0, 0, None, "rate is 0"),
        (8, -1, None, "start is -1"),
        (8, math.nan, None, "start is nan"),
        (8, 0, 0, "seconds is 0"),
        (8, 0, math.inf, "seconds is inf"),
    ):
        with pytest.raises(ValueError, match=f"{told}.*; expected"):
            read_audio(path, rate, start, seconds)


def test_one_sample_and_none(tmp_path: Path) -> None:
    one = write(tmp_path / "a.wav", np.array([0.5]))
    assert read_audio(one, 16000).tolist() == [0.5] and seconds_of(one) == 1 / 16000
    assert len(read_audio(one, 8000)) == 1 and len(read_audio(one, 44100)) == 3
    for suffix in ("wav", "ogg"):
        none = write(tmp_path / f"b.{suffix}", np.zeros(0))
        assert reason(none) == "it has no samples, says its header"
        with pytest.raises(Broken, match=rf"b.{suffix} \(it has no samples"):
            seconds_of(none)


def broken(folder: Path, name: str) -> Path:
    """A file that is called as what is wrong with it."""
    path = folder / name
    suffix, noise = path.suffix[1:], np.random.default_rng(0).uniform(-0.5, 0.5, 20000)
    if name.startswith("text"):
        path.write_text("no sound, though it may be called one; " * 20)
    elif name.startswith("nan"):
        noise[7777] = {"nan.wav": math.nan, "nan_inf.wav": -math.inf}[name]
        write(path, noise, subtype="FLOAT")
    elif not name.startswith(("missing", "empty")):
        data = bytearray(write(path, noise).read_bytes())
        half = len(data) // 2
        if name.startswith("cut"):
            data = data[:half]
        elif name.startswith("short"):  # by less than its header
            data = data[:-10]
        elif name.startswith("header"):
            data = data[:20]
        elif name.startswith("page"):
            data = data[: data.rfind(b"OggS")]
        elif name.startswith("hole"):
            data[half : half + 300] = bytes(range(1, 151)) * 2
        elif name == "huge.flac":
            data[21] |= 15
            data[22:26] = b"\xff" * 4
        elif name == "unknown.flac":
            data[21] &= 240
            data[22:26] = bytes(4)
        elif name == "none.wav":
            data[40:44] = bytes(4)
        path.write_bytes(data)
    elif name.startswith("empty"):
        path.touch()
    assert suffix
    return path


CUT = "cut off: "
BY_HEADER = {
    "missing.wav": "No such file",
    "empty.wav": "0 bytes",
    "empty.mp3": "0 bytes",
    "text.wav": "not recognised",
    "text.mp3": "no sound found in it",
    "text.au": "no header",
    "text.raw": "no header",
    "none.wav": "no samples",
    "huge.flac": "68719476735 samples in",
    "unknown.flac": "samples in",
    "header.wav": "Malformed 'fmt ' chunk",
    "header.flac": "unimplemented",
    "cut.wav": f"{CUT}19978 bytes of samples where its header tells of 40000",
    "short.wav": f"{CUT}39990 bytes",
    "cut.aiff": CUT,
    "cut.au": CUT,
    "cut.w64": CUT,
    "cut.caf": "malformed",
    "cut.ogg": "no samples",
    "cut.opus": "malformed",
    "short.opus": f"{CUT}it has no end of stream",
    "page.opus": f"{CUT}it has no end of stream",
    "short.ogg": f"{CUT}it has no end of stream",
    "hole.ogg": "corrupt",
    "hole.opus": "malformed",
}
BY_SAMPLES = {
    "cut.flac": "cut off or corrupt: flac decoder lost sync",
    "hole.flac": "cut off or corrupt: ",
    "cut.mp3": "of its samples are missing",
    "nan.wav": "NaN or infinite",
    "nan_inf.wav": "NaN or infinite",
}


@pytest.mark.parametrize("name", [*BY_HEADER, *BY_SAMPLES])
def test_broken_files_are_named_with_the_reason(tmp_path: Path, name: str) -> None:
    path = broken(tmp_path, name)
    assert (BY_HEADER | BY_SAMPLES)[name] in reason(path)
    assert unreadable([str(path)]) == {str(path): reason(path)}
    if name in BY_HEADER:
        with pytest.raises(Broken) as error:
            seconds_of(path)
        assert error.value.reason == reason(path)
    else:
        assert seconds_of(path) == 1.25


def test_a_part_before_the_fault_is_read(tmp_path: Path) -> None:
    noise = torch.from_numpy(np.random.default_rng(0).uniform(-0.5, 0.5, 20000)).float()
    part = read_audio(broken(tmp_path, "nan.wav"), 16000, 0.0, 0.4)
    assert torch.equal(part, noise[: len(part)])
    assert len(read_audio(broken(tmp_path, "cut.flac"), 16000, 0, 0.25)) == 4000


@pytest.mark.parametrize("size", [2**32 - 1, 2**31 - 1, 2**31 - 1 - 36])
def test_what_was_written_to_a_pipe_is_whole(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "a.wav", np.full(100, 0.5))
    data = bytearray(path.read_bytes())
    data[40:44] = data[4:8] = struct.pack("<I", size)
    path.write_bytes(data)
    assert seconds_of(path) == 100 / 16000 and len(read_audio(path, 16000)) == 100
    assert unreadable([str(path)]) == {}


def test_unreadable_reads_each_file_once_and_leaves_out_the_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = write(tmp_path / "good.wav", np.zeros(10), 44101)
    bad = [broken(tmp_path, "cut.wav"), broken(tmp_path, "nan.wav")]
    opened: list[str] = []
    within = module._open
    monkeypatch.setattr(module, "_open", lambda path: (opened.append(path), within(path))[1])
    paths = [str(path) for path in (good, *bad)]
    assert list(unreadable(paths)) == paths[1:] and opened == paths
    assert list(unreadable(paths, rate=44101)) == paths[1:]
    assert list(unreadable(paths, rate=16000)) == paths


def test_rates_with_a_huge_filter_are_refused_and_odd_ones_are_not(tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", np.zeros(100), 44101)
    assert "705,616,000 weights" in reason(path) and "ffmpeg" in reason(path)
    assert len(read_audio(path, 44101)) == 100
    path = write(tmp_path / "b.wav", sine(440, 44056, 0.1), 44056, subtype="FLOAT")
    expected = torch.from_numpy(sine(440, 16000, 0.1)).float()
    assert (read_audio(path, 16000)[50:1550] - expected[50:1550]).abs().max() < 2e-3


def test_an_hour_takes_little_time_and_memory(tmp_path: Path) -> None:
    path, second = tmp_path / "hour.wav", sine(440, 8000, 1)
    with soundfile.SoundFile(path, "w", 8000, 2, "PCM_U8") as file:
        for _ in range(3600):
            file.write(np.stack([second, second], 1))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    assert seconds_of(path) == 3600
    part = read_audio(path, 16000, 3599, 1)
    assert (part[50:-50] - torch.from_numpy(sine(440, 16000, 1)).float()[50:-50]).abs().max() < 0.01
    assert time.perf_counter() - start < 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 50_000  # kB
    whole = read_audio(path, 16000)
    assert len(whole) == 16000 * 3600 and time.perf_counter() - start < 30
    for moment in (0, 1800, 3598):
        cut = whole[16000 * moment :][100:16100]
        assert (cut - torch.from_numpy(sine(440, 16000, 2)[100:16100]).float()).abs().max() < 0.01
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 1_200_000  # 230 MB of samples; 3 times in all


def test_files_are_found_in_any_depth_case_and_script(tmp_path: Path) -> None:
    names = ["b.WAV", "a/Ω naïve 日本.flac", "a/c/d.e.Mp3", "z.opus"]
    others = ["text.txt", ".hidden.wav", ".cache/f.wav", "a/wav", "cover.jpg"]
    for name in names + others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    os.symlink(tmp_path / "a", tmp_path / "linked", target_is_directory=True)
    assert audio_files(tmp_path) == sorted(
        str(tmp_path / name) for name in [*names, *(f"linked/{n[2:]}" for n in names[1:3])]
    )
    assert audio_files(tmp_path / "b.WAV") == [str(tmp_path / "b.WAV")]
    path = write(tmp_path / "a/Ω naïve 日本.flac", np.full(10, 0.5))
    assert read_audio(path, 16000).tolist() == [0.5] * 10
    path = path.rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.flac"))  # no UTF-8
    assert read_audio(path, 16000).tolist() == [0.5] * 10


def test_folders_without_sounds_are_named(tmp_path: Path) -> None:
    (tmp_path / "text.txt").touch()
    with pytest.raises(FileNotFoundError, match=f"no sounds in the folder {tmp_path}.*flac.*wav"):
        audio_files(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"no folder or file at {tmp_path}/nowhere"):
        audio_files(tmp_path / "nowhere")
