"""`raytf.TFData`: input from a `tf.data` function of the user's. Needs no TensorFlow.

Each worker calls `make_dataset(context)` for each epoch, under the random seeds of (seed, epoch). It returns the epoch
from its first batch. Either all workers get the same global batches, which raytf shards, or the function returns the
shard in the context. All workers make the same number of steps, which is known or counted before the first step. A
stateless pipeline resumes at any step, by skipping; others (Python code, a service) resume at an epoch. An endless
dataset is one stream, divided into epochs. An in-memory `cache()` is kept between epochs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from ray import cloudpickle

from raytf import validation
from raytf.errors import ConfigError
from raytf.logs import warn_user

UNEVEN = ("pad", "error")
RESUMES = ("auto", "step", "epoch")


@dataclass(frozen=True, kw_only=True)
class PipelineContext:
    """The argument of a `TFData` function.

    Args:
        index: Index of the shard to return, as in `dataset.shard(context.num_shards, context.index)`; 0 unless
            `shards_itself`.
        num_shards: Number of shards; 1 unless `shards_itself`.
        batch: Rows of a batch to return: the global batch, or with `shards_itself` this worker's share of it.
        global_batch: Rows of a step over all workers.
        seed: Seed of the run, an int.
        epoch: Epoch to return, from 0; always 0 for an endless dataset.
    """

    index: int = 0
    num_shards: int = 1
    batch: int
    global_batch: int
    seed: int
    epoch: int


def recording_context(read: set[str]) -> type[PipelineContext]:
    """Returns a class of contexts that adds the names of values to a set as the function reads them."""

    class Context(PipelineContext):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    return Context


@dataclass(frozen=True, kw_only=True)
class PipelineFacts:
    """The result of an inspection of a pipeline, before the workers start.

    Args:
        text: How workers share it, and where a training resumes, as a clause.
        resume_unit: Unit at which a training resumes, "step" or "epoch".
        steps: Number of steps of an epoch, or None if unknown. With `shards_itself`, those of one shard of all rows.
        rows: Rows of the first batch.
        spec: Shapes and dtypes of a batch, as text, for comparisons.
        is_shared: Whether each worker has rows of its own, as far as the function reads which.
    """

    text: str
    resume_unit: str
    steps: int | None
    rows: int
    spec: str
    is_shared: bool = True


@dataclass(frozen=True, eq=False)
class TFData:
    """Feeds a training from a function that returns a `tf.data.Dataset`. Trainers take it as a dataset.

    Each worker calls the function for each epoch. By default every worker runs the whole pipeline, and raytf shards
    each global batch. So results equal those of one process.

    Args:
        make_dataset: Function `make_dataset(context)` that returns a `tf.data.Dataset` of (features, labels, sample
            weights) batches, as for `model.fit`, or a `keras.utils.PyDataset`. Its `PipelineContext` has the ints
            `batch`, `global_batch`, `seed`, `epoch`, `index` and `num_shards`. During the call the global seeds of
            TensorFlow, NumPy and Python depend on `seed` and `epoch` alone. Load slow data outside of the function, or
            in a `functools.cache`.
        shards_itself: Whether the function returns shard `context.index` of `context.num_shards`, in batches of
            `context.batch` rows.
        rows: Whether the dataset is one of rows of known shapes, which raytf batches.
        steps_per_epoch: Number of batches of an epoch, at least 1. An endless dataset (`repeat()`) needs it. By
            default it is the dataset's cardinality, or counted before the first epoch if that is unknown.
        uneven: Treatment of shards with fewer batches than others. "pad", the default, adds steps without rows, which
            have no effect on the result. "error" raises ConfigError.
        class_weight: Dict of weights by class, as in `model.fit`.
        resume: Unit at which a training resumes, "step" or "epoch". "auto", the default, is "step", or "epoch" if the
            pipeline may have a state (Python code, a tf.data service).

    Raises:
        ConfigError: An argument is wrong.

    Example:
        >>> import keras, raytf, tensorflow as tf
        >>> def make_dataset(context):
        ...     x = tf.reshape(tf.range(256.0) / 256, (64, 4))
        ...     return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(64).batch(context.batch)
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> data = raytf.TFData(make_dataset)
        >>> history = raytf.fit(model, data, batch_size=16, epochs=2, num_workers=2, verbose=0)
        >>> len(history.history["loss"])
        2
    """

    make_dataset: Callable
    _: KW_ONLY
    shards_itself: bool = False
    rows: bool = False
    steps_per_epoch: int | None = None
    uneven: str = "pad"
    class_weight: Mapping[int, float] | None = None
    resume: str = "auto"
    facts: PipelineFacts | None = field(default=None, init=False, repr=False)  # the result of `with_facts`

    def __post_init__(self):
        if not callable(self.make_dataset):
            raise ConfigError(
                "raytf.TFData takes a function that makes the dataset on each worker, make_dataset(context)",
                f"a {type(self.make_dataset).__name__}",
                "Pass the function; what it returned stays in this process",
            )
        for name in ("shards_itself", "rows"):
            validation.check_flag(name, getattr(self, name))
        if self.steps_per_epoch is not None:
            validation.check_whole("steps_per_epoch", self.steps_per_epoch, 1)
        validation.check_word("uneven", self.uneven, UNEVEN)
        if self.class_weight is not None and not isinstance(self.class_weight, Mapping):
            received = repr(self.class_weight)
            raise ConfigError("class_weight must be a dict of classes to weights", received, "Pass {0: 1.0, ...}")
        validation.check_word("resume", self.resume, RESUMES)

    @property
    def name(self) -> str:
        """Returns the name of the function, for messages."""
        function = getattr(self.make_dataset, "func", self.make_dataset)  # of a `functools.partial`
        return getattr(function, "__name__", type(function).__name__)

    def with_facts(self, facts: PipelineFacts) -> TFData:
        """Returns a copy with the result of an inspection; internal to raytf.

        Args:
            facts: Result of `pipeline.inspect`.
        """
        if not facts.is_shared:
            warn_user(
                f"{self.name!r}, of a raytf.TFData with shards_itself=True, reads neither context.index nor "
                "context.num_shards, so that each worker may train on all rows. Add "
                "dataset.shard(context.num_shards, context.index), or leave shards_itself out",
            )
        made = copy.copy(self)
        object.__setattr__(made, "facts", facts)
        return made

    def first(self) -> TFData:
        """Returns itself, as it contains no rows; has the interface of `StoredDataset.first`."""
        return self

    with_blocks = first

    def order(self, batch_size: int, seed: int, resume_unit: str) -> dict[str, Any]:
        """Returns the settings that decide which rows a step has, as JSON, as far as known before workers start.

        Args:
            batch_size: Global batch size in rows, at least 1.
            seed: Seed of the run.
            resume_unit: Unit from which the pipeline resumes: "step" or "epoch".
        """
        return {"batch_size": batch_size, "seed": seed, "pipeline": self.name, "goes_on": resume_unit}

    def check_pickles(self) -> None:
        """Checks that the function can be sent to a worker.

        Raises:
            ConfigError: It does not pickle.
        """
        try:
            cloudpickle.dumps(self.make_dataset)
        except Exception as error:
            raise ConfigError(
                "The function of a raytf.TFData must pickle, as it is sent to the workers",
                f"{self.name!r}: {error}",
                "Create what does not pickle (datasets, tensors, files, locks) inside the function",
            ) from error
