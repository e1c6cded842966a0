"""`raytf run`: any TensorFlow script on Ray actors, a process for each task of its cluster. Driver side."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import click
import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group

from raytf import activity, logs, timeouts
from raytf.collectives import ring_token
from raytf.errors import ConfigError, RaytfError, first_line, one_line
from raytf.launch.runner import BEAT_INTERVAL, TaskLocation, TaskRunner
from raytf.launch.spec import LaunchSpec
from raytf.runtime import cores, resources, roles, settings, shared_folders
from raytf.runtime.answers import NoAnswerError, collect_answers, in_completion_order
from raytf.runtime.connection import connect, resolve_address
from raytf.runtime.hang_watch import HangMonitor
from raytf.runtime.roles import Task, TaskExit

logger = logs.get_logger(__name__)

# Seconds between two checks for silent tasks. The pause of a driver that was itself stopped counts no more than twice
# that.
_TICK_INTERVAL = 1.0
# Seconds of a wait for resources or processes before its first report, and between two reports.
_PATIENCE_INTERVAL = 10.0
_PATIENCE_WITH_PROCESSES_INTERVAL = 30.0
_AGAIN_INTERVAL = 60.0
_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def connect_cluster(script: LaunchSpec, address: str | None = None) -> None:
    """Connects to the Ray cluster on which `launch_script` runs a script.

    Args:
        script: Script and its tasks.
        address: Address of the Ray cluster; None uses RAY_ADDRESS or the job's, or starts Ray on this machine.

    Raises:
        ConfigError: The cluster does not answer, or requires a token that is missing or another one.
    """
    environment = _runtime_env(address)
    bundles = [script.bundle(task) for task in script.tasks()]
    connect(bundles, address, logging_level=logging.ERROR, log_to_driver=False, runtime_env=environment)


def launch_script(script: LaunchSpec) -> int:
    """Runs a script on all tasks of its cluster until it has ended, see `connect_cluster`.

    Args:
        script: Script and its tasks.

    Returns:
        0, or the exit code of the task that failed first: for a signal, 128 plus its number.

    Raises:
        ResourceError: The cluster can never hold the tasks.
        StartError, NoAnswerError: A task's process does not start.
    """
    with _sigterm_as_interrupt() as signals:
        cluster = ScriptCluster(script)
        try:
            return cluster.run()
        except KeyboardInterrupt:
            number = signals[0] if signals else signal.SIGINT
            name = signal.Signals(number).name
            logger.info(f"stopped by {name}; all processes are ended. The same command starts the script again")
            return 128 + number
        finally:
            cluster.close()


def _runtime_env(address: str | None) -> dict:
    jobs = json.loads(os.environ.get(_JOB_CONFIG, "{}")).get("runtime_env") or {}
    if "working_dir" in jobs or resolve_address(address) is None:
        return {}  # the job has sent its folder, or Ray is started for this machine only
    return {"working_dir": os.getcwd(), "excludes": [".git", ".venv"]}


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[list[int]]:
    """Handles SIGTERM, as sent by `ray job stop`, as an interrupt; yields a list for its number."""
    signals: list[int] = []

    def interrupt(number, frame):
        signals.append(number)  # during a wait, Ray replaces the raised exception by its own interrupt
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, previous)


def _start_error(name: str, error: Exception) -> Exception:
    """Returns the error of a process that did not start. That of a wrong option is raised unchanged."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, ConfigError) else StartError(f"{name} did not start: {one_line(error)}")


class StartError(RaytfError, RuntimeError):
    """A task's process did not start."""


