"""Probe of a node: its facts, and its links to others. It is sent to nodes by value, and needs nothing of raytf there.

Sockets serve only peers that prove the examination's token, by HMAC over a new nonce for each connection. Each datagram
contains a proof, too. Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
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

from raytf.runtime.networks import interfaces

PINGS, DATAGRAMS, AT_ONCE, LARGE = 20, 200, 50, 8
BULK_BYTES, CHUNK = 8 * 2**20, bytes(2**16)
# Connections that a probe serves at a time, which bounds the threads for other programs' connections.
_SERVED = 256
_MAC, _NONCE = 32, 16
# From Linux' linux/in.h.
_PROBE = 3
# Level and options (MTU_DISCOVER, MTU) of a family, from linux/in.h and in6.h; bytes of the headers of IP and UDP.
_MTU_OPTIONS = {
    socket.AF_INET: (socket.IPPROTO_IP, 10, 14, 28),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 23, 24, 48),
}
# From Linux' linux/capability.h; and the value from which version 1 of control groups means no limit.
_NO_MEMORY_LIMIT = 2**60


class Probe:
    """An actor on a node.

    Args:
        token: Secret token of the examination, which only its probes have.
        ports: First and last port on which it may listen.
        step, link, name: Seconds, as `Timeouts.link_step`, `link` and `name_lookup`, which its node may not have.
    """

    def __init__(self, token: bytes, ports: tuple[int, int], step: float, link: float, name: float):
        self._token, self._ports = token, ports
        self._address = ""  # any, until it listens at one
        self._made_folders: list[pathlib.Path] = []
        self._step, self._link, self._name = step, link, name
        self._sockets: list[socket.socket] = []
        self._sockets_by_port = threading.BoundedSemaphore(_SERVED)

    def facts(self) -> dict:
        """Returns the node's versions, limits, free space and name; see `findings.find_problems`."""
        return {
            "versions": _versions(),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "shm": _free("/dev/shm"),
            "disks": {path: _free(path) for path in _folders()},
            "name": _resolved(self._name),
            "token": _token_file(),
            "interfaces": interfaces(),
            "container": cgroup_limits() | {"traces": _traces()},
        }

    def clock(self) -> float:
        """Returns the seconds since 1970."""
        return time.time()

    def listen(self, address: str) -> tuple[int, int]:
        """Opens sockets at an address of the node; returns their ports: TCP, UDP."""
        self._address = address
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        tcp, udp = (
            _bound(family, kind, self._address, self._ports) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)
        )
        tcp.listen(_SERVED)
        self._sockets = [tcp, udp]
        for serve, bound in ((self._accept, tcp), (self._echo, udp)):
            threading.Thread(target=serve, args=(bound,), daemon=True).start()
        return tcp.getsockname()[1], udp.getsockname()[1]

    def close(self) -> None:
        """Closes the node's sockets."""
        for opened in self._sockets:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
            opened.close()

    def reach(self, address: str, ports: tuple[int, int]) -> dict:
        """Measures the link to another node: "error", or "rtt" in seconds, and "loss", "large", "mtu" if known."""
        result = {"error": None}
        try:
            with self._connect(address, ports[0]) as connection:
                result["rtt"] = _measure_round_trips(connection)
        except (OSError, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return result | self._datagrams(address, ports[1])

    def connect_error(self, address: str, port: int) -> str | None:
        """Returns why nothing listens at an address, or None."""
        try:
            socket.create_connection((address, port), self._step).close()
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def bandwidth(self, address: str, port: int) -> dict:
        """Measures the rate to the other node: "error", or "rate" in bytes per second."""
        try:
            with self._connect(address, port) as connection:
                return {"error": None, "rate": _measure_rate(connection)}
        except (OSError, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def write(self, folder: str, name: str, content: str) -> str | None:
        """Writes a file into the shared folder; returns the error, or None."""
        try:
            system, path = _storage(folder)
            if isinstance(path, pathlib.Path):
                self._made_folders = [parent for parent in path.parents if not parent.exists()]
                path.mkdir(parents=True, exist_ok=True)  # a run makes its storage, too
                (path / name).write_text(content)
            else:
                system.create_dir(path, recursive=True)
                with system.open_output_stream(f"{path}/{name}") as file:
                    file.write(content.encode())
        except Exception as error:  # each storage raises its own kinds of errors; all are reported
            return f"{type(error).__name__}: {error}"
        return None

    def read(self, folder: str, name: str, content: str) -> str | None:
        """Reads a file of the shared folder; returns the error, or None."""
        try:
            system, path = _storage(folder)
            if isinstance(path, pathlib.Path):
                text = (path / name).read_text()
            else:
                with system.open_input_stream(f"{path}/{name}") as file:
                    text = file.read().decode()
        except Exception as error:  # as above
            return f"{type(error).__name__}: {error}"
        return None if text == content else "the file has another content"

    def remove(self, folder: str) -> None:
        """Removes the examination's folder from the storage, if this node sees it."""
        system, path = _storage(folder)
        if isinstance(path, pathlib.Path):
            shutil.rmtree(path, ignore_errors=True)
            for made in self._made_folders:
                with contextlib.suppress(OSError):  # another node has removed it, or writes into it
                    made.rmdir()
        else:
            with contextlib.suppress(FileNotFoundError):
                system.delete_dir(path)

    # ------------------------------------------------------------------------------------------------ sockets

    def _proof(self, *parts: bytes) -> bytes:
        return hmac.digest(self._token, b"".join(parts), "sha256")

    def _connect(self, address: str, port: int) -> socket.socket:
        """Returns a connection after both ends have proved the token."""
        connection = socket.create_connection((address, port), self._step, source_address=(self._address, 0))
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce, client_nonce = _receive_exactly(connection, _NONCE), secrets.token_bytes(_NONCE)
            connection.sendall(client_nonce + self._proof(b"client", nonce, client_nonce))
            if not hmac.compare_digest(_receive_exactly(connection, _MAC), self._proof(b"server", client_nonce, nonce)):
                raise ValueError("another program answers on the port of the probe")
        except BaseException:
            connection.close()
            raise
        return connection

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:  # closed
                return
            if not self._sockets_by_port.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Serves one connection: returns each byte p; counts bytes after a b up to the last one."""
        try:
            with connection, contextlib.suppress(OSError, ValueError):
                connection.settimeout(self._step)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                nonce = secrets.token_bytes(_NONCE)
                connection.sendall(nonce)
                peer_nonce, proof = _receive_exactly(connection, _NONCE), _receive_exactly(connection, _MAC)
                if not hmac.compare_digest(proof, self._proof(b"client", nonce, peer_nonce)):
                    return
                connection.sendall(self._proof(b"server", peer_nonce, nonce))
                deadline = time.monotonic() + self._link
                while time.monotonic() < deadline and (kind := connection.recv(1)):
                    if kind == b"b":
                        _drain(connection, deadline)
                    connection.sendall(kind)
        finally:
            self._sockets_by_port.release()

    def _echo(self, listening: socket.socket) -> None:
        """Answers datagrams that contain the proof with a short one, so that nothing is amplified."""
        while True:
            try:
                data, sender = listening.recvfrom(2**16)
            except OSError:
                return
            if len(data) >= 4 + _MAC and hmac.compare_digest(data[4 : 4 + _MAC], self._proof(b"ask", data[:4])):
                with contextlib.suppress(OSError):
                    listening.sendto(data[:4] + self._proof(b"answer", data[:4]), sender)

    def _datagrams(self, address: str, port: int) -> dict:
        """Returns the share of lost small datagrams, and the share of the network's largest ones that arrive."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as udp_socket, contextlib.suppress(OSError):
            udp_socket.bind((self._address, 0))
            udp_socket.connect((address, port))
            answered = self._count_answers(udp_socket, range(DATAGRAMS), 0)
            if not answered:
                return {}  # datagrams are filtered, which does not affect TCP
            if answered < DATAGRAMS:  # a busy host may miss some; a bad link loses some in a second trial, too
                answered = max(answered, self._count_answers(udp_socket, range(DATAGRAMS, 2 * DATAGRAMS), 0))
            result = {"loss": 1 - answered / DATAGRAMS}
            level, discover, mtu, headers = _MTU_OPTIONS[family]
            udp_socket.setsockopt(level, discover, _PROBE)
            result["mtu"] = min(udp_socket.getsockopt(level, mtu), 9000)
            size = result["mtu"] - headers - 4 - _MAC
            result["large"] = self._count_answers(udp_socket, range(2 * DATAGRAMS, 2 * DATAGRAMS + LARGE), size) / LARGE
            return result
        return {}

    def _count_answers(self, address: socket.socket, numbers: range, padding: int) -> int:
        """Returns how many of some datagrams are answered. Sends a few at a time, as the peer may miss a flood."""
        missing = set(numbers)
        at_once = 1 if padding else AT_ONCE  # one by one: a slow link drops several large ones that arrive at once
        for sent, number in enumerate(numbers, 1):
            head = struct.pack("!I", number)
            with contextlib.suppress(OSError):
                address.send(head + self._proof(b"ask", head) + bytes(padding))
            if sent % at_once == 0:
                self._answers(address, missing, 0.05, len(numbers) - sent)
        self._answers(address, missing, 1.0)
        return len(numbers) - len(missing)

    def _answers(self, udp_socket: socket.socket, missing: set[int], seconds: float, unsent: int = 0) -> None:
        deadline = time.monotonic() + seconds
        while len(missing) > unsent and (remaining := deadline - time.monotonic()) > 0:
            udp_socket.settimeout(remaining)
            try:
                data = udp_socket.recv(2**16)
            except TimeoutError:
                return
            except OSError:  # an ICMP message, of which there may be several
                continue
            if len(data) == 4 + _MAC and hmac.compare_digest(data[4:], self._proof(b"answer", data[:4])):
                missing.discard(struct.unpack("!I", data[:4])[0])


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    deadline, data = time.monotonic() + connection.gettimeout(), b""
    while len(data) < count:
        if time.monotonic() > deadline:
            raise TimeoutError("timed out")
        part = connection.recv(count - len(data))
        if not part:
            raise ValueError("the other end closed the connection")
        data += part
    return data


def _drain(connection: socket.socket, deadline: float) -> None:
    """Receives bytes up to one that is not 0."""
    while time.monotonic() < deadline and (data := connection.recv(2**18)):
        if data[-1]:
            return


def _measure_round_trips(connection: socket.socket) -> float:
    taken = []
    for _ in range(PINGS):
        began = time.monotonic()
        connection.sendall(b"p")
        _receive_exactly(connection, 1)
        taken.append(time.monotonic() - began)
    return statistics.median(taken)


def _measure_rate(connection: socket.socket) -> float:
    """Returns the bytes per second, measured over half of a step's timeout at most."""
    began, count = time.monotonic(), 0
    connection.sendall(b"b")
    while count < BULK_BYTES and time.monotonic() < began + connection.gettimeout() / 2:
        connection.sendall(CHUNK)
        count += len(CHUNK)
    connection.sendall(b"\1")
    _receive_exactly(connection, 1)
    return count / (time.monotonic() - began)


def _bound(family, kind, address: str, ports: tuple[int, int]) -> socket.socket:
    for port in secrets.SystemRandom().sample(range(ports[0], ports[1] + 1), min(200, ports[1] + 1 - ports[0])):
        candidate = socket.socket(family, kind)
        try:
            candidate.bind((address, port))
        except OSError:  # in use
            candidate.close()
            continue
        return candidate
    raise OSError(f"no free port of {ports[0]} to {ports[1]} at {address}")


# -------------------------------------------------------------------------------------------------------- facts


def _versions() -> dict[str, str | None]:
    versions = {"python": platform.python_version()}
    for package, names in {
        "ray": ("ray",),
        "tensorflow": ("tensorflow", "tensorflow-cpu"),
        "keras": ("keras",),
        "raytf": ("raytf",),
    }.items():
        versions[package] = next((version for name in names if (version := _version(name))), None)
    versions["raytf's code"] = _code()
    return versions


def _version(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _code() -> str | None:
    """Returns a digest of raytf's files: a clone may differ under one version."""
    spec = importlib.util.find_spec("raytf")
    if spec is None or spec.origin is None:
        return None
    digest, folder = hashlib.sha256(), pathlib.Path(spec.origin).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _free(path: str) -> tuple[int, int] | None:
    """Returns the free and the total bytes of a path's file system."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize


def cgroup_limits(root: pathlib.Path = pathlib.Path("/")) -> dict[str, float | None]:
    """Returns the "cpus" and bytes of "memory" that control groups allow this process, each None without a limit.

    Args:
        root: Root of the file system.
    """
    cpus, memory = [], []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            base = root / "sys/fs/cgroup" / controllers  # version 2 has no controllers
            group_folder = base / path.lstrip("/")
            # In a container the path may be the host's, and the limits are in the base.
            for folder in {group_folder, *group_folder.parents, base}:
                if folder == base or base in folder.parents:
                    cpus += _cpus(folder)
                    memory += _numbers(folder / "memory.max") + _numbers(folder / "memory.limit_in_bytes")
    limited = [amount for amount in memory if amount < _NO_MEMORY_LIMIT]
    return {"cpus": min(cpus, default=None), "memory": min(limited, default=None)}


def _cpus(folder: pathlib.Path) -> list[float]:
    limits = _numbers(folder / "cpu.max") or [
        number for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us") for number in _numbers(folder / name)
    ]
    return [limits[0] / limits[1]] if len(limits) == 2 and limits[0] > 0 else []


def _numbers(file: pathlib.Path) -> list[int]:
    """Returns the numbers of a control group's file; none if it has no limit, or does not exist."""
    try:
        return [int(word) for word in file.read_text().split()]
    except (OSError, ValueError):  # "max"
        return []


def _traces() -> bool | None:
    """Returns whether a process may read another one of its user, as py-spy does; False only in a container.

    A container has a part of the capabilities; one that is added to a pod is effective for root alone. None means that
    the container has none at all, as the Pod Security Standard "restricted" wants it.
    """
    try:
        status = pathlib.Path("/proc/self/status").read_text()
        allowed = int(status.partition("CapBnd:")[2].split()[0], 16)
        last = int(pathlib.Path("/proc/sys/kernel/cap_last_cap").read_text())
        read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, ValueError, IndexError, AttributeError):
        return True
    vector = (ctypes.c_size_t * 2)(1, 1)  # an invalid address: EFAULT if reading is allowed
    refused = read(os.getppid(), vector, 1, vector, 1, 0) < 0 and ctypes.get_errno() == errno.EPERM
    if refused and not allowed:
        return None
    return not refused or allowed == (1 << last + 1) - 1


def _folders() -> set[str]:
    """Returns the folders in which this node writes: the temporary one, and the logs of Ray's session."""
    folders = {tempfile.gettempdir()}
    with contextlib.suppress(OSError):
        path = os.readlink("/proc/self/fd/1")
        if path.startswith("/") and os.path.isfile(path):
            folders.add(os.path.dirname(path))
    return folders


def _resolved(seconds: float) -> dict:
    """Returns the host's name and its addresses here; a slow resolver is not awaited."""
    name, answer = socket.gethostname(), []

    def ask():
        try:
            answer.append(sorted({entry[4][0] for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}))
        except OSError as error:
            answer.append(str(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    addresses = answer[0] if answer else f"timeout: no answer within {seconds:g} s"
    return {"host": name, "found": addresses}


def _token_file() -> dict:
    """Returns whether Ray uses a token here, and the permissions of its file."""
    mode = os.environ.get("RAY_AUTH_MODE")
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser("~/.ray/auth_token")
    result = {"mode": mode, "path": path, "bits": None}
    if mode == "token" and not os.environ.get("RAY_AUTH_TOKEN"):
        with contextlib.suppress(OSError):
            bits = stat.S_IMODE(os.stat(path).st_mode)
            passed = all(folder.stat().st_mode & stat.S_IXOTH for folder in pathlib.Path(path).resolve().parents)
            result["bits"] = bits if passed else bits & ~stat.S_IRWXO  # other users cannot reach the file
    return result


def _storage(folder: str):
    """Returns (file system of pyarrow, path) of a URI; (None, Path) of a folder."""
    if "://" not in folder:
        return None, pathlib.Path(folder)
    from pyarrow import fs

    return fs.FileSystem.from_uri(folder)
