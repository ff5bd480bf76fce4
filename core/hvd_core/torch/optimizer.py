"""DistributedOptimizer: the user's own optimizer, whose gradients are those of all ranks.

Nothing is subclassed or replaced. Hooks on the parameters notice a backward pass; at its end, before
`backward()` returns, the gradients are reduced; hooks around `step` see to the passes that did not get that
far. From then on clipping, `GradScaler`, logging and the step itself see the same values on every rank.
"""

from __future__ import annotations

import operator
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from .. import basics
from ..basics import global_process_set as _G
from ..errors import InvalidArgument
from ..group import Group, ReduceOp
from . import end_of_backward
from .compression import Compression, Compressor
from .gradients import Reduction, reduce_gradients
from .ops import resolve_op
from .parameters import check_groups, default_names, parameter_names

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)


def DistributedOptimizer(
    optimizer: _Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = _G,
) -> _Optimizer:
    """Makes `optimizer` step with the gradients of all ranks, and returns that same object.

    Every rank calls it with an optimizer over the same parameters in the same order. Gradients are reduced at
    the end of the backward that completes `backward_passes_per_step` (several passes are summed, not
    averaged, as everywhere in torch), or in `step()` if fewer were made. A gradient missing on some ranks
    counts as zero there; one missing everywhere stays None. A rank that made no backward takes part in
    `step()`, or in `synchronize()`, which it must then call before it looks at gradients. A closure given to
    `step` returns the average of the ranks' losses. With one rank nothing changes.

    Added to the optimizer: `synchronize()` reduces now if that is still to be done; `skip_synchronize()`, a
    context in which `step()` takes the gradients as they are; `set_backward_passes_per_step(n)`. A copy of
    the optimizer (`copy.deepcopy`, pickle) has none of this and raises at its first step.

    named_parameters: names for error texts; if given, unique and for every parameter of the optimizer. op:
    Average, Sum, Min, Max or Product. gradient_predivide_factor f: gradients are divided by f before they are
    summed and by size/f after (Average only). compression: on the wire. sparse_as_dense: reduce sparse
    gradients as dense ones; without it they are refused. num_groups, groups: checked and accepted for
    Horovod's sake; here all gradients are one group. Raises `InvalidArgument` (a `ValueError`).
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f"expected a torch.optim.Optimizer, got {type(optimizer).__qualname__}")
    if hasattr(optimizer, "_hvd"):
        raise InvalidArgument("this optimizer is distributed already")
    if gradient_predivide_factor != 1.0 and op != ReduceOp.Average:
        raise InvalidArgument("gradient_predivide_factor works with op=Average only")
    check_groups(groups, num_groups)
    group = basics.group_of(process_set)
    # The core divides by the size between the sum and the postscale.
    scales = 1.0 / gradient_predivide_factor, float(gradient_predivide_factor)
    reduction = Reduction(resolve_op(op, None), *scales, compression, sparse_as_dense)
    _drop_refusal(optimizer)
    names = parameter_names(optimizer, named_parameters)
    distributor = _Distributor(optimizer, names, reduction, backward_passes_per_step)
    if group.size > 1:
        distributor.attach()
    added = optimizer.__dict__
    added["_hvd"] = distributor
    added["_parameter_names"] = names
    for method in (
        distributor.synchronize,
        distributor.skip_synchronize,
        distributor.set_backward_passes_per_step,
    ):
        added[method.__name__] = method
    return optimizer


class _Distributor:
    """What is attached to one optimizer, which owns it; nothing here keeps the optimizer alive.

    The state is what this rank knows of `p.grad`: `_reduced` says that they are global and not yet used up,
    `_passes` counts the backward passes since. `step` uses them up, and so does setting them to zero or None.
    Not thread-safe, as optimizers are not.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[torch.Tensor, str],
        how: Reduction,
        passes_per_step: int,
    ):
        self._optimizer = weakref.ref(optimizer)
        self._names = names
        self._how = how
        self.set_backward_passes_per_step(passes_per_step)
        self._label = basics.next_name("DistributedOptimizer")
        self._label_of = weakref.ref(basics.default_group())
        self._reduced = False
        self._skip = False
        self._warned = False
        self._attached = False
        self._backward: weakref.ref[end_of_backward.Backward] | None = None
        self._params: list[torch.Tensor] = []
        self._labels: list[str] = []  # their names
        self._index: dict[int, int] = {}  # id of a parameter -> position in _params
        self._versions: list[int] = []  # of the gradients, right after the last reduction; -1 for None
        self._hook_handles: dict[int, Any] = {}
        weakref.finalize(self, _remove_all, self._hook_handles).atexit = False

    # -- public, as methods of the optimizer --

    def synchronize(self) -> None:
        """Reduces the gradients now if no backward has done so since the last step. All other ranks reduce
        theirs at the same time, by a backward, a step or this. A rank without any backward contributes zeros;
        gradients that were set by hand are reduced as they are."""
        if self._attached and (not self._reduced or self._is_zeroed()):
            self._reduce()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In this context `step()` takes the gradients as they are."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes make a step; the count starts anew."""
        if not isinstance(passes, int) or passes < 1:
            raise InvalidArgument(f"backward_passes_per_step must be a positive integer, got {passes!r}")
        self._passes_per_step = passes
        self._passes = 0

    # -- hooks --

    def attach(self) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None
        self._attached = True
        self._current_params()
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.__dict__["__getstate__"] = self._state_of_copy

    def _current_params(self) -> list[torch.Tensor]:
        """The optimizer's parameters, with hooks; groups may have been added or replaced."""
        optimizer = self._optimizer()
        assert optimizer is not None
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if len(params) == len(self._params) and all(map(operator.is_, params, self._params)):
            return self._params
        self._params = params
        self._index = {id(p): i for i, p in enumerate(params)}
        self._versions = [-1] * len(params)
        for p, name in default_names(optimizer):
            self._names.setdefault(p, name)
        self._labels = [self._names[p] for p in params]
        for key in self._hook_handles.keys() - self._index.keys():
            self._hook_handles.pop(key).remove()
        weak = weakref.ref(self)

        def on_gradient(param: torch.Tensor) -> None:
            if (distributor := weak()) is not None:
                distributor._on_gradient(param)

        for p in params:
            if id(p) not in self._hook_handles and (p.is_floating_point() or p.is_complex()):
                self._hook_handles[id(p)] = _register(p, on_gradient)
        return params

    def _on_gradient(self, param: torch.Tensor) -> None:
        if end_of_backward.is_running(self._backward):
            return
        if self._reduced and not self._is_added_to(param):
            self._reduced = False  # the global gradients are gone: a new step begins
        self._backward = end_of_backward.join(self, basics.default_group())

    def end_of_backward(self, group: Group) -> None:
        if self._reduced:
            self._one_too_many()
        self._passes += 1
        if self._reduced or self._passes >= self._passes_per_step:
            self._reduce(group)

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            if not self._reduced and not self._skip:
                self._reduce()
            return None
        if len(args) > 1:
            return (args[0], self._global_closure(closure), *args[2:]), kwargs
        return args, {**kwargs, "closure": self._global_closure(closure)}

    def _global_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def wrapped() -> Any:
            self._after_step()
            loss = closure()
            if not self._reduced and not self._skip:
                self._reduce()
            return self._average(loss)

        return wrapped

    def _average(self, loss: Any) -> Any:
        if loss is None:
            return None
        value = np.array([float(loss.detach() if isinstance(loss, torch.Tensor) else loss)])
        value = basics.default_group().allreduce(value, name=f"{self._label}.loss", op=ReduceOp.Average)
        if isinstance(loss, torch.Tensor):
            return torch.full_like(loss.detach(), float(value[0]))
        return float(value[0])

    def _after_step(self, *_: Any) -> None:
        self._reduced = False
        self._passes = 0

    # -- gradients --

    def _reduce(self, group: Group | None = None) -> None:
        group = basics.default_group() if group is None else group
        params = self._current_params()
        self._passes = 0
        reduce_gradients(self._how, group, self._label_in(group), params, self._labels)
        self._versions = [-1 if p.grad is None else p.grad._version for p in params]
        self._reduced = True

    def _label_in(self, group: Group) -> str:
        """The name of our collectives; numbers start anew with each Group."""
        if self._label_of() is not group:
            self._label = basics.next_name("DistributedOptimizer")
            self._label_of = weakref.ref(group)
        return self._label

    def _is_added_to(self, param: torch.Tensor) -> bool:
        """Whether the backward under way adds to `param`'s global gradient. autograd then increments the
        version by one; a new gradient has version 0, and setting to zero counts too."""
        index = self._index.get(id(param))
        return (
            index is not None
            and param.grad is not None
            and param.grad._version == self._versions[index] + 1
            and param.grad._version > 0
        )

    def _is_zeroed(self) -> bool:
        for p in self._params:
            if p.grad is not None:
                values = p.grad._values() if p.grad.layout is torch.sparse_coo else p.grad
                if bool(values.any()):
                    return False
        return True

    def _one_too_many(self) -> None:
        """The gradients are the global ones of the passes before plus those of this rank's last pass."""
        text = (
            f"more backward passes before step() than backward_passes_per_step={self._passes_per_step} "
            "(several backward() calls, or reentrant activation checkpointing)"
        )
        if self._how.op in (ReduceOp.Sum, ReduceOp.Product):
            raise InvalidArgument(
                f"{text}: with op={self._how.op.name} the first ones would be counted once for each rank. "
                "Pass DistributedOptimizer(backward_passes_per_step=) the number of passes"
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{text}: all gradients are reduced again after each, which is right but slow. "
                "Pass DistributedOptimizer(backward_passes_per_step=) the number of passes",
                stacklevel=7,  # the user's call of backward(), three frames of torch and three of ours up
            )

    def _state_of_copy(self) -> dict[str, Any]:
        """For copies and pickles, which lose all hooks: what torch keeps, and a hook that refuses to step."""
        optimizer = self._optimizer()
        assert optimizer is not None
        state = type(optimizer).__getstate__(optimizer)
        return {**state, "_optimizer_step_pre_hooks": OrderedDict({_REFUSAL: refuse_step})}


_REFUSAL = -1  # torch numbers its hooks from 0


def refuse_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The only hook of a copied optimizer (public for pickle's sake)."""
    raise InvalidArgument(
        f"this {type(optimizer).__name__} is a copy of a DistributedOptimizer (made by copy.deepcopy or "
        "pickle) and would step with the gradients of its own rank only. Wrap it: "
        "hvd.DistributedOptimizer(copy, ...)"
    )


def _drop_refusal(optimizer: torch.optim.Optimizer) -> None:
    optimizer._optimizer_step_pre_hooks.pop(_REFUSAL, None)


def _remove_all(handles: dict[int, Any]) -> None:
    for handle in handles.values():
        handle.remove()


def _register(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Registers also on a frozen parameter: it may be unfrozen later, and torch keeps the hook."""
    frozen = not param.requires_grad
    if frozen:
        param.requires_grad_(True)
    try:
        return param.register_post_accumulate_grad_hook(hook)
    finally:
        if frozen:
            param.requires_grad_(False)
