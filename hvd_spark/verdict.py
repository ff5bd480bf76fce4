"""How a job ended badly, as the exception to raise at the driver: the first cause, typed, no JVM stack."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence

from hvd_core import errors
from hvd_core.errors import (
    HorovodInternalError,
    HvdError,
    JobCancelled,
    PreflightError,
    RankFailed,
    RankFailure,
    StorageFull,
    first_cause,
)
from hvd_core.launch.failure import with_the_others

from .guard import MISSING
from .rows import Failure

_ADVICE = (
    "install it on every executor (with hvd: pip install hvd), ship your own modules "
    "(spark.submit.pyFiles, addPyFile), or point PYSPARK_PYTHON (spark.pyspark.python) at a Python that "
    "has it"
)


def typed(failures: Sequence[Failure], fitting: bool) -> tuple[HvdError, BaseException | None]:
    """The first cause as the exception to raise, and what to raise it from.

    What hvd itself finds about rows and losses is raised as what it is, and modules that executors lack as a
    PreflightError; all else is a RankFailed, from the rank's own exception if that can be unpickled here.
    """
    missing = [failure.what for failure in failures if failure.stage == MISSING]
    if missing:
        return PreflightError(_said_of_modules(missing)), None
    whats = [failure.what for failure in failures]
    first = failures[whats.index(first_cause(whats))]
    failed = RankFailed(with_the_others(first.what, whats))
    kind = getattr(errors, first.what.exc_type, None)
    if fitting and isinstance(kind, type) and issubclass(kind, HvdError):
        if not issubclass(kind, (RankFailed, HorovodInternalError)):
            if kind is StorageFull:
                return kind(f"rank {first.what.rank} on {first.what.host}: {first.what.message}"), None
            if first.stage == "rows":
                return kind(_said_of_rows(failures)), None
            return kind(first.what.message), failed
    failed.__cause__ = _unpickled(first.exception)
    return failed, failed.__cause__


def _said_of_modules(missing: Sequence[RankFailure]) -> str:
    by_text: dict[str, set[str]] = {}
    for what in missing:
        by_text.setdefault(what.message, set()).add(what.host)
    said = "; ".join(f"{text} on {', '.join(sorted(hosts))}" for text, hosts in sorted(by_text.items()))
    return f"the executors' Python lacks what the ranks need: {said}: {_ADVICE}"


def _said_of_rows(failures: Sequence[Failure]) -> str:
    """Each rank counts in its own rows, so all have something to say."""
    said = [failure.what for failure in failures if failure.stage == "rows"]
    if len(said) == 1:
        return said[0].message
    return "\n".join(f"rank {what.rank}: {what.message}" for what in said)


def _unpickled(exception: bytes) -> BaseException | None:
    try:
        value = pickle.loads(exception) if exception else None
    except Exception:  # noqa: BLE001  its class may not exist here, or not rebuild
        return None
    return value if isinstance(value, BaseException) else None


_RANK_OF_TASK = re.compile(r"ResultTask\(\d+, (\d+)\)")
_MISSING = re.compile(r"ModuleNotFoundError: (No module named '[.\w]+')")
_HOST = re.compile(r"\((?:TID \d+\) \()?([^\s()]+) executor \w+\)")


def translated(error: Exception, failures: Sequence[Failure], fitting: bool) -> Exception:
    """What to raise instead of Spark's own error about a barrier stage; other errors are the user's to
    see. failures: what the ranks could still say."""
    if any(not failure.what.echo for failure in failures):
        return typed(failures, fitting)[0]
    text = str(error)
    missing = _MISSING.search(text)
    if missing:
        host = _HOST.search(text)
        return PreflightError(
            f"the executors' Python lacks what the ranks need: {missing[1]}"
            f"{f' on {host[1]}' if host else ''}: {_ADVICE}"
        )
    if "PYTHON_VERSION_MISMATCH" in text:
        line = next(line for line in text.splitlines() if "PYTHON_VERSION_MISMATCH" in line)
        return PreflightError(
            f"driver and executors run different Pythons; set PYSPARK_PYTHON. {line.strip()}"
        )
    if re.search(r"\bcancell?ed\b", text) and "barrier" not in text:
        return JobCancelled(f"the Spark job was cancelled, and its ranks were ended ({_first_line(text)})")
    task = _RANK_OF_TASK.search(text)
    if task:
        reason = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("at ")]
        return RankFailed(lost(int(task[1]), "\n".join(reason[:20])))
    return typed(failures, fitting)[0] if failures else error


def lost(rank: int, why: str = "") -> RankFailure:
    """A rank whose supervisor or host is gone: another attempt can help."""
    return RankFailure(rank, "lost", traceback=why, retryable=True)


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in lines if re.search(r"\bcancell?ed\b", line)), lines[0])
