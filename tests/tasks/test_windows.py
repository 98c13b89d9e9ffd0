"""Answers about what is several rows of a batch are the mean of those of its rows."""

import pytest
import torch
from torch import Tensor

from tasks import windows
from tasks.windows import averaged

OWNERS = [0, 0, 0, 1, 2, 2]


def answer(values: Tensor, mask: Tensor | None, along: float | Tensor | None) -> dict[str, Tensor]:
    real = values if mask is None else values.where(mask, 0)
    scaled = real * (1 if along is None else torch.as_tensor(along).view(-1, 1))
    return {"first": scaled.cumsum(1), "second": scaled.sum(1, keepdim=True)}


def rows() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(6, 3, generator=draw, requires_grad=True)
    return values, torch.rand(6, 3, generator=draw) > 0.3, torch.rand(6, generator=draw)


@pytest.mark.parametrize("size", [1, 2, 4, 5, 6, 64])
@pytest.mark.parametrize("trained", [True, False])
def test_the_mean_over_the_rows_of_each(size: int, trained: bool, monkeypatch) -> None:
    monkeypatch.setattr(windows, "ROWS", size)
    values, mask, along = rows()
    owner, seen = torch.tensor(OWNERS), []

    def looked(*parts) -> dict[str, Tensor]:
        seen.append(len(parts[0]))
        return answer(*parts)

    for given in ((None, None), (mask, 0.5), (mask, along), (None, torch.tensor(2.0))):
        seen.clear()
        with torch.set_grad_enabled(trained):
            found = averaged(looked, owner, values, *given)
        assert seen == [6] if trained else max(seen) <= size and sum(seen) == 6
        whole = answer(values, *given)
        for question, logits in whole.items():
            wanted = torch.stack(
                [
                    sum(logits[row] for row in range(6) if OWNERS[row] == own) / OWNERS.count(own)
                    for own in range(3)
                ]
            )
            torch.testing.assert_close(found[question], wanted)


def test_without_owners_each_row_is_its_own() -> None:
    values, mask, along = rows()
    found = averaged(answer, None, values, mask, along)
    assert all(torch.equal(found[name], v) for name, v in answer(values, mask, along).items())


def test_a_row_weighs_as_one_of_those_of_its_owner() -> None:
    values, *_ = rows()
    averaged(answer, torch.tensor(OWNERS), values, None, None)["second"].sum().backward()
    wanted = torch.tensor([1 / OWNERS.count(own) for own in OWNERS])
    torch.testing.assert_close(values.grad, wanted[:, None].expand(-1, 3))


def test_half_precision_is_averaged_in_single() -> None:
    values = torch.tensor([[1.0], [1.0], [1.0], [257.0]]).bfloat16()
    found = averaged(lambda x: {"kind": x}, torch.zeros(4, dtype=torch.long), values)["kind"]
    assert found.dtype == torch.float32 and found.item() == (3 + values[-1].item()) / 4
