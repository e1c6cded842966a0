"""Compares two workers with one process on the model of a `raytf.fit` during its start; see `train/verify`.

It uses its own process, as workers that stay between calls have already run TensorFlow.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray

from raytf import logs, procfs, timeouts
from raytf.data.stored import StoredDataset
from raytf.errors import one_line
from raytf.fitting import fit_worker
from raytf.fitting.fit_worker import FitDataset, SentModel
from raytf.runtime import connection
from raytf.runtime.answers import collect_answers
from raytf.runtime.processes import Process, start_process, thread_variables, worker_environment
from raytf.storage import priority
from raytf.train import verify
from raytf.train.entry import import_raytf

logger = logs.get_logger(__name__)

_NICE = 10
_MOST_BYTES = 64 << 20
_SHUT_DOWN = "Ray was shut down before its end"
# Comparisons that wait for an earlier one.
_MOST_WAITING = 8


class BackgroundVerification:
    """A comparison that runs in a thread, and in a process of the cluster.

    Args:
        model: Name of the model.
        scaling_config, run_config: Configs of the workers.
        word: "warn" or "error".
        sending: The model, with its data.
        rows: Rows for training and validation, by name.
        blocks: The first block of each, in this process.
        drop: Called if this comparison is left out, as too many later ones wait.
    """

    def __init__(
        self,
        model: str,
        scaling_config,
        run_config,
        word: str,
        sending: SentModel,
        rows: Mapping[str, FitDataset],
        blocks: Mapping[str, StoredDataset],
        drop: Callable[[], None],
    ):
        self._model, self._word, self._outcome, self._reported = model, word, None, False
        self._location, self._drop = logs.user_location(), drop
        self._extra_wait, self._is_begun = False, False
        self._is_urgent, self._pid, self._session = word == "error", None, connection.session()
        few = {name: verify.few_rows(block) for name, block in blocks.items()}
        size = sum(getattr(value, "nbytes", 0) for value in sending.values.values())
        if few["train"] is None or size > _MOST_BYTES:
            self._outcome = verify.VerificationResult(
                skipped="one row" if few["train"] is None else f"{size >> 20} MiB of weights"
            )
            self._thread = None
            return
        parts = {
            name: (part.batch, part.structure, few[name], verify.whole_batch(blocks[name], part.sampling.global_batch))
            for name, part in rows.items()
            if few.get(name)
        }
        arguments = scaling_config, run_config, sending, parts
        self._thread = threading.Thread(target=self._run, args=arguments, name="raytf_verify", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Warns of the outcome, once it is known."""
        if self._outcome is not None and not self._reported:
            self._reported = True
            result = dataclasses.replace(self._outcome, model=f"the model {self._model!r}")
            verify.report_result(result, self._word, self._location)

    def wait(self, seconds: float, more: bool = False) -> None:
        """Waits for the outcome, and warns of it.

        Args:
            seconds: Timeout.
            more: Whether the thread warns of a later outcome.

        Raises:
            ConfigError: With "error", two workers do not train as one process does, or the outcome is unknown by then.
        """
        if self._thread is not None:
            self._thread.join(seconds)
        if self._outcome is None and self._word == "error":
            self._outcome = verify.VerificationResult(failed=f"no end after {seconds:g} s")
        self._extra_wait = more
        self.check()
        if more and not self._reported:
            atexit.register(self._give_up)

    def _give_up(self) -> None:
        """Waits for the outcome at the end of this process, and logs if it is unknown."""
        if (seconds := _exit_deadline() - time.monotonic()) > 0:
            logger.info(f"verify: the comparison is still running; the program waits for it, {seconds:.0f} s at most")
            self._is_urgent = True
            self._raise_priority()
            self._thread.join(seconds)
        not_begun = verify.VerificationResult(failed="the program ended before its turn; verify='error' waits for it")
        self._outcome = self._outcome or (verify.NOT_IN_TIME if self._is_begun else not_begun)
        self.check()

    def _run(self, *arguments) -> None:
        with _comparison_queue.turn() if self._word == "warn" else contextlib.nullcontext(True) as is_taken:
            if is_taken:
                self._is_begun = True
                self._compare(*arguments)
            else:
                self._outcome = verify.VerificationResult(skipped="models of later calls were compared instead")
                self._drop()
                _log_dropped(self._model)
        if self._extra_wait:
            atexit.unregister(self._give_up)
            self.check()

    def _raise_priority(self) -> None:
        """Sets the normal priority of the comparison, if this process waits for it and may do that."""
        if self._is_urgent and self._pid is not None:
            priority.set_normal_with_children(self._pid)

    def _is_connected(self) -> bool:
        """Returns whether Ray is that of the call: a function of Ray would start another one."""
        return connection.session() == self._session

    def _check_connected(self) -> None:
        """Raises an error if Ray is not that of the call, as answers would never come."""
        if not self._is_connected():
            raise RuntimeError(_SHUT_DOWN)

    def _compare(self, scaling_config, run_config, sending: SentModel, parts: dict) -> None:
        try:
            self._check_connected()
            environment = worker_environment(
                run_config, scaling_config, thread_variables(1) | {"CUDA_VISIBLE_DEVICES": "-1"}
            )
            process = start_process(Process, ray.get_runtime_context().get_node_id(), environment, soft=True)
            try:
                importing, settings = process.execute.remote(_import, not self._is_urgent), timeouts.get()
                common = {"names": ["a process"], "check": self._check_connected}
                ((pid, machine),) = collect_answers([importing], settings.imports, "its imports", **common)
                self._pid = pid if machine == procfs.machine_id() else None
                self._raise_priority()
                call = process.execute.remote(
                    timeouts.call_with, settings, compare_workers, sending, parts, self._word == "warn"
                )
                (self._outcome,) = collect_answers([call], settings.verify_error + 60, "its outcome", **common)
            finally:
                if self._is_connected():
                    ray.kill(process)
        except Exception as error:
            why = one_line(error) if self._is_connected() else _SHUT_DOWN
            self._outcome = self._outcome or verify.VerificationResult(failed=why)


