"""The feed of a worker from a `raytf.TFData`, a `tf.data` function. See `tf_data` for the contract.

An epoch's dataset is created at the request of its first batch. It runs in C++ inside the dataset that Keras iterates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raytf import logs
from raytf.collectives import communicator
from raytf.compat.keras import PyDatasetAdapter, make_class_weight_map_fn
from raytf.compat.tensorflow import deterministic_datasets, global_seed, reshuffles
from raytf.data import dataset_graph, worker_part
from raytf.data.sampling import Sampling, generator
from raytf.data.tf_data import PipelineContext, PipelineFacts, TFData, recording_context
from raytf.errors import ConfigError, one_line, user_line
from raytf.runtime.topology import Shard

logger = logs.get_logger(__name__)

PREFETCH = 2
# Number of epochs' datasets that are kept alive: the current one, a prefetched one, and an abandoned one.
_MOST_RECENT = 3
_RULE = "make_dataset(context) of a raytf.TFData must return a tf.data.Dataset of batches, as model.fit takes it"


class PipelineFeed:
    """One worker's shard of a `tf.data` pipeline, with the interface of `feed.Feed`.

    Args:
        source: The user's `TFData`.
        sampling: Sampling settings, of which the rows of a step and the seed are used.
        shard: Index of this worker, and number of workers.
        name: Name of the dataset, for error messages.
        context: Class of the function's argument.

    Attributes:
        spec: Element spec of a batch.
        steps: Number of steps of an epoch, set by `agree`.
        hidden: Kinds of the pipeline's layers and operations that may have a state; empty if there are none.
        global_batch: Rows of a step.
        epoch: The epoch of the next iterator, as in `Feed`.
        first_step: The first step of the next iterator.

    Raises:
        ConfigError: The function fails, or its result cannot be used for training.
    """

    steps: int

    def __init__(
        self,
        source: TFData,
        sampling: Sampling,
        shard: Shard = Shard(),  # noqa: B008
        name: str = "train",
        context: type[PipelineContext] = PipelineContext,
    ):
        self._source, self._sampling, self._shard, self._name = source, sampling, shard, name
        self._context = context
        self._caches: list = []
        self._recent: list = []
        self._adapters: list[PyDatasetAdapter] = []
        self._stream: tuple | None = None
        self._filled = False
        self.global_batch = sampling.global_batch
        self.epoch = self.first_step = 0
        self._counts_itself = True
        self._first = self._made(0)
        self.spec = self._first.element_spec
        if source.shards_itself:  # shares of a batch differ by a row, and may be empty
            self.spec = tf.nest.map_structure(_of_any_rows, self.spec)
        self._endless = int(self._first.cardinality()) == tf.data.INFINITE_CARDINALITY
        self.hidden = sorted({kind for kind in _kinds(self._first) if dataset_graph.is_unknown(kind)})
        if self._endless and source.steps_per_epoch is None:
            raise self._error(
                "An endless dataset needs steps_per_epoch",
                "one that repeats for ever",
                "Pass raytf.TFData(..., steps_per_epoch=...), or leave .repeat() out",
            )

    @property
    def order(self) -> dict[str, Any]:
        """Returns the settings that decide which rows a step has, as `Feed.order`; JSON."""
        order = self._source.order(self.global_batch, self._sampling.seed, self.resume_unit) | {"steps": self.steps}
        return order | ({"shards": self._shard.count} if self._source.shards_itself else {})

    @property
    def resume_unit(self) -> str:
        """Returns the unit at which a training resumes: "step" or "epoch"."""
        if self._source.resume != "auto":
            return self._source.resume
        return "epoch" if self.hidden else "step"

    # ---------------------------------------------------------------------------------------- steps

    def agree(self, strategy, saved: dict | None = None) -> PipelineFeed:
        """Sets the number of steps of an epoch; a collective call of all workers.

        Args:
            strategy: Strategy of the workers; None for a single process, with any shard.
            saved: `state_dict()` of another worker, for a replacement worker, which then exchanges nothing; or None.

        Returns:
            This feed.

        Raises:
            ConfigError: There are no steps, batches differ between workers, or their numbers differ and must not.
        """
        if saved is not None:
            self.steps = saved["steps"]
            return self
        count = self._shard.count
        counts = np.zeros((count, 2), np.int64)
        counts[self._shard.index] = self._own_steps(), zlib.crc32(repr(self.spec).encode())
        if not self._source.shards_itself and self.hidden and count > 1:  # Python's own random numbers
            counts[self._shard.index, 1] += self._digest() << 32
        if count > 1 and strategy is not None:
            (counts,) = communicator.sum_over_workers(strategy, [counts])
        if strategy is None:
            counts = counts[[self._shard.index]]
        steps, kinds = counts[:, 0].tolist(), counts[:, 1].tolist()
        if len(set(kinds)) > 1:
            rank = next(i for i, kind in enumerate(kinds) if kind != kinds[0])
            same = len({kind & 0xFFFFFFFF for kind in kinds}) == 1
            raise self._error(
                "All workers must be given batches alike" + ("; they cut each one" if same else ""),
                f"other {'rows in the first batch' if same else 'shapes or types'} on worker {rank} than on worker 0, "
                f"here {_shown(self.spec)}",
                "Let chance follow context.seed and context.epoch, or pass raytf.TFData(..., shards_itself=True)"
                if same
                else "Name shapes and types in the function",
            )
        self.steps = max(steps)
        if not self.steps:
            raise self._nothing()
        if len(set(steps)) > 1:
            shown = ", ".join(map(str, steps))
            if self._source.uneven == "error" or not self._source.shards_itself:
                raise self._error(
                    "Shards must have as many batches as each other with uneven='error'"
                    if self._source.shards_itself
                    else "All workers must be given the same batches",
                    f"{shown} batches by worker",
                    "Cut the data evenly, or pass uneven='pad'",
                )
            if self._shard.index == 0:
                logger.info(
                    f"the shards of {self._name!r} have {shown} batches: workers with fewer make steps without rows, "
                    "which count nothing. Cut the data evenly to use all workers, or refuse it by uneven='error'"
                )
        return self

    def state_dict(self) -> dict[str, int]:
        """Returns the state for a replacement worker."""
        return {"steps": self.steps}

    def known_steps(self) -> int | None:
        """Returns the number of batches of this worker's epoch, or None if they must be counted."""
        if self._source.steps_per_epoch is not None:
            return self._source.steps_per_epoch
        known = int(self._first.cardinality())
        return known if known >= 0 else None

    def _own_steps(self) -> int:
        known = self.known_steps()
        if known is not None:
            return known
        began = time.monotonic()
        steps = int(self._first.reduce(np.int64(0), lambda number, *_: number + 1))
        if self._shard.index == 0:
            logger.info(
                f"{self._name!r} does not know how many batches it has, so they were counted: {steps} in "
                f"{time.monotonic() - began:.1f} s; raytf.TFData(..., steps_per_epoch={steps}) saves that"
            )
        self._first = self._made(0)  # the count has consumed a generator
        return steps

    def _digest(self) -> int:
        """Returns a hash of the first global batch, of 31 bits."""
        first = next(iter(self._batches(self._made_whole(0)).take(1)), None)
        crc = 0
        for leaf in tf.nest.flatten(first, expand_composites=True) if first is not None else ():
            crc = zlib.crc32(repr(leaf.numpy().tolist()).encode(), crc)
        return crc & 0x7FFFFFFF

    # ---------------------------------------------------------------------------------------- interface of Feed

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Sets the epoch of all further iterators, and the first step of the next one."""
        self.epoch, self.first_step, self._counts_itself = epoch, first_step, False

    def dataset(self) -> tf.data.Dataset:
        """Returns a dataset of this worker's batches; each new iterator is an epoch."""
        dataset = tf.data.Dataset.from_tensors(0).map(lambda _: tf.py_function(self._epoch, [], tf.variant))
        dataset = dataset.flat_map(lambda epoch: tf.data.experimental.from_variant(epoch, self.spec))
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(self.steps - self.first_step))
        return worker_part.mark_worker_part(dataset.with_options(self._first.options()).prefetch(PREFETCH))

    def first_batch(self) -> tf.data.Dataset:
        """Returns a dataset of only the first batch of the first epoch.

        Raises:
            ConfigError: There is no batch, or reading it fails.
        """
        try:
            batch = next(iter(self._made(0).take(1)), None)
        except tf.errors.OpError as error:
            failed = f"one whose first batch fails: {one_line(error)}"
            raise self._error(_RULE, failed, "Correct the function") from error
        if batch is None:
            raise self._nothing()
        return worker_part.mark_worker_part(tf.data.Dataset.from_tensors(batch))

    def few(self, rows: int) -> tf.data.Dataset:
        """Returns this worker's shard of the first rows, in global batches."""
        batches = self._batches(self._made_whole(0))
        return self._cut(batches.unbatch().take(rows).batch(self.global_batch))

    @property
    def row_bytes(self) -> float:
        """Returns the approximate size of a row in bytes."""
        batch = next(iter(self.first_batch()))
        leaves = tf.nest.flatten(batch, expand_composites=True)
        size = sum(int(tf.size(leaf)) * max(1, leaf.dtype.size) for leaf in leaves)
        return size / max(1, int(worker_part.row_count(_first_leaf(batch))))

    def _epoch(self) -> tf.Tensor:
        number, first = self.epoch, self.first_step
        self.first_step = 0
        if self._counts_itself:
            self.epoch += 1
        dataset = self._continued_epoch(number, first) if self._endless else self._new_epoch(number, first)
        self._recent = [*self._recent[1 - _MOST_RECENT :], dataset]
        return tf.data.experimental.to_variant(dataset)

    def _new_epoch(self, number: int, first: int) -> tf.data.Dataset:
        if number and not self._filled:
            self._fill_caches()
        self._filled = True
        batches = self._made(number)
        known = int(batches.cardinality())
        if known < self.steps:  # or unknown, a negative number
            batches = batches.concatenate(self._missing_steps())
        return batches.skip(first).take(self.steps - first)

    def _continued_epoch(self, number: int, first: int) -> tf.data.Dataset:
        """Returns an epoch of an endless dataset: continues its iterator if that is at this step, else skips to it."""
        wanted, end = number * self.steps + first, (number + 1) * self.steps
        # an iterator that was abandoned within its epoch may still prefetch
        if self._stream is None or not int(self._stream[1]) == self._stream[2] == wanted:
            with tf.device("CPU:0"):
                position = tf.Variable(wanted, dtype=tf.int64, trainable=False)
            self._stream = iter(self._made(0).skip(wanted)), position, end
        iterator, position, _ = self._stream
        self._stream = iterator, position, end

        def following(_):
            batch = iterator.get_next()
            with tf.control_dependencies([position.assign_add(1, read_value=False)]):
                return tf.nest.map_structure(tf.identity, batch, expand_composites=True)

        return tf.data.Dataset.range(self.steps - first).map(following)

    def _missing_steps(self) -> tf.data.Dataset:
        """Returns the dataset for steps without a batch: batches without rows, or one that raises an error."""
        nothing = tf.nest.map_structure(_without_rows, self.spec)
        if self._source.shards_itself and self._source.uneven == "pad":
            return tf.data.Dataset.from_tensors(nothing).repeat()
        error = self._error(
            "Every epoch must have as many batches as the first one",
            f"fewer than {self.steps}",
            "Make the function's batches depend on the context alone, or repeat() them with steps_per_epoch",
        )

        def fail(_):
            with tf.control_dependencies([tf.debugging.Assert(False, [str(error)])]):
                return tf.nest.map_structure(tf.identity, nothing, expand_composites=True)

        return tf.data.Dataset.range(1).map(fail)

    def _fill_caches(self) -> None:
        """Fills random caches with the first epoch's data, for a training that resumes in a later epoch."""
        for layer in dataset_graph.layers(self._first):
            if dataset_graph.kind(layer) == "CacheDataset" and _by_chance(layer):
                layer.reduce(np.int64(0), lambda number, *_: number)

    # ---------------------------------------------------------------------------------------- the user's function

    def _made(self, epoch: int) -> tf.data.Dataset:
        """Returns this worker's batches of an epoch."""
        return self._cut(self._batches(self._made_whole(epoch)))

    def _made_whole(self, epoch: int) -> tf.data.Dataset:
        """Calls the function for an epoch, and returns its dataset."""
        shard = self._shard if self._source.shards_itself else Shard()
        start, stop = shard.bounds(self.global_batch)
        context = self._context(
            index=shard.index,
            num_shards=shard.count,
            batch=stop - start,
            global_batch=self.global_batch,
            seed=self._sampling.seed,
            epoch=epoch,
        )
        for adapter in self._adapters:
            adapter.on_epoch_end()
        self._adapters.clear()
        try:
            # keeps these operations out of the graph of a step that is being traced
            with tf.init_scope(), _seeded(self._sampling.seed, epoch), deterministic_datasets(self._caches):
                dataset = self._source.make_dataset(context)
                if isinstance(dataset, keras.utils.PyDataset):
                    dataset = self._of_py_dataset(dataset)
        except ConfigError:
            raise
        except Exception as error:
            raise self._error(
                _RULE, _error_with_line(error), "Correct the function; it runs on every worker"
            ) from error
        if not isinstance(dataset, tf.data.Dataset):
            raise self._error(_RULE, f"a {type(dataset).__module__}.{type(dataset).__name__}", "Return the dataset")
        return dataset

    def _of_py_dataset(self, given: keras.utils.PyDataset) -> tf.data.Dataset:
        adapter = PyDatasetAdapter(given)
        adapter.on_epoch_begin()
        self._adapters.append(adapter)
        dataset = adapter.get_tf_dataset()
        steps = adapter.num_batches
        return dataset if steps is None else dataset.apply(tf.data.experimental.assert_cardinality(steps))

    def _batches(self, made: tf.data.Dataset) -> tf.data.Dataset:
        leaves = [leaf for leaf in tf.nest.flatten(made.element_spec) if hasattr(leaf, "shape")]
        if self._source.rows:
            if any(isinstance(spec, tf.TensorSpec) and not spec.shape.is_fully_defined() for spec in leaves):
                raise self._error(
                    "With rows=True every row must have a known shape, so that they become batches",
                    _shown(made.element_spec),
                    "Name it with set_shape in a map; or batch in the function, with padded_batch or ragged_batch",
                )
            start, stop = (self._shard if self._source.shards_itself else Shard()).bounds(self.global_batch)
            return self._weighted(made.batch(stop - start))
        if not leaves or any(leaf.shape.rank == 0 for leaf in leaves):
            raise self._error(
                _RULE,
                f"rows, {_shown(made.element_spec)}",
                "Batch them in the function, .batch(context.batch), or pass raytf.TFData(..., rows=True)",
            )
        if any(leaf.shape.rank is None for leaf in leaves):
            unknown = f"tensors of unknown rank, {_shown(made.element_spec)}"
            raise self._error(_RULE, unknown, "Name the shapes with set_shape in a map")
        return self._weighted(made)

    def _weighted(self, made: tf.data.Dataset) -> tf.data.Dataset:
        if self._source.class_weight is None:
            return made
        try:
            return made.map(make_class_weight_map_fn(dict(self._source.class_weight)))
        except (ValueError, TypeError) as error:
            rule = "class_weight is for one output of classes, and without sample weights"
            raise self._error(rule, one_line(error), "Leave it out, and give weights in the function") from error

    def _cut(self, made: tf.data.Dataset) -> tf.data.Dataset:
        if self._source.shards_itself or self._shard.count == 1:
            return made
        index = tf.constant(self._shard.index, tf.int64)
        return made.map(lambda *batch: worker_part.part_of(batch, index, self._shard.count))

    def _nothing(self) -> ConfigError:
        return self._error(_RULE, "a dataset without a batch", "Check the files and filters that it is made from")

    def _error(self, rule: str, received: str, fix: str) -> ConfigError:
        return ConfigError(rule, f"{received}; from {self._source.name!r}, of {self._name!r}", fix)


