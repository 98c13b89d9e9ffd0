"""The embedded speech, and the law of the sequences drawn from it."""

import hashlib
import itertools
import runpy
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchaudio.transforms import MelSpectrogram

import tasks.data.spoken
from tasks.data.spoken import (
    GAP,
    SAMPLE_RATE,
    VOICES,
    SpokenDigits,
    answers,
    draw_digits,
    embedded_clips,
)

DATA = Path(tasks.data.spoken.__file__).with_name("spoken_digits.npz")
SCRIPT = Path(__file__).parents[3] / "scripts" / "make_spoken_digits.py"
CONTENT = "5bcf09b230226d8fa58ca44c2004e90a9668b0758c955d02d07e84eb29db8018"


def test_the_file_is_small_and_as_made() -> None:
    assert DATA.stat().st_size < 3_000_000
    with np.load(DATA) as file:
        arrays = dict(file)
    content = b"".join(arrays[name].tobytes() for name in sorted(arrays))
    assert hashlib.sha256(content).hexdigest() == CONTENT
    assert arrays["samples"].dtype == np.uint8
    assert arrays["offsets"][-1] == len(arrays["samples"])


def test_the_licence_says_which_is_which_and_goes_with_the_wheel() -> None:
    text = DATA.with_suffix(".LICENSE").read_text()
    clips = embedded_clips()
    makers = Counter(clips.names[voice].split()[0] for voice in clips.voice)
    for kind, maker in (("SYNTHETIC", "espeak"), ("SYNTHETIC", "flite"), ("RECORDED", "asterisk")):
        assert f"{kind}: {makers[maker]} clips" in text
    assert sum(makers.values()) == 860 and "860 clips" in text and "78 voices" in text
    for words in ("Allison Smith", "licenses/by-sa/3.0", "GNU General", "Carnegie Mellon"):
        assert words in text
    root = SCRIPT.parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    shipped = [path for glob in project["project"]["license-files"] for path in root.glob(glob)]
    assert DATA.with_suffix(".LICENSE") in shipped
    assert "tasks" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def test_every_voice_says_every_digit_and_only_one_is_a_person() -> None:
    clips = embedded_clips()
    assert set(zip(clips.voice.tolist(), clips.digit.tolist(), strict=True)) == set(
        itertools.product(range(78), range(10))
    )
    assert Counter(clips.split) == {"train": 56, "val": 8, "test": 13, "recorded": 1}
    assert len(set(clips.names)) == 78
    for name, split, recorded in zip(clips.names, clips.split, clips.recorded, strict=True):
        assert recorded == (split == "recorded") == (name == "asterisk Allison Smith")
    assert len({word.tobytes() for word in clips.words}) == len(clips.words) == 860


def test_clips_are_words_without_silence_around_them() -> None:
    for word in embedded_clips().words:
        assert word.dtype == np.float32 and 0.12 < len(word) / SAMPLE_RATE < 1.1
        assert abs(np.abs(word).max() - 0.5) < 0.02
        ends = [np.abs(part).max() for part in (word[:240], word[-240:])]  # 30 ms
        assert min(ends) > 0.005


def test_voices_of_the_splits_are_disjoint_and_as_the_script_says() -> None:
    names = {split: SpokenDigits(split, 1).names for split in VOICES}
    assert len(set(itertools.chain.from_iterable(names.values()))) == 78
    held_out: dict[str, str] = runpy.run_path(str(SCRIPT))["HELD_OUT"]
    for split, variants in held_out.items():
        found = [name.split("+")[1] for name in names[split] if "+" in name]
        assert sorted(found) == sorted(variants.split())
    assert "flite rms" in names["test"] and names["recorded"] == ["asterisk Allison Smith"]
    for split in VOICES:
        data = SpokenDigits(split, 10)
        said = Counter(data.utterance(index).voice for index in range(3 * len(data.names)))
        assert said == dict.fromkeys(data.names, 3)


def allowed(others: tuple[int, ...]) -> set[tuple[int, ...]]:
    """All orders of 0, 1, 2 and ``others`` that the rule allows, by trying every one."""
    orders = set(itertools.permutations((0, 1, 2, *others)))
    return {
        order
        for order in orders
        if order[0] > 2
        and order[-1] > 2
        and all(max(pair) > 2 for pair in itertools.pairwise(order))
    }


