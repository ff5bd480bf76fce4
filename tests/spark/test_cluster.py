"""Executors in processes of their own, and a driver that is interrupted from its terminal."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from . import cluster_job, jobs
from .drivers import facts, started


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


@pytest.mark.timeout(120)
def test_ctrl_c_at_the_driver(tmp_path: Path) -> None:
    fifo = tmp_path / "word"
    with jobs.on_word(fifo, lambda word: word and os.killpg(process.pid, signal.SIGINT)):
        process = started(cluster_job.__file__, "local[2]", "sleep", str(fifo))
        found = facts(process, 110)
    assert found["interrupted"]["gone"]
    assert found["again"]["got"] == [3.0, 3.0]
