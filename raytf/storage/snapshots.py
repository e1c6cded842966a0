"""Snapshots of a training, handed to a process that writes them: the training only copies its arrays.

    writer = SnapshotWriter(filesystem, "runs/one")
    writer.write("step_000000000100", {"state.json": text, "seeds.npz": {"0": seed}, "model.keras": archive})
    writer.write("step_000000000110", parts, held=True)     # written only if this process dies
    number = writer.write("checkpoint_one", parts, pinned=True)     # no newer one takes its place
    writer.finish(60.0, number=number)     # it is whole, or NotKeptError says why not
    writer.close()

Snapshots lie in buffers of shared memory, of which no name exists anywhere. Small ones have several: one may be written
while another is filled, and where one waits meanwhile, a third is filled, which then takes its place. Of a large one
there is room for one alone, so that a checkpoint takes its own size of memory and no more; what comes while that is
written is left out, but for one that is pinned, which waits. So where the storage is slower than snapshots come, some
are left out, and training does not wait. Where some are held there is room for two.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import pickle
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping

from raytf import liveness, procfs, timeouts
from raytf.errors import ConfigError, RaytfError
from raytf.storage import finishing, planted, priority, snapshot_store
from raytf.storage.snapshot_buffers import Buffer, Part, SnapshotLayout, needs_of

_LONGEST_MESSAGE = 1 << 16
# So many of the last ones are told.
_TOLD = 100
# One that is written, one that waits, one that is held, one that is pinned, one to fill: as long as all of them have
# few bytes. Large snapshots have one buffer, and two where some are held: the one before stays until the next is there.
_BUFFERS = 5
_FEW_BYTES = 64 << 20
# Who waits looks so often whether all is being closed.
_LOOKS_INTERVAL = 0.2
# After so many with parts that did not come the chief writes alone.
_MOST_LATE = 2


class NotKeptError(RaytfError, OSError):
    """The last snapshot of a training could not be written in the time that there was.

    Args:
        name: of the snapshot.
        why: the last error of the storage, or how far it was, as a clause.
    """

    def __init__(self, name: str, why: str):
        super().__init__(name, why)
        self.name, self.why = name, why

    def __str__(self) -> str:
        return f"the snapshot {self.name} could not be kept: {self.why}"

    def __reduce__(self):
        return type(self), (self.name, self.why)


class NoRoomError(NotKeptError):
    """A snapshot found no memory, as the storage has not taken what lies there in the time that there was."""


class _Other:
    """The process that writes.

    Args:
        pid: its.
        niceness: with which it goes last, see `priority`.
    """

    def __init__(self, pid: int, niceness: int):
        self._pid, self._niceness, self._last = pid, niceness, True
        self._seen = procfs.look(pid)

    def goes_last(self, last: bool) -> None:
        """Says whether it is to; nothing if it is gone, and another one may have its number."""
        seen = procfs.look(self._pid) if last != self._last else None
        if seen is None or self._seen is None or seen.started != self._seen.started:
            return
        self._last = last
        if last:
            priority.go_last_again(self._pid, self._niceness)
        else:
            priority.share_alike(self._pid)


class SnapshotWriter:
    """Hands snapshots to a process of its own, which writes them; for one thread of the chief.

    Other threads may wait in `finish`.

    What was handed over is written even when this process is killed. The other one ends when this one closes it or is
    gone, at the latest `Timeouts.writer_alone_at_most` seconds later.

    Args:
        filesystem: a `pyarrow.fs.FileSystem` that can be pickled.
        folder: of the run there; it is made if there is none.
        keep: how many snapshots within epochs stay, at least 1; see `snapshot_store.needless`.
        cpus: on which the other process runs; None: on those of this one. What trains is bound to some cores, and the
            other process is not to take its time there.

    Attributes:
        written: what the other side said of the last snapshots that are whole: "name", "bytes", "seconds", "cpu" (its
            processor seconds so far), "removed".
        left_out: how many were, as newer ones came before they could be written.

    Raises:
        ConfigError: the file system cannot be handed to another process.
    """

    def __init__(self, filesystem, folder: str, keep: int = 2, cpus: Collection[int] | None = None):
        self.written: list[dict] = []
        self.left_out = 0
        self.pid: int | None = None
        self._other: _Other | None = None
        self._queued: dict[int, float] = {}  # seconds by process: the one that was started starts another one
        self._waits = 0  # threads of the training that wait for it
        self._behind = False  # whether a pinned one was not whole when the next one came
        self._folder = folder
        self._names: dict[int, str] = {}
        self._count = self._last = self._held = self._pinned = self._begun = 0
        self._lock, self._closing = threading.RLock(), False
        self._failed, self._gone, self._late = "", False, 0
        self._holds = False  # whether some are held
        self._readied: threading.Thread | None = None
        self._said: set[str] = set()
        given = {"folder": folder, "keep": max(1, keep), "cpus": cpus, "timeouts": timeouts.get()}
        settings = pickle.dumps({"filesystem": _pickled(filesystem), **given})
        self._buffers = [Buffer(number) for number in range(_BUFFERS)]
        self._control, self._errors = None, os.memfd_create("raytf_snapshot_errors")
        self._start(settings)

    def _start(self, settings: bytes) -> None:
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # what this process can import, the other one can: a class of a file system may be anywhere
        path = [str(pathlib.Path(__file__).parents[2]), *sys.path]
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1"}
        passed = [other.fileno(), *(b.descriptor for b in self._buffers)]
        sign = _sign(self._folder)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "raytf.storage.snapshot_writer", *map(str, passed)],
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=[*passed, sign.fileno()],
                start_new_session=True,
            )
        finally:
            other.close()
            sign.close()
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:  # its end is told by the first write
            pipe.write(settings)

    def write(
        self,
        name: str,
        parts: Mapping[str, Part],
        held: bool = False,
        writers: int = 1,
        index: int | None = None,
        pinned: bool = False,
    ) -> int:
        """Copies a snapshot; the other process writes it. Its manifest comes by itself.

        Args:
            name: of its folder in the run's.
            parts: by name of the file.
            held: it is written only if this process ends before the next one comes, and does not `release` it.
            writers: so many workers write the archive together, see `division`.
            index: this one's, for a worker that writes its `Piece` alone.
            pinned: newer ones do not make it needless, until it is written, or `unpin`. It waits until the pinned one
                before is written, but where the storage fails.

        Returns:
            Its number, for `finish` and `unpin`; 0 where it was left out.

        Raises:
            ConfigError: a name is not one of a folder in the run's.
            NoRoomError: it is pinned, and the storage has not taken the one before.
            NotKeptError: the other process has ended.
        """
        snapshot_store.check_name(name)
        plan = SnapshotLayout(parts)
        plan.end(name=name, writers=writers, index=index)
        if self._readied is not None:
            self._readied.join()
            self._readied = None
        self._holds = self._holds or held
        with self._lock:
            buffer = self._free(name, plan.needs, held, pinned)
            if buffer is not None:
                return self._write(name, plan, buffer, held, pinned)
        return self._wait_and_write(name, plan) if pinned else 0

    def ready(self, size: int, held: bool = False) -> None:
        """Has memory ready for snapshots to come, in a thread of its own: the first one then takes as long as others.

        Args:
            size: bytes of one.
            held: some are to be held.
        """
        if self._count:
            return
        self._holds = self._holds or held
        needs = needs_of(size)
        count = min(_BUFFERS - 2, max(1, self._most(needs) // needs)) if needs else 0
        for buffer in self._buffers[:count]:
            buffer.grow(needs)

        def touch() -> None:
            for buffer in self._buffers[:count]:
                buffer.touch()

        self._readied = threading.Thread(target=touch, daemon=True, name="raytf_snapshot_memory")
        self._readied.start()

    def _most(self, needs: int) -> int:
        """Bytes that all buffers may have."""
        return max(_FEW_BYTES, (1 + self._holds) * needs)

    def _write(self, name: str, plan: SnapshotLayout, buffer: Buffer, held: bool, pinned: bool) -> int:
        plan.fill(buffer)
        self._count += 1
        buffer.busy, before = self._count, self._held
        busy = {one.busy for one in self._buffers}
        self._names = {number: its for number, its in self._names.items() if number in busy} | {self._count: name}
        if held:
            self._held = self._count
        else:
            self._last, self._held = self._count, 0
            if pinned:
                self._behind = self._behind or self._is_busy(self._pinned)
                self._pinned = self._count
                self._weigh()
        where = {"buffer": buffer.number, "at": plan.head_at, "size": plan.size}
        self._send({"id": self._count, **where, "held": held, "pinned": pinned, "fails": planted.taken()})
        if before:
            self._end(before)  # from here on the new one is what the other side writes if this one ends
        return self._count

    def release(self) -> None:
        """Lets go of the one that is held: the training has come to its end."""
        with self._lock:
            if self._held:
                self._send({"release": True})
                self._end(self._held)
                self._held = 0

    def promote(self) -> None:
        """Has the one that is held written now."""
        with self._lock:
            if self._held:
                self._send({"promote": True})
                self._last, self._held = self._held, 0

    def unpin(self, number: int) -> None:
        """Lets newer ones take the place of one that is pinned."""
        with self._lock:
            if number == self._pinned and self._is_busy(number) and not self._gone and not self._closing:
                self._pinned = 0
                self._send({"unpin": True})

    def finish(self, seconds: float, failing: float | None = None, number: int | None = None) -> None:
        """Waits until a snapshot is whole.

        Args:
            seconds: at most so long.
            failing: at most so long where the storage has failed; as for one that is slow unless it is given.
            number: of one that is pinned; the last one if it is not given.

        Raises:
            NotKeptError: it is not.
        """
        with self._lock:
            wanted = self._last if number is None else number
            if not self._is_busy(wanted):
                return
            name = self._names[wanted]
            if not (self._gone or self._closing):
                self._send({"hurry": True})
        began = time.monotonic()
        while self._is_busy(wanted):
            longest = failing if failing is not None and self._failed else seconds
            left = began + longest - time.monotonic()
            if self._closing:
                raise NotKeptError(name, self._failed or "the training has ended before its storage did")
            if self._gone:
                raise NotKeptError(name, self._how_it_ended())
            if left <= 0:
                raise NotKeptError(name, self._failed or f"its storage did not end within {seconds:.0f} s")
            self._drain(min(left, _LOOKS_INTERVAL))

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """In the block the training waits for the other process, which has a processor as others have it meanwhile."""
        self._wait_one(1)
        try:
            yield
        finally:
            self._wait_one(-1)

    def queued(self) -> float:
        """For how many seconds the other process was ready to run, and others had the processor; from any thread."""
        pid = self.pid or self._process.pid
        with contextlib.suppress(OSError):  # it has ended
            self._queued[pid] = procfs.queued_in_all(pid)
        return sum(self._queued.values())

    def _wait_one(self, more: int) -> None:
        with self._lock:
            self._waits += more
            self._weigh()

    def _weigh(self) -> None:
        """Has the other process go last, or not; one that has not said who it is does so later."""
        if self._other is not None and not self._gone:
            self._behind = self._behind and self._is_busy(self._pinned)
            self._other.goes_last(not (self._waits or self._behind))

    def _is_busy(self, number: int) -> bool:
        return any(buffer.busy == number for buffer in self._buffers)

    def close(self) -> None:
        """Lets the other process end, once it has written what it has; waits for that some seconds."""
        with self._lock:
            if self._control is None:
                return
            self._closing = True
            self._control.shutdown(socket.SHUT_WR)
            until = time.monotonic() + timeouts.get().writer_end
            while not self._gone and (left := until - time.monotonic()) > 0:
                self._drain(left)
            self._control.close()
            self._control = None
            if self._readied is not None:
                self._readied.join()
            for buffer in self._buffers:
                buffer.close()
            os.close(self._errors)
            self._reap(0.0)

    def _free(self, name: str, needs: int, held: bool, pinned: bool) -> Buffer | None:
        """A buffer to fill: one in which nothing lies, or a snapshot that waits though a newer one does, too.

        None: there is no more memory for it, and it is left out, or waits.
        """
        self._drain(0.0)
        if self._gone:
            raise NotKeptError(name, self._how_it_ended())
        if pinned and self._is_busy(self._pinned) and not self._failed:
            return None  # the other side keeps one of them from newer ones
        free = sorted((one for one in self._buffers if one.busy is None), key=lambda one: -one.size)
        # one for what is held, and one for what is pinned, would take memory for nothing where there is none
        spare = (not (held or self._held)) + (not (pinned or self._is_busy(self._pinned)))
        free = free[: len(free) - spare]
        # what has begun was told before the other side looks for newer ones, see `snapshot_writer`
        kept = (None, self._begun, self._last, self._held, self._pinned)
        superseded = [one for one in self._buffers if one.busy not in kept]
        found = next((one for one in [*free, *superseded] if self._has_room(one, needs)), None)
        if found is None and free:  # others, in which nothing lies, have the memory
            for one in self._buffers:
                if one.busy is None:
                    one.empty()
            found = next((one for one in free if self._has_room(one, needs)), None)
        if found is None and not pinned:
            self._leave_out()
        elif found is not None and found.busy is not None:
            self._leave_out(found.busy)
        return found

    def _has_room(self, buffer: Buffer, needs: int) -> bool:
        if buffer.size >= needs:
            return True
        return sum(one.size for one in self._buffers) - buffer.size + needs <= self._most(needs)

    def _wait_and_write(self, name: str, plan: SnapshotLayout) -> int:
        """`_write` of one that is pinned, once the other side is done with what lies there, or could not write it."""
        began, asked = time.monotonic(), False
        with self.held_up():
            while True:
                with self._lock:
                    if (buffer := self._free(name, plan.needs, held=False, pinned=True)) is not None:
                        return self._write(name, plan, buffer, held=False, pinned=True)
                    if not asked:
                        self._send({"yield": True})
                        asked = True
                its = timeouts.get()
                left = began + (its.checkpoint_failing if self._failed else its.checkpoint_write) - time.monotonic()
                if left <= 0:
                    raise NoRoomError(name, self._failed or "its storage has not taken the one before")
                self._drain(min(left, _LOOKS_INTERVAL))

    def _leave_out(self, number: int | None = None) -> None:
        self._names.pop(number, None)
        self.left_out += 1
        if not self._failed:  # else that was said
            text = f"The storage of {self._folder!r} takes longer than snapshots come: some are left out"
            self._say("left out", f"{text}. Take them less often")

    def _send(self, message: dict) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            self._drain(0.0)
            raise NotKeptError(self._names.get(self._count, "of the last steps"), self._how_it_ended()) from None

    def _drain(self, seconds: float) -> None:
        """Takes what the other side said, and waits so long for the first."""
        control = self._control
        while not self._gone and control is not None and control.fileno() >= 0:
            poll = select.poll()
            poll.register(control, select.POLLIN)
            if not poll.poll(1e3 * seconds):
                return
            with self._lock:
                if self._control is None or self._gone or not self._hear_next():
                    return
            seconds = 0.0

    def _hear_next(self) -> bool:
        """Takes a message, unless another thread has; whether there may be more."""
        try:
            text = self._control.recv(_LONGEST_MESSAGE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            text = b""
        if text:
            self._hear(json.loads(text))
            return True
        self._gone = True
        busy = [buffer.busy for buffer in self._buffers if buffer.busy is not None]
        if busy:
            raise NotKeptError(self._names[max(busy)], self._how_it_ended())
        return False

    def _hear(self, event: dict) -> None:
        kind = event.pop("event")
        if kind == "ready":
            self.pid = event["pid"]
            self._other = _Other(event["pid"], event["niceness"])
            self._weigh()
            self._reap(timeouts.get().writer_end)  # the process between, which has ended
            return
        number = event["id"]
        name = self._names.get(number)
        if kind == "begun":
            self._begun = number
        elif kind == "failed":
            self._failed = event["why"]
            self._say(event["why"], f"The snapshot {name} could not be written, and is tried again: {event['why']}")
        elif name is not None:  # else it was left out before the other side knew
            self._end(number)
            self._weigh()
            if kind == "dropped":
                self._leave_out(number)
            else:
                self._failed = ""
                self._hear_of_parts(name, event)
                self.written = [*self.written[1 - _TOLD :], event]
                if event["unremoved"]:
                    self._say(event["unremoved"], f"Snapshots before {name} could not be removed: {event['unremoved']}")

    def _hear_of_parts(self, name: str, event: dict) -> None:
        late, others = event.get("late", []), event.get("others", [])
        self._late = self._late + 1 if late else 0
        if others:
            self._say(
                "others",
                f"Workers {others} have written other weights of {name} than the chief has, which are not used: their "
                "models are no longer alike",
            )
        elif late:
            self._say(
                "late",
                f"Workers {late} had not written their parts of {name} in time, and the chief has: they are slow, or "
                f"{self._folder!r} is not the same folder for all workers",
            )

    @property
    def failing(self) -> str:
        """Returns why the storage has not taken the last snapshot, or "" where nothing has failed."""
        return self._failed

    @property
    def alone(self) -> bool:
        """Whether others' parts did not come, time and again."""
        return self._late >= _MOST_LATE

    def _end(self, number: int) -> None:
        for buffer in self._buffers:
            if buffer.busy == number:
                buffer.busy = None

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warnings.warn(text, stacklevel=5)

    def _how_it_ended(self) -> str:
        self._reap(timeouts.get().writer_end)
        said = os.pread(self._errors, 1 << 16, 0).decode(errors="replace").strip().splitlines()
        return f"the process that writes snapshots has ended{': ' + said[-1] if said else ''}"

    def _reap(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return


def wait_for_writers(folder: str, seconds: float | None = None) -> bool:
    """Waits until no process of this host writes snapshots of a run any more, and says whether that is so.

    Those of a worker that was killed finish what they were handed; a run that goes on should see it.

    Args:
        folder: of the run on its storage.
        seconds: at most so long; None is as long as they may go on alone, and some more.
    """
    seconds = _ends_alone() if seconds is None else seconds
    until = time.monotonic() + seconds
    for name in procfs.abstract_sockets(_prefix(folder)):
        with contextlib.suppress(ConnectionError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(name)  # nobody takes it: it ends with the other side
            if not liveness.is_own_peer(connection):  # it writes nothing of this run
                continue
            connection.settimeout(max(0.01, until - time.monotonic()))
            try:
                connection.recv(1)
            except TimeoutError:
                return False
    return True


def wait_for_all(filesystem, folder: str, seconds: float | None = None) -> bool:
    """`wait_for_writers`, and then for those of other hosts, whose workers have gone.

    Args:
        filesystem: a `pyarrow.fs.FileSystem`.
        folder: of the run there.
        seconds: at most so long, each, and as much longer as those may take that write much; see `wait_for_writers`.
    """
    seconds = (_ends_alone() if seconds is None else seconds) + finishing.seconds_more(filesystem, folder)
    here = wait_for_writers(folder, seconds)
    return finishing.wait(filesystem, folder, seconds) and here


def _ends_alone() -> float:
    return timeouts.get().writer_alone_at_most + 10.0


@contextlib.contextmanager
def settled(filesystem, folder: str) -> Iterator[None]:
    """Waits before and behind for the processes that write snapshots of a run, see `wait_for_all`."""
    wait_for_all(filesystem, folder)
    try:
        yield
    finally:
        wait_for_all(filesystem, folder)


def _sign(folder: str) -> socket.socket:
    """A socket with a name that is seen on this host as long as a process has it open; no file stands for it."""
    made = socket.socket(socket.AF_UNIX)
    made.bind(f"\0{_prefix(folder)}{secrets.token_hex(8)}")
    made.listen()
    return made


def _prefix(folder: str) -> str:
    return f"raytf_snapshots_{hashlib.sha256(folder.rstrip('/').encode()).hexdigest()[:32]}_"


def _pickled(filesystem) -> bytes:
    """A file system for another process; a class of `__main__` travels by value."""
    try:
        if any(kind.__module__ == "__main__" for kind in _kinds(filesystem)):
            from ray import cloudpickle

            return cloudpickle.dumps(filesystem)
        return pickle.dumps(filesystem)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            "The file system of a run's storage must be one that can be pickled, as another process writes to it",
            f"a {type(filesystem).__name__} ({error})",
            "Give the classes that it is made of a __reduce__",
        ) from error


def _kinds(filesystem) -> list[type]:
    """The classes of a file system, of its handler and of what that holds."""
    handler = getattr(filesystem, "handler", None)
    return [type(filesystem), type(handler), type(getattr(handler, "fs", None))]