@pytest.mark.parametrize("others", [(3, 3, 3, 3), (3, 4, 5, 6), (3, 3, 4, 9), (7, 7, 8, 8, 8)])
def test_all_answers_are_equally_likely_given_the_bag_of_words(others: tuple[int, ...]) -> None:
    counts = Counter(tuple(answers(np.array(order)).values()) for order in allowed(others))
    assert set(counts) == set(itertools.permutations(range(3), 2))
    assert len(set(counts.values())) == 1


def test_digits_are_drawn_uniformly_from_what_the_rule_allows() -> None:
    count = 40_000
    draw = np.random.default_rng(0)
    seen = Counter(tuple(draw_digits(draw, 8).tolist()) for _ in range(count))
    places, orders = Counter(), Counter()
    for digits, times in seen.items():
        others = tuple(digit for digit in digits if digit > 2)
        assert len(others) == 5 and max(digits) <= 9
        assert sorted(digits)[:3] == [0, 1, 2]
        assert digits[0] > 2 < digits[-1]
        assert all(max(pair) > 2 for pair in itertools.pairwise(digits))
        place = tuple(i for i, digit in enumerate(digits) if digit < 3)
        places[place] += times
        orders[(place, tuple(digits[i] for i in place))] += times
    assert len(places) == 4 and len(orders) == 24  # C(4, 3) choices of gaps, 3! orders
    expected = count / 24
    chi_squared = sum((times - expected) ** 2 / expected for times in orders.values())
    assert chi_squared < 49.7  # 23 degrees of freedom, p = 0.001


@pytest.mark.parametrize("split", VOICES)
@pytest.mark.parametrize("digits", [(7, 7), (7, 10), (24, 24)])
def test_an_item_is_what_its_plan_says(split: Any, digits: tuple[int, int]) -> None:
    data = SpokenDigits(split, 30, digits)
    assert len(data) == 30 and data.sample_rate == 8000
    assert data.classes == {"first": ["zero", "one", "two"], "last": ["zero", "one", "two"]}
    numbers = set()
    for index in range(20):
        sound, labels = data[index]
        plan = data.utterance(index)
        numbers.add(len(plan.digits))
        assert sound.shape == (plan.samples,) and sound.dtype == torch.float32
        assert sound.abs().max() <= 1
        assert {name: label.item() for name, label in labels.items()} == data.labels(index)
        assert all(label.dtype == torch.int64 and label.ndim == 0 for label in labels.values())
        order = [digit for digit in plan.digits if digit < 3]
        assert (labels["first"], labels["last"]) == (order[0], order[-1])
        starts, ends = plan.starts, plan.ends
        gaps = np.diff(np.stack([np.r_[0, ends], np.r_[starts, plan.samples]]), axis=0)[0]
        assert (GAP[0] * 8000 - 1 < gaps).all() and (gaps < GAP[1] * 8000 + 1).all()
        assert gaps.std() > 0
        speech = np.zeros(plan.samples, bool)
        for start, end in zip(starts, ends, strict=True):
            speech[start:end] = True
        silence = sound.numpy()[~speech]
        assert abs(silence.std() / plan.noise - 1) < 0.1
        clips = embedded_clips()
        for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
            word = clips.words[plan.clips[place]]
            assert clips.digit[plan.clips[place]] == plan.digits[place]
            assert clips.names[clips.voice[plan.clips[place]]] == plan.voice
            heard = np.abs(sound.numpy()[start:end]).max()
            peak = plan.gains[place] * np.abs(word).max()
            assert 0.7 * peak < heard < peak + 6 * plan.noise  # at another speed, between samples
            if split != "train":
                expected = plan.gains[place] * word
                assert np.abs(sound.numpy()[start:end] - expected).max() < 6 * plan.noise
    assert digits[0] <= min(numbers) and max(numbers) <= digits[1]
    assert len(numbers) == digits[1] - digits[0] + 1


def test_training_words_are_played_at_other_speeds_and_others_are_not() -> None:
    clips = embedded_clips()
    ratios: dict[str, list[float]] = {}
    for split in VOICES:
        data = SpokenDigits(split, 50)
        plans = [data.utterance(index) for index in range(50)]
        ratios[split] = [
            len(clips.words[clip]) / length
            for plan in plans
            for clip, length in zip(plan.clips, plan.ends - plan.starts, strict=True)
        ]
    assert all(set(ratios[split]) == {1.0} for split in VOICES[1:])
    assert 0.79 < min(ratios["train"]) < 0.85 and 1.2 < max(ratios["train"]) < 1.26


