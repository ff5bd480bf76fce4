"""Two hosts: an allreduce against what TCP itself moves over as many streams in the same run.

python benchmarks/tcp.py [--quick] [--nbytes 1048576 ...]

The hosts are two network namespaces of this machine with a veth pair between them, one rank in each. "raw"
sends as many bytes each way as the tensor has, in both directions at once, and adds nothing. "raw, adds"
moves as many over as many streams and makes the sum of them: each rank adds half, and what is added can only
be sent back when it has come. Nothing that two ranks do can be less, so that is where an allreduce ends.
Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import native
import report
import side_by_side
import tensors
import torch
from race import Contender, median_us, race, ratio
from side_by_side import Ranks

from hvd_core.config import Config

NBYTES = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
TARGET_FROM = 1 << 20
TARGET = 0.85
_ADDRESSES = ("10.214.0.1", "10.214.0.2")  # exist inside the two namespaces only


def why_not() -> str | None:
    """Why this cannot run here."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if shutil.which("ip") is None:
        return "there is no ip (iproute2)"
    probe = f"hvd-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode != 0:
        return f"ip netns add: {made.stderr.strip()}"
    _ip("netns", "delete", probe)
    return None


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def two_namespaces() -> Iterator[list[str]]:
    """Their names. They and what runs over their link end with the context."""
    names = [f"hvd-{secrets.token_hex(4)}" for _ in _ADDRESSES]
    with contextlib.ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        _ip(
            "link",
            "add",
            "veth0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "veth0",
            "netns",
            names[1],
        )
        for name, address in zip(names, _ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "veth0")
            for device in ("lo", "veth0"):
                _ip("-n", name, "link", "set", device, "up")
        yield names


class Raw:
    """`streams` TCP connections between the two ranks, and what is done over them in C (cpp/raw_tcp.cc)."""

    def __init__(self, ranks: Ranks, streams: int, library: str):
        self.sockets: list[socket.socket] = []
        if ranks.rank == 0:
            with socket.create_server((_ADDRESSES[0], 0)) as server:
                ranks.gather(server.getsockname())
                self.sockets = [server.accept()[0] for _ in range(streams)]
        else:
            address = ranks.gather(None)[0]
            self.sockets = [socket.create_connection(address) for _ in range(streams)]
        for connection in self.sockets:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._descriptors = (ctypes.c_int * streams)(*(s.fileno() for s in self.sockets))
        self._rank = ranks.rank
        self._exchange = ctypes.CDLL(library).raw_tcp_exchange
        self._exchange.argtypes = [ctypes.c_void_p, ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.c_size_t]
        self._add = ctypes.CDLL(library).raw_tcp_add
        self._add.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 2, ctypes.c_void_p, ctypes.c_size_t]

    def exchange(self, out: int, into: int, nbytes: int) -> None:
        """Sends `nbytes` at address `out` and receives as many at `into`, an equal part over each stream."""
        _raise(self._exchange(self._descriptors, len(self.sockets), out, into, nbytes))

    def add(self, data: int, count: int) -> None:
        """Makes the sum of both ranks' `count` float32 at address `data`."""
        _raise(self._add(self._descriptors, len(self.sockets), self._rank, data, count))


def _raise(failed: int) -> None:
    if failed:
        raise OSError(failed, os.strerror(failed))


def measure(
    ranks: Ranks, nbytes: list[int], budget_s: float, most: int, streams: int, library: str
) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    ranks.connect_hvd().barrier()
    ranks.pin()
    raw = Raw(ranks, streams, library)
    rows = []
    for size in nbytes:
        tensor, received = torch.empty(size // 4), torch.empty(size // 4)
        own, summed = torch.empty(size // 4), torch.empty(size // 4)

        def check(turn: int, received: torch.Tensor = received) -> None:
            assert (received == turn + 2 - ranks.rank).all()

        contenders = [
            tensors.hvd_allreduce(ranks, tensor),
            Contender(
                "raw",
                lambda own=own, received=received, size=size: raw.exchange(
                    own.data_ptr(), received.data_ptr(), size
                ),
                lambda turn, own=own: own.fill_(turn + 1 + ranks.rank),
                check,
            ),
            tensors.summed(
                ranks, "raw, adds", summed, lambda t=summed, size=size: raw.add(t.data_ptr(), size // 4)
            ),
        ]
        times = race(ranks, contenders, budget_s=budget_s, most=most)
        achieved, low, high = ratio(times["raw"], times["hvd"])
        adds = ratio(times["raw, adds"], times["hvd"])
        rows.append(
            {
                "bytes": size,
                "streams": streams,
                "turns": len(times["hvd"]),
                "hvd_us": median_us(times["hvd"]),
                "raw_us": median_us(times["raw"]),
                "raw_GB_s": size / median_us(times["raw"]) / 1e3,
                "achieved": achieved,
                "95%": f"{low:.2f}-{high:.2f}",
                "raw_adds_us": median_us(times["raw, adds"]),
                "of raw that adds": adds[0],
                "of it 95%": f"{adds[1]:.2f}-{adds[2]:.2f}",
            }
        )
    return rows


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--nbytes", type=int, nargs="+", default=NBYTES)
    options = parser.parse_args()
    quick = options.quick
    if reason := why_not():
        print(f"tcp: skipped: {reason}")
        print(json.dumps({"skipped": reason}))
        return
    figure = report.Figure("tcp", "two namespaces, fp32: an allreduce against raw TCP", quick)
    with two_namespaces() as names:
        outcome = side_by_side.run(
            measure,
            size=2,
            within=[["ip", "netns", "exec", name] for name in names],
            nbytes=options.nbytes,
            budget_s=0.1 if quick else 6.0,
            most=15 if quick else 200,
            streams=Config.from_env().ring_streams,
            library=str(native.build("raw_tcp")),
        )
    figure.saw(outcome)
    figure.rows = outcome.value
    figure.targets = [
        report.Target(f"{row['bytes'] >> 20} MiB: achieved / raw", row["achieved"], TARGET)
        for row in figure.rows
        if row["bytes"] >= TARGET_FROM
    ]
    figure.notes = [
        f"limit at {row['bytes'] >> 20} MiB: raw TCP that also adds reaches "
        f"{row['raw_us'] / row['raw_adds_us']:.3g} of raw, and hvd {row['of raw that adds']:.3g} of that"
        for row in figure.rows
        if row["bytes"] >= TARGET_FROM
    ]
    figure.publish()


if __name__ == "__main__":
    main()
