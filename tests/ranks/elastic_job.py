"""Ranks whose launcher replaces lost ranks. Each writes its process number and endpoint, reads a line for
each generation, trains, writes what became of it. Arguments, for each rank: descriptors to read and to write,
and where it dies, as JSON. All are forked from this process, so that torch is imported once."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

import torch
import torch._dynamo  # what an optimizer imports

import hvd_core.torch as hvd
from hvd_core.group import Listener
from hvd_core.world import World, set_current

STEPS, COMMIT_EVERY, ROWS = 9, 2, 12
WITHIN_S = 60.0


def listen(listener: Listener, told: int) -> None:
    for line in os.fdopen(told):
        who = json.loads(line)
        world = World(who["rank"], len(who["endpoints"]), tuple(who["endpoints"]), b"token", listener,
                      who["generation"], WITHIN_S)  # fmt: skip
        set_current(world)


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True).sin()


def net_of(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    return net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def be_a_rank(told: int, say: int, dies: dict[str, int]) -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(say, "w")
    listener = Listener.bind()
    set_current(World(0, 0, (), b"", listener, replaced_within_s=WITHIN_S))
    print(os.getpid(), listener.endpoint, file=answers, flush=True)
    threading.Thread(target=listen, args=(listener, told), daemon=True).start()
    hvd.init()
    net, optimizer, scheduler = net_of(seed=hvd.rank())
    hvd.DistributedOptimizer(optimizer, net.named_parameters())
    state = hvd.elastic.TorchState(net, optimizer, scheduler=scheduler, step=0, done=[])
    resets: list[int] = []
    begins: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(state.step)])

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @hvd.elastic.run
    def train(state: Any) -> str:
        begins.append(state.step)
        while state.step < STEPS:
            if dies.get("before") == state.step:
                die()
            if dies.get("backward") == state.step:
                next(net.parameters()).register_hook(die)
            x, y = (part[hvd.rank() :: hvd.size()] for part in rows(state.step))
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            scheduler.step()
            state.done.append(state.step)
            state.step += 1
            if state.step % COMMIT_EVERY == 0:
                state.commit()
            if dies.get("end") == state.step:
                die()
        return "trained"

    found = {"said": train(state), "resets": resets, "begins": begins, "done": state.done,
             "lr": scheduler.get_last_lr(), "weights": [p.tolist() for p in net.parameters()],
             "local": hvd.local_rank()}  # fmt: skip
    hvd.shutdown()
    print(json.dumps(found), file=answers, flush=True)


def main() -> None:
    ranks = [json.loads(argument) for argument in sys.argv[1:]]
    for told, say, dies in ranks:
        if os.fork() == 0:
            for fd in {fd for rank in ranks for fd in rank[:2]} - {told, say}:
                os.close(fd)
            be_a_rank(told, say, dies)
            os._exit(0)


if __name__ == "__main__":
    main()
