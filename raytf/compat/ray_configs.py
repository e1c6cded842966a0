"""Private fields of Ray Train's configs. Does not import Ray Train: configs are arguments."""

from __future__ import annotations

from typing import NamedTuple

from raytf.compat.versions import uses_private


@uses_private("ray.train.v2.api.config:ScalingConfig._resources_per_worker_not_none")
def resources_per_worker(scaling_config) -> dict[str, float]:
    """Returns a worker's resources with Ray's defaults; the public field contains the user's value, or None."""
    return scaling_config._resources_per_worker_not_none


@uses_private("ray.train.v2.api.config:ScalingConfig._label_selector_per_worker")
def label_selectors(scaling_config, workers: int) -> list[dict] | None:
    """Returns a label selector for each worker; the public field may be one for all."""
    return scaling_config._label_selector_per_worker(workers)


@uses_private("ray.train._internal.data_config:DataConfig._datasets_to_split")
def datasets_to_split(data_config):
    """Returns which datasets a DataConfig splits, "all" or names: it is an argument without a public field."""
    return data_config._datasets_to_split


@uses_private(
    "ray.train._internal.data_config:DataConfig._get_user_execution_options",
    "ray.train._internal.data_config:DataConfig._resolve_execution_options",
)
def with_options(dataset, data_config, name: str):
    """Returns a copy of a dataset with its execution options in a DataConfig, or itself if the user set none."""
    if data_config._get_user_execution_options(name) is None:
        return dataset
    dataset = dataset.copy(dataset)
    dataset.context.execution_options = data_config._resolve_execution_options(name)
    return dataset


class Preemption(NamedTuple):
    """Options of a FailureConfig for drained nodes: how many are no failures, and the others' time.

    Args:
        limit: `max_preemption_failures`.
        relaxed: `relax_collectives_on_preemption`.
        seconds: `preemption_grace_s`.
    """

    limit: int
    relaxed: bool
    seconds: float


def of_preemption(failure_config) -> Preemption:
    """Returns these options, which Ray has since 2.58; before it none is public."""
    return Preemption(
        getattr(failure_config, "max_preemption_failures", -1),
        getattr(failure_config, "relax_collectives_on_preemption", False),
        getattr(failure_config, "preemption_grace_s", 0.0),
    )
