"""The socket at the driver: what gets in, and what does not. Needs no Spark."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest

from hvd_core.launch.display import Progress
from hvd_spark import feed
from hvd_spark.feed import FeedClient, FeedServer

TOKEN = b"t" * 32


@pytest.fixture
def server() -> Iterator[FeedServer]:
    made = FeedServer(TOKEN, "127.0.0.1", local=True)
    yield made
    made.close()


def pump(server: FeedServer, until: Any) -> list[dict[str, Any]]:
    """Serves until `until(records)` holds."""
    records: list[dict[str, Any]] = []
    deadline = time.monotonic() + 5
    while not until(records):
        assert time.monotonic() < deadline, records
        records += server.read(0.1)
    return records


def connected(server: FeedServer, token: bytes = TOKEN) -> FeedClient | None:
    """A client; the server has to be read for the handshake, so it connects in a thread."""
    import threading

    made: list[FeedClient | None] = []
    thread = threading.Thread(target=lambda: made.append(FeedClient.connect(server.address, token, 1)))
    thread.start()
    pump(server, lambda _: not thread.is_alive())
    return made[0]


def test_records_arrive_in_order(server: FeedServer) -> None:
    client = connected(server)
    assert client is not None
    client.send([{"n": 0}, {"n": 1, "text": "ü\n"}])
    client.send([{"n": 2}])
    client.close()
    records = pump(server, lambda got: len(got) == 3)
    assert [r["n"] for r in records] == [0, 1, 2]
    assert records[1]["text"] == "ü\n"
    assert server.drain(5) == []
    assert server.dropped == 0


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x80\x05" + b"x" * 200, b"HVDFEED1" + b"\0" * 36, b""]
)
def test_strangers_are_dropped(server: FeedServer, data: bytes) -> None:
    with socket.create_connection(server.address) as sock:
        sock.sendall(data)
        if not data:
            sock.shutdown(socket.SHUT_WR)
        pump(server, lambda _: server.dropped == 1)
    client = connected(server)
    assert client is not None
    client.send([{"n": 1}])
    assert pump(server, lambda got: got) == [{"n": 1}]
    client.close()


def test_wrong_token(server: FeedServer) -> None:
    client = connected(server, b"u" * 32)
    if client is not None:  # the server says nothing; what is sent is not read
        client.send([{"n": 1}])
        client.close()
    assert pump(server, lambda _: server.dropped == 1) == []


def test_a_frame_is_not_accepted_twice(server: FeedServer) -> None:
    """The challenge differs each time, so what was overheard is of no use."""
    frames = []
    for _ in range(2):
        sock = socket.create_connection(server.address)
        server.read(1)
        challenge = sock.recv(16)
        frames.append(feed._frame(TOKEN, challenge, 0))
        sock.sendall(frames[0])
        sock.sendall(b'{"n": 1}\n')
        sock.shutdown(socket.SHUT_WR)
        pump(server, lambda got: got or server.dropped)
        sock.close()
    assert frames[0] != frames[1]
    assert server.dropped == 1


def test_silent_strangers_do_not_stay(server: FeedServer, monkeypatch: Any) -> None:
    monkeypatch.setattr(feed, "_PATIENCE_S", 0.05)
    with socket.create_connection(server.address):
        pump(server, lambda _: server.dropped == 1)


def test_what_is_not_json_ends_the_connection(server: FeedServer) -> None:
    client = connected(server)
    assert client is not None
    assert client._sock is not None
    client._sock.sendall(b"not json\n")
    pump(server, lambda _: server.dropped == 1)
    client.close()


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    assert FeedClient.connect(address, TOKEN, 0) is None
    assert FeedClient.connect(None, TOKEN, 0) is None


def test_a_driver_that_does_not_answer_costs_a_second_at_most() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        assert FeedClient.connect(silent.getsockname(), TOKEN, 0, timeout_s=0.2) is None
        assert time.monotonic() - start < 5


def test_a_driver_that_does_not_read_never_blocks_a_rank(server: FeedServer) -> None:
    client = connected(server)
    assert client is not None
    for _ in range(400):
        client.send([{"line": "x" * 50_000}])  # 20 MB, far above what sockets buffer
    assert client.lost > 0
    client.close(timeout_s=0.0)


def test_piped_progress_is_plain_lines() -> None:
    out, err = StringIO(), StringIO()
    progress = Progress(out=out, err=err)
    progress.take({"kind": "output", "rank": 1, "host": socket.gethostname(), "line": "hello"})
    progress.take({"kind": "output", "rank": 2, "host": "host-b", "line": "there"})
    step = {"kind": "progress", "rank": 0, "epochs": 2, "steps": 4, "rows_per_s": 1234.5, "loss": 0.5}
    progress.take({**step, "epoch": 0, "step": 1})
    progress.take({**step, "epoch": 0, "step": 2})
    progress.take({**step, "epoch": 0, "step": 3, "history": {"loss": 0.5, "val_loss": 0.75, "seconds": 1.0}})
    progress.close()
    assert out.getvalue() == "[1] hello\n[2@host-b] there\n"
    lines = err.getvalue().splitlines()
    assert lines == [
        "epoch 1/2 step 2/4  1,234 rows/s  loss 0.5",
        "epoch 1/2  1,234 rows/s  loss 0.5  val_loss 0.75",
    ]


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_in_a_terminal_is_a_bar() -> None:
    out, err = StringIO(), Terminal()
    progress = Progress(out=out, err=err)
    step = {"kind": "progress", "rank": 0, "epochs": 2, "steps": 4, "rows_per_s": 1234.5, "loss": 0.5}
    progress.take({**step, "epoch": 0, "step": 1})
    progress.take({"kind": "log", "rank": 1, "line": "hello"})
    progress.take({**step, "epoch": 1, "step": 3, "history": {"loss": 0.25}})
    progress.close()
    assert out.getvalue() == "[1] hello\n", "beside the bar"
    last = err.getvalue().split("\r")[-1]
    assert last.startswith("epoch 2/2: 100%") and "8/8" in last and "loss 0.25" in last and "\n" in last


def test_quiet_progress() -> None:
    out, err = StringIO(), StringIO()
    progress = Progress(verbose=0, out=out, err=err)
    progress.take({"kind": "output", "rank": 0, "line": "mine"})
    progress.take({"kind": "progress", "rank": 0, "epoch": 0, "step": 0, "steps": 1, "loss": 1.0})
    assert (out.getvalue(), err.getvalue()) == ("[0] mine\n", "")
