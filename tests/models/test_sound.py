"""Tokens of sound: what the convolutions are, which tokens are real, and where they are in time."""

import inspect
import runpy
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import mmpos
from mmpos.frequencies import DynamicNTK
from mmpos.models import Classifier, FrameEmbedding, SpectrogramPatches, Transformer

VARIANTS = runpy.run_path(str(Path(__file__).parents[1] / "variants.py"))
SLOTS = {
    mmpos.AdditiveEncoding: "additive",
    mmpos.RotaryEncoding: "rotary",
    mmpos.AttentionBias: "bias",
    mmpos.ContentBias: "bias",
}
GRIDS = {1: (700,), 2: (5, 290)}
DIM, HEADS, BINS = 48, 3, 20
STEMS = [
    {},
    {"kernels": (4, 3), "strides": (2, 2)},
    {"kernels": (5, 2, 3), "strides": (2, 3, 2)},
    {"bins": 1, "kernels": (10, 3), "strides": (5, 2)},
    {"kernels": (1,), "strides": (3,)},
    {"kernels": (2,), "strides": (5,)},
]
LENGTHS = (37, 2, 61, 16)


def concrete(base: type) -> list[type]:
    found = [] if inspect.isabstract(base) else [base]
    found += [cls for derived in base.__subclasses__() for cls in concrete(derived)]
    return [cls for cls in found if cls.__module__.startswith("mmpos.")]


def encodings() -> list:
    """Every class of the package on one axis and on two, with the options of a transformer."""
    cases = []
    for (base, slot), (axes, grid) in product(SLOTS.items(), GRIDS.items()):
        for cls in concrete(base):
            named = VARIANTS["ARGUMENTS"].get(cls.__name__, [{}])
            for each in named if axes in VARIANTS["AXES"].get(cls.__name__, GRIDS) else []:
                made = {
                    key: value(axes) if callable(value) else value for key, value in each.items()
                }
                name = "-".join([cls.__name__, *map(str, each), f"{axes}d"])
                cases.append(pytest.param(grid, {slot: partial(cls, **made)}, id=name))
    return cases


ENCODINGS = [
    *(pytest.param(grid, {}, id=f"none-{axes}d") for axes, grid in GRIDS.items()),
    *encodings(),
    pytest.param(
        GRIDS[1],
        {"rotary": partial(mmpos.RotaryEncoding, extension=DynamicNTK(original_length=4))},
        id="dynamic-1d",
    ),
]


def frames(length: int, bins: int = BINS, rows: int = 2) -> torch.Tensor:
    draw = torch.Generator().manual_seed(length)
    return torch.randn(rows, bins, length, generator=draw, dtype=torch.float64)


def stem(causal: bool, **named) -> FrameEmbedding:
    return FrameEmbedding(8, **{"bins": BINS, **named}, causal=causal).double()


def padded(lengths, longest: int, fill: float, bins: int = BINS):
    """Clips, alone and in one batch, where what is beyond their ends is garbage."""
    clips = [frames(length, bins, rows=1) for length in lengths]
    batch = torch.full((len(clips), bins, longest), fill, dtype=torch.float64)
    for row, clip in enumerate(clips):
        batch[row, :, : clip.shape[-1]] = clip[0]
    return clips, batch, torch.arange(longest) < torch.tensor(lengths)[:, None]


def test_the_default_is_the_stem_of_whisper() -> None:
    made = FrameEmbedding(16, 80)
    first, second = made.convolutions
    x = torch.randn(2, 80, 31)
    hidden = F.gelu(F.conv1d(x, first.weight, first.bias, padding=1))
    wanted = F.gelu(F.conv1d(hidden, second.weight, second.bias, stride=2, padding=1)).mT
    tokens = made(x)
    torch.testing.assert_close(tokens.values, wanted)
    assert first.kernel_size == second.kernel_size == (3,) and made.stride == 2
    assert tokens.mask is None and tokens.extent is None
    assert torch.equal(tokens.positions, torch.arange(16)[:, None])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("named", STEMS)
