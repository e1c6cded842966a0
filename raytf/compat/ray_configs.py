"""What Ray Train's configs hold and do not show. Imports no Ray Train: configs are given."""

from __future__ import annotations

from raytf.compat.versions import uses


@uses("ray.train.v2.api.config:ScalingConfig._resources_per_worker_not_none")
def resources_per_worker(scaling_config) -> dict[str, float]:
    """Resources of a worker with Ray's defaults in; the public field holds what the user said, or None."""
    return scaling_config._resources_per_worker_not_none


@uses("ray.train.v2.api.config:ScalingConfig._label_selector_per_worker")
def label_selectors(scaling_config, workers: int) -> list[dict] | None:
    """A label selector for each worker; the public field may be one for all."""
    return scaling_config._label_selector_per_worker(workers)


@uses("ray.train._internal.data_config:DataConfig._datasets_to_split")
def datasets_to_split(data_config):
    """What a DataConfig was told to split, "all" or names: it is an argument without a public field."""
    return data_config._datasets_to_split


@uses(
    "ray.train._internal.data_config:DataConfig._get_user_execution_options",
    "ray.train._internal.data_config:DataConfig._resolve_execution_options",
)
def execution_options(data_config, name: str):
    """How a DataConfig says that a dataset is to be executed, or None where the user said nothing; see above."""
    if data_config._get_user_execution_options(name) is None:
        return None
    return data_config._resolve_execution_options(name)
