from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tasks.weights import load_weights


@pytest.fixture
def trained() -> nn.Module:
    return nn.Linear(3, 2)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["network", "task", "checkpoint", "safetensors"])
def test_every_kind_of_file(kind: str, trained: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / ("weights.safetensors" if kind == "safetensors" else "weights.pt")
    state = trained.state_dict()
    of_task = {f"network.{name}": value for name, value in state.items()}
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "checkpoint":
        torch.save({"state_dict": of_task | {"losses.value": torch.zeros(1)}, "epoch": 3}, path)
    else:
        torch.save(state if kind == "network" else of_task, path)
    fresh = nn.Linear(3, 2)
    assert not same(fresh, trained)
    load_weights(fresh, path)
    assert same(fresh, trained)


def test_another_width_is_refused_with_both_and_nothing_is_changed(
    trained: nn.Module, tmp_path: Path
) -> None:
    torch.save(trained.state_dict(), tmp_path / "weights.pt")
    other = nn.Linear(4, 2)
    before = other.weight.detach().clone()
    with pytest.raises(ValueError, match=r"weight is 2 × 3 there and 2 × 4 here"):
        load_weights(other, tmp_path / "weights.pt")
    assert torch.equal(other.weight, before)


@pytest.mark.parametrize(
    ("bias_there", "bias_here", "message"),
    [(False, True, "bias is missing there"), (True, False, "bias is unknown here")],
)
def test_other_names_are_refused(
    bias_there: bool, bias_here: bool, message: str, tmp_path: Path
) -> None:
    torch.save(nn.Linear(3, 2, bias=bias_there).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=message):
        load_weights(nn.Linear(3, 2, bias=bias_here), tmp_path / "weights.pt")


def test_no_file(tmp_path: Path, trained: nn.Module) -> None:
    with pytest.raises(FileNotFoundError, match="no file with weights at"):
        load_weights(trained, tmp_path / "absent.pt")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("text.pt", b"no weights"),
        ("text.safetensors", b"no weights"),
        ("empty.pt", b""),
        ("users.pt", b"root:x:0:0:root:/root:/bin/bash\n" * 9),
        ("picture.pt", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x04"),
    ],
)
def test_a_file_of_something_else(
    name: str, content: bytes, tmp_path: Path, trained: nn.Module
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="cannot read weights from") as caught:
        load_weights(trained, tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_a_module_and_a_folder(tmp_path: Path, trained: nn.Module) -> None:
    torch.save(trained.state_dict(), tmp_path / "half.pt")
    whole = (tmp_path / "half.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])
    torch.save(trained, tmp_path / "module.pt")
    for name in ("half.pt", "module.pt"):
        told = f"cannot read weights from .*{name}: expected a checkpoint, .* or a damaged one"
        with pytest.raises(ValueError, match=told):
            load_weights(trained, tmp_path / name)
    with pytest.raises(IsADirectoryError, match=f"{tmp_path} is a folder, expected a file"):
        load_weights(trained, tmp_path)


@pytest.mark.parametrize("content", [{"epoch": 3}, {1: torch.ones(1)}, {"state_dict": [1]}, [2]])
def test_a_file_without_tensors(content: object, tmp_path: Path, trained: nn.Module) -> None:
    torch.save(content, tmp_path / "numbers.pt")
    with pytest.raises(ValueError, match=r"numbers.pt holds no weights: expected a checkpoint"):
        load_weights(trained, tmp_path / "numbers.pt")


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "network._orig_mod.", "module._orig_mod.network."]
)
def test_what_compiles_or_distributes_a_network_puts_before_its_names(
    prefix: str, tmp_path: Path, trained: nn.Module
) -> None:
    state = {prefix + name: value for name, value in trained.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "weights.pt")
    fresh = nn.Linear(3, 2)
    load_weights(fresh, tmp_path / "weights.pt")
    assert same(fresh, trained)
