"""Batch normalisation over the rows of all ranks (`sync_batchnorm=True`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .ranks import Ranks


def convert(module: nn.Module, ranks: Ranks, name: str = "batchnorm") -> nn.Module:
    """Replaces every BatchNorm of `module` by one over all ranks, sharing parameters and buffers."""
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        return SyncBatchNorm(module, ranks, name)
    for key, child in module.named_children():
        setattr(module, key, convert(child, ranks, f"{name}.{key}"))
    return module


class SyncBatchNorm(_BatchNorm):
    """Statistics of all ranks' rows, each row counting once. In training every rank runs it at the same
    time, also with no rows of its own."""

    def __init__(self, plain: _BatchNorm, ranks: Ranks, name: str):
        super().__init__(
            plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats
        )
        for key in ("weight", "bias"):
            setattr(self, key, getattr(plain, key))
        for key in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(self, key, getattr(plain, key))
        self.train(plain.training)
        self._ranks, self._name = ranks, name

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.ndim}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        output, mean, var, count = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self
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

    def total(self, values: Tensor, what: str) -> Tensor:
        """Sum over ranks, in float64."""
        data = np.array(values.detach().double().cpu().numpy(), order="C")  # a copy: the sum is in place
        return torch.from_numpy(self._ranks.sum(data, f"{self._name}.{what}"))


class _Normalize(torch.autograd.Function):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, with mean and var over all ranks and their gradients.

    Source of the backward: Ioffe & Szegedy 2015, section 3, with sums over the rows of all ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: SyncBatchNorm) -> Any:
        axes = [d for d in range(x.ndim) if d != 1]
        local = torch.cat([x.double().sum(axes), torch.tensor([x.numel() / x.shape[1]], dtype=torch.float64)])
        sums = layer.total(local, "sum")
        count = max(float(sums[-1]), 1.0)
        mean = sums[:-1] / count
        centred = x.double() - _wide(mean, x)
        var = layer.total(centred.square().sum(axes), "var") / count
        scale = torch.rsqrt(var + layer.eps)
        normal = (centred * _wide(scale, x)).to(x.dtype)
        ctx.save_for_backward(normal, weight, scale)
        ctx.layer, ctx.count, ctx.axes = layer, count, axes
        output = normal if weight is None else normal * _wide(weight, x)
        if bias is not None:
            output = output + _wide(bias, x)
        ctx.mark_non_differentiable(mean, var)
        return output, mean, var, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        normal, weight, scale = ctx.saved_tensors
        grad64, normal64 = grad.double(), normal.double()
        own = torch.stack([grad64.sum(ctx.axes), (grad64 * normal64).sum(ctx.axes)])
        sums = ctx.layer.total(own, "grad") / ctx.count
        factor = scale if weight is None else scale * weight.double()
        inner = grad64 - _wide(sums[0], grad) - normal64 * _wide(sums[1], grad)
        grad_x = (inner * _wide(factor, grad)).to(grad.dtype)
        if weight is None:
            return grad_x, None, None, None
        return grad_x, own[1].to(weight.dtype), own[0].to(weight.dtype), None


def _wide(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(1, -1, *[1] * (like.ndim - 2))
