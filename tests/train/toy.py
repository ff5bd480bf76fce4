"""A third framework, in numpy: linear regression by gradient descent with momentum. What a framework must be,
without anything that torch would do by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvd_core.errors import CheckpointError
from hvd_core.train import TrainSpec, tree
from hvd_core.train.columns import ModelFacts
from hvd_core.train.framework import Batch, Totals
from hvd_core.train.ranks import Ranks
from hvd_core.train.shard import Shard


class Linear:
    """y = x @ weight + bias, as the user's model."""

    def __init__(self, width: int):
        self.weight, self.bias = np.zeros(width), np.zeros(1)


class ToyFramework:
    """spec.optimizer() gives the rate; the loss is the mean squared error, `noise` in spec.loss() shakes each
    step by random numbers of this rank."""

    weights_file = "weights.safetensors"
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

    def facts(self, spec: TrainSpec) -> ModelFacts:
        return ModelFacts(("x",), 1, False, "float64", (False,), "Linear")

    def prepare(self, spec: TrainSpec, ranks: Ranks, shard: Shard) -> None:
        self.model, self._ranks, self._rate = spec.model, ranks, float(spec.learning_rate or 0.1)
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
            error = self._errors(batch)
            shaken = batch.inputs[0] + self._noise * self._random.normal(size=batch.inputs[0].shape)
            gradients = [2 * shaken.T @ error, 2 * error.sum(keepdims=True)]
            for p, v, g in zip(self._parameters(), self._speed, gradients, strict=True):
                g = self._ranks.sum(np.ascontiguousarray(g), "gradient") / batch.global_rows
                v *= 0.9
                v += g
                p -= self._rate * v
            totals.add("loss", float(error @ error), batch.rows)
            totals.rows += batch.rows
            totals.steps += 1

    def _errors(self, batch: Batch) -> np.ndarray:
        return self.predict(batch.inputs)[0] - batch.labels[0]

    def evaluate(self, batches: Iterator[Batch]) -> Totals:
        totals = Totals()
        for batch in batches:
            error = self._errors(batch)
            totals.add("loss", float(error @ error), batch.rows)
            totals.rows += batch.rows
        return totals

    def end_epoch(self, logs: dict[str, float]) -> None:
        self._rate *= 0.9

    def predict(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [inputs[0] @ self.model.weight + self.model.bias]

    def digests(self) -> dict[str, bytes]:
        return {"weight": self.model.weight.tobytes()[:8], "bias": self.model.bias.tobytes()[:8]}

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
