"""`sparse_updates="lazy"`: an optimizer updates those rows of an `Embedding` that a batch uses, and no others.

Keras' Adam updates the whole table, and squares the gradients of a repeated id one by one. Here the gradients of an id
are summed. The optimizer's own `update_step` gets only the used rows of the table and of its slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from raytf.collectives.communicator import local_replicas
from raytf.compat import keras_objects
from raytf.compat.keras import BaseOptimizer, TFOptimizer
from raytf.compat.patching import patch
from raytf.errors import ConfigError
from raytf.parallel import keras_optimizers, own_loops
from raytf.parallel import step as step_module

_OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "Ftrl")
# Whether it is in force in this process; set by each training.
lazy = False


@patch((keras.layers.Embedding, "call"))
def call(original, self, inputs):
    """Replaces `Embedding.call`: reads the used rows only, as TensorFlow copies a table that it reads as a whole."""
    table = keras_objects.variable_of(keras_objects.table_of(self))  # None as Keras computes shapes
    if not lazy or table is None or getattr(self, "lora_enabled", False) or not isinstance(inputs, tf.Tensor):
        return original(self, inputs)
    ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
    ids = tf.where(ids < 0, ids + table.shape[0], ids)
    return tf.cast(tf.gather(table, ids), self.compute_dtype)


@patch((BaseOptimizer, "_clip_gradients"))
def clip_gradients(original, self, grads):
    """Clips the values of gradients whose ids are unique: other rows are zeros, which change no norm."""
    if not _tables():
        return original(self, grads)
    clipped = original(self, [own_loops.content_of(g) for g in grads])
    return [
        tf.IndexedSlices(c, g.indices, g.dense_shape) if isinstance(g, tf.IndexedSlices) else c
        for c, g in zip(clipped, grads, strict=True)
    ]


@patch((TFOptimizer, "_apply_weight_decay"))
def apply_weight_decay(original, self, variables):
    """Leaves out tables, of which only used rows decay, see `update`."""
    tables = _tables()
    original(self, [v for v in variables if id(v) not in tables])


def _tables() -> frozenset[int]:
    return getattr(step_module.state, "tables", None) or frozenset()


def prepared(optimizer, grads: Sequence, variables: Sequence) -> tuple[list, frozenset[int]]:
    """Returns (gradients with unique ids, ids of the variables that are updated by rows) if it is in force.

    Raises:
        ConfigError: The optimizer, or one of its options, cannot update some rows.
    """
    slices = [isinstance(g, tf.IndexedSlices) for g in grads]
    if not lazy or not any(slices):
        return list(grads), frozenset()
    _check(optimizer)
    tables = frozenset(id(v) for v, by_rows in zip(variables, slices, strict=True) if by_rows)
    return [_merged(g) if by_rows else g for g, by_rows in zip(grads, slices, strict=True)], tables


def _check(optimizer) -> None:
    kind, strategy = type(optimizer), tf.distribute.get_strategy()
    devices = local_replicas(strategy) if tf.distribute.has_strategy() else 1
    options = ("use_ema", "gradient_accumulation_steps", "loss_scale_factor")
    received = [f"{name}={value}" for name in options if (value := getattr(optimizer, name, None))]
    if not keras_optimizers.is_one_of(optimizer, _OPTIMIZERS):
        received = [f"{kind.__name__} ({kind.__module__})"]
    if devices > 1:
        received.append(f"{devices} devices in each worker")
    if received:
        raise ConfigError(
            f'sparse_updates="lazy" is for Keras\' own {", ".join(_OPTIMIZERS)}, without averages, accumulation and '
            "loss scaling, and for one device in each worker",
            ", ".join(received),
            "Use one of them, or leave sparse_updates out",
        )


def of_this_worker(gradient: tf.IndexedSlices, step: step_module.Step | None) -> tf.IndexedSlices:
    """Returns this worker's gradient with unique ids; without any if it has no row, but a placeholder."""
    gradient = _merged(gradient)
    if step is not None and step.partial:
        count = tf.where(step.rows > 0, tf.size(gradient.indices), 0)
        gradient = tf.IndexedSlices(gradient.values[:count], gradient.indices[:count], gradient.dense_shape)
    return gradient


def _merged(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the gradient with the sum of each id's values."""
    step = step_module.current()
    if step is not None and step.is_merged(gradient):
        return gradient
    ids, segments = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, segments, tf.size(ids))
    values.set_shape([None, *gradient.values.shape[1:]])
    return tf.IndexedSlices(values, ids, gradient.dense_shape)


class PartOfVariable:
    """A part of a variable, as a variable for `update_step`.

    Args:
        value: The part as a tensor.
        key: The optimizer's key of the variable; None for a slot.
    """

    def __init__(self, value: tf.Tensor, key=None):
        self.dtype, self.value, self._unique_id = value.dtype, value, key

    def __tf_tensor__(self, dtype=None, name=None) -> tf.Tensor:
        return tf.convert_to_tensor(self.value, dtype)

    def assign(self, value) -> None:
        self.value = tf.cast(value, self.dtype)

    def assign_add(self, value) -> None:
        self.assign(self.value + value)

    def assign_sub(self, value) -> None:
        self.assign(self.value - value)


class _VariableRows(PartOfVariable):
    """Some rows of a variable.

    Args:
        variable: A `tf.Variable` of this process.
        ids: Unique numbers of its rows.
        key: See `PartOfVariable`.
    """

    def __init__(self, variable, ids: tf.Tensor, key=None):
        super().__init__(tf.gather(variable, ids), key)
        self._variable, self._ids = variable, ids

    def store(self) -> None:
        """Writes the rows into the variable."""
        self._variable.scatter_update(tf.IndexedSlices(self.value, self._ids))


def update(optimizer, variable, gradient: tf.IndexedSlices, learning_rate) -> None:
    """Makes an optimizer's update of some rows; called in the context of `extended.update`.

    Args:
        optimizer: An optimizer that `prepared` has accepted.
        variable: The table, a `tf.Variable` of this process.
        gradient: Gradient with unique ids.
        learning_rate: As for `update_step`.
    """
    ids = gradient.indices
    table = _VariableRows(variable, ids, keras_objects.key_of(optimizer, variable))
    slot_variables = keras_objects.slots_of(optimizer, variable)
    slots = {name: _VariableRows(keras_optimizers.local_variable(slot), ids) for name, slot in slot_variables.items()}
    if optimizer.weight_decay is not None and keras_objects.decays(optimizer, variable):
        factor = tf.cast(optimizer.weight_decay, table.dtype) * tf.cast(learning_rate, table.dtype)
        table.assign_sub(table.value * factor)
    with keras_objects.with_slots(optimizer, variable, slots):
        optimizer.update_step(gradient.values, table, learning_rate)
    for rows in (table, *slots.values()):
        rows.store()
