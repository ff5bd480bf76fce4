"""Tests on the embedded Ray of tests/conftest.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        # Ray leaves sockets and files to the garbage collector, and warns of what it will change.
        item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
        item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))
        item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
        item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(90, func_only=True))


@pytest.fixture
def run_config(tmp_path: Path, cluster: Any) -> Any:
    """Results of a run go into the test's own directory."""
    from ray.train import RunConfig

    return RunConfig(name="run", storage_path=str(tmp_path))
