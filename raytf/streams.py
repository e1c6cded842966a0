"""Datasets that no object store holds: read anew in every epoch, by one Ray Data execution that all workers share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import ray

from raytf.blocks import Blocks
from raytf.order import Order
from raytf.pieces import Pieces

_WAIT_SECONDS = 1.0


@dataclass(frozen=True)
class Stream:
    """A dataset that is streamed; stands where `blocks.Blocks` stand for one in the object store.

    Args:
        rows: rows of each piece.
        columns: names of the columns.
        sample: the first rows, for shapes and dtypes.
        server: the `Server` actor.
    """

    rows: tuple[int, ...]
    columns: list[str]
    sample: pa.Table = field(repr=False)
    server: Any = field(repr=False)

    def first(self) -> Blocks:
        """The first rows alone."""
        return Blocks([self.sample], [self.sample.num_rows], self.columns)

    def another(self) -> Stream:
        """The same dataset from a server of its own, for workers that train apart from these; it ends with this one."""
        return replace(self, server=ray.get(self.server.another.remote()))


class Server:
    """Executes pieces of a dataset in the order of an epoch, as far ahead as workers need, and tells where rows lie.

    Rows are addressed by stream position, so that a worker may start anywhere; reading starts with the piece in which
    that lies. Blocks are let go when every worker has asked for later ones.

    Args:
        pieces: of the dataset.
        num_cpus: CPUs of each reading task; None leaves them as the dataset has them.
        workers: how many will ask at once.
    """

    def __init__(self, pieces: Pieces, num_cpus: float | None, workers: int = 1):
        self._pieces, self._num_cpus, self._workers = pieces, num_cpus, workers
        self._runs: dict[int, _Run] = {}
        self._asked: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def another(self):
        """A server of the same pieces."""
        return _server(self._pieces, self._num_cpus, self._workers)

    def rows(self, worker: int, workers: int, order: Order, epoch: int, start: int, stop: int) -> list:
        """Where the rows from stream position `start` to `stop` lie: (block, first row in it, rows) in order.

        Args:
            worker, workers: who asks, and how many will.
            order: the order of the pieces.
            epoch, start, stop: what is asked for; returns when it is read.
        """
        found = None
        while found is None:  # another worker may have gone back, behind what this run still has
            found = self._run(worker, workers, order, epoch, start).wait(start, stop)
        return found

    def _run(self, worker: int, workers: int, order: Order, epoch: int, start: int) -> _Run:
        with self._lock:
            if len(self._asked) > workers:
                self._asked.clear()  # fewer workers than before a restart
            self._asked[worker] = (epoch, start)
            run = self._runs.get(epoch)
            if run is None or not run.reaches(start):
                if run is not None:
                    run.end()
                run = self._runs[epoch] = _Run(self._pieces, order, epoch, start, self._num_cpus)
            if len(self._asked) == workers:
                self._let_go()
            return run

    def _let_go(self) -> None:
        first = min(epoch for epoch, _ in self._asked.values())
        for epoch in [epoch for epoch in self._runs if epoch < first]:
            self._runs.pop(epoch).end()
        if first in self._runs:
            self._runs[first].let_go(min(start for epoch, start in self._asked.values() if epoch == first))


class _Run:
    """One execution of an epoch from some position on, in a thread."""

    def __init__(self, pieces: Pieces, order: Order, epoch: int, start: int, num_cpus: float | None):
        sequence, position, skipped = order.pieces(epoch), 0, 0
        while skipped < len(sequence) and position + order.rows[sequence[skipped]] <= start:
            position += order.rows[sequence[skipped]]
            skipped += 1
        self._dataset = pieces.dataset(sequence[skipped:], num_cpus)
        self._total = order.total
        self._blocks: list[tuple[int, int, Any]] = []  # (stream position, rows, block)
        self._first = self._read = position
        self._wanted = start
        self._ahead = order.window
        self._error: BaseException | None = None
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def reaches(self, start: int) -> bool:
        """Whether the position is still there or will come."""
        with self._changed:
            return self._error is None and self._first <= start

    def wait(self, start: int, stop: int) -> list | None:
        """Where the rows lie, when they are read; None if the run was ended."""
        with self._changed:
            self._wanted = max(self._wanted, stop)
            self._changed.notify_all()
            while self._read < stop and self._error is None and not self._ended:
                self._changed.wait(_WAIT_SECONDS)
            if self._error is not None:
                raise self._error
            if self._ended or start < self._first:
                return None
            found = []
            for position, rows, block in self._blocks:
                first, last = max(start, position), min(stop, position + rows)
                if first < last:
                    found.append((block, first - position, last - first))
            return found

    def let_go(self, start: int) -> None:
        with self._changed:
            self._blocks = [entry for entry in self._blocks if entry[0] + entry[1] > start]
            self._first = self._blocks[0][0] if self._blocks else self._read

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _follow(self) -> None:
        executor = None
        try:
            bundles, _, executor = self._dataset._execute_to_iterator(capture_executor=False)
            for bundle in bundles:
                for block in bundle.blocks:
                    if not self._add(block.ref, block.metadata.num_rows):
                        return
            with self._changed:
                if self._read != self._total:
                    raise ValueError(
                        f"An epoch of the stream must have the rows that were counted, {self._total}; received: "
                        f"{self._read}. Use operators that give the same rows each time, and tell map_batches "
                        "udf_modifying_row_count=True where it changes their number"
                    )
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            if executor is not None:
                with contextlib.suppress(Exception):  # it may have ended by itself
                    executor.shutdown(force=True)

    def _add(self, ref, rows: int) -> bool:
        """Whether to go on; waits while enough is read."""
        with self._changed:
            self._blocks.append((self._read, rows, ref))
            self._read += rows
            self._changed.notify_all()
            while self._read > self._wanted + self._ahead and not self._ended:
                self._changed.wait(_WAIT_SECONDS)
            return not self._ended


def open_stream(pieces: Pieces, columns: list[str], sample: pa.Table, workers: int, num_cpus: float | None) -> Stream:
    """Starts the server of a stream, on this node.

    Args:
        pieces, columns, sample: of the dataset.
        workers: how many will ask at once.
        num_cpus: see `Server`.
    """
    return Stream(pieces.rows, columns, sample, _server(pieces, num_cpus, workers))


def close(datasets: Mapping[str, Any]) -> None:
    """Ends the servers of those of a run's datasets that are streams."""
    for dataset in datasets.values():
        if isinstance(dataset, Stream):
            ray.kill(dataset.server)


def _server(pieces: Pieces, num_cpus: float | None, workers: int):
    concurrent = 2 * workers + 2
    return ray.remote(Server).options(num_cpus=0, max_concurrency=concurrent).remote(pieces, num_cpus, workers)
