"""Reads the rows of an epoch, chunk by chunk, from the object stores of all nodes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.data.block import BlockAccessor
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytf.data.columns import Columns
from raytf.data.gather import COPIED_BYTES, ColumnSource, RowLocations, are_typed, check_type, source
from raytf.data.record_files import RecordStream, RecordTables
from raytf.data.sampling import Epoch, Ranges, Sampler
from raytf.data.stored import StoredDataset, as_table
from raytf.data.streamed import Part, StreamedDataset, without_rows

# Number of attempts for a chunk, each after another loss of blocks.
_TRIES = 10
_PARSERS = 3  # threads that read and parse TFRecord files: one for each piece that is read at a time

_PART_ROWS = 1024  # lower bound of the mean rows of record batches that become tables


class Reader:
    """Reader of a dataset's rows.

    Attributes:
        sources: Sources of the columns, for their shapes and dtypes.
    """

    sources: list[ColumnSource]

    def chunks(self, epoch: Epoch, number: int, first: int) -> Iterator[tuple[int, Rows]]:
        """Yields each chunk of an epoch with its rows.

        Args:
            epoch: The epoch.
            number: Number of the epoch, from 0.
            first: The first chunk.
        """
        raise NotImplementedError

    def rows(self, epoch: Epoch, number: int, chunk: int) -> Rows:
        """Returns the rows of one chunk."""
        raise NotImplementedError


class Rows:
    """Rows that are gathered by stream position.

    Args:
        sources: Sources of the columns, over some tables.
        starts: Stream position of the first row of each table, ascending.
        tables: Index of each table in the sources, in the stream's order.
    """

    def __init__(self, sources: Sequence[ColumnSource], starts: np.ndarray, tables: np.ndarray):
        # int16 for few tables, as NumPy then uses a counting sort
        tables = tables.astype(np.int16) if len(tables) < 2**15 else tables
        self._sources, self._starts, self._tables = sources, starts, tables
        self._ranges = Ranges(starts) if len(starts) else None  # there may be no rows
        self.row_bytes = sum(source.row_bytes for source in sources)

    def _locate(self, positions: np.ndarray) -> RowLocations:
        index = self._ranges.find(positions)
        return RowLocations(self._tables[index], positions - self._starts[index])

    def gather(self, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        """Copies the rows of all columns into new arrays."""
        locations = self._locate(positions)
        return tuple(array for source in self._sources for array in source.gather(locations))

    def lengths(self, positions: np.ndarray, column: int) -> np.ndarray:
        """Returns the lengths of a column's lists, without a read of their values.

        Args:
            positions: Positions of the rows in the stream: int64, (rows,).
            column: Index of a column of lists.
        """
        return self._sources[column].lengths(self._locate(positions))


class StoredReader(Reader):
    """Reader of blocks that are all in the object store."""

    def __init__(self, blocks: StoredDataset, columns: Sequence[Columns]):
        tables = [as_table(block) for block in blocks.get()]
        parts = [_in_one_piece(table) for table in tables]
        if sum(table.nbytes for table in tables) <= COPIED_BYTES:
            parts = [[table] for table in tables]
        self._rows = np.array([len(part) for tables_of_block in parts for part in tables_of_block], np.int64)
        self._first = np.cumsum([0, *map(len, parts)])  # part of each block
        self.sources = sources([part for tables_of_block in parts for part in tables_of_block], columns, COPIED_BYTES)

    def chunks(self, epoch, number, first):
        rows = self.rows(epoch, number, first)
        for chunk in range(first, epoch.chunks):
            yield chunk, rows

    def rows(self, epoch, number, chunk):
        if len(self._rows) == len(epoch.pieces):
            return Rows(self.sources, epoch.starts, epoch.pieces)
        tables = np.concatenate([np.arange(*self._first[piece : piece + 2]) for piece in epoch.pieces])
        return Rows(self.sources, np.cumsum([0, *self._rows[tables]])[:-1], tables)


def _in_one_piece(table: pa.Table) -> list[pa.Table]:
    """Splits a table without a copy into parts of contiguous columns, unless these would be too small."""
    if all(column.num_chunks <= 1 for column in table.columns):
        return [table]
    parts = table.to_batches()
    return [table] if len(table) < _PART_ROWS * len(parts) else [pa.Table.from_batches([part]) for part in parts]


class StreamReader(Reader):
    """Reader of a `streamed.StreamedDataset`, which prefetches the next chunk.

    Attributes:
        prepare: prepare(epoch, number, chunk, rows), which is called for each chunk in advance, to fetch its rows.
    """

    def __init__(self, stream: StreamedDataset, columns: Sequence[Columns], order: Sampler, worker: int, workers: int):
        self._stream, self._columns, self._order = stream, columns, without_rows(order)
        self._requester = (worker, workers)
        self.prepare: Callable = lambda epoch, number, chunk, rows: None
        self.sources = sources([as_table(block) for block in stream.first().get()], columns)
        self._tables = RecordTables(stream) if isinstance(stream, RecordStream) else None

    def chunks(self, epoch, number, first):
        with ThreadPoolExecutor(1, "raytf_feed") as pool:
            coming = pool.submit(self._prepared, epoch, number, first) if first < epoch.chunks else None
            for chunk in range(first, epoch.chunks):
                rows = coming.result()
                coming = pool.submit(self._prepared, epoch, number, chunk + 1) if chunk + 1 < epoch.chunks else None
                yield chunk, rows

    def _prepared(self, epoch, number, chunk) -> StreamRows:
        rows = self.rows(epoch, number, chunk)
        self.prepare(epoch, number, chunk, rows)
        return rows

    def rows(self, epoch, number, chunk):
        start, stop = epoch.bounds(chunk)
        if self._tables is not None:
            return RecordRows(self._tables, epoch, start, stop, self._columns, self.sources)

        def ask() -> list[Part]:
            return self._stream.request(*self._requester, self._order, number, start, stop)

        return StreamRows(ask, start, stop - start, self._columns, self.sources)


class StreamRows:
    """Rows of a stream's chunk on any nodes of the cluster, which are fetched, with the interface of `Rows`.

    From another node only the needed rows of a block are sent: a task on that node extracts them.

    Args:
        ask: ask() -> the locations of the rows, in order; called again after a loss.
        start: Stream position of the first row.
        count: Number of rows.
        columns: Columns of the tensors.
        known: Sources of the columns over other rows.
    """

    def __init__(self, ask: Callable[[], list[Part]], start: int, count: int, columns: Sequence[Columns], known: list):
        self._ask, self._start, self._columns = ask, start, columns
        self._known = self._sources = known
        self._names = list(dict.fromkeys(name for c in columns for name in c.names))
        self._parts = ask()
        self._tables: list[pa.Table] = []
        self._table = np.full(count, -1, np.int32)  # for each row the index of its table, and its row in that
        self._row = np.zeros(count, np.int64)
        self._known_lengths: dict[int, np.ndarray] = {}  # all rows' lengths, by index of the column
        self.fetched_bytes = 0  # from other nodes

    @functools.cached_property
    def _node_id(self) -> str:
        """Ray's id of this process' node."""
        return ray.get_runtime_context().get_node_id()

    @property
    def row_bytes(self) -> float:
        """Returns the approximate bytes of a row."""
        return sum(source.row_bytes for source in self._sources)

    def fetch(self, positions: np.ndarray) -> None:
        """Fetches the rows at these stream positions that are not fetched yet."""
        missing = np.zeros(len(self._table), bool)
        missing[positions - self._start] = True
        missing &= self._table < 0
        wanted = np.flatnonzero(missing)
        if not len(wanted):
            return
        for offset, rows, table in self._retried(lambda: self._taken(wanted)):
            self._table[rows] = len(self._tables)
            self._row[rows] = np.arange(len(rows)) if offset is None else rows - offset
            self._tables.append(table)
        self._sources = sources(self._tables, self._columns)
        for columns, fetched, known in zip(self._columns, self._sources, self._known, strict=True):
            if all(are_typed(self._tables, column) for column in columns.parts):
                check_type(fetched.dtype, known.dtype, ", ".join(columns.names))

    def _taken(self, wanted: np.ndarray) -> list[tuple[int | None, np.ndarray, pa.Table]]:
        """Returns tables as (offset of the table if it has all rows from there, or None; the rows; the table)."""
        local, far = [], []
        for part, offset, rows in self._needed(wanted):
            (local if part.node == self._node_id else far).append((part, offset, rows))
        coming = self._sent(_take, [(part, part.first + rows - offset) for part, offset, rows in far], self._names)
        taken = []
        for part, offset, _ in local:  # all rows of a local block, which needs no copy
            table = as_table(ray.get(part.block)).slice(part.first, part.rows).select(self._names)
            taken.append((offset, np.arange(offset, offset + part.rows), table))
        for indices, tables in coming():
            rows = [far[i][2] for i in indices]
            rows = rows if len(tables) == len(rows) else [np.concatenate(rows)]
            taken += [(None, row_numbers, table) for row_numbers, table in zip(rows, tables, strict=True)]
            self.fetched_bytes += sum(table.nbytes for table in tables)
        return taken

    def _needed(self, wanted: np.ndarray) -> Iterator[tuple[Part, int, np.ndarray]]:
        """Yields (part, index of its first row, the wanted rows) for each part with some."""
        offset = 0
        for part in self._parts:
            low, high = np.searchsorted(wanted, [offset, offset + part.rows])
            if low < high:
                yield part, offset, wanted[low:high]
            offset += part.rows

    def _sent(self, function, wanted: list, *arguments) -> Callable[[], list[tuple[list[int], Any]]]:
        """Starts function(requests of the blocks, *arguments, *blocks) on each node that has some of the blocks.

        Args:
            function: A function of this module.
            wanted: (part, request for its block), for each block.
            arguments: Arguments for all nodes.

        Returns:
            A call that waits, and returns (indices in `wanted`, result of the function) for each node.
        """
        by_node: dict[str, list[int]] = {}
        for i, (part, _) in enumerate(wanted):
            by_node.setdefault(part.node, []).append(i)
        calls = []
        for node, indices in by_node.items():
            strategy = NodeAffinitySchedulingStrategy(node, soft=True)
            local = _local.options(scheduling_strategy=strategy)
            blocks = [wanted[i][0].block for i in indices]
            calls.append((indices, local.remote(function, [wanted[i][1] for i in indices], arguments, *blocks)))
        return lambda: [(indices, ray.get(call)) for indices, call in calls]

    def _retried(self, fetch: Callable):
        """Returns the result of `fetch`, and requests blocks again that were lost with their process."""
        for tries_left in reversed(range(_TRIES)):
            try:
                return fetch()
            except (ray.exceptions.ObjectLostError, ray.exceptions.RayTaskError, ray.exceptions.NodeDiedError) as error:
                cause = getattr(error, "cause", error)
                lost = isinstance(cause, ray.exceptions.ObjectLostError | ray.exceptions.NodeDiedError)
                if not lost or not tries_left:
                    raise
                self._parts = self._ask()

    def _locate(self, positions: np.ndarray) -> RowLocations:
        index = positions - self._start
        table = self._table[index]
        # int16 for few tables, as NumPy then uses a counting sort
        return RowLocations(table.astype(np.int16) if len(self._tables) < 2**15 else table, self._row[index])

    def gather(self, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        """Copies the rows of all columns into new arrays."""
        self.fetch(positions)
        locations = self._locate(positions)
        return tuple(array for source in self._sources for array in source.gather(locations))

    def lengths(self, positions: np.ndarray, column: int) -> np.ndarray:
        """Returns the lengths of a column's lists, as `Rows.lengths`; other nodes send only lengths."""
        if column not in self._known_lengths:
            parts = self._retried(functools.partial(self._all_lengths, self._columns[column]))
            self._known_lengths[column] = np.concatenate(parts)
        return self._known_lengths[column][positions - self._start]

    def _all_lengths(self, column: Columns) -> list[np.ndarray]:
        wanted = [(part, (part.first, part.rows)) for part in self._parts]
        far = [i for i, part in enumerate(self._parts) if part.node != self._node_id]
        coming = self._sent(_measure, [wanted[i] for i in far], column)
        all_lengths: list = [
            None if i in far else _measure([rows], column, ray.get(part.block))[0]
            for i, (part, rows) in enumerate(wanted)
        ]
        for indices, lengths in coming():
            for i, part_lengths in zip(indices, lengths, strict=True):
                all_lengths[far[i]] = part_lengths
        return all_lengths


