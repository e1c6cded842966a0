"""Checks a trainer's arguments before anything runs. Driver side."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray
from ray import cloudpickle
from ray.train import RunConfig, ScalingConfig

from raytf import validation
from raytf.compat import legacy_keras
from raytf.compat.ray_configs import resources_per_worker
from raytf.data.tf_data import TFData
from raytf.errors import ConfigError
from raytf.identity import same_run
from raytf.logs import warn_user
from raytf.parameter_server.servers import ServerSpec
from raytf.runtime.resources import fewest_workers, most_workers
from raytf.runtime.settings import TensorflowConfig
from raytf.runtime.topology import per_replica_batch, pick_strategy
from raytf.worker import checkpoint_every
from raytf.worker.checkpoint_every import CheckpointInterval

# How the global batch of an elastic run follows the number of its workers.
ELASTIC_BATCHES = ("keep", "scale")
# Modes of the comparison of two workers with one process.
VERIFY_WORDS = ("warn", "error", False)


def check_pickles(function, name: str, argument: str = "config") -> None:
    """Raises ConfigError unless `function` can be called and sent to a worker."""
    if not callable(function):
        raise ConfigError(f"{name} must be a function of {argument}", repr(function), "Pass a function")
    try:
        cloudpickle.dumps(function)
    except Exception as error:
        raise ConfigError(
            f"{name} must be a function that pickles, as it is sent to the workers",
            f"{getattr(function, '__name__', function)!r}: {error}",
            "Create what does not pickle (models, locks, files, connections) inside the function",
        ) from error


def check_build(build_model) -> None:
    """Raises ConfigError unless `build_model` is a function, and no model, that can be sent to a worker."""
    if hasattr(build_model, "train_step") and not isinstance(build_model, type):
        raise ConfigError(
            "build_model must be a function of config that builds the model on each worker",
            f"a model, {getattr(build_model, 'name', build_model)!r}",
            "Pass a function that builds and compiles it, or train it with raytf.fit",
        )
    check_pickles(build_model, "build_model")
    try:
        # a decorator's own signature counts: it may pass more arguments to the function that it wraps
        signature = inspect.signature(build_model, follow_wrapped=False)
    except ValueError:  # functions written in C may have no signature
        return
    try:
        signature.bind({})
    except TypeError as error:
        raise ConfigError(
            "build_model must take one argument, the config",
            f"{getattr(build_model, '__name__', build_model)}{signature} ({error})",
            "Define it as build_model(config), and bind what else it takes with functools.partial",
        ) from None


# How to make a dataset, by module and name of the object's type.
_READS = {
    ("pandas", "DataFrame"): "ray.data.from_pandas(frame)",
    ("pyarrow", "Table"): "ray.data.from_arrow(table)",
    ("numpy", "ndarray"): "ray.data.from_numpy(array), or train arrays with raytf.fit",
    ("datasets", "Dataset"): "ray.data.from_huggingface(dataset)",
    ("tensorflow", "DatasetV2"): "raytf.TFData(make_dataset) of the function that makes it",
    ("keras", "PyDataset"): "raytf.TFData(make_dataset) of a function that makes it",
    ("builtins", "function"): "raytf.TFData(make_dataset)",
    ("builtins", "str"): "ray.data.read_parquet(path)",
    ("builtins", "list"): "ray.data.from_items(rows)",
}


def as_dataset(given) -> str:
    """Returns advice on how to make a dataset of another object, as a sentence."""
    kinds = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(given).__mro__]
    advice = next((_READS[kind] for kind in kinds if kind in _READS), None)
    return f"Use {advice or 'one of ray.data.read_... and from_..., or train it with raytf.fit'}"


def check_datasets(datasets) -> None:
    """Raises ConfigError unless the datasets of a trainer are None, or a dict by name."""
    validation.check_mapping("datasets", datasets, '{"train": dataset}')
    for name in datasets or {}:
        if not isinstance(name, str):
            raise ConfigError("The keys of datasets must be names", repr(name), 'Use "train" and "validation"')


def check_ray_datasets(datasets: Mapping[str, Any]) -> None:
    """Raises ConfigError for a dataset by name that is no Ray Dataset."""
    for name, dataset in datasets.items():
        if not isinstance(dataset, ray.data.Dataset):
            raise ConfigError(
                "A dataset must be a ray.data.Dataset",
                f"{name!r} of type {type(dataset).__name__}",
                as_dataset(dataset),
            )


def check_pipelines(trainer) -> bool:
    """Returns whether the datasets of a KerasTrainer are `raytf.TFData`.

    Raises:
        ConfigError: Only some of them are, or an argument has no meaning for them.
    """
    pipelines = {name: dataset for name, dataset in trainer.datasets.items() if isinstance(dataset, TFData)}
    if not pipelines:
        return False
    if len(pipelines) < len(trainer.datasets):
        raise ConfigError(
            "The datasets of a trainer are Ray Datasets, or all of them raytf.TFData",
            ", ".join(f"{name!r} of type {type(dataset).__name__}" for name, dataset in trainer.datasets.items()),
            "Make all of one kind",
        )
    for dataset in pipelines.values():
        dataset.check_pickles()
    options = {
        name: spec for name, spec in {**trainer.batch.roles, "map": trainer.batch.map}.items() if spec is not None
    }
    options |= {name: setting for name in ("shuffle", "materialize") if (setting := getattr(trainer, name)) != "auto"}
    options |= {} if trainer.dataset_config is None else {"dataset_config": trainer.dataset_config}
    if options:
        raise ConfigError(
            "A raytf.TFData gives features, labels and weights itself, read, mapped and shuffled",
            ", ".join(options),
            "Leave it out, and do it in the function",
        )
    wrong = {
        "parameter servers": trainer.num_ps or trainer.strategy == "parameter_server",
        "TPUs": trainer.scaling_config.use_tpu or trainer.strategy == "tpu",
        "elastic_batch='scale'": trainer.elastic_batch == "scale",
    }
    if unsupported := [name for name, value in wrong.items() if value]:
        raise ConfigError(
            "Batches of a raytf.TFData are cut for workers on CPUs or GPUs that train in step, and follow batch_size",
            ", ".join(unsupported),
            "Use ray.data.Dataset for these",
        )
    return True


@dataclasses.dataclass(frozen=True)
class Copies:
    """A `callbacks` function for a list of callbacks: returns new copies on each worker."""

    pickled: bytes

    def __call__(self, config):
        return cloudpickle.loads(self.pickled)


def callbacks_function(given) -> Callable | None:
    """Returns the function that workers call for their callbacks, or None.

    Args:
        given: Function of config, a callback, a list of callbacks, or None.

    Raises:
        ConfigError: It is none of these, or cannot be pickled.
    """
    if given is None:
        return None
    if validation.is_callback(given):
        given = [given]
    if not isinstance(given, (list, tuple)):
        check_pickles(given, "callbacks", "config, or a list of callbacks")
        return given
    for callback in given:
        if not hasattr(callback, "on_epoch_end") or isinstance(callback, type):
            raise ConfigError(
                "callbacks must be Keras callbacks, or a function of config that returns them",
                repr(callback),
                "Pass objects such as keras.callbacks.EarlyStopping()",
            )
    try:
        return Copies(cloudpickle.dumps(list(given)))
    except Exception as error:
        raise ConfigError(
            "callbacks in a list must pickle, as each worker gets copies of them",
            f"{', '.join(type(callback).__name__ for callback in given)}: {error}",
            "Pass a function that makes them on the workers: callbacks=lambda config: [...]",
        ) from error


def check_strategy(name: str, scaling_config: ScalingConfig) -> None:
    """Raises ConfigError if the strategy does not fit the workers."""
    workers = check_workers(scaling_config)
    gpus = int(resources_per_worker(scaling_config).get("GPU", 0))
    pick_strategy(name, workers=workers, devices=gpus, tpu=bool(scaling_config.use_tpu))


def check_workers(scaling_config: ScalingConfig) -> int:
    """Returns the number of processes that train: the fewest workers, or 1 with num_workers=0.

    Raises:
        ConfigError: num_workers is neither a number of workers nor a range of them, or an elastic run could have none.
    """
    given = scaling_config.num_workers
    ends = given if isinstance(given, tuple) else (given,)
    if len(ends) not in (1, 2) or any(isinstance(bound, bool) or not isinstance(bound, int) for bound in ends):
        raise ConfigError(
            "num_workers must be an integer, or (fewest, most) of an elastic run",
            repr(given),
            "Use ScalingConfig(num_workers=2), or ScalingConfig(num_workers=(1, 4))",
        )
    if given == 0:
        return 1
    if ends[0] < 1:
        raise ConfigError("num_workers must be at least 1", repr(given), "Use ScalingConfig(num_workers=1) or more")
    if ends[0] > ends[-1]:
        raise ConfigError(
            "num_workers=(fewest, most) needs a most that is not below the fewest",
            repr(given),
            f"Use ScalingConfig(num_workers={ends[::-1]})",
        )
    return ends[0]


def check_batch(batch_size: object, scaling_config: ScalingConfig, num_ps: int, scales: bool = False) -> None:
    """Raises ConfigError unless a global batch has a row for each replica.

    It counts the replicas of the most workers that a run may have. If the batch scales with them, it counts those of
    the fewest.
    """
    if num_ps:
        per_replica_batch(batch_size, 1)
        return
    count = devices(scaling_config)
    most = max(1, fewest_workers(scaling_config) if scales else most_workers(scaling_config))
    if not scales and isinstance(scaling_config.num_workers, tuple) and batch_size < most * count:
        raise ConfigError(
            "batch_size is the global batch of an elastic run, too, and must have a row for each replica of the most "
            "workers",
            f"batch_size={batch_size!r} with num_workers={scaling_config.num_workers}, up to {most * count} replicas",
            f"Use a batch_size of {most * count} or more, or fewer workers at most",
        )
    per_replica_batch(batch_size, most * count)


def warn_of_score(run_config: RunConfig | None) -> None:
    """Warns if a trainer keeps the worst checkpoints by its metric's name: Ray's default order is "max"."""
    if doubt := validation.score_warning(getattr(run_config, "checkpoint_config", None)):
        warn_user(doubt)


def check_score(checkpoint_config: Any, logs: Collection[str] | None, validates: bool, has_others: bool) -> None:
    """Raises ConfigError if no checkpoint has the metric by which checkpoints are kept; warns if one may have it.

    Args:
        checkpoint_config: A CheckpointConfig of Ray Train or Ray Tune.
        logs: Names that the model reports, see `dry_run.DryRunResult`; None if unknown.
        validates: Whether there are rows for validation.
        has_others: Whether callbacks or evaluations may add metrics.
    """
    attribute = checkpoint_config.checkpoint_score_attribute
    if logs is None or attribute is None or (unknown := validation.unknown_metric(attribute, logs, validates)) is None:
        return
    known, fix = unknown
    if not has_others:
        rule = "checkpoint_score_attribute must be a metric that the run reports"
        raise ConfigError(rule, f"{attribute!r} of {known}", fix)
    warn_user(
        f"The model reports no {attribute!r}, by which checkpoints are kept, so that a callback or an evaluation must "
        f"add it. {fix}",
    )


def check_monitors(callbacks: Callable | None, logs: Collection[str] | None, validates: bool) -> None:
    """Raises ConfigError as `validation.check_monitors`, for a list; a function's callbacks are checked on workers."""
    if isinstance(callbacks, Copies):
        validation.check_monitors(callbacks({}), logs, validates)


