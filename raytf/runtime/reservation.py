"""All resources of a run in the cluster, as one placement group: all at once, or none."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Collection, Mapping

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytf import events
from raytf.compat import ray_core
from raytf.compat.ray_train import DEFAULT_WORKER_GROUP_START_TIMEOUT_S, WORKER_GROUP_START_TIMEOUT_S_ENV_VAR
from raytf.errors import ResourceError
from raytf.events import Kind, RunEvent
from raytf.runtime import resources

# Seconds of a wait before its first report, and between two reports.
_PATIENCE_INTERVAL = 5.0
_AGAIN_INTERVAL = 60.0
# Seconds between two checks: a wait for a group can be interrupted then.
_TICK_INTERVAL = 1.0


def bundle_layout(
    workers: int,
    worker_resources: Mapping[str, float],
    sidecars: Mapping[str, Mapping[str, float]],
    strategy: str,
    nodes: int,
) -> tuple[list[dict[str, float]], dict[str, int]]:
    """Returns (the bundles of a run, the workers' first; the index of each additional task's bundle); pure.

    Args:
        workers: Number of workers, at least 1.
        worker_resources: Resources of a worker.
        sidecars: Resources of the additional tasks, by name.
        strategy: Placement strategy. If it requires a node per bundle, and there are fewer `nodes`, the tasks share the
            workers' bundles.
        nodes: Number of nodes.
    """
    bundles = [dict(worker_resources) for _ in range(workers)]
    if strategy != "STRICT_SPREAD" or workers + len(sidecars) <= nodes:
        bundle_indices = {name: workers + i for i, name in enumerate(sidecars)}
        return bundles + [dict(amounts) for amounts in sidecars.values()], bundle_indices
    bundle_indices = {name: i % workers for i, name in enumerate(sidecars)}
    for name, index in bundle_indices.items():
        for resource, amount in sidecars[name].items():
            bundles[index][resource] = bundles[index].get(resource, 0) + amount
    return bundles, bundle_indices


class Reservation:
    """The placement group of a run. It survives restarts of the workers, with the same size.

    Args:
        sidecar_bundles: Resources of each task in addition to the workers, by its name.
        seconds: Seconds for which the driver waits for it, or None: as long as other work holds the cluster.
        cleaned: Whether to release the group when this process dies and is an actor's, such as a Ray Tune trial. Ray
            itself releases it only when the whole job has ended.

    Attributes:
        group: The placement group, or None.
        bundle_indices: Index of the bundle of each additional task, by name.
    """

    def __init__(
        self, sidecar_bundles: Mapping[str, Mapping[str, float]], seconds: float | None = None, cleaned: bool = False
    ):
        self._sidecar_bundles, self._seconds, self._cleaned = dict(sidecar_bundles), seconds, cleaned
        self._cleaner = None
        self._name, self._number = f"raytf-{uuid.uuid4().hex}", 0
        self.group: PlacementGroup | None = None
        self.bundle_indices: dict[str, int] = {}
        self._bundles: list[dict[str, float]] = []
        self._workers = 0
        self._wait_began: float | None = None
        self._report_at = 0.0

    def ensure(
        self, workers: int, worker_resources: Mapping[str, float], strategy: str, selectors: list | None
    ) -> PlacementGroup:
        """Returns the group for `workers` workers, ready or not: the current one, or a new one that replaces it.

        Args:
            workers: Number of workers, at least 1.
            worker_resources: Resources of a worker.
            strategy: Placement strategy.
            selectors: Node selectors, a dict for each worker, or None; a selector of all workers applies to other
                tasks, too.
        """
        if self.group is not None and self._workers == workers and not self._is_drained():
            return self.group
        self.drop()
        nodes = sum(node["Alive"] for node in ray.nodes())
        self._bundles, self.bundle_indices = bundle_layout(
            workers, worker_resources, self._sidecar_bundles, strategy, nodes
        )
        self._workers, self._number = workers, self._number + 1
        self._start_cleaner()
        selectors = bundle_selectors(selectors, len(self._bundles))
        self.group = placement_group(
            self._bundles, strategy, name=f"{self._name}-{self._number}", bundle_label_selector=selectors
        )
        return self.group

    def _is_drained(self) -> bool:
        """Returns whether a node of the group is draining; False with parameter servers: they stay in their group."""
        draining = ray_core.draining()
        if "ps 0" in self._sidecar_bundles or not draining:
            return False
        return not draining.keys().isdisjoint(placement_group_table(self.group)["bundles_to_node_id"].values())

    def wait(
        self, seconds: float | None = None, cancelled: Callable[[], bool] = lambda: False, patience: float = 0.0
    ) -> bool:
        """Waits until the cluster has reserved the group; reports the wait after a while, and from time to time.

        Args:
            seconds: Timeout in seconds, or None.
            cancelled: Returns whether to give up.
            patience: Seconds of a wait for nodes that the cluster lacks, at least `_AGAIN_INTERVAL`; see also
                `resources.check_bundles`. They count from the first of several calls that time out.

        Raises:
            ResourceError: The cluster has changed so that it can never reserve it.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            current_time = time.monotonic()
            if self._wait_began is None:
                self._wait_began, self._report_at = current_time, current_time + _PATIENCE_INTERVAL
            step = _TICK_INTERVAL if deadline is None else max(0.0, min(_TICK_INTERVAL, deadline - current_time))
            if self.group.wait(step):
                if current_time - self._wait_began >= _PATIENCE_INTERVAL:
                    events.emit(RunEvent(kind=Kind.RESOURCES_GIVEN, seconds=current_time - self._wait_began))
                self._wait_began = None
                return True
            if cancelled() or (deadline is not None and time.monotonic() >= deadline):
                return False
            if current_time >= self._report_at:
                self._report_at = current_time + _AGAIN_INTERVAL
                waited, more = current_time - self._wait_began, self._end()
                if waited >= max(patience, _AGAIN_INTERVAL):  # earlier, a node may be restarting
                    resources.check_bundles(self._bundles, waited)
                events.emit(
                    RunEvent(kind=Kind.RESOURCES_AWAITED, seconds=waited, why=self._describe_missing(), more=more)
                )

    def take(self, workers: int, worker_resources: Mapping[str, float], strategy: str, selectors: list | None) -> None:
        """Calls `ensure` and `wait` on the driver; a wait that fails releases the group.

        Raises:
            ResourceError: The cluster cannot reserve it, or does not within the driver's timeout.
        """
        try:
            self.ensure(workers, worker_resources, strategy, selectors)
            if not self.wait(self._seconds):
                raise ResourceError(
                    "The cluster must give a run all its resources at once",
                    f"timeout after {self._seconds:g} s: {self._describe_missing()}",
                    "Wait until other work has ended, or raise FailureConfig(controller_failure_limit=...)",
                )
        except BaseException:
            self.drop()
            raise

    def _describe_missing(self) -> str:
        """Returns the missing resources, as a sentence without a full stop."""
        wanted = resources.total_resources(self._bundles)
        free, total = ray.available_resources(), ray.cluster_resources()
        trains = "a coordinator" if "ps 0" in self._sidecar_bundles else f"{self._workers} worker(s)"
        need = [trains, *self._sidecar_bundles]
        has = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in wanted)
        grows = ", more nodes may come" if resources.may_grow() else ""
        return (
            f"the run needs {resources.format_resources(wanted)} at once ({', '.join(need)}), and {has} are free{grows}"
        )

    def _end(self) -> str:
        return "" if self._seconds is None else f", at most {self._seconds:g} s"

    def by_node(self) -> list[tuple[str, dict[str, float]]]:
        """Returns (node, resources) of each bundle that the cluster has reserved."""
        nodes = placement_group_table(self.group)["bundles_to_node_id"] if self.group is not None else {}
        return [(nodes[i], bundle) for i, bundle in enumerate(self._bundles) if nodes.get(i)]

    def drop(self) -> None:
        """Releases the group, and ends the processes in it."""
        if self.group is not None:
            remove_placement_group(self.group)
            self.group, self._workers = None, 0

    def end_cleaner(self) -> None:
        """Ends the actor that would release the groups after this process; called when all are released."""
        if self._cleaner is not None:
            ray.kill(self._cleaner)
            self._cleaner = None

    def _start_cleaner(self) -> None:
        context = ray.get_runtime_context()
        if self._cleaned and self._cleaner is None and context.get_actor_id() is not None:
            # otherwise it is in the actor's group
            strategy = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=True)
            options = {"num_cpus": 0, "lifetime": "detached", "name": f"{self._name}-cleaner", "namespace": "raytf"}
            self._cleaner = ray.remote(_Cleaner).options(scheduling_strategy=strategy, **options).remote()
            self._cleaner.watch.remote(context.get_actor_id(), self._name)

    def release(self) -> None:
        """Releases the group, and all earlier groups of this object."""
        self.drop()
        _remove_named(self._name)


