"""What the layout has to know of a torch model, and its tensors as bytes and arrays."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import InvalidArgument, LossError, PreflightError
from .columns import ModelFacts
from .framework import Readable
from .spec import TrainSpec
from .torch_copy import copy_without_weights, read_into
from .torch_losses import terms_for


def build_model(spec: TrainSpec) -> nn.Module:
    model = spec.model if spec.model_fn is None else spec.model_fn()
    if not isinstance(model, nn.Module):
        source = "model_fn returned" if spec.model_fn is not None else "model is"
        raise InvalidArgument(f"{source} {type(model).__name__}, not a torch.nn.Module")
    return model


def build_optimizer(spec: TrainSpec, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = spec.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model.parameters())
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f"optimizer(parameters) returned {type(optimizer).__name__}, not an Optimizer")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InvalidArgument(f"{type(optimizer).__name__} needs a closure and is not supported by fit")
    return optimizer


def facts(spec: TrainSpec, to_train: bool) -> ModelFacts:
    """Reads the signature of forward and the dtypes. A model_fn is called once, without touching the RNG."""
    terms = terms_for(spec) if to_train else []
    if spec.sample_weight_col is not None:
        for term in terms:
            term.needs_weights_per_row()
    with torch.random.fork_rng(devices=[]):
        model = build_model(spec)
        if to_train and spec.model_fn is not None:
            build_optimizer(spec, model)
    if to_train and not any(p.requires_grad for p in model.parameters()):
        raise PreflightError(f"model {type(model).__name__} has no parameters to train")
    params = list(inspect.signature(model.forward).parameters.values())
    places = [p for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return ModelFacts(
        inputs=tuple(p.name for p in places),
        required=sum(p.default is p.empty for p in places),
        varargs=any(p.kind is p.VAR_POSITIONAL for p in params),
        float_dtype=numpy_dtype(float_dtype(model)),
        class_index=tuple(t.class_numbers for t in terms) if to_train else (False,) * len(spec.label_cols),
        name=type(model).__name__,
        heads=tuple(t.head for t in terms),
    )


def float_dtype(model: nn.Module) -> torch.dtype:
    """Of the first floating parameter."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def numpy_dtype(dtype: torch.dtype) -> str:
    """numpy's name; bfloat16 travels as float32."""
    return {torch.bfloat16: "float32"}.get(dtype, str(dtype).removeprefix("torch."))


def to_tensors(arrays: Sequence[np.ndarray], dtype: torch.dtype) -> list[Tensor]:
    """Views of the arrays; floats are cast when the model's dtype does not exist in numpy."""
    tensors = [torch.from_numpy(a if a.flags.writeable else a.copy()) for a in arrays]
    if dtype is torch.bfloat16:
        return [t.to(dtype) if t.is_floating_point() else t for t in tensors]
    return tensors


def outputs_of(value: Any) -> list[Tensor]:
    """The model's outputs as a list: one tensor, a tuple or list of them, or the values of a dict."""
    if isinstance(value, Tensor):
        return [value]
    values = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(values, (tuple, list)) or not all(isinstance(v, Tensor) for v in values):
        raise LossError(
            f"the model returned {type(value).__name__}; expected a tensor, or several in a tuple or dict"
        )
    return list(values)


def called(model: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The model's outputs. Raises LossError where an embedding does not have what it is asked for."""
    try:
        return outputs_of(model(*tensors))
    except IndexError as error:
        if "out of range in self" not in str(error):  # as an embedding says it; others are the user's
            raise
        given = ", ".join(
            f"input {i}: {int(t.min())} to {int(t.max())}"
            for i, t in enumerate(tensors)
            if not t.is_floating_point() and t.numel()
        )
        raise LossError(f"an embedding is too small for its indices: {error}; {given}") from error


def run_model(model: nn.Module, inputs: Sequence[np.ndarray], device: str | None = None) -> list[np.ndarray]:
    """Outputs in inference mode, in the output's dtype (bfloat16 as float32). The model's mode is put back.
    device: to which the model moves; None: it is on the CPU."""
    if device is not None:
        model.to(device)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            tensors = to_tensors(inputs, float_dtype(model))
            outputs = called(model, [t if device is None else t.to(device) for t in tensors])
            arrays = [(o.float() if o.dtype is torch.bfloat16 else o).cpu().numpy() for o in outputs]
    finally:
        model.train(was_training)
    rows = len(inputs[0])
    for array in arrays:
        if array.ndim == 0 or len(array) != rows:
            raise LossError(f"the model returned shape {array.shape} for {rows} rows; rows must come first")
    return arrays


def devices() -> list[str]:
    """GPUs that torch can use here."""
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def digests(named: Iterable[tuple[str, Tensor]]) -> dict[str, bytes]:
    """8 bytes for each tensor, of its bits."""
    found = {}
    for name, tensor in named:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        found[name] = hashlib.blake2b(data.data, digest_size=8).digest()
    return found


def trained(spec: TrainSpec, weights: Readable) -> nn.Module:
    """A copy of the user's model, made as the ranks made theirs. A model_fn does not touch the RNG."""
    with torch.random.fork_rng(devices=[]):
        model = build_model(spec) if spec.model is None else copy_without_weights(spec.model)
    return read_into(model, weights)


def load_weights(model: nn.Module, weights: bytes) -> nn.Module:
    """Puts `FitResult.weights` into a model of the same class; returns it, in evaluation mode."""
    return read_into(model, BytesIO(weights))
