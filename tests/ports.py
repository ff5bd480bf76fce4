"""Ports for what has to be named before anybody listens there."""

from __future__ import annotations

import random
from contextlib import closing, suppress
from socket import create_server


def free_port() -> int:
    """Nobody listens there now, and nobody is given it who asks for any port: those begin at 32768."""
    while True:
        with (
            suppress(OSError),
            closing(create_server(("127.0.0.1", random.randrange(20_000, 32_000)))) as probe,
        ):
            return int(probe.getsockname()[1])
