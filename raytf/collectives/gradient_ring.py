"""All-reduce of gradients over the ring of `ring.py` instead of TensorFlow's collectives, for workers on CPUs.

TensorFlow's ring over gRPC copies a tensor into messages and back several times. On GPUs NCCL is used, and not this
module. Gradients are sent in packs, the last layers' first, so that the backward pass overlaps with the sums. A pack
is weighted with the rows while it is copied together, and may be rounded to 16 bits. With float16 it has scales, as a
sum of gradients may exceed the range.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from raytf import activity
from raytf.collectives import exchange, packs, ring_token, scaled_float16
from raytf.collectives.exchange import Exchange, bytes_of, empty
from raytf.collectives.packs import ALIGNED, Pack
from raytf.collectives.recovery_client import PlaceholderRing
from raytf.collectives.ring import Ring, ignoring_overflow, put_weighted
from raytf.collectives.ring_listener import Listener
from raytf.compat.tensorflow import releasing_functions
from raytf.errors import ConfigError, PeerLostError
from raytf.logs import warn_user
from raytf.runtime import ports

# Bytes of a pack: large enough for the sockets' full rate, small enough to overlap with the backward pass.
PACK_BYTES = 4 << 20
# Number of blocks that fit into a core's cache.
_BLOCKS_AT_ONCE = 32
# Bytes of a worker's row count, sent before a few gradients.
_ROWS_BYTES = ALIGNED


class GradientRing(Exchange):
    """Sums gradients over the workers of a strategy, in addition to the other exchanges.

    Args:
        ring: A connected ring.
        pack_bytes: Largest size of a pack in bytes; a larger gradient is a pack of its own.
        wire_dtype: Floating dtype of 16 bits to send wider gradients in, or None to send them in their own.

    Attributes:
        seconds: Seconds spent in sums since the start, with the wait for other workers.
        completed: Number of updates whose sums are complete on this worker, over all packs; from 0 for each ring. No
            part of a sum is used before.
    """

    def __init__(self, ring: Ring | PlaceholderRing, pack_bytes: int = PACK_BYTES, wire_dtype: tf.DType | None = None):
        super().__init__(ring)
        self._pack_bytes = pack_bytes
        self._wire_dtype = None if wire_dtype is None else wire_dtype.as_numpy_dtype
        self.seconds = 0.0

    def commit(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor | tf.IndexedSlices]:
        """Returns the same gradients, usable only when all are ready; completes a `sum` that was not `last`."""
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
        self,
        gradients: Sequence[tf.Tensor],
        rows: tf.Tensor | None,
        exact: bool = False,
        last: bool = True,
        shares: bool = False,
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """Sums dense gradients over the workers, or averages them over all workers' rows; in a replica context.

        No result is ready before all packs are summed: an update is made completely, or not at all.

        Args:
            gradients: Floating tensors, with the same shapes on all workers and in all calls of this location.
            rows: int32 scalar, the number of rows over which this worker's gradients are means. With 0 rows they count
                as zeros, even if they are NaN. None sums the gradients without weights.
            exact: Whether to send them in their own dtype, despite `wire_dtype`.
            last: Whether the update has no other gradients; otherwise `commit` follows.
            shares: Whether this worker needs its share of each result only, as a flat tensor, see `packs`.

        Returns:
            (the results in the same order, float64 scalar with the rows of all workers, at least 1, or None).
        """
        total = tf.constant(-1.0, tf.float64)  # the first pack computes it, and the others wait for it
        with tf.control_dependencies([self._turn.read_value()]):
            own_rows = tf.identity(tf.cast(-1 if rows is None else rows, tf.float64))
        result: list[tf.Tensor | None] = [None] * len(gradients)
        call_number, made_packs = _next_sum_number(), self.packs(gradients)
        for number, made in enumerate(made_packs):
            closes, indices = last and number == len(made_packs) - 1, made.indices
            exact = exact or shares or self._wire_dtype is None
            bounds = self.bounds(made) if shares else None
            sum_pack = functools.partial(self._run, self._sum_pack, exact, call_number, closes, bounds)
            pack = [gradients[i] for i in indices]
            dtypes = [tf.float64, *(g.dtype for g in pack)]
            with releasing_functions():
                total, *summed = tf.numpy_function(sum_pack, [own_rows, total, *pack], dtypes)
            total.set_shape([])
            for i, value in zip(indices, summed, strict=True):
                if not shares:
                    value.set_shape(gradients[i].shape)
                result[i] = value
        with tf.control_dependencies([total]):  # each pack waits for the previous one
            self._turn.assign_add(1)
            if len(made_packs) > 1:
                result = [tf.identity(value) for value in result]
        return result, None if rows is None else total

    def sum_rows(
        self, gradients: Sequence[tf.IndexedSlices], rows: tf.Tensor | None, merge: bool, fixed: Sequence[bool | None]
    ) -> list[tf.IndexedSlices]:
        """Sums gradients of some rows of tables over the workers in one exchange, in a replica context.

        Args:
            gradients: Floating slices, of the same tables on all workers.
            rows: As for `sum`.
            merge: Whether ids are unique on each worker, and shall be in the result. Otherwise it has all slices, by
                rank.
            fixed: Whether ids do not come from the rows of the batch, for each of the gradients; None if unknown. If
                they do not, ids that are equal on all workers are in the result once, as in one process. Their values
                are summed. The same holds for unknown ids that are unique, unless each worker has one row.
        """
        flat = [part for g in gradients for part in (tf.cast(g.indices, tf.int64), g.values)]
        own_rows = tf.cast(-1 if rows is None else rows, tf.float64)
        gather = functools.partial(self._sum_rows, merge, tuple(fixed))
        gathered_rows = self._ordered(gather, [own_rows, *flat], [part.dtype for part in flat])
        results = []
        for g, ids, values in zip(gradients, gathered_rows[::2], gathered_rows[1::2], strict=True):
            ids.set_shape([None])
            values.set_shape([None, *g.values.shape[1:]])
            results.append(tf.IndexedSlices(values, tf.cast(ids, g.indices.dtype), g.dense_shape))
        return results

    @ignoring_overflow
    def _sum_rows(self, merge: bool, fixed: Sequence, rows: np.ndarray, *flat: np.ndarray) -> list[np.ndarray]:
        header = np.array([rows, *map(len, flat[::2])], np.float64)
        (gathered,) = self._gather_arrays([np.concatenate([bytes_of(part) for part in (header, *flat)])])
        begin = 0

        def take(count: int, example: np.ndarray) -> np.ndarray:
            nonlocal begin
            first, begin = begin, begin + count * example.itemsize * math.prod(example.shape[1:])
            return gathered[first:begin].view(example.dtype).reshape(count, *example.shape[1:])

        workers = []
        while begin < gathered.size:
            own_rows, *counts = take(header.size, header)
            workers.append((own_rows, [take(int(counts[i // 2]), part) for i, part in enumerate(flat)]))
        total = max(sum(own_rows for own_rows, _ in workers), 1.0)
        counting = [rank for rank, (n, _) in enumerate(workers) if n] or range(len(workers))
        most = max(workers[rank][0] for rank in counting)
        results = []
        for i, part in enumerate(flat[1::2]):
            used = next((parts[2 * i][0] for n, parts in workers if n and parts[2 * i].size), 0)
            ids = [parts[2 * i] if n else np.full_like(parts[2 * i], used) for n, parts in workers]  # of placeholders
            weighted = [_weighted(parts[2 * i + 1], n / total if n >= 0 else 1.0) for n, parts in workers]
            first = ids[counting[0]]
            maybe = fixed[i] or (fixed[i] is None and most > 1 and len(np.unique(first)) == len(first))
            if maybe and all(np.array_equal(ids[rank], first) for rank in counting):
                results += [first, sum(weighted[rank] for rank in counting).astype(part.dtype, copy=False)]
            else:
                results += _merged(ids, weighted, part.dtype) if merge else _joined(ids, weighted, part.dtype)
        return results

    def packs(self, tensors: Sequence[tf.Tensor | tf.TensorSpec]) -> list[Pack]:
        """Returns the packs in which tensors with these dtypes and shapes are summed."""
        kinds = [(t.shape.num_elements() or 0, t.dtype, t.dtype.size) for t in tensors]
        return packs.packs(kinds, self._pack_bytes)

    def bounds(self, pack: Pack) -> list[tuple[int, int]]:
        """Returns (begin, end) of this worker's share of each array of a pack."""
        return pack.shares(self.ring.rank, self.ring.size)

    def join(self, shares: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
        """Returns whole tensors from all workers' shares of `sum`, in a replica context.

        Args:
            shares: This worker's share of each tensor.
            specs: Dtypes and shapes of the tensors.
        """
        result: list[tf.Tensor | None] = [None] * len(specs)
        for pack in self.packs(specs):
            given = [shares[i] for i in pack.indices]
            join = functools.partial(self._join, pack)
            for i, value in zip(pack.indices, self._ordered(join, given), strict=True):
                result[i] = tf.reshape(value, specs[i].shape)
        return result

    def _join(self, pack: Pack, *shares: np.ndarray) -> list[np.ndarray]:
        buffer = self._empty(self.ring.padded(pack.starts[-1]), shares[0].dtype)
        for share, start, (begin, end) in zip(shares, pack.starts, self.bounds(pack), strict=False):
            buffer[start + begin : start + end] = share
        buffer = self.ring.all_gather(buffer)
        return [buffer[start : start + size] for start, size in zip(pack.starts, pack.sizes, strict=False)]

    def whole(self, share: np.ndarray) -> np.ndarray:
        """Returns a whole flat array from all workers' shares of it; between steps, on all workers at once."""
        return self._run(self._whole, share)

    def _whole(self, share: np.ndarray) -> np.ndarray:
        (sizes, parts) = self._gather_arrays([np.array([share.size]), share])
        ends = np.cumsum(sizes)
        order = packs.by_segment(self.ring.size)
        return np.concatenate([parts[ends[rank] - sizes[rank] : ends[rank]] for rank in order])

    @ignoring_overflow
    def _sum_pack(
        self,
        exact: bool,
        sum_number: int,
        closes: bool,
        bounds: Sequence[tuple[int, int]] | None,
        rows: np.float64,
        total: np.float64,
        *pack: np.ndarray,
    ) -> list[np.ndarray]:
        began = time.perf_counter()
        dtype = pack[0].dtype
        wire = dtype if exact or dtype.itemsize == 2 else np.dtype(self._wire_dtype)
        starts = packs.starts(tuple(g.size for g in pack), wire.itemsize)
        items, counts = starts[-1], rows >= 0 and total < 0
        is_small = bounds is None and wire == dtype
        if counts and is_small and self.ring.uses_small_gather(self.ring.padded(items) * dtype.itemsize + _ROWS_BYTES):
            summed, total = self._sum_at_once(rows, sum_number, pack, starts)
        else:
            if counts:
                counted = np.full(self.ring.size, rows, np.float64)
                self.ring.all_reduce(counted, sum_number)
                total = np.maximum(counted[0], 1.0)
            add = self.ring.all_reduce if bounds is None else self.ring.reduce_scatter
            summed = self._sum_weighted(rows / total if rows >= 0 else 1.0, sum_number, pack, starts, wire, add)
        self.seconds += time.perf_counter() - began
        self.completed += closes
        if bounds is None:
            results = (summed[s : s + g.size].reshape(g.shape) for g, s in zip(pack, starts, strict=False))
        else:
            results = (summed[s + b : s + e] for s, (b, e) in zip(starts, bounds, strict=False))
        return [np.float64(total), *results]

    def _sum_at_once(
        self, rows: np.float64, sum_number: int, pack: Sequence[np.ndarray], starts: tuple[int, ...]
    ) -> tuple[np.ndarray, np.float64]:
        """Returns (mean of a few gradients over all workers' rows, number of rows) from a trade of unsummed ones."""
        dtype, total = pack[0].dtype, np.float64(1)
        content = self._empty(_ROWS_BYTES + self.ring.padded(starts[-1]) * dtype.itemsize, np.dtype(np.uint8))
        content[:_ROWS_BYTES].view(np.float64)[0] = rows
        local_gradients = content[_ROWS_BYTES:].view(dtype)
        _clear_gaps(pack, starts, local_gradients)
        for gradient, start in zip(pack, starts, strict=False):
            local_gradients[start : start + gradient.size] = gradient.reshape(-1)
        summed = empty(local_gradients.size, dtype)

        def add(parts: Sequence[np.ndarray]) -> None:
            nonlocal total
            counted = [part[:_ROWS_BYTES].view(np.float64)[0] for part in parts]
            total = np.maximum(sum(counted), 1.0)
            gradients = [part[_ROWS_BYTES:].view(dtype) for part in parts]
            self.ring.sum_in_order(gradients, summed, [rows / total for rows in counted])

        self.ring.all_gather_small(content, add, sum_number)
        return summed, total

    def _sum_weighted(
        self,
        weight: float,
        sum_number: int,
        pack: Sequence[np.ndarray],
        starts: tuple[int, ...],
        wire: np.dtype,
        add: Callable[..., np.ndarray],
    ) -> np.ndarray:
        """Returns the weighted sum of gradients, in an array where they begin at `starts`; `add` sends it as `wire`."""
        dtype, items = pack[0].dtype, starts[-1]
        blocks = self.ring.padded(scaled_float16.blocks(items)) if wire == np.float16 else 0
        wire = np.dtype(np.float32) if blocks else wire
        scaled = 0 < blocks * scaled_float16.BLOCK.itemsize < items * wire.itemsize  # a few numbers do not fill a block
        size = blocks * scaled_float16.ITEMS if scaled else self.ring.padded(items)
        buffer = empty(size, wire) if scaled else self._empty(size, wire)
        _clear_gaps(pack, starts, buffer)
        flat = [gradient.reshape(-1) for gradient in pack]

        def fill(begin: int, end: int) -> None:
            for i in range(bisect.bisect_right(starts, begin, hi=len(flat)) - 1, len(flat)):
                first, last = max(begin, starts[i]), min(end, starts[i] + flat[i].size)
                if first < last:
                    put_weighted(flat[i][first - starts[i] : last - starts[i]], weight, buffer[first:last])
                if starts[i] >= end:
                    break

        if scaled:
            fill(0, items)
            self._add_scaled(buffer.reshape(blocks, -1), sum_number)
        else:
            buffer = add(buffer, sum_number, fill)
        return buffer if buffer.dtype == dtype else _converted(buffer, dtype)

    def _add_scaled(self, numbers: np.ndarray, sum_number: int) -> None:
        """Sums a float32 array (blocks, items) over the workers, in place; sends float16 with scales."""
        coded = self._empty(len(numbers), scaled_float16.BLOCK)
        for begin in range(0, len(numbers), _BLOCKS_AT_ONCE):
            part = slice(begin, begin + _BLOCKS_AT_ONCE)
            scaled_float16.encode(numbers[part], coded[part])
        coded = self.ring.all_reduce(coded, sum_number)
        for begin in range(0, len(numbers), _BLOCKS_AT_ONCE):
            part = slice(begin, begin + _BLOCKS_AT_ONCE)
            scaled_float16.decode(coded[part], numbers[part])


def _clear_gaps(pack: Sequence[np.ndarray], starts: tuple[int, ...], target: np.ndarray) -> None:
    """Sets the items of a pack's array between gradients to zero."""
    for gap in packs.gaps(starts, tuple(g.size for g in pack), target.size):
        target[gap] = 0


def _weighted(values: np.ndarray, weight: float) -> np.ndarray:
    wide = values.astype(np.float32) if values.dtype.itemsize == 2 else values
    result = empty(wide.size, wide.dtype)
    put_weighted(wide.reshape(-1), weight, result)
    return result.reshape(wide.shape)


def _joined(ids: Sequence[np.ndarray], values: Sequence[np.ndarray], dtype: np.dtype) -> list[np.ndarray]:
    """Returns the (ids, values) of all workers, by rank."""
    return [np.concatenate(ids), np.concatenate(values).astype(dtype, copy=False)]


def _merged(ids: Sequence[np.ndarray], values: Sequence[np.ndarray], dtype: np.dtype) -> list[np.ndarray]:
    """Returns (sorted ids, sums of their values); each worker's ids are unique."""
    unique = np.unique(np.concatenate(ids))
    sums = np.zeros((len(unique), *values[0].shape[1:]), values[0].dtype)
    for own_ids, own_values in zip(ids, values, strict=True):
        sums[np.searchsorted(unique, own_ids)] += own_values
    return [unique, sums.astype(dtype, copy=False)]


def _same(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(gradient.values), gradient.indices, gradient.dense_shape)
    return tf.identity(gradient)


_sum_numbers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _next_sum_number() -> int:
    """Returns the number of a sum in the function that is being traced, from 1; 0 in eager mode.

    It detects a worker that takes a different branch of a `tf.cond`.
    """
    if tf.executing_eagerly():
        return 0
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    _sum_numbers[graph] = _sum_numbers.get(graph, 0) + 1
    return _sum_numbers[graph]


def _converted(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    result = empty(values.size, dtype)
    result[...] = values
    return result


@dataclasses.dataclass(frozen=True)
class Members:
    """The workers of a strategy.

    Args:
        addresses: Addresses "host:port" by rank. The ring listens there, as TensorFlow's server would.
        rank: Rank of this worker.
    """

    addresses: tuple[str, ...]
    rank: int


def members(resolver) -> Members | None:
    """Returns the workers of a cluster if a ring is useful (several workers with one CPU device each), else None.

    Args:
        resolver: A `tf.distribute.cluster_resolver.ClusterResolver`, or None for the one of TF_CONFIG.
    """
    resolver = resolver or tf.distribute.cluster_resolver.TFConfigClusterResolver()
    spec, job, index = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    jobs = [name for name in ("chief", "worker") if name in spec.jobs]
    addresses = [address for name in jobs for address in spec.job_tasks(name)]
    if len(addresses) < 2 or job not in jobs or index is None or tf.config.get_visible_devices("GPU"):
        return None
    chiefs = spec.num_tasks("chief") if job == "worker" and "chief" in jobs else 0
    return Members(tuple(addresses), chiefs + index)


def join(
    group: Members,
    *,
    placeholder: PlaceholderRing | None = None,
    join_timeout_s: float,
    timeout_s: float | None,
    pack_bytes: int,
    wire_dtype: str | None,
) -> GradientRing:
    """Joins the ring of the workers; a collective call, before their strategies are built.

    The ring uses the token of `ring_token.keep_token`, the same on all workers.

    Args:
        group: Result of `members`.
        placeholder: A `PlaceholderRing` for a ring that is joined later, or None to join a ring.
        join_timeout_s: Timeout in seconds for all workers to join.
        timeout_s: Seconds that a sum waits for a live neighbour; None waits forever.
        pack_bytes: Bytes of a pack; 0 for `PACK_BYTES`.
        wire_dtype: "bfloat16", "float16" or None.

    Raises:
        ConfigError: Another socket listens at this worker's address.
        PeerLostError: A worker did not join in time, or is not of this ring.
    """
    joined = placeholder
    if joined is None:
        try:
            joined = connect(group, ring_token.token(), ring_token.next_generation(), join_timeout_s, timeout_s)
        except PeerLostError as error:
            hint = "all workers must be started alike, with one token, and with GPUs on all or on none"
            raise PeerLostError(error.rank, f"{error.why}; {hint}", error.lost) from error
    return GradientRing(joined, pack_bytes or PACK_BYTES, None if wire_dtype is None else tf.as_dtype(wire_dtype))


def listener(group: Members) -> Listener:
    """Listens at this worker's address, for a ring.

    Raises:
        ConfigError: Another socket listens there.
    """
    address = group.addresses[group.rank]
    return Listener(ports.split_address(address)[0], ports.own_socket(address))


def connect(group: Members, token: bytes, generation: int, join_timeout_s: float, timeout_s: float | None) -> Ring:
    """Joins a ring of one generation; a collective call of its members. See `join`."""
    addresses = [ports.split_address(address) for address in group.addresses]
    listening = listener(group)
    with activity.tracker.collective(activity.COLLECTIVE):
        joined = listening.join(group.rank, addresses, token, join_timeout_s, timeout_s, generation=generation)
    ring_token.was_joined(generation)
    return joined


def check_without(wire_dtype: str | None) -> None:
    """Warns that this worker has no token, and thus no ring.

    Raises:
        ConfigError: `wire_dtype` is set, which needs a ring.
    """
    if wire_dtype is not None:
        raise ConfigError(
            "gradient_dtype needs raytf's ring, and the ring needs a token that all processes are started with",
            f"gradient_dtype={wire_dtype!r} without a token",
            "Start the workers with a trainer of raytf or `raytf run`",
        )
    warn_user(
        "these processes have no token for raytf's ring: TensorFlow's collectives sum gradients, which is slower on "
        "CPUs. Start them with a trainer of raytf or `raytf run`",
    )


def ring_of(strategy) -> GradientRing | None:
    """Returns the ring of a strategy's workers; None if they use TensorFlow's collectives, or there is one worker."""
    return exchange.exchange_of(strategy)
