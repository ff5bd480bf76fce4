"""Runs code when a backward pass has ended, before `backward()` returns to the user."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import torch

from .. import basics

if TYPE_CHECKING:
    from ..group import Group


class Member(Protocol):
    """An optimizer whose parameters got gradients in this backward."""

    def end_of_backward(self, group: Group) -> None: ...


class Backward:
    """One running backward pass of this rank, and the optimizers that take part in it.

    Each member waits for other ranks. They do so side by side: on another rank gradients may have arrived in
    another order, or one member's not at all (it joins in its step), so that waiting one after the other
    could be crosswise.

    autograd owns the instance (through its callback), everyone else refers to it weakly: it is gone when the
    pass has ended or has failed. `done` says the same while a traceback keeps it alive. A backward inside a
    backward (reentrant checkpointing) joins the outer one if that has delivered a gradient before.
    """

    def __init__(self) -> None:
        self.done = False
        self.members: list[tuple[Member, Group]] = []

    def __call__(self) -> None:
        self.done = True
        (first, group), *others = self.members
        if not others:
            first.end_of_backward(group)
            return
        with ThreadPoolExecutor(len(others), thread_name_prefix="hvd-end-of-backward") as pool:
            futures = [pool.submit(member.end_of_backward, its_group) for member, its_group in others]
            first.end_of_backward(group)
        for future in futures:
            future.result()


#: By default Group, that is by rank.
_running: weakref.WeakKeyDictionary[Group, weakref.ref[Backward]] = weakref.WeakKeyDictionary()


def is_running(backward: weakref.ref[Backward] | None) -> bool:
    """Whether the pass that `join` returned has yet to end."""
    running = backward() if backward is not None else None
    return running is not None and not running.done


def join(member: Member, group: Group) -> weakref.ref[Backward]:
    """To be called from a gradient hook, once for each pass: `member.end_of_backward(group)` runs when it
    ends."""
    rank = basics.default_group()
    backward = _running.get(rank)
    running = backward() if backward is not None else None
    if backward is None or running is None or running.done:
        running = Backward()
        backward = _running[rank] = weakref.ref(running)
        torch.autograd.Variable._execution_engine.queue_callback(running)
    running.members.append((member, group))
    return backward
