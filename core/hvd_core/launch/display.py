"""What the user sees at the driver while ranks work: a bar in a terminal or a notebook, plain lines when
piped."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from .cell import Cell

#: Piped output gets a line at each epoch's end, and within an epoch not more often than this.
_LINE_EVERY_S = 10.0


class Progress:
    """Takes the feed's records: `{"kind": "output" or "log", "rank", "host", "line"}` and
    `{"kind": "progress", "rank", ...}`.

    Lines of the ranks go to standard output with their rank, and their host if it is another one; progress
    (of rank 0) to standard error. verbose: 0 shows the ranks' lines only. printed: False leaves out what
    ranks print; "log" is always shown.
    """

    def __init__(
        self,
        *,
        verbose: int = 1,
        printed: bool = True,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ):
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._verbose = verbose
        self._lines = {"output", "log"} if printed else {"log"}
        self._bar: Any = None
        self._host = socket.gethostname()
        self._cell = Cell.here() if out is None and err is None else None
        self._losses: list[float] = []
        self._shown_at = 0.0

    def take(self, record: Mapping[str, Any]) -> None:
        if record.get("kind") in self._lines:
            host = record.get("host", self._host)
            where = "" if host == self._host else f"@{host}"
            self._line(f"[{record.get('rank')}{where}] {record.get('line', '')}")
        elif record.get("kind") == "progress" and record.get("rank") == 0 and self._verbose:
            self._progress(record)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._out)
        else:
            print(text, file=self._out, flush=True)

    def _progress(self, record: Mapping[str, Any]) -> None:
        if self._cell is not None:
            self._in_cell(record)
            return
        if self._err.isatty() and self._draw(record):
            return
        if "history" in record or time.monotonic() - self._shown_at >= _LINE_EVERY_S:
            self._shown_at = time.monotonic()
            print(describe(record), file=self._err, flush=True)

    def _in_cell(self, record: Mapping[str, Any]) -> None:
        assert self._cell is not None
        done, total = _steps(record)
        if record.get("epoch") == 0 and "history" in record:
            self._losses.clear()  # the next of several models
        if "history" in record:
            self._losses.append(float(record["loss"]))
        self._cell.show(describe(record), done / max(total, done), self._losses)

    def _draw(self, record: Mapping[str, Any]) -> bool:
        """Draws the bar; False when tqdm is not installed."""
        done, total = _steps(record)
        if self._bar is None:
            try:
                from tqdm import tqdm
            except ImportError:
                return False
            self._bar = tqdm(total=total, file=self._err, unit="step", dynamic_ncols=True)
        self._bar.total = max(self._bar.total, done)
        self._bar.set_description_str(_epoch(record))
        self._bar.set_postfix_str(_numbers(record), refresh=False)
        self._bar.update(max(0, done - self._bar.n))
        return True


def _steps(record: Mapping[str, Any]) -> tuple[int, int]:
    """How many are done, and of how many."""
    steps = int(record.get("steps") or 0)
    done = int(record.get("epoch") or 0) * steps + int(record.get("step") or 0) + 1
    return done, steps * int(record.get("epochs") or 1)


def describe(record: Mapping[str, Any]) -> str:
    """One progress record as a line; the end of an epoch has no step but the epoch's numbers."""
    if "history" in record:
        return f"{_epoch(record)}  {_numbers(record)}"
    return (
        f"{_epoch(record)} step {int(record.get('step') or 0) + 1}/{record.get('steps')}  {_numbers(record)}"
    )


def _epoch(record: Mapping[str, Any]) -> str:
    total = f"/{record['epochs']}" if record.get("epochs") else ""
    return f"epoch {int(record.get('epoch') or 0) + 1}{total}"


#: Times and counts of the history that say nothing about how well it goes.
_LEFT_OUT = {"rows_per_s", "seconds", "data", "compute", "communication", "lr", "epoch", "rows", "steps"}


def _numbers(record: Mapping[str, Any]) -> str:
    parts = [f"{record['rows_per_s']:,.0f} rows/s"] if record.get("rows_per_s") else []
    for key, value in {**record, **(record.get("history") or {})}.items():
        if isinstance(value, float) and key not in _LEFT_OUT:
            parts.append(f"{key} {value:.6g}")
    return "  ".join(parts)
