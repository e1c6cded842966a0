"""Checks at an epoch's end, on all workers at once, for a loss that is NaN or infinite, and diverged weights."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from raytf.collectives import communicator
from raytf.collectives.communicator import spans_workers
from raytf.logs import warn_user
from raytf.parallel import local_sgd, model_optimizers, own_state
from raytf.parallel.callbacks import settable_rate
from raytf.worker.part import Training, TrainingPart

# Losses that are read at once, and delay of a read in steps, after which they are computed in any case. A loss is a
# mean since the epoch's begin. So the last one is enough; the others are read if it is not finite.
_READ_BATCH, _READ_DELAY = 16, 4
# With nan="stop" workers agree on a stop every so many steps, as each agreement is an exchange.
_AGREE_STEPS = 100
# Bytes of each variable in its checksum: workers that have diverged differ everywhere in a variable.
_CHECKED_BYTES = 4 << 20


class EpochChecks(TrainingPart):
    """Warns of a loss that is NaN or infinite, with its first step, and of workers with different weights or rates.

    Args:
        nan: "warn", "stop" (warn, and stop the training), or "ignore".
        users: The user's callbacks.
        rank: Rank of this worker.
        size: Number of workers.
    """

    raytf_after_agreement = True

    def __init__(self, nan: str, users: Sequence = (), rank: int = 0, size: int = 1):
        super().__init__()
        self._nan, self._rank, self._size = nan, rank, size
        self._terminates = any(isinstance(c, keras.callbacks.TerminateOnNaN) for c in users)
        self._waiting: list[tuple] = []
        self._epoch, self._bad, self._step = 0, -1, -1
        self._warned = self._warned_of_divergence = False
        self._knows_step = True  # whether the first step is known
        self._executed = 0

    @classmethod
    def create(cls, training: Training) -> EpochChecks:
        return cls(training.options.nan, training.users, training.session.rank, training.session.size)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch, self._step, self._executed = epoch, -1, 0
        self._waiting.clear()

    def on_train_batch_end(self, batch, logs=None):
        first, self._step = self._step + 1 if self._step >= 0 else batch, batch
        if self._nan == "ignore" or (self._bad >= 0 and self._nan != "stop"):
            return
        outputs = self.model.__dict__.get("_raytf_last", (logs,))[0]  # for this worker's own rows
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if loss is not None and self._bad < 0:
            self._waiting.append((first, loss))
            if len(self._waiting) == _READ_BATCH + _READ_DELAY:
                self._read_losses(_READ_BATCH)
        if self._nan == "stop":
            previous, self._executed = self._executed, batch + 1
            if previous // _AGREE_STEPS != self._executed // _AGREE_STEPS:
                self._drain()
                self._agree()

    def on_epoch_end(self, epoch, logs=None):
        self._drain()
        loss = (logs or {}).get("loss")
        if self._bad < 0 and self._nan != "ignore" and isinstance(loss, (int, float)) and not _is_finite(loss):
            self._bad, self._knows_step = 0, False  # the step is unknown, as with parameter servers
        if self._nan != "ignore" or self._compares():
            self._agree(end=True)
        if self._nan != "ignore" and not self._warned and (self._size == 1 or self._compares()):
            self._check_weights()

    def _check_weights(self) -> None:
        """Finds weights that stay NaN although the loss is finite, as relu maps NaN to 0."""
        for variable in self.model.trainable_variables:
            if "float" not in variable.dtype or np.isfinite(np.sum(_values(self.model, variable), dtype=np.float64)):
                continue
            self._warned = True
            if self._nan == "stop":  # on all workers, as they have the same weights
                self.model.stop_training = True
            if self._rank == 0:
                consequence = "The training stops because of nan='stop'. " if self._nan == "stop" else ""
                warn_user(
                    f"{variable.path} has weights that are NaN or infinite at the end of epoch {self._epoch + 1}, "
                    f"though the loss is finite. {consequence}Look for rows that are NaN or infinite.",
                    stacklevel=2,
                )
            return

    def _drain(self) -> None:
        if self._waiting:
            self._read_losses(len(self._waiting))

    def _read_losses(self, count: int) -> None:
        """Reads the last of the first `count` pending losses, and the ones before only if it is not finite."""
        losses, self._waiting = self._waiting[:count], self._waiting[count:]
        if _is_finite(losses[-1][1]):
            return
        self._bad = next(step for step, loss in losses if not _is_finite(loss))
        self._waiting.clear()

    def _compares(self) -> bool:
        """Returns whether all workers must have the same weights."""
        strategy = self.model.distribute_strategy
        return self._size > 1 and spans_workers(strategy) and local_sgd.averaging_interval(strategy) == 1

    def _agree(self, end: bool = False) -> None:
        """Exchanges the first step with a bad loss, and at an epoch's end checksums of weights and rates."""
        local_row = [self._bad, *(checksums(self.model) if end and self._compares() else (0, 0))]
        rows = self._exchanged(local_row)
        bad = {rank: int(row[0]) for rank, row in enumerate(rows) if row[0] >= 0}
        if bad and not self._warned:
            self._warned = True
            if self._rank == 0:
                warn_user(self._of_nan(bad), stacklevel=2)
        if bad and self._nan == "stop":
            self.model.stop_training = True
        if end and not self._warned_of_divergence and (rows[:, 1:] != rows[0, 1:]).any():
            self._warned_of_divergence = True
            self._warn_of_divergence(rows)

    def _exchanged(self, local_row: Sequence[int]) -> np.ndarray:
        """Returns a matrix with one row of numbers for each worker."""
        if self._size == 1 or not spans_workers(self.model.distribute_strategy):
            return np.array([local_row], np.int64)
        rows = np.zeros((self._size, len(local_row)), np.int64)
        rows[self._rank] = local_row
        (rows,) = communicator.sum_over_workers(self.model.distribute_strategy, [rows])
        return rows

    def _of_nan(self, bad: dict[int, int]) -> str:
        first = min(bad.values())
        ranks = [rank for rank, step in bad.items() if step == first]
        if self._size == 1:
            rows = ""
        elif len(ranks) == self._size:
            rows = ", with the rows of all workers"
        else:
            rows = f", with the rows of worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        if self._terminates and self.model.stop_training:
            advice = "keras.callbacks.TerminateOnNaN has ended the training"
        elif self._nan == "stop":
            advice = "The training stops because of nan='stop'"
        else:
            advice = (
                "The training continues; nan='stop' would end it. A lower learning rate, clipnorm, or a look at these "
                "rows may help"
            )
        location = f"since step {first + 1} of" if self._knows_step else "in"
        return (
            f"The loss is NaN or infinite {location} epoch {self._epoch + 1}"
            f"{rows if self._knows_step else ''}. {advice}."
        )

    def _warn_of_divergence(self, rows: np.ndarray) -> None:
        ranks = [rank for rank in range(self._size) if (rows[rank, 1:] != rows[0, 1:]).any()]
        variables = list(self.model.trainable_variables)
        crcs = self._exchanged([_checksum(self.model, v) for v in variables])
        paths = [v.path for i, v in enumerate(variables) if (crcs[:, i] != crcs[0, i]).any()]
        if self._rank != 0:
            return
        text = f"{paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "") if paths else "learning rates"
        warn_user(
            f"Worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} and worker 0 have other weights or rates "
            f"than each other at the end of epoch {self._epoch + 1}: {text}. Something changes them on each worker for "
            "itself, as a callback or a step does that draws a number or reads a clock. Draw from a seed that all "
            "have, or let the optimizer change them.",
            stacklevel=2,
        )


def _is_finite(loss) -> bool:
    return math.isfinite(float(np.mean(np.asarray(loss, np.float64))))


def checksums(model) -> tuple[int, int]:
    """Returns (checksum of the trained weights, checksum of the learning rates) of this process."""
    crc = 0
    for variable in model.trainable_variables:
        crc = zlib.crc32(_checked(model, variable), crc)
    optimizers = [
        optimizer
        for optimizer in model_optimizers.optimizers_of(model).values()
        if settable_rate(optimizer) is not None
    ]
    rates = np.array([float(optimizer.learning_rate) for optimizer in optimizers], np.float64)
    return crc, zlib.crc32(rates.tobytes())


def _checksum(model, variable) -> int:
    return zlib.crc32(_checked(model, variable))


def _values(model, variable) -> np.ndarray:
    return own_state.local_value(model.distribute_strategy, variable).view(tf.as_dtype(variable.dtype).as_numpy_dtype)


def _checked(model, variable) -> np.ndarray:
    return own_state.local_value(model.distribute_strategy, variable)[:_CHECKED_BYTES]
