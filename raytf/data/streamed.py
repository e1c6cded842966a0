"""Datasets that no object store holds: read anew in every epoch, by one Ray Data execution that all workers share."""

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
# A request is answered within this, if only with "not yet": so that who asks knows that the server lives.
_ANSWER_INTERVAL = 10.0
# Between two sentences about rows that do not come.
_REPORT_INTERVAL = 30.0


@dataclass(frozen=True)
class StreamedDataset:
    """A dataset that is streamed; stands where `stored.StoredDataset` stand for one in the object store.

    Args:
        rows: rows of each piece.
        columns: names of the columns.
        sample: the first rows, for shapes and dtypes.
        name: of the dataset, for messages.
        workers: how many will ask at once.
        pieces: of the dataset, in the object store.
        server: the `ServerActor` actor.
    """

    rows: tuple[int, ...]
    columns: list[str]
    sample: pa.Table = field(repr=False)
    name: str
    workers: int
    pieces: Any = field(repr=False)
    server: Any = field(repr=False)

    def first(self) -> StoredDataset:
        """The first rows alone."""
        return StoredDataset([self.sample], [self.sample.num_rows], self.columns)

    def another(self) -> StreamedDataset:
        """The same dataset from a server of its own, for workers that train apart; ends with this process."""
        return replace(self, server=_server(self.name, self.workers))

    def rest(self) -> None:
        """Lets go of what was read for workers that have stopped."""
        ray.wait([self.server.rest.remote()], timeout=_ANSWER_INTERVAL)

    def request(self, worker: int, workers: int, order: Sampler, epoch: int, start: int, stop: int) -> list[Part]:
        """Where the rows from stream position `start` to `stop` lie, in order, when they are read.

        A server that dies meanwhile comes back by itself, and is asked again: it holds nothing but what it reads.

        Args:
            worker, workers: who asks, and how many will.
            order: of the epoch; its rows need not be given, as the server knows them.
            epoch, start, stop: what is asked for.

        Raises:
            StreamError: the server cannot come back.
        """
        while True:
            try:
                call = self.server.rows.remote(worker, workers, order, epoch, start, stop)
                found = ray.get(call, timeout=timeouts.get().stream_answer)
                if found == []:  # it is new
                    ray.get(self.server.take.remote([self.pieces]), timeout=timeouts.get().stream_answer)
                    found = None
            except ray.exceptions.GetTimeoutError:
                why = f"has not answered for {timeouts.get().stream_answer:g} s"
                raise StreamError(f"What reads {self.name!r} {why}: see why its process cannot start") from None
            except ray.exceptions.RayActorError as error:
                why = str(error).strip().splitlines()[0]
                raise StreamError(f"What reads {self.name!r} has ended and cannot come back: {why}") from None
            if found is not None:
                return found


@dataclass(frozen=True, slots=True)
class Part:
    """Rows in a block.

    Args:
        block: reference to the block.
        first: number of the first row in the block.
        rows: how many.
        node: where the block lies, or lay when it was read.
    """

    block: Any
    first: int
    rows: int
    node: str


