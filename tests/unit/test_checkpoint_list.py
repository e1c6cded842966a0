"""Ray's list of a run's checkpoints, as a run that resumes finds it."""

from __future__ import annotations

import math
import types

import pytest
from ray.train import Checkpoint, CheckpointConfig

from raytf.compat.ray_train import StorageContext
from raytf.train.checkpoint_list import CheckpointList


@pytest.fixture
def opened(tmp_path):
    """Opens the list of one run, as each of its starts does."""
    config = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="val_loss", checkpoint_score_order="min")

    def opens() -> CheckpointList:
        storage = StorageContext(str(tmp_path), "run")
        return CheckpointList(types.SimpleNamespace(storage_context=storage, checkpoint_config=config))

    return opens


def test_a_run_resumes_after_a_score_that_was_nan(opened, tmp_path):
    def take(checkpoints, **metrics):
        folder = tmp_path / "run" / f"checkpoint_{metrics['epoch']}"
        folder.mkdir(parents=True)
        report = types.SimpleNamespace(metrics=metrics, checkpoint=Checkpoint(str(folder)), validation=False)
        checkpoints.take(
            [report], types.SimpleNamespace(run_context=None, run_config=types.SimpleNamespace(callbacks=()))
        )

    first = opened()
    take(first, epoch=1, val_loss=math.nan)
    second = opened()
    assert math.isnan(second.result(None).metrics["val_loss"])
    take(second, epoch=2, val_loss=0.5)
    take(second, epoch=3, val_loss=math.nan)
    take(second, epoch=4, val_loss=0.75)
    assert [report.metrics["epoch"] for report in opened().reported()] == [2, 4], "two best are kept, and none is NaN"
