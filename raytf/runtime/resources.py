"""Capacity of a cluster, compared with the resources that a run requests. Driver side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raytf import logs, timeouts
from raytf.compat import ray_configs, ray_core
from raytf.compat.ray_core import gcs_pb2
from raytf.errors import ResourceError
from raytf.runtime import networks, ports
from raytf.runtime.answers import collect_answers

logger = logs.get_logger(__name__)


def count_fitting(nodes: list[dict[str, float]], per_worker: dict[str, float]) -> int:
    """Returns how many workers the empty nodes can hold at once; pure.

    Args:
        nodes: Total resources of each node.
        per_worker: Resources of one worker, each more than 0.
    """
    return sum(int(min((node.get(name, 0) + 1e-9) // amount for name, amount in per_worker.items())) for node in nodes)


def resources_per_worker(scaling_config) -> dict[str, float]:
    """Returns the resources that a worker requests, each more than 0."""
    return {name: amount for name, amount in ray_configs.resources_per_worker(scaling_config).items() if amount > 0}


def fewest_workers(scaling_config) -> int:
    """Returns the number of workers, or the smallest if it is elastic."""
    workers = scaling_config.num_workers
    return workers if isinstance(workers, int) else workers[0]


def most_workers(scaling_config) -> int:
    """Returns the number of workers, or the largest if it is elastic."""
    workers = scaling_config.num_workers
    return workers if isinstance(workers, int) else workers[1]


def placed_actor(kind, group, bundle: int, amounts: dict[str, float], *, arguments: tuple = (), **options):
    """Starts an actor of class `kind` in a bundle of a placement group, with resources by name; returns its handle."""
    scheduling = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    custom = {name: amount for name, amount in amounts.items() if name not in ("CPU", "GPU")}
    options |= {"num_cpus": amounts.get("CPU", 0), "num_gpus": amounts.get("GPU", 0), "resources": custom}
    return ray.remote(kind).options(scheduling_strategy=scheduling, **options).remote(*arguments)


def format_resources(amounts: dict[str, float]) -> str:
    """Returns resources as text for a message."""
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def only_cpus(scaling_config) -> bool:
    """Returns whether a worker requests only CPUs, on any node."""
    return (
        set(resources_per_worker(scaling_config)) <= {"CPU"}
        and not scaling_config.use_tpu
        and not scaling_config.label_selector
    )


def living(suspects: Collection[str]) -> set[str]:
    """Returns the ids of nodes that live and are not drained; the suspects must answer, see `is_silent_about`."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return alive - ray_core.draining().keys() - is_silent_about(suspects)


def is_silent_about(nodes: Collection[str]) -> set[str]:
    """Returns those of some nodes whose raylets refuse connections now: Ray marks a node dead only after 15 s.

    Args:
        nodes: Ids; each node that vanished silently takes a second.
    """
    return {
        node["NodeID"]
        for node in (ray.nodes() if nodes else ())
        if node["NodeID"] in nodes
        and node["Alive"]
        and not ports.is_listening(ports.join_address(node["NodeManagerAddress"], node["NodeManagerPort"]))
    }


def interfaces(scaling_config, network: str | None) -> dict[str, tuple[str | None, str]]:
    """Returns (interface, address) on which workers will listen, by the address in Ray of each node that fits one.

    Args:
        scaling_config: A `ray.train.ScalingConfig`.
        network: As `TensorflowConfig.network`.

    Raises:
        ConfigError: A node is not in the network.
    """
    needed = resources_per_worker(scaling_config)
    nodes = {
        node["NodeManagerAddress"]: node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and (not needed or count_fitting([node["Resources"]], needed))
    }
    ask, seconds = ray.remote(num_cpus=0)(networks.interfaces), timeouts.get().process_start
    strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes.values()]
    refs = [ask.options(scheduling_strategy=strategy).remote() for strategy in strategies]
    interfaces_of = collect_answers(refs, seconds, "its network interfaces", names=list(nodes))
    return networks.worker_addresses(dict(zip(nodes, interfaces_of, strict=True)), network)


def likely_nodes(scaling_config, workers: int) -> list[str]:
    """Returns the node of each of `workers` workers if Ray places them now; fewer without room for all."""
    drained = ray_core.draining()
    nodes = {node: free for node, free in ray_core.free_by_node().items() if node not in drained}
    return has_room_on(
        nodes, resources_per_worker(scaling_config), workers, spread="SPREAD" in scaling_config.placement_strategy
    )


