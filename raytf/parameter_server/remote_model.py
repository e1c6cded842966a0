"""A Keras model with variables on parameter servers, for steps that workers make asynchronously.

The coordinator has the plain model. Each variable is copied into one or more Keras variables on the servers, as the
partitioner divides its rows. Workers compute with these instead of the model's variables. Their optimizer updates them
by additions, which a server executes one at a time. `pull` and `push` copy values between model and servers.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raytf.compat import keras_objects
from raytf.errors import ConfigError

# Step of a seed generator's counter between two training steps: more than a model draws in one.
_DRAWS = 1 << 16
# Types of an optimizer's attributes that are plain settings, and not variables.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.number, types.FunctionType)


class RemoteModel:
    """A Keras model with variables on parameter servers.

    Args:
        model: A compiled and built model, outside of any strategy.
        strategy: A `tf.distribute.ParameterServerStrategy`.
        partitioner: Function `partitioner(shape, dtype)` that returns the number of parts along each axis, as
            `tf.distribute.experimental.partitioners`. None leaves variables whole. Only rows are partitioned.

    Attributes:
        parts: The server variables of each variable of the model, by its id.

    Raises:
        ConfigError: Workers cannot train the model asynchronously.
    """

    def __init__(self, model, strategy, partitioner: Callable | None = None):
        self._model, self._strategy = model, strategy
        check_model(model)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        self._trainable = list(model.trainable_variables)
        seeds = {id(v) for v in _seed_states(model)}
        self._seeds = [(v, np.array(v)) for v in model.non_trainable_variables if id(v) in seeds]
        self._states = [v for v in model.non_trainable_variables if id(v) not in seeds]
        self.parts: dict[int, list] = {}
        with strategy.scope():
            for variable in (*self._trainable, *self._states):
                self.parts[id(variable)] = self._variables_of_server(variable, partitioner)
            self._optimizer = _copies(model.optimizer)
            shards = [part for v in self._trainable for part in self.parts[id(v)]]
            created = _built_model(self._optimizer, shards)
        self._decay_as_the_models()
        iterations = self._optimizer.iterations
        # Keras reads, adds and writes, which loses steps if several workers do so
        iterations.assign_add = lambda value: iterations.value.assign_add(tf.cast(value, iterations.dtype))
        self._tables = _tables(model)
        slots = self._matched(created)
        for variable, parts in slots:
            _write(parts, np.array(variable))
        # each variable of the model and its optimizer, with its server variables
        self._pairs = [*((v, self.parts[id(v)]) for v in (*self._trainable, *self._states)), *slots]
        self._versions = [np.array(variable) for variable, _ in self._pairs]
        if any(len(parts) > 1 for parts in self.parts.values()) and self._optimizer.clipnorm is not None:
            raise ConfigError(
                "clipnorm looks at whole gradients, and a partitioned variable has one for each part",
                f"clipnorm={self._optimizer.clipnorm} with a variable_partitioner",
                "Use global_clipnorm or clipvalue",
            )

    def _decay_as_the_models(self) -> None:
        """Excludes all parts of a variable from weight decay if the model's optimizer excludes the variable."""
        whole = {
            keras_objects.key_of(self._optimizer, part): variable
            for variable in self._trainable
            for part in self.parts[id(variable)]
        }
        keras_objects.with_decay_choice(
            self._optimizer,
            lambda part: keras_objects.decays(
                self._model.optimizer, whole[keras_objects.key_of(self._optimizer, part)].value
            ),
        )

    def _variables_of_server(self, variable, partitioner) -> list:
        value = np.asarray(variable)
        parts = 1
        if partitioner is not None and value.ndim and variable.trainable:
            parts = int(partitioner(tf.TensorShape(value.shape), tf.as_dtype(variable.dtype))[0])
        if parts > 1 and variable.constraint is not None:
            raise ConfigError(
                "A constraint looks at a whole variable, and a partitioned one is in parts",
                f"{type(variable.constraint).__name__} of {variable.path}",
                "Leave the constraint out, or partition larger variables only",
            )
        shards = []
        for i, part in enumerate(np.array_split(value, parts)):
            shard = keras.Variable(
                lambda shape, dtype, part=part: tf.constant(part, dtype),
                shape=part.shape,
                dtype=variable.dtype,
                trainable=variable.trainable,
                name=variable.name if parts == 1 else f"{variable.name}_part{i}",
            )
            shard.constraint = variable.constraint
            shards.append(shard)
        return shards

    def _matched(self, created: list[tuple]) -> list[tuple[Any, list]]:
        """Returns (variable of the model's optimizer, its server variables) for each variable."""
        whole = _built_model(_copies(self._model.optimizer), self._trainable)
        first = np.cumsum([0, *(len(self.parts[id(v)]) for v in self._trainable)])
        owner = {shard: i for i, start in enumerate(first[:-1]) for shard in range(start, first[i + 1])}
        by_key: dict[tuple, list] = {}
        unkeyed = []
        for key, variable in created:
            if key is None:
                unkeyed.append(variable)
            else:
                by_key.setdefault((owner[key[0]], key[1]), []).append(variable)
        unkeyed = iter(unkeyed)
        return [
            (variable_of_model, [next(unkeyed)] if key is None else by_key[key])
            for variable_of_model, (key, _) in zip(self._model.optimizer.variables, whole, strict=True)
        ]

    def steps(self) -> int:
        """Returns the number of steps that workers have made."""
        return int(self._optimizer.iterations.value.numpy())

    def pull(self) -> None:
        """Copies the servers' values into the model and its optimizer."""
        for i, (variable, parts) in enumerate(self._pairs):
            self._versions[i] = _joined(parts)
            variable.assign(self._versions[i])

    def push(self) -> None:
        """Copies variables of the model that have changed since the last `pull` to the servers."""
        for seen, (variable, parts) in zip(self._versions, self._pairs, strict=True):
            current = np.array(variable)
            if not np.array_equal(seen, current):
                _write(parts, current)

    def train_step(self, data, number: tf.Tensor, totals: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Makes a step on a worker, which updates the servers' variables.

        Args:
            data: A batch, as for `fit`.
            number: Number of the step in the run, for random numbers, an int64 tensor.
            totals: Values of the model's metric variables before the step.

        Returns:
            Their values after the step.
        """
        shards = [part for v in self._trainable for part in self.parts[id(v)]]
        raw = [shard.value for shard in shards]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for variable in raw:
                tape.watch(variable)
            loss, totals = self._forward(data, number, totals, training=True)
        self._optimizer.apply(tape.gradient(loss, raw), shards)
        return totals

    def test_step(self, data, number: tf.Tensor, totals: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Makes a step of the validation on a worker, with the arguments of `train_step`."""
        return self._forward(data, number, totals, training=False)[1]

    def _forward(self, data, number, totals, training: bool):
        model = self._model
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with _lookup(self._tables, self.parts):
            tables = {id(keras_objects.table_of(layer)) for layer in self._tables}
            mapping = [(v, self._read(v)) for v in self._trainable if id(v) not in tables]
            states = [(v, self._read(v)) for v in self._states]
            seeds = [(v, _drawn(value, number)) for v, value in self._seeds]
            metrics = list(zip(model.metrics_variables, totals, strict=True))
            with _TableScope([*mapping, *states, *seeds, *metrics], tables, self._read) as scope:
                y_pred = model(x, training=training) if keras_objects.takes_training(model) else model(x)
                loss = keras_objects.step_loss(model, x=x, y=y, y_pred=y_pred, sample_weight=weights, training=training)
                first = next(leaf for leaf in tf.nest.flatten(x) if leaf is not None)
                rows = first.nrows() if isinstance(first, tf.RaggedTensor) else tf.shape(first)[0]
                keras_objects.loss_tracker_of(model).update_state(loss, sample_weight=rows)
                model.compute_metrics(x, y, y_pred, sample_weight=weights)
        if training:
            for variable, initial in states:
                self._add(variable, initial, scope.get_current_value(variable))
        return loss, [tf.convert_to_tensor(scope.get_current_value(v)) for v in model.metrics_variables]

    def _read(self, variable) -> tf.Tensor:
        parts = [tf.convert_to_tensor(part.value) for part in self.parts[id(variable)]]
        return parts[0] if len(parts) == 1 else tf.concat(parts, 0)

    def _add(self, variable, old_value, new_value) -> None:
        """Adds the change of moving statistics in a step, so that workers do not overwrite each other's changes."""
        if new_value is old_value:
            return
        (part,) = self.parts[id(variable)]
        if variable.dtype.startswith(("float", "bfloat")):
            part.value.assign_add(new_value - old_value)
        else:
            part.value.assign(new_value)


def check_model(model) -> None:
    """Raises ConfigError if workers cannot train the model asynchronously."""
    base = keras.Model
    overridden = [name for name in ("train_step", "test_step") if getattr(type(model), name) is not getattr(base, name)]
    optimizer = model.optimizer
    for wrong, received, fix in (
        (
            overridden,
            f"a model with a {' and a '.join(overridden)} of its own",
            "Write a TensorflowTrainer loop for it",
        ),
        (hasattr(optimizer, "inner_optimizer"), "a LossScaleOptimizer", "Train in float32 or mixed_bfloat16"),
        (optimizer.use_ema, "use_ema=True", "Leave use_ema out"),
        (optimizer.gradient_accumulation_steps, "gradient_accumulation_steps", "Use a larger batch_size"),
    ):
        if wrong:
            raise ConfigError("With parameter servers each worker makes a whole step by itself", received, fix)


def _seed_states(model) -> list:
    return [g.state for layer in keras_objects.layers_of(model) for g in keras_objects.seed_generators_of(layer)]


def _drawn(value: np.ndarray, number) -> tf.Tensor:
    """Returns a seed generator's state for a step: the seed, and a counter that no other step uses."""
    return tf.stack([tf.constant(value[0]), tf.constant(value[1]) + tf.cast(number * _DRAWS, value.dtype)])


def _tables(model) -> list:
    """Returns embedding layers whose rows can be looked up on the servers: a step transfers only rows that it needs."""
    return [
        layer
        for layer in keras_objects.layers_of(model)
        if type(layer) is keras.layers.Embedding
        and layer.embeddings_regularizer is None
        and keras_objects.table_of(layer).trainable
        and not layer.lora_enabled
        and not layer.quantization_mode
    ]


@contextlib.contextmanager
def _lookup(layers, parts):
    """Patches embedding layers to read rows from the servers; their gradients are of those rows."""

    def call(layer):
        def looked_up(ids):
            if ids.dtype not in ("int32", "int64"):
                ids = tf.cast(ids, tf.int32)
            shards = [part.value for part in parts[id(keras_objects.table_of(layer))]]
            # shards are split by `numpy.array_split`, as TensorFlow's lookup assumes
            return tf.cast(tf.nn.embedding_lookup(shards, ids), layer.compute_dtype)

        return looked_up

    for layer in layers:
        layer.call = call(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.call


class _TableScope(keras.StatelessScope):
    """A scope that reads a whole table only if something else than its lookup uses it. A tied output does.

    Args:
        state_mapping: As for `keras.StatelessScope`.
        tables: Ids of the tables' variables.
        read: read(variable) returns its value on the servers.
    """

    def __init__(self, state_mapping: list[tuple], tables: set[int], read: Callable):
        super().__init__(state_mapping)
        self._tables, self._read = tables, read

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        return self._read(variable) if value is None and id(variable) in self._tables else value


def _copies(optimizer):
    """Returns an unbuilt copy of an optimizer, with settings that are not in its config."""
    copy = type(optimizer).from_config(optimizer.get_config())
    for name, value in vars(optimizer).items():
        if not name.startswith("_") and name not in ("built", "name") and isinstance(value, _PLAIN):
            setattr(copy, name, value)
    return copy


def _built_model(optimizer, variables) -> list[tuple]:
    """Builds an optimizer, and returns (key, variable) for each of its variables.

    The key is (index of the trained variable, name) for variables that belong to one, else None.
    """
    index = {id(v): i for i, v in enumerate(variables)}
    keys: dict[int, tuple] = {}
    add = optimizer.add_variable_from_reference

    def recorded(reference_variable, name=None, *args, **kwargs):
        copy = add(reference_variable, name, *args, **kwargs)
        keys[id(copy)] = (index[id(reference_variable)], name)
        return copy

    optimizer.add_variable_from_reference = recorded
    try:
        optimizer.build(variables)
    finally:
        del optimizer.add_variable_from_reference
    return [(keys.get(id(v)), v) for v in optimizer.variables]


def _write(parts, value: np.ndarray) -> None:
    for part, rows in zip(parts, np.array_split(value, len(parts)) if len(parts) > 1 else [value], strict=True):
        part.value.assign(rows)


def _joined(parts) -> np.ndarray:
    values = [part.value.numpy() for part in parts]
    return values[0] if len(values) == 1 else np.concatenate(values)
