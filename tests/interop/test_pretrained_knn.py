"""The script on pretrained weights: what it converts, which pictures it takes, how they vote."""

import copy
import importlib.util
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

onnx = pytest.importorskip("onnx")

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrained_knn.py"
DIM, DEPTH = 12, 2
PATH = "backbone.encoder.layer.1"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("pretrained_knn", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def tiny() -> torch.nn.Module:
    """A model in which no parameter is like another."""
    model = timm.create_model(
        "vit_small_patch14_dinov2", img_size=56, embed_dim=DIM, depth=DEPTH, num_heads=2
    )
    for parameter in model.parameters():
        parameter.data.normal_()
    return model.eval()


def graph_of(model, *, without: str = "", table: tuple[int, ...] | None = None):
    """An ONNX graph that names and lays out weights as transformers' export does."""
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    arrays = {
        "backbone.embeddings.cls_token": state["cls_token"],
        "onnx::Concat_7": state["pos_embed"][:, :1],
        "onnx::Reshape_9": state["pos_embed"][:, 1:],
        "backbone.embeddings.patch_embeddings.projection.weight": state["patch_embed.proj.weight"],
        "backbone.embeddings.patch_embeddings.projection.bias": state["patch_embed.proj.bias"],
        "backbone.layernorm.weight": state["norm.weight"],
        "backbone.layernorm.bias": state["norm.bias"],
        "decoder.weight": np.zeros((1, 3, DIM), np.float32),
    }
    if table is not None:
        arrays["onnx::Reshape_9"] = np.zeros(table, np.float32)
    nodes = []
    for layer in range(DEPTH):
        own = {k.split(".", 2)[2]: v for k, v in state.items() if k.startswith(f"blocks.{layer}.")}
        path = f"backbone.encoder.layer.{layer}"
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
            arrays[f"{path}.{name}"] = own[name]
        for scale in (1, 2):
            arrays[f"{path}.layer_scale{scale}.lambda1"] = own[f"ls{scale}.gamma"]
        linear = {
            "attention.output.dense": ("attn.proj", slice(None)),
            "mlp.fc1": ("mlp.fc1", slice(None)),
            "mlp.fc2": ("mlp.fc2", slice(None)),
        }
        for place, kind in enumerate(("query", "key", "value")):
            rows = slice(place * DIM, (place + 1) * DIM)
            linear[f"attention.attention.{kind}"] = ("attn.qkv", rows)
        for number, (name, (key, rows)) in enumerate(linear.items()):
            arrays[f"{path}.{name}.bias"] = own[f"{key}.bias"][rows]
            weight = f"onnx::MatMul_{100 * layer + number}"
            arrays[weight] = own[f"{key}.weight"][rows].T
            node = "/" + f"{path}.{name}".replace(".", "/").replace("layer/", "layer.") + "/MatMul"
            nodes.append(onnx.helper.make_node("MatMul", ["x", weight], ["y"], name=node))
        nodes.append(onnx.helper.make_node("MatMul", ["q", "k"], ["s"], name=f"/{path}/MatMul"))
    arrays = {k: np.ascontiguousarray(v) for k, v in arrays.items() if k != without}
    stored = [onnx.numpy_helper.from_array(value, key) for key, value in arrays.items()]
    return onnx.helper.make_graph(nodes, "tiny", [], [], stored)


def test_every_parameter_is_converted(script):
    model, other = tiny(), tiny()
    x = torch.randn(2, 3, 56, 56)
    assert not torch.equal(model(x), other(x))
    script.convert(script.stored(graph_of(model)), other)
    for (key, wanted), got in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(wanted, got), key
    assert torch.equal(model(x), other(x))


@pytest.mark.parametrize(
    ("named", "fault"),
    [
        ({"without": "backbone.layernorm.bias"}, r'Missing key\(s\) in state_dict: "norm.bias"\.'),
        ({"without": f"{PATH}.attention.attention.key.bias"}, '"blocks.1.attn.qkv.bias"'),
        ({"without": "onnx::MatMul_101"}, '"blocks.1.mlp.fc1.weight"'),
        ({"without": "onnx::Concat_7"}, '"pos_embed"'),
        ({"table": (1, 25, DIM)}, r"pos_embed: .*\[1, 26, 12\].*\[1, 17, 12\]"),
        ({"table": (1, 16, DIM + 1)}, "Sizes of tensors must match"),
    ],
)
def test_what_is_missing_or_of_another_shape_is_named(script, named, fault):
    with pytest.raises(RuntimeError, match=fault):
        script.convert(script.stored(graph_of(tiny(), **named)), tiny())


def paint(path: Path, colour: tuple[int, ...], size=(20, 10), mode="RGBA") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def test_pictures_come_in_the_order_of_their_paths_and_once(script, tmp_path):
    for name in ("b/z/2.png", "b/1.png", "b/a/3.png", "a/9.png", "a/x/y/0.png"):  # not in order
        shade = int(name[-5])
        paint(tmp_path / name, (10 * shade, 0, 0, 255))
    paint(tmp_path / "b" / "again.png", (10, 0, 0, 255))  # as b/1.png
    paint(tmp_path / "b" / "flat.png", (20, 0, 0), mode="RGB")  # as b/z/2.png, stored otherwise
    paint(tmp_path / "b" / "wide.png", (10, 0, 0, 255), size=(21, 10))
    paint(tmp_path / "b" / "small.png", (11, 0, 0, 255), size=(40, 9))
    paint(tmp_path / "c" / "only.png", (99, 0, 0, 255))
    (tmp_path / "a" / "note.txt").write_text("no picture")
    images, names, dropped = script.pictures(tmp_path, None, 2, 10)
    shades = [image.getpixel((image.width // 2, image.height // 2))[0] for image in images]
    assert names == ["a", "a", "b", "b", "b", "b"]
    assert shades == [90, 0, 10, 20, 10, 30]
    assert dropped == 2
    _, names, _ = script.pictures(tmp_path, ["c", "a"], 1, 10)
    assert names == ["a", "a", "c"]


def test_too_few_classes_are_refused(script, tmp_path):
    paint(tmp_path / "a" / "1.png", (1, 0, 0, 255))
    paint(tmp_path / "b" / "1.png", (2, 0, 0, 255))
    assert len(script.pictures(tmp_path, None, 1, 10)[0]) == 2
    with pytest.raises(ValueError, match="fewer than 2 classes of 2 pictures of 10 px"):
        script.pictures(tmp_path, None, 2, 10)


def test_a_picture_is_a_square_on_white(script):
    image = Image.new("RGBA", (4, 2), (0, 0, 0, 0))
    image.putpixel((1, 0), (255, 0, 0, 255))
    image.putpixel((2, 1), (0, 0, 0, 51))  # one fifth
    values = np.asarray(script.squared(image))
    wanted = np.full((4, 4, 3), 255)
    wanted[1, 1], wanted[2, 2] = (255, 0, 0), (204, 204, 204)
    assert np.array_equal(values, wanted)
    x = script.batch([script.squared(image)], 4, timm.create_model("vit_tiny_patch16_224"))
    assert torch.equal(x[0, :, 1, 1], torch.tensor([1.0, -1.0, -1.0]))  # mean 0.5, deviation 0.5


def test_neighbours_vote_as_by_the_formula(script):
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(4, (40,), generator=torch.Generator().manual_seed(2))
    rows, kinds = x.tolist(), labels.tolist()
    for k, temperature in ((1, 0.07), (5, 0.5), (39, 0.2)):
        right = []
        for i, own in enumerate(rows):
            near = sorted(
                (
                    (
                        sum(map(math.prod, zip(own, other, strict=True)))
                        / math.hypot(*own)
                        / math.hypot(*other),
                        c,
                    )
                    for j, (other, c) in enumerate(zip(rows, kinds, strict=True))
                    if j != i
                ),
                reverse=True,
            )[:k]
            votes = [
                sum(math.exp(s / temperature) for s, c in near if c == kind) for kind in range(4)
            ]
            right.append(votes.index(max(votes)) == kinds[i])
        assert script.neighbours(x, labels, k, temperature).tolist() == right
        assert 0 < sum(right) < 40


def test_each_way_is_measured_at_each_size(script):
    model = tiny()
    before = model.pos_embed.clone()
    images = [Image.new("RGB", (30, 30), (9 * i, 90, 255 - 9 * i)) for i in range(24)]
    labels = torch.arange(24) // 12
    results = list(script.measured(model, images, labels, (28, 42), 2))
    assert torch.equal(model.pos_embed, before)
    ways = [script.PIXELS, script.OURS, script.TIMMS, script.DRAWN, script.DRAWN, script.ZERO]
    assert [each.way for each in results if each.size == 28] == ways
    twice = f"{script.OURS}, by way of 28"
    assert [each.way for each in results if each.size == 42] == [*ways[:2], twice, *ways[2:]]
    assert results[0].accuracy > 90  # one colour after another
    shown = script.table(results)
    assert shown.row_count == 6 and "(" in list(shown.columns[1].cells)[3]


def test_the_ways_differ_in_the_table_alone(script):
    model = tiny()
    tables, others = {}, dict(model.named_parameters())
    (pixels, _), *ways = ((way, copy.deepcopy(each)) for way, each in script.ways(model, 42, 28, 1))
    assert pixels == script.PIXELS
    for way, there in ways:
        tables[way] = there.pos_embed.detach().clone()
        for key, value in there.named_parameters():
            assert key == "pos_embed" or torch.equal(value, others[key])
    assert {tuple(each.shape) for each in tables.values()} == {(1, 10, DIM)}
    grid = model.pos_embed[:, 1:].reshape(1, 4, 4, DIM).movedim(-1, 1)
    wanted = torch.nn.functional.interpolate(grid, (3, 3), mode="bicubic")
    got = tables[script.OURS][:, 1:].reshape(1, 3, 3, DIM).movedim(-1, 1)
    assert torch.allclose(got, wanted, atol=1e-5)
    assert not torch.allclose(tables[script.OURS], tables[script.TIMMS], atol=1e-2)
    assert not torch.allclose(
        tables[script.OURS], tables[f"{script.OURS}, by way of 28"], atol=1e-2
    )
    assert tables[script.DRAWN].abs().max() <= 2 and 0.015 < tables[script.DRAWN].std() < 0.025
    assert not tables[script.ZERO].any()


def test_rope_learns_from_the_other_half_what_the_table_gave(script, monkeypatch):
    model = tiny()
    model.pos_embed.data *= 5
    before = {key: value.clone() for key, value in model.state_dict().items()}
    images = [Image.new("RGB", (30, 30), (9 * i, 90, 255 - 9 * i)) for i in range(24)]
    x = script.batch(images, 28, model)
    learn, apart = script.distil, []

    def watched(student, teacher, pictures, size, steps):
        assert pictures == images[1::2] and size == 28
        assert student.pos_embed is None and student.mmpos.rotary is not None
        row = before["pos_embed"][:, :1]
        assert torch.equal(student.cls_token, before["cls_token"] + row)
        for rate in (None, 2e-3):
            if rate:
                learn(student, teacher, pictures, size, steps, rate)
            with torch.no_grad():
                apart.append(1 - torch.cosine_similarity(student.eval()(x), teacher(x)).mean())

    judge, measured = script.judged, []
    monkeypatch.setattr(script, "distil", watched)
    monkeypatch.setattr(script, "judged", lambda *a: (measured.append(a[2:]), judge(*a))[1])
    labels = torch.arange(24) // 12
    results = list(script.distilled(model, images, labels, (28, 42), 60))
    rows = ("table", "RoPE, 0 steps", "RoPE, 60 steps")
    assert [(each.way, each.size) for each in results] == [(r, n) for r in rows for n in (28, 42)]
    assert all(torch.equal(own, labels[::2]) for _, own in measured)
    assert all(torch.equal(held, x[::2]) for held, _ in measured if held.shape[-1] == 28)
    assert 0 < apart[1] < apart[0] / 2
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_the_change_has_the_error_of_a_paired_difference(script):
    before = script.Result("a", 1, [True, True, False, False], 0.0)
    after = script.Result("b", 2, [True, True, True, False], 0.0)
    assert script.change(before, after) == "a at 1 → b at 2: +25.0 ± 25.0 points"


def test_the_command_from_weights_to_table(script, tmp_path, monkeypatch, capsys):
    models = [tiny() for _ in range(4)]
    monkeypatch.setattr(script.timm, "create_model", lambda name: models.pop())
    monkeypatch.setattr(script.torch, "set_num_threads", lambda count: None)
    onnx.save(onnx.helper.make_model(graph_of(models.pop())), tmp_path / "weights.onnx")
    for place, name in enumerate(("red", "blue", "rare")):
        for i in range(1 if name == "rare" else 12):
            paint(tmp_path / "pictures" / name / f"{i}.png", (90 * place, 9 * i, 90, 255))
    paths = ["--weights", str(tmp_path / "weights.onnx"), "--images", str(tmp_path / "pictures")]
    more = ["--sizes", "28", "42", "--least", "12", "--side", "10", "--seeds", "1"]
    script.main([*paths, *more, "--json", str(tmp_path / "out.json")])
    shown = capsys.readouterr().out
    assert "24 pictures, 0 dropped as the same: {'blue': 12, 'red': 12}" in shown
    assert "mmpos resize at 28 → mmpos resize at 42" in shown
    rows = json.loads((tmp_path / "out.json").read_text())
    assert len(rows) == 11 and {len(row["right"]) for row in rows} == {24}
    script.main([*paths, *more, "--finetune", "1"])
    assert "table at 28 → RoPE, 1 steps at 42" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        script.main([*paths, "--least", "9"])
    assert "fewer than 2 classes of 9 pictures of 64 px" in capsys.readouterr().err