def has_room_on(
    nodes: dict[str, dict[str, float]], per_worker: dict[str, float], workers: int, spread: bool
) -> list[str]:
    """Returns nodes for up to `workers` workers; pure.

    Args:
        nodes: Free resources by node.
        per_worker: Resources of one worker, each more than 0.
        workers: Number of workers.
        spread: Whether to use the nodes in turn, instead of filling the one with most room first.
    """
    room = {name: count_fitting([free], per_worker) if per_worker else workers for name, free in nodes.items()}
    order = sorted(room, key=lambda name: -room[name])
    if not spread:
        return [name for name in order for _ in range(room[name])][:workers]
    rounds = range(max(room.values(), default=0))
    return [name for turn in rounds for name in order if turn < room[name]][:workers]


def may_grow() -> bool:
    """Returns whether nodes may still come: those of an autoscaler, or pods of KubeRay.

    KubeRay and `ray up` start each node with the name of its group, which Ray makes a label of the node.
    """
    groups = (node["Labels"].get(ray_core.RAY_NODE_GROUP_KEY) for node in ray.nodes() if node["Alive"])
    return any(groups) or bool(ray_core.most_resources())


def free_without(nodes: list[dict[str, float]], bundles: list[dict[str, float]]) -> list[dict[str, float]] | None:
    """Returns the remaining resources of nodes that hold bundles of different sizes; None if they cannot.

    The largest are placed first.
    """
    remaining = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda b: (b.get("GPU", 0), sum(b.values())), reverse=True):
        node = next((n for n in remaining if all(n.get(k, 0) + 1e-9 >= v for k, v in bundle.items())), None)
        if node is None:
            return None
        for name, amount in bundle.items():
            node[name] = node.get(name, 0) - amount
    return remaining


def capacity(scaling_config) -> float:
    """Returns how many workers the cluster can hold; infinite if it may grow, or if a worker requests nothing."""
    amounts = resources_per_worker(scaling_config)
    if not amounts or may_grow():
        return math.inf
    return count_fitting([node["Resources"] for node in ray.nodes() if node["Alive"]], amounts)


def held_by_others() -> str:
    """Returns the holders of the cluster's CPUs, as a clause."""
    total, free = (amounts.get("CPU", 0) for amounts in (ray.cluster_resources(), ray.available_resources()))
    if free >= 1:
        return f"{free:g} of {total:g} CPUs are free"
    own_job = ray.get_runtime_context().get_job_id()
    owners: dict[str, float] = {}
    for group in ray_core.placement_groups():
        if group.state == gcs_pb2.PlacementGroupTableData.CREATED:
            job = _job(group.creator_job_id, own_job)
            amount = sum(bundle.unit_resources.get("CPU", 0) for bundle in group.bundles)
            owners[f"worker groups of {job}"] = owners.get(f"worker groups of {job}", 0) + amount
    for actor in ray_core.living_actors():
        amount = actor.required_resources.get("CPU", 0)
        if amount and not actor.placement_group_id:
            name = f"{actor.class_name.split('.')[-1]} of {_job(actor.job_id, own_job)}"
            owners[name] = owners.get(name, 0) + amount
    unknown = total - free - sum(owners.values())
    if unknown > 0.5:
        owners["tasks"] = unknown
    shown = ", ".join(f"{amount:g} by {name}" for name, amount in owners.items() if amount)
    return f"{total - free:g} of {total:g} CPUs are held: {shown}"


def describe_sharing(scaling_config, bundles: list[dict[str, float]]):
    """Returns the ScalingConfig, with less CPU per worker if a run's processes must share this machine's cores.

    They must in a Ray that this process started without a number of CPUs, as `ray.data` does. Any other Ray keeps its
    count, and reports if that is too small.

    Args:
        scaling_config: A `ray.train.ScalingConfig`.
        bundles: Resources of each process of the run.
    """
    if not ray_core.has_started_ray() or ray_core.has_given_cpus():
        return scaling_config
    wanted, cores = total_resources(bundles).get("CPU", 0), ray.cluster_resources().get("CPU", 0)
    amounts = dict(ray_configs.resources_per_worker(scaling_config))
    if wanted <= cores or not amounts.get("CPU") or not isinstance(scaling_config.num_workers, int):
        return scaling_config
    logger.info(f"{len(bundles)} processes share the {cores:g} core(s) of this machine")
    amounts["CPU"] = math.floor(amounts["CPU"] * cores / wanted * 1000) / 1000
    return dataclasses.replace(scaling_config, resources_per_worker=amounts)


