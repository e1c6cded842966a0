"""Callbacks that belong to the chief: how they are known, and which of them look at batches."""

from __future__ import annotations

import contextlib
import json
import sys
import types
import warnings

import keras
import pytest

import raytf
from raytf.collectives import communicator
from raytf.parallel import chief_callbacks, double_writes, verbosity
from raytf.parallel.callbacks import _redirected, _warn_of_test_batches, chief_state_classes, prepared, reads_batches


@pytest.fixture
def trackers(monkeypatch):
    """Modules of the trackers' names, whose callbacks have the attributes and hooks of the real ones."""

    class WandbMetricsLogger(keras.callbacks.Callback):
        def __init__(self, log_freq="epoch"):
            super().__init__()
            self.logging_batch_wise = log_freq != "epoch"
            self.log_freq = (1 if log_freq == "batch" else log_freq) if self.logging_batch_wise else None

        def on_train_batch_end(self, batch, logs=None):
            pass

    class MlflowCallback(keras.callbacks.Callback):
        def __init__(self, log_every_n_steps=None):
            super().__init__()
            self.log_every_n_steps = log_every_n_steps

        def on_batch_end(self, batch, logs=None):
            pass

    class WandbModelCheckpoint(keras.callbacks.ModelCheckpoint):
        pass

    for module, kinds in {
        "wandb.integration.keras.callbacks": (WandbMetricsLogger, WandbModelCheckpoint),
        "mlflow.keras.callback": (MlflowCallback,),
    }.items():
        made = types.ModuleType(module)
        monkeypatch.setitem(sys.modules, module, made)
        for kind in kinds:
            kind.__module__ = module
            setattr(made, kind.__name__, kind)
    return {kind.__name__: kind for kind in (WandbMetricsLogger, MlflowCallback, WandbModelCheckpoint)}


def test_trackers_are_the_chiefs_and_ask_for_batches_only_where_they_log_them(trackers, tmp_path):
    wandb, mlflow, saves = (trackers[n] for n in ("WandbMetricsLogger", "MlflowCallback", "WandbModelCheckpoint"))

    class Users(wandb):
        def on_train_batch_begin(self, batch, logs=None):
            pass

    looking = [wandb("batch"), wandb(10), mlflow(5), saves(tmp_path / "a.keras", save_freq=3), Users()]
    not_looking = [wandb(), mlflow(), saves(tmp_path / "a.keras"), keras.callbacks.RemoteMonitor()]
    assert [reads_batches(c) for c in looking + not_looking] == [True] * 5 + [False] * 4
    assert all(map(chief_callbacks.is_chiefs, looking + not_looking[:-1]))
    stopping = keras.callbacks.EarlyStopping()
    assert list(_redirected([*looking, *not_looking, stopping], contextlib.ExitStack())) == [stopping]


def test_what_the_chief_alone_has_counted(tmp_path):
    """Another worker's copy, which does not run, knows nothing of it; one that writes as epochs come need not."""
    to = tmp_path / "a.keras"

    class Own(keras.callbacks.ModelCheckpoint):  # runs on all workers
        pass

    without = [
        *(keras.callbacks.ModelCheckpoint(to), keras.callbacks.CSVLogger(tmp_path / "a.csv")),
        *(keras.callbacks.TensorBoard(tmp_path), keras.callbacks.RemoteMonitor(), keras.callbacks.EarlyStopping()),
        *(Own(to, save_best_only=True), keras.callbacks.BackupAndRestore(tmp_path)),
    ]
    assert chief_state_classes(without) == []
    holding = [
        *(keras.callbacks.ModelCheckpoint(to, save_best_only=True), keras.callbacks.TensorBoard(update_freq=5)),
        *(chief_callbacks.NoOpCallback(), chief_callbacks.on_chief(keras.callbacks.Callback())),
    ]
    assert chief_state_classes([*without, *holding]) == ["Callback", "ModelCheckpoint", "NoOpCallback", "TensorBoard"]


@pytest.mark.parametrize("end", ["", "/"])
def test_a_writer_of_a_users_class_writes_to_a_temporary_folder_where_it_is_not_the_chiefs(tmp_path, end):
    class Backup(keras.callbacks.BackupAndRestore):
        pass

    class Best(keras.callbacks.ModelCheckpoint):
        pass

    made = [Backup(f"{tmp_path}/backup{end}"), Best(f"{tmp_path}/best.keras")]
    before = [dict(vars(callback)) for callback in made]
    with contextlib.ExitStack() as ends:
        assert list(_redirected(made, ends)) == made
        paths = [v for callback in made for v in vars(callback).values() if isinstance(v, str) and "/" in v]
        assert len(set(paths)) == 6 and not any(path.startswith(str(tmp_path)) for path in paths)
    assert [vars(callback) for callback in made] == before, "the user may read them after a training"