def check_elastic_batch(
    word: object, batch_size: int, scaling_config: ScalingConfig, config: TensorflowConfig, strategy: str
) -> None:
    """Raises ConfigError if the global batch of a run cannot follow the number of workers."""
    validation.check_word("elastic_batch", word, ELASTIC_BATCHES)
    if word == "keep":
        return
    workers = scaling_config.num_workers
    if strategy == "parameter_server":
        received, fix = "strategy='parameter_server', whose steps are each one worker's", "Leave elastic_batch out"
    elif not isinstance(workers, tuple):
        received = f"num_workers={workers}"
        fix = "Leave elastic_batch out, or use ScalingConfig(num_workers=(1, 4))"
    elif config.sync_every > 1:
        received = f"sync_every={config.sync_every}, with which each worker makes whole steps by itself"
        fix = "Leave one of them out"
    elif scaling_config.use_tpu:
        received, fix = "TPUs, whose steps have one fixed shape", "Leave elastic_batch out"
    elif batch_size % workers[0]:
        received = f"batch_size={batch_size}, which the fewest of num_workers={workers} do not divide"
        fix = f"Use a multiple of {workers[0]}: it is the batch of the fewest workers"
    else:
        return
    raise ConfigError(
        'With elastic_batch="scale" the global batch and the learning rate follow the number of workers of an elastic '
        "run, each of which has as many rows",
        received,
        fix,
    )


