"""Scenarios of the parity tests with what users put together in ways that no other scenario has."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from raytf.errors import ConfigError
from tests.processes.fresh_scenarios import compiled
from tests.processes.loss_scenarios import UNEVEN, VALIDATION, branches, one_hot, pairs, rows_of
from tests.processes.optimizer_scenarios import dense
from tests.processes.scenarios import BATCH, SCENARIOS, by_branch, classes, floats, results, scenario
from tests.processes.state_scenarios import with_states

BEFORE = list(SCENARIOS)


@scenario
def odd_reductions(p):
    """Sums, and means by the sum of the weights, of which rows have many or none."""
    kinds = {"sum": "sum", "weighed": "mean_with_sample_weight", "plain": "sum_over_batch_size"}
    losses = {name: keras.losses.MeanSquaredError(reduction=kind) for name, kind in kinds.items()}
    x, y = rows_of(losses, one_hot)
    weights = np.random.default_rng(4).uniform(0, 2, UNEVEN) * (np.arange(UNEVEN) % 5 < 2)
    return by_branch(p.fit(lambda: branches(losses), (x, y, dict.fromkeys(y, weights))))


class Tied(layers.Layer):
    """An embedding that is also the weights of the last layer: slices and a whole gradient for one variable."""

    def __init__(self):
        super().__init__()
        self.table, self.between = layers.Embedding(12, 8), layers.GRU(8, return_sequences=True)

    def call(self, tokens):
        return ops.matmul(self.between(self.table(tokens)), ops.transpose(self.table.embeddings))


@scenario
def odd_tied_embedding(p):
    tokens = np.random.default_rng(3).integers(0, 12, (UNEVEN, 7))

    def build():
        model = keras.Sequential([keras.Input((7,), dtype="int64"), Tied()])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return compiled(model, loss, lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.3), metrics=["accuracy"])

    return p.fit(build, (tokens, np.roll(tokens, -1, 1)))[1]


@tf.custom_gradient
def reversed_gradient(x):
    return tf.identity(x), lambda upstream: -0.5 * upstream


class Reversal(layers.Layer):
    def call(self, x):
        return reversed_gradient(x)


@scenario
def odd_domain_adversary(p):
    """A head that learns the domain, and features that unlearn it."""

    def build():
        inputs = keras.Input((6,))
        x = layers.Dense(8, "tanh")(inputs)
        outputs = {"kind": layers.Dense(3)(x), "domain": layers.Dense(1)(Reversal()(x))}
        losses = {
            "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "domain": keras.losses.BinaryCrossentropy(from_logits=True),
        }
        return compiled(keras.Model(inputs, outputs), losses, loss_weights={"kind": 1.0, "domain": 0.3})

    y = {"kind": classes(3, rows=UNEVEN), "domain": classes(2, seed=9, rows=UNEVEN)[:, None]}
    known = {"kind": 1.0 * (y["domain"][:, 0] == 0), "domain": np.ones(UNEVEN)}  # one domain has no labels
    return p.fit(build, (floats(6, rows=UNEVEN), y, known))[1]


def _f1(y_true, y_pred):
    true, predicted = np.argmax(y_true, -1), np.argmax(y_pred, -1)
    scores = [
        2 * np.sum((true == k) & (predicted == k)) / max(1, np.sum(true == k) + np.sum(predicted == k))
        for k in range(3)
    ]
    return np.float64(np.mean(scores))


def f1_of_numpy(y_true, y_pred):
    return tf.ensure_shape(tf.numpy_function(_f1, [y_true, y_pred], tf.float64), ())


@scenario
def odd_metric_of_numpy(p):
    rows = lambda count: (floats(6, rows=count), one_hot(None, count))
    build = lambda: compiled(dense(8, 3, inputs=6), metrics=[f1_of_numpy])
    return p.fit(build, rows(UNEVEN), validation_data=p.data(rows(VALIDATION)))[1]


class Report(keras.callbacks.Callback):
    """Evaluates and predicts rows of its own after each epoch, and adds what it finds to the logs."""

    def __init__(self):
        super().__init__()
        self.rows = floats(6, seed=20, rows=11), floats(2, seed=21, rows=11)

    def on_epoch_end(self, epoch, logs=None):
        logs["own_loss"] = self.model.evaluate(*self.rows, verbose=0, batch_size=4)
        logs["own_mean"] = float(np.mean(self.model.predict(self.rows[0], verbose=0, batch_size=4)))


@scenario
def odd_callback_that_evaluates(p):
    stop = keras.callbacks.EarlyStopping("own_loss", mode="min", patience=1, min_delta=0.05, restore_best_weights=True)
    return p.fit(lambda: compiled(dense(8, 2, inputs=6)), pairs(), epochs=5, callbacks=[Report(), stop])[1]


@scenario
def odd_arguments_of_fit(p):
    data, held = p.data(pairs()), p.data(pairs(VALIDATION))
    model = p._built(lambda: compiled(dense(8, 2, inputs=6), metrics=["mae"]), data)
    history = model.fit(
        data.repeat(),
        epochs=5,
        initial_epoch=1,
        steps_per_epoch=2,
        validation_data=held,
        validation_steps=1,
        validation_freq=2,
        verbose=0,
    )
    return results(model, history)


@scenario
def odd_transfer_learning(p):
    """A frozen base at first, and all of it then, at another rate."""
    data, held = p.data(pairs()), p.data(pairs(VALIDATION))

    def build():
        base = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.BatchNormalization(synchronized=True)])
        base.trainable = False
        return compiled(keras.Sequential([base, layers.ReLU(), layers.Dense(2)]))

    model = p._built(build, data)
    first = model.fit(data, epochs=2, validation_data=held, verbose=0)
    with p.strategy.scope():
        model.layers[0].trainable = True
        model.compile(keras.optimizers.RMSprop(1e-3), "mae", metrics=["mse"])
    second = model.fit(data, epochs=2, validation_data=held, verbose=0)
    out = results(model, second) | {f"first:{k}": np.asarray(v) for k, v in first.history.items()}
    return with_states((model, out))


class Predicting(keras.Model):
    """Features in tuples and dicts, and a step of its own for predictions."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = layers.Dense(4, "tanh"), layers.Dense(4, "tanh"), layers.Dense(2)

    def call(self, x):
        first, (second, third) = x
        return self.head(self.a(first["left"]) + self.b(second) * third)

    def predict_step(self, data):
        predicted = self(data[0] if isinstance(data, tuple) and len(data) == 1 else data)
        return {"best": ops.argmax(predicted, -1), "said": predicted - ops.mean(predicted, -1, keepdims=True)}