def inspect(source: TFData, sampling: Sampling, name: str) -> PipelineFacts:
    """Inspects a pipeline and its first batch, in one process.

    Args:
        source: Argument of `PipelineFeed`.
        sampling: Argument of `PipelineFeed`.
        name: Argument of `PipelineFeed`.

    Raises:
        ConfigError: `PipelineFeed` raises it, or there is no batch.
    """
    read: set[str] = set()
    feed = PipelineFeed(source, sampling, name=name, context=recording_context(read))
    batch = next(iter(feed.first_batch()))
    rows = int(worker_part.row_count(_first_leaf(batch)))
    text = _remarks(feed, source)
    if rows != sampling.global_batch and feed.known_steps() != 1:
        text += (
            f"; a batch has {rows} rows, and batch_size is {sampling.global_batch}: use context.batch in the function"
        )
    result = {"text": text, "resume_unit": feed.resume_unit, "spec": repr(feed.spec)}
    is_shared = not source.shards_itself or bool({"index", "num_shards"} & read)
    return PipelineFacts(**result, steps=feed.known_steps(), rows=rows, is_shared=is_shared)


def two_steps(source: TFData, shard: Shard, batch: int) -> tf.data.Dataset:
    """Returns one worker's shard of a pipeline's first rows: a global batch, and one of two rows less.

    Args:
        source: The user's `TFData`.
        shard: Index of the worker, and number of workers.
        batch: Rows of the first step over all workers.
    """
    source = dataclasses.replace(source, shards_itself=False)
    feed = PipelineFeed(source, Sampling(global_batch=batch, shuffle="none"), shard)
    return worker_part.mark_worker_part(feed.few(2 * batch - 2))


