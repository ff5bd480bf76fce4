"""Memory of `Group.empty` goes when its last array is gone, on every rank that has mapped it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from hvd_core import Group, Sum
from tests.unit.connected import connected

_NBYTES = 3 << 20


def _mapped() -> int:
    """How often this process, which is all ranks, has memory of that size mapped."""
    sizes = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = line.split()[0].split("-")
        if "memfd:" in line:
            sizes.append(int(end, 16) - int(begin, 16))
    return sizes.count(_NBYTES)


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _all_gone(limit: int) -> bool:
    until = time.monotonic() + 30
    while _mapped() > limit and time.monotonic() < until:
        time.sleep(0.01)
    return _mapped() <= limit


@pytest.mark.timeout(90)
def test_arrays_come_and_go() -> None:
    def add(group: Group) -> None:
        array = group.empty(_NBYTES).view(np.float32)
        array[:] = group.rank + 1
        group.allreduce(array, name="a", out=array, op=Sum)
        assert (array == 6).all()

    with connected(3) as ranks:
        before = _open_files()
        for _ in range(20):
            ranks.on_every(add)
        assert _all_gone(0)
        assert _open_files() == before
        kept = ranks.groups[1].empty(_NBYTES)
        ranks.on_every(lambda group: group.barrier())
        assert _all_gone(1 + 2) and _mapped() == 3  # its owner's and the others'
        kept[:] = 7
        del kept
        assert _all_gone(0)
