"""Losses as numerator and denominator, so that N ranks give what one rank gives on the joined batch.

A loss of `torch.nn` is run with reduction="none" and divided by what it would divide by itself, counted
over all ranks: its rows (times the elements of a row), or for class numbers the summed class weights of the
valid targets. The denominator is `elements * base`: `base` depends on labels and weights only, so it is
known before the forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from ..errors import InvalidArgument, LossError
from .spec import TrainSpec

#: Compared with the output element by element; reduced over all elements, or over rows.
_ELEMENTWISE = (
    nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss,
    nn.SoftMarginLoss, nn.KLDivLoss, nn.MultiLabelSoftMarginLoss, nn.HingeEmbeddingLoss,
)  # fmt: skip
#: The label is the number of a class (or a list of them, for MultiLabelMargin).
_CLASS_NUMBERS = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss, nn.MultiLabelMarginLoss)
#: Mean over Σ class weights of the targets that are not ignore_index.
_COUNTED = (nn.CrossEntropyLoss, nn.NLLLoss)
_FUNCTIONS: dict[Any, type[_Loss]] = {
    F.l1_loss: nn.L1Loss, F.mse_loss: nn.MSELoss, F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy: nn.BCELoss, F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.cross_entropy: nn.CrossEntropyLoss, F.nll_loss: nn.NLLLoss, F.kl_div: nn.KLDivLoss,
}  # fmt: skip


#: What the output means that a loss is given; "output" for the others (see predict.HEADS).
_HEADS: tuple[tuple[type[_Loss], str], ...] = (
    (nn.CrossEntropyLoss, "softmax"), (nn.NLLLoss, "log_softmax"), (nn.MultiMarginLoss, "scores"),
    (nn.BCEWithLogitsLoss, "sigmoid"), (nn.BCELoss, "probability"),
)  # fmt: skip


class Term:
    """One loss of one label.

    how: "rows" (mean over rows or elements), "counted" (mean over class weights), "sum", or of a function
    of the user's: "mean", "total", "custom". class_numbers: the label is int64 and has one dimension less
    than the output. head: what the output means to this loss.
    """

    def __init__(self, loss: Callable[..., Any], reduction: str | None, label: str):
        self.loss = loss
        self.label = label
        known = _known(loss)
        self.class_numbers = isinstance(loss if known is None else known, _CLASS_NUMBERS)
        self.head = next((head for kind, head in _HEADS if isinstance(known, kind)), "output")
        self.name = getattr(loss, "__name__", type(loss).__name__)
        self._unreduced: Any = None
        self._per_row = False
        #: The shapes of the last output and label that differed, and what the label's had to become.
        self._matching: tuple[tuple[torch.Size, torch.Size], torch.Size] | None = None
        #: That a loss of torch.nn says of itself; None for others.
        self.reduction = None if known is None else known.reduction
        if known is None:
            self.how = _declared(loss, reduction, self.name)
            return
        self._unreduced = copy.copy(known)
        self._unreduced.reduction = "none"
        self.how = {"mean": "rows", "batchmean": "rows", "sum": "sum"}[_reduction_of(known)]
        self._per_row = known.reduction == "batchmean"
        if self.how == "rows" and isinstance(known, _COUNTED) and known.weight is not None:
            self.how = "counted"

    def see_labels(self, labels: np.ndarray) -> bool:
        """Whether these labels hold an ignored class; if any rank's do, `count_targets` must be called."""
        if self.how != "rows" or not isinstance(self._unreduced, _COUNTED) or labels.dtype.kind == "f":
            return False
        return bool((labels == self._unreduced.ignore_index).any())

    def count_targets(self) -> None:
        self.how = "counted"

    def needs_weights_per_row(self) -> None:
        """Raises when this loss cannot be weighted by rows."""
        if self.how == "custom":
            raise InvalidArgument(
                f"loss {self.name}: loss_reduction='custom' gives no loss per row for sample_weight_col; "
                f"return one "
                "value for each row and say loss_reduction='mean'"
            )

    def base(self, label: Tensor, weight: Tensor | None) -> Tensor | None:
        """This rank's share of the denominator before the elements of a row, float64; None: its number of
        rows."""
        if self.how == "counted" and not label.is_floating_point():
            counts = _target_weights(self._unreduced, label)
            if weight is not None:
                counts = counts * _by_row(weight.double(), counts)
            return counts.sum()
        if self.how == "custom":
            return None
        return None if weight is None else weight.double().sum()

    def match(self, output: Tensor, label: Tensor) -> Tensor:
        """The label in the shape and dtype the loss takes. LossError names both shapes when they do not
        fit."""
        if label.is_floating_point() or not self._takes_numbers():
            label = label.to(output.dtype)
        if self.how == "custom" or output.shape == label.shape:
            return label
        if self._unreduced is None and not label.is_floating_point():
            return label
        shapes = (output.shape, label.shape)
        if self._matching is None or self._matching[0] != shapes:
            self._matching = (shapes, self._wanted_shape(output, label))
        return label.reshape(self._matching[1])

    def _wanted_shape(self, output: Tensor, label: Tensor) -> torch.Size:
        """Of a label that is not of the output's shape; raises LossError."""
        wanted = output.shape
        if not label.is_floating_point() and self.class_numbers and output.ndim > 1:
            wanted = torch.Size((*output.shape[:1], *output.shape[2:]))
        if label.shape == wanted or (label.numel() == wanted.numel() and label.shape[0] == wanted[0]
                                     and _squeezed(label) == _squeezed_shape(wanted)):  # fmt: skip
            return wanted
        raise LossError(
            f"output of shape {tuple(output.shape)} against label {self.label!r} of shape "
            f"{tuple(label.shape)}: "
            f"{self.name} compares them element by element; make the shapes agree (or use "
            "loss_reduction='custom' and return numerator and denominator)" + self._hint(label)
        )

    def _hint(self, label: Tensor) -> str:
        """For a function of the user's that was given a label as floats."""
        if self._unreduced is not None or not label.is_floating_point():
            return ""
        return f". If {self.name} takes class numbers: dtypes={{{self.label!r}: 'int64'}} keeps them whole"

    def _takes_numbers(self) -> bool:
        return self.class_numbers or self._unreduced is None

    def terms(self, output: Tensor, label: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """(numerator, elements): a scalar to differentiate, and what its base is multiplied by. For
        "custom" the second is this rank's whole denominator. `label` has been matched. Raises LossError."""
        if weight is not None and not weight.all():
            # Not a product with 0: what is no number in such a row must reach neither value nor gradient.
            counts = weight != 0
            output, label, weight = output[counts], label[counts], weight[counts]
            if not len(output):
                return output.sum(), 1.0
        if self._unreduced is not None:
            losses = self._call(self._unreduced, output, label)
            # Of labels that are probabilities torch counts rows, also with class weights.
            counts_rows = self.how == "rows" or (self.how == "counted" and label.is_floating_point())
            elements = losses.numel() / max(len(output), 1) if counts_rows and not self._per_row else 1.0
            return _weighted(losses, weight), elements
        value = self._call(self.loss, output, label)
        if self.how == "custom":
            return self._pair(value)
        value = self._tensor(value)
        rows = len(output)
        if value.ndim and len(value) == rows:
            return _weighted(value, weight), value.numel() / max(rows, 1)
        if value.numel() != 1:
            raise LossError(
                f"loss {self.name} returned shape {tuple(value.shape)} for {rows} rows, not a scalar"
            )
        if weight is not None:
            raise LossError(
                f"loss {self.name} returned a scalar, but sample_weight_col needs one value for each of "
                f"the {rows} "
                "rows: return the unreduced loss"
            )
        value = value.reshape(())
        return (value * rows if self.how == "mean" else value), 1.0

    def plain(self, output: Tensor, label: Tensor) -> Tensor:
        """The user's own call, untouched (not for "custom")."""
        value = self._tensor(self._call(self.loss, output, label))
        if value.numel() != 1:
            if self._unreduced is None and value.ndim and len(value) == len(output):
                return value.mean() if self.how == "mean" else value.sum()
            raise LossError(
                f"loss {self.name} returned shape {tuple(value.shape)} for {len(output)} rows, not a scalar"
            )
        return value.reshape(()) if value.ndim else value

    def _call(self, loss: Callable[..., Any], output: Tensor, label: Tensor) -> Any:
        """What the user's function raises stays as it is, apart from labels that came in another dtype."""
        try:
            return loss(output, label)
        except (RuntimeError, IndexError) as error:
            known, hint = self._unreduced is not None, self._hint(label)
            if known or (hint and any(word in str(error) for word in ("Long", "Float", "Double", "dtype"))):
                raise LossError(
                    f"loss {self.name} of label column {self.label!r} ({_range(label)}) with an output of "
                    f"shape {tuple(output.shape)}: {error}{hint}"
                ) from error
            raise

    def _tensor(self, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise LossError(f"loss {self.name} returned {type(value).__name__} {value!r}, not a tensor")
        return value

    def _pair(self, value: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise LossError(
                f"loss {self.name}: with loss_reduction='custom' it must return (numerator, denominator), "
                f"not "
                f"{type(value).__name__}"
            )
        numerator = self._tensor(value[0])
        if numerator.numel() != 1:
            raise LossError(
                f"loss {self.name} returned a numerator of shape {tuple(numerator.shape)}, not a scalar"
            )
        denominator = torch.as_tensor(value[1], dtype=torch.float64).detach().reshape(())
        return numerator.reshape(()), denominator


def terms_for(spec: TrainSpec) -> list[Term]:
    """One for each label. Raises InvalidArgument for a loss whose reduction over ranks is not known."""
    losses = spec.losses if len(spec.losses) > 1 else spec.losses * len(spec.label_cols)
    terms = [
        Term(loss, spec.loss_reduction, name) for loss, name in zip(losses, spec.label_cols, strict=True)
    ]
    asked = spec.loss_reduction
    own = [t.reduction for t in terms]
    if asked is not None and None not in own and set(own) != {asked}:
        raise InvalidArgument(
            f"loss_reduction={asked!r} beside {terms[0].name}, which reduces by {own[0]!r} itself: "
            f"leave it out, or give the loss itself another reduction=..."
        )
    return terms


def _known(loss: Any) -> _Loss | None:
    """The torch loss this is, if it behaves as torch defines it."""
    if not isinstance(loss, nn.Module):
        return _FUNCTIONS[loss]() if callable(loss) and _hashable(loss) and loss in _FUNCTIONS else None
    for kind in (*_ELEMENTWISE, *_CLASS_NUMBERS):
        if isinstance(loss, kind):
            return loss if type(loss).forward is kind.forward else None
    if isinstance(loss, _Loss) and type(loss).__module__.startswith("torch.nn"):
        raise InvalidArgument(
            f"loss {type(loss).__name__} takes more than (output, label); wrap it in a function and say "
            f"how its value "
            "is reduced: loss_reduction='mean', 'sum' or 'custom'"
        )
    return None


def _hashable(value: Any) -> bool:
    return getattr(type(value), "__hash__", None) is not None


def _reduction_of(loss: _Loss) -> str:
    if loss.reduction == "none":
        raise InvalidArgument(
            f"loss {type(loss).__name__}(reduction='none') gives no scalar; use 'mean' or 'sum'"
        )
    return str(loss.reduction)


def _declared(loss: Any, reduction: str | None, name: str) -> str:
    if reduction is None:
        raise InvalidArgument(
            f"loss {name} is not one of torch.nn's losses, so say what it returns: loss_reduction='mean' "
            f"(over its "
            "rows), 'sum', or 'custom' (a pair: numerator, denominator)"
        )
    return "total" if reduction == "sum" else reduction


def _target_weights(loss: Any, label: Tensor) -> Tensor:
    """For each target its class weight, 0 where it is ignored; float64."""
    valid = label != loss.ignore_index
    if loss.weight is None:
        return valid.double()
    return loss.weight.double()[label.clamp(0, len(loss.weight) - 1)] * valid


def _weighted(losses: Tensor, weight: Tensor | None) -> Tensor:
    return losses.sum() if weight is None else (losses * _by_row(weight.to(losses.dtype), losses)).sum()


def _range(label: Tensor) -> str:
    return f"{label.dtype}, {label.min().item():g} to {label.max().item():g}" if label.numel() else "no rows"


def _by_row(weight: Tensor, like: Tensor) -> Tensor:
    return weight.reshape(-1, *[1] * (like.ndim - 1))


def _squeezed(tensor: Tensor) -> Sequence[int]:
    return _squeezed_shape(tensor.shape)


def _squeezed_shape(shape: Sequence[int]) -> Sequence[int]:
    """Without a last dimension of 1 after the rows."""
    return tuple(shape[:-1]) if len(shape) == 2 and shape[1] == 1 else tuple(shape)