class RecordRows(StreamRows):
    """Rows of a chunk of TFRecord files, of which this process parses those that it needs.

    Args:
        tables: Reader of the files.
        epoch: The epoch.
        start: Stream position of the first row.
        stop: Stream position after the last row.
        columns: Columns of the tensors.
        known: Sources of the columns over other rows.
    """

    def __init__(
        self, tables: RecordTables, epoch: Epoch, start: int, stop: int, columns: Sequence[Columns], known: list
    ):
        self._read = tables.table
        super().__init__(
            lambda: tables.parts(epoch.pieces, epoch.starts, start, stop), start, stop - start, columns, known
        )

    def _taken(self, wanted):
        needed = list(self._needed(wanted))
        tables = self._parsed([(part, rows - offset) for part, offset, rows in needed], self._names)
        return [(None, rows, table) for (_, _, rows), table in zip(needed, tables, strict=True)]

    def _all_lengths(self, column):
        tables = self._parsed([(part, np.arange(part.rows)) for part in self._parts], column.names)
        return [_measure([(0, len(table))], column, table)[0] for table in tables]

    def _parsed(self, wanted: list[tuple[Part, np.ndarray]], names: Sequence[str]) -> list[pa.Table]:
        """Returns a table for each (part, its rows, ascending), of some columns."""
        with ThreadPoolExecutor(_PARSERS, "raytf_records") as pool:
            return list(pool.map(lambda call: self._read(*call, names), wanted))


