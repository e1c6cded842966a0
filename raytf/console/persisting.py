"""Drops log records of failures that are retried, unless they persist. In Ray Train's controller."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from raytf.compat import loggers

_PERSISTS_INTERVAL = 30.0
# Ray waits 5 s for an answer and retries at the next poll: a record after this many seconds is another failure.
_SERIES_INTERVAL = 15.0


def autoscaler_is_asked(clock: Callable[[], float] = time.monotonic) -> None:
    """Drops records of timeouts of the autoscaler, which Ray calls safe to ignore unless they persist.

    Args:
        clock: Function that returns seconds, for tests.
    """
    logging.getLogger(loggers.AUTOSCALER_ASKED).addFilter(_Persisting("Failed to send resource request", clock))


class _Persisting(logging.Filter):
    """Drops records with a prefix until they have repeated for 30 s; then passes one every 30 s."""

    def __init__(self, text: str, clock: Callable[[], float]):
        super().__init__()
        self._text, self._clock = text, clock
        self._since = self._last = float("-inf")

    def filter(self, record) -> bool:
        if not str(record.msg).startswith(self._text):
            return True
        time_now = self._clock()
        if time_now - self._last > _SERIES_INTERVAL:
            self._since = time_now
        self._last = time_now
        if time_now - self._since < _PERSISTS_INTERVAL:
            return False
        self._since = time_now
        return True
