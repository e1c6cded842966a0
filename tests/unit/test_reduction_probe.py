"""What functions do with rows, found out on halves of a batch."""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers, ops

from raytf.parallel import losses, reduction_probe, step_logs, trainer
from raytf.parallel import step as step_module
from raytf.parallel.constant_draws import constant_draws

PER_ROW = {
    "mse": lambda y, p: ops.mean(ops.square(y - p), axis=-1),
    "a value for each place": lambda y, p: ops.abs(y - p),
    "keras": keras.losses.cosine_similarity,
}
COMPARING = {
    "contrastive": lambda y, p: ops.logsumexp(ops.matmul(p, ops.transpose(p)), axis=-1),
    "centered": lambda y, p: ops.mean(ops.square(p - ops.mean(p, axis=0)), axis=-1),
    "ranked": lambda y, p: ops.cast(ops.argsort(p[:, 0]), "float32") + y[:, 0],
    "of the rows before": lambda y, p: ops.cumsum(p[:, 0]),
    "of a part": lambda y, p: tf.boolean_mask(p[:, 0], p[:, 0] > 0.5),
    "one for all": lambda y, p: ops.mean(y - p)[None],
    "from position 64 on": lambda y, p: ops.concatenate([p[:64, 0], 2 * p[64:, 0]]),
}


def slope(y, p):
    """The derivative of a function of the rows, as a physics-informed loss has it."""
    with tf.GradientTape() as tape:
        tape.watch(p)
        values = ops.sum(p**3)
    return ops.mean(ops.square(tape.gradient(values, p)))


MEANS = {
    "slope": slope,
    "mean": lambda y, p: ops.mean(ops.square(y - p)),
    "mean and more": lambda y, p: 3 + ops.mean(y - p),
}
SUMS = {"sum": lambda y, p: ops.sum(ops.square(y - p)), "scaled": lambda y, p: ops.sum(y - p) / 50}
NEITHER = {
    "root": lambda y, p: ops.sqrt(ops.mean(ops.square(y - p))),
    "spread": lambda y, p: ops.std(p),
    "ratio of sums": lambda y, p: ops.sum(y * p) / ops.sum(p * p),
    "largest": lambda y, p: ops.max(p),
    "of the first hundred": lambda y, p: ops.mean(ops.square(y - p)[:100]),
}


def tried(function, *shape, dtypes=(tf.float32, tf.float32), rows=reduction_probe.ANY_ROWS):
    specs = tuple(tf.TensorSpec((None, *shape), dtype) for dtype in dtypes)
    return reduction_probe.probe(lambda its: function(*its), specs, rows)


@pytest.mark.parametrize("name", [*PER_ROW, *COMPARING])
def test_whether_a_value_of_a_row_needs_others(name):
    found = tried((PER_ROW | COMPARING)[name], 3)
    assert (found.rows, found.why) == (name in PER_ROW, None)


@pytest.mark.parametrize("name", [*MEANS, *SUMS, *NEITHER])
def test_how_halves_make_the_whole(name):
    ways = tried((MEANS | SUMS | NEITHER)[name], 3).ways
    assert ways == ({"mean"} if name in MEANS else {"sum"} if name in SUMS else set())


@settings(max_examples=10)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    power=st.integers(1, 3),
    weight=st.floats(-3, 3).filter(lambda w: abs(w) > 0.01),
    dtype=st.sampled_from([tf.float16, tf.bfloat16, tf.float32, tf.float64]),
)
def test_any_mean_over_rows_is_one_and_any_sum_a_sum(shape, power, weight, dtype):
    # of one sign: where rows cancel out, what is left of 16 bits is rounding
    each = lambda y, p: weight * tf.reduce_mean(tf.abs(0.5 + y - p) ** power, axis=list(range(1, p.shape.rank)))
    dtypes = (dtype, dtype)
    assert tried(each, *shape, dtypes=dtypes).rows
    assert "mean" in tried(lambda y, p: tf.reduce_mean(each(y, p)), *shape, dtypes=dtypes).ways
    assert "sum" in tried(lambda y, p: tf.reduce_sum(each(y, p)), *shape, dtypes=dtypes).ways


MARK = -77.0
LEAVING_OUT = {
    "a usual number": lambda y, p, m=-100: _mean_over(ops.not_equal(y, m), y, p),
    "a number of its module": lambda y, p: _mean_over(ops.not_equal(y, MARK), y, p),
    "what is no number": lambda y, p: _mean_over(ops.isfinite(y), y, p),
}


def _mean_over(known, y, p):
    known = ops.cast(known, p.dtype)
    each = ops.square(ops.where(known > 0, y, 0.0) - p)
    return ops.sum(known * each) / ops.sum(known)


