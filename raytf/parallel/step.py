"""One replica's step with several workers: its number of rows, and the variables that it changes."""

from __future__ import annotations

import contextlib
import itertools
import threading

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from raytf.collectives.communicator import all_sum, local_replicas, many_replicas
from raytf.compat import keras_objects
from raytf.compat.keras import backend_core
from raytf.compat.patching import patch
from raytf.compat.tensorflow import AggregatingVariable, context

# State of the replica that this thread traces or runs, such as its `step`.
state = threading.local()


class Step:
    """The state of one replica's step while it is traced or runs."""

    def __init__(self, rows: tf.Tensor, partial: bool, shared: frozenset[int] = frozenset(), states=None):
        self.rows = rows  # int32 scalar, number of this replica's real rows
        self.partial = partial  # whether the number of rows may differ between replicas or steps
        self.shared = shared  # ids of shared variables that a replica without rows must not change
        self.states = states  # a `joined_state.States`, or None to warn of no states
        self._global_rows: list[tf.Tensor] = []
        self._alike: dict[int, object] = {}  # by id: tensors with equal values on all workers
        self._drawn: dict[int, object] = {}  # by id: seeds of this worker's random numbers
        self._merged: dict[int, object] = {}  # by id: indices of gradients with unique ids
        self._local: dict[int, object] = {}  # by id: gradients of this worker's rows, for `shards`
        self._whole: dict[int, object] = {}  # by id: values, and factors, of the rows of all workers
        self._complete: set[int] = set()  # ids of variables that a replica without rows changes rightly
        self._by_rows: set[int] = set()  # ids of those that rows have changed
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def note_alike(self, tensor) -> None:
        """Records that a tensor, or the handle of a variable, is equal on all workers."""
        self._alike[id(tensor)] = tensor

    def is_alike(self, tensor) -> bool:
        """Returns whether a tensor was recorded as equal on all workers."""
        return id(tensor) in self._alike

    def note_drawn(self, seed) -> None:
        """Records a seed of random numbers, which each replica has of its own."""
        self._drawn[id(seed)] = seed

    def is_drawn(self, tensor) -> bool:
        """Returns whether a tensor was recorded as a seed."""
        return id(tensor) in self._drawn

    def note_local(self, gradient: tf.Tensor) -> None:
        """Records that a gradient is a tape's own result over this replica's rows, which its optimizer sums."""
        self._local[id(gradient)] = gradient

    def is_local(self, gradient: tf.Tensor) -> bool:
        """Returns whether a gradient was recorded as local."""
        return id(gradient) in self._local

    def note_merged(self, gradient: tf.IndexedSlices) -> None:
        """Records that the ids of a gradient are unique."""
        self._merged[id(gradient.indices)] = gradient.indices

    def is_merged(self, gradient: tf.IndexedSlices) -> bool:
        """Returns whether the ids of a gradient were recorded as unique."""
        return id(gradient.indices) in self._merged

    def note_whole(self, value) -> None:
        """Records that a value, or what is multiplied by it, is that of the rows of all workers."""
        self._whole[id(value)] = value

    def is_whole(self, value) -> bool:
        """Returns whether a value was recorded as that of the rows of all workers."""
        return id(value) in self._whole

    def note_complete(self, variable) -> None:
        """Records a variable whose new value is right in a replica without rows, too."""
        self._complete.add(id(variable))

    def note_changed_by_rows(self, variable) -> None:
        """Records a variable to which a replica without rows gets its old value back."""
        self._by_rows.add(id(variable))

    def is_complete(self, variable) -> bool:
        """Returns whether a variable's new value is right in a replica without rows, too."""
        return id(variable) in self._complete - self._by_rows

    def is_nested(self) -> bool:
        """Returns whether the code that is traced is in a function, condition or loop within the step."""
        return not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is not self._graph

    def is_in_control_flow(self) -> bool:
        """Returns whether the code that is traced is in a condition or loop within the step."""
        graph = tf.compat.v1.get_default_graph() if self.is_nested() else self._graph
        while graph not in (None, self._graph) and not getattr(graph, "is_control_flow_graph", False):
            graph = getattr(graph, "outer_graph", None)
        return graph not in (None, self._graph)

    def global_rows(self) -> tf.Tensor:
        """Returns the rows of all replicas, a float64 scalar of at least 1.

        The first call in a step costs a collective. The result of a branch of `tf.cond` or a body of `tf.while_loop`
        cannot be used outside of it.
        """
        known = next((total for total in self._global_rows if _is_visible(total)), None)
        if known is None:
            (total,) = all_sum([tf.cast(self.rows, tf.float64)])
            known = tf.maximum(total, 1.0)
            self._global_rows.append(known)
        return known

    def upscale(self, dtype) -> tf.Tensor:
        """Returns global rows over this replica's rows, which reverts the later weight of the gradients."""
        factor = tf.cast(tf.math.divide_no_nan(self.global_rows(), tf.cast(self.rows, tf.float64)), dtype)
        self.note_whole(factor)
        return factor

    @property
    def known_rows(self) -> int | None:
        """Number of rows if it is known while the step is traced, at least 1: a placeholder has one row."""
        rows = tf.get_static_value(self.rows)
        return None if rows is None else max(int(rows), 1)

    @property
    def notes(self):
        """Facts about the model's functions, see `step_logs.Notes`; None outside of a model's own step."""
        seen = getattr(state, "seen", None)
        return None if seen is None else seen.notes


