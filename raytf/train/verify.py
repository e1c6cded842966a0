"""Compares two workers with one device before training, on a few of the user's rows.

Forks of a process that has imported TensorFlow, and run none of it, make the runs, see `worker/verification`. This
module does not import TensorFlow: the calling process may become a worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import pickle
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray import cloudpickle

from raytf import logs, timeouts
from raytf.collectives import ring_token
from raytf.compat import autograph
from raytf.data import stored
from raytf.data.stored import StoredDataset
from raytf.data.tf_data import TFData
from raytf.errors import PeerLostError, one_line
from raytf.logs import warn_user
from raytf.runtime.answers import NoAnswerError, collect_answers
from raytf.storage import priority
from raytf.train.verify_comparison import VerificationResult, compare_runs, differing_values

logger = logs.get_logger(__name__)

# Rows of both steps together, and of the first one: neither divides evenly between two workers.
_ROWS = (12, 7)
_LARGE_ROWS = (6, 3)
_LARGE_ROW_BYTES = 64 << 10
# Most rows and bytes of a whole global batch, and rows of the step after it.
_MOST_ROWS, _MOST_BYTES, _ROWS_AFTER = 1024, 4 << 20, 5
# Seconds for which a caller waits for a comparison that continues after it, and for one that does not.
_START_WAIT, _WAIT = 0.5, 4.0
# Seconds between two checks whether the caller lives.
_CHECK_INTERVAL = 0.5
# Seconds between two requests of the driver for the result of a running comparison.
_POLL_INTERVAL = 1.0

NOT_IN_TIME = VerificationResult(failed="the training has ended first; verify='error' waits for it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerificationOptions:
    """How to compare two workers with one device.

    Args:
        batch: Rows of the training's steps.
        may_continue: Whether the comparison continues after the calling process' wait for it; otherwise it is ended.
        seconds: Limit of that wait, or None for the default.
    """

    batch: int
    may_continue: bool = False
    seconds: float | None = None

    @property
    def wait(self) -> float:
        return (_START_WAIT if self.may_continue else _WAIT) if self.seconds is None else self.seconds


@dataclasses.dataclass(frozen=True)
class ComparisonProcess:
    """A comparison that runs in parallel to this process.

    Args:
        pid: Id of the process that makes it.
        reader: File descriptor of this process for reading its `VerificationResult`.
    """

    pid: int
    reader: int


def task_factory(
    pickled: bytes, block: StoredDataset | TFData, validation: StoredDataset | TFData | None, global_batch: int
) -> Callable[[], Any] | VerificationResult:
    """Returns the function that makes the trial of a KerasTrainer's model, for `start_comparison`.

    A `VerificationResult` if the data has one row.

    Args:
        pickled: (build_model, config, the `batch_spec.BatchSpec`, ...), by cloudpickle, see `dry_run.inspect`.
        block: A block of the training data, in this process.
        validation: A block of the validation data, in this process, or None.
        global_batch: Rows of the training's steps.
    """
    train = few_rows(block)
    held_out = None if validation is None else few_rows(validation)
    whole = whole_batch(block, global_batch)
    whole_held_out = None if validation is None else whole_batch(validation, global_batch)

    def trial():
        from raytf.worker.verification import VerificationTask

        build_model, config, batch, *_ = cloudpickle.loads(pickled)
        few = VerificationTask(
            build=lambda: build_model(dict(config)),
            batch=batch,
            rows=train[0],
            validation=None if held_out is None else held_out[0],
            global_batch=train[1],
        )
        return few.with_whole_batch(whole, whole_held_out)

    return trial if train is not None else VerificationResult(skipped="the data has one row")


def few_rows(block: StoredDataset | TFData) -> tuple[StoredDataset | TFData, int] | None:
    """Returns (rows from all over a block, rows of the first step); None if two workers cannot have one each.

    A pipeline is returned unchanged, as its rows are read in the trial.
    """
    if isinstance(block, TFData):
        return block, _ROWS[1]
    table = _table_of(block)
    large = table.nbytes > _LARGE_ROW_BYTES * max(1, table.num_rows)
    wanted, first = _LARGE_ROWS if large else _ROWS
    count = min(wanted, table.num_rows)
    if count < 2:
        return None
    return _spread(block, table, count), min(first, max(2, (count + 2) // 2))


def whole_batch(block: StoredDataset | TFData, batch: int) -> tuple[StoredDataset | TFData, int] | None:
    """Returns (rows, rows of the first step) with the training's own steps, for code that names positions in a batch.

    None if `few_rows` has as many rows, or if the rows are large.
    """
    if isinstance(block, TFData):
        return (block, batch) if _ROWS[1] < batch <= _MOST_ROWS else None
    table = _table_of(block)
    first = min(batch, _MOST_ROWS, table.num_rows - _ROWS_AFTER)
    if first <= _ROWS[1] or table.nbytes / table.num_rows * first > _MOST_BYTES:
        return None
    return _spread(block, table, first + _ROWS_AFTER), first


def _table_of(block: StoredDataset) -> pa.Table:
    """Returns the rows of all blocks that have the types of the first one."""
    tables = [stored.as_table(part) for part in block.get()]
    return pa.concat_tables([table for table in tables if table.schema.equals(tables[0].schema)])


def _spread(block: StoredDataset, table: pa.Table, count: int) -> StoredDataset:
    """Returns so many rows from all over a block."""
    indices = np.linspace(0, table.num_rows - 1, count).astype(int)
    rows = pa.concat_tables([table.slice(int(row), 1) for row in indices])  # `take` lacks some types of columns
    return StoredDataset([rows], [count], block.columns)


# ------------------------------------------------------------------------------------------ the processes


def start_comparison(trial: Callable[[], Any] | VerificationResult, low_priority: bool = False) -> ComparisonProcess:
    """Starts a comparison in other processes, which end with this one.

    Args:
        trial: Returns the `verification.VerificationTask`; called in each process that trains, as it may run
            TensorFlow. Or a `VerificationResult` if there is nothing to try.
        low_priority: Whether other processes have priority, such as workers that start meanwhile.
    """
    reader, writer = os.pipe()
    requester = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writer)
        return ComparisonProcess(pid, reader)
    try:
        os.close(reader)
        os.setsid()
        if low_priority:
            priority.set_lowest(forever=True)
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        os.environ.update(CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="3")
        try:
            with autograph.in_memory():
                result = trial if isinstance(trial, VerificationResult) else _Supervisor(trial, requester).run()
        except BaseException as error:
            result = VerificationResult(failed=one_line(error))
        with os.fdopen(writer, "wb") as file:
            pickle.dump(result, file)
    finally:
        os._exit(0)


def outcome(running: ComparisonProcess, seconds: float, urgent: bool = False) -> VerificationResult | None:
    """Returns the result, or None if the comparison continues; then it can be called again.

    Args:
        running: Result of `start_comparison`, in this process.
        seconds: Seconds to wait, at least 0.
        urgent: Whether the user waits for it, too: from now on it has normal priority.
    """
    if urgent:
        priority.set_normal_with_children(running.pid)
    poll = select.poll()
    poll.register(running.reader, select.POLLIN)
    if not poll.poll(seconds * 1000):
        return None
    with os.fdopen(running.reader, "rb") as file:
        content = file.read()
    os.waitpid(running.pid, 0)
    return pickle.loads(content) if content else VerificationResult(failed="its process was killed")


def cancel(running: ComparisonProcess) -> None:
    """Ends a comparison whose result is not needed any more."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(running.pid, signal.SIGKILL)  # it may not have its own process group yet
    os.close(running.reader)
    os.waitpid(running.pid, 0)


