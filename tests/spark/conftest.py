"""Tests on the embedded Spark of tests/conftest.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        # pandas takes no part in what we do; py4j leaves sockets to the garbage collector.
        item.add_marker(pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas"))
        item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(90, func_only=True))


@pytest.fixture
def job_count(spark: Any) -> Callable[[], int]:
    """How many jobs Spark has started so far, apart from those in a job group."""
    return lambda: len(spark.sparkContext.statusTracker().getJobIdsForGroup(None))
