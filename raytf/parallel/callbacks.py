"""Callbacks under several workers: the chief decides and writes, and every worker follows at the same step."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras.callbacks import (
    BackupAndRestore,
    CSVLogger,
    LambdaCallback,
    ModelCheckpoint,
    RemoteMonitor,
    TensorBoard,
)

from raytf.collectives import communicator, exchange, healing
from raytf.compat import keras_objects
from raytf.compat.versions import at_least
from raytf.parallel import assigned, chief_callbacks, double_writes, model_optimizers
from raytf.storage import scratch

# Keras callbacks that write files, and the attribute that says where.
WRITERS = {
    ModelCheckpoint: "filepath",
    BackupAndRestore: "backup_dir",
    TensorBoard: "log_dir",
    CSVLogger: "filename",
}
# Those that write or send in a way that no attribute leads elsewhere.
_ORBAX = (keras.callbacks.OrbaxCheckpoint,) if at_least("keras", 3, 14) else ()
_ALONE = (*_ORBAX, RemoteMonitor)


class _Agreement(keras.callbacks.Callback):
    """Stands after the user's callbacks: every worker takes what the chief's callbacks assigned, and stops with all."""

    def __init__(self):
        super().__init__()
        self._noted = assigned.AssignedVariables()

    def on_train_begin(self, logs=None):
        """The chief's variables and first epoch: a callback before this one may have restored them."""
        model = self.model
        self._take_chiefs(_shared_variables(model, with_metrics=True))
        (first_epoch,) = communicator.from_chief(
            model.distribute_strategy, [np.int64(keras_objects.first_epoch(model))]
        )
        keras_objects.set_first_epoch(model, int(first_epoch))
        self._noted.taken()

    def on_epoch_begin(self, epoch, logs=None):
        self._agree()

    def on_epoch_end(self, epoch, logs=None):
        self._agree()

    def _agree(self):
        """What one worker's callbacks have assigned, or that it stops, holds for all, with the chief's values."""
        model, mine = self.model, self._noted.taken()
        told = np.array([bool(model.stop_training), bool(mine)], np.int32)
        ((stops, assigns),) = communicator.sum_over_workers(model.distribute_strategy, [told])
        model.stop_training = bool(stops > 0)
        if assigns:
            variables = _shared_variables(model)
            assigned_here = np.array([id(v) in mine for v in variables], np.int32)
            (counts,) = communicator.sum_over_workers(model.distribute_strategy, [assigned_here])
            self._take_chiefs(self._different([v for v, n in zip(variables, counts, strict=True) if n]))

    def _different(self, variables: list) -> list:
        """Of variables those that do not hold the same on all workers; most callbacks assign the same on all."""
        strategy = self.model.distribute_strategy
        mine = np.array([_digest(communicator.read(v)) for v in variables], np.int64)
        (chiefs,) = communicator.from_chief(strategy, [mine])
        (others,) = communicator.sum_over_workers(strategy, [(mine != chiefs).astype(np.int32)])
        return [v for v, n in zip(variables, others, strict=True) if n]

    def _take_chiefs(self, variables: list) -> None:
        strategy = self.model.distribute_strategy
        for group in communicator.groups(variables):  # not all at once: they may be most of a worker's memory
            local = [communicator.read(v) for v in group]
            values = communicator.from_chief(strategy, local)
            for variable, old, value in zip(group, local, values, strict=True):
                if not communicator.is_chief(strategy) and not np.array_equal(old, value):
                    variable.assign(value)
        self._noted.taken()  # what this has assigned is the same on all


class _BatchAgreement(_Agreement):
    """Used where a callback looks at batches and may stop the training between two of them, or assign.

    Args:
        begins: whether a callback is told of the begin of a batch.
    """

    def __init__(self, begins: bool):
        super().__init__()
        self._begins = begins

    def on_train_batch_begin(self, batch, logs=None):
        if self._begins:
            self._agree()

    def on_train_batch_end(self, batch, logs=None):
        self._agree()


def _shared_variables(model, with_metrics: bool = False) -> list:
    """Those of a model and its optimizers that workers can exchange, in the same order on all of them."""
    left_out = set() if with_metrics else {id(v) for v in model.metrics_variables}
    return [
        v
        for v in (*model.variables, *model_optimizers.variables(model))
        if tf.as_dtype(v.dtype) in exchange.SUMMABLE and id(v) not in left_out
    ]


def _digest(array: np.ndarray) -> int:
    """A number that differs where the bytes do."""
    found = hashlib.blake2b(exchange.bytes_of(array), digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True)