# ------------------------------------------------------------------------------------------ at the driver


class ComparisonReporter:
    """Reports the result of a comparison that continues during a training; a context around the training.

    Args:
        running: The comparison, or None if its result is known or none was made.
        processes: A `processes.WarmPool`, one process of which makes the comparison.
    """

    def __init__(self, running: ComparisonProcess | None, processes):
        self._running, self._processes, self._well = running, processes, False
        self._ends, self._thread = threading.Event(), threading.Thread(target=self._follow, daemon=True)
        self._location = logs.user_location()

    def __enter__(self) -> ComparisonReporter:
        if self._running is not None:
            self._processes.compares = True
            self._thread.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._well = kind is None
        self._ends.set()
        if self._running is not None:
            self._thread.join(timeouts.get().verify_end + timeouts.get().verify_thread_join)

    def _follow(self) -> None:
        result, ended = None, False
        try:
            limits = timeouts.get()
            while result is None and not ended:
                ended = self._ends.wait(_POLL_INTERVAL)
                seconds = limits.verify_end if ended and self._well else 0.0
                call = self._processes.answered.execute.remote(outcome, self._running, seconds, seconds > 0)
                (result,) = collect_answers(
                    [call], seconds + limits.verify_answer, "the result of verify", names=["a process"]
                )
            result = result or NOT_IN_TIME
        except (ray.exceptions.RayError, NoAnswerError) as error:
            ends = self._ends.wait(limits.verify_thread_join)  # the workers end a moment before the training does
            result = NOT_IN_TIME if ends else VerificationResult(failed=f"its process has gone: {one_line(error)}")
        finally:
            self._processes.compares = False
            self._processes.end_answered()
        if self._well or result is not NOT_IN_TIME:
            report_result(result, "warn", self._location)


