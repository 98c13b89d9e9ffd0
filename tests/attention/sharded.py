"""Run as a program: a process and its peers share the tokens of every sequence."""

import inspect
import itertools
import runpy
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import mmpos
from mmpos import coordinates, frequencies
from mmpos.attention import SequenceShards

SLOTS = {
    mmpos.AdditiveEncoding: "additive",
    mmpos.RotaryEncoding: "rotary",
    mmpos.AttentionBias: "bias",
    mmpos.ContentBias: "bias",
}
GRIDS = {1: (700,), 2: (5, 290), 3: (2, 3, 270)}
VARIANTS = runpy.run_path(str(Path(__file__).parents[1] / "variants.py"))
LENGTHS = {2: (7, 4), 3: (5, 5, 1)}
SETTINGS = {
    "all": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 4},
    "near": {"window": 3},
    "documents": {"causal": True, "segments": True},
    "padding": {"mask": True, "rows": True},
    "prefix": {"class_token": True, "registers": 1, "mask": True},
    "causal prefix": {"class_token": True, "causal": True, "order": True},
    "order": {"causal": True, "window": 4, "segments": True, "order": True, "rows": True},
}


def concrete(base):
    found = [] if inspect.isabstract(base) else [base]
    for derived in base.__subclasses__():
        found += concrete(derived)
    return [cls for cls in found if cls.__module__.startswith("mmpos.")]


def encodings():
    """Every class of the package, in each of its variants, on each number of axes it has."""
    for base, slot in SLOTS.items():
        for cls in concrete(base):
            content = {"head_dim": 16} if base is mmpos.ContentBias else {}
            for named in VARIANTS["ARGUMENTS"].get(cls.__name__, [content]):
                for axes in VARIANTS["AXES"].get(cls.__name__, GRIDS):
                    own = {k: v(axes) if callable(v) else v for k, v in named.items()}
                    yield f"{cls.__name__} {named} {axes}", GRIDS[axes], {slot: partial(cls, **own)}


rope = mmpos.RotaryEncoding
MIXTURES = {
    "none": ((5, 290), {}, {}),
    "shared heads": ((700,), {"rotary": rope, "kv_heads": 1, "qk_norm": nn.LayerNorm}, {}),
    "three places": (
        (5, 290),
        {"additive": mmpos.LearnedEncoding, "rotary": rope, "bias": mmpos.ALiBi},
        {},
    ),
    "by layer": (
        (700,),
        {
            "rotary": [rope, nn.Identity],
            "bias": [nn.Identity, mmpos.T5Bias],
            "window": [3, None],
            "causal": True,
        },
        {},
    ),
    "own of each layer": (
        (5, 290),
        {
            "rotary": partial(mmpos.MixedRotaryEncoding, heads=3),
            "bias": mmpos.bias.LogCPB,
            "per_layer": ("rotary", "bias"),
        },
        {},
    ),
    "dynamic NTK": (
        (700,),
        {"rotary": partial(rope, extension=frequencies.DynamicNTK(original_length=6))},
        {"mask": True},
    ),
    "LongRoPE": (
        (700,),
        {
            "rotary": partial(
                rope,
                extension=frequencies.LongRoPE(
                    short_factor=[1.0] * 8, long_factor=[3.0] * 8, original_length=9, factor=4
                ),
            )
        },
        {},
    ),
    "scaled": (
        (5, 290),
        {
            "additive": partial(mmpos.SinusoidalEncoding, coordinates=coordinates.Scaled((7, 9))),
            "rotary": partial(rope, coordinates=coordinates.Centered(turns=True)),
            "bias": partial(mmpos.ALiBi, coordinates=coordinates.Scaled((7, 9))),
        },
        {"extent": (5, 290)},
    ),
    "extents of tokens": (
        (5, 290),
        {
            "additive": partial(mmpos.SinusoidalEncoding, coordinates=coordinates.Scaled((7, 9))),
            "rotary": partial(rope, coordinates=coordinates.Centered(turns=True)),
            "bias": partial(mmpos.ALiBi, coordinates=coordinates.Scaled((7, 9))),
        },
        {"extent": "tokens", "segments": True},
    ),
}


