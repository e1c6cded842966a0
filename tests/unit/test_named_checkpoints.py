"""What distinguishes trainings of `raytf.fit`, and which checkpoint a call by name resumes from. No Ray."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest

from raytf.errors import ConfigError
from raytf.fitting import arrays
from raytf.fitting.named_checkpoints import NamedFitCheckpoints, training_identity
from raytf.storage import checkpoint_files
from raytf.storage.checkpoint_files import CheckpointState
from raytf.storage.step_folders import folder_name

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
