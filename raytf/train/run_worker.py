"""A worker of a run: a process that trains in a thread, and sends its events to the driver. On a worker.

Ray Train's functions (`ray.train.report`, `get_context` and others) work in the train loop as under Ray Train.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.train import CheckpointUploadMode

from raytf import activity
from raytf.collectives import recovery_client
from raytf.collectives.recovery_client import BlockedWorker
from raytf.compat import loggers, ray_train
from raytf.compat.ray_train import (
    CheckpointConsistencyMode,
    ReportedCheckpoint,
    set_train_fn_utils,
)
from raytf.console.quiet import log_levels
from raytf.errors import ConfigError
from raytf.events import RunEvent
from raytf.runtime.failures import is_consequence, user_error
from raytf.train.group import LoopEnded, MemberProcess, PeerLossNoticed, Report, WaitingForRing
from raytf.train.session_functions import TrialContext, TrialSetup, TrialTrainFnUtils
from raytf.worker import clearing, stop
from raytf.worker.stop import StoppedForRestartError

# Seconds for which a worker's process waits for an event before it answers other calls.
_BEAT_INTERVAL = 0.2


@dataclass(frozen=True)
class Request:
    """A request of the training thread, which waits for the answer.

    Args:
        kind: "meet": all workers get rank 0's `value`, when all have requested it. "checkpoint": the last checkpoint.
            "reported": all reported checkpoints, when those of this worker are listed.
        value: Value of this worker; for "reported" (whether all have to be validated, seconds to wait or None).
    """

    kind: str
    value: Any = None


class RunJob:
    """A train loop for the workers.

    Args:
        train: The loop, with its context, without arguments.
        context: Ray's TrainRunContext.
        datasets: `ray.data.Dataset` by name, or functions that return one.
        nodes: Node id of each worker, by rank.
        validates: Whether reports may ask for a validation.
    """

    def __init__(
        self, train: Callable[[], Any], context, datasets: Mapping[str, Any], nodes: Sequence[str], validates=False
    ):
        config, self.train, self.validates = context.run_config, train, validates
        self.name, self.storage, self.level = config.name, config.storage_context, config.logging_config.log_level
        given = {name: item() if callable(item) else item for name, item in datasets.items()}
        self.trial_setup = TrialSetup(nodes=tuple(nodes), datasets=given, dataset_config=context.dataset_config)


class Channel:
    """The training thread's connection to the driver, which takes its events one by one.

    Args:
        rank, size, name: Of this worker, and of the run.
    """

    is_in_driver = False  # whether this process is the driver's

    def __init__(self, rank: int, size: int, name: str):
        self.rank, self.size, self.name = rank, size, name
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self._room = threading.Semaphore(1)  # for an event that waits to be taken; events of the run need none
        self.answers: queue.SimpleQueue = queue.SimpleQueue()

    def check(self) -> None:
        """Raises an error if the run is over, at the begin of each report."""

    def send(self, event: Report | Request | LoopEnded) -> None:
        """Sends an event; blocks until the driver has taken the one before."""
        self._room.acquire()
        self._events.put(event)

    def send_run_event(self, event: RunEvent) -> None:
        """Sends an event of the run; does not block."""
        self._events.put(event)

    def take(self, seconds: float = 0.0) -> Any:
        """Returns the next event for the driver; raises `queue.Empty` after so many seconds without one."""
        event = self._events.get(timeout=seconds)
        if not isinstance(event, RunEvent):
            self._room.release()
        return event

    def request(self, kind: str, value: Any = None) -> Any:
        """Returns the driver's answer to a `Request`."""
        self.send(Request(kind, value))
        return self.answers.get()

    def wake(self) -> None:
        """Has the driver look after the workers; an event that waits already does so."""
        if self._room.acquire(blocking=False):
            self._events.put(PeerLossNoticed())


