"""Warm starts of Ray's workers and of drivers in tests: forks of a process that has imported TensorFlow, Ray and raytf.

These imports take 4 s of a core, and most of what a small test on a cluster takes is that. For each environment that an
import would see otherwise there is a process of its own; of these the last `_MOST` that were asked are kept. Ray's
library reads the job's and the node's names when it is loaded: `_Settings` writes each worker's own over them.

`warm(folder)` gives the path of a program to stand for `sys.executable` while Ray is started. `python -m tests.warm
listen` listens to that program, and starts `python -m tests.warm tensorflow`, which imports it; forks of that import
Ray, and forks of these are the workers. `Driver` asks for a script, which is a fork of `python -m tests.warm ray`, or
of these where it is to have TensorFlow.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pathlib
import random
import runpy
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator

from cluster import local
from raytf.compat import legacy_keras

ROOT = pathlib.Path(__file__).parents[1]
# Environments, and jobs in each of these, for which a process is kept.
_MOST, _MOST_JOBS = 5, 6
# What an import reads; Ray's settings, which name the job and the node, are read where Ray is imported.
_READ = (
    *("PYTHON", "TF_", "KERAS_", "XLA_", "CUDA", "LD_", "MALLOC", "ARROW_", "HDF5_", "ABSL_", "GRPC_"),
    "VIRTUAL_ENV",
)
_RAYS = ("RAY_",)
# Of these: what a process reads when it begins, or a fork does in its place.
_LATER = ("PYTHONBREAKPOINT", "PYTHONPATH", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
# What differs between the jobs and nodes of one environment, and what stands for it while Ray is imported: `_Settings`.
_MARKS = {"RAY_JOB_ID": b"raytf-test-job:", "RAY_RAYLET_PID": b"raytf-raylet-s:"}
_WITH, _WITHOUT = "with TensorFlow", "without TensorFlow"
_CODE = struct.Struct("<i")
_LENGTH = struct.Struct("<Q")
_BEFORE = struct.Struct("@NNi4x")
_MOST_FILES = 8
# Of Linux' sched.h.
_CLONE_NEWNET = 0x40000000

# Hands its arguments, environment and files over, and stays for as long as the fork does.
_PROGRAM = """#!{python} -IS
import array, json, os, socket, struct, sys
taken = False
if any(argument.endswith("default_worker.py") for argument in sys.argv[1:3]):
    try:
        s = socket.socket(socket.AF_UNIX)
        s.connect({address!r})
        content = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
        network = os.open("/proc/self/ns/net", os.O_RDONLY)
        files = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2, network]))
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
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        command = [sys.executable, "-m", "tests.warm", "listen", str(listening.fileno())]
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, pass_fds=[listening.fileno()])
    try:
        _addresses.append(address)
        yield str(program)
    finally:
        _addresses.remove(address)
        process.terminate()
        process.wait()


_addresses: list[str] = []


class Driver:
    """A script that runs as a fork within a `warm`: what tests use of `subprocess.Popen`.

    Its number of process is in no command line: a test that looks for that, or for what only a start from scratch
    does, starts a process.

    Args:
        command: what stands behind `python`: "-m MODULE", "-c TEXT" or a path of a script, and arguments.
        env: its environment.
        cwd: its folder; by default the current one.
        stdout, stderr: `subprocess.PIPE`, or None for this process' own.
        tensorflow: whether TensorFlow is to be there already.
    """

    def __init__(self, command, *, env, cwd=None, stdout=None, stderr=None, tensorflow=False):
        self.args, self.returncode = list(map(str, command)), None
        self.stdout, out = _pipe(stdout, 1)
        self.stderr, err = _pipe(stderr, 2)
        nothing = os.open(os.devnull, os.O_RDONLY)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(_addresses[-1])
        kind = _WITH if tensorflow else _WITHOUT
        content = json.dumps([self.args, dict(env), str(cwd or os.getcwd()), kind]).encode()
        _send(self._socket, content, [nothing, out, err])
        for file in (nothing, *([out] if self.stdout else ()), *([err] if self.stderr else ())):
            os.close(file)
        self._socket.settimeout(120)
        (self.pid,) = _CODE.unpack(self._socket.recv(_CODE.size))

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._socket], [], [], 0)[0]:
            self._hear()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._socket], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self._hear()
        return self.returncode

    def _hear(self) -> None:
        (self.returncode,) = _CODE.unpack(self._socket.recv(_CODE.size))
        self._socket.close()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        """What it has printed and was not read yet; waits for its end."""
        found: dict = {}
        read = lambda pipe: found.update({pipe: pipe.read()})
        pipes = [pipe for pipe in (self.stdout, self.stderr) if pipe]
        threads = [threading.Thread(target=read, args=(pipe,), daemon=True) for pipe in pipes]
        until = None if timeout is None else time.monotonic() + timeout
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(None if until is None else max(0.0, until - time.monotonic()))
        for pipe in pipes:
            pipe.close()
        return found.get(self.stdout), found.get(self.stderr)


