"""Start-up lines of TensorFlow and Ray, kept away from who did not ask for them; every other line is shown.

TensorFlow's native code writes some of its lines before it reads any setting: `TF_CPP_MIN_LOG_LEVEL` does not hide
them. They are taken out of what goes to file descriptor 2 by a process of its own, which runs this file: it hands on
the last line of a process that crashes, waits for nobody's lock, and does not mind forks.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading

_NATIVE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    r"|To enable the following instructions: "
    r"|\S+ \S+ +\d+ (?:"
    r"port\.cc:\d+\] oneDNN custom operations are on"
    r"|cudart_stub\.cc:\d+\] Could not find cuda drivers"
    r"|cpu_feature_guard\.cc:\d+\]"
    r"|cuda_(?:dnn|fft|blas)\.cc:\d+\] Unable to register cu\w+ factory"
    r"|computation_placer\.cc:\d+\] computation placer already registered"
    # no driver, or no device that may be seen; whatever else is wrong with a GPU is told
    r"|cuda_\w+\.cc:\d+\] failed call to cuInit: .*(?:\(303\)|CUDA_ERROR_NO_DEVICE)"
    r")"
)
_RAY_WIDGETS = "ray.widgets.util"
_FILTER_ENDS_SECONDS = 2.0

_lock = threading.Lock()
_state = {"active": False, "started": False}
_left: list[subprocess.Popen] = []


def is_native(line: str) -> bool:
    """Whether a line is one of those that TensorFlow's native code writes whenever it starts."""
    return _NATIVE.match(line) is not None


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
    command = [sys.executable, "-I", "-S", __file__]
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
            filtering.wait(_FILTER_ENDS_SECONDS)
        except subprocess.TimeoutExpired:  # a process that was started meanwhile writes to it
            _left.append(filtering)


def ray_starts() -> None:
    """Keeps back what Ray says of its start where it was not the user who called `ray.init`.

    A dataset that is made before anything else starts Ray, too, which is why this is called when raytf is imported.
    What Ray warns of is shown; that it protects a cluster with a token is no warning.
    """
    import logging

    from raytf.compat import loggers  # not at the top: this file runs by itself, too

    for name in loggers.RAY_STARTS:
        logger = logging.getLogger(name)
        if _is_told not in logger.filters:
            logger.addFilter(_is_told)
    # what Ray and its tqdm would like to draw with in a notebook
    logging.getLogger(_RAY_WIDGETS).setLevel(logging.WARNING)
    if "ipykernel" in sys.modules:
        import warnings

        warnings.filterwarnings("ignore", "IProgress not found")


def _is_told(record) -> bool:
    says_only = record.levelname == "INFO" or "Token authentication is enabled for this" in str(record.msg)
    from raytf.compat import loggers

    # calls of `ray.init` that nobody has written
    nobodys = {loggers.AUTO_INIT, "raytf.runtime.connection"}
    return not (says_only and nobodys & set(_callers()))


def _callers():
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_globals.get("__name__")
        frame = frame.f_back


def _copy() -> None:
    """What the filtering process does."""
    with open(0, "rb", buffering=0) as lines, open(1, "wb", buffering=0) as out:
        rest = b""
        while text := lines.read(1 << 16):
            *whole, rest = re.split(rb"(?<=[\n\r])", rest + text)
            out.write(b"".join(line for line in whole if not is_native(line.decode(errors="replace"))))
        if rest and not is_native(rest.decode(errors="replace")):
            out.write(rest)


if __name__ == "__main__":
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with who writes to it
    _copy()
