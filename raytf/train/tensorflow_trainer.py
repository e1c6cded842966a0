"""TensorflowTrainer: runs a user's train loop on several workers. Driver side."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
import time
from collections.abc import Callable
from typing import Any

import ray
import ray.train
from ray.train import Checkpoint, DataConfig, RunConfig, ScalingConfig, UserCallback, ValidationConfig

from raytf import validation
from raytf.compat import legacy_keras
from raytf.console import phases as phases_module
from raytf.console import progress
from raytf.console.lines import print_line
from raytf.data.tf_data import TFData
from raytf.errors import ConfigError
from raytf.runtime import resources
from raytf.runtime.connection import connect
from raytf.runtime.processes import with_variables, worker_environment
from raytf.runtime.settings import TensorflowConfig
from raytf.storage import run_folder
from raytf.storage.run_folder import RunFolder
from raytf.storage.run_lock import RunLock
from raytf.train import arguments, graceful_stop, ray_config, results, run_list
from raytf.train.backend import TensorflowBackendConfig
from raytf.train.engine_trainer import EngineTrainer


class TensorflowTrainer(EngineTrainer):
    """Runs a TensorFlow train loop on Ray workers: `ray.train.tensorflow.TensorflowTrainer`, with Keras 3.

    With `raytf.TensorflowConfig(legacy_keras=True)`, `tf.keras` of the workers is Keras 2, as under Ray's own trainer.
    TF_USE_LEGACY_KERAS=1 has the same effect, in the driver's environment or in a runtime environment of Ray.

    Args:
        train_loop_per_worker: Function without arguments, or of `train_loop_config`. Call `raytf.get_strategy()` in it,
            or build `tf.distribute.MultiWorkerMirroredStrategy()`.
        train_loop_config: Dict that the function is called with.
        tensorflow_config: A `raytf.TensorflowConfig`. Ray's own, which has no options, means the default.
        scaling_config: A `ray.train.ScalingConfig`; one worker by default.
        dataset_config: A `ray.train.DataConfig`.
        run_config: A `ray.train.RunConfig`. Without a name each `fit` is a new run. Only one driver at a time can use
            the folder of a run.
        datasets: Dict of `ray.data.Dataset` or `raytf.TFData` by name, for `raytf.get_dataset` and
            `ray.train.get_dataset_shard`.
        validation_config: A `ray.train.ValidationConfig`.
        metadata: Refused by Ray Train 2.60.
        resume_from_checkpoint: Refused by Ray Train 2.60.
        strategy: Strategy that `raytf.get_strategy()` builds, as in `KerasTrainer`; "auto" by default. With
            "parameter_server" the loop runs once, on the coordinator.
        num_ps: Number of parameter servers, at least 0, which is the default.

    Raises:
        ConfigError: An argument is wrong, and this can be seen before anything runs.

    Example:
        >>> import ray, raytf
        >>> def train_loop():
        ...     import keras, numpy, raytf
        ...     with raytf.get_strategy().scope():
        ...         model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...         model.compile("sgd", "mse")
        ...     model.fit(numpy.ones((64, 4)), numpy.ones(64), batch_size=16, callbacks=[raytf.ReportCallback()])
        >>> trainer = raytf.TensorflowTrainer(train_loop, scaling_config=ray.train.ScalingConfig(num_workers=2))
        >>> "loss" in trainer.fit().metrics
        True
    """

    def __init__(
        self,
        train_loop_per_worker: Callable,
        *,
        train_loop_config: dict | None = None,
        tensorflow_config: Any = None,
        scaling_config: ScalingConfig | None = None,
        dataset_config: DataConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: dict[str, Any] | None = None,
        validation_config: ValidationConfig | None = None,
        metadata: dict[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        strategy: str = "auto",
        num_ps: int = 0,
    ):
        validation.check_function("train_loop_per_worker", train_loop_per_worker, "train_loop(config)", optional=False)
        validation.check_mapping("train_loop_config", train_loop_config, '{"batch_size": 32}')
        ray_config.check_kinds(scaling_config, run_config)
        ray_config.check_validation(validation_config, evaluator=False)
        expected, fix = "a ray.train.DataConfig", "Pass one, or None"
        validation.check_kind("dataset_config", dataset_config, DataConfig, expected, fix)
        arguments.check_datasets(datasets)
        # Ray also takes functions that return a dataset
        read = {name: d for name, d in (datasets or {}).items() if not isinstance(d, TFData) and not callable(d)}
        arguments.check_ray_datasets(read)
        scaling_config = scaling_config or ScalingConfig()
        ray_config.check_local(scaling_config, run_config, tensorflow_config, num_ps, validation_config)
        arguments.check_strategy(strategy, scaling_config)
        arguments.check_servers(strategy, num_ps, scaling_config)
        validation.check_run_name(None if run_config is None else run_config.name)
        arguments.warn_of_score(run_config)
        run_config = None if run_config is None else run_folder.with_absolute_path(run_config)
        self._workers, self.num_ps = scaling_config, num_ps
        self.pipelines = {name: dataset for name, dataset in (datasets or {}).items() if isinstance(dataset, TFData)}
        for dataset in self.pipelines.values():
            dataset.check_pickles()
        environment = worker_environment(run_config or RunConfig(), scaling_config)
        scaling_config, self._servers = arguments.servers(num_ps, scaling_config, environment)
        if not isinstance(tensorflow_config, TensorflowConfig):
            kind = type(tensorflow_config)
            if tensorflow_config is not None and kind.__module__ != "ray.train.tensorflow.config":
                raise ConfigError(
                    "tensorflow_config must be a raytf.TensorflowConfig",
                    repr(tensorflow_config),
                    "Pass raytf.TensorflowConfig(...), or None",
                )
            tensorflow_config = TensorflowConfig()
        arguments.check_sparse(tensorflow_config, strategy, self._workers)
        arguments.check_sharded(tensorflow_config, strategy, self._workers, own_loop=True)
        if tensorflow_config.spares:
            raise ConfigError(
                "spares replace a lost worker of a KerasTrainer; those of a TensorflowTrainer all restart",
                f"spares={tensorflow_config.spares}",
                "Leave spares out",
            )
        request = arguments.keras_2_request(tensorflow_config, run_config)
        if request is not None:
            legacy_keras.check_installed(request)
            run_config = with_variables(run_config or RunConfig(), legacy_keras.VARIABLES)
            tensorflow_config = dataclasses.replace(tensorflow_config, legacy_keras=True)
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=TensorflowBackendConfig(
                config=tensorflow_config, strategy=strategy, servers=self._servers, tpu=bool(self._workers.use_tpu)
            ),
            scaling_config=scaling_config,
            dataset_config=dataset_config,
            run_config=run_config,
            datasets={name: dataset for name, dataset in (datasets or {}).items() if name not in self.pipelines},
            resume_from_checkpoint=resume_from_checkpoint,
            metadata=metadata,
            validation_config=validation_config,
        )

    def fit(self) -> ray.train.Result:
        """Runs the train loop on every worker.

        Raises:
            ResourceError: The cluster can never run the workers.
            TrainingError: A worker failed more often than `FailureConfig` allows; it is a
                `ray.train.TrainingFailedError`, too.
            StoppedError: SIGTERM or SIGINT (to the main thread) stopped it at once. It is a `SystemExit`.
        """
        with phases_module.show_phases(phase=phases_module.starting_phase()):
            connect(
                resources.run_bundles(self.scaling_config, self._servers)
            )  # may start Ray, which replaces the handler of SIGTERM
        with graceful_stop.GracefulStop(after_step=False) as self._ending:
            return self._fit_placed()

    def _fit_placed(self) -> ray.train.Result:
        """Runs the train loop as the only driver of the run's folder."""
        if not self.num_ps:
            self._workers = resources.describe_sharing(self._workers, resources.run_bundles(self._workers))
            self.scaling_config = self._workers
        resources.check_cluster(self._workers)
        resources.check_servers(self.scaling_config, self._servers)
        setup, board = self.backend_config, progress.Board()
        user = setup.config
        if user.network is not None:
            resources.interfaces(self._workers, user.network)
        seed = secrets.randbelow(2**31) if user.seed is None else user.seed
        self.backend_config = dataclasses.replace(
            setup,
            config=dataclasses.replace(user, seed=seed),
            datasets={**self.datasets, **self.pipelines},
            board=board,
        )
        given, context = self.run_config, self.train_run_context
        named = run_folder.with_name(given, "tensorflow")
        self.run_config = dataclasses.replace(named, callbacks=[*(given.callbacks or ()), ReportLines(board)])
        self.train_run_context = dataclasses.replace(
            context, run_config=self.run_config, scaling_config=self.scaling_config
        )
        folder = RunFolder.from_config(self.run_config)
        try:
            with RunLock(folder.filesystem, folder.path, self._cancel) as lock:
                lock.confirm()
                folder.check_list()
                if self._ending is not None:
                    self._ending.record(folder.filesystem, folder.path)
                location = run_folder.folder_in_users_form(self.run_config)
                print_line(f"run     {location}")
                try:
                    with self._shown_line(board):
                        result = super().fit()
                except BaseException:
                    lock.check()  # the loss of the lock is the cause, not its consequence
                    raise
            learned = run_list.newest(folder.filesystem, folder.path) is not None
            for line in results.lines(result, location, learned):
                print_line(line)
            return result
        finally:
            board.clear()
            self.backend_config, self.run_config, self.train_run_context = setup, given, context

    def _shown_line(self, board: progress.Board):
        """Returns the progress line of a run; a run in this process prints by itself, or is in a debugger."""
        if self.running_in_local_mode:
            return contextlib.nullcontext()
        return progress.ProgressLine(board, phases_module.console())


class ReportLines(UserCallback):
    """Prints the chief's metrics of a report if no `fit` shows its progress, at most once in `interval` seconds.

    Args:
        board: The run's `progress.Board`.
        interval: Shortest interval in seconds.
        clock: Returns seconds.
    """

    def __init__(self, board: progress.Board, interval: float = 1.0, clock: Callable[[], float] = time.monotonic):
        self._board, self._interval, self._clock, self._printed = board, interval, clock, -math.inf

    def after_report(self, run_context, metrics, checkpoint) -> None:
        now, shown = self._clock(), progress.describe_metrics(metrics[0])
        if shown and now - self._printed >= self._interval and not self._board.has_steps():
            self._printed = now
            print_line(f"report  {shown}")
