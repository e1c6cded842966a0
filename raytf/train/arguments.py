"""What can be seen to be wrong with a trainer's arguments before anything runs. Driver side."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
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
from raytf.parameter_server.servers import ServerSpec
from raytf.runtime.resources import fewest_workers, most_workers
from raytf.runtime.settings import TensorflowConfig
from raytf.runtime.topology import per_replica_batch, pick_strategy
from raytf.worker import checkpoint_every
from raytf.worker.checkpoint_every import Every

# How the global batch of an elastic run follows the number of its workers.
ELASTIC_BATCHES = ("keep", "scale")
# What to do about a loss that is no number.
NAN_WORDS = ("warn", "stop", "ignore")
# Whether a model on two workers is compared with one process.
VERIFY_WORDS = ("warn", "error", False)


def check_pickles(function, name: str, of: str = "config") -> None:
    """Raises ConfigError unless `function` can be called and sent to a worker."""
    if not callable(function):
        raise ConfigError(f"{name} must be a function of {of}", repr(function), "Pass a function")
    try:
        cloudpickle.dumps(function)
    except Exception as error:
        raise ConfigError(
            f"{name} must be a function that pickles, as it is sent to the workers",
            f"{getattr(function, '__name__', function)!r}: {error}",
            "Create what does not pickle (models, locks, files, connections) inside the function",
        ) from error


def check_build(build_model) -> None:
    """Raises ConfigError unless `build_model` is a function that can be sent to a worker; models can be called, too."""
    if hasattr(build_model, "train_step") and not isinstance(build_model, type):
        raise ConfigError(
            "build_model must be a function of config that builds the model on each worker",
            f"a model, {getattr(build_model, 'name', build_model)!r}",
            "Pass a function that builds and compiles it, or train it with raytf.fit",
        )
    check_pickles(build_model, "build_model")
    try:
        # What a decorator takes itself is asked, and not what it wraps, to which it may give more.
        signature = inspect.signature(build_model, follow_wrapped=False)
    except ValueError:  # of what is written in C
        return
    try:
        signature.bind({})
    except TypeError as error:
        raise ConfigError(
            "build_model must take one argument, the config",
            f"{getattr(build_model, '__name__', build_model)}{signature} ({error})",
            "Define it as build_model(config), and bind what else it takes with functools.partial",
        ) from None


# By the module and name of a type, what makes a dataset of its objects.
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
    """Returns how a dataset is made of something else, as a clause."""
    kinds = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(given).__mro__]
    found = next((_READS[kind] for kind in kinds if kind in _READS), None)
    return f"Use {found or 'one of ray.data.read_... and from_..., or train it with raytf.fit'}"


def check_pipelines(trainer) -> bool:
    """Whether the datasets of a KerasTrainer are `raytf.TFData`.

    Raises:
        ConfigError: some are, and others not; or an argument has no meaning for them.
    """
    given = {name: one for name, one in trainer.datasets.items() if isinstance(one, TFData)}
    if not given:
        return False
    if len(given) < len(trainer.datasets):
        raise ConfigError(
            "The datasets of a trainer are Ray Datasets, or all of them raytf.TFData",
            ", ".join(f"{name!r} of type {type(one).__name__}" for name, one in trainer.datasets.items()),
            "Make all of one kind",
        )
    for one in given.values():
        one.check_pickles()
    asked = {name: spec for name, spec in {**trainer.batch.roles, "map": trainer.batch.map}.items() if spec is not None}
    asked |= {name: its for name in ("shuffle", "materialize") if (its := getattr(trainer, name)) != "auto"}
    asked |= {} if trainer.dataset_config is None else {"dataset_config": trainer.dataset_config}
    if asked:
        raise ConfigError(
            "A raytf.TFData gives features, labels and weights itself, read, mapped and shuffled",
            ", ".join(asked),
            "Leave it out, and do it in the function",
        )
    wrong = {
        "parameter servers": trainer.num_ps or trainer.strategy == "parameter_server",
        "TPUs": trainer.scaling_config.use_tpu or trainer.strategy == "tpu",
        "elastic_batch='scale'": trainer.elastic_batch == "scale",
    }
    if found := [name for name, value in wrong.items() if value]:
        raise ConfigError(
            "Batches of a raytf.TFData are cut for workers on CPUs or GPUs that train in step, and follow batch_size",
            ", ".join(found),
            "Use ray.data.Dataset for these",
        )
    return True


@dataclasses.dataclass(frozen=True)
class Copies:
    """A `callbacks` function of a list of callbacks: gives each worker copies of them."""

    pickled: bytes

    def __call__(self, config):
        return cloudpickle.loads(self.pickled)


def callbacks_function(given) -> Callable | None:
    """Returns what the workers call for their callbacks.

    Args:
        given: a function of config, a callback, a list of them, or None.

    Raises:
        ConfigError: it is none of these, or does not pickle.
    """
    if given is None:
        return None
    if validation.is_callback(given):
        given = [given]
    if not isinstance(given, (list, tuple)):
        check_pickles(given, "callbacks", "config, or a list of callbacks")
        return given
    for one in given:
        if not hasattr(one, "on_epoch_end") or isinstance(one, type):
            raise ConfigError(
                "callbacks must be Keras callbacks, or a function of config that returns them",
                repr(one),
                "Pass objects such as keras.callbacks.EarlyStopping()",
            )
    try:
        return Copies(cloudpickle.dumps(list(given)))
    except Exception as error:
        raise ConfigError(
            "callbacks in a list must pickle, as each worker gets copies of them",
            f"{', '.join(type(one).__name__ for one in given)}: {error}",
            "Pass a function that makes them on the workers: callbacks=lambda config: [...]",
        ) from error


def check_strategy(name: str, scaling_config: ScalingConfig) -> None:
    """Raises ConfigError if the strategy does not fit the workers."""
    workers = check_workers(scaling_config)
    gpus = int(resources_per_worker(scaling_config).get("GPU", 0))
    pick_strategy(name, workers=workers, devices=gpus, tpu=bool(scaling_config.use_tpu))


def check_workers(scaling_config: ScalingConfig) -> int:
    """The processes that train: the fewest workers, or this one alone where num_workers=0.

    Raises:
        ConfigError: no number of workers, or no range of such numbers; an elastic run may have none.
    """
    given = scaling_config.num_workers
    ends = given if isinstance(given, tuple) else (given,)
    if len(ends) not in (1, 2) or any(isinstance(one, bool) or not isinstance(one, int) for one in ends):
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
    """Raises ConfigError unless each replica has a row of a global batch, with the most workers that a run may have.

    Where the batch scales with them, with the fewest.
    """
    if num_ps:
        per_replica_batch(batch_size, 1)
        return
    each = devices(scaling_config)
    most = max(1, fewest_workers(scaling_config) if scales else most_workers(scaling_config))
    if not scales and isinstance(scaling_config.num_workers, tuple) and batch_size < most * each:
        raise ConfigError(
            "batch_size is the global batch of an elastic run, too, and must have a row for each replica of the most "
            "workers",
            f"batch_size={batch_size!r} with num_workers={scaling_config.num_workers}, up to {most * each} replicas",
            f"Use a batch_size of {most * each} or more, or fewer workers at most",
        )
    per_replica_batch(batch_size, most * each)


def check_elastic_batch(
    word: object, batch_size: int, scaling_config: ScalingConfig, config: TensorflowConfig, strategy: str
) -> None:
    """Raises ConfigError if a batch that follows the number of workers has no meaning for a run."""
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
    """Raises ConfigError unless the learning rate of a model that was tried can follow the number of workers."""
    if not same_run.has_one_rate(identity):
        raise ConfigError(
            'elastic_batch="scale" multiplies the learning rate, of one optimizer that has a number for it',
            "a schedule, which counts steps whatever their rows, or several optimizers",
            "Set the rate by epochs in a callback, as keras.callbacks.LearningRateScheduler does with schedule(epoch, "
            'rate) from the rate that it is given, or use elastic_batch="keep"',
        )


def check_servers(strategy: str, num_ps: int, scaling_config: ScalingConfig) -> None:
    """Raises ConfigError if parameter servers are asked for without their strategy, or the other way round."""
    validation.check_num_ps(strategy, num_ps)
    if strategy == "parameter_server" and not isinstance(scaling_config.num_workers, int):
        raise ConfigError(
            "A cluster with parameter servers has a fixed number of workers", scaling_config.num_workers, "Choose one"
        )
    if strategy == "parameter_server" and isinstance(scaling_config.label_selector, list):
        raise ConfigError(
            "A cluster with parameter servers has one label selector for all its processes",
            f"a list of {len(scaling_config.label_selector)}",
            "Use ScalingConfig(label_selector={...})",
        )


def every(given: object, config: TensorflowConfig) -> Every:
    """What `checkpoint_every` stands for.

    Raises:
        ConfigError: it is nonsense, or means nothing for such a training.
    """
    found = checkpoint_every.parse(given)
    if config.sync_every > 1 and found.seconds is not None:
        raise ConfigError(
            "With sync_every workers are averaged for a checkpoint, which must lie at the same steps in each run",
            f"checkpoint_every={given!r} with sync_every={config.sync_every}",
            'Use a number of steps, such as checkpoint_every="1000 steps"',
        )
    return Every() if found.auto and config.sync_every > 1 else found


def memory_steps(given: object, strategy: str) -> int | None:
    """What `memory_every` stands for.

    Raises:
        ConfigError: it is nonsense, or means nothing for such a training.
    """
    found = checkpoint_every.steps(given)
    if found is not None and strategy == "tpu":
        raise ConfigError(
            "memory_every needs workers each of which holds the whole model",
            f"memory_every={given!r} with strategy={strategy!r}",
            "Use checkpoint_every",
        )
    return found


def servers(num_ps: int, scaling_config: ScalingConfig, environment: dict) -> tuple[ScalingConfig, ServerSpec | None]:
    """What Ray Train runs, and the servers beside it: with parameter servers, Ray Train has the coordinator alone."""
    if not num_ps:
        return scaling_config, None
    each = dict(resources_per_worker(scaling_config))
    plan = ServerSpec(
        num_workers=scaling_config.num_workers, num_ps=num_ps, worker_resources=each, environment=environment
    )
    coordinator = ScalingConfig(
        num_workers=1,
        resources_per_worker={"CPU": each.get("CPU", 1)},
        placement_strategy=scaling_config.placement_strategy,
        label_selector=scaling_config.label_selector,
    )
    return coordinator, plan


def asked_keras_2(config: TensorflowConfig, run_config: RunConfig | None) -> str | None:
    """What asks for Keras 2 in the workers: `legacy_keras.asked`, of all environments that they may have."""
    worker = (run_config.worker_runtime_env if run_config else None) or {}
    job = ray.get_runtime_context().runtime_env if ray.is_initialized() else {}
    return legacy_keras.asked(config.legacy_keras, *(dict(env.get("env_vars") or {}) for env in (worker, job)))


def devices(scaling_config: ScalingConfig) -> int:
    """How many devices a worker computes on, at least 1."""
    return max(1, int(resources_per_worker(scaling_config).get("GPU", 0)))


def check_spares(config: TensorflowConfig, scaling_config: ScalingConfig, run_config, strategy: str) -> None:
    """Raises ConfigError if a KerasTrainer is to have spares, and none of its workers could be replaced by one."""
    if not config.spares:
        return
    workers, most = scaling_config.num_workers, most_workers(scaling_config)
    each = resources_per_worker(scaling_config)
    if not survives_failures(run_config):
        received, fix = "no failure allowed", "Allow some: RunConfig(failure_config=FailureConfig(max_failures=...))"
    elif most <= config.spares:
        received, fix = f"num_workers={workers}", "Use fewer spares than workers, of which one must live"
    elif strategy not in ("auto", "multi_worker_mirrored"):
        received, fix = f"strategy={strategy!r}", 'Leave spares out, or use strategy="auto"'
    elif each.get("GPU") or each.get("TPU") or scaling_config.use_tpu:
        received, fix = "workers with GPUs or TPUs, which all restart", "Leave spares out"
    else:
        return
    raise ConfigError(
        "spares replace a lost worker, where it can be replaced in place",
        f"spares={config.spares} with {received}",
        fix,
    )


def survives_failures(run_config) -> bool:
    """Whether a run goes on after a worker's failure."""
    failures = run_config.failure_config
    return failures is not None and failures.max_failures != 0
