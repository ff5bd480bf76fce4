"""How a rank's end is told: the user's own frames, few lines, and whether it is only an echo."""

from __future__ import annotations

import re
import sysconfig
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from socket import gethostname

from ..errors import HvdError, RankFailure
from .pickling import type_name

MAX_TRACEBACK_LINES = 40
_MAX_MESSAGE_CHARS = 2000
_OURS = ("/hvd_core/", "/hvd_spark/", "/hvd_ray/", "/ray/train/v2/_internal/")
_LIBRARIES = tuple(
    {sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {"<frozen "}
)


def describe(error: BaseException, rank: int) -> RankFailure:
    """`error`, caught in rank `rank`, as a record. Frames of hvd and of what starts a rank are left out;
    `where` is the innermost line of the user's own files."""
    formatted = traceback.TracebackException.from_exception(error, capture_locals=False)
    own = _user_line(formatted.stack)
    _drop_our_frames(formatted, set())
    return RankFailure(
        rank=rank,
        kind="exception",
        exc_type=_exception_name(error),
        message=_message(error),
        traceback=_shortened("".join(formatted.format())),
        where=own,
        host=gethostname(),
        echo=any(isinstance(e, HvdError) and e.echo for e in _chain(error)),
        retryable=any(isinstance(e, HvdError) and e.retryable for e in _chain(error)),
        at=time.time(),
    )


def _exception_name(error: BaseException) -> str:
    return type(error).__name__ if isinstance(error, HvdError) else type_name(type(error))


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001  a user's __str__
        text = f"<str() of this {type(error).__name__} raised {type(broken).__name__}>"
    return text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[:_MAX_MESSAGE_CHARS]} ..."


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and what it was raised from or while handling: `except PeerLost: raise Mine` is still an
    echo."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)


def without_our_frames(lines: Iterable[str]) -> list[str]:
    """The same for the text that `faulthandler` prints at a crash."""
    return [line for line in lines if not ('File "' in line and _is_ours(line.partition('File "')[2]))]


def of_the_user(lines: Iterable[str]) -> list[str]:
    """Of such a text the frames in the user's own files."""
    frames = [line for line in without_our_frames(lines) if 'File "' in line]
    return [line for line in frames if not line.partition('File "')[2].startswith(_LIBRARIES)]


def _is_ours(filename: str) -> bool:
    return filename.startswith("<frozen ") or any(part in filename for part in _OURS)


def _user_line(stack: traceback.StackSummary) -> str:
    frames = [frame for frame in stack if not _is_ours(frame.filename)]
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    if not frames:
        return ""
    last = (own or frames)[-1]
    return f"{last.filename}:{last.lineno}"


def _drop_our_frames(formatted: traceback.TracebackException, seen: set[int]) -> None:
    if id(formatted) in seen:
        return
    seen.add(id(formatted))
    kept = [frame for frame in formatted.stack if not _is_ours(frame.filename)]
    formatted.stack = traceback.StackSummary.from_list(kept)
    for inner in (
        formatted.__cause__,
        formatted.__context__,
        *(getattr(formatted, "exceptions", None) or ()),
    ):
        if inner is not None:
            _drop_our_frames(inner, seen)


def _shortened(text: str) -> str:
    lines = text.rstrip().splitlines()
    if len(lines) <= MAX_TRACEBACK_LINES:
        return "\n".join(lines)
    head = MAX_TRACEBACK_LINES // 4
    tail = MAX_TRACEBACK_LINES - head - 1
    left_out = f"  ... {len(lines) - head - tail} lines left out ..."
    return "\n".join([*lines[:head], left_out, *lines[-tail:]])


#: What a rank raises that has waited for others in vain; where those are says more.
_WAITED = ("CollectiveTimeout", "PeerLost")
_MAX_OTHERS = 3


def has_waited(failure: RankFailure) -> bool:
    """Whether other ranks are at fault, who may not know."""
    return failure.exc_type in _WAITED


def with_the_others(first: RankFailure, everyone: Sequence[RankFailure]) -> RankFailure:
    """`first`; if it has waited for others, then with where those were, above all when they were ended."""
    if not has_waited(first):
        return first
    said = where_they_were([other for other in everyone if other.rank != first.rank], first.message)
    return replace(first, traceback="\n".join([first.traceback, *said]))


def where_they_were(failures: Sequence[RankFailure], message: str = "") -> list[str]:
    """Of a few ranks, those first that did not know that they were waited for, and that `message` names."""

    def order(failure: RankFailure) -> tuple[bool, bool, int]:
        is_named = re.search(rf"\branks? [\d, ]*\b{failure.rank}\b", message) is not None
        return (failure.kind != "ended", not is_named, failure.rank)

    said = []
    for failure in sorted(failures, key=order):
        if failure.kind == "ended" and failure.traceback:
            said.append(
                f"rank {failure.rank}, when it was ended (most recent call first):\n{failure.traceback}"
            )
        elif has_waited(failure) and failure.where:
            said.append(f"rank {failure.rank} waited too, at {failure.where}")
    if len(said) > _MAX_OTHERS:
        said[_MAX_OTHERS:] = [f"({len(said) - _MAX_OTHERS} more ranks are not shown)"]
    return said


def exit_failure(leaving: SystemExit, rank: int) -> RankFailure:
    """The record of a rank that left with `sys.exit(...)`; as in Python, text means status 1."""
    status = leaving.code if isinstance(leaving.code, int) else 1
    text = "" if isinstance(leaving.code, int) else f"sys.exit({_shortened(str(leaving.code))!r})"
    return RankFailure(
        rank=rank, kind="exit", exit_status=status & 0xFF, traceback=text, host=gethostname(), at=time.time()
    )
