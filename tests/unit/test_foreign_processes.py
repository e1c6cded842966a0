"""Another user of the host binds raytf's abstract sockets, or changes what workers send: nothing waits, nothing runs.

A process of another user is one for which the kernel reports another user's number; root becomes one in a fork.
"""

import ast
import contextlib
import os
import pathlib
import pickle
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import raytf
from raytf import liveness
from raytf.collectives import ring_links, ring_listener, signed
from raytf.collectives.ring_listener import Listener
from raytf.collectives.ring_token import TOKEN_BYTES
from raytf.errors import RaytfError
from raytf.runtime import cores, ports
from raytf.runtime.settings import Listening
from raytf.storage import snapshots

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux'")
NOBODY = 65_534


@pytest.fixture
def stranger():
    """stranger(name, ...): a process of another user listens at abstract names, and takes no connection."""
    if os.getuid():
        pytest.skip("only root can become another user")
    ended = []

    def start(*names):
        ready, write_end = os.pipe()
        alive, end = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.close(end)
                os.setuid(NOBODY)
                held = [socket.socket(socket.AF_UNIX) for _ in names]
                for one, name in zip(held, names, strict=True):
                    one.bind(name)
                    one.listen()
                os.write(write_end, b"1")
                os.read(alive, 1)
            finally:
                os._exit(0)
        os.close(write_end)
        os.close(alive)
        ended.append((pid, end))
        assert os.read(ready, 1) == b"1"
        os.close(ready)

    yield start
    for pid, end in ended:
        os.close(end)
        os.waitpid(pid, 0)


def test_whose_process_is_at_the_other_end(stranger):
    stranger("\0raytf_test/theirs")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as one:
        server.bind(f"\0raytf_test/{os.getpid()}")
        server.listen()
        one.connect(server.getsockname())
        assert liveness.is_same_user(one)
    with socket.socket(socket.AF_UNIX) as one:
        one.connect("\0raytf_test/theirs")
        assert not liveness.is_same_user(one)


def test_a_ring_forms_where_a_stranger_has_the_names_of_its_ports(stranger):
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    stranger(*(f"\0raytf/ring/{one.port}" for one in listeners))
    addresses = [(one.host, one.port) for one in listeners]
    with ThreadPoolExecutor(2) as pool:
        places = list(pool.map(lambda i: listeners[i].join(i, addresses, bytes(TOKEN_BYTES), 20.0, 20.0), range(2)))
        assert all(ring_links.is_local(place._next) for place in places), "neighbours of one host share memory"
        found = list(pool.map(lambda place: place.all_reduce(np.ones(2)).tolist(), places))
    assert found == [[2.0, 2.0]] * 2
    for place in places:
        place.close()


def test_a_neighbour_that_is_not_at_its_local_socket_is_found_at_its_port(monkeypatch):
    """As one of another network namespace is."""
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    addresses = [(one.host, one.port) for one in listeners]
    names = {port: f"\0raytf_test/{os.getpid()}/{port}" for _, port in addresses}
    calls = []

    def name_of(port, token):
        calls.append(port)  # who binds it asks first
        return names[port] if calls.count(port) == 1 else names[port] + "-elsewhere"

    monkeypatch.setattr(ring_listener, "_local_name", name_of)
    bound = threading.Barrier(2)
    hold = ring_listener._Handshake.hold

    async def both_bound(self, timeout):
        bound.wait(20)
        return await hold(self, timeout)

    monkeypatch.setattr(ring_listener._Handshake, "hold", both_bound)
    with ThreadPoolExecutor(2) as pool:
        places = list(pool.map(lambda i: listeners[i].join(i, addresses, bytes(TOKEN_BYTES), 20.0, 20.0), range(2)))
        assert not any(ring_links.is_local(place._next) for place in places)
    for place in places:
        place.close()


def test_ports_that_a_stranger_claims_are_taken_all_the_same(stranger, monkeypatch):
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    stranger(f"\0raytf/{port}")
    try:
        assert ports.reserve_address(Listening((port, port))) == f"127.0.0.1:{port}"
    finally:
        ports.end_claims()


def test_a_strangers_door_is_not_waited_at(stranger, monkeypatch):
    door = f"\0raytf_test/door/{os.getpid()}"
    stranger(door)
    monkeypatch.setattr(cores, "_DOOR", door)
    assert not cores._waited_for_chooser(600.0)


def test_a_strangers_sign_is_no_writer(stranger, tmp_path):
    stranger(f"\0{snapshots._prefix(str(tmp_path))}stranger")
    assert snapshots.wait_for_writers(str(tmp_path), 600.0)


def test_a_sign_with_a_full_queue_is_not_waited_at(tmp_path):
    with socket.socket(socket.AF_UNIX) as sign, contextlib.ExitStack() as waiting:
        sign.bind(f"\0{snapshots._prefix(str(tmp_path))}stranger")
        sign.listen(0)
        for _ in range(2):  # the second one finds it full
            one = waiting.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(sign.getsockname())
        assert snapshots.wait_for_writers(str(tmp_path), 600.0)


class _Runs:
    """Runs code where it is unpickled."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self._path,)


def test_what_is_not_signed_is_not_unpickled(tmp_path):
    token, nonces = os.urandom(TOKEN_BYTES), np.arange(8, dtype=np.int32).reshape(2, 4)
    message = signed.pack({"a": [1, 2]}, token, nonces)
    assert signed.unpack(message, token, nonces) == {"a": [1, 2]}
    evil = tmp_path / "ran"
    proof = message[:32].tobytes()
    for wrong in (
        np.frombuffer(proof + pickle.dumps(_Runs(evil)), np.uint8),
        signed.pack(_Runs(evil), os.urandom(TOKEN_BYTES), nonces),
        signed.pack(_Runs(evil), token, nonces + 1),  # heard before
        np.zeros(0, np.uint8),
    ):
        with pytest.raises(RaytfError, match="is not unpickled"):
            signed.unpack(wrong, token, nonces)
    assert not evil.exists()


@pytest.mark.slow
def test_nothing_else_that_workers_exchange_is_unpickled():
    root = pathlib.Path(raytf.__file__).parent
    found = set()
    for room in ("collectives", "parallel", "worker", "data", "compat"):
        for file in (root / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Attribute) and node.attr in ("loads", "load", "Unpickler"):
                    named = ast.unparse(node.value)
                    found |= {file.name} if named.endswith("pickle") else set()
    # preprocessing reads what tasks of Ray Data return, which Ray itself unpickles
    assert found == {"signed.py", "preprocessing.py"}
