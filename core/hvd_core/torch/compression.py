"""What gradients look like on the wire. A compressor is any object with the two functions below."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Compressor(Protocol):
    """`decompress(*compress(t))` has the dtype and shape of `t`. Reductions run on the compressed tensor, so
    scale factors apply after the cast."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]: ...

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor: ...


class NoneCompressor:
    """Leaves tensors alone."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _CastCompressor:
    """Casts floating tensors; `ctx` is the dtype to go back to, None for a tensor that was left alone."""

    wire_dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if not tensor.dtype.is_floating_point or tensor.dtype == cls.wire_dtype:
            return tensor, None
        return tensor.to(cls.wire_dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Half the bytes of fp32; overflows beyond 65504 (see `gradient_predivide_factor`)."""

    wire_dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Half the bytes of fp32 with its range and 8 bits of precision."""

    wire_dtype = torch.bfloat16


class Compression:
    """The compressors that come with hvd."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