def settable_rate(optimizer):
    """The learning-rate variable that callbacks can set, or None under a schedule."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = keras_objects.rate_of(inner)
    return rate if isinstance(rate, keras.Variable) else None


def looks_at_batches(callback) -> bool:
    """Whether a callback reads the logs of single training batches, or may stop the training between two."""
    if isinstance(callback, (ModelCheckpoint, BackupAndRestore, *_ORBAX)):
        return callback.save_freq != "epoch"
    if type(callback) is TensorBoard:
        return callback.update_freq != "epoch"
    if getattr(callback, "raytf_local_batches", False):
        return False
    tracked = chief_callbacks.tracks_batches(callback)
    if tracked is not None:
        return tracked
    base = keras.callbacks.Callback
    hooks = chief_callbacks.BATCH_HOOKS
    return any(h in vars(callback) or getattr(type(callback), h) is not getattr(base, h) for h in hooks)


def _sees_begins(callback) -> bool:
    """Whether a callback, which is none of Keras' own or raytf's, is told before a batch, where it may assign."""
    module = type(callback).__module__.partition(".")[0]
    known = module in ("keras", "raytf") and not isinstance(callback, LambdaCallback)
    if known or getattr(callback, "raytf_local_batches", False):
        return False
    base = keras.callbacks.Callback
    hooks = ("on_train_batch_begin", "on_batch_begin")
    return any(h in vars(callback) or getattr(type(callback), h) is not getattr(base, h) for h in hooks)


def _redirected(callbacks, folder: Callable[[], str]):
    """What a worker that is not the chief runs: writers are left out, or write to a folder that is thrown away."""
    for callback in callbacks:
        if isinstance(callback, _ALONE) or chief_callbacks.is_chiefs(callback):
            continue
        kind = next((k for k in WRITERS if isinstance(callback, k)), None)
        if kind is None:
            yield callback
        elif type(callback) is not kind:  # a subclass may do more than write
            where = str(getattr(callback, WRITERS[kind]))
            setattr(callback, WRITERS[kind], os.path.join(folder(), os.path.basename(where)))
            yield callback


def held_by_chief(callbacks) -> list[str]:
    """Classes of callbacks that the chief alone runs, and that may hold what follows from the epochs or batches before.

    Those of Keras that write each epoch as it comes hold nothing of the kind.
    """
    writers = (*WRITERS, *_ALONE)
    found = set()
    for callback in callbacks:
        left_out = isinstance(callback, (*_ALONE, chief_callbacks.Elsewhere)) or type(callback) in WRITERS
        if not left_out and not chief_callbacks.is_chiefs(callback):
            continue
        holds = looks_at_batches(callback) or getattr(callback, "save_best_only", False)
        if holds or not isinstance(callback, writers):
            found.add(type(callback).__name__)
    return sorted(found)


@contextlib.contextmanager
def prepared(model, callbacks):
    """Yields (callbacks for `fit`, whether the logs of batches must be global) for a model on several workers."""
    given = callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else None
    if given is not None:
        listed = list(given.callbacks)
    else:
        listed = list(callbacks) if isinstance(callbacks, (list, tuple)) else [] if callbacks is None else [callbacks]
    if communicator.is_chief(model.distribute_strategy):
        _warn_of_test_batches(listed)
    # a callback of one worker alone is enough: what is exchanged after a batch needs all
    looking = any(looks_at_batches(c) for c in listed)
    unknown = sorted({type(c).__name__ for c in listed if _may_write(c)})
    told = np.array([looking, len(unknown), any(map(_sees_begins, listed))], np.int32)
    ((looking, writing, begins),) = communicator.sum_over_workers(model.distribute_strategy, [told])
    batches = bool(looking)
    ends, kept = contextlib.ExitStack(), listed
    if not communicator.is_chief(model.distribute_strategy):
        kept = list(_redirected(listed, lambda: ends.enter_context(scratch.folder())))
    agreement = _BatchAgreement(bool(begins)) if batches else _Agreement()
    after = [c for c in kept if getattr(c, "raytf_after_agreement", False)]
    kept = [c for c in kept if c not in after]
    if writing:
        kept = _watched(kept, unknown, model.distribute_strategy)
    kept = [*kept, agreement, *after]
    if given is not None:
        agreement.set_model(model)
        given.callbacks[:] = kept
        kept = given
    try:
        yield kept, batches
    finally:
        double_writes.note(False)
        ends.close()


def _warn_of_test_batches(callbacks: list) -> None:
    """Says which callbacks are told of what a validation step gave here, which is no value of all rows."""

    def takes(callback) -> bool:
        hook, local = callback.on_test_batch_end, getattr(callback, "raytf_local_batches", False)
        own = "on_test_batch_end" in vars(callback) or not hook.__module__.startswith(("keras.", "raytf."))
        return own and not local

    if told := sorted({type(c).__name__ for c in callbacks if takes(c)}):
        warnings.warn(
            f"The logs of on_test_batch_end are those of a worker's own rows ({', '.join(told)}): use on_test_end or "
            "on_epoch_end, whose logs are those of all rows",
            stacklevel=2,
        )


def _may_write(callback) -> bool:
    """Whether it is not known what a callback does, which runs on all workers."""
    module = type(callback).__module__.partition(".")[0]
    return module not in ("keras", "raytf") and not chief_callbacks.is_chiefs(callback)


def _watched(callbacks: list, unknown: list[str], strategy) -> list:
    """The callbacks, between two that look at which files they write."""
    before = double_writes.Before()
    if healing.here.place is not None:  # of workers who may have seen an epoch end
        before.looking = healing.here.place.agreed["looking"]
    total = lambda counts: communicator.sum_over_workers(strategy, [counts])[0]
    return [before, *callbacks, double_writes.After(before, unknown, total, communicator.is_chief(strategy))]
