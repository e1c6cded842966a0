"""Chooses how many steps one call of the training function runs, from the time of Python between two calls."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Mapping
from typing import Any

from raytf import logs
from raytf.collectives import communicator
from raytf.parallel import callbacks as callbacks_module
from raytf.parallel import epoch_iterator
from raytf.worker.part import Training, TrainingPart

logger = logs.get_logger(__name__)

# Executions that are measured, and warm-up executions before them.
_LOOKED_AT, _WARM_UP = 24, 8
# Python's share of a step from which a new trace pays, and target for that share.
_MIN_OVERHEAD, _OVERHEAD_TARGET = 0.03, 0.01
# Longest execution in seconds: progress and a stop come between two executions.
_LONGEST_CALL = 1.0
_MOST = 64


def choose_steps(seconds_between: float, seconds_within: float, first: float, steps_left: int) -> int:
    """Returns the steps per execution that hide the time between two calls, or 1 if more would not pay.

    Args:
        seconds_between: Seconds between two executions.
        seconds_within: Seconds of an execution of one step.
        first: Seconds of the first execution, which traces; another number of steps costs about as much again.
        steps_left: Remaining steps of the whole training.

    Returns:
        A power of two, at most `_MOST`, with executions of at most 1 s.
    """
    if seconds_between < _MIN_OVERHEAD * (seconds_between + seconds_within):
        return 1
    wanted = seconds_between / (_OVERHEAD_TARGET * (seconds_between + seconds_within))
    longest = _LONGEST_CALL / max(seconds_within, 1e-9)
    number = 2 ** math.floor(math.log2(max(1.0, min(wanted, longest, _MOST))))
    saved = steps_left * seconds_between * (1 - 1 / number)
    return number if saved > 2 * first else 1


class ExecutionCallback(TrainingPart):
    """Measures the first steps and raises `steps_per_execution` if Python between steps is slow; put it first.

    All workers follow the chief, at the same step. If executions of several steps turn out slower, training returns to
    single steps. It does nothing if the model was compiled with more than one step per execution, or runs eagerly. The
    same applies to callbacks that observe batches, and to data of unknown length.

    Args:
        callbacks: The user's callbacks.
    """

    def __init__(self, callbacks):
        super().__init__()
        self._state: Mapping | None = None
        self._fixed = any(callbacks_module.reads_batches(c) for c in callbacks)

    @classmethod
    def create(cls, training: Training) -> ExecutionCallback | None:
        """Sets the model's steps per execution; returns None if they are given, or if other processes make steps."""
        steps = training.options.steps_per_execution
        if steps != "auto":
            training.model.steps_per_execution = steps
        return cls(training.users) if steps == "auto" and training.waited is not None else None

    def on_train_begin(self, logs=None):
        model = self.model
        self._steps = self.params["steps"]
        # with several workers all measure or none: a callback may be the chief's only
        fixed = self._fixed or model.__dict__.get("_raytf_sync_batches", False)
        self._is_measuring = not (fixed or model.steps_per_execution > 1 or model.run_eagerly or not self._steps)
        self._iterator = epoch_iterator.newest_iterator() if self._is_measuring else None
        self._single = None  # function and time of single steps, while another function is in use
        self._start_over()
        self._steps_left = None
        self._first = 0.0
        if self._state is not None:
            self._resume(self._state)
            self._state = None

    def state_dict(self) -> dict[str, Any]:
        single = None if self._single is None else self._single[1]
        names = ("_is_measuring", "_first", "_count", "_seconds_between", "_seconds_within")
        return {"single": single, **{name: copy.copy(getattr(self, name)) for name in names}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def _resume(self, state: Mapping[str, Any]) -> None:
        for name in state.keys() - {"single"}:
            setattr(self, name, state[name])
        self._single = None if state["single"] is None else (None, state["single"])
        self._iterator = epoch_iterator.newest_iterator() if self._is_measuring else None

    def exchanges(self, step: int) -> bool:
        return self._is_measuring and (self._count + 1 in (_WARM_UP + _LOOKED_AT, self._judged_at()))

    def _judged_at(self) -> int:
        return 1 + max(2, _LOOKED_AT // self.model.steps_per_execution)

    def _start_over(self):
        self._count, self._ended, self._began = 0, None, None
        self._seconds_between, self._seconds_within = [], []  # seconds between executions, and of a step in one

    def on_epoch_begin(self, epoch, logs=None):
        self._steps_left = (self.params["epochs"] - epoch) * (self._steps or 0)
        self._ended = None

    def on_train_batch_begin(self, batch, logs=None):
        if self._is_measuring:
            self._began, self._begin = time.perf_counter(), batch
            if self._ended is not None:
                self._seconds_between.append(self._began - self._ended)

    def on_train_batch_end(self, batch, logs=None):
        if not self._is_measuring:
            return
        self._ended = time.perf_counter()
        if self._began is not None:  # None: other workers made the execution after which this replacement begins
            self._seconds_within.append((self._ended - self._began) / (batch - self._begin + 1))
        self._count += 1
        if self._count == 1 and self._seconds_within:
            self._first = self._seconds_within[0]
        if self._single is None and self._count == _WARM_UP + _LOOKED_AT:
            self._decide(batch)
        elif self._single is not None and self._count == self._judged_at():
            self._choose_faster()

    def _decide(self, batch):
        if len(self._seconds_between) <= _WARM_UP:  # epochs of one step have no time between steps
            self._is_measuring = False
            return
        gap, duration = (statistics.median(times[_WARM_UP:]) for times in (self._seconds_between, self._seconds_within))
        number = choose_steps(gap, duration, self._first, self._steps_left - batch - 1)
        number = communicator.chief_number(self.model.distribute_strategy, number)
        if number == 1:
            self._is_measuring = False
            return
        self._single = self.model.train_function, gap + duration
        logger.debug("steps_per_execution: %d, as Python took %.0f %% of a step", number, 100 * gap / (gap + duration))
        self._set_steps(number)
        self.model.make_train_function(force=True)
        self._start_over()

    def _choose_faster(self):
        function, single = self._single
        is_slower = statistics.median(self._seconds_within[1:]) > single
        if communicator.chief_number(self.model.distribute_strategy, is_slower):
            logger.debug("steps_per_execution: 1 again, as more did not help")
            self._set_steps(1)
            self.model.train_function = function
            if function is None:  # another worker made it, which this one has replaced
                self.model.make_train_function(force=True)
        self._is_measuring = False

    def _set_steps(self, number: int):
        self.model.steps_per_execution = number
        self._iterator.steps_per_execution = number
