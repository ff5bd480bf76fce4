"""`import horovod` gives hvd: which names there are, what the others say, and what behaves otherwise."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch

import hvd_core
import hvd_core.torch as ours
from hvd_core import Config, World, as_horovod, horovod_calls, world
from hvd_core.errors import HorovodInternalError, InvalidArgument, MismatchError
from hvd_core.launch import pickling
from hvd_core.torch import as_horovod as habits
from tests.unit.thread_ranks import run_ranks

pytestmark = pytest.mark.timeout(60)

#: What `horovod.torch` 0.28.1 exports.
TORCH = [
    "elastic", "Compression", "allgather_object", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "allreduce", "allreduce_async", "allreduce_", "allreduce_async_",
    "grouped_allreduce", "grouped_allreduce_async", "grouped_allreduce_", "grouped_allreduce_async_",
    "sparse_allreduce_async", "allgather", "allgather_async", "grouped_allgather",
    "grouped_allgather_async", "broadcast", "broadcast_async", "broadcast_", "broadcast_async_", "alltoall",
    "alltoall_async", "reducescatter", "reducescatter_async", "grouped_reducescatter",
    "grouped_reducescatter_async", "join", "barrier", "poll", "synchronize", "init", "shutdown",
    "is_initialized", "start_timeline", "stop_timeline", "size", "local_size", "cross_size", "rank",
    "local_rank", "cross_rank", "mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled",
    "gloo_built", "nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built", "ProcessSet",
    "global_process_set", "add_process_set", "remove_process_set", "Average", "Sum", "Adasum", "Min", "Max",
    "Product", "HorovodInternalError", "DistributedOptimizer", "SyncBatchNorm",
]  # fmt: skip


def test_each_name_of_horovod_torch_is_there(horovod: ModuleType) -> None:
    hvd = importlib.import_module("horovod.torch")
    other = {"init", "elastic", *habits.__all__}
    for name in TORCH:
        assert (getattr(hvd, name) is getattr(ours, name)) is (name not in other), name
    assert hvd.elastic.TorchState is ours.elastic.TorchState
    assert hvd.elastic.ElasticSampler is hvd.elastic.sampler.ElasticSampler is ours.elastic.ElasticSampler
    assert hvd.mpi_ops.allgather is hvd.allgather is habits.allgather
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert horovod.__version__ == "0.28.1"


def test_every_module_of_the_table_has_its_names(horovod: ModuleType) -> None:
    for name, sources in as_horovod._MODULES.items():
        if "hvd_spark" in "".join(sources) or "hvd_ray" in "".join(sources):  # they load pyspark and ray
            for source in sources:
                place, _, names = source.partition(": ")
                known = importlib.import_module(place)
                assert all(word in getattr(known, "__all__", vars(known)) for word in names.split()), name
        else:
            module = importlib.import_module(name)
            for source in sources:
                assert as_horovod._names(source).keys() <= {*dir(module), "elastic"}, name
    assert importlib.import_module("horovod.common.exceptions").HorovodInternalError is HorovodInternalError
    assert importlib.import_module("horovod.torch.compression").Compression is ours.Compression
    done: list[int] = []
    importlib.import_module("horovod.runner.util.threads").in_thread(done.append, (3,)).join()
    assert done == [3]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import horovod.tensorflow as hvd", "hvd has no horovod.tensorflow: TensorFlow and Keras are not"),
        ("import horovod.tensorflow.keras as hvd", "hvd has no horovod.tensorflow: TensorFlow"),
        ("import horovod.keras", "hvd has no horovod.keras: TensorFlow and Keras"),
        ("import horovod.mxnet", "hvd has no horovod.mxnet: MXNet"),
        ("from horovod.spark.keras import KerasEstimator", "hvd has no horovod.spark.keras: TensorFlow"),
        ("from horovod.spark import run_elastic", "run_elastic: the number of ranks stays"),
        ("from horovod.ray import ElasticRayExecutor", "replace_workers=True"),
        ("import horovod.runner.driver", "no module 'horovod.runner.driver'; did you mean"),
        ("from horovod.torch import nothing", "cannot import name 'nothing' from 'horovod.torch'"),
    ],
)
def test_what_is_not_there_says_what_to_do(horovod: ModuleType, code: str, says: str) -> None:
    with pytest.raises(ImportError) as failure:
        exec(code)
    assert says in str(failure.value)


def test_an_unknown_attribute_is_no_attribute(horovod: ModuleType) -> None:
    hvd = importlib.import_module("horovod.torch")
    assert not hasattr(hvd, "nothing")
    with pytest.raises(AttributeError, match="no attribute 'allredce'; did you mean allreduce"):
        _ = hvd.allredce


def test_horovod_itself_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", ModuleType("horovod"))
    with pytest.raises(InvalidArgument, match="imported already"):
        hvd_core.install_as_horovod()
    assert as_horovod.FINDER not in sys.meta_path


def test_settings_are_read_once_with_a_note(
    horovod: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hvd = importlib.import_module("horovod.torch")
    settings = {
        "HOROVOD_FUSION_THRESHOLD": "1048576",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
        "HVD_STALL_WARN_S": "7",
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_CYCLE_TIME": "2",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
    }
    for name, value in settings.items():
        monkeypatch.setitem(os.environ, name, value)
    for _ in range(2):
        hvd.init()
        hvd.shutdown()
    config = Config.from_env()
    assert (config.fusion_bytes, config.stall_warn_s) == (1 << 20, 7)
    assert capfd.readouterr().err.splitlines() == [
        "hvd: HOROVOD_FUSION_THRESHOLD=1048576 is read as HVD_FUSION_BYTES",
        "hvd: these settings of Horovod mean nothing here: HOROVOD_AUTOTUNE, HOROVOD_CYCLE_TIME",
    ]
    monkeypatch.delitem(os.environ, "HOROVOD_FUSION_THRESHOLD")
    hvd.init()
    hvd.shutdown()
    assert Config.from_env().fusion_bytes == Config().fusion_bytes
    monkeypatch.setitem(os.environ, "HOROVOD_GLOO_TIMEOUT_SECONDS", "soon")
    with pytest.raises(InvalidArgument, match="HOROVOD_GLOO_TIMEOUT_SECONDS: HVD_PEER_TIMEOUT_S='soon'"):
        hvd.init()


def test_scripts_find_their_place_in_the_environment(
    horovod: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoints = tuple(f"e;host={host}" for host in ("a", "a", "b", "b", "b"))
    monkeypatch.setattr(world, "_current", World(3, 5, endpoints))
    hvd_core.install_as_horovod()
    told = {name: os.environ[f"HOROVOD_{name}"] for name in horovod_calls._PLACE}
    assert told == {
        "RANK": "3", "SIZE": "5", "LOCAL_RANK": "1", "LOCAL_SIZE": "3", "CROSS_RANK": "1", "CROSS_SIZE": "2",
    }  # fmt: skip


def test_a_dynamic_timeline_stays_one_in_later_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    alone = World()
    for _ in range(2):
        alone.connect(Config(timeline="DYNAMIC")).close()
    assert list(tmp_path.iterdir()) == []


def test_who_gets_a_job_has_horovod_before_its_modules_are_imported(
    horovod: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users.py").write_text("import horovod.torch as hvd\ndef job():\n    return hvd.allgather\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users", raising=False)
    payload = pickling.dumps(importlib.import_module("users").job)
    monkeypatch.delitem(sys.modules, "users")
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read())[0]().__module__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=payload,
        capture_output=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == [b"hvd_core.torch.as_horovod"], done.stderr.decode()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_proc": 1, "np": 2}, "two names of one thing"),
        ({"hosts": "a:2,b:2"}, "this machine only"),
        ({"use_mpi": True}, "there is no MPI"),
        ({"min_np": 2}, "the number of ranks stays"),
    ],
)
def test_options_of_run_that_mean_something_else(
    horovod: ModuleType, options: dict[str, object], says: str
) -> None:
    with pytest.raises(InvalidArgument, match=says):
        horovod.run(print, **options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        horovod.run(print, nonsense=1)


def test_a_rank_that_has_joined_is_an_error_for_all_but_allreduce() -> None:
    def calls(rank: int) -> list[object]:
        rows, one = torch.ones(2, 3), torch.ones(1)
        return [
            lambda: habits.allgather(rows),
            lambda: ours.synchronize(habits.allgather_async(rows, name="a")),
            lambda: habits.grouped_allgather([rows, one]),
            lambda: habits.broadcast(rows, rank, name="b"),
            lambda: habits.broadcast_(rows, rank),
            lambda: habits.alltoall(rows, torch.tensor([1, 1], dtype=torch.int32)),
            lambda: habits.reducescatter(rows),
            lambda: ours.synchronize(habits.grouped_reducescatter_async([rows])),
        ]

    def body(rank: int) -> None:
        for first in (0, 1):
            if rank == first:
                last = ours.join()
            else:
                assert ours.allreduce(torch.ones(1), op=ours.Sum).item() == 1
                for call in calls(rank):
                    with pytest.raises(MismatchError, match="1 of 2 ranks have joined"):
                        call()  # type: ignore[operator]
                last = ours.join()
            assert last == 1 - first
            if rank == first:  # nothing is sent, and the others need not know
                with pytest.raises(InvalidArgument):
                    habits.alltoall(torch.ones(1), torch.tensor([1, 1], dtype=torch.int32), name="bad")
            assert habits.allgather(torch.tensor([rank])).tolist() == [0, 1]
            handle = habits.broadcast_async(torch.tensor([rank]), 1)
            assert ours.synchronize(handle).item() == 1

    run_ranks(2, body)


def test_step_warns_after_synchronize_without_skip_synchronize() -> None:
    def body(rank: int) -> None:
        layer = torch.nn.Linear(1, 1)
        optimizer = habits.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1))

        def step(*, asks: bool, skips: bool) -> int:
            optimizer.zero_grad()
            layer(torch.ones(1, 1)).sum().backward()
            if asks:
                optimizer.synchronize()  # type: ignore[attr-defined]
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                if skips:
                    with optimizer.skip_synchronize():  # type: ignore[attr-defined]
                        optimizer.step()
                else:
                    optimizer.step()
            return sum("called without optimizer.skip_synchronize()" in str(w.message) for w in seen)

        counts = [step(asks=asks, skips=skips) for asks, skips in [(1, 0), (0, 0), (1, 1), (0, 0)]]
        if rank == 0:
            assert counts == [1, 0, 0, 0]

    run_ranks(1, body)


def test_gradients_are_zero_after_an_optimizer_without_state_was_broadcast() -> None:
    def body(rank: int) -> None:
        frozen, free = (
            torch.nn.Parameter(torch.ones(2), requires_grad=False),
            torch.nn.Parameter(torch.ones(3)),
        )
        optimizer = torch.optim.SGD([frozen, free], lr=0.1, momentum=0.9)
        habits.broadcast_optimizer_state(optimizer, root_rank=0)
        assert frozen.grad is None
        assert free.grad is not None and free.grad.tolist() == [0.0] * 3
        assert not optimizer.state

    run_ranks(2, body)
