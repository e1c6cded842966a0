"""Faults that are planted in a training, by place or from a seed, for tests of models, callbacks and clusters."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import signal
import time
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from raytf import validation
from raytf.errors import ConfigError
from raytf.storage import stored_json


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
        if isinstance(self.seconds, bool) or not (isinstance(self.seconds, int | float) and 0 < self.seconds < 1e6):
            raise ConfigError("seconds of a fault must be a number above 0", repr(self.seconds), "Change it")

    def happen(self) -> None:
        time.sleep(self.seconds)


_KINDS = {kind.__name__: kind for kind in (Kill, Stop, Fail, Slow)}


@dataclasses.dataclass(frozen=True)
class FaultPlan:
    """Faults of a run, each of which happens once, over all its restarts.

    `callbacks=lambda config: [plan.callback(folder, workers=3)]` plants them in a `KerasTrainer`, and
    `callbacks=[plan.callback(folder)]` in `raytf.fit` or `model.fit`.

    Args:
        faults: any number of `Kill`, `Stop`, `Fail` and `Slow`.

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
        cls, seed: int, *, workers: int, steps: int, faults: int = 1, kinds: Iterable[str] = _DEFAULT
    ) -> FaultPlan:
        """A plan from a seed: the same one for the same arguments, on any machine.

        Args:
            seed: from 0.
            workers: of the run, at least 1.
            steps: of the whole run, at least 1.
            faults: how many, at most `workers * steps`, each at a place of its own.
            kinds: names of what may happen: "Kill", "Stop", "Fail", "Slow".

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
        for kind in kinds:
            validation.check_word("kinds", kind, list(_KINDS))
        if faults > workers * steps or not kinds:
            rule = "A random plan has at most workers * steps faults, of one kind or more"
            raise ConfigError(rule, f"{faults} faults of {kinds}", "Ask for fewer, or name a kind")
        source = random.Random(seed)
        places = sorted(source.sample(range(workers * steps), faults))
        return cls(_KINDS[source.choice(kinds)](rank=p % workers, step=p // workers) for p in places)

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
                or where steps count over the run and Keras does not know how many an epoch has.
        """
        if workers is not None:
            self.check(workers)
        from keras.callbacks import Callback

        class Planted(Callback):
            raytf_local_batches = True  # needs no value of other workers

            def on_train_begin(self, logs=None):
                self._rank, number = _place()
                plan.check(number)
                self._mine = [fault for fault in plan.faults if fault.rank == self._rank]
                if self.params.get("steps") is None and any(fault.epoch is None for fault in self._mine):
                    rule = "Faults without an epoch need steps that are known"
                    raise ConfigError(rule, "an epoch of any length", "Give steps_per_epoch, or faults an epoch")

            def on_epoch_begin(self, epoch, logs=None):
                self._epoch = epoch

            def on_train_batch_begin(self, batch, logs=None):
                for fault in self._mine:
                    if fault.due(self._epoch, batch, self.params.get("steps")) and _first(folder, fault):
                        fault.happen()

        plan, folder = self, os.fspath(folder)
        return Planted()

    def happened(self, folder: str | os.PathLike) -> list[Fault]:
        """The faults that have happened, of a run whose callback had this folder."""
        return [fault for fault in self.faults if _marker(folder, fault).exists()]


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


def _marker(folder: str | os.PathLike, fault: Fault) -> pathlib.Path:
    text = json.dumps([type(fault).__name__, dataclasses.asdict(fault)], sort_keys=True)
    return pathlib.Path(folder, f"fault-{hashlib.sha256(text.encode()).hexdigest()[:16]}")


def _first(folder: str | os.PathLike, fault: Fault) -> bool:
    """Whether this is the first time that a fault is due; it is noted before it happens."""
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError), _marker(folder, fault).open("x") as file:
        file.write(f"{fault}\n")
        return True
    return False
