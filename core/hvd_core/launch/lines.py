"""Bytes of a stream to lines."""

from __future__ import annotations

#: A longer line is delivered in pieces of this many bytes.
MAX_LINE_NBYTES = 16 << 20
#: A progress bar (text that returns with \r instead of ending) is shown this often.
PROGRESS_INTERVAL_S = 2.0


class LineSplitter:
    """Cuts one stream into lines; bytes that are not UTF-8 appear as \\xNN.

    Of a line that was overwritten with carriage returns the last state counts, as on a terminal; while it
    goes on, one state every `PROGRESS_INTERVAL_S` is a line.
    """

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._nbytes = 0
        self._shown_at = float("-inf")

    def feed(self, data: bytes, now: float) -> list[str]:
        """The lines that `data` completes. `now`: any monotonic clock, seconds."""
        *ends, rest = data.split(b"\n")
        lines = [_last_state(self._take() + end) for end in ends]
        self._pieces.append(rest)
        self._nbytes += len(rest)
        if self._nbytes >= MAX_LINE_NBYTES:
            lines.append(_text(self._take()))
        elif b"\r" in rest and now - self._shown_at >= PROGRESS_INTERVAL_S:
            pending = self._take()
            done, _, begun = pending.rpartition(b"\r")
            if begun and _last_state(done).strip():
                lines.append(_last_state(done))
                self._shown_at = now
            else:
                begun = pending
            self._pieces, self._nbytes = [begun], len(begun)
        return lines

    def finish(self) -> list[str]:
        """The last line, when it has no end."""
        rest = self._take()
        return [_last_state(rest)] if rest.strip(b"\r") else []

    def _take(self) -> bytes:
        data = b"".join(self._pieces)
        self._pieces, self._nbytes = [], 0
        return data


def _last_state(line: bytes) -> str:
    return _text(line.rstrip(b"\r").rpartition(b"\r")[2])


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="backslashreplace")
