"""Shared by all tests: the engines, one of each for a whole run, and what a test must leave behind, which is
nothing."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

GRACE_S = 3.0

os.environ["PYSPARK_PYTHON"] = sys.executable

#: Whether a process can learn how one has ended that is not its child (`hvd_core.launch.exits`).
KERNEL_TELLS = tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 15)

# A shell starts what runs in its background with SIGINT ignored, and so would be every process of a test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def children() -> dict[int, str]:
    """pid → command line of the children of this process that are still running."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:  # the thread has ended meanwhile; its children are another's now
            continue
        for pid in map(int, pids):
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            if state == "Z":
                del found[pid]
    return found


def await_end(pid: int, deadline: float) -> bool:
    """Whether process `pid` ends before `deadline` (time.monotonic)."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0])
    finally:
        os.close(fd)


@pytest.fixture(autouse=True)
def no_process_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test of tests/ranks or tests/fault ends with the child processes it began with."""
    if request.path.parent.name not in ("ranks", "fault"):
        yield
        return
    before = set(children())
    yield
    deadline = time.monotonic() + GRACE_S
    left = {pid: what for pid, what in children().items() if pid not in before}
    left = {pid: what for pid, what in left.items() if not await_end(pid, deadline)}
    assert not left, f"left running: {left}"


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """Spark with two slots, executors on this interpreter."""
    from .spark.sessions import session

    made = session(**{"spark.app.name": "hvd tests", "spark.driver.memory": "1g"})
    yield made
    made.stop()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Ray with two CPUs on this machine."""
    import ray

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=200 << 20,
    )
    yield ray
    ray.shutdown()


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Any]:
    pytest.importorskip("ipykernel")
    from .notebooks import Notebook

    made = Notebook(tmp_path)
    yield made
    made.close()


@pytest.fixture
def horovod(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module that `import horovod` gives in this test, and in ranks that it starts."""
    import hvd_core
    from hvd_core import as_horovod, horovod_calls
    from hvd_core.launch import pickling

    monkeypatch.setattr(horovod_calls, "_said", set())
    monkeypatch.setattr(horovod_calls, "_written", {})
    before = dict(os.environ)
    hvd_core.install_as_horovod()
    hvd_core.install_as_horovod()
    yield importlib.import_module("horovod")
    sys.meta_path.remove(as_horovod.FINDER)
    pickling.BEFORE_JOBS.clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
