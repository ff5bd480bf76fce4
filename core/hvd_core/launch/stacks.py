"""Where a process of ours is that does not answer, by a signal that needs neither its GIL nor its help."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from pathlib import Path

from . import wire
from .failure import of_the_user, without_our_frames

#: What asks a rank for its stacks, as it asks a JVM.
SIGNAL = signal.SIGQUIT
#: The main thread comes last, and these end what is told of it.
_LAST = ("in _run_module_as_main", "...")
_STARTS_US = ("in _run_module_as_main", "in _run_code")
_MAX_NBYTES = 1 << 16
_MAX_LINES = 12


def write_when_asked(fd: int) -> None:
    """In a rank: each SIGNAL writes the stacks of its Python threads to `fd`."""
    faulthandler.register(SIGNAL, file=fd, all_threads=True)


class Question:
    """Asks a process that did `write_when_asked` on the other end of the pipe `fd`. It is to be ended, as a
    stopped one goes on. Readable when there is more of the answer."""

    def __init__(self, pid: int, fd: int):
        self._fd = fd
        wire.drain(self._read, _MAX_NBYTES)  # what somebody else has asked for
        self._was_stopped = _state(pid) == "T"
        self._text = b""
        self.answered = False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)
            if self._was_stopped:
                os.kill(pid, signal.SIGCONT)

    def fileno(self) -> int:
        return self._fd

    def poll(self) -> None:
        """Takes what has come; never blocks."""
        data, eof = wire.drain(self._read, _MAX_NBYTES)
        self._text += data
        self.answered = eof or self._text.decode(errors="replace").rstrip().endswith(_LAST)

    @property
    def answer(self) -> str:
        """A few lines for a person; "" if nothing came."""
        lines = shown(self._text.decode(errors="replace"))
        if self._was_stopped:
            return "\n".join(["  it was stopped (SIGSTOP)", *lines])
        return "\n".join(lines)

    def _read(self, nbytes: int) -> bytes:
        return os.read(self._fd, nbytes)


def shown(text: str) -> list[str]:
    """Of what `faulthandler` writes: the main thread, then those others that run code of the user's."""
    threads: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")):
            threads.append([])
        elif threads and line.strip() and not line.endswith(_STARTS_US):
            threads[-1].append(line)
    if not threads:
        return []
    main, *others = reversed(threads)
    lines = (without_our_frames(main) or main)[:_MAX_LINES]
    for frames in others:
        if own := of_the_user(frames):
            lines += ["  another thread:", *own]
    return lines[: 2 * _MAX_LINES]


def _state(pid: int) -> str:
    """R, S, T, ... of proc(5); "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
