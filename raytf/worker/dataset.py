"""`raytf.get_dataset`: in a train loop of the user's own, this worker's part of one of the trainer's datasets."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from raytf.data import columns as columns_module
from raytf.data import stored, streamed
from raytf.data.batch_spec import BatchSpec
from raytf.data.columns import ColumnSpecs
from raytf.data.feed import Feed
from raytf.data.sampling import Sampling
from raytf.data.stored import StoredDataset
from raytf.errors import ConfigError
from raytf.runtime.topology import Shard, per_replica_batch
from raytf.worker import context as context_module

# what was read of each dataset, and which columns; None: all
_read: dict[str, tuple[frozenset | None, StoredDataset]] = {}


def _read_once(name: str, dataset, specs, context) -> StoredDataset:
    """Rank 0 reads a dataset at the first call, and tells the others where it lies; all must ask for it.

    The columns that the call names; all of them if a later call names others. A sweep has read all for all its trials.
    """
    if isinstance(dataset, StoredDataset):
        return dataset
    from ray.train.collective import broadcast_from_rank_zero

    known = name in _read
    wanted = frozenset(part for spec in specs.values() for part in columns_module.flat(spec))
    if not known or not (_read[name][0] is None or wanted <= _read[name][0]):
        found = None
        if context.get_world_rank() == 0:
            found = dataset() if callable(dataset) else dataset
            if not known:
                found = stored.projected(found, specs)
            found = streamed.materialized(name, found, None if known else specs)
        _read[name] = None if known else wanted, broadcast_from_rank_zero(found)
    return _read[name][1]


def get_dataset(
    name: str,
    *,
    batch_size: int,
    features: ColumnSpecs,
    labels: ColumnSpecs | None = None,
    sample_weights: ColumnSpecs | None = None,
    shuffle: str | None = None,
    seed: int = 0,
    window: int = 65_536,
    drop_remainder: bool = False,
    map: Callable | None = None,
) -> tf.data.Dataset:
    """Inside a train loop: this worker's part of one of the trainer's datasets. Each new iterator is the next epoch.

    Args:
        name: the key in the trainer's `datasets`.
        batch_size: rows of the **global** batch, over all workers.
        features: a column (a name, or a `raytf.Column` that says how it becomes a tensor), a list of columns (stacked
            into one float32 vector), or a dict of these by input name.
        labels, sample_weights: likewise, or None.
        shuffle: "full" (the default for "train"), "window", or "none" (the default for others).
        seed: of the shuffle; the order depends on (seed, epoch, batch_size) alone, not on the number of workers.
        window: rows of a window where `shuffle` is "window".
        drop_remainder: leave out the last batch where it is smaller.
        map: as in `KerasTrainer`.

    Returns:
        A dataset of (features, labels, sample_weights), without the parts that are None, whose cardinality is known.

    Raises:
        ConfigError: called outside a train loop, or an argument does not fit the dataset.
    """
    setup = context_module.setup()
    if setup is None or not setup.datasets:
        raise ConfigError(
            "raytf.get_dataset() works inside a train loop",
            f"a call for {name!r} outside of one",
            "Call it in the function that a raytf trainer with datasets={...} runs on its workers",
        )
    import ray.train

    context = ray.train.get_context()
    if name not in setup.datasets:
        known = ", ".join(repr(key) for key in setup.datasets)
        raise ConfigError(f"A dataset must be one that the trainer was given ({known})", repr(name), "Pass it there")
    batch = BatchSpec.parsed(features, labels, sample_weights, map)
    dataset = _read_once(name, setup.datasets[name], batch.roles, context)
    batch.check(dataset.columns)
    per_replica_batch(batch_size, context.get_world_size())
    sampling = Sampling(
        global_batch=batch_size,
        seed=seed,
        shuffle=shuffle or ("full" if name == "train" else "none"),
        window=window,
        drop_remainder=drop_remainder,
    )
    feed = Feed(dataset, batch, sampling, Shard(context.get_world_rank(), context.get_world_size()))
    return feed.dataset()
