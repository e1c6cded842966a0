"""Converts a dataset to a `tf.data.Dataset`: this worker's part of each global batch, in the order of `sampling`.

Rows are copied once, from Arrow memory into superbatches of many steps. TensorFlow slices these into batches in C++,
so that it rarely calls Python.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from raytf.compat.tensorflow import releasing_functions
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

# Bytes of a superbatch: large enough for rare calls of Python, small enough to stay in the allocator.
SUPERBATCH = 8 << 20
# Bytes of the first superbatch of an epoch, for which the first step waits.
FIRST_SUPERBATCH = 1 << 20
# Number of prefetched batches, if it takes time to make one out of a superbatch.
PREFETCH = 2
HEAVY_BATCH = 1 << 20  # bytes


class Feed:
    """One worker's shard of a dataset.

    Args:
        dataset: A `stored.StoredDataset`, or a `streamed.StreamedDataset`.
        batch: Contents of a batch.
        sampling: Sampling settings.
        shard: Index of this worker, and number of workers.
        static: Whether all batches have one fixed shape, as TPUs need; with `drop_remainder`.
        reader_shard: Index of this process among those that read, and their number, or None for the workers.
        shapes_only: Whether other processes read. This one then needs steps, shapes and dtypes, from the first rows.

    Attributes:
        rows: Number of rows of an epoch.
        steps: Number of steps of an epoch.
        chunk_steps: Number of steps whose rows are ordered together.
        global_batch: Rows of a step.
        shape: The `Batcher` of the tensors.
        epoch: The epoch of the next iterator; it counts up by itself unless `set_epoch` is called.
        first_step: The first step of the next iterator.
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
        self._order = sampling.sampler(dataset.rows)
        reading = reader_shard or shard
        opened = dataset.first() if shapes_only and dataset.rows else dataset
        self._reader: Reader = open_reader(opened, batch.columns, self._order, reading.index, reading.count)
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
        """Returns the settings that decide which rows a step has, see `BatchSpec.order`."""
        return self._batch.order(self._order)

    def state_dict(self) -> dict[str, int]:
        """Returns the state for a replacement worker, which needs none: what there is follows from the arguments."""
        return {}

    @property
    def row_bytes(self) -> float:
        """Returns the approximate size of a row in bytes."""
        return self.shape.row_bytes

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Sets the epoch of all further iterators, and the first step of the next one."""
        self.epoch, self.first_step, self._counts_itself = epoch, first_step, False

    def dataset(self) -> tf.data.Dataset:
        """Returns a `tf.data.Dataset` of (features, labels, weights) batches; each new iterator is an epoch."""
        start, stop = self._shard.bounds(self.global_batch)
        shape = self.shape
        with releasing_functions():
            dataset = tf.data.Dataset.from_generator(self._superbatches, output_signature=shape.signature)
        last_rows = self._order.total - (self.steps - 1) * self.global_batch
        # a step without rows of this worker is a step too
        empty = self._shard.bounds(last_rows)[0] == last_rows
        dataset = shape.batches(dataset.prefetch(1), stop - start, static=self._static, empty=empty)
        if self._static:
            _check_static(dataset.element_spec)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(self.steps - self.first_step))
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        options.autotune.enabled = False  # it costs a thread, and at times a wait at the end (`iterator_release`)
        # an additional thread costs more than it saves if a batch is only a slice of a superbatch
        if shape.heavy or shape.row_bytes * (stop - start) > HEAVY_BATCH:
            dataset = dataset.prefetch(PREFETCH)
        return worker_part.mark_worker_part(dataset.with_options(options))

    def first_batch(self) -> tf.data.Dataset:
        """Returns only the first batch, without a generator: TensorFlow logs a line at the first generator."""
        rows = tf.data.Dataset.from_tensors(tuple(self.span(0, 0, 1)))
        return worker_part.mark_worker_part(self.shape.batches(rows, self.global_batch))

    def step_without(self, skip: int) -> tf.data.Dataset:
        """Returns only the first step of the next iterator, without the first `skip` rows of its global batch."""
        rows = min(self.global_batch, self._order.total - self.first_step * self.global_batch)
        start, stop = self._shard.bounds(rows)
        skipped = min(max(0, skip - start), stop - start)

        def remaining_rows(*batch):
            # keeps the number of rows out of the static shape
            first = tf.compat.v1.placeholder_with_default(np.int64(skipped), [])
            parts = tf.nest.map_structure(lambda t: worker_part.rows_between(t, first, worker_part.row_count(t)), batch)
            return parts if len(parts) > 1 else parts[0]

        return worker_part.mark_worker_part(self.dataset().take(1).map(remaining_rows))

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
        """Returns the positions of a whole chunk, or None if this worker's part is computed alone."""
        if self._batch.bucket is not None:
            return epoch.positions(chunk, lambda positions: rows.lengths(positions, self._batch.bucket))
        return epoch.positions(chunk) if epoch.by_chunk else None

    def _prepare(self, epoch, number: int, chunk: int, rows) -> None:
        """Prefetches this worker's rows of a stream's chunk, and the lengths of all lists."""
        for column in self._batch.padded:
            rows.lengths(np.arange(*epoch.bounds(chunk)), column)
        whole, steps = self._positions(epoch, chunk, rows), slice(0, self._order.chunk_steps)
        rows.fetch(epoch.part(chunk, steps, self._shard.index, self._shard.count, whole))

    def _arrays(self, epoch, number, chunk, rows, whole, steps: slice) -> tuple:
        positions = epoch.part(chunk, steps, self._shard.index, self._shard.count, whole)
        seeds = (row_seeds(self._order.seed, number, epoch.row_numbers(positions)),) if self._batch.map else ()
        return (*rows.gather(positions), *self._longest(epoch, chunk, rows, whole, steps), *seeds)

    def _longest(self, epoch, chunk, rows, whole, steps: slice) -> list[np.ndarray]:
        """Returns the longest length of each step, over all workers' rows, for each column that is padded by batch."""
        if not self._batch.padded:
            return []
        all_rows = epoch.part(chunk, steps, 0, 1, whole)
        begins = np.arange(0, len(all_rows), self.global_batch)
        return [np.maximum.reduceat(rows.lengths(all_rows, i), begins).astype(np.int64) for i in self._batch.padded]

    def span(self, number: int, first: int, count: int) -> tuple:
        """Returns the arrays of this worker's rows of some steps, in the form of `shape.signature`.

        Args:
            number: Number of the epoch, from 0.
            first: The first step.
            count: Number of steps, all in one chunk.
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
    saved: dict | None = None,
    **more,
):
    """Returns the `Feed` of a worker, or its `pipeline.PipelineFeed` for a `TFData`.

    Args:
        dataset: A `StoredDataset`, a `StreamedDataset` or a `TFData`.
        batch: Contents of a batch; a `TFData` ignores it.
        sampling: Sampling settings.
        shard: Index of this worker, and number of workers.
        name: Name of the dataset, for error messages.
        strategy: Argument of `PipelineFeed.agree`.
        saved: Argument of `PipelineFeed.agree`.
        more: Further arguments of `Feed`.
    """
    if isinstance(dataset, TFData):
        from raytf.data.pipeline import PipelineFeed  # imports Keras 3, which a worker with Keras 2 does not need

        return PipelineFeed(dataset, sampling, shard, name).agree(strategy, saved)
    return Feed(dataset, batch, sampling, shard, **more)


def _check_static(spec) -> None:
    """Raises ConfigError unless a batch has one fixed shape, of numbers."""
    for tensor in tf.nest.flatten(spec):
        fixed = isinstance(tensor, tf.TensorSpec) and tensor.shape.is_fully_defined()
        if not fixed or tensor.dtype == tf.string:
            raise ConfigError(
                "On TPUs every batch has the same shape, of numbers",
                f"{tensor.dtype.name}{getattr(tensor, 'shape', '')}",
                "Pad lists to one length (raytf.Column(..., pad=256)), and encode strings before",
            )
