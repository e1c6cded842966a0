"""A dataset to `tf.data.Dataset`: this worker's part of every global batch, in the order of `raytf.data.sampling`.

Rows are copied once, in superblocks of many steps, from Arrow memory into memory of their own; TensorFlow cuts these
into batches in C++, so that Python is called seldom.
"""

from __future__ import annotations

import tensorflow as tf

from raytf.data import batches, sampling, worker_part
from raytf.data.reader import Reader, StreamReader, open_reader
from raytf.data.stored import StoredDataset
from raytf.errors import ConfigError
from raytf.runtime.topology import share

# Bytes that are gathered at once: large enough that Python is called seldom, small enough to stay in the allocator.
SUPERBLOCK = 8 << 20
# Of the first in an epoch, which the first step waits for.
FIRST_SUPERBLOCK = 1 << 20
# Batches ready before the step that takes them, where making one out of a superblock takes time.
PREFETCH = 2
HEAVY_BATCH = 1 << 20  # bytes


class Feed:
    """One worker's part of a dataset.

    Args:
        blocks: where the rows lie: `stored.StoredDataset`, or a `streamed.StreamedDataset`.
        features, labels, sample_weights: parsed columns (`columns.parse`); labels and weights may be None.
        global_batch: rows of a step over all workers.
        worker, workers: this worker's rank and the number of workers.
        seed: of the shuffle.
        shuffle: "full", "window" or "none", see `sampling.Sampler`.
        window: rows of a window.
        drop_remainder: leave out the last step of an epoch where it is smaller.
        map: map(features, labels, weights, seeds) -> the same without seeds; parts that are None are left out. In
            TensorFlow operations on a batch; seeds are int32, (rows, 2), a function of seed, epoch and row.
        static: batches of one fixed shape, as TPUs need; with `drop_remainder`.
        reader: (index, number) of the processes that read, where that is not (worker, workers).
        shapes_only: other processes read; this one needs steps, shapes and dtypes, and looks at the first rows.

    Attributes:
        rows, steps: of an epoch.
        chunk_steps: steps whose rows are put in order together.
        global_batch: rows of a step.
        shape: of the tensors.
        epoch: the epoch that the next iterator gives; counts up by itself unless it is set before each epoch.
        first_step: the step that the next iterator starts with.
    """

    def __init__(
        self,
        blocks: StoredDataset,
        *,
        features,
        labels=None,
        sample_weights=None,
        global_batch: int,
        worker: int = 0,
        workers: int = 1,
        seed: int = 0,
        shuffle: str = "full",
        window: int = 65_536,
        drop_remainder: bool = False,
        map=None,
        static: bool = False,
        reader: tuple[int, int] | None = None,
        shapes_only: bool = False,
    ):
        if shuffle not in sampling.SHUFFLES:
            raise ConfigError(f"shuffle must be one of {', '.join(sampling.SHUFFLES)}", repr(shuffle), "Choose one")
        self._place = {"global_batch": global_batch, "worker": worker, "workers": workers}
        self._order = sampling.Sampler(
            rows=tuple(blocks.rows), global_batch=global_batch, seed=seed, shuffle=shuffle, window=window
        )
        structure = tuple(spec for spec in (features, labels, sample_weights) if spec is not None)
        self._tensors = batches.BatchSpec(structure, map)
        seen = blocks.first() if shapes_only and blocks.rows else blocks
        self._reader: Reader = open_reader(seen, self._tensors.columns, self._order, *(reader or (worker, workers)))
        if isinstance(self._reader, StreamReader) and reader is None:
            self._reader.prepare = self._prepare
        self.shape = self._tensors.of(self._reader.sources)
        self.global_batch, self.chunk_steps = global_batch, self._order.chunk_steps
        self._chunk: tuple = (None, None)
        self.rows, self._static = self._order.total, static
        self.steps = sampling.steps_per_epoch(self._order.total, global_batch, drop_remainder)
        self.epoch = 0
        self.first_step = 0
        self._counts_itself = True

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Says which epoch every iterator from now on gives, and from which step on."""
        self.epoch, self.first_step, self._counts_itself = epoch, first_step, False

    def dataset(self) -> tf.data.Dataset:
        """A `tf.data.Dataset` of (features, labels, weights) batches; each new iterator is an epoch."""
        start, stop = share(self._place["global_batch"], self._place["workers"], self._place["worker"])
        shape = self.shape
        dataset = tf.data.Dataset.from_generator(self._superblocks, output_signature=shape.signature)
        rest = self._order.total - (self.steps - 1) * self._place["global_batch"]
        # a step of which this worker has no row is a step
        empty = share(rest, self._place["workers"], self._place["worker"])[0] == rest
        dataset = shape.batches(dataset.prefetch(1), stop - start, static=self._static, empty=empty)
        if self._static:
            _check_static(dataset.element_spec)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(self.steps - self.first_step))
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        options.autotune.enabled = shape.computes
        # A thread more costs a step more than it saves where a batch is only cut out of a superblock.
        if shape.heavy or shape.row_bytes * (stop - start) > HEAVY_BATCH:
            dataset = dataset.prefetch(PREFETCH)
        return worker_part.mark_worker_part(dataset.with_options(options))

    def _superblocks(self):
        number, first = self.epoch, self.first_step
        self.first_step = 0
        if self._counts_itself:
            self.epoch += 1
        epoch, size = self._order.epoch(number), FIRST_SUPERBLOCK
        part = -(-self._place["global_batch"] // self._place["workers"])
        for chunk, rows in self._reader.chunks(epoch, number, first // self._order.chunk_steps):
            whole = self._positions(epoch, chunk, rows)
            begin = chunk * self._order.chunk_steps
            step, end = max(first, begin), min(self.steps, begin + self._order.chunk_steps)
            while step < end:
                count = max(1, int(size // max(1, rows.row_bytes * part)))
                steps = slice(step - begin, min(end, step + count) - begin)
                yield self._arrays(epoch, number, chunk, rows, whole, steps)
                step, size = begin + steps.stop, SUPERBLOCK

    def _positions(self, epoch, chunk, rows):
        """Those of a whole chunk, where this worker's alone cannot be worked out."""
        if self._tensors.bucket is not None:
            return epoch.positions(chunk, rows.lengths)
        return epoch.positions(chunk) if epoch.by_chunk else None

    def _prepare(self, epoch, number: int, chunk: int, rows) -> None:
        """Fetches this worker's rows of a chunk of a stream, before they are due."""
        whole, steps = self._positions(epoch, chunk, rows), slice(0, self._order.chunk_steps)
        rows.fetch(epoch.part(chunk, steps, self._place["worker"], self._place["workers"], whole))

    def _arrays(self, epoch, number, chunk, rows, whole, steps: slice) -> tuple:
        mine = epoch.part(chunk, steps, self._place["worker"], self._place["workers"], whole)
        seeds = (sampling.row_seeds(self._order.seed, number, epoch.row_numbers(mine)),) if self._tensors.seeded else ()
        return (*rows.gather(mine), *seeds)

    def span(self, number: int, first: int, count: int) -> tuple:
        """The arrays of this worker's rows of some steps, as `shape.signature` has them.

        Args:
            number: the epoch, from 0.
            first, count: the steps; all in one chunk.
        """
        chunk, begin = first // self.chunk_steps, first // self.chunk_steps * self.chunk_steps
        if self._chunk[0] != (number, chunk):
            same = self._chunk[0] is not None and self._chunk[0][0] == number
            epoch = self._chunk[1][0] if same else self._order.epoch(number)
            rows = self._reader.rows(epoch, number, chunk)
            self._chunk = (number, chunk), (epoch, rows, self._positions(epoch, chunk, rows))
        epoch, rows, whole = self._chunk[1]
        return self._arrays(epoch, number, chunk, rows, whole, slice(first - begin, first - begin + count))


def _check_static(spec) -> None:
    """Raises ConfigError unless a batch has one fixed shape, of numbers."""
    for one in tf.nest.flatten(spec):
        fixed = isinstance(one, tf.TensorSpec) and one.shape.is_fully_defined()
        if not fixed or one.dtype == tf.string:
            raise ConfigError(
                "On TPUs every batch has the same shape, of numbers",
                f"{one.dtype.name}{getattr(one, 'shape', '')}",
                "Pad lists to one length (raytf.Column(..., pad=256)), and encode strings before",
            )
