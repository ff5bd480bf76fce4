"""A small transformer that learns to turn sequences round, on ranks whose batches have other lengths.

    hvdrun -np 2 python examples/torch_transformer.py [--steps 150]

Warmup and decay of the learning rate, gradients of two passes a step, clipping between backward and step: the
gradients are those of all ranks as soon as `backward()` returns.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import hvd_core.torch as hvd

parser = argparse.ArgumentParser(description="Reverse a sequence of letters")
parser.add_argument("--steps", type=int, default=150, help="(default: 150)")
parser.add_argument("--batch-size", type=int, default=32, help="sequences of each rank (default: 32)")
parser.add_argument("--passes", type=int, default=2, help="batches of a step (default: 2)")
parser.add_argument("--lr", type=float, default=3e-3, help="(default: 0.003)")
parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
parser.add_argument("--sharded", action="store_true", help="each rank keeps a share of the optimizer's state")

LETTERS, LONGEST = 12, 10


class Reverser(nn.Module):
    """Each position attends to all others and says which letter stands at its mirror image."""

    def __init__(self, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.letter = nn.Embedding(LETTERS, width)
        self.place = nn.Embedding(2 * LONGEST, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, LETTERS)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        length = letters.shape[1]
        there = torch.arange(length)
        both = self.place(there) + self.place(LONGEST + there.flip(0))  # from the front and from the back
        return self.out(self.layers(self.letter(letters) + both))


def batch(args: argparse.Namespace, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    length = int(torch.randint(4, LONGEST + 1, (), generator=generator))
    letters = torch.randint(LETTERS, (args.batch_size, length), generator=generator)
    return letters, letters.flip(1)


def test(model: nn.Module, args: argparse.Namespace) -> float:
    """The part of the letters that is right, over 20 batches of every rank."""
    generator = torch.Generator().manual_seed(10_000 + hvd.rank())
    right = torch.zeros(2)
    with torch.no_grad():
        for _ in range(20):
            letters, mirrored = batch(args, generator)
            hits = model(letters).argmax(2) == mirrored
            right += torch.tensor([hits.sum(), hits.numel()])
    hits, count = hvd.allreduce(right, op=hvd.Sum, name="test").tolist()
    return hits / count


def main(args: argparse.Namespace) -> None:
    hvd.init()
    torch.manual_seed(args.seed)
    model = Reverser()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    wrap = hvd.ShardedOptimizer if args.sharded else hvd.DistributedOptimizer
    optimizer = wrap(optimizer, model.named_parameters(), backward_passes_per_step=args.passes)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps + 1, pct_start=0.2)
    generator = torch.Generator().manual_seed(args.seed + hvd.rank())
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        for _ in range(args.passes):
            letters, mirrored = batch(args, generator)
            loss = F.cross_entropy(model(letters).flatten(0, 1), mirrored.flatten())
            (loss / args.passes).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if hvd.rank() == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}, gradient norm {norm:.3f}")
    right = test(model, args)
    if hvd.rank() == 0:
        print(f"{right:.3f} of the letters are right")


if __name__ == "__main__":
    main(parser.parse_args())
