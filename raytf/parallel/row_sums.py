"""Warns of a user's `train_step` whose loss is visibly no mean over rows, in the graph of the step.

Such a loss is a sum over rows by a constant, or takes rows by their position in the batch. Each worker has its own
rows, so the gradient differs from that of one process.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from raytf.errors import definition_line
from raytf.logs import warn_user
from raytf.parallel import model_optimizers
from raytf.parallel import step as step_module

_PASSED = ("Identity", "Cast", "Neg", "AddV2", "Add", "AddN", "Sub", "Reshape", "Squeeze")
_SCALED = ("Mul", "RealDiv", "DivNoNan")
_BY_VALUE = (
    *_PASSED,
    *_SCALED,
    "Square",
    "Abs",
    "Exp",
    "Log",
    "Log1p",
    "Sqrt",
    "Relu",
    "Maximum",
    "Minimum",
    "Pow",
    "SelectV2",
)
_SUM, _PART = "is a sum over rows", "takes rows by their position in the batch"


class RowSums:
    """The check of one trace of a model's `train_step`.

    Args:
        model: The model.
        data: The batch that the step gets.
    """

    def __init__(self, model, data: Any):
        self._method, self._named = type(model).train_step, model.__dict__.setdefault("_raytf_named", set())
        self._leaves = [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if hasattr(leaf, "consumers")]
        self._reached: set = set()

    @classmethod
    def create(cls, model, data: Any) -> RowSums | None:
        """Returns the check, or None in eager mode, and for Keras' own step."""
        return cls(model, data) if model_optimizers.is_own(model, "train_step") and not tf.executing_eagerly() else None

    def check(self, target: Any) -> None:
        """Warns if a loss that a tape differentiates is no mean over rows."""
        step = step_module.current()
        if step is None or step.is_nested() or self._method in self._named:
            return
        self._reach()
        scalars = [t for t in tf.nest.flatten(target) if isinstance(t, tf.Tensor) and t.shape.rank == 0]
        fault = next(filter(None, (self._fault_of(step, t) for t in scalars)), None)
        fault = fault or (_PART if any(self._cuts(step, leaf) for leaf in self._leaves) else None)
        if fault is not None:
            self._warn(fault)

    def _warn(self, fault: str) -> None:
        self._named.add(self._method)
        warn_user(
            f"train_step ({definition_line(self._method)}): its loss {fault}, and each worker has its own rows, so "
            "that weights differ from those of one process. Take a mean over all rows of the batch, or compute the "
            "loss in compute_loss or in a keras.losses.Loss, which have the rows of all workers",
        )

    def _reach(self) -> None:
        """Finds the operations that depend on the batch."""
        pending = [op for leaf in self._leaves for op in leaf.consumers()]
        while pending:
            op = pending.pop()
            if op not in self._reached:
                self._reached.add(op)
                pending += [consumer for output in op.outputs for consumer in output.consumers()]

    def _depends(self, tensor) -> bool:
        return tensor.op in self._reached or any(tensor is leaf for leaf in self._leaves)

    def _has_rows(self, step, tensor) -> bool:
        """Returns whether a tensor's first dimension is that of the batch, as far as its shape shows."""
        return bool(tensor.shape.rank) and tensor.shape[0] in (None, step.known_rows) and self._depends(tensor)

    def _fault_of(self, step, loss) -> str | None:
        """Returns why a scalar is no mean over rows, or None if it may be one."""
        pending, seen = [loss], set()
        while pending:
            tensor = pending.pop()
            if id(tensor) in seen or not self._depends(tensor) or step.is_whole(tensor):
                continue
            seen.add(id(tensor))
            op = tensor.op
            if any(map(step.is_whole, op.inputs)):
                continue
            if op.type in _PASSED or (op.type in _SCALED and sum(map(self._depends, op.inputs)) == 1):
                pending += op.inputs
            elif op.type in ("Sum", "Mean") and self._reduces_rows(step, op):
                parts = self._elementwise(step, op.inputs[0])
                if parts is not None and any(self._is_cut(step, part.op) for part in parts):
                    return _PART if op.type == "Mean" else _SUM
                if parts is not None and op.type == "Sum":
                    return _SUM
            elif op.type in ("Sum", "Mean"):
                pending.append(op.inputs[0])
            elif self._is_cut(step, op):
                return _PART
        return None

    def _reduces_rows(self, step, op) -> bool:
        axes = tf.get_static_value(op.inputs[1])
        rank = op.inputs[0].shape.rank
        return axes is not None and self._has_rows(step, op.inputs[0]) and 0 in {int(a) % rank for a in axes.ravel()}

    def _elementwise(self, step, values) -> list | None:
        """Returns the tensors that values are computed from row by row; None if the rows' number may divide them."""
        tensors, pending = [], [values]
        while pending:
            tensor = pending.pop()
            if step.is_whole(tensor) or any(map(step.is_whole, tensor.op.inputs)):
                return None
            tensors.append(tensor)
            if tensor.op.type not in _BY_VALUE:
                continue
            for given in tensor.op.inputs:
                if self._has_rows(step, given):
                    pending.append(given)
                elif self._depends(given):
                    return None
        return tensors

    def _cuts(self, step, leaf) -> bool:
        return any(self._is_cut(step, op) for op in leaf.consumers())

    def _is_cut(self, step, op) -> bool:
        """Returns whether an operation takes rows by their position."""
        if op.type in ("Split", "SplitV"):
            axis = tf.get_static_value(op.inputs[0 if op.type == "Split" else 2])
            values = op.inputs[1 if op.type == "Split" else 0]
            return axis is not None and len(op.outputs) > 1 and axis == 0 and self._has_rows(step, values)
        if op.type == "StridedSlice" and self._has_rows(step, op.inputs[0]):
            masks = [op.get_attr(f"{name}_mask") & 1 for name in ("begin", "end", "ellipsis", "new_axis")]
            strides = tf.get_static_value(op.inputs[3])
            complete = masks[0] and masks[1] and (strides is None or strides[0] == 1)
            return not (complete or masks[2] or masks[3])
        return False
