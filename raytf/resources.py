"""What a cluster can hold, against what a run asks for. Driver side."""

from __future__ import annotations

import ray

from raytf.errors import ResourceError


def fits(nodes: list[dict[str, float]], per_worker: dict[str, float]) -> int:
    """How many workers the nodes can hold at once if they were empty; pure.

    Args:
        nodes: total resources of each node.
        per_worker: resources of one worker, each more than 0.
    """
    return sum(int(min((node.get(name, 0) + 1e-9) // amount for name, amount in per_worker.items())) for node in nodes)


def only_cpus(scaling_config) -> bool:
    """Whether a worker asks for nothing but CPUs, wherever they are."""
    asked = {name for name, amount in scaling_config._resources_per_worker_not_none.items() if amount > 0}
    return asked <= {"CPU"} and not scaling_config.use_tpu and not scaling_config.label_selector


def likely_nodes(scaling_config) -> list[str]:
    """The node of each worker if Ray places them now; shorter where there is no room for all."""
    per_worker = {k: v for k, v in scaling_config._resources_per_worker_not_none.items() if v > 0}
    workers = scaling_config.num_workers
    workers = workers if isinstance(workers, int) else workers[0]
    nodes = ray._private.state.available_resources_per_node()
    return placed(nodes, per_worker, workers, spread="SPREAD" in scaling_config.placement_strategy)


def placed(nodes: dict[str, dict[str, float]], per_worker: dict[str, float], workers: int, spread: bool) -> list[str]:
    """Nodes for up to `workers` workers; pure.

    Args:
        nodes: free resources by node.
        per_worker: resources of one worker, each more than 0.
        workers: how many.
        spread: in turn over the nodes, instead of filling the roomiest first.
    """
    room = {name: fits([free], per_worker) if per_worker else workers for name, free in nodes.items()}
    order = sorted(room, key=lambda name: -room[name])
    if not spread:
        return [name for name in order for _ in range(room[name])][:workers]
    rounds = range(max(room.values(), default=0))
    return [name for turn in rounds for name in order if turn < room[name]][:workers]


def can_grow() -> bool:
    """Whether an autoscaler may add nodes."""
    return bool(ray._private.state.state.get_max_resources_from_cluster_config())


def check_cluster(scaling_config) -> None:
    """Raises ResourceError if the cluster can never hold the workers; an autoscaler may still add nodes.

    Args:
        scaling_config: a `ray.train.ScalingConfig`.
    """
    workers = scaling_config.num_workers
    wanted = workers if isinstance(workers, int) else workers[0]
    per_worker = {k: v for k, v in scaling_config._resources_per_worker_not_none.items() if v > 0}
    if not per_worker or wanted < 1:
        return
    if can_grow():
        return
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    holds = fits(nodes, per_worker)
    if holds < wanted:
        need = ", ".join(f"{v:g} {k}" for k, v in per_worker.items())
        total = ray.cluster_resources()
        has = ", ".join(f"{total.get(k, 0):g} {k}" for k in per_worker)
        raise ResourceError(
            f"The cluster must be able to hold every worker ({need} each)",
            f"num_workers={wanted} on {len(nodes)} node(s) with {has}, room for {holds}",
            "Use fewer workers, ask for less in resources_per_worker, or add nodes",
        )
