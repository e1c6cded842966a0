"""Hides start-up lines of TensorFlow and Ray that the user has not requested. All other lines are shown.

TensorFlow's native code writes some lines before it reads any setting: `TF_CPP_MIN_LOG_LEVEL` does not hide them. A
separate process, `native_lines.py`, filters them from file descriptor 2. It also forwards the last line of a process
that crashes, waits for no lock, and is safe with forks.
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

_RAY_WIDGETS = "ray.widgets.util"

_lock = threading.Lock()
_state = {"active": False, "started": False}
_restore: list[subprocess.Popen] = []


def wants_native(environment) -> bool:
    """Returns whether the user has requested all of TensorFlow's native lines, by `TF_CPP_MIN_LOG_LEVEL=0`."""
    return environment.get("TF_CPP_MIN_LOG_LEVEL") == "0"


@contextlib.contextmanager
def quiet_native():
    """Hides TensorFlow's native start-up lines in this process until the context ends."""
    with _lock:
        filters = not (_state["active"] or _state["started"] or wants_native(os.environ)) and bool(sys.executable)
        _state["active"] |= filters
    if not filters:
        yield
        return
    try:
        with _filtered():
            yield
        _state["started"] = True
    finally:
        _state["active"] = False


@contextlib.contextmanager
def _filtered():
    sys.stderr.flush()
    try:
        original = os.dup(2)
    except OSError:  # the descriptor is closed
        yield
        return
    command = [sys.executable, "-I", "-S", native_lines.__file__]
    filtering = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=original, stderr=subprocess.DEVNULL)
    try:
        os.dup2(filtering.stdin.fileno(), 2)
        filtering.stdin.close()
        yield
    finally:
        sys.stderr.flush()
        os.dup2(original, 2)
        os.close(original)
        try:
            filtering.wait(timeouts.get().output_filter)
        except subprocess.TimeoutExpired:  # a child process that started meanwhile still writes to it
            _restore.append(filtering)


@contextlib.contextmanager
def quiet_ray_start() -> Iterator[None]:
    """Hides Ray's start-up lines in this process until the context ends; its warnings are shown.

    The line that a token protects the cluster is hidden too. From here on so are the hints of Ray and its tqdm to
    install widgets for a notebook.
    """
    import logging

    logging.getLogger(_RAY_WIDGETS).setLevel(logging.WARNING)
    if "ipykernel" in sys.modules:
        import warnings

        warnings.filterwarnings("ignore", "IProgress not found")
    token = logging.getLogger(loggers.RAY_TOKEN)
    token.addFilter(_is_no_token)
    try:
        with log_levels(dict.fromkeys((loggers.RAY_STARTS, loggers.RAY_TOKEN), logging.WARNING)):
            yield
    finally:
        token.removeFilter(_is_no_token)


def _is_no_token(record) -> bool:
    return "Token authentication is enabled for this" not in str(record.msg)


@contextlib.contextmanager
def log_levels(levels: Mapping[str, int | str]) -> Iterator[None]:
    """Sets the levels of loggers, by name, until the context ends."""
    import logging

    previous = {name: logging.getLogger(name).level for name in levels}
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name, level in previous.items():
            logging.getLogger(name).setLevel(level)


def quiet_result_reading():
    """Returns a context in which Ray reads a run's folder without its hints on how to start another run."""
    return log_levels({loggers.TRAIN_CHECKPOINTS: "WARNING"})
