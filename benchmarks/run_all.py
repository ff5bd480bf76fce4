"""Runs every figure in order and rewrites RESULTS.md from what they print.

    python benchmarks/run_all.py [--quick] [--only NAME ...]

The JSON lines are kept in build/bench.jsonl. A figure that cannot run here says why and is listed as skipped.
What stands below "## Limits" in RESULTS.md is written by hand and stays.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import report

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
LINES = HERE.parent / "build" / "bench.jsonl"
LIMITS = "## Limits"
TIMEOUT_S = 1200
#: In the order of the table of targets.
FIGURES = (
    "shm_roofline",
    "arena_vs_peers",
    "allreduce_vs_peers",
    "latency",
    "half",
    "gradient_set",
    "many_small",
    "scaling",
    "tcp",
    "step",
    "ranks",
    "idle",
    "start",
    "shard",
    "dataframe",
    "on_ray",
)


def run(name: str, quick: bool) -> dict[str, Any]:
    """The figure's JSON, or {"name", "skipped"}; a script skips itself by {"skipped": reason}."""
    script = HERE / f"{name}.py"
    if not script.exists():
        return {"name": name, "skipped": "there is no such script"}
    command = [sys.executable, str(script), *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"name": name, "skipped": f"not done after {TIMEOUT_S} s"}
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines or not lines[-1].startswith("{"):
        print(done.stdout, flush=True)
        what = f"failed with status {done.returncode}" if done.returncode else "printed no line of JSON"
        return {"name": name, "skipped": what}
    print("\n".join(lines[:-1]), flush=True)
    return {"name": name, **json.loads(lines[-1])}


def results(figures: list[dict[str, Any]]) -> str:
    """The text of RESULTS.md above its limits."""
    lines = ["# Results", "", "Written by `make bench`; see [README.md](README.md) for what is measured.", ""]
    facts = next((figure["facts"] for figure in reversed(figures) if "facts" in figure), {})
    lines += [f"* {key}: {_plain(value)}" for key, value in facts.items() if value]
    lines += ["", "| figure | target | asked | measured | |", "|---|---|---|---|---|"]
    for figure in figures:
        name = figure["name"]
        if "facts" not in figure and "skipped" not in figure:
            lines.append(f"| `{name}` | | | not run | |")
        if "skipped" in figure:
            lines.append(f"| `{name}` | | | skipped: {figure['skipped']} | |")
        for target in figure.get("targets", []):
            asked = f"{'≤' if target['at_most'] else '≥'} {target['bound']:g}"
            verdict = {True: "met", False: "**not met**", None: "not measured"}[target["met"]]
            lines.append(
                f"| `{name}` | {target['what']} | {asked} | {report.cell(target['achieved'])} | {verdict} |"
            )
    for figure in figures:
        if not figure.get("rows"):
            continue
        lines += ["", f"## {figure['name']}: {figure.get('title', '')}", ""]
        columns = list(figure["rows"][0])
        lines += [f"| {' | '.join(columns)} |", "|" + "---:|" * len(columns)]
        lines += [f"| {' | '.join(report.cell(row.get(c)) for c in columns)} |" for row in figure["rows"]]
        lines += ["", *(f"* {note}" for note in figure.get("notes", []))]
        of = figure.get("facts", {})
        lines.append(f"* {report.load(figure)}; {of.get('date', '')}, commit {of.get('commit', '')}")
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=FIGURES)
    options = parser.parse_args()
    LINES.parent.mkdir(exist_ok=True)
    kept: dict[str, dict[str, Any]] = {}
    if options.only and LINES.exists():  # the others stay as they were measured last
        kept = {line["name"]: line for line in map(json.loads, LINES.read_text().splitlines())}
    for name in options.only or FIGURES:
        begin = time.monotonic()
        print(f"== {name}", flush=True)
        kept[name] = run(name, options.quick)
        if "skipped" in kept[name]:
            print(f"   skipped: {kept[name]['skipped']}")
        print(f"   {time.monotonic() - begin:.0f} s", flush=True)
        LINES.write_text(
            "".join(json.dumps(kept[n], ensure_ascii=False) + "\n" for n in FIGURES if n in kept)
        )
    if not options.quick:
        _, found, limits = RESULTS.read_text().partition(LIMITS) if RESULTS.exists() else ("", "", "")
        text = results([kept.get(name, {"name": name}) for name in FIGURES])
        RESULTS.write_text(text + (f"\n{found}{limits}" if found else ""))


if __name__ == "__main__":
    main()
