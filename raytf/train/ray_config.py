"""Refuses options of Ray's classes that raytf does not support, by name and with an alternative. Driver side.

`docs/reference/ray-compatibility.md` lists all options, and where they work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ray.train import DataConfig, FailureConfig, RunConfig, ScalingConfig, UserCallback, ValidationConfig

from raytf import validation
from raytf.compat import legacy_keras, ray_configs
from raytf.compat.ray_train import RAY_TRAIN_CALLBACKS_ENV_VAR
from raytf.errors import ConfigError


def apply_data_config(datasets: Mapping[str, Any], dataset_config: DataConfig | None) -> dict[str, Any]:
    """Returns the datasets with the execution options of a `DataConfig`; leaves the caller's datasets unchanged.

    Raises:
        ConfigError: It sets how rows are split, which the row order of a KerasTrainer does not allow.
    """
    if dataset_config is None:
        return dict(datasets)
    if type(dataset_config) is not DataConfig:
        raise ConfigError(
            "dataset_config of a KerasTrainer must be a ray.train.DataConfig, as workers share each batch",
            f"a {type(dataset_config).__name__}, which may cut datasets in its own way",
            "Use a TensorflowTrainer, which obeys it, or prepare the datasets before",
        )
    split = ray_configs.datasets_to_split(dataset_config)
    if split != "all" and set(split) != set(datasets):
        raise ConfigError(
            "A KerasTrainer shares the rows of each batch among the workers, validation too",
            f"DataConfig(datasets_to_split={split!r})",
            "Leave datasets_to_split out: metrics are those of all rows of a dataset either way",
        )
    return {name: ray_configs.with_options(dataset, dataset_config, name) for name, dataset in datasets.items()}


def check_validation(validation_config: ValidationConfig | None, evaluator: bool) -> None:
    """Raises ConfigError unless a KerasTrainer can call Ray's validation for each checkpoint."""
    if validation_config is None:
        return
    if not isinstance(validation_config, ValidationConfig):
        raise ConfigError(
            "validation_config must be a ray.train.ValidationConfig",
            repr(validation_config),
            "Pass ray.train.ValidationConfig(fn), where fn(checkpoint) gives a dict of metrics",
        )
    if evaluator:
        raise ConfigError(
            "Checkpoints are evaluated by evaluator=True or by a validation_config",
            "both",
            "Leave one of them out",
        )


def check_kinds(scaling_config, run_config) -> None:
    """Raises ConfigError unless both are None or configs of Ray Train."""
    example = "Use ray.train.ScalingConfig(num_workers=2)"
    validation.check_kind("scaling_config", scaling_config, ScalingConfig, "a ray.train.ScalingConfig", example)
    for name, amount in (getattr(scaling_config, "resources_per_worker", None) or {}).items():
        if not validation.is_number(amount) or amount < 0:
            rule, fix = "resources_per_worker must be numbers of at least 0, by name", 'For example {"CPU": 2}'
            raise ConfigError(rule, f"{name}={amount!r}", fix)
    has_workers = scaling_config is not None and scaling_config.num_workers != 0
    if has_workers and not ray_configs.resources_per_worker(scaling_config):
        rule, fix = "A worker must request a resource of the cluster", 'Use a part of a CPU, as {"CPU": 0.1}'
        raise ConfigError(rule, f"resources_per_worker={scaling_config.resources_per_worker!r}", fix)
    check_run_config(run_config, RunConfig, "ray.train.RunConfig")
    environment = getattr(run_config, "worker_runtime_env", None)
    validation.check_mapping("worker_runtime_env", environment, '{"env_vars": {"NAME": "value"}}')


def check_run_config(run_config, kind: type, name: str) -> None:
    """Raises ConfigError unless a RunConfig is None, or one of `kind` with a storage path that is a path.

    Args:
        run_config: The user's value.
        kind: The RunConfig of Ray Train or of Ray Tune, which differ.
        name: Full name of `kind`.
    """
    validation.check_kind("run_config", run_config, kind, f"a {name}", f"Use {name}(name=..., storage_path=...)")
    validation.check_path("storage_path", getattr(run_config, "storage_path", None))


