"""What hangs on an optimizer and sees to it that its gradients are those of all ranks."""

from __future__ import annotations

import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from .. import basics
from ..errors import InvalidArgument
from ..group import Group, ReduceOp
from . import end_of_backward
from .copies import state_of_copy
from .gradient_hooks import GradientHook, register, remove_all, take_over
from .gradients import Reduction, reduce_gradients
from .parameters import default_names
from .planned import Arrivals, PlannedGradients, RankHasJoined


class Distributor:
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
        process_set: Any = basics.global_process_set,
    ):
        self._optimizer = weakref.ref(optimizer)
        self._process_set = process_set
        self._names = names
        self._how = how
        self.set_backward_passes_per_step(passes_per_step)
        self._label = ""
        self._label_of: weakref.ref[Group] | None = None
        self._reduced = False
        self._skip = False
        self._local_only = 0  # depth of no_sync()
        self._warned = False
        self._attached = False
        self._backward: weakref.ref[end_of_backward.Backward] | None = None
        self._params: list[torch.Tensor] = []
        self._labels: list[str] = []  # their names
        self._index: dict[int, int] = {}  # id of a parameter -> position in _params
        self._versions: list[int] = []  # of the gradients, right after the last reduction; -1 for None
        self._arrivals = Arrivals()
        self._planned: PlannedGradients | None = None
        self._planned_in: weakref.ref[Group] | None = None  # the Group in which we have tried to make one
        self._plans = 0
        self._hand_over: Callable[[torch.Tensor], None] | None = None  # in the running backward
        self._lost: torch.Tensor | None = None  # a parameter that another optimizer has taken over
        self._hook_handles: dict[int, Any] = {}
        weakref.finalize(self, remove_all, self._hook_handles).atexit = False

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

    @property
    def takes_gradients_as_they_are(self) -> bool:
        """Within `skip_synchronize`."""
        return self._skip

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """In this context a backward only adds to this rank's gradients, as in DistributedDataParallel; it
        does not count as one of `backward_passes_per_step`. The first backward after it reduces what has
        come together. A step reduces also in here: none is ever made with the gradients of one rank. All
        ranks enter it at the same place."""
        self._local_only += 1
        try:
            yield
        finally:
            self._local_only -= 1

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
        with _lock:
            _attached.add(self)
        self._label_in(self._group())  # optimizers are made in the same order on all ranks, not used so
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
        take_over(self, params)
        self._params = params
        self._index = {id(p): i for i, p in enumerate(params)}
        self._versions = [-1] * len(params)
        for p, name in default_names(optimizer):
            self._names.setdefault(p, name)
        self._labels = [self._names[p] for p in params]
        for key in self._hook_handles.keys() - self._index.keys():
            self._hook_handles.pop(key).remove()
        on_gradient = GradientHook(self)
        for p in params:
            if id(p) not in self._hook_handles and (p.is_floating_point() or p.is_complex()):
                self._hook_handles[id(p)] = register(p, on_gradient)
        return params

    def lose(self, param: torch.Tensor) -> None:
        self._hook_handles.pop(id(param)).remove()
        self._lost = param

    def _check_owned(self) -> None:
        if self._lost is not None:
            raise InvalidArgument(
                f"parameter {self._names[self._lost]} of shape {tuple(self._lost.shape)} belongs to another "
                "DistributedOptimizer, made later than this one, and its gradient can be reduced only once: "
                "give each parameter to one optimizer"
            )

    def on_gradient(self, param: torch.Tensor) -> None:
        if not end_of_backward.is_running(self._backward):
            if self._reduced and not self._is_added_to(param):
                self._reduced = False  # the global gradients are gone: a new step begins
            group = self._group()
            self._backward = end_of_backward.join(self, group)
            self._hand_over = None if self._local_only else self._begin_overlap(group)
            self._arrivals.begin()
        if self._hand_over is not None:
            self._hand_over(param)
        elif self._planned_in is None:
            self._arrivals.note(self._index.get(id(param)))

    def _begin_overlap(self, group: Group) -> Callable[[torch.Tensor], None] | None:
        """What to do with each gradient of the backward that begins, if this pass makes the last of the
        step and gradients come once."""
        planned = self._plan_in(group)
        is_last = not self._reduced and self._passes + 1 >= self._passes_per_step
        if planned is None or not is_last or self._arrivals.has_repeats:
            return None
        if not planned.is_for(self._current_params()):
            return None
        planned.begin()
        return planned.hand_over

    def end_of_backward(self, group: Group) -> None:
        if self._reduced:
            self._one_too_many()
        if self._local_only:
            self._reduced = False
            return
        self._passes += 1
        if self._reduced or self._passes >= self._passes_per_step:
            self._reduce(group)

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._check_owned()
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
        group = self._group()
        value = group.allreduce(value, name=f"{self._label_in(group)}.loss", op=ReduceOp.Average)
        if isinstance(loss, torch.Tensor):
            return torch.full_like(loss.detach(), float(value[0]))
        return float(value[0])

    def _after_step(self, *_: Any) -> None:
        self._reduced = False
        self._passes = 0

    def forget(self) -> None:
        """A backward has failed because its Group died: the next step begins anew."""
        self._after_step()
        self._backward = self._hand_over = None
        self._planned, self._planned_in, self._arrivals = None, None, Arrivals()

    def call_itself(self, label: str) -> None:
        """How its collectives begin in the present Group. For ranks that have made optimizers in other
        Groups, or none yet."""
        self._label, self._label_of, self._plans = label, weakref.ref(self._group()), 0

    # -- gradients --

    def _group(self) -> Group:
        return basics.group_of(self._process_set)

    def _reduce(self, group: Group | None = None) -> None:
        self._check_owned()
        group = self._group() if group is None else group
        params = self._current_params()
        self._passes = 0
        planned = self._plan_in(group)
        if planned is None:
            self._reduce_now(group, range(len(params)))
            if self._planned_in is None:
                self._make_plan(group)
        else:
            left = planned.finish(is_changed=not planned.is_for(params))
            if left.changed:
                self._reduce_now(group, range(len(params)))
                planned.leave()
                self._make_plan(group)
            elif left.declined:
                self._reduce_now(group, left.declined)
        self._versions = [-1 if p.grad is None else p.grad._version for p in params]
        self._reduced = True

    def _reduce_now(self, group: Group, positions: Sequence[int]) -> None:
        params, names = [self._params[i] for i in positions], [self._labels[i] for i in positions]
        reduce_gradients(self._how, group, self._label_in(group), params, names)

    def _plan_in(self, group: Group) -> PlannedGradients | None:
        is_old = self._planned_in is not None and self._planned_in() is not group
        if is_old or (self._planned is not None and self._planned.is_void):
            self._planned, self._planned_in, self._arrivals = None, None, Arrivals()
        return self._planned

    def plan_in(self, group: Group) -> PlannedGradients | None:
        return self._planned if self._planned_in is not None and self._planned_in() is group else None

    def _make_plan(self, group: Group) -> None:
        """Right after gradients were reduced, so that all ranks come here together, but for those that have
        joined: then each step tries again."""
        self._planned, self._planned_in = None, None
        label = f"{self._label_in(group)}.{self._plans + 1}"
        with suppress(RankHasJoined):
            self._planned = PlannedGradients.make(
                self._how, group, label, self._params, self._labels, self._arrivals.order
            )
            self._planned_in = weakref.ref(group)
            self._plans += 1

    def _label_in(self, group: Group) -> str:
        """The name of our collectives; numbers start anew with each Group."""
        if self._label_of is None or self._label_of() is not group:
            self._label = basics.next_name("DistributedOptimizer", self._process_set)
            self._plans = 0
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
        optimizer = self._optimizer()
        assert optimizer is not None
        return state_of_copy(optimizer)


_lock = threading.Lock()
_attached: weakref.WeakSet[Distributor] = weakref.WeakSet()


def plans_in(group: Group) -> list[PlannedGradients]:
    """Of all optimizers of this process that reduce in `group`."""
    with _lock:
        plans = [distributor.plan_in(group) for distributor in _attached]
    return [plan for plan in plans if plan is not None]