def suggest_fix(process_resources: dict[str, float], count: int) -> str:
    """Returns the user's options if the cluster cannot hold `count` processes, by the resources that it lacks.

    Args:
        process_resources: Resources of a process, each more than 0.
        count: Number of processes.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return suggest_workers(nodes, process_resources, count, has_started_ray=ray_core.has_started_ray())


def suggest_workers(
    nodes: list[dict[str, float]], process_resources: dict[str, float], count: int, has_started_ray: bool = False
) -> str:
    """Returns the same as `suggest_fix`; pure.

    Args:
        nodes: Total resources of each node.
        process_resources, count: Resources and number of the processes.
        has_started_ray: Whether the driver has started Ray on this machine.
    """
    short = [
        name for name, amount in process_resources.items() if count_fitting(nodes, {name: amount}) < count
    ] or list(process_resources)
    ways = ["Use fewer workers"] if count_fitting(nodes, process_resources) else []
    if "GPU" in short:
        has_gpus = any(node.get("GPU") for node in nodes)
        fewer, no_gpus = (
            "ask for fewer GPUs of each",
            "train on CPUs (--gpus-per-worker 0, or ScalingConfig without use_gpu)",
        )
        ways.append(fewer if has_gpus else no_gpus)
    if "CPU" in short:
        ways.append("ask for less of each (--cpus-per-worker 0.5, or ScalingConfig(resources_per_worker={'CPU': 0.5}))")
        if has_started_ray:
            total = math.ceil(process_resources["CPU"] * count)
            ways.append(f"start Ray with ray.init(num_cpus={total}) before the data is named")
    ways += [f"ask for less {name}" for name in short if name not in ("CPU", "GPU")]
    lacking = [name for name in short if not any(node.get(name) for node in nodes)]
    ways.append("add nodes" + (f" with {' and '.join(lacking)}" if lacking else ""))
    text = ", ".join(ways[:-1]) + (" or " if len(ways) == 2 else ", or " if ways[:-1] else "") + ways[-1]
    return text[0].upper() + text[1:]


def _job(binary: bytes, own_job: str) -> str:
    return "this job" if binary.hex() == own_job else f"job {binary.hex()}"


def check_cluster(scaling_config) -> None:
    """Raises ResourceError if the cluster can never hold the workers, see `may_grow`.

    Args:
        scaling_config: A `ray.train.ScalingConfig`.
    """
    wanted = fewest_workers(scaling_config)
    holds = capacity(scaling_config)
    if holds < wanted:
        amounts, total = resources_per_worker(scaling_config), ray.cluster_resources()
        need, has = format_resources(amounts), format_resources({name: total.get(name, 0) for name in amounts})
        nodes = [node for node in ray.nodes() if node["Alive"]]
        raise ResourceError(
            f"The cluster must be able to hold every worker ({need} each)",
            f"num_workers={wanted} on {len(nodes)} node(s) with {has}, room for {holds}",
            suggest_fix(amounts, wanted),
        )


def check_servers(scaling_config, plan, extra: dict[str, float] | None = None) -> None:
    """Raises ResourceError if the cluster can never hold a run with its tasks in addition to its workers.

    Args:
        scaling_config: ScalingConfig of the workers.
        plan: `servers.ServerSpec`, or None.
        extra: Resources of one more task.
    """
    if plan is not None or extra:
        check_bundles(run_bundles(scaling_config, plan, extra))


def run_bundles(scaling_config, plan=None, extra: dict[str, float] | None = None) -> list[dict[str, float]]:
    """Returns the resources of each process of a run; see `check_servers`."""
    result = [resources_per_worker(scaling_config)] * fewest_workers(scaling_config)
    result += [plan.bundle(task) for task in plan.tasks()] if plan else []
    return [*result, *([extra] if extra else [])]


def total_resources(bundles: list[dict[str, float]]) -> dict[str, float]:
    """Returns the total resources of all bundles."""
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    return {name: sum(bundle.get(name, 0) for bundle in bundles) for name in names}


def _mean(bundles: list[dict[str, float]]) -> dict[str, float]:
    """Returns the mean amount of each resource over the bundles that request it."""
    requests = {name: [bundle[name] for bundle in bundles if bundle.get(name)] for name in total_resources(bundles)}
    return {name: sum(amounts) / len(amounts) for name, amounts in requests.items() if amounts}


def check_bundles(bundles: list[dict[str, float]], waited: float = 0.0) -> None:
    """Raises ResourceError if the cluster can never hold tasks with these resources.

    Args:
        bundles: Resources of each task.
        waited: Seconds for which they have been waited for. A cluster that may grow is given `Timeouts.nodes` to do so.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if free_without(nodes, bundles) is not None:
        return
    grows = may_grow()
    if grows and waited < timeouts.get().nodes:
        return
    wanted, available = total_resources(bundles), ray.cluster_resources()
    clause = f"; no others have come within {waited:.0f} s" if grows else ""
    raise ResourceError(
        f"The cluster must be able to hold {len(bundles)} tasks ({format_resources(wanted)})",
        f"{len(nodes)} node(s) with {format_resources({name: available.get(name, 0) for name in wanted})}{clause}",
        suggest_fix(_mean(bundles), len(bundles)),
    )