def _pipe(asked, own: int):
    """(a file to read from, or None; the number of the file that the driver gets)."""
    if asked is None:
        return None, own
    assert asked == subprocess.PIPE
    read, write = os.pipe()
    return os.fdopen(read, encoding="utf-8", errors="replace"), write


def listen(listening: socket.socket) -> None:
    """Hands each request to the process of its environment."""
    there: dict[str, socket.socket] = {}
    processes: list[subprocess.Popen] = []

    def end(*_):
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    with listening:
        while True:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(ConnectionError):
                content, files = _received(connection)
                arguments, environment, _, *kind = json.loads(content)
                its = environment | _context(arguments).get("env_vars", {})
                without = kind == [_WITHOUT]
                own = _own(its, (*_READ, *_RAYS)) + _WITHOUT if without else _own(its, _READ)
                if legacy_keras.is_on(its) or _folder(arguments) is None:
                    connection.sendall(b"n")
                elif own in there:
                    there[own] = there.pop(own)  # the last one asked
                    _send(there[own], content, [connection.fileno(), *files])
                else:
                    if len(there) == _MOST:
                        there.pop(next(iter(there))).close()
                    there[own], other = socket.socketpair()
                    # the mark of a cluster, too, which ends all that bears it, with what is forked for others
                    left_out = (*_LATER, local.MARK) if without else ("PYTHONPATH", *_RAYS, local.MARK)
                    its = {name: value for name, value in its.items() if not name.startswith(left_out)}
                    what = "ray" if without else "tensorflow"
                    command = [sys.executable, "-m", "tests.warm", what, str(other.fileno())]
                    with other:
                        processes.append(
                            subprocess.Popen(command, cwd=ROOT, env=its, pass_fds=[other.fileno()], process_group=0)
                        )
                    _send(there[own], content, [connection.fileno(), *files])
                for file in files:
                    os.close(file)


def import_tensorflow(requests: socket.socket) -> None:
    """Hands each request to a fork that has imported Ray with these settings, and keeps the last few of these."""
    import pandas  # noqa: F401
    import psutil  # noqa: F401
    import pyarrow.dataset
    import pyarrow.parquet

    from raytf.compat.fast_import import import_keras

    import_keras()
    # what workers import when they come to it, among it what a function of a test's file brings
    import pyarrow.json  # noqa: F401
    import pytest  # noqa: F401
    import tensorboard.summary.v2  # noqa: F401
    import tensorflow as tf

    for part in ("from_generator", "from_tensors", "flat_map", "rebatch"):
        importlib.import_module(f"tensorflow.python.data.ops.{part}_op")
    assert tf.summary

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    there: dict[str, socket.socket] = {}
    marked = True

    def fork(own: str) -> bool:
        """Whether its workers can be of any job on any node, if they are to be."""
        there[own], other = socket.socketpair()
        if not os.fork():
            for end in (requests, *there.values()):
                end.close()
            for file in files:
                os.close(file)
            os.environ.update(json.loads(own))
            import_ray(other, marked=marked)
        other.close()
        if len(there) > _MOST_JOBS:
            there.pop(next(iter(there))).close()
        return there[own].recv(1) == b"y"

    while True:
        content, files = _received(requests)
        arguments, environment, _, *_ = json.loads(content)
        its = environment | _context(arguments).get("env_vars", {})
        if (own := _own(its, _RAYS, later=_MARKS if marked else ())) not in there and not fork(own):
            marked = False
            print("tests.warm: Ray keeps its settings in another way; it is imported for each job", file=sys.stderr)
            there.pop(own).close()
            fork(own := _own(its, _RAYS))
        _send(there[own], content, files)
        for file in files:
            os.close(file)


