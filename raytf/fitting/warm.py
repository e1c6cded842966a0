"""Workers that stay after a call of `raytf.fit` for the next one: one group per driver.

Idle workers release their resources for another run of this driver, or for work that the cluster lacks room for. They
also end after 600 s, and with the driver.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import threading
import time

import ray
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.util.placement_group import placement_group_table

from raytf import events, logs, timeouts
from raytf.compat import ray_core
from raytf.compat.ray_configs import label_selectors
from raytf.console.progress import Entries
from raytf.errors import first_line
from raytf.events import Kind, RunEvent
from raytf.runtime import connection
from raytf.runtime.answers import NoAnswerError, collect_answers
from raytf.runtime.processes import worker_environment
from raytf.runtime.reservation import Reservation
from raytf.runtime.resources import resources_per_worker
from raytf.train.worker_group import WorkerGroup, WorkerGroupLostError

logger = logs.get_logger(__name__)

_IDLE_INTERVAL = 600.0
# Seconds between two checks for work that waits for room.
_CHECK_INTERVAL = 0.5
# States of a placement group that the cluster has no room for.
_WAITING = ("PENDING", "RESCHEDULING")


class WarmGroup:
    """Workers, and their resources in the cluster.

    Args:
        scaling_config, run_config, setup: Configs of the workers.

    Attributes:
        model: Key of the model that the workers have, or None.
        verified: Keys of models that were compared, see `background_verification`.
    """

    def __init__(self, scaling_config, run_config, setup):
        self.key = _key(scaling_config, run_config, setup)
        self.model: str | None = None
        self.verified: set[str] = set()
        self._warned = Entries("warned")
        self._reservation = Reservation({}, cleaned=True)
        workers, per_bundle = scaling_config.num_workers, resources_per_worker(scaling_config)
        selectors = label_selectors(scaling_config, workers)
        self._reservation.take(workers, per_bundle, scaling_config.placement_strategy, selectors)
        try:
            environment = worker_environment(run_config, scaling_config)
            group = self._reservation.group
            setup = dataclasses.replace(setup, warned=self._warned)
            self.worker_group = WorkerGroup(setup, per_bundle, workers, environment, group=group)
        except BaseException:
            self._reservation.drop()
            raise

    def is_alive(self) -> bool:
        """Returns whether all workers are alive."""
        try:
            collect_answers(
                [w.__ray_ready__.remote() for w in self.worker_group.actors],
                timeouts.get().idle_answer,
                "idle workers",
            )
        except (ray.exceptions.RayActorError, NoAnswerError):
            return False
        return True

    def close(self) -> None:
        """Ends the workers and releases their resources; returns when the cluster has them."""
        group = self._reservation.group
        try:
            self.worker_group.close(well=False)
        finally:  # the caller ignores errors of a cluster that shuts down
            self._reservation.drop()
        self._warned.clear()
        deadline = time.monotonic() + timeouts.get().resources_back
        while placement_group_table(group).get("state") != "REMOVED" and time.monotonic() < deadline:
            time.sleep(0.02)
        # at the end of a process the request to remove a group may be lost
        if placement_group_table(group).get("state") == "REMOVED":
            self._reservation.end_cleaner()
        self._warned.clear()


def _key(scaling_config, run_config, setup) -> str:
    properties = (
        sorted(vars(scaling_config).items(), key=str),
        run_config.worker_runtime_env,
        setup,
        connection.session(),
    )
    return repr(properties)


class _IdleGroup:
    """Holds the group while it is idle."""

    def __init__(self):
        self._lock = threading.Lock()
        self._group: WarmGroup | None = None
        self._session: str | None = None
        self._stored_at = 0.0
        self._watch: threading.Thread | None = None

    def take(self) -> WarmGroup | None:
        """Removes and returns the group; None if no live one is stored."""
        return self._exchange(None)

    def put(self, group: WarmGroup) -> None:
        """Stores a group; ends the one that a call in another thread has stored."""
        _close(self._exchange(group))

    def clear(self) -> None:
        """Ends the stored group."""
        _close(self._exchange(None))

    def _exchange(self, group: WarmGroup | None) -> WarmGroup | None:
        with self._lock:
            previous, self._group = self._group, None  # first: Ray may end meanwhile
            session = None if previous is group is None else connection.session()
            previous = previous if self._session == session else None
            self._group, self._session, self._stored_at = group, session, time.monotonic()
            if group is not None and (self._watch is None or not self._watch.is_alive()):
                self._watch = threading.Thread(target=self._watch_group, name="raytf-warm", daemon=True)
                self._watch.start()
            return previous

    def _watch_group(self) -> None:
        while True:
            time.sleep(_CHECK_INTERVAL)
            with self._lock:
                if self._group is None:
                    self._watch = None
                    return
                is_expired = time.monotonic() - self._stored_at > _IDLE_INTERVAL
            try:
                if is_expired or not ray.is_initialized() or is_wanted():
                    self.clear()
            except Exception as error:  # the cluster has gone, and the group with it
                logger.debug("idle workers: %s", error)
                self.clear()


def _close(group: WarmGroup | None) -> None:
    if group is not None:
        with contextlib.suppress(ray.exceptions.RayError, ConnectionError):
            group.close()


def is_wanted() -> bool:
    """Returns whether anything in the cluster waits for resources: a task, actor or placement group of any driver.

    Placement groups are checked separately: Ray's reported load may omit those that it has tried in vain.
    """
    state = get_cluster_resource_state(ray_core.gcs_client())
    if state.pending_resource_requests or state.pending_gang_resource_requests:
        return True
    return any(group["state"] in _WAITING for group in placement_group_table().values())


_idle = _IdleGroup()


def take_group(scaling_config, run_config, setup) -> WarmGroup:
    """Returns the workers of the last call if they match, or new ones.

    Args:
        scaling_config, run_config, setup: Configs of the workers.
    """
    group = _idle.take()
    if group is not None and group.key == _key(scaling_config, run_config, setup) and group.is_alive():
        return group
    if group is not None:
        group.close()
    return WarmGroup(scaling_config, run_config, setup)


def keep_group(group: WarmGroup) -> None:
    """Keeps idle workers, unless their memory has grown too much."""
    try:
        outgrown = group.worker_group.outgrown()
    except WorkerGroupLostError as error:
        outgrown = first_line(error)
    if outgrown is None:
        _idle.put(group)
    else:
        events.emit(RunEvent(kind=Kind.WORKERS_RENEWED, why=outgrown, more="take the next call"))
        group.close()


def end_group() -> None:
    """Ends the kept workers."""
    _idle.clear()


def has_group() -> bool:
    """Returns whether workers of an earlier call are kept."""
    return _idle._group is not None


atexit.register(end_group)
connection.idle.append(end_group)
