"""Workers and parameter servers of a ParameterServerStrategy: Ray actors that its coordinator starts and watches."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group

from raytf import ports, roles, settings
from raytf.errors import RaytfError
from raytf.resources import placed_actor
from raytf.roles import Task
from raytf.topology import tf_config

# Coordinator and servers wait for each other in several operations at once: on two cores, TensorFlow's default of two
# threads hung, and six ran.
THREADS = 8
_ASK_SECONDS = 0.1


class ServerLostError(RaytfError, ConnectionError):
    """A parameter server died, and with it variables: the run goes on from its last checkpoint, or ends."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The servers of a run.

    Args:
        num_workers: that compute steps, at least 1.
        num_ps: parameter servers, at least 1.
        worker_resources: of each worker; a parameter server gets its CPUs, and nothing else.
        environment: runtime environment of their processes.
    """

    num_workers: int
    num_ps: int
    worker_resources: dict[str, float]
    environment: dict = field(default_factory=dict, repr=False)

    def tasks(self) -> list[Task]:
        """Workers and parameter servers."""
        return [task for task in roles.tasks(self.num_workers, num_ps=self.num_ps) if task.role != "chief"]

    def bundle(self, task: Task) -> dict[str, float]:
        """Resources of a task."""
        cpus = {"CPU": self.worker_resources.get("CPU", 1)}
        return dict(self.worker_resources) if task.role == "worker" else cpus


class Server:
    """A worker or parameter server, in an actor of its own."""

    def reserve(self) -> str:
        """Its "host:port"."""
        return ports.reserve_address()

    def serve(
        self, task: Task, cluster: dict[str, list[str]], cpus: int, workers: int, feeds: dict[str, dict[str, Any]]
    ) -> None:
        """Starts TensorFlow's server; what it takes is that of `feed`, besides the cluster and its CPUs."""
        os.environ.update(settings.variables(cpus, max(THREADS, cpus)))
        if task.role == "ps":
            os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        import tensorflow as tf

        if feeds:
            # first, because the coordinator gives a worker steps as soon as its server answers
            self.feed(feeds, task.index, workers)
        config = tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=cpus, inter_op_parallelism_threads=max(THREADS, cpus)
        )
        ports.release_port()
        self._server = tf.distribute.Server(
            tf.train.ClusterSpec(cluster),
            job_name=task.role,
            task_index=task.index,
            protocol="grpc",
            config=config,
        )

    def feed(self, feeds: dict[str, dict[str, Any]], worker: int, workers: int) -> None:
        """Makes the rows of datasets available to steps on this worker.

        Args:
            feeds: for each name the arguments of a `feed.Feed`.
            worker, workers: this worker's index and their number.
        """
        from raytf import worker_rows

        worker_rows.register(feeds, worker, workers)

    def join(self) -> None:
        """Never returns."""
        threading.Event().wait()


class Servers:
    """Starts the servers of a plan, and replaces workers that die.

    Attributes:
        cluster: addresses by role, with this process as the chief.
        changed: set when `lost` is.
        lost: what ended the cluster, or None.
    """

    def __init__(self, plan: Plan, chief: str):
        self.plan = plan
        self.changed, self.lost = threading.Event(), None
        self._feeds: dict[str, dict] = {}
        self._closed, self._context = False, None
        self._tasks = plan.tasks()
        bundles = [plan.bundle(task) for task in self._tasks]
        self._group = placement_group(bundles, strategy="PACK")
        ray.get(self._group.ready())
        self._actors = {task: self._actor(task) for task in self._tasks}
        found = ray.get([actor.reserve.remote() for actor in self._actors.values()])
        self.cluster: dict[str, list[str]] = {"chief": [chief]}
        for task, address in zip(self._tasks, found, strict=True):
            self.cluster.setdefault(task.role, []).append(address)
        ray.get([self._serve(task) for task in self._tasks])
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _actor(self, task: Task):
        place, options = self._tasks.index(task), {"runtime_env": self.plan.environment, "max_concurrency": 3}
        return placed_actor(Server, self._group, place, self.plan.bundle(task), **options)

    def _serve(self, task: Task):
        cpus = max(1, int(self.plan.bundle(task).get("CPU", 1)))
        feeds = self._feeds if task.role == "worker" else {}
        return self._actors[task].serve.remote(task, self.cluster, cpus, self.plan.num_workers, feeds)

    def feed(self, feeds: Mapping[str, dict[str, Any]]) -> None:
        """Makes datasets available on all workers, those that replace others included; see `Server.feed`."""
        self._feeds = dict(feeds)
        ray.get([self._feed(task) for task in self._tasks if task.role == "worker"])

    def _feed(self, task: Task):
        return self._actors[task].feed.remote(self._feeds, task.index, self.plan.num_workers)

    def resolver(self):
        """TensorFlow's cluster resolver for the coordinator; sets TF_CONFIG."""
        import tensorflow as tf
        from tensorflow.python.eager import context

        self._context = context.context()
        self._context.update_server_def = functools.partial(self._reconnect, self._context.update_server_def)
        os.environ["TF_CONFIG"] = tf_config(self.cluster, "chief", 0)
        return tf.distribute.cluster_resolver.TFConfigClusterResolver()

    def _reconnect(self, connect, definition, *arguments) -> None:
        """TensorFlow's own way of connecting to workers anew waits for ever for an address at which none will come up:
        so the addresses are asked first, until each answers, and those that are new are told."""
        while not self._closed and self.lost is None and not all(map(self._answers, self._tasks)):
            self.changed.wait(_ASK_SECONDS)
        for job in definition.cluster.job:
            for index, address in enumerate(self.cluster[job.name]):
                job.tasks[index] = address
        connect(definition, *arguments)

    def _answers(self, task: Task) -> bool:
        return ports.answers(self.cluster[task.role][task.index])

    def kill(self, task: Task) -> None:
        """Ends a server as a failure would."""
        ray.kill(self._actors[task])

    def check(self) -> None:
        """Raises ServerLostError if a parameter server has died."""
        if self.lost is not None:
            raise ServerLostError(self.lost)

    def _watch(self) -> None:
        """Replaces workers, perhaps on other hosts."""
        waiting = {actor.join.remote(): task for task, actor in self._actors.items()}
        while waiting:
            done, _ = ray.wait(list(waiting))
            if self._closed:
                return
            for ref in done:
                task = waiting.pop(ref)
                if task.role == "ps":
                    self.lost = (
                        f"{task} died, and with it the variables that it held. The run goes on from its last "
                        "checkpoint where FailureConfig(max_failures=...) allows it"
                    )
                    self.changed.set()
                    return
                # a host that has vanished closes no connection, and TensorFlow would wait for it
                ports.hang_up(self.cluster[task.role][task.index])
                self._actors[task] = self._actor(task)
                with contextlib.suppress(RayActorError):  # it died again; the next turn replaces it
                    self.cluster[task.role][task.index] = ray.get(self._actors[task].reserve.remote())
                    ray.get(self._serve(task))
                waiting[self._actors[task].join.remote()] = task

    def close(self) -> None:
        """Ends all servers."""
        self._closed = True
        if self._context is not None:
            del self._context.update_server_def
        for actor in self._actors.values():
            ray.kill(actor)
        remove_placement_group(self._group)