class ScriptCluster:
    """The actors of a script's tasks."""

    def __init__(self, script: LaunchSpec):
        self._script, self._tasks = script, script.tasks()
        self._group, self._runners = None, {}
        self._locations: dict[Task, TaskLocation] = {}
        self._numbers: dict[Task, int] = {}  # of the script that runs for a task now: `TaskRunner.start`
        self._requests: dict[object, Task] = {}  # pending results of `TaskRunner.follow`
        self._silent: dict[Task, float] = {}  # seconds since the request to a task's runner
        self._answered_at = 0.0
        self._lost: set[Task] = set()  # tasks whose runner does not answer
        self._reported_folders: set[str] = set()
        self._restarts = 0
        self._hangs: HangMonitor | None = None
        self._ranks: dict[int, Task] = {}
        self._width = max(len(str(task)) for task in self._tasks)

    def run(self) -> int:
        """Starts all tasks, and restarts them after failures as allowed; returns the exit code."""
        while True:
            if not self._runners:
                self._open()
            self._start(self._tasks)
            with self._hang_detection():
                exits, lost = self._run_until_decided()
            first = roles.first_failure(exits)
            if first is None:
                self._end(exits)
                return 0
            self._describe_failure(first, exits)
            if self._restarts == self._script.max_restarts:
                return exits[first].status
            self._restarts += 1
            count = f"restart {self._restarts} of {self._script.max_restarts}"
            logger.warning(f"{count}: all tasks start again, as {first} failed")
            if lost:
                self.close()
            else:
                self._stop(self._tasks)

    def _open(self) -> None:
        bundles = [self._script.bundle(task) for task in self._tasks]
        resources.check_bundles(bundles)
        self._group = placement_group(bundles, strategy="PACK")
        began = time.monotonic()
        say = _wait_reporter(
            lambda: (
                f"waiting for the cluster's resources ({_describe_needs(bundles)}): until other work ends or nodes come"
                f"; {resources.held_by_others()}"
            )
        )
        while not self._group.wait(_TICK_INTERVAL):
            if say():
                resources.check_bundles(bundles, time.monotonic() - began)  # a node may be lost
        for i, (task, bundle) in enumerate(zip(self._tasks, bundles, strict=True)):
            self._runners[task] = resources.placed_actor(TaskRunner, self._group, i, bundle, max_concurrency=6)

    def _start(self, tasks: Sequence[Task]) -> None:
        """Starts tasks: all with new addresses, or one at its former address."""
        if len(tasks) == len(self._tasks):
            folder = shared_folders.describe_folder(os.getcwd())
            wanted = timeouts.get(), self._script.listening(), self._script.cores_to_claim()
            refs = [self._runners[task].reserve.remote(folder, *wanted) for task in tasks]
            locations = self._answers(tasks, refs, timeouts.get().process_start, "the start of its process")
            self._locations = dict(zip(tasks, locations, strict=True))
            self._configs = roles.environment({task: location.address for task, location in self._locations.items()})
            reserved = self._locations.values()
            agreed = cores.agree_on_pinning(
                [location.address for location in reserved], [location.claimed for location in reserved]
            )
            self._pinned = dict(zip(self._locations, agreed, strict=True))
            self._token = ring_token.new_token()
            self._report_folders(folder.path)
        script = self._script
        frozen_s = script.frozen_after or math.inf
        refs = [
            self._runners[task].start.remote(
                [_path(*script.script_of(task)), *script.arguments_of(task)],
                script.script_of(task)[1],
                {"TF_CONFIG": self._configs[task]} | script.variables(task),
                self._token,
                frozen_s,
                self._pinned[task],
            )
            for task in tasks
        ]
        self._requests = {ref: task for ref, task in self._requests.items() if task not in tasks}
        self._numbers |= zip(
            tasks, self._answers(tasks, refs, timeouts.get().script_start, "the start of its script"), strict=True
        )
        for task in tasks:
            self._request(task)

    def _answers(self, tasks: Sequence[Task], refs: list, seconds: float, action: str) -> list:
        """Returns the runners' results; reports which ones are pending.

        Raises:
            StartError, NoAnswerError: An actor failed, or did not answer.
        """
        report_late = _wait_reporter(
            lambda: f"waiting for {_unready_tasks(tasks, refs)}: {action}", _PATIENCE_WITH_PROCESSES_INTERVAL
        )
        return collect_answers(
            refs,
            seconds,
            action,
            names=[str(task) for task in tasks],
            check=report_late,
            failure=_start_error,
        )

    def _report_folders(self, folder: str) -> None:
        """Reports, once per host, the script's folder there if it is not the current one."""
        for task in self._locations.values():
            if task.folder != folder and task.host not in self._reported_folders:
                self._reported_folders.add(task.host)
                logger.warning(
                    f"{task.host} does not see the current folder; the script runs there in a copy, {task.folder}, "
                    "and what it writes into it stays there. Start from a folder that all nodes see to get that back"
                )

    @contextlib.contextmanager
    def _hang_detection(self) -> Iterator[None]:
        """Runs hang detection if all workers make steps together."""
        tasks = [task for task in self._tasks if task.role in ("chief", "worker")]
        if self._script.num_ps or not self._script.hang_timeout:
            yield
            return
        refs = [self._runners[task].process.remote() for task in tasks]
        answers = self._answers(tasks, refs, timeouts.get().script_start, "the process of its script")
        locations = dict(enumerate(answers))
        runners = [self._runners[task] for task in tasks]

        def execute(rank, function):
            return runners[rank].snapshot.remote() if function is activity.snapshot else runners[rank].stack.remote()

        limit = self._script.hang_timeout
        first = max(limit, settings.FIRST_STEP_TIMEOUT)
        self._ranks = dict(enumerate(tasks))
        names = {rank: str(task) for rank, task in self._ranks.items()}
        self._hangs = HangMonitor(execute, locations, limit, first, names=names, through_others=True)
        try:
            yield
        finally:
            self._hangs.close()
            self._hangs = None

    def _hung_tasks(self, exits: Mapping[Task, TaskExit]) -> dict[Task, TaskExit]:
        """Returns tasks that end the run because they hang."""
        if self._hangs is None:
            return {}
        for rank, task in self._ranks.items():
            if task in exits:
                self._hangs.record_finished(rank)
        hanging = {self._ranks[rank]: error for rank, error in self._hangs.ended.items()}
        return {
            task: TaskExit(-signal.SIGKILL, why=f"hangs: {error}")
            for task, error in hanging.items()
            if task not in exits
        }

    def _run_until_decided(self) -> tuple[dict[Task, TaskExit], bool]:
        """Prints the tasks' output until the run is decided; returns (exits in order, whether an actor was lost)."""
        exits: dict[Task, TaskExit] = {}
        lost, deadline = False, None
        while self._requests:
            for task, end, is_lost in self._receive():
                lost = lost or is_lost
                if (
                    end.code
                    and not is_lost
                    and roles.can_restart_by_itself(task, self._tasks)
                    and self._may_restart(task, end)
                ):
                    self._start([task])
                else:
                    exits[task] = end
            exits |= self._hung_tasks(exits)
            first = roles.first_failure(exits)
            if first is not None:
                deadline = deadline or time.monotonic() + timeouts.get().task_cause
                if not exits[first].is_consequence():
                    break
                if time.monotonic() >= deadline:
                    exits |= self._stopped_tasks(exits)
                    break
            elif roles.ends_run(self._tasks) <= exits.keys():
                break
        return exits, lost

    def _may_restart(self, task: Task, end: TaskExit) -> bool:
        if self._restarts == self._script.max_restarts:
            return False
        self._restarts += 1
        number = f"restart {self._restarts} of {self._script.max_restarts}"
        logger.warning(f"{task} failed ({end.reason()}); {number}: it starts again alone")
        return True

    def _request(self, task: Task) -> None:
        self._requests[self._runners[task].follow.remote(self._numbers[task])] = task
        self._silent[task] = 0.0

    def _receive(self) -> list[tuple[Task, TaskExit, bool]]:
        """Prints new output of tasks; returns (task, exit, whether its actor was lost) of those that have ended."""
        done, silent = [], list(self._requests)
        if silent:
            ray.wait(silent, timeout=_TICK_INTERVAL)
            done, silent = ray.wait(silent, num_returns=len(silent), timeout=0)  # all that have answered, not one
        ended = []
        for ref in done:
            task = self._requests.pop(ref)
            end, is_lost = self._show(task, ref)
            if end is None:
                self._request(task)
            else:
                ended.append((task, end, is_lost))
        current_time = time.monotonic()
        passed, self._answered_at = min(current_time - self._answered_at, 2 * _TICK_INTERVAL), current_time
        for ref in silent:
            task = self._requests[ref]
            self._silent[task] += passed
            if self._silent[task] >= BEAT_INTERVAL + timeouts.get().host_silent:
                del self._requests[ref]
                self._lost.add(task)
                host = self._locations[task].host
                why = f"timeout: its host {host}, or Ray's process there, does not answer: frozen or gone"
                ended.append((task, TaskExit(-signal.SIGKILL, why=why), True))
        return ended

    def _show(self, task: Task, ref) -> tuple[TaskExit | None, bool]:
        """Prints new output; returns (exit of the task, or None; whether its actor was lost)."""
        try:
            events = ray.get(ref)
        except RayActorError as error:
            why = f"its host {self._locations[task].host}, or Ray's process there, was lost: {first_line(error)}"
            return TaskExit(-signal.SIGKILL, why=why), True
        for kind, value in events:
            if kind == "exit":
                return value, False
            if not self._script.quiet or task == self._tasks[0]:
                color = _COLORS[self._tasks.index(task) % len(_COLORS)]
                name = click.style(f"[{task}]".ljust(self._width + 2), fg=color)
                click.echo(f"{name} {value}", err=kind == "stderr")
        return None, False

    def _stopped_tasks(self, exits: Mapping[Task, TaskExit]) -> dict[Task, TaskExit]:
        """Returns tasks whose process is stopped now: others may fail before the stop has lasted long enough."""
        refs = [self._runners[task].stopped_exit.remote() for task in self._tasks if task not in exits]
        tasks = [task for task in self._tasks if task not in exits]
        exits_of = {}
        with contextlib.suppress(NoAnswerError):
            for index, ref in in_completion_order(refs, timeouts.get().task_cause, "the state of its process"):
                with contextlib.suppress(RayActorError):
                    if (end := ray.get(ref)) is not None:
                        exits_of[tasks[index]] = end
        return exits_of

    def _describe_failure(self, first: Task, exits: Mapping[Task, TaskExit]) -> None:
        ended = [str(task) for task, end in exits.items() if not end.code]
        limit = self._script.max_restarts
        is_last = self._restarts == limit
        fate = f". All processes are ended, as --max-restarts {limit} allows no restart" if is_last else ""
        if exits[first].is_consequence() and ended:
            logger.warning(
                f"{', '.join(ended)} ended while others continued; every worker must make the same number of steps. "
                f"{first} then failed: {exits[first].reason()}{fate}"
            )
        else:
            logger.warning(f"{first} failed first: {exits[first].reason()}{fate}")
        if self._script.quiet and first != self._tasks[0] and exits[first].error:
            click.echo(exits[first].error, err=True)

    def _end(self, exits: Mapping[Task, TaskExit]) -> None:
        """Ends the tasks that wait forever; an evaluator may continue for a while, with its output shown."""
        waiting = {task for task in self._tasks if task not in exits}
        evaluators = {task for task in waiting if task.role == "evaluator"}
        self._request_stop(waiting - evaluators)
        for task, end in self._drain(evaluators, timeouts.get().last_evaluation).items():
            if end.code:
                logger.warning(f"{task} failed after the end of the training: {end.reason()}")
            evaluators.discard(task)
        for task in evaluators:
            logger.warning(f"timeout: {task} is ended, {timeouts.get().last_evaluation:g} s after the training")
        self._request_stop(evaluators)
        self._drain(waiting, 2 * timeouts.get().script_grace)

    def _drain(self, tasks: set[Task], seconds: float) -> dict[Task, TaskExit]:
        """Prints the output of tasks until they have ended, or for some seconds; returns their exits."""
        deadline, exits = time.monotonic() + seconds, {}
        while tasks & set(self._requests.values()) and time.monotonic() < deadline:
            exits |= {task: end for task, end, _ in self._receive()}
        return {task: end for task, end in exits.items() if task in tasks}

    def _request_stop(self, tasks: Iterable[Task]) -> list:
        return [
            self._runners[task].stop.remote(timeouts.get().script_grace) for task in tasks if task not in self._lost
        ]

    def _stop(self, tasks: Iterable[Task]) -> None:
        with contextlib.suppress(NoAnswerError):  # Ray kills tasks that do not answer, or they are lost
            for _ in in_completion_order(
                self._request_stop(tasks), 4 * timeouts.get().script_grace, "the end of its script"
            ):
                pass

    def close(self) -> None:
        """Ends every process."""
        self._stop(self._runners)
        for runner in self._runners.values():
            ray.kill(runner)
        self._runners.clear()
        self._requests.clear()
        self._lost.clear()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def _path(script: str, module: bool) -> str:
    """Returns a script's path on all nodes: relative to the current folder, which is copied, or absolute."""
    path = os.path.relpath(script)
    return script if module else os.path.abspath(script) if path.startswith(os.pardir) else path


def _wait_reporter(text: Callable[[], str], patience_s: float = _PATIENCE_INTERVAL) -> Callable[[], bool]:
    """Returns a function to call during a wait: it reports the wait at intervals, and returns whether it did."""
    due = [time.monotonic() + patience_s]

    def maybe() -> bool:
        if time.monotonic() < due[0]:
            return False
        due[0] = time.monotonic() + _AGAIN_INTERVAL
        logger.info(text())
        return True

    return maybe


def _unready_tasks(tasks: Sequence[Task], refs: list) -> str:
    waiting = set(ray.wait(refs, num_returns=len(refs), timeout=0)[1])
    return ", ".join(str(task) for task, ref in zip(tasks, refs, strict=True) if ref in waiting)


def _describe_needs(bundles: Sequence[Mapping[str, float]]) -> str:
    """Returns the resources that bundles need, and those that are free, for a message."""
    free = ray.available_resources()
    amounts = (
        f"{amount:g} {name}, {free.get(name, 0):g} free" for name, amount in resources.total_resources(bundles).items()
    )
    return f"{len(bundles)} task(s): {'; '.join(amounts)}"
