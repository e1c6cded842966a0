"""Evaluates every new checkpoint in parallel to the training, in a process of its own that stays warm.

A task starts for each checkpoint that is reported for validation, by Ray's list of checkpoints; it calls this actor.
Results are in Ray's key-value store, so that neither the death of the actor nor of the task loses them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import uuid

import ray
from ray.exceptions import RayError, RayTaskError
from ray.train import Checkpoint

from raytf import events, logs, timeouts
from raytf.compat import autograph
from raytf.compat.fast_import import import_keras
from raytf.compat.ray_train import ValidationConfig
from raytf.console import output, shared_warnings
from raytf.console.progress import Entries
from raytf.errors import one_line
from raytf.events import Kind, RunEvent
from raytf.runtime import process_monitor
from raytf.runtime.process_monitor import ProcessKiller, ProcessLocation
from raytf.runtime.resources import placed_actor
from raytf.storage.checkpoint_files import read_state_of
from raytf.storage.folder_contents import local_folder
from raytf.timeouts import Timeouts
from raytf.worker import checkpoint as checkpoints
from raytf.worker.job import TrainJob

logger = logs.get_logger(__name__)

# Prefix of its metrics, next to "loss", "val_loss", ... of the training.
PREFIX = "eval_"
# Tries for a checkpoint whose evaluation kills the process, and number of such checkpoints in a row after which the
# evaluator gives up: their memory and time belong to the training.
_TRIES, _CHECKPOINTS_IN_A_ROW = 2, 2
_DISABLED = f"the evaluator was given up, as it died or did not start for {_CHECKPOINTS_IN_A_ROW} checkpoints in a row"
_CHECK_INTERVAL = 2.0


class Evaluator:
    """Evaluates the model of a task with the weights of one checkpoint after another; an actor.

    Args:
        given: (ref of a `TrainJob` with a dataset "validation", `EvaluationResults` of it, entries of
            `shared_warnings.py`).
        deadlines: Timeouts of the driver.
    """

    def __init__(self, given: tuple, deadlines: Timeouts):
        timeouts.set_current(deadlines)
        output.set_output_name("evaluator 0")
        task, record, self._warned = given
        self._task, self._record, self._model = ray.get(task), record, None
        record.entries.put("location", vars(process_monitor.current_process()))

    def evaluate(self, checkpoint: Checkpoint, call_id: str) -> dict[str, float]:
        """Returns the metrics of a checkpoint on the validation data, by name; `call_id` identifies the call."""
        self._record.entries.put("begun", call_id)
        with shared_warnings.shown_once(self._warned):
            return self._evaluate(checkpoint)

    def _evaluate(self, checkpoint: Checkpoint) -> dict[str, float]:
        with autograph.in_memory():
            if self._model is None:
                self._build()
            with local_folder(checkpoint) as folder:
                checkpoints.check_folder(folder)
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


class EvaluationResults:
    """Results of an evaluator, and reasons for missing ones; its entries outlive the evaluator.

    Args:
        entries: An `Entries`, or None for a new one.
    """

    def __init__(self, entries=None):
        self.entries = Entries("evaluator") if entries is None else entries

    def put_metrics(self, epoch: int, metrics: dict[str, float]) -> None:
        """Stores the metrics of the checkpoint at the end of an epoch."""
        self.entries.put(f"epoch/{epoch}", {"metrics": metrics})
        self.entries.put("failures", 0)

    def missing(self, epoch: int, why: str) -> None:
        """Stores why an epoch has no metrics, as a clause."""
        self.entries.put(f"epoch/{epoch}", {"why": why})

    def failed(self) -> int:
        """Counts a checkpoint for which the process died twice, or did not start; returns their number in a row."""
        failures = (self.entries.get("failures") or 0) + 1
        self.entries.put("failures", failures)
        return failures

    def is_disabled(self) -> bool:
        """Returns whether the evaluator died, or did not start, too often to be called again."""
        return (self.entries.get("failures") or 0) >= _CHECKPOINTS_IN_A_ROW

    def results(self) -> tuple[dict[int, dict[str, float]], dict[int, str]]:
        """Returns (metrics by epoch, reasons for missing metrics by epoch)."""
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
        """Returns the metrics by epoch, warns of missing ones in one line, and deletes all entries."""
        try:
            metrics, why = self.results()
        finally:
            self.entries.clear()
        if why:
            logger.warning(sentence(why))
        return metrics


def report_not_finite(metrics: dict[int, dict[str, float]]) -> None:
    """Emits an event for the first epoch with a metric that is NaN or infinite, if any."""
    for epoch in sorted(metrics):
        if names := [name for name, value in metrics[epoch].items() if not math.isfinite(value)]:
            events.emit(RunEvent(kind=Kind.VALIDATION_NOT_FINITE, epoch=epoch, name=", ".join(names)))
            return


def sentence(why: dict[int, str]) -> str:
    """Returns one line with the epochs that have no evaluation, and why."""
    reasons: dict[str, list[int]] = {}
    for epoch in sorted(why):
        reasons.setdefault(why[epoch], []).append(epoch)
    parts = [f"of epoch {', '.join(map(str, epochs))} ({reason})" for reason, epochs in reasons.items()]
    return f"The evaluation is missing {'; '.join(parts)}. The training itself is complete"


def checkpoint_metrics(result) -> dict[int, dict[str, float]]:
    """Returns the metrics by epoch in the checkpoints of a `ray.train.Result`, with those of earlier calls of `fit`."""
    bears = lambda metrics: {name: value for name, value in metrics.items() if name.startswith(PREFIX)}
    return {metrics["epoch"]: bears(metrics) for _, metrics in result.best_checkpoints or () if "epoch" in metrics}


class EvaluatorSidecar:
    """An evaluator in addition to the workers of a run.

    Args:
        task: The training; its map of training rows is not used.
        resources: Resources of the actor, by name.
        environment: Runtime environment of its process.
        warned: Entries for warnings that are shown once, see `shared_warnings.py`.

    Attributes:
        name: Name of its task among the tasks of the run.
        results: Its `EvaluationResults`.
    """

    name = "evaluator 0"

    def __init__(self, task: TrainJob, resources: dict[str, float], environment: dict, warned: Entries):
        self.resources, self.results, self._warned = resources, EvaluationResults(), warned
        self._task, self._environment = task, environment
        self._actor, self._group, self._given = None, None, None

    def start(self, reservation) -> None:
        """Starts the actor in its bundle of a `Reservation`, unless it runs there; called by the engine."""
        if self._group is not None and reservation.group == self._group:
            return
        if self._actor is not None:
            ray.kill(self._actor)
        self._group = reservation.group
        self._given = self._given or ray.put(self._task)
        name = f"raytf-evaluator-{uuid.uuid4().hex}"
        options = {"runtime_env": self._environment, "name": name, "max_restarts": -1}
        options["arguments"] = (self._given, self.results, self._warned), timeouts.get()
        self._actor = placed_actor(
            Evaluator, reservation.group, reservation.bundle_indices[self.name], self.resources, **options
        )
        self.results.entries.put("actor", name)

    def validation(self) -> ValidationConfig:
        """Returns the config with the function that Ray Train calls for a checkpoint; a lost task is retried."""
        ask = functools.partial(_ask, self.results)
        return ValidationConfig(fn=ask, ray_remote_kwargs={"num_cpus": 0, "max_retries": -1})


def _ask(record: EvaluationResults, checkpoint: Checkpoint) -> dict[str, float]:
    """Returns the metrics of a checkpoint; {} if there are none, with the reason in the record."""
    epoch = _epoch(checkpoint)
    if record.is_disabled():
        record.missing(epoch, _DISABLED)
        return {}
    why = ""
    for _ in range(_TRIES):
        try:
            metrics = _evaluated(record, checkpoint)
        except RayTaskError as error:  # an error of the model or the data: a retry fails, too
            record.missing(epoch, one_line(error))
            return {}
        except RayError as error:
            why = _why(error)
        except _FrozenError as error:
            why = str(error)
        except _NotStartedError as error:
            why = str(error)
            break
        else:
            record.put_metrics(epoch, metrics)
            return metrics
    record.missing(epoch, why)
    if record.failed() >= _CHECKPOINTS_IN_A_ROW:
        _end(record)
    return {}


def _end(record: EvaluationResults) -> None:
    """Ends the actor for good, to free its memory and cores for the training."""
    with contextlib.suppress(ValueError):  # there is no actor
        ray.kill(ray.get_actor(record.entries.get("actor")))


class _NotStartedError(Exception):
    """No evaluation began before the timeout."""


class _FrozenError(Exception):
    """The evaluator was frozen, and was killed."""


def _evaluated(record: EvaluationResults, checkpoint: Checkpoint) -> dict[str, float]:
    """Returns the metrics from the evaluator; kills one that is frozen, and waits for one that restarts."""
    deadline = time.monotonic() + timeouts.get().evaluator_start
    with ProcessKiller() as watching:
        while True:
            call_id = uuid.uuid4().hex
            ref = _find(record, deadline).evaluate.remote(checkpoint, call_id)
            begun = _follow(ref, record, call_id, deadline, watching)
            try:
                return ray.get(ref)
            except RayTaskError:
                raise
            except RayError as error:
                if "evaluator" in watching.ended:
                    raise _FrozenError(f"the evaluator was frozen: {watching.ended['evaluator']}") from error
                if begun or time.monotonic() >= deadline:
                    raise
                time.sleep(_CHECK_INTERVAL)


def _follow(ref, record: EvaluationResults, call_id: str, deadline: float, watching: ProcessKiller) -> bool:
    """Blocks until a call ends; returns whether its evaluation had begun."""
    while True:
        done, _ = ray.wait([ref], timeout=_CHECK_INTERVAL)
        begun = record.entries.get("begun") == call_id
        if done:
            return begun
        location = record.entries.get("location")
        if location is not None:
            watching.watch("evaluator", ProcessLocation(**location))
        if not begun and time.monotonic() >= deadline:
            raise _NotStartedError(f"timeout after {timeouts.get().evaluator_start:g} s: the evaluator did not start")


def _find(record: EvaluationResults, deadline: float):
    """Returns the actor that the engine started last; between two groups of an elastic run it waits for one."""
    while True:
        try:
            return ray.get_actor(record.entries.get("actor"))
        except ValueError:
            if time.monotonic() >= deadline:
                raise _NotStartedError(
                    f"timeout after {timeouts.get().evaluator_start:g} s: no evaluator ran"
                ) from None
            time.sleep(1.0)


def _why(error: Exception) -> str:
    """Returns why an evaluator died, as a clause; Ray has the reason only if it killed the process itself."""
    text = str(error)
    if "running low on memory" in text or "OutOfMemory" in type(error).__name__ or "OUT_OF_MEMORY" in text:
        return "Ray ended the evaluator's process, as its node was out of memory, twice"
    return "the evaluator's process was killed, as the system does where memory runs out, or crashed, twice"


def _epoch(checkpoint: Checkpoint) -> int:
    """Returns the number of epochs that a checkpoint has completed."""
    return read_state_of(checkpoint).epoch
