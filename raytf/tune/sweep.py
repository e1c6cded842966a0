"""Ray Tune over a trainer: trials run in warm worker groups, whose processes and TensorFlow outlive a trial.

A Tune trial is an actor without resources of its own. Its placement group holds those of its workers
(`worker_group.WorkerGroup`). So a trial gets all its workers or none. Tune reuses such an actor, with its warm workers,
for the next trial with the same resources. Schedulers, search, retries and the state on disk are Tune's.

Over 500 lines: a third of it documents the arguments of `sweep`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import inspect
import json
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import ray
import ray.train
from pyarrow.fs import FileSelector
from ray import tune
from ray.tune.result import AUTO_RESULT_KEYS, DONE
from ray.tune.schedulers import HyperBandScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search import SearchAlgorithm, Searcher
from ray.tune.utils import flatten_dict
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytf import logs, timeouts, validation
from raytf.compat import loggers, ray_tune
from raytf.compat.ray_tune import get_fs_and_path, restored_run_config
from raytf.console.lines import print_line
from raytf.console.phases import COMPARING, READING, TRYING, show_phases, starting_phase
from raytf.data import stored, streamed
from raytf.data.tf_data import TFData
from raytf.errors import ConfigError, ResourceError, StoppedError, TrainingError
from raytf.identity import canonical, config_keys, fingerprint, same_run
from raytf.logs import warn_user
from raytf.runtime import resources
from raytf.runtime.answers import NoAnswerError, in_completion_order
from raytf.runtime.processes import WarmPool, worker_environment
from raytf.storage import pickle_safety, run_folder, scratch
from raytf.storage.run_folder import RunFolder
from raytf.storage.run_lock import RunLock
from raytf.train import arguments, ray_config, run_list
from raytf.train.entry import import_raytf, train
from raytf.train.graceful_stop import GracefulStop
from raytf.train.keras_trainer import KerasTrainer
from raytf.train.prepare import Prepared, placed
from raytf.train.tensorflow_trainer import TensorflowTrainer
from raytf.train.worker_group import GroupWorker
from raytf.tune import report, schedulers, space, trial_steps
from raytf.tune.learning_rate import Scaling
from raytf.tune.options import SweepOptions
from raytf.tune.sweep_end import SweepEnd, SweepStop
from raytf.tune.table import Stopper, SweepTable
from raytf.tune.trial import SweepSpec, Trial, UnknownMetricError
from raytf.worker import model_source
from raytf.worker.job import TrainJob
from raytf.worker.stop import StoppedForRestartError

logger = logs.get_logger(__name__)

_NEW_OUTPUT = "RAY_AIR_NEW_OUTPUT"
_NO_SIGINT = "TUNE_DISABLE_SIGINT_HANDLER"
_TUNES_STATE = "experiment_state-"
_FREQUENT_SNAPSHOTS = "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S"
# Keys of a trial's config that the trainer itself reads.
_OWN_KEYS = ("batch_size", "epochs", "num_workers")


def sweep(
    trainer: KerasTrainer | TensorflowTrainer,
    param_space: Mapping[str, Any] | None = None,
    *,
    num_samples: int = 1,
    metric: str = "loss",
    mode: str = "min",
    scheduler: str | TrialScheduler | None = None,
    search_alg: str | Searcher | SearchAlgorithm | None = None,
    max_concurrent_trials: int | None = None,
    run_config: tune.RunConfig | None = None,
    warm: bool = True,
    report_every_steps: int | None = None,
    scale_learning_rate: str | None = None,
    base_batch_size: int | None = None,
    warmup_steps: int = 0,
    resume: str | os.PathLike | None = None,
    progress: bool = True,
) -> tune.ResultGrid:
    """Trains with many configs on workers that are kept between trials, and compares the results.

    Args:
        trainer: A `KerasTrainer` or a `TensorflowTrainer`. It is not fitted itself.
        param_space: Dict from keys of the trainer's config to values or search spaces of `ray.tune` (`tune.loguniform`,
            `tune.choice`, `tune.grid_search`, ...). "num_workers" can be one of them. A trial's values replace those of
            the trainer's config.
        num_samples: Number of trials, for each point of a grid; at least 1, which is the default. -1 runs until
            something else ends the sweep.
        metric: Name of the metric in the logs: "loss", the default, "val_accuracy", ...
        mode: "min", the default, or "max".
        scheduler: "fifo", "asha", "hyperband", "median", "pbt", or a scheduler of `ray.tune.schedulers`.
        search_alg: "random", "optuna", or a search algorithm of `ray.tune.search`.
        max_concurrent_trials: Largest number of trials at a time, at least 1. None fills the cluster.
        run_config: A `ray.tune.RunConfig`. None takes name, storage, failures and checkpoints of the trainer's.
        warm: Whether to keep the workers between trials; True by default. False starts new processes for each trial.
        report_every_steps: Number of steps between reports, in addition to those at the ends of epochs; for a
            `KerasTrainer`. A scheduler's `training_iteration` then counts these reports.
        scale_learning_rate: How `learning_rate`, which is meant for `base_batch_size`, follows a trial's `batch_size`.
            "linear" (Goyal et al., 2017, arXiv:1706.02677) or "sqrt" (Krizhevsky, 2014, arXiv:1404.5997). None leaves
            it as it is.
        base_batch_size: The batch size, in rows, that `learning_rate` is meant for; see `scale_learning_rate`.
        warmup_steps: Number of steps in which the learning rate rises from 0, at least 0, which is the default.
        resume: Path of a sweep that was interrupted. Trials that ended or failed are kept; others resume from their
            checkpoints. `trainer` must be the same, and `param_space` is not needed. Metric, scheduler, search, number
            of trials and `warm` are those of the interrupted sweep. A sweep also resumes if it is called again with the
            same name and arguments. Ray Tune stores sweeps as pickles, which run code when they are read. So folders
            that other users can write to are refused, and for URIs there is a warning.
        progress: Whether terminals show a table of the trials; True by default.

    Returns:
        A `ray.tune.ResultGrid`. Pass `grid.get_best_result()` to `raytf.load_model` for its model. The metrics of each
        result also contain `per_replica_batch`, `steps_per_epoch` and `scaled_learning_rate`.

    Raises:
        ConfigError: An argument is wrong, or no trial reports the metric.
        ResourceError: The cluster can never run a trial.
        StoppedError: SIGTERM or SIGINT came to the main thread. Its message has what resumes the sweep. It is a
            `SystemExit`.

    Example:
        >>> import keras, pandas, ray, raytf
        >>> from ray import tune
        >>> def build_model(config):
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     model.compile(keras.optimizers.SGD(config["learning_rate"]), "mse")
        ...     return model
        >>> rows = ray.data.from_pandas(pandas.DataFrame({"x": range(64), "y": range(64)}) / 64)
        >>> trainer = raytf.KerasTrainer(build_model, datasets={"train": rows}, features="x", labels="y")
        >>> space = {"learning_rate": tune.grid_search([0.01, 0.1]), "batch_size": 16}
        >>> grid = raytf.sweep(trainer, space, metric="loss", mode="min")
        >>> len(grid)
        2
    """
    _check(trainer, param_space, report_every_steps, resume)
    ray_config.check_run_config(run_config, tune.RunConfig, "ray.tune.RunConfig")
    for name, value in {"warm": warm, "progress": progress}.items():
        validation.check_flag(name, value)
    options = SweepOptions(
        num_samples=num_samples,
        metric=metric,
        mode=mode,
        max_concurrent_trials=max_concurrent_trials,
        report_every_steps=report_every_steps,
        scaling=Scaling(rule=scale_learning_rate, base_batch_size=base_batch_size, warmup_steps=warmup_steps),
    )
    score_warning = validation.score_warning(getattr(run_config, "checkpoint_config", None))
    for doubt in (validation.mode_warning(metric, mode), score_warning, space.list_warning(param_space or {})):
        if doubt is not None:
            warn_user(doubt)
    ray_config.check_sweep(trainer, param_space, run_config is not None)
    run_config = None if run_config is None else run_folder.with_absolute_path(run_config)
    named = None
    if resume is None:
        options = dataclasses.replace(options, space=space.describe_space(param_space))
        if (named := _existing(run_config or trainer.run_config)) is not None:
            options.check_same(report.read_settings(named), named)
            resume = named
    if resume is not None:
        options = options.resumed(report.read_settings(resume))
        pickle_safety.check_owner(report.absolute_folder(resume))
    else:
        options = dataclasses.replace(options, sample=space.sample_config(dict(param_space)))
    given = dict(param_space or {})
    config = trainer.config if isinstance(trainer, KerasTrainer) else dict(trainer.train_loop_config or {})
    bounded = space.numbers if isinstance(trainer, KerasTrainer) else space.key_bounds
    epochs = max((int(e) for e in bounded(given.get("epochs", config.get("epochs", 100)), "epochs")), default=1)
    if isinstance(trainer, KerasTrainer) and space.is_listed(given.get("batch_size")):
        space.numbers(given["batch_size"], "batch_size")
    chosen = space.make_scheduler(scheduler, given, epochs)
    if isinstance(chosen, HyperBandScheduler) and max_concurrent_trials is not None:
        raise ConfigError(
            "HyperBand waits for whole brackets of trials, which max_concurrent_trials would keep from starting",
            f"max_concurrent_trials={max_concurrent_trials}",
            "Leave the limit out: trials wait for the cluster's room anyhow",
        )
    searched = space.make_search(search_alg)
    trials = space.count_trials(given, num_samples)
    ended = None if resume is None else run_list.trials_ended(resume)
    finished = f"all {trials} trials have ended" if trials is not None and ended == trials else None
    bundles = [resources.resources_per_worker(trainer.scaling_config)] * _largest(trainer.scaling_config, given)
    trainer = copy.copy(trainer)
    with show_phases(progress, starting_phase(finished)):
        tensorflow = trainer.tensorflow_config if isinstance(trainer, KerasTrainer) else trainer.backend_config.config
        trainer.scaling_config = placed(trainer.scaling_config, bundles, tensorflow.network)
    largest, room = _check_room(trainer.scaling_config, given)
    groups = min(room / largest, trials or math.inf, max_concurrent_trials or math.inf)
    spares = largest * (int(groups) if math.isfinite(groups) else 1)
    # Population Based Training may return to an earlier checkpoint of its trial
    keep = 4 if isinstance(chosen, PopulationBasedTraining) else 1
    settled = _run_config(run_config, trainer.run_config, keep)
    with contextlib.ExitStack() as ends:
        ending = ends.enter_context(GracefulStop())
        ends.callback(scratch.remove_abandoned)
        location = _sweep_folder(settled, resume)
        lock = ends.enter_context(RunLock(*location))
        ending.record(*location)
        if progress:
            print_line(f"sweep   {resume or run_folder.folder_in_users_form(settled)}")
        shown = ends.enter_context(show_phases(progress, READING))
        processes = WarmPool(GroupWorker, trainer.scaling_config, trainer.run_config, spares, import_raytf)
        training = ends.enter_context(Prepared(processes))
        failures = (settled.failure_config or tune.FailureConfig()).max_failures
        failures, score = math.inf if failures == -1 else failures, settled.checkpoint_config
        plan, identity = _plan(trainer, config, options, training, failures, score, shown, finished is not None)
        processes.end_unused()
        shown.close()
        if isinstance(scheduler, str) and options.report_every_steps is not None and resume is None:
            chosen = space.make_scheduler(scheduler, given, epochs * _most_reports(plan, options, given))
        if named is not None:
            _check_same(options.identity, identity, named)
            resumes = "the sweep of this name resumes" if finished is None else f"{finished}: nothing is trained"
            logger.info(f"{named}: {resumes}")
        table = SweepTable(options.metric, options.mode, trials, progress)
        trainable = type("Trial", (Trial,), {"default_resource_request": classmethod(lambda cls, c: plan.resources(c))})
        tuner = _tuner(
            tune.with_parameters(trainable, plan=plan),
            given,
            tune.TuneConfig(
                metric=options.metric,
                mode=options.mode,
                num_samples=num_samples,
                scheduler=chosen,
                search_alg=searched,
                # The cluster's capacity limits them anyhow, as a trial waits for its placement group. A limit of Tune's
                # also counts paused trials, and synchronous schedulers would wait forever for the next one.
                max_concurrent_trials=max_concurrent_trials,
                reuse_actors=warm,
            ),
            _with_table(settled, table),
            resume,
        )
        lock.confirm()
        lock.on_lost = lambda: setattr(table, "fatal", TrainingError(None, lock.lost))
        if resume is None:
            _write_settings(dataclasses.replace(options, identity=identity), settled)
        if plan.end is not None:
            ends.callback(plan.end.clear)
        ranked = schedulers.nan_is_worst(options.metric, options.mode)
        rows = ray_tune.rows_of_resumed_trials(trial_steps.reported_rows)
        with table, ranked, rows, _quiet_tune(progress) as tunes:
            stop_request = (
                None if plan.end is None else SweepStop(plan.end, tunes.interrupt, ending.emit_stop_requested)
            )
            table.stop_request = stop_request
            with ending.calls(
                tunes.interrupt if stop_request is None else lambda: tunes.has_begun() and stop_request.request()
            ):
                grid = ray_tune.in_order_of_trials(tuner.fit())
        lock.check()
        if stop_request is not None and stop_request.lost:
            raise TrainingError(None, f"the sweep was requested to stop after a step: {'; '.join(stop_request.lost)}")
        if ending.number is not None:
            raise StoppedError(ending.number, _describe_progress(grid, plan.end is not None))
        if table.fatal is not None:
            raise table.fatal
        if plan.end is not None:
            trial_steps.remove_all_trials(grid.filesystem, grid.experiment_path)
        table.print_best(grid)
        if isinstance(trainer, KerasTrainer):
            model_source.remember_run(grid.experiment_path, trainer.build_model, trainer.config)
        _clean_hosts()
        return grid


def _clean_hosts() -> None:
    """Removes files that killed workers left on other hosts; the next worker of a late host removes its files."""
    own_node = ray.get_runtime_context().get_node_id()
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != own_node]
    strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    clean = ray.remote(scratch.remove_abandoned)
    refs = [clean.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote() for strategy in strategies]
    with contextlib.suppress(NoAnswerError):
        for _ in in_completion_order(refs, timeouts.get().cleanup, "the removal of temporary folders"):
            pass


def _existing(run_config) -> str | None:
    """Returns the started sweep of a RunConfig's name, in the form of `resume`; None if there is none."""
    if run_folder.is_unnamed(run_config) or run_config.storage_filesystem is not None:
        return None
    folder = RunFolder.from_config(run_config)
    files = folder.filesystem.get_file_info(FileSelector(folder.path, allow_not_found=True))
    names = [file.base_name for file in files]
    if report.SETTINGS not in names or not any(name.startswith(_TUNES_STATE) for name in names):
        return None
    return run_folder.folder_in_users_form(run_config)


