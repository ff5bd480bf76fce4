"""Objects as two files: their tensors as safetensors, which any tool reads without running code, and a pickle
of everything else."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from ..errors import PreflightError

#: What safetensors can hold; other dtypes stay in the pickle.
_DTYPES = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    }
)  # fmt: skip


def save_objects(objects: Mapping[str, Any], tensors_path: Path) -> bytes:
    """Writes the tensors of `objects` to `tensors_path` (no file when there are none); returns the pickle.

    Those of objects["model"] are named as in its state dict. Tensors that are one (tied weights) stay one:
    the file has the first name, its metadata says which names mean it. Raises what pickling raises.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, objects.get("model"))
    pickler.dump(dict(objects))
    pickler.complete()
    if pickler.tensors:
        _safetensors().save_file(pickler.tensors, tensors_path, metadata=pickler.tied)
    return file.getvalue()


def load_objects(data: bytes, tensors_path: Path | None) -> dict[str, Any]:
    """What `save_objects` was given. This runs code from `data`: only for files from people you trust."""
    tensors = {} if tensors_path is None else _safetensors().load_file(tensors_path)
    objects: dict[str, Any] = _Unpickler(io.BytesIO(data), tensors).load()
    return objects


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise PreflightError("saving and loading models needs the package safetensors: install it") from error
    return safetensors.torch


class _Pickler(cloudpickle.Pickler):
    """Leaves a name where a tensor was. `tensors`: by name; `tied`: further names of the model for them."""

    def __init__(self, file: io.BytesIO, model: Any):
        super().__init__(file)
        self.tensors: dict[str, Tensor] = {}
        self.tied: dict[str, str] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        state = model.state_dict() if isinstance(model, torch.nn.Module) else {}
        self._state = {name: value for name, value in state.items() if _can_store(value)}
        self._taken = set(self._state)
        for name, value in self._state.items():
            first = self._names.setdefault(_place(value), name)
            if first != name:
                self.tied[name] = first

    def complete(self) -> None:
        """Adds what is in the model's state dict and was not met under its name."""
        for name, value in self._state.items():
            if name not in self.tied and name not in self.tensors:
                self.tensors[name] = _whole(value)

    def persistent_id(self, obj: Any) -> str | None:
        if type(obj) is not Tensor or obj.requires_grad or not _can_store(obj):
            return None
        name = self._names.get(_place(obj)) or self._new_name(obj)
        if name not in self.tensors:
            self.tensors[name] = _whole(obj)
        return name

    def _new_name(self, tensor: Tensor) -> str:
        number = len(self.tensors)
        while f"object.{number}" in self._taken:
            number += 1
        name = f"object.{number}"
        self._taken.add(name)
        if tensor.numel():  # empty tensors have no place of their own
            self._names[_place(tensor)] = name
        return name


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Mapping[str, Tensor]):
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: str) -> Tensor:
        return self._tensors[pid]


def _can_store(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.dtype in _DTYPES
        and value.device.type != "meta"
    )


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same numbers at the same place; of no use for empty ones."""
    if not tensor.numel():
        return ("empty", id(tensor))
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _whole(tensor: Tensor) -> Tensor:
    """Contiguous, on the CPU, with a storage of its own, which is what safetensors takes."""
    plain = tensor.detach().resolve_neg().cpu().contiguous()
    if plain.data_ptr() == tensor.data_ptr() and plain.untyped_storage().nbytes() != plain.nbytes:
        return plain.clone()
    return plain
