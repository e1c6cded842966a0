"""Events that a training on workers sends to the driver, such as a loss that is NaN. Driver side."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from raytf import events
from raytf.events import Kind, RunEvent

# Seconds for which the first report of a loss that is NaN waits for those of other workers.
_OTHERS_INTERVAL = 1.0


class TrainingEvents:
    """Emits each kind of event once. A loss that is NaN is emitted with the workers in whose rows it began.

    Each worker sends the first step whose loss, that of its own rows, was NaN. All weights are NaN after that step, so
    that the workers without such rows send a later one.

    Args:
        clock: Returns seconds; for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._emitted: set[Kind] = set()
        self._losses: dict[int, RunEvent] = {}  # by rank
        self._deadline = 0.0

    def take(self, event: RunEvent) -> None:
        """Takes an event of a worker."""
        if event.kind in self._emitted:
            return
        if event.kind is not Kind.LOSS_NOT_FINITE or event.step is None:
            self._emit(event)
            return
        if not self._losses:
            self._deadline = self._clock() + _OTHERS_INTERVAL
        (rank,) = event.ranks
        self._losses.setdefault(rank, event)
        if len(self._losses) == event.workers:
            self.flush()

    def check(self) -> None:
        """Emits what has waited for long enough; called again and again."""
        if self._losses and self._clock() >= self._deadline:
            self.flush()

    def flush(self) -> None:
        """Emits what waits."""
        if not self._losses:
            return
        losses, self._losses = self._losses, {}
        first = min(losses.values(), key=lambda event: event.step)
        ranks = tuple(sorted(rank for rank, event in losses.items() if event.step == first.step))
        self._emit(dataclasses.replace(first, ranks=ranks))

    def _emit(self, event: RunEvent) -> None:
        self._emitted.add(event.kind)
        events.emit(event)
