"""Callbacks with several workers: the chief decides and writes, and every worker follows at the same step."""

from __future__ import annotations

import contextlib
import hashlib
import os

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from keras.callbacks import (
    BackupAndRestore,
    CSVLogger,
    LambdaCallback,
    ModelCheckpoint,
    RemoteMonitor,
    TensorBoard,
)

from raytf.collectives import communicator, exchange, recovery_client
from raytf.compat import keras_objects
from raytf.compat.versions import at_least
from raytf.logs import warn_user
from raytf.parallel import assigned, chief_callbacks, double_writes, model_optimizers
from raytf.storage import scratch

# Keras callbacks that write files, and the attribute with the path.
WRITERS = {
    ModelCheckpoint: "filepath",
    BackupAndRestore: "backup_dir",
    TensorBoard: "log_dir",
    CSVLogger: "filename",
}
# Callbacks that write or send, and have no attribute to redirect that.
_ORBAX = (keras.callbacks.OrbaxCheckpoint,) if at_least("keras", 3, 14) else ()
_CHIEF_ONLY = (*_ORBAX, RemoteMonitor)


class _Agreement(keras.callbacks.Callback):
    """Runs after the user's callbacks: applies the chief's assignments, and a stop of any worker, to all workers."""

    def __init__(self):
        super().__init__()
        self._noted = assigned.AssignedVariables()

    def on_train_begin(self, logs=None):
        """Copies the chief's variables and first epoch to all: a callback before this one may have restored them."""
        model = self.model
        self._take_chiefs(_shared_variables(model, with_metrics=True))
        first_epoch = communicator.chief_number(model.distribute_strategy, keras_objects.first_epoch(model))
        keras_objects.set_first_epoch(model, first_epoch)
        self._noted.taken()

    def on_epoch_begin(self, epoch, logs=None):
        self._agree()

    def on_epoch_end(self, epoch, logs=None):
        self._agree()

    def _agree(self):
        """Stops all workers if one stops, and copies variables that any worker's callbacks assigned from the chief."""
        model, assigned_ids = self.model, self._noted.taken()
        flags = np.array([bool(model.stop_training), bool(assigned_ids)], np.int32)
        ((stops, assigns),) = communicator.sum_over_workers(model.distribute_strategy, [flags])
        model.stop_training = bool(stops > 0)
        if assigns:
            variables = _shared_variables(model)
            is_assigned = np.array([id(v) in assigned_ids for v in variables], np.int32)
            (counts,) = communicator.sum_over_workers(model.distribute_strategy, [is_assigned])
            self._take_chiefs(self._different([v for v, n in zip(variables, counts, strict=True) if n]))

    def _different(self, variables: list) -> list:
        """Returns the variables that differ between workers; most callbacks assign equal values on all."""
        strategy = self.model.distribute_strategy
        digests = np.array([_digest(communicator.read(v)) for v in variables], np.int64)
        (chief_digests,) = communicator.broadcast_from_chief(strategy, [digests])
        (differing,) = communicator.sum_over_workers(strategy, [(digests != chief_digests).astype(np.int32)])
        return [v for v, n in zip(variables, differing, strict=True) if n]

    def _take_chiefs(self, variables: list) -> None:
        strategy = self.model.distribute_strategy
        for group in communicator.groups(variables):  # in groups: they may be most of a worker's memory
            local = [communicator.read(v) for v in group]
            values = communicator.broadcast_from_chief(strategy, local)
            for variable, old, value in zip(group, local, values, strict=True):
                if not communicator.is_chief(strategy) and not np.array_equal(old, value):
                    variable.assign(value)
        self._noted.taken()  # these assignments are equal on all workers


