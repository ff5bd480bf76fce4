"""What control groups and the machine let a process have, and memory that is more than that."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_core import Config, Group, Listener
from hvd_core.errors import InvalidArgument
from hvd_core.limits import cpu_quota, free_memory

from .connected import connected

pytestmark = pytest.mark.timeout(60)


def _cgroups(folder: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    (folder / "membership").write_text(membership)
    for name, text in files.items():
        (folder / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "fs" / name).write_text(text + "\n")
    return folder / "membership", folder / "fs"


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        (
            "0::/a/b\n",
            {"cpu.max": "max 100000", "a/cpu.max": "200000 100000", "a/b/cpu.max": "300000 100000"},
            2,
        ),
        ("0::/of/the/host\n", {"cpu.max": "100000 100000"}, 1),
        ("2:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "100000"}, 0.5),
        ("2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("3:memory:/\n", {}, None),
    ],
)
def test_cpu_quota(membership: str, files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    assert cpu_quota(*_cgroups(tmp_path, membership, files)) == quota


def _v2(limit: str, used: int, inactive: int = 0) -> dict[str, str]:
    stat = f"anon 1\ninactive_file {inactive}\nactive_file 7"
    return {"memory.max": limit, "memory.current": str(used), "memory.stat": stat}


def _v1(limit: int, used: int, inactive: int = 0) -> dict[str, str]:
    stat = f"inactive_file 5\ntotal_inactive_file {inactive}"
    return {"memory.limit_in_bytes": str(limit), "memory.usage_in_bytes": str(used), "memory.stat": stat}


def _below(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


@pytest.mark.parametrize(
    ("membership", "files", "free"),
    [
        ("0::/\n", _v2("1000", 300), 700),
        ("0::/\n", _v2("1000", 900, inactive=250), 350),
        ("0::/\n", _v2("1000", 1100), 0),
        ("0::/a/b\n", _below("a", _v2("1000", 600)) | _below("a/b", _v2("max", 100)), 400),
        ("0::/a/b\n", _below("a", _v2("9000", 600)) | _below("a/b", _v2("800", 100)), 700),
        ("0::/of/the/host\n", _v2("1000", 300), 700),
        ("9:memory:/x\n0::/\n", _below("memory/x", _v1(1000, 600, inactive=50)), 450),
        (
            "9:memory:/x/y\n",
            _below("memory/x", _v1(1000, 600)) | _below("memory/x/y", _v1(1 << 62, 500)),
            400,
        ),
        ("2:cpu:/x\n", _below("cpu/x", _v1(1000, 600)), None),
        ("0::/\n", _v2("max", 300), None),
        ("0::/\n", {}, None),
    ],
)
def test_free_memory(membership: str, files: dict[str, str], free: int | None, tmp_path: Path) -> None:
    got = free_memory(*_cgroups(tmp_path, membership, files))
    assert got == free if free is not None else got > 1 << 20


def test_more_shared_memory_than_there_is_is_an_error_and_no_kill() -> None:
    group = Group.solo()
    with pytest.raises(InvalidArgument, match=r"Group\.empty: 1,125,899,906,842,624 bytes of shared memory"):
        group.empty(1 << 50)
    assert group.empty(1000).nbytes == 1000
    config = Config(chunk_bytes=1 << 40)
    listener = Listener.bind(config)
    with pytest.raises(
        InvalidArgument, match=r"chunk_bytes=1099511627776 \(HVD_CHUNK_BYTES\): .* bytes of shared"
    ):
        Group.connect(listener, [listener.endpoint] * 2, rank=0, token=b"t", config=config)


def test_a_plan_asks_for_room_before_anybody_is_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = [(f"g{i}", "float32", (1 << 20,)) for i in range(8)]

    def refused(group: Group) -> str:
        with pytest.raises(InvalidArgument) as error:
            group.plan(gradients, name="p")
        return str(error.value)

    with connected(2) as ranks:
        with monkeypatch.context() as tight:
            tight.setattr("hvd_core.group.free_memory", lambda: 6 << 20)
            for text in ranks.on_every(refused):
                assert text.startswith("plan 'p', batch_bytes=4194304: 8,3"), text
                assert "6,291,456 are free here" in text
        plans = ranks.on_every(lambda group: group.plan(gradients, name="p"))
        assert all(plan is not None for plan in plans)


@contextlib.contextmanager
def _memory_cgroup(limit: int) -> Iterator[Path]:
    """A cgroup of our own, of either version."""
    for root, name in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup", root, f"hvd-test-{uuid.uuid4().hex[:8]}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / name).exists():
                (group / name).write_text(str(limit))
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip("no memory cgroup can be made here")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes cgroups")
def test_the_limit_of_a_real_cgroup_is_seen_before_it_kills() -> None:
    code = (
        "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "from hvd_core import Group; from hvd_core.errors import InvalidArgument\n"
        "group = Group.solo(); group.empty(20 << 20)\n"
        "try: group.empty(1 << 30)\n"
        "except InvalidArgument as error: print(error)"
    )
    with _memory_cgroup(400 << 20) as group:
        command = [sys.executable, "-c", code, str(group / "cgroup.procs")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert "1,073,741,824 bytes of shared memory" in done.stdout