def import_ray(requests: socket.socket, tensorflow: bool = True, marked: bool = False) -> None:
    """Becomes, in a fork each, the workers and drivers that are asked for; ends when nothing more can be.

    Args:
        tensorflow: whether that is there, and somebody waits to hear that Ray is.
        marked: whether workers are of several jobs and nodes.
    """
    if marked:
        os.environ.update({name: mark.decode() for name, mark in _MARKS.items()})
    import ray._private.arrow_serialization
    import ray._private.workers.default_worker
    import ray.actor

    # Ray's random numbers begin in each fork where they stand here: two forks would give one name to two tasks.
    ray.actor.ActorClassID = _ClassIds(ray.actor.ActorClassID)
    import pydantic.v1  # noqa: F401
    import ray.data
    import ray.train
    import ray.tune

    if tensorflow:
        import raytf.compat.multi_worker
        import raytf.parallel.trainer
        import raytf.parameter_server.servers
        import raytf.testing
        import raytf.train.entry
        import raytf.train.startup
        import raytf.worker.fit
        import raytf.worker.model_file
    else:
        import raytf.cli_options
        import raytf.launch.launcher
        import raytf.train.keras_trainer
        import raytf.tune.sweep  # noqa: F401

    settings = _Settings() if marked else None
    if tensorflow:
        requests.send(b"n" if settings and not settings.found else b"y")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    assert _ids_of_two_forks_differ(), "something that is imported draws from Ray's random numbers"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    paths = [path for path in sys.path if path not in ("", str(ROOT), *_python_path())]
    gc.collect()
    gc.freeze()
    while True:
        try:
            content, files = _received(requests)
        except ConnectionError:
            os._exit(0)
        if not os.fork():
            requests.close()
            arguments, environment, place, *driver = json.loads(content)
            if settings:
                settings.set(environment | _context(arguments).get("env_vars", {}))
            (_drive if driver else _become)(arguments, environment, place, files, paths)
        for file in files:
            os.close(file)


class _Settings:
    """What Ray's library has read of `_MARKS` when it was loaded: C++ strings, of its one object of settings.

    Of such a string the object holds the address of its letters, and before these stand its length, the room that is
    there, and how many others share it.
    """

    def __init__(self):
        self._letters = {name: self._find(mark) for name, mark in _MARKS.items()}
        self.found = all(self._letters.values())

    def set(self, environment: dict[str, str]) -> None:
        for name, letters in self._letters.items():
            value = environment.get(name, "").encode()
            assert len(value) <= len(_MARKS[name]), f"{name} is too long to stand for another: {value!r}"
            ctypes.memmove(letters, value + b"\0", len(value) + 1)
            ctypes.c_size_t.from_address(letters - _BEFORE.size).value = len(value)

    @staticmethod
    def _find(mark: bytes) -> int | None:
        """Address of the letters."""
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            for start, end in _variables_of("_raylet.so"):
                for (address,) in struct.iter_unpack("@N", ctypes.string_at(start, end - start)):
                    with contextlib.suppress(OSError, OverflowError):  # no address
                        content = os.pread(memory.fileno(), _BEFORE.size + len(mark), address - _BEFORE.size)
                        if content.endswith(mark) and _BEFORE.unpack_from(content)[:2] == (len(mark), len(mark)):
                            return address
        return None


def _variables_of(library: str) -> list[tuple[int, int]]:
    """(first address, end) of what can be written of a library that is loaded."""
    found, before = [], None
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, _, *path = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in span.split("-"))
        if rights.startswith("rw") and (path[0].endswith(library) if path else start == before):
            found.append((start, end))
            before = end
        elif path and path[0].endswith(library):
            before = end
        else:
            before = None
    return found


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


def import_ray_alone(requests: socket.socket) -> None:
    """As `import_ray`, without TensorFlow."""
    import_ray(requests, tensorflow=False)