def _check_same(was: Mapping[str, Any], now: Mapping[str, Any], name: str) -> None:
    """Raises ConfigError if a sweep's trainer `was` another one; unknown properties do not differ."""
    if differ := same_run.find_differences(was, now):
        raise ConfigError(
            "A sweep of a name that exists resumes as it was",
            f"{name!r} with {same_run.describe_differences(differ)}",
            f"Choose another name, or say resume={name!r}",
        )


def _describe_progress(grid, after_step: bool) -> str:
    """Describes the progress of a sweep that a signal ended, as a clause."""
    resume_point = "at their next steps" if after_step else "from their last checkpoints"
    done = sum(bool((result.metrics or {}).get(DONE)) or result.error is not None for result in grid)
    return (
        f"the sweep has ended with {done} of {len(grid)} begun trials complete; with the same name, or "
        f"resume={grid.experiment_path!r}, the others resume {resume_point}"
    )


@contextlib.contextmanager
def _quiet_tune(has_table: bool):
    """Silences Tune's output: its newer one prints a page at any verbosity, the older one prints nothing.

    A table has a line for each failed trial, so that Tune logs no traceback. Also disables its warning of frequent
    snapshots, which are normal with warm workers, unless the user set its threshold. Yields a `_TuneLoop`, which
    replaces Tune's own SIGINT handler.

    Args:
        has_table: Whether the sweep shows a table.
    """
    variables = {_NEW_OUTPUT: "0", _FREQUENT_SNAPSHOTS: os.environ.get(_FREQUENT_SNAPSHOTS, "0"), _NO_SIGINT: "1"}
    previous = {name: os.environ.get(name) for name in variables}
    tune_logger = logging.getLogger("ray.tune.tune")  # it logs where the results are, as raytf does
    level = tune_logger.level
    os.environ.update(variables)
    tune_logger.setLevel(max(level, logging.WARNING))
    controller = logging.getLogger(loggers.TUNE_CONTROLLER)
    is_logged = _is_no_failure if has_table else _is_no_unknown_metric
    controller.addFilter(is_logged)
    if has_table:
        tune_logger.addFilter(_is_no_failure)
    operations = logging.getLogger(loggers.TUNE_OPERATIONS)
    operations.addFilter(_is_no_advice)
    handler = signal.getsignal(signal.SIGUSR1)
    try:
        yield _TuneLoop(handler, tune_logger)
    finally:
        for added in (_is_unreported, _is_no_failure):
            tune_logger.removeFilter(added)
        controller.removeFilter(is_logged)
        operations.removeFilter(_is_no_advice)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, signal.SIG_DFL if handler is None else handler)
        tune_logger.setLevel(level)
        for name, value in previous.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


