"""What is tried again and passes on a busy machine is told only where it persists. In Ray Train's controller."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from raytf.compat import loggers

_PERSISTS_INTERVAL = 30.0
# Ray waits 5 s for an answer and tries again at the next poll: what comes later than so long is another failure.
_SERIES_INTERVAL = 15.0


def autoscaler_is_asked(clock: Callable[[], float] = time.monotonic) -> None:
    """Keeps back that an autoscaler was not asked in time, which Ray calls safe to ignore unless it persists.

    Args:
        clock: gives seconds; for tests.
    """
    logging.getLogger(loggers.AUTOSCALER_ASKED).addFilter(_Persisting("Failed to send resource request", clock))


class _Persisting(logging.Filter):
    """Drops a record that begins so until it has come again and again for 30 s; then it is told, once each 30 s."""

    def __init__(self, text: str, clock: Callable[[], float]):
        super().__init__()
        self._text, self._clock = text, clock
        self._since = self._last = float("-inf")

    def filter(self, record) -> bool:
        if not str(record.msg).startswith(self._text):
            return True
        now = self._clock()
        if now - self._last > _SERIES_INTERVAL:
            self._since = now
        self._last = now
        if now - self._since < _PERSISTS_INTERVAL:
            return False
        self._since = now
        return True