class RunTrainFnUtils(TrialTrainFnUtils):
    """Ray Train's functions in a run.

    Args:
        channel: Connection to the driver.
        job: The train loop.

    Attributes:
        reports: Number of `report_later` calls, or what a replacement worker has set.
    """

    def __init__(self, channel: Channel, job: RunJob):
        super().__init__(channel, job.trial_setup, lambda value: channel.request("meet", value), "")
        self._channel, self._storage, self._validates = channel, job.storage, job.validates
        self._context = TrialContext(job.name, channel.rank, job.trial_setup, job.storage)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "raytf_reports")
        self._failed: Exception | None = None
        self._last: concurrent.futures.Future | None = None
        self.reports = 0

    def report(
        self,
        metrics,
        checkpoint=None,
        checkpoint_dir_name=None,
        checkpoint_upload_mode=CheckpointUploadMode.SYNC,
        delete_local_checkpoint_after_upload=None,
        checkpoint_upload_fn=None,
        validation=False,
    ):
        self._channel.check()
        if validation and not self._validates:
            raise ConfigError(
                "report(validation=...) needs a function that validates",
                "a trainer without validation_config",
                "Pass validation_config=ray.train.ValidationConfig(...) to a trainer with workers",
            )
        delete = delete_local_checkpoint_after_upload
        delete = checkpoint_upload_mode is CheckpointUploadMode.ASYNC if delete is None else delete
        name = self._broadcast(checkpoint_dir_name or self._storage.make_default_checkpoint_dir_name())

        def keep() -> tuple[Any, Any]:
            if checkpoint is None:
                return None, False
            if checkpoint_upload_mode is CheckpointUploadMode.NO_UPLOAD:
                stored_checkpoint = checkpoint
            elif checkpoint_upload_fn is not None:
                stored_checkpoint = checkpoint_upload_fn(checkpoint, name)
            else:
                stored_checkpoint = self._storage.persist_current_checkpoint(checkpoint, name)
            if not ray_train.is_managed_checkpoint(self._storage, stored_checkpoint):
                raise ConfigError(
                    "A checkpoint that is reported must be in the run's folder",
                    f"{stored_checkpoint} for the run {self._channel.name!r}",
                    "Write it below ray.train.get_context().get_storage().experiment_fs_path",
                )
            if delete and checkpoint_upload_mode is not CheckpointUploadMode.NO_UPLOAD:
                checkpoint.filesystem.delete_dir(checkpoint.path)
            return stored_checkpoint, validation

        sent = self.report_later(metrics, keep)
        if checkpoint_upload_mode is not CheckpointUploadMode.ASYNC or self._channel.is_in_driver:
            sent.result()

    def report_later(self, metrics: dict[str, Any], checkpoint_of: Callable[[], tuple[Any, Any]]):
        """Reports later, as `ray_train.report_later`."""
        self._channel.check()
        self.reports += 1

        def send_report() -> None:
            try:
                self._channel.send(Report(metrics, *checkpoint_of()))
            except Exception as error:  # an error in this thread would be lost
                self._failed = error
                self._channel.send(LoopEnded(error=with_stack(error)))
                raise

        self._last = self._thread.submit(send_report)
        return self._last

    def finish_reports(self) -> None:
        """Blocks until all reports are made; raises the error of one that failed."""
        self._thread.shutdown()
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """Drops reports that wait."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def report_loss(self) -> None:
        """Makes the driver check the workers."""
        self._channel.wake()

    def send_run_event(self, event: RunEvent) -> None:
        """Sends an event of the run to the driver."""
        self._channel.send_run_event(event)

    def get_checkpoint(self):
        return self._channel.request("checkpoint")

    def get_all_reported_checkpoints(
        self, consistency_mode=CheckpointConsistencyMode.VALIDATED, timeout_s=None
    ) -> list[ReportedCheckpoint]:
        if self._last is not None:
            concurrent.futures.wait([self._last], timeout_s)
        return self._channel.request("reported", (consistency_mode is CheckpointConsistencyMode.VALIDATED, timeout_s))


def with_stack(error: BaseException) -> Exception:
    """Returns an error with its stack, which is not logged: the driver shows the first worker's one alone."""
    with log_levels({loggers.TRAIN_ERRORS: logging.CRITICAL}):
        return ray_train.construct_user_exception_with_traceback(error)


class RunWorker(MemberProcess):
    """A worker of a run."""

    def __init__(self):
        self._thread: threading.Thread | None = None
        self._channel: Channel | None = None
        self._error: Exception | None = None

    def begin(self, job: RunJob, rank: int) -> None:
        """Starts the train loop."""
        self._error, self._channel = None, Channel(rank, len(job.trial_setup.nodes), job.name)
        self._thread = threading.Thread(target=self._run, args=(job, self._channel), daemon=True)
        self._thread.start()

    def _run(self, job: RunJob, channel: Channel) -> None:
        utils = RunTrainFnUtils(channel, job)
        set_train_fn_utils(utils)
        try:
            logging.getLogger("ray.train").setLevel(job.level)
            os.makedirs(job.storage.local_working_directory, exist_ok=True)
            os.chdir(job.storage.local_working_directory)
            ended = LoopEnded(job.train())
            utils.finish_reports()
        except BaseException as error:
            self._error = with_stack(error)
            ended = LoopEnded(error=self._error)
            utils.close()
        finally:
            set_train_fn_utils(None)
        channel.send(ended)

    def next_event(self, seconds: float = _BEAT_INTERVAL) -> Any:
        """Returns the next event of the training; after a timeout None, or `WaitingForRing` if it does.

        The timeout lets this process answer other calls.
        """
        with contextlib.suppress(queue.Empty):
            return self._channel.take(seconds)
        return WaitingForRing() if isinstance(recovery_client.client.waiting(), BlockedWorker) else None

    def answer(self, value: Any) -> None:
        """Answers a request of the training thread."""
        self._channel.answers.put(value)

    def poll_recovery_state(self, seconds: float) -> tuple[BlockedWorker | str | None, Exception | None]:
        """Returns `RecoveryClient.waiting(seconds)` of this process, and the training's error or None."""
        return recovery_client.client.waiting(seconds), self._error

    def leave(self, seconds: float) -> bool:
        """Prepares this process for another training; returns False if the last one has not ended, or has failed.

        Args:
            seconds: Seconds to wait for the end of the running training.
        """
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):  # it may wait to send its last event
                self._channel.take()
            self._thread.join(min(seconds, _BEAT_INTERVAL))
            seconds -= _BEAT_INTERVAL
            if seconds <= 0:
                return False
        cause = user_error(self._error)
        if cause is None or not (isinstance(cause, StoppedForRestartError) or is_consequence(cause)):
            return False
        from raytf.collectives import exchange

        self._error = cause = None  # its frames hold the model
        exchange.leave_all()
        recovery_client.client.reset()
        stop.stop_barrier.reset()
        activity.tracker.reset()
        os.environ.pop("TF_CONFIG", None)
        clearing.clear_training()
        return True
