"""Rows for steps on a worker of a ParameterServerStrategy, from that worker's own memory.

The coordinator creates a step's graph, which runs in the worker's process. TensorFlow looks up the Python function of a
`PyFunc` operation by name, in the process that runs the operation. Each worker registers a function for each dataset,
so that rows never pass through the coordinator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from raytf.compat.tensorflow import register_function
from raytf.data.feed import Feed
from raytf.runtime.topology import Shard

# Strong references, as TensorFlow keeps only weak ones.
_registered: list[Callable] = []


def register_rows(feeds: dict[str, dict[str, Any]], worker: int, workers: int) -> None:
    """Opens datasets in a worker's process, and registers functions for their rows.

    Args:
        feeds: For each dataset the arguments of a `Feed`, except for the reader's shard.
        worker: Index of this worker.
        workers: Number of workers.
    """
    _registered.clear()
    for name, arguments in feeds.items():
        function = _rows(Feed(**arguments, reader_shard=Shard(worker, workers)))
        _registered.append(function)
        register_function(_token(name), function)


def _rows(feed: Feed) -> Callable:
    lock = threading.Lock()

    def rows(epoch, first, count):
        with lock:
            return feed.span(int(epoch), int(first), int(count))

    return rows


def _token(name: str) -> str:
    return f"raytf/{name}"


def row_span(name: str, feed: Feed, epoch: tf.Tensor, first: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
    """Returns the batches of some steps, in a graph that a worker runs.

    Args:
        name: Name of the dataset.
        feed: The coordinator's feed, for shapes and dtypes.
        epoch: Epoch, a scalar int64 tensor.
        first: First step, a scalar int64 tensor.
        count: Number of steps, all in one chunk, a scalar int64 tensor.
    """
    shape = feed.shape
    specs = shape.signature
    flat = tf.raw_ops.PyFunc(input=[epoch, first, count], token=_token(name), Tout=[spec.dtype for spec in specs])
    for tensor, spec in zip(flat, specs, strict=True):
        tensor.set_shape(spec.shape)
    dataset = tf.data.Dataset.from_tensors(tuple(flat))
    return shape.batches(dataset, feed.global_batch)
