"""Evaluates every new checkpoint of a training beside it, in a process of its own that stays warm.

Ray Train starts a task for each checkpoint that is reported for validation; the task asks this actor. What it found is
kept in Ray's key-value store, so that neither the actor's death nor the task's loses it.
"""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
import warnings

import ray
from ray.exceptions import RayError, RayTaskError
from ray.train import Checkpoint

from raytf import timeouts
from raytf.compat import autograph
from raytf.compat.fast_import import import_keras
from raytf.compat.ray_train import ValidationConfig
from raytf.console import once, output
from raytf.console.progress import Entries
from raytf.errors import in_a_line
from raytf.runtime import process_monitor
from raytf.runtime.process_monitor import ProcessLocation, Watchdog
from raytf.runtime.resources import placed_actor
from raytf.storage.checkpoint_files import read_state_of
from raytf.timeouts import Timeouts
from raytf.worker import checkpoint as checkpoints
from raytf.worker.job import TrainJob

# Beside "loss", "val_loss", ... of the training.
PREFIX = "eval_"
# A checkpoint whose evaluation ends with the process' death is evaluated once more; where that happens to so many
# checkpoints in a row, it would happen to all, and their memory and time are the training's.
_TRIES, _CHECKPOINTS_IN_A_ROW = 2, 2
_LOOK_INTERVAL = 2.0


class Evaluator:
    """The model of a task, with the weights of one checkpoint after the other; an actor.

    Args:
        given: (a ref of a `TrainJob` with a dataset "validation", what its askers know of it, see `once.py`).
        its: the driver's.
    """

    def __init__(self, given: tuple, its: Timeouts):
        timeouts.put_in_force(its)
        output.say_who("evaluator 0")
        task, record, self._warned = given
        self._task, self._record, self._model = ray.get(task), record, None
        record.entries.put("place", vars(process_monitor.here()))

    def evaluate(self, checkpoint: Checkpoint, asked: str) -> dict[str, float]:
        """Metrics of a checkpoint on the validation data, by name; `asked` tells one call from another."""
        self._record.entries.put("begun", asked)
        with once.shown(self._warned):
            return self._evaluate(checkpoint)

    def _evaluate(self, checkpoint: Checkpoint) -> dict[str, float]:
        with autograph.in_memory():
            if self._model is None:
                self._build()
            with checkpoint.as_directory() as folder:
                checkpoints.check(folder)
                checkpoints.restore(folder, self._model)
            values = self._model.evaluate(self._dataset, verbose=0, return_dict=True)
        return {PREFIX + name: float(value) for name, value in values.items()}

    def _build(self) -> None:
        import_keras()
        from raytf.data.feed import open_feed
        from raytf.parallel import trainer
        from raytf.worker.fit import build_from_data

        trainer.install()
        model = self._task.build_model(dict(self._task.config))
        self._dataset = open_feed(**self._task.feed("validation"), name="validation").dataset()
        build_from_data(model, self._dataset)
        self._model = model


class Record:
    """What an evaluator found, and why it did not: entries that outlive it.

    Args:
        entries: an `Entries`, a new one unless it is given.
    """

    def __init__(self, entries=None):
        self.entries = Entries("evaluator") if entries is None else entries

    def found(self, epoch: int, metrics: dict[str, float]) -> None:
        """Keeps the metrics of the checkpoint after so many epochs."""
        self.entries.put(f"epoch/{epoch}", {"metrics": metrics})
        self.entries.put("deaths", 0)

    def missing(self, epoch: int, why: str) -> None:
        """Keeps why there are none, as a clause."""
        self.entries.put(f"epoch/{epoch}", {"why": why})

    def died(self) -> int:
        """Counts a checkpoint that two evaluators died of; how many there were in a row."""
        deaths = (self.entries.get("deaths") or 0) + 1
        self.entries.put("deaths", deaths)
        return deaths

    def given_up(self) -> bool:
        """Whether the evaluator died so often that it is asked no more."""
        return (self.entries.get("deaths") or 0) >= _CHECKPOINTS_IN_A_ROW

    def results(self) -> tuple[dict[int, dict[str, float]], dict[int, str]]:
        """(metrics by epoch, why there are none by epoch)."""
        metrics, why = {}, {}
        for name in self.entries.names():
            kind, _, epoch = name.partition("/")
            if kind == "epoch":
                entry = self.entries.get(name)
                if "metrics" in entry:
                    metrics[int(epoch)] = entry["metrics"]
                else:
                    why[int(epoch)] = entry["why"]
        return metrics, why

    def close(self) -> dict[int, dict[str, float]]:
        """The metrics by epoch; says in a line which are missing, and forgets all."""
        try:
            metrics, why = self.results()
        finally:
            self.entries.clear()
        if why:
            warnings.warn(sentence(why), stacklevel=2)
        return metrics


def sentence(why: dict[int, str]) -> str:
    """Which epochs have no evaluation and why, in a line."""
    reasons: dict[str, list[int]] = {}
    for epoch in sorted(why):
        reasons.setdefault(why[epoch], []).append(epoch)
    parts = [f"of epoch {', '.join(map(str, epochs))} ({reason})" for reason, epochs in reasons.items()]
    return f"The evaluation is missing {'; '.join(parts)}. The training itself is complete"


def kept(result) -> dict[int, dict[str, float]]:
    """The metrics by epoch that the checkpoints of a `ray.train.Result` bear, those of earlier calls of `fit` too."""
    bears = lambda metrics: {name: value for name, value in metrics.items() if name.startswith(PREFIX)}
    return {metrics["epoch"]: bears(metrics) for _, metrics in result.best_checkpoints or () if "epoch" in metrics}


