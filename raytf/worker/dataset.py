"""`raytf.get_dataset`: this worker's shard of a dataset of the trainer, in a train loop of the user's."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from raytf import validation
from raytf.data import columns as columns_module
from raytf.data import stored, streamed
from raytf.data.batch_spec import BatchSpec
from raytf.data.columns import ColumnSpecs
from raytf.data.feed import Feed, open_feed
from raytf.data.sampling import Sampling, differences
from raytf.data.stored import StoredDataset
from raytf.data.tf_data import TFData
from raytf.errors import ConfigError
from raytf.runtime.topology import Shard, per_replica_batch
from raytf.storage import stored_json
from raytf.worker import context as context_module


def _read_once(name: str, dataset, specs, context) -> StoredDataset:
    """Returns a dataset that rank 0 reads at the first call, and broadcasts to all workers. A collective call.

    Reads the columns of the first call; all columns if a later call names others. A sweep has read all columns.
    """
    if isinstance(dataset, StoredDataset):
        return dataset
    from ray.train.collective import broadcast_from_rank_zero

    # by name of the dataset: the columns that were read (None: all), and the rows
    read: dict[str, tuple[frozenset | None, StoredDataset]] = context_module.rows()
    known = name in read
    columns = frozenset(part for spec in specs.values() for part in columns_module.flat(spec))
    if not known or not (read[name][0] is None or columns <= read[name][0]):
        rows = None
        if context.get_world_rank() == 0:
            rows = dataset() if callable(dataset) else dataset
            if not known:
                rows = stored.projected(rows, specs)
            rows = streamed.materialized(name, rows, None if known else specs)
        read[name] = None if known else columns, broadcast_from_rank_zero(rows)
    return read[name][1]


def get_dataset(
    name: str,
    *,
    batch_size: int,
    features: ColumnSpecs | None = None,
    labels: ColumnSpecs | None = None,
    sample_weights: ColumnSpecs | None = None,
    shuffle: str | None = None,
    seed: int = 0,
    window: int = 65_536,
    drop_remainder: bool = False,
    map: Callable | None = None,
) -> tf.data.Dataset:
    """Returns this worker's shard of a dataset of the trainer, in a train loop. Each new iterator is the next epoch.

    Args:
        name: Key in the trainer's `datasets`.
        batch_size: Rows of the **global** batch, over all workers; at least one for each replica.
        features: Name of a column, or a `raytf.Column`. Or a list of columns, which are stacked into one float32
            vector. Or a dict of these by name of the model's input. A `raytf.TFData` takes `batch_size` and `seed`
            alone.
        labels: As `features`, or None.
        sample_weights: As `features`, or None.
        shuffle: "full" (the default for "train"), "window", or "none" (the default for others).
        seed: Seed of the shuffle; 0 by default. The order depends on seed, epoch and batch size only, not on the number
            of workers.
        window: Number of rows of a window, at least 1 and 65,536 by default, for shuffle="window".
        drop_remainder: Whether to drop the last batch if it is smaller.
        map: Function as in `KerasTrainer`.

    Returns:
        A `tf.data.Dataset` of (features, labels, sample_weights) without the parts that are None, of known cardinality.
        Its batches have this worker's rows of the global batch.

    Raises:
        ConfigError: It was called outside of a train loop, or an argument does not fit the dataset.

    Example:
        >>> import pandas, ray, raytf
        >>> def train_loop():
        ...     import raytf
        ...     for x, y in raytf.get_dataset("train", batch_size=16, features="x", labels="y"):
        ...         pass
        >>> rows = ray.data.from_pandas(pandas.DataFrame({"x": range(64), "y": range(64)}))
        >>> result = raytf.TensorflowTrainer(train_loop, datasets={"train": rows}).fit()
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
    validation.check_seed(seed)
    validation.check_flag("drop_remainder", drop_remainder)
    validation.check_whole("window", window, 1)
    validation.check_function("map", map, "map(features, labels, seeds)")
    if isinstance(setup.datasets[name], TFData):
        given = {"features": features, "labels": labels, "sample_weights": sample_weights, "map": map}
        given |= {"shuffle": shuffle, "drop_remainder": drop_remainder or None}
        if passed := [key for key, value in given.items() if value is not None]:
            raise ConfigError(f"{name!r} is a raytf.TFData, which defines these", ", ".join(passed), "Leave them out")
        per_replica_batch(batch_size, context.get_world_size())
        feed = open_feed(
            setup.datasets[name],
            BatchSpec(None),
            Sampling(global_batch=batch_size, seed=seed, shuffle="none"),
            Shard(context.get_world_rank(), context.get_world_size()),
            name=name,
            strategy=context_module.get_strategy(),
        )
        return _given(feed)
    if features is None:
        raise ConfigError("features must name columns", None, "Name a column, a list of columns or a dict")
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
    if feed.rows and not feed.steps:
        raise ConfigError(
            "With drop_remainder an epoch needs one whole batch",
            f"batch_size={batch_size} for the {feed.rows} rows of {name!r}",
            "Use a smaller batch_size",
        )
    return _given(feed)


def _given(feed) -> tf.data.Dataset:
    dataset = feed.dataset()
    _feeds[dataset] = feed
    return dataset