class _BatchAgreement(_Agreement):
    """Used if a callback reads batches and may stop the training, or assign, between two batches.

    Args:
        begins: Whether a callback is called before batches.
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
    """Returns variables of a model and its optimizers that workers can exchange, in the same order on all workers."""
    left_out = set() if with_metrics else {id(v) for v in model.metrics_variables}
    return [
        v
        for v in (*model.variables, *model_optimizers.alike(model))
        if tf.as_dtype(v.dtype) in exchange.SUMMABLE and id(v) not in left_out
    ]


def _digest(array: np.ndarray) -> int:
    """Returns a number that differs if the bytes differ."""
    digest = hashlib.blake2b(exchange.bytes_of(array), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def settable_rate(optimizer):
    """Returns the learning-rate variable that callbacks can set, or None of a schedule or of several rates."""
    inner = model_optimizers.unscaled(optimizer)
    rate = keras_objects.rate_of(inner) if model_optimizers.updating(inner) == [inner] else None
    return rate if isinstance(rate, keras.Variable) else None


def reads_batches(callback) -> bool:
    """Returns whether a callback reads the logs of training batches, or may stop the training between two batches."""
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
    """Returns whether a callback, other than those of Keras and raytf, is called before a batch, when it may assign."""
    module = type(callback).__module__.partition(".")[0]
    known = module in ("keras", "raytf") and not isinstance(callback, LambdaCallback)
    if known or getattr(callback, "raytf_local_batches", False):
        return False
    base = keras.callbacks.Callback
    hooks = ("on_train_batch_begin", "on_batch_begin")
    return any(h in vars(callback) or getattr(type(callback), h) is not getattr(base, h) for h in hooks)


def _redirected(callbacks, ends: contextlib.ExitStack):
    """Yields callbacks for a worker other than the chief: without writers, or with writers to a temporary folder.

    Args:
        callbacks: The user's.
        ends: Removes the folders, and gives the callbacks their paths again, when it closes.
    """
    for callback in callbacks:
        if isinstance(callback, _CHIEF_ONLY) or chief_callbacks.is_chiefs(callback):
            continue
        kind = next((k for k in WRITERS if isinstance(callback, k)), None)
        if kind is None:
            yield callback
        elif type(callback) is not kind:  # a subclass may do more than write
            given = {WRITERS[kind]: getattr(callback, WRITERS[kind])}
            path = str(given[WRITERS[kind]])
            if kind is BackupAndRestore:  # Keras has made the paths of its files already
                below = os.path.join(path, "")
                given |= {n: v for n, v in vars(callback).items() if isinstance(v, str) and v.startswith(below)}
            new_path = os.path.join(ends.enter_context(scratch.temporary_folder()), os.path.basename(path))
            for name, value in given.items():
                ends.callback(setattr, callback, name, value)
                setattr(callback, name, new_path + str(value).removeprefix(path))
            yield callback


def chief_state_classes(callbacks) -> list[str]:
    """Returns classes of callbacks that only the chief runs, and that may have state from earlier epochs or batches.

    Keras callbacks that write each epoch separately have no such state.
    """
    writers = (*WRITERS, *_CHIEF_ONLY)
    names = set()
    for callback in callbacks:
        left_out = isinstance(callback, (*_CHIEF_ONLY, chief_callbacks.NoOpCallback)) or type(callback) in WRITERS
        if not left_out and not chief_callbacks.is_chiefs(callback):
            continue
        holds = reads_batches(callback) or getattr(callback, "save_best_only", False)
        if holds or not isinstance(callback, writers):
            names.add(type(callback).__name__)
    return sorted(names)


@contextlib.contextmanager
def prepared(model, callbacks):
    """Yields (callbacks for `fit`, whether the logs of batches must be global) for a model on several workers."""
    given = callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else None
    listed = tree.flatten(callbacks or []) if given is None else list(given.callbacks)  # a list may be nested in Keras
    if communicator.is_chief(model.distribute_strategy):
        _warn_of_test_batches(listed)
    # a callback on one worker is enough: exchanges after a batch need all workers
    reading = any(reads_batches(c) for c in listed)
    unknown = sorted({type(c).__name__ for c in listed if _may_write(c)})
    flags = np.array([reading, len(unknown), any(map(_sees_begins, listed))], np.int32)
    ((reading, writing, begins),) = communicator.sum_over_workers(model.distribute_strategy, [flags])
    batches = bool(reading)
    ends, callback_list = contextlib.ExitStack(), listed
    if not communicator.is_chief(model.distribute_strategy):
        callback_list = list(_redirected(listed, ends))
    agreement = _BatchAgreement(bool(begins)) if batches else _Agreement()
    deferred = [c for c in callback_list if getattr(c, "raytf_after_agreement", False)]
    callback_list = [c for c in callback_list if c not in deferred]
    if writing:
        callback_list = _watched(callback_list, unknown, model.distribute_strategy)
    callback_list = [*callback_list, agreement, *deferred]
    if given is not None:
        agreement.set_model(model)
        ends.callback(setattr, given, "callbacks", given.callbacks)  # the user's, who may pass it again
        given.callbacks, callback_list = callback_list, given
    try:
        yield callback_list, batches
    finally:
        double_writes.note(False)
        ends.close()


def _warn_of_test_batches(callbacks: list) -> None:
    """Warns of callbacks that receive the logs of validation steps, which cover only this worker's rows."""

    def takes(callback) -> bool:
        hook, local = callback.on_test_batch_end, getattr(callback, "raytf_local_batches", False)
        has_own_hook = "on_test_batch_end" in vars(callback) or not hook.__module__.startswith(("keras.", "raytf."))
        return has_own_hook and not local

    if names := sorted({type(c).__name__ for c in callbacks if takes(c)}):
        warn_user(
            f"The logs of on_test_batch_end are those of a worker's own rows ({', '.join(names)}): use on_test_end or "
            "on_epoch_end, whose logs are those of all rows",
        )


def _may_write(callback) -> bool:
    """Returns whether a callback runs on all workers, and may write files."""
    module = type(callback).__module__.partition(".")[0]
    return module not in ("keras", "raytf") and not chief_callbacks.is_chiefs(callback)


def _watched(callbacks: list, unknown: list[str], strategy) -> list:
    """Returns the callbacks, between two callbacks that record which files they write."""
    first = double_writes.WriteRecorder()
    if recovery_client.client.replacement_state is not None:  # the other workers may have seen the end of an epoch
        first.is_comparing = recovery_client.client.replacement_state.shared_state["comparing_writes"]
    total = lambda counts: communicator.sum_over_workers(strategy, [counts])[0]
    return [first, *callbacks, double_writes.WriteComparison(first, unknown, total, communicator.is_chief(strategy))]
