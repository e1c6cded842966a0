"""A dataset's blocks to `tf.data.Dataset`: this worker's part of every global batch, in the order of `raytf.order`.

Object-store memory is read only by convention but mapped writable, and TensorFlow may work in place on memory that it
was given: rows are therefore always copied, once, into aligned memory of their own.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import tensorflow as tf

from raytf import blocks as blocks_module
from raytf import columns as columns_module
from raytf import multiworker_input, order, strategy
from raytf.blocks import Blocks
from raytf.columns import Columns, Source
from raytf.errors import ConfigError
from raytf.topology import per_replica_batch, share

# Bytes that are gathered at once: large enough that Python is called seldom, small enough to stay in the allocator.
SUPERBLOCK = 8 << 20


class Feed:
    """One worker's part of a dataset.

    Args:
        blocks: where the rows lie.
        features, labels, sample_weights: parsed columns (`columns.parse`); labels and weights may be None.
        global_batch: rows of a step over all workers.
        worker, workers: this worker's rank and the number of workers.
        seed: of the shuffle.
        shuffle: "full" or "none".

    Attributes:
        epoch: the epoch that the next iterator gives; counts up by itself unless it is set before each epoch.
        first_step: the step that the next iterator starts with.
    """

    def __init__(
        self,
        blocks: Blocks,
        *,
        features,
        labels=None,
        sample_weights=None,
        global_batch: int,
        worker: int = 0,
        workers: int = 1,
        seed: int = 0,
        shuffle: str = "full",
        drop_remainder: bool = False,
    ):
        if shuffle not in order.SHUFFLES:
            raise ConfigError(f"shuffle must be one of {', '.join(order.SHUFFLES)}", repr(shuffle), "Choose one")
        self._place = {"global_batch": global_batch, "worker": worker, "workers": workers}
        self._rows, self._seed, self._shuffle = sum(blocks.rows), seed, shuffle
        self._drop = drop_remainder
        self._starts = np.cumsum([0, *blocks.rows])
        tables = [_table(block) for block in blocks.get()]
        specs = (features, labels, sample_weights)
        self._structure = tuple(spec for spec in specs if spec is not None)
        columns = _flatten(self._structure)
        known = {c: Source(tables, c) for c in dict.fromkeys(columns)}
        self._sources = [known[c] for c in columns]
        self.steps = order.steps_per_epoch(self._rows, global_batch, drop_remainder)
        self.epoch = 0
        self.first_step = 0
        self._counts_itself = True

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Says which epoch every iterator from now on gives, and from which step on."""
        self.epoch, self.first_step, self._counts_itself = epoch, first_step, False

    def dataset(self) -> tf.data.Dataset:
        """A `tf.data.Dataset` of (features, labels, weights) batches; each new iterator is an epoch."""
        batch = self._place["global_batch"]
        start, stop = share(batch, self._place["workers"], self._place["worker"])
        full = order.steps_per_epoch(self._rows, batch, drop_remainder=True)
        specs = [tf.TensorSpec((None, *s.shape), _tf_dtype(s.dtype)) for s in self._sources]
        dataset = tf.data.Dataset.from_generator(self._full_steps, output_signature=tuple(specs))
        dataset = dataset.rebatch(stop - start, drop_remainder=self._drop)
        if self.steps > full:
            last = tf.data.Dataset.from_generator(self._last_step, output_signature=tuple(specs))
            dataset = dataset.concatenate(last)
        structure = self._structure
        dataset = dataset.map(lambda *flat: _unflatten(structure, flat))
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(self.steps - self.first_step))
        return multiworker_input.mark_worker_part(dataset.prefetch(2))

    def _permutation(self) -> np.ndarray:
        return order.permutation(self._rows, self._seed, self.epoch, self._shuffle)

    def _full_steps(self):
        epoch_order, batch = self._permutation(), self._place["global_batch"]
        self._pending_last = epoch_order
        first, self.first_step = self.first_step, 0
        if self._counts_itself:
            self.epoch += 1
        full = order.steps_per_epoch(self._rows, batch, drop_remainder=True)
        row_bytes = sum(max(1, int(np.prod(s.shape))) * s.dtype.itemsize for s in self._sources)
        part = -(-batch // self._place["workers"])
        chunk = max(1, SUPERBLOCK // max(1, row_bytes * part))
        for step in range(first, full, chunk):
            steps = range(step, min(full, step + chunk))
            rows = np.concatenate([order.worker_rows(epoch_order, s, **self._place) for s in steps])
            yield self._gather(rows)

    def _last_step(self):
        yield self._gather(order.worker_rows(self._pending_last, self.steps - 1, **self._place))

    def _gather(self, rows: np.ndarray):
        block = np.searchsorted(self._starts, rows, side="right") - 1
        within = rows - self._starts[block]
        return tuple(source.gather(block, within) for source in self._sources)


def _table(block) -> pa.Table:
    return block if isinstance(block, pa.Table) else pa.Table.from_pandas(block, preserve_index=False)


def _flatten(structure) -> list[Columns]:
    return [c for spec in structure for c in columns_module.flat(spec)]


def _unflatten(structure, flat):
    flat = iter(flat)
    parts = tuple({k: next(flat) for k in s} if isinstance(s, dict) else next(flat) for s in structure)
    return parts if len(parts) > 1 else parts[0]


def _tf_dtype(dtype: np.dtype) -> tf.DType:
    return tf.string if dtype.hasobject else tf.as_dtype(dtype)


_read: dict[str, Blocks] = {}


def _read_once(name: str, dataset, context) -> Blocks:
    """Rank 0 reads a dataset at the first call, and tells the others where it lies; all must ask for it."""
    from ray.train.collective import broadcast_from_rank_zero

    if name not in _read:
        first = context.get_world_rank() == 0
        found = blocks_module.read(dataset() if callable(dataset) else dataset) if first else None
        _read[name] = broadcast_from_rank_zero(found)
    return _read[name]


def get_dataset(
    name: str,
    *,
    batch_size: int,
    features,
    labels=None,
    sample_weights=None,
    shuffle: str | None = None,
    seed: int = 0,
    drop_remainder: bool = False,
) -> tf.data.Dataset:
    """Inside a train loop: this worker's part of one of the trainer's datasets. Each new iterator is the next epoch.

    Args:
        name: the key in the trainer's `datasets`.
        batch_size: rows of the **global** batch, over all workers.
        features: a column, a list of columns (stacked into one float32 vector), or a dict of these by input name.
        labels, sample_weights: likewise, or None.
        shuffle: "full" (the default for "train") or "none" (the default for others).
        seed: of the shuffle; the order depends on (seed, epoch, batch_size) alone, not on the number of workers.
        drop_remainder: leave out the last batch where it is smaller.

    Returns:
        A dataset of (features, labels, sample_weights), without the parts that are None, whose cardinality is known.

    Raises:
        ConfigError: called outside a train loop, or an argument does not fit the dataset.
    """
    config = strategy.config()
    if config is None or not config.feed:
        raise ConfigError(
            "raytf.get_dataset() works inside a train loop",
            f"a call for {name!r} outside of one",
            "Call it in the function that a raytf trainer with datasets={...} runs on its workers",
        )
    import ray.train

    context = ray.train.get_context()
    if name not in config.feed:
        known = ", ".join(map(repr, config.feed))
        raise ConfigError(f"A dataset must be one that the trainer was given ({known})", repr(name), "Pass it there")
    blocks = _read_once(name, config.feed[name], context)
    parsed = {
        role: columns_module.parse(spec, role)
        for role, spec in {"features": features, "labels": labels, "sample_weights": sample_weights}.items()
    }
    for role, spec in parsed.items():
        columns_module.check_names(spec, blocks.columns, role)
    per_replica_batch(batch_size, context.get_world_size())
    feed = Feed(
        blocks,
        **parsed,
        global_batch=batch_size,
        worker=context.get_world_rank(),
        workers=context.get_world_size(),
        seed=seed,
        shuffle=shuffle or ("full" if name == "train" else "none"),
        drop_remainder=drop_remainder,
    )
    return feed.dataset()