class StreamServer:
    """Executes pieces of a dataset in the order of an epoch, as far ahead as workers need, and tells where rows lie.

    Rows are addressed by stream position, so that a worker may start anywhere; reading starts with the piece in which
    that lies. Blocks are let go when every worker has asked for later ones. A server keeps no state that the next
    request does not bring: one that died is simply started again.

    Args:
        pieces: of the dataset; None waits for `take`, as Ray warns of an actor that comes back and whose arguments lie
            in the object store.
        name: of the dataset, for messages.
    """

    def __init__(self, pieces: Partitions | None = None, name: str = "dataset"):
        self._pieces = pieces
        self._name = name
        self._orders: dict[Sampler, Sampler] = {}
        self._runs: dict[int, EpochRead] = {}
        self._asked: dict[int, tuple[int, int]] = {}
        self._standing: Counter[tuple[int, int]] = Counter()
        self._lock = threading.Lock()
        self._quiet = contextlib.ExitStack()  # for as long as this lives
        self._quiet.enter_context(stored_module.quiet())

    def take(self, pieces: list) -> None:
        """Takes the pieces; `pieces` is a list of a reference to them, which Ray does not fetch by itself."""
        self._pieces = ray.get(pieces[0])

    def rest(self) -> None:
        """Ends all reading, and lets go of every block."""
        with self._lock:
            runs, self._runs = self._runs, {}
            self._asked.clear()
            self._standing.clear()
        for run in runs.values():
            run.end()

    def rows(self, worker: int, workers: int, order: Sampler, epoch: int, start: int, stop: int) -> list[Part] | None:
        """Where the rows from stream position `start` to `stop` lie, in order; None if they are not read yet.

        [] where it has no pieces, as it has just started.

        Args:
            worker, workers: who asks, and how many will.
            order: the order of the pieces, without their rows.
            epoch, start, stop: what is asked for; waits a while until it is read.
        """
        if self._pieces is None:
            return []
        deadline = time.monotonic() + _ANSWER_INTERVAL
        while True:  # another worker may have gone back, behind what this run still has
            run = self._run(worker, workers, order, epoch, start)
            found = run.wait(start, stop, deadline)
            if found is not None or time.monotonic() > deadline:
                return found

    def _run(self, worker: int, workers: int, order: Sampler, epoch: int, start: int) -> EpochRead:
        with self._lock:
            if len(self._asked) > workers:  # fewer workers than before a restart
                self._asked.clear()
                self._standing.clear()
            self._stands(worker, (epoch, start))
            run = self._runs.get(epoch)
            if run is None or not run.reaches(start):
                if run is not None:
                    run.end()
                run = self._runs[epoch] = EpochRead(self._pieces, self._whole(order), epoch, start, self._name)
            if len(self._asked) == workers:
                self._let_go()
            return run

    def _whole(self, order: Sampler) -> Sampler:
        if order not in self._orders:
            self._orders[order] = replace(order, rows=self._pieces.rows)
        return self._orders[order]

    def _stands(self, worker: int, place: tuple[int, int]) -> None:
        """Notes where a worker is; places are counted, as many workers stand at few."""
        before = self._asked.get(worker)
        if before is not None:
            self._standing[before] -= 1
            if not self._standing[before]:
                del self._standing[before]
        self._asked[worker] = place
        self._standing[place] += 1

    def _let_go(self) -> None:
        first, start = min(self._standing)
        for epoch in [epoch for epoch in self._runs if epoch < first]:
            self._runs.pop(epoch).end()
        if first in self._runs:
            self._runs[first].let_go(start)


