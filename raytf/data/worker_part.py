"""Marks datasets that are already this worker's shard, so that Keras does not shard them again."""

from __future__ import annotations

import functools

import tensorflow as tf

from raytf.collectives.communicator import local_replicas
from raytf.errors import ConfigError

# Value of a tf.data option that marks a dataset as this worker's shard; options survive `map` and `prefetch`.
# Only TensorFlow's MultiDeviceIterator sets this field, on datasets of its own.
_WORKER_PART = 1


def mark_worker_part(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns `dataset` with the mark that its batches are this worker's shard: Keras must not shard it again."""
    options = tf.data.Options()
    options.experimental_distribute.num_devices = _WORKER_PART
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def is_worker_part(dataset: tf.data.Dataset) -> bool:
    """Returns whether `mark_worker_part` was called on this dataset, or one from which it was made."""
    distribute = dataset.options().experimental_distribute
    unsharded = distribute.auto_shard_policy == tf.data.experimental.AutoShardPolicy.OFF
    return unsharded and distribute.num_devices == _WORKER_PART


def distributed(dataset: tf.data.Dataset, strategy: tf.distribute.Strategy):
    """Distributes a worker's shard over its devices, as `strategy.experimental_distribute_dataset` does for others.

    Raises:
        ConfigError: The worker has several devices, which do not divide its batches.
    """
    if local_replicas(strategy) == 1:
        return strategy.distribute_datasets_from_function(lambda _: dataset)
    rows, devices = tf.nest.flatten(dataset.element_spec)[0].shape[0], local_replicas(strategy)
    if rows is None or rows % devices:
        raise ConfigError(
            "A worker with several devices needs batches of a fixed size that its devices divide",
            f"batches of {rows} rows for {devices} devices",
            "Choose a batch_size that all replicas divide and drop the remainder, or one device for each worker",
        )
    return strategy.distribute_datasets_from_function(lambda _: dataset.rebatch(rows // devices))


def has_sparse(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset has sparse tensors, of which TensorFlow cannot slice parts without rows."""
    return any(isinstance(spec, tf.SparseTensorSpec) for spec in tf.nest.flatten(dataset.element_spec))


def cut(dataset: tf.data.Dataset, strategy: tf.distribute.Strategy, worker: int):
    """Returns this worker's shard of a dataset of global batches, for each of its devices.

    Each device gets a part of each batch. A part without rows still has all other dimensions.

    Args:
        dataset: A `tf.data.Dataset` of global batches, the same on all workers.
        strategy: The strategy of the workers.
        worker: Rank of this worker.
    """
    devices, replicas = local_replicas(strategy), strategy.num_replicas_in_sync

    indices = [tf.constant(worker * devices + i, tf.int64) for i in range(devices)]
    if devices == 1:
        return mark_worker_part(dataset.map(lambda *batch: part_of(batch, indices[0], replicas)))

    def parts(*batch):
        datasets = [tf.data.Dataset.from_tensors(part_of(batch, index, replicas)) for index in indices]
        return functools.reduce(tf.data.Dataset.concatenate, datasets)

    mixed = dataset.flat_map(parts)  # reads a generator only once
    steps = int(dataset.cardinality())
    mixed = mixed if steps < 0 else mixed.apply(tf.data.experimental.assert_cardinality(steps * devices))
    return strategy.distribute_datasets_from_function(lambda _: mixed)


def part_of(batch: tuple, index: tf.Tensor, count: int):
    """Returns one contiguous part of a batch's rows, which may be empty, as `topology.shard_of_rank` divides them.

    Args:
        batch: Arguments of a function for `tf.data.Dataset.map`.
        index: Index of the part, int64, from 0.
        count: Number of parts.
    """
    batch = batch[0] if len(batch) == 1 else batch
    rows = row_count(next(leaf for leaf in tf.nest.flatten(batch) if hasattr(leaf, "shape")))
    edges = [(number * (rows // count) + tf.minimum(number, rows % count)) for number in (index, index + 1)]
    return tf.nest.map_structure(lambda leaf: rows_between(leaf, *edges), batch)


def row_count(leaf) -> tf.Tensor:
    """Returns the number of rows of a dense, sparse or ragged tensor: int64."""
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.cast(leaf.nrows(), tf.int64) if isinstance(leaf, tf.RaggedTensor) else tf.shape(leaf, tf.int64)[0]


def rows_between(leaf, start: tf.Tensor, stop: tf.Tensor):
    """Returns neighbouring rows of a dense, sparse or ragged tensor; anything else, unchanged."""
    if not hasattr(leaf, "shape") or (isinstance(leaf, tf.Tensor) and leaf.shape.rank == 0):
        return leaf
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[start:stop]
    dimensions = leaf.dense_shape[1:]
    begin, size = (
        tf.concat([[first], remaining], 0)
        for first, remaining in ((start, tf.zeros_like(dimensions)), (stop - start, dimensions))
    )
    part = tf.sparse.slice(leaf, begin, size)
    part = tf.SparseTensor(part.indices, part.values, size)
    part.set_shape([None, *leaf.shape[1:]])
    return part
