"""What Keras 3 needs to be right under a MultiWorkerMirroredStrategy.

Stock Keras 3 `fit` fails under several workers. `install()` changes Keras in this process so that `fit`, `evaluate`
and `predict` of several workers equal those of one process on the same global batches. Nothing changes for any other
strategy. In a step of `fit` or `evaluate`:

* A loss is the mean over this worker's rows. Gradients are weighted with the number of rows, summed over workers
  once, before clipping, accumulation, loss scaling and averaging see them, and divided by the rows of all workers.
* Losses that are no mean over rows (sums, masked or weighted means, functions of the whole batch) are corrected with
  the global divisor, or computed on the gathered global batch.
* A worker that got no row for a step computes on a placeholder row and contributes nothing.
* Metric variables are local until the end of an epoch; then they are summed, once, and moving statistics averaged.
* What callbacks decide is the chief's decision; files are written by the chief.

In a custom loop under `strategy.run` an optimizer sums gradients over replicas as TensorFlow's guides say, before
clipping and accumulation.
"""

from __future__ import annotations

import contextlib
import functools
import threading

import keras
import numpy as np
import tensorflow as tf
from keras.src import tree
from keras.src.backend.common.stateless_scope import StatelessScope
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.losses import loss as loss_module
from keras.src.metrics.reduction_metrics import Mean
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.random.seed_generator import SeedGenerator
from keras.src.trainers import compile_utils
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.epoch_iterator import EpochIterator
from tensorflow.python.distribute import distribute_lib, mirrored_run
from tensorflow.python.distribute import values as distribute_values

from raytf import collectives, multiworker_callbacks
from raytf.collectives import all_sum, local_replicas, spans_workers
from raytf.errors import ConfigError, UnsupportedVersionError

TESTED = {"keras": ("3.15",), "tensorflow": ("2.21",)}
# Says in a tf.data option, which survives `map` and `prefetch`, that a dataset is this worker's part already.
# Only TensorFlow's MultiDeviceIterator sets this field, on datasets of its own.
_WORKER_PART = 1
# Apart enough that no two replicas' seeds meet: seeds count up by one a draw.
_REPLICA_SEED = 1_000_003

_state = threading.local()
_installed: dict[str, object] = {}


class _Step:
    """What one replica knows of the step that it is tracing or running."""

    def __init__(self, rows: tf.Tensor, partial: bool):
        self.rows = rows  # int32 scalar, this replica's real rows
        self.partial = partial  # whether the number of rows may differ between replicas or steps
        self._global_rows: tf.Tensor | None = None

    def global_rows(self) -> tf.Tensor:
        """Rows of all replicas, float64 scalar of at least 1; costs a collective at the first call in a step."""
        if self._global_rows is None:
            (total,) = all_sum([tf.cast(self.rows, tf.float64)])
            self._global_rows = tf.maximum(total, 1.0)
        return self._global_rows

    def upscale(self, dtype) -> tf.Tensor:
        """Global rows over this replica's rows: undoes the weight that the gradients will get."""
        return tf.cast(tf.math.divide_no_nan(self.global_rows(), tf.cast(self.rows, tf.float64)), dtype)


def _step() -> _Step | None:
    return getattr(_state, "step", None)


@contextlib.contextmanager
def _set(**values):
    before = {name: getattr(_state, name, None) for name in values}
    vars(_state).update(values)
    try:
        yield
    finally:
        vars(_state).update(before)


def _in_replica_of_many() -> bool:
    """Whether this code runs for one replica of several workers."""
    return not tf.distribute.in_cross_replica_context() and spans_workers(tf.distribute.get_strategy())


# ---------------------------------------------------------------------------------------------------- the step


def _first_leaf(x):
    return next(leaf for leaf in tree.flatten(x) if leaf is not None)


def _rows(leaf) -> tuple[tf.Tensor, bool]:
    """The number of rows of a batch, and whether it may change from step to step."""
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32), True
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32), True
    static = tf.TensorShape(leaf.shape)
    return tf.shape(leaf)[0], static.rank is None or static[0] is None


def _with_placeholder(data, rows):
    """Puts one row of zeros in the place of an empty batch: layers and losses need not survive zero rows."""

    def fill(tensor):
        if not isinstance(tensor, tf.Tensor) or tensor.shape.rank == 0:
            return tensor

        def one_row():
            return tf.zeros(tf.concat([[1], tf.shape(tensor)[1:]], 0), tensor.dtype)

        filled = tf.cond(rows > 0, lambda: tensor, one_row)
        return tf.ensure_shape(filled, tensor.shape)

    return tree.map_structure(fill, data)


