"""Positions of mixed sequences against transformers' own indices, each family by its own rule."""

import random
from types import MethodType, SimpleNamespace

import pytest
import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniPreTrainedModelForConditionalGeneration as Omni,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.vision_utils import get_vision_position_ids

from mmpos.positions import (
    Audio,
    Counting,
    Image,
    Interleaved,
    Text,
    Video,
    blocks,
    of_rows,
    of_types,
)

pytestmark = pytest.mark.peer("transformers")
seeds = pytest.mark.parametrize("seed", range(6))
MERGE = 2
FAMILIES = {
    "qwen2_vl": (Qwen2VLModel, Counting(MERGE, "extent"), False),
    "qwen2_5_vl": (Qwen2_5_VLModel, Counting(MERGE, "extent", ticks=2), False),
    "qwen3_vl": (Qwen3VLModel, Counting(MERGE, "extent"), True),
}


def bare(cls, *methods: str, **attributes):
    """What the methods of a model need of it, and no weights."""
    model = SimpleNamespace(**attributes)
    for name in methods:
        setattr(model, name, MethodType(getattr(cls, name), model))
    return model


def grid_of(part) -> list[int]:
    return [part.frames if isinstance(part, Video) else 1, part.height, part.width]


def drawn(seed: int, stamped: bool) -> list[list]:
    """Rows with text around each of several images and videos, none of them square by design."""
    draw = random.Random(seed)
    rows = []
    for _ in range(5):
        row: list = [Text(draw.randint(1, 9))]
        for _ in range(draw.randint(1, 5)):
            height, width = MERGE * draw.randint(1, 7), MERGE * draw.randint(1, 7)
            if draw.random() < 0.5:
                row.append(Image(height, width))
            else:
                frames = draw.randint(1, 12)
                stamps = tuple(draw.randint(1, 6) for _ in range(frames)) if stamped else None
                seconds = draw.choice([0.5, 2 / 3, 0.8, 1.0, 1.37, 5.0])
                row.append(Video(frames, height, width, seconds=seconds, stamps=stamps))
            row.append(Text(draw.randint(1, 9)))
        rows.append(row if draw.random() < 0.7 else row[:-1])
    return rows


def types_of(row: list) -> list[int]:
    types = []
    for part in row:
        if isinstance(part, Text):
            types += [0] * part.length
            continue
        frames, height, width = grid_of(part)
        frame = [1 + isinstance(part, Video)] * (height * width // MERGE**2)
        stamps = getattr(part, "stamps", None) or [0] * frames
        for stamp in stamps:
            types += [0] * stamp + frame
    return types


def padded(rows: list[list[int]], side: str, fill: int = 0):
    """Rows as one tensor, and its mask."""
    length = max(map(len, rows)) + 3
    lay = lambda row, own, rest: rest + own if side == "left" else own + rest  # noqa: E731
    values = [lay(row, row, [fill] * (length - len(row))) for row in rows]
    mask = [lay(row, [True] * len(row), [False] * (length - len(row))) for row in rows]
    return torch.tensor(values), torch.tensor(mask)


@seeds
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_qwen_vl(family, side, seed):
    cls, counting, stamped = FAMILIES[family]
    rows = drawn(seed, stamped)
    types, mask = padded([types_of(row) for row in rows], side)
    parts = [part for row in rows for part in row]
    images = torch.tensor([grid_of(part) for part in parts if isinstance(part, Image)])
    videos = [part for part in parts if isinstance(part, Video)]
    grids = torch.tensor([grid_of(part) for part in videos])
    seconds = torch.tensor([part.seconds for part in videos])
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=2)
    model = bare(
        cls,
        "get_vision_position_ids",
        "get_rope_index",
        config=SimpleNamespace(vision_config=vision),
    )
    theirs, delta = model.get_rope_index(
        torch.ones_like(types),
        types,
        image_grid_thw=images,
        video_grid_thw=grids,
        second_per_grid_ts=seconds,
        attention_mask=mask.long(),
    )
    for ours in (
        of_rows(rows, counting, length=types.shape[1], side=side),
        of_types(
            types,
            counting,
            mask=mask,
            images=images,
            videos=grids,
            seconds=seconds,
            stamped=stamped,
        ),
    ):
        torch.testing.assert_close(ours.positions, theirs.movedim(0, -1), rtol=0, atol=0)
        torch.testing.assert_close(ours.delta.unsqueeze(-1), delta, rtol=0, atol=0)
        assert torch.equal(ours.mask, mask)


