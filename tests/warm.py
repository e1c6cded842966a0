"""Warm starts of Ray's workers and of drivers in tests: forks of a process that has imported TensorFlow, Ray and raytf.

These imports take 4 s of a core, and most of what a small test on a cluster takes is that. For each environment that an
import would see otherwise there is a process of its own; of these the last `_MOST` that were asked are kept. Ray's
library reads the job's and the node's names when it is loaded: `_Settings` writes each worker's own over them.

`warm(...)` gives the path of a program to stand for `sys.executable` while Ray is started. `python -m tests.warm
listen` listens to such programs, of all processes of pytest, and starts `python -m tests.warm tensorflow`, which
imports it; forks of that import Ray, and forks of these are the workers. `Driver` asks for a script, which is a fork of
`python -m tests.warm ray`, or of these where it is to have TensorFlow. Ray's own processes in Python beside a node are
forks, too, and of what workers and drivers start what writes checkpoints or is a benchmark's, and within `scripts` the
processes of `raytf run`. Below a folder of `customized` the commands `ray` and `raytf` are, too, whose processes stand
for their forks: or neither they nor workers are.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import io
import json
import logging
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
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterator

from cluster import local
from raytf.compat import legacy_keras

ROOT = pathlib.Path(__file__).parents[1]
# Environments of a kind, and jobs in each of these, for which a process is kept.
_MOST, _MOST_JOBS = 5, 6
# Descriptors below it are free in a process that forks: a fork may be asked to have its files there.
_OWN_FILES = 200
# What an import reads; Ray's settings, which name the job and the node, are read where Ray is imported.
_READ = (
    *("PYTHON", "TF_", "KERAS_", "XLA_", "CUDA", "LD_", "MALLOC", "ARROW_", "HDF5_", "ABSL_", "GRPC_"),
    "VIRTUAL_ENV",
)
_RAYS = ("RAY_",)
_READ_OF_FILES = ("PYTHON", "LD_", "MALLOC", "ARROW_")
# Of these: what a process reads when it begins, or a fork does in its place, or what only processes in C++ read.
_DRAINS = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
_LATER = (
    *("PYTHONBREAKPOINT", "PYTHONPATH", "TF_CONFIG", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"),
    *("RAY_health_check_period_ms", "RAY_health_check_timeout_ms", "RAY_health_check_failure_threshold"),
    *("RAY_TMPDIR", _DRAINS),
)
# What differs between Ray's own processes in Python, which read it from the environment, or can do without it.
_OF_A_NODE = ("RAY_NODE_ID", "RAY_RAYLET_PID", "LD_PRELOAD")
# What differs between the jobs and nodes of one environment, and what stands for it while Ray is imported: `_Settings`.
_MARKS = {"RAY_JOB_ID": b"raytf-test-job:", "RAY_RAYLET_PID": b"raytf-raylet-s:"}
# Kinds of processes that fork, by what they have imported.
_TENSORFLOW, _RAY, _FILES, _COMMAND = "tensorflow", "ray", "files", "command"
# Ray's own processes; the two agents have libraries of the same names.
_AGENTS = ("agent", "runtime_env")
_SERVICES = {
    "/dashboard/dashboard.py": "dashboard",
    "/dashboard/agent.py": _AGENTS[0],
    "/runtime_env/agent/main.py": _AGENTS[1],
    "/log_monitor.py": "monitors",
    "/monitor.py": "monitors",
    "ray.util.client.server": "monitors",
}
_CODE = struct.Struct("<i")
_LENGTH = struct.Struct("<Q")
_BEFORE = struct.Struct("@NNi4x")
_MOST_FILES = 32
# In which a fork that is told to end does so by itself.
_ENDS_SECONDS = 10.0
# Of Linux' sched.h, and of its prctl.h.
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1

# Where Ray is imported at once, and not for each job.
_READS_RAYS = (_RAY, _COMMAND, *_SERVICES.values())

# The name of a program that starts workers from scratch.
_ONLY_SERVICES = "services"

# Hands its arguments, environment and files over, and stays for as long as the fork does.
_PROGRAM = """#!{python} -IS
import array, json, os, socket, struct, sys
taken = False
if any(argument.endswith({scripts!r}) for argument in sys.argv[1:4]):
    try:
        s = socket.socket(socket.AF_UNIX)
        s.connect({address!r})
        content = json.dumps([{address!r}, sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
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

# A `sitecustomize`: below it Ray starts forks.
_SITE = """
import sys

sys.executable = {program!r}
"""

# More of it: commands of Ray and raytf hand themselves over, pass signals on, and end as the fork does, or with them.
_COMMANDS = """
_command = sys.orig_argv[1:]
_kind = {kinds!r}.get(next(iter(_command[_command[:1] == ["-c"] :]), ""))
if _kind:
    import array, json, os, signal, socket, struct

    _s = socket.socket(socket.AF_UNIX)
    _s.connect({address!r})
    _how = {{"kind": _kind, "pass_fds": [], "cores": sorted(os.sched_getaffinity(0)), "ends": True}}
    _content = json.dumps([{address!r}, _command, dict(os.environ), os.getcwd(), _how]).encode()
    _files = array.array("i", [0, 1, 2, os.open("/proc/self/ns/net", os.O_RDONLY)])
    _s.sendmsg([struct.pack("<Q", len(_content))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _files)])
    _s.sendall(_content)
    (_pid,) = struct.unpack("<i", _s.recv(4))
    for _number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(_number, lambda number, _: os.kill(_pid, number))
    (_code,) = struct.unpack("<i", _s.recv(4))
    if _code < 0:
        signal.signal(-_code, signal.SIG_DFL)
        os.kill(os.getpid(), -_code)
    os._exit(_code)
"""


def customized(folder: pathlib.Path, program: str, services: bool = False) -> None:
    """Writes what is to be in a folder of PYTHONPATH for what Ray starts to be forks.

    Args:
        folder: that folder.
        program: of a `warm`.
        services: only what Ray has beside a node; workers and commands start from scratch.
    """
    place = pathlib.Path(program).parent
    if services:
        text = _SITE.format(program=str(place / _ONLY_SERVICES))
    else:
        here = pathlib.Path(sys.executable)
        kinds = dict.fromkeys([str(here.with_name("ray")), str(place / "ray"), local.ASK_RAY], _COMMAND)
        kinds[str(here.with_name("raytf"))] = _TENSORFLOW  # it tries models
        text = _SITE.format(program=program) + _COMMANDS.format(address=str(place / "s"), kinds=kinds)
    (folder / "sitecustomize.py").write_text(text)


@contextlib.contextmanager
def listener(folder: pathlib.Path) -> Iterator[str]:
    """Listens to workers that start; ends with those that fork, and without the forks.

    Args:
        folder: for a socket, of a short path.

    Yields:
        The path of the socket.
    """
    address = str(folder / "s")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        command = [sys.executable, "-m", "tests.warm", "listen", str(listening.fileno())]
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, pass_fds=[listening.fileno()])
    try:
        yield address
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def warm(folder: pathlib.Path, listening: str) -> Iterator[str]:
    """Has what is started by a program be forks.

    Args:
        folder: for the program and what `scripts` keeps, of a short path; one of each process of pytest.
        listening: the socket of a `listener`, which several may ask.

    Yields:
        The path of the program.
    """
    address, program = str(folder / "s"), folder / "python"
    (folder / "s").symlink_to(listening)
    for name, scripts in ((program.name, ("default_worker.py", *_SERVICES)), (_ONLY_SERVICES, tuple(_SERVICES))):
        text = _PROGRAM.format(python=sys.executable, address=address, scripts=scripts)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "ray").symlink_to(pathlib.Path(sys.executable).with_name("ray"))  # beside "Python", for cluster/local.py
    _addresses.append(address)
    try:
        yield str(program)
    finally:
        _addresses.remove(address)


