"""`run`: N ranks on this machine."""

from __future__ import annotations

import os
import pickle
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any, TextIO, TypeVar

from ..errors import InvalidArgument, LaunchFailed, LaunchTimeout, RankFailed, RankFailure, first_cause
from .cpus import thread_env, threads_per_rank, usable_cpus
from .events import Assignment, Event, Failed, Output, Report, Result
from .failure import has_waited, where_they_were, with_the_others
from .pickling import dumps
from .rank_process import RankProcess, end_ranks, note_stacks
from .template_process import Template

T = TypeVar("T")
Env = Mapping[str, str] | Callable[[int], Mapping[str, str]] | None

#: What this process has, is slow to import and safe to fork: the template imports it once for all ranks.
PRELOAD = ("torch", "hvd_core.torch")
#: An echo (a lost peer) is not the cause; that must be heard of within this time.
_CAUSE_WITHIN_S = 2.0
#: Those that have waited like the first say so within this time; who is silent is not in hvd.
_SILENT_S = 0.3


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_proc: int,
    env: Env = None,
    cpus_per_rank: int | None = None,
    output: TextIO | None = None,
    printed: bool = True,
    timeout_s: float | None = None,
) -> list[T]:
    """Runs `fn(*args, **kwargs)` on `num_proc` ranks of this machine; returns their results by rank.

    Each rank is a process of its own; in it `hvd.init()` finds the others. This process is never forked, so
    this works in notebooks and in scripts without `if __name__ == "__main__"`, and from any thread. Functions
    and classes of `__main__` are sent by value, those of importable modules by name.

    env: changes to this process's environment, the same for all ranks or `env(rank)`; visible before anything
    of the user is imported. cpus_per_rank: compute threads of one rank; by default `OMP_NUM_THREADS`, else an
    equal share of the CPUs this process may use (affinity mask, cgroup quota). output: text file for the
    lines the ranks print, each with the prefix "[rank] "; None: this process's stdout and stderr. printed:
    False leaves out what ranks print and shows only what they say with `log_to_driver`. timeout_s: all ranks
    must be done after this long.

    When a rank fails, the others are ended and `RankFailed` is raised with the first cause, from the rank's
    own exception when it can be unpickled here. Also raised: NotPicklable (names the variable) and
    InvalidArgument before anything is started, LaunchFailed, LaunchTimeout. Ctrl-C ends the ranks and goes on
    as KeyboardInterrupt. No process, thread or descriptor is left behind, whichever way this ends.
    """
    _check_counts(num_proc, cpus_per_rank)
    envs = envs_of(num_proc, env)
    payload = dumps(fn, args, kwargs)
    if not sys.platform.startswith("linux"):
        if num_proc != 1:
            raise InvalidArgument(
                f"num_proc={num_proc}: more than one rank works on Linux only, this is {sys.platform}"
            )
        return [fn(*args, **(kwargs or {}))]
    threads = threads_per_rank(cpus_per_rank, num_proc, os.environ, usable_cpus())
    preload = [name for name in PRELOAD if name in sys.modules]
    return run_payload(
        payload,
        envs,
        threads=threads,
        preload=preload,
        output=output,
        timeout_s=timeout_s,
        printed=printed,
    )


