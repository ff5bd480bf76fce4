"""Executors in processes of their own, and a driver that is interrupted from its terminal."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from . import cluster_job, jobs
from .drivers import facts, started

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    return facts(started(cluster_job.__file__, "local-cluster[2,1,1024]", "cases"), 200)


@pytest.mark.cluster
@pytest.mark.timeout(210)
def test_ranks_on_two_executors(cluster: dict[str, Any]) -> None:
    assert cluster["slots"] == {"executors": 2, "got": ["hello 0/2!", "hello 1/2!"]}
    assert cluster["again"]["got"] == [3.0, 3.0]


@pytest.mark.cluster
@pytest.mark.timeout(210)
def test_r33_two_runs_are_alike_on_a_cluster(cluster: dict[str, Any]) -> None:
    first, second = cluster["r33"]["fits"]
    assert first == second
    assert len(first) == 3


@pytest.mark.cluster
@pytest.mark.timeout(210)
def test_r20_one_rank_raises_on_a_cluster(cluster: dict[str, Any]) -> None:
    found = cluster["r20"]
    assert found["text"].startswith("rank 1 raised ValueError: token-20 (")
    assert found["took_s"] < 10


@pytest.mark.cluster
@pytest.mark.timeout(210)
def test_r21_exit_without_a_word_on_a_cluster(cluster: dict[str, Any]) -> None:
    assert cluster["r21"]["text"].splitlines()[0] == "rank 0 exited with status 86"
    assert cluster["r21"]["took_s"] < 10
    assert cluster["r21"]["gone"], "the ranks of the case before"


@pytest.mark.cluster
@pytest.mark.timeout(210)
def test_transform_on_a_cluster(cluster: dict[str, Any]) -> None:
    assert cluster["transform"]["rows"] == 1000
    assert cluster["transform"]["error"] < 1e-6


@pytest.mark.cluster
@pytest.mark.timeout(210)
def test_a_driver_that_executors_reach_through_spark_only(cluster: dict[str, Any]) -> None:
    found = cluster["unreachable"]
    assert found["got"] == [3.0, 3.0]
    assert found["text"].startswith("rank 1 raised ValueError: token-alone (")
    assert found["took_s"] < 12


@pytest.mark.cluster
@pytest.mark.timeout(210)
@pytest.mark.parametrize("killed", ["worker", "executor"])
def test_a_killed_process_of_spark(cluster: dict[str, Any], killed: str) -> None:
    found = cluster[killed]
    assert found["kind"] == "RankFailed"
    assert found["text"].splitlines()[0] == "rank 1 is lost"
    assert not [line for line in found["text"].splitlines() if line.lstrip().startswith("at ")], (
        "no JVM stack"
    )
    assert found["took_s"] < 10
    assert cluster["executor gone"]["gone"]


@pytest.mark.cluster
@pytest.mark.timeout(210)
def test_r39_an_executor_is_killed_and_another_goes_on(cluster: dict[str, Any]) -> None:
    found = cluster["retry"]
    assert found["killed"] and found["same"]
    assert "resumed at epoch " in found["summary"]
    assert found["rows"] == [400, 400, 400]


@pytest.fixture(scope="module")
def with_gpus() -> dict[str, Any]:
    return facts(started(cluster_job.__file__, "local-cluster[2,2,1024]", "gpus"), 150)


@pytest.mark.cluster
@pytest.mark.timeout(160)
def test_several_ranks_in_one_executor_share_the_memory_of_their_machine(with_gpus: dict[str, Any]) -> None:
    found = with_gpus["gpus"]["got"]
    assert sorted(rank["local"][0] for rank in found) == [0, 1, 2, 3]
    assert all(rank["local"][1:] == [4, 1] and rank["sum"] == 10 for rank in found)
    assert len({rank["executor"] for rank in found}) == 2
    assert with_gpus["fit"]["apart"] < 1e-5


@pytest.mark.cluster
@pytest.mark.timeout(160)
def test_each_rank_has_a_gpu_of_its_own(with_gpus: dict[str, Any]) -> None:
    """By a resource profile: the session's tasks ask for none."""
    found = with_gpus["gpus"]["got"]
    for executor in {rank["executor"] for rank in found}:
        assert sorted(rank["mask"] for rank in found if rank["executor"] == executor) == ["6", "7"]
    assert not any(rank["early"] for rank in found), "torch was imported before"
    assert [rank["mask"] for rank in with_gpus["own mask"]["got"]] == ["9", "9"]
    assert with_gpus["too many"]["kind"] == "NotEnoughSlots"
    assert "5 ranks need 5 GPUs" in with_gpus["too many"]["text"] and "for 4" in with_gpus["too many"]["text"]


@pytest.mark.cluster
@pytest.mark.timeout(160)
def test_an_encrypted_cluster_is_told_apart(with_gpus: dict[str, Any]) -> None:
    found = with_gpus["encrypted"]
    assert found["kind"] == "PlainTextRefused"
    assert "spark.network.crypto.enabled=true" in found["text"] and "HVD_PLAIN_TEXT=1" in found["text"]


@pytest.mark.timeout(120)
def test_ctrl_c_at_the_driver(tmp_path: Path) -> None:
    fifo = tmp_path / "word"
    with jobs.on_word(fifo, lambda word: word and os.killpg(process.pid, signal.SIGINT)):
        process = started(cluster_job.__file__, "local[2]", "sleep", str(fifo))
        found = facts(process, 110)
    assert found["interrupted"]["gone"]
    assert found["again"]["got"] == [3.0, 3.0]
