"""Tokens of clips: what a tubelet is of, which are real, and where they are in time."""

import inspect
import os
import runpy
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

import mmpos
from mmpos.coordinates import Scaled
from mmpos.models import Classifier, PatchEmbedding, Transformer, TubeletEmbedding
from mmpos.models.tubelets import inflated_kernel

VARIANTS = runpy.run_path(str(Path(__file__).parents[1] / "variants.py"))
SLOTS = {
    mmpos.AdditiveEncoding: "additive",
    mmpos.RotaryEncoding: "rotary",
    mmpos.AttentionBias: "bias",
    mmpos.ContentBias: "bias",
}
DIM, HEADS, SIZE, PATCH = 48, 3, (4, 6), (2, 2)
LENGTHS, LONGEST = (7, 1, 4, 5), 9
TABLES = (mmpos.LearnedEncoding, mmpos.FactorizedEncoding)


def concrete(base: type) -> list[type]:
    found = [] if inspect.isabstract(base) else [base]
    found += [cls for derived in base.__subclasses__() for cls in concrete(derived)]
    return [cls for cls in found if cls.__module__.startswith("mmpos.")]


def encodings() -> list:
    """Every class of the package that takes three axes, with the options of a transformer."""
    cases = [pytest.param({}, id="none")]
    for base, slot in SLOTS.items():
        for cls in concrete(base):
            named = VARIANTS["ARGUMENTS"].get(cls.__name__, [{}])
            for each in named if 3 in VARIANTS["AXES"].get(cls.__name__, (3,)) else []:
                if "key_grid" in each:  # for keys elsewhere than queries
                    continue
                made = {key: value(3) if callable(value) else value for key, value in each.items()}
                cases.append(
                    pytest.param(
                        {slot: partial(cls, **made)}, id="-".join([cls.__name__, *map(str, each)])
                    )
                )
    two = partial(mmpos.RotaryEncoding, coordinates=Scaled((None, 4, 4)))
    both = {"additive": mmpos.SinusoidalEncoding, "rotary": two, "bias": mmpos.ALiBi}
    return [*cases, pytest.param(both, id="three at once")]


def clip(frames: int, rows: int = 1, channels: int = 2) -> torch.Tensor:
    draw = torch.Generator().manual_seed(frames)
    return torch.randn(rows, channels, frames, *SIZE, generator=draw, dtype=torch.float64)


