"""Fault injection and longer deadlines, for tests of models, callbacks and clusters.

Over 500 lines: one fault after another, each with its documentation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import pathlib
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from raytf import timeouts, validation
from raytf.collectives import ring
from raytf.errors import ConfigError
from raytf.logs import warn_user
from raytf.runtime import packet_filter
from raytf.storage import injected_faults, stored_json


@contextlib.contextmanager
def scale_timeouts(times: float) -> Iterator[None]:
    """Multiplies the deadlines of raytf until the context ends.

    It applies to this process, and to all processes that runs start meanwhile. Timeouts that are arguments, such as
    `hang_timeout_s`, stay.

    Args:
        times: The factor, above 0; 5 or 10 on a busy machine.

    Raises:
        ConfigError: `times` is no such number.

    Example:
        >>> import raytf.testing
        >>> with raytf.testing.scale_timeouts(5):
        ...     pass
    """
    if isinstance(times, bool) or not isinstance(times, (int, float)) or not 0 < times < math.inf:
        raise ConfigError("times of scale_timeouts must be a number more than 0", repr(times), "For example 5")
    with timeouts.temporarily(timeouts.get().scaled(times)):
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """Fault of one worker before a step.

    Args:
        rank: World rank of the worker, from 0.
        step: Step before which the fault happens, from 0. With several steps per execution it happens before the first
            execution that begins at this step or a later one.
        epoch: Epoch in which `step` counts, from 0, or None to count steps over the whole run.

    Raises:
        ConfigError: A value is no integer of at least 0.
    """

    rank: int
    step: int
    epoch: int | None = None

    def __post_init__(self):
        for name in ("rank", "step") if self.epoch is None else ("rank", "step", "epoch"):
            validation.check_whole(f"{name} of a fault", getattr(self, name), 0)

    def __str__(self) -> str:
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("rank", "step", "epoch")]
        values = ", ".join(f"{name} {getattr(self, name)}" for name in names)
        step = f"step {self.step}" if self.epoch is None else f"step {self.step} of epoch {self.epoch}"
        return f"{type(self).__name__.lower()} worker {self.rank} before {step}" + (f" ({values})" if values else "")

    def due(self, epoch: int, step: int, steps: int | None) -> bool:
        """Returns whether a step is the fault's step or a later one.

        Args:
            epoch: Epoch of the step, from 0.
            step: Step within that epoch, from 0.
            steps: Number of steps in an epoch, or None if it is not known.
        """
        if self.epoch is not None:
            return (epoch, step) >= (self.epoch, self.step)
        return epoch * (steps or 0) + step >= self.step

    def run_step(self, steps: int | None) -> int:
        """Returns the step of the fault, counted over the run; `steps` is the number of steps in an epoch."""
        return self.step + (self.epoch or 0) * (steps or 0)

    def happen(self) -> None:
        """Causes the fault, in the worker's process."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill(Fault):
    """Kills the worker's process (SIGKILL), as the kernel does when it is out of memory.

    Args:
        rank: World rank of the worker, from 0.
        step: Step before which the fault happens, from 0.
        epoch: Epoch in which `step` counts, from 0, or None to count steps over the whole run.

    Raises:
        ConfigError: A value is no integer of at least 0.
    """

    def happen(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop(Fault):
    """Stops the worker's process (SIGSTOP), until another process continues or kills it.

    Args:
        rank: World rank of the worker, from 0.
        step: Step before which the fault happens, from 0.
        epoch: Epoch in which `step` counts, from 0, or None to count steps over the whole run.

    Raises:
        ConfigError: A value is no integer of at least 0.
    """

    def happen(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fail(Fault):
    """Raises a RuntimeError in the worker.

    Args:
        rank: World rank of the worker, from 0.
        step: Step before which the fault happens, from 0.
        epoch: Epoch in which `step` counts, from 0, or None to count steps over the whole run.
        text: Text of the error.

    Raises:
        ConfigError: A value is no integer of at least 0.
    """

    text: str = "injected by a FaultPlan"

    def happen(self) -> None:
        raise RuntimeError(self.text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slow(Fault):
    """Delays the worker, which makes it a straggler for one step.

    Args:
        rank: World rank of the worker, from 0.
        step: Step before which the fault happens, from 0.
        epoch: Epoch in which `step` counts, from 0, or None to count steps over the whole run.
        seconds: Delay in seconds, above 0.

    Raises:
        ConfigError: A value is out of its range.
    """

    seconds: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        _check_seconds(self.seconds)

    def happen(self) -> None:
        time.sleep(self.seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CutOff(Fault):
    """Cuts the worker's connections to its neighbours in raytf's all-reduce ring; its process survives.

    Connections of Ray and of TensorFlow's own collectives stay. It needs no privileges. It does not simulate a host
    without any network, which takes a network namespace or a cable.

    Args:
        rank: World rank of the worker, from 0.
        step: Step before which the fault happens, from 0.
        epoch: Epoch in which `step` counts, from 0, or None to count steps over the whole run.
        silent: False shuts the connections down, and both ends notice at once. True has the kernel drop all packets of
            these connections, as a broken switch does. One end's kernel then gives up after about 35 s. True needs
            Linux, and both neighbours on other hosts.

    Raises:
        ConfigError: A value is out of its range. In a run: it has no ring, as with one worker or GPUs, or `silent` is
            not possible in it.
    """

    silent: bool = False

    def __post_init__(self):
        super().__post_init__()
        validation.check_flag("silent of a fault", self.silent)

    def happen(self) -> None:
        connections = ring.connections()
        if not connections:
            rule = "A CutOff cuts connections of raytf's ring, over which several workers sum on CPUs"
            raise ConfigError(rule, f"{self}, in a process without", "Leave it out, or train with two workers or more")
        if self.silent and (
            sys.platform != "linux" or any(connection.family == socket.AF_UNIX for connection in connections)
        ):
            rule = "A silent CutOff is between hosts, under Linux"
            raise ConfigError(rule, f"{self}, which has a neighbour on its own host", "Leave out silent, or use Stop")
        for connection in connections:
            if self.silent:
                packet_filter.attach_filter(connection, packet_filter.NOTHING)
            else:
                with contextlib.suppress(OSError):  # the other end has closed it
                    connection.shutdown(socket.SHUT_RDWR)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FillDisk(Fault):
    """Fills the disk of a folder with a file, on the worker's host (Linux). Use a disk of the test alone, as a tmpfs.

    Other writes to that disk fail with "No space left on device". With `steps` or `seconds` the file is removed then,
    or at the end of the training. A worker that was killed before removes it after its restart. With neither, the file
    stays until `remove`.

    Args:
        rank: World rank of the worker, from 0.
        step: Step before which the fault happens, from 0.
        epoch: Epoch in which `step` counts, from 0, or None to count steps over the whole run.
        folder: Path of a folder that exists on the worker's host.
        size: Size of the file in bytes, at least 1. None, or more than the free space, fills the disk to the last
            block.
        steps: Number of steps of the run after which the file is removed, at least 1.
        seconds: Seconds after which the file is removed, above 0, also while no step is made.

    Raises:
        ConfigError: A value is out of its range, or both `steps` and `seconds` are given. In a run: the folder does
            not exist.
    """

    folder: str
    size: int | None = None
    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.folder, str | os.PathLike) or not os.fspath(self.folder):
            raise ConfigError("folder of a fault must be a path", repr(self.folder), "Pass a path")
        object.__setattr__(self, "folder", os.fspath(self.folder))
        for name in ("size", "steps"):
            if getattr(self, name) is not None:
                validation.check_whole(f"{name} of a fault", getattr(self, name), 1)
        if self.seconds is not None:
            _check_seconds(self.seconds)
        if self.steps is not None and self.seconds is not None:
            rule = "A disk has room again after some steps, or after some seconds"
            raise ConfigError(rule, f"steps={self.steps} and seconds={self.seconds}", "Leave one of them out")

    @property
    def path(self) -> str:
        """Path of the file that fills the disk."""
        return os.path.join(self.folder, f"raytf-{_name(self)}")

    def happen(self) -> None:
        if not os.path.isdir(self.folder):
            rule = "A FillDisk fills the disk of a folder that is there"
            raise ConfigError(rule, f"{self}, which is none on {socket.gethostname()}", "Make it before the run")
        with open(self.path, "wb", buffering=0) as file:
            _fill(file.fileno(), self.size)

    def remove(self) -> None:
        """Removes the file, on its host, if it exists."""
        pathlib.Path(self.path).unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailWrite(Fault):
    """Makes the write of the next checkpoint fail, after its bytes are written and before it is complete.

    It fails in the process that writes raytf's checkpoints, at the point of a storage error. These are the checkpoints
    of a `KerasTrainer`, and those within epochs of a sweep's trials and of `raytf.fit(name=...)`. That process retries.
    If no checkpoint follows the fault, a warning at the end of the training reports it. The fault ends with the
    worker's process.

    Args:
        rank: 0, the worker that writes checkpoints.
        step: Step before which the fault happens, from 0.
        epoch: Epoch in which `step` counts, from 0, or None to count steps over the whole run.
        number: Number of the OSError, a constant of the module `errno`.
        times: Number of consecutive attempts that fail, 1 to 1000.

    Raises:
        ConfigError: A value is out of its range.
    """

    number: int = errno.EIO
    times: int = 1

    def __post_init__(self):
        super().__post_init__()
        if self.rank:
            raise ConfigError("A FailWrite is of rank 0, which writes the checkpoints", f"rank={self.rank}", "Use 0")
        if type(self.number) is not int or self.number not in errno.errorcode:
            rule = "number of a fault must be one of the module errno"
            raise ConfigError(rule, repr(self.number), "Give errno.EIO, for example")
        validation.check_whole("times of a fault", self.times, 1)
        if self.times > _MOST_TIMES:
            raise ConfigError(
                f"times of a fault must be at most {_MOST_TIMES}", repr(self.times), f"Pass {_MOST_TIMES} or less"
            )

    def happen(self) -> None:
        injected_faults.plan_faults(self.number, self.times)


_MOST_TIMES = 1000
_KINDS = {kind.__name__: kind for kind in (Kill, Stop, Fail, Slow, CutOff, FillDisk, FailWrite)}
# Bytes that are allocated at a time; half as many whenever the disk has no room for them.
_FIRST_BLOCK = 1 << 30


def _check_seconds(seconds: Any) -> None:
    if isinstance(seconds, bool) or not (isinstance(seconds, int | float) and 0 < seconds < 1e6):
        raise ConfigError("seconds of a fault must be a number above 0", repr(seconds), "Pass a number above 0")


def _fill(descriptor: int, size: int | None) -> None:
    """Allocates `size` bytes for a file, or all free space of its disk."""
    done, block = 0, _FIRST_BLOCK
    while block and (size is None or done < size):
        block = block if size is None else min(block, size - done)
        try:
            os.posix_fallocate(descriptor, done, block)
            done += block
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            block //= 2


@dataclasses.dataclass(frozen=True)
class FaultPlan:
    """Injects faults into a run, each once, over all its restarts.

    `callbacks=lambda config: [plan.callback(folder, workers=3)]` injects them into a `KerasTrainer`, and
    `callbacks=[plan.callback(folder)]` into `raytf.fit` or `model.fit`.

    Args:
        faults: Any number of `Kill`, `Stop`, `Fail`, `Slow`, `CutOff`, `FillDisk` and `FailWrite`.

    Raises:
        ConfigError: Another object is among them, or the same fault twice.
    """

    faults: tuple[Fault, ...] = ()
    _DEFAULT: ClassVar[tuple[str, ...]] = ("Kill",)

    def __init__(self, faults: Iterable[Fault] = ()):
        given = tuple(faults)
        for fault in given:
            if type(fault) not in _KINDS.values():
                raise ConfigError(f"A FaultPlan takes {', '.join(_KINDS)}", repr(fault), "Give some of these")
        if len(set(given)) < len(given):
            raise ConfigError("Faults of a plan happen once", f"one of them twice in {list(given)}", "Leave one out")
        object.__setattr__(self, "faults", given)

    @classmethod
    def random(
        cls, seed: int, *, workers: int, steps: int, faults: int = 1, kinds: Iterable[str | Fault] = _DEFAULT
    ) -> FaultPlan:
        """Returns a random plan from a seed: the same plan for the same arguments, on any machine.

        Args:
            seed: Seed, from 0.
            workers: Number of workers of the run, at least 1.
            steps: Number of steps of the whole run, at least 1.
            faults: Number of faults, at most `workers * steps`, each at a different rank or step.
            kinds: Kinds to choose from: "Kill", "Stop", "Fail", "Slow", "CutOff" and "FailWrite". A fault, such as a
                `FillDisk`, is also a kind: its rank, step and epoch are replaced. A `FailWrite` happens on rank 0 only,
                and other ranks get another kind. If it is the only kind, `faults` is at most `steps`.

        Raises:
            ConfigError: An argument is out of its range.
        """
        for name, value, least in (
            ("seed", seed, 0),
            ("workers", workers, 1),
            ("steps", steps, 1),
            ("faults", faults, 0),
        ):
            validation.check_whole(name, value, least)
        kinds = list(kinds)
        named = [name for name in _KINDS if name != FillDisk.__name__]
        for kind in kinds:
            if type(kind) not in _KINDS.values():
                validation.check_word("kinds", kind, named)
        common = [kind for kind in kinds if kind != FailWrite.__name__ and not isinstance(kind, FailWrite)]
        if not common:
            workers = 1
        if faults > workers * steps or not kinds:
            rule = "A random plan has at most workers * steps faults, of one kind or more"
            raise ConfigError(rule, f"{faults} faults of {kinds}", "Ask for fewer, or name a kind")
        source = random.Random(seed)
        positions = sorted(source.sample(range(workers * steps), faults))
        return cls(
            _make_fault(source.choice(common if p % workers else kinds), p % workers, p // workers) for p in positions
        )

    def __str__(self) -> str:
        return "; ".join(map(str, self.faults)) or "no faults"

    def to_json(self) -> str:
        """Returns the plan as a line of JSON, which `from_json` reads."""
        return json.dumps([{"kind": type(fault).__name__} | dataclasses.asdict(fault) for fault in self.faults])

    @classmethod
    def from_json(cls, text: str) -> FaultPlan:
        """Returns the plan from the JSON of `to_json`.

        Raises:
            ConfigError: The text is no such JSON.
        """
        try:
            return cls(_fault(entry) for entry in stored_json.parse_value(text))
        except (TypeError, KeyError, AttributeError, stored_json.UnreadableError) as error:
            raise ConfigError("A plan is JSON of FaultPlan.to_json", repr(text)[:200], "Give one of these") from error

    def check(self, workers: int) -> None:
        """Raises ConfigError if a fault names a rank that the run does not have.

        Args:
            workers: Number of workers of the run, at least 1.

        Raises:
            ConfigError: A fault names such a rank, or `workers` is no such number.
        """
        validation.check_whole("workers", workers, 1)
        for fault in self.faults:
            if fault.rank >= workers:
                fix = f"Name one of 0 to {workers - 1}"
                raise ConfigError("A fault names a worker of the run", f"{fault}, of {workers} worker(s)", fix)

    def callback(self, folder: str | os.PathLike, *, workers: int | None = None) -> Any:
        """Returns a Keras callback that injects the faults.

        Args:
            folder: Path of a folder of this run alone, which all workers share. A file in it marks a fault that has
                happened, and a restart does not repeat that fault. It is created if it does not exist.
            workers: Number of workers of the run, or None to check the ranks only before the first step.

        Raises:
            ConfigError: The plan names a rank that the run does not have. In a run: TensorFlow has parameter servers,
                or a fault cannot happen. Or a fault needs the number of steps in an epoch, which is not known.
        """
        if workers is not None:
            self.check(workers)
        from keras.callbacks import Callback

        class Planted(Callback):
            raytf_local_batches = True  # needs no value of other workers

            def get_state(self):
                return None  # a checkpoint would bring the chief's faults to the other workers

            def set_state(self, state):
                pass

            def on_train_begin(self, logs=None):
                self._rank, number = _rank_and_size()
                plan.check(number)
                self._own_faults = [fault for fault in plan.faults if fault.rank == self._rank]
                counted = [f for f in self._own_faults if f.epoch is None or getattr(f, "steps", None) is not None]
                if self.params.get("steps") is None and counted:
                    rule = "Faults without an epoch, or that end after some steps, need steps that are known"
                    raise ConfigError(rule, "an epoch of any length", "Give steps_per_epoch, or faults an epoch")
                self._full = _FullDisks(
                    [f for f in self._own_faults if isinstance(f, FillDisk) and os.path.exists(f.path)]
                )

            def on_epoch_begin(self, epoch, logs=None):
                self._epoch = epoch

            def on_train_batch_begin(self, batch, logs=None):
                steps = self.params.get("steps")
                self._full.remove_due(self._epoch * (steps or 0) + batch, steps)
                for fault in self._own_faults:
                    if fault.due(self._epoch, batch, steps) and _mark_first(folder, fault):
                        fault.happen()
                        if isinstance(fault, FillDisk):
                            self._full.add(fault)

            def on_train_end(self, logs=None):
                self._full.end()
                if injected_faults.take_faults():
                    text = "No checkpoint was handed to raytf's writer after a FailWrite, which did nothing"
                    warn_user(f"{text}: inject it earlier, or have checkpoints")

        plan, folder = self, os.fspath(folder)
        return Planted()

    def happened(self, folder: str | os.PathLike) -> list[Fault]:
        """Returns the faults that have happened in a run whose callback used this folder."""
        return [fault for fault in self.faults if _marker(folder, fault).exists()]


class _FullDisks:
    """Full disks of a worker, whose files it removes in time.

    Args:
        faults: Faults whose files an earlier worker has left.
    """

    def __init__(self, faults: Iterable[FillDisk]):
        self._faults: list[FillDisk] = []
        self._timers: list[threading.Timer] = []
        for fault in faults:
            self.add(fault)

    def add(self, fault: FillDisk) -> None:
        """Adds a fault that has happened."""
        self._faults.append(fault)
        if fault.seconds is not None:
            remaining = os.path.getmtime(fault.path) + fault.seconds - time.time()
            self._timers.append(threading.Timer(max(0.0, remaining), fault.remove))
            self._timers[-1].daemon = True
            self._timers[-1].start()

    def remove_due(self, made: int, steps: int | None) -> None:
        """Removes the files that are due after `made` steps of the run, with `steps` steps in an epoch."""
        for fault in self._faults:
            if fault.steps is not None and made >= fault.run_step(steps) + fault.steps:
                fault.remove()

    def end(self) -> None:
        """Removes all files that have a limit, when the training succeeds."""
        for timer in self._timers:
            timer.cancel()
            timer.join()
        for fault in self._faults:
            if fault.steps is not None or fault.seconds is not None:
                fault.remove()


def _make_fault(kind: str | Fault, rank: int, step: int) -> Fault:
    if isinstance(kind, str):
        return _KINDS[kind](rank=rank, step=step)
    return dataclasses.replace(kind, rank=rank, step=step, epoch=None)


def _fault(entry: Mapping[str, Any]) -> Fault:
    return _KINDS[entry["kind"]](**{name: value for name, value in entry.items() if name != "kind"})


def _rank_and_size() -> tuple[int, int]:
    """Returns (rank, number of workers) of this process."""
    tf_config = json.loads(os.environ.get("TF_CONFIG") or "{}")
    roles = {role: len(tf_config.get("cluster", {}).get(role, ())) for role in ("chief", "worker", "ps")}
    if roles["ps"]:
        raise ConfigError("A FaultPlan is for workers that train together", "parameter servers", "Use another strategy")
    if not tf_config:
        return 0, 1
    first = roles["chief"] if tf_config["task"]["type"] == "worker" else 0
    return first + tf_config["task"]["index"], roles["chief"] + roles["worker"]


def _name(fault: Fault) -> str:
    text = json.dumps([type(fault).__name__, dataclasses.asdict(fault)], sort_keys=True)
    return f"fault-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _marker(folder: str | os.PathLike, fault: Fault) -> pathlib.Path:
    return pathlib.Path(folder, _name(fault))


def _mark_first(folder: str | os.PathLike, fault: Fault) -> bool:
    """Returns whether a fault is due for the first time, and marks it before it happens."""
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError), _marker(folder, fault).open("x") as file:
        file.write(f"{fault}\n")
        return True
    return False
