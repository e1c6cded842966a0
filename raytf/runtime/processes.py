"""Processes that start, and import TensorFlow, before their use is known. Driver side."""

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
from raytf.errors import TrainingError
from raytf.runtime import resources
from raytf.runtime.allocator import allocator
from raytf.runtime.answers import collect_answers, in_completion_order

# A worker's environment; `RunConfig.worker_runtime_env` overrides it.
_VARIABLES = {
    WARN_BLOCKING_GET: "0",
    legacy_keras.VARIABLE: "0",  # overrides the environment in which Ray was started on its hosts
}

# The same, unless set in the driver's environment; with Ray Train's `print` each line appears twice.
_VARIABLES_UNLESS_SET = {"TF_CPP_MIN_LOG_LEVEL": "2", ENABLE_PRINT_PATCH_ENV_VAR: "0"}


class Process:
    """A process that calls the functions that it gets."""

    def execute(self, function: Callable, *arguments):
        return function(*arguments)


class WarmPool:
    """Processes that may become workers; they hold no resources of the cluster.

    Args:
        kind: Class of the workers, a `Process`.
        scaling_config, run_config: Configs of the run.
        workers: Largest number of processes, on the nodes where Ray would place them now; at least one process starts.
        preload: Function that each process calls at its start: its imports are ready when the process is used.

    Attributes:
        members: (node, actor) of each process that may become a worker.
        warned: Entries by which the process that shows a warning claims it, see `shared_warnings.py`.
        answered: Actor that answered the last request, or None.
        compares: Whether that one still compares two workers with one device, see `verify.ComparisonReporter`.
        ending: A `graceful_stop.GracefulStop`, whose signals end the processes' work, or None.
        run_config: RunConfig of the run.
        cancelled: Whether the run was cancelled.
    """

    ending: Any = None
    cancelled = False

    def __init__(self, kind, scaling_config, run_config, workers: int, preload: Callable[[], None]):
        self.run_config, self.members, self._extra = run_config, [], []
        self.answered, self.compares = None, False
        # A process must not search for devices before Ray assigns it some: without devices it can only try the model.
        if resources.only_cpus(scaling_config):
            environment = _early_environment(run_config, scaling_config, thread_variables(_cpus(scaling_config)))
            for node in resources.likely_nodes(scaling_config, workers):
                self.members.append((node, start_process(kind, node, environment)))
        if not self.members:
            node_id = ray.get_runtime_context().get_node_id()
            environment = _early_environment(run_config, scaling_config, {"CUDA_VISIBLE_DEVICES": "-1"})
            self._extra.append(start_process(kind, node_id, environment, soft=True))
        self.warned = Entries("warned")
        self._output = Output(worker_environment(run_config, scaling_config)["env_vars"])
        self._ready = {
            actor.execute.remote(timeouts.call_with, timeouts.get(), preload): actor for actor in self._actors()
        }

    def ask(self, function, *arguments):
        """Calls a function in the first process that is ready; if that dies, the next one replaces it.

        Raises:
            NoAnswerError: No process started, or the function did not end, in time.
        """
        failed = None
        for _, ready in in_completion_order(
            list(self._ready), timeouts.get().process_start, "the start of a process", names=self._names()
        ):
            try:
                ray.get(ready)
                call = self._ready[ready].execute.remote(timeouts.call_with, timeouts.get(), function, *arguments)
                (answer,) = collect_answers(
                    [call], timeouts.get().model_answer, "the facts of the model", names=["a process"]
                )
            except (RayActorError, ActorUnschedulableError, RuntimeEnvSetupError) as error:
                failed = error
                continue
            self.answered = self._ready[ready]
            self.end_unused()
            return answer
        raise failed

    def _names(self) -> list[str]:
        return [f"process {i}" for i in range(len(self._ready))]

    def end_unused(self) -> None:
        """Ends the processes that cannot become workers, except the last one that answered, see `end_answered`."""
        _end([actor for actor in self._extra if actor is not self.answered])
        self._extra = [actor for actor in self._extra if actor is self.answered]

    def drop(self, actor) -> None:
        """Ends a process that becomes no worker; one that still compares ends with that, see `end_answered`."""
        if actor is self.answered and self.compares:
            self._extra.append(actor)
        else:
            ray.kill(actor)

    def end_answered(self) -> None:
        """Ends the process that answered last, if it cannot become a worker; its work is done."""
        _end(self._extra)
        self._extra = []

    def check(self) -> None:
        """Raises the error of a run that was cancelled."""
        if self.cancelled:
            raise TrainingError(None, "it was cancelled")

    def cancel(self) -> None:
        """Ends all processes, workers or not, and the run."""
        self.cancelled = True
        self._close()

    def _close(self) -> None:
        self._output.close(sys.exc_info()[1])
        _end(self._actors())
        self.warned.clear()

    def _actors(self) -> list:
        return [*(actor for _, actor in self.members), *self._extra]


def worker_environment(run_config, scaling_config, variables: dict[str, str] | None = None) -> dict:
    """Returns the runtime environment of a worker's process.

    Args:
        run_config: RunConfig; its variables override all others.
        scaling_config: ScalingConfig with the CPUs of a worker.
        variables: Additional variables.
    """
    environment = dict(run_config.worker_runtime_env or {})
    from_driver = {name: os.environ.get(name, value) for name, value in _VARIABLES_UNLESS_SET.items()}
    defaults = _VARIABLES | from_driver | allocator(_cpus(scaling_config)) | (variables or {})
    return environment | {"env_vars": defaults | dict(environment.get("env_vars", {}))}


def with_variables(run_config, variables: dict[str, str]):
    """Returns a copy of a RunConfig whose workers have these environment variables."""
    run_config, environment = copy.copy(run_config), dict(run_config.worker_runtime_env or {})
    run_config.worker_runtime_env = environment | {"env_vars": dict(environment.get("env_vars", {})) | variables}
    return run_config


def cpus_of(worker_resources: Mapping[str, float]) -> int:
    """Returns the number of CPUs for which a worker with these resources computes, at least 1."""
    return max(1, int(worker_resources.get("CPU", 1)))


def _cpus(scaling_config) -> int:
    return cpus_of(resources_per_worker(scaling_config or ScalingConfig()))


def thread_variables(cpus: int) -> dict[str, str]:
    """Returns the variable that Ray sets for a process with CPUs, for a process that requests none."""
    return {"OMP_NUM_THREADS": str(cpus)}


def _early_environment(run_config, scaling_config, variables: dict[str, str]) -> dict:
    return worker_environment(run_config, scaling_config, get_env_vars_to_propagate() | variables)


def start_process(kind, node: str, environment: dict, soft: bool = False):
    """Starts a process that holds no CPU; returns its actor.

    Args:
        kind: Class of the actor.
        node: Ray's id of its node.
        environment: Its runtime environment.
        soft: Whether it may start elsewhere; for an actor without CPUs Ray then chooses any node.
    """
    strategy = NodeAffinitySchedulingStrategy(node, soft=soft)
    return ray.remote(kind).options(num_cpus=0, runtime_env=environment, scheduling_strategy=strategy).remote()


def _end(actors) -> None:
    for actor in actors:
        ray.kill(actor)
