"""What raytf reports, through `logging`: the loggers are named as the modules are, such as `raytf.train.engine`.

A process that has set up none of them shows messages from INFO upwards on stderr, each begins with `raytf: `. Doubts
about the user's code are warnings of Python, too, see `warn_user`.
"""

from __future__ import annotations

import logging
import sys
import warnings

NAME = "raytf"
_WARNINGS = f"{NAME}.warnings"


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
        handler.addFilter(lambda record: record.name != _WARNINGS)  # Python shows it
        top.addHandler(handler)
        # TensorFlow's absl gives the root logger a handler, which would show each message again
        top.propagate = False
    if top.level == logging.NOTSET:
        top.setLevel(logging.INFO)
    return logging.getLogger(name)


def user_location() -> tuple[str, int]:
    """Returns the file and the line outside raytf that has called it, for `warn_user` in another thread."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == NAME:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def warn_user(message: str, stacklevel: int = 1, location: tuple[str, int] | None = None) -> None:
    """Emits a warning of Python about the user's code or arguments, and logs it.

    Python shows it, and the user's filters of warnings apply. Handlers that the user has added to the logger "raytf"
    get it as well, with level WARNING.

    Args:
        message: Text of the warning.
        stacklevel: As of `warnings.warn`, at least 1.
        location: Result of `user_location`, instead of a stack level.
    """
    if location is None:
        warnings.warn(message, stacklevel=stacklevel + 1)
    else:
        warnings.warn_explicit(message, UserWarning, *location)
    get_logger(_WARNINGS).warning(message)
