"""Progress in a notebook: one display in the cell, which changes in place."""

from __future__ import annotations

import html
import math
import secrets
import sys
from collections.abc import Sequence
from typing import Any

_WIDTH, _HEIGHT = 160, 24


class Cell:
    """A bar, a line of numbers and the curve of the losses by epoch; the line alone where a frontend shows no
    HTML. `shell` is IPython's."""

    def __init__(self, shell: Any):
        self._shell = shell
        self._id = f"hvd-{secrets.token_hex(8)}"
        self._shown = False

    @classmethod
    def here(cls) -> Cell | None:
        """Of the cell that runs in this process; None outside of a kernel."""
        module = sys.modules.get("IPython")
        shell = module.get_ipython() if module is not None and hasattr(module, "get_ipython") else None
        return cls(shell) if getattr(shell, "kernel", None) is not None else None

    def show(self, text: str, part: float, losses: Sequence[float]) -> None:
        """part: how much is done, 0 to 1."""
        bundle = {"text/plain": text, "text/html": as_html(text, part, losses)}
        self._shell.display_pub.publish(bundle, transient={"display_id": self._id}, update=self._shown)
        self._shown = True


def as_html(text: str, part: float, losses: Sequence[float]) -> str:
    bar = f'<progress value="{part:.4f}" max="1"></progress>'
    return f"<div>{bar} <code>{html.escape(text)}</code> {_curve(losses)}</div>"


def _curve(losses: Sequence[float]) -> str:
    """The losses from left to right as a small picture, when there are some."""
    known = [(i, loss) for i, loss in enumerate(losses) if math.isfinite(loss)]
    if len(known) < 2:
        return ""
    low, high = min(loss for _, loss in known), max(loss for _, loss in known)
    across, up = _WIDTH / (len(losses) - 1), (_HEIGHT - 2) / ((high - low) or 1.0)
    points = " ".join(f"{i * across:.1f},{1 + (high - loss) * up:.1f}" for i, loss in known)
    line = f'<polyline points="{points}" fill="none" stroke="#0072B2" stroke-width="1.5"/>'
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="loss by epoch">{line}</svg>'
