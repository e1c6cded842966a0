"""The task that a KerasTrainer sends to its workers. Needs no TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from raytf.console.progress import Board
from raytf.data.batch_spec import BatchSpec
from raytf.data.sampling import Sampling
from raytf.data.stored import StoredDataset
from raytf.data.tf_data import TFData
from raytf.worker.checkpoint_every import CheckpointInterval


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of a training that its parts read, see `part.TrainingPart`.

    Args:
        steps_per_execution: "auto", or a number of steps, at least 1.
        board: `progress.Board`, or None for no progress line.
        warmup_steps: Number of steps in which the learning rate rises from 0.
        report_steps: Tuple (interval in steps, metric that a report needs) for reports within epochs, or None.
        identity: JSON values by name that identify the run.
        checkpoint_every: When to save checkpoints within epochs.
        memory_every: Interval in steps of checkpoints in memory, or None.
        recovers: Whether to replace a lost worker in place, if that is possible.
        scale: Factor of batch_size and learning rate, see `TrainJob.for_workers`.
        nan: Reaction to a loss that is NaN or infinite, see `epoch_checks.EpochChecks`.
    """

    steps_per_execution: int | str = "auto"
    board: Board | None = None
    warmup_steps: int = 0
    report_steps: tuple[int, str] | None = None
    identity: dict[str, Any] = dataclasses.field(default_factory=dict)
    checkpoint_every: CheckpointInterval = CheckpointInterval()  # noqa: RUF009 - it is frozen
    memory_every: int | None = None
    recovers: bool = False
    scale: float = 1.0
    nan: str = "warn"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainJob(TrainingOptions):
    """Arguments of a training, which a KerasTrainer sends to its workers.

    Args:
        build_model: The user's function of the config that returns a compiled model.
        callbacks: The user's function of the config that returns callbacks, or None.
        config: The user's config, a dict.
        batch: Columns of a batch; its map is for training rows.
        datasets: `stored.StoredDataset`, `streamed.StreamedDataset` or `TFData` by name: "train", and maybe
            "validation".
        sampling: Order of the training rows; weights and masks use its seed, too. The rows of a step come from
            the config, which a trial of a sweep may change.
        variable_partitioner: See `remote_model.RemoteModel`.
        evaluator: Whether an evaluator evaluates checkpoints, in parallel to a training without validation.
        validate: Whether each checkpoint calls the evaluator, or a function of the user's.
        fewest: Number of workers that the config's batch_size and learning rate are for. None unless an elastic run
            scales them.
    """

    build_model: Callable
    callbacks: Callable | None
    config: dict[str, Any]
    batch: BatchSpec
    datasets: dict[str, StoredDataset]
    sampling: Sampling
    variable_partitioner: Callable | None = None
    evaluator: bool = False
    validate: bool = False
    fewest: int | None = None

    def for_workers(self, workers: int) -> TrainJob:
        """Returns the job for a number of workers, with the scaled batch_size in the config."""
        if self.fewest is None:
            return self
        batch = self.config["batch_size"] * workers // self.fewest
        return dataclasses.replace(
            self, config={**self.config, "batch_size": batch}, scale=workers / self.fewest, fewest=None
        )

    def used(self) -> list[str]:
        """Returns the names of the datasets that the training itself uses."""
        return [name for name in self.datasets if not (self.evaluator and name == "validation")]

    def feed(self, name: str, drop_remainder: bool = False) -> dict[str, Any]:
        """Returns the arguments of a `feed.Feed` of a dataset, except for the reader's shard."""
        batch, training = self.batch, name == "train"
        return {
            "dataset": self.datasets[name],
            "batch": batch if training else dataclasses.replace(batch, map=None),
            "sampling": dataclasses.replace(
                self.sampling,
                global_batch=self.config["batch_size"],
                shuffle=self.sampling.shuffle if training else "none",
                drop_remainder=drop_remainder,
            ),
        }

    @property
    def order(self) -> dict[str, int | str | bool]:
        """Returns `Feed.order` of the training rows, as far as it is known before the workers start."""
        if isinstance(self.datasets["train"], TFData):
            source, seed = self.datasets["train"], self.sampling.seed
            return source.order(self.config["batch_size"], seed, source.facts.resume_unit)
        arguments = self.feed("train")
        return self.batch.order(arguments["sampling"].sampler(arguments["dataset"].rows))


def is_complete(state, task: TrainJob) -> bool:
    """Returns whether a run that resumes from a `checkpoint.CheckpointState` (None: from scratch) is complete."""
    return state is not None and (state.stopped or state.epoch >= task.config["epochs"])
