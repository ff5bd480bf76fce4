"""Starting alike: parameters and objects from one rank to all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .. import basics
from ..errors import InvalidArgument, MismatchError
from .handles import synchronize
from .transfers import broadcast_async, broadcast_async_


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Overwrites tensors with those of `root_rank`, in place.

    `params`: a `state_dict()`, or any iterable of (name, tensor) pairs such as `model.named_parameters()`, or
    of bare tensors. Every rank passes the same names; a difference raises `MismatchError` on all ranks,
    naming the first. None values are skipped.
    """
    named = _named_tensors(params)
    check_names("broadcast_parameters", [name for name, _ in named], root_rank)
    with torch.no_grad():
        handles = []
        for name, tensor in named:
            start = broadcast_async_ if tensor.is_contiguous() else broadcast_async
            handles.append(start(tensor, root_rank, f"broadcast_parameters.{name}"))
        for handle, (_, tensor) in zip(handles, named, strict=True):
            received = synchronize(handle)
            if received is not tensor:
                tensor.copy_(received)


def _named_tensors(params: Mapping[str, Any] | Iterable[Any]) -> list[tuple[str, torch.Tensor]]:
    """The tensors of `params`, outside autograd. A mapping is sorted by name: ranks may have built it in
    other orders."""
    if isinstance(params, (str, torch.Tensor)) or not isinstance(params, Iterable):
        raise InvalidArgument(
            f"broadcast_parameters: expected a dict or an iterable, got {type(params).__qualname__}"
        )
    items = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    named = []
    for index, item in enumerate(items):
        name, tensor = (f"noname.{index}", item) if isinstance(item, torch.Tensor) else _pair(item)
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(
                f"broadcast_parameters: {name} is a {type(tensor).__qualname__}, not a tensor"
            )
        named.append((name, tensor.detach()))
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise InvalidArgument(f"broadcast_parameters: names must be unique; found twice: {', '.join(twice)}")
    return named


def _pair(item: Any) -> tuple[str, Any]:
    try:
        name, tensor = item
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"broadcast_parameters: expected (name, tensor) pairs, got a {type(item).__qualname__}"
        ) from None
    return str(name), tensor


def check_names(caller: str, names: list[str], root_rank: int) -> None:
    """Every rank's names are root's, else `MismatchError` on all. Usually 16 bytes per rank; the names
    themselves travel only when they differ."""
    group = basics.default_group()
    if not 0 <= root_rank < group.size:
        raise InvalidArgument(f"{caller}: root_rank={root_rank} is not a rank, there are {group.size}")
    if group.size == 1:
        return
    text = "\n".join(names).encode()
    label = basics.next_name(caller)
    digests = group.allgather_bytes(hashlib.blake2b(text, digest_size=16).digest(), name=label)
    if len(set(digests)) == 1:
        return
    lists = [data.decode().split("\n") for data in group.allgather_bytes(text, name=f"{label}.names")]
    root = lists[root_rank]
    for rank, theirs in enumerate(lists):
        if missing := [name for name in root if name not in theirs]:
            raise MismatchError(f"{caller}: rank {rank} has no {missing[0]!r}, rank {root_rank} has")
        if extra := [name for name in theirs if name not in root]:
            raise MismatchError(f"{caller}: rank {rank} has {extra[0]!r}, rank {root_rank} has not")
    raise MismatchError(f"{caller}: ranks pass the same names in different orders")
