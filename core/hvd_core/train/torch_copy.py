"""A fitted model without a second copy of its weights: the user's model made again with room for them, and
the weights read into that room."""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn

from .framework import Readable
from .torch_state import opened_weights


def copy_without_weights(model: nn.Module) -> nn.Module:
    """What pickling the model and back gives, so an object of its class that shares nothing with it; the
    tensors of its state dict have memory with any content."""
    fresh = {
        value.untyped_storage().data_ptr()
        for value in model.state_dict().values()
        if isinstance(value, Tensor) and _fills_its_storage(value)
    }
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(model)
    file.seek(0)
    copy: nn.Module = _Unpickler(file, pickler.storages, fresh).load()
    return copy


def read_into(model: nn.Module, weights: Readable) -> nn.Module:
    """Reads `FitResult.weights` from front to back into the memory of a model of the same class; returns it,
    in evaluation mode."""
    state = model.state_dict()
    found: dict[str, Any] = {}
    header, plain = opened_weights(weights)
    for name, form in header:
        place = state.get(name)
        if not isinstance(place, Tensor) or not _is_room_for(place, form.dtype, form.shape):
            place = torch.empty(form.shape, dtype=form.dtype)
        if place.nbytes:
            _fill(place.detach().reshape(-1).view(torch.uint8).numpy(), weights)
        found[name] = torch.view_as_complex(place) if form.is_pairs else place
    model.load_state_dict({**found, **plain})
    return model.eval()


def _fill(room: np.ndarray, weights: Readable) -> None:
    if weights.readinto(room.data) != room.nbytes:
        raise EOFError("the weights end too early")


def _is_room_for(place: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return (
        place.layout is torch.strided
        and place.device.type == "cpu"
        and place.is_contiguous()
        and not place.is_neg()
        and (place.dtype, tuple(place.shape)) == (dtype, shape)
    )


def _fills_its_storage(value: Tensor) -> bool:
    return value.layout is torch.strided and value.nbytes == value.untyped_storage().nbytes() > 0


class _Pickler(cloudpickle.Pickler):
    """Leaves a number where a storage was, as torch.save does."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.storages: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.storage.TypedStorage):
            return None
        self.storages.append(obj)
        return len(self.storages) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storages: list[Any], fresh: set[int]):
        super().__init__(file)
        self._storages, self._fresh = storages, fresh
        self._made: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, pid: int) -> Any:
        typed = self._storages[pid]
        theirs = typed._untyped_storage
        address = theirs.data_ptr()
        ours = self._made.get(address) if address else None
        if ours is None:
            same = torch.UntypedStorage(theirs.nbytes(), device=theirs.device)
            ours = same if address in self._fresh else same.copy_(theirs)
            self._made[address] = ours
        return torch.storage.TypedStorage(wrap_storage=ours, dtype=typed.dtype, _internal=True)
