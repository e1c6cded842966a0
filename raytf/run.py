"""`raytf run`: any TensorFlow script on Ray actors, a process for each task of its cluster. Driver side."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence

import click
import ray
from ray._private import services
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group

from raytf import resources, roles, servers, settings
from raytf.allocator import allocator
from raytf.errors import ConfigError, first_line
from raytf.roles import Exit, Task
from raytf.tasks import Runner, identity

# A task that failed because another had gone often ends before that one.
_CAUSE_SECONDS = 5.0
_GRACE_SECONDS = 5.0
# When the training has ended, an evaluator may still be at its last checkpoint.
_EVALUATOR_SECONDS = 30.0
_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """What to run, and on what.

    Args:
        script: path of a Python file, or the name of a module.
        arguments: of the script.
        module: whether it is a module.
        num_workers: processes that train, at least 1.
        num_ps: parameter servers; with them comes a chief that coordinates.
        chief: call the first worker chief.
        evaluator: one more process that evaluates.
        cpus_per_worker, gpus_per_worker: of each worker and the evaluator; others get CPUs only.
        max_restarts: how often failed tasks are started anew.
        environment: variables of the processes.
        legacy_keras: start them with Keras 2 in the place of Keras 3.
        quiet: show what the first task prints only.

    Raises:
        ConfigError: an argument is wrong.
    """

    script: str
    arguments: Sequence[str] = ()
    module: bool = False
    num_workers: int = 1
    num_ps: int = 0
    chief: bool = False
    evaluator: bool = False
    cpus_per_worker: int = 1
    gpus_per_worker: int = 0
    max_restarts: int = 0
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    legacy_keras: bool = False
    quiet: bool = False

    def __post_init__(self):
        self.tasks()
        for name, least in (("cpus_per_worker", 1), ("gpus_per_worker", 0), ("max_restarts", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}", getattr(self, name), "Raise it")
        if self.module:
            if not _found(self.script):
                raise ConfigError(
                    "With --module, the script is a module that can be imported from the current folder",
                    repr(self.script),
                    "Check its name, or leave out --module for a file",
                )
        elif not os.path.exists(self.script):
            raise ConfigError("The script must be a file that exists", repr(self.script), "Check the path")
        if self.legacy_keras and importlib.util.find_spec("tf_keras") is None:
            raise ConfigError(
                "Keras 2 is the package tf_keras", "--legacy-keras without it", "Install it: pip install tf_keras"
            )

    def tasks(self) -> list[Task]:
        """The tasks of its cluster."""
        return roles.tasks(self.num_workers, num_ps=self.num_ps, chief=self.chief, evaluator=self.evaluator)

    def bundle(self, task: Task) -> dict[str, float]:
        """Resources of a task."""
        trains = task.role in ("worker", "evaluator") or not self.num_ps
        gpus = {"GPU": self.gpus_per_worker} if trains and self.gpus_per_worker else {}
        return {"CPU": self.cpus_per_worker, **gpus}

    def variables(self, task: Task) -> dict[str, str]:
        """The environment of a task's process, without TF_CONFIG; what the user gave is laid over it."""
        cpus = self.cpus_per_worker
        made = allocator(cpus) | {
            "OMP_NUM_THREADS": str(cpus),
            **settings.variables(cpus, max(servers.THREADS if self.num_ps else 2, cpus)),
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        if "GPU" not in self.bundle(task):
            made["CUDA_VISIBLE_DEVICES"] = "-1"
        if self.legacy_keras:
            made["TF_USE_LEGACY_KERAS"] = "1"
        return made | dict(self.environment)


def run(script: Script, address: str | None = None) -> int:
    """Runs a script on all tasks of its cluster until it has ended.

    Args:
        script: what to run.
        address: of the Ray cluster; None takes the one of RAY_ADDRESS or of the job, or starts a Ray here.

    Returns:
        0, or the exit code of the task that failed first, 128 and its number for a signal.

    Raises:
        ResourceError: the cluster can never hold the tasks.
    """
    connect(address)
    with _terminated():
        cluster = _Cluster(script)
        try:
            return cluster.run()
        except KeyboardInterrupt as interrupt:
            number = interrupt.args[0] if interrupt.args else signal.SIGINT
            _say(f"stopped by {signal.Signals(number).name}; all processes are ended")
            return 128 + number
        finally:
            cluster.close()


def connect(address: str | None) -> None:
    """Connects to Ray; the current folder travels to the other nodes."""
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, runtime_env=_runtime_env(address))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            "A script runs on a Ray cluster that answers, and its folder must be one that Ray can send",
            f"{address or 'the default address'}: {first_line(error)}",
            "Check --address and, where the cluster has a token, RAY_AUTH_MODE and the token",
        ) from error


def _runtime_env(address: str | None) -> dict:
    jobs = json.loads(os.environ.get(_JOB_CONFIG, "{}")).get("runtime_env") or {}
    if "working_dir" in jobs or services.canonicalize_bootstrap_address(address) is None:
        return {}  # the job has sent its folder, or a Ray is started for this machine only
    return {"working_dir": os.getcwd(), "excludes": [".git", ".venv"]}


def _found(module: str) -> bool:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
    finally:
        sys.path.remove(os.getcwd())


