"""The torch implementation of `Framework`: one optimizer step for each batch, equal to one on the joined
batch."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import CheckpointError, InvalidArgument, LossError
from ..torch.batchnorm import SyncBatchNorm
from . import torch_model, torch_store
from .columns import ModelFacts
from .framework import OPTIONAL, RANK_STRIDE, Batch, Readable, Totals
from .order import micro_batches
from .ranks import Ranks
from .shard import Shard
from .spec import TrainSpec
from .torch_model import (
    build_model,
    build_optimizer,
    called,
    digests,
    float_dtype,
    to_tensors,
)
from .torch_objective import Objective
from .torch_rate import LearningRate
from .torch_state import check_same_model, read_weights, to_plain, to_torch, weights_bytes

#: The loop reduces by `synchronize()` once a step, whatever the number of backward passes before it.
_NEVER = 1 << 30


class TorchFramework:
    """Not thread-safe. `model` and `optimizer` are the user's own objects, trained in place."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    name = "torch"
    supports = OPTIONAL
    #: The first optimizer imports torch._dynamo, which takes as long as torch itself.
    preload = ("torch", "torch._dynamo", "hvd_core.torch", "hvd_core.train.torch_loop")
    weights_file = "weights.safetensors"
    pyfunc = "hvd_core.train.torch_export"

    # -- without ranks --

    def facts(self, spec: TrainSpec, *, to_train: bool = True) -> ModelFacts:
        return torch_model.facts(spec, to_train)

    def trained(self, spec: TrainSpec, weights: Readable) -> nn.Module:
        return torch_model.trained(spec, weights)

    def predict(
        self, model: nn.Module, inputs: Sequence[np.ndarray], device: str | None = None
    ) -> list[np.ndarray]:
        return torch_model.run_model(model, inputs, device)

    def devices(self) -> list[str]:
        return torch_model.devices()

    def save_objects(self, objects: Mapping[str, Any], tensors_path: Path) -> bytes:
        return torch_store.save_objects(objects, tensors_path)

    def load_objects(self, data: bytes, tensors_path: Path | None) -> dict[str, Any]:
        return torch_store.load_objects(data, tensors_path)

    # -- prepare --

    def prepare(self, spec: TrainSpec, ranks: Ranks, shard: Shard) -> None:
        """Seeds torch with `spec.seed` before a model_fn runs; afterwards ranks other than 0 go on with a
        stream of their own, so rank 0 (and N = 1) is plain torch after `torch.manual_seed(seed)`."""
        if spec.accumulate_steps > 1 and spec.sync_batchnorm:
            raise InvalidArgument("accumulate_steps > 1 does not work with sync_batchnorm=True")
        self.spec, self._ranks, self._shard = spec, ranks, shard
        per_rank = spec.batch_size or -(-(spec.global_batch_size or 1) // ranks.size)
        self._micro_rows = max(1, per_rank)
        torch.manual_seed(spec.seed)
        self.model = build_model(spec)
        if spec.sync_batchnorm and ranks.size > 1:
            self.model = SyncBatchNorm.convert_sync_batchnorm(self.model)
        self.optimizer = build_optimizer(spec, self.model)
        if ranks.rank:
            torch.manual_seed(spec.seed + RANK_STRIDE * ranks.rank)
        self._dtype = float_dtype(self.model)
        self._amp_dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[spec.precision]
        self._scaler = torch.amp.GradScaler("cpu") if spec.precision == "fp16" else None
        self._objective = Objective(spec, ranks, shard)
        self._rate = LearningRate(spec, self.optimizer, ranks.size)
        if ranks.size > 1:
            self._distribute()
        self._ema = None if spec.ema_decay is None else [p.detach().clone() for p in self.model.parameters()]
        self._rows_since_sync = 0

    def _distribute(self) -> None:
        from .. import torch as hvd

        state = {k: _real(v) for k, v in self.model.state_dict().items() if isinstance(v, Tensor)}
        hvd.broadcast_parameters(state, root_rank=0)
        wire = self.spec.wire_dtype
        hvd.DistributedOptimizer(
            self.optimizer,
            named_parameters=self.model.named_parameters(),
            compression=hvd.Compression.none if wire is None else getattr(hvd.Compression, wire),
            backward_passes_per_step=_NEVER,
            op=hvd.Sum,
            sparse_as_dense=True,
        )

    def bind_outputs(self, count: int) -> None:
        self._objective.bind(count)

    @property
    def names(self) -> list[str]:
        return self._objective.names

    @property
    def loss_weights(self) -> dict[str, float]:
        return self._objective.loss_weights

    @property
    def learning_rate(self) -> float:
        return self._rate.used

    @property
    def needs_pairs(self) -> bool:
        return any(
            isinstance(m, _BatchNorm) and not isinstance(m, SyncBatchNorm) for m in self.model.modules()
        )

    # -- train --

    def train_epoch(self, batches: Iterator[Batch], epoch: int, steps: int, totals: Totals) -> None:
        self.model.train()
        for batch in batches:
            self._rate.before_step(epoch, batch.step, steps)
            try:
                self._step(batch, totals)
            except LossError as error:
                where = f"rank {self._ranks.rank}, epoch {epoch}, step {batch.step}"
                raise LossError(f"{where}: {error}") from error.__cause__
            totals.rows += batch.rows
            totals.steps += 1
            self._rows_since_sync += batch.rows
        start = time.perf_counter()
        self._sync_buffers()
        totals.communication_s += time.perf_counter() - start

    def _step(self, batch: Batch, totals: Totals) -> None:
        self.optimizer.zero_grad()
        batch = _countable(batch)
        labels, weight = self._objective.labels(batch), _weight(batch)
        bases = self._objective.bases(labels, weight, batch, totals)
        if not bases:
            return  # no gradient anywhere, so no step
        if not batch.rows:
            self._take_part(batch, totals)
        size = self._micro_rows if self.spec.accumulate_steps > 1 else max(batch.rows, 1)
        pairs = size < batch.rows and self.needs_pairs
        for part in micro_batches(batch.rows, size, pairs=pairs):
            outputs = self._forward([x[part] for x in batch.inputs])
            part_weight = None if weight is None else weight[part]
            loss = self._objective.loss(
                outputs, [y[part] for y in labels], part_weight, bases, batch.rows, totals
            )
            if not loss.requires_grad:
                raise LossError("the loss does not depend on the model's parameters: is something detached?")
            self._check_finite(loss, batch)
            self._backward(loss)
        self._apply(totals)

    def _take_part(self, batch: Batch, totals: Totals) -> None:
        """What a rank without rows owes the others: a forward for a synchronised BatchNorm, and its share of
        denominators that follow from the forward."""
        outputs = None
        if self.spec.sync_batchnorm and self._ranks.size > 1:
            outputs = self._forward(batch.inputs)
        loss = self._objective.without_rows(outputs, totals)
        if loss is not None:
            self._backward(loss)

    def _forward(self, inputs: Sequence[np.ndarray]) -> list[Tensor]:
        """Outputs; losses are taken in float32 where the model ran in a smaller type."""
        if self._amp_dtype is None:
            return called(self.model, to_tensors(inputs, self._dtype))
        with torch.autocast("cpu", self._amp_dtype):
            outputs = called(self.model, to_tensors(inputs, self._dtype))
        return [o.float() if o.dtype is self._amp_dtype else o for o in outputs]

    def _backward(self, loss: Tensor) -> None:
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        scaled.backward()

    def _check_finite(self, loss: Tensor, batch: Batch) -> None:
        value = loss.item()
        if math.isfinite(value):
            return
        blocks = [b for b in self._shard.blocks if b.role in ("input", "label")]
        counts = slice(None) if batch.weight is None else batch.weight != 0
        for block, x in zip(blocks, [*batch.inputs, *batch.labels], strict=True):
            if x.dtype.kind == "f" and not np.isfinite(x[counts]).all():
                names = ", ".join(map(repr, block.columns))
                raise LossError(
                    f"the loss is {value}; {block.role} column {names} holds NaN or infinity here"
                )
        if self._scaler is not None and self._scaler.get_scale() > 1.0:
            return  # an overflow of fp16: the scaler skips the step and lowers its scale
        raise LossError(
            f"the loss is {value}, from finite inputs and labels: is the learning rate too large?"
        )

    def _apply(self, totals: Totals) -> None:
        """Reduce, unscale, clip, step: in this order, so that all ranks see the same values."""
        if self._ranks.size > 1:
            start = time.perf_counter()
            self.optimizer.synchronize()  # type: ignore[attr-defined]
            totals.communication_s += time.perf_counter() - start
        if self._scaler is not None:
            self._scaler.scale(torch.zeros(()))  # a rank without rows has not used it yet
            self._scaler.unscale_(self.optimizer)
        if self.spec.grad_clip_norm is not None:
            params = [p for g in self.optimizer.param_groups for p in g["params"]]
            torch.nn.utils.clip_grad_norm_(params, self.spec.grad_clip_norm)
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self._rate.after_step()
        if self._ema is not None:
            assert self.spec.ema_decay is not None
            with torch.no_grad():
                for mean, p in zip(self._ema, self.model.parameters(), strict=True):
                    mean.lerp_(p, 1.0 - self.spec.ema_decay)

    def end_epoch(self, logs: dict[str, float]) -> None:
        self._rate.after_epoch(logs)

    def _sync_buffers(self) -> None:
        """Floating buffers become their mean over ranks, weighted by the rows each has seen since the last
        time; others are rank 0's. Those that are equal everywhere (constants) stay as they are."""
        rows, self._rows_since_sync = self._rows_since_sync, 0
        buffers = {n: _real(b) for n, b in self.model.named_buffers() if isinstance(b, Tensor)}
        if self._ranks.size == 1 or not buffers:
            return
        own = [rows, {name: digest.hex() for name, digest in digests(buffers.items()).items()}]
        every = [json.loads(d) for d in self._ranks.gather(json.dumps(own).encode(), "buffers")]
        total = sum(rows for rows, _ in every)
        share = rows / total if total else 1.0 / self._ranks.size
        with torch.no_grad():
            for name, buffer in buffers.items():
                if len({bits[name] for _, bits in every}) == 1:
                    continue
                floating = buffer.is_floating_point()
                counts = share > 0 if floating else self._ranks.rank == 0
                wide = buffer.double() if floating else buffer
                # Not a product with 0: what is no number must not reach the others.
                value = (wide * share if floating else wide) if counts else torch.zeros_like(wide)
                data = np.array(value.cpu().numpy()).reshape(-1)
                self._ranks.sum(data, f"buffer.{name}")
                buffer.copy_(torch.from_numpy(data).reshape(buffer.shape))

    # -- evaluate --

    def evaluate(self, batches: Iterator[Batch]) -> Totals:
        totals = Totals()
        was_training = self.model.training
        self.model.eval()
        with self._averaged(), torch.inference_mode():
            for batch in batches:
                outputs = called(self.model, to_tensors(batch.inputs, self._dtype))
                self._objective.evaluate(outputs, self._objective.labels(batch), _weight(batch), totals)
                totals.rows += batch.rows
                totals.steps += 1
        self.model.train(was_training)
        return totals

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """The EMA's values in the parameters, and back."""
        if self._ema is None:
            yield
            return
        params = list(self.model.parameters())
        own = [p.detach().clone() for p in params]
        self._put(self._ema)
        try:
            yield
        finally:
            self._put(own)

    def _put(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(self.model.parameters(), values, strict=True):
                p.copy_(value)

    # -- state --

    def digests(self) -> dict[str, bytes]:
        return digests(self.model.named_parameters())

    def weights(self) -> bytes:
        with self._averaged():
            return weights_bytes(self.model.state_dict())

    def state(self) -> dict[str, Any]:
        """`parameters`: those that are trained, where the weights are running means of them."""
        state = {
            "optimizer": self.optimizer.state_dict(),
            "optimizer_class": type(self.optimizer).__name__,
            "rate": self._rate.state(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "parameters": None if self._ema is None else dict(self.model.named_parameters()),
        }
        plain: dict[str, Any] = to_plain(state)
        return plain

    def own_state(self) -> dict[str, Any]:
        """Between two epochs' ends the ranks' buffers differ, as their random states always do."""
        buffers = dict(self.model.named_buffers()) if self._ranks.size > 1 else {}
        own: dict[str, Any] = to_plain(
            {"rng": torch.get_rng_state(), "buffers": buffers, "rows_since_sync": self._rows_since_sync}
        )
        return own

    def load(self, weights: bytes, state: dict[str, Any], own: dict[str, Any] | None) -> None:
        saved, state = read_weights(weights), to_torch(state)
        check_same_model(self.model, saved)
        here, there = type(self.optimizer).__name__, state["optimizer_class"]
        if here != there:
            raise CheckpointError(f"it holds the state of {there}, but the optimizer is {here}")
        self.model.load_state_dict(saved)
        if self._ema is not None:
            self._ema = [p.detach().clone() for p in self.model.parameters()]
        if state["parameters"] is not None:
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    p.copy_(state["parameters"][name])
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except ValueError as error:
            raise CheckpointError(f"the optimizer does not take its state: {error}") from error
        self._rate.load(state["rate"])
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])
        if own is not None:
            self._load_own(to_torch(own))

    def _load_own(self, own: dict[str, Any]) -> None:
        self._rows_since_sync = own["rows_since_sync"]
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in own["buffers"]:
                    buffer.copy_(own["buffers"][name])
        torch.set_rng_state(own["rng"])


def _real(tensor: Tensor) -> Tensor:
    """The same memory, complex numbers as pairs."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _countable(batch: Batch) -> Batch:
    """Without rows of weight 0 whose inputs are no numbers: their gradient would be 0 * NaN."""
    if batch.weight is None or batch.weight.all():
        return batch
    usable = np.ones(batch.rows, bool)
    for x in batch.inputs:
        if x.dtype.kind == "f":
            usable &= np.isfinite(x.reshape(len(x), -1)).all(axis=1)
    keep = usable | (batch.weight != 0)
    return batch if keep.all() else batch.take(keep)


def _weight(batch: Batch) -> Tensor | None:
    return None if batch.weight is None else torch.from_numpy(batch.weight)
