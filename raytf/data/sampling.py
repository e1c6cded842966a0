"""Which rows make up step s of epoch e: a pure function of (seed, epoch, global batch).

The number of workers does not occur: a run with 1, 2 or 3 workers trains on the same sequence of global
batches, and a run that is resumed at any (epoch, step) goes on with the very rows that were due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raytf.runtime.topology import share
from raytf.validation import check_word

SHUFFLES = ("full", "window", "none")
# What a random stream is for; part of its counter, so that no two purposes share numbers.
_ROWS, _PIECES, _WINDOW, _BUCKETS, _ROUNDS = range(5)
# Up to so many rows an order is drawn as a whole, from all orders alike; it takes 8 bytes a row.
EXACT_ROWS = 1 << 16
_BINS_A_RANGE, _LOOKS = 4, 4
_FEISTEL_ROUNDS = 8
_FEISTEL_BLOCK = 1 << 14  # numbers that are worked on at once, so that they stay in the cache


def generator(seed: int, epoch: int, purpose: int = _ROWS, index: int = 0) -> np.random.Generator:
    """The random numbers of one purpose in one epoch.

    NumPy's Philox keyed with (seed, epoch): counter-based (Salmon et al., "Parallel random numbers: as easy as 1, 2,
    3", 2011), so that near keys give independent numbers and any can be had without those before it.

    Args:
        seed: the run's seed, 0 to 2**63 - 1.
        epoch: the epoch, from 0.
        purpose, index: which stream of it; far apart in the counter.
    """
    key = [np.uint64(seed), np.uint64(epoch)]
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, np.uint64(index), np.uint64(purpose)]))


class Exact:
    """A uniformly random order of 0 ... rows - 1, as an array; see `Feistel` for arguments and methods."""

    def __init__(self, rows: int, random: np.random.Generator):
        self._all = random.permutation(rows).astype(np.int64, copy=False)

    def at(self, places: np.ndarray) -> np.ndarray:
        return self._all[places]


class Feistel:
    """A pseudorandom order of 0 ... rows - 1 that is worked out where it is looked at, and takes no memory.

    A generalized Feistel cipher with cycle walking (J. Black and P. Rogaway, "Ciphers with arbitrary finite domains",
    CT-RSA 2002): a number is a pair of a high and a low half, and each round adds to one half, modulo its size, a hash
    of the other, which can be undone whatever the hash is. The pairs are a few more than `rows` (by less than
    2 sqrt(rows)); what comes out too large is put in again. The hash is of two multiplications by random odd numbers.

    Args:
        rows: 1 to 2**62.
        random: gives the rounds their keys.
    """

    def __init__(self, rows: int, random: np.random.Generator):
        self._rows = rows
        self._low_bits = max(1, ((rows - 1).bit_length() + 1) // 2)
        self._high_size = -(-rows // (1 << self._low_bits))
        # of each round what is added, and two odd factors
        self._keys = random.integers(0, 2**32, (_FEISTEL_ROUNDS, 3), dtype=np.uint32) | np.array([0, 1, 1], np.uint32)

    def at(self, places: np.ndarray) -> np.ndarray:
        """What stands at these places of the order: int64, (n,), as `places` are."""
        found = np.empty(len(places), np.int64)
        for start in range(0, len(places), _FEISTEL_BLOCK):
            found[start : start + _FEISTEL_BLOCK] = self._once(places[start : start + _FEISTEL_BLOCK])
        outside = np.flatnonzero(found >= self._rows)
        while len(outside):
            found[outside] = self._once(found[outside])
            outside = outside[found[outside] >= self._rows]
        return found

    def _once(self, numbers: np.ndarray) -> np.ndarray:
        bits, size = self._low_bits, np.uint32(self._high_size)
        high = (numbers >> bits).astype(np.uint32)
        low = numbers.astype(np.uint32) & np.uint32((1 << bits) - 1)
        hashed, other, wide = np.empty_like(high), np.empty_like(high), np.empty(len(high), np.uint64)
        for i in range(0, _FEISTEL_ROUNDS, 2):
            _hash(low, self._keys[i], hashed, other)
            wide[:] = hashed
            wide *= np.uint64(self._high_size)
            wide >>= np.uint64(32)  # evenly over 0 ... size - 1 (D. Lemire, "Fast random integer generation", 2019)
            hashed[:] = wide
            high += hashed
            np.subtract(high, size, out=other)
            np.minimum(high, other, out=high)  # the difference is huge where it would be negative
            _hash(high, self._keys[i + 1], hashed, other)
            hashed >>= np.uint32(32 - bits)
            low ^= hashed
        return (high.astype(np.int64) << bits) | low


def shuffled(rows: int, seed: int, epoch: int) -> Exact | Feistel:
    """The order of all rows in an epoch, which any process works out for the places that it needs alone."""
    if rows <= EXACT_ROWS:
        return Exact(rows, generator(seed, epoch))
    return Feistel(rows, generator(seed, epoch, _ROUNDS))


def _hash(numbers: np.ndarray, keys: np.ndarray, out: np.ndarray, other: np.ndarray) -> None:
    """Of uint32 numbers, into `out`, whose high bits are the best; `other` is overwritten."""
    np.add(numbers, keys[0], out=out)
    out *= keys[1]
    np.right_shift(out, np.uint32(15), out=other)
    out ^= other
    out *= keys[2]


def differences(was: Mapping, now: Mapping) -> str:
    """What says that steps have other rows than before, for an error; "" where they have the same.

    Args:
        was, now: `Feed.order`.
    """
    names = [name for name in dict.fromkeys([*now, *was]) if now.get(name) != was.get(name)]
    if not names and now.get("goes_on") == "epoch":
        return "the pipeline may have a state of its own"
    return ", ".join(f"{name} {now.get(name)}, was {was.get(name)}" for name in names)


def regrouped(was: Mapping, now: Mapping, step: int) -> tuple[int, int] | None:
    """Where an epoch goes on whose steps take another number of rows from here on.

    Args:
        was, now: `Feed.order`.
        step: steps of the epoch that were made as `was` says.

    Returns:
        (the step that comes, by its new number; how many of its first rows were taken before), or None where the order
        of rows is another one, too: of windows, and of buckets by length, it follows the batch.
    """
    others = [name for name in {*was, *now} if name != "batch_size" and was.get(name) != now.get(name)]
    if others or now["bucket"] or now["shuffle"] == "window":
        return None
    rows, batch = now["rows"], now["batch_size"]
    made = min(step * was["batch_size"], rows)
    return (steps_per_epoch(rows, batch), 0) if made == rows else divmod(made, batch)


def steps_per_epoch(rows: int, global_batch: int, drop_remainder: bool = False) -> int:
    """Number of steps of an epoch; the last batch is smaller where `global_batch` does not divide `rows`."""
    return rows // global_batch if drop_remainder else -(-rows // global_batch)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How steps take rows, whatever dataset they are of.

    Args:
        global_batch: rows of a step over all workers, at least 1.
        seed: of the shuffle, 0 to 2**63 - 1.
        shuffle, window: see `Sampler`.
        drop_remainder: leave out the last step of an epoch where it is smaller.

    Raises:
        ConfigError: another word for `shuffle`.
    """

    global_batch: int
    seed: int = 0
    shuffle: str = "full"
    window: int = 65_536
    drop_remainder: bool = False

    def __post_init__(self):
        check_word("shuffle", self.shuffle, SHUFFLES)

    def of(self, rows: Iterable[int]) -> Sampler:
        """The order of a dataset whose pieces have so many rows."""
        return Sampler(
            rows=tuple(rows), global_batch=self.global_batch, seed=self.seed, shuffle=self.shuffle, window=self.window
        )

    def steps(self, rows: int) -> int:
        """Steps of an epoch of so many rows."""
        return steps_per_epoch(rows, self.global_batch, self.drop_remainder)


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """The order of a dataset's rows in every epoch.

    Rows are numbered as the dataset has them; they come in pieces (blocks, or parts of files) that can be read alone.

    Args:
        rows: rows of each piece.
        global_batch: rows of a step.
        seed: 0 to 2**63 - 1.
        shuffle: "full", uniformly random over all rows; "window", pieces in random order, and rows in random order
            within windows of consecutive rows of that; or "none".
        window: rows of a window; rounded down to whole steps, at least one.
    """

    rows: tuple[int, ...]
    global_batch: int
    seed: int = 0
    shuffle: str = "full"
    window: int = 65_536

    @property
    def total(self) -> int:
        """Number of rows."""
        return sum(self.rows)

    @property
    def chunk_steps(self) -> int:
        """Steps of a chunk: of a window, or of about as many rows."""
        return max(1, self.window // self.global_batch)

    def pieces(self, epoch: int) -> np.ndarray:
        """The order in which an epoch reads the pieces: int64, (pieces,)."""
        if self.shuffle != "window":
            return np.arange(len(self.rows))
        return generator(self.seed, epoch, _PIECES).permutation(len(self.rows))

    def epoch(self, epoch: int) -> Epoch:
        """One epoch, counted from 0."""
        return Epoch(self, epoch)


class Ranges:
    """Says in which of many ranges, one after the other, numbers lie: `numpy.searchsorted`, faster for many numbers.

    Args:
        starts: first number of each range, ascending: int64, at least one; the last has no end.
    """

    def __init__(self, starts: np.ndarray):
        self._starts = starts
        self._next = np.append(starts[1:], np.iinfo(np.int64).max)
        whole = int(starts[-1] - starts[0]) + 1
        self._shift = max(0, (whole // (_BINS_A_RANGE * len(starts))).bit_length())
        edges = starts[0] + (np.arange((whole >> self._shift) + 2) << self._shift)
        found = np.searchsorted(starts, edges, side="right") - 1
        self._first = found[:-1].astype(np.int16 if len(starts) < 2**15 else np.int64)  # of each bin of numbers
        self._most = int(np.diff(found).max())  # ranges that begin in a bin

    def of(self, numbers: np.ndarray) -> np.ndarray:
        """The index of each number's range."""
        if self._most > _LOOKS:  # very uneven
            return np.searchsorted(self._starts, numbers, side="right") - 1
        found = self._first.take((numbers - self._starts[0]) >> self._shift, mode="clip")
        for _ in range(self._most):
            found += numbers >= self._next.take(found)
        return found


class Epoch:
    """The rows of an epoch by chunk.

    The epoch's stream is the dataset's rows with the pieces in the epoch's order; a stream position is a row's place in
    it. Where the order of the pieces is that of the dataset, it is the row's number.
    """

    def __init__(self, order: Sampler, epoch: int):
        self._order, self._epoch = order, epoch
        self.pieces = order.pieces(epoch)
        rows = np.asarray(order.rows, np.int64)
        self.starts = np.cumsum([0, *rows[self.pieces]])[:-1]  # stream position of the first row of each piece
        self._natural = np.cumsum([0, *rows])[:-1][self.pieces]  # and its number
        self._all = shuffled(order.total, order.seed, epoch) if order.shuffle == "full" else None
        self.chunk_rows = order.chunk_steps * order.global_batch
        self.chunks = -(-order.total // self.chunk_rows)

    def row_numbers(self, positions: np.ndarray) -> np.ndarray:
        """The rows' numbers in the dataset."""
        place = np.searchsorted(self.starts, positions, side="right") - 1
        return self._natural[place] + positions - self.starts[place]

    def bounds(self, chunk: int) -> tuple[int, int]:
        """First and last (excluded) place in the epoch of a chunk."""
        return chunk * self.chunk_rows, min(self._order.total, (chunk + 1) * self.chunk_rows)

    def positions(self, chunk: int, lengths: Callable[[np.ndarray], np.ndarray] | None = None) -> np.ndarray:
        """Stream positions of the rows of a chunk, in the order of training: int64, (<= chunk_rows,).

        Args:
            chunk: from 0.
            lengths: lengths(stream positions) -> int64, where rows of similar length shall share a batch.
        """
        start, stop = self.bounds(chunk)
        if self._order.shuffle == "window":
            found = start + generator(self._order.seed, self._epoch, _WINDOW, chunk).permutation(stop - start)
        else:
            found = self._at(np.arange(start, stop))
        if lengths is not None:
            random = generator(self._order.seed, self._epoch, _BUCKETS, chunk)
            found = bucketed(found, lengths(found), self._order.global_batch, random)
        return found

    def part(self, chunk: int, steps: slice, worker: int, workers: int, whole: np.ndarray | None = None) -> np.ndarray:
        """One worker's part of some steps of a chunk; see `worker_part`.

        Args:
            chunk, steps, worker, workers: which part.
            whole: the chunk's positions where they have been worked out; else only those of the part are.
        """
        batch = self._order.global_batch
        if whole is not None:
            return worker_part(whole, batch, worker, workers, steps)
        return self._at(worker_part(np.arange(*self.bounds(chunk)), batch, worker, workers, steps))

    @property
    def by_chunk(self) -> bool:
        """Whether the rows of a chunk can be put in order together only."""
        return self._order.shuffle == "window"

    def _at(self, places: np.ndarray) -> np.ndarray:
        return places if self._all is None else self._all.at(places)


def bucketed(positions: np.ndarray, lengths: np.ndarray, batch: int, random: np.random.Generator) -> np.ndarray:
    """The same rows, so that each batch holds rows of similar length, and batches come in random order.

    Args:
        positions: the rows, in any order.
        lengths: of each, (len(positions),).
        batch: rows of a batch; a smaller last one stays last.
        random: for the order of the batches.
    """
    by_length = positions[np.argsort(lengths, kind="stable")]
    whole = len(positions) // batch
    # what makes up no batch is taken from all lengths, not only from the longest
    rest = np.sort(random.permutation(len(positions))[whole * batch :])
    kept = np.delete(by_length, rest).reshape(whole, batch)
    return np.concatenate([kept[random.permutation(whole)].ravel(), by_length[rest]])


def worker_part(rows: np.ndarray, global_batch: int, worker: int, workers: int, steps: slice) -> np.ndarray:
    """One worker's contiguous part of each step of a chunk, one after the other.

    Args:
        rows: the rows of a chunk, which starts with a step; any dtype.
        global_batch: rows of a step; the chunk's last may have fewer, of which a worker may have none.
        worker, workers: rank and number of workers.
        steps: which of the chunk's steps; a slice without a step.
    """
    rows = rows[steps.start * global_batch : steps.stop * global_batch]
    whole = len(rows) // global_batch
    start, stop = share(global_batch, workers, worker)
    parts = rows[: whole * global_batch].reshape(whole, global_batch)[:, start:stop].ravel()
    rest = rows[whole * global_batch :]
    if not len(rest):
        return parts
    start, stop = share(len(rest), workers, worker)
    return np.concatenate([parts, rest[start:stop]])


def row_seeds(seed: int, epoch: int, rows: Sequence[int]) -> np.ndarray:
    """Two int32 numbers for each row, by row number: for TensorFlow's stateless random operations.

    SplitMix64's finalizer (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014) of the row's
    number, started from a number of (seed, epoch).

    Returns:
        int32 array of shape (len(rows), 2).
    """
    start = generator(seed, epoch).integers(0, 2**64, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = (np.asarray(rows, np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + start
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))).view(np.int32).reshape(-1, 2)