class _TuneLoop:
    """Tune's loop, which a handler of SIGUSR1 ends.

    Args:
        previous_handler: The previous handler.
        logger: Tune's logger, which is silenced at the end.
    """

    def __init__(self, previous_handler, logger: logging.Logger):
        self._previous_handler, self._logger = previous_handler, logger

    def has_begun(self) -> bool:
        return signal.getsignal(signal.SIGUSR1) is not self._previous_handler

    def interrupt(self) -> bool:
        """Ends the loop with its state saved; returns False before it has begun."""
        if not self.has_begun():
            return False
        self._logger.addFilter(_is_unreported)
        signal.getsignal(signal.SIGUSR1)(signal.SIGUSR1, None)
        return True


def _is_no_failure(record: logging.LogRecord) -> bool:
    """Returns whether a record is not about a failed trial."""
    return not record.getMessage().startswith(("Trial task failed", "Trials did not complete"))


def _is_no_unknown_metric(record: logging.LogRecord) -> bool:
    """Returns whether to log a trial's failure; a metric that no trial reports ends the sweep with its own message."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(getattr(error, "cause", error), UnknownMetricError)


def _is_no_advice(record: logging.LogRecord) -> bool:
    """Returns whether a record is not Tune's advice to report less often: a report is an epoch, or asked for."""
    return "may be a performance bottleneck" not in record.getMessage()


