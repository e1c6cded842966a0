"""Runs a user's script in a process of its own, unmodified, with what Keras 3 needs under several workers in force.

`python -m raytf.launch.bootstrap ORDER SCRIPT [ARGUMENT]...`, as `runner.TaskRunner` starts it. Neither TensorFlow nor
Keras is imported here: what has to be changed in them is changed right after the script has imported them.
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
from raytf.collectives import ring
from raytf.compat import fast_import, legacy_keras, legacy_names
from raytf.runtime import cores, settings
from raytf.timeouts import Timeouts

_prepared = contextlib.ExitStack()
# Questions to a script's process.
TOLD, STACK = b"t", b"s"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BootOptions:
    """What a process of a script is told.

    Args:
        alive: file descriptor of a pipe that its starter holds open; the token of the ring of all tasks comes through
            it, and when it ends, so does this process.
        asked: of a socket on which its starter asks what the training does; see `_answer`.
        module: the script is the name of a module.
        ports: the first and the last port on which it may listen.
        timeouts: its starter's, by name.
        cores: those that its starter has claimed for it; none leaves it where it is.
    """

    alive: int
    asked: int
    module: bool
    ports: tuple[int, int]
    timeouts: Timeouts
    cores: list[int] = dataclasses.field(default_factory=list)

    def text(self) -> str:
        """For the command line."""
        return json.dumps(dataclasses.asdict(self))


def main(arguments: list[str]) -> None:
    """Runs the script until it ends, as `__main__`."""
    order, script, *rest = arguments
    order = BootOptions(**json.loads(order))
    timeouts.put_in_force(Timeouts(**order.timeouts))
    ring.keep_token(os.read(order.alive, ring.TOKEN_BYTES))
    threading.Thread(target=_end_with, args=(order.alive,), daemon=True).start()
    threading.Thread(target=_answer, args=(order.asked,), daemon=True).start()
    activity.here.train_here()
    if order.cores:
        cores.adopt(order.cores)
    if not legacy_keras.is_on():
        sys.meta_path.insert(0, _AfterImport(functools.partial(_prepare, tuple(order.ports))))
    sys.argv = [script, *rest]
    sys.excepthook = _show
    if order.module:
        sys.path[0] = os.getcwd()
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")


def _end_with(pipe: int) -> None:
    """Ends this process and those that it started when the other end of a pipe is closed."""
    os.read(pipe, 1)
    os.killpg(0, signal.SIGKILL)


def _answer(asked: int) -> None:
    """Answers questions of a byte with a line of JSON: what the training does, or its stack."""
    with socket.socket(fileno=asked) as one, contextlib.suppress(OSError):  # its starter may have ended
        while question := one.recv(1):
            answer = activity.told() if question == TOLD else activity.stack()
            one.sendall(json.dumps(answer).encode() + b"\n")


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once, when TensorFlow and Keras are both imported whole.

    A script may import either first, and Keras imports TensorFlow; one that imports TensorFlow alone may use `tf.keras`
    at any time, so that Keras is imported right behind it.
    """

    def __init__(self, action: Callable[[], None]):
        self._action = action
        self._awaited = {"tensorflow", "keras"}
        self._asking = False

    def find_spec(self, name, path=None, target=None):
        if name not in self._awaited or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            with fast_import.quick():
                execute(module)  # TensorFlow tries Keras several times before it is whole itself
                if name == "tensorflow" and "keras" not in sys.modules:
                    import keras  # noqa: F401
            self._awaited.discard(name)
            if not self._awaited:
                sys.meta_path.remove(self)
                self._action()

        spec.loader.exec_module = exec_module
        return spec


def _prepare(ports: tuple[int, int]) -> None:
    from raytf.worker import context

    _prepared.enter_context(context.prepared(settings.WorkerSetup(config=settings.TensorflowConfig(ports=ports))))


def _show(kind, error, traceback) -> None:
    """Python's own message, from the script's first line on."""
    ours = (__file__, "<frozen runpy>")
    inner = traceback
    while inner is not None and inner.tb_frame.f_code.co_filename in ours:
        inner = inner.tb_next
    try:
        legacy_names.explain(error, "start the script with raytf run --legacy-keras")
    except legacy_names.Keras2Error as told:
        told.__cause__ = None  # its text holds it, and the traceback is the same
        kind, error = type(told), told
    sys.__excepthook__(kind, error.with_traceback(inner or traceback), inner or traceback)


if __name__ == "__main__":
    main(sys.argv[1:])
