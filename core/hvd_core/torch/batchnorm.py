"""Batch normalisation over the rows of all ranks."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from .. import basics
from ..basics import global_process_set as _G
from ..errors import InvalidArgument
from ..group import Group, ReduceOp


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm*d` of the joined batch: statistics of all ranks' rows, each row counting once, on
    CPUs too.

    In training every rank runs it at the same time, also with no rows of its own; its backward likewise.
    Everything else (evaluation, one rank) is plain batch normalisation. Input: (rows, channels, ...).
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: Any = _G,
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_set: Any = _G) -> nn.Module:
        """Replaces every BatchNorm of `module`, in place, by one over all ranks that shares its parameters
        and buffers. Returns `module`, or its replacement if it is itself one."""
        made: dict[nn.Module, nn.Module] = {
            layer: cls._like(layer, process_set)
            for layer in module.modules()
            if isinstance(layer, _BatchNorm) and not isinstance(layer, cls)
        }
        for parent in list(module.modules()):
            for key, child in parent._modules.items():
                if child is not None and child in made:
                    parent._modules[key] = made[child]
        return made.get(module, module)

    @classmethod
    def _like(cls, plain: _BatchNorm, process_set: Any) -> SyncBatchNorm:
        layer = cls(
            plain.num_features,
            plain.eps,
            plain.momentum,
            plain.affine,
            plain.track_running_stats,
            process_set,
        )
        for key in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(layer, key, getattr(plain, key))
        return layer.train(plain.training)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2 or input.shape[1] != self.num_features:
            raise InvalidArgument(
                f"SyncBatchNorm: expected (rows, {self.num_features}, ...), got {tuple(input.shape)}"
            )

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        group = basics.group_of(self.process_set) if self.training else None
        if group is None or group.size == 1:
            return super().forward(input)
        output, mean, var, count = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, group, _label(self, group)
        )
        if self.track_running_stats and self.running_mean is not None:
            assert self.num_batches_tracked is not None
            assert self.running_var is not None
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                unbiased = var * (count / max(count - 1.0, 1.0))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        return output


#: The name of each layer's collectives, the Group in which it has it, and after how many joins. Not in the
#: layer: they are copied.
_labels: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Group], int, str]]
_labels = weakref.WeakKeyDictionary()


def _label(layer: SyncBatchNorm, group: Group) -> str:
    """All ranks run their layers for the first time in the same order."""
    known, joins = _labels.get(layer), basics.joins()
    if known is None or known[0]() is not group or known[1] != joins:
        name = basics.next_name("SyncBatchNorm", layer.process_set)
        known = _labels[layer] = weakref.ref(group), joins, name
    return known[2]


def _total(values: Tensor, group: Group, name: str) -> Tensor:
    """Sum over ranks, of float64."""
    host = values.detach().to("cpu", copy=True)
    group.allreduce(host.numpy(), name=name, op=ReduceOp.Sum)
    return host.to(values.device)


class _Normalize(torch.autograd.Function):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, with mean and var over all ranks and their gradients.

    Computed in float64. Source of the backward: Ioffe & Szegedy 2015, section 3, with sums over the rows of
    all ranks; the gradients of weight and bias are those of this rank's rows.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group, label: str
    ) -> Any:
        axes = [d for d in range(x.ndim) if d != 1]
        wide = x.double()
        rows = wide.new_tensor([x.numel() / x.shape[1]])
        sums = _total(torch.cat([wide.sum(axes), rows]), group, f"{label}.sum")
        count = max(float(sums[-1]), 1.0)
        mean = sums[:-1] / count
        centred = wide - _along(mean, x)
        var = _total(centred.square().sum(axes), group, f"{label}.var") / count
        scale = torch.rsqrt(var + eps)
        normal = centred * _along(scale, x)
        ctx.save_for_backward(normal.to(x.dtype), weight, scale)
        ctx.group, ctx.label, ctx.count, ctx.axes = group, label, count, axes
        output = normal if weight is None else normal * _along(weight, x)
        if bias is not None:
            output = output + _along(bias, x)
        ctx.mark_non_differentiable(mean, var)
        return output.to(x.dtype), mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        normal, weight, scale = ctx.saved_tensors
        grad64, normal64 = grad.double(), normal.double()
        own = torch.stack([grad64.sum(ctx.axes), (grad64 * normal64).sum(ctx.axes)])
        sums = _total(own, ctx.group, f"{ctx.label}.grad") / ctx.count
        factor = scale if weight is None else scale * weight.double()
        inner = grad64 - _along(sums[0], grad) - normal64 * _along(sums[1], grad)
        grad_x = (inner * _along(factor, grad)).to(grad.dtype)
        if weight is None:
            return grad_x, None, None, None, None, None
        return grad_x, own[1].to(weight.dtype), own[0].to(weight.dtype), None, None, None


def _along(values: Tensor, like: Tensor) -> Tensor:
    """One value for each channel of `like`."""
    return values.reshape(1, -1, *[1] * (like.ndim - 2))