def cells(grid, count, seed=0):
    """Cells in random order, half of them near one another."""
    found = mmpos.positions.grid(*grid)
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))
    middle = len(found) // 2
    near = found[middle - 20 : middle + 20][order[order < 40]]
    return torch.cat((near[: count // 2], found[order]))[:count]


def call(named, grid, total):
    """What a forward pass is given along the tokens, of the whole sequence."""
    rows, tokens = {}, {}
    tokens["positions"] = cells(grid, total)
    if named.pop("rows", False):
        tokens["positions"] = torch.stack([cells(grid, total, seed) for seed in (0, 1)])
    if named.pop("segments", False):
        tokens["segments"] = torch.tensor([4, 4, 4, 0, 0, 0, 9, 9, 9, 9, 9])[:total]
    if named.pop("mask", False):
        tokens["mask"] = torch.arange(total) < torch.tensor([[total], [total - 3]])
    if named.get("extent") == "tokens":
        tokens["extent"] = torch.tensor([[5, 290]] * 4 + [[9, 300]] * (total - 4))[None]
        del named["extent"]
    if "extent" in named:
        rows["extent"] = named.pop("extent")
    return tokens, rows


def own_part(name, part, own):
    return part[..., own, :] if name in ("positions", "extent") else part[..., own]


def same(name, grid, named):
    rank, size = dist.get_rank(), dist.get_world_size()
    named = dict(named)
    order = torch.arange(total := sum(LENGTHS[size]))
    index = None
    starts = [0, *itertools.accumulate(LENGTHS[size])]
    if named.pop("order", False):
        order = torch.randperm(total, generator=torch.Generator().manual_seed(7))
        index = order[starts[rank] : starts[rank + 1]]
    own = order[starts[rank] : starts[rank + 1]]
    tokens, rest = call(named, grid, total)
    torch.manual_seed(0)
    model = mmpos.models.Transformer(grid, dim=48, depth=2, heads=3, **named).double().eval()
    for weight in model.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    prefix = model.prefix_tokens
    x = torch.randn(2, total, 48).double()
    w = torch.randn(2, prefix + total, 48).double()
    whole_x, own_x = x.clone().requires_grad_(), x[:, own].requires_grad_()
    whole = model(whole_x, **tokens, **rest)
    (whole * w).sum().backward()
    wanted = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    part = model(
        own_x,
        **{key: own_part(key, value, own) for key, value in tokens.items()},
        **rest,
        shards=SequenceShards(index=index),
    )
    loss = (part[:, prefix:] * w[:, prefix:][:, own]).sum()
    loss = loss + (part[:, :prefix] * w[:, :prefix]).sum() / size
    loss.backward()
    close = partial(
        torch.testing.assert_close, rtol=1e-10, atol=1e-10, msg=lambda m: f"{name}: {m}"
    )
    close(part[:, prefix:], whole[:, prefix:][:, own])
    close(part[:, :prefix], whole[:, :prefix])
    close(own_x.grad, whole_x.grad[:, own])
    found = [p.grad for p in model.parameters()]
    assert [g is None for g in found] == [g is None for g in wanted], name
    flat, wanted = (
        torch.cat([g.flatten() for g in all_ if g is not None]) for all_ in (found, wanted)
    )
    dist.all_reduce(flat)
    close(flat, wanted)


def every_encoding():
    """One setting for each variant, another in three processes; all of them if asked to."""
    size, settings = dist.get_world_size(), list(SETTINGS.items())
    for i, (name, grid, slot) in enumerate(encodings()):
        turn = (i + 4 * (size == 3)) % len(settings)
        for setting, named in settings if "all" in sys.argv else settings[turn : turn + 1]:
            same(f"{name}, {setting}", grid, slot | named)
    for name, (grid, named, more) in MIXTURES.items():
        for setting in ({}, {"causal": True}):
            same(name, grid, named | more | setting)
    same("every setting", (700,), {"rotary": rope, "bias": mmpos.T5Bias} | SETTINGS["order"])


def nano(**named):
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"dim": 48, "depth": 2, "heads": 3} | named
    return mmpos.models.Transformer((700,), **sizes).double()


class Wide(nn.LayerNorm):
    """Gives float32 under autocast, as it does on CUDA."""

    def forward(self, input):
        return super().forward(input.to(torch.float32)).to(torch.float32)


def whole_and_own(seed=3):
    """Tokens and positions, and which are the own ones."""
    x = torch.randn(2, 11, 48, generator=torch.Generator().manual_seed(seed)).double()
    return x, mmpos.positions.sequence(11), SequenceShards().cut(11)


def draws_alike():
    """Disturbances and drop path are those of one process, whatever was drawn before."""
    shaken = partial(mmpos.RotaryEncoding, coordinates=coordinates.Index(shift=9.0, jitter=2.0))
    model = nano(rotary=shaken, drop_path=0.5, depth=6).train()
    x, positions, own = whole_and_own()
    seeds, seeded = [], torch.manual_seed
    torch.manual_seed = lambda seed: (seeds.append(seed), seeded(seed))[1]
    seeded(dist.get_rank())
    part = model(x[:, own], positions[own], shards=SequenceShards())
    after = torch.rand(())
    torch.manual_seed = seeded
    torch.manual_seed(seeds[0])
    torch.testing.assert_close(part, model(x, positions)[:, own], rtol=0, atol=1e-10)
    torch.manual_seed(dist.get_rank())
    torch.randint(2**63 - 1, ())
    assert after == torch.rand(()), "each goes on with its own numbers"


def losses():
    """Means over all real tokens and over prefix tokens, summed over processes or averaged."""
    x, positions, own = whole_and_own()
    real = torch.arange(11) % 3 != 0
    size, shards = dist.get_world_size(), SequenceShards()
    for distributed in (False, True):
        model = nano(class_token=True, additive=mmpos.LearnedEncoding)
        out = model(x, positions)
        whole = out[:, 1:][:, real].square().mean() + out[:, 0].sin().mean()
        whole = whole + out[:, 1:].mean(1).square().sum()
        wanted = torch.autograd.grad(whole, list(model.parameters()))
        run = nn.parallel.DistributedDataParallel(model) if distributed else model
        out = run(x[:, own], positions[own], shards=shards)
        kept = out[:, 1:][:, real[own]]
        assert shards.total(kept.numel()) == 2 * 7 * 48
        loss = kept.square().sum() / shards.total(kept.numel())
        pooled = shards.gather(out[:, 1:]).mean(1).square().sum()
        loss = loss + (out[:, 0].sin().mean() + pooled) / size
        torch.testing.assert_close(shards.total(loss), whole.detach(), rtol=0, atol=1e-10)
        (loss * size if distributed else loss).backward()
        for weight, want in zip(model.parameters(), wanted, strict=True):
            if not distributed:
                dist.all_reduce(weight.grad)
            torch.testing.assert_close(weight.grad, want, rtol=0, atol=1e-10)


def refusals():
    """All processes raise, rather than wait for one another."""
    x, positions, own = whole_and_own()
    first, shards, model = (
        dist.get_rank() == 0,
        SequenceShards(),
        nano(additive=mmpos.LearnedEncoding),
    )
    places = torch.arange(11)[own]
    wrong = {
        "about mask": {"mask": torch.ones(2, len(places), dtype=torch.bool) if first else None},
        "about positions": {"positions": positions[own].float() if first else positions[own]},
        "about extent": {"extent": (700 + first,)},
        "about length": {"length": 11 + first},
        "about index": {"shards": SequenceShards(index=places) if first else shards},
        "mask is for 11 tokens": {"mask": torch.ones(2, 11, dtype=torch.bool)},
        "segments is for 11 tokens": {"segments": torch.zeros(11, dtype=torch.long)},
        "about lengths of mask": {"mask": torch.ones(2, 11 if first else len(places)).bool()},
        "about lengths of index": {"shards": SequenceShards(index=places[int(first) :])},
        "about training": {},
        "each place from 0 to 10 once": {"shards": SequenceShards(index=places * 0)},
        "index is for 1 tokens": {"shards": SequenceShards(index=places[:1])},
    }
    for message, given in wrong.items():
        model.train(message == "about training" and first)
        try:
            model(x[:, own], **{"positions": positions[own], "shards": shards, **given})
        except ValueError as refused:
            assert message in str(refused), (message, refused)
            assert "\n" not in str(refused)
        else:
            raise AssertionError(f"not refused: {message}")


def communication():
    """One exchange of keys and values in each layer and way, and positions once."""
    x, positions, own = whole_and_own()
    sent, ways = [], {name: getattr(dist, name) for name in ("all_gather", "reduce_scatter")}

    def counted(name):
        def call(out, given, group=None):
            parts = given if isinstance(given, list) else [given]
            sent.append((name, parts[0].numel() * parts[0].element_size()))
            return ways[name](out, given, group=group)

        return call

    for name in ways:
        setattr(dist, name, counted(name))
    longest = -(-11 // dist.get_world_size())
    layer = 2 * 2 * 1 * longest * 16 * 8  # keys and values, rows, heads, tokens, features, bytes
    for slot in (
        {},
        {"additive": mmpos.SinusoidalEncoding},
        {"rotary": rope},
        {"bias": mmpos.ALiBi},
    ):
        sent.clear()
        model = nano(kv_heads=1, **slot)
        out = model(x[:, own], positions[own], shards=SequenceShards())
        forward = [("all_gather", 8 * 14), ("all_gather", 8 * longest)]
        assert sent == [*forward, *[("all_gather", layer)] * 2], sent
        sent.clear()
        out.sum().backward()
        assert sent == [("reduce_scatter", layer)] * 2, sent
        sent.clear()
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        whole = model(x, positions, shards=SequenceShards(alone))
        assert torch.equal(whole, model(x, positions))
        assert not sent
    with torch.autocast("cpu", torch.bfloat16):
        model = nano(qk_norm=Wide).to(torch.float32)
        model(x[:, own].float(), positions[own], shards=SequenceShards())
    assert sent[2:] == [("all_gather", 3 * layer // 4)] * 2, "three heads, in two bytes"
    for name, way in ways.items():
        setattr(dist, name, way)


def precision():
    """Half precision by autocast, with norms that give float32; the gradient of a gradient."""
    x, positions, own = whole_and_own()
    model = nano(rotary=rope, qk_norm=Wide, causal=True).to(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        part = model(x[:, own].float(), positions[own], shards=SequenceShards())
        whole = model(x.float(), positions)
    torch.testing.assert_close(part, whole[:, own], rtol=0, atol=0.05)
    own_x = x[:, own].clone().requires_grad_()
    size = dist.get_world_size()
    (slope,) = torch.autograd.grad(
        SequenceShards().gather(own_x).pow(3).sum() / size, own_x, create_graph=True
    )
    torch.testing.assert_close(slope, 3 * own_x**2, rtol=0, atol=1e-10)
    (curve,) = torch.autograd.grad(slope.pow(2).sum(), own_x)
    torch.testing.assert_close(curve, 36 * own_x**3, rtol=0, atol=1e-10)


def no_tokens():
    """A process may have none."""
    x, positions, _ = whole_and_own()
    own = slice(0, 11) if dist.get_rank() == 0 else slice(11, 11)
    model = nano(bias=mmpos.T5Bias, causal=True)
    part = model(x[:, own], positions[own], shards=SequenceShards())
    part.sum().backward()
    torch.testing.assert_close(part, model(x, positions)[:, own], rtol=0, atol=1e-10)


CHECKS = [draws_alike, losses, refusals, communication, precision, no_tokens]


def rank(index, store, size):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}{size}",
        rank=index,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    for check in CHECKS:
        check()
    torch.Tensor.float = torch.Tensor.double  # what is formed in float32 would round differently
    every_encoding()
    dist.destroy_process_group()


if __name__ == "__main__":
    for size in LENGTHS:
        mp.start_processes(rank, args=(sys.argv[1], size), nprocs=size, start_method="fork")
