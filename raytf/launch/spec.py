"""Arguments of `raytf run`, checked before Ray is imported. Driver side."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import math
import os
import sys
import warnings
from collections.abc import Mapping, Sequence

from raytf.compat import legacy_keras
from raytf.errors import ConfigError
from raytf.liveness import STOPPED_INTERVAL
from raytf.runtime import networks, roles, settings
from raytf.runtime.allocator import allocator
from raytf.runtime.roles import Task
from raytf.validation import check_whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """Arguments and resources of the tasks of one role.

    Args:
        arguments: Arguments of the script, instead of those of `LaunchSpec`.
        environment: Environment variables of the processes; those of `LaunchSpec` override them.
        cpus: CPUs of each process, more than 0, for which Ray places it.
        gpus: GPUs of each process.
        threads: Cores that each process may use, if these are more.
        script: Script of the tasks, instead of that of `LaunchSpec`; None for that one.
        module: Whether that script is a module.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    cpus: float
    gpus: int
    threads: float = 0
    script: str | None = None
    module: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """A script, its tasks, and their resources.

    Args:
        script: Path of a Python file, or name of a module.
        arguments: Arguments of the script.
        module: Whether `script` is a module.
        num_workers: Number of training processes, at least 1.
        num_ps: Number of parameter servers; they add a coordinating chief.
        chief: Whether the first worker is the chief.
        evaluator: Whether to add a process that evaluates.
        cpus_per_worker: CPUs of each process, more than 0; below 1, processes share cores.
        gpus_per_worker: GPUs of each worker and of the evaluator; other tasks have CPUs only.
        max_restarts: Largest number of restarts after failures.
        ports: First and last port on which tasks listen.
        network: Network interface on which they listen, see `TensorflowConfig.network`.
        frozen_after: Seconds for which a process may be stopped (SIGSTOP, a debugger) before it has failed; 0 waits
            forever.
        hang_timeout: Seconds after which the task that others wait for is named, see `TensorflowConfig.hang_timeout_s`;
            0 turns hang detection off.
        pin_cpus: Whether to pin each process to its own cores, see `TensorflowConfig.pin_cpus`.
        environment: Environment variables of the processes.
        legacy_keras: Whether they use Keras 2 instead of Keras 3.
        quiet: Whether to show only the first task's output.
        of_roles: Arguments and resources of the tasks of a role, by role.

    Raises:
        ConfigError: An argument is wrong.
    """

    script: str
    arguments: Sequence[str] = ()
    module: bool = False
    num_workers: int = 1
    num_ps: int = 0
    chief: bool = False
    evaluator: bool = False
    cpus_per_worker: float = 1
    gpus_per_worker: int = 0
    max_restarts: int = 0
    ports: tuple[int, int] = settings.PORTS
    network: str | None = None
    frozen_after: float = STOPPED_INTERVAL
    hang_timeout: float = 10.0
    pin_cpus: bool = False
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    legacy_keras: bool = False
    quiet: bool = False
    of_roles: Mapping[str, RoleSpec] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name, least in (("num_workers", 1), ("num_ps", 0), ("gpus_per_worker", 0), ("max_restarts", 0)):
            check_whole(name, getattr(self, name), least)
        self.tasks()
        settings.check_ports(self.ports)
        networks.check_network(self.network)
        for cpus in (self.cpus_per_worker, *(role.cpus for role in self.of_roles.values())):
            if not 0 < cpus < math.inf:
                raise ConfigError("cpus_per_worker must be more than 0", cpus, "Pass more than 0")
        if not 0 <= self.frozen_after < math.inf:
            raise ConfigError("frozen_after must be at least 0 seconds", self.frozen_after, "Use 0 to wait for ever")
        if not (self.hang_timeout == 0 or 2 <= self.hang_timeout < math.inf):
            raise ConfigError("hang_timeout must be at least 2 seconds, or 0", self.hang_timeout, "Use 0 for none")
        for script, module in {self.script_of(task) for task in self.tasks()}:
            _check_script(script, module)
        if self.legacy_keras or legacy_keras.is_enabled(self.environment):
            legacy_keras.check_installed("--legacy-keras" if self.legacy_keras else f"--env {legacy_keras.VARIABLE}=1")

    def tasks(self) -> list[Task]:
        """Returns the tasks of its cluster."""
        return roles.run_tasks(self.num_workers, num_ps=self.num_ps, chief=self.chief, evaluator=self.evaluator)

    def bundle(self, task: Task) -> dict[str, float]:
        """Returns the resources of a task."""
        if (role_spec := self.of_roles.get(task.role)) is not None:
            return {"CPU": role_spec.cpus} | ({"GPU": role_spec.gpus} if role_spec.gpus else {})
        trains = task.role in ("worker", "evaluator") or not self.num_ps
        gpus = {"GPU": self.gpus_per_worker} if trains and self.gpus_per_worker else {}
        return {"CPU": self.cpus_per_worker, **gpus}

    def arguments_of(self, task: Task) -> Sequence[str]:
        """Returns the script's arguments in a task's process."""
        role_spec = self.of_roles.get(task.role)
        return self.arguments if role_spec is None else role_spec.arguments

    def script_of(self, task: Task) -> tuple[str, bool]:
        """Returns the script of a task's process, and whether it is a module."""
        role_spec = self.of_roles.get(task.role)
        if role_spec is None or role_spec.script is None:
            return self.script, self.module
        return role_spec.script, role_spec.module

    def listening(self) -> settings.Listening:
        """Returns where tasks listen."""
        return settings.Listening(self.ports, self.network)

    def cores_to_claim(self) -> int:
        """Returns how many cores each process claims."""
        return int(self.cpus_per_worker) if self.pin_cpus and not self.num_ps else 0

    def variables(self, task: Task) -> dict[str, str]:
        """Returns the environment of a task's process, without TF_CONFIG; the user's variables override it."""
        role_spec = self.of_roles.get(task.role)
        cpus = max(1, int(max(self.bundle(task)["CPU"], role_spec.threads if role_spec else 0)))
        defaults = allocator(cpus) | {
            "OMP_NUM_THREADS": str(cpus),
            **settings.variables(cpus, max(settings.SERVER_THREADS if self.num_ps else 2, cpus)),
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        if "GPU" not in self.bundle(task):
            defaults["CUDA_VISIBLE_DEVICES"] = "-1"
        if self.legacy_keras:
            defaults |= legacy_keras.VARIABLES
        return defaults | dict(role_spec.environment if role_spec else {}) | dict(self.environment)


def _check_script(script: str, module: bool) -> None:
    if module:
        _check_module(script)
    elif not os.path.isfile(script):
        problem = "a folder" if os.path.isdir(script) else "no such file"
        raise ConfigError("The script must be a file that exists", f"{script!r} ({problem})", "Check the path")
    else:
        _check_syntax(script)


def _check_syntax(script: str) -> None:
    """Raises ConfigError for a script that no Python can run; another version of Python on the cluster may say more."""
    try:
        with open(script, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script's own processes show them
            compile(file.read(), script, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OSError) as error:
        line = getattr(error, "lineno", None)
        location = script if line is None else f"{script}, line {line}"
        reason = getattr(error, "msg", None) or error
        raise ConfigError("The script must be Python", f"{location}: {reason}", "Correct the script") from None


def _check_module(name: str) -> None:
    """Raises ConfigError unless a module can be found from the current folder; imports nothing of it."""
    first, *submodules = name.split(".")
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path.remove(os.getcwd())
    for part in submodules:
        # `find_spec` of the whole name would import its packages
        folders = spec and spec.submodule_search_locations
        spec = importlib.machinery.PathFinder.find_spec(part, folders) if folders else None
    if spec is None:
        raise ConfigError(
            "With --module, the script is a module that can be imported from the current folder",
            repr(name),
            "Leave out --module for a file" if os.path.exists(name) else "Check its name, and the current folder",
        )
