"""Functions of Horovod whose parameters or settings are not ours, for `hvd_core.as_horovod`."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from . import basics, world
from .config import Config, variable
from .errors import InvalidArgument

#: Horovod's settings that mean the same here, and our field of `Config`. An HVD_* variable that is set wins.
_SETTINGS = {
    "HOROVOD_FUSION_THRESHOLD": "fusion_bytes",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "peer_timeout_s",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "stall_warn_s",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "stall_shutdown_s",
    "HOROVOD_TIMELINE": "timeline",
    "HOROVOD_TIMELINE_MARK_CYCLES": "timeline_mark_cycles",
}
_PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
#: Nothing to say of these: what Horovod's launcher sets, and what is always possible here.
_QUIET = {f"HOROVOD_{name}" for name in (*_PLACE, "HOSTNAME", "DYNAMIC_PROCESS_SETS")}
_said: set[str] = set()
_written: dict[str, str] = {}  # ours that we have set


def init(comm: Any = None, process_sets: Any = None) -> None:
    """`hvd_core.basics.init`, with Horovod's settings."""
    notes = _read_settings(os.environ)
    basics.init(comm, process_sets)
    tell_place()
    if basics.rank() == 0:
        for note in notes:
            print(f"hvd: {note}", file=sys.stderr, flush=True)


def _read_settings(env: MutableMapping[str, str]) -> list[str]:
    """Makes ours of what Horovod's are now, and tells of each once."""
    notes = []
    for name, field in _SETTINGS.items():
        ours = variable(field)
        if ours in env and env[ours] != _written.get(ours):
            continue
        if _written.pop(ours, None) is not None:
            env.pop(ours, None)
        if name in env:
            try:
                Config.from_env({ours: env[name]})
            except InvalidArgument as error:
                raise InvalidArgument(f"{name}: {error}") from None
            env[ours] = _written[ours] = env[name]
            note = f"{name}={env[name]} is read as {ours}"
            notes += [note] if note not in _said else []
            _said.add(note)
    others = sorted(name for name in env if name.startswith("HOROVOD_"))
    others = [name for name in others if not ({name} & {*_SETTINGS, *_QUIET, *_said})]
    _said.update(others)
    if others:
        notes.append(f"these settings of Horovod mean nothing here: {', '.join(others)}")
    return notes


def tell_place() -> None:
    """HOROVOD_RANK and the others, which scripts read, as soon as they are known."""
    place = world.current()
    if not world.is_set() or not place.endpoints:
        return
    first, by_host = 0, place.ranks_by_host()
    for host, local_size in enumerate(by_host):
        if place.rank < first + local_size:
            numbers = place.rank, place.size, place.rank - first, local_size, host, len(by_host)
            told = zip(_PLACE, numbers, strict=True)
            os.environ.update({f"HOROVOD_{name}": str(number) for name, number in told})
            return
        first += local_size


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """A thread that runs `target(*args)`. `silent` is there for Horovod's sake."""
    thread = threading.Thread(target=target, args=tuple(args), name=name, daemon=daemon)
    thread.start()
    return thread


REPLACING = (
    "the number of ranks stays; on Ray lost ones are replaced: see HorovodConfig(replace_workers=True)"
)
_NO_MPI = "hvd brings its own transport, there is no MPI"
_ONE_HOST = "ranks are started on this machine only; on several hosts let mpirun, srun or torchrun start them"
_OUTPUT = "the ranks' lines come here, each with its rank"


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    np: int | None = None,
    hosts: str | None = None,
    **options: Any,
) -> list[Any]:
    """`hvd_core.run` by Horovod's parameters."""
    from . import launch

    _refuse(
        "horovod.run",
        options,
        useless=("disable_cache", "start_timeout", "use_gloo", "verbose"),
        instead={
            **dict.fromkeys(("hostfile", "ssh_port", "ssh_identity_file"), _ONE_HOST),
            **dict.fromkeys(("use_mpi", "mpi_args"), _NO_MPI),
            **dict.fromkeys(("min_num_proc", "min_np", "max_num_proc", "max_np", "slots"), REPLACING),
            **dict.fromkeys(("reset_limit", "cooldown_range", "host_discovery_script"), REPLACING),
            **dict.fromkeys(("network_interface", "network_interfaces"), _ONE_HOST),
            "output_filename": _OUTPUT,
            "executable": "ranks run this Python",
        },
    )
    if num_proc is not None and np is not None and num_proc != np:
        raise InvalidArgument(f"horovod.run: num_proc={num_proc} and np={np} are two names of one thing")
    count = num_proc or np or 1
    if hosts is not None and hosts.partition(":")[0] not in ("localhost", "127.0.0.1"):
        raise InvalidArgument(f"horovod.run(hosts={hosts!r}): {_ONE_HOST}")
    return launch.run(func, args, kwargs, num_proc=count)


def run_on_spark(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    *,
    env: Mapping[str, str] | None = None,
    verbose: int = 1,
    **options: Any,
) -> list[Any]:
    """`hvd_spark.run` by the parameters of `horovod.spark.run`."""
    _refuse(
        "horovod.spark.run",
        options,
        useless=("use_gloo", "prefix_output_with_timestamp"),
        instead={
            **dict.fromkeys(("use_mpi", "extra_mpi_args"), _NO_MPI),
            **dict.fromkeys(("stdout", "stderr"), _OUTPUT),
            "nics": f"env={{{variable('interface')!r}: name}} says which network interface",
            "executable": "ranks run the Python of the executors",
        },
    )
    start = {} if start_timeout is None else {"start_timeout_s": float(start_timeout)}
    spark = importlib.import_module("hvd_spark")
    results: list[Any] = spark.run(fn, args, kwargs, num_proc, env=env, verbose=verbose, **start)
    return results


def _refuse(
    caller: str, options: Mapping[str, Any], useless: Sequence[str], instead: Mapping[str, str]
) -> None:
    """Of Horovod's options those that mean nothing here; `useless` ones are let pass, and so is what was left
    at Horovod's default."""
    for name, value in options.items():
        if name not in useless and name not in instead:
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}")
        if name in instead and value not in (None, False):
            raise InvalidArgument(f"{caller}({name}={value!r}): {instead[name]}")
