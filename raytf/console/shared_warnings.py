"""Shows a warning that all workers of a run emit only once, by the first worker. On a worker.

It replaces `warnings.showwarning`. A warning of a single worker is still shown, and one that is emitted n times is
shown n times. Warnings of raytf itself are shown without the source line.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import logging
import os
import re
import sys
import warnings

from raytf import logs

_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


@contextlib.contextmanager
def shown_once(entries):
    """Shows a warning of Python or of a logger only if this worker claims it first, until the context ends.

    Args:
        entries: A `progress.Entries` that all workers of the run share, or None to show all warnings.
    """
    claims = None if entries is None else _Claims(entries)
    original = warnings.showwarning

    def show(message, category, filename, lineno, file=None, line=None):
        if file is None and claims and not claims.take(f"{filename}:{lineno}: {category.__name__}: {message}"):
            return
        if line is None and filename.startswith(_PACKAGE_FOLDER):  # Python would read the source line
            line = ""
        original(message, category, filename, lineno, file, line)

    handlers = _consoles() if claims else []
    warnings.showwarning = show
    for handler in handlers:
        handler.addFilter(claims.filter)
    try:
        yield
    finally:
        warnings.showwarning = original
        for handler in handlers:
            handler.removeFilter(claims.filter)


def _consoles() -> list[logging.Handler]:
    """Returns the logging handlers that write to this process' stderr or stdout, and the one of loggers without any."""
    loggers = [logging.getLogger(name) for name in (None, logs.NAME, "tensorflow", "absl")]
    last_resort = [logging.lastResort] if logging.lastResort else []
    handlers = {id(handler): handler for handler in (*last_resort, *(h for logger in loggers for h in logger.handlers))}
    streams = (None, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    is_file = lambda handler: isinstance(handler, logging.FileHandler) or getattr(handler, "stream", 0) not in streams
    return [handler for handler in handlers.values() if not is_file(handler)]


class _Claims:
    def __init__(self, entries):
        self._entries = entries
        self._counts: collections.Counter[str] = collections.Counter()

    def take(self, text: str) -> bool:
        """Returns whether this worker is the first with the nth occurrence of this text."""
        key = hashlib.sha256(_ADDRESS.sub("0x", text).encode()).hexdigest()[:32]
        self._counts[key] += 1
        return self._entries.claim(f"{key}/{self._counts[key]}")

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        if not hasattr(record, "raytf_shown"):
            record.raytf_shown = self.take(f"{record.name}: {record.getMessage()}")
        return record.raytf_shown
