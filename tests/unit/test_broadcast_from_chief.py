"""The chief's values reach the others in pieces: a worker needs no room for several copies of all."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from raytf.collectives import communicator
from raytf.parallel import callbacks


@pytest.fixture
def sent(monkeypatch):
    """Arrays that went through TensorFlow."""
    made, original = [], communicator.sum_over_workers

    def recorded(strategy, values):
        made.append([np.asarray(v) for v in values])
        return original(strategy, values)

    monkeypatch.setattr(communicator, "sum_over_workers", recorded)
    monkeypatch.setattr(communicator, "PIECE_BYTES", 1024)
    return made


def test_values_come_whole_in_small_pieces(sent):
    rng = np.random.default_rng(0)
    values = [rng.normal(size=shape).astype("float32") for shape in [(40, 13), (), (0, 3), (7,), (301,)]]
    values[2:2] = [np.arange(500), np.int32(-7), rng.normal(size=3).astype(np.float16)]
    found = communicator.broadcast_from_chief(tf.distribute.OneDeviceStrategy("cpu:0"), values)
    for one, value in zip(found, values, strict=True):
        assert one.dtype == np.asarray(value).dtype and np.array_equal(one, value) and one.shape == np.shape(value)
    assert all(len(arrays) == 1 and arrays[0].nbytes <= 1024 for arrays in sent)
    assert len(sent) == 4 + 4 + 1 + 1
    assert len({array.size for (array,) in sent if array.dtype == np.float32}) <= 2, "TensorFlow traces few functions"


def test_a_training_starts_variable_by_variable(sent, monkeypatch):
    most, original = [], communicator.broadcast_from_chief

    def recorded(strategy, values):
        most.append(sum(np.asarray(v).nbytes for v in values))
        return original(strategy, values)

    monkeypatch.setattr(communicator, "broadcast_from_chief", recorded)
    with tf.distribute.OneDeviceStrategy("cpu:0").scope():
        model = keras.Sequential([keras.Input((16,)), *[keras.layers.Dense(16) for _ in range(20)]])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    before = [np.asarray(v) for v in model.variables]
    agreement = callbacks._Agreement()
    agreement.set_model(model)
    model._initial_epoch = 3
    agreement.on_train_begin()
    assert sum(most) > 60_000 and max(most) <= 16 << 20 and model._initial_epoch == 3
    assert max(array.nbytes for (array,) in sent) <= 1024
    assert all(np.array_equal(a, np.asarray(b)) for a, b in zip(before, model.variables, strict=True))


def test_a_plan_counts_what_the_start_takes():
    from raytf.runtime.settings import TensorflowConfig
    from raytf.train.dry_run import ModelFacts
    from raytf.train.plan import optimizer_bytes, start_bytes

    def facts(weights, largest):
        return ModelFacts(
            parameters=weights // 4,
            weight_bytes=weights,
            largest_bytes=largest,
            optimizer_bytes=2 * weights,
            gradient_bytes=weights,
            sparse_bytes=0,
            wide_gradients=True,
            row_bytes=4.0,
            step_seconds=1.0,
            table_slot_bytes=100,
        )

    assert start_bytes(facts(1 << 30, 1 << 20), "multi_worker_mirrored", 2) == (3 * 16 + 28) << 20
    assert start_bytes(facts(1 << 30, 1 << 28), "multi_worker_mirrored", 2) == (3 * 256 + 28) << 20
    assert start_bytes(facts(4000, 4000), "multi_worker_mirrored", 2) == 10 * 12_000
    assert start_bytes(facts(1 << 30, 1 << 20), "default", 1) == 0
    shares = TensorflowConfig(shard_optimizer=True)
    assert optimizer_bytes(facts(500, 50), "multi_worker_mirrored", 3, shares) == 100 + 300
    assert optimizer_bytes(facts(500, 50), "multi_worker_mirrored", 3, TensorflowConfig()) == 1000
    assert optimizer_bytes(facts(500, 50), "default", 1, shares) == 1000


def test_groups_are_bounded():
    variables = [np.zeros(n, np.float32) for n in (10, 90, 200, 1, 1)]
    assert [len(group) for group in communicator.groups(variables, 400)] == [2, 1, 2]
    assert communicator.groups([], 400) == []
