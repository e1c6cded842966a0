"""The process that writes snapshots: it takes them from shared memory, and outlives whoever handed them over.

python -m raytf.storage.snapshot_writer SOCKET BUFFER...      # descriptors, from `snapshots.SnapshotWriter`

It imports neither TensorFlow nor Keras nor Ray, unless the storage's file system is a class of those. A request is a
message of a few bytes; what is to be written lies in one of the buffers, complete when the message comes. So what was
handed over is written even if the other side is killed in the next moment. When the other side has gone, what is left
is tried for `Timeouts.writer_alone` seconds, in which it had a processor, and for the time of its bytes, and then this
process ends however far it is. What is only held is written if the other side goes without a word.
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
from raytf.storage import finishing, priority, scattered
from raytf.storage.snapshot_store import SnapshotStore, Written

_LONGEST_MESSAGE = 1 << 16
_FIRST_WAIT, _LONGEST_WAIT, _HURRIED_WAIT = 0.5, 60.0, 1.0


class _Server:
    """Takes requests and does one after the other, always the newest; before it, unless it failed, one that is pinned.

    Args:
        control: the socket to the other side; its end says that the other side has gone.
        buffers: descriptors of shared memory.
        store: where to write.
        niceness: of this process while it goes last.
    """

    def __init__(self, control: socket.socket, buffers: list[int], store: SnapshotStore, niceness: int):
        self._control, self._buffers, self._store, self._niceness = control, buffers, store, niceness
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._waiting: list[dict] = []
        self._held: dict | None = None  # to be written only if the other side goes
        self._gone = self._hurried = False
        self._yields = False  # the other side waits for the place of one that is not pinned
        self._begun = 0  # the id of the request that was claimed last
        self._pinned = 0  # of the one that no newer one makes needless
        self._failed = 0  # of the one that was tried last, and failed
        self._prunes = False  # who writes parts of others' leaves that to them

    def left(self) -> int:
        """Bytes left to be written, now that the other side has gone; asked by another thread."""
        held = self._held
        return sum(request["size"] for request in [*self._waiting, *([held] if held else [])])

    def run(self) -> None:
        """Works until the other side has gone and nothing is left."""
        self._tell({"event": "ready", "pid": os.getpid(), "niceness": self._niceness})
        while self._waiting or not self._gone:
            self._take(None if not self._waiting else 0.0)
            if self._waiting:
                self._write_newest()
        with contextlib.suppress(Exception):
            if self._prunes:
                self._store.prune()  # the training may have ended with a checkpoint of an epoch

    def _take(self, seconds: float | None) -> bool:
        """Takes all requests that came, and waits so long for the first; whether one came."""
        found = woken = False
        until = None if seconds is None else time.monotonic() + seconds
        while not self._gone:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not self._poll.poll(0.0 if found or woken else left if left is None else 1e3 * left):
                break
            try:
                message = self._control.recv(_LONGEST_MESSAGE)
            except ConnectionResetError:
                message = b""
            if not message:
                self._gone = self._hurried = True
                return self._promote() or found
            request = json.loads(message)
            if "id" in request:
                found = self._received(request) or found
            elif "yield" in request:
                self._hurried = woken = self._yields = True
            elif "unpin" in request:
                found, self._pinned = True, 0
            elif "release" in request:
                self._held = None
            else:
                self._hurried = woken = True
                found = ("promote" in request and self._promote()) or found
        return found

    def _received(self, request: dict) -> bool:
        """Takes a request, which makes one that is held needless; whether it is to be written now."""
        self._store.fails += request["fails"]
        self._held = request if request.get("held") else None
        if self._held is None:
            self._waiting.append(request)
            self._pinned = request["id"] if request.get("pinned") else self._pinned
        return self._held is None

    def _promote(self) -> bool:
        """Has what is held written; whether there is such a one."""
        held = self._held
        if held is not None:
            self._waiting.append(held)  # before it is taken away there: another thread asks what is `left`
            self._held = None
        return held is not None

    def _claim(self) -> dict:
        """The request to be tried next; those before the newest are dropped, but for one that is pinned.

        It says that it begins, and then looks for a newer one. The other side hands over a newer one, and then looks
        what has begun, before it takes back a buffer. So one of the two sees the other: no buffer is read and filled.
        """
        while True:
            self._take(0.0)
            newest = self._waiting[-1]["id"]
            needless = [request for request in self._waiting if request["id"] not in (newest, self._pinned)]
            for request in needless:
                self._tell({"event": "dropped", "id": request["id"]})
                self._waiting.remove(request)
            request = self._next()
            if request["id"] == self._begun:
                return request
            self._begun = request["id"]
            self._tell({"event": "begun", "id": self._begun})
            if not self._take(0.0) or request["id"] == self._pinned:
                return request

    def _next(self) -> dict:
        """What is pinned, if it did not just fail; once the other side has gone time may be short: the newest."""
        if self._gone:
            return self._waiting[-1]
        return next((request for request in self._waiting if request["id"] != self._failed), self._waiting[-1])

    def _write_newest(self) -> None:
        """Writes the newest request; where that fails again and again, or what is newer then, until one is written."""
        wait = _FIRST_WAIT
        while True:
            request = self._claim()
            try:
                written = self._write(request)
            except Exception as error:  # every kind of file system has its own
                why, self._failed = f"{type(error).__name__}: {str(error).strip()[:500]}", request["id"]
                self._tell({"event": "failed", "id": request["id"], "why": why}, lossy=True)
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
                self._hurried = self._gone or (self._hurried and bool(self._waiting))
                self._tell({"event": "written", "id": request["id"], "cpu": time.process_time(), **written})
                return

    def _is_yielded(self, request: dict) -> bool:
        """Gives up one that failed and is not pinned, where the other side needs its place for another one."""
        self._take(0.0)
        if not self._yields or self._gone or request["id"] == self._pinned:
            return False
        self._yields = False
        self._waiting.remove(request)
        self._tell({"event": "dropped", "id": request["id"]})
        return True

    def _pause(self, seconds: float) -> None:
        """Between two tries, however many requests come; short once the other side waits for the last, or has gone."""
        began = time.monotonic()
        while (left := began + min(seconds, _HURRIED_WAIT if self._hurried else seconds) - time.monotonic()) > 0:
            if self._gone:
                time.sleep(left)
            else:
                self._take(left)

    def _write(self, request: dict) -> dict:
        began = time.monotonic()
        with _mapped(self._buffers[request["buffer"]], request["size"]) as memory:
            head = json.loads(bytes(memory[request["at"] : request["size"]]))
            files = {part["file"]: pieces(part, memory) for part in head["parts"]}
            if head["index"] is not None:
                ((file, content),) = files.items()
                written = Written(self._store.put_part(head["name"], file, head["index"], content))
            else:
                written = self._store.put(head["name"], files, head["writers"])
                self._prunes = True
        try:
            removed, why = self._store.prune() if self._prunes else [], None
        except Exception as error:  # the snapshot is kept all the same, and the next one looks again
            removed, why = [], f"{type(error).__name__}: {str(error).strip()[:500]}"
        seconds = time.monotonic() - began
        told = {"name": head["name"], "seconds": seconds, "removed": removed, "unremoved": why}
        return {**told, **dataclasses.asdict(written)}

    def _tell(self, event: dict, lossy: bool = False) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, *([BlockingIOError] if lossy else [])):
            self._control.send(json.dumps(event).encode(), socket.MSG_DONTWAIT if lossy else 0)


def pieces(part: dict, memory: memoryview) -> list:
    """The pieces of a file from shared memory.

    Args:
        part: "file": its name; and "at", "size" of its content, or "arrays": [key, dtype, shape, at] of each in an npz,
            or "members": [name, at, size] of each in a zip.
        memory: the buffer.
    """
    if "arrays" in part:
        return scattered.arrays(
            {key: np.ndarray(shape, np.dtype(kind), memory, at).view() for key, kind, shape, at in part["arrays"]}
        )
    if "members" in part:
        return scattered.archive([(name, memory[at : at + size]) for name, at, size in part["members"]])
    return [memory[part["at"] : part["at"] + part["size"]]]


@contextlib.contextmanager
def _mapped(buffer: int, size: int):
    """The first bytes of a buffer. What was made of it is let go when it is closed with the process."""
    mapped = mmap.mmap(buffer, size, prot=mmap.PROT_READ)
    try:
        yield memoryview(mapped)
    finally:
        with contextlib.suppress(BufferError):  # an error's traceback still holds a view; it is unmapped with that
            mapped.close()


def _end_with_the_other_side(control: socket.socket, left: Callable[[], int], note: finishing.Note) -> None:
    """Ends this process some time after the other side has gone, whatever it waits for; notes at once what is left."""

    def watch():
        poll = select.poll()
        poll.register(control, select.POLLHUP | select.POLLRDHUP)
        poll.poll()
        if size := left():
            threading.Thread(target=note.write, args=(size,), daemon=True).start()
        priority.share_alike(os.getpid())  # no training is left that it would hold up
        _stay(left)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _stay(left: Callable[[], int]) -> None:
    """Returns when the time is over for which this process goes on alone, with what is left to be written."""
    began, queued, most = time.monotonic(), _queued(), 0
    while True:
        its = timeouts.get()
        waited, most = min(_queued() - queued, its.writer_alone_at_most - its.writer_alone), max(most, left())
        seconds = began + timeouts.deadline(its.writer_alone, most) + waited - time.monotonic()
        if seconds <= 0:
            return
        time.sleep(seconds)


def _queued() -> float:
    """For how many seconds the thread that works was ready to run, and others had its processor; 0.0 if unknown."""
    try:
        return procfs.queued(os.getpid())
    except OSError:
        return 0.0


def main(arguments: list[str]) -> None:
    """Reads the settings from standard input, leaves the family of the process that started it, and works."""
    settings = pickle.loads(sys.stdin.buffer.read())  # of the process that started this one, not of a storage
    timeouts.put_in_force(settings["timeouts"])
    if os.fork():
        os._exit(0)  # who kills the children of a worker, as Ray does, does not find this one
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # its end is that of the other side
    if settings["cpus"] is not None:
        with contextlib.suppress(OSError):  # its cgroup has none of them any more
            os.sched_setaffinity(0, settings["cpus"])
    control = socket.socket(fileno=int(arguments[0]))
    filesystem, folder = pickle.loads(settings["filesystem"]), settings["folder"]
    store = SnapshotStore(filesystem, folder, settings["keep"])
    server = _Server(control, [int(a) for a in arguments[1:]], store, priority.go_last())
    note = finishing.Note(filesystem, folder)
    _end_with_the_other_side(control, server.left, note)
    server.run()
    note.remove()
    os._exit(0)  # threads of a file system are not waited for


if __name__ == "__main__":
    main(sys.argv[1:])
