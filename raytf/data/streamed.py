"""Datasets that fit in no object store: one Ray Data execution, shared by all workers, reads them in each epoch."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from raytf import logs, timeouts
from raytf.compat import ray_data
from raytf.data import partitions
from raytf.data import stored as stored_module
from raytf.data.partitions import AT_ONCE, Partitions
from raytf.data.sampling import Sampler
from raytf.data.stored import StoredDataset
from raytf.errors import StreamError
from raytf.runtime import resources

logger = logs.get_logger(__name__)

_WAIT_INTERVAL = 1.0
# Seconds within which a request is answered, at least with "not yet", as a heartbeat of the server.
_ANSWER_INTERVAL = 10.0
# Seconds between two warnings about missing rows.
_REPORT_INTERVAL = 30.0
_SLOW_ADVICE = "Reading continues. Look at the source of the rows, at the load of the hosts, and at what holds CPUs"


@dataclass(frozen=True)
class StreamedDataset:
    """Dataset that is read in every epoch, the counterpart of `stored.StoredDataset`.

    Args:
        rows: Number of rows of each piece.
        columns: Names of the columns.
    """

    rows: tuple[int, ...]
    columns: list[str]

    def first(self) -> StoredDataset:
        """Returns a dataset of only the first rows."""
        raise NotImplementedError

    def clone(self) -> StreamedDataset:
        """Returns the dataset for workers of another training."""
        return self

    def release_prefetch(self) -> None:
        """Releases the blocks that were read for workers that have stopped."""

    def close(self) -> None:
        """Ends the reading for good."""


@dataclass(frozen=True)
class ServedDataset(StreamedDataset):
    """Dataset that one Ray Data execution reads for all workers.

    Args:
        sample: The first rows, for shapes and dtypes.
        name: Name of the dataset, for messages.
        workers: Number of workers that request rows at once.
        pieces: Reference to the dataset's pieces in the object store.
        server: The actor of a `StreamServer`.
    """

    sample: pa.Table = field(repr=False)
    name: str
    workers: int
    pieces: Any = field(repr=False)
    server: Any = field(repr=False)

    def first(self) -> StoredDataset:
        return StoredDataset([self.sample], [self.sample.num_rows], self.columns)

    def clone(self) -> ServedDataset:
        # the new server ends with this process
        return replace(self, server=_server(self.name, self.workers))

    def release_prefetch(self) -> None:
        ray.wait([self.server.release_prefetch.remote()], timeout=_ANSWER_INTERVAL)

    def close(self) -> None:
        ray.kill(self.server)

    def request(self, worker: int, workers: int, order: Sampler, epoch: int, start: int, stop: int) -> list[Part]:
        """Returns the locations of the rows from stream position `start` to `stop`, in order, after they are read.

        A server that dies restarts by itself, and the request is sent again. The server's only state is the blocks that
        it reads.

        Args:
            worker: Rank of the requesting worker.
            workers: Number of workers that request rows.
            order: Order of the rows, without the numbers of rows of pieces, which the server has.
            epoch: Number of the epoch, from 0.
            start: First stream position.
            stop: Stream position after the last row.

        Raises:
            StreamError: The server cannot restart.
        """
        while True:
            try:
                call = self.server.rows.remote(worker, workers, order, epoch, start, stop)
                locations = ray.get(call, timeout=timeouts.get().stream_answer)
                if locations == []:  # a new server, which has no pieces yet
                    ray.get(self.server.take.remote([self.pieces]), timeout=timeouts.get().stream_answer)
                    locations = None
            except ray.exceptions.GetTimeoutError:
                why = f"has not answered for {timeouts.get().stream_answer:g} s (timeout)"
                raise StreamError(f"What reads {self.name!r} {why}: see why its process cannot start") from None
            except ray.exceptions.RayActorError as error:
                why = str(error).strip().splitlines()[0]
                raise StreamError(f"What reads {self.name!r} has ended and cannot come back: {why}") from None
            if locations is not None:
                return locations


@dataclass(frozen=True, slots=True)
class Part:
    """Rows in a block.

    Args:
        block: Reference to the block.
        first: Number of the first row in the block.
        rows: Number of rows.
        node: Ray's id of the node that held the block when it was read.
    """

    block: Any
    first: int
    rows: int
    node: str


class StreamServer:
    """Server that reads pieces of a dataset in the order of an epoch, with read-ahead, and returns rows' locations.

    Rows are addressed by stream position: a worker may start at any, and reading starts with its piece. Blocks are
    released when all workers have requested later ones. Each request contains all state that a server needs, so that a
    restart loses nothing.

    Args:
        pieces: Pieces of the dataset, or None until `take`. Ray warns of an actor that may restart and has arguments in
            the object store.
        name: Name of the dataset, for messages.
    """

    def __init__(self, pieces: Partitions | None = None, name: str = "dataset"):
        self._pieces = pieces
        self._name = name
        self._runs: dict[int, EpochRead] = {}
        self._positions: dict[int, tuple[int, int]] = {}
        self._workers_at: Counter[tuple[int, int]] = Counter()
        self._lock = threading.Lock()
        self._quiet = contextlib.ExitStack()  # for the server's lifetime
        self._quiet.enter_context(stored_module.quiet())

    def take(self, pieces: list) -> None:
        """Receives the pieces as a list of one reference, which Ray does not resolve by itself."""
        self._pieces = ray.get(pieces[0])

    def release_prefetch(self) -> None:
        """Ends all reading, and releases all blocks."""
        with self._lock:
            runs, self._runs = self._runs, {}
            self._positions.clear()
            self._workers_at.clear()
        for run in runs.values():
            run.end()

    def rows(self, worker: int, workers: int, order: Sampler, epoch: int, start: int, stop: int) -> list[Part] | None:
        """Waits up to 10 s for the rows from stream position `start` to `stop`, and returns their locations in order.

        Args:
            worker: Rank of the requesting worker.
            workers: Number of workers that request rows.
            order: Order of the pieces, without their numbers of rows.
            epoch: Number of the epoch, from 0.
            start: First stream position.
            stop: Stream position after the last row.

        Returns:
            The locations; None if the rows are not read yet; [] from a new server without pieces.
        """
        if self._pieces is None:
            return []
        deadline = time.monotonic() + _ANSWER_INTERVAL
        while True:  # another worker may have restarted at a position that this run has released
            run = self._run(worker, workers, order, epoch, start)
            locations = run.wait(start, stop, deadline)
            if locations is not None or time.monotonic() > deadline:
                return locations

    def _run(self, worker: int, workers: int, order: Sampler, epoch: int, start: int) -> EpochRead:
        with self._lock:
            if len(self._positions) > workers:  # fewer workers after a restart
                self._positions.clear()
                self._workers_at.clear()
            self._record_position(worker, (epoch, start))
            run = self._runs.get(epoch)
            if run is None or not run.reaches(start):
                if run is not None:
                    run.end()
                whole = replace(order, rows=self._pieces.rows)
                run = self._runs[epoch] = EpochRead(self._pieces, whole, epoch, start, self._name)
            if len(self._positions) == workers:
                self._release_blocks()
            return run

    def _record_position(self, worker: int, position: tuple[int, int]) -> None:
        """Records the position of a worker; positions are counted, as many workers share few."""
        previous = self._positions.get(worker)
        if previous is not None:
            self._workers_at[previous] -= 1
            if not self._workers_at[previous]:
                del self._workers_at[previous]
        self._positions[worker] = position
        self._workers_at[position] += 1

    def _release_blocks(self) -> None:
        first, start = min(self._workers_at)
        for epoch in [epoch for epoch in self._runs if epoch < first]:
            self._runs.pop(epoch).end()
        if first in self._runs:
            self._runs[first].release_before(start)


class EpochRead:
    """Epoch that a thread reads from a stream position on."""

    def __init__(self, pieces: Partitions, order: Sampler, epoch: int, start: int, name: str):
        sequence = np.asarray(order.pieces(epoch))
        ends = np.cumsum(np.asarray(order.rows, np.int64)[sequence])
        skipped = int(np.searchsorted(ends, start, side="right"))
        self._pieces, self._sequence, self._name = pieces, sequence[skipped:], name
        self._total = int(ends[-1])
        # for each block that is kept: stream position, and (rows, block, node)
        self._starts: list[int] = []
        self._blocks: list[tuple[int, Any, str]] = []
        self._first = self._read = int(ends[skipped - 1]) if skipped else 0
        self._wanted = start
        self._read_ahead = order.window
        self._error: BaseException | None = None
        self._ended = False
        self._last_row_at = time.monotonic()
        self._changed = threading.Condition()
        threading.Thread(target=self._follow, daemon=True).start()

    def reaches(self, start: int) -> bool:
        """Returns whether the position is not released yet."""
        with self._changed:
            return self._error is None and not self._ended and self._first <= start

    def wait(self, start: int, stop: int, deadline: float) -> list[Part] | None:
        """Waits for the rows, and returns their locations; None after the end of the run, or the deadline."""
        with self._changed:
            if self._wanted < stop:
                self._wanted = stop
                self._changed.notify_all()
            while self._read < stop and self._error is None and not self._ended and time.monotonic() < deadline:
                self._changed.wait(_WAIT_INTERVAL)
                self._report()
            if self._error is not None:
                raise self._error
            if self._ended or start < self._first or self._read < stop:
                return None
            parts = []
            for i in range(bisect_right(self._starts, start) - 1, len(self._starts)):
                position, (rows, block, node) = self._starts[i], self._blocks[i]
                if position >= stop:
                    break
                first, last = max(start, position), min(stop, position + rows)
                parts.append(Part(block, first - position, last - first, node))
            return parts

    def _report(self) -> None:
        """Logs that no rows have come for 30 s, and which processes hold the CPUs."""
        quiet = time.monotonic() - self._last_row_at
        if quiet > _REPORT_INTERVAL:
            self._last_row_at = time.monotonic()
            usage = resources.held_by_others()
            logger.warning(f"no rows of {self._name!r} have come for {quiet:.0f} s; {usage}. {_SLOW_ADVICE}")

    def release_before(self, start: int) -> None:
        with self._changed:
            released = bisect_right(self._starts, start) - 1
            if released >= 0 and self._starts[released] + self._blocks[released][0] <= start:
                released += 1
            if released > 0:
                del self._starts[:released], self._blocks[:released]
                self._first = self._starts[0] if self._starts else self._read

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._starts, self._blocks = [], []
            self._changed.notify_all()

    def _follow(self) -> None:
        try:
            for first in range(0, len(self._sequence), AT_ONCE):
                if not self._execute(self._sequence[first : first + AT_ONCE]):
                    return
            if self._read != self._total:
                raise ValueError(
                    f"An epoch of the stream must have the rows that were counted, {self._total}; received: "
                    f"{self._read}. Use operators that give the same rows each time, and pass map_batches "
                    "udf_modifying_row_count=True where it changes their number"
                )
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _execute(self, indices: np.ndarray) -> bool:
        """Reads some pieces, and returns whether to continue."""
        this_node = ray.get_runtime_context().get_node_id()
        with ray_data.executed(self._pieces.dataset(indices)) as bundles:
            for bundle in bundles:
                known = ray.experimental.get_local_object_locations(bundle.block_refs)
                for block in bundle.blocks:
                    # small blocks are in this process
                    nodes = known.get(block.ref, {}).get("node_ids") or [this_node]
                    if block.metadata.num_rows and not self._add(block.ref, block.metadata.num_rows, nodes[0]):
                        return False
        return True

    def _add(self, ref, rows: int, node: str) -> bool:
        """Adds a block, waits while the read-ahead is sufficient, and returns whether to continue."""
        with self._changed:
            if self._ended:
                return False
            self._starts.append(self._read)
            self._blocks.append((rows, ref, node))
            self._read += rows
            self._last_row_at = time.monotonic()
            self._changed.notify_all()
            while self._read > self._wanted + self._read_ahead and not self._ended:
                self._changed.wait(_WAIT_INTERVAL)
            self._last_row_at = time.monotonic()
            return not self._ended


@contextlib.contextmanager
def log_slow_reads(name: str):
    """Logs repeatedly, until the context ends, that a dataset is not read yet, and which processes hold the CPUs."""
    ended = threading.Event()

    def log_until_ended():
        began, pause = time.monotonic(), _REPORT_INTERVAL
        while not ended.wait(pause):
            seconds = time.monotonic() - began
            logger.warning(f"{name!r} is not read after {seconds:.0f} s; {resources.held_by_others()}. {_SLOW_ADVICE}")
            pause *= 2

    thread = threading.Thread(target=log_until_ended, daemon=True, name="raytf_watch")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def stored(name: str, dataset):
    """Executes a `ray.data.Dataset` into the object store, with read and map tasks that wait for no CPU.

    Args:
        name: Name of the dataset, for messages.
        dataset: The `ray.data.Dataset`.

    Returns:
        A `ray.data.MaterializedDataset`.
    """
    with stored_module.quiet(), log_slow_reads(name):
        return partitions.unbound(dataset).materialize()


def materialized(name: str, dataset, specs: Mapping | None = None) -> StoredDataset:
    """Calls `stored.read` with tasks that wait for no CPU, and logs a warning if the read is slow."""
    with log_slow_reads(name):
        return stored_module.read(dataset, specs, partitions.unbound)


def without_rows(order: Sampler) -> Sampler:
    """Returns the order without the numbers of rows of pieces, for a request: the server has them."""
    return dataclasses.replace(order, rows=())


def open_stream(pieces: Partitions, columns: list[str], sample: pa.Table, workers: int, name: str) -> ServedDataset:
    """Starts the server of a stream, on any node; it ends with this process.

    Args:
        pieces: Pieces of the dataset.
        columns: Names of the columns.
        sample: The first rows.
        workers: Number of workers that request rows at once.
        name: Name of the dataset, for messages.
    """
    stored = ray.put(pieces)
    return ServedDataset(pieces.rows, columns, sample, name, workers, stored, _server(name, workers))


def close(datasets: Mapping[str, Any]) -> None:
    """Ends the servers of a run's streamed datasets."""
    for dataset in datasets.values():
        if isinstance(dataset, StreamedDataset):
            dataset.close()


def _server(name: str, workers: int):
    """Starts a server that restarts on any node when its process or its node dies."""
    options = {"num_cpus": 0, "max_concurrency": 2 * workers + 2, "max_restarts": -1, "max_task_retries": -1}
    return ray.remote(StreamServer).options(**options).remote(None, name)
