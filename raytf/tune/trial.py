"""One trial of a sweep, as Ray Tune runs it: an actor that leads a worker group. TensorFlow is not in its process."""

from __future__ import annotations

import dataclasses
import logging
import posixpath
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import ray
from pyarrow.fs import FileType
from ray import tune
from ray.tune.result import DONE, RESULT_DUPLICATE, SHOULD_CHECKPOINT
from ray.tune.utils import flatten_dict

from raytf.compat import loggers, ray_configs, ray_tune
from raytf.errors import ConfigError, RaytfError, first_line
from raytf.train.worker_group import TrialError, TrialRun, WorkerGroup, WorkerGroupLostError
from raytf.tune import learning_rate
from raytf.worker.session import read_files, write_files

# A trial that lasts is saved this often, so that one whose worker dies does not start anew.
_SAVE_SECONDS = 30.0
# In the errors of TensorFlow, of Python, and of Ray where its monitor ended a worker.
_NO_MEMORY = ("ResourceExhausted", "OutOfMemory", "MemoryError", "OUT_OF_MEMORY")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """What every trial of a sweep shares.

    Args:
        train: train(session, config), on a worker; train.apart() is the same for one group, and train.rest() lets go
            of what its datasets have read ahead.
        config: the trainer's, which a trial's values are laid over.
        scaling_config, setup: the trainer's.
        environment: runtime environment of the workers.
        datasets: `ray.data.Dataset` by name, for loops that ask for shards.
        dataset_config: how they are cut.
        rows: of the training data, where known.
        metric: that every report must hold.
        scaling: of the learning rate.
        spares: (node, `worker_group.GroupWorker`) of each process that started before the trials.
    """

    train: Callable
    config: dict[str, Any]
    scaling_config: Any
    setup: Any
    environment: dict
    datasets: dict[str, Any]
    dataset_config: Any
    rows: int | None
    metric: str
    scaling: learning_rate.Scaling
    spares: list[tuple[str, Any]]

    def workers(self, config: Mapping[str, Any]) -> int:
        """Number of workers of a trial."""
        return int(config.get("num_workers", self.scaling_config.num_workers))

    def resources(self, config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
        """Tune's request for a trial: nothing for its actor, a bundle for each worker."""
        each = ray_configs.resources_per_worker(self.scaling_config)
        count = self.workers(config)
        bundles = [{}, *[dict(each) for _ in range(count)]]
        selectors = ray_configs.label_selectors(self.scaling_config, count)
        # Tune leaves the empty bundle of the trial's actor out, and so do the selectors
        more = {} if selectors is None else {"bundle_label_selector": selectors}
        return tune.PlacementGroupFactory(bundles, strategy=self.scaling_config.placement_strategy, **more)


class Trial(tune.Trainable):
    """One trial, and the next ones in the same worker group."""

    def setup(self, config, plan: SweepSpec):
        logging.getLogger(loggers.TUNE_STORAGE).setLevel(logging.WARNING)  # it tells of each checkpoint
        self._plan, self._worker_group = plan, None
        self._take(config)

    def _take(self, config) -> None:
        self._config = self._plan.config | {k: v.item() if isinstance(v, np.generic) else v for k, v in config.items()}
        self._files: dict[str, bytes] | None = None
        self._running = self._reported = False
        self._saved = 0.0

    def reset_config(self, new_config) -> bool:
        if self._running:
            try:
                self._worker_group.stop()
            except WorkerGroupLostError:  # a worker died after its trial had ended: this one gets others
                self._close(well=False)
            self._train.rest()  # what streams have read for the next steps of a trial that was stopped
        self._take(new_config)
        return True

    def step(self) -> dict[str, Any]:
        try:
            metrics = self._next()
        except WorkerGroupLostError as error:
            self._close(well=False)
            raise _explained(error, self._config) from None
        except TrialError as error:
            self._close()  # Tune ends the actor of a trial that failed
            raise _explained(error, self._config) from None
        if metrics is None:
            # one that goes on from the end of another's training has nothing left to do
            if not self._reported and self._files is None:
                raise TrialError("The train loop ended without a report: call ray.train.report(metrics) in it")
            return {DONE: True, RESULT_DUPLICATE: True}
        if not self._reported and self._plan.metric not in flatten_dict(metrics):
            raise UnknownMetricError(
                "metric must be one that the trials report", repr(self._plan.metric), f"Choose one of {sorted(metrics)}"
            )
        self._reported = True
        return {**metrics, **self._derived, **self._maybe_save()}

    def _next(self) -> dict[str, Any] | None:
        plan = self._plan
        if not self._running:
            workers = plan.workers(self._config)
            self._derived = learning_rate.derived(self._config, plan.scaling, workers, plan.rows)
            config = dict(self._config)
            if "scaled_learning_rate" in self._derived:
                config["learning_rate"] = self._derived["scaled_learning_rate"]
            if self._worker_group is None:
                each = ray_configs.resources_per_worker(plan.scaling_config)
                self._train = plan.train.apart()
                places = {"first_bundle": _first_bundle(), "spares": plan.spares}
                self._worker_group = WorkerGroup(plan.setup, each, workers, plan.environment, **places)
            around = {"datasets": plan.datasets, "dataset_config": plan.dataset_config}
            around |= {
                "filesystem": ray_tune.storage_of(self).storage_filesystem,
                "folder": ray_tune.storage_of(self).trial_fs_path,
            }
            self._worker_group.begin(
                TrialRun(train=self._train, config=config, name=self.trial_name, files=self._files, around=around)
            )
            self._running = True
        return self._worker_group.go_on()

    def _maybe_save(self) -> dict[str, Any]:
        due = ray_tune.seconds_of(self) - self._saved >= _SAVE_SECONDS
        if due:
            self._saved = ray_tune.seconds_of(self)
        return {SHOULD_CHECKPOINT: True} if due else {}

    def restore(self, checkpoint_path) -> None:
        saved = getattr(checkpoint_path, "checkpoint", checkpoint_path)
        path = posixpath.join(saved.path, ray_tune.DICT_CHECKPOINT)
        if saved.filesystem.get_file_info(path).type != FileType.NotFound:
            raise ConfigError(
                "A trial's checkpoint holds no pickle, which Tune would read and run", path, "Find out who put it there"
            )
        super().restore(checkpoint_path)

    def save_checkpoint(self, folder: str) -> None:
        files = (self._worker_group.save() if self._running else None) or self._files
        # Tune takes no empty folder
        write_files(files or {"nothing": b""}, folder)

    def load_checkpoint(self, folder: str) -> None:
        files = read_files(folder)
        self._files = None if "nothing" in files else files

    def cleanup(self) -> None:
        self._close()

    def _close(self, well: bool = True) -> None:
        if self._worker_group is not None:
            self._worker_group.close(well)
        self._worker_group, self._running = None, False


class UnknownMetricError(ConfigError):
    """The metric that a sweep compares is not in the reports."""


def _first_bundle() -> int:
    """The index of the first worker's bundle: Tune leaves the empty one of the trial's actor out."""
    group = ray.util.get_current_placement_group()
    return 0 if all(group.bundle_specs) else 1


def _explained(error: TrialError | WorkerGroupLostError, config: Mapping[str, Any]) -> RaytfError:
    """The error, with what a lack of memory means; a worker that the kernel or Ray ended for it is a lost group."""
    cause, details = (error.cause, error.details) if isinstance(error, TrialError) else (str(error), "")
    if not any(sign in cause for sign in _NO_MEMORY):
        return error
    text = f"config['batch_size']={config.get('batch_size')} does not fit into a worker's memory ({first_line(cause)})"
    return TrialError(text, details) if isinstance(error, TrialError) else WorkerGroupLostError(f"{text}\n{cause}")