def _step_variables(model) -> list:
    """Variables that a forward pass changes by what it sees: metrics and moving statistics (no frozen weights)."""
    states = [v for layer in model._flatten_layers() for v in layer._non_trainable_variables]
    return list({id(v): v for v in (*model.metrics_variables, *states)}.values())


def _one_replica_step(model, function):
    """Wraps `train_step` or `test_step`: (data) -> (its outputs, this replica's rows)."""

    def step(data):
        # without this, what needs no data (the count of iterations) runs once more when the data has ended
        with tf.control_dependencies([t for t in tree.flatten(data) if isinstance(t, tf.Tensor)]):
            return on_batch(data)

    def on_batch(data):
        x, _, _ = data_adapter_utils.unpack_x_y_sample_weight(data)
        rows, partial = _rows(_first_leaf(x))
        if not partial:
            with _set(step=_Step(rows, partial)):
                return function(data), rows
        variables = _step_variables(model)
        before = [tf.identity(v.value) for v in variables]
        with _set(step=_Step(rows, partial)):
            outputs = function(_with_placeholder(data, rows))

        def put_back():
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            return True

        with _set(inline_merge=True):
            tf.cond(rows > 0, lambda: True, put_back)
        return outputs, rows

    return step


def _make_function(self, step_function):
    """Runs `step_function` on every replica; outputs stay local to this worker.

    Keras' own version puts the step into a `tf.cond` into a `tf.while_loop`, and collectives lose their instance keys
    on the way; here the step lies in the loop itself.
    """
    strategy = self.distribute_strategy
    if not spans_workers(strategy):
        return _installed["_make_function"](self, step_function)
    _refuse_what_cannot_work(self, strategy)
    replica_step = _one_replica_step(self, step_function)
    training = step_function == self.train_step

    @tf.autograph.experimental.do_not_convert
    def one_step(data):
        outputs, rows = strategy.run(replica_step, args=(data,))
        local = strategy.experimental_local_results
        mean = lambda v: local(v)[0] if local_replicas(strategy) == 1 else tf.reduce_mean(local(v), axis=0)
        return tree.map_structure(mean, outputs), tf.reduce_sum(local(rows))

    one_step = self._autoconvert_optionals(one_step)
    if not self.run_eagerly:
        one_step = tf.function(one_step, reduce_retracing=True)

    @tf.autograph.experimental.do_not_convert
    def steps(iterator):
        result = one_step(iterator.get_next())
        if self.steps_per_execution == 1:
            return result

        def body(done, upcoming, _):
            outputs = one_step(upcoming.get_value())
            more = done + 1 < self.steps_per_execution
            following = tf.cond(more, iterator.get_next_as_optional, lambda: upcoming)
            return done + 1, following, outputs

        _, _, result = tf.while_loop(
            lambda done, upcoming, _: tf.logical_and(done < self.steps_per_execution, upcoming.has_value()),
            body,
            (tf.constant(1), iterator.get_next_as_optional(), result),
            parallel_iterations=1,
        )
        return result

    compiled = None if self.run_eagerly else tf.function(steps, reduce_retracing=True)

    def eager_steps(iterator):
        for step in range(self.steps_per_execution):
            try:
                result = one_step(next(iterator))
            except (StopIteration, tf.errors.OutOfRangeError):
                if step == 0:
                    raise
                break
        return result

    def function(iterator):
        is_tf = isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator))
        outputs, rows = compiled(iterator) if is_tf and compiled else eager_steps(iterator)
        self.__dict__["_raytf_last"] = (outputs, rows)
        if getattr(self, "_raytf_sync_batches", None) == ("train" if training else "test"):
            return _global_logs(self, outputs, rows)
        return outputs

    return function


def _refuse_what_cannot_work(model, strategy):
    if model.jit_compile and not tf.config.list_physical_devices("GPU"):
        raise ConfigError(
            "jit_compile needs GPUs when there are several workers: TensorFlow has no collectives in XLA on CPUs",
            "jit_compile=True",
            "Compile the model with jit_compile=False, or give each worker a GPU",
        )
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    options = {
        "gradient_accumulation_steps": getattr(optimizer, "gradient_accumulation_steps", None),
        "ema_overwrite_frequency": getattr(optimizer, "ema_overwrite_frequency", None),
        "LossScaleOptimizer": isinstance(model.optimizer, LossScaleOptimizer) or None,
    }
    used = [name for name, value in options.items() if value]
    if used and local_replicas(strategy) > 1:
        raise ConfigError(
            "With several workers this optimizer option needs one device for each worker",
            f"{', '.join(used)} with {local_replicas(strategy)} devices in each worker",
            "Start one worker for each GPU",
        )


