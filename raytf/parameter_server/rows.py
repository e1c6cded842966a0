"""Rows for steps that run on a worker of a ParameterServerStrategy, out of that worker's own memory.

A step's graph is made by the coordinator, and runs in the worker's process. TensorFlow finds the Python function of a
`PyFunc` operation by a name in the process where the operation runs: here that is the worker's, which has registered
one for each dataset. So rows never pass through the coordinator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from raytf.compat.tensorflow import register_function
from raytf.data.feed import Feed
from raytf.runtime.topology import Shard

# TensorFlow keeps weak references only.
_kept: list[Callable] = []


def register(feeds: dict[str, dict[str, Any]], worker: int, workers: int) -> None:
    """In a worker's process: opens datasets and makes their rows available.

    Args:
        feeds: for each name the arguments of a `Feed`, without those that say who reads.
        worker, workers: index of this worker and their number.
    """
    _kept.clear()
    for name, arguments in feeds.items():
        function = _rows(Feed(**arguments, reader_shard=Shard(worker, workers)))
        _kept.append(function)
        register_function(_token(name), function)


def _rows(feed: Feed) -> Callable:
    lock = threading.Lock()

    def rows(epoch, first, count):
        with lock:
            return feed.span(int(epoch), int(first), int(count))

    return rows


def _token(name: str) -> str:
    return f"raytf/{name}"


def span(name: str, feed: Feed, epoch: tf.Tensor, first: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
    """In a graph that a worker runs: the batches of some steps.

    Args:
        name: of the dataset.
        feed: the coordinator's own, for shapes and dtypes.
        epoch, first, count: which steps, of one chunk: int64 scalars.
    """
    shape = feed.shape
    specs = shape.signature
    flat = tf.raw_ops.PyFunc(input=[epoch, first, count], token=_token(name), Tout=[spec.dtype for spec in specs])
    for tensor, spec in zip(flat, specs, strict=True):
        tensor.set_shape(spec.shape)
    dataset = tf.data.Dataset.from_tensors(tuple(flat))
    return shape.batches(dataset, feed.global_batch)
