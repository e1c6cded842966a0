"""A run whose workers share out the optimizer's state: a lost worker, another number, a callback that saves."""

from __future__ import annotations

import os

import numpy as np
import pytest
from ray.train import FailureConfig, RunConfig, ScalingConfig

import raytf
from raytf.storage.checkpoint_files import MODEL
from raytf.testing import FaultPlan, Kill
from tests.cluster import models

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow, pytest.mark.timeout(900)]


def in_parts(config):
    """A model that counts as large: both workers write its checkpoints, each a part."""
    from raytf.worker import writers

    writers.LEAST_BYTES = 1
    return models.mlp(config)


def trainer(tmp_path, name, shares=True, callbacks=None, workers=2, epochs=2, build=models.mlp, **options):
    return raytf.KerasTrainer(
        build,
        config={"batch_size": 24, "epochs": epochs},
        datasets={"train": models.dataset()},
        features=models.FEATURES,
        labels="label",
        callbacks=callbacks,
        checkpoint_every="2 steps",
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=name, storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=1 if callbacks else 0)
        ),
        tensorflow_config=raytf.TensorflowConfig(shard_optimizer=shares, bytes_per_pack=256),
        progress=False,
        **options,
    )


def values(result):
    model = raytf.load_model(result)
    return [np.asarray(v) for v in (*model.weights, *model.optimizer.variables)]


def test_a_lost_worker_and_one_that_is_not(tmp_path):
    """All workers restart from the checkpoint that is in memory, as a share is nowhere else; the bits are the same.

    In the run that loses one both workers write each checkpoint."""
    plan = FaultPlan([Kill(rank=1, step=7)])

    def faults(config):
        return [plan.callback(tmp_path / "faults", workers=2)]

    without = values(trainer(tmp_path, "without", shares=False).fit())
    quiet = values(trainer(tmp_path, "quiet").fit())
    result = trainer(tmp_path, "lost", callbacks=faults, build=in_parts, memory_every="1 step").fit()
    lost, files = values(result), os.listdir(result.checkpoint.path)
    assert MODEL not in files and sum(name.startswith(MODEL) for name in files) == 3  # two ranges, and the end
    assert plan.happened(tmp_path / "faults") == list(plan.faults)
    for one, two, three in zip(without, quiet, lost, strict=True):
        assert one.tobytes() == two.tobytes() == three.tobytes()


def test_run_resumes_unsharded_and_with_another_number_of_workers(tmp_path):
    """The identity of a run does not have the option, as results are the same."""
    quiet = values(trainer(tmp_path, "quiet", epochs=3).fit())
    trainer(tmp_path, "run", epochs=1).fit()
    trainer(tmp_path, "run", shares=False, epochs=2, workers=1, resume=True).fit()
    last = values(trainer(tmp_path, "run", epochs=3, resume=True).fit())
    for one, two in zip(quiet, last, strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-9)


def test_callback_that_saves_the_sharded_optimizer_gets_an_error_with_the_reason(tmp_path):
    def saves(config):
        import keras

        return [keras.callbacks.ModelCheckpoint(str(tmp_path / "mine.keras"))]

    with pytest.raises(Exception, match="each worker has its share of the optimizer's state"):
        trainer(tmp_path, "run", callbacks=saves).fit()
