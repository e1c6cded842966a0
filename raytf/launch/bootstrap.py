"""Runs an unmodified user script in its own process, with raytf's changes to Keras 3 for several workers.

`runner.TaskRunner` starts it as `python -m raytf.launch.bootstrap ORDER SCRIPT [ARGUMENT]...`. It does not import
TensorFlow or Keras: it changes them right after the script has imported them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.abc
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Callable

from raytf import activity, timeouts
from raytf.collectives import ring_token
from raytf.compat import fast_import, legacy_keras, legacy_names
from raytf.runtime import cores, settings
from raytf.timeouts import Timeouts

_prepared = contextlib.ExitStack()
# Requests to a script's process.
SNAPSHOT, STACK = b"t", b"s"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BootOptions:
    """Options for the process of a script.

    Args:
        alive: File descriptor of a pipe that its parent holds open. It carries the token of the ring of all tasks. This
            process ends when it is closed.
        request_fd: File descriptor of a socket on which its parent requests snapshots and stacks; see `_answer`.
        module: Whether the script is the name of a module.
        ports: First and last port on which it may listen.
        timeouts: Timeouts of its parent, by name.
        cores: Cores that its parent has claimed for it; an empty list pins nothing.
    """

    alive: int
    request_fd: int
    module: bool
    ports: tuple[int, int]
    timeouts: Timeouts
    cores: list[int] = dataclasses.field(default_factory=list)

    def text(self) -> str:
        """Returns the options as JSON, for the command line."""
        return json.dumps(dataclasses.asdict(self))


def main(arguments: list[str]) -> None:
    """Runs the script as `__main__` until it ends."""
    order, script, *script_arguments = arguments
    order = BootOptions(**json.loads(order))
    timeouts.set_current(Timeouts(**order.timeouts))
    ring_token.keep_token(os.read(order.alive, ring_token.TOKEN_BYTES))
    threading.Thread(target=_end_with, args=(order.alive,), daemon=True).start()
    threading.Thread(target=_answer, args=(order.request_fd,), daemon=True).start()
    activity.tracker.register_thread()
    if order.cores:
        cores.adopt_cores(order.cores)
    if not legacy_keras.is_enabled():
        sys.meta_path.insert(0, _AfterImport(functools.partial(_prepare, tuple(order.ports))))
    sys.argv = [script, *script_arguments]
    sys.excepthook = _show
    if order.module:
        sys.path[0] = os.getcwd()
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(os.path.abspath(script), run_name="__main__")  # Python, too, makes __file__ absolute


def _end_with(pipe: int) -> None:
    """Kills this process group when the other end of a pipe is closed."""
    os.read(pipe, 1)
    os.killpg(0, signal.SIGKILL)


def _answer(requests: int) -> None:
    """Answers requests of one byte with a line of JSON: the training's snapshot, or its stack."""
    with socket.socket(fileno=requests) as parent, contextlib.suppress(OSError):  # the parent may have ended
        while question := parent.recv(1):
            answer = activity.snapshot() if question == SNAPSHOT else activity.stack()
            parent.sendall(json.dumps(answer).encode() + b"\n")


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once, when TensorFlow and Keras are both completely imported.

    A script may import either first, and Keras imports TensorFlow. A script that imports only TensorFlow may use
    `tf.keras` at any time, so Keras is imported right after it.
    """

    def __init__(self, action: Callable[[], None]):
        self._action = action
        self._awaited = {"tensorflow", "keras"}
        self._is_searching = False

    def find_spec(self, name, path=None, target=None):
        if name not in self._awaited or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            with fast_import.quick():
                execute(module)  # TensorFlow tries to import Keras several times before its own import is complete
                if name == "tensorflow" and "keras" not in sys.modules:
                    import keras  # noqa: F401
            self._awaited.discard(name)
            if not self._awaited:
                sys.meta_path.remove(self)
                self._action()

        spec.loader.exec_module = exec_module
        return spec


def _prepare(ports: tuple[int, int]) -> None:
    first, *others = sys.path
    from raytf.worker import context

    _prepared.enter_context(context.prepared(settings.WorkerSetup(config=settings.TensorflowConfig(ports=ports))))
    added = [folder for folder in sys.path if folder not in (first, *others)]
    sys.path[:] = [first, *added, *others]  # Ray puts its packages before the script's folder


def _show(kind, error, traceback) -> None:
    """Prints Python's own message, from the script's first line on."""
    own_files = (__file__, "<frozen runpy>")
    inner = traceback
    while inner is not None and inner.tb_frame.f_code.co_filename in own_files:
        inner = inner.tb_next
    try:
        legacy_names.explain(error, "start the script with raytf run --legacy-keras")
    except legacy_names.Keras2Error as keras_2_error:
        keras_2_error.__cause__ = None  # its text contains the cause, and the traceback is the same
        kind, error = type(keras_2_error), keras_2_error
    sys.__excepthook__(kind, error.with_traceback(inner or traceback), inner or traceback)


if __name__ == "__main__":
    main(sys.argv[1:])
