"""torch's weights and state as bytes and arrays that are read without running code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from .tree import Typed

#: The one key of safetensors' metadata (of several the order, and so the bytes, would vary). Its JSON:
#: "plain", what is no tensor; "complex", which tensors are stored as pairs of real numbers.
_ABOUT = "hvd"
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