def test_a_sequence_follows_from_its_split_seed_and_index_alone() -> None:
    data, again = SpokenDigits("train", 5, seed=3), SpokenDigits("train", 9, seed=3)
    state = torch.get_rng_state()
    for index in (4, 0, 1007):
        assert torch.equal(data[index][0], again[index][0])
    assert torch.equal(torch.get_rng_state(), state)
    lines = [
        tuple(SpokenDigits(split, 5, (24, 24), seed=seed).utterance(index).digits.tolist())
        for split in VOICES
        for seed in (0, 1)
        for index in (0, 5)
    ]
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("dev", 1), "voices is 'dev'; expected one of"),
        (("test", 0), "samples is 0; expected at least 1"),
        (("test", 1, (6, 9)), r"digits is \(6, 9\); expected the fewest, at least 7"),
        (("test", 1, (9, 8)), r"digits is \(9, 8\)"),
    ],
)
def test_what_cannot_be_said_is_refused(arguments: tuple, words: str) -> None:
    checked: Any = SpokenDigits
    with pytest.raises(ValueError, match=words):
        checked(*arguments)
    with pytest.raises(ValueError, match="seed is -1"):
        SpokenDigits("test", 1, seed=-1)


def statistics(split: Any, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and deviation of log-mel frames over each sequence and over its quarters; ``first``."""
    mel = MelSpectrogram(8000, n_fft=256, win_length=200, hop_length=80, n_mels=40, f_min=60)
    bags, quarters, labels = [], [], []
    data = SpokenDigits(split, count, (7, 7))
    for index in range(count):
        sound, label = data[index]
        frames = (mel(sound) + 1e-5).log()
        whole, *parts = (
            torch.cat([part.mean(1), part.std(1)])
            for part in (frames, *frames.tensor_split(4, dim=1))
        )
        bags.append(whole)
        quarters.append(torch.cat(parts))
        labels.append(label["first"])
    return torch.stack(bags), torch.stack(quarters), torch.stack(labels)


def accuracy(train: Tensor, labels: Tensor, test: Tensor, answers: Tensor) -> float:
    """Of multinomial logistic regression on standardised features."""
    mean, std = train.mean(0), train.std(0)
    train, test = (
        torch.cat([(part - mean) / std, torch.ones(len(part), 1)], 1) for part in (train, test)
    )
    weight = torch.zeros(train.shape[1], 3, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = cross_entropy(train @ weight, labels) + 0.01 * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return float(((test @ weight).argmax(1) == answers).float().mean())


def test_a_bag_of_frames_is_at_chance_and_order_is_not() -> None:
    bags, quarters, labels = statistics("train", 1000)
    test_bags, test_quarters, test_labels = statistics("test", 1500)
    bag = accuracy(bags, labels, test_bags, test_labels)
    ordered = accuracy(quarters, labels, test_quarters, test_labels)
    assert abs(bag - 1 / 3) < 0.05  # four standard deviations
    assert ordered > 0.6


def test_the_script_cuts_silence_off_and_keeps_the_word() -> None:
    made = runpy.run_path(str(SCRIPT))
    time = torch.arange(8000) / 16000
    word = (2 * torch.pi * 440 * time).sin() * torch.hann_window(8000)
    quiet = 1e-4 * torch.randn(6400, generator=torch.Generator().manual_seed(0))
    clip = made["Clip"](torch.cat([quiet, 0.1 * word, quiet]), 16000, 3, "voice", "train", False)
    levels = made["prepare"](clip)
    assert levels.dtype == np.uint8 and 3400 < len(levels) < 4200
    assert abs(int(levels[0]) - 128) <= 1 and abs(int(levels[-1]) - 128) <= 1
    # 0.5 is at log(1 + 255/2) / log(256) of the way from the middle to the end
    assert abs(int(levels.max()) - (127.5 + 127.5 * np.log(128.5) / np.log(256))) <= 1


def test_espeak_says_again_what_the_file_holds() -> None:
    pytest.importorskip("espeakng_loader", reason="only needed to make the file anew")
    made = runpy.run_path(str(SCRIPT))
    with np.load(DATA) as arrays:
        for number, clip in enumerate(itertools.islice(made["by_espeak"](), 20)):
            start, end = arrays["offsets"][number : number + 2]
            assert np.array_equal(made["prepare"](clip), arrays["samples"][start:end])
            assert (clip.digit, clip.voice) == (
                arrays["digit"][number],
                arrays["names"][number // 10],
            )