# ------------------------------------------------------------------------------------------------------ losses


def _reduce_weighted_values(values, sample_weight=None, mask=None, reduction="sum_over_batch_size", dtype=None):
    """A worker's loss, such that the mean over workers weighted with their rows is the loss of the global batch."""
    step = _step()
    original = _installed["reduce_weighted_values"]
    loss = original(values, sample_weight, mask, reduction, dtype)
    if step is None or reduction in (None, "none") or len(values.shape) == 0:
        return loss
    if reduction == "sum":
        return loss * step.upscale(loss.dtype)
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        weights = loss_module.apply_mask(
            None if sample_weight is None else tf.cast(sample_weight, loss.dtype), mask, loss.dtype, reduction
        )
        divisor = tf.reduce_sum(tf.cast(weights, tf.float64))
    elif mask is not None:
        divisor = tf.reduce_sum(tf.cast(mask, tf.float64))
    else:
        return loss
    divisor = tf.where(step.rows > 0, divisor, 0.0)
    (total,) = all_sum([divisor])
    return loss * tf.cast(tf.math.divide_no_nan(divisor, total), loss.dtype) * step.upscale(loss.dtype)


def _gathered(step: _Step, tensor, share):
    """The rows of all replicas in order, with this replica's own rows in the place of its copy of them.

    Gradients flow into the own rows alone; the sum over replicas then is the gradient of the whole.
    """
    offset, total = share
    placed = tf.pad(tensor[: step.rows], [[offset, total - offset - step.rows]] + [[0, 0]] * (tensor.shape.rank - 1))
    if tensor.dtype not in collectives.SUMMABLE:
        (summed,) = all_sum([tf.cast(placed, tf.int32)])
        return tf.cast(summed, tensor.dtype)
    (summed,) = all_sum([tf.stop_gradient(placed)])
    return tf.stop_gradient(summed - placed) + placed


def _whole_batch_loss(step: _Step, function, y_true, y_pred, sample_weight):
    """A loss that reduces its batch by itself, computed on the global batch."""
    context = tf.distribute.get_replica_context()
    ones = tf.one_hot(context.replica_id_in_sync_group, context.num_replicas_in_sync, dtype=tf.int32)
    (counts,) = all_sum([ones * step.rows])
    offset = tf.reduce_sum(counts[: context.replica_id_in_sync_group])
    share = (offset, tf.reduce_sum(counts))
    gather = functools.partial(
        tree.map_structure, lambda t: t if t is None else _gathered(step, tf.convert_to_tensor(t), share)
    )
    value = function(gather(y_true), gather(y_pred), *([] if sample_weight is None else [gather(sample_weight)]))
    # The value stands for every replica; its gradient is this replica's own part, which must not be weighted again.
    return tf.stop_gradient(value) + (value - tf.stop_gradient(value)) * step.upscale(value.dtype)


def _has_rows(y_pred) -> bool:
    return all(len(t.shape) > 0 for t in tree.flatten(y_pred) if t is not None)


def _loss_call(self, y_true, y_pred, sample_weight=None):
    """`Loss.__call__`; where `call` returns a scalar of its own, it is given the global batch."""
    original = _installed["Loss.__call__"]
    step = _step()
    if step is None or getattr(_state, "whole_batch", False) or not _has_rows(y_pred):
        return original(self, y_true, y_pred, sample_weight)
    seen: list[bool] = []
    call = self.call

    def spy(*args, **kwargs):
        values = call(*args, **kwargs)
        seen.append(len(values.shape) == 0)
        return values

    self.__dict__["call"] = spy
    try:
        value = original(self, y_true, y_pred, sample_weight)
    finally:
        del self.__dict__["call"]
    if not (seen and seen[-1]):
        return value
    with _set(whole_batch=True, step=None):
        return _whole_batch_loss(step, functools.partial(original, self), y_true, y_pred, sample_weight)


