"""The quickstart in a real kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ..notebooks import run_all, said

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

QUICKSTART = Path(__file__).parents[2] / "examples" / "ray_quickstart.ipynb"


def test_the_quickstart(notebook: Any) -> None:
    pytest.importorskip("ray")
    pytest.importorskip("sklearn")
    codes, done = run_all(notebook, QUICKSTART)
    text = said(done)
    found = re.search(r"right: ([\d.]+)%; who always says the same is right in ([\d.]+)%", text)
    assert found is not None and float(found[1]) > 94 > 75 > float(found[2]), text
    loop = re.search(r"rank 0 of 2 had (\d+) rows; the last steps' mean loss ([\d.]+)", text)
    assert loop is not None and 205 <= int(loop[1]) <= 225 and float(loop[2]) < 0.4, text
    shown = [m["content"]["data"] for m in done if m["msg_type"] == "execute_result"]
    assert any("<td>12" in data.get("text/html", "") for data in shown)
    assert shown[-1]["text/plain"] == "[[5.0, 5.0, 5.0], [5.0, 5.0, 5.0]]"
    assert all(cell["outputs"] for cell in codes[1:-1]), "who looks at it on a page sees what it prints"
