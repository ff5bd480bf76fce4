"""A rank stopped in the middle of an allreduce with a peer, which gives its memory back meanwhile.

Tensors in the arena are no question here: their memory is not reused.
"""

from __future__ import annotations

import random
import signal

import pytest

from .calls import add_until_it_fails_then_reuse, is_as_reused
from .ranks import connected_ranks

# 32 MiB: nearly all of the time goes into reading and adding.
COUNT = 8 << 20


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("way", "size"), [("staged", 2), ("staged", 3), ("plan", 2), ("plan", 3)])
def test_a_stopped_rank_changes_nothing_of_what_its_peer_has_freed(way: str, size: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    for _ in range(2):
        with connected_ranks(size, peer_timeout_s=1.0) as ranks:
            for rank in ranks:
                rank.start(add_until_it_fails_then_reuse, way, COUNT)
            # Some rounds go well, then the last rank stops wherever it is.
            assert not ranks[0].pipe.poll(0.3 + 0.2 * moments.random())
            ranks[-1].kill(signal.SIGSTOP)
            for rank in ranks[:-1]:
                assert rank.result() == "PeerLost"
            ranks[-1].kill(signal.SIGCONT)
            # It reports an error too, not a sum of memory that means something else now.
            assert ranks[-1].result() in ("PeerLost", "Aborted")
            for rank in ranks:
                assert rank.call(is_as_reused)
