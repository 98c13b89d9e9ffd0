"""What stays when a model is resized: its own size, parameters as objects, and the way back."""

import pytest
import torch

from mmpos.interop.timm import describe, resize


def tensors(model) -> dict:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_its_own_size_changes_nothing_and_a_larger_one_no_object(every, make, image, out):
    model = make(every)
    own = describe(model).image_size
    size = own or (64, 64)
    x = image(*size)
    expected = out(model, x)
    before = {key: (value, value.clone()) for key, value in tensors(model).items()}
    noted = model._traits, model._model_args
    resize(model, size)
    assert torch.equal(out(model, x), expected)
    if own is not None:
        assert (model._traits, model._model_args) == noted
        for key, value in tensors(model).items():
            assert value is before[key][0] and torch.equal(value, before[key][1])
    larger = (size[0] * 2,) * 2
    resize(model, larger)
    out(model, image(*larger))
    resize(model, size)
    now = tensors(model)
    assert now.keys() == before.keys()
    for key, parameter in model.named_parameters():
        assert parameter is before[key][0] and parameter.shape == before[key][1].shape
    for key, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, before[key][1], rtol=0, atol=1e-6)
    assert out(model, x).shape == expected.shape


@pytest.mark.parametrize("name", ["vit", "swin", "levit", "hiera", "rope_mixed_ape", "clip_pool"])
def test_a_bfloat16_model_in_training_stays_one(name, make, image):
    model = make(name).to(torch.bfloat16).train()
    resize(model, 128)
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert all(module.training for module in model.modules())
    model(image(128, 128, batch=2).bfloat16()).sum().backward()


@pytest.mark.parametrize("name", ["vit", "swin", "pit", "levit", "sam"])
def test_frozen_tables_stay_frozen_and_empty_gradients_go(name, make, image):
    model = make(name)
    model(image(*describe(model).image_size)).sum().backward()
    parameter = next(p for key, p in model.named_parameters() if "pos" in key or "bias" in key)
    kept = next(p for key, p in model.named_parameters() if "head" in key or "neck" in key)
    gradient, old = kept.grad, parameter.shape
    tables = [p for key, p in model.named_parameters() if "pos_embed" in key or "_bias" in key]
    for table in tables:
        table.requires_grad_(False)
    resize(model, 256)
    assert not any(table.requires_grad for table in tables)
    assert kept.grad is gradient
    assert parameter.shape == old or parameter.grad is None


@pytest.mark.parametrize("name", ["vit", "eva02", "dinov3", "swin", "levit", "convit"])
def test_on_the_meta_device(name, make):
    model = make(name, device="meta")
    described = resize(model, (128, 256) if name != "eva02" else (112, 224))
    assert described.resizable and all(value.is_meta for value in model.parameters())


def test_autocast_does_not_round_tables(make):
    plain, within = make("swin"), make("swin")
    resize(plain, 192)
    with torch.autocast("cpu", torch.bfloat16):
        resize(within, 192)
    for one, other in zip(plain.parameters(), within.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["efficientformer", "mvitv2", "convit", "hiera"])
def test_weights_load_into_a_model_that_was_resized_alike(name, make, image, out):
    one, other = make(name), make(name)
    for parameter in one.parameters():
        parameter.data.mul_(1.01)
    for model in (one, other):
        resize(model, (96, 64))
    other.load_state_dict(one.state_dict())
    assert torch.equal(out(one, image(96, 64)), out(other, image(96, 64)))


@pytest.mark.parametrize(
    "name", ["levit", "levit_conv", "mvitv2", "volo", "pit", "msra", "swin", "xcit", "tiny_vit"]
)
def test_sizes_that_are_no_whole_number_of_steps(name, make, image, out):
    """timm rounds the grid of most down, and then fails on what its convolutions give."""
    model = make(name)
    for size in ((72, 104), (140, 84), (88, 88)):
        resize(model, size)
        assert out(model, image(*size)).isfinite().all()
