"""Records throughput, waits, communication and memory for each epoch, for TensorBoard and `raytf report`."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import posixpath
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import pyarrow.fs
import tensorflow as tf

from raytf import activity, logs, procfs
from raytf.errors import first_line
from raytf.parallel import model_optimizers
from raytf.worker.part import Training, TrainingPart

logger = logs.get_logger(__name__)

# Folder in the run's folder, with a file of JSON lines for each rank.
FOLDER = "figures"
# Name of the TensorBoard run, next to "train" and "validation".
_SYSTEM = "system"
# Object stores cannot append: the whole file is written again, at most once in so many seconds.
_AGAIN_INTERVAL = 30.0
_SHOWN = (
    "learning_rate",
    "examples_per_second",
    "step_seconds",
    "input_wait",
    "communication",
    "checkpoint_seconds",
    "memory_bytes",
)


def ends_on_error(content: str) -> Callable[[Callable], Callable]:
    """Makes a method that writes do nothing after its first error, which it logs: the training continues.

    The object notes this in its `_failed`, which is False at first.

    Args:
        content: What the method writes, in the plural.
    """

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def call(self, *args, **kwargs) -> None:
            if self._failed:
                return
            try:
                method(self, *args, **kwargs)
            except Exception as error:  # file systems of fsspec have errors of their own
                self._failed = True
                logger.warning(
                    f"{content} end here, as they cannot be written: {first_line(error)}. Training continues without "
                    "them. Mend the storage; a restart of the run writes them again"
                )

        return call

    return decorate


class FiguresCallback(TrainingPart):
    """Records figures of this worker at the end of each epoch; costs nothing in steps.

    Args:
        position: A `callbacks.FeedCallback`, which counts steps.
        global_batch: Rows of a step, over all workers.
        rank: Rank of this worker.
        size: Number of workers.
        waited: Function that returns the seconds for which steps have waited for rows in all. None if other processes
            run the steps: then waits and communication are not known in this process.
        write: Functions called with the figures, and with None at the end; see `FiguresFile` and `events_writer`.
    """

    def __init__(
        self,
        position,
        global_batch: int,
        rank: int,
        size: int,
        waited: Callable[[], float] | None,
        write: Sequence[Callable[[Mapping[str, Any] | None], object]],
    ):
        super().__init__()
        self._position, self._batch, self._waited, self._write = position, global_batch, waited, list(write)
        self._worker = {"rank": rank, "workers": size, "host": socket.gethostname(), "pid": os.getpid()}

    @classmethod
    def create(cls, training: Training) -> FiguresCallback | None:
        """Returns the part if anything shows its figures: `raytf report`, or the user's TensorBoard callback."""
        session, storage = training.session, training.session.storage
        files = [] if storage is None else [storage.storage_filesystem, storage.experiment_fs_path]
        write: list = [FiguresFile(*files, session.rank)] if files else []
        events = events_writer(training.users) if session.rank == 0 else None
        write += [] if events is None else [events]
        size = training.workers or session.size
        args = training.position, training.global_batch, session.rank, size, training.waited, write
        return cls(*args) if write else None

    def on_train_begin(self, logs=None):
        self._last = self._began = self._now()
        self._trained: dict[str, float | None] | None = None

    def on_epoch_begin(self, epoch, logs=None):
        self._began, self._trained = self._now(), None

    def on_test_begin(self, logs=None):
        self._trained = self._trained or self._now()  # the epoch's validation is no training

    def on_epoch_end(self, epoch, logs=None):
        current = self._now()
        figures = self._worker | {"epoch": epoch + 1, "step": self._position.step, "time": time.time()}
        figures |= epoch_figures(self._began, self._trained or current, self._batch)
        figures["checkpoint_seconds"] = current["checkpoint"] - self._last["checkpoint"]
        figures |= {"learning_rate": _rate(self.model), "memory_bytes": procfs.memory_bytes()}
        self._last = current
        for write in self._write:
            write(figures)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Writes the last figures at the end, also if a stop or an error ends the training."""
        try:
            yield
        finally:
            for write in self._write:
                write(None)

    def _now(self) -> dict[str, float | None]:
        spent, makes_steps = activity.tracker.seconds_by_phase(), self._waited is not None
        return {
            "clock": time.monotonic(),
            "step": self._position.step,
            "input": self._waited() if makes_steps else None,
            "communication": spent[activity.SUM] + spent[activity.COLLECTIVE] if makes_steps else None,
            "checkpoint": spent[activity.CHECKPOINT],
        }


def epoch_figures(
    began: Mapping[str, float | None], ended: Mapping[str, float | None], batch: int
) -> dict[str, float | None]:
    """Returns figures of the steps between two moments; shares are of their time, 0 to 1, or None.

    Args:
        began: Clock, other times in seconds, and number of steps at the first moment.
        ended: The same at the second moment.
        batch: Rows of a step.
    """
    seconds = max(1e-9, ended["clock"] - began["clock"])
    steps = ended["step"] - began["step"]

    def share(name: str) -> float | None:
        return None if ended[name] is None else min(1.0, max(0.0, ended[name] - began[name]) / seconds)

    return {
        "seconds": seconds,
        "steps": steps,
        "examples_per_second": steps * batch / seconds,
        "step_seconds": seconds / max(1, steps),
        "input_wait": share("input"),
        "communication": share("communication"),
    }


class FiguresFile:
    """Appends figures to the file of a rank in a run's folder. If the storage fails it stops, but not the training.

    Args:
        filesystem: A `pyarrow.fs.FileSystem`.
        run: Path of the run's folder in the file system.
        rank: Rank of this worker.
    """

    def __init__(self, filesystem: pyarrow.fs.FileSystem, run: str, rank: int):
        self._filesystem, self._folder = filesystem, posixpath.join(run, FOLDER)
        self._path, self._failed = posixpath.join(self._folder, f"worker_{rank}.jsonl"), False
        self._appends = isinstance(filesystem, pyarrow.fs.LocalFileSystem)
        self._text: bytes | None = None
        self._written = float("-inf")

    @ends_on_error("Figures for `raytf report`")
    def __call__(self, figures: Mapping[str, Any] | None) -> None:
        self._flush() if figures is None else self._add(json.dumps(figures).encode() + b"\n")

    def _add(self, line: bytes) -> None:
        if self._appends:
            os.makedirs(self._folder, exist_ok=True)
            with open(self._path, "ab") as file:
                file.write(line)
            return
        if self._text is None:
            self._text = self._existing_size()
        self._text += line
        if time.monotonic() - self._written >= _AGAIN_INTERVAL:
            self._flush()

    def _flush(self) -> None:
        if self._text is not None:
            with self._filesystem.open_output_stream(self._path) as file:
                file.write(self._text)
            self._written = time.monotonic()

    def _existing_size(self) -> bytes:
        if self._filesystem.get_file_info(self._path).type != pyarrow.fs.FileType.File:
            return b""
        with self._filesystem.open_input_stream(self._path) as file:
            return file.read()


def events_writer(callbacks: Sequence[keras.callbacks.Callback]) -> Callable[[Mapping[str, Any] | None], None] | None:
    """Returns a function that writes figures next to the events of a TensorBoard callback; None without one.

    Args:
        callbacks: Callbacks of the training, including raytf's.
    """
    tensorboard = next((callback for callback in callbacks if isinstance(callback, keras.callbacks.TensorBoard)), None)
    return None if tensorboard is None else _FigureWriter(os.path.join(str(tensorboard.log_dir), _SYSTEM))


class _FigureWriter:
    """Writes events of figures in a separate folder, as TensorBoard reads one file of a folder at a time."""

    def __init__(self, folder: str):
        self._folder, self._writer, self._failed = folder, None, False

    @ends_on_error("Figures for TensorBoard")
    def __call__(self, figures: Mapping[str, Any] | None) -> None:
        if figures is None:
            return
        with tf.device("CPU:0"):
            self._writer = self._writer or tf.summary.create_file_writer(self._folder)
            with self._writer.as_default(step=figures["epoch"] - 1):  # as in Keras
                for name in _SHOWN:
                    if figures.get(name) is not None:
                        tf.summary.scalar(name, figures[name])
            self._writer.flush()


def _rate(model) -> float | None:
    """Returns the current learning rate of the model's optimizer, also of a schedule; None without one."""
    optimizer = model_optimizers.unscaled(model.optimizer)
    rate = getattr(optimizer, "learning_rate", None)
    return None if rate is None else float(keras.ops.convert_to_numpy(rate))
