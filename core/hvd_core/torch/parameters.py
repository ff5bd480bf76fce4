"""What DistributedOptimizer calls the parameters, and the checks of its arguments about them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from ..errors import InvalidArgument


def default_names(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, str]]:
    """Names as torch knows them (an optimizer made from `named_parameters()`), else by position."""
    for i, group in enumerate(optimizer.param_groups):
        known = group.get("param_names") or [f"allreduce.noname.{i}.{j}" for j in range(len(group["params"]))]
        yield from zip(group["params"], known, strict=True)


def parameter_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Names by parameter: the user's, which must be unique and cover the optimizer, else the default ones."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        return dict(default_names(optimizer))
    named = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise InvalidArgument(
            "named_parameters should be a sequence of tuples (name, parameter), "
            "usually model.named_parameters()"
        )
    twice = sorted(str(name) for name, count in Counter(name for name, _ in named).items() if count > 1)
    if twice:
        raise InvalidArgument(
            f"parameter names in named_parameters must be unique; found twice: {', '.join(twice)}"
        )
    names = {p: str(name) for name, p in named}
    unnamed = [(name, tuple(p.shape)) for p, name in default_names(optimizer) if p not in names]
    if unnamed:
        name, shape = unnamed[0]
        raise InvalidArgument(
            f"named_parameters was given, but {len(unnamed)} of the optimizer's {len(params)} parameters are "
            f"not in it; the first is {name} of shape {shape}"
        )
    return names


def check_groups(groups: int | Sequence[Sequence[torch.Tensor]] | None, num_groups: int) -> None:
    """Horovod's fusion groups are accepted when they make sense, and have no effect."""
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    is_list = isinstance(groups, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in groups)
    is_count = isinstance(groups, int) and groups >= 0
    if groups is not None and not is_count and not is_list:
        raise InvalidArgument("groups should be a non-negative integer or a list of lists of tensors")
