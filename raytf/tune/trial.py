"""One trial of a sweep, as Ray Tune runs it: an actor that leads a worker group. Its process has no TensorFlow."""

from __future__ import annotations

import dataclasses
import json
import logging
import posixpath
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import ray
from pyarrow.fs import FileType
from ray import tune
from ray.tune.result import DONE, RESULT_DUPLICATE, SHOULD_CHECKPOINT, TRAINING_ITERATION
from ray.tune.utils import flatten_dict

from raytf import events, timeouts
from raytf.compat import loggers, ray_configs, ray_core, ray_tune
from raytf.console import output
from raytf.errors import ConfigError, RaytfError, first_line
from raytf.events import Kind, RunEvent
from raytf.storage import checkpoint_files, run_folder
from raytf.storage.folder_contents import read_files, write_files
from raytf.train import arguments
from raytf.train.worker_group import TrialError, TrialRun, WorkerGroup, WorkerGroupLostError
from raytf.tune import learning_rate, trial_steps
from raytf.tune.sweep_end import SweepEnd
from raytf.worker.session import TRIAL
from raytf.worker.stop import DRAIN, STOP, StoppedForRestartError
from raytf.worker.trial_session import TrialCheckpointDir

# Seconds between saves of a long trial, so that one whose worker dies does not start from scratch.
_SAVE_INTERVAL = 30.0
# Signs in errors of TensorFlow, of Python, and of Ray when its monitor ended a worker.
_NO_MEMORY = ("ResourceExhausted", "OutOfMemory", "MemoryError", "OUT_OF_MEMORY")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """Settings that all trials of a sweep share.

    Args:
        train: Function train(session, config) for a worker. train.clone() returns a copy for one group.
            train.release_prefetch() releases what its datasets have prefetched.
        config: The trainer's config, which a trial's values override.
        scaling_config, setup: The trainer's.
        environment: Runtime environment of the workers.
        datasets: `ray.data.Dataset` by name, for loops that request shards.
        dataset_config: Config of their shards.
        rows: Number of training rows, or None if unknown.
        metric: Metric that every report must contain.
        scaling: Scaling of the learning rate.
        spares: (node, `worker_group.GroupWorker`) of each process that started before the trials.
        end: Ends the trials after a step, and enables their mid-epoch checkpoints; None for user loops, whose steps are
            unknown.
        failures: Number of failures of a trial that Tune allows.
        why_not_recovered: Why lost workers are never replaced in place, as a clause; None if they may be. Each start
            of a trial may replace as many workers as Tune allows failures.
        score: CheckpointConfig with the metric by which the best checkpoints of a trial are kept. None if they are not
            compared.
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
    end: SweepEnd | None = None
    failures: float = 0
    why_not_recovered: str | None = None
    score: tune.CheckpointConfig | None = None

    def workers(self, config: Mapping[str, Any]) -> int:
        """Returns the number of workers of a trial."""
        return int(config.get("num_workers", self.scaling_config.num_workers))

    def replicas(self, config: Mapping[str, Any]) -> int:
        """Returns the number of replicas of a trial: one for each device of its workers."""
        return self.workers(config) * arguments.devices(self.scaling_config)

    def resources(self, config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
        """Returns Tune's request for a trial: nothing for its actor, a bundle for each worker."""
        per_worker = ray_configs.resources_per_worker(self.scaling_config)
        count = self.workers(config)
        bundles = [{}, *[dict(per_worker) for _ in range(count)]]
        selectors = ray_configs.label_selectors(self.scaling_config, count)
        # Tune omits the empty bundle of the trial's actor, and so do the selectors
        more = {} if selectors is None else {"bundle_label_selector": selectors}
        return tune.PlacementGroupFactory(bundles, strategy=self.scaling_config.placement_strategy, **more)


