"""The rows of an epoch, chunk by chunk: out of the object store, wherever they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import ray

from raytf.blocks import Blocks, as_table
from raytf.columns import Columns
from raytf.order import Epoch, Order
from raytf.sources import Lists, Places, Source, source
from raytf.streams import Stream


class Reader:
    """Gives the rows of a dataset.

    Attributes:
        sources: of the columns, for their shapes and dtypes.
    """

    sources: list[Source]

    def chunks(self, epoch: Epoch, number: int, first: int) -> Iterator[tuple[int, Rows]]:
        """Each chunk of an epoch from `first` on, with its rows.

        Args:
            epoch, number: the epoch, and which it is.
            first: the chunk to start with.
        """
        raise NotImplementedError

    def rows(self, epoch: Epoch, number: int, chunk: int) -> Rows:
        """The rows of one chunk."""
        raise NotImplementedError


class Rows:
    """Rows that can be gathered by stream position.

    Args:
        sources: of the columns, over some tables.
        starts: stream position of the first row of each table, ascending.
        tables: index of each table in the sources, in the stream's order.
    """

    def __init__(self, sources: Sequence[Source], starts: np.ndarray, tables: np.ndarray):
        # few tables: of so small a type that NumPy sorts by counting
        tables = tables.astype(np.int16) if len(tables) < 2**15 else tables
        self._sources, self._starts, self._tables = sources, starts, tables
        self.row_bytes = sum(source.row_bytes for source in sources)

    def _places(self, positions: np.ndarray) -> Places:
        place = np.searchsorted(self._starts, positions, side="right") - 1
        return Places(self._tables[place], positions - self._starts[place])

    def gather(self, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        """The arrays of all columns, in memory of their own."""
        places = self._places(positions)
        return tuple(array for source in self._sources for array in source.gather(places))

    def lengths(self, positions: np.ndarray) -> np.ndarray:
        """Lengths of the lists by which rows are put together."""
        lists = next(s for s in self._sources if isinstance(s, Lists) and s.bucket)
        return lists.lengths(self._places(positions))


class StoredReader(Reader):
    """Rows of blocks that all lie in the object store."""

    def __init__(self, blocks: Blocks, columns: Sequence[Columns]):
        self.sources = sources([as_table(block) for block in blocks.get()], columns)

    def chunks(self, epoch, number, first):
        rows = self.rows(epoch, number, first)
        for chunk in range(first, epoch.chunks):
            yield chunk, rows

    def rows(self, epoch, number, chunk):
        return Rows(self.sources, epoch.starts, epoch.pieces)


class StreamReader(Reader):
    """Rows of a `streams.Stream`: the next chunk is fetched while one is used."""

    def __init__(self, stream: Stream, columns: Sequence[Columns], order: Order, worker: int, workers: int):
        self._stream, self._columns, self._order = stream, columns, order
        self._who = (worker, workers)
        self.sources = sources([stream.sample], columns)

    def chunks(self, epoch, number, first):
        with ThreadPoolExecutor(1, "raytf_feed") as pool:
            coming = pool.submit(self.rows, epoch, number, first) if first < epoch.chunks else None
            for chunk in range(first, epoch.chunks):
                rows = coming.result()
                coming = pool.submit(self.rows, epoch, number, chunk + 1) if chunk + 1 < epoch.chunks else None
                yield chunk, rows

    def rows(self, epoch, number, chunk):
        start, stop = epoch.bounds(chunk)
        found = ray.get(self._stream.server.rows.remote(*self._who, self._order, number, start, stop))
        blocks = ray.get([ref for ref, _, _ in found])
        tables = [as_table(block).slice(first, rows) for block, (_, first, rows) in zip(blocks, found, strict=True)]
        starts = start + np.cumsum([0, *(rows for _, _, rows in found)])[:-1]
        return Rows(sources(tables, self._columns), starts, np.arange(len(tables)))


def sources(tables: Sequence[pa.Table], columns: Sequence[Columns]) -> list[Source]:
    """One for each of `columns`; a column that is named twice is read once."""
    known = {c: source(tables, c) for c in dict.fromkeys(columns)}
    return [known[c] for c in columns]


def open_reader(blocks, columns: Sequence[Columns], order: Order, worker: int, workers: int) -> Reader:
    """The reader of what `blocks.read` gave."""
    if isinstance(blocks, Stream):
        return StreamReader(blocks, columns, order, worker, workers)
    return StoredReader(blocks, columns)
