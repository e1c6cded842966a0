"""An evaluator that dies is started again, and a training is not lost by what becomes of it."""

from __future__ import annotations

import pytest
import ray
from ray.train import RunConfig, ScalingConfig

import raytf
from tests.cluster import models

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


def fit(tmp_path, epochs, deaths):
    return raytf.KerasTrainer(
        dies_of(deaths),
        config={"batch_size": 25, "epochs": epochs, "marker": str(tmp_path / "died")},
        datasets={"train": models.dataset(97), "validation": models.dataset(41, 1)},
        features=models.FEATURES,
        labels="label",
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=str(tmp_path)),
        evaluator=True,
        progress=False,
    ).fit()


def test_deaths_of_the_evaluator(tmp_path):
    """It dies once of the first checkpoint, which is evaluated again, and twice of the second: the training has its
    result, without that evaluation."""
    with pytest.warns(UserWarning, match=r"evaluation is missing of epoch 2 \(the evaluator's process was killed"):
        result = fit(tmp_path, 2, {1: 1, 2: 2})
    history = result.metrics_dataframe
    assert list(history["epoch"]) == [1, 2] and history["loss"].notna().all()
    assert list(history["eval_loss"].notna()) == [True, False]
    assert sorted(path.name for path in tmp_path.glob("died_*")) == ["died_1_0", "died_2_0", "died_2_1"]
