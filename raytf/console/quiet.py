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

_RAY_WIDGETS = "ray.widgets.util"

_lock = threading.Lock()
_state = {"active": False, "started": False}
_left: list[subprocess.Popen] = []


def wants_native(environment) -> bool:
    """Whether the user has asked for all of TensorFlow's native lines, by `TF_CPP_MIN_LOG_LEVEL=0`."""
    return environment.get("TF_CPP_MIN_LOG_LEVEL") == "0"


@contextlib.contextmanager
def native():
    """Within it, TensorFlow starts in this process without its native start-up lines."""
    with _lock:
        mine = not (_state["active"] or _state["started"] or wants_native(os.environ)) and bool(sys.executable)
        _state["active"] |= mine
    if not mine:
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


@contextlib.contextmanager
def ray_starts() -> Iterator[None]:
    """Within it Ray starts in this process without what it says of that; what it warns of is shown.

    That it protects a cluster with a token is no warning. Nor is what Ray and its tqdm would like to draw with in a
    notebook, from here on.
    """
    import logging

    logging.getLogger(_RAY_WIDGETS).setLevel(logging.WARNING)
    if "ipykernel" in sys.modules:
        import warnings

        warnings.filterwarnings("ignore", "IProgress not found")
    token = logging.getLogger(loggers.RAY_TOKEN)
    token.addFilter(_is_no_token)
    try:
        with at_levels(dict.fromkeys((loggers.RAY_STARTS, loggers.RAY_TOKEN), logging.WARNING)):
            yield
    finally:
        token.removeFilter(_is_no_token)


def _is_no_token(record) -> bool:
    return "Token authentication is enabled for this" not in str(record.msg)


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