@contextlib.contextmanager
def _terminated():
    """SIGTERM, as `ray job stop` sends it, is an interrupt."""

    def interrupt(number, frame):
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Cluster:
    """The actors of a script's tasks."""

    def __init__(self, script: Script):
        self._script, self._tasks = script, script.tasks()
        self._group, self._runners = None, {}
        self._restarts = 0
        self._width = max(len(str(task)) for task in self._tasks)

    def run(self) -> int:
        """Starts all tasks, anew where they fail and may be; the exit code."""
        resources.check_bundles([self._script.bundle(task) for task in self._tasks])
        while True:
            if not self._runners:
                self._open()
            self._start(self._tasks)
            exits, lost = self._follow()
            first = roles.first_failure(exits)
            if first is None:
                self._end(exits)
                return 0
            self._explain(first, exits)
            if self._restarts == self._script.max_restarts:
                return exits[first].status
            self._restarts += 1
            _say(f"restart {self._restarts} of {self._script.max_restarts}: all tasks")
            if lost:
                self.close()
            else:
                self._stop(self._tasks)

    def _open(self) -> None:
        bundles = [self._script.bundle(task) for task in self._tasks]
        self._group = placement_group(bundles, strategy="PACK")
        if not self._group.wait(10):
            _say("waiting for the cluster's resources: other work holds them")
            ray.get(self._group.ready())
        for i, (task, bundle) in enumerate(zip(self._tasks, bundles, strict=True)):
            self._runners[task] = resources.placed_actor(Runner, self._group, i, bundle, max_concurrency=4)

    def _start(self, tasks: Sequence[Task]) -> None:
        """Starts tasks: all with new addresses, or one where it stood."""
        if len(tasks) == len(self._tasks):
            folder = identity(os.getcwd())
            found = ray.get([self._runners[task].reserve.remote(folder) for task in tasks])
            self._configs = roles.environment(dict(zip(tasks, found, strict=True)))
        script = self._script
        command = [script.script if script.module else self._path(), *script.arguments]
        ray.get(
            [
                self._runners[task].start.remote(
                    command, script.module, {"TF_CONFIG": self._configs[task]} | script.variables(task)
                )
                for task in tasks
            ]
        )

    def _path(self) -> str:
        """The script as all nodes find it: within the current folder, which travels, or at its place on all."""
        path = os.path.relpath(self._script.script)
        return os.path.abspath(self._script.script) if path.startswith(os.pardir) else path

    def _follow(self) -> tuple[dict[Task, Exit], bool]:
        """Shows what tasks print until the run is decided; (how tasks ended, in order; whether an actor was lost)."""
        exits: dict[Task, Exit] = {}
        lost, until = False, None
        pending = {self._runners[task].follow.remote(): task for task in self._tasks}
        while pending:
            left = None if until is None else max(0.0, until - time.monotonic())
            done, _ = ray.wait(list(pending), timeout=left)
            for ref in done:
                task = pending.pop(ref)
                end, gone = self._show(task, ref)
                lost = lost or gone
                if end is None:
                    pending[self._runners[task].follow.remote()] = task
                elif end.code and not gone and roles.alone(task, self._tasks) and self._may_restart(task, end):
                    self._start([task])
                    pending[self._runners[task].follow.remote()] = task
                else:
                    exits[task] = end
            first = roles.first_failure(exits)
            if first is not None:
                until = until or time.monotonic() + _CAUSE_SECONDS
                if not exits[first].is_consequence() or time.monotonic() >= until:
                    break
            elif roles.needed(self._tasks) <= exits.keys():
                break
        return exits, lost

    def _may_restart(self, task: Task, end: Exit) -> bool:
        if self._restarts == self._script.max_restarts:
            return False
        self._restarts += 1
        _say(f"{task} failed ({end.reason()}); restart {self._restarts} of {self._script.max_restarts}: it alone")
        return True

    def _show(self, task: Task, ref) -> tuple[Exit | None, bool]:
        """Prints what is new; (how the task ended, if it did; whether its actor was lost)."""
        try:
            events = ray.get(ref)
        except RayActorError as error:
            return Exit(-signal.SIGKILL, f"its node or Ray's actor was lost: {error}"), True
        for kind, value in events:
            if kind == "exit":
                return value, False
            if not self._script.quiet or task == self._tasks[0]:
                color = _COLORS[self._tasks.index(task) % len(_COLORS)]
                name = click.style(f"[{task}]".ljust(self._width + 2), fg=color)
                click.echo(f"{name} {value}", err=kind == "stderr")
        return None, False

    def _explain(self, first: Task, exits: Mapping[Task, Exit]) -> None:
        ended = [str(task) for task, end in exits.items() if not end.code]
        if exits[first].is_consequence() and ended:
            _say(
                f"{', '.join(ended)} ended while others went on; every worker must make the same number of steps. "
                f"{first} then failed: {exits[first].reason()}"
            )
        else:
            _say(f"{first} failed first: {exits[first].reason()}")
        if self._script.quiet and first != self._tasks[0]:
            click.echo(exits[first].error, err=True)

    def _end(self, exits: Mapping[Task, Exit]) -> None:
        """Ends the tasks that wait for ever; an evaluator may go on for a while."""
        rest = [task for task in self._tasks if task not in exits]
        self._stop([task for task in rest if task.role != "evaluator"])
        for task in rest:
            if task.role == "evaluator":
                until = time.monotonic() + _EVALUATOR_SECONDS
                while (left := until - time.monotonic()) > 0:
                    ref = self._runners[task].follow.remote()
                    if not ray.wait([ref], timeout=left)[0] or self._show(task, ref)[0] is not None:
                        break

    def _stop(self, tasks: Sequence[Task]) -> None:
        with contextlib.suppress(RayActorError):
            ray.get([self._runners[task].stop.remote(_GRACE_SECONDS) for task in tasks])

    def close(self) -> None:
        """Ends every process."""
        self._stop(list(self._runners))
        for runner in self._runners.values():
            ray.kill(runner)
        self._runners.clear()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def _say(text: str) -> None:
    click.echo(f"raytf run: {text}", err=True)
