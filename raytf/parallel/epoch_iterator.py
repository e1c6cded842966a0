"""Datasets with several workers: which rows they contain, and how many steps they have."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import keras
import tensorflow as tf
from keras import tree

from raytf.collectives.communicator import local_replicas, many_replicas, spans_workers
from raytf.compat import keras_objects
from raytf.compat.keras import EpochIterator, backend_trainer
from raytf.compat.patching import overrides, patch
from raytf.compat.tensorflow import rank, replica_spec
from raytf.data import worker_part
from raytf.logs import warn_user
from raytf.parallel import model_optimizers


class _EpochIterator(backend_trainer.TFEpochIterator):
    """Supports a change of `steps_per_execution` within an epoch if the number of batches is known."""

    _resume_point: tuple | None = None

    def begin_at(
        self, step: int, dataset: tf.data.Dataset, first: tuple[int, Callable[[], tf.data.Dataset]] | None = None
    ) -> None:
        """Sets the begin of the next epoch; batches keep their numbers.

        Args:
            step: Number of steps that another process has made already.
            dataset: The batches from there on.
            first: (steps, function) if other workers are within an execution of several steps. The steps are those of
                the first execution, which are all batches of `dataset`. The function returns the later batches.
        """
        self._resume_point = step, dataset, first

    def _distribute(self, dataset, strategy):
        return strategy.experimental_distribute_dataset(dataset)

    @overrides(EpochIterator)
    def _interrupted_warning(self):
        if self.steps_per_epoch:  # otherwise the data ends where the first epoch does, as it is meant to
            super()._interrupted_warning()

    @overrides(EpochIterator)
    def _enumerate_iterator(self):
        if self.steps_per_epoch or not self._num_batches:
            yield from super()._enumerate_iterator()
            return
        self.data_adapter.on_epoch_begin()
        (self._steps_seen, remaining, first), self._resume_point = self._resume_point or (0, None, None), None
        if self._steps_seen < self._num_batches:
            whole = self._get_iterator()
            iterator = iter(whole if remaining is None else self._distribute(remaining, self._distribute_strategy))
        while self._steps_seen < self._num_batches:
            begin = self._steps_seen
            steps = self.steps_per_execution if first is None else first[0]
            self._steps_seen = min(begin + steps, self._num_batches)
            yield begin, self._steps_seen - 1, iterator
            if first is not None and self._steps_seen < self._num_batches:
                iterator = iter(self._distribute(first[1](), self._distribute_strategy))
            first = None
        self.data_adapter.on_epoch_end()


class _WorkerEpochIterator(_EpochIterator):
    """Uses a dataset that is this worker's part unchanged, and computes the steps of a distributed dataset."""

    def __init__(self, distribute_strategy=None, *args, **kwargs):
        EpochIterator.__init__(self, *args, **kwargs)
        self._distribute_strategy = distribute_strategy
        dataset = self.data_adapter.get_tf_dataset()
        if isinstance(dataset, tf.data.Dataset):
            dataset = self._distribute(dataset, distribute_strategy)
        self._distributed_dataset = dataset

    def _distribute(self, dataset, strategy):
        policy = dataset.options().experimental_distribute.auto_shard_policy
        whole = policy != tf.data.experimental.AutoShardPolicy.OFF and not worker_part.is_worker_part(dataset)
        if whole and worker_part.has_sparse(dataset):
            return worker_part.cut(dataset, strategy, rank(strategy) if spans_workers(strategy) else 0)
        if not spans_workers(strategy):
            return strategy.experimental_distribute_dataset(dataset)
        if not worker_part.is_worker_part(dataset):
            if policy == tf.data.experimental.AutoShardPolicy.OFF:
                # each batch is split into one for each worker, so batches and steps differ in number
                self.data_adapter._raytf_unknown_batches = True
                self._num_batches = None
            return strategy.experimental_distribute_dataset(dataset)
        if local_replicas(strategy) == 1:
            return dataset
        return worker_part.distributed(dataset, strategy)

    @overrides(EpochIterator)
    def reset(self):
        super().reset()
        if getattr(self.data_adapter, "_raytf_unknown_batches", False):
            self._num_batches = None


@patch((backend_trainer, "TFEpochIterator"))
def epoch_iterator(original, *args, distribute_strategy=None, **kwargs):
    """Makes the iterator of `fit` use this worker's part unchanged, and follow `steps_per_execution`."""
    kind = _WorkerEpochIterator if many_replicas(distribute_strategy) else _EpochIterator
    made = kind(*args, distribute_strategy=distribute_strategy, **kwargs)
    _newest[:] = [weakref.ref(made)]
    return made


_newest: list[weakref.ref] = []


def newest_iterator():
    """Returns the last epoch iterator; in `on_train_begin` of the first callback, that is the iterator of its `fit`."""
    return _newest[0]()


def _example_batch(iterator, strategy, eager: bool):
    """Returns a batch with the shapes and dtypes of the data, as far as a step's graph has them.

    It reads no row: a generator would not repeat it, and a shuffling dataset would change its order.

    Args:
        iterator: An epoch iterator.
        strategy: The strategy of the iterator.
        eager: Whether the model's step runs without a graph, and may need all sizes.
    """
    dataset = iterator._distributed_dataset
    spec = tf.nest.map_structure(replica_spec, dataset.element_spec)
    shapes = [s.shape for s in tf.nest.flatten(spec) if not isinstance(s, tf.OptionalSpec)]
    known = (lambda shape: shape[1:].is_fully_defined()) if eager else (lambda shape: shape.rank is not None)
    if all(map(known, shapes)):
        return tf.nest.map_structure(_example, spec)
    first = keras_objects.first_batch(iterator.data_adapter)
    if first is not None:
        return first
    warn_user(
        "The shapes of the data are unknown, so one batch is read to learn them, which a generator would not give "
        "again. Name the shapes: from_generator(..., output_signature=...), or tensor.set_shape(...) in map.",
    )
    batch = next(iter(dataset))
    return tree.map_structure(lambda v: strategy.experimental_local_results(v)[0], batch)


def _example(spec):
    if isinstance(spec, tf.OptionalSpec):  # Keras uses it for a part that a generator omits
        return None
    if isinstance(spec, tf.TensorSpec) and spec.shape[1:].is_fully_defined():
        return tf.zeros([*(size or 2 for size in spec.shape[:1]), *spec.shape[1:]], spec.dtype)
    return keras.KerasTensor(spec.shape, keras.backend.standardize_dtype(spec.dtype))


@patch((backend_trainer.TensorFlowTrainer, "_maybe_symbolic_build"))
def maybe_symbolic_build(original, self, iterator=None, data_batch=None):
    """Builds from shapes: Keras reads a batch, and reduces it over replicas as if it were a tensor."""
    strategy = self.distribute_strategy
    given = keras_objects.given_strategy(self) is not None  # otherwise Keras builds at the first step
    if not many_replicas(strategy) and not (given and model_optimizers.decides_itself(self)):
        return original(self, iterator, data_batch)
    built = (self.built or not model_optimizers.has_call(self)) and all(
        part is None or part.built for part in (*keras_objects.compiled_parts(self), self.optimizer)
    )
    if built:
        return None
    if iterator is not None:
        data_batch = _example_batch(iterator, strategy, self.run_eagerly)
    with strategy.scope():
        model_optimizers.build(self, data_batch)
