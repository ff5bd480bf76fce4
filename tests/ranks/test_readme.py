"""The examples of the README do what it says."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def example(containing: str) -> str:
    (found,) = (code for code in examples() if containing in code)
    return found


def test_run_gives_what_the_comment_says(tmp_path: Path):
    code = example("hvd_core.run(")
    call, promised = re.search(r"^(hvd_core\.run\(.*\))  # (.*)$", code, flags=re.MULTILINE).groups()
    script = tmp_path / "readme.py"
    script.write_text(code.replace(call, f"print({call})"))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout) == ast.literal_eval(promised)


def test_the_estimator_example_names_real_parameters():
    from hvd_spark import HorovodEstimator

    tree = ast.parse(example("from hvd_spark import HorovodEstimator"))
    (call,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "HorovodEstimator"
    )
    known = inspect.signature(HorovodEstimator).parameters
    assert {keyword.arg for keyword in call.keywords} <= set(known)
