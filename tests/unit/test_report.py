"""A report reads what Tune wrote as JSON, and unpickles nothing of it. No Ray."""

import json
import os
import pickle

import pytest
from ray.tune import Checkpoint

from raytf.errors import ConfigError
from raytf.tune import report
from raytf.tune.trial import Trial
from tests.unit.test_checkpoint import Bomb


def test_trials_are_read_and_what_is_pickled_in_them_is_not(tmp_path):
    exploded = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(str(exploded)))
    packed = {"_type": "CLOUDPICKLE_FALLBACK", "value": bomb.hex()}
    trials = [
        {"trial_id": "a", "config": {"rate": 0.1, "point": packed}, "relative_logdir": "Trial_a", "storage": packed},
        {"trial_id": "b", "config": {"rate": 0.2}, "relative_logdir": "../Trial_b", "placement": bomb.hex()},
        {"trial_id": "c", "config": {}, "relative_logdir": None},
    ]
    for name, rows in {"Trial_a": [0.5, None, 0.25], "Trial_b": []}.items():
        (tmp_path / name).mkdir()
        lines = [json.dumps({"eval": {"loss": row}, "loss": 1}) for row in rows]
        (tmp_path / name / "result.json").write_text("".join(line + "\n" for line in lines))
        for file in ("params.pkl", "error.pkl"):
            (tmp_path / name / file).write_bytes(bomb)
    failure = "Failure # {} (occurred at 2026-11-22_17-23-55)\n{}\nmore\n"
    (tmp_path / "Trial_b" / "error.txt").write_text(failure.format(1, "first") + failure.format(2, "units must be odd"))
    state = {"trial_data": [[json.dumps(trial), json.dumps({"x": packed})] for trial in trials], "runner_data": packed}
    (tmp_path / "experiment_state-2026-11-22_17-23-54.json").write_text(json.dumps(state))
    (tmp_path / "experiment_state-2026-11-21_17-23-54.json").write_text("{}")
    (tmp_path / "tuner.pkl").write_bytes(bomb)
    a, b, c = report.entries(os.fspath(tmp_path), "eval/loss")
    assert (a.name, a.config, a.value, a.curve, a.error) == ("a", {"rate": 0.1, "point": "..."}, 0.25, [0.5, 0.25], "")
    assert (b.value, b.curve, b.error) == (None, [], "units must be odd")
    assert (c.value, c.error) == (None, "")
    assert not exploded.exists()


def test_a_pickle_in_a_trials_checkpoint_is_refused(tmp_path):
    """Tune unpickles this file where it finds it."""
    (tmp_path / "_dict_checkpoint.pkl").write_bytes(pickle.dumps(Bomb(str(tmp_path / "exploded"))))
    with pytest.raises(ConfigError, match="holds no pickle"):
        Trial.restore(Trial.__new__(Trial), Checkpoint.from_directory(str(tmp_path)))
    assert not (tmp_path / "exploded").exists()