def _is_unreported(record: logging.LogRecord) -> bool:
    """Returns whether raytf does not itself log what Tune logs about an ended sweep."""
    return record.levelno >= logging.ERROR and not str(record.msg).startswith("Trials did not complete")


def _check(trainer, param_space, report_every_steps, resume) -> None:
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
            "Sweep with another strategy, and without an evaluator",
        )
    if isinstance(trainer, KerasTrainer) and trainer.memory_every is not None:
        raise ConfigError(
            "Trials hold no copies in memory, as a host has those of many",
            f"memory_every={trainer.memory_every!r}",
            "Leave memory_every out",
        )
    if isinstance(trainer, KerasTrainer) and trainer.tensorflow_config.shard_optimizer:
        raise ConfigError(
            "Tune has one worker of a trial save a checkpoint, and with shard_optimizer each worker has a part of it",
            "shard_optimizer=True",
            "Leave shard_optimizer out",
        )
    validation.check_path("resume", resume)
    if resume is None:
        space.check_space(param_space)
    elif "://" not in (path := report.absolute_folder(resume)) and not os.path.exists(path):
        raise ConfigError("A sweep is resumed from a path that exists", repr(resume), "Check the path")
    if report_every_steps is not None and isinstance(trainer, TensorflowTrainer):
        raise ConfigError(
            "report_every_steps is for a KerasTrainer", "a TensorflowTrainer", "Call ray.train.report in the train loop"
        )


