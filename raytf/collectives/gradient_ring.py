"""Gradients summed over the ring of `ring.py` in the place of TensorFlow's collectives, where workers compute on CPUs.

TensorFlow's ring over gRPC copies a tensor into messages and back several times; on GPUs NCCL does the work, and this
module nothing. Gradients travel in packs, the last layers' first, so that the sum of one pack runs while the backward
pass computes the next. A pack is weighted with the rows while it is copied together, and may be rounded to 16 bits;
float16 has scales of its own, as the sum of gradients may be larger than it can be.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import time
import warnings
import weakref
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from raytf import activity
from raytf.collectives import exchange, ring, scaled_float16
from raytf.collectives.exchange import ALIGNED, Exchange, empty
from raytf.collectives.healing import Detached
from raytf.collectives.ring import Listener, Ring
from raytf.compat.tensorflow import giving_memory
from raytf.errors import ConfigError, PeerLostError
from raytf.runtime import ports

# Large enough that the sockets work at their rate, small enough that the backward pass still has something to compute.
PACK_BYTES = 4 << 20
# That stay in a core's cache.
_BLOCKS_AT_ONCE = 32
# In which a worker tells how many rows it has, before few gradients.
_ROWS_BYTES = ALIGNED


class GradientRing(Exchange):
    """Sums gradients over the workers of a strategy, and exchanges what else they have.

    Args:
        ring: connected.
        pack_bytes: packs are closed at this size.
        wire_dtype: floating type of 16 bits in which wider gradients travel, or None for their own.

    Attributes:
        seconds: spent in sums since the start, waiting for others included.
        completed: sums of gradients that are whole on this worker, of all packs and what else belongs to an update;
            counted from 0 for each ring. No part of a sum is used before.
    """

    def __init__(self, ring: Ring | Detached, pack_bytes: int = PACK_BYTES, wire_dtype: tf.DType | None = None):
        super().__init__(ring)
        self._pack_bytes = pack_bytes
        self._wire_dtype = None if wire_dtype is None else wire_dtype.as_numpy_dtype
        self.seconds = 0.0

    def commit(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor | tf.IndexedSlices]:
        """The same gradients, none of which can be used before all are there; closes a `sum` that was not `last`."""
        parts = [part for g in gradients for part in ([g.values] if isinstance(g, tf.IndexedSlices) else [g])]
        if tf.executing_eagerly():
            self._complete()
            return list(gradients)
        with tf.control_dependencies(parts):
            done = tf.numpy_function(self._complete, [], [tf.bool])
        with tf.control_dependencies(done):
            return [_same(g) for g in gradients]

    def _complete(self) -> list[np.bool_]:
        self.completed += 1
        return [np.True_]

    def sum(
        self, gradients: Sequence[tf.Tensor], rows: tf.Tensor | None, exact: bool = False, last: bool = True
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """Sums of dense gradients over the workers, or their means over the rows of all; in a replica context.

        None of the results is there before all packs have been summed: an update is made as a whole, or not.

        Args:
            gradients: floating tensors, the same shapes on each worker and at each call from the same place.
            rows: int32 scalar, the rows over which this worker's gradients are means (with none, they count as zeros
                whatever they hold); None sums the gradients as they are.
            exact: let them travel as they are, too.
            last: nothing else belongs to the update; else `commit` follows.

        Returns:
            (the results in the same order, float64 scalar with the rows of all workers, at least 1, or None).
        """
        total = tf.constant(-1.0, tf.float64)  # the first pack finds it out, and the others wait for that
        with tf.control_dependencies([self._turn.read_value()]):
            mine = tf.identity(tf.cast(-1 if rows is None else rows, tf.float64))
        result: list[tf.Tensor | None] = [None] * len(gradients)
        place, packs = _place(), self._packs(gradients)
        for number, places in enumerate(packs):
            closes = last and number == len(packs) - 1
            sum_pack = functools.partial(self._made, self._sum_pack, exact or self._wire_dtype is None, place, closes)
            pack = [gradients[i] for i in places]
            dtypes = [tf.float64, *(g.dtype for g in pack)]
            with giving_memory():
                total, *summed = tf.numpy_function(sum_pack, [mine, total, *pack], dtypes)
            total.set_shape([])
            for i, value in zip(places, summed, strict=True):
                value.set_shape(gradients[i].shape)
                result[i] = value
        with tf.control_dependencies([total]):  # each pack has waited for the one before
            self._turn.assign_add(1)
            if len(packs) > 1:
                result = [tf.identity(value) for value in result]
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
        self, exact: bool, place: int, closes: bool, rows: np.float64, total: np.float64, *pack: np.ndarray
    ) -> list[np.ndarray]:
        began = time.perf_counter()
        dtype = pack[0].dtype
        wire = dtype if exact or dtype.itemsize == 2 else np.dtype(self._wire_dtype)
        step = ALIGNED // wire.itemsize
        starts = list(itertools.accumulate((-(-g.size // step) * step for g in pack), initial=0))
        items, counts = starts[-1], rows >= 0 and total < 0
        if counts and wire == dtype and self.ring.trades(self.ring.padded(items) * dtype.itemsize + _ROWS_BYTES):
            summed, total = self._sum_at_once(rows, place, pack, starts)
        else:
            if counts:
                counted = np.full(self.ring.size, rows, np.float64)
                self.ring.add(counted, place)
                total = np.maximum(counted[0], 1.0)
            summed = self._sum_weighted(rows / total if rows >= 0 else 1.0, place, pack, starts, wire)
        self.seconds += time.perf_counter() - began
        self.completed += closes
        return [
            np.float64(total),
            *(summed[s : s + g.size].reshape(g.shape) for g, s in zip(pack, starts, strict=False)),
        ]

    def _sum_at_once(
        self, rows: np.float64, place: int, pack: Sequence[np.ndarray], starts: Sequence[int]
    ) -> tuple[np.ndarray, np.float64]:
        """(the mean of few gradients over the rows of all, these): each worker gives the others its own as they are."""
        dtype = pack[0].dtype
        content = np.zeros(_ROWS_BYTES + self.ring.padded(starts[-1]) * dtype.itemsize, np.uint8)
        content[:_ROWS_BYTES].view(np.float64)[0] = rows
        own = content[_ROWS_BYTES:].view(dtype)
        for gradient, start in zip(pack, starts, strict=False):
            own[start : start + gradient.size] = gradient.reshape(-1)
        parts = self.ring.trade(content, place)
        counted = [np.frombuffer(part[:_ROWS_BYTES], np.float64)[0] for part in parts]
        total = np.maximum(sum(counted), 1.0)
        numbers = parts[:, _ROWS_BYTES:].view(dtype)
        for part, its in zip(numbers, counted, strict=True):
            _put(part, its / total, part)
        summed = empty(own.size, dtype)
        self.ring.sum_in_order(numbers, summed)
        return summed, total

    def _sum_weighted(
        self, weight: float, place: int, pack: Sequence[np.ndarray], starts: Sequence[int], wire: np.dtype
    ) -> np.ndarray:
        """The sum of gradients with a weight, which may travel in another type; each begins where `starts` says."""
        dtype, items = pack[0].dtype, starts[-1]
        blocks = self.ring.padded(scaled_float16.blocks(items)) if wire == np.float16 else 0
        wire = np.dtype(np.float32) if blocks else wire
        scaled = 0 < blocks * scaled_float16.BLOCK.itemsize < items * wire.itemsize  # few numbers fill no blocks
        size = blocks * scaled_float16.ITEMS if scaled else self.ring.padded(items)
        buffer = empty(size, wire) if scaled else self._empty(size, wire)
        for gradient, start, following in zip(pack, starts, [*starts[1:-1], buffer.size], strict=False):
            buffer[start + gradient.size : following] = 0
        flat = [gradient.reshape(-1) for gradient in pack]

        def fill(begin: int, end: int) -> None:
            for i in range(bisect.bisect_right(starts, begin, hi=len(flat)) - 1, len(flat)):
                first, last = max(begin, starts[i]), min(end, starts[i] + flat[i].size)
                if first < last:
                    _put(flat[i][first - starts[i] : last - starts[i]], weight, buffer[first:last])
                if starts[i] >= end:
                    break

        if scaled:
            fill(0, items)
            self._add_scaled(buffer.reshape(blocks, -1), place)
        else:
            buffer = self.ring.add(buffer, place, fill)
        return buffer if buffer.dtype == dtype else _converted(buffer, dtype)

    def _add_scaled(self, numbers: np.ndarray, place: int) -> None:
        """Sums float32 (blocks, items) over the workers, in place, in float16 with scales."""
        coded = self._empty(len(numbers), scaled_float16.BLOCK)
        for begin in range(0, len(numbers), _BLOCKS_AT_ONCE):
            part = slice(begin, begin + _BLOCKS_AT_ONCE)
            scaled_float16.encode(numbers[part], coded[part])
        coded = self.ring.add(coded, place)
        for begin in range(0, len(numbers), _BLOCKS_AT_ONCE):
            part = slice(begin, begin + _BLOCKS_AT_ONCE)
            scaled_float16.decode(coded[part], numbers[part])


def _same(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(gradient.values), gradient.indices, gradient.dense_shape)
    return tf.identity(gradient)


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


@np.errstate(over="ignore", invalid="ignore")
def _converted(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    made = empty(values.size, dtype)
    made[...] = values
    return made


@dataclasses.dataclass(frozen=True)
class Members:
    """The workers of a strategy, as each of them knows them.

    Args:
        addresses: "host:port" of each, by rank; the ring listens there, as TensorFlow's server would.
        rank: this worker's.
    """

    addresses: tuple[str, ...]
    rank: int


def members(resolver) -> Members | None:
    """The workers of a cluster where a ring helps: several, with one CPU device each; else None.

    Args:
        resolver: a `tf.distribute.cluster_resolver.ClusterResolver`, or None for that of TF_CONFIG.
    """
    resolver = resolver or tf.distribute.cluster_resolver.TFConfigClusterResolver()
    spec, job, index = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    jobs = [one for one in ("chief", "worker") if one in spec.jobs]
    addresses = [address for one in jobs for address in spec.job_tasks(one)]
    if len(addresses) < 2 or job not in jobs or index is None or tf.config.get_visible_devices("GPU"):
        return None
    before = spec.num_tasks("chief") if job == "worker" and "chief" in jobs else 0
    return Members(tuple(addresses), before + index)


def join(
    group: Members,
    *,
    detached: Detached | None = None,
    join_timeout_s: float,
    timeout_s: float | None,
    pack_bytes: int,
    wire_dtype: str | None,
) -> GradientRing:
    """A ring of the workers; all of them call it at once, before their strategies are built.

    The ring's token is the one that `ring.keep_token` was given, the same on all workers.

    Args:
        group: from `members`.
        detached: stands for a ring that is joined later; None joins one.
        join_timeout_s: seconds within which all workers must come.
        timeout_s: seconds that a sum waits for a neighbour that lives; None waits for ever.
        pack_bytes: bytes of a pack; 0 takes `PACK_BYTES`.
        wire_dtype: "bfloat16", "float16" or None.

    Raises:
        ConfigError: something else listens at this worker's address.
        PeerLostError: a worker did not join in time, or is none of this ring.
    """
    joined = detached
    if joined is None:
        try:
            joined = connect(group, ring.token(), ring.next_generation(), join_timeout_s, timeout_s)
        except PeerLostError as error:
            alike = "all workers must be started alike, with one token, and with GPUs on all or on none"
            raise PeerLostError(error.rank, f"{error.why}; {alike}", error.lost) from error
    return GradientRing(joined, pack_bytes or PACK_BYTES, None if wire_dtype is None else tf.as_dtype(wire_dtype))


def listener(group: Members) -> Listener:
    """Listens at this worker's address, for a ring.

    Raises:
        ConfigError: something else listens there.
    """
    address = group.addresses[group.rank]
    return Listener(ports.split(address)[0], ports.own(address))


def connect(group: Members, token: bytes, generation: int, join_timeout_s: float, timeout_s: float | None) -> Ring:
    """A ring of one generation; all its members call it at once. See `join`."""
    addresses = [ports.split(address) for address in group.addresses]
    listening = listener(group)
    with activity.here.meeting(activity.COLLECTIVE):
        joined = listening.join(group.rank, addresses, token, join_timeout_s, timeout_s, generation=generation)
    ring.was_joined(generation)
    return joined


def check_without(wire_dtype: str | None) -> None:
    """Says what it means that this worker has no token, where a ring would help.

    Raises:
        ConfigError: `wire_dtype` would mean nothing.
    """
    if wire_dtype is not None:
        raise ConfigError(
            "gradient_dtype needs raytf's ring, and the ring needs a token that all processes are started with",
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
    """The ring of a strategy's workers, or None where they meet in TensorFlow's collectives, or there is one."""
    return exchange.of(strategy)
