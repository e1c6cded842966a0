"""What jobs do before and after their training; Ray and the training are mocked."""

from __future__ import annotations

import os
import signal
import types
from unittest import mock

import pytest
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


@pytest.fixture
def served(monkeypatch):
    """(jobs/serve.py; a Ray Serve that only notes what is called)."""
    pytest.importorskip("ray.serve", reason="an extra: `serve`")
    from jobs import serve

    monkeypatch.setattr(serve, "train", lambda *_: (mock.MagicMock(), mock.MagicMock()))
    monkeypatch.setattr(serve, "ask", lambda *_: [1, 2, 3, 4, 5])
    for name in ("load_model", "evaluate", "export"):
        monkeypatch.setattr(raytf, name, mock.MagicMock())
    raytf.evaluate.return_value = {"accuracy": 0.9}
    noted = mock.Mock()
    monkeypatch.setattr(serve, "serve", noted)
    return serve, noted


def test_serve_ends_with_the_job_that_ctrl_c_ends(served, monkeypatch):
    monkeypatch.setattr(signal, "pause", mock.Mock(side_effect=KeyboardInterrupt))
    job, serve = served
    job.main(["--wait"])
    assert signal.pause.called and [name for name, *_ in serve.method_calls] == ["start", "run", "shutdown"]


@pytest.mark.parametrize("fails", ["start", "run"])
def test_serve_ends_with_a_job_that_fails_and_the_error_is_seen(served, fails):
    job, serve = served
    getattr(serve, fails).side_effect = RuntimeError("Deploying application default failed")
    with pytest.raises(RuntimeError, match="Deploying application default failed"):
        job.main([])
    assert serve.shutdown.called
