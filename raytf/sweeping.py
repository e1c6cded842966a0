"""Ray Tune over a trainer: trials run in lanes, groups of workers that stay warm between two trials.

A Tune trial is an actor without resources of its own in a placement group that holds its workers' (`lane.Lane`), so
that a trial gets all its workers or none. Tune hands such an actor, with its warm workers, to the next trial that asks
for the same resources; schedulers, search, retries and the state on disk are Tune's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import ray
from ray import tune
from ray.train._internal.storage import get_fs_and_path
from ray.tune.schedulers import HyperBandScheduler, PopulationBasedTraining
from ray.tune.utils import flatten_dict

from raytf import blocks, rates, reads, report, resources, space, storage, streams
from raytf.errors import ConfigError, ResourceError
from raytf.lane import LaneWorker
from raytf.processes import Processes, worker_environment
from raytf.sweep_table import Stopper, Table
from raytf.trainer import KerasTrainer, TensorflowTrainer
from raytf.trial import Plan, Trial
from raytf.worker import Task, train

_NEW_OUTPUT = "RAY_AIR_NEW_OUTPUT"
# What the trainer itself reads of a trial's config.
_OWN_KEYS = ("batch_size", "epochs", "num_workers")


def sweep(
    trainer,
    param_space: Mapping[str, Any] | None = None,
    *,
    num_samples: int = 1,
    metric: str = "loss",
    mode: str = "min",
    scheduler=None,
    search_alg=None,
    max_concurrent_trials: int | None = None,
    run_config=None,
    warm: bool = True,
    report_every_steps: int | None = None,
    scale_learning_rate: str | None = None,
    base_batch_size: int | None = None,
    warmup_steps: int = 0,
    resume: str | os.PathLike | None = None,
    progress: bool = True,
) -> tune.ResultGrid:
    """Runs a trainer with many configs, and compares them.

    Args:
        trainer: a `KerasTrainer` or a `TensorflowTrainer`; not fitted itself.
        param_space: keys of the trainer's config to values or search spaces of `ray.tune` (`tune.loguniform`,
            `tune.choice`, `tune.grid_search`, ...), and `num_workers`. A trial's values are laid over the config.
        num_samples: trials (for each point of a grid), at least 1; -1 goes on until something else ends the sweep.
        metric: of the reports, by Keras' name: "loss", "val_accuracy", ...
        mode: "min" or "max".
        scheduler: "fifo", "asha", "hyperband", "median", "pbt", or a scheduler of `ray.tune.schedulers`.
        search_alg: "random", "optuna", or a search algorithm of `ray.tune.search`.
        max_concurrent_trials: at most; None takes what the cluster holds.
        run_config: `ray.tune.RunConfig`; where it is None, the name, storage, failures and checkpoints of the
            trainer's.
        warm: keep workers between trials; False gives every trial processes of its own.
        report_every_steps: report every so many steps, too, not only at the ends of epochs; for a KerasTrainer. A
            scheduler's `training_iteration` then counts these reports.
        scale_learning_rate: "linear" or "sqrt": `learning_rate` is meant for `base_batch_size` and follows a trial's
            `batch_size`.
        base_batch_size: see there.
        warmup_steps: in which the learning rate rises from 0.
        resume: path of a sweep that was interrupted: trials that ended are kept, the others go on from their
            checkpoints. `trainer` must be the same, and `param_space` is not needed.
        progress: show a table of the trials in a terminal.

    Returns:
        A `ray.tune.ResultGrid`; `grid.get_best_result()` is a Result that `raytf.load_model` takes. Each result's
        metrics hold `per_replica_batch`, `steps_per_epoch` and `scaled_learning_rate`, too.

    Raises:
        ConfigError: an argument is wrong, nothing reads a key of the space, or no trial reports the metric.
        ResourceError: the cluster can never hold a trial.
    """
    _check(trainer, param_space, num_samples, mode, max_concurrent_trials, report_every_steps, resume)
    known = {"metric": metric, "mode": mode, "rule": scale_learning_rate, "base_batch_size": base_batch_size}
    known |= {"warmup_steps": warmup_steps, "report_every_steps": report_every_steps}
    if resume is not None:
        known = report.settings(resume)
    metric, mode = known["metric"], known["mode"]
    scaling = rates.Scaling(**{name: known[name] for name in ("rule", "base_batch_size", "warmup_steps")})
    given = dict(param_space or {})
    config = trainer.config if isinstance(trainer, KerasTrainer) else dict(trainer.train_loop_config or {})
    epochs = max((int(e) for e in space.values(given.get("epochs", config.get("epochs", 100)), "epochs")), default=1)
    _check_keys(trainer, given)
    chosen = space.scheduler(scheduler, given, epochs)
    if isinstance(chosen, HyperBandScheduler) and max_concurrent_trials is not None:
        raise ConfigError(
            "HyperBand waits for whole brackets of trials, which max_concurrent_trials would keep from starting",
            f"max_concurrent_trials={max_concurrent_trials}",
            "Leave the limit out: trials wait for the cluster's room anyhow",
        )
    searched = space.search(search_alg)
    if not ray.is_initialized():
        ray.init()
    largest, room = _check_room(trainer.scaling_config, given)
    lanes = min(room / largest, space.count(given, num_samples) or math.inf, max_concurrent_trials or math.inf)
    spares = largest * (int(lanes) if math.isfinite(lanes) else 1)
    processes = Processes(LaneWorker, trainer.scaling_config, trainer.run_config, spares)
    found: dict = {}
    try:
        plan, found = _plan(trainer, given, config, metric, scaling, known["report_every_steps"], processes)
        processes.settle()
        # Population Based Training may come back to a checkpoint that its trial has left behind
        keep = 4 if isinstance(chosen, PopulationBasedTraining) else 1
        settled = _run_config(run_config, trainer.run_config, keep)
        table = Table(metric, mode, space.count(given, num_samples), progress)
        trainable = type("Trial", (Trial,), {"default_resource_request": classmethod(lambda cls, c: plan.resources(c))})
        tuner = _tuner(
            tune.with_parameters(trainable, plan=plan),
            given,
            tune.TuneConfig(
                metric=metric,
                mode=mode,
                num_samples=num_samples,
                scheduler=chosen,
                search_alg=searched,
                # What the cluster holds limits them anyhow, as a trial waits for its placement group. A limit of Tune's
                # counts trials that are paused, too, and synchronous schedulers would wait for ever for the next one.
                max_concurrent_trials=max_concurrent_trials,
                reuse_actors=warm,
            ),
            _watched(settled, table),
            resume,
        )
        if resume is None:
            _remember(known, settled)
        with table, _quiet_tune():
            grid = tuner.fit()
        if table.fatal is not None:
            raise table.fatal
        table.conclude(grid)
        return grid
    finally:
        processes.cancel()
        streams.close(found)


@contextlib.contextmanager
def _quiet_tune():
    """Tune's newer output prints a page however quiet it is told to be; the older one says nothing."""
    before = os.environ.get(_NEW_OUTPUT)
    os.environ[_NEW_OUTPUT] = "0"
    try:
        yield
    finally:
        del os.environ[_NEW_OUTPUT]
        if before is not None:
            os.environ[_NEW_OUTPUT] = before


