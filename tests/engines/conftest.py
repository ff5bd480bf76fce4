"""Tests of what holds on every engine: `launch` runs a function, `fit` fits a model, on each in turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import hvd_core

HERE = Path(__file__).parent
Launch = Callable[..., list[Any]]
Fit = Callable[..., Any]

#: Engines leave sockets to the garbage collector, and warn of what they will change.
_QUIET = (
    "ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning",
    "ignore:PySpark does not yet fully support pandas", "ignore::pytest.PytestUnraisableExceptionWarning",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        for quiet in _QUIET:
            item.add_marker(pytest.mark.filterwarnings(quiet))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(90, func_only=True))


@pytest.fixture(params=["local", "spark", "ray"])
def launch(request: pytest.FixtureRequest) -> Launch:
    """`run` of an engine."""
    if request.param == "local":
        return hvd_core.run
    if request.param == "spark":
        request.getfixturevalue("spark")
        import hvd_spark

        return hvd_spark.run
    request.getfixturevalue("cluster")
    import hvd_ray

    return hvd_ray.run


def fit_on_spark(spark: Any, table: pa.Table, **options: Any) -> Any:
    """A fitted model; the rows in three partitions."""
    import hvd_spark

    frame = spark.createDataFrame(table).repartition(3)
    return hvd_spark.HorovodEstimator(**options).fit(frame)


def fit_on_ray(cluster: Any, table: pa.Table, **options: Any) -> Any:
    """The same; the rows in blocks of 1, of most of them, and of the rest."""
    import hvd_ray

    cut = max(1, table.num_rows - 7)
    blocks = [table.slice(0, 1), table.slice(1, cut - 1), table.slice(cut)]
    return hvd_ray.HorovodEstimator(**options).fit(cluster.data.from_arrow(blocks))


@pytest.fixture(params=["spark", "ray"])
def fit(request: pytest.FixtureRequest) -> Fit:
    if request.param == "spark":
        return partial(fit_on_spark, request.getfixturevalue("spark"))
    return partial(fit_on_ray, request.getfixturevalue("cluster"))
