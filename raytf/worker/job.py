"""What a KerasTrainer tells its workers. Needs no TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from raytf.console.progress import Board
from raytf.data.stored import StoredDataset


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainJob:
    """What a KerasTrainer tells its workers.

    Args:
        build_model, callbacks: the user's functions of the config.
        config: the user's config.
        features, labels, sample_weights: parsed columns.
        datasets: the `stored.StoredDataset` or `streamed.StreamedDataset` of "train" and, if there is one, of
            "validation".
        seed: of weights, shuffle and masks.
        shuffle, window: order of training rows.
        map: the user's function of a training batch, or None.
        steps_per_execution: "auto" or a number.
        board: the `progress.Board`, or None for no progress line.
        warmup_steps: in which the learning rate rises from 0.
        report_steps: (every how many steps, metric that a report needs) of reports within epochs, or None.
        variable_partitioner: see `remote_model.RemoteModel`.
        evaluator: checkpoints are evaluated beside the training, which does not validate.
        validate: something is to be called for each checkpoint: the evaluator, or a function of the user's.
        identity: what tells this run from another, by name; JSON values.
    """

    build_model: Callable
    callbacks: Callable | None
    config: dict[str, Any]
    features: Any
    labels: Any
    sample_weights: Any
    datasets: dict[str, StoredDataset]
    seed: int
    shuffle: str
    window: int
    map: Callable | None
    steps_per_execution: int | str
    board: Board | None
    warmup_steps: int = 0
    report_steps: tuple[int, str] | None = None
    variable_partitioner: Callable | None = None
    evaluator: bool = False
    validate: bool = False
    identity: dict[str, Any] = dataclasses.field(default_factory=dict)

    def used(self) -> list[str]:
        """The datasets of the training itself."""
        return [name for name in self.datasets if not (self.evaluator and name == "validation")]

    def feed(self, name: str) -> dict[str, Any]:
        """The arguments of a `feed.Feed` of a dataset, without those that say who reads."""
        return {
            "blocks": self.datasets[name],
            "features": self.features,
            "labels": self.labels,
            "sample_weights": self.sample_weights,
            "global_batch": self.config["batch_size"],
            "seed": self.seed,
            "shuffle": self.shuffle if name == "train" else "none",
            "window": self.window,
            "map": self.map if name == "train" else None,
        }


def ended(state, task: TrainJob) -> bool:
    """Whether a run that goes on from a `checkpoint.State` (None: from nothing) has nothing left to do."""
    return state is not None and (state.stopped or state.epoch >= task.config["epochs"])
