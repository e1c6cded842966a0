"""Snapshots of a training, sent to a process that writes them: the training only copies its arrays.

Snapshots are in anonymous shared memory. A small one replaces one that waits. A large one has a single buffer, and is
left out while another is written. See docs/design/checkpoint-writer.md, and `SnapshotWriter` for an example.

Over 500 lines: one class, whose methods share the state of the writing process.
"""

from __future__ import annotations

import contextlib
import fcntl
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
import termios
import threading
import time
from collections.abc import Collection, Iterator, Mapping

from raytf import liveness, logs, procfs, timeouts
from raytf.errors import ConfigError, RaytfError
from raytf.storage import finishing, injected_faults, priority, snapshot_store
from raytf.storage.snapshot_buffers import Buffer, Part, SnapshotLayout, needs_of

logger = logs.get_logger(__name__)

_LONGEST_MESSAGE = 1 << 16
# Number of the last events that `written` keeps.
_MOST_EVENTS = 100
# One that is written, one that waits, one that is held, one that is pinned, one to fill, if all are small. Large
# snapshots have one buffer, and two if some are held: the previous one stays until the next is complete.
_BUFFERS = 5
_FEW_BYTES = 64 << 20
# Poll interval of a waiting thread for the closing of everything.
_POLL_INTERVAL = 0.2
# After this number of snapshots with missing parts, the chief writes alone.
_MOST_LATE_PARTS = 2


class NotWrittenError(RaytfError, OSError):
    """The last snapshot of a training could not be written in time.

    Args:
        name: Name of the snapshot.
        why: The last error of the storage, or the progress, as a clause.
    """

    def __init__(self, name: str, why: str):
        super().__init__(name, why)
        self.name, self.why = name, why

    def __str__(self) -> str:
        return f"the checkpoint {self.name} could not be saved: {self.why}"

    def __reduce__(self):
        return type(self), (self.name, self.why)


class BufferFullError(NotWrittenError):
    """A snapshot found no memory, as the storage has not written the buffered one in time."""


class _WriterProcess:
    """The process that writes.

    Args:
        pid: Its pid.
        niceness: Its niceness at low priority, see `priority`.
    """

    def __init__(self, pid: int, niceness: int):
        self._pid, self._niceness, self._last = pid, niceness, True
        self._seen = procfs.read_state(pid)

    def set_low_priority(self, last: bool) -> None:
        """Sets or ends its low priority; does nothing if it has ended, as its pid may be reused."""
        process = procfs.read_state(self._pid) if last != self._last else None
        if process is None or self._seen is None or process.started != self._seen.started:
            return
        self._last = last
        if last:
            priority.set_lowest_again(self._pid, self._niceness)
        else:
            priority.set_normal(self._pid)