def padded(fill: float = torch.nan) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Clips, alone and in one batch, where what is beyond their ends is garbage."""
    clips = [clip(length) for length in LENGTHS]
    batch = torch.full((len(clips), 2, LONGEST, *SIZE), fill, dtype=torch.float64)
    for row, own in enumerate(clips):
        batch[row, :, : own.shape[2]] = own[0]
    return clips, batch, torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]


def cut(tubelet: int, dim: int = 8) -> TubeletEmbedding:
    torch.manual_seed(1)
    return TubeletEmbedding(dim, (tubelet, *PATCH), 2).double()


def by_hand(made: TubeletEmbedding, x: torch.Tensor) -> torch.Tensor:
    """Tubelet by tubelet; frames beyond the last are the last."""
    weight, (time, high, wide) = made.project.weight.flatten(1), made.patch_size
    frames = list(x.unbind(2))
    frames += [frames[-1]] * (-len(frames) % time)
    rows, columns = x.shape[3] // high, x.shape[4] // wide
    tokens = []
    for t, h, w in product(range(len(frames) // time), range(rows), range(columns)):
        part = torch.stack(frames[t * time : (t + 1) * time], 2)
        part = part[..., h * high : (h + 1) * high, w * wide : (w + 1) * wide]
        tokens.append(part.flatten(1) @ weight.T + made.project.bias)
    return torch.stack(tokens, 1)


@pytest.mark.parametrize("tubelet", [1, 2, 3])
@pytest.mark.parametrize("frames", range(1, 8))
def test_a_last_tubelet_is_filled_with_the_last_frame(frames: int, tubelet: int) -> None:
    made, x = cut(tubelet), clip(frames, rows=2)
    tokens = made(x)
    torch.testing.assert_close(tokens.values, by_hand(made, x))
    cells = (-(-frames // tubelet), 2, 3)
    assert tokens.extent == cells == made.grid(frames, *SIZE) and tokens.mask is None
    assert tokens.positions.tolist() == [list(cell) for cell in product(*map(range, cells))]


@pytest.mark.parametrize("fill", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("tubelet", [1, 2, 3])
def test_padded_rows_have_the_tokens_that_they_have_alone(tubelet: int, fill: float) -> None:
    made = cut(tubelet)
    clips, batch, mask = padded(fill)
    batch.requires_grad_()
    tokens = made(batch, mask)
    assert tokens.extent == made.grid(LONGEST, *SIZE)
    for row, own in enumerate(clips):
        alone, real = made(own), tokens.mask[row]
        assert real.tolist() == [i < len(alone.positions) for i in range(len(real))]
        torch.testing.assert_close(tokens.values[row, real], alone.values[0])
        assert torch.equal(tokens.positions[real], alone.positions)
    tokens.values.sum().backward()
    assert batch.grad is not None and batch.grad.isfinite().all()
    assert (batch.grad.abs().sum((1, 3, 4)) > 0).equal(mask)


def test_a_row_without_frames_is_padding_alone() -> None:
    _, batch, mask = padded()
    batch[2], mask[2] = torch.nan, False
    tokens = cut(2)(batch, mask)
    assert tokens.values.isfinite().all() and not tokens.mask[2].any()


def classifier(slots: dict, tubelet: int, pool="mean") -> Classifier:
    torch.manual_seed(0)
    tokens = TubeletEmbedding(DIM, (tubelet, *PATCH), 2)
    slots = {slot: made for slot, made in slots.items() if made is not None}
    prefix = {"class_token": pool != "mean", "registers": int(pool != "mean")}
    shape = {"dim": DIM, "depth": 2, "heads": HEADS, **prefix}
    encoder = Transformer(tokens.grid(LONGEST, *SIZE), **shape, **slots)
    model = Classifier(tokens, encoder, {"kind": 5}, pool=pool).double().eval()
    for name, parameter in model.named_parameters():  # attention that looks
        if parameter.ndim > 1 and ".layers." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def answer(model: Classifier, x: torch.Tensor, extent, step=None) -> torch.Tensor:
    """Of a clip alone, in which encodings read ``extent``: what a batch spans, for tables."""
    tokens = model.tokens(x, step=step)
    encoded = model.transformer(tokens.values, tokens.positions, extent=extent)
    return model.answers(model.pooled(encoded))["kind"][0]


@pytest.mark.parametrize("steps", [None, (0.5, 2.0, 1.0, 0.25), (2, 1, 1, 2)])
@pytest.mark.parametrize("tubelet", [2, 3])
@pytest.mark.parametrize("slots", encodings())
def test_a_short_clip_in_a_batch_is_as_alone(slots: dict, tubelet: int, steps) -> None:
    model = classifier(slots, tubelet, "mean" if tubelet == 2 else "prefix")
    clips, batch, mask = padded()
    named = {} if steps is None else {"step": torch.tensor(steps, dtype=torch.float64)}
    table = isinstance(model.transformer.additive, TABLES)
    with torch.no_grad():
        try:
            answers = model(batch, mask, **named)["kind"]
        except ValueError as refused:  # tables are for one grid and whole positions
            assert steps and ("whole position" in str(refused) or "was made for" in str(refused))
            return
        for row, own in enumerate(clips):
            step = None if steps is None else steps[row]
            if not table:
                alone = model(own, step=step)["kind"][0]
            else:
                alone = answer(model, own, model.tokens.grid(LONGEST, *SIZE), step)
            torch.testing.assert_close(answers[row], alone, rtol=1e-6, atol=1e-6)
    assert (answers[0] - answers[2]).abs().max() > 1e-3


def test_each_row_has_a_step_of_its_own() -> None:
    made, x, steps = cut(2), clip(5, rows=3), (0.1, 3.0, 1 / 30)
    tokens = made(x, step=torch.tensor(steps, dtype=torch.float64))
    for row, step in enumerate(steps):
        alone = made(x[row : row + 1], step=step)
        torch.testing.assert_close(tokens.values[row], alone.values[0])
        assert torch.equal(tokens.positions[row], alone.positions)
        assert torch.equal(tokens.extent[row], alone.extent)
        torch.testing.assert_close(alone.extent[0], torch.tensor(6 * step).double())


def test_rows_of_other_rates_are_read_each_as_alone() -> None:
    """Where encodings read the extent: scaled on all axes, and an extension by it."""
    x, steps = clip(LONGEST, rows=3), torch.tensor([0.25, 1.0, 2.0]).double()
    dynamic = mmpos.frequencies.DynamicNTK(original_length=4)
    for named in ({"coordinates": Scaled((8, 4, 4))}, {"extension": [dynamic, None, None]}):
        model = classifier({"rotary": partial(mmpos.RotaryEncoding, **named)}, 1)
        answers = model(x, step=steps)["kind"]
        for row, step in enumerate(steps.tolist()):
            alone = model(x[row : row + 1], step=step)["kind"][0]
            torch.testing.assert_close(answers[row], alone, rtol=1e-6, atol=1e-6)


def test_tubelets_of_one_frame_are_the_patches_of_frames() -> None:
    made, x = cut(1), clip(5, rows=2)
    flat = PatchEmbedding(8, PATCH, 2).double()
    flat.load_state_dict(
        {n: v.squeeze(2) for n, v in made.state_dict().items() if v.ndim > 1}, False
    )
    flat.project.bias = made.project.bias
    frames = flat(x.transpose(1, 2).flatten(0, 1))
    tokens = made(x)
    torch.testing.assert_close(tokens.values, frames.values.reshape(2, -1, 8))
    cells = tokens.positions.view(5, -1, 3)
    assert all(torch.equal(cells[frame, :, 1:], frames.positions) for frame in range(5))
    assert cells[..., 0].tolist() == [[frame] * 6 for frame in range(5)]


@pytest.mark.parametrize("tubelet", [1, 2, 3, 4])
def test_an_inflated_kernel(tubelet: int) -> None:
    flat, made = PatchEmbedding(8, PATCH, 2).double(), cut(tubelet)
    made.project.bias = flat.project.bias
    still, moving = clip(1).expand(-1, -1, 2 * tubelet, -1, -1), clip(2 * tubelet)
    made.project.weight.data = inflated_kernel(flat.project.weight, tubelet)
    once = flat(still[:, :, 0]).values
    torch.testing.assert_close(made(still).values, once.repeat(1, 2, 1))
    each = flat(moving.transpose(1, 2)[0]).values.view(2, tubelet, 6, 8)
    torch.testing.assert_close(made(moving).values[0], each.mean(1).flatten(0, 1))
    made.project.weight.data = inflated_kernel(flat.project.weight, tubelet, "central")
    centre = each[:, tubelet // 2].flatten(0, 1)
    torch.testing.assert_close(made(moving).values[0], centre)


def test_the_patch_may_become_another() -> None:
    made, x = cut(2), clip(7)
    made.patch_size = (2, 4, 6)
    assert made(x).values.shape == (1, 4, 8) and made.grid(7, *SIZE) == (4, 1, 1)
    assert made(x).extent == (4, 1, 1)


@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit() -> None:
    made, x = cut(2), clip(5, rows=3)
    for wrong in (x[0], x[:, :, 0], x[None]):
        with pytest.raises(ValueError, match=r"^clips have shape \(.*\), expected \[batch, chan"):
            made(wrong)
    with pytest.raises(ValueError, match=r"^frames of 4 × 5 cannot be cut into patches of 2 × 2"):
        made(x[..., :5])
    with pytest.raises(ValueError, match=r"^frames of 3 × 6 cannot be cut into patches of 2 × 2"):
        made(x[..., :3, :])
    with pytest.raises(ValueError, match=r"^a clip has 1 frame or more, got 0$"):
        made(x[:, :, :0])
    with pytest.raises(ValueError, match=r"^the mask of clips \(3, 2, 5, 4, 6\) is \(3, 5\), got"):
        made(x, torch.ones(3, 4, dtype=torch.bool))
    mask = torch.tensor([[True] * 5, [False] + [True] * 4, [True] * 5])
    with pytest.raises(ValueError, match=r"^padding comes at the end of a row"):
        made(x, mask)
    for step in (0, -1.0, torch.nan, torch.inf, torch.tensor([1.0, 0.0, 2.0])):
        with pytest.raises(ValueError, match=r"^step must be above 0 and finite, got"):
            made(x, step=step)
    for step in (torch.ones(2), torch.ones(3, 1)):
        with pytest.raises(ValueError, match=r"^step is one number or one for each of 3 rows, got"):
            made(x, step=step)
    for size in ((2, 2), (4,), (1, 2, 2, 2)):
        with pytest.raises(ValueError, match=r"^a tubelet has three sizes, frames, height and wi"):
            TubeletEmbedding(8, size)
    for wrong in ((torch.ones(1, 1, 2), 2), (torch.ones(1, 1, 2, 2), 0)):
        with pytest.raises(ValueError, match=r"^expected a kernel \[out, channel, height, width\]"):
            inflated_kernel(*wrong)
    with pytest.raises(ValueError, match=r"'mean' or 'central', got .*'middle'$"):
        inflated_kernel(torch.ones(1, 1, 2, 2), 2, "middle")


TRACED = """
import warnings
import torch
from mmpos.models import TubeletEmbedding

