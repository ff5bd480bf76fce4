"""Every exception of hvd, in one place.

Two families. `HorovodInternalError` is what a collective raises: something happened between the ranks.
`RankFailed` is what a launcher (`run`, `HorovodEstimator.fit`, ...) raises at the driver: a rank ended badly,
and this is the first cause. `retryable` says whether running the same job again can help; it is decided here
and nowhere else. All classes pickle.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


class HvdError(Exception):
    """Base of everything hvd raises on purpose."""

    retryable = False
    #: True for errors that only repeat what happened on another rank; never shown above the first cause.
    echo = False


def no_such(owner: str, kind: str, name: str, known: Iterable[str], listed: Iterable[str] = ()) -> str:
    """What to say of a name that does not exist: the one of `known` that is close, or all (`listed`, if
    that is shorter)."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(list(listed) or names)}"
    return f"{owner} has no {kind} {name!r}; {hint}"


class InvalidArgument(HvdError, ValueError):
    """A bad argument, found on this rank before anything was sent. The Group lives on."""


class NotInitialized(HvdError, ValueError):
    """`rank()`, `allreduce()`, ... were called before `init()` or after `shutdown()`."""


class HorovodInternalError(HvdError, RuntimeError):
    """A collective did not complete. The text names the rank at fault."""


class NotReducible(InvalidArgument, HorovodInternalError):
    """A reduction that there is not, of this tensor or with this operation. Found on this rank before
    anything was sent; also a `HorovodInternalError`, which is what Horovod raises for it."""


class MismatchError(HorovodInternalError):
    """Ranks submitted one name with different shapes, dtypes, operations, ... A program bug; the Group lives
    on."""


class PeerLost(HorovodInternalError):
    """A rank died or fell silent. The Group is dead; a new one can be connected."""

    retryable = True
    echo = True


class CollectiveTimeout(HorovodInternalError, TimeoutError):
    """A deadline passed: connect, a wait, or the stall limit. The text names who is missing."""


class Aborted(HorovodInternalError):
    """Some rank called `abort(reason)`; the text is its reason. The Group is dead."""

    echo = True


class GroupClosed(HorovodInternalError):
    """The Group was closed, here or by a peer that left, while a collective needed it."""

    echo = True


class RanksDiverged(HvdError, RuntimeError):
    """The parameters of two ranks differ where they must be equal. Names the first parameter and rank."""


class PreflightError(HvdError, ValueError):
    """The job cannot work; found before anything was launched."""


class ColumnError(PreflightError):
    """A column is missing, of a type that cannot be trained on, or does not fit the model's inputs."""


class NotEnoughSlots(PreflightError):
    """More ranks than the cluster can run at the same time. Names needed and available."""


class PlainTextRefused(PreflightError):
    """The cluster encrypts its connections and hvd would not. Names the setting that accepts that."""


class NotPicklable(PreflightError, TypeError):
    """Something the ranks need cannot be sent to them. Names the variable."""


class DataError(HvdError, ValueError):
    """The rows are not what was declared: nulls, ragged shapes, no rows. Names the column and the count."""


class LossError(HvdError, ValueError):
    """The loss is NaN, is not a scalar, or cannot compare output and label. Names rank, epoch and step."""


class CheckpointError(HvdError, RuntimeError):
    """A checkpoint cannot be written or read, or does not belong to what is trained. Names URL and cause."""


class RowsLost(HvdError, RuntimeError):
    """The ranks saw another number of rows than the engine sent."""


class LaunchFailed(HvdError, RuntimeError):
    """Ranks could not be started, or the process they are forked from died."""

    retryable = True


class JobCancelled(HvdError, RuntimeError):
    """Somebody cancelled the job while it ran: from the engine's UI, by its job group or tag. Its ranks have
    ended."""


class StorageFull(HvdError, OSError):
    """The rows of a rank did not fit where they were to go. Names the directory, the bytes and the
    setting."""


class LaunchTimeout(HvdError, TimeoutError):
    """A launcher's deadline (`timeout_s`) passed. Names the ranks that were not done; they were ended."""


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended. A value: travels as JSON from the rank's supervisor to the driver.

    kind: "exception" (the function raised), "exit" (ended with a status), "signal" (killed), "lost" (its
    supervisor or host vanished), "ended" (ended by us because another rank failed).
    host: its name. node: where the rank ran, as its engine knows it; part of the error's text.
    at: seconds since the Unix epoch, on the rank's host.
    """

    rank: int
    kind: str
    exc_type: str = ""
    message: str = ""
    traceback: str = ""
    where: str = ""
    exit_status: int | None = None
    signal: int | None = None
    host: str = ""
    node: str = ""
    echo: bool = False
    retryable: bool = False
    at: float = 0.0

    def headline(self) -> str:
        """One line: rank, what, where."""
        if self.kind == "exception":
            text = f"rank {self.rank} raised {self.exc_type}: {self.message}"
            return f"{text} ({self.where})" if self.where else text
        if self.kind == "exit":
            return f"rank {self.rank} exited with status {self.exit_status}"
        if self.kind == "signal":
            return f"rank {self.rank} was killed by signal {self.signal}"
        if self.kind == "ended":
            return f"rank {self.rank} was ended because another rank failed"
        return f"rank {self.rank} is lost"

    def with_rank(self, rank: int) -> RankFailure:
        """The same failure under the rank's final number."""
        return replace(self, rank=rank)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankFailure:
        return cls(**json.loads(text))


def first_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """The failure to show: what is not an echo before what is, then what could be the cause of a peer's loss
    (a death) before an exception that only reports one, then the earliest. `failures` must not be empty."""

    def order(failure: RankFailure) -> tuple[bool, bool, float, int]:
        return (failure.echo or failure.kind == "ended", failure.kind == "lost", failure.at, failure.rank)

    return min(failures, key=order)


_MAX_LINES = 60


class RankFailed(HvdError, RuntimeError):
    """A rank ended badly; raised at the driver with the first cause. `failure` is the record, `rank` its
    rank.

    The text is at most 60 lines: the headline, then the user's part of the traceback. When the rank's
    exception could be unpickled it is `__cause__`. attempts: how many there were, of which this is the
    first.
    """

    def __init__(self, failure: RankFailure, attempts: int = 1):
        self.failure = failure
        self.attempts = attempts
        super().__init__(self._text())

    @property
    def rank(self) -> int:
        return self.failure.rank

    @property
    def retryable(self) -> bool:  # type: ignore[override]
        return self.failure.retryable

    def _text(self) -> str:
        lines = [self.failure.headline()]
        if self.failure.node:
            lines.append(f"on node {self.failure.node}")
        if self.attempts > 1:
            lines.append(
                f"{self.attempts} attempts failed (max_retries={self.attempts - 1}), this is the first"
            )
        body = self.failure.traceback.rstrip().splitlines()
        room = _MAX_LINES - len("\n".join(lines).splitlines()) - 2
        if len(body) > room:
            body = [
                *body[: room // 2],
                f"  ... {len(body) - room} lines left out ...",
                *body[-(room - room // 2) :],
            ]
        return "\n".join(lines + body)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.failure, self.attempts), self.__dict__)
