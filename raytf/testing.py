"""For tests of models, callbacks and clusters: faults that are planted in a training, and longer deadlines."""

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
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from raytf import timeouts, validation
from raytf.collectives import ring
from raytf.errors import ConfigError
from raytf.runtime import packet_filter
from raytf.storage import planted, stored_json


@contextlib.contextmanager
def scale_timeouts(times: float) -> Iterator[None]:
    """Has raytf wait longer, or shorter, before it takes another way or fails, until the context ends.

    It is for this process, and for all that runs start meanwhile. What is an argument, as `hang_timeout_s`, stays.

    Args:
        times: as long as without it, more than 0; on a machine that is busy, 5 or 10.

    Raises:
        ConfigError: `times` is no such number.

    Example:
        >>> import raytf.testing
        >>> with raytf.testing.scale_timeouts(5):
        ...     pass
    """
    if isinstance(times, bool) or not isinstance(times, (int, float)) or not 0 < times < math.inf:
        raise ConfigError("times of scale_timeouts must be a number more than 0", repr(times), "For example 5")
    with timeouts.within(timeouts.get().scaled(times)):
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens to one worker before a step.

    Args:
        rank: of the worker, from 0.
        step: before which it happens, from 0; with several steps an execution, before the first execution that begins
            at this step or behind it.
        epoch: in which `step` counts, from 0; None counts steps over the whole run.

    Raises:
        ConfigError: a value is no integer of at least 0.
    """

    rank: int
    step: int
    epoch: int | None = None

    def __post_init__(self):
        for name in ("rank", "step") if self.epoch is None else ("rank", "step", "epoch"):
            validation.check_whole(f"{name} of a fault", getattr(self, name), 0)

    def __str__(self) -> str:
        own = [field.name for field in dataclasses.fields(self) if field.name not in ("rank", "step", "epoch")]
        values = ", ".join(f"{name} {getattr(self, name)}" for name in own)
        place = f"step {self.step}" if self.epoch is None else f"step {self.step} of epoch {self.epoch}"
        return f"{type(self).__name__.lower()} worker {self.rank} before {place}" + (f" ({values})" if values else "")

    def due(self, epoch: int, step: int, steps: int | None) -> bool:
        """Whether a step is the fault's, or behind it; `steps` are those of an epoch, where that is known."""
        if self.epoch is not None:
            return (epoch, step) >= (self.epoch, self.step)
        return epoch * (steps or 0) + step >= self.step

    def place(self, steps: int | None) -> int:
        """The step before which it happens, counted over the run; `steps` are those of an epoch."""
        return self.step + (self.epoch or 0) * (steps or 0)

    def happen(self) -> None:
        """Does it, in the worker's process."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill(Fault):
    """Kills the worker's process, as the kernel does when memory is out (SIGKILL)."""

    def happen(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop(Fault):
    """Stops the worker's process (SIGSTOP), until another one continues or kills it."""

    def happen(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fail(Fault):
    """Raises a RuntimeError in the worker.

    Args:
        text: of the error.
    """

    text: str = "planted by a FaultPlan"

    def happen(self) -> None:
        raise RuntimeError(self.text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slow(Fault):
    """Holds the worker up.

    Args:
        seconds: how long, above 0.
    """

    seconds: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        _check_seconds(self.seconds)

    def happen(self) -> None:
        time.sleep(self.seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CutOff(Fault):
    """Cuts the worker's connections with its neighbours in raytf's ring, over which workers sum; its process lives on.

    Nothing else is cut: not those of Ray, nor of TensorFlow's own collectives. No rights are needed for it. A host that
    loses its whole network is another fault, which takes a network namespace or a cable.

    Args:
        silent: False: the connections are shut down, so that both ends are told at once. True: the kernel lets nothing
            in any more that arrives on them and answers nothing, as behind a broken switch, until one end's kernel
            gives up: after about 35 s. For that both neighbours must be on other hosts, and the kernel Linux.

    Raises:
        ConfigError: `silent` is no bool. In a run: it has no ring, as with one worker or with GPUs; or the silence is
            not possible there.
    """

    silent: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.silent, bool):
            raise ConfigError("silent of a fault must be True or False", repr(self.silent), "Change it")

    def happen(self) -> None:
        connections = ring.connections()
        if not connections:
            rule = "A CutOff cuts connections of raytf's ring, over which several workers sum on CPUs"
            raise ConfigError(rule, f"{self}, in a process without", "Leave it out, or train with two workers or more")
        if self.silent and (sys.platform != "linux" or any(one.family == socket.AF_UNIX for one in connections)):
            rule = "A silent CutOff is between hosts, under Linux"
            raise ConfigError(rule, f"{self}, which has a neighbour on its own host", "Leave out silent, or use Stop")
        for one in connections:
            if self.silent:
                packet_filter.attach(one, packet_filter.NOTHING)
            else:
                with contextlib.suppress(OSError):  # the other end has closed it
                    one.shutdown(socket.SHUT_RDWR)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FillDisk(Fault):
    """Fills the disk of a folder with a file, on the worker's host: for a disk of the test's own, as a tmpfs; on Linux.

    Whatever else writes to that disk meets "No space left on device". The file is removed before a later step, some
    time later, or at the end of the training; a worker that was killed in between does so when it goes on.

    Args:
        folder: that is there on the worker's host.
        size: of the file in bytes, at least 1; None, and one that is larger than what is free, fills the disk to the
            last block.
        steps: after so many steps of the run the file is removed, at least 1.
        seconds: after which it is removed, above 0, also while the training stands still. Without `steps` and `seconds`
            it stays, and `remove` removes it.

    Raises:
        ConfigError: a value is out of its range, or both `steps` and `seconds` are given. In a run: the folder is not
            there.
    """

    folder: str
    size: int | None = None
    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.folder, str | os.PathLike) or not os.fspath(self.folder):
            raise ConfigError("folder of a fault must be a path", repr(self.folder), "Change it")
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
        """Of the file that fills the disk."""
        return os.path.join(self.folder, f"raytf-{_name(self)}")

    def happen(self) -> None:
        if not os.path.isdir(self.folder):
            rule = "A FillDisk fills the disk of a folder that is there"
            raise ConfigError(rule, f"{self}, which is none on {socket.gethostname()}", "Make it before the run")
        with open(self.path, "wb", buffering=0) as file:
            _fill(file.fileno(), self.size)

    def remove(self) -> None:
        """Removes the file, on its host; none is right, too."""
        pathlib.Path(self.path).unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailWrite(Fault):
    """Has the next checkpoint fail to be written, when its bytes are there and it is not whole so far.

    It fails in the process that writes raytf's checkpoints, where an error of the storage would be raised: those of a
    `KerasTrainer`, those within epochs of a sweep's trials and of `raytf.fit(name=...)`. It is tried again by itself.
    Where no checkpoint comes behind it, a warning at the training's end says so. It goes with the worker's process.

    Args:
        rank: 0, the worker that writes checkpoints.
        number: of the OSError, as `errno.EIO`, which is the default; from 1.
        times: so many tries in a row fail, 1 to 1000.

    Raises:
        ConfigError: a value is out of its range.
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
            raise ConfigError(f"times of a fault must be at most {_MOST_TIMES}", repr(self.times), "Change it")

    def happen(self) -> None:
        planted.plant(self.number, self.times)


_MOST_TIMES = 1000
_KINDS = {kind.__name__: kind for kind in (Kill, Stop, Fail, Slow, CutOff, FillDisk, FailWrite)}
# So much of a disk is taken at a time, and half of that where it is no longer free.
_FIRST_BLOCK = 1 << 30


def _check_seconds(seconds: Any) -> None:
    if isinstance(seconds, bool) or not (isinstance(seconds, int | float) and 0 < seconds < 1e6):
        raise ConfigError("seconds of a fault must be a number above 0", repr(seconds), "Change it")


def _fill(descriptor: int, size: int | None) -> None:
    """Gives a file so many bytes, or all that its disk has left."""
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
    """Faults of a run, each of which happens once, over all its restarts.

    `callbacks=lambda config: [plan.callback(folder, workers=3)]` plants them in a `KerasTrainer`, and
    `callbacks=[plan.callback(folder)]` in `raytf.fit` or `model.fit`.

    Args:
        faults: any number of `Kill`, `Stop`, `Fail`, `Slow`, `CutOff`, `FillDisk` and `FailWrite`.

    Raises:
        ConfigError: something else is among them, or one of them twice.
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
        """A plan from a seed: the same one for the same arguments, on any machine.

        Args:
            seed: from 0.
            workers: of the run, at least 1.
            steps: of the whole run, at least 1.
            faults: how many, at most `workers * steps`, each at a place of its own.
            kinds: what may happen: "Kill", "Stop", "Fail", "Slow", "CutOff", "FailWrite"; or a fault with values of its
                own, as a `FillDisk`, in the place of whose rank, step and epoch come others. A `FailWrite` is of rank
                0: other ranks get one of the other kinds, and where there are none, `faults` is at most `steps`.

        Raises:
            ConfigError: an argument is out of its range.
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
        anywhere = [kind for kind in kinds if kind != FailWrite.__name__ and not isinstance(kind, FailWrite)]
        if not anywhere:
            workers = 1
        if faults > workers * steps or not kinds:
            rule = "A random plan has at most workers * steps faults, of one kind or more"
            raise ConfigError(rule, f"{faults} faults of {kinds}", "Ask for fewer, or name a kind")
        source = random.Random(seed)
        places = sorted(source.sample(range(workers * steps), faults))
        return cls(_at(source.choice(anywhere if p % workers else kinds), p % workers, p // workers) for p in places)

    def __str__(self) -> str:
        return "; ".join(map(str, self.faults)) or "no faults"

    def to_json(self) -> str:
        """The plan as a line of JSON, from which `from_json` makes the same one."""
        return json.dumps([{"kind": type(fault).__name__} | dataclasses.asdict(fault) for fault in self.faults])

    @classmethod
    def from_json(cls, text: str) -> FaultPlan:
        """The plan that `to_json` wrote.

        Raises:
            ConfigError: it is none.
        """
        try:
            return cls(_fault(entry) for entry in stored_json.value(text))
        except (TypeError, KeyError, AttributeError, stored_json.UnreadableError) as error:
            raise ConfigError("A plan is JSON of FaultPlan.to_json", repr(text)[:200], "Give one of these") from error

    def check(self, workers: int) -> None:
        """Refuses a plan that names a rank that is not there.

        Args:
            workers: of the run, at least 1.

        Raises:
            ConfigError: it does, or `workers` is no such number.
        """
        validation.check_whole("workers", workers, 1)
        for fault in self.faults:
            if fault.rank >= workers:
                fix = f"Name one of 0 to {workers - 1}"
                raise ConfigError("A fault names a worker of the run", f"{fault}, of {workers} worker(s)", fix)

    def callback(self, folder: str | os.PathLike, *, workers: int | None = None) -> Any:
        """A callback of Keras that plants the faults.

        Args:
            folder: of the run alone, which all workers see; a file there says that a fault has happened, so that it
                does not again after a restart. It is made where it is missing.
            workers: of the run, where that is known: a rank that is not there is then refused here, else before the
                first step.

        Raises:
            ConfigError: the plan names a rank that is not there. In a run: also where TensorFlow has parameter servers,
                or where steps count over the run and Keras does not know how many an epoch has. And what a fault says
                of itself.
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
                self._rank, number = _place()
                plan.check(number)
                self._mine = [fault for fault in plan.faults if fault.rank == self._rank]
                counted = [f for f in self._mine if f.epoch is None or getattr(f, "steps", None) is not None]
                if self.params.get("steps") is None and counted:
                    rule = "Faults without an epoch, or that end after some steps, need steps that are known"
                    raise ConfigError(rule, "an epoch of any length", "Give steps_per_epoch, or faults an epoch")
                self._full = _Full([f for f in self._mine if isinstance(f, FillDisk) and os.path.exists(f.path)])

            def on_epoch_begin(self, epoch, logs=None):
                self._epoch = epoch

            def on_train_batch_begin(self, batch, logs=None):
                steps = self.params.get("steps")
                self._full.look(self._epoch * (steps or 0) + batch, steps)
                for fault in self._mine:
                    if fault.due(self._epoch, batch, steps) and _first(folder, fault):
                        fault.happen()
                        if isinstance(fault, FillDisk):
                            self._full.add(fault)

            def on_train_end(self, logs=None):
                self._full.end()
                if planted.taken():
                    text = "No checkpoint was handed to raytf's writer after a FailWrite, which did nothing"
                    warnings.warn(f"{text}: plant it earlier, or have checkpoints", stacklevel=2)

        plan, folder = self, os.fspath(folder)
        return Planted()

    def happened(self, folder: str | os.PathLike) -> list[Fault]:
        """The faults that have happened, of a run whose callback had this folder."""
        return [fault for fault in self.faults if _marker(folder, fault).exists()]


class _Full:
    """The disks that are full on a worker, until there is to be room again.

    Args:
        faults: those whose files are there: of a worker of before.
    """

    def __init__(self, faults: Iterable[FillDisk]):
        self._faults: list[FillDisk] = []
        self._timers: list[threading.Timer] = []
        for fault in faults:
            self.add(fault)

    def add(self, fault: FillDisk) -> None:
        """One that has happened."""
        self._faults.append(fault)
        if fault.seconds is not None:
            left = os.path.getmtime(fault.path) + fault.seconds - time.time()
            self._timers.append(threading.Timer(max(0.0, left), fault.remove))
            self._timers[-1].daemon = True
            self._timers[-1].start()

    def look(self, made: int, steps: int | None) -> None:
        """Called after `made` steps of the run, with `steps` in an epoch."""
        for fault in self._faults:
            if fault.steps is not None and made >= fault.place(steps) + fault.steps:
                fault.remove()

    def end(self) -> None:
        """Called as the training ends well."""
        for timer in self._timers:
            timer.cancel()
            timer.join()
        for fault in self._faults:
            if fault.steps is not None or fault.seconds is not None:
                fault.remove()


def _at(kind: str | Fault, rank: int, step: int) -> Fault:
    if isinstance(kind, str):
        return _KINDS[kind](rank=rank, step=step)
    return dataclasses.replace(kind, rank=rank, step=step, epoch=None)


def _fault(entry: Mapping[str, Any]) -> Fault:
    return _KINDS[entry["kind"]](**{name: value for name, value in entry.items() if name != "kind"})


def _place() -> tuple[int, int]:
    """(rank, number of workers) of this process."""
    told = json.loads(os.environ.get("TF_CONFIG") or "{}")
    roles = {role: len(told.get("cluster", {}).get(role, ())) for role in ("chief", "worker", "ps")}
    if roles["ps"]:
        raise ConfigError("A FaultPlan is for workers that train together", "parameter servers", "Use another strategy")
    if not told:
        return 0, 1
    first = roles["chief"] if told["task"]["type"] == "worker" else 0
    return first + told["task"]["index"], roles["chief"] + roles["worker"]


def _name(fault: Fault) -> str:
    text = json.dumps([type(fault).__name__, dataclasses.asdict(fault)], sort_keys=True)
    return f"fault-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _marker(folder: str | os.PathLike, fault: Fault) -> pathlib.Path:
    return pathlib.Path(folder, _name(fault))


def _first(folder: str | os.PathLike, fault: Fault) -> bool:
    """Whether this is the first time that a fault is due; it is noted before it happens."""
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError), _marker(folder, fault).open("x") as file:
        file.write(f"{fault}\n")
        return True
    return False
