"""Python objects between ranks: cloudpickle over the byte collectives of the default Group. Framework-free.

A rank that cannot pickle its object tells the others instead of leaving them waiting: each message starts
with one byte, `_OBJECT` or `_ERROR`.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from . import basics
from .errors import InvalidArgument, NotPicklable

_OBJECT, _ERROR = b"o", b"e"


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: Any = None
) -> Any:
    """Returns root's `obj` on every rank: the object itself on root, a copy elsewhere, of any size.

    Every rank must call it with the same `root_rank`; the `obj` of ranks other than root is not looked at.
    The others unpickle what root sent. Raises `NotPicklable` on every rank when root's object does not
    pickle.
    """
    group = basics.group_of(process_set)
    root_rank = basics.root_in(process_set, root_rank)
    if not 0 <= root_rank < group.size:
        raise InvalidArgument(f"root_rank={root_rank} is not a rank: there are {group.size}")
    name = name or basics.next_name("broadcast_object", process_set)
    is_root = group.rank == root_rank
    message = group.broadcast_bytes(_dumps(obj) if is_root else None, root=root_rank, name=name)
    received = _loads(message, root_rank, only_check=is_root)
    return obj if is_root else received


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """Returns the objects of all ranks, by rank. Every rank must call it.

    Raises `NotPicklable` on every rank, naming the rank, when an object does not pickle.
    """
    group = basics.group_of(process_set)
    name = name or basics.next_name("allgather_object", process_set)
    messages = group.allgather_bytes(_dumps(obj), name=name)
    for rank, message in enumerate(messages):
        _loads(message, rank, only_check=True)
    return [_loads(message, rank) for rank, message in enumerate(messages)]


def _dumps(obj: Any) -> bytes:
    import cloudpickle  # only here: `import hvd_core` needs numpy only

    buffer = io.BytesIO()
    buffer.write(_OBJECT)
    try:
        cloudpickle.dump(obj, buffer)
    except Exception as error:  # noqa: BLE001 (whatever a user's __reduce__ raises must reach the other ranks too)
        return _ERROR + f"{type(obj).__qualname__}: {type(error).__name__}: {error}".encode(errors="replace")
    return buffer.getvalue()


def _loads(message: bytes, rank: int, only_check: bool = False) -> Any:
    if message[:1] == _ERROR:
        raise NotPicklable(f"the object of rank {rank} does not pickle: {message[1:].decode()}")
    return None if only_check else pickle.loads(memoryview(message)[1:])