torch.manual_seed(0)
made = TubeletEmbedding(8, (2, 2, 2), 1)
mask = torch.arange(7) < torch.tensor([[7], [4]])
steps = torch.tensor([0.5, 2.0]).double()
compiled = torch.compile(made, backend="eager", fullgraph=True)
for frames, named in ((7, {}), (6, {}), (7, {"mask": mask}), (7, {"mask": mask, "step": steps}),
                      (5, {"step": 0.25})):
    x = torch.randn(2, 1, frames, 4, 4)
    for got, wanted in zip(compiled(x, **named), made(x, **named), strict=True):
        assert got == wanted if not torch.is_tensor(wanted) else torch.equal(got, wanted)


class Of(torch.nn.Module):
    def __init__(self, tokens):
        super().__init__()
        self.tokens = tokens

    def forward(self, *given):
        found = self.tokens(*given)
        return found.values, found.positions


clips, frames = (torch.randn(2, 1, 8, 4, 4), mask), torch.export.Dim("half", min=2, max=64) * 2
mask = torch.arange(8) < torch.tensor([[8], [5]])
warnings.simplefilter("ignore")
for given in ((clips[0],), (clips[0], mask)):
    shapes = ({2: frames}, {1: frames})[: len(given)]
    exported = torch.export.export(Of(made), given, dynamic_shapes=(shapes,)).module()
    x = torch.randn(2, 1, 6, 4, 4)
    more = (x, *[torch.arange(6) < torch.tensor([[6], [3]])] * (len(given) - 1))
    for got, wanted in zip(exported(*more), Of(made)(*more), strict=True):
        assert torch.equal(got, wanted)
"""


def test_compiled_and_exported_code_gives_the_same() -> None:
    run = subprocess.run(
        [sys.executable, "-c", TRACED],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "JAXTYPING_DISABLE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