def _remarks(feed: PipelineFeed, source: TFData) -> str:
    sharding = (
        "a shard on each worker" if source.shards_itself else "on each worker, which takes its part of each batch"
    )
    resumption = "resumes at any step"
    if feed.resume_unit == "epoch":
        why = f", as it may have a state of its own ({', '.join(feed.hidden)})" if feed.hidden else ""
        resumption = f"resumes at epochs, and replaces no worker in place{why}"
    chance = ""
    if any(
        dataset_graph.kind(layer).startswith("Parallel") and _draws(layer)
        for layer in dataset_graph.layers(feed._first)
    ):
        chance = "; random operations in a parallel map draw in any order: use tf.random.stateless_..., or one call"
    return f"tf.data of {source.name!r}, {sharding}; {resumption}{chance}"


@contextlib.contextmanager
def _seeded(seed: int, epoch: int) -> Iterator[None]:
    """Sets the global seeds of Python, NumPy and TensorFlow to those of an epoch, until the context ends."""
    number = int(generator(seed, epoch).integers(2**31))
    python, arrays = random.getstate(), np.random.get_state()
    random.seed(number)
    np.random.seed(number)
    try:
        with global_seed(number):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


def _kinds(dataset) -> Iterator[str]:
    for layer in dataset_graph.layers(dataset):
        yield dataset_graph.kind(layer)
        yield from dataset_graph.operations(layer)