class _ComparisonQueue:
    """Admits one comparison of this process at a time, in their order. Each takes a core and some 800 MB.

    Calls in a loop may be faster than comparisons: of more than `_MOST_WAITING` the oldest is dropped.
    """

    def __init__(self):
        self._changed, self._is_taken = threading.Condition(), False
        self._waiting: list[object] = []

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Waits until no earlier comparison runs, each of which has a timeout; yields False if it was dropped."""
        ticket = object()
        with self._changed:
            self._waiting = [*self._waiting, ticket][-_MOST_WAITING:]
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: ticket not in self._waiting or (not self._is_taken and self._waiting[0] is ticket)
            )
            if admitted := ticket in self._waiting:
                self._waiting.remove(ticket)
                self._is_taken = True
        try:
            yield admitted
        finally:
            if admitted:
                with self._changed:
                    self._is_taken = False
                    self._changed.notify_all()


_comparison_queue = _ComparisonQueue()


@functools.cache
def _log_dropped(model: str) -> None:
    """Logs once for each name that a model is not compared; models of a loop have few names."""
    logger.info(
        f"verify: the model {model!r} is not compared with one process: {_MOST_WAITING} later calls came before its "
        "turn; verify='error' compares the model of each call"
    )


@functools.cache
def _exit_deadline() -> float:
    """Returns the time until which all comparisons of a process that ends are awaited."""
    return time.monotonic() + timeouts.get().verify_end


def _import(at_low_priority: bool) -> tuple[int, str]:
    """Imports what a comparison needs; returns (the id of this process, that of its machine)."""
    if at_low_priority:
        os.nice(_NICE)
    import_raytf()
    return os.getpid(), procfs.machine_id()


def compare_workers(sending: SentModel, parts: dict[str, tuple], low_priority: bool) -> verify.VerificationResult:
    """Compares two workers with one device, in a process that has run no TensorFlow.

    Args:
        sending: The model, with its data.
        parts: (batch, structure, result of `verify.few_rows`, that of `verify.whole_batch`) of "train", and optionally
            of "validation".
        low_priority: See `verify.start_comparison`.
    """
    batch, structure, (rows, first), whole = parts["train"]
    validation_batch, validation_structure, validation, whole_validation = None, structure, None, None
    if "validation" in parts:
        validation_batch, validation_structure, (validation, _), whole_validation = parts["validation"]

    def build() -> Any:
        from raytf.fitting import transport

        (model,), _ = transport.deserialize(sending.data, sending.values)
        return model

    def trial():
        from raytf.fitting import transport
        from raytf.worker.verification import VerificationTask

        with contextlib.suppress(OSError):
            os.chdir(sending.folder)
        transport.apply_settings(sending.settings)
        few = VerificationTask(
            build=build,
            batch=batch,
            rows=rows,
            validation=validation,
            global_batch=first,
            structure=lambda dataset: fit_worker.restructure(dataset, structure),
            validation_batch=validation_batch,
            validation_structure=lambda dataset: fit_worker.restructure(dataset, validation_structure),
        )
        return few.with_whole_batch(whole, whole_validation)

    result = verify.outcome(verify.start_comparison(trial, low_priority), timeouts.get().verify_error)
    return result or verify.VerificationResult(failed=f"no end after {timeouts.get().verify_error:g} s")