@pytest.mark.parametrize("name", LEAVING_OUT)
def test_a_mean_over_labels_that_are_there_is_none_over_rows(name):
    function = LEAVING_OUT[name]
    specs = tf.TensorSpec((None, 2), tf.float32), tf.TensorSpec((None, 2), tf.float32)
    call = lambda its: function(*its)
    assert "mean" in reduction_probe.probe(call, specs).ways
    assert not reduction_probe.probe(call, specs, masked=reduction_probe.MaskedLabels(specs[0], [function])).ways


def test_classes_may_be_missing_that_a_loss_does_not_know():
    def masked(its):
        y, p = its
        each = keras.losses.sparse_categorical_crossentropy(tf.where(y == 254, tf.zeros_like(y), y), p)
        return tf.reduce_sum(tf.where(y == 254, 0.0, each)) / tf.reduce_sum(tf.cast(y != 254, tf.float32))

    specs = tf.TensorSpec((None,), tf.uint8), tf.TensorSpec((None, 3), tf.float32)
    assert not reduction_probe.probe(masked, specs, masked=reduction_probe.MaskedLabels(specs[0], [masked])).ways


@pytest.mark.parametrize("name", [*MEANS, *PER_ROW])
def test_what_leaves_nothing_out_is_what_it_was(name):
    function = (MEANS | PER_ROW)[name]
    specs = tf.TensorSpec((None, 3), tf.float32), tf.TensorSpec((None, 3), tf.float32)
    call = lambda its: function(*its)
    assert reduction_probe.probe(
        call, specs, masked=reduction_probe.MaskedLabels(specs[0], [function])
    ) == reduction_probe.probe(call, specs)


IGNORED, IN_A_LIST, IN_A_DICT = 12, [3, 12], {"ignored": {"classes": [12]}}


class OfAClass:
    IGNORED = 12

    def call(self, labels, values):
        return masked_mean(labels != self.IGNORED, values)


class OfAnAttribute:
    def __init__(self):
        self.config = {"ignored": 12}

    def call(self, labels, values):
        return masked_mean(labels != self.config["ignored"], values)


def masked_mean(mask, values):
    mask = ops.cast(mask, values.dtype)
    return ops.sum(mask * values) / ops.maximum(ops.sum(mask), 1)


def of_a_list(labels, values):
    return masked_mean(labels != IN_A_LIST[1], values)


def of_a_dict(labels, values):
    return masked_mean(labels != IN_A_DICT["ignored"]["classes"][0], values)


def taken_rather_than_skipped(labels, values):
    return masked_mean(labels == IGNORED, values)


@pytest.mark.parametrize("owner", [OfAClass(), OfAnAttribute(), of_a_list, of_a_dict, taken_rather_than_skipped])
@pytest.mark.parametrize("shape", [(None,), (None, 5), pytest.param((None, 1 << 20), marks=pytest.mark.slow)])
def test_numbers_that_mask_rows_are_found_where_code_keeps_them(owner, shape):
    function = getattr(owner, "call", owner)
    specs = tf.TensorSpec(shape, tf.int64), tf.TensorSpec(shape, tf.float32)
    missing = reduction_probe.MaskedLabels(specs[0], [function, owner])
    assert not reduction_probe.probe(lambda given: function(*given), specs, masked=missing).ways


def test_classes_are_rows_of_what_a_loss_knows():
    specs = (tf.TensorSpec((None,), tf.int64), tf.TensorSpec((None, 7), tf.float32))
    found = reduction_probe.probe(lambda its: keras.losses.sparse_categorical_crossentropy(*its), specs)
    assert found.rows


def test_rows_may_be_taken_in_twos_and_threes():
    pairs = lambda y, p: ops.mean(ops.square(ops.subtract(*ops.unstack(ops.reshape(p, (-1, 2, 3)), axis=1))))
    triples = lambda y, p: ops.mean(ops.reshape(p, (-1, 3, 3)) ** 2)
    assert tried(pairs, 3).ways == tried(triples, 3).ways == {"mean"}


def test_large_rows_are_tried_with_small_ones():
    seen = []

    def function(y, p):
        seen.append(p.shape.num_elements())
        return ops.mean(y - p, axis=(1, 2, 3))

    assert tried(function, 2048, 2048, 8).rows
    assert max(seen) <= 1 << 12


def test_large_vocabularies_are_tried_with_short_sequences():
    specs = (tf.TensorSpec((None, 1024), tf.int64), tf.TensorSpec((None, 1024, 50257)))
    loss = lambda its: keras.losses.sparse_categorical_crossentropy(*its, from_logits=True)
    assert reduction_probe.probe(loss, specs).rows


def test_what_has_no_rows_is_given_as_it_is():
    """Positions of a sequence, or weights of classes."""
    weights = tf.constant([1.0, 2.0, 3.0])
    call = lambda its: ops.mean(its[0] * its[1], axis=-1)
    assert reduction_probe.probe(call, (tf.TensorSpec((None, 3)), weights), None).rows


