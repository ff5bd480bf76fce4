"""The timeline of a job: one file, all ranks, one clock."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import hvd_core
from hvd_core.errors import InvalidArgument, RankFailed

pytestmark = pytest.mark.timeout(90)

_STEPS = 5
_NAMES = [f"grad/{i}" for i in range(4)]


def _compute(steps: int = _STEPS) -> int:
    import numpy as np

    from hvd_core import basics

    basics.init()
    group = basics.default_group()
    arrays = [np.ones(1000 * (i + 1), np.float32) for i in range(len(_NAMES))]
    for _ in range(steps):
        handles = [group.allreduce_async(a, name=n) for a, n in zip(arrays, _NAMES, strict=True)]
        for handle in handles:
            handle.wait()
        group.allgather(np.ones((group.rank + 1, 2)), name="rows")
    group.barrier("end")
    return os.getpid()


def _compute_then_leave(steps: int = _STEPS) -> int:
    from hvd_core import basics

    pid = _compute(steps)
    basics.shutdown()
    return pid


def _events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())


def _inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    slack = 0.002  # the rounding of microseconds to three decimals
    return (
        outer["ts"] - slack <= inner["ts"]
        and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + slack
    )


def _check_rows(events: list[dict[str, Any]]) -> None:
    """In a row, of two events one is inside the other or they are apart."""
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    for row in rows.values():
        open_until: list[dict[str, Any]] = []
        for event in sorted(row, key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1]["ts"] + open_until[-1]["dur"] <= event["ts"] + 0.002:
                open_until.pop()
            assert not open_until or _inside(event, open_until[-1]), (event, open_until[-1])
            open_until.append(event)


# The clocks of two hosts are compared by messages, which is exact to half the time that the fastest one took.
_BETWEEN_HOSTS_US = 500.0


def _check(
    events: list[dict[str, Any]], size: int, names: list[str], times: int, blur_us: float = 0.002
) -> None:
    _check_rows(events)
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(named) == list(range(size))
    for rank, name in named.items():
        assert name.startswith(f"rank {rank} (host ")
    batches = {(e["pid"], e["args"]["batch"]): e for e in events if e.get("cat") == "batch"}
    assert {e["tid"] for e in batches.values()} == {1}
    tensors = defaultdict(lambda: defaultdict(list))
    stages = defaultdict(list)
    for event in events:
        if event.get("cat") == "tensor":
            tensors[event["name"]][event["pid"]].append(event)
        elif event.get("cat") == "stage":
            stages[event["pid"], event["tid"]].append(event)
    for name in names:
        of_rank = tensors[name]
        assert {rank: len(found) for rank, found in of_rank.items()} == dict.fromkeys(range(size), times)
        for turn in zip(*(of_rank[rank] for rank in range(size)), strict=True):
            negotiated, queued, ended = [], [], []
            assert len({event["args"]["batch"] for event in turn}) == 1
            for rank, event in enumerate(turn):
                own = [s for s in stages[rank, event["tid"]] if _inside(s, event)]
                assert [s["name"] for s in own] == ["negotiate", "queue", event["args"]["what"]]
                batch = batches[rank, event["args"]["batch"]]
                assert (own[2]["ts"], own[2]["dur"]) == (batch["ts"], batch["dur"])
                queued.append(event["ts"])
                negotiated.append(own[0]["ts"] + own[0]["dur"])
                ended.append(batch["ts"] + batch["dur"])
            # On one clock: nobody agrees before all have asked, nobody is done before all have begun.
            assert max(queued) <= min(negotiated) + blur_us
            assert max(negotiated) <= min(ended) + blur_us


@pytest.mark.parametrize("layout", ["one host", "two hosts"])
def test_a_job_with_hvd_timeline(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "trace.json"
    hosts = ["a", "a", "b"] if layout == "two hosts" else ["", "", ""]
    pids = hvd_core.run(
        _compute_then_leave,
        num_proc=3,
        env=lambda rank: {
            "HVD_TIMELINE": str(path),
            "HVD_TIMELINE_MARK_CYCLES": "1",
            "HVD_HOST_ID": hosts[rank],
        },
    )
    events = _events(path)
    blur_us = _BETWEEN_HOSTS_US if layout == "two hosts" else 0.002
    _check(events, 3, [*_NAMES, "rows"], _STEPS, blur_us)
    assert sum(e["name"] == "cycle" for e in events) >= 3 * _STEPS
    for rank, pid in enumerate(pids):
        assert any(
            e["name"] == "process_name" and e["pid"] == rank and f"pid {pid})" in e["args"]["name"]
            for e in events
        )


def _start_and_stop(path: str) -> None:
    from hvd_core import basics

    basics.init()
    _compute(2)
    if basics.rank() == 0:
        with pytest.raises(InvalidArgument, match=r"/nowhere/t\.json"):
            basics.start_timeline("/nowhere/t.json")
    basics.start_timeline(path)
    if basics.rank() == 0:
        with pytest.raises(InvalidArgument, match="already"):
            basics.start_timeline(path)
    basics.default_group().barrier("started")
    _compute(3)
    basics.stop_timeline()
    if basics.rank() == 0:
        _check(_events(Path(path)), basics.size(), _NAMES, 3)
    basics.default_group().barrier("stopped")
    before = Path(path).read_bytes()
    _compute(1)
    assert Path(path).read_bytes() == before


@pytest.mark.parametrize("size", [1, 2])
def test_a_timeline_of_a_part_of_a_job(tmp_path: Path, size: int) -> None:
    hvd_core.run(_start_and_stop, (str(tmp_path / "trace.json"),), num_proc=size)


def _plan_steps(path: str) -> None:
    import numpy as np

    from hvd_core import basics

    basics.init()
    group = basics.default_group()
    arrays = [np.ones(n, np.float32) for n in (10, 100_000, 500_000)]
    tensors = [(f"grad/{i}", "float32", array.shape) for i, array in enumerate(arrays)]
    plan = group.plan(tensors, name="plan", first_bytes=1 << 16)
    assert plan is not None
    group.barrier("agreed")
    basics.start_timeline(path)
    group.barrier("started")
    for _ in range(3):
        plan.begin()
        for i, array in enumerate(arrays):
            plan.ready(i, array.ctypes.data)
        assert not plan.end(0)
    basics.stop_timeline()
    group.barrier("stopped")  # the notes of some pass through others
    basics.shutdown()


@pytest.mark.parametrize("hosts", [["", ""], [*"aaabb"]], ids=["one host", "two hosts"])
def test_a_plan_is_in_the_timeline_too(tmp_path: Path, hosts: list[str]) -> None:
    path = tmp_path / "trace.json"
    hvd_core.run(
        _plan_steps, (str(path),), num_proc=len(hosts), env=lambda rank: {"HVD_HOST_ID": hosts[rank]}
    )
    events = _events(path)
    _check_rows(events)
    middle = "wire" if hosts[0] else "reduce"
    phases = [{"copy in", middle, "copy out"} for _ in hosts]
    if hosts[0]:
        phases[2].remove("wire")  # owns no slice
    for rank in range(len(hosts)):
        batches = [e for e in events if e.get("cat") == "batch" and e["pid"] == rank and e["tid"] >= 100]
        assert len(batches) >= 2 * 3
        assert all(0 < batch["dur"] < 60e6 for batch in batches)
        inner = [e for e in events if e.get("cat") == "phase" and e["pid"] == rank and e["tid"] >= 100]
        assert {e["name"] for e in inner} == phases[rank]
        for batch in batches if "wire" in phases[rank] else []:
            assert any(_inside(e, batch) and e["name"] == "wire" and e["dur"] > 0 for e in inner)
        for name in ("grad/0", "grad/1", "grad/2"):
            assert (
                sum(e["name"] == name and e["pid"] == rank for e in events if e.get("cat") == "tensor") == 3
            )


def _die(rank_to_die: int, path: str) -> None:
    import numpy as np

    from hvd_core import basics

    _compute(3)
    if basics.rank() == rank_to_die:
        while not os.path.getsize(path):
            os.sched_yield()
        os.kill(os.getpid(), 9)
    basics.default_group().allreduce(np.ones(3), name="never")


@pytest.mark.parametrize("rank_to_die", [0, 1])
def test_a_crash_leaves_what_was_written(tmp_path: Path, rank_to_die: int) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(RankFailed, match=f"rank {rank_to_die}"):
        hvd_core.run(_die, (rank_to_die, str(path)), num_proc=2, env={"HVD_TIMELINE": str(path)})
    text = path.read_text()
    events = json.loads(text if text.endswith("\n]\n") else text[: text.rindex("}") + 1] + "]")
    _check_rows(events)


def _connect_with(path: str) -> str:
    from hvd_core import Config, Group

    try:
        Group.solo(Config(timeline=path))
    except InvalidArgument as error:
        return str(error)
    return ""


def test_a_path_that_cannot_be_written_is_an_error_at_once() -> None:
    assert "'/nowhere/trace.json'" in _connect_with("/nowhere/trace.json")
    assert _connect_with("DYNAMIC") == ""
