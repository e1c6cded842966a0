"""KerasTrainer: checks all arguments, then trains on workers of raytf's own engine. Driver side.

Over 500 lines: a third of it documents the arguments of the trainer.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pandas as pd
import ray
import ray.train
from ray import cloudpickle
from ray.train import DataConfig, RunConfig, ScalingConfig, ValidationConfig

from raytf import logs, timeouts, validation
from raytf.compat import legacy_keras
from raytf.console import phases as phases_module
from raytf.console import progress, quiet
from raytf.console.lines import print_line
from raytf.data import file_source, ingest, sampling
from raytf.data import streamed as streamed_module
from raytf.data.batch_spec import BatchSpec
from raytf.data.columns import ColumnSpecs
from raytf.data.sampling import Sampling
from raytf.data.tf_data import TFData
from raytf.errors import ConfigError
from raytf.identity import canonical, config_keys, fingerprint, same_run
from raytf.logs import warn_user
from raytf.parameter_server.servers import ServerSpec
from raytf.runtime import resources
from raytf.runtime.processes import Process, WarmPool, worker_environment
from raytf.runtime.settings import TensorflowConfig
from raytf.storage import checkpoint_files, run_folder, snapshots
from raytf.storage.run_folder import RunFolder
from raytf.storage.run_lock import RunLock
from raytf.train import arguments, evaluator, graceful_stop, ray_config, results, verify
from raytf.train.backend import TensorflowBackendConfig
from raytf.train.dry_run import DryRunResult, inspect
from raytf.train.engine import Startup
from raytf.train.engine_trainer import EngineTrainer
from raytf.train.entry import import_raytf, train
from raytf.train.local import LocalStartup
from raytf.train.prepare import Prepared, place_workers
from raytf.worker import model_loading, model_source
from raytf.worker.checkpoint_every import CheckpointInterval
from raytf.worker.job import TrainJob, is_complete

logger = logs.get_logger(__name__)

DEFAULTS = {"batch_size": 32, "epochs": 1}


@dataclasses.dataclass(eq=False, repr=False)
class KerasTrainer:
    """Trains a Keras 3 model on Ray, with the result of `model.fit` in one process on the same global batches.

    Args:
        build_model: Function `build_model(config) -> keras.Model` that returns a compiled model. It is called on every
            worker, in the scope of the strategy.
        config: Dict for `build_model` and `callbacks`. The trainer itself reads two of its keys. `batch_size` is the
            number of rows of the **global** batch, at least one for each replica; 32 by default. `epochs` is the number
            of epochs to train, at least 1; 1 by default.
        datasets: Dict of `ray.data.Dataset`, or of `raytf.TFData` with a function that returns a `tf.data.Dataset`:
            "train", and optionally "validation".
        features: Name of a column, or a `raytf.Column`. Or a list of columns, which are stacked into one float32
            vector. Or a dict of these by name of the model's input. Required for Ray Datasets. `features`, `labels`,
            `sample_weights`, `map`, `shuffle` and `materialize` have no meaning for a `raytf.TFData`.
        labels: As `features`, by name of the model's output. None for models that need no labels.
        sample_weights: Name of a column with one weight per row, or a dict of these by name of the output.
        map: Function `map(features, labels, sample_weights, seeds)` that returns the same without `seeds`, and without
            what is None. It runs in TensorFlow operations on batches of training rows, after the shuffle. `seeds` is an
            int32 tensor of shape (rows, 2) that depends on seed, epoch and row only. Pass it to
            `tf.random.stateless_*`: a resumed or resized run then augments rows in the same way.
        callbacks: Function `callbacks(config)` that returns a list of Keras callbacks. It is called on every worker;
            only the chief writes files. Or a list of callbacks, of which each worker gets copies.
        strategy: "auto", "one_device", "mirrored", "multi_worker_mirrored", "central_storage", "parameter_server" or
            "tpu"; "auto" by default. With "parameter_server" each step is made by one worker on a whole batch. Workers
            do not wait for each other.
        evaluator: If True, one more process evaluates the checkpoint of each epoch on the dataset "validation" while
            training continues. It replaces validation in the training. Its metrics are named `eval_*`, arrive late, and
            are not seen by callbacks.
        num_ps: Number of parameter servers, at least 0, which is the default. They are started in addition to the
            workers, as is a coordinator.
        variable_partitioner: Function `partitioner(shape, dtype)` that returns the number of parts along each axis,
            such as those of `tf.distribute.experimental.partitioners`. Splits large variables over the servers by rows.
        scaling_config: A `ray.train.ScalingConfig`; one worker by default. With `num_workers=0` the training runs in
            the calling process.
        dataset_config: A `ray.train.DataConfig` with the execution options of Ray Data. Datasets are always sharded
            over the workers.
        validation_config: A `ray.train.ValidationConfig`. Its function runs for the checkpoint of each epoch, in a task
            of its own. What it returns is added to the rows of `result.metrics_dataframe` whose checkpoints are kept.
        run_config: A `ray.train.RunConfig`. Without a name each `fit` is a new run. Only one driver at a time can use
            the folder of a run.
        tensorflow_config: A `raytf.TensorflowConfig`: collectives, recovery, threads, GPU memory.
        seed: Seed of weights, order of rows, dropout masks and augmentation, 0 to 2**63 - 1; 0 by default.
        materialize: Whether rows are kept in Ray's object store; "auto" by default. True keeps them. False reads them
            again in every epoch, in one execution of Ray Data that all workers share. "auto" streams what does not fit.
            A dict of these sets it by dataset.
        shuffle: Order of training rows in each epoch; "auto" by default. "full": uniformly random. "window": blocks in
            random order, rows in random order in windows. "none": as they are. "auto": "window" for streamed datasets,
            else "full".
        window: Number of rows of a window, at least 1; 65,536 by default.
        steps_per_execution: Steps in one call of the training function, at least 1. "auto", the default, keeps the
            value that the model was compiled with if it is above 1. Else it measures the first steps. It raises the
            value where Python's share of a step matters and no callback needs batches.
        progress: Whether the driver shows a line of progress; True by default.
        checkpoint_every: When to write checkpoints within epochs: "100 steps", "30 s", "10 min", or "epoch". "epoch"
            writes them only at the ends of epochs. "auto", the default, spends at most a hundredth of the time, and
            writes every 30 s at most. A run resumes at the next step with the same rows, masks and metrics, on any
            number of workers. With `TensorflowConfig(sync_every=)` "auto" means "epoch", and times are refused.
        memory_every: When to copy the training's state into memory, such as "10 steps". None makes no copies. One copy
            is on the chief's host, and one on another host if there is one. Each host needs memory for two. The copy is
            written to storage only when the run breaks. The loss of a host then costs at most that many steps. With
            parameter servers a process on the coordinator's host holds the copy, from which all restart.
        elastic_batch: For elastic runs, `ScalingConfig(num_workers=(fewest, most))`. "keep", the default: the global
            batch is `batch_size` on any number of workers. The weights do not depend on that number. "scale":
            `batch_size` and the learning rate are those of the fewest workers. Both grow in proportion with the number
            of workers. This is the linear scaling rule of Goyal et al. 2017, https://arxiv.org/abs/1706.02677, without
            its warm-up. An epoch that has begun continues after the rows that it has used. With shuffle="window" or
            buckets by length it starts again, with a warning. "scale" refuses a `LearningRateSchedule`, several
            optimizers, `sync_every` and TPUs.
        resume: What to do if the run's folder has checkpoints. "auto", the default, resumes the same run, and raises an
            error that names what differs if it is another one. True resumes with the changes, unless model or optimizer
            differ, and raises an error if there is no checkpoint. False archives the previous run and starts from
            scratch. More epochs, other callbacks and another number of workers are not differences. A run that has
            ended is not trained again.
        verify: Whether to compare two workers with one process before training. It compares logs, metrics, weights and
            other variables, on a few rows, after two steps and a validation. "warn", the default, warns of differences,
            with their cause and the fix. After half a second the comparison continues in parallel with the first steps.
            "error" waits for at most 200 s. It raises an error for differences, and without a result. False compares
            nothing. Models above 64 MiB, parameter servers, `sync_every` and single devices are not compared.
        nan: What to do if the loss is NaN or infinite. "warn", the default: one warning soon afterwards, with the first
            such step and the workers whose rows caused it. The warning is an event of the run, see `raytf.run_events`.
            "stop": also stops the training, within 100 steps; with parameter servers at the epoch's end. "ignore":
            nothing. Metrics of the validation are only warned of.

    Raises:
        ConfigError: An argument is wrong, and this can be seen before anything runs.

    Example:
        >>> import keras, pandas, ray, raytf
        >>> def build_model(config):
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     model.compile(keras.optimizers.SGD(config["learning_rate"]), "mse")
        ...     return model
        >>> rows = ray.data.from_pandas(pandas.DataFrame({"x": range(64), "y": range(64)}) / 64)
        >>> trainer = raytf.KerasTrainer(
        ...     build_model,
        ...     config={"learning_rate": 0.1, "batch_size": 16, "epochs": 2},
        ...     datasets={"train": rows},
        ...     features="x",
        ...     labels="y",
        ...     scaling_config=ray.train.ScalingConfig(num_workers=2),
        ... )
        >>> result = trainer.fit()
        >>> sorted(result.metrics)
        ['epoch', 'loss']
    """

    build_model: Callable
    _: dataclasses.KW_ONLY
    config: Mapping[str, Any] | None = None
    datasets: Mapping[str, Any]
    features: ColumnSpecs | None = None
    labels: ColumnSpecs | None = None
    sample_weights: ColumnSpecs | None = None
    map: Callable | None = None
    callbacks: Callable | Sequence | None = None
    strategy: str = "auto"
    evaluator: bool = False
    num_ps: int = 0
    variable_partitioner: Callable | None = None
    scaling_config: ScalingConfig | None = None
    run_config: RunConfig | None = None
    dataset_config: DataConfig | None = None
    validation_config: ValidationConfig | None = None
    tensorflow_config: TensorflowConfig | None = None
    seed: int = 0
    materialize: bool | str | Mapping[str, bool | str] = "auto"
    shuffle: str = "auto"
    window: int = 65_536
    steps_per_execution: int | str = "auto"
    progress: bool = True
    checkpoint_every: str = "auto"
    memory_every: str | None = None
    elastic_batch: Literal["keep", "scale"] = "keep"
    resume: str | bool = "auto"
    verify: Literal["warn", "error", False] = "warn"
    nan: Literal["warn", "stop", "ignore"] = "warn"

    def __post_init__(self):
        self._check_kinds()
        self.callbacks = arguments.callbacks_function(self.callbacks)
        self.config = DEFAULTS | dict(self.config or {})
        self.datasets = dict(self.datasets or {})
        self.scaling_config = self.scaling_config or ScalingConfig()
        self.run_config = run_folder.with_absolute_path(self.run_config or RunConfig())
        self.tensorflow_config = self.tensorflow_config or TensorflowConfig()
        self.batch = BatchSpec.parsed(self.features, self.labels, self.sample_weights, self.map)
        self._check_arguments()

    def _check_kinds(self) -> None:
        """Raises ConfigError for arguments of other types than the documented ones, which all that follows expects."""
        ray_config.check_kinds(self.scaling_config, self.run_config)
        arguments.check_datasets(self.datasets)
        validation.check_mapping("config", self.config, '{"batch_size": 32, "epochs": 3}')
        given, expected = self.tensorflow_config, "a raytf.TensorflowConfig"
        validation.check_kind("tensorflow_config", given, TensorflowConfig, expected, "Pass one, or None")
        for name in ("evaluator", "progress"):
            validation.check_flag(name, getattr(self, name))

    def _check_arguments(self) -> None:
        legacy_keras.refuse_keras_2(arguments.keras_2_request(self.tensorflow_config, self.run_config))
        arguments.check_build(self.build_model)
        if self.batch.map is not None:
            arguments.check_pickles(self.batch.map, "map", "batches")
        if self.variable_partitioner is not None:
            arguments.check_pickles(self.variable_partitioner, "variable_partitioner", "shape and dtype")
        given = self.scaling_config, self.run_config, self.tensorflow_config
        ray_config.check_local(*given, self.num_ps, self.validation_config, self.evaluator)
        ray_config.check_validation(self.validation_config, self.evaluator)
        arguments.check_servers(self.strategy, self.num_ps, self.scaling_config)
        arguments.check_sparse(self.tensorflow_config, self.strategy, self.scaling_config)
        arguments.check_sharded(self.tensorflow_config, self.strategy, self.scaling_config)
        validation.check_config(self.config)
        arguments.check_workers(self.scaling_config)
        arguments.check_strategy(self.strategy, self.scaling_config)
        arguments.check_spares(self.tensorflow_config, self.scaling_config, self.run_config, self.strategy)
        batch = self.config["batch_size"]
        arguments.check_elastic_batch(
            self.elastic_batch, batch, self.scaling_config, self.tensorflow_config, self.strategy
        )
        arguments.check_batch(batch, self.scaling_config, self.num_ps, self.elastic_batch == "scale")
        if "train" not in self.datasets or set(self.datasets) - {"train", "validation"}:
            raise ConfigError(
                "datasets must hold 'train' and may hold 'validation'", sorted(self.datasets), "Rename the datasets"
            )
        if self.evaluator and "validation" not in self.datasets:
            raise ConfigError(
                "evaluator=True needs rows to evaluate", sorted(self.datasets), "Pass datasets['validation']"
            )
        of_functions = arguments.check_pipelines(self)
        if not of_functions:
            arguments.check_ray_datasets(self.datasets)
            self.datasets = ray_config.apply_data_config(self.datasets, self.dataset_config)
        if self.batch.features is None and not of_functions:
            raise ConfigError("features must name columns", None, "Name a column, a list of columns or a dict")
        ingest.check(self.materialize, self.datasets)
        validation.check_word("shuffle", self.shuffle, ("auto", *sampling.SHUFFLES))
        if self.shuffle == "full" and ingest.materialized(self.materialize, "train") is False:
            raise ConfigError(
                "What is streamed cannot be shuffled over all rows", "shuffle='full'", "Use shuffle='window'"
            )
        validation.check_whole("window", self.window, 1)
        if self.steps_per_execution != "auto":
            validation.check_whole('steps_per_execution, where it is not "auto",', self.steps_per_execution, 1)
        validation.check_seed(self.seed)
        arguments.checkpoint_interval(self.checkpoint_every, self.tensorflow_config)
        arguments.memory_steps(self.memory_every, self.strategy)
        validation.check_word("resume", self.resume, ("auto", True, False))
        validation.check_run_name(self.run_config.name)
        validation.check_word("verify", self.verify, arguments.VERIFY_WORDS)
        validation.check_word("nan", self.nan, validation.NAN_WORDS)
        arguments.warn_of_score(self.run_config)

    def fit(self) -> ray.train.Result:
        """Trains, and returns when the last epoch is reported.

        Returns:
            A `ray.train.Result`. Its `metrics` has the last epoch's global values by their Keras names, and `epoch`.
            `metrics_dataframe` has a row for each epoch. `checkpoint` is the model for `raytf.load_model`.

        Raises:
            ConfigError: The model, the columns or the cluster do not fit; no worker has started.
            TrainingError: A worker failed more often than `FailureConfig` allows; contains the first cause and its
                rank. Or another driver has taken over the run's folder while this one was frozen.
            StoppedError: SIGTERM or SIGINT came (to the main thread), or the run cannot leave a drained node. That is
                the driver's node, or the node of the coordinator of parameter servers. Contains the saved step, and is
                a `SystemExit`.

        Example:
            >>> import keras, pandas, ray, raytf
            >>> def build_model(config):
            ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            ...     model.compile("sgd", "mse")
            ...     return model
            >>> trainer = raytf.KerasTrainer(
            ...     build_model,
            ...     config={"batch_size": 16, "epochs": 1},
            ...     datasets={"train": ray.data.from_pandas(pandas.DataFrame({"x": range(64), "y": range(64)}) / 64)},
            ...     features="x",
            ...     labels="y",
            ...     scaling_config=ray.train.ScalingConfig(num_workers=2),
            ... )
            >>> sorted(trainer.fit().metrics)
            ['epoch', 'loss']
        """
        with phases_module.show_phases(self.progress, phases_module.starting_phase(self._finished())) as phases:
            inner = place_workers(self)  # may start Ray, which takes SIGTERM for itself
            with graceful_stop.GracefulStop() as ending:
                return self._fit_placed(inner, ending, phases)

    def _finished(self) -> str | None:
        """Returns that the run is complete, as a clause, if its checkpoints show it before the start; else None."""
        if self.resume is False or run_folder.is_unnamed(self.run_config):
            return None
        return results.has_ended(self.run_config, self.config["epochs"])

    def _fit_placed(
        self, inner: ScalingConfig, ending: graceful_stop.GracefulStop, phases: phases_module.Phases
    ) -> ray.train.Result:
        """Trains as the only driver of the run's folder."""
        run_config = self.run_config
        if self.resume is not True:  # otherwise the name is an existing run's
            run_config = run_folder.with_name(run_config, "keras")
        folder = RunFolder.from_config(run_config)
        with RunLock(folder.filesystem, folder.path) as lock, snapshots.no_writers(folder.filesystem, folder.path):
            location = run_folder.folder_in_users_form(run_config)
            if self.progress:
                print_line(f"run     {location}")
            last = self._last(folder)
            if last is not None and is_complete(last, self):
                launch = WarmPool(Process, inner, run_config, 1, import_raytf)  # only to try the model
            elif not self.scaling_config.num_workers:
                launch = LocalStartup(inner, run_config)
            else:
                launch = Startup(inner, run_config)
            lock.on_lost, launch.ending = launch.cancel, ending
            ending.record(folder.filesystem, folder.path)
            with Prepared(launch) as training:
                try:
                    result = self._fit_prepared(training, lock, folder, last, phases)
                except BaseException:
                    lock.check()  # the loss of the lock is the cause, not its consequence
                    raise
            ending.check(result, folder)
        if self.progress:
            for line in results.lines(result, location):
                print_line(line)
        return result

    def _fit_prepared(
        self, training: Prepared, lock: RunLock, folder: RunFolder, last, phases: phases_module.Phases
    ) -> ray.train.Result:
        """Trains, unless the checkpoint `last` in the run's folder is of another run, or the run has ended."""
        has_ended = last is not None and is_complete(last, self)
        phases.begin(phases_module.READING)
        launch, blocks = training.processes, training.read(self)
        phases.begin(phases_module.COMPARING if has_ended else phases_module.TRYING)
        with ThreadPoolExecutor(1) as executor:
            data = executor.submit(self._data_identity, blocks)
            tried = self._try_model(launch, blocks, self.config, may_continue=True, compares=not has_ended)
            if self.elastic_batch == "scale":
                arguments.check_scalable(tried.identity)
            has_others = bool(self.callbacks or self.evaluator or self.validation_config)
            validates = "validation" in self.datasets and not self.evaluator
            arguments.check_score(self.run_config.checkpoint_config, tried.logs, validates, has_others)
            arguments.check_monitors(self.callbacks, tried.logs, validates)
            identity = self._identity(blocks, tried.identity, data.result())
        lock.confirm()
        phases.close()
        if last is not None:
            same_run.check_same_run(last.identity, identity, self.resume, folder.name)
            folder.relist(last, self.run_config.checkpoint_config)
            if has_ended:
                return self._ended(folder, last)
            order = self._order(last, blocks) if last.epoch_step else {}
            logger.info(f"{folder.name}: {_describe_resume(last, order)}")
        if self.resume is False and (archived := folder.archive()):
            logger.info(f"{folder.name}: starts from scratch; the previous run is archived as {archived!r}")
        with verify.ComparisonReporter(tried.comparison, launch):
            return self._train(launch, blocks, identity)

    def _order(self, last: run_folder.LastCheckpoint, blocks: dict) -> dict[str, Any]:
        """Returns the `Feed.order` of the run; parts that depend on the number of workers are the last checkpoint's."""
        order = self._task(blocks).order
        by_workers = ("batch_size", "window") if self.elastic_batch == "scale" else ()
        if isinstance(blocks["train"], TFData):
            by_workers = ("steps", "shards")
            order |= dict.fromkeys(name for name in by_workers if name in last.order)
        return order | {name: last.order[name] for name in by_workers if name in order and name in last.order}

    def _last(self, folder: RunFolder) -> run_folder.LastCheckpoint | None:
        """Returns the checkpoint from which this run resumes, or None."""
        if self.resume is False:
            return None
        last = folder.last(lambda last: is_complete(last, self))
        if last is None and self.resume is True:
            raise ConfigError(
                "With resume=True a run resumes from a checkpoint",
                f"no checkpoint in {folder.path!r}",
                'Correct the name and storage_path of the RunConfig, or use resume="auto"',
            )
        return last

    def _data_identity(self, blocks: dict) -> dict[str, Any]:
        return {
            name: fingerprint.pipeline_fingerprint(part)
            if isinstance(part, TFData)
            else fingerprint.dataset_fingerprint(self.datasets[name], sum(part.rows))
            for name, part in blocks.items()
        }

    def _identity(self, blocks: dict, model: dict[str, Any], data: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the identity of this run, see `same_run.py`.

        Args:
            blocks: Datasets that were read, by name.
            model: Identity of the tried model.
            data: Identity of the datasets, or None to compute it.
        """
        settings = {name: getattr(self.tensorflow_config, name) for name in ("sync_every", "gradient_dtype")}
        if self.tensorflow_config.sparse_updates:
            settings["sparse_updates"] = self.tensorflow_config.sparse_updates
        if self.elastic_batch != "keep":
            settings["elastic_batch"] = self.elastic_batch
        columns_of = {name: fingerprint.columns_fingerprint(spec) for name, spec in self.batch.roles.items()}
        identity = {
            "version": same_run.VERSION,
            **model,
            "columns": {**columns_of, "types": model["types"]},
            "map": canonical.describe(self.batch.map),
            "seed": self.seed,
            "batch_size": self.config["batch_size"],
            "order": {"shuffle": self.shuffle, "used": self._shuffle(blocks), "window": self.window},
            "settings": settings,
            "data": self._data_identity(blocks) if data is None else data,
        }
        del identity["types"]
        train = self.datasets["train"]
        if classes := {} if isinstance(train, TFData) else file_source.classes_of(train):
            identity["classes"] = classes
        return json.loads(json.dumps(identity))

    def _ended(self, folder: RunFolder, last: run_folder.LastCheckpoint) -> ray.train.Result:
        """Returns the result of a run that is complete."""
        why = "was stopped by a callback" if last.stopped else "is complete"
        logger.info(f"{folder.name}: {why} after {last.epoch} epoch(s); finished, nothing to do")
        with quiet.quiet_result_reading():
            result = ray.train.Result.from_path(folder.path, storage_filesystem=folder.filesystem)
        return _with_history(self, result, self._validated(result) or evaluator.checkpoint_metrics(result))

    def _validated(self, result: ray.train.Result) -> dict[int, dict]:
        """Returns the metrics of the checkpoints by epoch if a validation_config has added to them, otherwise {}."""
        rows = [metrics for _, metrics in result.best_checkpoints or ()] if self.validation_config else []
        return {row["epoch"]: row for row in rows if "epoch" in row}

    def _task(self, blocks: dict) -> TrainJob:
        """Returns the `TrainJob` of the workers for read data, without a progress line.

        Raises:
            ConfigError: The data is streamed, and the shuffle is over all rows.
        """
        shuffle = self._shuffle(blocks)
        if isinstance(blocks["train"], streamed_module.StreamedDataset) and shuffle == "full":
            raise ConfigError(
                "What is streamed cannot be shuffled over all rows",
                "shuffle='full' for a dataset that the object store cannot hold",
                "Use shuffle='window', or materialize=True if Ray may put it on disk",
            )
        interval = arguments.checkpoint_interval(self.checkpoint_every, self.tensorflow_config)
        by_epochs = isinstance(blocks["train"], TFData) and blocks["train"].facts.resume_unit == "epoch"
        return TrainJob(
            build_model=self.build_model,
            callbacks=self.callbacks,
            config=self.config,
            batch=self.batch,
            datasets=blocks,
            sampling=Sampling(
                global_batch=self.config["batch_size"], seed=self.seed, shuffle=shuffle, window=self.window
            ),
            steps_per_execution=self.steps_per_execution,
            board=None,
            variable_partitioner=self.variable_partitioner,
            evaluator=self.evaluator,
            validate=self.evaluator or self.validation_config is not None,
            checkpoint_every=CheckpointInterval() if by_epochs and self.checkpoint_every == "auto" else interval,
            memory_every=arguments.memory_steps(self.memory_every, self.strategy),
            recovers=self._recovers() and not by_epochs,
            fewest=resources.fewest_workers(self.scaling_config) if self.elastic_batch == "scale" else None,
            nan=self.nan,
        )

    def _recovers(self) -> bool:
        """Returns whether a lost worker is replaced in place."""
        return self.tensorflow_config.heal and not self.num_ps and arguments.survives_failures(self.run_config)

    def _shuffle(self, blocks: dict) -> str:
        """Returns the shuffle of the training data, which "auto" chooses by its kind."""
        if isinstance(blocks["train"], TFData):
            return "none"  # the function shuffles
        streamed = isinstance(blocks["train"], streamed_module.StreamedDataset)
        return self.shuffle if self.shuffle != "auto" else "window" if streamed else "full"

    def _servers(self) -> tuple[ScalingConfig, ServerSpec | None]:
        """Returns (the ScalingConfig of the workers, the `servers.ServerSpec` or None)."""
        environment = worker_environment(self.run_config, self.scaling_config)
        return arguments.servers(self.num_ps, self.scaling_config, environment)

    def _setup(self) -> TensorflowBackendConfig:
        """Returns the setup of the workers' processes."""
        return TensorflowBackendConfig(
            config=dataclasses.replace(self.tensorflow_config, seed=self.seed % 2**31),
            strategy=self.strategy,
            servers=self._servers()[1],
            tpu=bool(self.scaling_config.use_tpu),
        )

    def _train(self, launch: Startup, blocks: dict, identity: dict[str, Any]) -> ray.train.Result:
        task = dataclasses.replace(self._task(blocks), identity=identity)
        if not self.progress:
            return self._run(task, launch)
        for name, dataset in blocks.items():
            print_line(ingest.describe(name, dataset, task.sampling.shuffle if name == "train" else "none"))
        board = progress.Board()
        try:
            return self._run(dataclasses.replace(task, board=board), launch)
        finally:
            board.clear()

    def _run(self, task: TrainJob, launch: Startup) -> ray.train.Result:
        if not self.evaluator:
            result = self._fit(task, launch, None)
            return _with_history(self, result, self._validated(result))
        environment = worker_environment(self.run_config, self.scaling_config)
        bundle = resources.resources_per_worker(self.scaling_config)
        sidecar = evaluator.EvaluatorSidecar(dataclasses.replace(task, board=None), bundle, environment, launch.warned)
        try:
            result = self._fit(task, launch, sidecar)
        finally:
            metrics = sidecar.results.close()
        if self.nan != "ignore" and not results.ended_in_nan(result):
            evaluator.report_not_finite(metrics)
        return _with_history(self, result, evaluator.checkpoint_metrics(result) | metrics)

    def _fit(self, task: TrainJob, launch: Startup, sidecar: evaluator.EvaluatorSidecar | None) -> ray.train.Result:
        def keras_training():
            return train(task)

        inner = EngineTrainer(
            keras_training,
            backend_config=self._setup(),
            scaling_config=self._servers()[0],
            run_config=launch.run_config,
            launch=launch,
            validation_config=sidecar.validation() if sidecar else self.validation_config,
            sidecar=sidecar,
            shown=(list(self.datasets), self.config),
            dataset_config=self.dataset_config,
            recovers=task.recovers,
            warm_up_job=task if task.recovers and self.tensorflow_config.spares else None,
        )
        if task.board is None:
            return inner.fit()
        with progress.ProgressLine(task.board, phases_module.console()):
            return inner.fit()

    def _try_model(
        self,
        processes: WarmPool,
        blocks: dict,
        config: Mapping[str, Any],
        rows: int | None = None,
        known_keys: Collection[str] = tuple(DEFAULTS),
        may_continue: bool = False,
        compares: bool = True,
    ) -> DryRunResult:
        """Tries the model of a config on the data.

        Warns of keys of the config that nothing reads. Warns of differences between two workers and one process, or
        raises an error, depending on `verify`.

        Args:
            processes: Pool of processes, one of which tries the model.
            blocks: Datasets that were read, by name; the properties of pipelines are added to it.
            config: Config for `build_model`.
            rows: Number of rows of measured steps, instead of a comparison; None for no figures.
            known_keys: Keys of the config for raytf itself, of which it does not warn.
            may_continue: Whether a comparison may continue after the return, see `verify.ComparisonReporter`.
            compares: Whether to compare at all: nothing is trained if the run has ended.

        Returns:
            Properties of the model, and figures of it if `rows` is given.

        Raises:
            ConfigError: The columns or the model do not fit the data.
            UnsupportedVersionError: raytf does not fit the installed versions of Ray, Keras or TensorFlow.
        """
        ray_datasets = {name: block for name, block in blocks.items() if not isinstance(block, TFData)}
        for name, block in ray_datasets.items():
            if not block.rows:
                raise ConfigError(
                    "A dataset must hold rows", f"{name!r} is empty", "Check the path or the filter that made it"
                )
            self.batch.check(block.columns)
        names = sorted(set(config) - set(known_keys))
        pickled = cloudpickle.dumps((self.build_model, dict(config), self.batch, names, self.callbacks))
        order = self._comparison(may_continue) if compares and rows is None else None
        validation = blocks["validation"].first() if "validation" in blocks else None
        outcome = processes.ask(inspect, pickled, blocks["train"].first(), rows, order, validation)
        if isinstance(outcome, Exception):
            raise outcome
        blocks.update({name: blocks[name].with_facts(seen) for name, seen in outcome.pipelines.items()})
        if outcome.warning is not None:
            logger.warning(outcome.warning)
        if outcome.unread:
            warn_user(config_keys.unread_warning(outcome.unread))
        if outcome.verification is not None:
            verify.report_result(outcome.verification, self.verify)
        return outcome

    def _comparison(self, may_continue: bool) -> verify.VerificationOptions | None:
        """Returns how to compare two workers with one device, or None if there is nothing to compare."""
        replicas = resources.most_workers(self.scaling_config) * arguments.devices(self.scaling_config)
        if not self.verify or replicas < 2 or self.num_ps or self.tensorflow_config.sync_every > 1:
            return None
        order = verify.VerificationOptions(batch=self.config["batch_size"], may_continue=may_continue)
        if self.verify == "error":
            return dataclasses.replace(order, may_continue=False, seconds=timeouts.get().verify_error)
        return order


def _describe_resume(last: run_folder.LastCheckpoint, order: Mapping[str, Any]) -> str:
    """Describes how a run resumes: at the next step, or its epoch's first if steps would have other rows now."""
    if last.epoch_step and (differs := sampling.differences(last.order, order)):
        restart = f"epoch {last.epoch + 1} restarts at its first step, as its {last.epoch_step} step(s)"
        return f"resuming from step {last.step}; {restart} would have other rows now ({differs})"
    return f"resuming from step {last.step} ({checkpoint_files.describe_progress(last.epoch, last.epoch_step)})"


def _with_history(trainer, result: ray.train.Result, evaluations: Mapping[int, dict] | None = None) -> ray.train.Result:
    """Adds a row for each epoch to the result, whatever checkpoints are kept, with the evaluator's metrics by epoch."""
    if result.checkpoint is not None:
        model_source.remember_run(result.path, trainer.build_model, trainer.config)
        history = model_loading.last_state(result).history
        result.metrics_dataframe = pd.DataFrame([row | (evaluations or {}).get(row["epoch"], {}) for row in history])
    return result
