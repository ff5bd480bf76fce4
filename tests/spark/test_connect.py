"""Everything again under Spark Connect: a client without SparkContext, and a server of its own."""

from __future__ import annotations

from typing import Any

import pytest

from . import connect_job
from .drivers import facts, started

pytest.importorskip("grpc_status")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return facts(started(connect_job.__file__), 280)


@pytest.mark.timeout(300)
def test_run(told: dict[str, Any]) -> None:
    assert told["run"]["got"] == [3.0, 3.0]
    assert told["raises"]["kind"] == "RankFailed"
    assert "raised NameError: name 'this_name_does_not_exist'" in told["raises"]["text"]
    assert "jobs.py" in told["raises"]["text"]


@pytest.mark.timeout(300)
def test_dynamic_allocation_of_the_server(told: dict[str, Any]) -> None:
    assert told["dynamic"]["kind"] == "PreflightError"
    assert "spark.dynamicAllocation.enabled=false" in told["dynamic"]["text"]
    assert told["dynamic"]["took_s"] < 10


@pytest.mark.timeout(300)
def test_r19_slots(told: dict[str, Any]) -> None:
    assert told["too many"]["kind"] == told["busy"]["kind"] == "NotEnoughSlots"
    assert "4 ranks need 4 slots" in told["too many"]["text"] and "has 2" in told["too many"]["text"]
    assert told["too many"]["took_s"] < 10
    assert "for 2 slots that are free at the same time; other jobs hold them" in told["busy"]["text"]
    assert told["busy"]["took_s"] < 25
    assert told["after"]["got"] == [3.0, 3.0]


@pytest.mark.timeout(300)
def test_fit_save_load_transform(told: dict[str, Any]) -> None:
    assert told["fit"]["history"] == 200
    assert told["HorovodEstimator"]["same"] and told["HorovodModel"]["same"]
    found = told["predictions"]
    assert found["before"] == found["after"] and len(found["after"]) == 200 and found["history"] == 2
    assert told["empty"]["got"] == []


@pytest.mark.timeout(300)
def test_pipeline_and_cross_validator(told: dict[str, Any]) -> None:
    pipeline, cv = told["pipeline"], told["cv"]
    assert pipeline["same"] and pipeline["uid"]
    assert 0 <= pipeline["accuracy"] <= 1
    assert cv["metrics"][1] < 0.8 * cv["metrics"][0]
    assert cv["same"] and cv["best"]


@pytest.mark.timeout(300)
def test_weights_above_the_limits_of_a_message(told: dict[str, Any]) -> None:
    assert told["large"] == {"same": True, "rows": 20}
