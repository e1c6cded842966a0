"""Workers and parameter servers of a ParameterServerStrategy: Ray actors that its coordinator starts and monitors."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup

from raytf import logs, timeouts
from raytf.console import output
from raytf.errors import ConfigError, RaytfError, first_line, one_line
from raytf.runtime import ports, process_monitor, roles, settings
from raytf.runtime.answers import NoAnswerError, collect_answers
from raytf.runtime.process_monitor import ProcessKiller
from raytf.runtime.resources import placed_actor
from raytf.runtime.roles import Task
from raytf.runtime.topology import tf_config
from raytf.timeouts import Timeouts

logger = logs.get_logger(__name__)

_ASK_INTERVAL = 0.1
_STARTS = 3  # processes in place of a worker that may die at their start


class ServerLostError(RaytfError, ConnectionError):
    """A parameter server died, and its variables are lost: the run resumes from its last checkpoint, or ends."""


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """The servers of a run.

    Args:
        num_workers: Number of workers that compute steps, at least 1.
        num_ps: Number of parameter servers, at least 1.
        worker_resources: Resources of each worker. A parameter server gets as many CPUs, and nothing else.
        environment: Runtime environment of their processes.
        group: Placement group of the run, or None before its start.
        bundle_indices: Index of the bundle in the placement group for each task, by the task's name.
    """

    num_workers: int
    num_ps: int
    worker_resources: dict[str, float]
    environment: dict = field(default_factory=dict, repr=False)
    group: PlacementGroup | None = field(default=None, repr=False)
    bundle_indices: dict[str, int] = field(default_factory=dict, repr=False)

    def tasks(self) -> list[Task]:
        """Returns the tasks of all workers and parameter servers."""
        return [task for task in roles.run_tasks(self.num_workers, num_ps=self.num_ps) if task.role != "chief"]

    def bundle(self, task: Task) -> dict[str, float]:
        """Returns the resources of a task."""
        cpus = {"CPU": self.worker_resources.get("CPU", 1)}
        return dict(self.worker_resources) if task.role == "worker" else cpus

    def start(self, chief: str, allowed: settings.Listening) -> ServerGroup:
        """Starts the servers.

        Args:
            chief: "host:port" of the coordinator, which is this process.
            allowed: Where they may listen.
        """
        return ServerGroup(self, chief, allowed)


class ServerActor:
    """Ray actor with one worker or parameter server."""

    def reserve(self, deadlines: Timeouts, allowed: settings.Listening) -> tuple[str, process_monitor.ProcessLocation]:
        """Returns ("host:port", location of this process); `allowed` is where it may listen."""
        timeouts.set_current(deadlines)
        return ports.reserve_address(allowed), process_monitor.current_process()

    def serve(
        self, task: Task, cluster: dict[str, list[str]], cpus: int, workers: int, feeds: dict[str, dict[str, Any]]
    ) -> None:
        """Starts TensorFlow's server on `cpus` CPUs; `workers` and `feeds` as in `feed`."""
        output.set_output_name(str(task))
        os.environ.update(settings.variables(cpus, max(settings.SERVER_THREADS, cpus)))
        if task.role == "ps":
            os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        import tensorflow as tf

        if feeds:
            # before the server starts, as the coordinator schedules steps as soon as it answers
            self.feed(feeds, task.index, workers)
        config = tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=cpus, inter_op_parallelism_threads=max(settings.SERVER_THREADS, cpus)
        )
        ports.release_port()
        self._server = tf.distribute.Server(
            tf.train.ClusterSpec(cluster),
            job_name=task.role,
            task_index=task.index,
            protocol="grpc",
            config=config,
        )
        ports.listen_only_at(cluster[task.role][task.index])

    def feed(self, feeds: dict[str, dict[str, Any]], worker: int, workers: int) -> None:
        """Opens datasets for the steps on this worker.

        Args:
            feeds: For each dataset the arguments of a `feed.Feed`.
            worker: Index of this worker.
            workers: Number of workers.
        """
        from raytf.parameter_server import rows

        rows.register_rows(feeds, worker, workers)

    def join(self) -> None:
        """Blocks until the process ends, so that its end is visible."""
        threading.Event().wait()