@scenario
def odd_nested_features(p):
    x = {"left": floats(3, rows=UNEVEN)}, (floats(5, seed=1, rows=UNEVEN), floats(1, seed=2, rows=UNEVEN))
    model, out = p.fit(lambda: compiled(Predicting(), "mae"), (x, floats(2, seed=8, rows=UNEVEN)))
    predicted = model.predict(tf.data.Dataset.from_tensor_slices((x,)).batch(8), verbose=0)
    return out | predicted


@scenario
def odd_arguments_of_optimizers(p):
    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh", name="one"), layers.Dense(2, name="two")])
        rate = keras.optimizers.schedules.CosineDecayRestarts(0.05, 3, 2.0, 0.9, 0.1)
        optimizer = keras.optimizers.Nadam(rate, weight_decay=0.1, clipvalue=0.2, gradient_accumulation_steps=2)
        optimizer.exclude_from_weight_decay(var_names=["bias"], var_list=[model.layers[1].kernel])
        model.compile(optimizer, "mse")
        return model

    return p.fit(build, pairs(), epochs=4)[1]


class Watched(layers.Layer):
    """A layer with a metric of its own."""

    def __init__(self):
        super().__init__()
        self.hidden, self.active = layers.Dense(8, "relu"), keras.metrics.Mean(name="active")

    def call(self, x):
        x = self.hidden(x)
        self.active.update_state(ops.cast(x > 0, x.dtype))
        return x


@scenario
def odd_metric_of_a_layer(p):
    build = lambda: compiled(keras.Sequential([keras.Input((6,)), Watched(), layers.Dense(2)]))
    return p.fit(build, pairs(), validation_data=p.data(pairs(VALIDATION)))[1]


