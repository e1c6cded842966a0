"""What workers exchange over a ring beside gradients: sums, gatherings and the chief's values, in graphs and outside.

All workers must make their exchanges in one order. TensorFlow keeps the order of what uses one variable, also into
conditions and loops, but not that of two exchanges that need nothing of each other: each reads a variable before, and
changes it after.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from raytf import activity
from raytf.collectives import healing
from raytf.collectives import ring as sockets
from raytf.collectives.healing import Detached
from raytf.collectives.ring import Ring
from raytf.compat.tensorflow import giving_memory
from raytf.errors import ConfigError, RaytfError

SUMMABLE = frozenset({tf.float64, tf.float32, tf.float16, tf.bfloat16, tf.int64, tf.int32})
# TensorFlow's own, which have no fixed number of bytes.
NO_NUMBERS = (tf.string, tf.resource, tf.variant)
# TensorFlow takes an array of NumPy's without a copy where it begins at such an address.
ALIGNED = 64
# What is smaller travels together.
_SMALL_BYTES = 1 << 20

_exchanges: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Exchange:
    """The exchanges of one worker with the others of its ring.

    Args:
        ring: connected.

    Attributes:
        completed: updates whose sums are all there on this worker; counted from 0 for each ring.
    """

    def __init__(self, ring: Ring | Detached):
        self.ring, self.completed = ring, 0
        with tf.init_scope():
            self._turn = tf.Variable(0, trainable=False, dtype=tf.int64, name="ring_turn")

    def replace(self, ring: Ring) -> None:
        """Takes another connected ring in the place of a broken one; what is traced stays, and uses it.

        All its members call it between two steps, with rings of one generation. This worker keeps its rank, and
        `completed` begins anew.
        """
        self.close()
        self.ring, self.completed = ring, 0
        sockets.was_joined(ring.generation)

    def close(self) -> None:
        """Leaves the ring."""
        self.ring.close()

    # ---------------------------------------------------------------------------------- NumPy, between steps

    def add_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The sum of each array over the workers, which have the same dtypes and shapes; in as many sums as dtypes."""
        return self._made(self._add_arrays, arrays)

    def gather_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The rows of each array of all workers, in the order of their ranks; all but the first dimension are alike."""
        return self._made(self._gather_arrays, arrays)

    def chiefs_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The chief's values of each array; the others' are only read for their shapes and dtypes."""
        return self._made(self._chiefs_arrays, arrays)

    def _add_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        found: list[np.ndarray | None] = [None] * len(arrays)
        for dtype in dict.fromkeys(array.dtype for array in arrays):
            places = [i for i, array in enumerate(arrays) if array.dtype == dtype]
            step = max(1, ALIGNED // dtype.itemsize)
            starts = np.cumsum([0, *(-(-arrays[i].size // step) * step for i in places)])
            buffer = self._empty(self.ring.padded(int(starts[-1])), dtype)
            buffer[...] = 0
            for i, start in zip(places, starts, strict=False):
                buffer[start : start + arrays[i].size] = arrays[i].reshape(-1)
            if buffer.size:
                buffer = self.ring.add(buffer)
            for i, start in zip(places, starts, strict=False):
                found[i] = buffer[start : start + arrays[i].size].reshape(arrays[i].shape)
        return found

    def _gather_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        ring, count = self.ring, len(arrays)
        if isinstance(ring, Detached) and ring.rehearses:
            return [np.concatenate([array] * ring.size) for array in arrays]
        told = np.zeros((ring.size, count, 2), np.int64)
        row_bytes = [a.itemsize * int(np.prod(a.shape[1:], dtype=np.int64)) for a in arrays]
        told[ring.rank] = [(len(a), size) for a, size in zip(arrays, row_bytes, strict=True)]
        (told,) = self._add_arrays([told])
        if (told[:, :, 1] != row_bytes).any():
            raise RaytfError(
                "What is gathered from workers must have the same shape on all, but for the gathered dimension, "
                f"received: rows of {told[:, :, 1].tolist()} bytes by rank. Gather what is alike."
            )
        found = []
        for i, array in enumerate(arrays):
            bounds = [0, *np.cumsum(told[:, i, 0] * row_bytes[i]).tolist()]
            whole = self._empty(bounds[-1], np.dtype(np.uint8))
            whole[bounds[ring.rank] : bounds[ring.rank + 1]] = bytes_of(array)
            if whole.size:
                whole = ring.gather(whole, bounds)
            found.append(whole.view(array.dtype).reshape(int(told[:, i, 0].sum()), *array.shape[1:]))
        return found

    def _chiefs_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        found = [self._empty(a.size, a.dtype) for a in arrays]
        if self.ring.rank == 0 or self.ring.alone:
            for array, its in zip(arrays, found, strict=True):
                its[...] = array.reshape(-1)
        together: list[np.ndarray] = []
        for i, its in enumerate(found):
            if its.nbytes > _SMALL_BYTES:
                found[i] = self.ring.broadcast(its.view(np.uint8)).view(its.dtype)
            elif its.size:
                together.append(its.view(np.uint8))
            if sum(one.size for one in together) > _SMALL_BYTES:
                self._broadcast_together(together)
        self._broadcast_together(together)
        return [its.reshape(a.shape) for its, a in zip(found, arrays, strict=True)]

    def _broadcast_together(self, arrays: list[np.ndarray]) -> None:
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
        """The sum of each tensor over the workers, which have the same dtypes and shapes.

        Raises:
            ConfigError: a dtype is not in `SUMMABLE`.
        """
        for tensor in tensors:
            if tensor.dtype not in SUMMABLE:
                raise ConfigError(
                    f"Workers sum {', '.join(sorted(d.name for d in SUMMABLE))}", tensor.dtype.name, "Cast it before"
                )
        found = self._ordered(lambda *arrays: self._add_arrays(arrays), tensors)
        for value, tensor in zip(found, tensors, strict=True):
            value.set_shape(tensor.shape)
        return found

    def gather(self, tensors: Sequence[tf.Tensor], axis: int | tf.Tensor = 0) -> list[tf.Tensor]:
        """The parts of each tensor of all workers along an axis, in the order of their ranks."""

        def gather(along: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            found = self._gather_arrays([np.moveaxis(array, int(along), 0) for array in arrays])
            return [np.ascontiguousarray(np.moveaxis(array, 0, int(along))) for array in found]

        _check_plain(tensors)
        axis = tf.cast(axis, tf.int64)
        found = self._ordered(gather, [axis, *tensors], [t.dtype for t in tensors])
        known = tf.get_static_value(axis)
        for value, tensor in zip(found, tensors, strict=True):
            if tensor.shape.rank is not None:
                along = None if known is None else int(known) % tensor.shape.rank
                value.set_shape([None if along in (None, i) else size for i, size in enumerate(tensor.shape)])
        return found

    def chiefs(self, tensor: tf.Tensor) -> tf.Tensor:
        """The chief's value of a tensor, which has the same dtype and shape on all workers."""
        _check_plain([tensor])
        (found,) = self._ordered(lambda array: self._chiefs_arrays([array]), [tensor])
        found.set_shape(tensor.shape)
        return found

    def _ordered(
        self, function: Callable, tensors: Sequence[tf.Tensor], dtypes: Sequence[tf.DType] | None = None
    ) -> list[tf.Tensor]:
        """What a function of arrays makes of tensors, after all exchanges before and before all that follow."""
        if tf.executing_eagerly():
            return [tf.convert_to_tensor(array) for array in self._made(function, *(np.asarray(t) for t in tensors))]
        dtypes = [t.dtype for t in tensors] if dtypes is None else dtypes
        return self._in_turn(functools.partial(self._made, function), tensors, dtypes)

    def _in_turn(self, function: Callable, tensors: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
        """In a graph: calls a function of arrays after all exchanges before and before all that follow."""
        with tf.control_dependencies([self._turn.read_value()]), giving_memory():
            found = tf.numpy_function(function, list(tensors), dtypes)
        with tf.control_dependencies(found):
            self._turn.assign_add(1)
        return found

    def _empty(self, items: int, dtype: np.dtype) -> np.ndarray:
        """A flat array that TensorFlow takes without a copy, and the next worker, if it is on this host."""
        shared = self.ring.empty(items, dtype)
        return empty(items, dtype) if shared is None else shared

    def _made(self, function: Callable, *arrays: np.ndarray):
        return healing.here.make(self, functools.partial(function, *arrays))

    def pass_on(self, tensors: Sequence[tf.Tensor]) -> None:
        """Ends a step: hands what only this worker has to the next one, after all exchanges before; see `healing`."""

        def stepped(*arrays: np.ndarray) -> list[np.bool_]:
            healing.here.stepped(self, b"".join(map(np.ndarray.tobytes, map(np.asarray, arrays))))
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
    """The bytes of an array; those of its memory where they lie in one piece."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def empty(items: int, dtype: np.dtype) -> np.ndarray:
    """A flat array that TensorFlow takes without a copy."""
    memory = np.empty(items * dtype.itemsize + ALIGNED, np.uint8)
    start = -memory.ctypes.data % ALIGNED
    return memory[start : start + items * dtype.itemsize].view(dtype)


def keep(strategy, made: Exchange) -> None:
    """Says that a strategy's workers meet in it, and leaves its ring when the strategy is gone."""
    _exchanges[strategy.extended] = made
    weakref.finalize(strategy.extended, made.close)


def leave_all() -> None:
    """Leaves the rings of all strategies of this process."""
    for made in list(_exchanges.values()):
        made.close()


def of(strategy) -> Exchange | None:
    """The exchange of a strategy, or None where workers meet in TensorFlow's collectives, or there is one."""
    return _exchanges.get(strategy.extended)


def meeting():
    """Around an exchange between steps: it is told where this worker is."""
    return activity.here.meeting(activity.COLLECTIVE)