def _remove_named(prefix: str) -> None:
    """Releases all groups whose names begin with a prefix."""
    for group in placement_group_table().values():
        if group["name"].startswith(prefix) and group["state"] != "REMOVED":
            remove_placement_group(get_placement_group(group["name"]))


class _Cleaner:
    """Releases the groups of an actor after its death. It survives that actor, and then ends itself."""

    def watch(self, owner: str, prefix: str) -> None:
        """Waits for the death of the actor with this id."""
        while ray_core.is_alive(owner):
            time.sleep(_TICK_INTERVAL)
        _remove_named(prefix)
        ray.actor.exit_actor()


def bundle_selectors(selectors: list[dict] | None, bundles: int) -> list[dict] | None:
    """Returns a selector for each bundle; the first ones are the workers'."""
    if selectors is None:
        return None
    common = selectors[0] if all(selector == selectors[0] for selector in selectors) else {}
    return [*selectors, *[dict(common) for _ in range(bundles - len(selectors))]]


def avoid_nodes(selectors: list[dict] | None, bundles: int, nodes: Collection[str]) -> list[dict] | None:
    """Returns the workers' selectors, with a rule against some nodes: Ray would wait for a lost node.

    Args:
        selectors: A dict for each worker, or None; a selector that names nodes itself is unchanged.
        bundles: Number of workers.
        nodes: Ids of the nodes.
    """
    if not nodes:
        return selectors
    rule = {ray_core.RAY_NODE_ID_KEY: f"!in({','.join(sorted(nodes))})"}
    return [rule | selector for selector in selectors or [{}] * bundles]


def wait_limit(failure_config) -> float | None:
    """Returns the seconds for which a run waits for the cluster: its attempts, each with the timeout of a start."""
    attempts = failure_config.controller_failure_limit
    start_timeout = float(os.environ.get(WORKER_GROUP_START_TIMEOUT_S_ENV_VAR, DEFAULT_WORKER_GROUP_START_TIMEOUT_S))
    return None if attempts == -1 else (attempts + 1) * start_timeout
