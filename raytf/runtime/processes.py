"""Processes that start, and import TensorFlow, before it is settled what for. Driver side."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RuntimeEnvSetupError
from ray.train import ScalingConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytf import timeouts
from raytf.compat import legacy_keras
from raytf.compat.ray_configs import resources_per_worker
from raytf.compat.ray_core import WARN_BLOCKING_GET
from raytf.compat.ray_train import ENABLE_PRINT_PATCH_ENV_VAR, get_env_vars_to_propagate
from raytf.console.output import Output
from raytf.console.progress import Entries
from raytf.runtime import resources
from raytf.runtime.allocator import allocator
from raytf.runtime.answers import as_they_come, collect

# A worker's environment, unless `RunConfig.worker_runtime_env` says otherwise.
_VARIABLES = {
    WARN_BLOCKING_GET: "0",
    legacy_keras.VARIABLE: "0",  # whatever Ray was started with on its hosts
}

# Likewise, unless the driver's says otherwise; with Ray Train's `print` each line comes twice.
_VARIABLES_UNLESS_SET = {"TF_CPP_MIN_LOG_LEVEL": "2", ENABLE_PRINT_PATCH_ENV_VAR: "0"}


class Process:
    """A process that does what it is told."""

    def execute(self, function: Callable, *arguments):
        return function(*arguments)


class WarmPool:
    """Processes that may become workers; they hold no resources of the cluster.

    Args:
        kind: the workers' class: a `Process`, or Ray Train's, which has an `execute`, too.
        scaling_config, run_config: the run's.
        workers: at most so many, on the nodes where Ray would place them now; at least one process starts.
        preload: is called in each as it starts: what it imports is there when the process is used.

    Attributes:
        there: (node, actor) of each process that may become a worker.
        warned: where their warnings are claimed by the one that shows them, see `once.py`.
        asked: the actor that answered the last question, or None.
        ending: an `ends.Ending`, whose signals end what they do; None leaves SIGINT to Ray Train.
    """

    ending: Any = None

    def __init__(self, kind, scaling_config, run_config, workers: int, preload: Callable[[], None]):
        self.there = []
        self._extra = []
        self.asked = None
        # A process must not look for devices before Ray gives it some: then it can only try the model.
        if resources.only_cpus(scaling_config):
            environment = _early_environment(run_config, scaling_config, threads(_cpus(scaling_config)))
            for node in resources.likely_nodes(scaling_config, workers):
                self.there.append((node, start(kind, node, environment)))
        if not self.there:
            here = ray.get_runtime_context().get_node_id()
            environment = _early_environment(run_config, scaling_config, {"CUDA_VISIBLE_DEVICES": "-1"})
            self._extra.append(start(kind, here, environment, soft=True))
        self.warned = Entries("warned")
        self._output = Output(worker_environment(run_config, scaling_config)["env_vars"])
        self._ready = {actor.execute.remote(timeouts.under, timeouts.get(), preload): actor for actor in self._all()}

    def ask(self, function, *arguments):
        """Calls a function in the first process that is ready; one that dies meanwhile is replaced by the next.

        Raises:
            NoAnswerError: none started, or the function did not end, in time.
        """
        failed = None
        for _, ready in as_they_come(
            list(self._ready), timeouts.get().process_start, "the start of a process", names=self._names()
        ):
            try:
                ray.get(ready)
                call = self._ready[ready].execute.remote(timeouts.under, timeouts.get(), function, *arguments)
                (answer,) = collect(
                    [call], timeouts.get().model_answer, "what it finds out about the model", names=["a process"]
                )
            except (RayActorError, ActorUnschedulableError, RuntimeEnvSetupError) as error:
                failed = error
                continue
            self.asked = self._ready[ready]
            self.settle()
            return answer
        raise failed

    def _names(self) -> list[str]:
        return [f"process {i}" for i in range(len(self._ready))]

    def settle(self) -> None:
        """Ends what cannot become a worker, but the process that was asked last, see `end_asked`."""
        _end([one for one in self._extra if one is not self.asked])
        self._extra = [one for one in self._extra if one is self.asked]

    def end_asked(self) -> None:
        """Ends the process that was asked last, if it cannot become a worker, as nothing goes on in it any more."""
        _end(self._extra)
        self._extra = []

    def cancel(self) -> None:
        """Ends all, workers or not."""
        self._output.close(sys.exc_info()[1])
        _end(self._all())
        self.warned.clear()

    def _all(self) -> list:
        return [*(actor for _, actor in self.there), *self._extra]


def worker_environment(run_config, scaling_config, variables: dict[str, str] | None = None) -> dict:
    """The runtime environment of a worker's process.

    Args:
        run_config: whose own variables go before all others.
        scaling_config: says how many CPUs a worker has.
        variables: more of them.
    """
    environment = dict(run_config.worker_runtime_env or {})
    told = {name: os.environ.get(name, value) for name, value in _VARIABLES_UNLESS_SET.items()}
    ours = _VARIABLES | told | allocator(_cpus(scaling_config)) | (variables or {})
    return environment | {"env_vars": ours | dict(environment.get("env_vars", {}))}


def with_variables(run_config, variables: dict[str, str]):
    """A copy of a RunConfig whose workers have these environment variables."""
    run_config, environment = copy.copy(run_config), dict(run_config.worker_runtime_env or {})
    run_config.worker_runtime_env = environment | {"env_vars": dict(environment.get("env_vars", {})) | variables}
    return run_config


def cpus_of(each: Mapping[str, float]) -> int:
    """For how many CPUs a worker with these resources computes, at least 1."""
    return max(1, int(each.get("CPU", 1)))


def _cpus(scaling_config) -> int:
    return cpus_of(resources_per_worker(scaling_config or ScalingConfig()))


def threads(cpus: int) -> dict[str, str]:
    """The variable that Ray sets for a process that asks for CPUs, for one that asks for none."""
    return {"OMP_NUM_THREADS": str(cpus)}


def _early_environment(run_config, scaling_config, variables: dict[str, str]) -> dict:
    return worker_environment(run_config, scaling_config, get_env_vars_to_propagate() | variables)


def start(kind, node: str, environment: dict, soft: bool = False):
    """The actor of a process that holds no CPU.

    Args:
        kind: its class.
        node: Ray's id of where it starts.
        environment: its runtime environment.
        soft: whether it may start elsewhere, which Ray takes for any node at all where an actor needs no CPU.
    """
    place = NodeAffinitySchedulingStrategy(node, soft=soft)
    return ray.remote(kind).options(num_cpus=0, runtime_env=environment, scheduling_strategy=place).remote()


def _end(actors) -> None:
    for actor in actors:
        ray.kill(actor)
