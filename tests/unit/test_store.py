"""Objects as a safetensors file and a pickle."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hvd_core.train.torch_store import load_objects, save_objects

safetensors = pytest.importorskip("safetensors")


class Tied(nn.Module):
    """Everything that a state dict can make hard."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.bits16 = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("empty", torch.zeros(0, 2))
        self.register_buffer("whole", torch.arange(12.0))
        self.register_buffer("part", self.whole[2:5])  # a view of another entry
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("unsaved", torch.tensor([7, 8]), persistent=False)
        self.register_buffer("complex", torch.ones(2, dtype=torch.complex64))


def saved(objects: dict[str, Any], path: Path) -> dict[str, Any]:
    return load_objects(save_objects(objects, path), path if path.exists() else None)


def test_state_comes_back_and_can_be_read_without_us(tmp_path: Path) -> None:
    model, file = Tied(), tmp_path / "file"
    back = saved({"model": model}, file)["model"]
    want, got = model.state_dict(), back.state_dict()
    assert list(want) == list(got)
    for name, value in want.items():
        assert got[name].dtype is value.dtype and torch.equal(got[name], value), name
    assert back.head.weight is back.embed.weight
    assert not back.bits16.requires_grad and back.embed.weight.requires_grad
    assert torch.equal(back.unsaved, model.unsaved)
    with safetensors.safe_open(file, "pt") as opened:
        plain = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  it has no __iter__
        assert opened.metadata() == {"head.weight": "embed.weight"}
    for name in set(want) - {"head.weight", "complex"}:
        assert torch.equal(plain[name], want[name]), name
    with torch.no_grad():
        back.embed.weight.add_(1)  # the tensors are ours to change, and the file is not


def test_an_optimizer_stays_bound_to_its_model(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    back = saved({"model": model, "optimizer": optimizer}, tmp_path / "file")
    assert back["optimizer"].param_groups[0]["params"][0] is back["model"].weight
    for both in ((model, optimizer), (back["model"], back["optimizer"])):
        both[1].zero_grad()
        both[0](torch.ones(3, 2)).sum().backward()
        both[1].step()
    assert torch.equal(model.weight, back["model"].weight)


def test_without_tensors_there_is_no_file(tmp_path: Path) -> None:
    back = saved({"loss": nn.MSELoss(), "n": [1, 2], "fn": lambda x: x + 1}, tmp_path / "file")
    assert back["n"] == [1, 2] and back["fn"](1) == 2
    assert not (tmp_path / "file").exists()


def test_the_pickle_does_not_grow_with_the_weights(tmp_path: Path) -> None:
    small, large = nn.Linear(10, 10), nn.Linear(1000, 1000)
    sizes = [len(save_objects({"model": copy.deepcopy(m)}, tmp_path / "file")) for m in (small, large)]
    assert abs(sizes[1] - sizes[0]) < 100