_addresses: list[str] = []


@contextlib.contextmanager
def scripts(forks: bool = True) -> Iterator[None]:
    """Within it the scripts of `raytf run` are forks on nodes of a `warm`; or, within that, they are none."""
    here = _forked_scripts(_addresses[-1])
    before = here.exists()
    try:
        here.touch() if forks else here.unlink()
        yield
    finally:
        here.touch() if before else here.unlink(missing_ok=True)


def _forked_scripts(address: str) -> pathlib.Path:
    """A file that is there while they are."""
    return pathlib.Path(address).with_name("scripts")


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
        network: the file of the network namespace that it is to be in; by default this process' own.
    """

    def __init__(
        self, command, *, env, cwd=None, stdout=None, stderr=None, tensorflow=False, network="/proc/self/ns/net"
    ):
        kind = _TENSORFLOW if tensorflow else _RAY
        self._start(_addresses[-1], kind, command, env, cwd, (None, stdout, stderr), text=True, network=network)

    def _start(
        self,
        address,
        kind,
        command,
        env,
        cwd,
        streams,
        text,
        pass_fds=(),
        network="/proc/self/ns/net",
        **options,
    ) -> None:
        self.args, self.returncode, self._lock = list(map(str, command)), None, threading.Lock()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        with contextlib.ExitStack() as others:
            self.stdin, first = _pipe(streams[0] or subprocess.DEVNULL, 0, text, others)
            self.stdout, out = _pipe(streams[1], 1, text, others)
            self.stderr, err = _pipe(streams[2], 2, text, others)
            network = os.open(network, os.O_RDONLY)
            others.callback(os.close, network)
            how = {"kind": kind, "pass_fds": list(pass_fds), "cores": sorted(os.sched_getaffinity(0)), **options}
            content = json.dumps([address, self.args, dict(env), str(cwd or os.getcwd()), how]).encode()
            _send(connection, content, [first, out, err, network, *pass_fds])
        connection.settimeout(120)
        self._socket = connection
        (self.pid,) = _CODE.unpack(connection.recv(_CODE.size))

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._socket], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            with self._lock:
                if self.returncode is None:
                    (self.returncode,) = _CODE.unpack(self._socket.recv(_CODE.size, socket.MSG_PEEK))
        return self.returncode

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_) -> None:
        self.wait()
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe:
                pipe.close()

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


def _pipe(asked, own: int, text: bool, others: contextlib.ExitStack):
    """(the file at this end, or None; the number of the one that the driver gets, which `others` closes)."""
    if asked is None:
        return None, own
    if asked == subprocess.PIPE:
        read, write = os.pipe()
        mine, its = (read, write) if own else (write, read)
        others.callback(os.close, its)
        kind = {"encoding": "utf-8", "errors": "replace"} if text else {"mode": "rb" if own else "wb", "buffering": 0}
        return os.fdopen(mine, **kind), its
    if asked == subprocess.DEVNULL:
        others.callback(os.close, its := os.open(os.devnull, os.O_RDWR))
        return None, its
    return None, asked if isinstance(asked, int) else asked.fileno()


class _Process(Driver):
    """A process of raytf's own in place of a `subprocess.Popen`, with what is used of that."""

    def __init__(self, address, kind, command, env, cwd, stdin, stdout, stderr, pass_fds, **options):
        self._start(address, kind, command, env, cwd, (stdin, stdout, stderr), False, pass_fds, **options)


