"""S1: which GPU a rank gets."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_core.errors import LaunchFailed
from hvd_core.launch.gpus import Gpus, gpus_for


@pytest.mark.parametrize(
    ("local_rank", "visible", "addresses", "mask", "index"),
    [
        (0, "2,3", [], "2", 0),
        (1, "2,3", [], "3", 1),
        (0, "4,5,6", ["1"], "5", 1),  # a position in what is visible
        (0, "4,5,6", ["5"], "5", 1),  # the machine's own number
        (0, "1,0", ["0"], "0", 1),  # the name wins
        (1, None, ["3"], "3", 3),
        (1, None, [], "1", 1),
        (0, "0,1,2,3", ["2", "3"], "2,3", 2),
        (0, "GPU-aa,GPU-bb", ["1"], "GPU-bb", 1),
        (0, "GPU-aa,GPU-bb", ["GPU-bb"], "GPU-bb", 1),
        (0, None, ["GPU-bb"], "GPU-bb", 0),
        (5, "", [], "", None),
        (0, "", ["0"], "", None),
        (0, "-1", [], "", None),
        (1, "2, -1, 3", ["0"], "2", 0),
        (0, "NoDevFiles", [], "", None),
    ],
)
def test_s1_device_table(
    local_rank: int, visible: str | None, addresses: list[str], mask: str, index: int | None
) -> None:
    assert gpus_for(local_rank, visible, addresses) == Gpus(mask, index)


@pytest.mark.parametrize(
    ("local_rank", "visible", "addresses", "named"),
    [
        (1, "0", [], ["local rank 1", "CUDA_VISIBLE_DEVICES='0'"]),
        (0, "4,5", ["7"], ["GPU 7", "'4,5'"]),
        (1, "2,-1,3", [], ["local rank 1", "shows 1 here"]),
        (0, "0", ["GPU-cc"], ["GPU-cc"]),
        (0, "0,1", ["1", "2"], ["GPU 1, 2", "'0,1'"]),
    ],
)
def test_s1_beyond_what_is_visible(
    local_rank: int, visible: str, addresses: list[str], named: list[str]
) -> None:
    with pytest.raises(LaunchFailed) as caught:
        gpus_for(local_rank, visible, addresses)
    assert all(text in str(caught.value) for text in named)


@pytest.mark.parametrize("addresses", [[], ["0"]])
@pytest.mark.parametrize("visible", ["3", None])
def test_s1_two_ranks_on_one_gpu(addresses: Any, visible: str | None) -> None:
    found = [gpus_for(rank, visible, addresses, per_rank=0.5) for rank in (0, 1)]
    assert [gpus.index for gpus in found] == [0, 0]
    assert {gpus.mask for gpus in found} == {visible or "0"}
    assert all("2 ranks share a GPU" in gpus.warning for gpus in found)


def test_s1_two_gpus_for_each_rank() -> None:
    assert [gpus_for(rank, "4,5,6,7", per_rank=2).mask for rank in (0, 1)] == ["4,5", "6,7"]