class SnapshotWriter:
    """Sends snapshots to its own process, which writes them; for one thread of the chief.

    Other threads may wait in `finish`. In use:

        writer = SnapshotWriter(filesystem, "runs/one")
        writer.write("step_000000000100", {"state.json": text, "seeds.npz": {"0": seed}, "model.keras": archive})
        writer.write("step_000000000110", parts, in_memory=True)     # written only if this process dies

        number = writer.write("checkpoint_one", parts, pinned=True)     # no newer one replaces it
        writer.finish(60.0, number=number)     # it is whole, or NotWrittenError explains why not
        writer.close()

    Snapshots that were sent are written even if this process is killed. The other process ends after `close`, or when
    this process has gone, at the latest `Timeouts.orphan_writer_at_most` seconds later.

    Args:
        filesystem: A picklable `pyarrow.fs.FileSystem`.
        folder: The run's folder there; created if missing.
        keep: Number of mid-epoch snapshots to keep, at least 1; see `snapshot_store.removable`.
        cpus: CPUs of the other process; None: those of this one. Training is bound to some cores, which the other
            process should not use.

    Attributes:
        written: Reports on the last whole snapshots: "name", "bytes", "seconds", "cpu" (its processor seconds so far),
            "removed".
        skipped: Number of snapshots that newer ones replaced before they could be written.

    Raises:
        ConfigError: The file system cannot be sent to another process.
    """

    def __init__(self, filesystem, folder: str, keep: int = 2, cpus: Collection[int] | None = None):
        self.written: list[dict] = []
        self.skipped = 0
        self.pid: int | None = None
        self._process_state: _WriterProcess | None = None
        self._queued: dict[int, float] = {}  # seconds by process: the started one starts another one
        self._waits = 0  # threads of the training that wait for it
        self._unwritten = False  # whether a pinned one was not whole when the next one came
        self._folder = folder
        self._names: dict[int, str] = {}
        self._count = self._last = self._held_id = self._pinned = self._begun = 0
        self._lock, self._closing = threading.RLock(), False
        self._failed, self._writer_ended, self._late_count = "", False, 0
        self._holds = False  # whether some are held
        self._readied: threading.Thread | None = None
        self._logged: set[str] = set()
        options = {"folder": folder, "keep": max(1, keep), "cpus": cpus, "timeouts": timeouts.get()}
        settings = pickle.dumps({"filesystem": _pickled(filesystem), **options})
        self._buffers = [Buffer(number) for number in range(_BUFFERS)]
        self._control, self._errors = None, os.memfd_create("raytf_snapshot_errors")
        self._start(settings)

    def _start(self, settings: bytes) -> None:
        self._control, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)  # some 600 messages
        # the other process must import what this one can: a file system's class may be anywhere
        path = [str(pathlib.Path(__file__).parents[2]), *sys.path]
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1"}
        passed = [peer.fileno(), *(b.descriptor for b in self._buffers)]
        sign = _presence_socket(self._folder)
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
            peer.close()
            sign.close()
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:  # the first write reports its end
            pipe.write(settings)

    def write(
        self,
        name: str,
        parts: Mapping[str, Part],
        in_memory: bool = False,
        writers: int = 1,
        index: int | None = None,
        pinned: bool = False,
    ) -> int:
        """Copies a snapshot; the other process writes it, and adds the manifest.

        Args:
            name: Name of its folder in the run's.
            parts: Content by file name.
            in_memory: Whether to write it only if this process ends before the next comes, and does not `release` it.
            writers: Number of workers that write the archive together, see `sharded_write`.
            index: This worker's index, for one that writes only its `TemplatePart`.
            pinned: Whether newer ones do not replace it until it is written, or until `unpin`. It waits until the
                previous pinned one is written, unless the storage fails.

        Returns:
            Its number, for `finish` and `unpin`; 0 if it was left out.

        Raises:
            ConfigError: A name is not one of a folder in the run's.
            BufferFullError: It is pinned, and the storage has not written the previous one.
            NotWrittenError: The other process has ended.
        """
        snapshot_store.check_name(name)
        plan = SnapshotLayout(parts)
        plan.end(name=name, writers=writers, index=index)
        if self._readied is not None:
            self._readied.join()
            self._readied = None
        self._holds = self._holds or in_memory
        with self._lock:
            buffer = self._free_buffer(name, plan.needs, in_memory, pinned)
            if buffer is not None:
                return self._write(name, plan, buffer, in_memory, pinned)
        return self._wait_and_write(name, plan) if pinned else 0

    def ready(self, size: int, in_memory: bool = False) -> None:
        """Allocates memory for future snapshots in a thread, so that the first one takes as long as others.

        Args:
            size: Bytes of one.
            in_memory: Whether some will be held.
        """
        if self._count:
            return
        self._holds = self._holds or in_memory
        needs = needs_of(size)
        count = min(_BUFFERS - 2, max(1, self._memory_limit(needs) // needs)) if needs else 0
        for buffer in self._buffers[:count]:
            buffer.grow(needs)

        def touch() -> None:
            for buffer in self._buffers[:count]:
                buffer.touch()

        self._readied = threading.Thread(target=touch, daemon=True, name="raytf_snapshot_memory")
        self._readied.start()

    def _memory_limit(self, needs: int) -> int:
        """Returns the maximum total bytes of all buffers."""
        return max(_FEW_BYTES, (1 + self._holds) * needs)

    def _write(self, name: str, plan: SnapshotLayout, buffer: Buffer, in_memory: bool, pinned: bool) -> int:
        plan.fill(buffer)
        self._count += 1
        buffer.busy, previous_held = self._count, self._held_id
        busy = {candidate.busy for candidate in self._buffers}
        self._names = {number: snapshot_name for number, snapshot_name in self._names.items() if number in busy} | {
            self._count: name
        }
        if in_memory:
            self._held_id = self._count
        else:
            self._last, self._held_id = self._count, 0
            if pinned:
                self._unwritten = self._unwritten or self._is_busy(self._pinned)
                self._pinned = self._count
                self._update_priority()
        location = {"buffer": buffer.number, "at": plan.head_at, "size": plan.size}
        self._send(
            {
                "id": self._count,
                **location,
                "in_memory": in_memory,
                "pinned": pinned,
                "fails": injected_faults.take_faults(),
            }
        )
        if previous_held:
            self._end(previous_held)  # from here on the other side writes the new one if this process ends
        return self._count

    def release(self) -> None:
        """Discards the held snapshot: the training has ended."""
        with self._lock:
            if self._held_id:
                self._send({"release": True})
                self._end(self._held_id)
                self._held_id = 0

    def flush(self) -> None:
        """Requests that the held snapshot is written now."""
        with self._lock:
            if self._held_id:
                self._send({"promote": True})
                self._last, self._held_id = self._held_id, 0

    def unpin(self, number: int) -> None:
        """Allows newer snapshots to replace a pinned one."""
        with self._lock:
            if number == self._pinned and self._is_busy(number) and not self._writer_ended and not self._closing:
                self._pinned = 0
                self._send({"unpin": True})

    def finish(self, seconds: float, failing: float | None = None, number: int | None = None) -> None:
        """Blocks until a snapshot is whole.

        Args:
            seconds: Timeout.
            failing: Timeout if the storage has failed; None: the same as `seconds`.
            number: Number of a pinned snapshot; None: the last one.

        Raises:
            NotWrittenError: It is not whole.
        """
        with self._lock:
            wanted = self._last if number is None else number
            if not self._is_busy(wanted):
                return
            name = self._names[wanted]
            if not (self._writer_ended or self._closing):
                self._send({"flush": True})
        began = time.monotonic()
        while self._is_busy(wanted):
            longest = failing if failing is not None and self._failed else seconds
            remaining = began + longest - time.monotonic()
            if self._closing:
                raise NotWrittenError(name, self._failed or "the training has ended before its storage did")
            if self._writer_ended:
                raise NotWrittenError(name, self._exit_description())
            if remaining <= 0:
                raise NotWrittenError(
                    name, self._failed or f"timeout after {seconds:.0f} s: its storage did not finish"
                )
            self._drain(min(remaining, _POLL_INTERVAL))

    @contextlib.contextmanager
    def writer_priority(self) -> Iterator[None]:
        """Raises the other process's priority to normal while the training waits for it in the block."""
        self._count_waiters(1)
        try:
            yield
        finally:
            self._count_waiters(-1)

    def queued(self) -> float:
        """Returns the seconds in which the other process was runnable without a processor; from any thread."""
        pid = self.pid or self._process.pid
        with contextlib.suppress(OSError):  # it has ended
            self._queued[pid] = procfs.total_queued_seconds(pid)
        return sum(self._queued.values())

    def _count_waiters(self, more: int) -> None:
        with self._lock:
            self._waits += more
            self._update_priority()

    def _update_priority(self) -> None:
        """Sets the other process's priority; one that has not reported its pid gets it later."""
        if self._process_state is not None and not self._writer_ended:
            self._unwritten = self._unwritten and self._is_busy(self._pinned)
            self._process_state.set_low_priority(not (self._waits or self._unwritten))

    def _is_busy(self, number: int) -> bool:
        return any(buffer.busy == number for buffer in self._buffers)

    def close(self) -> None:
        """Ends the other process once it has written everything; waits some seconds for that."""
        with self._lock:
            if self._control is None:
                return
            self._closing = True
            self._control.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + timeouts.get().writer_end
            with contextlib.suppress(NotWrittenError):  # it ends now, and `finish` has reported what is not whole
                while not self._writer_ended and (remaining := deadline - time.monotonic()) > 0:
                    self._drain(remaining)
            self._control.close()
            self._control = None
            if self._readied is not None:
                self._readied.join()
            for buffer in self._buffers:
                buffer.close()
            os.close(self._errors)
            self._reap(0.0)

    def _free_buffer(self, name: str, needs: int, in_memory: bool, pinned: bool) -> Buffer | None:
        """Returns a buffer to fill: an empty one, or a snapshot that waits although a newer one does, too.

        None: there is no memory for it, and it is left out, or waits.
        """
        self._drain(0.0)
        if self._writer_ended:
            raise NotWrittenError(name, self._exit_description())
        if pinned and self._is_busy(self._pinned) and not self._failed:
            return None  # the other side protects only one of them from newer ones
        if self._has_backlog():
            if not pinned:
                self._skip_snapshot()
            return None
        free = sorted(
            (candidate for candidate in self._buffers if candidate.busy is None), key=lambda candidate: -candidate.size
        )
        # reserves no buffer for a held or a pinned snapshot if there is none
        spare = (not (in_memory or self._held_id)) + (not (pinned or self._is_busy(self._pinned)))
        free = free[: len(free) - spare]
        # the other side reports its start before it checks for newer ones, see `snapshot_writer`
        needed_ids = (None, self._begun, self._last, self._held_id, self._pinned)
        superseded = [candidate for candidate in self._buffers if candidate.busy not in needed_ids]
        chosen = next((candidate for candidate in [*free, *superseded] if self._has_room(candidate, needs)), None)
        if chosen is None and free:  # other empty buffers have the memory
            for candidate in self._buffers:
                if candidate.busy is None:
                    candidate.empty()
            chosen = next((candidate for candidate in free if self._has_room(candidate, needs)), None)
        if chosen is None and not pinned:
            self._skip_snapshot()
        elif chosen is not None and chosen.busy is not None:
            self._skip_snapshot(chosen.busy)
        return chosen

    def _has_backlog(self) -> bool:
        """Returns whether many messages are unread: the other side reads none while it writes, and `send` may block."""
        unread = int.from_bytes(fcntl.ioctl(self._control, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return 2 * unread > self._control.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    def _has_room(self, buffer: Buffer, needs: int) -> bool:
        if buffer.size >= needs:
            return True
        return sum(other_buffer.size for other_buffer in self._buffers) - buffer.size + needs <= self._memory_limit(
            needs
        )

    def _wait_and_write(self, name: str, plan: SnapshotLayout) -> int:
        """Writes a pinned snapshot once the other side has written the buffered one, or failed to."""
        began, is_requested = time.monotonic(), False
        with self.writer_priority():
            while True:
                with self._lock:
                    if (buffer := self._free_buffer(name, plan.needs, in_memory=False, pinned=True)) is not None:
                        return self._write(name, plan, buffer, in_memory=False, pinned=True)
                    if not is_requested:
                        self._send({"release_buffer": True})
                        is_requested = True
                current = timeouts.get()
                remaining = (
                    began
                    + (current.checkpoint_failing if self._failed else current.checkpoint_write)
                    - time.monotonic()
                )
                if remaining <= 0:
                    raise BufferFullError(name, self._failed or "timeout: its storage has not finished the one before")
                self._drain(min(remaining, _POLL_INTERVAL))

    def _skip_snapshot(self, number: int | None = None) -> None:
        self._names.pop(number, None)
        self.skipped += 1
        if not self._failed:  # else the failure was already reported
            text = f"The storage of {self._folder!r} is slower than checkpoints come: some are skipped"
            self._log("left out", f"{text}. Raise the interval of checkpoint_every")

    def _send(self, message: dict) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            self._drain(0.0)
            raise NotWrittenError(self._names.get(self._count, "of the last steps"), self._exit_description()) from None

    def _drain(self, seconds: float) -> None:
        """Handles the other side's messages, and waits `seconds` for the first."""
        control = self._control
        while not self._writer_ended and control is not None and control.fileno() >= 0:
            poll = select.poll()
            poll.register(control, select.POLLIN)
            if not poll.poll(1e3 * seconds):
                return
            with self._lock:
                if self._control is None or self._writer_ended or not self._handle_next():
                    return
            seconds = 0.0

    def _handle_next(self) -> bool:
        """Handles a message, unless another thread has. Returns whether there may be more."""
        try:
            text = self._control.recv(_LONGEST_MESSAGE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            text = b""
        if text:
            self._handle(json.loads(text))
            return True
        self._writer_ended = True
        busy = [buffer.busy for buffer in self._buffers if buffer.busy is not None]
        if busy:
            raise NotWrittenError(self._names[max(busy)], self._exit_description())
        return False

    def _handle(self, event: dict) -> None:
        kind = event.pop("event")
        if kind == "ready":
            self.pid = event["pid"]
            self._process_state = _WriterProcess(event["pid"], event["niceness"])
            self._update_priority()
            self._reap(timeouts.get().writer_end)  # the intermediate process, which has ended
            return
        number = event["id"]
        name = self._names.get(number)
        if kind == "begun":
            self._begun = number
        elif kind == "failed":
            self._failed = event["why"]
            self._log(
                event["why"],
                f"The checkpoint {name} could not be written: {event['why']}. It is retried, and training continues. "
                "Free space on the storage, or mend it",
            )
        elif name is not None:  # else it was left out before the other side received that
            self._end(number)
            self._update_priority()
            if kind == "dropped":
                self._skip_snapshot(number)
            else:
                self._failed = ""
                self._handle_parts(name, event)
                self.written = [*self.written[1 - _MOST_EVENTS :], event]
                if event["unremoved"]:
                    why = event["unremoved"]
                    self._log(
                        why,
                        f"Checkpoints before {name} could not be removed, and stay: {why}. The next checkpoint "
                        "retries. Remove them by hand if that fails, too",
                    )

    def _handle_parts(self, name: str, event: dict) -> None:
        slow, unequal = event.get("late_workers", []), event.get("others", [])
        self._late_count = self._late_count + 1 if slow else 0
        if unequal:
            self._log(
                "others",
                f"Workers {unequal} have written other weights of {name} than the chief has: their models are no "
                "longer alike. The chief's are saved, and training continues. Find the callback or step that changes "
                "weights on one worker only",
            )
        elif slow:
            self._log(
                "late",
                f"Workers {slow} had not written their parts of {name} in time, and the chief has: they are slow, or "
                f"{self._folder!r} is not the same folder for all workers. The checkpoint is whole. Examine the "
                "storage: raytf doctor --storage PATH",
            )

    @property
    def failing(self) -> str:
        """The reason why the storage has not written the last snapshot, or "" if nothing has failed."""
        return self._failed

    @property
    def parts_are_missing(self) -> bool:
        """Returns whether others' parts were missing repeatedly."""
        return self._late_count >= _MOST_LATE_PARTS

    def _end(self, number: int) -> None:
        for buffer in self._buffers:
            if buffer.busy == number:
                buffer.busy = None

    def _log(self, cause: str, text: str) -> None:
        if cause not in self._logged:
            self._logged.add(cause)
            logger.warning(text)

    def _exit_description(self) -> str:
        self._reap(timeouts.get().writer_end)
        lines = os.pread(self._errors, 1 << 16, 0).decode(errors="replace").strip().splitlines()
        return f"the process that writes checkpoints has ended{': ' + lines[-1] if lines else ''}"

    def _reap(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return


def wait_for_writers(folder: str, seconds: float | None = None) -> bool:
    """Waits until no process of this host writes snapshots of a run. Returns whether that is so.

    Writers of a killed worker finish the snapshots that they received; a resumed run should see these.

    Args:
        folder: The run's folder on its storage.
        seconds: Timeout; None: the longest time of a writer alone, plus a margin.
    """
    seconds = _standalone_deadline() if seconds is None else seconds
    deadline = time.monotonic() + seconds
    for name in procfs.abstract_sockets(_prefix(folder)):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection.connect(name)  # no one accepts it: it ends with the other side
                if liveness.is_same_user(connection):  # else it is not a writer of this run
                    connection.recv(1)
            except TimeoutError:
                return False
            except OSError:  # it has ended; or it is a stranger's, with a full queue
                continue
    return True


def wait_for_all(filesystem, folder: str, seconds: float | None = None) -> bool:
    """Waits like `wait_for_writers`, and then for writers of other hosts whose workers have gone.

    Args:
        filesystem: A `pyarrow.fs.FileSystem`.
        folder: The run's folder there.
        seconds: Timeout of each wait, extended for writers of many bytes; see `wait_for_writers`.
    """
    seconds = (_standalone_deadline() if seconds is None else seconds) + finishing.seconds_more(filesystem, folder)
    local_done = wait_for_writers(folder, seconds)
    return finishing.wait_for_notes(filesystem, folder, seconds) and local_done


def _standalone_deadline() -> float:
    return timeouts.get().orphan_writer_at_most + 10.0


@contextlib.contextmanager
def no_writers(filesystem, folder: str) -> Iterator[None]:
    """Waits before and after the block for the processes that write a run's snapshots, see `wait_for_all`."""
    wait_for_all(filesystem, folder)
    try:
        yield
    finally:
        wait_for_all(filesystem, folder)


def _presence_socket(folder: str) -> socket.socket:
    """Returns a socket whose abstract name exists on this host while a process has it open, without a file."""
    made = socket.socket(socket.AF_UNIX)
    made.bind(f"\0{_prefix(folder)}{secrets.token_hex(8)}")
    made.listen()
    return made


def _prefix(folder: str) -> str:
    return f"raytf_snapshots_{hashlib.sha256(folder.rstrip('/').encode()).hexdigest()[:32]}_"


def _pickled(filesystem) -> bytes:
    """Pickles a file system for another process; a class of `__main__` is pickled by value."""
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
    """Returns the classes of a file system, its handler and the handler's file system."""
    handler = getattr(filesystem, "handler", None)
    return [type(filesystem), type(handler), type(getattr(handler, "fs", None))]