class _UserLoss:
    """A loss that is no plain `Loss`: a class with its own `__call__`, or any callable."""

    def __init__(self, loss):
        self.loss = loss

    def __getattr__(self, name):
        return getattr(self.loss, name)

    def __call__(self, y_true, y_pred, sample_weight=None):
        step = _step()
        value = self.loss(y_true, y_pred, sample_weight)
        if step is None or len(value.shape) > 0 or not _has_rows(y_pred):
            return value
        with _set(whole_batch=True, step=None):
            return _whole_batch_loss(step, self.loss, y_true, y_pred, sample_weight)


def _compile_loss_build(self, y_true, y_pred):
    _installed["CompileLoss.build"](self, y_true, y_pred)
    for i, entry in enumerate(self._flat_losses):
        own = type(entry.loss).__call__ is not loss_module.Loss.__call__
        if own and not isinstance(entry.loss, _UserLoss):
            self._flat_losses[i] = entry._replace(loss=_UserLoss(entry.loss))


def _scale_for_distribution(original, value):
    return value if _step() is not None or getattr(_state, "whole_batch", False) else original(value)


def _mean_update_state(self, values, sample_weight=None):
    """`Mean.update_state`; a scalar that stands for a batch counts by the rows it stands for."""
    step = _step()
    if step is not None and step.partial and sample_weight is None and len(getattr(values, "shape", (1,))) == 0:
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        sample_weight = replicas / step.upscale(self.dtype)
        sample_weight = tf.where(step.rows > 0, sample_weight, tf.zeros_like(sample_weight))
    return _installed["Mean.update_state"](self, values, sample_weight)


# -------------------------------------------------------------------------------------------------- gradients


def _reduced_gradients(grads):
    """Gradients of the global batch: in a step of `fit` the mean over rows, elsewhere the sum over replicas."""
    step = _step()
    present = [i for i, g in enumerate(grads) if g is not None]
    local = [grads[i] for i in present]
    if not local:
        return grads
    if step is not None:
        local = [_map_dense(lambda d: _weighted(d, step), g) for g in local]
        *local, rows = all_sum([*local, tf.cast(step.rows, _wide(local))])
        scale = tf.maximum(rows, 1.0)
        local = [_map_dense(lambda d: d / tf.cast(scale, d.dtype), g) for g in local]
    else:
        local = all_sum(local)
    reduced = list(grads)
    for i, g in zip(present, local, strict=True):
        reduced[i] = g
    return reduced


def _wide(grads):
    """A dtype for the row count: that of the first gradient, so that it shares its collective, unless too narrow."""
    dtype = next((g.dtype for g in grads if isinstance(g, tf.Tensor)), tf.float32)
    return dtype if dtype in (tf.float32, tf.float64) else tf.float32


def _map_dense(function, gradient):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def _weighted(gradient, step: _Step):
    weighted = gradient * tf.cast(step.rows, gradient.dtype)
    # a placeholder row may give NaN, and NaN times zero rows is NaN
    return tf.where(step.rows > 0, weighted, tf.zeros_like(weighted)) if step.partial else weighted


def _apply(original, self, grads, trainable_variables=None):
    """`Optimizer.apply`: sums gradients over workers first, then works as in one process."""
    if getattr(_state, "reduced", False) or not _in_replica_of_many():
        return original(self, grads, trainable_variables)
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    grads = _reduced_gradients([tf.convert_to_tensor(g) if isinstance(g, np.ndarray) else g for g in grads])
    with _set(reduced=True, inline_merge=local_replicas(tf.distribute.get_strategy()) == 1):
        return original(self, grads, trainable_variables)


def _all_reduce_sum_gradients(self, grads_and_vars):
    if getattr(_state, "reduced", False):
        return grads_and_vars
    return _installed["_all_reduce_sum_gradients"](self, grads_and_vars)


def _merge_call(self, fn, args, kwargs):
    """With one replica in this process a merge call is a plain call, which may also stand inside a `tf.cond`."""
    if not getattr(_state, "inline_merge", False):
        return _installed["_merge_call"](self, fn, args, kwargs)
    return distribute_lib.ReplicaContextBase._merge_call(self, fn, args, kwargs)


def _seed_next(self, ordered=True):
    """Seeds count alike on all workers, and each replica draws from a stream of its own."""
    seed = _installed["SeedGenerator.next"](self, ordered)
    if not _in_replica_of_many():
        return seed
    replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, seed.dtype)
    return seed + tf.stack([replica * _REPLICA_SEED, tf.zeros_like(replica)])


