"""The layout of a snapshot in shared memory, and that memory: see `snapshots`."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from raytf.errors import ConfigError
from raytf.storage import snapshot_store
from raytf.storage.file_template import FileTemplate, TemplatePart, ZipTemplate, flat_bytes
from raytf.storage.snapshot_store import MANIFEST

_ALIGNED = 64
# Extra bytes for the parts of a snapshot that grow: histories, counters.
_ROOM = 1 << 20

# Raw content, an `.npz` of arrays by name, a zip, or a template.
Part = bytes | str | Mapping[str, np.ndarray] | ZipTemplate | TemplatePart


def needs_of(size: int) -> int:
    """Returns the buffer size for a snapshot of `size` bytes, with room for parts that grow."""
    return size + min(_ROOM, size // 8)


class Buffer:
    """Anonymous shared memory; it is freed with the last process that has it open."""

    def __init__(self, number: int):
        self.number = number
        self.descriptor = os.memfd_create("raytf_snapshot")
        self.size = 0
        self.busy: int | None = None  # number of the request whose data it holds
        self.template: FileTemplate | None = None  # the template at its beginning
        self._map: mmap.mmap | None = None
        self.memory = np.empty(0, np.uint8)

    def grow(self, size: int) -> None:
        """Grows to `size` bytes; keeps the content."""
        if size <= self.size:
            return
        self._unmap()
        os.ftruncate(self.descriptor, size)
        self._map, self.size = mmap.mmap(self.descriptor, size), size
        with contextlib.suppress(OSError, AttributeError):  # huge pages of 2 MB are allocated and filled faster
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.memory = np.frombuffer(self._map, np.uint8)

    def touch(self) -> None:
        """Allocates the pages, without the interpreter's lock."""
        self.memory[:: mmap.PAGESIZE] = 0

    def write_template(self, template: FileTemplate | None) -> None:
        """Writes a template at the beginning, without its arrays."""
        if template is not None and self.template is not template:
            for offset, text in template.texts:
                self.put(offset, text)
        self.template = template

    def put(self, offset: int, content) -> None:
        data = np.frombuffer(content, np.uint8)
        self.memory[offset : offset + len(data)] = data

    def put_array(self, offset: int, value: np.ndarray) -> None:
        data = flat_bytes(value)
        self.memory[offset : offset + len(data)] = data

    def _unmap(self) -> None:
        self.memory = np.empty(0, np.uint8)
        if self._map is not None:
            self._map.close()
            self._map = None

    def empty(self) -> None:
        """Frees its memory."""
        self._unmap()
        self.size, self.template = 0, None
        os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        self._unmap()
        os.close(self.descriptor)


class SnapshotLayout:
    """Assigns offsets in a buffer: a template first, then all other parts."""

    def __init__(self, parts: Mapping[str, Part]):
        templates = [part.template for part in parts.values() if isinstance(part, (ZipTemplate, TemplatePart))]
        if len(templates) > 1:
            raise ConfigError(
                "A snapshot has one file with a template", f"{len(templates)}", "Write the others as bytes"
            )
        self.template = templates[0] if templates else None
        self.size = self.template.size if self.template else 0
        self.texts: list[tuple[int, bytes]] = []
        self.values: list[tuple[int, np.ndarray]] = []
        self.head = [self._part(file, part) for file, part in parts.items()]

    def _part(self, file: str, part: Part) -> dict:
        snapshot_store.check_name(file)
        if file == MANIFEST:
            raise ConfigError("The manifest of a snapshot is written by its writer", file, "Leave the manifest out")
        if isinstance(part, (ZipTemplate, TemplatePart)):
            regions = [(offset, size) for offset, size in part.template.regions]
            if [value.nbytes for value in part.values] != [size for _, size in regions]:
                raise ValueError(f"the arrays of {file} are not those of its template")
            self.values += [(offset, value) for (offset, _), value in zip(regions, part.values, strict=True)]
            if isinstance(part, TemplatePart):
                return {"file": file, "at": 0, "size": part.template.size}
            return {"file": file, "members": [[name, *self._member(content)] for name, content in part.members]}
        if isinstance(part, Mapping):
            return {"file": file, "arrays": [self._array(key, np.asarray(value)) for key, value in part.items()]}
        return {"file": file, **dict(zip(("at", "size"), self._member(part), strict=True))}

    def _member(self, content) -> tuple[int, int]:
        if isinstance(content, FileTemplate):
            return 0, content.size
        content = content.encode() if isinstance(content, str) else content
        offset = self._room(len(content))
        self.texts.append((offset, content))
        return offset, len(content)

    def _array(self, key: str, value: np.ndarray) -> list:
        if value.dtype.hasobject:
            raise ConfigError("Arrays of a snapshot hold numbers", f"{key!r} of Python objects", "Store them as texts")
        offset = self._room(value.nbytes)
        self.values.append((offset, value))
        return [key, _dtype_name(value.dtype), value.shape, offset]

    def _room(self, size: int) -> int:
        offset = -(-self.size // _ALIGNED) * _ALIGNED
        self.size = offset + size
        return offset

    def end(self, **fields: Any) -> None:
        """Adds the snapshot's description, which comes last."""
        head = json.dumps({"parts": self.head, **fields}).encode()
        self.head_at = self._room(len(head))
        self.texts.append((self.head_at, head))

    @property
    def needs(self) -> int:
        """The buffer size for the snapshot, with room for parts that grow."""
        return needs_of(self.size)

    def fill(self, buffer: Buffer) -> None:
        """Copies everything into the buffer."""
        if buffer.size < self.size:
            buffer.grow(self.needs)
        buffer.write_template(self.template)
        for offset, value in self.values:
            buffer.put_array(offset, value)
        for offset, content in self.texts:
            buffer.put(offset, content)


def _dtype_name(dtype: np.dtype) -> str:
    """Returns a dtype as text; for types that are not numpy's, such as bfloat16, `numpy.savez`'s representation."""
    return np.lib.format.dtype_to_descr(dtype) if dtype.isbuiltin == 1 else f"|V{dtype.itemsize}"