TEXT_ID, IMAGE_ID, VIDEO_ID, AUDIO_ID, LOOK, LISTEN, END = range(7)
SPECIAL = SimpleNamespace(
    image_token_id=IMAGE_ID,
    video_token_id=VIDEO_ID,
    audio_token_id=AUDIO_ID,
    vision_start_token_id=LOOK,
    audio_start_token_id=LISTEN,
    position_id_per_seconds=25,
    seconds_per_chunk=2,
)
TMROPE = Counting(MERGE, ticks=25)


def omni_row(draw: random.Random, turns: bool) -> tuple[list, list[int]]:
    """Parts and token ids of text and of media between marks."""
    row, ids = [], []
    for _ in range(draw.randint(1, 4)):
        said = draw.randint(1, 5)
        height, width = MERGE * draw.randint(1, 5), MERGE * draw.randint(1, 5)
        frames, gap = draw.randint(1, 9), draw.choice([0.5, 1.0, 1.5, 2.0])
        video, image = Video(frames, height, width, seconds=gap), Image(height, width)
        patches = height * width // MERGE**2
        kind = draw.choice(["both", "image"] if turns else ["audio", "image", "video"])
        if kind == "both":
            sound = Audio(int(25 * gap * frames) + draw.randint(0, 9), rate=25)
            both = Interleaved(video, sound)
            row += [Text(said), Text(2, step=0), both, Text(2, step=0)]
            tokens = [AUDIO_ID if heard else VIDEO_ID for heard in both.kinds(TMROPE)]
            ids += [TEXT_ID] * said + [LOOK, LISTEN, *tokens, END, END]
            continue
        part, token, count = {
            "audio": (Audio(frames * 7, rate=25), AUDIO_ID, frames * 7),
            "image": (image, IMAGE_ID, patches),
            "video": (video, VIDEO_ID, patches * frames),
        }[kind]
        row += [Text(said + 1), part, Text(1)]
        ids += [TEXT_ID] * said + [LISTEN if kind == "audio" else LOOK] + [token] * count + [END]
    said = draw.randint(1, 5)
    return [*row, Text(said)], ids + [TEXT_ID] * said


@seeds
@pytest.mark.parametrize("turns", [False, True])
def test_qwen_omni(turns, seed):
    draw = random.Random(seed)
    rows, ids = zip(*(omni_row(draw, turns) for _ in range(5)), strict=True)
    tokens, mask = padded(list(ids), "left")
    parts = [part for row in rows for part in row]
    both = [part for part in parts if isinstance(part, Interleaved)]
    videos = [part for part in parts if isinstance(part, Video)] + [part.video for part in both]
    audios = [part for part in parts if isinstance(part, Audio)] + [part.audio for part in both]
    images = [part for part in parts if isinstance(part, Image)]
    model = bare(
        Omni,
        "get_rope_index",
        "get_llm_pos_ids_for_vision",
        "get_chunked_index",
        config=SPECIAL,
        spatial_merge_size=MERGE,
    )
    theirs, delta = model.get_rope_index(
        tokens,
        image_grid_thw=torch.tensor([grid_of(part) for part in images]),
        video_grid_thw=torch.tensor([grid_of(part) for part in videos]),
        attention_mask=mask.long(),
        use_audio_in_video=turns,
        audio_seqlens=torch.tensor([4 * part.count for part in audios]),
        second_per_grids=torch.tensor([part.seconds for part in videos]),
    )
    ours = of_rows(rows, TMROPE, length=tokens.shape[1], side="left")
    assert torch.equal(ours.mask, mask)
    torch.testing.assert_close(
        ours.positions[mask], theirs.movedim(0, -1)[mask], rtol=0, atol=0, check_dtype=False
    )
    torch.testing.assert_close(ours.delta.unsqueeze(-1), delta, rtol=0, atol=0)


@seeds
def test_patches_in_the_order_of_the_vision_tower(seed):
    draw = random.Random(seed)
    merge = draw.choice([1, 2, 3])
    sizes = (draw.randint(1, 4), merge * draw.randint(1, 5), merge * draw.randint(1, 5))
    grids = torch.tensor([sizes])
    theirs = get_vision_position_ids(grids, merge, include_temporal=True)
    torch.testing.assert_close(blocks(*sizes, merge=merge), theirs, rtol=0, atol=0)
