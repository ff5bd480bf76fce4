"""Ratings of films by users, from two sparse embeddings: Horovod's way, a rank at a time.

    hvdrun -np 2 python examples/torch_recommender.py [--epochs 8]

The ratings are made up: tastes of users times traits of films, and noise. Each batch touches few rows of the
tables; their gradients are sparse, and only those rows travel.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvd_core.torch as hvd

parser = argparse.ArgumentParser(description="Matrix factorisation with sparse gradients")
parser.add_argument("--users", type=int, default=500, help="(default: 500)")
parser.add_argument("--films", type=int, default=200, help="(default: 200)")
parser.add_argument("--ratings", type=int, default=40_000, help="(default: 40000)")
parser.add_argument("--batch-size", type=int, default=256, help="rows of each rank (default: 256)")
parser.add_argument("--epochs", type=int, default=8, help="(default: 8)")
parser.add_argument("--seed", type=int, default=1, help="(default: 1)")

NOISE = 0.3


class Factors(nn.Module):
    def __init__(self, users: int, films: int, width: int = 8) -> None:
        super().__init__()
        self.user = nn.Embedding(users, width, sparse=True)
        self.film = nn.Embedding(films, width, sparse=True)
        self.mean = nn.Parameter(torch.zeros(()))
        for table in (self.user, self.film):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, user: torch.Tensor, film: torch.Tensor) -> torch.Tensor:
        return self.mean + (self.user(user) * self.film(film)).sum(1)


def ratings(args: argparse.Namespace) -> tuple[TensorDataset, TensorDataset]:
    """Nine tenths to train on, one to test with: user, film, rating."""
    generator = torch.Generator().manual_seed(args.seed)
    taste, trait = (torch.randn(n, 4, generator=generator) for n in (args.users, args.films))
    user, film = (torch.randint(n, (args.ratings,), generator=generator) for n in (args.users, args.films))
    rating = 3 + (taste[user] * trait[film]).sum(1) / 2
    rating += NOISE * torch.randn(args.ratings, generator=generator)
    cut = args.ratings * 9 // 10
    rows = user, film, rating
    return TensorDataset(*(x[:cut] for x in rows)), TensorDataset(*(x[cut:] for x in rows))


def test(model: nn.Module, rows: TensorDataset) -> float:
    """Root mean squared error over the test rows of all ranks."""
    user, film, rating = (x[hvd.rank() :: hvd.size()] for x in rows.tensors)
    with torch.no_grad():
        squares = (model(user, film) - rating).pow(2)
    total, count = hvd.allreduce(torch.tensor([squares.sum(), len(squares)]), op=hvd.Sum, name="test")
    return float((total / count).sqrt())


def main(args: argparse.Namespace) -> None:
    hvd.init()
    torch.manual_seed(args.seed)
    train_rows, test_rows = ratings(args)
    sampler = DistributedSampler(train_rows, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train_rows, batch_size=args.batch_size, sampler=sampler)

    model = Factors(args.users, args.films)
    tables = torch.optim.SparseAdam([model.user.weight, model.film.weight], lr=0.03)
    rest = torch.optim.Adam([model.mean], lr=0.05)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for optimizer in (tables, rest):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    tables = hvd.DistributedOptimizer(tables)  # two optimizers over parts of one model
    rest = hvd.DistributedOptimizer(rest)

    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        for user, film, rating in loader:
            tables.zero_grad()
            rest.zero_grad()
            (model(user, film) - rating).pow(2).mean().backward()
            tables.step()
            rest.step()
        error = test(model, test_rows)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: test error {error:.3f}, of which {NOISE} is noise")


if __name__ == "__main__":
    main(parser.parse_args())
