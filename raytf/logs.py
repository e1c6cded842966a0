"""What raytf reports, through `logging`: the loggers are named as the modules are, such as `raytf.train.engine`.

A process that has set up none of them shows messages from INFO upwards on stderr, each begins with `raytf: `. Doubts
about the user's code are warnings of Python, too, see `warn_user`.
"""

from __future__ import annotations

import logging
import os
import sys
import types
import warnings

NAME = "raytf"
_WARNINGS = f"{NAME}.warnings"
# Packages whose frames are not the user's code, and scripts that start a process.
_LIBRARIES = {NAME, "keras", "tf_keras", "tensorflow", "ray", "click", *sys.stdlib_module_names}
_STARTS_OF_PROCESSES = ("default_worker.py", NAME)


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


def user_location() -> tuple[str, int] | None:
    """Returns file and line of the user's code that is running or has called this, or None."""
    frame = _user_frame()
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _user_frame() -> types.FrameType | None:
    frame = sys._getframe(1)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return frame


def _is_users(frame: types.FrameType) -> bool:
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    # a worker's first frame is a script of Ray's, and a command's one of pip's
    starts_process = package == "__main__" and os.path.basename(frame.f_code.co_filename) in _STARTS_OF_PROCESSES
    return not starts_process and package not in _LIBRARIES and "__autograph_generated" not in frame.f_code.co_filename


def warn_user(message: str, location: tuple[str, int] | None = None) -> None:
    """Emits a warning of Python about the user's code or arguments, and logs it.

    Python shows it, and the user's filters of warnings apply. Handlers that the user has added to the logger "raytf"
    get it as well, with level WARNING. It has the line of the user's code that is running, or else of raytf's.

    Args:
        message: Text of the warning.
        location: Result of `user_location` in another thread.
    """
    frame = _user_frame() or sys._getframe(1)
    file, line = location or (frame.f_code.co_filename, frame.f_lineno)
    registry = None if location else frame.f_globals.setdefault("__warningregistry__", {})  # as `warnings.warn` does
    warnings.warn_explicit(message, UserWarning, file, line, registry=registry)
    get_logger(_WARNINGS).warning(message)