def check_scalable(identity: Mapping[str, Any]) -> None:
    """Raises ConfigError unless the learning rate of a tried model can follow the number of workers."""
    if not same_run.has_one_rate(identity):
        raise ConfigError(
            'elastic_batch="scale" multiplies the learning rate, of one optimizer that has a number for it',
            "a schedule, which counts steps whatever their rows, or several optimizers",
            "Set the rate by epochs in a callback, as keras.callbacks.LearningRateScheduler does with schedule(epoch, "
            'rate) from the rate that it is given, or use elastic_batch="keep"',
        )


def check_sparse(config: TensorflowConfig, strategy: str, scaling_config: ScalingConfig) -> None:
    """Raises ConfigError if a run cannot update some rows of a table."""
    if config.sparse_updates and (strategy in ("parameter_server", "tpu") or scaling_config.use_tpu):
        raise ConfigError(
            "sparse_updates is for workers that train in step, on CPUs or GPUs",
            f"sparse_updates={config.sparse_updates!r} with strategy={strategy!r}, use_tpu={scaling_config.use_tpu}",
            "Leave sparse_updates out",
        )


def check_sharded(
    config: TensorflowConfig, strategy: str, scaling_config: ScalingConfig, own_loop: bool = False
) -> None:
    """Raises ConfigError if a run cannot share out the optimizer's state."""
    if not config.shard_optimizer:
        return
    received = f"strategy={strategy!r}" if strategy not in ("auto", "multi_worker_mirrored") else None
    if own_loop:
        received = "a TensorflowTrainer, whose loop saves its own checkpoints"
    elif scaling_config.use_tpu or resources_per_worker(scaling_config).get("GPU"):
        received = "workers with GPUs or TPUs"
    if received is not None:
        raise ConfigError(
            "shard_optimizer is for a KerasTrainer whose workers train in step, on CPUs",
            f"shard_optimizer=True with {received}",
            "Leave shard_optimizer out",
        )


