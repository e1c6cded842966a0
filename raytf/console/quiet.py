"""Start-up lines of TensorFlow and Ray, kept away from who did not ask for them; every other line is shown.

TensorFlow's native code writes some of its lines before it reads any setting: `TF_CPP_MIN_LOG_LEVEL` does not hide
them. They are taken out of what goes to file descriptor 2 by a process of its own, which runs `native_lines.py`: it
hands on the last line of a process that crashes, waits for nobody's lock, and does not mind forks.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping

from raytf import timeouts
from raytf.compat import loggers
from raytf.console import native_lines

_RAY_STARTS = loggers.RAY_STARTS
_RAY_WIDGETS = "ray.widgets.util"
# Whose calls of `ray.init` nobody has written.
_NOBODYS = {loggers.AUTO_INIT, "raytf.runtime.connection"}

_lock = threading.Lock()
_state = {"active": False, "started": False}
_left: list[subprocess.Popen] = []


def wants_native(environment) -> bool:
    """Whether the user has asked for all of TensorFlow's native lines, by `TF_CPP_MIN_LOG_LEVEL=0`."""
    return environment.get("TF_CPP_MIN_LOG_LEVEL") == "0"


@contextlib.contextmanager
def native(ends_start: bool = True):
    """Within it, TensorFlow starts in this process without its native start-up lines.

    Args:
        ends_start: whether TensorFlow will have started then, so that nothing is to be kept back any more.
    """
    with _lock:
        mine = not (_state["active"] or _state["started"] or wants_native(os.environ)) and bool(sys.executable)
        _state["active"] |= mine
    if not mine:
        yield
        return
    try:
        with _filtered():
            yield
        _state["started"] |= ends_start
    finally:
        _state["active"] = False


@contextlib.contextmanager
def _filtered():
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # there is no such descriptor
        yield
        return
    command = [sys.executable, "-I", "-S", native_lines.__file__]
    filtering = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=kept, stderr=subprocess.DEVNULL)
    try:
        os.dup2(filtering.stdin.fileno(), 2)
        filtering.stdin.close()
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        try:
            filtering.wait(timeouts.get().output_filter)
        except subprocess.TimeoutExpired:  # a process that was started meanwhile writes to it
            _left.append(filtering)


def ray_starts() -> None:
    """Keeps back what Ray says of its start where it was not the user who called `ray.init`.

    A dataset that is made before anything else starts Ray, too, which is why this is called when raytf is imported.
    What Ray warns of is shown; that it protects a cluster with a token is no warning.
    """
    import logging

    for name in _RAY_STARTS:
        logger = logging.getLogger(name)
        if _is_told not in logger.filters:
            logger.addFilter(_is_told)
    # what Ray and its tqdm would like to draw with in a notebook
    logging.getLogger(_RAY_WIDGETS).setLevel(logging.WARNING)
    if "ipykernel" in sys.modules:
        import warnings

        warnings.filterwarnings("ignore", "IProgress not found")


@contextlib.contextmanager
def at_levels(levels: Mapping[str, int | str]) -> Iterator[None]:
    """Within it loggers, by name, have other levels."""
    import logging

    before = {name: logging.getLogger(name).level for name in levels}
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def result_is_read():
    """Within it Ray reads a run's folder without its advice for those who meant to start another run."""
    return at_levels({loggers.TRAIN_CHECKPOINTS: "WARNING"})


def _is_told(record) -> bool:
    says_only = record.levelname == "INFO" or "Token authentication is enabled for this" in str(record.msg)
    return not (says_only and _NOBODYS & set(_callers()))


def _callers():
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_globals.get("__name__")
        frame = frame.f_back
