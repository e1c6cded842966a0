"""The process that writes snapshots: it reads them from shared memory, and outlives the process that sends them.

    python -m raytf.storage.snapshot_writer SOCKET BUFFER...      # descriptors, from `snapshots.SnapshotWriter`

It imports neither TensorFlow nor Keras nor Ray, unless the storage's file system is a class of those. A request is a
message of a few bytes, sent when the data in its buffer is complete. So data is written even if the sender is killed
right after; held data only then. Limit: `Timeouts.orphan_writer` seconds with a processor, more for many bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from raytf import procfs, timeouts
from raytf.storage import finishing, gather_io, priority
from raytf.storage.snapshot_store import SnapshotStore, WriteResult

_LONGEST_MESSAGE = 1 << 16
_FIRST_WAIT, _LONGEST_WAIT, _HURRIED_WAIT = 0.5, 60.0, 1.0


class _WriteLoop:
    """Serves requests one by one, always the newest; a pinned one precedes it unless it has just failed.

    Args:
        control: The socket to the peer; its end means that the peer has gone.
        buffers: Descriptors of shared memory.
        store: The store to write to.
        niceness: Niceness of this process at low priority.
    """

    def __init__(self, control: socket.socket, buffers: list[int], store: SnapshotStore, niceness: int):
        self._control, self._buffers, self._store, self._niceness = control, buffers, store, niceness
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._waiting: list[dict] = []
        self._held_request: dict | None = None  # to be written only if the peer goes
        self._peer_gone = self._hurried = False
        self._yields = False  # the peer waits for the buffer of an unpinned one
        self._begun = 0  # id of the last claimed request
        self._pinned = 0  # id of the request that no newer one makes needless
        self._failed = 0  # id of the last tried request, if it failed
        self._prunes = False  # a writer of parts for others leaves pruning to them

    def unwritten(self) -> int:
        """Returns the bytes still to be written once the peer has gone; called by another thread."""
        held_request = self._held_request
        return sum(request["size"] for request in [*self._waiting, *([held_request] if held_request else [])])

    def run(self) -> None:
        """Serves requests until the peer has gone and nothing remains."""
        self._send({"event": "ready", "pid": os.getpid(), "niceness": self._niceness})
        while self._waiting or not self._peer_gone:
            self._take(None if not self._waiting else 0.0)
            if self._waiting:
                self._write_newest()
        with contextlib.suppress(Exception):
            if self._prunes:
                self._store.prune()  # the training may have ended with an epoch-end checkpoint

    def _take(self, seconds: float | None) -> bool:
        """Receives all pending requests, and waits `seconds` for the first. Returns whether one came."""
        received = woken = False
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._peer_gone:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._poll.poll(0.0 if received or woken else remaining if remaining is None else 1e3 * remaining):
                break
            try:
                message = self._control.recv(_LONGEST_MESSAGE)
            except ConnectionResetError:
                message = b""
            if not message:
                self._peer_gone = self._hurried = True
                return self._promote() or received
            request = json.loads(message)
            if "id" in request:
                received = self._received(request) or received
            elif "release_buffer" in request:
                self._hurried = woken = self._yields = True
            elif "unpin" in request:
                received, self._pinned = True, 0
            elif "release" in request:
                self._held_request = None
            else:
                self._hurried = woken = True
                received = ("promote" in request and self._promote()) or received
        return received

    def _received(self, request: dict) -> bool:
        """Records a request, which makes a held one needless. Returns whether to write it now."""
        self._store.fails += request["fails"]
        self._held_request = request if request.get("in_memory") else None
        if self._held_request is None:
            self._waiting.append(request)
            self._pinned = request["id"] if request.get("pinned") else self._pinned
        return self._held_request is None

    def _promote(self) -> bool:
        """Schedules the held request for writing. Returns whether there is one."""
        held_request = self._held_request
        if held_request is not None:
            self._waiting.append(held_request)  # before the removal: another thread reads `unwritten`
            self._held_request = None
        return held_request is not None

    def _claim(self) -> dict:
        """Returns the request to try next; drops those before the newest, except a pinned one.

        It reports the start, and then checks for a newer request. The peer sends a newer request, and then checks what
        has started before it takes back a buffer. So one of the two sees the other: no buffer is read and filled at
        once.
        """
        while True:
            self._take(0.0)
            newest = self._waiting[-1]["id"]
            needless = [request for request in self._waiting if request["id"] not in (newest, self._pinned)]
            for request in needless:
                self._send({"event": "dropped", "id": request["id"]})
                self._waiting.remove(request)
            request = self._next()
            if request["id"] == self._begun:
                return request
            self._begun = request["id"]
            self._send({"event": "begun", "id": self._begun})
            if not self._take(0.0) or request["id"] == self._pinned:
                return request

    def _next(self) -> dict:
        """Returns a pinned request unless it just failed; after the peer has gone the newest, as time may be short."""
        if self._peer_gone:
            return self._waiting[-1]
        return next((request for request in self._waiting if request["id"] != self._failed), self._waiting[-1])

    def _write_newest(self) -> None:
        """Writes the newest request, with retries; a newer one replaces it, until one is written."""
        wait = _FIRST_WAIT
        while True:
            request = self._claim()
            try:
                written = self._write(request)
            except Exception as error:  # every kind of file system has its own
                why, self._failed = f"{type(error).__name__}: {str(error).strip()[:500]}", request["id"]
                self._send({"event": "failed", "id": request["id"], "why": why}, lossy=True)
                with contextlib.suppress(Exception):
                    if self._prunes:
                        self._store.prune(keep=1)  # the disk may be full
                if self._is_yielded(request):
                    return
                self._pause(wait)
                if self._is_yielded(request):
                    return
                wait = min(_LONGEST_WAIT, 2 * wait)
            else:
                self._waiting.remove(request)
                self._failed, self._yields = 0, False
                self._pinned = 0 if request["id"] == self._pinned else self._pinned
                self._hurried = self._peer_gone or (self._hurried and bool(self._waiting))
                self._send({"event": "written", "id": request["id"], "cpu": time.process_time(), **written})
                return

    def _is_yielded(self, request: dict) -> bool:
        """Drops a failed unpinned request if the peer needs its buffer. Returns whether it did."""
        self._take(0.0)
        if not self._yields or self._peer_gone or request["id"] == self._pinned:
            return False
        self._yields = False
        self._waiting.remove(request)
        self._send({"event": "dropped", "id": request["id"]})
        return True

    def _pause(self, seconds: float) -> None:
        """Waits between two attempts, despite new requests; briefly once the peer waits for the last, or has gone."""
        began = time.monotonic()
        while (remaining := began + min(seconds, _HURRIED_WAIT if self._hurried else seconds) - time.monotonic()) > 0:
            if self._peer_gone:
                time.sleep(remaining)
            else:
                self._take(remaining)

    def _write(self, request: dict) -> dict:
        began = time.monotonic()
        with _mapped(self._buffers[request["buffer"]], request["size"]) as memory:
            head = json.loads(bytes(memory[request["at"] : request["size"]]))
            files = {part["file"]: mapped_pieces(part, memory) for part in head["parts"]}
            if head["index"] is not None:
                ((file, content),) = files.items()
                written = WriteResult(self._store.put_part(head["name"], file, head["index"], content))
            else:
                written = self._store.put(head["name"], files, head["writers"])
                self._prunes = True
        try:
            removed, why = self._store.prune() if self._prunes else [], None
        except Exception as error:  # the snapshot is kept all the same, and the next one retries
            removed, why = [], f"{type(error).__name__}: {str(error).strip()[:500]}"
        seconds = time.monotonic() - began
        event = {"name": head["name"], "seconds": seconds, "removed": removed, "unremoved": why}
        return {**event, **dataclasses.asdict(written)}

    def _send(self, event: dict, lossy: bool = False) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, *([BlockingIOError] if lossy else [])):
            self._control.send(json.dumps(event).encode(), socket.MSG_DONTWAIT if lossy else 0)


def mapped_pieces(part: dict, memory: memoryview) -> list:
    """Returns the pieces of a file from shared memory.

    Args:
        part: Dict with the name "file", and "at" and "size" of the content. An npz has "arrays" instead: [key, dtype,
            shape, at] of each. A zip has "members" instead: [name, at, size] of each.
        memory: The buffer.
    """
    if "arrays" in part:
        return gather_io.npz_pieces(
            {
                key: np.ndarray(shape, np.dtype(kind), memory, offset).view()
                for key, kind, shape, offset in part["arrays"]
            }
        )
    if "members" in part:
        return gather_io.zip_pieces([(name, memory[offset : offset + size]) for name, offset, size in part["members"]])
    return [memory[part["at"] : part["at"] + part["size"]]]


@contextlib.contextmanager
def _mapped(buffer: int, size: int):
    """Maps the first bytes of a buffer; remaining views of it keep it mapped."""
    mapped = mmap.mmap(buffer, size, prot=mmap.PROT_READ)
    try:
        yield memoryview(mapped)
    finally:
        with contextlib.suppress(BufferError):  # an error's traceback still holds a view; it is unmapped with that
            mapped.close()


def _exit_after_peer(control: socket.socket, unwritten: Callable[[], int], note: finishing.WriterNote) -> None:
    """Exits this process some time after the peer has gone, whatever blocks it; notes at once the remaining bytes."""

    def watch():
        poll = select.poll()
        poll.register(control, select.POLLHUP | select.POLLRDHUP)
        poll.poll()
        if size := unwritten():
            threading.Thread(target=note.write, args=(size,), daemon=True).start()
        priority.set_normal(os.getpid())  # no training is left that it would slow down
        _wait_as_orphan(unwritten)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _wait_as_orphan(unwritten: Callable[[], int]) -> None:
    """Blocks until the time that this process may run alone, with the remaining bytes, is over."""
    began, queued, most = time.monotonic(), _queued(), 0
    while True:
        current = timeouts.get()
        waited, most = (
            min(_queued() - queued, current.orphan_writer_at_most - current.orphan_writer),
            max(most, unwritten()),
        )
        seconds = began + timeouts.deadline(current.orphan_writer, most) + waited - time.monotonic()
        if seconds <= 0:
            return
        time.sleep(seconds)


def _queued() -> float:
    """Returns the seconds in which the working thread was runnable without a processor; 0.0 if unknown."""
    try:
        return procfs.queued_seconds(os.getpid())
    except OSError:
        return 0.0


def main(arguments: list[str]) -> None:
    """Reads the settings from standard input, detaches from the process that started it, and serves requests."""
    settings = pickle.loads(sys.stdin.buffer.read())  # of the process that started this one, not of a storage
    timeouts.set_current(settings["timeouts"])
    if os.fork():
        os._exit(0)  # a killer of a worker's children, such as Ray, does not find this one
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when its peer ends
    if settings["cpus"] is not None:
        with contextlib.suppress(OSError):  # its cgroup no longer has any of them
            os.sched_setaffinity(0, settings["cpus"])
    control = socket.socket(fileno=int(arguments[0]))
    filesystem, folder = pickle.loads(settings["filesystem"]), settings["folder"]
    store = SnapshotStore(filesystem, folder, settings["keep"])
    server = _WriteLoop(control, [int(a) for a in arguments[1:]], store, priority.set_lowest())
    note = finishing.WriterNote(filesystem, folder)
    _exit_after_peer(control, server.unwritten, note)
    server.run()
    note.remove()
    os._exit(0)  # does not wait for threads of a file system


if __name__ == "__main__":
    main(sys.argv[1:])
