"""Warm starts of Ray's workers in tests: forks of a process that has imported TensorFlow, Ray and raytf.

These imports take 4 s of a core, and most of what a small test on a cluster takes is that. For each environment that an
import would see otherwise there is a process of its own; of these the last `_MOST` that were asked are kept.

`warm(folder)` gives the path of a program to stand for `sys.executable` while Ray is started. `python -m tests.warm
SOCKET` listens to that program, and starts `python -m tests.warm FILE`, which imports TensorFlow; forks of that import
Ray, and forks of these are the workers.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import pathlib
import random
import runpy
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Iterator

from raytf.compat import legacy_keras

ROOT = pathlib.Path(__file__).parents[1]
# Environments, and jobs in each of these, for which a process is kept.
_MOST, _MOST_JOBS = 5, 3
# What an import reads; Ray's settings, which name the job and the node, are read where Ray is imported.
_READ = (
    *("PYTHON", "TF_", "KERAS_", "XLA_", "CUDA", "LD_", "MALLOC", "ARROW_", "HDF5_", "ABSL_", "GRPC_"),
    "VIRTUAL_ENV",
)
_RAYS = ("RAY_",)
_LENGTH = struct.Struct("<Q")

# Hands its arguments, environment and files over, and stays for as long as the fork does.
_PROGRAM = """#!{python} -IS
import array, json, os, socket, struct, sys
taken = False
if any(argument.endswith("default_worker.py") for argument in sys.argv[1:3]):
    try:
        s = socket.socket(socket.AF_UNIX)
        s.connect({address!r})
        content = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
        files = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))
        s.sendmsg([struct.pack("<Q", len(content))], [files])
        s.sendall(content)
        taken = s.recv(1) == b"y"
    except OSError:
        pass
if not taken:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
s.recv(1)
"""


@contextlib.contextmanager
def warm(folder: pathlib.Path) -> Iterator[str]:
    """Listens to workers that start; ends with those that fork, and without the forks.

    Args:
        folder: for a socket, of a short path, and the program.

    Yields:
        The path of the program.
    """
    address, program = str(folder / "s"), folder / "python"
    program.write_text(_PROGRAM.format(python=sys.executable, address=address))
    program.chmod(0o755)
    process = subprocess.Popen([sys.executable, "-m", "tests.warm", address], cwd=ROOT, start_new_session=True)
    try:
        yield str(program)
    finally:
        process.terminate()
        process.wait()


def listen(address: str) -> None:
    """Hands each request to the process of its environment."""
    there: dict[str, socket.socket] = {}
    processes: list[subprocess.Popen] = []

    def end(*_):
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        while True:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(ConnectionError):
                content, files = _received(connection, 3)
                arguments, environment, _ = json.loads(content)
                its = environment | _context(arguments).get("env_vars", {})
                own = _own(its, _READ)
                other_way = legacy_keras.is_on(its) or _context(arguments).get("command_prefix")
                if own in there:
                    there[own] = there.pop(own)  # the last one asked
                elif not other_way:
                    if len(there) == _MOST:
                        there.pop(next(iter(there))).close()
                    there[own], other = socket.socketpair()
                    its = {name: value for name, value in its.items() if not name.startswith(_RAYS)}
                    command = [sys.executable, "-m", "tests.warm", str(other.fileno())]
                    with other:
                        processes.append(
                            subprocess.Popen(command, cwd=ROOT, env=its, pass_fds=[other.fileno()], process_group=0)
                        )
                if own in there:
                    _send(there[own], content, [connection.fileno(), *files])
                else:
                    connection.sendall(b"n")
                for file in files:
                    os.close(file)


def import_tensorflow(requests: socket.socket) -> None:
    """Hands each request to a fork that has imported Ray for this job on this node, and keeps the last few of these."""
    import pandas  # noqa: F401
    import psutil  # noqa: F401
    import pyarrow.dataset
    import pyarrow.parquet  # noqa: F401

    from raytf.compat.fast_import import import_keras

    import_keras()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    there: dict[str, socket.socket] = {}
    while True:
        content, files = _received(requests, 4)
        arguments, environment, _ = json.loads(content)
        own = _own(environment | _context(arguments).get("env_vars", {}), _RAYS)
        if own not in there:
            there[own], other = socket.socketpair()
            if not os.fork():
                for end in (requests, *there.values()):
                    end.close()
                for file in files:
                    os.close(file)
                os.environ.update(json.loads(own))
                import_ray(other)
            other.close()
            if len(there) > _MOST_JOBS:
                there.pop(next(iter(there))).close()
        _send(there[own], content, files)
        for file in files:
            os.close(file)


def import_ray(requests: socket.socket) -> None:
    """Becomes, in a fork each, the workers that are asked for; ends when nothing more can be."""
    import ray._private.workers.default_worker
    import ray.actor

    # Ray's random numbers begin in each fork where they stand here: two forks would give one name to two tasks.
    ray.actor.ActorClassID = _ClassIds(ray.actor.ActorClassID)
    import ray.data
    import ray.train
    import ray.tune

    import raytf.train.entry
    import raytf.worker.fit  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    assert _ids_of_two_forks_differ(), "something that is imported draws from Ray's random numbers"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    paths = [path for path in sys.path if path not in ("", str(ROOT), *_python_path())]
    gc.collect()
    gc.freeze()
    while True:
        try:
            content, files = _received(requests, 4)
        except ConnectionError:
            os._exit(0)
        if not os.fork():
            requests.close()
            _become(*json.loads(content), files, paths)
        for file in files:
            os.close(file)


class _ClassIds:
    """Names the classes of actors without Ray's random numbers."""

    def __init__(self, kind):
        self._kind = kind

    def from_random(self):
        return self._kind(os.urandom(self._kind.size()))


