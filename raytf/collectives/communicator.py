"""Sums over the workers of a MultiWorkerMirroredStrategy, with one collective for each dtype.

If workers have raytf's ring, all sums use it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from raytf.collectives import exchange
from raytf.compat.tensorflow import in_multi_worker_mode, separate_function
from raytf.compat.tensorflow import is_chief as strategy_is_chief


def spans_workers(strategy) -> bool:
    """Returns whether `strategy` trains synchronously with other processes through collectives."""
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and in_multi_worker_mode(strategy)


def many_replicas(strategy) -> bool:
    """Returns whether `strategy` trains synchronously on several replicas, in one or several processes."""
    local = (
        tf.distribute.MirroredStrategy,
        tf.distribute.MultiWorkerMirroredStrategy,
        tf.distribute.experimental.CentralStorageStrategy,
    )
    return spans_workers(strategy) or (isinstance(strategy, local) and strategy.num_replicas_in_sync > 1)


def is_chief(strategy) -> bool:
    """Returns whether this process writes the files: the chief of the cluster, or the only process."""
    return not spans_workers(strategy) or strategy_is_chief(strategy)


def local_replicas(strategy) -> int:
    """Returns the number of replicas in this process."""
    return len(strategy.extended.worker_devices)


def all_sum(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums each tensor over all replicas; called in a replica context.

    Args:
        tensors: Dense tensors or IndexedSlices of dtypes in `SUMMABLE`, with equal shapes on each replica.

    Returns:
        The sums in the same order. Dense tensors of one dtype share one collective.
    """
    context = tf.distribute.get_replica_context()
    groups: dict[object, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(i)
    result: list[tf.Tensor | None] = [None] * len(tensors)
    for indices in groups.values():
        # an argument of a tf.function has no device, and TensorFlow then finds no destination for the sum
        local = [t if isinstance(t, tf.IndexedSlices) else tf.identity(t) for t in (tensors[i] for i in indices)]
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, local)
        for index, value in zip(indices, summed, strict=True):
            result[index] = value
    return result


def of_first_replica(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors of the first replica, the chief's, on all replicas; in a replica's context."""
    is_first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
    numbers = [tensor if tensor.dtype in exchange.SUMMABLE else tf.cast(tensor, tf.int64) for tensor in tensors]
    summed = all_sum([tf.where(is_first, number, tf.zeros_like(number)) for number in numbers])
    return [tf.cast(value, tensor.dtype) for value, tensor in zip(summed, tensors, strict=True)]


def wide(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor, cast to float32 if it has 16-bit floats: a sum may exceed float16's 65504."""
    return tf.cast(tensor, tf.float32) if tensor.dtype in (tf.float16, tf.bfloat16) else tensor


def sum_over_workers(strategy, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Sums NumPy arrays over the processes; called outside any replica context, on every worker at once.

    Args:
        strategy: A strategy for which `spans_workers` holds.
        values: Arrays with dtypes in `SUMMABLE`, with equal shapes on each worker.

    Returns:
        The sums in the same order, with equal bits on every worker.
    """
    ring = exchange.exchange_of(strategy)
    if ring is not None:
        with exchange.collective_phase():
            return ring.all_reduce_arrays([np.asarray(v) for v in values])
    tensors = [tf.convert_to_tensor(v) for v in values]
    known = _sums.setdefault(strategy, {})
    signature = tuple((t.dtype, tuple(t.shape)) for t in tensors)
    if signature not in known:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[signature] = _sum_function(strategy)
    with exchange.collective_phase():
        return [v.numpy() for v in known[signature](*tensors)]


# A function for each signature: a single one would be retraced, and TensorFlow would warn of that.
_MOST_KNOWN = 64
_sums: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _sum_function(strategy):
    replicas = local_replicas(strategy)
    strategy = weakref.proxy(strategy)

    def replica(*local):
        if replicas > 1:  # each process counts once
            counted = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group % replicas, 0)
            local = [tf.where(counted, v, tf.zeros_like(v)) for v in local]
        return all_sum(local)

    def total(*local):
        return [strategy.experimental_local_results(v)[0] for v in strategy.run(replica, args=local)]

    return separate_function(total, autograph=False)


def broadcast_from_chief(strategy, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the chief's values on every worker; values of others only define shapes and dtypes.

    TensorFlow's collectives send them in pieces of `PIECE_BYTES`, each of which TensorFlow holds about seven times.
    However many there are, a worker needs memory for the received values, and 30 MiB.
    """
    values = [np.asarray(v) for v in values]
    ring = exchange.exchange_of(strategy)
    if ring is not None:
        with exchange.collective_phase():
            return ring.broadcast_arrays(values)
    chief = is_chief(strategy)
    results = [np.empty(v.shape, v.dtype) for v in values]
    for dtype in dict.fromkeys(v.dtype for v in values):
        given = [v.reshape(-1) for v in values if v.dtype == dtype]
        taken = [v.reshape(-1) for v in results if v.dtype == dtype]
        total, most = sum(v.size for v in given), PIECE_BYTES // dtype.itemsize
        for start in range(0, total, most):
            size = min(most, total - start)
            # few different sizes: TensorFlow traces a function for each
            piece = np.zeros(1 << (size - 1).bit_length() if size < most else most, dtype)
            if chief:
                _copy(given, start, piece[:size], out=False)
            (summed,) = sum_over_workers(strategy, [piece])
            _copy(taken, start, summed[:size], out=True)
    return results


def chief_number(strategy, number: int) -> int:
    """Returns the chief's number on every worker of a strategy; `number` itself if the strategy spans no workers."""
    return int(broadcast_from_chief(strategy, [np.int64(number)])[0]) if spans_workers(strategy) else number


# Large enough to use the network's full rate.
PIECE_BYTES = 4 << 20


def _copy(arrays: list[np.ndarray], start: int, piece: np.ndarray, out: bool) -> None:
    """Copies between a piece and flat arrays in sequence, from item `start` on; `out`: into the arrays."""
    stop, begin = start + piece.size, 0
    for array in arrays:
        first, last = max(start, begin), min(stop, begin + array.size)
        if first < last:
            section, source = array[first - begin : last - begin], piece[first - start : last - start]
            if out:
                section[:] = source
            else:
                source[:] = section
        begin += array.size


def read(variable) -> np.ndarray:
    """Returns a variable's values, as a view if NumPy has their type: for reading only, and not to keep."""
    tensor = tf.convert_to_tensor(variable)
    try:
        return np.asarray(memoryview(tensor))
    except ValueError:  # the buffer protocol has no bfloat16
        return tensor.numpy()


def bytes_of(variable) -> int:
    """Returns the number of bytes of a variable of numbers."""
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def groups(variables: Sequence, most_bytes: int = 4 * PIECE_BYTES) -> list[list]:
    """Groups variables in their order, up to `most_bytes` each; a larger variable has its own group."""
    made, size = [], 0
    for variable in variables:
        bytes_ = bytes_of(variable)
        if not made or size + bytes_ > most_bytes:
            made.append([])
            size = 0
        made[-1].append(variable)
        size += bytes_
    return made