class Beside:
    """An evaluator that is to stand beside the workers of a run.

    Args:
        task: of the training; its map of training rows is not used.
        resources: of the actor, by name.
        environment: runtime environment of its process.
        warned: entries by which warnings are shown once, see `once.py`.

    Attributes:
        name: of the task among those of the run.
        record: what is known of it.
    """

    name = "evaluator 0"

    def __init__(self, task: TrainJob, resources: dict[str, float], environment: dict, warned: Entries):
        self.resources, self.record, self._warned = resources, Record(), warned
        self._task, self._environment = task, environment
        self._actor, self._group, self._given = None, None, None

    def start(self, held) -> None:
        """Starts it in its bundle of a `Reservation`, unless it is there; called by Ray Train's controller."""
        if self._group is not None and held.group == self._group:
            return
        if self._actor is not None:
            ray.kill(self._actor)
        self._group = held.group
        self._given = self._given or ray.put(self._task)
        name = f"raytf-evaluator-{uuid.uuid4().hex}"
        options = {"runtime_env": self._environment, "name": name, "max_restarts": -1}
        options["arguments"] = (self._given, self.record, self._warned), timeouts.get()
        self._actor = placed_actor(Evaluator, held.group, held.places[self.name], self.resources, **options)
        self.record.entries.put("actor", name)

    def validation(self) -> ValidationConfig:
        """What Ray Train calls for a checkpoint; a task that is lost is asked again."""
        ask = functools.partial(_ask, self.record)
        return ValidationConfig(fn=ask, ray_remote_kwargs={"num_cpus": 0, "max_retries": -1})


def _ask(record: Record, checkpoint: Checkpoint) -> dict[str, float]:
    """The metrics of a checkpoint; {} where there are none, and the record says why."""
    epoch = _epoch(checkpoint)
    if record.given_up():
        record.missing(epoch, f"the evaluator was given up, as it died of {_CHECKPOINTS_IN_A_ROW} checkpoints in a row")
        return {}
    why = ""
    for _ in range(_TRIES):
        try:
            metrics = _evaluated(record, checkpoint)
        except RayTaskError as error:  # of the model or the data: it would be the same again
            record.missing(epoch, in_a_line(error.cause if error.cause is not None else error))
            return {}
        except RayError as error:
            why = _why(error)
        except _FrozenError as error:
            why = str(error)
        except _NotStartedError as error:
            why = str(error)
            break
        else:
            record.found(epoch, metrics)
            return metrics
    record.missing(epoch, why)
    if record.died() >= _CHECKPOINTS_IN_A_ROW:
        _end(record)
    return {}


def _end(record: Record) -> None:
    """Ends the actor for good: what it holds is the training's."""
    with contextlib.suppress(ValueError):  # there is none
        ray.kill(ray.get_actor(record.entries.get("actor")))


class _NotStartedError(Exception):
    """No evaluation began in time."""


class _FrozenError(Exception):
    """The evaluator stood still, and was ended."""


def _evaluated(record: Record, checkpoint: Checkpoint) -> dict[str, float]:
    """What the evaluator says. One that stands still is ended, and one that starts anew is waited for."""
    late = time.monotonic() + timeouts.get().evaluator_start
    with Watchdog() as watching:
        while True:
            asked = uuid.uuid4().hex
            ref = _find(record, late).evaluate.remote(checkpoint, asked)
            begun = _follow(ref, record, asked, late, watching)
            try:
                return ray.get(ref)
            except RayTaskError:
                raise
            except RayError as error:
                if "evaluator" in watching.ended:
                    raise _FrozenError(f"the evaluator was frozen: {watching.ended['evaluator']}") from error
                if begun or time.monotonic() >= late:
                    raise
                time.sleep(_LOOK_INTERVAL)


def _follow(ref, record: Record, asked: str, late: float, watching: Watchdog) -> bool:
    """Waits for the end of a call; whether its evaluation had begun."""
    while True:
        done, _ = ray.wait([ref], timeout=_LOOK_INTERVAL)
        begun = record.entries.get("begun") == asked
        if done:
            return begun
        place = record.entries.get("place")
        if place is not None:
            watching.watch("evaluator", ProcessLocation(**place))
        if not begun and time.monotonic() >= late:
            raise _NotStartedError(f"the evaluator did not start within {timeouts.get().evaluator_start:g} s")


def _find(record: Record, late: float):
    """The actor that the controller started last: between two groups of an elastic run there is none."""
    while True:
        try:
            return ray.get_actor(record.entries.get("actor"))
        except ValueError:
            if time.monotonic() >= late:
                raise _NotStartedError(f"there was no evaluator within {timeouts.get().evaluator_start:g} s") from None
            time.sleep(1.0)


def _why(error: Exception) -> str:
    """Why an evaluator died, as a clause; Ray knows it only where it has ended it itself."""
    text = str(error)
    if "running low on memory" in text or "OutOfMemory" in type(error).__name__ or "OUT_OF_MEMORY" in text:
        return "Ray ended the evaluator's process, as its node was out of memory, twice"
    return "the evaluator's process was killed, as the system does where memory runs out, or crashed, twice"


def _epoch(checkpoint: Checkpoint) -> int:
    """The number of epochs that a checkpoint has behind it."""
    return read_state_of(checkpoint).epoch
