from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

class Listener:
    @staticmethod
    def bind(host_id: str, interface: str) -> Listener: ...
    @property
    def endpoint(self) -> str: ...
    @property
    def dropped(self) -> int: ...

class Handle:
    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> Any: ...

class Group:
    @staticmethod
    def connect(
        listener: Listener | None,
        endpoints: list[str],
        rank: int,
        token: bytes,
        epoch: int,
        fusion_bytes: int,
        chunk_bytes: int,
        connect_timeout_s: float,
        peer_timeout_s: float,
        stall_warn_s: float,
        stall_shutdown_s: float,
        ring_streams: int,
        wire_dtype: str,
        timeline: str,
        timeline_mark_cycles: bool,
        cpu_quota: float,
        note: str,
    ) -> Group: ...
    def begin_phase(self, name: str, timeout_s: float) -> None: ...
    def end_phase(self) -> None: ...
    def start_timeline(self, path: str, mark_cycles: bool) -> None: ...
    def stop_timeline(self) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def cross_rank(self) -> int: ...
    @property
    def cross_size(self) -> int: ...
    def run(
        self,
        op: int,
        name: str,
        input: Any,
        output: Any,
        reduce: int,
        prescale: float,
        postscale: float,
        root: int,
        timeout_s: float | None,
        /,
    ) -> Any: ...
    def start(
        self,
        owner: object,
        op: int,
        name: str,
        input: Any,
        output: Any,
        reduce: int,
        prescale: float,
        postscale: float,
        root: int,
        /,
    ) -> Handle: ...
    def start_group(
        self,
        owner: object,
        op: int,
        name: str,
        names: list[str] | None,
        inputs: list[Any],
        outputs: list[Any],
        reduce: int,
        prescale: float,
        postscale: float,
        root: int,
        /,
    ) -> Handle: ...
    def run_tensor(
        self,
        op: int,
        name: str,
        tensor: Any,
        output: Any,
        reduce: int | None,
        prescale: float,
        postscale: float,
        root: int,
        /,
    ) -> Any: ...
    def start_tensor(
        self,
        owner: object,
        op: int,
        name: str,
        tensor: Any,
        output: Any,
        reduce: int | None,
        prescale: float,
        postscale: float,
        root: int,
        /,
    ) -> Any: ...
    def start_tensors(
        self,
        owner: object,
        op: int,
        name: str,
        tensors: list[Any],
        output: Callable[[Any], Any] | None,
        reduce: int | None,
        prescale: float,
        postscale: float,
        root: int,
        /,
    ) -> Any: ...
    def start_alltoall(self, owner: object, name: str, input: Any, splits: list[int] | None, /) -> Handle: ...
    def barrier(self, name: str, timeout_s: float | None, /) -> None: ...
    def join(self, timeout_s: float | None, /) -> int: ...
    def empty(self, nbytes: int) -> NDArray[np.uint8]: ...
    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...
    def check(self) -> None: ...
    def fileno(self) -> int: ...
    def stats(self) -> dict[str, Any]: ...

class Plan:
    def begin(self) -> None: ...
    def ready(self, member: int, address: int) -> None: ...
    def decline(self, member: int) -> None: ...
    def end(self, flags: int) -> list[int]: ...
    def supply(self, member: int, address: int) -> None: ...
    def leave(self) -> None: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def batches(self) -> int: ...
    @property
    def declined(self) -> list[int]: ...
    @property
    def flags_of_any(self) -> int: ...
    @property
    def flags_of_all(self) -> int: ...
    def times(self) -> dict[str, float]: ...

def plan_nbytes(
    group: Group, tensors: list[tuple[str, str, list[int]]], first_nbytes: int, nbytes: int
) -> int: ...
def make_plan(
    group: Group,
    name: str,
    tensors: list[tuple[str, str, list[int]]],
    reduce: int,
    prescale: float,
    postscale: float,
    first_nbytes: int,
    nbytes: int,
) -> Plan | None: ...
def kernels() -> str: ...
def use_kernels(name: str) -> None: ...
def gather_rows(
    base: NDArray[np.uint8], row_nbytes: int, index: NDArray[np.int64], out: NDArray[np.uint8]
) -> None: ...
def hash_rows(blocks: list[tuple[NDArray[np.uint8], int]], rows: int, seed: int) -> NDArray[np.uint64]: ...
def sort_by_hash(hashes: NDArray[np.uint64]) -> NDArray[np.int64]: ...
def permutation(n: int, seed: int, epoch: int, begin: int, count: int) -> NDArray[np.int64]: ...