def report_result(result: VerificationResult, word: str, location: tuple[str, int] | None = None) -> None:
    """Warns of the differences of a result; logs in a line if the result is unknown.

    Args:
        result: Result of a comparison.
        word: "warn" or "error".
        location: File and line of the training, if another thread reports; see `logs.user_location`.

    Raises:
        ConfigError: With "error", two workers do not train as one process does, or this is unknown.
    """
    if word == "error" and (result.differences or result.failed is not None):
        raise result.error()
    if result.failed is not None:  # nothing is wrong with the model: no warning
        logger.info(result.text())
    elif text := result.text():
        warn_user(text, location=location)
    if result.few is not None:
        logger.info(
            f"verify: two workers train {result.model} as one process does on a few rows; a whole batch was not "
            f"compared ({result.few}), so that code that takes rows by their position, as values[:100], may differ"
        )
    if result.skipped is not None:
        logger.debug("verify: nothing was compared: %s", result.skipped)
    if result.random:
        logger.debug("verify: random in one process as well: %s", ", ".join(result.random))


# ------------------------------------------------------------------------------------------ the runs

_PR_SET_PDEATHSIG = 1  # from Linux' prctl(2)


class _ComparisonLostError(Exception):
    """The process that requested the comparison has ended."""


@dataclasses.dataclass(frozen=True)
class ForkedTraining:
    """A process that trains, and the memory file for its outcome."""

    pid: int
    memory: int