class ServerGroup:
    """Starts the servers of a plan, and replaces workers that die.

    Attributes:
        cluster: Addresses by role, with this process as the chief.
        changed: Event that is set with `lost`.
        lost: Why the cluster ended, or None.
    """

    def __init__(self, plan: ServerSpec, chief: str, allowed: settings.Listening):
        self.plan, self._listening = plan, allowed
        self.changed, self.lost = threading.Event(), None
        self._feeds: dict[str, dict] = {}
        self._closed, self._context = False, None
        self._tasks = plan.tasks()
        if plan.group is None:
            raise ConfigError("Servers need a run's placement group", None, "Start them from a trainer of raytf")
        self._actors = {}
        self._process_killer = ProcessKiller()
        try:
            self._start(chief)
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _start(self, chief: str) -> None:
        for task in self._tasks:
            self._actors[task] = self._actor(task)
        pending = [actor.reserve.remote(timeouts.get(), self._listening) for actor in self._actors.values()]
        reservations = self._collect(
            pending, timeouts.get().process_start, "the processes of workers and parameter servers"
        )
        self.cluster: dict[str, list[str]] = {"chief": [chief]}
        for task, (address, location) in zip(self._tasks, reservations, strict=True):
            self.cluster.setdefault(task.role, []).append(address)
            self._process_killer.watch(task, location)
        self._collect([self._serve(task) for task in self._tasks], timeouts.get().process_setup, "TensorFlow's servers")

    def _collect(self, requests: list, seconds: float, action: str, tasks: list[Task] | None = None) -> list:
        def failed(name: str, error: Exception) -> Exception:
            if isinstance(error, RayTaskError):  # an error of its task, such as unreadable rows
                return error
            return ServerLostError(f"{name} did not start: {first_line(error)}{self._kill_reason(name)}")

        return collect_answers(
            requests, seconds, action, names=[str(task) for task in tasks or self._tasks], failure=failed
        )

    def _kill_reason(self, name: str) -> str:
        """Returns why the watchdog has ended a task's process, as a clause; "" if it has not."""
        return next((f" ({cause})" for task, cause in self._process_killer.ended.items() if str(task) == name), "")

    def _actor(self, task: Task):
        options = {"runtime_env": self.plan.environment, "max_concurrency": 3}
        bundle = self.plan.bundle_indices[str(task)]
        return placed_actor(ServerActor, self.plan.group, bundle, self.plan.bundle(task), **options)

    def _serve(self, task: Task):
        cpus = max(1, int(self.plan.bundle(task).get("CPU", 1)))
        feeds = self._feeds if task.role == "worker" else {}
        return self._actors[task].serve.remote(task, self.cluster, cpus, self.plan.num_workers, feeds)

    def feed(self, feeds: Mapping[str, dict[str, Any]]) -> None:
        """Opens datasets on all workers, including replacement workers; see `ServerActor.feed`."""
        self._feeds = dict(feeds)
        workers = [task for task in self._tasks if task.role == "worker"]
        count = self.plan.num_workers
        pending = [self._actors[task].feed.remote(self._feeds, task.index, count) for task in workers]
        self._collect(pending, timeouts.get().process_setup, "the workers' rows", workers)

    def resolver(self):
        """Returns TensorFlow's cluster resolver for the coordinator; sets TF_CONFIG."""
        import tensorflow as tf

        from raytf.compat.tensorflow import context

        self._context = context.context()
        self._context.update_server_def = functools.partial(self._reconnect, self._context.update_server_def)
        os.environ["TF_CONFIG"] = tf_config(self.cluster, "chief", 0)
        return tf.distribute.cluster_resolver.TFConfigClusterResolver()

    def _reconnect(self, connect, definition, *arguments) -> None:
        """Reconnects to workers after all addresses answer, and updates addresses that have changed.

        TensorFlow's own reconnect blocks forever on an address at which no server will start.
        """
        while not self._closed and self.lost is None and not all(map(self._answers, self._tasks)):
            self.changed.wait(_ASK_INTERVAL)
        for job in definition.cluster.job:
            for index, address in enumerate(self.cluster[job.name]):
                job.tasks[index] = address
        connect(definition, *arguments)

    def _answers(self, task: Task) -> bool:
        return ports.is_listening(self.cluster[task.role][task.index])

    def kill(self, task: Task) -> None:
        """Kills a server, as a failure would."""
        ray.kill(self._actors[task])

    def check(self) -> None:
        """Raises ServerLostError if a parameter server has died."""
        if self.lost is not None:
            raise ServerLostError(self.lost)

    def _watch(self) -> None:
        """Replaces workers that die, maybe on other hosts; ends the cluster if a parameter server dies."""
        waiting = {actor.join.remote(): task for task, actor in self._actors.items()}
        starts: Counter[Task] = Counter()  # in succession, of processes that died before they served
        while waiting:
            done, _ = ray.wait(list(waiting))
            if self._closed:
                return
            for ref in done:
                task = waiting.pop(ref)
                cause = self._kill_reason(str(task))
                if task.role == "ps":
                    self._fail(f"{task} was lost{cause}, and with it the variables that it held")
                    return
                # a host that has vanished closes no connection, and TensorFlow would wait for one
                ports.close_connections(self.cluster[task.role][task.index])
                logger.warning(f"{task} was lost{cause}. It is replaced; the other workers continue")
                try:
                    starts[task] = 0 if self._replace(task) else starts[task] + 1
                    why = "" if starts[task] < _STARTS else f"{_STARTS} processes in its place died at their start"
                except (NoAnswerError, RayError) as error:  # also rows that its new host cannot read
                    why = str(error) if isinstance(error, NoAnswerError) else one_line(error)
                if why:
                    self._fail(f"{task} was lost{cause}, and could not be replaced: {why}")
                    return
                waiting[self._actors[task].join.remote()] = task

    def _fail(self, why: str) -> None:
        self.lost = why
        self.changed.set()

    def _replace(self, task: Task) -> bool:
        """Starts another process for a worker; returns False if it died meanwhile."""
        self._process_killer.forget(task)
        self._process_killer.ended.pop(task, None)
        self._actors[task] = self._actor(task)
        with contextlib.suppress(RayActorError):
            purpose, names, limits = "a worker in place of one that died", [str(task)], timeouts.get()
            ((address, location),) = collect_answers(
                [self._actors[task].reserve.remote(limits, self._listening)], limits.process_start, purpose, names=names
            )
            self.cluster[task.role][task.index] = address
            self._process_killer.watch(task, location)
            collect_answers([self._serve(task)], timeouts.get().process_setup, purpose, names=names)
            return True
        return False

    def close(self) -> None:
        """Kills all servers."""
        self._closed = True
        if self._context is not None:
            del self._context.update_server_def
        self._process_killer.close()
        for actor in self._actors.values():
            ray.kill(actor)
