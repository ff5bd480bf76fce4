"""Horovod's MNIST example, on the digits of scikit-learn (no download): a convolutional net on every rank.

    hvdrun -np 2 python examples/torch_mnist_like.py [--epochs 10]

What changed from `horovod.torch` is the import.
"""

import argparse
from itertools import islice

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvd_core.torch as hvd

parser = argparse.ArgumentParser(description="Digits of 8x8 pixels")
parser.add_argument("--batch-size", type=int, default=32, help="rows of each rank (default: 32)")
parser.add_argument("--epochs", type=int, default=10, help="(default: 10)")
parser.add_argument("--lr", type=float, default=0.01, help="learning rate of one rank (default: 0.01)")
parser.add_argument("--momentum", type=float, default=0.9, help="(default: 0.9)")
parser.add_argument("--seed", type=int, default=42, help="(default: 42)")
parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel as fp16")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0, help="(default: 1)")
parser.add_argument("--batches-per-allreduce", type=int, default=1, help="batches of a step (default: 1)")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.norm = hvd.SyncBatchNorm(32)
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.norm(self.conv2(x)))
        return F.log_softmax(self.fc(self.drop(x.flatten(1))), dim=1)


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """1500 digits to train on and 297 to test with."""
    images, digits = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(digits)
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, epoch: int, passes: int):
    model.train()
    loader.sampler.set_epoch(epoch)  # shuffle anew, alike on all ranks
    whole_steps = islice(loader, len(loader) // passes * passes)
    for batch, (x, y) in enumerate(whole_steps):
        loss = F.nll_loss(model(x), y) / passes
        loss.backward()
        if (batch + 1) % passes == 0:
            optimizer.step()
            optimizer.zero_grad()
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {loss.item() * passes:.4f}")


def test(model: nn.Module, loader: DataLoader) -> None:
    model.eval()
    sums = torch.zeros(3)  # loss, right answers, rows
    with torch.no_grad():
        for x, y in loader:
            output = model(x)
            sums += torch.tensor(
                [F.nll_loss(output, y, reduction="sum"), (output.argmax(1) == y).sum(), len(y)]
            )
    loss, right, rows = hvd.allreduce(sums, op=hvd.Sum, name="test").tolist()
    if hvd.rank() == 0:
        print(f"test: loss {loss / rows:.4f}, accuracy {right / rows:.3f} of {rows:.0f} rows")


def main(args: argparse.Namespace) -> None:
    hvd.init()
    torch.manual_seed(args.seed)
    train_rows, test_rows = datasets()
    sampler = DistributedSampler(train_rows, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_rows, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    test_sampler = range(hvd.rank(), len(test_rows), hvd.size())  # every row once
    test_loader = DataLoader(test_rows, batch_size=256, sampler=test_sampler)

    model = Net()
    # The global batch is size() times as large: so is the learning rate.
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    for epoch in range(1, args.epochs + 1):
        train(model, optimizer, train_loader, epoch, args.batches_per_allreduce)
        test(model, test_loader)


if __name__ == "__main__":
    main(parser.parse_args())
