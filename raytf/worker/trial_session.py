"""The session of a trial in a sweep: reports and checkpoints go to the trial's actor on its request."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
from collections.abc import Iterator, Mapping
from typing import Any

from raytf import activity
from raytf.collectives import recovery_client
from raytf.events import RunEvent
from raytf.storage import checkpoint_files, scratch, step_folders
from raytf.storage.folder_contents import size_of_files, write_files
from raytf.worker.checkpoint import CheckpointSnapshot
from raytf.worker.checkpoint_saver import CheckpointSaver
from raytf.worker.session import TRIAL, ReportedFiles, Session


class TrialStopped(BaseException):
    """Ends a trial's train loop at a report. It is no `Exception`, so that the user's `except Exception` misses it."""


@dataclasses.dataclass(frozen=True)
class TrialCheckpointDir:
    """Location of a trial's checkpoints within epochs; Tune requests those of their ends.

    Args:
        filesystem: A `pyarrow.fs.FileSystem`.
        folder: Path of the trial's own folder in the file system.
        reports: Number of reports that the trial has made before.
    """

    filesystem: Any
    folder: str
    reports: int


class TrialSession(Session):
    """Session of a trial in a worker group. Its thread pauses at each report until a command: go, save or stop.

    Args:
        rank: Rank of this worker.
        size: Number of workers.
        folder: Folder of the checkpoint to resume from, or None.
        name: Name of the trial.
        step_checkpoints: Location of checkpoints within epochs, or None without any.

    Attributes:
        waits: Whether it pauses at a report.
    """

    recovers = True

    def __init__(
        self, rank: int, size: int, folder: str | None, name: str, step_checkpoints: TrialCheckpointDir | None = None
    ):
        super().__init__(rank, size)
        self.name, self.folder, self.saves = name, folder, step_checkpoints is not None
        self._saver = (
            CheckpointSaver(step_checkpoints.filesystem, step_checkpoints.folder)
            if step_checkpoints is not None and rank == 0
            else None
        )
        self._reports = 0 if step_checkpoints is None else step_checkpoints.reports
        self._snapshot: CheckpointSnapshot | ReportedFiles | None = None
        self._taken: dict[str, bytes] | None = None  # files that were already written
        self.waits = False
        self.commands: queue.SimpleQueue = queue.SimpleQueue()
        self.events: queue.SimpleQueue = queue.SimpleQueue()

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[str | None]:
        """Yields a folder as `RaySession.checkpoint`; Tune selects the checkpoint, and a damaged one is an error."""
        with contextlib.ExitStack() as stack:
            if self._saver is not None:
                stack.callback(self._saver.close)
            if (replacement_state := recovery_client.client.replacement_state) is not None:
                self.folder = stack.enter_context(scratch.temporary_folder(size_of_files(replacement_state.files)))
                write_files(replacement_state.files, self.folder)
                self._reports = replacement_state.shared_state["reports"]
            if self.folder is not None:
                checkpoint_files.check_folder(self.folder, contents=self.rank == 0)
            yield self.folder

    def reports_made(self) -> int:
        return self._reports

    def emit(self, event: RunEvent) -> None:
        self.events.put(("event", event))

    def save_step(self, name: str, model, parts: Mapping[str, Any], writers: int = 1) -> None:
        parts = {**parts, TRIAL: json.dumps({"reports": self._reports})}
        self._saver.save_async(name, model, parts, last=self.stop_request() is not None)

    def ready(self, model, in_memory: bool, writers: int = 1) -> None:
        if self._saver is not None:
            self._saver.ready(model, in_memory)

    def report(self, metrics: dict, snapshot: CheckpointSnapshot | ReportedFiles | None, keep: bool = False) -> None:
        """Sends the metrics to the group, and waits for a command; a checkpoint is written only on request.

        Without a `snapshot` an earlier report's remains valid.
        """
        self._reports += 1
        # a training that is requested to stop may end after this report, and nothing else saves it then
        if self._saver is not None and snapshot is not None and snapshot.step is not None and self.stop_request():
            self.save_step(step_folders.folder_name(snapshot.step), snapshot.model, snapshot.parts())
        if snapshot is not None:
            self._snapshot, self._taken = snapshot, None
            if keep and self.rank == 0:
                self._taken = self._files()
        self.events.put(("report", metrics))
        self.waits = True
        with activity.tracker.collective(activity.REPORT):
            self.park()
        self.waits = False

    def park(self) -> None:
        """Executes commands until "go".

        Raises:
            TrialStopped: The command is "stop".
        """
        while (command := self.commands.get()) != "go":
            if command == "stop":
                raise TrialStopped
            self.events.put(("saved", self._files()))

    def _files(self) -> dict[str, bytes] | None:
        """Returns the files of a checkpoint of the current state, by name; None if this worker wrote none."""
        if self._snapshot is None or not (self._snapshot.everyone or self.rank == 0):
            return None
        return self._snapshot.files() if self._taken is None else self._taken
