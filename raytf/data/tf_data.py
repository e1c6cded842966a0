"""`raytf.TFData`: the rows of a run that come out of a `tf.data` function of the user's. Needs no TensorFlow.

The contract: `make_dataset(context)` is called for each epoch, on each worker, with the random seeds of (seed, epoch),
and gives that epoch from its beginning. Either all workers get the same global batches, of which raytf cuts each one's
part, or the function gives the shard that the context names. All workers make as many steps: those that are known or
counted before the first one. What has no state of its own resumes at any step, by skipping; what may have (Python code,
a service) at an epoch. An endless dataset is one stream that its epochs divide. What `cache()` keeps in memory stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from ray import cloudpickle

from raytf import validation
from raytf.errors import ConfigError

UNEVEN = ("pad", "error")
RESUMES = ("auto", "step", "epoch")


@dataclass(frozen=True, kw_only=True)
class PipelineContext:
    """What a `TFData` function is told.

    Args:
        index, num_shards: the shard that it is to give: `dataset.shard(context.num_shards, context.index)`. The only
            one, 0 of 1, unless it shards by itself.
        batch: rows of a batch that it is to give: the global batch, or this worker's part of one.
        global_batch: rows of a step, of all workers.
        seed: of the run.
        epoch: that it is to give, from 0; of an endless dataset 0.
    """

    index: int = 0
    num_shards: int = 1
    batch: int
    global_batch: int
    seed: int
    epoch: int


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What was seen of a pipeline before the workers start.

    Args:
        text: how it is shared, and where a training goes on, as a clause.
        goes_on: "step" or "epoch".
        steps: of an epoch where they are known, of shards those of all in one.
        rows: of the first batch.
        spec: shapes and types of a batch, to be compared.
    """

    text: str
    goes_on: str
    steps: int | None
    rows: int
    spec: str


@dataclass(frozen=True, eq=False)
class TFData:
    """Rows of a `tf.data` pipeline, wherever a trainer takes a dataset.

    ```python
    def train(context):
        files = tf.data.Dataset.list_files("/data/*.tfrecord")
        return tf.data.TFRecordDataset(files).map(parse).shuffle(1000).batch(context.batch)

    raytf.KerasTrainer(build_model, datasets={"train": raytf.TFData(train)}, config={"batch_size": 256})
    ```

    Args:
        make_dataset: make_dataset(context) -> a `tf.data.Dataset` of (features, labels, sample weights) batches, as
            `model.fit` takes it, or a `keras.utils.PyDataset`. Called on each worker for each epoch, with a
            `PipelineContext`: `index` and `num_shards`, `batch`, `global_batch`, `seed` and `epoch`. TensorFlow's,
            NumPy's and Python's global seeds are those of seed and epoch in it. Keep outside of it, or in a
            `functools.cache`, what is slow to load.
        shards_itself: the function gives the shard that the context names, in batches of `context.batch` rows. Else
            every worker runs the whole pipeline, and raytf cuts each global batch: the result is that of one process.
        rows: the dataset is one of rows, of known shapes, which raytf batches.
        steps_per_epoch: batches of an epoch; needed where `repeat()` makes it endless. Where it is not given, and the
            dataset does not know, its batches are counted before the first epoch.
        uneven: of shards that have fewer batches than others, or none: "pad" has their workers make the other steps
            without rows, which count nothing; "error" refuses them.
        class_weight: weight of each class, by number, for labels that are classes; as `model.fit` takes it.
        resume: where a training goes on: "auto" at a step, or at an epoch if the pipeline holds what may have a state
            of its own; "step" or "epoch" says it.
        looked: raytf's own.

    Raises:
        ConfigError: an argument is wrong.
    """

    make_dataset: Callable
    _: KW_ONLY
    shards_itself: bool = False
    rows: bool = False
    steps_per_epoch: int | None = None
    uneven: str = "pad"
    class_weight: Mapping[int, float] | None = None
    resume: str = "auto"
    looked: Looked | None = field(default=None, repr=False)

    def __post_init__(self):
        if not callable(self.make_dataset):
            raise ConfigError(
                "raytf.TFData takes a function that makes the dataset on each worker, make_dataset(context)",
                f"a {type(self.make_dataset).__name__}",
                "Pass the function; what it returned stays in this process",
            )
        for name in ("shards_itself", "rows"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False", repr(getattr(self, name)), "Choose one")
        if self.steps_per_epoch is not None:
            validation.check_whole("steps_per_epoch", self.steps_per_epoch, 1)
        validation.check_word("uneven", self.uneven, UNEVEN)
        if self.class_weight is not None and not isinstance(self.class_weight, Mapping):
            received = repr(self.class_weight)
            raise ConfigError("class_weight must be a dict of classes to weights", received, "Pass {0: 1.0, ...}")
        validation.check_word("resume", self.resume, RESUMES)

    @property
    def name(self) -> str:
        """The function's, for sentences."""
        function = getattr(self.make_dataset, "func", self.make_dataset)  # of a `functools.partial`
        return getattr(function, "__name__", type(function).__name__)

    def first(self) -> TFData:
        """The same: it holds no rows, of which `StoredDataset.first` takes some."""
        return self

    here = first

    def order(self, batch_size: int, seed: int, goes_on: str) -> dict[str, Any]:
        """What says which rows a step has, as far as it is known before the workers start; see `Feed.order`. JSON."""
        return {"batch_size": batch_size, "seed": seed, "pipeline": self.name, "goes_on": goes_on}

    def check_pickles(self) -> None:
        """Raises ConfigError if the function cannot be sent to a worker."""
        try:
            cloudpickle.dumps(self.make_dataset)
        except Exception as error:
            raise ConfigError(
                "The function of a raytf.TFData must pickle, as it is sent to the workers",
                f"{self.name!r}: {error}",
                "Create what does not pickle (datasets, tensors, files, locks) inside the function",
            ) from error
