"""State as bytes that can be read without running code: nested plain values and arrays, as one safetensors
file.

Arrays are its tensors, everything else is JSON in its metadata. Only a value that is neither (a lambda in a
scheduler's state, say) is pickled, and only `loads(..., trust=True)` opens it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import CheckpointError

_TREE = "hvd.tree"


@dataclass(frozen=True)
class Typed:
    """An array of a dtype that numpy lacks ("bfloat16"): its elements as unsigned integers of their size."""

    dtype: str
    bits: np.ndarray


@dataclass(frozen=True)
class Opaque:
    """A pickled value that was not opened, because the file is not trusted."""

    pickled: bytes


def dumps(value: Any) -> bytes:
    """dict, list, tuple, str, bytes, numbers, bool, None, numpy arrays and `Typed`, nested; the rest by
    cloudpickle. Raises CheckpointError for what cannot be pickled either."""
    from safetensors.numpy import save

    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(_encoded(value, arrays, ""))
    return save({k: np.ascontiguousarray(v).reshape(v.shape) for k, v in arrays.items()}, {_TREE: text})


def loads(data: bytes, *, trust: bool) -> Any:
    """What `dumps` was given. trust: pickled values are opened, which may run code; else they are
    `Opaque`."""
    from safetensors.numpy import load

    nbytes = int.from_bytes(data[:8], "little")
    text = json.loads(data[8 : 8 + nbytes])["__metadata__"][_TREE]
    return _decoded(json.loads(text), load(data), trust)


def _encoded(value: Any, arrays: dict[str, np.ndarray], path: str) -> Any:
    if value is None or isinstance(value, (str, bool)) or type(value) in (int, float):
        return value
    if isinstance(value, dict):
        if type(value) is dict and all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: _encoded(v, arrays, _below(path, k)) for k, v in value.items()}
        pairs = [[_encoded(k, arrays, path), _encoded(v, arrays, _below(path, k))] for k, v in value.items()]
        return {"$dict": pairs}
    if type(value) in (list, tuple):
        items = [_encoded(v, arrays, _below(path, i)) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Typed):
        return {"$typed": value.dtype, "bits": _named(value.bits, arrays, path)}
    if isinstance(value, bytes):
        return {"$bytes": _named(np.frombuffer(value, np.uint8), arrays, path)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return {"$array": _named(value, arrays, path)}
    if isinstance(value, np.generic) and value.dtype.kind in "fiub":
        return {"$scalar": _named(np.asarray(value), arrays, path)}
    return {"$pickle": _named(np.frombuffer(_pickled(value, path), np.uint8), arrays, path)}


def _below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _named(array: np.ndarray, arrays: dict[str, np.ndarray], path: str) -> str:
    name = path or "value"
    while name in arrays:
        name += "_"
    arrays[name] = array
    return name


def _pickled(value: Any, path: str) -> bytes:
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise CheckpointError(
            f"{path} is a {type(value).__name__}, which cannot be saved: {error}"
        ) from error
    return data


def _decoded(node: Any, arrays: dict[str, np.ndarray], trust: bool) -> Any:
    if isinstance(node, list):
        return [_decoded(n, arrays, trust) for n in node]
    if not isinstance(node, dict):
        return node
    kind = next((k for k in node if k.startswith("$")), None)
    if kind is None:
        return {k: _decoded(v, arrays, trust) for k, v in node.items()}
    content = node[kind]
    if kind == "$dict":
        return {_decoded(k, arrays, trust): _decoded(v, arrays, trust) for k, v in content}
    if kind == "$tuple":
        return tuple(_decoded(n, arrays, trust) for n in content)
    if kind == "$typed":
        return Typed(content, arrays[node["bits"]])
    array = arrays[content]
    if kind == "$array":
        return array
    if kind == "$scalar":
        return array[()]
    if kind == "$bytes":
        return array.tobytes()
    return _opened(array.tobytes()) if trust else Opaque(array.tobytes())


def _opened(pickled: bytes) -> Any:
    import pickle

    return pickle.loads(pickled)
