"""Pure arithmetic of a cluster: addresses and roles to TF_CONFIG, global batch to per-replica batch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raytf.errors import ConfigError

ROLES = ("chief", "worker", "ps", "evaluator")


def tf_config(cluster: Mapping[str, Sequence[str]], role: str, index: int) -> str:
    """Returns the JSON text that TensorFlow reads from the environment variable TF_CONFIG.

    Args:
        cluster: "host:port" addresses of the tasks by role, in the order of their index.
        role: Role of this task: "chief", "worker", "ps" or "evaluator".
        index: Index of this task within its role, from 0. An evaluator is outside the cluster, so its index is not
            checked.

    Raises:
        ConfigError: An unknown role, a duplicate address, or a task that is not in the cluster.

    The guide "Distributed training with TensorFlow", section TF_CONFIG, describes the format.
    """
    for name in (*cluster, role):
        if name not in ROLES:
            raise ConfigError(f"A role must be one of {', '.join(ROLES)}", repr(name), "Rename the role")
    addresses = [address for tasks in cluster.values() for address in tasks]
    if len(set(addresses)) != len(addresses):
        raise ConfigError("Every task needs an address of its own", addresses, "Give each task a free port")
    if role != "evaluator" and not 0 <= index < len(cluster.get(role, ())):
        raise ConfigError(
            "A task must be in the cluster",
            f"{role} {index} of {len(cluster.get(role, ()))}",
            "Number the tasks of a role from 0",
        )
    return json.dumps({"cluster": {k: list(v) for k, v in cluster.items()}, "task": {"type": role, "index": index}})


def is_chief(cluster: Mapping[str, Sequence[str]], role: str, index: int) -> bool:
    """Returns whether a task writes checkpoints and logs: the chief, or worker 0 without one."""
    return role == "chief" if cluster.get("chief") else (role == "worker" and index == 0)


def per_replica_batch(global_batch: int, replicas: int) -> tuple[int, ...]:
    """Returns the rows of a full global batch for each replica, largest shares first.

    Args:
        global_batch: Rows of one training step over all replicas, at least `replicas`.
        replicas: Number of model replicas that train in step, at least 1.

    Returns:
        `replicas` positive row counts that differ by at most 1 and add up to `global_batch`.

    Raises:
        ConfigError: A replica would have no row.
    """
    if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < replicas:
        raise ConfigError(
            "batch_size is the global batch and must be an integer with at least one row for each replica",
            f"batch_size={global_batch!r} with {replicas} replica(s)",
            f"Use a batch_size of {replicas} or more, or fewer workers",
        )
    return tuple(stop - start for start, stop in (shard_of_rank(global_batch, replicas, i) for i in range(replicas)))


def shard_of_rank(rows: int, parts: int, index: int) -> tuple[int, int]:
    """Returns the half-open range of part `index` of `parts` within `rows` consecutive rows.

    Parts are contiguous and in order, and their sizes differ by at most 1; a part may be empty.
    """
    base, extra = divmod(rows, parts)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


@dataclass(frozen=True)
class Shard:
    """One of `count` equal parts: a worker of a run, or a rank of a group.

    Args:
        index: Index of the part, from 0.
        count: Number of parts, at least 1.
    """

    index: int = 0
    count: int = 1

    def bounds(self, rows: int) -> tuple[int, int]:
        """Returns the half-open range of this part within `rows` rows, see `shard_of_rank`."""
        return shard_of_rank(rows, self.count, self.index)


STRATEGIES = (
    "auto",
    "one_device",
    "mirrored",
    "multi_worker_mirrored",
    "central_storage",
    "parameter_server",
    "tpu",
)


def pick_strategy(name: str, *, workers: int, devices: int, tpu: bool) -> str:
    """Returns the strategy of a run: "auto" chooses; any other name is used or rejected.

    Args:
        name: One of `STRATEGIES`.
        workers: Number of workers of the run, at least 1.
        devices: GPUs of each worker.
        tpu: Whether the workers hold TPUs.

    Returns:
        A name of `STRATEGIES` other than "auto", or "default" for TensorFlow's strategy of a single device.

    Raises:
        ConfigError: An unknown name, or one that does not fit the workers.
    """
    if name not in STRATEGIES:
        raise ConfigError(f"strategy must be one of {', '.join(STRATEGIES)}", repr(name), "Choose one of these")
    if name == "auto":
        if tpu:
            return "tpu"
        return "multi_worker_mirrored" if workers > 1 else "mirrored" if devices > 1 else "default"
    if name in ("one_device", "mirrored", "central_storage") and workers > 1:
        raise ConfigError(
            f"strategy {name!r} trains in one process",
            f"{workers} workers",
            "Use num_workers=1, or strategy='multi_worker_mirrored'",
        )
    if name == "tpu" and not tpu:
        raise ConfigError(
            "strategy 'tpu' needs workers that hold TPUs",
            "workers without TPUs",
            "Ask for them with ScalingConfig(use_tpu=True, topology=...)",
        )
    return name
