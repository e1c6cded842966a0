"""A ring of sockets that sums arrays over processes: each sends to the next and receives from the previous one.

It implements the bandwidth-optimal ring all-reduce (Patarasuk and Yuan, 2009): every process sends 2 (n - 1) / n of the
array. Both halves, reduce-scatter and all-gather, form one stream: each piece is forwarded as soon as it is added. A
segment is summed along one path and then copied, so all processes end with the same bits. Between processes of one
host, sockets carry only counts if the array is in shared memory (`Ring.empty`). See docs/design/ring.md.

Over 500 lines: one class, whose ways of sending share the state of the message under way.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from raytf import activity, logs, timeouts
from raytf.collectives import scaled_float16, shared_memory
from raytf.collectives.failure_notifier import Cause, FailureNotifier, describe_error
from raytf.collectives.ring_links import Chord, Link, is_local
from raytf.errors import PeerLostError, RaytfError

logger = logs.get_logger(__name__)

# Bytes that are received before they are added: few enough for a core's cache.
_CHUNK = 1 << 18
_SENT_AT_ONCE = 1 << 20
# A neighbour of the same host reads larger arrays in shared memory; sending smaller ones is faster.
_READ_IN_PLACE = 1 << 17
# Bytes that a process sends in a trade, at most: few enough that round trips would cost more. Two processes send the
# same bytes in any way, and trade what fits into a core's cache.
_SMALL_GATHER_BYTES, _PAIR_BYTES = 32 << 10, 1 << 20
# Bytes that take as long to send as one hop.
_HOP_BYTES = 4 << 10
# Generation, exchange number, kind, number in its step and size: workers that disagree must not add arrays.
_HEADER = struct.Struct("<QQQQQ")
# Bits of an exchange's number in its step; the number of the call that makes it is to the left of them.
_CALL_BITS = 32
# Bytes that are ready in shared memory, or an array's offset in it; the largest value means that it is not there.
_COUNT = struct.Struct("<Q")
_NOT_SHARED = 2**64 - 1
_COUNTS_AT_ONCE = 64
_YES, _NO = b"\1", b"\0"
_ADD, _GATHER, _BROADCAST, _MESSAGE, _SMALL_GATHER, _SCATTER, _JOIN = range(7)
_NAMES = ("a sum", "a gathering", "a broadcast", "what is passed on", "a sum of parts with their weights")
_NAMES += ("a reduce-scatter", "an all-gather")
# Halves of a sum around the ring: (first, end).
_BOTH, _REDUCE, _COPY = (0, 2), (0, 1), (1, 2)
# Messages of a step, its checkpoint, the begin of an epoch and callbacks, see `recovery_client.state_version`.
_MOST_HELD = 4

# Gradients may overflow; loss scaling detects it afterwards.
ignoring_overflow = np.errstate(over="ignore", invalid="ignore")

_rings: weakref.WeakSet[Ring] = weakref.WeakSet()


def _abandon_rings() -> None:
    for ring in list(_rings):
        ring.abandon()


# `subprocess` and others that execute a program need only Python's close-on-exec
os.register_at_fork(after_in_child=_abandon_rings)


def connections() -> list[socket.socket]:
    """Returns the open connections to the neighbours of all rings of this process."""
    links = [link for connection in _rings for link in connection._links]
    chords = [chord for connection in _rings for chord in connection._chords]
    pairs = [*((link.data, link.watch) for link in links), *((chord.following, chord.previous) for chord in chords)]
    return [connection for pair in pairs for connection in pair if connection.fileno() >= 0]


class Ring:
    """One process's membership in the ring.

    Args:
        rank: Rank of this process, 0 <= rank < size.
        size: Number of processes, at least 2.
        following, previous: `Link` to the next process and from the previous one.
        timeout: Seconds that a sum waits for a live neighbour that sends nothing; None waits without limit.
        generation: Generation of the group, from 0; data of another generation is refused.
        chords: `Chord`s to the members 2, 4, 8, ... ranks further.

    Attributes:
        is_placeholder: Whether it only replaces a ring, see `recovery_client.PlaceholderRing`.
    """

    is_placeholder = False

    def __init__(
        self,
        rank: int,
        size: int,
        following: Link,
        previous: Link,
        timeout: float | None,
        generation: int = 0,
        chords: Sequence[Chord] = (),
    ):
        self.rank, self.size, self.timeout, self.generation = rank, size, timeout, generation
        self.peer_messages: tuple[tuple[int, bytes], ...] = ()  # last messages of the previous member
        self._links, self._chords = (following, previous), tuple(chords)
        self._next, self._previous = following.data, previous.data
        self._notifier = FailureNotifier(
            rank, generation, [((rank + 1) % size, following.watch), ((rank - 1) % size, previous.watch)]
        )
        weakref.finalize(self, self._notifier.close)
        _rings.add(self)
        self._sums = 0
        self._in_sum = False  # whether received bytes belong to a sum
        self.sent = 0  # number of bytes since the start
        self._lock = threading.Lock()
        self._unsent = memoryview(b"")
        self._polls: dict[tuple[bool, bool, bool, bool], select.poll] = {}
        self._memory: shared_memory.OwnMemory | None = None  # the next member reads it
        self._next_is_local, self._previous_is_local = is_local(self._next), is_local(self._previous)
        self._memory_lock, self._may_show = threading.Lock(), self._next_is_local
        self._peer_memory: shared_memory.PeerMemory | None = None
        self._showed = False  # whether neighbours have tried to share their memories
        self._lent: np.ndarray | None = None  # the other process of a pair may read it until its next exchange
        self._received = np.empty(_CHUNK, np.uint8)
        self._wide = np.empty((2, _CHUNK // 2), np.float32)

    def padded(self, items: int) -> int:
        """Returns the smallest number of items, at least `items`, that `all_reduce` can split into equal segments."""
        return -(-items // self.size) * self.size

    def empty(self, items: int, dtype: np.dtype) -> np.ndarray | None:
        """Returns a flat array in memory that the next process reads; None without such memory or if it is small."""
        if items * dtype.itemsize <= _READ_IN_PLACE:
            return None
        memory = self._own_memory()
        return None if memory is None else memory.empty(items, dtype)

    def _own_memory(self) -> shared_memory.OwnMemory | None:
        with self._memory_lock:
            if self._memory is None and self._may_show:
                try:
                    self._memory = shared_memory.OwnMemory()
                except OSError as error:
                    self._may_show = False
                    logger.warning(
                        f"workers of this host cannot share memory: {error}. They exchange through sockets, which is "
                        "slower, with equal results. Mend the cause for full speed"
                    )
            return self._memory

    def all_reduce(
        self, array: np.ndarray, sum_number: int = 0, fill: Callable[[int, int], None] | None = None
    ) -> np.ndarray:
        """All-reduces `array` by sum, in place; each worker calls it with the same sizes and in the same order.

        Args:
            array: Contiguous, one-dimensional, of any number type or `scaled_float16.BLOCK`. Its size is a multiple of
                the number of processes. Types of two bytes are added in float32, and rounded once for each process.
            sum_number: Number of this sum within its step, the same on all processes.
            fill: fill(begin, end) sets these items of `array`. It is called once for each item, just before its use,
                while its memory is in a core's cache. None if the items are set already.

        Returns:
            `array`, or another array if the next process may still read `array`.

        Raises:
            PeerLostError: A member of the ring left or is lost (its rank is `lost`), or `timeout` passed. The ring
                cannot be used afterwards.
            RaytfError: The neighbour sums something else, or is of another generation.
        """
        if self.uses_small_gather(array.nbytes):
            if fill is not None:
                fill(0, array.size)
            total = array
            if array.nbytes > _READ_IN_PLACE:  # the other one may read `array`
                # begins at a page where memory is shared: TensorFlow takes such an array without a copy
                shared = self.empty(array.size, array.dtype)
                total = np.empty_like(array) if shared is None else shared
            self._gather_small(
                _ADD,
                array.view(np.uint8),
                sum_number,
                lambda parts: self.sum_in_order([part.view(array.dtype) for part in parts], total),
            )
            return total
        return self._exchange_array(
            _ADD, array, sum_number, 2 * self._half(array), lambda ways: self._sum(array, fill, *ways, _BOTH)
        )

    def reduce_scatter(
        self, array: np.ndarray, sum_number: int = 0, fill: Callable[[int, int], None] | None = None
    ) -> np.ndarray:
        """Sums one of `size` segments of `array`, in place: number (rank + 1) % size. Others are undefined afterwards.

        It is the first half of `all_reduce`, with the same arguments, result, errors and bits.
        """
        return self._exchange_array(
            _SCATTER, array, sum_number, self._half(array), lambda ways: self._sum(array, fill, *ways, _REDUCE)
        )

    def all_gather(self, array: np.ndarray, sum_number: int = 0) -> np.ndarray:
        """Copies from each process the segment of `reduce_scatter`; the second half of `all_reduce`."""
        return self._exchange_array(
            _JOIN, array, sum_number, self._half(array), lambda ways: self._sum(array, None, *ways, _COPY)
        )

    def _half(self, array: np.ndarray) -> int:
        return (self.size - 1) * array.nbytes // self.size

    def uses_small_gather(self, size: int) -> bool:
        """Returns whether `size` bytes of each process are few enough for `all_gather_small`, which has fewer hops."""
        if self.size == 2:
            return size <= _PAIR_BYTES
        saved = 3 * (self.size - 1) if self._chords else 0  # hops that a trade saves
        return (self.size - 1) * size <= max(_SMALL_GATHER_BYTES, saved * _HOP_BYTES) and size <= _SMALL_GATHER_BYTES

    def all_gather_small(
        self, content: np.ndarray, use: Callable[[Sequence[np.ndarray]], None], sum_number: int = 0
    ) -> None:
        """Gathers the contents of all processes; each calls it with the same size and in the same order.

        Args:
            content: Bytes, few enough for `uses_small_gather`. With two processes of one host the other one reads them
                where they are if `empty` gave the array. Do not change them afterwards.
            use: use(contents by rank) is called once. Neither keep nor change these arrays.
            sum_number: Number of this exchange within its step, as for `all_reduce`.

        Raises:
            PeerLostError, RaytfError: As for `all_reduce`.
        """
        self._gather_small(_SMALL_GATHER, content, sum_number, use)

    def _gather_small(
        self, kind: int, content: np.ndarray, sum_number: int, use: Callable[[Sequence[np.ndarray]], None]
    ) -> None:
        if self.size == 2 and content.size > _READ_IN_PLACE:
            self._swap_large(kind, content, sum_number, use)
            return
        contents = np.empty((self.size, content.size), np.uint8)
        contents[self.rank] = content

        def exchange_chords() -> None:
            """Gathers in log2(n) hops (Bruck et al., 1997): each member sends all its bytes, twice as far each time."""
            parts = np.empty_like(contents)  # parts of this member and those before it
            parts[0] = content
            parts[1] = np.frombuffer(self._receive(content.size), np.uint8)
            self._flush()
            distance = 2
            for chord in self._chords:
                more = min(distance, self.size - distance)
                self._swap(chord, distance, parts[:more], parts[distance : distance + more])
                distance += more
            contents[(self.rank - np.arange(self.size)) % self.size] = parts

        def circulate() -> None:
            for phase in range(self.size - 1):
                if phase:
                    self._send(contents[(self.rank - phase) % self.size].tobytes())
                received = self._receive(content.size)
                contents[(self.rank - 1 - phase) % self.size] = np.frombuffer(received, np.uint8)
            self._flush()

        work = exchange_chords if self._chords else circulate
        self._exchange(kind, content.size, sum_number, (self.size - 1) * content.size, work, content.tobytes())
        use(contents)

    def _swap_large(
        self, kind: int, content: np.ndarray, sum_number: int, use: Callable[[Sequence[np.ndarray]], None]
    ) -> None:
        """Gathers the contents of two processes, which read each other's in shared memory if they are there.

        A content stays as it is until the other process begins its next exchange, and thus has read it.
        """
        begin = self._shared_offset(content)

        def swap() -> None:
            shows, other = self._memory_paths(begin, content.size)
            if shows:
                self._lent = content
            else:
                self._send(memoryview(content))
            if other is None:
                other = np.frombuffer(self._receive(content.size), np.uint8)
            self._flush()
            use((other, content) if self.rank else (content, other))

        self._exchange(kind, content.size, sum_number, content.size, swap, self._first_bytes(begin))

    def _swap(self, chord: Chord, distance: int, sent: np.ndarray, target: np.ndarray) -> None:
        """Sends bytes to the member `distance` ranks further, and fills `target` with bytes of the one before."""
        to_send, room = memoryview(sent.reshape(-1)), memoryview(target.reshape(-1))
        while to_send or room:
            moved = False
            if to_send:
                with contextlib.suppress(BlockingIOError):
                    to_send = to_send[self._attempt(distance, chord.following.send, to_send) :]
                    moved = True
            if room:
                with contextlib.suppress(BlockingIOError):
                    room = room[self._attempt(-distance, chord.previous.recv_into, room, receives=True) :]
                    moved = True
            if not moved:
                wanted = [(chord.following, select.POLLOUT)] if to_send else []
                wanted += [(chord.previous, select.POLLIN)] if room else []
                self._wait_for_descriptor(functools.partial(self._polling, wanted))

    def _attempt(self, distance: int, call: Callable, *arguments: Any, receives: bool = False) -> Any:
        """Returns the result of a call on a connection; its error is the loss of the member `distance` ranks further.

        With `receives`, no bytes are such an error, too.
        """
        try:
            result = call(*arguments)
            if receives and not result:
                raise ConnectionResetError("it closed its connection")
            return result
        except BlockingIOError:
            raise
        except OSError as error:
            raise _LostError((self.rank + distance) % self.size, error) from error

    def _polling(self, wanted: list[tuple[socket.socket, int]], watching: bool) -> select.poll:
        poll = select.poll()
        for source, events in [*wanted, *([(self._notifier, select.POLLIN)] if watching else [])]:
            poll.register(source, events)
        return poll

    @ignoring_overflow
    def sum_in_order(
        self, parts: Sequence[np.ndarray], target: np.ndarray, weights: Sequence[float] | None = None
    ) -> None:
        """Sums the parts of all processes in the order of `all_reduce` around the ring, with the same bits.

        Args:
            parts: Flat arrays by rank. With more than two processes each has fewer bytes than are added at once.
            target: Receives the sum; its size is a multiple of the number of processes.
            weights: Factors of the parts by rank, or None for 1. With the weight 0 a part counts as zeros, also NaN.
        """
        weights = weights or [1.0] * self.size
        if self.size == 2:  # either order gives the same bits
            items = _CHUNK // target.itemsize
            weighted = np.empty(min(items, target.size), target.dtype)
            for begin in range(0, target.size, items):
                piece = slice(begin, begin + items)
                total = target[piece]
                put_weighted(parts[0][piece], weights[0], total)
                put_weighted(parts[1][piece], weights[1], weighted[: total.size])
                self._accumulate(total, weighted[: total.size])
            return
        size, first = self.size, np.arange(self.size)
        segments = np.empty((size, target.size), target.dtype)
        for part, weight, copy in zip(parts, weights, segments, strict=True):
            put_weighted(part, weight, copy)
        segments = segments.reshape(size, size, -1)  # segments of each part
        total = segments[first, first]  # each segment begins with the member of its number
        for step in range(1, size):
            total_so_far = segments[(first + step) % size, first]
            self._accumulate(total_so_far.reshape(-1), total.reshape(-1))
            total = total_so_far
        target[:] = total.reshape(-1)

    def gather(self, array: np.ndarray, bounds: Sequence[int]) -> np.ndarray:
        """Fills `array` with the parts of all processes; each calls it with the same bounds and in the same order.

        Args:
            array: Contiguous bytes, which already contain the part of this process.
            bounds: Begin of each rank's part, and the end of the last.

        Returns:
            `array`, or a copy, as for `all_reduce`.

        Raises:
            PeerLostError, RaytfError: As for `all_reduce`.
        """
        size, rank = self.size, self.rank
        parts = [slice(*bounds[i : i + 2]) for i in range(size)]
        sends = [parts[(rank - i) % size] for i in range(size - 1)]
        receives = [parts[(rank - 1 - i) % size] for i in range(size - 1)]
        local_bytes = bounds[rank + 1] - bounds[rank]
        sent = sum(part.stop - part.start for part in sends)
        return self._exchange_array(
            _GATHER, array, 0, sent, lambda ways: self._forward_parts(array, sends, receives, local_bytes, *ways)
        )

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        """Copies `array` of rank 0 to all processes; each calls it with the same size and in the same order.

        Args:
            array: Contiguous bytes.

        Returns:
            `array`, or a copy, as for `all_reduce`.

        Raises:
            PeerLostError, RaytfError: As for `all_reduce`.
        """
        whole, first, last = [slice(0, array.size)], self.rank == 0, self.rank == self.size - 1
        sends, receives = [] if last else whole, [] if first else whole
        local_bytes, sent = array.size if first else 0, 0 if last else array.nbytes
        return self._exchange_array(
            _BROADCAST, array, 0, sent, lambda ways: self._forward_parts(array, sends, receives, local_bytes, *ways)
        )

    def _exchange_array(
        self, kind: int, array: np.ndarray, sum_number: int, sent: int, work: Callable[[_ReadInPlace], None]
    ) -> np.ndarray:
        """Exchanges an array that the next process may read in shared memory; returns the same as `all_reduce`."""
        large = array.nbytes > _READ_IN_PLACE
        begin = self._shared_offset(array) if large else None
        is_read = False

        def exchange() -> None:
            nonlocal is_read
            ways = self._memory_paths(begin, array.nbytes) if large else (False, None)
            work(ways)
            is_read = not self._have_read(*ways)

        self._exchange(kind, array.nbytes, sum_number, sent, exchange, self._first_bytes(begin) if large else b"")
        return array.copy() if is_read else array

    def _shared_offset(self, array: np.ndarray) -> int | None:
        """Returns the offset of an array in memory that the next process reads, or None if it is not there."""
        memory = self._memory
        return None if memory is None else memory.offset_of(array)

    def _first_bytes(self, begin: int | None) -> bytes:
        """Returns what precedes a large array: its offset in shared memory for a process of this host."""
        return _COUNT.pack(_NOT_SHARED if begin is None else begin) if self._next_is_local else b""

    def _exchange(
        self, kind: int, size: int, sum_number: int, sent: int, work: Callable[[], None], first: bytes = b""
    ) -> None:
        """Runs an exchange by `work`; `first` are the first bytes of it that this process sends."""
        sum_number |= activity.tracker.call << _CALL_BITS
        with self._lock:
            if self._next.fileno() < 0:
                raise self._broken()
            try:
                loss = self._notifier.loss
                if loss is not None:  # no member completes this sum without this one
                    raise _LostError(loss.lost, ConnectionResetError(loss.why))
                with activity.tracker.collective(activity.SUM):
                    self._agree(kind, size, sum_number, first)
                    self._in_sum = True
                    work()
                    self._in_sum = False
                self._sums += 1
                self.sent += _HEADER.size + sent
            except _LostError as error:
                raise self._lost(error) from error.error
            except BaseException as error:
                self._notifier.notify(Cause(self.rank, self.rank, f"failed: {type(error).__name__}: {error}"))
                self.close()
                if isinstance(error, OSError):
                    raise PeerLostError(self.rank, describe_error(error)) from error
                raise

    def _memory_paths(self, begin: int | None, count: int) -> _ReadInPlace:
        """Returns whether the next process reads this array in shared memory, and the previous one's array if readable.

        Args:
            begin: Offset in this process's shared memory, which the next process received; None if it is not there.
            count: Number of bytes of the array.
        """
        previous_begin = _COUNT.unpack(self._receive(_COUNT.size))[0] if self._previous_is_local else _NOT_SHARED
        if not self._showed:
            self._show_memories()
        shown = previous_begin != _NOT_SHARED and self._peer_memory is not None
        previous_bytes = self._peer_memory.read(previous_begin, count) if shown else None
        return begin is not None and self._memory is not None, previous_bytes

    def _show_memories(self) -> None:
        """Sends the descriptor of this process's memory to the next process, and maps the previous process's memory."""
        self._showed = True
        memory = self._own_memory()
        if self._next_is_local:
            self._flush()
            shown = [_NO] if memory is None else [_YES], [] if memory is None else [memory.descriptor]
            self._patiently(1, functools.partial(socket.send_fds, self._next, *shown), sending=True)
        if self._previous_is_local:
            receive_descriptors = functools.partial(socket.recv_fds, self._previous, 1, 1, socket.MSG_CMSG_CLOEXEC)
            data, descriptors, *_ = self._patiently(-1, receive_descriptors, receiving=True)
            if not data:
                raise _LostError((self.rank - 1) % self.size, ConnectionResetError("it closed its connection"))
            if data == _YES:
                # no descriptor came if this process may not open more files; the other process warns of it
                with contextlib.suppress(OSError, IndexError):
                    self._peer_memory = shared_memory.PeerMemory(descriptors[0])
                with contextlib.suppress(OSError):  # the next exchange detects the loss
                    self._previous.send(_NO if self._peer_memory is None else _YES)
        if memory is not None:
            memory.sent()
            if self._patiently(1, functools.partial(self._next.recv, 1), receives=True, answering=True) == _NO:
                self._memory, self._may_show = None, False
                logger.warning(
                    f"worker {(self.rank + 1) % self.size} cannot read the memory of others. Workers of this host "
                    "exchange through sockets, which is slower, with equal results"
                )

    def _have_read(self, shows: bool, neighbour: np.ndarray | None) -> bool:
        """Confirms the read of the previous process's array; returns whether the next process confirms its own."""
        if neighbour is not None:
            with contextlib.suppress(OSError):  # the neighbour does not need the answer any more
                self._previous.send(_YES)
        while shows:
            try:
                return bool(self._next.recv(1))
            except BlockingIOError:
                try:
                    self._wait(answering=True)
                except _LostError:  # the sum is complete here; the next exchange detects the loss
                    return False
            except OSError:
                return False
        return True

    def send_to_successor(self, number: int, content: bytes) -> None:
        """Sends the next member a message between two sums; its next sum adds it to its `peer_messages`.

        Args:
            number: Number of the message, 0 <= number < 2**64.
            content: At most 64 KiB, which a socket buffers at once, as the next member does not read yet.

        Raises:
            PeerLostError: As for `all_reduce`.
        """
        with self._lock:
            if self._next.fileno() < 0:
                raise self._broken()
            try:
                self._send(_HEADER.pack(self.generation, number, _MESSAGE, 0, len(content)) + content)
                self._flush()
            except _LostError as error:
                raise self._lost(error) from error.error

    def _broken(self) -> PeerLostError:
        cause = self._notifier.cause()
        lost = None if cause is None else cause.lost
        return PeerLostError(self.rank, f"the ring broke at an earlier sum: {cause}", lost)

    def _lost(self, error: _LostError) -> PeerLostError:
        """Leaves the ring after the loss of a member, and returns the error."""
        received_cause = self._notifier.cause(timeouts.get().ring_cause)  # a neighbour may have left for another loss
        why = received_cause.why if received_cause is not None else f"is lost: {describe_error(error.error)}"
        lost = received_cause.lost if received_cause is not None else error.lost
        cause = self._notifier.notify(Cause(lost, self.rank, why))  # its loss counts now even if it just left
        self._receive_peer_messages()
        self.close()
        has_left, call = received_cause is not None and received_cause.departed, activity.tracker.call
        peer_hint = f"; this worker is in {activity.CALLS[call]}, {_MIXED_CALLS}" if has_left and call else ""
        return PeerLostError(self.rank, f"{cause}{peer_hint}", cause.lost)

    def _receive_peer_messages(self) -> None:
        """Reads passed messages that are still in the socket if the previous member was lost between two sums."""
        if self._in_sum:
            return
        with contextlib.suppress(OSError):
            while len(head := self._previous.recv(_HEADER.size, socket.MSG_PEEK)) == _HEADER.size:
                generation, number, kind, _, length = _HEADER.unpack(head)
                if generation != self.generation or kind != _MESSAGE:
                    return
                content = self._previous.recv(_HEADER.size + length)
                if len(content) == _HEADER.size + length:
                    self._store_peer_message(number, content[_HEADER.size :])

    def _store_peer_message(self, number: int, content: bytes) -> None:
        others = [message for message in self.peer_messages if message[0] != number]
        self.peer_messages = (*others, (number, content))[-_MOST_HELD:]

    def close(self) -> None:
        """Leaves the ring; the sums of all others fail."""
        self._notifier.close()
        for connection in (*self._links, *self._chords):
            connection.close()
        self._memory = self._peer_memory = self._lent = None  # arrays in use keep the memory alive
        self._may_show = False

    def abandon(self) -> None:
        """Closes a fork's copies of the connections: an open copy would hide the member's own death from others."""
        self._lock = threading.Lock()
        self._notifier.abandon()
        for connection in (*self._links, *self._chords):
            connection.close()

    def _agree(self, own_kind: int, size: int, sum_number: int, first: bytes) -> None:
        header = _HEADER.pack(self.generation, self._sums, own_kind, sum_number, size)
        self._send(header + first)
        received = self._receive(_HEADER.size)
        generation, number, kind, _, length = _HEADER.unpack(received)
        while generation == self.generation and kind == _MESSAGE:
            self._store_peer_message(number, self._receive(length))
            received = self._receive(_HEADER.size)
            generation, number, kind, _, length = _HEADER.unpack(received)
        if received != header:
            generation, number, kind, index, length = _HEADER.unpack(received)
            if generation != self.generation:
                raise RaytfError(
                    f"All workers of a ring must be of one generation; worker {self.rank} is of generation "
                    f"{self.generation}, received: bytes of generation {generation} from worker "
                    f"{(self.rank - 1) % self.size}. They are refused: let all members join the newest ring."
                )
            previous, call, peer_call = (self.rank - 1) % self.size, sum_number >> _CALL_BITS, index >> _CALL_BITS
            sum_number, index = sum_number & (1 << _CALL_BITS) - 1, index & (1 << _CALL_BITS) - 1
            if call != peer_call:
                raise RaytfError(
                    f"All workers must be in the same call when they exchange something; worker {self.rank} is in "
                    f"{_called(call)}, received: worker {previous} in {_called(peer_call)}. "
                    f"These are calls {_MIXED_CALLS}."
                )
            raise RaytfError(
                f"All workers must sum the same sizes in the same order; worker {self.rank} is at exchange "
                f"{self._sums}, {_NAMES[own_kind]} of {size} bytes (optimizer call {sum_number} of its step), "
                f"received: worker "
                f"{(self.rank - 1) % self.size} at exchange {number}, {_named(kind)} of {length} bytes (call {index}). "
                "Build the same model on all workers, let each make the same steps, and where a condition "
                "decides whether an optimizer runs, base it on what all workers know alike, such as a count of steps."
            )
        self._lent = None

    def _send(self, message: bytes) -> None:
        """Sends as much as the socket accepts; `_receive` and `_flush` send the remaining bytes."""
        self._flush()
        self._unsent = memoryview(message)
        self._push()

    def _push(self) -> bool:
        """Sends as much of the unsent bytes as the socket accepts; returns whether it accepted any."""
        try:
            self._unsent = self._unsent[self._write(self._unsent) :]
        except BlockingIOError:
            return False
        return True

    def _flush(self) -> None:
        while self._unsent:
            if not self._push():
                self._wait(sending=True, receiving=False)

    def _receive(self, count: int) -> bytes:
        buffer = bytearray(count)
        count_received = 0
        while count_received < count:
            try:
                count_received += len(self._read(memoryview(buffer)[count_received:]))
            except BlockingIOError:
                # the others may all wait for the unsent bytes
                if not (self._unsent and self._push()):
                    self._wait(sending=bool(self._unsent), receiving=True)
        return buffer

    def _write(self, content: bytes | memoryview) -> int:
        return self._attempt(1, self._next.send, content)

    def _read(self, buffer: memoryview) -> memoryview:
        return buffer[: self._attempt(-1, self._previous.recv_into, buffer, receives=True)]

    def _patiently(self, step: int, call: Callable[[], Any], receives: bool = False, **wanted: bool) -> Any:
        """Returns the result of a call that involves the member `step` ranks further, once its socket is ready."""
        while True:
            try:
                return self._attempt(step, call, receives=receives)
            except BlockingIOError:
                self._wait(**wanted)

    def _announce_ready(self, count: int) -> int:
        """Sends that `count` more bytes are ready in shared memory."""
        message = _COUNT.pack(count)
        taken = self._write(message)
        if taken < len(message):
            self._send(message[taken:])
            self._flush()
        return count

    def _count_ready(self) -> int:
        """Receives how many more bytes are ready in the memory of the previous process."""
        message = self._read(memoryview(self._received)[: _COUNT.size * _COUNTS_AT_ONCE])
        missing = -len(message) % _COUNT.size
        if missing:
            message = bytes(message) + self._receive(missing)
        return sum(count for (count,) in _COUNT.iter_unpack(message))

    @ignoring_overflow
    def _sum(
        self,
        array: np.ndarray,
        fill: Callable[[int, int], None] | None,
        shows: bool,
        neighbour: np.ndarray | None,
        halves: tuple[int, int],
    ) -> None:
        self._flush()
        state = _AllReduceProgress(array, neighbour, fill, self.rank, self.size, self._accumulate, halves)
        send = functools.partial(self._show_part if shows else self._send_part, state)
        receive = functools.partial(self._receive_part if neighbour is None else self._read_part, state)
        while state.sent < state.total or state.received < state.total:
            moved = False
            for work, needed in ((send, state.sent < state.may_send), (receive, state.received < state.total)):
                if needed:
                    try:
                        work()
                        moved = True
                    except BlockingIOError:
                        pass
            if not moved:
                self._wait(sending=state.sent < state.may_send, receiving=state.received < state.total)

    def _send_part(self, way: _AllReduceProgress) -> None:
        part = way.next_to_send(_CHUNK if way.fills else _SENT_AT_ONCE)
        way.sent += self._write(way.bytes[part])

    def _show_part(self, way: _AllReduceProgress) -> None:
        part = way.next_to_send(_SENT_AT_ONCE)
        way.sent += self._announce_ready(part.stop - part.start)

    def _receive_part(self, way: _AllReduceProgress) -> None:
        phase, start, remaining = way.next_to_receive()
        if phase >= self.size - 1:  # the segment is a finished sum
            way.received += len(self._read(way.bytes[start : start + min(remaining, _SENT_AT_ONCE)]))
            return
        start, wanted = start - way.waiting, min(_CHUNK, remaining + way.waiting)
        count = len(self._read(memoryview(self._received)[way.waiting : wanted]))
        way.received, way.waiting = way.received + count, way.waiting + count
        if way.waiting == wanted:
            way.add(start, self._received[:wanted])
            way.waiting = 0

    def _read_part(self, way: _AllReduceProgress) -> None:
        phase, start, remaining = way.next_to_receive()
        adds = phase < self.size - 1
        wanted = min(remaining, _SENT_AT_ONCE) if adds else 1
        if way.reported - way.received < wanted:
            way.reported += self._count_ready()
        count = min(remaining, _SENT_AT_ONCE, way.reported - way.received)
        if count >= wanted:
            if adds:
                way.add(start, way.neighbour[start : start + count])
            else:
                way.bytes[start : start + count] = way.neighbour[start : start + count]
            way.received += count

    def _forward_parts(
        self,
        array: np.ndarray,
        sends: list[slice],
        receives: list[slice],
        local_bytes: int,
        shows: bool,
        neighbour: np.ndarray | None,
    ) -> None:
        """Sends parts while others are received; sends bytes after the first `local_bytes` only when received."""
        self._flush()
        bytes_ = memoryview(array.view(np.uint8))
        sending, receiving, ready = _Parts(bytes_, sends), _Parts(bytes_, receives), 0
        while sending.remaining or receiving.remaining:
            moved = False
            may_send = local_bytes + receiving.done - sending.done
            if sending.remaining and may_send > 0:
                with contextlib.suppress(BlockingIOError):
                    content = sending.now(min(may_send, _SENT_AT_ONCE))
                    sending.advance(self._announce_ready(len(content)) if shows else self._write(content))
                    moved = True
            if receiving.remaining:
                with contextlib.suppress(BlockingIOError):
                    if neighbour is None:
                        receiving.advance(len(self._read(receiving.now(_SENT_AT_ONCE))))
                    else:
                        if ready == receiving.done:
                            ready += self._count_ready()
                        target, start = receiving.now(min(ready - receiving.done, _SENT_AT_ONCE)), receiving.position
                        target[:] = neighbour[start : start + len(target)]
                        receiving.advance(len(target))
                    moved = True
            if not moved:
                self._wait(sending=bool(sending.remaining and may_send > 0), receiving=bool(receiving.remaining))

    def _accumulate(self, total: np.ndarray, received: np.ndarray) -> None:
        if total.dtype == scaled_float16.BLOCK:
            a, b = self._wide[:, : total.size * scaled_float16.ITEMS].reshape(2, total.size, -1)
            scaled_float16.decode(total, a)
            scaled_float16.decode(received, b)
            np.add(a, b, out=a)
            scaled_float16.encode(a, total)
            return
        if total.itemsize != 2:
            np.add(total, received, out=total)
            return
        a, b = self._wide[:, : total.size]
        a[...] = total
        b[...] = received
        np.add(a, b, out=a)
        total[...] = a

    def _wait(self, sending: bool = False, receiving: bool = False, answering: bool = False) -> None:
        """Blocks until a neighbour sends or accepts bytes or answers, as requested, or a member is lost."""
        self._wait_for_descriptor(functools.partial(self._poll, sending, answering, receiving))

    def _wait_for_descriptor(self, polling: Callable[[bool], select.poll]) -> None:
        """Blocks until a descriptor of `polling(whether it watches for a loss)` is ready."""
        milliseconds = None if self.timeout is None else self.timeout * 1000
        ready = [number for number, _ in polling(True).poll(milliseconds)]
        if not ready:
            raise TimeoutError(f"timeout after {self.timeout} s: a neighbour sent nothing")
        # data that still arrives counts first
        if ready == [self._notifier.fileno()] and not polling(False).poll(timeouts.get().ring_cause * 1000):
            cause = self._notifier.cause()
            raise _LostError(cause.lost, ConnectionResetError(cause.why))

    def _poll(self, *wanted: bool) -> select.poll:
        poll = self._polls.get(wanted)
        if poll is None:
            poll = self._polls[wanted] = select.poll()
            sending, answering, receiving, watching = wanted
            if sending or answering:
                poll.register(self._next, sending * select.POLLOUT | answering * select.POLLIN)
            for source, wants in ((self._previous, receiving), (self._notifier, watching)):
                if wants:
                    poll.register(source, select.POLLIN)
        return poll


