"""A dataset to `tf.data.Dataset`: this worker's part of every global batch, in the order of `raytf.data.sampling`.

Rows are copied once, in superbatches of many steps, from Arrow memory into memory of their own; TensorFlow cuts these
into batches in C++, so that Python is called seldom.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from raytf.compat.tensorflow import giving_memory
from raytf.data import worker_part
from raytf.data.batch_spec import BatchSpec
from raytf.data.batches import Batcher
from raytf.data.reader import Reader, StreamReader, open_reader
from raytf.data.sampling import Sampling, row_seeds
from raytf.data.stored import StoredDataset
from raytf.data.streamed import StreamedDataset
from raytf.data.tf_data import TFData
from raytf.errors import ConfigError
from raytf.runtime.topology import Shard

# Bytes that are gathered at once: large enough that Python is called seldom, small enough to stay in the allocator.
SUPERBATCH = 8 << 20
# Of the first in an epoch, which the first step waits for.
FIRST_SUPERBATCH = 1 << 20
# Batches ready before the step that takes them, where making one out of a superbatch takes time.
PREFETCH = 2
HEAVY_BATCH = 1 << 20  # bytes


class Feed:
    """One worker's part of a dataset.

    Args:
        dataset: where its rows lie: a `stored.StoredDataset`, or a `streamed.StreamedDataset`.
        batch: what a batch consists of.
        sampling: how steps take rows.
        shard: this worker among all.
        static: batches of one fixed shape, as TPUs need; with `drop_remainder`.
        reader_shard: this process among those that read, where these are not the workers.
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
        dataset: StoredDataset | StreamedDataset,
        batch: BatchSpec,
        sampling: Sampling,
        shard: Shard = Shard(),  # noqa: B008 - it is frozen
        *,
        static: bool = False,
        reader_shard: Shard | None = None,
        shapes_only: bool = False,
    ):
        self._batch, self._sampling, self._shard = batch, sampling, shard
        self._order = sampling.of(dataset.rows)
        reads = reader_shard or shard
        seen = dataset.first() if shapes_only and dataset.rows else dataset
        self._reader: Reader = open_reader(seen, batch.columns, self._order, reads.index, reads.count)
        if isinstance(self._reader, StreamReader) and reader_shard is None:
            self._reader.prepare = self._prepare
        self.shape = Batcher(batch, self._reader.sources)
        self.global_batch, self.chunk_steps = sampling.global_batch, self._order.chunk_steps
        self._chunk: tuple = (None, None)
        self.rows, self._static = self._order.total, static
        self.steps = sampling.steps(self._order.total)
        self.epoch = 0
        self.first_step = 0
        self._counts_itself = True

    @property
    def order(self) -> dict[str, int | str | bool]:
        """What says which rows a step of an epoch has, see `BatchSpec.order`."""
        return self._batch.order(self._order)

    @property
    def row_bytes(self) -> float:
        """About how many bytes a row takes."""
        return self.shape.row_bytes

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Says which epoch every iterator from now on gives, and from which step on."""
        self.epoch, self.first_step, self._counts_itself = epoch, first_step, False

    def dataset(self) -> tf.data.Dataset:
        """A `tf.data.Dataset` of (features, labels, weights) batches; each new iterator is an epoch."""
        start, stop = self._shard.of(self.global_batch)
        shape = self.shape
        with giving_memory():
            dataset = tf.data.Dataset.from_generator(self._superbatches, output_signature=shape.signature)
        rest = self._order.total - (self.steps - 1) * self.global_batch
        # a step of which this worker has no row is a step
        empty = self._shard.of(rest)[0] == rest
        dataset = shape.batches(dataset.prefetch(1), stop - start, static=self._static, empty=empty)
        if self._static:
            _check_static(dataset.element_spec)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(self.steps - self.first_step))
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        options.autotune.enabled = False  # it costs a thread, and at times a wait at the end (`iterator_ends`)
        # A thread more costs a step more than it saves where a batch is only cut out of a superbatch.
        if shape.heavy or shape.row_bytes * (stop - start) > HEAVY_BATCH:
            dataset = dataset.prefetch(PREFETCH)
        return worker_part.mark_worker_part(dataset.with_options(options))

    def first_batch(self) -> tf.data.Dataset:
        """The first batch of the first epoch alone, from no generator: of the first one TensorFlow writes a line."""
        rows = tf.data.Dataset.from_tensors(tuple(self.span(0, 0, 1)))
        return worker_part.mark_worker_part(self.shape.batches(rows, self.global_batch))

    def step_without(self, skip: int) -> tf.data.Dataset:
        """The step that the next iterator would start with, alone, without the first rows of its global batch."""
        rows = min(self.global_batch, self._order.total - self.first_step * self.global_batch)
        start, stop = self._shard.of(rows)
        mine = min(max(0, skip - start), stop - start)

        def rest(*batch):
            first = tf.compat.v1.placeholder_with_default(mine, [])  # the shape is not to tell how many are left
            parts = tf.nest.map_structure(lambda tensor: _rows_from(tensor, first), batch)
            return parts if len(parts) > 1 else parts[0]

        return worker_part.mark_worker_part(self.dataset().take(1).map(rest))

    def _superbatches(self):
        number, first = self.epoch, self.first_step
        self.first_step = 0
        if self._counts_itself:
            self.epoch += 1
        epoch, size = self._order.epoch(number), FIRST_SUPERBATCH
        part = -(-self.global_batch // self._shard.count)
        for chunk, rows in self._reader.chunks(epoch, number, first // self._order.chunk_steps):
            whole = self._positions(epoch, chunk, rows)
            begin = chunk * self._order.chunk_steps
            step, end = max(first, begin), min(self.steps, begin + self._order.chunk_steps)
            while step < end:
                count = max(1, int(size // max(1, rows.row_bytes * part)))
                steps = slice(step - begin, min(end, step + count) - begin)
                yield self._arrays(epoch, number, chunk, rows, whole, steps)
                step, size = begin + steps.stop, SUPERBATCH

    def _positions(self, epoch, chunk, rows):
        """Those of a whole chunk, where this worker's alone cannot be worked out."""
        if self._batch.bucket is not None:
            return epoch.positions(chunk, lambda positions: rows.lengths(positions, self._batch.bucket))
        return epoch.positions(chunk) if epoch.by_chunk else None

    def _prepare(self, epoch, number: int, chunk: int, rows) -> None:
        """Fetches this worker's rows of a chunk of a stream, and the lengths of all lists, before they are due."""
        for column in self._batch.padded:
            rows.lengths(np.arange(*epoch.bounds(chunk)), column)
        whole, steps = self._positions(epoch, chunk, rows), slice(0, self._order.chunk_steps)
        rows.fetch(epoch.part(chunk, steps, self._shard.index, self._shard.count, whole))

    def _arrays(self, epoch, number, chunk, rows, whole, steps: slice) -> tuple:
        mine = epoch.part(chunk, steps, self._shard.index, self._shard.count, whole)
        seeds = (row_seeds(self._order.seed, number, epoch.row_numbers(mine)),) if self._batch.map else ()
        return (*rows.gather(mine), *self._longest(epoch, chunk, rows, whole, steps), *seeds)

    def _longest(self, epoch, chunk, rows, whole, steps: slice) -> list[np.ndarray]:
        """Returns the length of the longest list of each step, of all workers' rows, for each column that needs it."""
        if not self._batch.padded:
            return []
        every = epoch.part(chunk, steps, 0, 1, whole)
        begins = np.arange(0, len(every), self.global_batch)
        return [np.maximum.reduceat(rows.lengths(every, i), begins).astype(np.int64) for i in self._batch.padded]

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


def open_feed(
    dataset,
    batch: BatchSpec,
    sampling: Sampling,
    shard: Shard = Shard(),  # noqa: B008 - it is frozen
    *,
    name: str = "train",
    strategy: tf.distribute.Strategy | None = None,
    told: dict | None = None,
    **more,
):
    """The `Feed` of a worker, or its `pipeline.PipelineFeed`.

    Args:
        dataset: a `StoredDataset`, a `StreamedDataset` or a `TFData`.
        batch, sampling, shard, more: see `Feed`.
        name: of the dataset, for sentences.
        strategy, told: see `PipelineFeed.agree`.
    """
    if isinstance(dataset, TFData):
        from raytf.data.pipeline import PipelineFeed  # with Keras 3, which a worker with Keras 2 does without

        return PipelineFeed(dataset, sampling, shard, name).agree(strategy, told)
    return Feed(dataset, batch, sampling, shard, **more)


def _rows_from(tensor, first: tf.Tensor):
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[first:]
    begin = tf.scatter_nd([[0]], [tf.cast(first, tf.int64)], tf.shape(tensor.dense_shape, tf.int64))
    return tf.sparse.slice(tensor, begin, tensor.dense_shape)


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