def _fork_what_is_started(address: str) -> None:
    """From here on processes of raytf's own that this one starts are forks of one that has imported what they need."""

    class Popen(subprocess.Popen):
        def __new__(cls, args, *_, **options):
            kind, command = None, args[1:] if isinstance(args, list) and args[0] == sys.executable else []
            if "-m" in command[:2]:
                command = command[command.index("-m") :]
                if command[1] == "raytf.storage.snapshot_writer":
                    kind = _FILES
                elif command[1] == "raytf.launch.bootstrap" and _forked_scripts(address).exists():
                    kind = None if legacy_keras.is_enabled(options["env"]) else _TENSORFLOW
            elif "--once" in command:  # of a benchmark
                kind = _TENSORFLOW
            if kind is None:
                return super().__new__(cls)
            given = {name: options.get(name) for name in ("env", "cwd", "stdin", "stdout", "stderr")}
            how = {"unbuffered": "-u" in args[1:3], "session": options.get("start_new_session", False)}
            return _Process(address, kind, command, **given, pass_fds=options.get("pass_fds", ()), **how)

    subprocess.Popen = Popen


def listen(listening: socket.socket) -> None:
    """Hands each request to the process of its kind and environment.

    A request has the address that it was sent to, a command, its environment, its folder, and how a `Driver` wants it.
    """
    there: dict[tuple[str, str], socket.socket] = {}
    processes: list[subprocess.Popen] = []

    def end(*_):
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
        os._exit(0)

    def begin(kind, read, its):
        """Starts the process of a kind and what it reads of this environment."""
        same = [other for other in there if other[0] == kind]
        if len(same) == _MOST:
            there.pop(same[0]).close()
        there[kind, read], other = socket.socketpair()
        # the mark of a cluster, too, which ends all that bears it, with what is forked for others
        left_out = (*_LATER, *(_OF_A_NODE if kind in _READS_RAYS else _RAYS), local.MARK)
        its = {name: value for name, value in its.items() if not name.startswith(left_out)}
        command = [sys.executable, "-m", "tests.warm", kind, str(other.fileno())]
        with other:
            started = subprocess.Popen(command, cwd=ROOT, env=its, pass_fds=[other.fileno()], process_group=0)
        processes.append(started)

    signal.signal(signal.SIGTERM, end)
    with listening:
        while True:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(ConnectionError):
                content, files = _received(connection)
                _, arguments, environment, _, *how = json.loads(content)
                its = environment | _context(arguments).get("env_vars", {})
                kind = how[0]["kind"] if how else _service(arguments) or _TENSORFLOW
                key = kind, _read_by(kind, its)
                if legacy_keras.is_enabled(its) or _folder(arguments) is None:
                    connection.sendall(b"n")
                elif key in there:
                    there[key] = there.pop(key)  # the last one asked
                    _send(there[key], content, [connection.fileno(), *files])
                else:
                    begin(*key, its)
                    _send(there[key], content, [connection.fileno(), *files])
                    # they are next, and a node gives them 15 s to be there, with all that they import
                    for soon in _AGENTS if kind == "dashboard" else ():
                        if (soon, key[1]) not in there:
                            begin(soon, key[1], its)
                for file in files:
                    os.close(file)


