"""Computes the rows of step s of epoch e, a pure function of (seed, epoch, global batch).

It is independent of the number of workers. Runs with 1, 2 or 3 workers train on the same sequence of global batches. A
run that resumes at any (epoch, step) continues with exactly the next rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raytf.runtime.topology import shard_of_rank
from raytf.validation import check_word

SHUFFLES = ("full", "window", "none")
# Purposes of random streams; a part of the counter, so that two purposes share no numbers.
_ROWS, _PIECES, _WINDOW, _BUCKETS, _ROUNDS = range(5)
# Up to this number of rows an order is drawn uniformly from all permutations, in 8 bytes a row.
EXACT_ROWS = 1 << 16
_BINS_A_RANGE, _LOOKS = 4, 4
_FEISTEL_ROUNDS = 8
_FEISTEL_BLOCK = 1 << 14  # numbers that are processed at once, so that they stay in the cache


def generator(seed: int, epoch: int, purpose: int = _ROWS, index: int = 0) -> np.random.Generator:
    """Returns the random generator of one purpose in one epoch.

    It is NumPy's Philox with the key (seed, epoch). Philox is counter-based (Salmon et al., "Parallel random numbers:
    as easy as 1, 2, 3", 2011). Close keys yield independent numbers, and each number is computed without the earlier
    ones.

    Args:
        seed: Seed of the run, 0 to 2**63 - 1.
        epoch: Epoch, from 0.
        purpose: Purpose of the stream.
        index: Index of the stream, far apart from others in the counter.
    """
    key = [np.uint64(seed), np.uint64(epoch)]
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, np.uint64(index), np.uint64(purpose)]))


class Exact:
    """Uniformly random permutation of 0 ... rows - 1, as an array; with the interface of `Feistel`."""

    def __init__(self, rows: int, random: np.random.Generator):
        self._permutation = random.permutation(rows).astype(np.int64, copy=False)

    def elements_at(self, indices: np.ndarray) -> np.ndarray:
        return self._permutation[indices]


class Feistel:
    """Pseudorandom permutation of 0 ... rows - 1 that is computed on access, and takes no memory.

    A generalized Feistel cipher with cycle walking (J. Black and P. Rogaway, "Ciphers with arbitrary finite domains",
    CT-RSA 2002). A number is a pair of a high and a low half. Each round adds to one half, modulo its size, a hash of
    the other, which is invertible for any hash. There are a few more pairs than `rows`, by less than 2 sqrt(rows). A
    result that is too large is encrypted again. The hash has two multiplications by random odd numbers.

    Args:
        rows: Number of rows, 1 to 2**62.
        random: Generator of the rounds' keys.
    """

    def __init__(self, rows: int, random: np.random.Generator):
        self._rows = rows
        self._low_bits = max(1, ((rows - 1).bit_length() + 1) // 2)
        self._high_size = -(-rows // (1 << self._low_bits))
        # for each round a summand, and two odd factors
        self._keys = random.integers(0, 2**32, (_FEISTEL_ROUNDS, 3), dtype=np.uint32) | np.array([0, 1, 1], np.uint32)

    def elements_at(self, indices: np.ndarray) -> np.ndarray:
        """Returns the elements of the permutation at `indices`; both are int64, (n,)."""
        elements = np.empty(len(indices), np.int64)
        for start in range(0, len(indices), _FEISTEL_BLOCK):
            elements[start : start + _FEISTEL_BLOCK] = self._permute(indices[start : start + _FEISTEL_BLOCK])
        outside = np.flatnonzero(elements >= self._rows)
        while len(outside):
            elements[outside] = self._permute(elements[outside])
            outside = outside[elements[outside] >= self._rows]
        return elements

    def _permute(self, numbers: np.ndarray) -> np.ndarray:
        bits, size = self._low_bits, np.uint32(self._high_size)
        high = (numbers >> bits).astype(np.uint32)
        low = numbers.astype(np.uint32) & np.uint32((1 << bits) - 1)
        hashed, scratch, wide = np.empty_like(high), np.empty_like(high), np.empty(len(high), np.uint64)
        for i in range(0, _FEISTEL_ROUNDS, 2):
            _hash(low, self._keys[i], hashed, scratch)
            wide[:] = hashed
            wide *= np.uint64(self._high_size)
            wide >>= np.uint64(32)  # evenly over 0 ... size - 1 (D. Lemire, "Fast random integer generation", 2019)
            hashed[:] = wide
            high += hashed
            np.subtract(high, size, out=scratch)
            np.minimum(high, scratch, out=high)  # a negative difference wraps around and is huge
            _hash(high, self._keys[i + 1], hashed, scratch)
            hashed >>= np.uint32(32 - bits)
            low ^= hashed
        return (high.astype(np.int64) << bits) | low


def shuffled(rows: int, seed: int, epoch: int) -> Exact | Feistel:
    """Returns the order of all rows in an epoch; each process computes only the elements that it needs."""
    if rows <= EXACT_ROWS:
        return Exact(rows, generator(seed, epoch))
    return Feistel(rows, generator(seed, epoch, _ROUNDS))


def _hash(numbers: np.ndarray, keys: np.ndarray, out: np.ndarray, other: np.ndarray) -> None:
    """Hashes uint32 numbers into `out`, whose high bits are the best, and overwrites `other`."""
    np.add(numbers, keys[0], out=out)
    out *= keys[1]
    np.right_shift(out, np.uint32(15), out=other)
    out ^= other
    out *= keys[2]


def differences(was: Mapping, now: Mapping) -> str:
    """Returns the changed settings of the rows' order, for an error message, or "".

    Args:
        was: The earlier `Feed.order`.
        now: The current `Feed.order`.
    """
    names = [name for name in dict.fromkeys([*now, *was]) if now.get(name) != was.get(name)]
    if not names and now.get("goes_on") == "epoch":
        return "the pipeline may have a state of its own"
    return ", ".join(f"{name} {now.get(name)}, was {was.get(name)}" for name in names)


def regrouped(was: Mapping, now: Mapping, step: int) -> tuple[int, int] | None:
    """Returns the position at which an epoch resumes after a change of the global batch.

    Args:
        was: The earlier `Feed.order`.
        now: The current `Feed.order`.
        step: Number of the epoch's steps that were made with `was`.

    Returns:
        (the next step, by its new number; the number of its first rows that were used before). None if the order of
        rows changes too, as with windows and buckets, whose order depends on the batch.
    """
    changed = [name for name in {*was, *now} if name != "batch_size" and was.get(name) != now.get(name)]
    if changed or now["bucket"] or now["shuffle"] == "window":
        return None
    rows, batch = now["rows"], now["batch_size"]
    made = min(step * was["batch_size"], rows)
    return (steps_per_epoch(rows, batch), 0) if made == rows else divmod(made, batch)


def steps_per_epoch(rows: int, global_batch: int, drop_remainder: bool = False) -> int:
    """Returns the number of steps of an epoch; the last batch may be smaller."""
    return rows // global_batch if drop_remainder else -(-rows // global_batch)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings, for any dataset.

    Args:
        global_batch: Rows of a step over all workers, at least 1.
        seed: Seed of the shuffle, 0 to 2**63 - 1.
        shuffle: "full", "window" or "none", see `Sampler`.
        window: Rows of a window, see `Sampler`.
        drop_remainder: Whether to omit a smaller last step of an epoch.

    Raises:
        ConfigError: `shuffle` is another word.
    """

    global_batch: int
    seed: int = 0
    shuffle: str = "full"
    window: int = 65_536
    drop_remainder: bool = False

    def __post_init__(self):
        check_word("shuffle", self.shuffle, SHUFFLES)

    def sampler(self, rows: Iterable[int]) -> Sampler:
        """Returns the `Sampler` of a dataset whose pieces have these numbers of rows."""
        return Sampler(
            rows=tuple(rows), global_batch=self.global_batch, seed=self.seed, shuffle=self.shuffle, window=self.window
        )

    def steps(self, rows: int) -> int:
        """Returns the number of steps of an epoch of `rows` rows."""
        return steps_per_epoch(rows, self.global_batch, self.drop_remainder)


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Order of a dataset's rows in all epochs.

    Rows are numbered in the dataset's order. They are grouped into pieces (blocks, or parts of files) that can be read
    independently.

    Args:
        rows: Number of rows of each piece.
        global_batch: Rows of a step.
        seed: Seed, 0 to 2**63 - 1.
        shuffle: "full", "window" or "none". "full" is a uniformly random order of all rows. "window" is a random order
            of pieces, and of rows within windows of that order.
        window: Rows of a window, which is rounded down to whole steps, at least one.
    """

    rows: tuple[int, ...]
    global_batch: int
    seed: int = 0
    shuffle: str = "full"
    window: int = 65_536

    @property
    def total(self) -> int:
        """Returns the number of rows."""
        return sum(self.rows)

    @property
    def chunk_steps(self) -> int:
        """Returns the steps of a chunk, which is a window, or has about as many rows."""
        return max(1, self.window // self.global_batch)

    def pieces(self, epoch: int) -> np.ndarray:
        """Returns the order in which an epoch reads the pieces: int64, (pieces,)."""
        if self.shuffle != "window":
            return np.arange(len(self.rows))
        return generator(self.seed, epoch, _PIECES).permutation(len(self.rows))

    def epoch(self, epoch: int) -> Epoch:
        """Returns one epoch, counted from 0."""
        return Epoch(self, epoch)


class Ranges:
    """Lookup of numbers in many consecutive ranges: `numpy.searchsorted`, faster for many numbers.

    Args:
        starts: First number of each range, ascending: int64, at least one. The last range has no end.
    """

    def __init__(self, starts: np.ndarray):
        self._starts = starts
        self._next = np.append(starts[1:], np.iinfo(np.int64).max)
        whole = int(starts[-1] - starts[0]) + 1
        self._shift = max(0, (whole // (_BINS_A_RANGE * len(starts))).bit_length())
        edges = starts[0] + (np.arange((whole >> self._shift) + 2) << self._shift)
        first_ranges = np.searchsorted(starts, edges, side="right") - 1
        self._first = first_ranges[:-1].astype(np.int16 if len(starts) < 2**15 else np.int64)  # of each bin of numbers
        self._most = int(np.diff(first_ranges).max())  # ranges that begin in a bin

    def find(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the index of each number's range."""
        if self._most > _LOOKS:  # very uneven
            return np.searchsorted(self._starts, numbers, side="right") - 1
        indices = self._first.take((numbers - self._starts[0]) >> self._shift, mode="clip")
        for _ in range(self._most):
            indices += numbers >= self._next.take(indices)
        return indices