def _check(trainer, param_space, num_samples, mode, max_concurrent_trials, every, resume) -> None:
    if not isinstance(trainer, (KerasTrainer, TensorflowTrainer)):
        raise ConfigError(
            "A sweep runs a raytf.KerasTrainer or a raytf.TensorflowTrainer",
            f"an object of type {type(trainer).__name__}",
            "Pass the trainer itself, not its result",
        )
    if trainer.num_ps or getattr(trainer, "evaluator", False):
        raise ConfigError(
            "A sweep's trials train in step, and validate themselves",
            "strategy='parameter_server'" if trainer.num_ps else "evaluator=True",
            "Sweep without it",
        )
    if resume is None:
        space.check(param_space)
    elif "://" not in (path := report.located(resume)) and not os.path.exists(path):
        raise ConfigError("A sweep is resumed from a path that exists", repr(resume), "Check the path")
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or (num_samples < 1 and num_samples != -1):
        raise ConfigError("num_samples must be at least 1, or -1", repr(num_samples), "Choose how many trials to run")
    if mode not in ("min", "max"):
        raise ConfigError("mode must be min or max", repr(mode), "Say whether the metric is to be small or large")
    for name, value in (("max_concurrent_trials", max_concurrent_trials), ("report_every_steps", every)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, or None", value, "Raise it")
    if every is not None and isinstance(trainer, TensorflowTrainer):
        raise ConfigError(
            "report_every_steps is for a KerasTrainer", "a TensorflowTrainer", "Call ray.train.report in the train loop"
        )


def _check_room(scaling_config, given: Mapping[str, Any]) -> tuple[int, float]:
    """Workers of the largest trial, and how many workers the cluster holds.

    Raises:
        ResourceError: it can never hold one.
    """
    counts = space.values(given.get("num_workers", scaling_config.num_workers), "num_workers")
    if not all(isinstance(n, (int, np.integer)) and n >= 1 for n in counts):
        raise ConfigError(
            "num_workers of a trial must be an integer of at least 1", counts, "Put numbers of workers into the space"
        )
    holds = resources.room(scaling_config)
    if holds < max(counts):
        need = resources.shown(resources.per_worker(scaling_config))
        raise ResourceError(
            f"The cluster must be able to hold the largest trial ({max(counts)} worker(s), {need} each)",
            f"room for {holds} such worker(s)",
            "Use fewer workers, ask for less in resources_per_worker, or add nodes",
        )
    return int(max(counts)), holds


def _plan(trainer, given, config, metric, scaling, every: int | None, processes: Processes) -> tuple[Plan, dict]:
    """Reads the data and tries the model; (the plan, the data that was read)."""
    environment = worker_environment(trainer.run_config, trainer.scaling_config)
    common = {
        "scaling_config": trainer.scaling_config,
        "environment": environment,
        "metric": metric,
        "scaling": scaling,
        "spares": processes.there,
    }
    if isinstance(trainer, TensorflowTrainer):
        datasets = {name: d() if callable(d) else d for name, d in (trainer.datasets or {}).items()}
        datasets = {name: d.materialize() for name, d in datasets.items()}
        found = {name: blocks.read(d) for name, d in datasets.items()}
        plan = Plan(
            train=_UserLoop(trainer.train_loop_per_worker),
            config=config,
            tensorflow_config=dataclasses.replace(
                trainer.backend_config, feed=found, seed=trainer.backend_config.seed or 0
            ),
            datasets=datasets,
            rows=sum(found["train"].rows) if "train" in found else None,
            **common,
        )
        return plan, {}
    found = storage.read_all(trainer.datasets, trainer.storage, trainer.scaling_config)
    try:
        trainer.try_model(processes, found, config | space.sample(given))
    except BaseException:
        streams.close(found)
        raise
    steps = None if every is None else (every, metric)
    task = dataclasses.replace(trainer.task(found), warmup_steps=scaling.warmup_steps, report_steps=steps)
    plan = Plan(
        train=_KerasLoop(task),
        config=config,
        tensorflow_config=trainer.worker_config(),
        datasets={},
        rows=sum(found["train"].rows),
        **common,
    )
    return plan, found


def _check_keys(trainer, given) -> None:
    """Raises ConfigError if nothing reads a key of the space; the code of a train loop may hand its config anywhere."""
    if not isinstance(trainer, KerasTrainer):
        return
    functions = [f for f in (trainer.build_model, trainer.callbacks) if f is not None]
    unread = sorted(
        name for name in given if name not in _OWN_KEYS and not any(reads.may_read(f, name) for f in functions)
    )
    if unread:
        raise ConfigError(
            "Something must read every key of param_space",
            ", ".join(map(repr, unread)),
            f"Use config[{unread[0]!r}] in build_model or callbacks, or correct the key",
        )


@dataclasses.dataclass(frozen=True)
class _KerasLoop:
    """A KerasTrainer's training, with a trial's config."""

    task: Task

    def __call__(self, session, config) -> None:
        train(dataclasses.replace(self.task, config=config), session)

    def apart(self) -> _KerasLoop:
        """The same for a lane: streams of its own, as lanes do not stand at the same row."""
        datasets = {n: d.another() if isinstance(d, streams.Stream) else d for n, d in self.task.datasets.items()}
        return _KerasLoop(dataclasses.replace(self.task, datasets=datasets))


@dataclasses.dataclass(frozen=True)
class _UserLoop:
    """A TensorflowTrainer's train loop, with a trial's config."""

    function: Callable

    def __call__(self, session, config) -> None:
        import keras

        from raytf import strategy

        keras.utils.set_random_seed(strategy.config().seed)
        if inspect.signature(self.function).parameters:
            self.function(config)
        else:
            self.function()

    def apart(self) -> _UserLoop:
        return self


def _run_config(given, trainers, keep: int) -> tune.RunConfig:
    """Tune's RunConfig: the sweep's own, or what the trainer's says."""
    if given is None:
        failure = getattr(trainers, "failure_config", None)
        checkpoint = getattr(trainers, "checkpoint_config", None)
        given = tune.RunConfig(
            # Ray Train names every RunConfig that has no name
            name=_new_name() if _unnamed(trainers) else trainers.name,
            storage_path=trainers.storage_path,
            storage_filesystem=trainers.storage_filesystem,
            failure_config=tune.FailureConfig(max_failures=getattr(failure, "max_failures", 0)),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=getattr(checkpoint, "num_to_keep", None) or keep),
        )
    checkpoint = dataclasses.replace(given.checkpoint_config or tune.CheckpointConfig(num_to_keep=keep))
    if checkpoint.checkpoint_at_end is None:
        checkpoint.checkpoint_at_end = True
    return dataclasses.replace(given, name=given.name or _new_name(), checkpoint_config=checkpoint)


