"""A third framework, in numpy: linear regression by gradient descent with momentum. What a framework must be,
without anything that torch would do by itself."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from hvd_core.errors import CheckpointError, InvalidArgument
from hvd_core.train import TrainSpec, tree
from hvd_core.train.columns import ModelFacts
from hvd_core.train.framework import Batch, Readable, Totals
from hvd_core.train.ranks import Ranks
from hvd_core.train.shard import Shard


class Linear:
    """y = x @ weight + bias, as the user's model."""

    def __init__(self, width: int):
        self.weight, self.bias = np.zeros(width), np.zeros(1)


class ToyFramework:
    """spec.optimizer() gives the rate; the loss is the mean squared error, `noise` in spec.loss() shakes each
    step by random numbers of this rank."""

    name = "toy"
    supports = frozenset({"learning_rate", "sample_weight_col"})
    preload = ("tests.train.toy",)
    weights_file = "weights.safetensors"
    pyfunc = None
    needs_pairs = False

    def __init__(self) -> None:
        self.model: Any = None
        self.optimizer: Any = None

    @property
    def names(self) -> list[str]:
        return ["loss"]

    @property
    def loss_weights(self) -> dict[str, float]:
        return {"loss": 1.0}

    @property
    def learning_rate(self) -> float:
        return self._rate

    def facts(self, spec: TrainSpec, *, to_train: bool = True) -> ModelFacts:
        if len(spec.label_cols) > 1:
            raise InvalidArgument("label_cols: toy models have one label")
        return ModelFacts(("x",), 1, False, "float64", (False,), "Linear", ("output",))

    def trained(self, spec: TrainSpec, weights: Readable) -> Linear:
        return self._made(weights.read())

    def _made(self, weights: bytes) -> Linear:
        saved = tree.loads(weights, trust=False)
        model = Linear(len(saved["weight"]))
        model.weight[:], model.bias[:] = saved["weight"], saved["bias"]
        return model

    def predict(
        self, model: Linear, inputs: Sequence[np.ndarray], device: str | None = None
    ) -> list[np.ndarray]:
        return [inputs[0] @ model.weight + model.bias]

    def devices(self) -> list[str]:
        return []

    def save_objects(self, objects: Mapping[str, Any], tensors_path: Path) -> bytes:
        others = {name: value for name, value in objects.items() if name != "model"}
        if "model" in objects:
            model = objects["model"]
            tensors_path.write_bytes(tree.dumps({"weight": model.weight, "bias": model.bias}))
        return bytes(cloudpickle.dumps(others))

    def load_objects(self, data: bytes, tensors_path: Path | None) -> dict[str, Any]:
        objects: dict[str, Any] = pickle.loads(data)
        if tensors_path is not None:
            objects["model"] = self._made(tensors_path.read_bytes())
        return objects

    def prepare(self, spec: TrainSpec, ranks: Ranks, shard: Shard) -> None:
        self.model = spec.model if spec.model_fn is None else spec.model_fn()
        self._ranks, self._rate = ranks, float(spec.learning_rate or 0.1)
        self._noise = float(spec.loss())
        self._random = np.random.default_rng(spec.seed + ranks.rank)
        self._speed = [np.zeros_like(p) for p in self._parameters()]
        for p in self._parameters():
            p[:] = np.frombuffer(ranks.broadcast(p.tobytes(), 0, "start"))

    def _parameters(self) -> list[np.ndarray]:
        return [self.model.weight, self.model.bias]

    def bind_outputs(self, count: int) -> None:
        assert count == 1

    def train_epoch(self, batches: Iterator[Batch], epoch: int, steps: int, totals: Totals) -> None:
        for batch in batches:
            error, weight = self._errors(batch)
            total = self._ranks.sum(np.array([weight.sum()]), "total")[0]
            shaken = batch.inputs[0] + self._noise * self._random.normal(size=batch.inputs[0].shape)
            weighted = weight * error
            gradients = [2 * shaken.T @ weighted, 2 * weighted.sum(keepdims=True)]
            for p, v, g in zip(self._parameters(), self._speed, gradients, strict=True):
                g = self._ranks.sum(np.ascontiguousarray(g), "gradient") / max(total, 1e-300)
                v *= 0.9
                v += g
                p -= self._rate * v
            totals.add("loss", float(weighted @ error), float(weight.sum()))
            totals.rows += batch.rows
            totals.steps += 1

    def _errors(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """And what each counts."""
        error = self.predict(self.model, batch.inputs)[0] - batch.labels[0]
        return error, np.ones(batch.rows) if batch.weight is None else batch.weight

    def evaluate(self, batches: Iterator[Batch]) -> Totals:
        totals = Totals()
        for batch in batches:
            error, weight = self._errors(batch)
            totals.add("loss", float((weight * error) @ error), float(weight.sum()))
            totals.rows += batch.rows
        return totals

    def end_epoch(self, logs: dict[str, float]) -> None:
        self._rate *= 0.9

    def digests(self) -> dict[str, bytes]:
        bits = {"weight": self.model.weight, "bias": self.model.bias}
        return {n: hashlib.blake2b(p.tobytes(), digest_size=8).digest() for n, p in bits.items()}

    def weights(self) -> bytes:
        return tree.dumps({"weight": self.model.weight, "bias": self.model.bias})

    def state(self) -> dict[str, Any]:
        return {"speed": [v.copy() for v in self._speed], "rate": self._rate}

    def own_state(self) -> dict[str, Any]:
        return {"random": self._random.bit_generator.state}

    def load(self, weights: bytes, state: dict[str, Any], own: dict[str, Any] | None) -> None:
        saved = tree.loads(weights, trust=False)
        if saved["weight"].shape != self.model.weight.shape:
            raise CheckpointError("it is of another model: weight has another width")
        self.model.weight[:], self.model.bias[:] = saved["weight"], saved["bias"]
        self._speed, self._rate = [v.copy() for v in state["speed"]], state["rate"]
        if own is not None:
            self._random.bit_generator.state = own["random"]
