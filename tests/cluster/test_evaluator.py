"""What an evaluator reports during a run; it is restarted when it dies, and no training is lost by that."""

from __future__ import annotations

import numpy as np
import pytest
import ray
from ray.train import RunConfig, ScalingConfig

import raytf
from tests.cluster import models
from tests.logged import warnings_logged

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


def dies_of(epochs):
    """A build_model whose model ends the evaluator's process at checkpoints: how often, by their epoch."""

    def build(config):
        import os
        import signal

        model = models.mlp(config)
        whole = model.evaluate

        def evaluate(*args, **kwargs):
            epoch = int(model.optimizer.iterations) // 4
            for number in range(epochs.get(epoch, 0)):
                marker = f"{config['marker']}_{epoch}_{number}"
                if not os.path.exists(marker):
                    open(marker, "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
            return whole(*args, **kwargs)

        if (ray.get_runtime_context().get_actor_name() or "").startswith("raytf-evaluator"):
            model.evaluate = evaluate
        return model

    return build


def trainer(folder, deaths, workers, **options):
    return raytf.KerasTrainer(
        dies_of(deaths),
        config={"batch_size": 25, "epochs": 3, "marker": str(folder / "died")},
        datasets={"train": models.dataset(97), "validation": models.dataset(41, 1)},
        features=models.FEATURES,
        labels="label",
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=str(folder)),
        progress=False,
        **options,
    )


def test_evaluator_during_training_and_its_restarts(tmp_path):
    """Its metrics are those of validation within the training, for every epoch and in the result. It dies once of the
    first checkpoint, which is evaluated again, and twice of the second: the training continues without that one."""
    in_training = trainer(tmp_path, {}, 0).fit()
    with warnings_logged(r"evaluation is missing of epoch 2 \(the evaluator's process was killed"):
        with_evaluator = trainer(tmp_path, {1: 1, 2: 2}, 2, evaluator=True).fit()
    history = with_evaluator.metrics_dataframe
    assert list(history["epoch"]) == [1, 2, 3] and history["loss"].notna().all()
    for name in ("loss", "accuracy"):
        expected = in_training.metrics_dataframe[f"val_{name}"].where([True, False, True])
        np.testing.assert_allclose(history[f"eval_{name}"], expected, rtol=0, atol=1e-9)
        assert with_evaluator.metrics[f"eval_{name}"] == pytest.approx(in_training.metrics[f"val_{name}"], abs=1e-9)
    assert "val_loss" not in with_evaluator.metrics
    assert sorted(path.name for path in tmp_path.glob("died_*")) == ["died_1_0", "died_2_0", "died_2_1"]
