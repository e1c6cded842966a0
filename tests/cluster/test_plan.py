"""What `raytf.plan` reports against what a run does."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ray.train import RunConfig, ScalingConfig

import raytf
from raytf.errors import ResourceError
from tests.cluster import models

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


def wide(config):
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(600, "relu"), layers.Dense(300), layers.Dense(4, "softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def trainer(tmp_path, *, build=wide, each=None, **options):
    return raytf.KerasTrainer(
        build,
        config={"batch_size": 25, "epochs": 2},
        datasets={"train": models.dataset(97), "validation": models.dataset(41, 1)},
        features=models.FEATURES,
        labels="label",
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker=each or {"CPU": 1}),
        run_config=RunConfig(storage_path=str(tmp_path)),
        progress=False,
        **options,
    )


def test_a_plan_is_what_a_run_does(tmp_path):
    file = str(tmp_path / "measured.json")

    def callbacks(config):
        import keras

        from raytf.collectives import gradient_ring

        class Measure(keras.callbacks.Callback):
            raytf_local_batches = True

            def on_epoch_begin(self, epoch, logs=None):
                self.ring = gradient_ring.ring_of(self.model.distribute_strategy).ring
                self.sent = self.ring.sent

            def on_epoch_end(self, epoch, logs=None):
                size = lambda variables: sum(np.asarray(v).nbytes for v in variables)
                found = {
                    "sent": (self.ring.sent - self.sent) / self.params["steps"],
                    "steps": self.params["steps"],
                    "weights": size(self.model.weights),
                    "optimizer": size(self.model.optimizer.variables),
                    "replicas": self.model.distribute_strategy.num_replicas_in_sync,
                }
                if self.ring.rank == 0:
                    with open(file, "w") as out:
                        json.dump(found, out)

        return [Measure()]

    planned = trainer(tmp_path, callbacks=callbacks)
    plan = raytf.plan(planned)
    assert plan.strategy == "multi_worker_mirrored" and "2 workers train in step" in plan.why
    assert plan.per_replica_batch == (13, 12) and plan.last_batch == 22 and plan.row_bytes == 6 * 4 + 8
    assert plan.step_seconds > 0 and plan.rows_per_second > 0
    shown = dict(plan.lines())
    assert (
        shown["rows of a step on a replica"] == "13 or 12" and shown["steps of an epoch"] == "4, the last with 22 rows"
    )
    planned.fit()
    with open(file) as found:
        measured = json.load(found)
    assert measured["steps"] == plan.steps_per_epoch and measured["replicas"] == len(plan.per_replica_batch)
    assert measured["weights"] == plan.weight_bytes and measured["optimizer"] == plan.optimizer_bytes
    # padding, and the number of rows, which travels with each step
    assert measured["sent"] == pytest.approx(plan.wire_bytes, rel=0.01)

    with pytest.raises(ResourceError, match="MiB for workers that have 1.0 MiB each"):
        raytf.plan(trainer(tmp_path, each={"CPU": 1, "memory": 2**20}))