def _service(arguments: list[str]) -> str | None:
    """The kind of one of Ray's own processes."""
    found = (kind for end, kind in _SERVICES.items() if any(argument.endswith(end) for argument in arguments[:3]))
    return next(found, None)


def _read_by(kind: str, environment: dict[str, str]) -> str:
    """What an import would read of it."""
    if kind == _RAY:
        return _own(environment, (*_READ, *_RAYS))
    if kind in _READS_RAYS:
        return _own(environment, (*_READ_OF_FILES, "GRPC_", *_RAYS), later=_OF_A_NODE)
    return _own(environment, _READ_OF_FILES if kind == _FILES else _READ)


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
        _, arguments, environment, _, *how = json.loads(content)
        its = environment | _context(arguments).get("env_vars", {})
        own = _own(its, _RAYS, later=_MARKS if marked else ())
        if how and how[0].get("session") and there:  # a script of a user, which asks nothing of Ray: any will do
            own = next(reversed(there))
        if own not in there and not fork(own):
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
        import raytf.train.run_worker
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
    _fork(requests, settings)


def _fork(requests: socket.socket, settings: _Settings | None = None) -> None:
    """Becomes, in a fork each, what is asked for; ends when nothing more can be."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    paths = [path for path in sys.path if path not in ("", str(ROOT), *_python_path())]
    while _reserved:
        os.close(_reserved.pop())
    gc.collect()
    gc.freeze()
    while True:
        try:
            content, files = _received(requests)
        except ConnectionError:
            os._exit(0)
        if not os.fork():
            requests.close()
            address, arguments, environment, place, *how = json.loads(content)
            if settings:
                settings.set(environment | _context(arguments).get("env_vars", {}))
            if how:
                _drive(arguments, environment, place, files, paths, address, **how[0])
            else:
                _become(arguments, environment, place, files, paths, address)
        for file in files:
            os.close(file)


_reserved: list[int] = []


def _reserve() -> None:
    """Keeps the first descriptors from what is imported: a fork may be asked to have its files there."""
    while not _reserved or _reserved[-1] < _OWN_FILES:
        _reserved.append(os.open(os.devnull, os.O_RDONLY))


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


def import_command(requests: socket.socket) -> None:
    """Of Ray's command line, and of what asks for nodes."""
    import ray.dashboard.modules.job.cli
    import ray.job_submission
    import ray.scripts.scripts
    import ray.util.state  # noqa: F401

    _fork(requests)