# --------------------------------------------------------------------------------------- metrics and statistics


def _averaged_variables(model) -> list:
    """Floating-point state that workers update from their own rows, such as moving statistics."""
    metrics = {id(v) for v in model.metrics_variables}
    return [v for v in _step_variables(model) if id(v) not in metrics and keras.backend.is_float_dtype(v.dtype)]


def _synchronize(model):
    """Averages moving statistics over workers and returns [(metric variable, global value)]: one collective a dtype."""
    strategy = model.distribute_strategy
    metrics = [v for v in model.metrics_variables if tf.as_dtype(v.dtype) in collectives.SUMMABLE]
    averaged = _averaged_variables(model)
    cached = model.__dict__.get("_raytf_synchronize")
    if cached is None or cached[0] != [id(v) for v in (*metrics, *averaged)]:
        key = [id(v) for v in (*metrics, *averaged)]
        cached = model.__dict__["_raytf_synchronize"] = (
            key,
            _synchronize_function(strategy, metrics, averaged),
        )
    return list(zip(metrics, cached[1](), strict=True))


def _synchronize_function(strategy, metrics, averaged):
    replicas = strategy.num_replicas_in_sync

    def replica():
        context = tf.distribute.get_replica_context()
        first = tf.equal(context.replica_id_in_sync_group, 0)
        local = []
        for variable in (*metrics, *averaged):
            value = tf.convert_to_tensor(variable.value)
            if variable.aggregation in ("only_first_replica", "none") and len(local) < len(metrics):
                value = tf.where(first, value, tf.zeros_like(value))
            local.append(value)
        summed = all_sum(local) if local else []
        for variable, value in zip(averaged, summed[len(metrics) :], strict=True):
            with _set(inline_merge=local_replicas(strategy) == 1):
                variable.assign(value / tf.cast(replicas, value.dtype))
        totals = summed[: len(metrics)]
        return [
            t / tf.cast(replicas, t.dtype) if v.aggregation == "mean" else t
            for v, t in zip(metrics, totals, strict=True)
        ]

    @tf.function
    def synchronize():
        return [strategy.experimental_local_results(v)[0] for v in strategy.run(replica)]

    return synchronize


def _global_logs(model, logs, rows):
    """The logs that one process would have: from global metrics, or the mean over rows of what a step returned."""
    totals = _synchronize(model)
    logs = logs if isinstance(logs, dict) else {}
    with StatelessScope(state_mapping=[(v, tf.convert_to_tensor(t)) for v, t in totals]):
        metrics = dict(model.get_metrics_result())
        if set(logs) == set(metrics):
            return metrics
        named = {m.name: m.result() for m in model.metrics if m.name in logs}
    others = {name: value for name, value in logs.items() if name not in named}
    values = [np.asarray(v, np.float64) * float(rows) for v in tree.flatten(others)]
    *sums, total = collectives.sum_over_workers(model.distribute_strategy, [*values, np.float64(rows)])
    return named | tree.pack_sequence_as(others, [v / total for v in sums])


def _get_metrics_result_or_logs(self, logs):
    if not spans_workers(self.distribute_strategy):
        return _installed["_get_metrics_result_or_logs"](self, logs)
    local, rows = self.__dict__.get("_raytf_last", (logs, 1))
    return _global_logs(self, local, rows)


# --------------------------------------------------------------------------------------------- fit and its input


class _WorkerEpochIterator(tf_trainer.TFEpochIterator):
    """Takes a dataset that is this worker's part as it is, and knows how many steps a distributed one has."""

    def __init__(self, distribute_strategy=None, *args, **kwargs):
        EpochIterator.__init__(self, *args, **kwargs)
        self._distribute_strategy = distribute_strategy
        dataset = self.data_adapter.get_tf_dataset()
        if isinstance(dataset, tf.data.Dataset):
            dataset = self._distribute(dataset, distribute_strategy)
        self._distributed_dataset = dataset

    def _distribute(self, dataset, strategy):
        if not is_worker_part(dataset):
            if dataset.options().experimental_distribute.auto_shard_policy == tf.data.experimental.AutoShardPolicy.OFF:
                # each batch is cut into one for each worker, so the number of batches is not that of the steps
                self.data_adapter._raytf_unknown_batches = True
                self._num_batches = None
            return strategy.experimental_distribute_dataset(dataset)
        if local_replicas(strategy) == 1:
            return dataset
        return strategy.distribute_datasets_from_function(
            lambda _: dataset.rebatch(self._replica_rows(dataset, strategy))
        )

    @staticmethod
    def _replica_rows(dataset, strategy):
        rows = tree.flatten(dataset.element_spec)[0].shape[0]
        if rows is None or rows % local_replicas(strategy):
            raise ConfigError(
                "A worker with several devices needs batches of a fixed size that its devices divide",
                f"batches of {rows} rows for {local_replicas(strategy)} devices",
                "Choose a batch_size that all replicas divide and drop the remainder, or one device for each worker",
            )
        return rows // local_replicas(strategy)

    def reset(self):
        super().reset()
        if getattr(self.data_adapter, "_raytf_unknown_batches", False):
            self._num_batches = None


