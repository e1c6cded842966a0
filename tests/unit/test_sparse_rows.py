"""`sparse_updates="lazy"`: used rows get what Keras' optimizer gives a table of only these; others stay as they are."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from raytf.compat.patching import patched
from raytf.errors import ConfigError
from raytf.parallel import sparse_rows, trainer

trainer.install()
ROWS, WIDTH, STEPS = 50, 3, 4
USED = [7, 3, 41]
MADE = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), 0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    "clipnorm": lambda: keras.optimizers.Adam(0.1, clipnorm=0.5),
    "clipvalue": lambda: keras.optimizers.Adam(0.1, clipvalue=0.05),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.1, global_clipnorm=0.5),
}


@pytest.fixture(autouse=True)
def lazy():
    with patched(sparse_rows, "lazy", True):
        yield


def gradients(step):
    """(ids, values, gradient of another variable): ids come twice, in any order."""
    draw = np.random.default_rng(step)
    return draw.choice(USED, 8), draw.normal(size=(8, WIDTH)), draw.normal(size=(2,))


def trained(make, start, gradient_of):
    """The variables of a table and its optimizer after some steps, and those of another variable."""
    keras.backend.set_floatx("float64")
    try:
        table, other = keras.Variable(start, name="table"), keras.Variable(np.ones(2), name="other")
        optimizer = make()
        optimizer.build([table, other])
    finally:
        keras.backend.set_floatx("float32")

    @tf.function(autograph=False)
    def step(ids, values, others):
        optimizer.apply([gradient_of(ids, values), others], [table, other])

    for i in range(STEPS):
        step(*map(tf.constant, gradients(i)))
    slots = [v for v in optimizer.variables if v.shape == table.shape]
    return [np.asarray(v) for v in (table, *slots)], np.asarray(other)


FAST = ("adamw", "clipnorm")


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in MADE])
def test_used_rows_and_others(name):
    start = np.random.default_rng(9).normal(size=(ROWS, WIDTH))
    by_rows, other = trained(MADE[name], start, lambda ids, values: tf.IndexedSlices(values, ids, (ROWS, WIDTH)))
    small = np.sort(USED)
    dense = lambda ids, values: tf.math.unsorted_segment_sum(values, tf.searchsorted(small, ids), small.size)
    expected, expected_other = trained(MADE[name], start[small], dense)
    np.testing.assert_allclose(other, expected_other, rtol=0, atol=1e-12)
    untouched = [i for i in range(ROWS) if i not in USED]
    assert len(by_rows) == len(expected)
    for found, wanted in zip(by_rows, expected, strict=True):
        np.testing.assert_allclose(found[small], wanted, rtol=0, atol=1e-12)
        assert len(np.unique(found[untouched], axis=0)) == (len(untouched) if found is by_rows[0] else 1)
    assert by_rows[0][untouched].tobytes() == start[untouched].tobytes()


class OwnAdam(keras.optimizers.Adam):
    pass


@pytest.mark.parametrize(
    ("optimizer", "received"),
    [
        (keras.optimizers.RMSprop(), "RMSprop"),
        (OwnAdam(), "OwnAdam"),
        (keras.optimizers.Adam(use_ema=True), "use_ema=True"),
        (keras.optimizers.Adam(gradient_accumulation_steps=2), "gradient_accumulation_steps=2"),
        (keras.optimizers.SGD(loss_scale_factor=2.0), "loss_scale_factor=2.0"),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "LossScaleOptimizer"),
    ],
)
def test_what_cannot_update_some_rows_is_refused(optimizer, received):
    table = keras.Variable(np.ones((ROWS, WIDTH)))
    with pytest.raises(ConfigError, match=f"received: {received}"):
        optimizer.apply([tf.IndexedSlices(tf.ones((2, WIDTH)), tf.constant([1, 2]), (ROWS, WIDTH))], [table])


def test_a_step_reads_used_rows_only():
    keras.utils.set_random_seed(1)
    layer = keras.layers.Embedding(ROWS, WIDTH)
    ids = tf.constant([[1.0, -2.0]])
    with patched(sparse_rows, "lazy", False):
        expected = layer(ids)
    table = layer.trainable_variables[0]
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([table])

    @tf.function(autograph=False)
    def step(ids):
        with tf.GradientTape() as tape:
            found = layer(ids)
            loss = tf.reduce_sum(found)
        optimizer.apply(tape.gradient(loss, [table.value]), [table])
        return found

    traced = step.get_concrete_function(ids)
    whole = [op.name for op in traced.graph.get_operations() if [tuple(t.shape) for t in op.outputs] == [(ROWS, WIDTH)]]
    assert whole == []
    before = np.asarray(table)
    np.testing.assert_array_equal(traced(ids), expected)
    changed = np.flatnonzero((np.asarray(table) != before).any(1))
    assert changed.tolist() == [1, ROWS - 2]
