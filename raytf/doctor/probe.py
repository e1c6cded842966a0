"""Probe of a node: what it is, and how it reaches the others. It is sent to nodes by value, and needs nothing of raytf.

Sockets serve only who proves the examination's token, by HMAC over a number that is new for each connection; each
datagram bears one, too. No wait is without a deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import hmac
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import resource
import secrets
import shutil
import socket
import stat
import statistics
import struct
import tempfile
import threading
import time

PINGS, DATAGRAMS, AT_ONCE, LARGE = 20, 200, 50, 8
BULK_BYTES, CHUNK = 8 * 2**20, bytes(2**16)
# Connections that a probe serves at a time: strangers cost no more threads than that.
_SERVED = 256
_MAC, _NONCE = 32, 16
# Of Linux' linux/sockios.h and linux/in.h.
_SIOCGIFADDR = 0x8915
_MTU_DISCOVER, _PROBE, _MTU = 10, 3, 14
_IP_UDP_HEADERS = 28
# Of Linux' linux/capability.h; and what version 1 of control groups has for no limit, or more.
_SYS_PTRACE, _NO_MEMORY_LIMIT = 19, 2**60


class Probe:
    """An actor on a node.

    Args:
        token: of the examination, known to its probes alone.
        address: of the node.
        ports: the first and the last on which it may listen.
        step, link, name: seconds, as `Timeouts.link_step`, `link` and `name_lookup`, which its node may not know.
    """

    def __init__(self, token: bytes, address: str, ports: tuple[int, int], step: float, link: float, name: float):
        self._token, self._address, self._ports = token, address, ports
        self._step, self._link, self._name = step, link, name
        self._sockets: list[socket.socket] = []
        self._places = threading.BoundedSemaphore(_SERVED)

    def facts(self) -> dict:
        """What the node is: versions, limits, free space, name; see `findings.examine`."""
        return {
            "versions": _versions(),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "shm": _free("/dev/shm"),
            "disks": {path: _free(path) for path in _folders()},
            "name": _resolved(self._name),
            "token": _token_file(),
            "interface": interface(self._address),
            "container": cgroup_limits() | {"traces": _traces()},
        }

    def clock(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def listen(self) -> tuple[int, int]:
        """Opens the node's sockets; their ports: TCP, UDP."""
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        tcp, udp = (
            _bound(family, kind, self._address, self._ports) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)
        )
        tcp.listen(_SERVED)
        self._sockets = [tcp, udp]
        for serve, one in ((self._accept, tcp), (self._echo, udp)):
            threading.Thread(target=serve, args=(one,), daemon=True).start()
        return tcp.getsockname()[1], udp.getsockname()[1]

    def close(self) -> None:
        """Closes the node's sockets."""
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def reach(self, address: str, ports: tuple[int, int]) -> dict:
        """Measures the way to another node: "error", or "rtt" in seconds, and "loss", "large", "mtu" where known."""
        found = {"error": None}
        try:
            with self._joined(address, ports[0]) as to:
                found["rtt"] = _round_trips(to)
        except (OSError, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return found | self._datagrams(address, ports[1])

    def bandwidth(self, address: str, port: int) -> dict:
        """Measures how fast the other node takes bytes: "error", or "rate" in bytes a second."""
        try:
            with self._joined(address, port) as to:
                return {"error": None, "rate": _sent(to)}
        except (OSError, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def write(self, folder: str, name: str, content: str) -> str | None:
        """Writes a file into the shared folder; what went wrong."""
        try:
            system, path = _storage(folder)
            if isinstance(path, pathlib.Path):
                path.mkdir(exist_ok=True)  # not its parents, of which nothing would be left to remove them
                (path / name).write_text(content)
            else:
                system.create_dir(path, recursive=True)
                with system.open_output_stream(f"{path}/{name}") as file:
                    file.write(content.encode())
        except Exception as error:  # what a storage raises is as many kinds as there are storages; it is told
            return f"{type(error).__name__}: {error}"
        return None

    def read(self, folder: str, name: str, content: str) -> str | None:
        """Reads a file of the shared folder; what went wrong."""
        try:
            system, path = _storage(folder)
            if isinstance(path, pathlib.Path):
                found = (path / name).read_text()
            else:
                with system.open_input_stream(f"{path}/{name}") as file:
                    found = file.read().decode()
        except Exception as error:  # as above
            return f"{type(error).__name__}: {error}"
        return None if found == content else "the file has another content"

    def remove(self, folder: str) -> None:
        """Removes the examination's folder from the storage, where this node sees it."""
        system, path = _storage(folder)
        if isinstance(path, pathlib.Path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                system.delete_dir(path)

    # ------------------------------------------------------------------------------------------------ sockets

    def _proof(self, *parts: bytes) -> bytes:
        return hmac.digest(self._token, b"".join(parts), "sha256")

    def _joined(self, address: str, port: int) -> socket.socket:
        """A connection both of whose ends know the token."""
        to = socket.create_connection((address, port), self._step, source_address=(self._address, 0))
        try:
            to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce, own = _exactly(to, _NONCE), secrets.token_bytes(_NONCE)
            to.sendall(own + self._proof(b"client", nonce, own))
            if not hmac.compare_digest(_exactly(to, _MAC), self._proof(b"server", own, nonce)):
                raise ValueError("another program answers on the port of the probe")
        except BaseException:
            to.close()
            raise
        return to

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                to, _ = listening.accept()
            except OSError:  # closed
                return
            if not self._places.acquire(blocking=False):
                to.close()
                continue
            threading.Thread(target=self._serve, args=(to,), daemon=True).start()

    def _serve(self, to: socket.socket) -> None:
        """Answers one connection: bytes that begin with p come back, those behind a length are counted."""
        try:
            with to, contextlib.suppress(OSError, ValueError):
                to.settimeout(self._step)
                to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                nonce = secrets.token_bytes(_NONCE)
                to.sendall(nonce)
                other, proof = _exactly(to, _NONCE), _exactly(to, _MAC)
                if not hmac.compare_digest(proof, self._proof(b"client", nonce, other)):
                    return
                to.sendall(self._proof(b"server", other, nonce))
                until = time.monotonic() + self._link
                while time.monotonic() < until and (kind := to.recv(1)):
                    if kind == b"b":
                        _drain(to, until)
                    to.sendall(kind)
        finally:
            self._places.release()

    def _echo(self, listening: socket.socket) -> None:
        """Answers datagrams that bear the proof, with a short one: nobody is sent more than they sent."""
        while True:
            try:
                data, sender = listening.recvfrom(2**16)
            except OSError:
                return
            if len(data) >= 4 + _MAC and hmac.compare_digest(data[4 : 4 + _MAC], self._proof(b"ask", data[:4])):
                with contextlib.suppress(OSError):
                    listening.sendto(data[:4] + self._proof(b"answer", data[:4]), sender)

    def _datagrams(self, address: str, port: int) -> dict:
        """Share of small datagrams that are lost, and whether those as large as the network takes are lost."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as to, contextlib.suppress(OSError):
            to.bind((self._address, 0))
            to.connect((address, port))
            answered = self._asked(to, range(DATAGRAMS), 0)
            if not answered:
                return {}  # datagrams are filtered, which TCP does not mind
            if answered < DATAGRAMS:  # a busy host may miss some: what its link loses is lost a second time
                answered = max(answered, self._asked(to, range(DATAGRAMS, 2 * DATAGRAMS), 0))
            found = {"loss": 1 - answered / DATAGRAMS}
            if family == socket.AF_INET:
                to.setsockopt(socket.IPPROTO_IP, _MTU_DISCOVER, _PROBE)
                found["mtu"] = min(to.getsockopt(socket.IPPROTO_IP, _MTU), 9000)
                size = found["mtu"] - _IP_UDP_HEADERS - 4 - _MAC
                found["large"] = self._asked(to, range(2 * DATAGRAMS, 2 * DATAGRAMS + LARGE), size) / LARGE
            return found
        return {}

    def _asked(self, to: socket.socket, numbers: range, padding: int) -> int:
        """How many of some datagrams are answered; they are sent a few at a time, as one program may miss a flood."""
        missing = set(numbers)
        at_once = 1 if padding else AT_ONCE  # one by one: a slow link drops several large ones that come at once
        for sent, number in enumerate(numbers, 1):
            head = struct.pack("!I", number)
            with contextlib.suppress(OSError):
                to.send(head + self._proof(b"ask", head) + bytes(padding))
            if sent % at_once == 0:
                self._answers(to, missing, 0.05, len(numbers) - sent)
        self._answers(to, missing, 1.0)
        return len(numbers) - len(missing)

    def _answers(self, to: socket.socket, missing: set[int], seconds: float, unsent: int = 0) -> None:
        until = time.monotonic() + seconds
        while len(missing) > unsent and (left := until - time.monotonic()) > 0:
            to.settimeout(left)
            try:
                data = to.recv(2**16)
            except TimeoutError:
                return
            except OSError:  # an ICMP message, of which there may be several
                continue
            if len(data) == 4 + _MAC and hmac.compare_digest(data[4:], self._proof(b"answer", data[:4])):
                missing.discard(struct.unpack("!I", data[:4])[0])


def _exactly(to: socket.socket, count: int) -> bytes:
    until, found = time.monotonic() + to.gettimeout(), b""
    while len(found) < count:
        if time.monotonic() > until:
            raise TimeoutError("timed out")
        part = to.recv(count - len(found))
        if not part:
            raise ValueError("the other end closed the connection")
        found += part
    return found


def _drain(to: socket.socket, until: float) -> None:
    """Takes bytes up to one that is not 0."""
    while time.monotonic() < until and (data := to.recv(2**18)):
        if data[-1]:
            return


def _round_trips(to: socket.socket) -> float:
    taken = []
    for _ in range(PINGS):
        began = time.monotonic()
        to.sendall(b"p")
        _exactly(to, 1)
        taken.append(time.monotonic() - began)
    return statistics.median(taken)


def _sent(to: socket.socket) -> float:
    """Bytes a second, of as many as pass within a step's time."""
    began, count = time.monotonic(), 0
    to.sendall(b"b")
    while count < BULK_BYTES and time.monotonic() < began + to.gettimeout() / 2:
        to.sendall(CHUNK)
        count += len(CHUNK)
    to.sendall(b"\1")
    _exactly(to, 1)
    return count / (time.monotonic() - began)


def _bound(family, kind, address: str, ports: tuple[int, int]) -> socket.socket:
    for port in secrets.SystemRandom().sample(range(ports[0], ports[1] + 1), min(200, ports[1] + 1 - ports[0])):
        one = socket.socket(family, kind)
        try:
            one.bind((address, port))
        except OSError:  # in use; the last error is told below
            one.close()
            continue
        return one
    raise OSError(f"no free port of {ports[0]} to {ports[1]} at {address}")


# -------------------------------------------------------------------------------------------------------- facts


def _versions() -> dict[str, str | None]:
    found = {"python": platform.python_version()}
    for package, names in {
        "ray": ("ray",),
        "tensorflow": ("tensorflow", "tensorflow-cpu"),
        "keras": ("keras",),
        "raytf": ("raytf",),
    }.items():
        found[package] = next((version for name in names if (version := _version(name))), None)
    found["raytf's code"] = _code()
    return found


def _version(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _code() -> str | None:
    """Digest of raytf's files: a clone may differ under one version."""
    spec = importlib.util.find_spec("raytf")
    if spec is None or spec.origin is None:
        return None
    digest, folder = hashlib.sha256(), pathlib.Path(spec.origin).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _free(path: str) -> tuple[int, int] | None:
    """Free and all bytes of the file system of a path."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def interface(address: str) -> str | None:
    """The name of this host's network interface that has an address; None where it is not known, as behind NAT."""
    for _, name in socket.if_nameindex():
        if ":" not in address:
            with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    with contextlib.suppress(OSError, ValueError):
        wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        for line in pathlib.Path("/proc/net/if_inet6").read_text().splitlines():
            if line.startswith(wanted):
                return line.split()[-1]
    return None


def cgroup_limits(root: pathlib.Path = pathlib.Path("/")) -> dict[str, float | None]:
    """The "cpus" and bytes of "memory" that control groups allow this process, each None without a limit.

    Args:
        root: of the file system.
    """
    cpus, memory = [], []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            base = root / "sys/fs/cgroup" / controllers  # of version 2: no controllers
            own = base / path.lstrip("/")
            # In a container the path may be that of the host, and the limits are in the base.
            for folder in {own, *own.parents, base}:
                if folder == base or base in folder.parents:
                    cpus += _cpus(folder)
                    memory += _numbers(folder / "memory.max") + _numbers(folder / "memory.limit_in_bytes")
    limited = [amount for amount in memory if amount < _NO_MEMORY_LIMIT]
    return {"cpus": min(cpus, default=None), "memory": min(limited, default=None)}


def _cpus(folder: pathlib.Path) -> list[float]:
    found = _numbers(folder / "cpu.max") or [
        number for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us") for number in _numbers(folder / name)
    ]
    return [found[0] / found[1]] if len(found) == 2 and found[0] > 0 else []


def _numbers(file: pathlib.Path) -> list[int]:
    """The numbers of a file of a control group; nothing where it has none, or is not there."""
    try:
        return [int(word) for word in file.read_text().split()]
    except (OSError, ValueError):  # "max"
        return []


def _traces() -> bool:
    """Whether a process may look at another one of its user here, as py-spy does; False only in a container."""
    try:
        status = pathlib.Path("/proc/self/status").read_text()
        allowed = int(status.partition("CapBnd:")[2].split()[0], 16)
        read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, ValueError, IndexError, AttributeError):
        return True
    vector = (ctypes.c_size_t * 2)(1, 1)  # no address of anybody: EFAULT for who may read
    refused = read(os.getppid(), vector, 1, vector, 1, 0) < 0 and ctypes.get_errno() == errno.EPERM
    return not refused or bool(allowed >> _SYS_PTRACE & 1)


def _folders() -> set[str]:
    """Where this node writes: the temporary folder, and that of Ray's session, whose log this process' output is."""
    found = {tempfile.gettempdir()}
    with contextlib.suppress(OSError):
        path = os.readlink("/proc/self/fd/1")
        if path.startswith("/") and os.path.isfile(path):
            found.add(os.path.dirname(path))
    return found


def _resolved(seconds: float) -> dict:
    """The host's name and the addresses that it resolves to here; a resolver may be slow, and is not waited for."""
    name, answer = socket.gethostname(), []

    def ask():
        try:
            answer.append(sorted({entry[4][0] for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}))
        except OSError as error:
            answer.append(str(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    found = answer[0] if answer else f"no answer within {seconds:g} s"
    return {"host": name, "found": found}


def _token_file() -> dict:
    """Whether Ray uses a token here, and who may read its file."""
    mode = os.environ.get("RAY_AUTH_MODE")
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser("~/.ray/auth_token")
    found = {"mode": mode, "path": path, "bits": None}
    if mode == "token" and not os.environ.get("RAY_AUTH_TOKEN"):
        with contextlib.suppress(OSError):
            bits = stat.S_IMODE(os.stat(path).st_mode)
            passed = all(folder.stat().st_mode & stat.S_IXOTH for folder in pathlib.Path(path).resolve().parents)
            found["bits"] = bits if passed else bits & ~stat.S_IRWXO  # others do not get as far as to the file
    return found


def _storage(folder: str):
    """(file system of pyarrow, path) of a URI; (None, Path) of a folder."""
    if "://" not in folder:
        return None, pathlib.Path(folder)
    from pyarrow import fs

    return fs.FileSystem.from_uri(folder)
