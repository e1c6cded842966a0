"""Gradients summed over the ring of `ring.py` in the place of TensorFlow's collectives, where workers compute on CPUs.

TensorFlow's ring over gRPC copies a tensor into messages and back several times; on GPUs NCCL does the work, and this
module nothing. Gradients travel in packs, the last layers' first, so that the sum of one pack runs while the backward
pass computes the next. A pack is weighted with the rows while it is copied together, and may be rounded to 16 bits;
float16 has scales of its own, as the sum of gradients may be larger than it can be.
"""

from __future__ import annotations

import functools
import time
import warnings
import weakref
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from raytf.collectives import ring, scaled_float16
from raytf.collectives.communicator import local_replicas, spans_workers, sum_over_workers
from raytf.collectives.ring import Listener, Ring
from raytf.compat.tensorflow import rank as strategy_rank
from raytf.errors import ConfigError
from raytf.runtime.ports import bound

# Large enough that the sockets work at their rate, small enough that the backward pass still has something to compute.
PACK_BYTES = 4 << 20
# TensorFlow takes an array of NumPy's without a copy where it begins at such an address.
_ALIGNED = 64
_JOIN_TIMEOUT = 120.0
# That stay in a core's cache.
_BLOCKS_AT_ONCE = 32

_rings: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class GradientRing:
    """Sums gradients over the workers of a strategy.

    Args:
        ring: connected.
        pack_bytes: packs are closed at this size.
        wire_dtype: floating type of 16 bits in which wider gradients travel, or None for their own.
    """

    def __init__(self, ring: Ring, pack_bytes: int = PACK_BYTES, wire_dtype: tf.DType | None = None):
        self.ring, self._pack_bytes = ring, pack_bytes
        self._wire_dtype = None if wire_dtype is None else wire_dtype.as_numpy_dtype
        self.seconds = 0.0  # spent in sums since the start, waiting for others included
        # TensorFlow keeps the order of what uses one variable, also into conditions and loops, but not that of two sums
        # that need nothing of each other: workers would make them in different orders
        with tf.init_scope():
            self._turn = tf.Variable(0, trainable=False, dtype=tf.int64, name="ring_turn")

    def sum(
        self, gradients: Sequence[tf.Tensor], rows: tf.Tensor | None, exact: bool = False
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """Sums of dense gradients over the workers, or their means over the rows of all; in a replica context.

        Args:
            gradients: floating tensors, the same shapes on each worker and at each call from the same place.
            rows: int32 scalar, the rows over which this worker's gradients are means (with none, they count as zeros
                whatever they hold); None sums the gradients as they are.
            exact: let them travel as they are, too.

        Returns:
            (the results in the same order, float64 scalar with the rows of all workers, at least 1, or None).
        """
        total = tf.constant(-1.0, tf.float64)  # the first pack finds it out, and the others wait for that
        with tf.control_dependencies([self._turn.read_value()]):
            mine = tf.identity(tf.cast(-1 if rows is None else rows, tf.float64))
        result: list[tf.Tensor | None] = [None] * len(gradients)
        sum_pack = functools.partial(self._sum_pack, exact or self._wire_dtype is None, _place())
        for places in self._packs(gradients):
            pack = [gradients[i] for i in places]
            dtypes = [tf.float64, *(g.dtype for g in pack)]
            total, *summed = tf.numpy_function(sum_pack, [mine, total, *pack], dtypes)
            total.set_shape([])
            for i, value in zip(places, summed, strict=True):
                value.set_shape(gradients[i].shape)
                result[i] = value
        with tf.control_dependencies([total]):
            self._turn.assign_add(1)
        return result, None if rows is None else total

    def _packs(self, gradients: Sequence[tf.Tensor]) -> list[list[int]]:
        packs: list[list[int]] = []
        filled, dtype = 0, None
        for i in reversed(range(len(gradients))):  # the backward pass begins with the last layers
            gradient = gradients[i]
            size = (gradient.shape.num_elements() or 0) * gradient.dtype.size
            if not packs or gradient.dtype != dtype or filled + size > self._pack_bytes:
                packs.append([])
                filled, dtype = 0, gradient.dtype
            packs[-1].append(i)
            filled += size
        return packs

    def _sum_pack(
        self, exact: bool, place: int, rows: np.float64, total: np.float64, *pack: np.ndarray
    ) -> list[np.ndarray]:
        began = time.perf_counter()
        weight = 1.0
        if rows >= 0:
            if total < 0:
                counted = np.full(self.ring.size, rows, np.float64)
                self.ring.add(counted, place)
                total = np.maximum(counted[0], 1.0)
            weight = rows / total
        dtype = pack[0].dtype
        wire = dtype if exact or dtype.itemsize == 2 else np.dtype(self._wire_dtype)
        step = _ALIGNED // wire.itemsize
        starts = np.cumsum([0, *(-(-g.size // step) * step for g in pack)])
        items = int(starts[-1])
        blocks = self.ring.padded(scaled_float16.blocks(items)) if wire == np.float16 else 0
        wire = np.dtype(np.float32) if blocks else wire
        scaled = 0 < blocks * scaled_float16.BLOCK.itemsize < items * wire.itemsize  # few numbers fill no blocks
        buffer = _empty(blocks * scaled_float16.ITEMS if scaled else self.ring.padded(items), wire)
        for gradient, start, following in zip(pack, starts, [*starts[1:-1], buffer.size], strict=False):
            _put(gradient.reshape(-1), weight, buffer[start : start + gradient.size])
            buffer[start + gradient.size : following] = 0
        if scaled:
            self._add_scaled(buffer.reshape(blocks, -1), place)
        else:
            self.ring.add(buffer, place)
        summed = buffer if buffer.dtype == dtype else _converted(buffer, dtype)
        self.seconds += time.perf_counter() - began
        return [
            np.float64(total),
            *(summed[s : s + g.size].reshape(g.shape) for g, s in zip(pack, starts, strict=False)),
        ]

    def _add_scaled(self, numbers: np.ndarray, place: int) -> None:
        """Sums float32 (blocks, items) over the workers, in place, in float16 with scales."""
        coded = np.empty(len(numbers), scaled_float16.BLOCK)
        for begin in range(0, len(numbers), _BLOCKS_AT_ONCE):
            part = slice(begin, begin + _BLOCKS_AT_ONCE)
            scaled_float16.encode(numbers[part], coded[part])
        self.ring.add(coded, place)
        for begin in range(0, len(numbers), _BLOCKS_AT_ONCE):
            part = slice(begin, begin + _BLOCKS_AT_ONCE)
            scaled_float16.decode(coded[part], numbers[part])


_places: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _place() -> int:
    """The number of a sum among those of the function that is traced, from 1, or 0 where none is.

    A worker that takes another branch of a `tf.cond` than the others is found out by it.
    """
    if tf.executing_eagerly():
        return 0
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    _places[graph] = _places.get(graph, 0) + 1
    return _places[graph]


@np.errstate(over="ignore", invalid="ignore")  # gradients may overflow; loss scaling looks for it afterwards
def _put(values: np.ndarray, weight: float, target: np.ndarray) -> None:
    """target = weight * values; what has no weight may be no number."""
    if weight == 0:
        target[...] = 0
    elif weight == 1:
        target[...] = values
    elif target.dtype == values.dtype and values.dtype.itemsize > 2:
        np.multiply(values, values.dtype.type(weight), out=target)
    else:  # in pieces that stay in a core's cache
        kind = values.dtype if values.dtype.itemsize > 2 else np.dtype(np.float32)
        wide = np.empty(1 << 16, kind)
        for i in range(0, values.size, wide.size):
            piece = values[i : i + wide.size]
            weighted = wide[: piece.size]
            np.multiply(piece, kind.type(weight), out=weighted, dtype=kind)
            target[i : i + piece.size] = weighted


def _empty(items: int, dtype: np.dtype) -> np.ndarray:
    memory = np.empty(items * dtype.itemsize + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + items * dtype.itemsize].view(dtype)


@np.errstate(over="ignore", invalid="ignore")
def _converted(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    made = _empty(values.size, dtype)
    made[...] = values
    return made


def attach(
    strategy,
    *,
    timeout_s: float | None,
    pack_bytes: int,
    wire_dtype: str | None,
    ports: tuple[int, int],
) -> None:
    """Gives `strategy` a ring where one helps: several workers with one CPU device each. All workers call it at once.

    The ring's token is the one that `ring.keep_token` was given, on all workers or on none. Without one, as in a script
    with a hand-set TF_CONFIG, there is no ring.

    Args:
        strategy: just built.
        timeout_s: seconds that a sum waits for a neighbour that lives; None waits for ever.
        pack_bytes: bytes of a pack; 0 takes `PACK_BYTES`.
        wire_dtype: "bfloat16", "float16" or None.
        ports: the first and the last on which it may listen.

    Raises:
        ConfigError: without a token `wire_dtype` would mean nothing, or some workers have a token and others none.
        PeerLostError: a worker did not join within two minutes.
    """
    if not spans_workers(strategy) or local_replicas(strategy) > 1:
        return
    if any("GPU" in device for device in strategy.extended.worker_devices):
        return
    cluster = strategy.cluster_resolver.cluster_spec().as_dict()
    hosts = [a.rpartition(":")[0].strip("[]") for job in ("chief", "worker") for a in cluster.get(job, [])]
    rank = strategy_rank(strategy)
    token = ring.token()
    listener = None if token is None else Listener(hosts[rank], bound(hosts[rank], ports))
    found = np.zeros(len(hosts), np.int64)
    found[rank] = 0 if listener is None else listener.port
    try:
        (found,) = sum_over_workers(strategy, [found])
        if not found.all():
            _check_without(found, wire_dtype)
            return
        addresses = [(host, int(port)) for host, port in zip(hosts, found, strict=True)]
        joined = listener.join(rank, addresses, token, _JOIN_TIMEOUT, timeout_s)
    finally:
        if listener is not None:
            listener.close()
    wire = None if wire_dtype is None else tf.as_dtype(wire_dtype)
    _rings[strategy.extended] = GradientRing(joined, pack_bytes or PACK_BYTES, wire)
    weakref.finalize(strategy.extended, joined.close)


def _check_without(found: np.ndarray, wire_dtype: str | None) -> None:
    """What is told where workers have no token, by the ports of those that have."""
    if found.any():
        raise ConfigError(
            "All workers of a ring have its token, or none has",
            f"none on workers {np.flatnonzero(found == 0).tolist()}",
            "Start all of them in the same way",
        )
    if wire_dtype is not None:
        raise ConfigError(
            "gradient_dtype needs raytf's ring, and that a token which whoever starts the processes gives to all",
            f"gradient_dtype={wire_dtype!r} without a token",
            "Start the workers with a trainer of raytf or `raytf run`, or call raytf.keep_token in each",
        )
    warnings.warn(
        "these processes were given no token for raytf's ring, so that gradients travel through TensorFlow's "
        "collectives, which are slower on CPUs: start them with a trainer of raytf or `raytf run`, or call "
        "raytf.keep_token in each",
        stacklevel=2,
    )


def of(strategy) -> GradientRing | None:
    """The ring that `attach` gave to `strategy`, or None."""
    return _rings.get(strategy.extended)