def _new_name() -> str:
    return f"sweep_{time.strftime('%Y-%m-%d_%H-%M-%S')}"


def _watched(run_config, table: Table) -> tune.RunConfig:
    callbacks = [*(run_config.callbacks or []), table]
    stop = Stopper(table, _users_stopper(run_config.stop))
    return dataclasses.replace(run_config, callbacks=callbacks, verbose=0, stop=stop)


def _remember(known: dict[str, Any], run_config) -> None:
    """Writes what a resumed sweep and a report need to know beside the trials."""
    filesystem, path = get_fs_and_path(run_config.storage_path, run_config.storage_filesystem)
    folder = f"{path}/{run_config.name}"
    filesystem.create_dir(folder)
    with filesystem.open_output_stream(f"{folder}/{report.SETTINGS}") as file:
        file.write(json.dumps(known).encode())


def _unnamed(run_config) -> bool:
    return run_config.name is None or run_config.name.startswith("ray_train_run-")


def _users_stopper(stop):
    """A stopper for each form that Ray's RunConfig takes."""
    from ray.tune.stopper import FunctionStopper

    if isinstance(stop, Mapping):
        limits = dict(stop)
        return FunctionStopper(
            lambda _, result: any(flatten_dict(result).get(k, -np.inf) >= v for k, v in limits.items())
        )
    if callable(stop) and not isinstance(stop, tune.Stopper):
        return FunctionStopper(stop)
    return stop


def _tuner(trainable, given, tune_config, run_config, resume) -> tune.Tuner:
    if resume is None:
        return tune.Tuner(trainable, param_space=given, tune_config=tune_config, run_config=run_config)
    tuner = tune.Tuner.restore(
        report.located(resume),
        trainable,
        param_space=given or None,
        resume_unfinished=True,
        restart_errored=False,
    )
    # Tune takes callbacks from the interrupted sweep; what is shown belongs to this process
    restored = tuner._local_tuner._run_config
    users = [c for c in restored.callbacks or [] if not isinstance(c, Table)]
    restored.callbacks, restored.stop, restored.verbose = [*users, *run_config.callbacks[-1:]], run_config.stop, 0
    return tuner