class Epoch:
    """Rows of an epoch by chunk.

    The epoch's stream is the dataset's rows with the pieces in the epoch's order. A stream position is a row's index in
    it. It is the row's number if the pieces are in the dataset's order.
    """

    def __init__(self, order: Sampler, epoch: int):
        self._order, self._epoch = order, epoch
        self.pieces = order.pieces(epoch)
        rows = np.asarray(order.rows, np.int64)
        self.starts = np.cumsum([0, *rows[self.pieces]])[:-1]  # stream position of the first row of each piece
        self._natural = np.cumsum([0, *rows])[:-1][self.pieces]  # and its number
        self._permutation = shuffled(order.total, order.seed, epoch) if order.shuffle == "full" else None
        self.chunk_rows = order.chunk_steps * order.global_batch
        self.chunks = -(-order.total // self.chunk_rows)

    def row_numbers(self, positions: np.ndarray) -> np.ndarray:
        """Returns the rows' numbers in the dataset."""
        piece = np.searchsorted(self.starts, positions, side="right") - 1
        return self._natural[piece] + positions - self.starts[piece]

    def bounds(self, chunk: int) -> tuple[int, int]:
        """Returns the first and the last (excluded) index of a chunk's rows in the epoch."""
        return chunk * self.chunk_rows, min(self._order.total, (chunk + 1) * self.chunk_rows)

    def positions(self, chunk: int, lengths: Callable[[np.ndarray], np.ndarray] | None = None) -> np.ndarray:
        """Returns the stream positions of a chunk's rows, in the order of training: int64, (<= chunk_rows,).

        Args:
            chunk: Index of the chunk, from 0.
            lengths: lengths(stream positions) -> int64, for batches of rows of similar length, or None.
        """
        start, stop = self.bounds(chunk)
        if self._order.shuffle == "window":
            positions = start + generator(self._order.seed, self._epoch, _WINDOW, chunk).permutation(stop - start)
        else:
            positions = self._positions_at(np.arange(start, stop))
        if lengths is not None:
            random = generator(self._order.seed, self._epoch, _BUCKETS, chunk)
            positions = bucketed(positions, lengths(positions), self._order.global_batch, random)
        return positions

    def part(self, chunk: int, steps: slice, worker: int, workers: int, whole: np.ndarray | None = None) -> np.ndarray:
        """Returns one worker's part of some steps of a chunk, see `worker_part`.

        Args:
            chunk: Index of the chunk.
            steps: Steps of the chunk.
            worker: Rank of the worker.
            workers: Number of workers.
            whole: All positions of the chunk, or None to compute only those of the part.
        """
        batch = self._order.global_batch
        if whole is not None:
            return worker_part(whole, batch, worker, workers, steps)
        return self._positions_at(worker_part(np.arange(*self.bounds(chunk)), batch, worker, workers, steps))

    @property
    def by_chunk(self) -> bool:
        """Returns whether the order of a chunk's rows is only computed as a whole."""
        return self._order.shuffle == "window"

    def _positions_at(self, indices: np.ndarray) -> np.ndarray:
        return indices if self._permutation is None else self._permutation.elements_at(indices)


def bucketed(positions: np.ndarray, lengths: np.ndarray, batch: int, random: np.random.Generator) -> np.ndarray:
    """Returns the rows in batches of similar length, and the batches in random order.

    Args:
        positions: Positions of the rows, in any order.
        lengths: Length of each row, (len(positions),).
        batch: Rows of a batch. A smaller last batch stays the last.
        random: Generator for the order of the batches.
    """
    by_length = positions[np.argsort(lengths, kind="stable")]
    whole = len(positions) // batch
    # the rows of the smaller batch are drawn from all lengths, not only from the longest
    remaining = np.sort(random.permutation(len(positions))[whole * batch :])
    whole_batches = np.delete(by_length, remaining).reshape(whole, batch)
    return np.concatenate([whole_batches[random.permutation(whole)].ravel(), by_length[remaining]])


def worker_part(rows: np.ndarray, global_batch: int, worker: int, workers: int, steps: slice) -> np.ndarray:
    """Returns one worker's contiguous part of each step of a chunk, concatenated.

    Args:
        rows: Rows of a chunk, which starts with a step; any dtype.
        global_batch: Rows of a step. The chunk's last step may have fewer, and a worker none of them.
        worker: Rank of the worker.
        workers: Number of workers.
        steps: Slice of the chunk's steps, without a stride.
    """
    rows = rows[steps.start * global_batch : steps.stop * global_batch]
    whole = len(rows) // global_batch
    start, stop = shard_of_rank(global_batch, workers, worker)
    parts = rows[: whole * global_batch].reshape(whole, global_batch)[:, start:stop].ravel()
    remaining = rows[whole * global_batch :]
    if not len(remaining):
        return parts
    start, stop = shard_of_rank(len(remaining), workers, worker)
    return np.concatenate([parts, remaining[start:stop]])


def row_seeds(seed: int, epoch: int, rows: Sequence[int]) -> np.ndarray:
    """Computes two int32 seeds for each row number, for TensorFlow's stateless random operations.

    They are SplitMix64's finalizer of the row's number, with a start from (seed, epoch). See Steele, Lea and Flood,
    "Fast splittable pseudorandom number generators", 2014.

    Returns:
        int32 array of shape (len(rows), 2).
    """
    start = generator(seed, epoch).integers(0, 2**64, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = (np.asarray(rows, np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + start
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))).view(np.int32).reshape(-1, 2)