class Experts(layers.Layer):
    """Experts that take their rows alone; a worker may have none for one of them."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = layers.Dense(4), [layers.Dense(3, "tanh") for _ in range(4)]

    def build(self, shape):
        for layer in (self.gate, *self.experts):
            layer.build(shape)

    def call(self, x):
        shares = ops.softmax(self.gate(x))
        best = tf.argmax(shares, -1, tf.int32)
        places = tf.dynamic_partition(tf.range(tf.shape(x)[0]), best, 4)
        parts = [expert(tf.gather(x, place)) for expert, place in zip(self.experts, places, strict=True)]
        return tf.dynamic_stitch(places, parts) * ops.max(shares, -1, keepdims=True)


@scenario
def odd_experts_of_rows(p):
    build = lambda: compiled(keras.Sequential([keras.Input((6,)), Experts(), layers.Dense(2)]))
    return p.fit(build, pairs())[1]


class Branching(layers.Layer):
    """Normalizes only what looks large."""

    def __init__(self):
        super().__init__()
        self.normalized = layers.BatchNormalization(synchronized=True)

    def build(self, shape):
        self.normalized.build(shape)

    def call(self, x, training=False):
        large = tf.reduce_mean(tf.abs(x)) > 0.8
        return tf.cond(large, lambda: self.normalized(x, training=training), lambda: x)


@scenario
def odd_normalization_in_a_branch(p):
    """Workers may take another branch: it is refused."""
    build = lambda: compiled(keras.Sequential([keras.Input((6,)), Branching(), layers.Dense(2)]))
    if p.world == 1:
        return {"refused": np.ones(1)} if p.fit(build, pairs()) else {}
    with pytest.raises(RuntimeError, match="must be called in the step itself.*inside a tf.cond"):
        p.fit(build, pairs())
    return {"refused": np.ones(1)}


ALL_BUT_ONE = 2 * BATCH + 1  # so that in the last step one worker has the only row


def logarithm(x):
    return ops.log(x)


@scenario
def odd_rows_without_zeros(p):
    """A worker without rows computes on a row of zeros, which has no logarithm."""
    normalization = lambda: layers.BatchNormalization(synchronized=True)
    build = lambda: compiled(
        keras.Sequential(
            [keras.Input((6,)), layers.Lambda(logarithm), layers.Dense(5), normalization(), layers.Dense(2)]
        )
    )
    x, y = pairs(ALL_BUT_ONE)
    return p.fit(build, (np.abs(x) + 0.1, y))[1]


@scenario
def odd_normalization_of_masked_rows(p):
    def build():
        inputs = keras.Input((5, 6))
        x = layers.BatchNormalization(synchronized=True, momentum=0.8)(layers.Masking()(inputs))
        return compiled(keras.Model(inputs, layers.Dense(2)(layers.GRU(4)(x))))

    x = floats(5, 6, rows=ALL_BUT_ONE)
    for i, row in enumerate(x):
        row[1 + i % 4 :] = 0.0
    model, out = p.fit(build, (x, floats(2, seed=8, rows=ALL_BUT_ONE)))
    return out | {f"s{i}": np.asarray(v) for i, v in enumerate(model.non_trainable_variables)}


class Annealed(layers.Layer):
    """Changes by the number of its steps."""

    def build(self, shape):
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")
        self.halved = self.add_weight(shape=(), initializer="ones", trainable=False, name="halved")

    def call(self, x, training=False):
        if training:
            self.steps.assign_add(1.0)
            self.halved.assign(self.halved / 2)
        return x * ops.cast(ops.minimum(0.1 * self.steps, 1.0), x.dtype)


@scenario
def odd_states_that_no_row_changes(p):
    """In the last step one worker has no row, and its state is to be that of the others."""

    def build():
        spectral = layers.SpectralNormalization(layers.Dense(3))
        return compiled(keras.Sequential([keras.Input((6,)), layers.Dense(5), Annealed(), spectral, layers.Dense(2)]))

    model, out = p.fit(build, pairs(ALL_BUT_ONE), epochs=3)
    return out | {f"s{i}": np.asarray(v) for i, v in enumerate(model.non_trainable_variables)}


class Phases(keras.losses.Loss):
    """A mean over rows at first, then one that compares them."""

    compares = False

    def call(self, y_true, y_pred):
        others = ops.mean(y_pred, 0) if self.compares else 0.0
        return ops.mean(ops.square(y_true - y_pred + others), -1)


class PhasesOfALayer(layers.Layer):
    """Adds a mean at first, then a sum."""

    adds_sums = False

    def call(self, x):
        self.add_loss(0.01 * (ops.sum if self.adds_sums else ops.mean)(ops.square(x)))
        return x


@scenario
def odd_losses_that_a_callback_changes(p):
    losses = []

    class NextPhase(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            losses[0].compares = self.model.layers[-1].adds_sums = epoch > 0
            self.model.make_train_function(force=True)

    def build():
        losses[:] = [Phases()]
        return compiled(keras.Sequential([keras.Input((6,)), layers.Dense(2), PhasesOfALayer()]), losses[0])

    return p.fit(build, pairs(), epochs=3, callbacks=[NextPhase()])[1]


class MaskedTokens(keras.Model):
    """The loss of tokens that the inputs hide, as in BERT."""

    HIDDEN = 7

    def __init__(self):
        super().__init__()
        self.table, self.head = layers.Embedding(20, 5), layers.Dense(20)

    def call(self, tokens):
        return self.head(self.table(tokens))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        hidden = ops.cast(ops.equal(x, self.HIDDEN), y_pred.dtype)
        values = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return ops.sum(values * hidden) / ops.maximum(ops.sum(hidden), 1.0)


IGNORED = {"classes": [11]}


def ignoring(y_true, y_pred):
    kept = ops.not_equal(y_true, IGNORED["classes"][0])
    values = keras.losses.sparse_categorical_crossentropy(ops.where(kept, y_true, 0), y_pred, from_logits=True)
    kept = ops.cast(kept, y_pred.dtype)
    return values * kept / (ops.mean(kept) + 1e-7)


@scenario
def odd_rows_that_numbers_elsewhere_select(p):
    """Numbers of a class, and of a list in a dict, say which tokens and which rows count."""
    tokens = np.random.default_rng(3).integers(0, 20, (UNEVEN, 6))
    masked = p.fit(lambda: compiled(MaskedTokens(), None), (tokens, np.roll(tokens, 1, 1)))[1]
    labels = classes(3, rows=UNEVEN)
    labels[BATCH // 2 :: 2] = 11
    build = lambda: compiled(keras.Sequential([keras.Input((6,)), layers.Dense(3)]), ignoring)
    ignored = p.fit(build, (floats(6, rows=UNEVEN), labels))[1]
    return masked | {f"ignored_{name}": value for name, value in ignored.items()}


class Largest(keras.metrics.Metric):
    def __init__(self, lowest):
        super().__init__(name=f"largest_{abs(lowest):.0e}")
        self.lowest, self.largest = lowest, self.add_variable((), lambda *_, **__: lowest, name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(ops.maximum(self.largest, ops.cast(ops.max(y_pred), self.largest.dtype)))

    def result(self):
        return self.largest

    def reset_state(self):
        self.largest.assign(self.lowest)


class GeometricMean(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="geometric_mean")
        self.product, self.count = self.add_variable((), "ones"), self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.product.assign(self.product * ops.cast(ops.prod(0.5 + ops.abs(y_true - y_pred)), self.product.dtype))
        self.count.assign_add(ops.cast(ops.size(y_true), self.count.dtype))

    def result(self):
        return self.product ** (1 / ops.maximum(self.count, 1.0))

    def reset_state(self):
        self.product.assign(1.0)
        self.count.assign(0.0)


def fitted_in_uneven_parts(p, *metrics):
    """Trains a model with Largest(0.0) and others; in two steps the chief has no row."""
    from raytf.data import worker_part

    arrays, steps = pairs(11), [([0, 1, 2], [3, 4]), ([], [5, 6]), ([7], [8, 9]), ([], [10])]
    mine = [np.array(parts[p.rank] if p.world > 1 else [*parts[0], *parts[1]], int) for parts in steps]
    data = tf.data.Dataset.from_generator(
        lambda: (tuple(a[rows] for a in arrays) for rows in mine),
        output_signature=tuple(tf.TensorSpec((None, *a.shape[1:]), a.dtype) for a in arrays),
    )
    data = data.apply(tf.data.experimental.assert_cardinality(len(steps)))

    def build():
        created = [Largest(0.0), *(metric if isinstance(metric, keras.Metric) else metric() for metric in metrics)]
        return compiled(keras.Sequential([keras.Input((6,)), layers.Dense(2)]), metrics=created)

    model = p._built(build, data)
    history = model.fit(worker_part.mark_worker_part(data) if p.world > 1 else data, epochs=2, verbose=0)
    return results(model, history)


@scenario
def odd_metrics_that_do_not_begin_with_zero(p):
    """Nor do they add up."""
    if p.strategy.num_replicas_in_sync > p.world:
        with pytest.raises(ConfigError, match="within the strategy's scope; received: the metric 'largest_1e.09'"):
            fitted_in_uneven_parts(p, Largest(-1e9))
    return fitted_in_uneven_parts(p, lambda: Largest(-1e30), GeometricMean)


@scenario
def odd_metric_created_out_of_scope(p):
    return fitted_in_uneven_parts(p, Largest(-1e9))


NEW = [name for name in SCENARIOS if name not in BEFORE]
__all__ = ["NEW", "SCENARIOS"]