class EpochRead:
    """One epoch from some position on, read in a thread."""

    def __init__(self, pieces: Partitions, order: Sampler, epoch: int, start: int, name: str):
        sequence = np.asarray(order.pieces(epoch))
        ends = np.cumsum(np.asarray(order.rows, np.int64)[sequence])
        skipped = int(np.searchsorted(ends, start, side="right"))
        self._pieces, self._sequence, self._name = pieces, sequence[skipped:], name
        self._total = int(ends[-1])
        # of each block that is held: stream position, and (rows, block, node)
        self._starts: list[int] = []
        self._blocks: list[tuple[int, Any, str]] = []
        self._first = self._read = int(ends[skipped - 1]) if skipped else 0
        self._wanted = start
        self._ahead = order.window
        self._error: BaseException | None = None
        self._ended = False
        self._came = time.monotonic()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def reaches(self, start: int) -> bool:
        """Whether the position is still there or will come."""
        with self._changed:
            return self._error is None and not self._ended and self._first <= start

    def wait(self, start: int, stop: int, deadline: float) -> list[Part] | None:
        """Where the rows lie, when they are read; None if the run was ended, or the time is over."""
        with self._changed:
            if self._read < stop:
                self._want(stop)
                while self._read < stop and self._error is None and not self._ended and time.monotonic() < deadline:
                    self._changed.wait(_WAIT_INTERVAL)
                    self._report()
            elif self._wanted < stop:
                self._want(stop)
            if self._error is not None:
                raise self._error
            if self._ended or start < self._first or self._read < stop:
                return None
            found = []
            for i in range(bisect_right(self._starts, start) - 1, len(self._starts)):
                position, (rows, block, node) = self._starts[i], self._blocks[i]
                if position >= stop:
                    break
                first, last = max(start, position), min(stop, position + rows)
                found.append(Part(block, first - position, last - first, node))
            return found

    def _want(self, stop: int) -> None:
        self._wanted = max(self._wanted, stop)
        self._changed.notify_all()

    def _report(self) -> None:
        """Says that no rows come, and what may be waited for."""
        quiet = time.monotonic() - self._came
        if quiet > _REPORT_INTERVAL:
            self._came = time.monotonic()
            held = resources.held()
            logger.warning(f"no rows of {self._name!r} have come for {quiet:.0f} s, reading continues; {held}")

    def let_go(self, start: int) -> None:
        with self._changed:
            gone = bisect_right(self._starts, start) - 1
            if gone >= 0 and self._starts[gone] + self._blocks[gone][0] <= start:
                gone += 1
            if gone > 0:
                del self._starts[:gone], self._blocks[:gone]
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
                    f"{self._read}. Use operators that give the same rows each time, and tell map_batches "
                    "udf_modifying_row_count=True where it changes their number"
                )
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _execute(self, indices: np.ndarray) -> bool:
        """Reads some pieces; whether to go on."""
        here = ray.get_runtime_context().get_node_id()
        with ray_data.executed(self._pieces.dataset(indices)) as bundles:
            for bundle in bundles:
                known = ray.experimental.get_local_object_locations(bundle.block_refs)
                for block in bundle.blocks:
                    # small ones lie in this process
                    nodes = known.get(block.ref, {}).get("node_ids") or [here]
                    if block.metadata.num_rows and not self._add(block.ref, block.metadata.num_rows, nodes[0]):
                        return False
        return True

    def _add(self, ref, rows: int, node: str) -> bool:
        """Whether to go on; waits while enough is read."""
        with self._changed:
            if self._ended:
                return False
            self._starts.append(self._read)
            self._blocks.append((rows, ref, node))
            self._read += rows
            self._came = time.monotonic()
            self._changed.notify_all()
            while self._read > self._wanted + self._ahead and not self._ended:
                self._changed.wait(_WAIT_INTERVAL)
            self._came = time.monotonic()
            return not self._ended


@contextlib.contextmanager
def watched(name: str):
    """Says now and then that a dataset is not read yet, and who holds the CPUs that its reading may wait for."""
    ended = threading.Event()

    def watch():
        began, pause = time.monotonic(), _REPORT_INTERVAL
        while not ended.wait(pause):
            seconds = time.monotonic() - began
            logger.warning(f"{name!r} is not read after {seconds:.0f} s, reading continues; {resources.held()}")
            pause *= 2

    thread = threading.Thread(target=watch, daemon=True, name="raytf_watch")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def stored(name: str, dataset):
    """Executes a `ray.data.Dataset` into the object store; what reads and maps it waits for no CPU.

    Args:
        name: of the dataset, for messages.
        dataset: to be read.

    Returns:
        A `ray.data.MaterializedDataset`.
    """
    with stored_module.quiet(), watched(name):
        return partitions.unbound(dataset).materialize()


def materialized(name: str, dataset, specs: Mapping | None = None) -> StoredDataset:
    """`stored.read` for which what reads and maps waits for no CPU, and that says so where it takes long."""
    with watched(name):
        return stored_module.read(dataset, specs, partitions.unbound)


def without_rows(order: Sampler) -> Sampler:
    """What a request carries of an order: not the rows of its pieces, which the server knows."""
    return dataclasses.replace(order, rows=())


def open_stream(found: Partitions, columns: list[str], sample: pa.Table, workers: int, name: str) -> StreamedDataset:
    """Starts the server of a stream, on any node; it ends with this process.

    Args:
        found, columns, sample: of the dataset.
        workers: how many will ask at once.
        name: of the dataset, for messages.
    """
    stored = ray.put(found)
    return StreamedDataset(found.rows, columns, sample, name, workers, stored, _server(name, workers))


def close(datasets: Mapping[str, Any]) -> None:
    """Ends the servers of those of a run's datasets that are streams."""
    for dataset in datasets.values():
        if isinstance(dataset, StreamedDataset):
            ray.kill(dataset.server)


def _server(name: str, workers: int):
    """A server that comes back wherever there is room when its process or its node dies."""
    options = {"num_cpus": 0, "max_concurrency": 2 * workers + 2, "max_restarts": -1, "max_task_retries": -1}
    return ray.remote(StreamServer).options(**options).remote(None, name)