def mark_worker_part(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Says that `dataset` holds this worker's rows in batches of this worker's size: Keras must not shard it again."""
    options = tf.data.Options()
    options.experimental_distribute.num_devices = _WORKER_PART
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def is_worker_part(dataset: tf.data.Dataset) -> bool:
    """Whether `mark_worker_part` was called on this dataset or one that it was made from."""
    distribute = dataset.options().experimental_distribute
    off = distribute.auto_shard_policy == tf.data.experimental.AutoShardPolicy.OFF
    return off and distribute.num_devices == _WORKER_PART


def _epoch_iterator(*args, distribute_strategy=None, **kwargs):
    kind = _WorkerEpochIterator if spans_workers(distribute_strategy) else _installed["TFEpochIterator"]
    return kind(*args, distribute_strategy=distribute_strategy, **kwargs)


def _example_batch(iterator, strategy):
    """A batch with the shapes and dtypes of the data; where they are known, no row is read for it."""
    dataset = iterator._distributed_dataset
    specs = tf.nest.flatten(dataset.element_spec)
    if all(isinstance(s, tf.TensorSpec) and s.shape.rank and s.shape[1:].is_fully_defined() for s in specs):
        return tf.nest.map_structure(lambda s: tf.zeros([s.shape[0] or 2, *s.shape[1:]], s.dtype), dataset.element_spec)
    batch = next(iter(dataset))
    return tree.map_structure(lambda v: strategy.experimental_local_results(v)[0], batch)


def _maybe_symbolic_build(self, iterator=None, data_batch=None):
    strategy = self.distribute_strategy
    if not spans_workers(strategy):
        return _installed["_maybe_symbolic_build"](self, iterator, data_batch)
    built = self.built and all(
        part is None or part.built for part in (self._compile_metrics, self._compile_loss, self.optimizer)
    )
    if built:
        return None
    if iterator is not None:
        data_batch = _example_batch(iterator, strategy)
    with strategy.scope():
        self._symbolic_build(data_batch=data_batch)


def _fit(self, x=None, y=None, batch_size=None, epochs=1, verbose="auto", callbacks=None, *args, **kwargs):
    original = _installed["fit"]
    strategy = self.distribute_strategy
    if not spans_workers(strategy):
        return original(self, x, y, batch_size, epochs, verbose, callbacks, *args, **kwargs)
    self._assert_compile_called("fit")
    _refuse_what_cannot_work(self, strategy)
    if verbose == "auto" and not collectives.is_chief(strategy):
        verbose = 0
    _agree_on_seed(strategy)
    with multiworker_callbacks.prepared(self, callbacks) as (callbacks, sync_batches):
        self.__dict__["_raytf_sync_batches"] = sync_batches
        try:
            return original(self, x, y, batch_size, epochs, verbose, callbacks, *args, **kwargs)
        finally:
            self.__dict__.pop("_raytf_sync_batches", None)


def _agree_on_seed(strategy):
    """Workers that shuffle the same arrays must shuffle them alike."""
    if tf.compat.v1.get_seed(None)[0] is None:
        (seed,) = collectives.from_chief(strategy, [np.random.SeedSequence().generate_state(1).astype(np.int64) >> 1])
        tf.random.set_seed(int(seed[0]))


def _evaluate(self, *args, **kwargs):
    if spans_workers(self.distribute_strategy):
        _refuse_what_cannot_work(self, self.distribute_strategy)
        if self.built:
            _synchronize(self)
    return _installed["evaluate"](self, *args, **kwargs)


def _make_predict_function(self, force=False):
    if spans_workers(self.distribute_strategy) and "predict_step" not in self.__dict__:
        predict_step = self.predict_step

        def padded(data):
            x, _, _ = data_adapter_utils.unpack_x_y_sample_weight(data)
            rows, partial = _rows(_first_leaf(x))
            if not partial:
                return predict_step(data)
            outputs = predict_step(_with_placeholder(data, rows))
            return tree.map_structure(lambda t: t[:rows], outputs)

        self.__dict__["predict_step"] = padded
    return _installed["make_predict_function"](self, force)


def _on_batch(name):
    def wrapper(self, *args, return_dict=False, **kwargs):
        logs = _installed[name](self, *args, return_dict=True, **kwargs)
        if spans_workers(self.distribute_strategy):
            logs = keras.src.utils.python_utils.pythonify_logs(_global_logs(self, *self.__dict__["_raytf_last"]))
        return logs if return_dict else self._flatten_metrics_in_order(logs)

    return wrapper


# ------------------------------------------------------------------------------------------------------ install


def check_versions() -> None:
    """Raises UnsupportedVersionError unless Keras and TensorFlow are versions that the tests of raytf run with."""
    installed = {"keras": keras.__version__, "tensorflow": tf.__version__}
    wrong = {k: v for k, v in installed.items() if not any(v.startswith(f"{t}.") for t in TESTED[k])}
    if wrong:
        works = ", ".join(f"{k} {'/'.join(f'{v}.*' for v in versions)}" for k, versions in TESTED.items())
        raise UnsupportedVersionError(
            f"raytf's multi-worker support is tested with {works}; received: "
            f"{', '.join(f'{k} {v}' for k, v in wrong.items())}. Install one of these versions, or pass "
            "allow_untested_keras=True to go on at your own risk."
        )
    if keras.backend.backend() != "tensorflow":
        raise UnsupportedVersionError(
            f"raytf trains with Keras' TensorFlow backend; received: {keras.backend.backend()}. "
            "Unset KERAS_BACKEND or set it to tensorflow."
        )


def install(allow_untested: bool = False) -> None:
    """Makes Keras 3 right under several workers, in this process, until it ends. A second call does nothing.

    Args:
        allow_untested: go on with versions of Keras or TensorFlow that raytf is not tested with.

    Raises:
        UnsupportedVersionError: such a version is installed and `allow_untested` is False.
    """
    if _installed:
        return
    if not allow_untested:
        check_versions()

    def replace(owner, name, new, key=None):
        _installed[key or name] = getattr(owner, name)
        setattr(owner, name, new)

    trainer = tf_trainer.TensorFlowTrainer
    for name, new in {
        "_make_function": _make_function,
        "_maybe_symbolic_build": _maybe_symbolic_build,
        "fit": _fit,
        "evaluate": _evaluate,
        "make_predict_function": _make_predict_function,
        "_get_metrics_result_or_logs": _get_metrics_result_or_logs,
        "train_on_batch": _on_batch("train_on_batch"),
        "test_on_batch": _on_batch("test_on_batch"),
    }.items():
        replace(trainer, name, functools.wraps(getattr(trainer, name))(new))
    replace(tf_trainer, "TFEpochIterator", _epoch_iterator)
    replace(loss_module, "reduce_weighted_values", _reduce_weighted_values)
    replace(loss_module.Loss, "__call__", _loss_call, "Loss.__call__")
    replace(compile_utils.CompileLoss, "build", _compile_loss_build, "CompileLoss.build")
    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        replace(loss_module, name, functools.partial(_scale_for_distribution, getattr(loss_module, name)))
    replace(Mean, "update_state", _mean_update_state, "Mean.update_state")
    for optimizer in (BaseOptimizer, LossScaleOptimizer):
        original = optimizer.apply
        optimizer.apply = functools.wraps(original)(
            lambda self, grads, trainable_variables=None, original=original: _apply(
                original, self, grads, trainable_variables
            )
        )
    replace(TFOptimizer, "_all_reduce_sum_gradients", _all_reduce_sum_gradients)
    replace(mirrored_run._MirroredReplicaContext, "_merge_call", _merge_call)
    replace(SeedGenerator, "next", _seed_next, "SeedGenerator.next")
    for number in (int, float):  # callbacks read `float(model.optimizer.learning_rate)`
        name = f"__{number.__name__}__"
        setattr(distribute_values.DistributedVariable, name, lambda self, number=number: number(self.numpy()))