def test_a_token_is_centred_on_its_frame(named, causal: bool) -> None:
    """A full convolution at every frame, of which strides take some."""
    made = stem(causal, **named)
    for length in (1, 2, 3, 29, 30, 31):
        x = wanted = frames(length, named.get("bins", BINS))
        for layer in made.convolutions:
            (kernel,), (stride,) = layer.kernel_size, layer.stride
            left = kernel - 1 if causal else (kernel - 1) // 2
            full = F.conv1d(wanted, layer.weight, layer.bias, padding=kernel - 1)
            full = full[..., kernel - 1 - left :][..., : wanted.shape[-1]]
            wanted = F.gelu(full[..., ::stride])
        tokens = made(x)
        torch.testing.assert_close(tokens.values, wanted.mT)
        assert made.grid(x.shape[1], length) == (len(tokens.positions),) == (wanted.shape[-1],)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("named", STEMS)
def test_on_which_frames_a_token_depends(named, causal: bool) -> None:
    made = stem(causal, **named)
    x = frames(90, named.get("bins", BINS), rows=1).requires_grad_()
    values = made(x).values[0]
    seen = range(made.left // made.stride + 1, len(values) - made.left // made.stride - 2)
    assert len(seen) > 2
    for token in seen:
        (gradient,) = torch.autograd.grad(values[token].sum(), x, retain_graph=True)
        on = gradient[0].abs().sum(0).nonzero().flatten()
        assert on[0] == token * made.stride - made.left
        if causal:
            assert on[-1] <= token * made.stride
        if causal or all(layer.kernel_size[0] % 2 for layer in made.convolutions):
            after = 0 if causal else made.left
            assert on[-1] == token * made.stride + after
    later = x.detach().clone()
    later[..., 41:] = torch.nan
    if causal:
        heard = -(-41 // made.stride)
        assert torch.equal(made(later).values[:, :heard], values[None, :heard])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("named", STEMS)
@pytest.mark.parametrize("fill", [torch.nan, torch.inf, 1e30])
def test_padded_rows_have_the_tokens_that_they_have_alone(named, causal: bool, fill: float) -> None:
    made = stem(causal, **named)
    clips, batch, mask = padded(LENGTHS, 70, fill, named.get("bins", BINS))
    batch.requires_grad_()
    tokens = made(batch, mask)
    for row, clip in enumerate(clips):
        alone = made(clip).values[0]
        assert tokens.mask[row].sum() == len(alone) and tokens.mask[row, : len(alone)].all()
        torch.testing.assert_close(tokens.values[row, : len(alone)], alone, rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(tokens.values[tokens.mask].sum(), batch)
    assert not gradient.mT[~mask].any() and gradient.mT[mask].abs().sum() > 0


def test_positions_are_counts_or_a_multiple_of_frames() -> None:
    made = stem(False, kernels=(3, 3), strides=(3, 2))
    x = frames(20)
    assert made(x).positions.flatten().tolist() == [0, 1, 2, 3]
    assert not made(x).positions.is_floating_point()
    assert made(x, None, 2).positions.flatten().tolist() == [0, 12, 24, 36]
    seconds = made(x, step=0.01).positions
    assert seconds.dtype == torch.float64
    torch.testing.assert_close(seconds.flatten(), torch.tensor([0, 0.06, 0.12, 0.18]).double())
    patches = SpectrogramPatches(8, BINS, patch_size=(8, 6), stride=(6, 4)).double()
    wanted = [[f, t] for f, t in product(range(3), range(5))]
    assert patches(x).positions.tolist() == wanted
    assert not patches(x).positions.is_floating_point()
    wanted = torch.tensor([[f, t * 0.044] for f, t in wanted]).double()
    torch.testing.assert_close(patches(x, step=0.011).positions, wanted, check_dtype=False)


PATCHES = [
    {},
    {"patch_size": (8, 6), "stride": (6, 4), "rest": ("pad", "drop")},
    {"patch_size": (7, 5), "stride": None, "rest": ("pad", "pad")},
    {"patch_size": (3, 9), "stride": (1, 2), "rest": ("drop", "drop")},
]


def covered(size: int, patch: int, stride: int, rest: str) -> int:
    """How many patches there are, by trying."""
    count = 1
    if rest == "drop":
        while count * stride + patch <= size:
            count += 1
    else:
        while (count - 1) * stride + patch < size:
            count += 1
    return count


@pytest.mark.parametrize("length", [16, 25, 26, 27, 36, 43])
@pytest.mark.parametrize("named", PATCHES)
def test_patches_are_windows_in_order_of_frequency(named, length: int) -> None:
    made = SpectrogramPatches(8, BINS, **named).double()
    x = frames(length)
    sizes, strides, rests = made.patch_size, made.stride, made.rest
    cells = [covered(*each) for each in zip((BINS, length), sizes, strides, rests, strict=True)]
    bigger = torch.zeros(2, 90, 90, dtype=torch.float64)
    bigger[:, :BINS, :length] = x
    windows = bigger.unfold(1, sizes[0], strides[0]).unfold(2, sizes[1], strides[1])
    windows = windows[:, : cells[0], : cells[1]].flatten(1, 2).flatten(2)
    wanted = F.linear(windows, made.project.weight.flatten(1), made.project.bias)
    tokens = made(x)
    torch.testing.assert_close(tokens.values, wanted)
    assert made.grid(BINS, length) == tuple(cells)
    assert tokens.positions.tolist() == [list(cell) for cell in product(*map(range, cells))]


def test_the_grid_of_the_audio_spectrogram_transformer() -> None:
    """12 × 101 of ten seconds, and 12 × 12 of one, sec. 2.1 and its AudioSet and commands runs."""
    whole = partial(SpectrogramPatches, 8, 128, rest=("drop", "drop"))
    assert whole().grid(128, 1024) == (12, 101) and whole().grid(128, 128) == (12, 12)
    assert SpectrogramPatches(8, 128).grid(128, 1024) == (12, 102)
    assert SpectrogramPatches(8, 128).grid(128, 5) == (12, 1)


@pytest.mark.parametrize("named", PATCHES)
def test_a_patch_is_real_where_it_adds_something(named) -> None:
    made = SpectrogramPatches(8, BINS, **named).double()
    patch, stride, drop = made.patch_size[1], made.stride[1], made.rest[1] == "drop"
    lengths = [n for n in range(41) if not (drop and 0 < n < patch)]
    _, batch, mask = padded(lengths, 40, torch.nan)
    tokens = made(batch, mask)
    rows, columns = made.grid(BINS, 40)
    for row, length in enumerate(lengths):
        adds = []
        for token in range(columns):
            own = set(range(token * stride, token * stride + patch))
            before = set(range((token - 1) * stride + patch)) if token else set()
            new = (own - before) & set(range(length))
            adds.append(max(own) < length if drop else bool(new))
        assert tokens.mask[row].view(rows, columns).tolist() == [adds] * rows
        if length:
            alone = made(frames(length, rows=1)).values[0]
            assert tokens.mask[row].sum() == len(alone)
            torch.testing.assert_close(tokens.values[row, tokens.mask[row]], alone)


def test_a_row_that_is_shorter_than_a_patch_is_refused_where_the_rest_is_dropped() -> None:
    dropping = SpectrogramPatches(8, 16, rest=("drop", "drop"))
    mask = torch.arange(40) < torch.tensor([[40], [15], [16]])
    with pytest.raises(ValueError, match="an input of 15 frames is smaller than a patch of 16"):
        dropping(torch.zeros(3, 16, 40), mask)
    assert dropping(torch.zeros(2, 16, 40), mask[::2]).mask.sum(-1).tolist() == [3, 1]
    for tokens in (dropping, FrameEmbedding(8, 16)):
        with pytest.raises(ValueError, match="sound has no frames"):
            tokens(torch.zeros(2, 16, 0))


@pytest.mark.parametrize("step", [None, 0.25])
@pytest.mark.parametrize("pool", ["mean", "prefix"])
@pytest.mark.parametrize(("grid", "slots"), ENCODINGS)
def test_a_short_clip_in_a_batch_is_as_alone(grid, slots, pool, step) -> None:
    front = partial(FrameEmbedding, strides=(1, 2))
    if len(grid) == 2:
        front = partial(SpectrogramPatches, patch_size=(8, 6), stride=(6, 4))
    encoder = Transformer(
        grid,
        dim=DIM,
        depth=2,
        heads=HEADS,
        class_token=pool == "prefix",
        **slots,
        registers=int(pool == "prefix"),
    )
    model = Classifier(front(DIM, BINS), encoder, {"word": 5}, pool=pool).eval()
    for name, parameter in model.named_parameters():  # attention that looks
        if parameter.ndim > 1 and ".layers." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    for dtype, near in ((torch.float32, 1e-5), (torch.float64, 1e-6)):  # encodings are float32
        model.to(dtype)
        clips, batch, mask = padded(LENGTHS, 70, torch.nan)
        named = {} if step is None else {"step": step}
        with torch.no_grad():
            try:
                alone = [model(clip.to(dtype), **named)["word"][0] for clip in clips]
            except ValueError as refused:
                assert step and "whole position" in str(refused)
                with pytest.raises(ValueError, match="whole position"):
                    model(batch.to(dtype), mask, **named)
                return
            answers = model(batch.to(dtype), mask, **named)["word"]
        torch.testing.assert_close(answers, torch.stack(alone), rtol=near, atol=near)
    assert (answers[0] - answers[2]).abs().max() > 1e-3


def scores(positions: torch.Tensor, turn: bool = True) -> torch.Tensor:
    """``q · k`` of moments, each with a query and a key of its own, turned by where they are."""
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 3, len(positions), 16, generator=draw)
    if not turn:
        return torch.stack((q, k)).double()
    rotation = mmpos.RotaryEncoding(16, positions.shape[-1])(positions)
    return mmpos.rotate(q, rotation) @ mmpos.rotate(k, rotation).mT


def test_the_mean_of_the_prefix_is_of_its_tokens_alone() -> None:
    encoder = Transformer(2, size="nano", depth=1, class_token=True, registers=1)
    model = Classifier(SpectrogramPatches(64, BINS), encoder, {"word": 5}, pool="prefix")
    x = frames(30).float()
    values, positions, *_ = model.tokens(x)
    first, second = encoder(values, positions).unbind(1)[:2]
    torch.testing.assert_close(model(x)["word"], model.heads["word"]((first + second) / 2))


@pytest.mark.parametrize("ticks", [1, 25, 50, 100])
@pytest.mark.parametrize("strides", [(2, 2), (2, 1), (1, 2), (4, 1)])
def test_scores_in_seconds_do_not_depend_on_rate_hop_and_stride(strides, ticks: int) -> None:
    """16 kHz at a hop of 10 ms and 8 kHz at 20 ms, compared each 40 ms."""
    where, counted = [], []
    for stride, rate in zip(strides, (16000, 8000), strict=True):
        seconds = 160 / rate
        made = stem(False, strides=(1, stride))
        common = slice(0, 16 * round(0.04 / seconds) // stride, round(0.04 / seconds) // stride)
        x = frames(round(0.64 / seconds))
        where.append(made(x, step=seconds * ticks).positions[common])
        counted.append(made(x).positions[common])
    fine, coarse = map(scores, where)
    torch.testing.assert_close(coarse, fine, rtol=0, atol=1e-5)
    q, k = scores(where[0], turn=False).unflatten(-1, (-1, 2))
    q, k = torch.view_as_complex(q), torch.view_as_complex(k)
    moments = torch.arange(16).double() * 0.04 * ticks
    angles = (moments[:, None] - moments)[..., None] * 10000.0 ** (-torch.arange(8).double() / 8)
    wanted = torch.einsum("bhmp,bhnp,mnp->bhmn", q, k.conj(), (1j * angles).exp()).real
    torch.testing.assert_close(fine.double(), wanted, rtol=0, atol=1e-5)
    if strides[0] != 2 * strides[1]:  # else tokens are as far apart, and counts agree
        assert (scores(counted[1]) - scores(counted[0])).abs().max() > 1


def test_scores_in_seconds_of_waveforms_and_patches() -> None:
    wave = stem(False, bins=1, kernels=(10, 8, 4), strides=(5, 8, 4))  # a token each 10 or 20 ms
    found = []
    for rate in (16000, 8000):
        x, moments = frames(rate // 2, bins=1, rows=1), slice(None, None, rate // 8000)
        positions = [wave(x, step=step).positions[moments] for step in (50 / rate, None)]
        found.append([scores(each) for each in positions])
    for rate, stride in ((16000, 4), (8000, 4), (8000, 2)):
        made = SpectrogramPatches(8, BINS, patch_size=(8, 4), stride=(6, stride)).double()
        x = frames(rate // 250)
        cells = [
            made(x, step=s).positions.unflatten(0, made.grid(*x.shape[1:]))
            for s in (160 / rate * 50, None)
        ]
        moments = slice(None, 7 * 8 * rate // 16000 // stride, 8 * rate // 16000 // stride)
        found.append([scores(each[:, moments].flatten(0, 1)) for each in cells])
    (wave, counts), (wave_8, counts_8), (fine, cells), *others = found
    torch.testing.assert_close(wave_8, wave, rtol=0, atol=1e-5)
    assert (counts_8 - counts).abs().max() > 1 and len(fine[0, 0]) == 21
    for (coarse, index), apart in zip(others, (True, False), strict=True):
        torch.testing.assert_close(coarse, fine, rtol=0, atol=1e-5)
        assert ((index - cells).abs().max() > 1) == apart


@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit() -> None:
    mask = torch.ones(2, 9, dtype=torch.bool)
    for made in (stem(False), SpectrogramPatches(8, BINS, stride=(4, 4)).double()):
        for wrong in (frames(30, bins=7), frames(30)[0]):
            with pytest.raises(
                ValueError, match=r"^sound has shape \(.*\), expected \[batch, 20, f"
            ):
                made(wrong)
        with pytest.raises(ValueError, match=r"input \(2, 20, 30\) is \(2, 30\), got \(2, 9\)$"):
            made(frames(30), mask)
    for kernels, strides in (((3, 3), (1,)), ((3,), (0,)), ((0, 3), (1, 2)), ((), ())):
        with pytest.raises(ValueError, match=r"^expected as many kernels as strides, each 1"):
            FrameEmbedding(8, 80, kernels=kernels, strides=strides)
    with pytest.raises(ValueError, match=r"^bins .*, got 0"):
        FrameEmbedding(8, 0)
    with pytest.raises(ValueError, match=r"^an input of 12 bins is smaller than a patch of 16"):
        SpectrogramPatches(8, 12)
    short = SpectrogramPatches(8, BINS, rest=("drop", "drop")).double()
    with pytest.raises(ValueError, match=r"^an input of 15 frames .* or rest='pad' on this axis$"):
        short(frames(15))
    for stride in ((17, 10), (10, 17), (0, 1)):
        with pytest.raises(ValueError, match=r"^a stride is from 1 to the patch.* of \(16, 16\)$"):
            SpectrogramPatches(8, 80, stride=stride)
    with pytest.raises(ValueError, match=r"^patch_size, stride and rest are for bins and f"):
        SpectrogramPatches(8, 80, patch_size=(16,), stride=None)
    with pytest.raises(ValueError, match=r"^rest must be one of .*, got 'crop'$"):
        SpectrogramPatches(8, 80, rest=("crop", "pad"))
    with pytest.raises(ValueError, match=r"^pool='prefix' reads a class token that"):
        Classifier(stem(False), Transformer(1, size="nano"), {"word": 2}, pool="prefix")
