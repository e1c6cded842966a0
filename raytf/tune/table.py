"""Shows a sweep: a live table in a terminal, a line for each finished trial, and finally the best one."""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import pickle
import sys
import time
from typing import Any

import ray
from ray import tune
from ray.exceptions import RayTaskError
from ray.tune.utils import flatten_dict

from raytf import events, logs
from raytf.console import phases
from raytf.console.progress import format_time_left
from raytf.errors import ResourceError, first_line, user_line
from raytf.runtime import resources
from raytf.tune.sweep_end import SweepStop
from raytf.tune.trial import UnknownMetricError

logger = logs.get_logger(__name__)

# Names derived from a trial's config, in the order of the output.
_DERIVED = {"per_replica_batch": "a replica", "steps_per_epoch": "steps an epoch", "scaled_learning_rate": "rate"}
_ROWS = 20
# Seconds without a running trial before a log line explains the wait, and then between two such lines.
_PATIENCE_INTERVAL = 20.0
_AGAIN_INTERVAL = 60.0
# Seconds between lines before the first trial has ended, outside of a terminal.
_LINE_INTERVAL = 60.0


class SweepTable(tune.Callback):
    """Follows Tune's trials; a context manager that shows the live table.

    Args:
        metric, mode: The comparison of trials.
        total: Number of trials of the whole sweep, or None if unknown.
        show: Whether to show anything.

    Attributes:
        fatal: An error of the first trial that ends the sweep, or None.
        stop_request: The `sweep_end.SweepStop` of a sweep that ends after a step, or None.
    """

    def __init__(self, metric: str, mode: str, total: int | None, show: bool):
        self._metric, self._mode, self._total, self._show = metric, mode, total, show
        self.fatal: Exception | None = None
        self.stop_request: SweepStop | None = None
        self._live = self._console = self._phases = None
        self._began: dict[str, float] = {}
        self._spent: list[float] = []
        self._trials: list = []
        self._due: float | None = None
        self._waits_since = 0.0
        self._line_due = math.inf

    def __getstate__(self):  # Tune stores its callbacks next to the trials
        shown = {"_live": None, "_console": None, "_phases": None}
        cleared = {**shown, "_trials": [], "_due": None, "fatal": None, "stop_request": None}
        return {**vars(self), **cleared}

    def __enter__(self):
        if self._show:
            from rich.live import Live

            self._console = phases.console()
            if self._console.is_terminal:
                self._live = Live(
                    console=self._console,
                    refresh_per_second=4,
                    transient=True,
                    redirect_stderr=sys.stderr.isatty(),
                )
                self._live.start()
            else:
                self._phases = phases.Phases(self._console, phases.WORKERS)
                self._phases.__enter__()
                self._line_due = time.monotonic() + _LINE_INTERVAL
        return self

    def __exit__(self, *exc):
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._end_phases()

    def _end_phases(self) -> None:
        """Ends the lines before the first trial has ended, outside of a terminal."""
        if self._phases is not None:
            self._phases.close()
            self._phases = None

    def on_step_end(self, iteration, trials, **info):
        self._trials = trials
        if self._phases is not None and time.monotonic() >= self._line_due:
            self._line_due += _LINE_INTERVAL
            self._console.print(self._title(), highlight=False, soft_wrap=True)
        if self.stop_request is not None:
            self.stop_request.check(lambda: [trial.trial_id for trial in trials if trial.status == "RUNNING"])
        self._check_resources()
        if self._live is not None:
            self._live.update(self._table())

    def _check_resources(self) -> None:
        """Logs, even without a table, why no trial runs; ends the sweep if the cluster can never hold one."""
        waiting = [t for t in self._trials if t.status == "PENDING"]
        now = time.monotonic()
        if not waiting or any(t.status == "RUNNING" for t in self._trials):
            self._due = None
        elif self._due is None:
            self._due, self._waits_since = now + _PATIENCE_INTERVAL, now
        elif now >= self._due:
            self._due = now + _AGAIN_INTERVAL
            bundles = waiting[0].placement_group_factory.bundles
            try:
                resources.check_bundles(bundles, now - self._waits_since)
            except ResourceError as error:  # a node has gone since the sweep began
                self.fatal = error
                return
            need = resources.format_resources(resources.total_resources(bundles))
            free = ray.available_resources()
            has = resources.format_resources({name: free.get(name, 0) for name in resources.total_resources(bundles)})
            text = f"{len(waiting)} trial(s) wait to start; one needs {need}, and {has} is free on the cluster"
            logger.info(f"{text}: {resources.held_by_others()}")

    def on_trial_start(self, iteration, trials, trial, **info):
        self._began.setdefault(trial.trial_id, time.monotonic())
        if self._phases is not None:
            self._phases.begin(phases.FIRST_STEP)

    def on_trial_result(self, iteration, trials, trial, result, **info):
        if self._phases is not None:
            self._phases.begin(None)

    def on_trial_complete(self, iteration, trials, trial, **info):
        self._ended(trial, f"{self._metric} {_format_value(_value(trial, self._metric))}")

    def on_trial_error(self, iteration, trials, trial, **info):
        cause = _cause(trial)
        if isinstance(cause, UnknownMetricError):
            self.fatal = cause
        reason = f"{first_line(cause) or type(cause).__name__}{'' if cause is None else user_line(cause)}"
        self._ended(trial, f"failed: {reason}; traceback: {trial.path}/error.txt")

    def _ended(self, trial, outcome: str) -> None:
        self._log_events(trial)
        self._spent.append(time.monotonic() - self._began.get(trial.trial_id, time.monotonic()))
        self._end_phases()
        if self._console is not None:
            count = f"{self._count()}/{self._total}" if self._total else str(self._count())
            epochs = (trial.last_result or {}).get("training_iteration", 0)
            self._console.print(
                f"trial {count}  {_config(trial)}  {outcome}  after {epochs} report(s), {self._spent[-1]:.1f} s",
                highlight=False,
                soft_wrap=True,
            )

    def _count(self) -> int:
        """Returns the number of trials that have ended, in this call or before it."""
        ended = [trial.trial_id for trial in self._trials if trial.status in ("TERMINATED", "ERROR")]
        return len(self._spent) + sum(trial_id not in self._began for trial_id in ended)

    def _log_events(self, trial) -> None:
        """Logs what a trial's training has found, such as a loss that is NaN, and has recorded in its folder."""
        with contextlib.suppress(OSError):  # of a storage; the sweep continues
            recorded = events.read_events(trial.storage.storage_filesystem, trial.path)
            firsts = {event.kind: event for event in reversed(recorded) if event.kind in events.TRAINING_KINDS}
            for event in reversed(firsts.values()):
                logger.warning(f"trial with {_config(trial)}: {event}")

    def best(self) -> tuple[float, Any] | None:
        """Returns (the best last value of the metric, its trial) so far."""
        values = [(_value(t, self._metric), t) for t in self._trials]
        values = [(v, t) for v, t in values if v is not None and math.isfinite(v)]
        return (min if self._mode == "min" else max)(values, key=lambda pair: pair[0]) if values else None

    def _title(self) -> str:
        """Returns how far the sweep is."""
        best = self.best()
        running = sum(t.status == "RUNNING" for t in self._trials)
        title = f"{self._count()}/{self._total or '?'} trials ended, {running} running"
        if best is not None:
            title += f", best {self._metric} {_format_value(best[0])}"
        return ", ".join([title, *format_time_left(self.seconds_left(running))])

    def _table(self):
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        best = self.best()
        table = RichTable()
        for name in ("trial", "state", "config", "report", self._metric):
            table.add_column(name)
        shown = [t for t in self._trials if t.status == "RUNNING"]
        shown += sorted(
            (t for t in self._trials if t.status != "RUNNING" and t.last_result),
            key=lambda t: _rank(_value(t, self._metric), self._mode),
        )
        for trial in shown[:_ROWS]:
            mark = " *" if best is not None and trial is best[1] else ""
            result = trial.last_result or {}
            value = _format_value(_value(trial, self._metric)) + mark
            reports = str(result.get("training_iteration", 0))
            table.add_row(trial.trial_id[-5:], trial.status.lower(), _config(trial), reports, value)
        return Group(Text(self._title()), table)  # a title of the table's own would wrap if that is narrow

    def seconds_left(self, running: int) -> float | None:
        """Returns the remaining seconds, if other trials last as long as finished ones; None before there are any."""
        if not self._spent or not self._total:
            return None
        remaining = max(0, self._total - self._count())
        return remaining * sum(self._spent) / len(self._spent) / max(1, running)

    def print_best(self, grid) -> None:
        """Prints the best config, and how to load its model."""
        if self._console is None:
            return
        errors = f", {len(grid.errors)} failed" if grid.errors else ""
        self._console.print(f"{len(grid)} trials{errors}; results in {grid.experiment_path}", soft_wrap=True)
        values = [result.metrics[self._metric] for result in grid if self._metric in (result.metrics or {})]
        if not values:
            return
        if all(value != value for value in values):  # Tune ignores NaN
            self._console.print(
                f"no trial is the best: {self._metric} is NaN in all of them. Lower the learning rate, or look at the "
                "data",
                soft_wrap=True,
            )
            return
        best = grid.get_best_result()
        config = ", ".join(f"{k}={_format_value(v)}" for k, v in best.config.items())
        self._console.print(
            f"best {self._metric} {_format_value(best.metrics[self._metric])}: {config}", highlight=False
        )
        if best.checkpoint is not None:
            self._console.print(
                f'its model: raytf.load_model("{best.checkpoint.path}")', highlight=False, soft_wrap=True
            )