def _draws(layer) -> bool:
    return any(map(dataset_graph.draws, dataset_graph.operations(layer)))


def _by_chance(dataset) -> bool:
    """Returns whether the content of a dataset depends on a seed."""
    return any(reshuffles(layer) or _draws(layer) for layer in dataset_graph.layers(dataset))


def _of_any_rows(spec):
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


def _without_rows(spec):
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.zeros([0, *(size or 0 for size in spec.shape[spec.ragged_rank + 1 :])], spec.dtype)
        return tf.RaggedTensor.from_nested_row_splits(values, [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank)
    if isinstance(spec, tf.SparseTensorSpec):
        shape = [0, *(size or 0 for size in spec.shape[1:])]
        return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape)
    return tf.zeros([0, *(size or 0 for size in spec.shape[1:])], spec.dtype)


def _first_leaf(batch):
    return next(leaf for leaf in tf.nest.flatten(batch) if hasattr(leaf, "shape"))


def _shown(spec) -> str:
    return str(tf.nest.map_structure(lambda s: f"{s.dtype.name}{s.shape}" if hasattr(s, "dtype") else str(s), spec))


def _error_with_line(error: Exception) -> str:
    line, location = one_line(error), user_line(error)
    return line if line.endswith(location) else f"{line}{location}"
