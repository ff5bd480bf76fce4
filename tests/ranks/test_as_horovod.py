"""Scripts as Horovod's users have written them, unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(90)

TRAIN = """
import argparse
import os

import torch
import torch.nn.functional as F
import horovod.torch as hvd
from horovod.torch.compression import Compression

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
args = parser.parse_args()

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=Compression.none, op=hvd.Average
)
for _ in range(5):
    x = torch.randn(16, 4)
    optimizer.zero_grad()
    F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
same = hvd.allgather(weights.unsqueeze(0))
assert torch.equal(same[0], same[1])
place = [os.environ["HOROVOD_" + name] for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
print(hvd.rank(), place, args.lr, __name__, flush=True)
hvd.join()
"""

DRIVER = """
import horovod
import horovod.torch as hvd

def train(factor):
    hvd.init()
    from horovod.common.exceptions import HorovodInternalError
    import torch
    return factor * hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Sum).item(), HorovodInternalError

results = horovod.run(train, args=(3,), np=2, use_gloo=True)
print([value for value, _ in results], results[0][1].__module__)
"""


def _run(*words: str | Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", *map(str, words)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_a_script_of_horovods_trains(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    as_horovod = (sys.executable, "-m", "hvd_core.as_horovod")
    said = _run("hvd_core.launch.hvdrun", "-np", "2", "--", *as_horovod, script, "--lr", "0.1")
    assert said == [f"[{r}] {r} ['{r}', '2', '{r}', '2'] 0.1 __main__" for r in range(2)]


def test_horovod_run_starts_ranks_that_have_it_too(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    assert _run("hvd_core.as_horovod", script) == ["[3.0, 3.0] hvd_core.errors"]