def _take(wanted: list[np.ndarray], names: list[str], *blocks) -> list[pa.Table]:
    """Copies some rows of each block, so that only these are sent; into one table if the types are equal."""
    taken = [
        BlockAccessor.for_block(as_table(block).select(names)).take(rows)
        for rows, block in zip(wanted, blocks, strict=True)
    ]
    alike = all(table.schema.equals(taken[0].schema) for table in taken)
    return [pa.concat_tables(taken).combine_chunks()] if alike else taken


def _measure(wanted: list[tuple[int, int]], column: Columns, *blocks) -> list[np.ndarray]:
    """Returns the lengths of the lists in some neighbouring rows of each block."""
    lengths = []
    for (first, rows), block in zip(wanted, blocks, strict=True):
        lists = source([as_table(block).slice(first, rows)], column)
        lengths.append(lists.lengths(RowLocations(np.zeros(rows, np.int64), np.arange(rows))))
    return lengths


@ray.remote(num_cpus=0, max_retries=-1)
def _local(function, wanted: list, arguments: tuple, *blocks):
    """Calls a function on the node of the blocks."""
    return function(wanted, *arguments, *blocks)


def sources(
    tables: Sequence[pa.Table], columns: Sequence[Columns], copied_bytes: float = math.inf
) -> list[ColumnSource]:
    """Returns a source for each of `columns`, see `gather.source`; a duplicate is read once."""
    known = {c: source(tables, c, copied_bytes) for c in dict.fromkeys(columns)}
    return [known[c] for c in columns]


def open_reader(blocks, columns: Sequence[Columns], order: Sampler, worker: int, workers: int) -> Reader:
    """Returns the reader of a stored or streamed dataset."""
    if isinstance(blocks, StreamedDataset):
        return StreamReader(blocks, columns, order, worker, workers)
    return StoredReader(blocks, columns)