class _Supervisor:
    """Trains on one device and on two workers, and compares them; trains on one device again if they differ.

    A model with code of the user's is compared on a few rows, and then on a whole global batch.

    Args:
        trial: Returns a `verification.VerificationTask`.
        requester: Id of the process that requested the comparison.
    """

    def __init__(self, trial: Callable[[], Any], requester: int):
        self._trial, self._requester, self._eagerly = trial, requester, True
        self._whole_s: float | None = None
        self._deadline = time.monotonic() + timeouts.get().verify

    def run(self) -> VerificationResult:
        result = self._compared()
        if result.failed is not None and result.failed.startswith("one device"):
            self._eagerly = False  # the model may work in graphs only
            result = self._compared()
        # the user's own code may name positions that few rows do not have
        if result.text() or self._whole_s is None:
            return result
        remaining, needed = self._deadline - time.monotonic(), 3 * self._whole_s
        if needed > remaining:
            why = f"it would take some {needed:.0f} s, with {max(0.0, remaining):.0f} s left"
            return dataclasses.replace(result, few=why)
        few, self._trial = self._trial, lambda: few().whole
        whole = self._compared()
        return whole if whole.failed is None else dataclasses.replace(result, few=whole.failed)

    def _compared(self) -> VerificationResult:
        with local_addresses(2) as addresses:
            return self._compared_at(addresses)

    def _compared_at(self, addresses: list[str]) -> VerificationResult:
        initial = os.memfd_create("initial")
        shared, tells = os.pipe()
        token = ring_token.new_token()

        def share(values: list) -> None:
            with os.fdopen(os.dup(initial), "wb") as file:
                pickle.dump(values, file, protocol=5)
            os.write(tells, b"1")

        def taken() -> list:
            os.close(tells)
            if not os.read(shared, 1):
                raise PeerLostError(0, "the worker whose weights it was to begin with has failed")
            return read_memory(initial)

        def worker(rank: int):
            from raytf.worker import verification

            return verification.as_worker(self._trial(), self._eagerly, rank, addresses, token, share)

        def device(initial_values: Callable[[], list], repeats: bool = False):
            from raytf.worker import verification

            return verification.on_one_device(self._trial(), self._eagerly, initial_values, repeats)

        runs = [
            start_run(lambda: worker(0)),
            start_run(lambda: worker(1)),
            start_run(lambda: device(taken)),
        ]
        os.close(tells)
        two, second, single = self._ended(runs)
        if (done := _unable(single, two, second)) is not None:
            return done
        self._whole_s = single.get("whole_s")
        candidates = differing_values(single, two)
        alike = two["digest"] == second["digest"]
        if not candidates and alike:
            return VerificationResult()
        (repeated,) = self._ended([start_run(lambda: device(lambda: read_memory(initial), repeats=True))])
        if "error" in repeated:
            return VerificationResult(failed=f"one device could not train a second time: {repeated['error']}")
        return compare_runs(single, two, repeated, candidates, alike)

    def _ended(self, runs: Sequence[ForkedTraining]) -> list[dict]:
        """Returns the outcome of each run; ends all runs at the timeout, or if the requesting process has ended."""
        running = {os.pidfd_open(run.pid): run for run in runs}
        poll = select.poll()
        for descriptor in running:
            poll.register(descriptor, select.POLLIN)
        try:
            while running:
                for descriptor, _ in poll.poll(_CHECK_INTERVAL * 1000):
                    poll.unregister(descriptor)
                    os.waitpid(running.pop(descriptor).pid, 0)
                    os.close(descriptor)
                if os.getppid() != self._requester:
                    raise _ComparisonLostError
                if running and time.monotonic() > self._deadline:
                    raise TimeoutError(f"timeout after {timeouts.get().verify:g} s")
        finally:
            for run in running.values():
                os.kill(run.pid, signal.SIGKILL)
                os.waitpid(run.pid, 0)
        return [read_memory(run.memory) or {"error": "its process was killed"} for run in runs]


@contextlib.contextmanager
def local_addresses(count: int) -> Iterator[list[str]]:
    """Yields addresses of this host that no other process takes meanwhile, for workers in forks of this process."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", 0))
        yield [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]


def start_run(work: Callable[[], dict]) -> ForkedTraining:
    """Starts a fork of this process that calls `work`, and writes its result or its error into a memory file.

    The fork ends with this process, as Ray kills only the direct children of a worker.
    """
    memory, parent = os.memfd_create("outcome"), os.getpid()
    pid = os.fork()
    if pid:
        return ForkedTraining(pid, memory)
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent has ended before this call
            os._exit(1)
        try:
            result = work()
        except BaseException as error:
            result = {"error": one_line(error), "lost": isinstance(error, (PeerLostError, TimeoutError))}
        with os.fdopen(memory, "wb") as file:
            pickle.dump(result, file, protocol=5)
    finally:
        os._exit(0)


def read_memory(memory: int) -> Any:
    """Returns the object that another process has written into a memory file; None if the file is empty."""
    with os.fdopen(os.dup(memory), "rb") as file:
        file.seek(0)
        return pickle.load(file) if os.fstat(memory).st_size else None


def _unable(single: dict, double: dict, other: dict) -> VerificationResult | None:
    """Returns why nothing can be compared, or a failure on two workers only; otherwise None."""
    skipped = next((run["skipped"] for run in (single, double, other) if "skipped" in run), None)
    if skipped is not None:
        return VerificationResult(skipped=skipped)
    failures = [run for run in (double, other) if "error" in run]
    causes = [run for run in failures if not run.get("lost")]
    if "error" in single and not single.get("lost"):
        return VerificationResult(failed=f"one device fails on them: {single['error']}")
    if causes and "error" not in single:
        return VerificationResult(
            differences=(f"a step fails on two workers, and not on one device: {causes[0]['error']}",)
        )
    if failures or "error" in single:
        return VerificationResult(failed=(causes or failures or [single])[0]["error"])
    return None
