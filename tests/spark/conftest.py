"""One embedded Spark for all tests of this folder, two slots, executors on this interpreter."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["PYSPARK_PYTHON"] = sys.executable

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


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    from .sessions import session

    made = session(**{"spark.app.name": "hvd tests", "spark.driver.memory": "1g"})
    yield made
    made.stop()


@pytest.fixture
def job_count(spark: Any) -> Callable[[], int]:
    """How many jobs Spark has started so far, apart from those in a job group."""
    return lambda: len(spark.sparkContext.statusTracker().getJobIdsForGroup(None))
