"""Checks for a loss that is NaN or infinite, and at an epoch's end for diverged weights. Runs on all workers."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raytf.collectives import communicator
from raytf.collectives.communicator import spans_workers
from raytf.events import Kind, RunEvent
from raytf.parallel import local_sgd, model_optimizers, own_state
from raytf.parallel.callbacks import settable_rate
from raytf.worker.part import Training, TrainingPart
from raytf.worker.session import Session

# Losses that are read at once, and delay of a read in steps, after which they are computed in any case. A loss is a
# mean since the epoch's begin. So the last one is enough; the others are read if it is not finite.
_READ_BATCH, _READ_DELAY = 16, 4
# With nan="stop" workers agree on a stop every so many steps, as each agreement is an exchange.
_AGREE_STEPS = 100
# Bytes of each variable in its checksum: workers that have diverged differ everywhere in a variable.
_CHECKED_BYTES = 4 << 20


class EpochChecks(TrainingPart):
    """Reports a loss that is NaN or infinite, with its first step, and workers with different weights or rates.

    A worker sends its first step at once, without an exchange; `TrainingEvents` of the driver find the first of all.

    Args:
        nan: "warn", "stop" (warn, and stop the training), or "ignore".
        users: The user's callbacks.
        session: Session of the run, which takes the events; by default they are logged.
        position: Counts steps, see `Training`; by default they are those of the epoch.
    """

    raytf_after_agreement = True

    def __init__(self, nan: str, users: Sequence = (), session: Session | None = None, position=None):
        super().__init__()
        self._nan, self._session, self._position = nan, session or Session(), position
        self._terminates = any(isinstance(c, keras.callbacks.TerminateOnNaN) for c in users)
        self._waiting: list[tuple] = []
        self._epoch, self._bad, self._step = 0, -1, -1
        self._steps_before = 0  # steps before this epoch
        self._reported = self._reported_validation = self._reported_divergence = False
        self._executed = 0  # steps of the epoch
        self._joins = False  # whether the next epoch to begin is one that the others are in

    @classmethod
    def create(cls, training: Training) -> EpochChecks:
        return cls(training.options.nan, training.users, training.session, training.position)

    def state_dict(self) -> dict[str, Any]:
        names = ("_executed", "_reported", "_reported_validation", "_reported_divergence")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._joins = True

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch, self._step = epoch, -1
        self._executed, self._joins = self._executed if self._joins else 0, False
        self._waiting.clear()

    def on_train_batch_end(self, batch, logs=None):
        first, self._step = self._step + 1 if self._step >= 0 else batch, batch
        reads = self._nan != "ignore" or self._terminates
        if not reads or (self._bad >= 0 and self._nan != "stop"):
            return
        if self._position is not None:
            self._steps_before = self._position.step - batch - 1
        outputs, rows = self.model.__dict__.get("_raytf_last", (logs, 1))  # of this worker
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if loss is not None and self._bad < 0:
            self._waiting.append((first, loss, rows))
            if len(self._waiting) == _READ_BATCH + _READ_DELAY:
                self._read_losses(_READ_BATCH)
        if self._nan == "stop":
            previous, self._executed = self._executed, batch + 1
            if previous // _AGREE_STEPS != self._executed // _AGREE_STEPS:
                self._drain()
                self._agree()

    def on_epoch_end(self, epoch, logs=None):
        self._drain()
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))}
        bad = [name for name, value in numbers.items() if not math.isfinite(value)]
        if self._nan != "ignore" or self._compares():
            self._agree(unseen="loss" in bad, end=True)
        if self._nan == "ignore" or self._reported:
            return
        if self._size == 1 or self._compares():
            self._check_weights()
        names = [name for name in bad if name.startswith("val_")]
        if names and not self._reported and not self._reported_validation:
            self._reported_validation = True
            self._emit_by_chief(Kind.VALIDATION_NOT_FINITE, name=", ".join(names))

    @property
    def _size(self) -> int:
        return self._session.size

    def _check_weights(self) -> None:
        """Finds weights that stay NaN although the loss is finite, as relu maps NaN to 0."""
        for variable in self.model.trainable_variables:
            if "float" not in variable.dtype or np.isfinite(np.sum(_values(self.model, variable), dtype=np.float64)):
                continue
            self._reported = True
            if self._nan == "stop":  # on all workers, as they have the same weights
                self.model.stop_training = True
            self._emit_by_chief(Kind.WEIGHTS_NOT_FINITE, name=variable.path, more=self._consequence())
            return

    def _emit_by_chief(self, kind: Kind, **fields) -> None:
        """Emits an event of which all workers know."""
        if self._session.rank == 0:
            self._session.emit(RunEvent(kind=kind, epoch=self._epoch + 1, **fields))

    def _drain(self) -> None:
        if self._waiting:
            self._read_losses(len(self._waiting))

    def _read_losses(self, count: int) -> None:
        """Reads the last of the first `count` pending losses, and the ones before only if it is not finite.

        Without rows in a step, a worker has made it with a placeholder, whose loss counts nothing.
        """
        losses, self._waiting = self._waiting[:count], self._waiting[count:]
        if _is_finite(losses[-1][1]):
            return
        self._bad = next((step for step, loss, rows in losses if np.sum(rows) > 0 and not _is_finite(loss)), -1)
        if self._bad < 0:
            return
        self._waiting.clear()
        if self._nan != "ignore" or self.model.stop_training:
            self._session.emit(
                RunEvent(
                    kind=Kind.LOSS_NOT_FINITE,
                    ranks=(self._session.rank,),
                    workers=self._size,
                    step=self._steps_before + self._bad + 1,
                    epoch=self._epoch + 1,
                    why=f"since step {self._bad + 1} of epoch {self._epoch + 1}",
                    more=self._advice(),
                )
            )

    def _compares(self) -> bool:
        """Returns whether all workers must have the same weights."""
        strategy = self.model.distribute_strategy
        return self._size > 1 and spans_workers(strategy) and local_sgd.averaging_interval(strategy) == 1

    def _agree(self, unseen: bool = False, end: bool = False) -> None:
        """Exchanges whether the loss is bad, and at an epoch's end checksums of weights and rates.

        Args:
            unseen: Whether the loss of the epoch is bad, as with parameter servers, where no step is seen.
            end: Whether an epoch ends.
        """
        rows = self._exchanged(
            [self._bad >= 0, unseen, *(checksums(self.model) if end and self._compares() else (0, 0))]
        )
        seen, unseen = rows[:, 0].any(), rows[:, 1].any()
        if unseen and not seen and not self._reported and self._nan != "ignore":
            self._emit_by_chief(Kind.LOSS_NOT_FINITE, why=f"in epoch {self._epoch + 1}", more=self._advice())
        self._reported |= bool(seen or unseen)
        if (seen or unseen) and self._nan == "stop":
            self.model.stop_training = True
        if end and not self._reported_divergence and (rows[:, 2:] != rows[0, 2:]).any():
            self._reported_divergence = True
            self._report_divergence(rows[:, 2:])

    def _exchanged(self, local_row: Sequence[int]) -> np.ndarray:
        """Returns a matrix with one row of numbers for each worker."""
        if self._size == 1 or not spans_workers(self.model.distribute_strategy):
            return np.array([local_row], np.int64)
        rows = np.zeros((self._size, len(local_row)), np.int64)
        rows[self._session.rank] = local_row
        (rows,) = communicator.sum_over_workers(self.model.distribute_strategy, [rows])
        return rows

    def _advice(self) -> str:
        if self._terminates and self.model.stop_training:
            return "keras.callbacks.TerminateOnNaN has ended the training"
        if self._nan == "stop":
            return self._consequence()
        return (
            f"{self._consequence()}; nan='stop' would end it. A lower learning rate, clipnorm, or a look at these rows "
            "may help"
        )

    def _consequence(self) -> str:
        return "The training stops because of nan='stop'" if self._nan == "stop" else "The training continues"

    def _report_divergence(self, rows: np.ndarray) -> None:
        ranks = tuple(rank for rank in range(self._size) if (rows[rank] != rows[0]).any())
        variables = list(self.model.trainable_variables)
        crcs = self._exchanged([zlib.crc32(_checked(self.model, v)) for v in variables])
        paths = [v.path for i, v in enumerate(variables) if (crcs[:, i] != crcs[0, i]).any()]
        text = f"{paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "") if paths else "learning rates"
        self._emit_by_chief(Kind.WORKERS_DIVERGED, ranks=ranks, name=text)


def _is_finite(loss) -> bool:
    return math.isfinite(float(np.mean(np.asarray(loss, np.float64))))


def checksums(model) -> tuple[int, int]:
    """Returns (checksum of the trained weights, checksum of the learning rates) of this process."""
    crc = 0
    for variable in model.trainable_variables:
        crc = zlib.crc32(_checked(model, variable), crc)
    optimizers = model_optimizers.optimizers_of(model).values()
    variables = [settable_rate(part) for optimizer in optimizers for part in model_optimizers.updating(optimizer)]
    rates = np.array([float(rate) for rate in variables if rate is not None], np.float64)
    return crc, zlib.crc32(rates.tobytes())


def _values(model, variable) -> np.ndarray:
    return own_state.local_value(model.distribute_strategy, variable).view(tf.as_dtype(variable.dtype).as_numpy_dtype)


def _checked(model, variable) -> np.ndarray:
    return own_state.local_value(model.distribute_strategy, variable)[:_CHECKED_BYTES]
