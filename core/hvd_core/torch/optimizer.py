"""DistributedOptimizer: the user's own optimizer, whose gradients are those of all ranks.

Nothing is subclassed or replaced. Hooks on the parameters notice a backward pass; at its end, before
`backward()` returns, the gradients are reduced; hooks around `step` see to the passes that did not get that
far. From then on clipping, `GradScaler`, logging and the step itself see the same values on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch

from .. import basics
from ..basics import global_process_set as _G
from ..errors import InvalidArgument
from ..group import ReduceOp
from .compression import Compression, Compressor
from .copies import drop_refusal
from .distributor import Distributor
from .gradients import Reduction
from .ops import resolve_op
from .parameters import check_groups, parameter_names

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)


def DistributedOptimizer(
    optimizer: _Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = _G,
) -> _Optimizer:
    """Makes `optimizer` step with the gradients of all ranks, and returns that same object.

    Every rank calls it with an optimizer over the same parameters in the same order. Gradients are reduced at
    the end of the backward that completes `backward_passes_per_step` (several passes are summed, not
    averaged, as everywhere in torch), or in `step()` if fewer were made. A gradient missing on some ranks
    counts as zero there; one missing everywhere stays None. A rank that made no backward takes part in
    `step()`, or in `synchronize()`, which it must then call before it looks at gradients. A closure given to
    `step` returns the average of the ranks' losses. With one rank nothing changes. A parameter belongs to the
    optimizer that was made last; an older one that has it too raises `InvalidArgument` when it is used.

    Added to the optimizer: `synchronize()` reduces now if that is still to be done; `skip_synchronize()`, a
    context in which `step()` takes the gradients as they are; `no_sync()`, one in which a backward reduces
    nothing; `set_backward_passes_per_step(n)`. A copy of the optimizer (`copy.deepcopy`, pickle) has none of
    this and raises at its first step.

    named_parameters: names for error texts; if given, unique and for every parameter of the optimizer. op:
    Average, Sum, Min, Max or Product. gradient_predivide_factor f: gradients are divided by f before they are
    summed and by size/f after (Average only). compression: on the wire, of dense gradients. sparse_as_dense:
    reduce sparse gradients as dense ones; without it their entries are gathered and added up (Average and Sum
    only). process_set: the ranks whose gradients are reduced; on others the optimizer stays a plain one.
    num_groups, groups: checked and accepted for Horovod's sake; here all gradients are one group. Raises
    `InvalidArgument` (a `ValueError`).
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f"expected a torch.optim.Optimizer, got {type(optimizer).__qualname__}")
    if hasattr(optimizer, "_hvd"):
        raise InvalidArgument("this optimizer is distributed already")
    if gradient_predivide_factor != 1.0 and op != ReduceOp.Average:
        raise InvalidArgument("gradient_predivide_factor works with op=Average only")
    check_groups(groups, num_groups)
    takes_part = _takes_part(process_set)
    # The core divides by the size between the sum and the postscale.
    scales = 1.0 / gradient_predivide_factor, float(gradient_predivide_factor)
    reduction = Reduction(resolve_op(op, None), *scales, compression, sparse_as_dense)
    drop_refusal(optimizer)
    names = parameter_names(optimizer, named_parameters)
    distributor = Distributor(optimizer, names, reduction, backward_passes_per_step, process_set)
    if takes_part:
        distributor.attach()
    added = optimizer.__dict__
    added["_hvd"] = distributor
    added["_parameter_names"] = names
    for method in (
        distributor.synchronize,
        distributor.skip_synchronize,
        distributor.no_sync,
        distributor.set_backward_passes_per_step,
    ):
        added[method.__name__] = method
    return optimizer


def _takes_part(process_set: Any) -> bool:
    included = getattr(process_set, "included", None)
    is_outside = included is not None and included() is False
    return not is_outside and basics.group_of(process_set).size > 1
