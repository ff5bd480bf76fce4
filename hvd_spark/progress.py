"""What the user sees at the driver while ranks work: a bar in a terminal, plain lines when piped."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

#: Piped output gets a line at each epoch's end, and within an epoch not more often than this.
_LINE_EVERY_S = 10.0


class Progress:
    """Takes the feed's records: `{"kind": "output" or "log", "rank", "line"}` and `{"kind": "progress",
    "rank", ...}`.

    Lines of the ranks go to standard output with their rank, progress (of rank 0) to standard error.
    verbose: 0 shows the ranks' lines only. printed: False leaves out what ranks print; "log" is always shown.
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
        self._shown_at = 0.0

    def take(self, record: Mapping[str, Any]) -> None:
        if record.get("kind") in self._lines:
            self._line(f"[{record.get('rank')}] {record.get('line', '')}")
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
        if self._err.isatty() and self._draw(record):
            return
        if "history" in record or time.monotonic() - self._shown_at >= _LINE_EVERY_S:
            self._shown_at = time.monotonic()
            print(describe(record), file=self._err, flush=True)

    def _draw(self, record: Mapping[str, Any]) -> bool:
        """Draws the bar; False when tqdm is not installed."""
        steps = int(record.get("steps") or 0)
        if self._bar is None:
            try:
                from tqdm import tqdm
            except ImportError:
                return False
            total = steps * int(record.get("epochs") or 1)
            self._bar = tqdm(total=total, file=self._err, unit="step", dynamic_ncols=True)
        done = int(record.get("epoch") or 0) * steps + int(record.get("step") or 0) + 1
        self._bar.total = max(self._bar.total, done)
        self._bar.set_description_str(_epoch(record))
        self._bar.set_postfix_str(_numbers(record), refresh=False)
        self._bar.update(max(0, done - self._bar.n))
        return True


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