def put_weighted(values: np.ndarray, weight: float, target: np.ndarray) -> None:
    """Computes target = weight * values; 0 for the weight 0, even if values are NaN."""
    if weight == 0:
        target[...] = 0
    elif weight == 1:
        target[...] = values
    elif target.dtype == values.dtype and values.dtype.itemsize > 2:
        np.multiply(values, values.dtype.type(weight), out=target)
    else:  # in pieces that stay in a core's cache
        kind = values.dtype if values.dtype.itemsize > 2 else np.dtype(np.float32)
        wide = np.empty(1 << 16, kind)
        for i in range(0, values.size, wide.size):
            piece = values[i : i + wide.size]
            weighted = wide[: piece.size]
            np.multiply(piece, kind.type(weight), out=weighted, dtype=kind)
            target[i : i + piece.size] = weighted


# Whether the next process reads the array in shared memory, and the previous process's array if this one does.
_ReadInPlace = tuple[bool, np.ndarray | None]


class _AllReduceProgress:
    """The progress of an array that is summed around the ring.

    Args:
        array, fill: As for `Ring.all_reduce`.
        neighbour: Bytes of the previous process's array, if they are read from shared memory.
        rank, size: As for `Ring`.
        accumulate: accumulate(mine, theirs) adds theirs to mine.
        halves: Halves to do: segments are added in the first one, and copied in the second.

    Attributes:
        total: Number of bytes sent and received at the end, counted from the first half.
        sent, received: Number of bytes done so far.
        waiting: Number of received bytes that are not added yet.
        reported: Number of bytes that the previous process reported as ready.
    """

    def __init__(
        self,
        array: np.ndarray,
        neighbour: np.ndarray | None,
        fill: Callable[[int, int], None] | None,
        rank: int,
        size: int,
        accumulate: Callable[[np.ndarray, np.ndarray], None],
        halves: tuple[int, int],
    ):
        self._array, self.neighbour, self._fill, self._accumulate = array, neighbour, fill, accumulate
        self._rank, self._size = rank, size
        self._flat = array.view(np.uint8)
        self.bytes = memoryview(self._flat)
        self._length = array.nbytes // size  # number of bytes of a segment
        begin, self.total = (half * (size - 1) * self._length for half in halves)
        self.sent = self.received = self.reported = begin
        self.waiting = 0
        self._filled = self._length if fill is None else 0  # bytes of the segment that is sent first

    @property
    def fills(self) -> bool:
        """Returns whether the next bytes to send may not be filled yet."""
        return self._filled < self._length

    @property
    def may_send(self) -> int:
        """Number of bytes that may be sent: a segment is forwarded as far as it was received and summed."""
        return min(self.total, self._length + self.received - self.waiting)

    def next_to_send(self, most: int) -> slice:
        """Returns the next filled bytes to send, at most `most`."""
        phase, offset = divmod(self.sent, self._length)
        start = (self._rank - phase) % self._size * self._length + offset
        end = start + min(self.may_send - self.sent, self._length - offset, most)
        if not phase and self.fills:
            if self._filled == offset:  # all filled bytes are sent
                self._fill_in(start, end)
                self._filled += end - start
            end = min(end, start - offset + self._filled)
        return slice(start, end)

    def next_to_receive(self) -> tuple[int, int, int]:
        """Returns (phase, begin, remaining bytes of its segment) of the next bytes to receive."""
        phase, offset = divmod(self.received, self._length)
        return phase, (self._rank - 1 - phase) % self._size * self._length + offset, self._length - offset

    def add(self, start: int, received: np.ndarray) -> None:
        """Adds bytes of another process's array at `start`."""
        for begin in range(0, len(received), _CHUNK):
            end = min(begin + _CHUNK, len(received))
            self._fill_in(start + begin, start + end)
            target = self._flat[start + begin : start + end]
            self._accumulate(target.view(self._array.dtype), received[begin:end].view(self._array.dtype))

    def _fill_in(self, start: int, end: int) -> None:
        if self._fill is not None:
            for begin in range(start, end, _CHUNK):
                size = self._array.itemsize
                self._fill(begin // size, min(begin + _CHUNK, end) // size)


class _Parts:
    """Parts of a memory, processed in order.

    Attributes:
        remaining, done: Number of bytes.
    """

    def __init__(self, memory: memoryview, parts: list[slice]):
        self._memory, self._parts, self._begun = memory, [p for p in parts if p.stop > p.start], 0
        self.remaining, self.done = sum(p.stop - p.start for p in self._parts), 0

    @property
    def position(self) -> int:
        """Offset of the next bytes."""
        return self._parts[0].start + self._begun

    def now(self, most: int) -> memoryview:
        """Returns the next bytes, at most `most`."""
        return self._memory[self.position : min(self.position + most, self._parts[0].stop)]

    def advance(self, count: int) -> None:
        self.remaining, self.done, self._begun = self.remaining - count, self.done + count, self._begun + count
        if self.position == self._parts[0].stop:
            del self._parts[0]
            self._begun = 0


_MIXED_CALLS = "which all workers make, or none: let the chief alone use what model.evaluate() returns"


def _called(call: int) -> str:
    return activity.CALLS[call] or "none of fit and evaluate" if call < len(activity.CALLS) else "another call"


def _named(kind: int) -> str:
    return _NAMES[kind] if kind < len(_NAMES) else f"something unknown ({kind})"


class _LostError(Exception):
    """A member with which no sum can be finished, and the error that this process got."""

    def __init__(self, lost: int, error: OSError):
        super().__init__(lost, error)
        self.lost, self.error = lost, error
