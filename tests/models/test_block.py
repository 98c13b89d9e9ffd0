import pytest
import torch
from torch import nn

import mmpos
from mmpos.attention import prepare
from mmpos.models import Attention, Block, DropPath, Mlp, SwiGLU
from mmpos.positions import sequence


def by_hand(attention, x, heads, kv_heads, turn, mask):
    """Multi-head attention, a head after the other, with weights sliced by hand."""
    width = x.shape[-1] // heads
    weight, bias = attention.qkv.weight, attention.qkv.bias
    first_key, first_value = heads * width, (heads + kv_heads) * width
    outputs = []
    for head in range(heads):
        shared = head // (heads // kv_heads)
        starts = (head * width, first_key + shared * width, first_value + shared * width)
        q, k, v = (
            x @ weight[start : start + width].T + bias[start : start + width] for start in starts
        )
        q, k = turn(attention.q_norm(q)), turn(attention.k_norm(k))
        scores = (q @ k.mT / width**0.5).masked_fill(~mask, -torch.inf)
        outputs.append(scores.softmax(-1) @ v)
    return attention.out(torch.cat(outputs, -1))


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("norm", [None, nn.LayerNorm, nn.RMSNorm])
def test_attention_by_hand(kv_heads, norm):
    attention = Attention(48, 6, kv_heads=kv_heads, qk_norm=norm)
    for own in (attention.q_norm, attention.k_norm):
        for weight in own.parameters():
            nn.init.uniform_(weight, 0.5, 1.5)
    x = torch.randn(2, 7, 48)
    rotation = mmpos.RotaryEncoding(8)(sequence(7))
    causal = torch.ones(7, 7).tril().bool()
    expected = by_hand(
        attention,
        x,
        6,
        kv_heads or 6,
        lambda part: mmpos.rotate(part[:, None], rotation)[:, 0],
        causal,
    )
    out = attention(x, rotation, prepare(7, 7, causal=True))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_queries_and_keys_have_norms_of_their_own():
    attention = Attention(48, 6, qk_norm=nn.RMSNorm)
    assert attention.q_norm is not attention.k_norm
    for own in (attention.q_norm, attention.k_norm):
        assert [weight.numel() for weight in own.parameters()] == [8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 10, "heads": 3}, "dim=10 must be a multiple of heads=3"),
        ({"dim": 12, "heads": 6, "kv_heads": 4}, "heads=6.*of kv_heads=4"),
        ({"dim": 12, "heads": 2, "kv_heads": 4}, "heads=2.*of kv_heads=4"),
    ],
)
def test_heads_that_do_not_divide(arguments, message):
    with pytest.raises(ValueError, match=message):
        Attention(**arguments)


def test_feed_forward_parts():
    x = torch.randn(2, 5, 12)
    mlp, glu = Mlp(12, ratio=2), SwiGLU(12)
    expected = nn.functional.gelu(x @ mlp.up.weight.T + mlp.up.bias) @ mlp.down.weight.T
    torch.testing.assert_close(mlp(x), expected + mlp.down.bias)
    gate, value = (x @ glu.up.weight.T + glu.up.bias).split(32, -1)
    inner = gate * torch.sigmoid(gate) * value
    torch.testing.assert_close(glu(x), inner @ glu.down.weight.T + glu.down.bias)
    weights = [sum(w.numel() for w in part.parameters() if w.ndim == 2) for part in (glu, Mlp(12))]
    assert weights[0] == weights[1]


def test_a_block_is_two_residual_branches_in_order():
    block = Block(48, Attention(48, 6), Mlp(48))
    x = torch.randn(2, 7, 48)
    middle = x + block.attention(block.attention_norm(x))
    torch.testing.assert_close(block(x), middle + block.mlp(block.mlp_norm(middle)))


def test_drop_path_drops_whole_samples_and_keeps_the_mean():
    x = torch.ones(4000, 3, 2)
    out = DropPath(0.25).train()(x)
    assert (out == out[:, :1, :1]).all()
    assert sorted(set(out[:, 0, 0].tolist())) == pytest.approx([0.0, 4 / 3])
    assert out.mean().item() == pytest.approx(1.0, abs=0.05)
    assert torch.equal(DropPath(0.25).eval()(x), x)
    assert torch.equal(DropPath(0.0).train()(x), x)
    assert DropPath(0.5).train()(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("rate", [1.0, -0.1])
def test_drop_path_rates(rate):
    with pytest.raises(ValueError, match=f"at least 0 and below 1, got {rate}"):
        DropPath(rate)