def _is_visible(tensor) -> bool:
    """Returns whether the current code may use a tensor: of this graph, of an outer graph, or an eager tensor."""
    if tf.executing_eagerly() or (tf.is_tensor(tensor) and hasattr(tensor, "numpy")):
        return True
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph is not tensor.graph:
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


def current() -> Step | None:
    """Returns the step of `fit` or `evaluate` that this thread traces or runs, or None outside of one."""
    return getattr(state, "step", None)


def is_trial() -> bool:
    """Returns whether a user's function is tried on synthetic rows; see `reduction_probe`."""
    return getattr(state, "trial", False)


@contextlib.contextmanager
def override_state(**values):
    """Sets fields of `state` for the block."""
    previous = {name: getattr(state, name, None) for name in values}
    vars(state).update(values)
    try:
        yield
    finally:
        vars(state).update(previous)


def in_replica_of_many() -> bool:
    """Returns whether this code runs for one replica of several."""
    return not tf.distribute.in_cross_replica_context() and many_replicas(tf.distribute.get_strategy())


def first_leaf(x):
    """Returns the first tensor of a nest of inputs."""
    return next(leaf for leaf in tree.flatten(x) if leaf is not None)


def count_rows(leaf) -> tuple[tf.Tensor, bool]:
    """Returns the number of rows of a batch, and whether it may vary between steps, or be 0."""
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32), True
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32), True
    static = tf.TensorShape(leaf.shape)
    if tf.executing_eagerly() or static.rank is None or not static[0]:
        return tf.shape(leaf)[0], True
    return tf.constant(static[0], tf.int32), False


def local_parts(strategy, data):
    """Splits a batch by rows for the replicas of this process.

    Keras passes the whole batch of `train_on_batch` to each replica: counts and sums would be multiplied.

    Args:
        strategy: A `tf.distribute.Strategy`.
        data: Nest of tensors or arrays with the rows first, and other values; or data that is split already.
    """
    replicas = local_replicas(strategy) if many_replicas(strategy) else 1
    leaves = [leaf for leaf in tree.flatten(data) if len(getattr(leaf, "shape", ()))]
    if replicas == 1 or not leaves or any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves):
        return data
    rows = int(leaves[0].dense_shape[0] if isinstance(leaves[0], tf.SparseTensor) else leaves[0].shape[0])
    edges = np.cumsum([0, *map(len, np.array_split(np.empty(rows), replicas))]).tolist()

    def divided(leaf):
        if not len(getattr(leaf, "shape", ())):
            return leaf
        parts = (_rows_of(leaf, start, stop) for start, stop in itertools.pairwise(edges))
        return strategy.experimental_distribute_values_from_function(lambda _: next(parts))

    return tree.map_structure(divided, data)


def _rows_of(leaf, start: int, stop: int) -> tf.Tensor | tf.RaggedTensor | tf.SparseTensor:
    if not isinstance(leaf, tf.SparseTensor):
        part = leaf[start:stop]
        return part if isinstance(part, tf.RaggedTensor) else tf.convert_to_tensor(part)
    inner = leaf.dense_shape[1:]
    begin = tf.concat([tf.constant([start], tf.int64), tf.zeros_like(inner)], 0)
    return tf.sparse.slice(leaf, begin, tf.concat([tf.constant([stop - start], tf.int64), inner], 0))


