"""What raytf logs and prints: `warnings_logged` is for its loggers what `pytest.warns` is for Python's warnings."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator

from raytf import logs


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def lines_logged() -> Iterator[list[str]]:
    """Yields the list of the messages from WARNING upwards that raytf logs in this process in the meantime."""
    handler, logger = _Lines(), logging.getLogger(logs.NAME)
    logger.addHandler(handler)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def warnings_logged(match: str) -> Iterator[list[str]]:
    """As `lines_logged`; fails if none of the messages matches, also where the context ends with an error."""
    with lines_logged() as texts:
        try:
            yield texts
        finally:
            assert any(re.search(match, text) for text in texts), f"none of {texts} matches {match!r}"


def without_status(stderr: str) -> list[str]:
    """Returns the lines of a command without those that say what it does, which a busy machine has in addition."""
    return [line for line in stderr.splitlines() if not line.endswith(" ...")]