def test_lists_of_callbacks_may_be_nested_as_in_keras(monkeypatch):
    monkeypatch.setattr(communicator, "sum_over_workers", lambda strategy, arrays: arrays)
    made = [keras.callbacks.EarlyStopping(), keras.callbacks.TerminateOnNaN()]
    for given, listed in (([made[:1], made[1]], made), (made[0], made[:1]), (None, [])):
        with prepared(types.SimpleNamespace(distribute_strategy=None), given) as (found, _):
            assert found[: len(listed)] == listed


def test_a_callback_list_gets_no_progress_line():
    mine = keras.callbacks.CallbackList([keras.callbacks.EarlyStopping()])
    with verbosity.limit_output(True, keras.callbacks.Callback):
        assert verbosity.for_fit("auto", mine) == (0, mine) and len(mine.callbacks) == 1
        assert len(verbosity.for_fit("auto", mine.callbacks)[1]) == 2


def test_a_callback_list_is_as_before_after_a_training(monkeypatch):
    monkeypatch.setattr(communicator, "sum_over_workers", lambda strategy, arrays: arrays)
    mine = keras.callbacks.CallbackList([keras.callbacks.EarlyStopping()])
    before = list(mine.callbacks)
    with prepared(types.SimpleNamespace(distribute_strategy=None), mine) as (found, _):
        assert found is mine and len(mine.callbacks) == 2
    assert mine.callbacks == before


def test_orbax_is_the_chiefs(tmp_path):
    class Stands(keras.callbacks.OrbaxCheckpoint):
        def __init__(self, save_freq):  # orbax is not installed
            self.save_freq = save_freq

    assert not reads_batches(Stands("epoch")) and reads_batches(Stands(10))
    assert not list(_redirected([Stands("epoch")], contextlib.ExitStack()))


def test_callbacks_that_the_user_declares_are_the_chiefs(monkeypatch, tmp_path):
    made = []

    class Writes(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            made.append(self)

    kept = raytf.on_chief(Writes())
    assert kept is made[0] and not list(_redirected([kept, raytf.on_chief(Writes)], contextlib.ExitStack()))
    assert len(made) == 2, "a process without TF_CONFIG is alone"
    cluster = {"worker": ["a:1", "b:2"]}
    for task, is_chief in (("worker", 0), True), (("worker", 1), False), (("evaluator", 0), False):
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": task[0], "index": task[1]}}))
        found = raytf.on_chief(Writes)
        assert isinstance(found, Writes if is_chief else chief_callbacks.NoOpCallback), task
    monkeypatch.delenv("TF_CONFIG")
    assert len(made) == 3
    for wrong, message in ((3, "received: 3"), (lambda: None, "a function that gave None"), ([kept], "takes a Keras")):
        with pytest.raises(raytf.ConfigError, match=message):
            raytf.on_chief(wrong)


def test_callback_of_validation_batches_warns_that_logs_are_a_workers_own():
    class Progress(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            pass

    keras_own = [keras.callbacks.ProgbarLogger(), keras.callbacks.EarlyStopping(), keras.callbacks.LambdaCallback()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _warn_of_test_batches(keras_own)
    given = keras.callbacks.LambdaCallback(on_test_batch_end=print)
    with pytest.warns(UserWarning, match=r"own rows \(LambdaCallback, Progress\)"):
        _warn_of_test_batches([*keras_own, Progress(), given])


def test_a_file_that_several_workers_write_is_warned_of_once(tmp_path):
    class Appends(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with open(tmp_path / "log", "a") as file:
                file.write("a")
            with open(tmp_path / "log") as file:
                file.read()

    def warned(total):
        before = double_writes.WriteRecorder()
        after = double_writes.WriteComparison(before, ["Appends"], total, True)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for epoch in range(2):
                for callback in (before, Appends(), after):
                    callback.on_epoch_end(epoch)
        return [str(one.message) for one in found]

    (message,) = warned(lambda counts: 2 * counts)
    assert str(tmp_path / "log") in message and "raytf.on_chief(callback)" in message
    assert not warned(lambda counts: counts), "this worker alone writes it"


def test_a_file_may_be_opened_while_another_thread_ends_the_recording():
    class Ends(str):
        def __iter__(self):  # the hook looks at the mode after it has seen that files are recorded
            double_writes.note(False)
            return iter("w")

    double_writes.note(True)
    double_writes._hook("open", ("log", Ends("w")))
    double_writes._hook("open", ("log", "w"))
    assert not double_writes.note(False)