_PROCESSES = {"listen": listen, "tensorflow": import_tensorflow, "ray": import_ray_alone}


def _become(arguments: list[str], environment: dict[str, str], place: str, files: list[int], paths: list[str]) -> None:
    """Goes on as the worker that was asked for, and ends with it; the connection stays open for as long."""
    import numpy as np

    code = 1
    try:
        os.setpgid(0, 0)  # Ray ends a worker with its group
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection, *others, network = files
        for number, file in enumerate(others):
            os.dup2(file, number)
            os.close(file)
        _enter(network)
        os.write(connection, b"y")
        os.chdir(_folder(arguments) or place)
        os.environ.clear()
        os.environ.update(environment | _context(arguments).get("env_vars", {}))
        place_of_script = next(i for i, argument in enumerate(arguments) if argument.endswith("default_worker.py"))
        own = ("--serialized-runtime-env-context=", "--language=")
        sys.argv = [argument for argument in arguments[place_of_script:] if not argument.startswith(own)]
        sys.path[:] = [os.path.dirname(sys.argv[0]), *_python_path(), *paths]
        _customize()
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


def _enter(network: int) -> None:
    """Goes to another network namespace, of a host that is one; this process has one thread."""
    if os.fstat(network).st_ino != os.stat("/proc/self/ns/net").st_ino:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(network, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.close(network)


def _drive(arguments: list[str], environment: dict[str, str], place: str, files: list[int], paths: list[str]) -> None:
    """Runs a script in a fork, and tells its number and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection, *others = files
    if pid := os.fork():
        for file in others:
            os.close(file)
        os.write(connection, _CODE.pack(pid))
        os.write(connection, _CODE.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        os._exit(0)
    import numpy as np

    os.close(connection)
    for number, file in enumerate(others):
        os.dup2(file, number)
        os.close(file)
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _customize()
    random.seed()
    np.random.seed()
    first, *rest = arguments
    code = 0
    try:
        if first in ("-m", "-c"):
            what, *rest = rest
            sys.path[:] = [place if first == "-m" else "", *_python_path(), *paths]
        else:
            sys.path[:] = [os.path.dirname(os.path.abspath(first)), *_python_path(), *paths]
        sys.argv[:] = [first if first != "-m" else what, *rest]
        if first == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif first == "-c":
            main = types.ModuleType("__main__")
            sys.modules["__main__"] = main
            exec(compile(what, "<string>", "exec"), main.__dict__)
        else:
            runpy.run_path(first, run_name="__main__")
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    # as Python ends
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _own(environment: dict[str, str], read: tuple[str, ...], later=()) -> str:
    """What an import would read of a worker's environment, without what it can be told later."""
    names = sorted(name for name in environment if name.startswith(read) and name not in (*_LATER, *later))
    return json.dumps({name: environment[name] for name in names})


def _context(arguments: list[str]) -> dict:
    given = [value for value in arguments if value.startswith("--serialized-runtime-env-context=")]
    return json.loads(given[-1].partition("=")[2]) if given else {}


def _folder(arguments: list[str]) -> str | None:
    """A worker's working directory, "" if it stays where it is; None if it is to start in yet another way."""
    match _context(arguments).get("command_prefix", []):
        case []:
            return ""
        case ["cd", folder, "&&"]:
            return shlex.split(folder)[0]
    return None


def _python_path() -> list[str]:
    return [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _customize() -> None:
    """Runs a `sitecustomize` of PYTHONPATH, as Python does when it starts."""
    files = [pathlib.Path(path, "sitecustomize.py") for path in _python_path()]
    if found := [file for file in files if file.exists()]:
        runpy.run_path(str(found[0]))


def _send(to: socket.socket, content: bytes, files: list[int]) -> None:
    to.sendmsg([_LENGTH.pack(len(content))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
    to.sendall(content)


def _received(connection: socket.socket) -> tuple[bytes, list[int]]:
    """A message, and the files that came with it."""
    head, others, _, _ = connection.recvmsg(_LENGTH.size, socket.CMSG_SPACE(_MOST_FILES * array.array("i").itemsize))
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
    what, number = sys.argv[1:]
    with contextlib.suppress(ConnectionError):
        _PROCESSES[what](socket.socket(fileno=int(number)))