def check_servers(strategy: str, num_ps: int, scaling_config: ScalingConfig) -> None:
    """Raises ConfigError if parameter servers and their strategy are not used together, or do not fit the workers."""
    validation.check_num_ps(strategy, num_ps)
    if strategy == "parameter_server" and not isinstance(scaling_config.num_workers, int):
        raise ConfigError(
            "A cluster with parameter servers has a fixed number of workers",
            scaling_config.num_workers,
            "Pass one integer",
        )
    if strategy == "parameter_server" and isinstance(scaling_config.label_selector, list):
        raise ConfigError(
            "A cluster with parameter servers has one label selector for all its processes",
            f"a list of {len(scaling_config.label_selector)}",
            "Use ScalingConfig(label_selector={...})",
        )


def checkpoint_interval(given: object, config: TensorflowConfig) -> CheckpointInterval:
    """Returns the parsed `checkpoint_every`.

    Raises:
        ConfigError: It is invalid, or does not fit the training.
    """
    parsed = checkpoint_every.parse_interval(given)
    if config.sync_every > 1 and parsed.seconds is not None:
        raise ConfigError(
            "With sync_every workers are averaged for a checkpoint, which must be at the same steps in each run",
            f"checkpoint_every={given!r} with sync_every={config.sync_every}",
            'Use a number of steps, such as checkpoint_every="1000 steps"',
        )
    return CheckpointInterval() if parsed.auto and config.sync_every > 1 else parsed


