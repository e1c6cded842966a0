"""A worker that is stopped is named with its rank and host, and ended; the run restarts as FailureConfig allows."""

from __future__ import annotations

import re
import signal

import pytest
from ray.train import FailureConfig, RunConfig, ScalingConfig

import raytf
from tests.cluster import models

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


def fit(tmp_path, rank, failures, **options):
    def callbacks(config):
        return [models.kill_once(str(tmp_path / f"stopped_{i}"), rank, i, 1, sig=signal.SIGSTOP) for i in (0, 1)]

    return raytf.KerasTrainer(
        models.mlp,
        config={"batch_size": 25, "epochs": 2},
        datasets={"train": models.dataset(97)},
        features=models.FEATURES,
        labels="label",
        callbacks=callbacks,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=failures)),
        progress=False,
        **options,
    ).fit()


@pytest.mark.timeout(300)
def test_stopped_worker_is_ended_and_named_and_the_run_restarts(tmp_path):
    """It is stopped in the first epoch, which is repeated, and its successor in the second: one failure too many."""
    with pytest.raises(
        raytf.TrainingError, match=r"worker 1 failed: WorkerFrozenError: its process (\d+) on"
    ) as caught:
        fit(tmp_path, 1, 1)
    pid = int((tmp_path / "stopped_1").read_text())
    assert caught.value.rank == 1 and f"its process {pid} on" in caught.value.cause
    stopped = r"is stopped by a signal \(SIGSTOP\?\), for \d+ s; worker 0 waits for it since step \d+$"
    assert re.search(stopped, caught.value.cause) and "raytf/worker/fit.py" in caught.value.details
