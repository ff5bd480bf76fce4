"""A real kernel, and what its cells say."""

from __future__ import annotations

import json
import os
import queue
import time
from pathlib import Path
from typing import Any


class Notebook:
    """A kernel and what its cells say."""

    def __init__(self, folder: Path):
        from jupyter_client import KernelManager

        self.manager = KernelManager(kernel_name="python3", transport="ipc", ip=str(folder / "k"))
        self.manager.start_kernel(env={**os.environ, "IPYTHONDIR": str(folder), "PYTHONPATH": os.getcwd()})
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def cell(self, code: str, until: str = "", timeout_s: float = 120) -> list[dict[str, Any]]:
        """Runs a cell to its end, or until its text has `until`; returns its messages."""
        self.client.execute(code)
        return self.messages(until, timeout_s)

    def messages(self, until: str = "", timeout_s: float = 120) -> list[dict[str, Any]]:
        """Of the cell that runs."""
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            found.append(message)
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return found
            if until and until in said(found):
                return found
        raise AssertionError(f"the cell did not end: {said(found)[-2000:]}")


def said(messages: list[dict[str, Any]], name: str = "stdout") -> str:
    return "".join(
        m["content"]["text"] for m in messages if m["msg_type"] == "stream" and m["content"]["name"] == name
    )


def errors(messages: list[dict[str, Any]]) -> list[str]:
    return [m["content"]["ename"] for m in messages if m["msg_type"] == "error"]


def run_all(notebook: Notebook, path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The code cells of a notebook, and the messages of all of them; none has raised."""
    codes = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    done: list[dict[str, Any]] = []
    for cell in codes:
        done += notebook.cell("".join(cell["source"]))
        assert errors(done) == [], cell["source"]
    return codes, done