def run_payload(
    payload: bytes,
    envs: Sequence[Mapping[str, str]],
    *,
    threads: int,
    preload: Sequence[str],
    output: TextIO | None = None,
    timeout_s: float | None = None,
    printed: bool = True,
) -> list[Any]:
    """`run` of what `dumps` made, with one rank for each of `envs`. preload: modules that the template
    imports once for all ranks; those that cannot be imported are left to the ranks. printed: show what ranks
    print, and not only what they say with `log_to_driver`."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    ranks: list[RankProcess] = []
    with Template.start(preload, thread_env(threads)) as template:
        try:
            ranks.extend(template.fork(payload, env=dict(extra), threads=threads) for extra in envs)
            return _Job(ranks, _Printer(output, printed), timeout_s, deadline).results()
        finally:
            end_ranks(ranks)
            for rank in ranks:
                rank.close()


def _check_counts(num_proc: int, cpus_per_rank: int | None) -> None:
    counts = {"num_proc": num_proc} | ({} if cpus_per_rank is None else {"cpus_per_rank": cpus_per_rank})
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InvalidArgument(f"{name} must be a whole number of at least 1, not {count!r}")


def envs_of(num_proc: int, env: Env) -> list[dict[str, str]]:
    """`env` of each rank. Raises InvalidArgument for what is no name or no string."""
    envs = [(env(rank) if callable(env) else env) or {} for rank in range(num_proc)]
    for rank, extra in enumerate(envs):
        if not isinstance(extra, Mapping):
            raise InvalidArgument(f"env of rank {rank} is {extra!r}, not {{name: string}}")
        for key, value in extra.items():
            if (
                not isinstance(key, str)
                or not isinstance(value, str)
                or not key
                or "=" in key
                or "\0" in key + value
            ):
                raise InvalidArgument(f"env of rank {rank}: {key!r}: {value!r} is not a name and a string")
    return [dict(extra) for extra in envs]


class _Printer:
    """Lines of the ranks to text files, a whole line in one write."""

    def __init__(self, output: TextIO | None, printed: bool):
        self._printed = printed
        self._files = {
            "stdout": sys.stdout if output is None else output,
            "stderr": sys.stderr if output is None else output,
        }

    def take(self, rank: int, event: Output | Report) -> None:
        if isinstance(event, Report):
            if event.kind == "log":
                self._show(rank, "stdout", str(event.data.get("line", "")))
        elif self._printed:
            self._show(rank, event.stream, event.line)

    def _show(self, rank: int, stream: str, line: str) -> None:
        file = self._files[stream]
        if file is None:  # pythonw, some embedders
            return
        text = f"[{rank}] {line}\n"
        try:
            file.write(text)
        except UnicodeEncodeError:
            encoding = getattr(file, "encoding", None) or "ascii"
            file.write(text.encode(encoding, "backslashreplace").decode(encoding))
        file.flush()


class _Job:
    """The ranks of one `run`, until the first failure or the last result."""

    def __init__(
        self, ranks: list[RankProcess], printer: _Printer, timeout_s: float | None, deadline: float | None
    ):
        self._ranks = ranks
        self._printer = printer
        self._timeout_s = timeout_s
        self._deadline = deadline
        self._assigned = False
        self._results: dict[int, bytes] = {}
        self._failures: dict[int, Failed] = {}

    def results(self) -> list[Any]:
        cause_by = float("inf")
        while len(self._results) < len(self._ranks):
            now = time.monotonic()
            if self._failures:
                cause_by = min(cause_by, now + _CAUSE_WITHIN_S)
                over = len(self._failures) + len(self._results) == len(self._ranks)
                if over or now >= cause_by or not first_cause(self._all_failures()).echo:
                    self._raise_first_cause()
            if self._deadline is not None and now >= self._deadline:
                self._raise_timeout()
            ends = [cause_by, now + 1.0] + ([self._deadline] if self._deadline is not None else [])
            wait([rank.fileno() for rank in self._living()], max(0.0, min(ends) - now))
            self._poll()
            self._assign_once_all_listen()
        return [self._unpickled(rank) for rank in range(len(self._ranks))]

    def _living(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if not rank.finished]

    def _poll(self) -> None:
        for number, rank in enumerate(self._ranks):
            for event in rank.poll():
                self._take(number, event)

    def _take(self, number: int, event: Event) -> None:
        if isinstance(event, (Output, Report)):
            self._printer.take(number, event)
        elif isinstance(event, Result):
            self._results[number] = event.value
        elif isinstance(event, Failed):
            self._failures[number] = Failed(event.failure.with_rank(number), event.exception)

    def _assign_once_all_listen(self) -> None:
        endpoints = [rank.endpoint_or_none() for rank in self._ranks]
        known = tuple(endpoint for endpoint in endpoints if endpoint is not None)
        if self._assigned or len(known) < len(self._ranks):
            return
        self._assigned = True
        token = secrets.token_bytes(32)
        for number, rank in enumerate(self._ranks):
            rank.assign(Assignment(number, len(self._ranks), known, token))

    def _all_failures(self) -> list[RankFailure]:
        return [failed.failure for failed in self._failures.values()]

    def _raise_first_cause(self) -> None:
        if has_waited(first_cause(self._all_failures())):
            self._ask_the_silent()
        end_ranks(self._ranks)
        self._poll()  # what the others still said, and perhaps an earlier cause
        failures = self._all_failures()
        failure = with_the_others(first_cause(failures), failures)
        if failure.kind == "lost":
            raise LaunchFailed(f"rank {failure.rank}: {failure.message}")
        raise RankFailed(failure) from _loads_or_none(self._failures[failure.rank].exception)

    def _ask_the_silent(self) -> None:
        deadline = time.monotonic() + _SILENT_S
        while (living := self._living()) and (left := deadline - time.monotonic()) > 0:
            wait([rank.fileno() for rank in living], left)
            self._poll()
        note_stacks(self._living())

    def _raise_timeout(self) -> None:
        late = [str(number) for number, rank in enumerate(self._ranks) if not rank.finished]
        note_stacks(self._living())
        end_ranks(self._ranks)
        self._poll()
        who = f"rank {late[0]} was" if len(late) == 1 else f"ranks {', '.join(late)} were"
        said = f"{who} not done after {self._timeout_s:g} s (timeout_s={self._timeout_s:g}) and ended"
        raise LaunchTimeout("\n".join([said, *where_they_were(self._all_failures())]))

    def _unpickled(self, rank: int) -> Any:
        try:
            return pickle.loads(self._results[rank])
        except Exception as error:
            failure = RankFailure(
                rank,
                "exception",
                exc_type=type(error).__name__,
                message=f"its result arrived but cannot be unpickled here: {error}",
                at=time.time(),
            )
            raise RankFailed(failure) from error


def _loads_or_none(exception: bytes) -> BaseException | None:
    """The rank's exception, when its class can be imported here and can be rebuilt."""
    if not exception:
        return None
    try:
        value = pickle.loads(exception)
    except Exception:  # noqa: BLE001  its record says enough
        return None
    return value if isinstance(value, BaseException) else None