def _ids_of_two_forks_differ() -> bool:
    from ray import WorkerID

    found = []
    for _ in range(2):
        read, write = os.pipe()
        if not os.fork():
            os.write(write, WorkerID.from_random().binary())
            os._exit(0)
        os.wait()
        found.append(os.read(read, WorkerID.size()))
        os.close(read)
        os.close(write)
    return found[0] != found[1]


def _become(arguments: list[str], environment: dict[str, str], place: str, files: list[int], paths: list[str]) -> None:
    """Goes on as the worker that was asked for, and ends with it; the connection stays open for as long."""
    import numpy as np

    code = 1
    try:
        os.setpgid(0, 0)  # Ray ends a worker with its group
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection, *others = files
        for number, file in enumerate(others):
            os.dup2(file, number)
            os.close(file)
        os.write(connection, b"y")
        os.chdir(place)
        os.environ.clear()
        os.environ.update(environment | _context(arguments).get("env_vars", {}))
        place_of_script = next(i for i, argument in enumerate(arguments) if argument.endswith("default_worker.py"))
        own = ("--serialized-runtime-env-context=", "--language=")
        sys.argv = [argument for argument in arguments[place_of_script:] if not argument.startswith(own)]
        sys.path[:] = [os.path.dirname(sys.argv[0]), *_python_path(), *paths]
        random.seed()
        np.random.seed()
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _own(environment: dict[str, str], read: tuple[str, ...]) -> str:
    """What an import would read of a worker's environment."""
    return json.dumps({name: value for name, value in sorted(environment.items()) if name.startswith(read)})


def _context(arguments: list[str]) -> dict:
    given = [value for value in arguments if value.startswith("--serialized-runtime-env-context=")]
    return json.loads(given[-1].partition("=")[2]) if given else {}


def _python_path() -> list[str]:
    return [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _send(to: socket.socket, content: bytes, files: list[int]) -> None:
    to.sendmsg([_LENGTH.pack(len(content))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
    to.sendall(content)


def _received(connection: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """A message, and the files that came with it."""
    head, others, _, _ = connection.recvmsg(_LENGTH.size, socket.CMSG_SPACE(count * array.array("i").itemsize))
    if not head:
        raise ConnectionError("nothing more is asked for")
    files = array.array("i")
    for _, _, data in others:
        files.frombytes(data)
    (size,), content = _LENGTH.unpack(head), b""
    while len(content) < size:
        if not (part := connection.recv(size - len(content))):
            raise ConnectionError("a request broke off")
        content += part
    return content, list(files)


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        with contextlib.suppress(ConnectionError):
            import_tensorflow(socket.socket(fileno=int(sys.argv[1])))
    else:
        listen(sys.argv[1])
