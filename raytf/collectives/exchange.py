"""Exchanges of workers over a ring, other than gradients: sums, gathers and broadcasts, in graphs and eagerly.

All workers must make their exchanges in one order. TensorFlow keeps the order of operations on one variable, also in
conditions and loops, but not of two independent exchanges. So each exchange reads a variable before it starts, and
changes it afterwards.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from raytf import activity
from raytf.collectives import packs, recovery_client, ring_token
from raytf.collectives.packs import ALIGNED
from raytf.collectives.recovery_client import PlaceholderRing
from raytf.collectives.ring import Ring
from raytf.compat.tensorflow import releasing_functions
from raytf.errors import ConfigError, RaytfError

SUMMABLE = frozenset({tf.float64, tf.float32, tf.float16, tf.bfloat16, tf.int64, tf.int32})
# Dtypes of TensorFlow without a fixed number of bytes.
NO_NUMBERS = (tf.string, tf.resource, tf.variant)
# Smaller arrays are sent together.
_SMALL_BYTES = 1 << 20

_exchanges: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Exchange:
    """The exchanges of one worker with the other workers of its ring.

    Args:
        ring: A connected ring.

    Attributes:
        completed: Number of updates whose sums are complete on this worker, from 0 for each ring.
        initializes_locally: Whether new variables keep this worker's initial values, instead of the chief's.
    """

    def __init__(self, ring: Ring | PlaceholderRing):
        self.ring, self.completed, self.initializes_locally = ring, 0, False
        with tf.init_scope():
            self._turn = tf.Variable(0, trainable=False, dtype=tf.int64, name="ring_turn")

    def replace(self, ring: Ring) -> None:
        """Replaces a broken ring by another connected ring. Traced functions stay valid and use it.

        All members call it between two steps, with rings of one generation. This worker keeps its rank, and `completed`
        restarts at 0.
        """
        self.close()
        self.ring, self.completed = ring, 0
        ring_token.was_joined(ring.generation)

    def close(self) -> None:
        """Leaves the ring."""
        self.ring.close()

    # ---------------------------------------------------------------------------------- NumPy, between steps

    def all_reduce_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the sum of each array over the workers, with equal dtypes and shapes; makes one sum per dtype."""
        return self._run(self._all_reduce_arrays, arrays)

    def gather_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the rows of each array of all workers, by rank; dimensions other than the first are equal."""
        return self._run(self._gather_arrays, arrays)

    def broadcast_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the chief's values of each array; arrays of other workers only define shapes and dtypes."""
        return self._run(self._broadcast_arrays, arrays)

    def _all_reduce_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        results: list[np.ndarray | None] = [None] * len(arrays)
        for dtype in dict.fromkeys(array.dtype for array in arrays):
            indices = [i for i, array in enumerate(arrays) if array.dtype == dtype]
            starts = packs.starts(tuple(arrays[i].size for i in indices), dtype.itemsize)
            buffer = self._empty(self.ring.padded(starts[-1]), dtype)
            buffer[...] = 0
            for i, start in zip(indices, starts, strict=False):
                buffer[start : start + arrays[i].size] = arrays[i].reshape(-1)
            if buffer.size:
                buffer = self.ring.all_reduce(buffer)
            for i, start in zip(indices, starts, strict=False):
                results[i] = buffer[start : start + arrays[i].size].reshape(arrays[i].shape)
        return results

    def _gather_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        ring, count = self.ring, len(arrays)
        if isinstance(ring, PlaceholderRing) and ring.warms_up:
            return [np.concatenate([array] * ring.size) for array in arrays]
        sizes = np.zeros((ring.size, count, 2), np.int64)
        row_bytes = [a.itemsize * int(np.prod(a.shape[1:], dtype=np.int64)) for a in arrays]
        sizes[ring.rank] = [(len(a), size) for a, size in zip(arrays, row_bytes, strict=True)]
        (sizes,) = self._all_reduce_arrays([sizes])
        if (sizes[:, :, 1] != row_bytes).any():
            raise RaytfError(
                "What is gathered from workers must have the same shape on all, but for the gathered dimension, "
                f"received: rows of {sizes[:, :, 1].tolist()} bytes by rank. Gather what is alike."
            )
        results = []
        for i, array in enumerate(arrays):
            bounds = [0, *np.cumsum(sizes[:, i, 0] * row_bytes[i]).tolist()]
            whole = self._empty(bounds[-1], np.dtype(np.uint8))
            whole[bounds[ring.rank] : bounds[ring.rank + 1]] = bytes_of(array)
            if whole.size:
                whole = ring.gather(whole, bounds)
            results.append(whole.view(array.dtype).reshape(int(sizes[:, i, 0].sum()), *array.shape[1:]))
        return results

    def _broadcast_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        results = [self._empty(a.size, a.dtype) for a in arrays]
        if self.ring.rank == 0 or self.ring.is_placeholder:
            for array, result in zip(arrays, results, strict=True):
                result[...] = array.reshape(-1)
        packed: list[np.ndarray] = []
        for i, result in enumerate(results):
            if result.nbytes > _SMALL_BYTES:
                results[i] = self.ring.broadcast(result.view(np.uint8)).view(result.dtype)
            elif result.size:
                packed.append(result.view(np.uint8))
            if sum(part.size for part in packed) > _SMALL_BYTES:
                self._broadcast_packed(packed)
        self._broadcast_packed(packed)
        return [result.reshape(a.shape) for result, a in zip(results, arrays, strict=True)]

    def _broadcast_packed(self, arrays: list[np.ndarray]) -> None:
        if not arrays:
            return
        whole = self.ring.broadcast(np.concatenate(arrays))
        start = 0
        for array in arrays:
            array[...] = whole[start : start + array.size]
            start += array.size
        arrays.clear()

    # ------------------------------------------------------------------------- TensorFlow, in steps and outside

    def add(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sum of each tensor over the workers, which have equal dtypes and shapes.

        Raises:
            ConfigError: A dtype is not in `SUMMABLE`.
        """
        for tensor in tensors:
            if tensor.dtype not in SUMMABLE:
                raise ConfigError(
                    f"Workers sum {', '.join(sorted(d.name for d in SUMMABLE))}", tensor.dtype.name, "Cast it before"
                )
        results = self._ordered(lambda *arrays: self._all_reduce_arrays(arrays), tensors)
        for value, tensor in zip(results, tensors, strict=True):
            value.set_shape(tensor.shape)
        return results

    def gather(self, tensors: Sequence[tf.Tensor], axis: int | tf.Tensor = 0) -> list[tf.Tensor]:
        """Returns the parts of each tensor of all workers along an axis, by rank."""

        def gather(axis_index: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            results = self._gather_arrays([np.moveaxis(array, int(axis_index), 0) for array in arrays])
            return [np.ascontiguousarray(np.moveaxis(array, 0, int(axis_index))) for array in results]

        _check_plain(tensors)
        axis = tf.cast(axis, tf.int64)
        results = self._ordered(gather, [axis, *tensors], [t.dtype for t in tensors])
        known = tf.get_static_value(axis)
        for value, tensor in zip(results, tensors, strict=True):
            if tensor.shape.rank is not None:
                known_axis = None if known is None else int(known) % tensor.shape.rank
                value.set_shape([None if known_axis in (None, i) else size for i, size in enumerate(tensor.shape)])
        return results

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the chief's value of a tensor, which has the same dtype and shape on all workers."""
        _check_plain([tensor])
        (result,) = self._ordered(lambda array: self._broadcast_arrays([array]), [tensor])
        result.set_shape(tensor.shape)
        return result

    def _ordered(
        self, function: Callable, tensors: Sequence[tf.Tensor], dtypes: Sequence[tf.DType] | None = None
    ) -> list[tf.Tensor]:
        """Returns a function's results on tensors, called after all earlier exchanges and before all later ones."""
        if tf.executing_eagerly():
            return [tf.convert_to_tensor(array) for array in self._run(function, *(np.asarray(t) for t in tensors))]
        dtypes = [t.dtype for t in tensors] if dtypes is None else dtypes
        return self._in_turn(functools.partial(self._run, function), tensors, dtypes)

    def _in_turn(self, function: Callable, tensors: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
        """Calls a function of arrays in a graph, after all earlier exchanges and before all later ones."""
        with tf.control_dependencies([self._turn.read_value()]), releasing_functions():
            results = tf.numpy_function(function, list(tensors), dtypes)
        with tf.control_dependencies(results):
            self._turn.assign_add(1)
        return results

    def _empty(self, items: int, dtype: np.dtype) -> np.ndarray:
        """Returns a flat array that TensorFlow, and a next worker on this host, use without a copy."""
        shared = self.ring.empty(items, dtype)
        return empty(items, dtype) if shared is None else shared

    def _run(self, function: Callable, *arrays: np.ndarray):
        return recovery_client.client.run_exchange(self, functools.partial(function, *arrays))

    def send_to_successor(self, tensors: Sequence[tf.Tensor]) -> None:
        """Ends a step: sends this worker's own state to the next one after earlier exchanges (`recovery_client`)."""

        def stepped(*arrays: np.ndarray) -> list[np.bool_]:
            recovery_client.client.send_state_after_step(
                self, b"".join(map(np.ndarray.tobytes, map(np.asarray, arrays)))
            )
            return [np.True_]

        if tf.executing_eagerly():
            stepped(*(np.asarray(t) for t in tensors))
        else:
            self._in_turn(stepped, tensors, [tf.bool])


def _check_plain(tensors: Sequence[tf.Tensor]) -> None:
    for tensor in tensors:
        if tensor.dtype in NO_NUMBERS:
            raise ConfigError("Workers exchange numbers", tensor.dtype.name, "Encode it as numbers")


def bytes_of(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array, without a copy if its memory is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def empty(items: int, dtype: np.dtype) -> np.ndarray:
    """Returns a flat array that TensorFlow uses without a copy."""
    memory = np.empty(items * dtype.itemsize + ALIGNED, np.uint8)
    start = -memory.ctypes.data % ALIGNED
    return memory[start : start + items * dtype.itemsize].view(dtype)


def register(strategy, made: Exchange) -> None:
    """Registers the exchange of a strategy's workers, and leaves its ring when the strategy is freed."""
    _exchanges[strategy.extended] = made
    weakref.finalize(strategy.extended, made.close)


def leave_all() -> None:
    """Leaves the rings of all strategies of this process."""
    for made in list(_exchanges.values()):
        made.close()


def exchange_of(strategy) -> Exchange | None:
    """Returns the exchange of a strategy, or None if workers use TensorFlow's collectives, or there is only one."""
    return _exchanges.get(strategy.extended)


def collective_phase():
    """Returns a context for an exchange between steps, which `activity` records."""
    return activity.tracker.collective(activity.COLLECTIVE)
