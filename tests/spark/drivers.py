"""Spark drivers in processes of their own, which tell what they found as JSON lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any


def started(file: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, file, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def facts(process: subprocess.Popen[str], timeout_s: float) -> dict[str, Any]:
    """What the driver told, by case."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    told = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert process.returncode == 0, err[-3000:]
    return {fact.pop("case"): fact for fact in told}
