"""Metrics under a strategy: what need not be sent to other workers is not."""

from __future__ import annotations

import concurrent.futures

import keras
import numpy as np
import pytest
import tensorflow as tf

from raytf.compat import keras_objects
from raytf.errors import ConfigError
from raytf.parallel import metrics, own_state, trainer
from raytf.parallel import step as step_module


def test_what_workers_have_together_for_one_that_cannot_reach_the_others():
    """Sums of metrics, means of moving statistics, and of all else the values of the first that is not older."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)])
    model.compile("sgd", "mse", metrics=["mae"])
    model.train_on_batch(np.ones((3, 2)), np.ones((3, 2)))
    norm, seed = model.layers[0], model.layers[1].seed_generator.state
    total, count = model.metrics_variables[:2]
    variables = [total, count, norm.moving_mean, seed]
    each = [[np.float32(rank), np.float32(3), np.full(2, rank, np.float32), np.array([5, rank])] for rank in range(3)]
    summed, rows, mean, drawn = metrics.merge_states(model, variables, each, older=[0])
    assert (summed, rows, mean.tolist(), drawn.tolist()) == (3.0, 9.0, [1.0, 1.0], [5, 1])
    assert mean.dtype == np.float32
    names = {v.path.split("/")[-1] for v in (total, count)}
    assert names == {"total", "count"}


def test_the_global_seed_is_a_workers_own_state_where_its_steps_draw_from_it():
    """A callback of the chief alone may draw from it, too, once the training has begun."""
    trainer.install()
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5)])
    before = own_state.variables_of(model)
    keras.random.normal((1,))
    assert own_state.variables_of(model) == before
    (shared,) = keras_objects.shared_seed()
    with step_module.override_state(written=own_state._written(model)):
        keras.random.normal((1,))
    assert own_state.variables_of(model) == [*before, shared]


def test_the_global_seed_of_a_training_is_known_to_other_threads():
    """What a worker keeps, or gives to one that takes another's place, is asked of it in another thread."""
    keras.utils.clear_session()
    (shared,) = keras_objects.make_shared_seed()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(keras_objects.shared_seed).result() == [shared]
    keras.utils.clear_session()
    assert keras_objects.shared_seed() == []


def test_replicas_draw_from_the_global_seed_that_a_checkpoint_holds():
    trainer.install()
    keras.utils.clear_session()
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        (seed,) = keras_objects.make_shared_seed()
    drawing = lambda: strategy.run(lambda: keras.random.uniform((2,)))
    before = np.asarray(seed)
    first, second = tf.function(drawing)(), tf.function(drawing)()
    after = np.asarray(seed)
    assert not np.array_equal(before, after)
    seed.assign(before)
    again = tf.function(lambda: (drawing(), drawing()))()
    np.testing.assert_array_equal(again, (first, second))
    np.testing.assert_array_equal(seed, after)


def test_what_a_step_assigns_besides_its_update_is_noted():
    trainer.install()
    layer = keras.layers.Dense(1)
    layer.build((None, 1))
    with step_module.override_state(written={}):
        with step_module.override_state(reduced=True):
            layer.bias.assign([2.0])
        assert not step_module.state.written
        layer.kernel.assign_add([[1.0]])
        assert list(step_module.state.written.values()) == [layer.kernel]


def test_a_metric_is_set_to_zero_without_a_look_at_it(monkeypatch):
    """A look is a sum over all workers, for each of its variables."""
    trainer.install()
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        metric = keras.metrics.Mean()
    strategy.run(lambda: metric.update_state([3.0, 5.0]))
    assert float(metric.result()) == 4.0
    held = keras_objects.variable_of(metric.total)
    assert held.synchronization == tf.VariableSynchronization.ON_READ
    with monkeypatch.context() as patched:
        patched.setattr(type(held), "read_value", lambda self: pytest.fail("it is read"))
        with strategy.scope():
            metric.reset_state()
    assert float(metric.total.value) == float(metric.count.value) == 0.0


def test_float8_is_refused_with_several_workers(monkeypatch):
    trainer.install()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.layers[0].quantize("float8")
    model.compile("sgd", "mse")
    monkeypatch.setattr(trainer, "many_replicas", lambda strategy: True)
    monkeypatch.setattr(trainer, "local_replicas", lambda strategy: 1)
    model.make_test_function()
    with pytest.raises(ConfigError, match=r"Layers of float8 note .* the variable '.*', with several workers"):
        model.make_train_function()


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_a_state_of_rows_is_refused_with_several_workers(method, monkeypatch):
    trainer.install()
    monkeypatch.setattr(trainer, "many_replicas", lambda strategy: True)
    model = keras.Sequential([keras.Input(batch_shape=(4, 1, 3)), keras.layers.LSTM(1, stateful=True)])
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match=r"LSTM\(stateful=True\). Use stateful=False"):
        getattr(model, method)(np.ones((4, 1, 3)), np.ones((4, 1)), batch_size=4, verbose=0)