class Stopper(tune.Stopper):
    """Ends the sweep if no trial can succeed, or if the user's own stopper requires it."""

    def __init__(self, table: SweepTable, users):
        self._table, self._users = table, users

    def __getstate__(self):
        return {"_table": None, "_users": self._users}

    def __call__(self, trial_id, result):
        return self._users(trial_id, result) if self._users is not None else False

    def stop_all(self):
        failed = self._table is not None and self._table.fatal is not None
        return failed or (self._users.stop_all() if hasattr(self._users, "stop_all") else False)


def _cause(trial) -> Exception | None:
    """Returns a trial's error on its actor; Tune has written it to a file by now."""
    if not os.path.exists(trial.pickled_error_file or ""):
        return trial.get_error()
    with open(trial.pickled_error_file, "rb") as file:
        error = pickle.load(file)
    return error.cause if isinstance(error, RayTaskError) else error


def _value(trial, metric: str) -> float | None:
    value = flatten_dict(trial.last_result or {}).get(metric)
    return float(value) if isinstance(value, numbers.Real) else None  # also NumPy's


def _rank(value: float | None, mode: str) -> float:
    if value is None or not math.isfinite(value):
        return math.inf
    return value if mode == "min" else -value


def _config(trial) -> str:
    result = trial.last_result or {}
    config = " ".join(f"{k}={_format_value(v)}" for k, v in trial.config.items())
    same = _format_value(result.get("scaled_learning_rate")) == _format_value(trial.config.get("learning_rate"))
    names = [name for name in _DERIVED if name in result and not (same and name == "scaled_learning_rate")]
    follows = ", ".join(f"{_format_value(result[name])} {_DERIVED[name]}" for name in names)
    return f"{config} ({follows})" if follows else config


def _format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
