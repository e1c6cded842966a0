"""A run that updates used rows of tables: one worker, two, and two of which one is lost in a step."""

from __future__ import annotations

import numpy as np
import pytest
from ray.train import FailureConfig, RunConfig, ScalingConfig

import raytf
from raytf.testing import FaultPlan, Kill
from tests.cluster import models

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow, pytest.mark.timeout(600)]


def fit(tmp_path, workers, callbacks=None, **options):
    import pyarrow as pa
    import ray

    draw = np.random.default_rng(0)
    columns = {f"id{i}": draw.integers(0, 12, 51) for i in range(5)} | {"label": draw.integers(0, 4, 51)}
    result = raytf.KerasTrainer(
        models.tables,
        config={"batch_size": 25, "epochs": 2},
        datasets={"train": ray.data.from_arrow(pa.table(columns))},
        features=[f"id{i}" for i in range(5)],
        labels="label",
        callbacks=callbacks,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=f"run{workers}{callbacks is None}",
            storage_path=str(tmp_path),
            failure_config=FailureConfig(max_failures=1),
        ),
        tensorflow_config=raytf.TensorflowConfig(sparse_updates="lazy"),
        progress=False,
        **options,
    ).fit()
    model = raytf.load_model(result)
    return [np.asarray(v) for v in (*model.weights, *model.optimizer.variables)]


def test_one_worker_two_and_a_lost_one(tmp_path):
    """In the last batch of an epoch a worker has no row."""
    plan = FaultPlan([Kill(rank=1, step=4)])

    def faults(config):
        return [plan.callback(tmp_path / "faults", workers=2)]

    one, two, healed = fit(tmp_path, 1), fit(tmp_path, 2), fit(tmp_path, 2, faults)
    assert plan.happened(tmp_path / "faults") == list(plan.faults)
    for single, double, lost in zip(one, two, healed, strict=True):
        np.testing.assert_allclose(double, single, rtol=0, atol=1e-9)
        assert lost.tobytes() == double.tobytes()
    moments = [v for v in two if v.shape == (20, 4)]
    assert len(moments) == 3 and all((v[12:] == 0).all() for v in moments[1:])
