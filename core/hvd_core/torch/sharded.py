"""ShardedOptimizer: each rank keeps the optimizer state of its share of the parameters, and updates that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import optim

from .. import basics
from ..basics import global_process_set as _G
from ..errors import InvalidArgument
from ..group import Group
from ..objects import allgather_object
from .optimizer import DistributedOptimizer

#: An element's update looks at no other element, so that a share is updated as the whole would be.
_BY_ELEMENT = frozenset(
    getattr(optim, name)
    for name in (
        "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
    )
)  # fmt: skip
#: State that is one value for a parameter of any size.
_SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
#: Where a share may begin within a parameter: there torch's vector loops begin anew, as in the whole.
_ALIGN_NBYTES = 64
#: Parameters go round in parts of so many bytes, each divided among all ranks.
_PART_NBYTES = 16 << 20


def shares(nbytes: Sequence[int], size: int) -> list[list[tuple[int, int]]]:
    """Divides what lies one behind the other among `size` ranks as evenly as borders at 64 bytes allow:
    for each of `nbytes`, for each rank, from where to where. Pure."""
    ends, total, offset = [], sum(nbytes), 0
    for length in nbytes:
        cuts = [_aligned(total * rank // size - offset) for rank in range(size)]
        borders = [min(max(cut, 0), length) for cut in cuts] + [length]
        ends.append(list(pairwise(borders)))
        offset += length
    return ends


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES


@dataclass(frozen=True)
class _Param:
    tensor: torch.Tensor
    #: The whole of it, one-dimensional, in the same memory.
    flat: torch.Tensor
    #: Elements of each rank.
    shares: list[tuple[int, int]]


class ShardedOptimizer(optim.Optimizer):
    """Steps as `optimizer` would behind `DistributedOptimizer`, with 1/size of its state on each rank
    (ZeRO-1).

    `optimizer` is one of torch's that work element by element (SGD, Adam, AdamW, NAdam, RAdam, Adamax,
    Adagrad, Adadelta, RMSprop, Rprop, ASGD), over contiguous parameters; it is used up, and its state taken
    over. All ranks make it alike and use it at the same places. `options` are those of
    `DistributedOptimizer`: gradients are reduced whole and in the backward, so clipping, `GradScaler` and
    logging see what they would see there. In `step` every rank updates its share, and the shares go round.
    The parameters are those of the unsharded optimizer, on one host bit for bit.

    `state_dict()` is that of the unsharded optimizer, so that any number of ranks, or none, can go on with
    it; **every rank calls it**. `load_state_dict` takes such a one. Raises `InvalidArgument` for other
    optimizers, by name, and on `step` when a rank has joined.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_set: Any = _G,
        **options: Any,
    ):
        if type(optimizer) not in _BY_ELEMENT:
            raise InvalidArgument(
                "ShardedOptimizer needs one of torch's optimizers that work element by element, as AdamW, "
                f"not {type(optimizer).__qualname__}"
            )
        if hasattr(optimizer, "_hvd"):
            raise InvalidArgument(f"this {type(optimizer).__qualname__} is distributed already")
        self._group, self._process_set = basics.group_of(process_set), process_set
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self._parts = _parts_of(self.param_groups, self._group.size)
        self._label = basics.next_name("ShardedOptimizer", process_set)
        self._own, self._inner = self._make_inner(type(optimizer))
        if optimizer.state:
            self.load_state_dict(optimizer.state_dict())
        DistributedOptimizer(self, named_parameters, process_set=process_set, **options)

    def _make_inner(
        self, kind: Callable[..., optim.Optimizer]
    ) -> tuple[dict[torch.Tensor, torch.nn.Parameter], optim.Optimizer]:
        """This rank's share of each parameter, a view of it, and the optimizer over them."""
        own = {}
        for param in self._params():
            begin, end = param.shares[self._group.rank]
            if begin < end:
                own[param.tensor] = torch.nn.Parameter(param.flat[begin:end], param.tensor.requires_grad)
        groups = [
            {**group, "params": [own[p] for p in group["params"] if p in own]} for group in self.param_groups
        ]
        return own, kind(groups)

    def _tensors(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _params(self) -> Iterator[_Param]:
        for part in self._parts:
            yield from part

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_inner"):
            raise InvalidArgument(
                "a ShardedOptimizer takes no further parameters: make it anew with all of them"
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_options()
        for param in self._params():
            own, grad = self._own.get(param.tensor), param.tensor.grad
            if grad is not None and grad.layout is not torch.strided:
                raise InvalidArgument(
                    "ShardedOptimizer takes no sparse gradients; make the layer with sparse=False"
                )
            if own is not None:
                begin, end = param.shares[self._group.rank]
                own.grad = None if grad is None else grad.detach().reshape(-1)[begin:end]
        self._inner.step()
        for own in self._own.values():
            own.grad = None  # of the whole one's memory
        for i, part in enumerate(self._parts):
            _pass_round(self._group, part, f"{self._label}.{i}")
        return loss

    def _take_options(self) -> None:
        """What schedulers and users have set on our groups."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key != "params"})

    # -- state --

    def state_dict(self) -> dict[str, Any]:
        """The unsharded optimizer's. Every rank calls it."""
        numbers = {p: i for i, p in enumerate(self._tensors())}
        mine = {numbers[p]: dict(self._inner.state.get(own, {})) for p, own in self._own.items()}
        of_rank = allgather_object(mine, name=f"{self._label}.state", process_set=self._process_set)
        state: dict[int, dict[str, Any]] = {}
        for param in self._params():
            number = numbers[param.tensor]
            pieces = [of_rank[rank][number] for rank, (begin, end) in enumerate(param.shares) if begin < end]
            if pieces and pieces[0]:
                state[number] = {
                    key: _joined(key, [piece[key] for piece in pieces], param.tensor) for key in pieces[0]
                }
        return {"state": state, "param_groups": super().state_dict()["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._take_options()
        self._inner.state.clear()
        numbers = {p: i for i, p in enumerate(self._tensors())}
        for param in self._params():
            values = state_dict["state"].get(numbers[param.tensor])
            if values and param.tensor in self._own:
                begin, end = param.shares[self._group.rank]
                self._inner.state[self._own[param.tensor]] = {
                    key: _share(key, value, begin, end, param.flat) for key, value in values.items()
                }


def _parts_of(groups: Sequence[dict[str, Any]], size: int) -> list[list[_Param]]:
    parts: list[list[torch.Tensor]] = [[]]
    for p in (p for group in groups for p in group["params"]):
        if not p.is_contiguous():
            raise InvalidArgument(
                f"ShardedOptimizer needs contiguous parameters; one of shape {tuple(p.shape)} is not"
            )
        if sum(q.nbytes for q in parts[-1]) >= _PART_NBYTES:
            parts.append([])
        parts[-1].append(p)
    return [
        [
            _Param(
                p,
                p.detach().view(-1),
                [(b // p.element_size(), e // p.element_size()) for b, e in by_rank],
            )
            for p, by_rank in zip(part, shares([p.nbytes for p in part], size), strict=True)
        ]
        for part in parts
    ]


def _pass_round(group: Group, part: Sequence[_Param], name: str) -> None:
    """Every rank's share of the parameters to all others."""
    if group.size == 1:
        return
    views = [param.flat.view(torch.uint8) for param in part]
    scale = [param.flat.element_size() for param in part]

    def share_of(rank: int) -> list[torch.Tensor]:
        return [
            view[begin * nbytes : end * nbytes]
            for view, nbytes, (begin, end) in zip(
                views, scale, (param.shares[rank] for param in part), strict=True
            )
        ]

    mine = torch.cat(share_of(group.rank)).cpu()
    gathered = torch.from_numpy(np.asarray(group.allgather(mine.numpy(), name=name)))
    if len(gathered) != sum(view.numel() for view in views):
        raise InvalidArgument(
            "ShardedOptimizer needs every rank in each step, and one has joined, with its share of the "
            "parameters: give all ranks as many batches, or use DistributedOptimizer"
        )
    offset = 0
    for rank in range(group.size):
        for view in share_of(rank):
            if rank != group.rank:
                view.copy_(gathered[offset : offset + view.numel()])
            offset += view.numel()


def _joined(key: str, pieces: Sequence[Any], param: torch.Tensor) -> Any:
    if key in _SCALARS or not isinstance(pieces[0], torch.Tensor):
        return pieces[0]
    return torch.cat([piece.to(pieces[0].device) for piece in pieces]).view(param.shape)


def _share(key: str, value: Any, begin: int, end: int, like: torch.Tensor) -> Any:
    """Where the parameter lies, as torch's own `load_state_dict` has it."""
    if not isinstance(value, torch.Tensor):
        return value
    if key in _SCALARS:
        return value.clone()
    return value.detach().reshape(-1)[begin:end].to(like.device, like.dtype, copy=True)