def import_files(requests: socket.socket) -> None:
    """Of what writes checkpoints."""
    import raytf.storage.snapshot_writer  # noqa: F401

    _fork(requests)


def import_agent(requests: socket.socket) -> None:
    """Of what Ray has beside each node, for its dashboard and its figures."""
    import ray.dashboard.agent
    import ray.dashboard.utils

    logging.disable()
    ray.dashboard.utils.get_all_modules(ray.dashboard.utils.DashboardAgentModule)
    logging.disable(logging.NOTSET)
    _fork(requests)


def import_runtime_env(requests: socket.socket) -> None:
    """Of what makes the environments of Ray's workers."""
    import ray._private.runtime_env.agent.main  # noqa: F401

    _fork(requests)


def import_dashboard(requests: socket.socket) -> None:
    """Of Ray's dashboard, and of its parts that are processes of their own."""
    import ray.dashboard.dashboard
    import ray.dashboard.subprocesses.handle
    import ray.dashboard.subprocesses.module
    import ray.dashboard.utils

    logging.disable()
    for kind in (ray.dashboard.utils.DashboardHeadModule, ray.dashboard.subprocesses.module.SubprocessModule):
        ray.dashboard.utils.get_all_modules(kind)
    logging.disable(logging.NOTSET)
    _fork(requests)


def import_monitors(requests: socket.socket) -> None:
    """Of what hands on what Ray's workers print, of what would start nodes, and of what serves Ray's client."""
    import ray._private.log_monitor
    import ray.autoscaler._private.monitor
    import ray.util.client.server.server  # noqa: F401

    _fork(requests)


_PROCESSES = {
    _TENSORFLOW: import_tensorflow,
    _RAY: import_ray_alone,
    _FILES: import_files,
    _COMMAND: import_command,
    "agent": import_agent,
    "runtime_env": import_runtime_env,
    "dashboard": import_dashboard,
    "monitors": import_monitors,
}


def _become(
    arguments: list[str], environment: dict[str, str], place: str, files: list[int], paths: list[str], address: str
) -> None:
    """Goes on as the process of Ray's that was asked for, and ends with it; the connection stays open for as long."""
    import numpy as np

    code = 1
    try:
        os.setpgid(0, 0)  # Ray ends a worker with its group
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection, *others, network = _out_of_the_way(files)
        _take(others, range(3))
        _enter(network)
        os.write(connection, b"y")
        os.chdir(_folder(arguments) or place)
        os.environ.clear()
        os.environ.update(environment | _context(arguments).get("env_vars", {}))
        tempfile.tempdir = None  # TMPDIR may be another one
        service = _service(arguments)
        scripts = ("default_worker.py", *_SERVICES)
        place_of_script = next(i for i, argument in enumerate(arguments) if argument.endswith(scripts))
        own = ("--serialized-runtime-env-context=", "--language=")
        sys.argv = [argument for argument in arguments[place_of_script:] if not argument.startswith(own)]
        sys.path[:] = [os.path.dirname(sys.argv[0]), *_python_path(), *paths]
        _customize()
        random.seed()
        np.random.seed()
        if service:
            if service == "dashboard":
                _fork_a_server_of_forks(connection)
            _write_at_once()
            threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        else:
            _fork_what_is_started(address)
        if sys.argv[0].endswith(".py"):
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
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