class Position(tf.train.experimental.PythonState):
    """Tracks the position of a train loop of your own in the rows of `get_dataset`. It is the same on every worker.

    `tf.train.Checkpoint` saves and restores it like a variable. Without one, `get_state()` returns JSON, which
    `set_state` accepts. A restored loop resumes with the next batch, on any number of workers. Of a `raytf.TFData`
    with a state of its own it resumes at epochs only. With `shards_itself` it needs as many workers as before.

    Args:
        rows: A dataset that `get_dataset` returned, not one that was made from it.

    Attributes:
        epoch: Number of complete epochs.
        step: Number of batches that were taken from the current epoch.
        steps: Number of batches of an epoch.

    Raises:
        ConfigError: `rows` is another dataset.

    Example:
        >>> import pandas, ray, raytf
        >>> def train_loop():
        ...     import tensorflow as tf
        ...     import raytf
        ...     rows = raytf.get_dataset("train", batch_size=16, features="x", labels="y")
        ...     position = raytf.Position(rows)
        ...     saved = tf.train.Checkpoint(position=position)    # and model, optimizer; read(path) restores it
        ...     for batches in position.epochs(3):
        ...         for x, y in batches:
        ...             pass    # a step; saved.write(path) saves it
        >>> rows = ray.data.from_pandas(pandas.DataFrame({"x": range(64), "y": range(64)}))
        >>> result = raytf.TensorflowTrainer(train_loop, datasets={"train": rows}).fit()
    """

    def __init__(self, rows: tf.data.Dataset):
        super().__init__()
        if rows not in _feeds:
            raise ConfigError(
                "A Position is that of a dataset of raytf.get_dataset",
                f"a {type(rows).__name__} of another",
                "Pass what get_dataset gave, and map what position.epochs gives",
            )
        self._feed = _feeds[rows]
        self.epoch = self.step = 0
        self.steps = self._feed.steps

    def epochs(self, epochs: int) -> Iterator[Iterator]:
        """Returns an iterator of the remaining epochs, each an iterator of its remaining batches, which it counts.

        Args:
            epochs: Number of epochs of the whole training, at least 0.

        Raises:
            ConfigError: `epochs` is not a whole number of at least 0.
        """
        validation.check_whole("epochs", epochs, 0)
        return self._epochs(epochs)

    def _epochs(self, epochs: int) -> Iterator[Iterator]:
        while self.epoch < epochs:
            yield self._batches()
            # also if a loop left the epoch early
            self.epoch, self.step = self.epoch + 1, 0

    def remaining(self) -> tf.data.Dataset:
        """Returns the remaining batches of the epoch as a dataset, for loops that count with `add`."""
        self._feed.set_epoch(self.epoch, self.step)
        return self._feed.dataset()

    def _batches(self) -> Iterator:
        for batch in self.remaining() if self.step < self.steps else ():
            self.step += 1
            yield batch

    def add(self, steps: int) -> None:
        """Counts batches that were taken from `remaining`. The last batch of an epoch begins the next epoch.

        Args:
            steps: Number of batches, from 0 to those that remain in the epoch.

        Raises:
            ConfigError: `steps` is not in this range.
        """
        remaining = self.steps - self.step
        if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps <= remaining:
            raise ConfigError(
                f"steps must be 0 to {remaining}, which are left of the epoch", repr(steps), "Count batches"
            )
        self.step += steps
        if self.step == self.steps:
            self.epoch, self.step = self.epoch + 1, 0

    def get_state(self) -> dict[str, Any]:
        """Returns a JSON-serializable dict for `set_state`: epoch, step, and the order of the rows."""
        return {"epoch": self.epoch, "step": self.step, "order": self._feed.order}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Resumes at the position of another `Position`.

        Args:
            state: Result of `get_state`.

        Raises:
            ConfigError: It is no result of `get_state`, or is within an epoch whose steps had other rows.
        """
        is_valid = isinstance(state, Mapping) and all(
            type(state.get(name)) is int and state[name] >= 0 for name in ("epoch", "step")
        )
        if not is_valid or not isinstance(state.get("order"), Mapping):
            raise ConfigError(
                "set_state takes what get_state gave", repr(state)[:200], "Pass the result of get_state()"
            )
        differs = differences(state["order"], self._feed.order)
        if state["step"] and differs:
            raise ConfigError(
                "A loop resumes within an epoch with the rows that its steps had",
                f"step {state['step']} of an epoch with {differs}",
                "Call get_dataset as before, or start the epoch again: set_state({**state, 'step': 0})",
            )
        if state["step"] > self.steps:
            raise ConfigError(
                f"A loop resumes within an epoch of {self.steps} steps",
                f"step {state['step']}",
                "Pass what get_state gave, and call get_dataset as before",
            )
        self.epoch, self.step = state["epoch"], state["step"]

    def serialize(self) -> str:
        """Returns the state as JSON, for `tf.train.Checkpoint`."""
        return json.dumps(self.get_state())

    def deserialize(self, string_value: str | bytes) -> None:
        """Restores the state from JSON, for `tf.train.Checkpoint`; raises as `set_state`."""
        try:
            state = stored_json.parse_object(string_value)
        except stored_json.UnreadableError as error:
            raise ConfigError(
                "The position in a checkpoint is what serialize wrote", f"a text that {error}", "Take one before it"
            ) from error
        self.set_state(state)


# The feed of each dataset that `get_dataset` returned.
_feeds: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
