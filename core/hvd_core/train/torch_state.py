"""torch's weights and state as bytes and arrays that are read without running code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from .tree import Typed

#: The one key of safetensors' metadata (of several the order, and so the bytes, would vary). Its JSON:
#: "plain", what is no tensor; "complex", which tensors are stored as pairs of real numbers.
_ABOUT = "hvd"
#: By safetensors' names.
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_INTS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def weights_bytes(state: Mapping[str, Any]) -> bytes:
    """A state dict as a safetensors file. Tied tensors are stored under each of their names. Raises
    CheckpointError for an entry that is neither a tensor nor plain JSON."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    pairs: list[str] = []
    seen: set[int] = set()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            plain[name] = _plain(name, value)
            continue
        value = value.detach().resolve_neg().cpu()
        if value.is_complex():
            pairs.append(name)
            value = torch.view_as_real(value)
        address = value.untyped_storage().data_ptr()
        tensors[name] = (
            value.clone(memory_format=torch.contiguous_format) if address in seen else value.contiguous()
        )
        seen.add(address)
    return bytes(save(tensors, {_ABOUT: json.dumps({"plain": plain, "complex": pairs})}))


def read_weights(weights: bytes) -> dict[str, Any]:
    """What `weights_bytes` was given."""
    from safetensors.torch import load

    nbytes = int.from_bytes(weights[:8], "little")
    about = json.loads(json.loads(weights[8 : 8 + nbytes])["__metadata__"][_ABOUT])
    state: dict[str, Any] = dict(load(weights))
    for name in about["complex"]:
        state[name] = torch.view_as_complex(state[name])
    return {**state, **about["plain"]}


@dataclass(frozen=True)
class Form:
    """A tensor in a file of weights. is_pairs: the real numbers of a complex one, in a last axis of two."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_pairs: bool


def opened_weights(file: Any) -> tuple[list[tuple[str, Form]], dict[str, Any]]:
    """Reads the head of what `weights_bytes` gave: the tensors in the order in which their bytes follow, and
    what is no tensor."""
    head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    about = json.loads(head.pop("__metadata__")[_ABOUT])
    forms = {
        name: Form(_DTYPES[entry["dtype"]], tuple(entry["shape"]), name in about["complex"])
        for name, entry in sorted(head.items(), key=lambda item: item[1]["data_offsets"])
    }
    return list(forms.items()), about["plain"]


def check_same_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Raises CheckpointError when `state` is that of another model, naming the first difference."""
    own = {k: _kind(v) for k, v in model.state_dict().items()}
    other = {k: _kind(v) for k, v in state.items()}
    differ = [k for k in {**own, **other} if own.get(k) != other.get(k)]
    if differ:
        name = differ[0]
        more = f" (and {len(differ) - 1} more differences)" if len(differ) > 1 else ""
        raise CheckpointError(
            f"it is of another model: {name} is {other.get(name, 'not there')}, and here "
            f"{own.get(name, 'not there')}{more}"
        )


def to_plain(value: Any) -> Any:
    """A copy, with arrays for tensors."""
    if isinstance(value, Tensor):
        return _array(value.detach().cpu())
    if isinstance(value, dict):
        return {k: to_plain(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_plain(v) for v in value)
    return value


def to_torch(value: Any) -> Any:
    """The opposite of `to_plain`."""
    if isinstance(value, Typed):
        return torch.from_numpy(value.bits.copy()).view(getattr(torch, value.dtype))
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, dict):
        return {k: to_torch(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_torch(v) for v in value)
    return value


def _array(tensor: Tensor) -> Any:
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_complex() or not hasattr(np, "bool_" if name == "bool" else name):
        bits = _INTS.get(tensor.element_size())
        if tensor.is_complex() or bits is None:
            return tensor.clone()  # pickled
        return Typed(name, tensor.contiguous().view(bits).numpy().copy())
    return tensor.numpy().copy()


def _kind(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def _plain(name: str, value: Any) -> Any:
    try:
        same = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        same = False
    if not same:
        raise CheckpointError(
            f"{name} in the model's state dict is a {type(value).__name__}, which is neither a tensor nor "
            "plain JSON and cannot be stored without running code: let get_extra_state return one of these"
        )
    return value
