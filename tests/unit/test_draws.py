"""Random numbers of TensorFlow's own operations on several replicas."""

from __future__ import annotations

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from raytf.parallel import step as step_module
from raytf.parallel import trainer

ROWS = 8
OF_ROWS = {
    "normal": lambda: tf.random.normal((ROWS, 3)),
    "uniform": lambda: tf.random.uniform((ROWS,), 0, 1000, tf.int32),
    "truncated_normal": lambda: tf.random.truncated_normal((ROWS, 3), seed=5),
    "gamma": lambda: tf.random.gamma((ROWS,), [2.0, 3.0]),
    "poisson": lambda: tf.random.poisson((ROWS,), [50.0, 90.0]),
    "categorical": lambda: tf.random.categorical(tf.zeros((ROWS, 99)), 4),
    "shuffle": lambda: tf.random.shuffle(tf.range(ROWS)),
    "dropout": lambda: tf.nn.dropout(tf.ones((ROWS, 9)), rate=0.5),
}
ONE_DRAW = {
    "of a weight": lambda: tf.random.normal((3, 2)),
    "a single number": lambda: tf.random.uniform([]),
    "one mask for all rows": lambda: tf.nn.dropout(tf.ones((ROWS, 9)), 0.5, noise_shape=(1, 9)),
}


@pytest.fixture
def drawn(monkeypatch):
    """Function drawn(function, replica): what the steps of one of several replicas draw."""
    trainer.install()
    monkeypatch.setattr(step_module, "in_replica_of_many", lambda: True)

    def on_replica(function, number):
        replica = types.SimpleNamespace(replica_id_in_sync_group=tf.constant(number))
        monkeypatch.setattr(tf.distribute, "get_replica_context", lambda: replica)
        tf.random.set_seed(7)

        @tf.function
        def step():
            with step_module.override_state(step=step_module.Step(tf.constant(ROWS), False)):
                return function(), tf.random.uniform([])

        return [[part.numpy() for part in step()] for _ in range(2)]

    return on_replica


@pytest.mark.parametrize("name", OF_ROWS)
def test_each_replica_draws_its_own_rows_and_the_same_single_numbers(drawn, name):
    one, two, again = (drawn(OF_ROWS[name], number) for number in (0, 1, 1))
    for (rows, number), (others, other), (repeated, _) in zip(one, two, again, strict=True):
        assert not np.array_equal(rows, others)
        np.testing.assert_array_equal(others, repeated)
        assert number == other


@pytest.mark.parametrize("name", ONE_DRAW)
def test_numbers_that_are_not_for_rows_are_one_draw(drawn, name):
    np.testing.assert_array_equal(*([first for first, _ in drawn(ONE_DRAW[name], number)] for number in (0, 1)))


@pytest.mark.parametrize("by_keras", [False, True])
def test_a_function_of_all_rows_draws_alike(drawn, by_keras):
    seeds = [keras.random.SeedGenerator(3) for _ in range(2)]

    def of_all_rows():
        with step_module.override_state(step=None, whole_batch=True):
            return keras.random.normal((ROWS, 3), seed=seeds.pop()) if by_keras else tf.random.normal((ROWS, 3))

    np.testing.assert_array_equal(*([first for first, _ in drawn(of_all_rows, number)] for number in (0, 1)))