def memory_steps(given: object, strategy: str) -> int | None:
    """Returns the number of steps in `memory_every`, or None.

    Raises:
        ConfigError: It is invalid, or does not fit the training.
    """
    steps = checkpoint_every.parse_steps(given)
    if steps is not None and strategy == "tpu":
        raise ConfigError(
            "memory_every needs workers each of which holds the whole model",
            f"memory_every={given!r} with strategy={strategy!r}",
            "Use checkpoint_every",
        )
    return steps


def servers(num_ps: int, scaling_config: ScalingConfig, environment: dict) -> tuple[ScalingConfig, ServerSpec | None]:
    """Returns the ScalingConfig of the processes that run the training function, and the ServerSpec or None.

    With parameter servers, only the coordinator runs it.
    """
    if not num_ps:
        return scaling_config, None
    resources = dict(resources_per_worker(scaling_config))
    plan = ServerSpec(
        num_workers=scaling_config.num_workers, num_ps=num_ps, worker_resources=resources, environment=environment
    )
    coordinator = ScalingConfig(
        num_workers=1,
        resources_per_worker={"CPU": resources.get("CPU", 1)},
        placement_strategy=scaling_config.placement_strategy,
        label_selector=scaling_config.label_selector,
    )
    return coordinator, plan


def keras_2_request(config: TensorflowConfig, run_config: RunConfig | None) -> str | None:
    """Returns what requests Keras 2 for the workers, in the config or in their environments; otherwise None."""
    worker = (run_config.worker_runtime_env if run_config else None) or {}
    job = ray.get_runtime_context().runtime_env if ray.is_initialized() else {}
    return legacy_keras.requesting_option(
        config.legacy_keras, *(dict(env.get("env_vars") or {}) for env in (worker, job))
    )


def devices(scaling_config: ScalingConfig) -> int:
    """Returns the number of devices of a worker, at least 1."""
    return max(1, int(resources_per_worker(scaling_config).get("GPU", 0)))


def check_spares(config: TensorflowConfig, scaling_config: ScalingConfig, run_config, strategy: str) -> None:
    """Raises ConfigError if a KerasTrainer has standby workers (`spares`) that could replace none of its workers."""
    if not config.spares:
        return
    workers, most = scaling_config.num_workers, most_workers(scaling_config)
    resources = resources_per_worker(scaling_config)
    if not survives_failures(run_config):
        received, fix = "no failure allowed", "Allow some: RunConfig(failure_config=FailureConfig(max_failures=...))"
    elif most <= config.spares:
        received, fix = f"num_workers={workers}", "Use fewer spares than workers, of which one must live"
    elif strategy not in ("auto", "multi_worker_mirrored"):
        received, fix = f"strategy={strategy!r}", 'Leave spares out, or use strategy="auto"'
    elif resources.get("GPU") or resources.get("TPU") or scaling_config.use_tpu:
        received, fix = "workers with GPUs or TPUs, which all restart", "Leave spares out"
    else:
        return
    raise ConfigError(
        "spares replace a lost worker, where it can be replaced in place",
        f"spares={config.spares} with {received}",
        fix,
    )


def survives_failures(run_config) -> bool:
    """Returns whether a run continues after the failure of a worker."""
    return run_config.failure_config.max_failures != 0
