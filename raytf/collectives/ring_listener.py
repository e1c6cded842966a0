"""The address of a process in a ring, and how neighbours meet there. Each proves that it knows the ring's token."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import secrets
import socket
import struct
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from raytf import liveness, timeouts
from raytf.collectives.ring import Ring
from raytf.collectives.ring_links import HOST_GONE, Chord, Link, chords, is_local
from raytf.collectives.ring_token import TOKEN_BYTES
from raytf.errors import PeerLostError

# Purposes of a connection.
_PURPOSES = _DATA, _WATCH = 0, 1
# The first bytes of a connection: magic, rank, purpose, generation and a random number for one use.
_MAGIC = b"raytf/ring/4"
_HELLO = struct.Struct(f"<{len(_MAGIC)}sIII{TOKEN_BYTES}s")
_PROOF_BYTES = 32
_WELCOME = b"\1"
# Unverified connections at once, at most; the oldest of more is closed, and a neighbour reconnects.
_STRANGERS = 64
_AGAIN_INTERVAL = 0.02
# Number of failures at the local socket of a neighbour that answers at its port.
_MISSES = 3


class Listener:
    """This process' address for the previous one: a port, and on Linux a Unix socket for the same host.

    Neighbours prove to each other that they have the ring's token, by an HMAC over random numbers of both. The token
    itself is never sent. Other connections are neither trusted nor waited for.

    Args:
        host: Address of this host that the other processes use.
        bound: A bound socket that does not listen yet; None uses a port that the system chooses.
    """

    def __init__(self, host: str, bound: socket.socket | None = None):
        self.host, self._handshake, self._stopped = host, None, False
        self._sockets: list[socket.socket] = []
        self._listen(socket.create_server((host, 0), family=_family(host)) if bound is None else bound)
        self.port = self._sockets[0].getsockname()[1]

    def _listen(self, sock: socket.socket) -> None:
        self._sockets.append(sock)
        sock.setblocking(False)
        sock.listen(16 * _STRANGERS)

    def join(
        self,
        rank: int,
        addresses: Sequence[tuple[str, int]],
        token: bytes,
        timeout: float,
        patience: float | None,
        host_gone: int = HOST_GONE,
        generation: int = 0,
    ) -> Ring:
        """Connects this process with its neighbours; all processes call it at once.

        Args:
            rank: Rank of this process.
            addresses: (host, port) of the listeners of all processes, by rank; at least two.
            token: `TOKEN_BYTES` bytes that only the processes of this ring have; others are refused.
            timeout: Seconds within which the neighbours must connect.
            patience: The `timeout` of the ring's sums, in seconds or None.
            host_gone: Seconds after which a neighbour's host that does not answer is lost, at least 2.
            generation: Generation of the group, 0 <= generation < 2**32, the same for all; members of another are
                refused.

        Raises:
            PeerLostError: A neighbour could not be reached, did not connect, or does not have the token.
        """
        if sys.platform == "linux":
            local = socket.socket(socket.AF_UNIX)
            local.bind(_local_name(self.port, token))
            self._listen(local)
        handshake = self._handshake = _Handshake(rank, addresses, token, self._sockets, generation)
        if self._stopped:
            handshake.cancel()
        try:
            # in a separate thread, as the caller's thread may run an event loop
            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(asyncio.run, handshake.hold(timeout))
                try:
                    following, previous = running.result()
                except BaseException:
                    handshake.cancel()
                    raise
        except asyncio.CancelledError as error:
            raise PeerLostError(
                rank, "no connection to its neighbours: the driver has cancelled the recovery"
            ) from error
        except OSError as error:
            raise PeerLostError(rank, f"no connection to its neighbours ({type(error).__name__}: {error})") from error
        finally:
            self.close()
        ends = len(_PURPOSES)
        links = [Link(*sockets[:ends], host_gone=host_gone) for sockets in (following, previous)]
        further = [Chord(*pair, host_gone=host_gone) for pair in zip(following[ends:], previous[ends:], strict=True)]
        return Ring(rank, len(addresses), *links, patience, generation, further)

    def stop(self) -> None:
        """Cancels a running `join` from another thread: it raises PeerLostError, unless all are connected."""
        self._stopped = True
        if self._handshake is not None:
            self._handshake.cancel()

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


class _Handshake:
    """The connections of one process with its neighbours, all made at the same time.

    Args:
        rank, addresses, token, generation: As for `Listener.join`.
        listening: Non-blocking listening sockets of this process.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[tuple[str, int]],
        token: bytes,
        listening: list[socket.socket],
        generation: int,
    ):
        size = len(addresses)
        self._generation = generation
        self._refused: tuple[int, int] | None = None  # (rank, generation) of a refused process with the token
        self._rank, self._addresses, self._token, self._listening = rank, addresses, token, listening
        self._purposes = (*_PURPOSES, *range(len(_PURPOSES), len(_PURPOSES) + chords(size)))
        # by purpose
        self._opened: dict[int, socket.socket] = {}
        self._accepted: dict[int, socket.socket] = {}
        self._all_accepted = asyncio.Event()
        self._handshakes: dict[asyncio.Task, None] = {}  # in order of arrival
        self._cancel, self._cancelled = None, False

    async def hold(self, timeout: float) -> tuple[list[socket.socket], list[socket.socket]]:
        """Returns the connections to the next process and from the previous one: (data, watch, chords) of each."""
        self._cancel = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, asyncio.current_task().cancel)
        if self._cancelled:
            raise asyncio.CancelledError
        try:
            async with asyncio.timeout(timeout), asyncio.TaskGroup() as group:
                doors = [group.create_task(self._open(sock)) for sock in self._listening]
                goers = [group.create_task(self._go(purpose)) for purpose in self._purposes]
                await self._all_accepted.wait()
                await asyncio.wait(goers)
                for door in doors:
                    door.cancel()
        except BaseException as error:
            for sock in (*self._opened.values(), *self._accepted.values()):
                sock.close()
            if isinstance(error, TimeoutError):
                raise TimeoutError(self._missing()) from None
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        finally:
            for task in self._handshakes:
                task.cancel()
            await asyncio.gather(*self._handshakes, return_exceptions=True)
        return tuple([connections[i] for i in sorted(connections)] for connections in (self._opened, self._accepted))

    def cancel(self) -> None:
        """Cancels it, from another thread."""
        self._cancelled = True
        if self._cancel is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._cancel()

    def _is_same_host(self, other: int) -> bool:
        return sys.platform == "linux" and self._addresses[other][0] == self._addresses[self._rank][0]

    def _missing(self) -> str:
        if self._refused is not None:
            rank, generation = self._refused
            return (
                f"worker {rank} came with generation {generation} of the ring and was refused, as this is "
                f"generation {self._generation}"
            )
        for purpose in self._purposes:
            if purpose not in self._accepted:
                return f"timeout: worker {self._peer(purpose, -1)} did not connect"
        missing = next((purpose for purpose in self._purposes if purpose not in self._opened), _DATA)
        return f"timeout: worker {self._peer(missing, 1)} did not answer"

    def _peer(self, purpose: int, way: int) -> int:
        """Returns the rank of the member to which (way 1), or from which (way -1), a connection leads."""
        distance = 1 if purpose in _PURPOSES else 1 << (purpose - len(_PURPOSES) + 1)
        return (self._rank + way * distance) % len(self._addresses)

    def _proof(self, sender: int, hello: bytes, drawn: bytes) -> bytes:
        """Returns the proof that a process has the token, for this hello and this random number only."""
        return hmac.digest(self._token, struct.pack("<I", sender) + hello + drawn, "sha256")

    async def _go(self, purpose: int) -> None:
        """Connects to the next member, or to one further on."""
        loop, peer = asyncio.get_running_loop(), self._peer(purpose, 1)
        host, port = self._addresses[peer]
        local, missed = self._is_same_host(peer), 0
        while True:
            sock = socket.socket(socket.AF_UNIX if local else _family(host))
            try:
                sock.setblocking(False)
                await loop.sock_connect(sock, _local_name(port, self._token) if local else (host, port))
                if local and not liveness.is_same_user(sock):
                    raise ConnectionRefusedError("another user's process listens there")
                if not local:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    await self._introduce(sock, purpose)
                    self._opened[purpose] = sock
                    return
                except _HungUpError:  # too many connected at once
                    sock.close()
            except ConnectionRefusedError:  # the peer does not listen yet
                sock.close()
                if local and await self._answers(host, port, purpose):
                    missed += 1
                    local = missed < _MISSES  # the peer is in another network namespace
            except BaseException:
                sock.close()
                raise
            await asyncio.sleep(_AGAIN_INTERVAL)

    async def _answers(self, host: str, port: int, purpose: int) -> bool:
        """Returns whether the next member listens already, as it answers at its port.

        Raises:
            ConnectionAbortedError: It does not have the token, so that its local socket has another name.
        """
        with socket.socket(_family(host)) as sock:
            sock.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(sock, (host, port))
                await self._ask_for_proof(sock, purpose)
            except (ConnectionRefusedError, _HungUpError):
                return False
            return True

    async def _introduce(self, sock: socket.socket, purpose: int) -> None:
        await _send(sock, await self._ask_for_proof(sock, purpose))
        await _receive(sock, len(_WELCOME))

    async def _ask_for_proof(self, sock: socket.socket, purpose: int) -> bytes:
        """Returns this member's proof for the next one, after that one has proved that it has the token."""
        hello = _HELLO.pack(_MAGIC, self._rank, purpose, self._generation, secrets.token_bytes(TOKEN_BYTES))
        await _send(sock, hello)
        drawn, proof = await _receive(sock, TOKEN_BYTES), await _receive(sock, _PROOF_BYTES)
        peer = self._peer(purpose, 1)
        if not hmac.compare_digest(proof, self._proof(peer, hello, drawn)):
            host, port = self._addresses[peer]
            raise ConnectionAbortedError(f"what answers at {host}:{port} does not know the token of this ring")
        return self._proof(self._rank, hello, drawn)

    async def _open(self, listening: socket.socket) -> None:
        """Accepts all connections, and verifies them concurrently."""
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(listening)
            task = loop.create_task(self._ask(sock))
            self._handshakes[task] = None
            task.add_done_callback(self._handshakes.pop)
            if len(self._handshakes) > _STRANGERS:
                next(iter(self._handshakes)).cancel()
            await asyncio.sleep(0)  # lets other tasks run during a flood of connections

    async def _ask(self, sock: socket.socket) -> None:
        try:
            if is_local(sock) and not liveness.is_same_user(sock):
                return
            async with asyncio.timeout(timeouts.get().ring_stranger):
                hello = await _receive(sock, _HELLO.size)
                magic, rank, purpose, generation, _ = _HELLO.unpack(hello)
                if magic != _MAGIC or purpose not in self._purposes or rank != self._peer(purpose, -1):
                    return
                drawn = secrets.token_bytes(TOKEN_BYTES)
                await _send(sock, drawn + self._proof(self._rank, hello, drawn))
                if not hmac.compare_digest(await _receive(sock, _PROOF_BYTES), self._proof(rank, hello, drawn)):
                    return
                if generation != self._generation:  # only now is the sender verified
                    self._refused = rank, generation
                    return
                await _send(sock, _WELCOME)
            self._accepted.setdefault(purpose, sock)
        except OSError:  # a stranger that closed the connection, or sent too little in time
            return
        finally:
            if sock not in self._accepted.values():
                sock.close()
        if len(self._accepted) == len(self._purposes):
            self._all_accepted.set()


class _HungUpError(OSError):
    """Raised if the other end closes the connection before it is used."""


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _local_name(port: int, token: bytes) -> str:
    """Returns the name of a Unix socket in Linux's abstract namespace: no file, gone with the process.

    It is as unique as the port. Only a process with the token can bind it before the ring does.
    """
    mark = hmac.digest(token, struct.pack("<I", port), "sha256").hex()[:32]
    return f"\0raytf/ring/{port}/{mark}"


async def _send(sock: socket.socket, message: bytes) -> None:
    try:
        await asyncio.get_running_loop().sock_sendall(sock, message)
    except OSError as error:
        raise _HungUpError(str(error)) from error


async def _receive(sock: socket.socket, count: int) -> bytes:
    """Returns exactly `count` bytes."""
    received = b""
    while len(received) < count:
        try:
            chunk = await asyncio.get_running_loop().sock_recv(sock, count - len(received))
        except OSError as error:
            raise _HungUpError(str(error)) from error
        if not chunk:
            raise _HungUpError("it closed the connection")
        received += chunk
    return received
