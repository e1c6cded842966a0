"""Snapshots of a training, handed to a process that writes them: the training only copies its arrays.

    writer = SnapshotWriter(filesystem, "runs/one")
    writer.write("step_000000000100", {"state.json": text, "seeds.npz": {"0": seed}, "model.keras": archive})
    writer.finish(60.0)     # the last one is whole, or NotKeptError says why not
    writer.close()

Snapshots lie in buffers of shared memory, of which no name exists anywhere: one may be written while another is filled,
and where one waits meanwhile, a third is filled, which then takes its place. So where the storage is slower than the
snapshots come, the newest is kept, some are left out, and training does not wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import mmap
import os
import pathlib
import pickle
import secrets
import select
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from raytf.errors import ConfigError, RaytfError
from raytf.storage import snapshot_store
from raytf.storage.snapshot_store import MANIFEST
from raytf.storage.snapshot_writer import ORPHAN_SECONDS

_END_SECONDS = 5.0
_LONGEST_MESSAGE = 1 << 16
_ALIGNED = 64
# What belongs to a snapshot grows: histories, counters.
_ROOM = 1 << 20
# So many of the last ones are told.
_TOLD = 100
# One that is written, one that waits, one to fill.
_BUFFERS = 3


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


class Image:
    """The bytes of a file in which only arrays change, at fixed places: it lies in each buffer, and these are copied.

    Args:
        content: the file as it was made once.
        places: where each array lies, as (offset, bytes).
    """

    def __init__(self, content: bytes, places: Sequence[tuple[int, int]]):
        self.content, self.places = content, list(places)


@dataclasses.dataclass(frozen=True)
class Archive:
    """A zip file of members that are not packed.

    Args:
        members: (name, content) in order; content is bytes, or the `image`.
        image: the member whose arrays are `values`.
        values: an array for each of the image's places, of as many bytes.
    """

    members: Sequence[tuple[str, bytes | Image]]
    image: Image
    values: Sequence[np.ndarray]


# A file as it is, an `.npz` of arrays by name, or a zip.
Part = bytes | str | Mapping[str, np.ndarray] | Archive


class _Buffer:
    """Shared memory without a name; it is gone with the last process that has it open."""

    def __init__(self, number: int):
        self.number = number
        self.descriptor = os.memfd_create("raytf_snapshot")
        self.size = 0
        self.busy: int | None = None  # the request that lies in it
        self.image: Image | None = None  # what lies at its beginning
        self._map: mmap.mmap | None = None
        self.memory = np.empty(0, np.uint8)

    def grow(self, size: int) -> None:
        """Makes it so large, and has the pages ready; what was in it is lost where it was smaller."""
        if size <= self.size:
            return
        self._unmap()
        size = size + size // 4 + _ROOM
        os.ftruncate(self.descriptor, size)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._map, self.size, self.image = mmap.mmap(self.descriptor, size, flags=flags), size, None
        self.memory = np.frombuffer(self._map, np.uint8)

    def lay(self, image: Image | None) -> None:
        """Has an image at the beginning, as it was made."""
        if image is not None and self.image is not image:
            self.put(0, image.content)
        self.image = image

    def put(self, at: int, content) -> None:
        found = np.frombuffer(content, np.uint8)
        self.memory[at : at + len(found)] = found

    def put_array(self, at: int, value: np.ndarray) -> None:
        flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        self.memory[at : at + len(flat)] = flat

    def _unmap(self) -> None:
        self.memory = np.empty(0, np.uint8)
        if self._map is not None:
            self._map.close()
            self._map = None

    def close(self) -> None:
        self._unmap()
        os.close(self.descriptor)


class _Plan:
    """What goes where in a buffer: an image first, then everything else."""

    def __init__(self, parts: Mapping[str, Part]):
        images = [part.image for part in parts.values() if isinstance(part, Archive)]
        if len(images) > 1:
            raise ConfigError("A snapshot has one file with an image", f"{len(images)}", "Write the others as bytes")
        self.image = images[0] if images else None
        self.size = len(self.image.content) if self.image else 0
        self.texts: list[tuple[int, bytes]] = []
        self.values: list[tuple[int, np.ndarray]] = []
        self.head = [self._part(file, part) for file, part in parts.items()]

    def _part(self, file: str, part: Part) -> dict:
        snapshot_store.check_name(file)
        if file == MANIFEST:
            raise ConfigError("The manifest of a snapshot is written by its writer", file, "Leave it out")
        if isinstance(part, Archive):
            sizes = [(at, size) for at, size in part.image.places]
            if [value.nbytes for value in part.values] != [size for _, size in sizes]:
                raise ValueError(f"the arrays of {file} are not those of its image")
            self.values += [(at, value) for (at, _), value in zip(sizes, part.values, strict=True)]
            return {"file": file, "members": [[name, *self._member(content)] for name, content in part.members]}
        if isinstance(part, Mapping):
            return {"file": file, "arrays": [self._array(key, np.asarray(value)) for key, value in part.items()]}
        return {"file": file, **dict(zip(("at", "size"), self._member(part), strict=True))}

    def _member(self, content) -> tuple[int, int]:
        if isinstance(content, Image):
            return 0, len(content.content)
        content = content.encode() if isinstance(content, str) else content
        at = self._room(len(content))
        self.texts.append((at, content))
        return at, len(content)

    def _array(self, key: str, value: np.ndarray) -> list:
        if value.dtype.hasobject:
            raise ConfigError("Arrays of a snapshot hold numbers", f"{key!r} of Python objects", "Store them as texts")
        at = self._room(value.nbytes)
        self.values.append((at, value))
        return [key, _kind(value.dtype), value.shape, at]

    def _room(self, size: int) -> int:
        at = -(-self.size // _ALIGNED) * _ALIGNED
        self.size = at + size
        return at

    def fill(self, buffer: _Buffer, name: str) -> tuple[int, int]:
        """Copies everything; (where its description begins, where that ends)."""
        head = json.dumps({"name": name, "parts": self.head}).encode()
        at = self._room(len(head))
        buffer.grow(self.size)
        buffer.lay(self.image)
        for place, value in self.values:
            buffer.put_array(place, value)
        for place, content in [*self.texts, (at, head)]:
            buffer.put(place, content)
        return at, self.size


def _kind(dtype: np.dtype) -> str:
    """A dtype as a text; of those that are not numpy's, as bfloat16, what `numpy.savez` makes of them."""
    return np.lib.format.dtype_to_descr(dtype) if dtype.isbuiltin == 1 else f"|V{dtype.itemsize}"


