"""TFRecord files on a path that all nodes see, which workers read and parse themselves.

Ray's tasks would have to import TensorFlow first, which takes longer than reading many files.
Needs no TensorFlow until rows are read.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyarrow import fs

from raytf.compat.ray_data import Read, last_operator
from raytf.data.gather import COPIED_BYTES
from raytf.data.records import Feature, Records
from raytf.data.stored import FIRST_ROWS, StoredDataset, names_of
from raytf.data.streamed import Part, StreamedDataset
from raytf.data.tfrecords import RecordSource

if TYPE_CHECKING:
    from raytf.data import examples


@dataclass(frozen=True)
class RecordBlocks(StoredDataset):
    """Files that are small enough to be kept in each worker; `refs` are their pieces.

    Args:
        features: Features to parse.
    """

    features: tuple[Feature, ...]

    def get(self) -> list[pa.Table]:
        from raytf.data import examples

        reader = examples.RecordReader(fs.LocalFileSystem())
        return [reader.table(piece, self.features, np.arange(piece.rows)) for piece in self.refs]

    def first(self) -> StoredDataset:
        rows = [min(count, FIRST_ROWS) for count in self.rows[:1]]
        return replace(self, refs=[replace(self.refs[i], rows=count) for i, count in enumerate(rows)], rows=rows)


@dataclass(frozen=True)
class RecordStream(StreamedDataset):
    """Files of which each worker parses its rows in every epoch.

    Args:
        records: The pieces.
        features: Features to parse.
    """

    records: Sequence[Records] = field(repr=False)
    features: tuple[Feature, ...]

    def first(self) -> StoredDataset:
        return RecordBlocks(list(self.records), list(self.rows), self.columns, self.features).first()


class RecordTables:
    """Reader of the rows of a `RecordStream`, which several threads may use."""

    def __init__(self, stream: RecordStream):
        self._stream, self._lock = stream, threading.Lock()
        self._unused: list[examples.RecordReader] = []

    @contextlib.contextmanager
    def _reader(self, piece: Records) -> Iterator[examples.RecordReader]:
        """Yields a reader for this thread alone: the one that is at this piece, if there is one."""
        from raytf.data import examples

        with self._lock:
            self._unused.sort(key=lambda reader: reader.is_at(piece))
            reader = self._unused.pop() if self._unused else examples.RecordReader(fs.LocalFileSystem())
        try:
            yield reader
        finally:
            with self._lock:
                self._unused.append(reader)

    def parts(self, pieces: np.ndarray, starts: np.ndarray, start: int, stop: int) -> list[Part]:
        """Returns the locations of the rows from stream position `start` to `stop`, in order.

        Args:
            pieces: The pieces in the order of the stream.
            starts: Stream position of the first row of each.
            start: First stream position.
            stop: Stream position after the last row.
        """
        parts = []
        for i in range(*np.searchsorted(starts, [start, stop], side="right") - [1, 0]):
            first = max(start, int(starts[i]))
            last = min(stop, int(starts[i]) + self._stream.rows[pieces[i]])
            if first < last:
                parts.append(Part(int(pieces[i]), first - int(starts[i]), last - first, ""))
        return parts

    def table(self, part: Part, rows: np.ndarray, names: Sequence[str]) -> pa.Table:
        """Returns the table of some rows of a part, ascending, and of some columns."""
        features = [feature for feature in self._stream.features if feature.name in names]
        piece = self._stream.records[part.block]
        with self._reader(piece) as reader:
            return reader.table(piece, features, part.first + rows)


def opened(dataset, specs: Mapping, small: bool) -> RecordBlocks | RecordStream | None:
    """Returns the files of a dataset for workers to read; None unless it is of local TFRecord files, unchanged.

    Args:
        dataset: A `ray.data.Dataset`.
        specs: Parsed columns to read, by role; an empty mapping reads all.
        small: Whether workers may keep small files.
    """
    operator = last_operator(dataset)
    source = operator.datasource if isinstance(operator, Read) else None
    if not isinstance(source, RecordSource) or not source.is_local:
        return None
    names = names_of(specs) or [feature.name for feature in source.features]
    features = tuple(feature for feature in source.features if feature.name in names)
    rows = [piece.rows for piece in source.records]
    if small and sum(piece.stop - piece.start for piece in source.records) <= COPIED_BYTES:
        return RecordBlocks(list(source.records), rows, names, features)
    return RecordStream(tuple(rows), names, source.records, features)
