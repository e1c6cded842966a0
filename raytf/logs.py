"""What raytf reports, through `logging`: the loggers are named as the modules are, such as `raytf.train.engine`.

A process that has set up none of them shows messages from INFO upwards on stderr, each begins with `raytf: `.
"""

from __future__ import annotations

import logging
import sys

NAME = "raytf"


class _StderrHandler(logging.Handler):
    """Writes to what stderr is at that moment: live lines, notebooks and tests replace it."""

    @property
    def stream(self):
        """The stream that it writes to, as of a `logging.StreamHandler`."""
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=self.stream, flush=True)
        except Exception:
            self.handleError(record)


def get_logger(name: str) -> logging.Logger:
    """Returns the logger of a module; makes sure that its messages are shown.

    What the user has set on the logger "raytf" before, a level or handlers, stays.

    Args:
        name: of the module, `__name__`.
    """
    top = logging.getLogger(NAME)
    if not top.handlers:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("raytf: %(message)s"))
        top.addHandler(handler)
        # TensorFlow's absl gives the root logger a handler, which would show each message again
        top.propagate = False
    if top.level == logging.NOTSET:
        top.setLevel(logging.INFO)
    return logging.getLogger(name)
