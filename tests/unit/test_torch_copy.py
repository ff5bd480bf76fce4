"""A model made again with room for its weights, and weights read into that room."""

from __future__ import annotations

import io
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from hvd_core.train.torch_copy import copy_without_weights, read_into  # noqa: E402
from hvd_core.train.torch_state import weights_bytes  # noqa: E402


class Odd(nn.Module):
    """Tied and strided parameters, buffers that are saved and others, several dtypes, an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.turned = nn.Parameter(torch.rand(4, 2).t())
        self.wave = nn.Parameter(torch.rand(2, 3, dtype=torch.complex64))
        self.brief = nn.Parameter(torch.rand(5).bfloat16())
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("grid", torch.rand(3), persistent=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.whole = torch.rand(6)
        self.part = nn.Parameter(self.whole[:3])
        self.extra = {"note": [1, 2]}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def same(left: nn.Module, right: nn.Module) -> bool:
    a, b = left.state_dict(), right.state_dict()
    return a.keys() == b.keys() and all(
        torch.equal(v, b[k]) if isinstance(v, torch.Tensor) else v == b[k] for k, v in a.items()
    )


def test_what_is_read_is_what_was_written_and_the_original_stays() -> None:
    torch.manual_seed(1)
    original, trained = Odd(), Odd()
    trained.extra = {"note": [3]}
    before = {k: v.clone() for k, v in original.state_dict().items() if isinstance(v, torch.Tensor)}
    copy = read_into(copy_without_weights(original), io.BytesIO(weights_bytes(trained.state_dict())))
    assert type(copy) is Odd and not copy.training and same(copy, trained)
    assert copy.b.weight is copy.a.weight
    assert torch.equal(copy.grid, original.grid), "is in no state dict, so it comes from the original"
    assert torch.equal(copy.whole[3:], original.whole[3:]), "of a memory that a parameter fills in part"
    for name, value in original.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, before[name])
            assert not value.numel() or value.data_ptr() != copy.state_dict()[name].data_ptr()


def test_weights_go_straight_into_the_models_memory() -> None:
    model = nn.Linear(300, 200)
    places = {name: value.data_ptr() for name, value in model.state_dict().items()}
    asked: list[int] = []

    class Counting(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            asked.append(memoryview(buffer).nbytes)
            return super().readinto(buffer)

    weights = weights_bytes(nn.Linear(300, 200).state_dict())
    read_into(model, Counting(weights))
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == places
    assert sorted(asked) == [800, 240_000]


def test_weights_of_another_model() -> None:
    weights = weights_bytes(nn.Linear(3, 2).state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        read_into(nn.Linear(2, 2), io.BytesIO(weights))
    with pytest.raises(RuntimeError, match="Missing key"):
        read_into(nn.Sequential(nn.Linear(3, 2)), io.BytesIO(weights))
    with pytest.raises(EOFError):
        read_into(nn.Linear(3, 2), io.BytesIO(weights[:-4]))