class SnapshotWriter:
    """Hands snapshots to a process of its own, which writes them; for one thread of the chief.

    What was handed over is written even when this process is killed. The other one ends when this one closes it or is
    gone, at the latest `snapshot_writer.ORPHAN_SECONDS` later.

    Args:
        filesystem: a `pyarrow.fs.FileSystem` that can be pickled.
        folder: of the run there; it is made if there is none.
        keep: how many snapshots within epochs stay, at least 1; see `snapshot_store.needless`.

    Attributes:
        written: what the other side said of the last snapshots that are whole: "name", "bytes", "seconds", "cpu" (its
            processor seconds so far), "removed".
        left_out: how many were, as newer ones came before they could be written.

    Raises:
        ConfigError: the file system cannot be handed to another process.
    """

    def __init__(self, filesystem, folder: str, keep: int = 2):
        self.written: list[dict] = []
        self.left_out = 0
        self.pid: int | None = None
        self._folder = folder
        self._names: dict[int, str] = {}
        self._last, self._begun, self._failed, self._gone = 0, 0, "", False
        self._said: set[str] = set()
        settings = pickle.dumps({"filesystem": _pickled(filesystem), "folder": folder, "keep": max(1, keep)})
        self._buffers = [_Buffer(number) for number in range(_BUFFERS)]
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

    def write(self, name: str, parts: Mapping[str, Part]) -> None:
        """Copies a snapshot; the other process writes it. Its manifest comes by itself.

        Args:
            name: of its folder in the run's.
            parts: by name of the file.

        Raises:
            ConfigError: a name is not one of a folder in the run's.
            NotKeptError: the other process has ended.
        """
        snapshot_store.check_name(name)
        plan = _Plan(parts)
        buffer = self._free(name)
        if not self._last:  # the first one makes another buffer ready, too
            self._buffers[1].grow(plan.size + _ROOM)
            self._buffers[1].lay(plan.image)
        at, size = plan.fill(buffer, name)
        self._last += 1
        buffer.busy = self._last
        busy = {one.busy for one in self._buffers}
        self._names = {number: its for number, its in self._names.items() if number in busy} | {self._last: name}
        self._send({"id": self._last, "buffer": buffer.number, "at": at, "size": size})

    def finish(self, seconds: float, failing: float | None = None) -> None:
        """Waits until the last snapshot is whole.

        Args:
            seconds: at most so long.
            failing: at most so long where the storage has failed; as for one that is slow unless it is given.

        Raises:
            NotKeptError: it is not.
        """
        if not self._last:
            return
        self._send({"hurry": True})
        began = time.monotonic()
        while any(buffer.busy == self._last for buffer in self._buffers):
            longest = failing if failing is not None and self._failed else seconds
            left = began + longest - time.monotonic()
            if left <= 0:
                why = self._failed or f"its storage did not end within {seconds:.0f} s"
                raise NotKeptError(self._names[self._last], why)
            self._drain(left if failing is None else min(left, failing))

    def close(self) -> None:
        """Lets the other process end, once it has written what it has; waits for that some seconds."""
        if self._control is None:
            return
        self._control.shutdown(socket.SHUT_WR)
        until = time.monotonic() + _END_SECONDS
        while not self._gone and (left := until - time.monotonic()) > 0:
            self._drain(left)
        self._control.close()
        self._control = None
        for buffer in self._buffers:
            buffer.close()
        os.close(self._errors)
        self._reap(0.0)

    def _free(self, name: str) -> _Buffer:
        """A buffer to fill: one in which nothing lies, or a snapshot that waits though a newer one does, too."""
        self._drain(0.0)
        if self._gone:
            raise NotKeptError(name, self._how_it_ended())
        free = [buffer for buffer in self._buffers if buffer.busy is None]
        # what has begun was told before the other side looks for newer ones, see `snapshot_writer`
        free += [buffer for buffer in self._buffers if buffer.busy not in (None, self._begun, self._last)]
        if free[0].busy is not None:
            self._leave_out(free[0].busy)
        return free[0]

    def _leave_out(self, number: int) -> None:
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
            raise NotKeptError(self._names[self._last], self._how_it_ended()) from None

    def _drain(self, seconds: float) -> None:
        """Takes what the other side said, and waits so long for the first."""
        while not self._gone and select.select([self._control], [], [], seconds)[0]:
            try:
                text = self._control.recv(_LONGEST_MESSAGE)
            except ConnectionResetError:
                text = b""
            if not text:
                self._gone = True
                busy = [buffer.busy for buffer in self._buffers if buffer.busy is not None]
                if busy:
                    raise NotKeptError(self._names[max(busy)], self._how_it_ended())
                return
            self._hear(json.loads(text))
            seconds = 0.0

    def _hear(self, event: dict) -> None:
        kind = event.pop("event")
        if kind == "ready":
            self.pid = event["pid"]
            self._reap(_END_SECONDS)  # the process between, which has ended
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
            if kind == "dropped":
                self._leave_out(number)
            else:
                self._failed = ""
                self.written = [*self.written[1 - _TOLD :], event]
                if event["unremoved"]:
                    self._say(event["unremoved"], f"Snapshots before {name} could not be removed: {event['unremoved']}")

    def _end(self, number: int) -> None:
        for buffer in self._buffers:
            if buffer.busy == number:
                buffer.busy = None

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warnings.warn(text, stacklevel=4)

    def _how_it_ended(self) -> str:
        self._reap(_END_SECONDS)
        said = os.pread(self._errors, 1 << 16, 0).decode(errors="replace").strip().splitlines()
        return f"the process that writes snapshots has ended{': ' + said[-1] if said else ''}"

    def _reap(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return


def wait_for_writers(folder: str, seconds: float = ORPHAN_SECONDS + 10.0) -> bool:
    """Waits until no process of this host writes snapshots of a run any more, and says whether that is so.

    Those of a worker that was killed finish what they were handed; a run that goes on should see it.

    Args:
        folder: of the run on its storage.
        seconds: at most so long.
    """
    until = time.monotonic() + seconds
    for name in _signs(folder):
        with contextlib.suppress(ConnectionError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(name)  # nobody takes it: it ends with the other side
            connection.settimeout(max(0.01, until - time.monotonic()))
            try:
                connection.recv(1)
            except TimeoutError:
                return False
    return True


@contextlib.contextmanager
def settled(folder: str) -> Iterator[None]:
    """Waits before and behind for the processes of this host that write snapshots of a run, see `wait_for_writers`."""
    wait_for_writers(folder)
    try:
        yield
    finally:
        wait_for_writers(folder)


def _sign(folder: str) -> socket.socket:
    """A socket with a name that is seen on this host as long as a process has it open; no file stands for it."""
    made = socket.socket(socket.AF_UNIX)
    made.bind(f"\0{_prefix(folder)}{secrets.token_hex(8)}")
    made.listen()
    return made


def _signs(folder: str) -> list[str]:
    """The names of the sockets of a run's writers."""
    try:
        with open("/proc/net/unix") as file:
            words = [line.split()[-1] for line in file if "@" in line]
    except FileNotFoundError:  # not Linux
        return []
    return [f"\0{word[1:]}" for word in dict.fromkeys(words) if word.startswith(f"@{_prefix(folder)}")]


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
