"""Datasets that are this worker's part already: a mark that keeps whoever distributes datasets from sharding them."""

from __future__ import annotations

import tensorflow as tf

from raytf.collectives.communicator import local_replicas
from raytf.errors import ConfigError

# Says in a tf.data option, which survives `map` and `prefetch`, that a dataset is this worker's part already.
# Only TensorFlow's MultiDeviceIterator sets this field, on datasets of its own.
_WORKER_PART = 1


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


def distributed(dataset: tf.data.Dataset, strategy: tf.distribute.Strategy):
    """A worker's part for the devices of the worker, as `strategy.experimental_distribute_dataset` gives others.

    Raises:
        ConfigError: there are several, which do not divide its batches.
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
