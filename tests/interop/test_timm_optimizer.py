"""An optimizer that has stepped goes on after its model is resized."""

import copy

import pytest
import torch
from torch.optim import SGD, Adagrad, AdamW, RMSprop

from mmpos.interop.timm import describe, resize
from mmpos.interop.timm.parts import tables
from mmpos.resample import Resampling

MODELS = {"vit": 96, "beit": 96, "swin": 192, "levit": 96, "hiera": 96, "pit": 96, "msra": 96}


def step(model, optimizer, x):
    for module in model.modules():
        if hasattr(module, "attention_bias_cache"):
            module.attention_bias_cache = {}
    y = model(x)
    y = y[0] if isinstance(y, tuple) else y
    optimizer.zero_grad()
    y.square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("make_optimizer", [AdamW, Adagrad, RMSprop, SGD])
@pytest.mark.parametrize("name", MODELS)
def test_it_steps_on_with_moments_of_the_new_grid(name, make_optimizer, make, image):
    model = make(name).train()
    named = {"momentum": 0.9} if make_optimizer is SGD else {}
    optimizer = make_optimizer(model.parameters(), lr=1e-3, **named)
    step(model, optimizer, image(*describe(model).image_size, batch=2))
    old = {id(table.parameter): table for table in tables(model)}
    before = copy.deepcopy({id(p): dict(state) for p, state in optimizer.state.items()})
    resize(model, MODELS[name], optimizer=optimizer)
    changed = 0
    for parameter, state in optimizer.state.items():
        table = old.get(id(parameter))
        for key, value in state.items():
            was = before[id(parameter)][key]
            if not isinstance(value, torch.Tensor) or not value.ndim:
                assert value == was
            elif table is None or value.shape == was.shape:
                assert torch.equal(value, was)
            else:
                changed += 1
                assert value.shape == parameter.shape
                if "sq" in key or key == "sum":
                    assert value.min() >= 0
                else:
                    again = table.resized(was, tables_grid(model, parameter))
                    torch.testing.assert_close(value, again)
    assert changed
    step(model, optimizer, image(*describe(model).image_size, batch=2))
    step(model, optimizer, image(*describe(model).image_size, batch=2))
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def tables_grid(model, parameter):
    return next(table.grid for table in tables(model) if table.parameter is parameter)


def test_without_it_only_resized_tables_fail(make, image):
    model = make("vit").train()
    rest = [p for key, p in model.named_parameters() if key != "pos_embed"]
    optimizer, other = AdamW(rest), AdamW([model.pos_embed])
    for each in (optimizer, other):
        step(model, each, image(64, 64, batch=2))
    resize(model, 96)
    before = model.blocks[0].mlp.fc1.weight.clone()
    step(model, optimizer, image(96, 96, batch=2))
    assert not torch.equal(model.blocks[0].mlp.fc1.weight, before)
    with pytest.raises(RuntimeError):
        step(model, other, image(96, 96, batch=2))


def test_moments_of_a_patch_kernel_begin_anew(make, image):
    model = make("vit").train()
    optimizer = AdamW(model.parameters())
    step(model, optimizer, image(64, 64, batch=2))
    kernel = model.patch_embed.proj.weight
    resize(model, 64, 8, optimizer=optimizer)
    assert kernel.shape[-1] == 8 and not optimizer.state[kernel]
    step(model, optimizer, image(64, 64, batch=2))
    assert optimizer.state[kernel]["step"] == 1
    assert optimizer.state[model.pos_embed]["step"] == 2


def test_second_moments_are_resized_bilinearly_by_default_and_by_choice(make, image):
    for chosen in (None, Resampling(antialias=False, cubic=-0.75)):
        model = make("vit").train()
        optimizer = AdamW(model.parameters())
        step(model, optimizer, image(64, 64, batch=2))
        second = optimizer.state[model.pos_embed]["exp_avg_sq"].clone()
        resize(model, 96, resampling=chosen, optimizer=optimizer)
        cells = second[:, 1:].reshape(1, 4, 4, -1).movedim(-1, 1)
        antialias = chosen is None
        wide = torch.nn.functional.interpolate(cells, (6, 6), mode="bilinear", antialias=antialias)
        expected = torch.cat((second[:, :1], wide.flatten(2).mT), 1)
        torch.testing.assert_close(optimizer.state[model.pos_embed]["exp_avg_sq"], expected)