def _fork_a_server_of_forks(connection: int) -> None:
    """Starts that of `multiprocessing`, which would import all that this process has, as a fork; it and its forks end
    with this process, and not a second later."""
    from multiprocessing import forkserver, util

    libc = ctypes.CDLL(None)
    before = util.spawnv_passfds

    def spawn(path, arguments, files):
        if "multiprocessing.forkserver" not in arguments[-1]:
            return before(path, arguments, files)
        if pid := os.fork():
            return pid
        os.close(connection)
        end = lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        end()
        os.register_at_fork(after_in_child=end)
        exec(arguments[-1], {})
        os._exit(0)

    util.spawnv_passfds = spawn
    forkserver.ensure_running()
    util.spawnv_passfds = before


def _end_with(connection: int) -> None:
    """Ends this process when the one that stands for it has been ended."""
    os.read(connection, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ENDS_SECONDS)  # of a GCS that has gone some wait for an answer, and for no signal
    os.kill(os.getpid(), signal.SIGKILL)


def _out_of_the_way(files: list[int]) -> list[int]:
    """The same files, of numbers that nobody asks for."""
    found = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _OWN_FILES) for file in files]
    for file in files:
        os.close(file)
    return found


def _take(files: list[int], numbers) -> None:
    for file, number in zip(files, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _write_at_once() -> None:
    """As `python -u` does."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(number, "w", closefd=False)
        before = getattr(sys, name)
        stream = io.TextIOWrapper(raw, encoding=before.encoding, errors=before.errors, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class _Imported:
    """Finds TensorFlow and Keras, which are there, for a script that is to be the first that imports them."""

    def __init__(self):
        self._modules = {name: sys.modules.pop(name) for name in ("tensorflow", "keras")}

    def find_spec(self, name, path=None, target=None):
        if name not in self._modules:
            return None
        module = self._modules.pop(name)
        loader = types.SimpleNamespace(create_module=lambda spec: module, exec_module=lambda module: None)
        spec = importlib.util.spec_from_loader(name, loader, is_package=True)
        spec.submodule_search_locations = module.__path__
        return spec


def _enter(network: int) -> None:
    """Goes to another network namespace, of a host that is one; this process has one thread."""
    if os.fstat(network).st_ino != os.stat("/proc/self/ns/net").st_ino:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(network, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.close(network)


def _drive(
    arguments: list[str],
    environment: dict[str, str],
    place: str,
    files: list[int],
    paths: list[str],
    address: str,
    *,
    kind: str,
    pass_fds: list[int],
    cores: list[int],
    unbuffered: bool = False,
    session: bool = False,
    ends: bool = False,
) -> None:
    """Runs a script in a fork, and tells its number and how it ended.

    Args:
        kind: of this process.
        pass_fds: numbers of files behind the first three.
        cores: of the process that asks.
        unbuffered: as with `python -u`.
        session: it has one of its own.
        ends: it ends with the process that asks.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection, others, network, passed = files[0], files[1:4], files[4], files[5:]
    if pid := os.fork():
        for file in (*others, network, *passed):
            os.close(file)
        os.write(connection, _CODE.pack(pid))
        os.write(connection, _CODE.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        os._exit(0)
    import numpy as np

    if ends:
        threading.Thread(target=_end_with, args=(_out_of_the_way([connection])[0],), daemon=True).start()
    else:
        os.close(connection)
    if session:
        os.setsid()
    network, *others = _out_of_the_way([network, *others, *passed])
    _take(others, [0, 1, 2, *pass_fds])
    _enter(network)
    os.sched_setaffinity(0, cores)
    if unbuffered:
        _write_at_once()
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR may be another one
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _customize()
    random.seed()
    np.random.seed()
    if kind == _COMMAND:
        constants = importlib.import_module("ray._private.ray_constants")
        setattr(constants, _DRAINS, float(environment.get(_DRAINS, getattr(constants, _DRAINS))))
    first, *rest = arguments
    if not session:
        _fork_what_is_started(address)
    elif kind == _TENSORFLOW:
        sys.meta_path.insert(0, _Imported())
        sys.modules["raytf.compat.fast_import"]._active = True  # it was quick
        sys.modules["ray"]._raylet.setproctitle(f"raytf.launch.bootstrap {environment['RAY_RAYLET_PID']}")
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
        if what == "listen":
            listen(socket.socket(fileno=int(number)))
        else:
            _reserve()
            _PROCESSES[what](socket.socket(fileno=int(number)))
