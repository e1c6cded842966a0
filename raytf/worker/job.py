"""What a KerasTrainer tells its workers. Needs no TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from raytf.console.progress import Board
from raytf.data.batch_spec import BatchSpec
from raytf.data.sampling import Sampling
from raytf.data.stored import StoredDataset
from raytf.data.tf_data import TFData
from raytf.worker.checkpoint_every import Every


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainJob:
    """What a KerasTrainer tells its workers.

    Args:
        build_model, callbacks: the user's functions of the config.
        config: the user's config.
        batch: what a batch consists of; its map is for training rows.
        datasets: the `stored.StoredDataset`, `streamed.StreamedDataset` or `TFData` of "train" and, if there is one, of
            "validation".
        sampling: how training steps take rows; its seed is that of weights and masks, too. The rows of a step are the
            config's, which a trial of a sweep may change.
        steps_per_execution: "auto" or a number.
        board: the `progress.Board`, or None for no progress line.
        warmup_steps: in which the learning rate rises from 0.
        report_steps: (every how many steps, metric that a report needs) of reports within epochs, or None.
        variable_partitioner: see `remote_model.RemoteModel`.
        evaluator: checkpoints are evaluated beside the training, which does not validate.
        validate: something is to be called for each checkpoint: the evaluator, or a function of the user's.
        identity: what tells this run from another, by name; JSON values.
        checkpoint_every: when checkpoints within epochs are kept.
        memory_every: after every so many steps one is held in memory, or None.
        heals: a worker that is lost is replaced in place, where that can be done.
        fewest: workers for which the config's batch_size and learning rate are, of an elastic run that scales them with
            its workers; or None.
        scale: by which they are scaled, see `of`.
        nan: what to do about a loss that is no number, see `epoch_checks.EpochChecks`.
    """

    build_model: Callable
    callbacks: Callable | None
    config: dict[str, Any]
    batch: BatchSpec
    datasets: dict[str, StoredDataset]
    sampling: Sampling
    steps_per_execution: int | str
    board: Board | None
    warmup_steps: int = 0
    report_steps: tuple[int, str] | None = None
    variable_partitioner: Callable | None = None
    evaluator: bool = False
    validate: bool = False
    identity: dict[str, Any] = dataclasses.field(default_factory=dict)
    checkpoint_every: Every = Every()  # noqa: RUF009 - it is frozen
    memory_every: int | None = None
    heals: bool = False
    fewest: int | None = None
    scale: float = 1.0
    nan: str = "warn"

    def of(self, workers: int) -> TrainJob:
        """The job as it is for so many workers: with the rows of their steps in the config."""
        if self.fewest is None:
            return self
        batch = self.config["batch_size"] * workers // self.fewest
        return dataclasses.replace(
            self, config={**self.config, "batch_size": batch}, scale=workers / self.fewest, fewest=None
        )

    def used(self) -> list[str]:
        """The datasets of the training itself."""
        return [name for name in self.datasets if not (self.evaluator and name == "validation")]

    def feed(self, name: str, drop_remainder: bool = False) -> dict[str, Any]:
        """The arguments of a `feed.Feed` of a dataset, without those that say who reads."""
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
        """`Feed.order` of the training rows, as far as it is known before the workers start."""
        if isinstance(self.datasets["train"], TFData):
            source, seed = self.datasets["train"], self.sampling.seed
            return source.order(self.config["batch_size"], seed, source.looked.goes_on)
        made = self.feed("train")
        return self.batch.order(made["sampling"].of(made["dataset"].rows))


def ended(state, task: TrainJob) -> bool:
    """Whether a run that goes on from a `checkpoint.CheckpointState` (None: from nothing) has nothing left to do."""
    return state is not None and (state.stopped or state.epoch >= task.config["epochs"])