def with_placeholder(data, rows):
    """Replaces an empty batch by one row of zeros: layers and losses may not support zero rows."""

    def fill(tensor):
        if isinstance(tensor, tf.SparseTensor):  # without rows it has no values
            size = tf.concat([tf.maximum(tensor.dense_shape[:1], 1), tensor.dense_shape[1:]], 0)
            filled = tf.SparseTensor(tensor.indices, tensor.values, size)
            filled.set_shape([None, *tensor.shape[1:]])
            return filled
        if isinstance(tensor, tf.RaggedTensor):
            no_values = lambda: tf.zeros([2], tensor.row_splits.dtype)
            splits = tf.cond(rows > 0, lambda: tensor.row_splits, no_values)
            return tf.RaggedTensor.from_row_splits(tensor.values, splits, validate=False)
        if not isinstance(tensor, tf.Tensor) or tensor.shape.rank == 0:
            return tensor

        def one_row():
            return tf.zeros(tf.concat([[1], tf.shape(tensor)[1:]], 0), tensor.dtype)

        filled = tf.cond(rows > 0, lambda: tensor, one_row)
        return filled if tf.executing_eagerly() else tf.ensure_shape(filled, tensor.shape)

    return tree.map_structure(fill, data)


def step_variables(model) -> list:
    """Returns variables that a forward pass updates: metrics and moving statistics (no frozen weights).

    It omits variables of synchronized layers, which follow the rows of all replicas, and variables that are joined at
    assignment. It also omits integers. A step counts as one on every replica, and a condition on the count must hold on
    all or none.
    """
    unsynchronized = [layer for layer in keras_objects.layers_of(model) if not getattr(layer, "synchronized", False)]
    states = [
        v
        for layer in unsynchronized
        for v in keras_objects.own_variables(layer)[1]
        if keras.backend.is_float_dtype(v.dtype) and not is_joined(v)
    ]
    return list({id(v): v for v in (*model.metrics_variables, *states)}.values())


@patch((backend_core.Variable, "_initialize_with_initializer"))
def initialize(original, self, initializer):
    """Replaces `Variable._initialize_with_initializer`: initializes variables of a traced step at once.

    An optimizer that was not built before creates its slots there. TensorFlow would broadcast the chief's initial
    values in a condition inside the step. Such collectives lose their keys there.
    """
    if tf.executing_eagerly() or not in_replica_of_many():
        original(self, initializer)
        return
    with outside():
        original(self, initializer)


@contextlib.contextmanager
def outside():
    """Creates variables within the context at once, and not in the function that is traced."""
    strategy = tf.distribute.get_strategy()
    # an empty graph: the function's own would create variables in its own way, also in eager mode
    with tf.init_scope(), tf.Graph().as_default(), context.eager_mode(), strategy.scope():
        yield


def is_shared(variable) -> bool:
    """Returns whether all replicas share one variable, as under CentralStorageStrategy."""
    return isinstance(keras_objects.variable_of(variable), AggregatingVariable)


def is_joined(variable) -> bool:
    """Returns whether a variable's `aggregation` defines how replicas' values are joined when they are assigned."""
    return has_aggregation(variable) and not is_shared(variable)


def has_aggregation(variable) -> bool:
    """Returns whether it has an `aggregation`, and is no metric's variable, which is joined when an epoch ends."""
    return variable.aggregation != "none" and variable.synchronization != "on_read"


def one_replica_step(model, function, states=None):
    """Wraps `train_step` or `test_step`: (data) -> (its outputs, this replica's rows); `states` as for `Step`."""

    def step(data):
        # otherwise, operations without data (the count of iterations) run once more at the end of the data
        with tf.control_dependencies([t for t in tree.flatten(data) if isinstance(t, tf.Tensor)]):
            return on_batch(data)

    def on_batch(data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        rows, partial = count_rows(first_leaf(x))
        if not partial:
            with override_state(step=Step(rows, partial, states=states)):
                return function(data), rows
        variables = step_variables(model)
        shared = frozenset(id(v) for v in variables if is_shared(v))  # steps without rows never change these
        variables = [v for v in variables if id(v) not in shared]
        old = [tf.identity(v.value) for v in variables]
        replica_step = Step(rows, partial, shared, states)
        with override_state(step=replica_step):
            outputs = function(with_placeholder(data, rows))

        def put_back():
            for variable, value in zip(variables, old, strict=True):
                if not replica_step.is_complete(variable):
                    variable.assign(value)
            return True

        with override_state(inline_merge=True):
            tf.cond(rows > 0, lambda: True, put_back)
        return outputs, rows

    return step
