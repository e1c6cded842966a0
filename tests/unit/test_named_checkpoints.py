"""What distinguishes trainings of `raytf.fit`, and which checkpoint a call by name resumes from. No Ray."""

from __future__ import annotations

import contextlib
import json
import signal
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from ray.train import RunConfig, ScalingConfig

from raytf.errors import ConfigError, StoppedError, TrainingError
from raytf.fitting import arrays, call, named_checkpoints, warm
from raytf.fitting.named_checkpoints import NamedFitCheckpoints, training_identity
from raytf.storage import checkpoint_files, run_lock
from raytf.storage.checkpoint_files import CheckpointState
from raytf.storage.step_folders import folder_name
from tests.waiting import until

X = np.arange(12.0).reshape(6, 2)


def sent(x=X, units=3, batch=2, **more):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    parts = {"train": arrays.check_rows(x, x[:, :1], None, None, None, None)}
    return training_identity(model, parts, {}, batch, {"initial_epoch": 0, "shuffle": "full"} | more)


def keep(folder, step, state_of):
    path = folder / folder_name(step)
    path.mkdir(parents=True)
    for part in (checkpoint_files.MODEL, checkpoint_files.SEEDS):
        (path / part).write_bytes(b"x")
    state = CheckpointState(1, step, 7, False, [{"epoch": 1}], identity=state_of, epoch_step=2)
    (path / checkpoint_files.STATE).write_text(state.to_json())
    checkpoint_files.write_manifest(str(path))


def test_same_call_resumes_and_another_one_is_named(tmp_path, capsys):
    keeping = NamedFitCheckpoints.from_arguments("digits", tmp_path, "4 steps", "auto")
    assert keeping.newest(sent()) == (None, None) and keeping.last() == 0
    with pytest.raises(ConfigError, match="resumes from a checkpoint"):
        NamedFitCheckpoints.from_arguments("digits", tmp_path, "auto", True).newest(sent())
    keep(tmp_path / "digits" / "fit", 4, sent())
    keep(tmp_path / "digits" / "fit", 6, json.loads(json.dumps(sent())))
    files, state = keeping.newest(sent())
    assert state.step == keeping.last() == 6 and checkpoint_files.STATE in files
    assert "digits: resuming from step 6 (step 2 of epoch 2)" in capsys.readouterr().err
    for other, message in [
        (sent(units=4), "units"),
        (sent(x=X + 1), "other contents of datasets"),
        (sent(x=X[:5]), "5 rows, was 6"),
        (sent(batch=3), "batch_size 3, was 2"),
        (sent(shuffle="none"), "shuffle"),
    ]:
        with pytest.raises(ConfigError, match=message):
            keeping.newest(other)
    with pytest.warns(UserWarning, match="resumes with batch_size 3, was 2"):
        assert NamedFitCheckpoints.from_arguments("digits", tmp_path, "auto", True).newest(sent(batch=3))[1].step == 6
    assert NamedFitCheckpoints.from_arguments("digits", tmp_path, "auto", False).newest(sent(batch=3)) == (None, None)
    assert not (tmp_path / "digits" / "fit").exists()
    keeping.forget()  # of nothing


def test_a_checkpoint_that_is_still_written_at_the_end_is_removed_too(tmp_path, monkeypatch):
    keeping = NamedFitCheckpoints.from_arguments("digits", tmp_path, "auto", "auto")
    waited = []

    def written(filesystem, folder):
        keep(tmp_path / "digits" / "fit", 6, {})
        waited.append(folder)

    monkeypatch.setattr(named_checkpoints.snapshots, "wait_for_all", written)
    keeping.forget()
    assert waited == [keeping.folder] and keeping.last() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, "/runs", "auto", "auto"), "under a name.*storage"),
        ((None, None, "4 steps", "auto"), "under a name.*checkpoint_every"),
        ((None, None, "auto", False), "under a name.*resume"),
        (("a", None, "4 apples", "auto"), "checkpoint_every must be"),
        (("a", None, "auto", "yes"), "resume must be"),
        (("../a", None, "auto", "auto"), "below its storage path"),
    ],
)
def test_what_means_nothing_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        NamedFitCheckpoints.from_arguments(*arguments)
    assert NamedFitCheckpoints.from_arguments(None, None, "auto", "auto") is None


class Group:
    """Workers that end after step 6, as a signal has asked for."""

    model, closed = None, False

    def __init__(self):
        self.worker_group = SimpleNamespace(
            actors=[], ended=6, begin=lambda *job: None, continue_trial=lambda why: None, stop=lambda: None
        )

    def close(self):
        self.closed = True


def call_by_name(folder):
    """A call of `raytf.fit` that needs no workers yet."""
    checkpoints = NamedFitCheckpoints.from_arguments("digits", folder, "auto", "auto")
    made = call.Call(keras.Sequential(), ScalingConfig(num_workers=1), RunConfig(), {}, checkpoints)
    made._sending, made._data, made._values = {"key": "", "values": {}, "settings": {}, "folder": ""}, b"", {}
    made._stop_request = SimpleNamespace(number=signal.SIGTERM, calls=lambda handler: contextlib.nullcontext())
    return made


def test_workers_of_a_stopped_training_take_no_other_call(tmp_path, monkeypatch):
    """They hold its last epoch, which the next call would take for its own if it failed early."""
    keep(tmp_path / "digits" / "fit", 6, {})
    group = Group()
    monkeypatch.setattr(call.warm, "take_group", lambda *configs: group)
    monkeypatch.setattr(call, "Output", lambda variables: SimpleNamespace(close=lambda error: None))
    with pytest.raises(StoppedError, match="stopped after step 6; checkpoint saved"):
        list(call_by_name(tmp_path).reports({"do": "fit", "callbacks": None, "rows": {}, "seed": 0}))
    assert group.closed and not warm.has_group()


def test_a_call_whose_name_another_driver_has_taken_over_ends_and_removes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_BEAT_INTERVAL", 0.05)
    keep(tmp_path / "digits" / "fit", 6, {})
    made = call_by_name(tmp_path)
    monkeypatch.setattr(made, "_connect", lambda: None)
    monkeypatch.setattr(made, "reports", lambda work: iter(()))
    with made._checkpoints.lock() as made._lock:
        lock = tmp_path / "digits" / run_lock.LOCK
        others = json.loads(lock.read_text()) | {"id": "another"}
        lock.unlink()
        lock.write_text(json.dumps(others))
        until(lambda: made._lock.lost is not None)
        for ends in (made._why_end, lambda: made.fit({}, [], 0)):
            with pytest.raises(TrainingError, match="has taken over"):
                ends()
        with pytest.raises(ConfigError, match="takes one driver at a time"):
            made.resume_state(1, 2, {}, shown=False)
    assert made._checkpoints.last() == 6
