"""What jobs do before and after their training; Ray and the training are mocked."""

from __future__ import annotations

import os
import types
from unittest import mock

import ray

import raytf
from jobs import resume_loop


def test_the_marker_of_a_killed_loop_is_in_the_storage_of_all_hosts(monkeypatch, tmp_path):
    seen = []

    def trainer(loop, train_loop_config, **rest):
        seen.append((train_loop_config["killed"], os.path.exists(train_loop_config["killed"])))
        return mock.Mock(fit=lambda: types.SimpleNamespace(return_value=(34, "step 0 of epoch 0", [])))

    monkeypatch.setattr(raytf, "TensorflowTrainer", trainer)
    monkeypatch.setattr(ray, "init", mock.Mock())
    monkeypatch.setattr(ray.data, "from_numpy", mock.Mock())
    storage = tmp_path / "new"
    resume_loop.main(["--smoke", "--storage", str(storage)])
    (quiet, there), (killed, killed_before) = seen
    assert os.path.dirname(quiet) == str(storage) and os.path.dirname(killed) == quiet
    assert there and not killed_before and not list(storage.iterdir())