def check_local(
    scaling_config, run_config, tensorflow_config, num_ps: int, validation_config, evaluator: bool = False
) -> None:
    """Raises ConfigError for options of Ray Train's controller, and of other processes if num_workers=0."""
    _check_controller(run_config)
    if scaling_config.num_workers != 0:
        return
    if getattr(tensorflow_config, "legacy_keras", False) and not legacy_keras.is_enabled():
        raise ConfigError(
            "With num_workers=0 the train loop has the Keras of this process",
            "TensorflowConfig(legacy_keras=True)",
            f"Set {legacy_keras.VARIABLE}=1 before Python starts",
        )
    for name in ("intra_op_threads", "inter_op_threads"):
        if getattr(tensorflow_config, name, None) is not None:
            raise ConfigError(
                "With num_workers=0 TensorFlow has the threads that this process gives it",
                f"TensorflowConfig({name}={getattr(tensorflow_config, name)})",
                f"Call tf.config.threading.set_{name.replace('_op_threads', '_op_parallelism_threads')}(...) first",
            )
    options = {
        "num_ps": num_ps,
        "evaluator=True": evaluator,
        "validation_config": validation_config is not None,
        "ScalingConfig(use_tpu=True)": scaling_config.use_tpu,
    }
    unsupported = [name for name, value in options.items() if value]
    if unsupported:
        raise ConfigError(
            "With num_workers=0 the training runs in this process, without workers, servers and Ray Train",
            f"{', '.join(unsupported)} with num_workers=0",
            "Use ScalingConfig(num_workers=1), or leave it out",
        )


def _check_controller(run_config) -> None:
    """Raises ConfigError for options of Ray Train's own controller, which does not run."""
    callbacks = [type(c).__name__ for c in getattr(run_config, "callbacks", ()) if not isinstance(c, UserCallback)]
    if os.environ.get(RAY_TRAIN_CALLBACKS_ENV_VAR):
        callbacks.append(f"{RAY_TRAIN_CALLBACKS_ENV_VAR}={os.environ[RAY_TRAIN_CALLBACKS_ENV_VAR]}")
    if callbacks:
        raise ConfigError(
            "There is no controller of Ray Train, whose internal callbacks could run",
            ", ".join(callbacks),
            "Use a ray.train.UserCallback in RunConfig(callbacks=[...])",
        )


def check_sweep(trainer, space: Mapping[str, Any] | None, own_run_config: bool) -> None:
    """Raises ConfigError for options of a trainer that the trials of its sweep, which Ray Tune runs, do not support.

    Args:
        trainer: A raytf trainer.
        space: `param_space` of the sweep, or None.
        own_run_config: Whether the sweep has a `ray.tune.RunConfig`, which sets the reaction to failures.
    """
    run, scaling = trainer.run_config, trainer.scaling_config
    if trainer.validation_config is not None:
        raise _of_train("validation_config", "Report what it computes as metrics from within the training")
    if run.callbacks:
        names = ", ".join(type(callback).__name__ for callback in run.callbacks)
        raise _of_train(
            f"RunConfig(callbacks=[{names}])",
            "Pass callbacks of Ray Tune: raytf.sweep(..., run_config=ray.tune.RunConfig(callbacks=[...]))",
        )
    if os.environ.get(RAY_TRAIN_CALLBACKS_ENV_VAR):
        raise _of_train(
            f"{RAY_TRAIN_CALLBACKS_ENV_VAR}={os.environ[RAY_TRAIN_CALLBACKS_ENV_VAR]}",
            "Unset it for the sweep, and pass callbacks of Ray Tune in run_config=ray.tune.RunConfig(callbacks=[...])",
        )
    if not own_run_config:
        _check_failures(run.failure_config)
    if getattr(trainer, "tensorflow_config", None) is not None and trainer.tensorflow_config.spares:
        raise ConfigError(
            "A worker of a trial that is lost is replaced by a process that starts then",
            f"TensorflowConfig(spares={trainer.tensorflow_config.spares}) in a sweep",
            "Leave spares out",
        )
    if scaling.elasticity_enabled and "num_workers" not in (space or {}):
        raise ConfigError(
            "The trials of a sweep have a fixed number of workers",
            f"ScalingConfig(num_workers={scaling.num_workers})",
            "Choose one number, or put num_workers into param_space",
        )
    if isinstance(scaling.label_selector, list) and "num_workers" in (space or {}):
        raise ConfigError(
            "A list of label selectors belongs to one number of workers",
            "num_workers in param_space, with a list as ScalingConfig(label_selector=...)",
            "Use one selector for all workers",
        )
    if scaling.topology:
        raise ConfigError(
            "The trials of a sweep reserve no slices of TPU hosts",
            f"ScalingConfig(topology={scaling.topology!r})",
            "Sweep on one host (num_workers=1, no topology), or run the configs one after another with fit()",
        )


def _check_failures(failure_config: FailureConfig) -> None:
    usual = FailureConfig()
    names = ("controller_failure_limit", "max_preemption_failures", "relax_collectives_on_preemption")
    for name in (*names, "preemption_grace_s"):
        value = getattr(failure_config, name, None)  # these attributes depend on the version of Ray
        if value != getattr(usual, name, None):
            raise _of_train(
                f"FailureConfig({name}={value!r})",
                "Leave it out: a trial whose node goes is restarted as FailureConfig(max_failures=...) allows",
            )


def _of_train(received: str, fix: str) -> ConfigError:
    return ConfigError("The trials of a sweep are run by Ray Tune, not by Ray Train", received, fix)