def test_noise_is_distinguished_from_what_cannot_be_tried():
    trainer.install()
    noisy = tried(lambda y, p: ops.mean(p + np.random.normal(size=3)), 3)
    assert noisy.unknown and not noisy.why
    failed = tried(lambda y, p: ops.mean(p) + undefined, 3)  # noqa: F821
    assert failed.unknown and "undefined" in failed.why


def test_a_trial_leaves_no_trace():
    trainer.install()
    state = keras.Variable(1.0)
    generator = keras.random.SeedGenerator(3)
    before = np.asarray(generator.state)
    metric = keras.metrics.Mean()

    def function(y, p):
        state.assign_add(1.0)
        metric.update_state(p)
        return ops.mean(p) + state + ops.mean(keras.random.normal((2,), seed=generator))

    tried(function, 3)
    assert (float(state), float(metric.count)) == (1.0, 0.0)
    np.testing.assert_array_equal(generator.state, before)


class Adds(layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        self.add_loss(self.function(x))
        return x


def stepping(rows=8):
    return step_module.override_state(
        step=step_module.Step(tf.constant(rows), True), seen=step_logs.StepObservations(step_logs.Notes()), calls=None
    )


def test_an_added_loss_that_is_neither_a_mean_nor_a_sum_is_warned_of_with_what_mends_it():
    trainer.install()
    layer = Adds(ops.std)
    with stepping(), pytest.warns(UserWarning, match="is neither a mean nor a sum.*compute_loss"):
        layer(tf.random.normal((8, 3)))


def test_a_compute_loss_that_cannot_be_tried_is_warned_of():
    trainer.install()

    class Kept(keras.Model):
        def call(self, x):
            return x

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return ops.mean(self.kept - y_pred)

    model = Kept()
    model.kept = tf.ones((8, 3))  # rows that are no argument
    with stepping(), pytest.warns(UserWarning, match="Kept.compute_loss could not be tried.*from the arguments"):
        losses.compute_loss(model, model.compute_loss, y=tf.ones((8, 3)), y_pred=tf.ones((8, 3)))


@pytest.mark.parametrize("kind", ["CosineSimilarity", "BinaryCrossentropy", "CategoricalCrossentropy"])
@pytest.mark.parametrize(("axis", "by_row"), [(-1, True), (1, True), (0, False), (-2, False)])
def test_a_loss_of_keras_over_the_axis_of_rows_is_tried(kind, axis, by_row):
    loss = getattr(keras.losses, kind)(axis=axis)
    with stepping():
        assert losses._tried(step_module.current(), loss, tf.ones((8, 3)), tf.ones((8, 3))).rows == by_row


def test_losses_that_were_added_stay_when_others_are_tried():
    trainer.install()
    model = keras.Sequential([Adds(ops.mean), Adds(lambda x: 2 * ops.mean(x))])
    with stepping():
        model(tf.ones((8, 3)))
        assert [float(loss) for loss in model.losses] == [1.0, 2.0]


def test_a_state_that_a_function_keeps_is_no_random_number():
    trainer.install()
    mean, seeds = keras.Variable(1.0, trainable=False), keras.random.SeedGenerator(1)

    def relative(y, p):
        mean.assign(0.9 * mean + 0.1 * ops.mean(p))
        return p[:, 0] / mean

    found = tried(relative, 3)
    assert not found.rows and found.why is None and float(mean) == 1.0
    noise = []

    def noisy(y, p):
        noise.append(keras.random.normal((), seed=seeds))
        return p[:, 0] + noise[-1]

    assert tried(noisy, 3).rows
    assert float(noise[0]) != float(noise[1]) and float(noise[-2]) == float(noise[-1])  # drawn, then constant


DRAWING = {
    "mean": lambda y, p: ops.mean(ops.square(y - p - keras.random.normal(ops.shape(p)))),
    "sum": lambda y, p: ops.sum(ops.square(y - keras.random.dropout(p, 0.5))),
    "of tf.random": lambda y, p: tf.reduce_sum(y * tf.random.gamma(tf.shape(p)[:1], [2.0, 3.0, 4.0])),
    "of counts": lambda y, p: tf.reduce_sum(y * tf.random.poisson(tf.shape(p), 3.0)),
    "pairs": lambda y, p: ops.logsumexp(ops.matmul(p + keras.random.uniform(ops.shape(p)), ops.transpose(p))),
}


@pytest.mark.parametrize("name", DRAWING)
def test_what_draws_is_classified_without_its_random_numbers(name):
    trainer.install()
    found = tried(DRAWING[name], 3)
    assert (found.ways, found.why) == ({"mean"} if name == "mean" else set() if name == "pairs" else {"sum"}, None)
    assert not np.array_equal(tf.random.normal((9,)), tf.random.normal((9,))), "random again"


def test_other_threads_draw_while_one_has_constants():
    drawn = []
    with constant_draws(own_thread=True):
        np.testing.assert_array_equal(tf.random.normal((9,)), tf.random.normal((9,)))
        thread = threading.Thread(target=lambda: drawn.append(tf.random.normal((9,))))
        thread.start()
        thread.join()
    assert len(np.unique(drawn[0])) == 9


def test_an_added_sum_that_draws_is_that_over_all_rows():
    trainer.install()
    seeds, sums = keras.random.SeedGenerator(1), []

    def noisy(x):  # in inference, too
        sums.append(ops.sum(x + keras.random.normal(ops.shape(x), seed=seeds)))
        return sums[-1]

    layer = Adds(noisy)
    with stepping(), pytest.MonkeyPatch.context() as patches:
        patches.setattr(step_module.Step, "upscale", lambda self, dtype: tf.constant(3, dtype))
        layer(tf.ones((8, 3)))
        assert float(layer.losses[0]) == pytest.approx(3 * float(sums[0]))


def contrastive(p):
    return ops.mean(ops.logsumexp(ops.matmul(p, ops.transpose(p)), axis=-1))


LATER = {
    "a sum": (lambda w, y, p: w * ops.sum(ops.square(y - p)), {"sum"}),
    "a mean": (lambda w, y, p: w * ops.mean(ops.square(y - p)), {"mean"}),
    "a mean with another": (lambda w, y, p: ops.mean(y - p) + w * ops.mean(ops.square(p)), {"mean"}),
    "a mean with what compares rows": (lambda w, y, p: ops.mean(y - p) + w * contrastive(p), set()),
    "a mean with a sum that draws": (
        lambda w, y, p: ops.mean(y - p) + w * ops.sum(p + keras.random.normal(ops.shape(p))),
        set(),
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_a_weight_that_begins_with_0_does_not_hide_what_is_weighted(name):
    trainer.install()
    function, ways = LATER[name]
    weight = keras.Variable(0.0, trainable=False)
    found = tried(lambda y, p: function(weight, y, p), 3)
    assert (found.ways, found.zeros, float(weight)) == (ways, frozenset(), 0.0)


def test_values_of_rows_with_a_weight_of_0_are_tried_with_another():
    weight = keras.Variable(0.0)
    assert tried(lambda y, p: p[:, 0] + weight * y[:, 0], 3).rows
    assert not tried(lambda y, p: p[:, 0] + weight * ops.mean(p), 3).rows


def test_the_graph_of_a_users_function_keeps_no_such_value():
    weight = keras.Variable(0.0)
    within = tf.function(lambda p: weight * ops.sum(p))
    assert tried(lambda y, p: ops.mean(p) + within(p), 3).ways == {"mean"}
    weight.assign(2.0)
    assert [float(within(tf.ones((rows, 3)))) for rows in (12, 24)] == [72.0, 144.0]


@pytest.mark.parametrize("start", [0, 700])
def test_a_count_of_steps_does_not_hide_what_comes_after_a_warm_up(start):
    optimizer = keras.optimizers.SGD()
    optimizer.iterations.assign(start)
    mean = lambda p: ops.mean(ops.square(p))
    warmed = lambda y, p: ops.where(optimizer.iterations < 1000, mean(p), contrastive(p))
    assert not tried(warmed, 3).ways
    assert tried(lambda y, p: ops.minimum(1.0, optimizer.iterations / 1000) * mean(p), 3).ways == {"mean"}
    table = tf.constant([1.0, 2.0])
    assert tried(lambda y, p: tf.gather(table, optimizer.iterations // 500) * mean(p), 3).ways == {"mean"}
    assert int(optimizer.iterations) == start


def test_what_reads_no_such_number_is_tried_no_more_often():
    """Nor what reads a metric, or a weight other than 0."""
    weight, metric, calls = keras.Variable(0.5), keras.metrics.Mean(), []

    def function(y, p):
        calls.append(1)
        metric.update_state(p)
        return weight * ops.mean(y - p)

    tried(lambda y, p: calls.append(1) or ops.mean(y - p), 3)
    before = len(calls)
    tried(function, 3)
    assert len(calls) == 2 * before


def test_an_added_sum_with_a_weight_that_begins_with_0_is_that_over_all_rows():
    trainer.install()
    weight = keras.Variable(0.0)
    layer = Adds(lambda x: weight * ops.sum(x))
    scaled = []
    with stepping(), pytest.MonkeyPatch.context() as patches:
        patches.setattr(step_module.Step, "upscale", lambda self, dtype: scaled.append(1) or tf.constant(3, dtype))
        layer(tf.ones((8, 3)))
    assert scaled