class Trial(tune.Trainable):
    """One trial, and the next ones in the same worker group."""

    def setup(self, config, plan: SweepSpec):
        logging.getLogger(loggers.TUNE_STORAGE).setLevel(logging.WARNING)  # it logs each checkpoint
        timeouts.set_current(plan.setup.timeouts)
        self._plan, self._worker_group = plan, None
        output.set_output_name(self.trial_name)
        self._record()
        self._take_config(config)

    def _record(self) -> None:
        storage = ray_tune.storage_of(self)
        record = events.Recorder(storage.storage_filesystem, storage.trial_fs_path)
        events.record(record, logged_elsewhere=events.TRAINING_KINDS)  # by the sweep's table

    def _take_config(self, config) -> None:
        self._config = self._plan.config | {k: v.item() if isinstance(v, np.generic) else v for k, v in config.items()}
        self._files: dict[str, bytes] | None = None
        self._start: dict[str, bytes] | None = None  # the files its workers resume from: these, or a later checkpoint
        self._initial_checkpoint = ""  # see `trial_steps`
        self._step_folder: TrialCheckpointDir | None = None
        self._pending = 0  # reports after Tune's checkpoint
        self._saved_step = 0
        self._running = self._reported = False
        self._saved = 0.0
        self._scores: list[float] = []  # those of the best checkpoints, worst first

    def reset_config(self, new_config) -> bool:
        if self._running:
            try:
                self._worker_group.stop()
                if (outgrown := self._worker_group.outgrown()) is not None:
                    events.emit(RunEvent(kind=Kind.WORKERS_RENEWED, why=outgrown, more="run the next trial"))
                    self._close()
            except WorkerGroupLostError:  # a worker died after its trial had ended: this one gets others
                self._close(well=False)
            self._train.release_prefetch()  # what streams have prefetched for a stopped trial
        self._record()
        self._take_config(new_config)
        return True

    def step(self) -> dict[str, Any]:
        end = self._plan.end
        if end is not None and not self._running and end.is_requested():
            end.ended(self.trial_id, None, is_saved=True)
            return {}  # Tune has ended
        try:
            metrics = self._next()
        except WorkerGroupLostError as error:
            self._close(well=False)
            self._emit_restart(error)
            raise _explained(error, self._config) from None
        except TrialError as error:
            self._close()  # Tune ends the actor of a trial that failed
            raise _explained(error, self._config) from None
        if metrics is None and self._worker_group.ended is not None:
            return self._ended(self._worker_group.ended, self._worker_group.stop_reason)
        if metrics is None:
            # one that resumes from the end of a training, its own or another's, has nothing left to do
            if not self._reported and self._start is None:
                raise TrialError("The train loop ended without a report: call ray.train.report(metrics) in it")
            return {DONE: True, RESULT_DUPLICATE: True}
        if not self._reported and self._plan.metric not in flatten_dict(metrics):
            raise UnknownMetricError(
                "metric must be one that the trials report", repr(self._plan.metric), f"Choose one of {sorted(metrics)}"
            )
        self._reported = True
        # Tune counts from its own checkpoint, and later reports are not repeated. Both keys stay in Tune's positions,
        # as it appends to a CSV file without a check of its header
        placeholder_result = (
            {DONE: False, TRAINING_ITERATION: self.iteration + 1 + self._pending} if self._pending else {}
        )
        return {**metrics, **self._derived, **self._maybe_save(metrics), **placeholder_result}

    def _emit_restart(self, error: WorkerGroupLostError) -> None:
        """Emits the restart of a trial that has lost a worker for good."""
        if not self._plan.failures:
            return
        why = error.why_not_recovered or self._plan.why_not_recovered
        why = "" if why is None else f" It could not be replaced in place: {why}."
        lost = first_line(error).rstrip(".")
        events.emit(RunEvent(kind=Kind.TRIAL_RESTARTED, why=lost, more=why))

    def _ended(self, step: int, why: str | None) -> dict[str, Any]:
        """Handles workers that ended after a step on request."""
        is_saved = self._saved_step >= step or trial_steps.is_finished(
            self._step_folder.filesystem, self._step_folder.folder, step
        )
        if why == DRAIN:
            self._close()
            moved = StoppedForRestartError(step)
            events.emit(RunEvent(kind=Kind.ENDED_AFTER_STEP, step=step, why=str(moved)))
            raise moved  # Tune does not count it as a failure, and starts the trial elsewhere
        self._plan.end.ended(self.trial_id, step, is_saved)
        return {}  # Tune has ended

    def _why_end(self) -> str | None:
        """Returns why the trial must end after a step, or None."""
        if self._plan.end.is_requested():
            return STOP
        nodes = {*self._worker_group.nodes, ray.get_runtime_context().get_node_id()}
        return None if nodes.isdisjoint(ray_core.draining()) else DRAIN

    def _next(self) -> dict[str, Any] | None:
        plan = self._plan
        if not self._running:
            workers, replicas = plan.workers(self._config), plan.replicas(self._config)
            self._derived = learning_rate.derived_config(self._config, plan.scaling, replicas, plan.rows)
            config = dict(self._config)
            if "scaled_learning_rate" in self._derived:
                config["learning_rate"] = self._derived["scaled_learning_rate"]
            if self._worker_group is None:
                per_worker = ray_configs.resources_per_worker(plan.scaling_config)
                self._train = plan.train.clone()
                placement = {"first_bundle": _first_bundle(), "spares": plan.spares}
                self._worker_group = WorkerGroup(plan.setup, per_worker, workers, plan.environment, **placement)
            storage = ray_tune.storage_of(self)
            context = {"datasets": plan.datasets, "dataset_config": plan.dataset_config}
            context |= {"filesystem": storage.storage_filesystem, "folder": storage.trial_fs_path}
            self._start = self._files if plan.end is None else self._newest(storage)
            run = TrialRun(
                train=self._train,
                config=config,
                name=self.trial_name,
                files=self._start,
                trial_setup=context,
                step_checkpoints=self._step_folder,
                max_recoveries=plan.failures if plan.why_not_recovered is None else 0,
            )
            self._worker_group.begin(run)
            events.emit(RunEvent(kind=Kind.WORKERS_STARTED, workers=workers))
            self._running = True
            if plan.end is not None:
                plan.end.record_begun(self.trial_id)
        reports = self._worker_group.continue_trial(None if plan.end is None else self._why_end)
        return None if reports is None else reports[0]

    def _newest(self, storage) -> dict[str, bytes] | None:
        """Returns the files of the checkpoint to resume from: Tune's, or a later mid-epoch one."""
        name = trial_steps.trial_folder(self._config, self._initial_checkpoint)
        folder = posixpath.join(storage.trial_fs_path, name)
        newest = trial_steps.newest_checkpoint(storage.storage_filesystem, folder, _step_of(self._files))
        files, reports = newest or (self._files, self.iteration)
        self._pending = reports - self.iteration
        self._step_folder = TrialCheckpointDir(storage.storage_filesystem, folder, reports)
        return files

    def _maybe_save(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        is_best = self._is_among_best(metrics)
        if due := is_best or ray_tune.seconds_of(self) - self._saved >= _SAVE_INTERVAL:
            self._saved = ray_tune.seconds_of(self)
        return {SHOULD_CHECKPOINT: True} if due else {}

    def _is_among_best(self, metrics: Mapping[str, Any]) -> bool:
        """Returns whether a checkpoint of this report would be one of the best, which the sweep keeps."""
        if self._plan.score is None:
            return False
        has_score, score = run_folder.score_key(flatten_dict(dict(metrics)), self._plan.score)
        count = self._plan.score.num_to_keep
        if not has_score or (count is not None and len(self._scores) >= count and score <= self._scores[0]):
            return False
        self._scores = sorted([*self._scores, score])[-count if count else 0 :]
        return True

    def restore(self, checkpoint_path) -> None:
        saved = getattr(checkpoint_path, "checkpoint", checkpoint_path)
        path = posixpath.join(saved.path, ray_tune.DICT_CHECKPOINT)
        self._restored_path = saved.path
        if saved.filesystem.get_file_info(path).type != FileType.NotFound:
            raise ConfigError(
                "A trial's checkpoint holds no pickle, which Tune would read and run", path, "Find out who put it there"
            )
        super().restore(checkpoint_path)
        self._saved = ray_tune.seconds_of(self)

    def save(self, checkpoint_dir=None):
        """Saves like `Trainable.save`; removes the trial's earlier mid-epoch checkpoints, which are now needless."""
        saved = super().save(checkpoint_dir)
        if self._step_folder is not None:
            trial_steps.remove_until(self._step_folder.filesystem, self._step_folder.folder, self._saved_step)
        return saved

    def save_checkpoint(self, folder: str) -> None:
        files = (self._worker_group.save() if self._running else None) or self._start or self._files
        self._saved_step = _step_of(files) if self._plan.end is not None else 0
        # Tune accepts no empty folder
        write_files(files or {"nothing": b""}, folder)
        if self._plan.end is not None:
            write_files({TRIAL: json.dumps({"begun_with": self._initial_checkpoint}).encode()}, folder)

    def load_checkpoint(self, folder: str) -> None:
        files = read_files(folder)
        self._files = None if "nothing" in files else files
        if self._plan.end is not None:
            self._initial_checkpoint = trial_steps.initial_checkpoint(
                self._restored_path, ray_tune.storage_of(self).trial_fs_path, files
            )

    def cleanup(self) -> None:
        self._close()

    def _close(self, well: bool = True) -> None:
        if self._worker_group is not None:
            self._worker_group.close(well)
        self._worker_group, self._running = None, False


def _step_of(files: Mapping[str, bytes] | None) -> int:
    """Returns the total steps of a checkpoint from its files; 0 without files."""
    if files is None or checkpoint_files.STATE not in files:
        return 0
    return checkpoint_files.parse_state(files[checkpoint_files.STATE], "Tune's checkpoint").step


class UnknownMetricError(ConfigError):
    """No report contains the metric that a sweep compares."""


def _first_bundle() -> int:
    """Returns the index of the first worker's bundle: Tune omits the empty one of the trial's actor."""
    group = ray.util.get_current_placement_group()
    return 0 if all(group.bundle_specs) else 1


def _explained(error: TrialError | WorkerGroupLostError, config: Mapping[str, Any]) -> RaytfError:
    """Returns the error, explained if memory ran out; a worker killed by the kernel or Ray is a lost group."""
    cause, details = (error.cause, error.details) if isinstance(error, TrialError) else (str(error), "")
    if not any(sign in cause for sign in _NO_MEMORY):
        return error
    text = f"config['batch_size']={config.get('batch_size')} does not fit into a worker's memory ({first_line(cause)})"
    return TrialError(text, details) if isinstance(error, TrialError) else WorkerGroupLostError(f"{text}\n{cause}")