def _check_room(scaling_config, given: Mapping[str, Any]) -> tuple[int, float]:
    """Returns the number of workers of the largest trial, and how many workers the cluster can hold.

    Raises:
        ResourceError: It can never hold that trial.
    """
    largest, holds = _largest(scaling_config, given), resources.capacity(scaling_config)
    if holds < largest:
        need = resources.format_resources(resources.resources_per_worker(scaling_config))
        raise ResourceError(
            f"The cluster must be able to hold the largest trial ({largest} worker(s), {need} each)",
            f"room for {holds} such worker(s)",
            resources.suggest_fix(resources.resources_per_worker(scaling_config), largest),
        )
    return largest, holds


def _largest(scaling_config, given: Mapping[str, Any]) -> int:
    """Returns the number of workers of the largest trial of a space."""
    return max(space.numbers(given.get("num_workers", scaling_config.num_workers), "num_workers"))


def _most_reports(plan: SweepSpec, options: SweepOptions, given: Mapping[str, Any]) -> int:
    """Returns the largest number of reports of an epoch, that of its end included; 1 if its steps are unknown."""
    rows, train = plan.rows, plan.train.task.datasets["train"]
    sample = (plan.config | options.sample)["batch_size"]
    if isinstance(train, TFData) and train.facts.steps is not None:
        rows = train.facts.steps * sample  # it was inspected with this batch
    if rows is None:
        return 1
    try:
        smallest = min(space.numbers(given.get("batch_size", plan.config["batch_size"]), "batch_size"))
    except ConfigError:  # a draw without known bounds
        smallest = sample
    return -(-rows // (smallest * options.report_every_steps))


def _plan(
    trainer,
    config: Mapping[str, Any],
    options: SweepOptions,
    training: Prepared,
    failures: float,
    score: tune.CheckpointConfig,
    shown,
    has_ended: bool,
):
    """Reads the data, and tries the model with one config of the space merged into the trainer's.

    Args:
        failures: Number of allowed failures, see `SweepSpec`.
        score: The CheckpointConfig of the sweep.
        shown: The `Phases` of the sweep.
        has_ended: Whether all trials have ended, and the model is tried to see that it is this sweep.

    Returns:
        (a `SweepSpec`, the identity of the trainer).
    """
    environment = worker_environment(trainer.run_config, trainer.scaling_config)
    processes = training.processes
    common = {
        "config": config,
        "scaling_config": trainer.scaling_config,
        "environment": environment,
        "metric": options.metric,
        "scaling": options.scaling,
        "spares": processes.members,
        "failures": failures,
        "score": None if score.checkpoint_score_attribute in (None, *AUTO_RESULT_KEYS) else score,
    }
    if isinstance(trainer, TensorflowTrainer):
        datasets = {name: d() if callable(d) else d for name, d in (trainer.datasets or {}).items()}
        datasets = {name: streamed.stored(name, d) for name, d in datasets.items()}
        contents = {name: stored.read(d) for name, d in datasets.items()}
        user = trainer.backend_config.config
        spec = SweepSpec(
            train=_UserLoop(trainer.train_loop_per_worker),
            setup=dataclasses.replace(
                trainer.backend_config,
                config=dataclasses.replace(user, seed=user.seed or 0),
                datasets={**contents, **trainer.pipelines},
                warned=processes.warned,
            ),
            datasets=datasets,
            dataset_config=trainer.data_config,
            rows=sum(contents["train"].rows) if "train" in contents else None,
            why_not_recovered="a TensorflowTrainer's steps are those of its loop",
            **common,
        )
        loop_parts = {"train_loop_per_worker": trainer.train_loop_per_worker, "train_loop_config": dict(config)}
        data = {name: fingerprint.dataset_fingerprint(d, sum(contents[name].rows)) for name, d in datasets.items()}
        data |= {name: fingerprint.pipeline_fingerprint(pipeline) for name, pipeline in trainer.pipelines.items()}
        return spec, {"version": same_run.VERSION, **canonical.describe(loop_parts), "data": data}
    contents, interval = training.read(trainer), options.report_every_steps
    shown.begin(COMPARING if has_ended else TRYING)
    sample = {**config, **options.sample}
    try:
        tried = trainer._try_model(processes, contents, sample, known_keys=_OWN_KEYS, compares=not has_ended)
    except ConfigError as error:
        values = ", ".join(f"{name}={value!r}" for name, value in options.sample.items()) or "the trainer's config"
        raise ConfigError(error.rule, f"{error.received}, tried with {values}", error.fix) from error
    if tried.logs is not None and not options.identity:  # a resumed sweep may have no trial left to run
        validates = "validation" in contents
        check_metric(options.metric, tried.logs, validates, trainer.callbacks)
        if score.checkpoint_score_attribute not in AUTO_RESULT_KEYS:
            arguments.check_score(score, tried.logs, validates, trainer.callbacks is not None)
        arguments.check_monitors(trainer.callbacks, tried.logs, validates)
    steps = None if interval is None else (interval, options.metric)
    by_epochs = isinstance(contents["train"], TFData) and contents["train"].facts.resume_unit == "epoch"
    recovers = trainer.tensorflow_config.heal and failures != 0 and not by_epochs
    identity = trainer._identity(contents, tried.identity)
    task = dataclasses.replace(
        trainer._task(contents),
        warmup_steps=options.scaling.warmup_steps,
        report_steps=steps,
        recovers=recovers,
        # what a trial's model needs of its data; its optimizer and its config are its own
        identity={name: identity[name] for name in ("columns", "map", "classes") if name in identity},
    )
    spec = SweepSpec(
        train=_KerasLoop(task),
        setup=dataclasses.replace(trainer._setup(), warned=processes.warned),
        datasets={},
        dataset_config=ray.train.DataConfig(),
        rows=None if isinstance(contents["train"], TFData) else sum(contents["train"].rows),
        end=SweepEnd(),
        why_not_recovered=None if trainer.tensorflow_config.heal else "TensorflowConfig(heal=False)",
        **common,
    )
    return spec, identity


def check_metric(metric: str, logs: Collection[str], validates: bool, callbacks: Callable | None) -> None:
    """Raises ConfigError if no trial can report a metric; warns if only a callback could add it.

    Args:
        metric: Metric that compares the trials.
        logs: Names that the model reports, see `dry_run.DryRunResult`.
        validates: Whether there are rows for validation.
        callbacks: Function of the trials' callbacks, which may add others, or None.
    """
    if (unknown := validation.unknown_metric(metric, logs, validates)) is None:
        return
    known, fix = unknown
    if callbacks is None or not _may_add(callbacks, metric, difflib.get_close_matches(metric, logs, 1)):
        raise ConfigError("metric must be one that the trials report", f"{metric!r} of {known}", fix)
    warn_user(f"The model reports no {metric!r}, so that a callback must add it to logs. {fix}")


def _may_add(callbacks: Callable, metric: str, close: list[str]) -> bool:
    """Returns whether callbacks may add a metric; a slip of the pen must be named by their code."""
    if isinstance(callbacks, arguments.Copies):
        users = callbacks({})
        if all(map(validation.adds_no_names, users)):
            return metric == "learning_rate"
        return not _is_slip(metric, close) or any(metric in config_keys.mentioned_keys(type(user)) for user in users)
    return not _is_slip(metric, close) or metric in config_keys.mentioned_keys(callbacks)


def _is_slip(metric: str, close: list[str]) -> bool:
    """Returns whether letters are missing, doubled or swapped in a name, or it is written in another way."""
    plain = lambda name: "".join(character for character in name.lower() if character.isalnum())
    for name in close:
        parts = difflib.SequenceMatcher(None, metric, name).get_opcodes()
        changed = [metric[a:b] + name[c:d] for kind, a, b, c, d in parts if kind != "equal"]
        inserted = all(kind in ("equal", "insert", "delete") for kind, *_ in parts)
        if inserted and len("".join(changed)) <= 2 and not any(c.isdigit() or c == "_" for c in "".join(changed)):
            return True
        if plain(metric) == plain(name):
            return True
    return False


@dataclasses.dataclass(frozen=True)
class _KerasLoop:
    """A KerasTrainer's training, with a trial's config."""

    task: TrainJob

    def __call__(self, session, config) -> int | None:
        """Trains. Returns the step after which the training ended on request; None if it is complete."""
        try:
            ended = train(dataclasses.replace(self.task, config=config), session)
        except StoppedForRestartError as moved:
            return moved.step
        return None if ended is None else ended["step"]

    def clone(self) -> _KerasLoop:
        """Returns a copy for one worker group with its own streams, as groups are at different rows."""
        datasets = {
            n: d.clone() if isinstance(d, streamed.StreamedDataset) else d for n, d in self.task.datasets.items()
        }
        return _KerasLoop(dataclasses.replace(self.task, datasets=datasets))

    def release_prefetch(self) -> None:
        for dataset in self.task.datasets.values():
            if isinstance(dataset, streamed.StreamedDataset):
                dataset.release_prefetch()


@dataclasses.dataclass(frozen=True)
class _UserLoop:
    """A TensorflowTrainer's train loop, with a trial's config."""

    function: Callable

    def __call__(self, session, config) -> None:
        import keras

        from raytf.worker import context

        keras.utils.set_random_seed(context.setup().config.seed)
        if inspect.signature(self.function).parameters:
            self.function(config)
        else:
            self.function()

    def clone(self) -> _UserLoop:
        return self

    def release_prefetch(self) -> None:
        pass


def _run_config(given, trainers, keep: int) -> tune.RunConfig:
    """Returns Tune's RunConfig: the sweep's own, or one derived from the trainer's."""
    if given is None:
        failure = getattr(trainers, "failure_config", None)
        checkpoint_config = trainers.checkpoint_config
        given = tune.RunConfig(
            name=None if run_folder.is_unnamed(trainers) else trainers.name,
            storage_path=trainers.storage_path,
            storage_filesystem=trainers.storage_filesystem,
            failure_config=tune.FailureConfig(max_failures=getattr(failure, "max_failures", 0)),
            checkpoint_config=tune.CheckpointConfig(
                num_to_keep=checkpoint_config.num_to_keep or keep,
                checkpoint_score_attribute=checkpoint_config.checkpoint_score_attribute,
                checkpoint_score_order=checkpoint_config.checkpoint_score_order,
            ),
        )
    checkpoint = dataclasses.replace(given.checkpoint_config or tune.CheckpointConfig(num_to_keep=keep))
    if checkpoint.checkpoint_at_end is None:
        checkpoint.checkpoint_at_end = True
    validation.check_run_name(given.name or None)
    return dataclasses.replace(given, name=given.name or run_folder.new_name("sweep"), checkpoint_config=checkpoint)


def _with_table(run_config, table: SweepTable) -> tune.RunConfig:
    callbacks = [*(run_config.callbacks or []), table]
    stop = Stopper(table, _users_stopper(run_config.stop))
    # in a notebook, Tune's own choice draws an empty page
    reporter = run_config.progress_reporter or tune.CLIReporter()
    return dataclasses.replace(run_config, callbacks=callbacks, verbose=0, stop=stop, progress_reporter=reporter)


def _sweep_folder(run_config, resume) -> tuple:
    """Returns (filesystem, path) of the sweep's folder, which may be a resumed one."""
    if resume is None:
        folder = RunFolder.from_config(run_config)
        return folder.filesystem, folder.path
    filesystem, path = get_fs_and_path(report.absolute_folder(resume), None)
    return filesystem, path.rstrip("/")


def _write_settings(options: SweepOptions, run_config) -> None:
    """Stores next to the trials what a resumed sweep and a report need."""
    folder = RunFolder.from_config(run_config)
    with folder.filesystem.open_output_stream(f"{folder.path}/{report.SETTINGS}") as file:
        file.write(json.dumps(options.content()).encode())


def _users_stopper(stop):
    """Returns a stopper for each form that Ray's RunConfig accepts."""
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
        report.absolute_folder(resume),
        trainable,
        param_space=given or None,
        resume_unfinished=True,
        restart_errored=False,
    )
    # Tune restores callbacks of the interrupted sweep; the display belongs to this process
    restored = restored_run_config(tuner)
    users = [c for c in restored.callbacks or [] if not isinstance(c, SweepTable)]
    restored.callbacks, restored.stop, restored.verbose = [*users, *run_config.callbacks[-1:]], run_config.stop, 0
    restored.progress_reporter = run_config.progress_reporter
    return tuner
