"""Scenarios of the parity tests with layers, losses, metrics and steps of Keras that no other scenario has."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.processes.loss_scenarios import UNEVEN, VALIDATION, Own, branches, one_hot, own, pairs, rows_of
from tests.processes.optimizer_scenarios import dense
from tests.processes.scenarios import SCENARIOS, by_branch, classes, floats, results, scenario
from tests.processes.state_scenarios import with_states

BEFORE = list(SCENARIOS)
SGD = lambda: keras.optimizers.SGD(0.05, momentum=0.9)


def compiled(model, loss="mse", optimizer=SGD, **kwargs):
    model.compile(optimizer(), loss, **kwargs)
    return model


def vectors():
    return floats(6, rows=UNEVEN), classes(3, rows=UNEVEN)


@scenario
def fresh_losses_of_keras(p):
    losses = {
        "msle": keras.losses.MeanSquaredLogarithmicError(),
        "log_cosh": keras.losses.LogCosh(),
        "cosine": keras.losses.CosineSimilarity(),
        "hinge": keras.losses.Hinge(),
        "squared_hinge": keras.losses.SquaredHinge(),
        "categorical_hinge": keras.losses.CategoricalHinge(),
        "smooth": keras.losses.CategoricalCrossentropy(label_smoothing=0.2, from_logits=True),
        "binary_focal": keras.losses.BinaryFocalCrossentropy(from_logits=True, apply_class_balancing=True),
    }
    x, y = rows_of(losses, lambda name, rows: one_hot(name, rows) + (0.1 if name == "msle" else 0))
    return by_branch(p.fit(lambda: branches(losses), (x, y)))


@scenario
def fresh_metrics_of_classes(p):
    def build():
        metrics = [
            keras.metrics.OneHotMeanIoU(3),
            keras.metrics.OneHotIoU(3, [0, 2]),
            keras.metrics.Precision(thresholds=[0.2, 0.4]),
            keras.metrics.Recall(0.3, class_id=1),
            keras.metrics.SensitivityAtSpecificity(0.6),
            keras.metrics.PrecisionAtRecall(0.5),
            keras.metrics.RecallAtPrecision(0.4),
            keras.metrics.SpecificityAtSensitivity(0.6),
            keras.metrics.AUC(curve="PR", multi_label=True, num_labels=3),
            keras.metrics.FBetaScore("weighted", 0.5),
            keras.metrics.F1Score(threshold=0.3),
            keras.metrics.FalseNegatives([0.1, 0.5]),
        ]
        model = dense(8, 3, inputs=6)
        model = keras.Sequential([model, layers.Softmax()])
        return compiled(model, "categorical_crossentropy", metrics=metrics, weighted_metrics=["accuracy", "mse"])

    rows = lambda count: (floats(6, rows=count), one_hot(None, count), np.random.default_rng(3).uniform(0, 2, count))
    return p.fit(build, rows(UNEVEN), validation_data=p.data(rows(VALIDATION)))[1]


@scenario
def fresh_metrics_of_numbers(p):
    def build():
        metrics = [
            keras.metrics.R2Score("variance_weighted_average"),
            keras.metrics.MeanAbsolutePercentageError(),
            keras.metrics.LogCoshError(),
            keras.metrics.CosineSimilarity(),
            keras.metrics.PearsonCorrelation(),
            keras.metrics.ConcordanceCorrelation(),
            keras.metrics.RootMeanSquaredError(),
        ]
        return compiled(dense(8, 2, inputs=6), metrics=metrics)

    return p.fit(build, pairs(), validation_data=p.data(pairs(VALIDATION)))[1]


@scenario
def fresh_frozen_normalization(p):
    """A frozen BatchNormalization within a trained model, and one whose momentum is its own."""

    def build():
        frozen = layers.BatchNormalization()
        frozen.trainable = False
        first = keras.Input((8, 8, 2)), layers.Conv2D(4, 3), frozen, layers.ReLU(), layers.GroupNormalization(2)
        last = layers.SeparableConv2D(4, 3), layers.GlobalMaxPooling2D(), layers.Dense(3)
        model = keras.Sequential([*first, *last])
        return compiled(model, keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    return with_states(p.fit(build, (floats(8, 8, 2, rows=UNEVEN), classes(3, rows=UNEVEN))))


@scenario
def fresh_causal_attention(p):
    """A small language model: causal attention, masked padding, and weights for tokens."""
    tokens = np.random.default_rng(3).integers(1, 12, (UNEVEN, 7))
    for i, row in enumerate(tokens):
        row[2 + i % 6 :] = 0
    weights = np.random.default_rng(5).uniform(0.1, 2, (UNEVEN, 7))

    def build():
        inputs = keras.Input((7,), dtype="int64")
        x = layers.Embedding(12, 8, mask_zero=True)(inputs)
        x = layers.Add()([x, layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)])
        x = layers.RMSNormalization()(x)
        outputs = layers.Dense(12)(x)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return compiled(keras.Model(inputs, outputs), loss, metrics=["accuracy"], weighted_metrics=["accuracy"])

    return p.fit(build, (tokens, tokens, weights))[1]


@scenario
def fresh_ignored_pixels(p):
    """Segmentation with pixels of no class, of which rows have different numbers."""
    labels = np.random.default_rng(4).integers(0, 3, (UNEVEN, 6, 6))
    for i, picture in enumerate(labels):
        picture[: i % 6] = 255

    def build():
        model = keras.Sequential([keras.Input((6, 6, 2)), layers.Conv2D(4, 3, padding="same"), layers.Conv2D(3, 1)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=255)
        iou = keras.metrics.MeanIoU(3, ignore_class=255, sparse_y_pred=False)
        return compiled(model, loss, metrics=[iou])

    return p.fit(build, (floats(6, 6, 2, rows=UNEVEN), labels))[1]


@scenario
def fresh_loss_with_a_condition(p):
    """A loss that is another one while the batch is bad."""

    def loss(y_true, y_pred):
        far = ops.mean(ops.square(y_true - y_pred))
        return tf.cond(far > 1.2, lambda: ops.mean(ops.abs(y_true - y_pred)), lambda: far)

    return p.fit(lambda: compiled(dense(8, 2, inputs=6), loss), pairs())[1]


class Clip(keras.Model):
    """Two towers, a trained temperature, and the loss of both directions in `compute_loss`."""

    def __init__(self):
        super().__init__()
        self.a, self.b = dense(8, 4, inputs=6), dense(8, 4, inputs=6)
        self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")

    def call(self, x):
        return ops.normalize(self.a(x["a"]), axis=-1), ops.normalize(self.b(x["b"]), axis=-1)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        a, b = y_pred
        logits = ops.matmul(a, ops.transpose(b)) * ops.exp(self.temperature)
        places = ops.arange(ops.shape(logits)[0])
        one = keras.losses.sparse_categorical_crossentropy(places, logits, from_logits=True)
        other = keras.losses.sparse_categorical_crossentropy(places, ops.transpose(logits), from_logits=True)
        return ops.mean(one + other) / 2


@scenario
def fresh_clip(p):
    x = {"a": floats(6, rows=UNEVEN), "b": floats(6, seed=1, rows=UNEVEN)}
    return p.fit(lambda: compiled(Clip(), None), (x, np.zeros((UNEVEN, 1))))[1]


class Teacher(keras.callbacks.Callback):
    """Moves a teacher's weights after each step, which the loss of the next one follows."""

    def on_train_batch_end(self, batch, logs=None):
        pairs = zip(self.model.teacher.weights, self.model.student.weights, strict=True)
        for old, new in pairs:
            old.assign(0.9 * old + 0.1 * new)


class Taught(keras.Model):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = dense(8, 2, inputs=6), dense(8, 2, inputs=6)
        self.teacher.trainable = False

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        kept = super().compute_loss(x, y, y_pred, sample_weight)
        return kept + ops.mean(ops.square(y_pred - ops.stop_gradient(self.teacher(x))))


@scenario
def fresh_teacher_of_a_callback(p):
    return with_states(p.fit(lambda: compiled(Taught()), pairs(), callbacks=[Teacher()]))


class TwoTapes(Own):
    """A tape for each layer, and a loss of its own each."""

    def train_step(self, data):
        x, y = data
        for layer, scale in ((self.hidden, 0.5), (self.head, 1.0)):
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = self.compute_loss(x, y, predicted) * scale + 1e-3 * ops.mean(ops.abs(predicted))
            grads = tape.gradient(loss, layer.trainable_variables)
            grads = [ops.clip(g, -0.02, 0.02) for g in grads]
            for variable, gradient in zip(layer.trainable_variables, grads, strict=True):
                variable.assign_sub(0.1 * gradient)
        return self.compute_metrics(x, y, predicted)


@scenario
def fresh_tapes_without_an_optimizer(p):
    return p.fit(own(TwoTapes, loss="mse", metrics=["mae"]), pairs())[1]


class Tracking(Own):
    """As many guides show it: trackers of its own, one of them weighed by rows."""

    def __init__(self):
        super().__init__()
        self.total, self.even = keras.metrics.Mean(name="total"), keras.metrics.Mean(name="even")
        self.largest = keras.metrics.Mean(name="largest")

    @property
    def metrics(self):
        return [self.total, self.even, self.largest]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = ops.mean(ops.square(y - predicted))
        variables = self.trainable_variables
        grads = tape.gradient(loss, variables)
        self.optimizer.apply(grads, variables)
        self.total.update_state(loss, sample_weight=ops.shape(x)[0])
        self.even.update_state(loss)
        self.largest.update_state(ops.max(ops.abs(grads[0])))
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        x, y = data
        self.total.update_state(ops.mean(ops.square(y - self(x))))
        return {"total": self.total.result()}


@scenario
def fresh_trackers(p):
    return p.fit(own(Tracking), pairs(), validation_data=p.data(pairs(VALIDATION)))[1]


@scenario
def fresh_outputs_by_name(p):
    """Losses by name and weight, one output without, and metrics by name."""

    def build():
        inputs = keras.Input((6,))
        x = layers.Dense(8, "gelu")(inputs)
        outputs = {"kind": layers.Dense(3, "softmax")(x), "size": layers.Dense(2)(x), "free": layers.Dense(1)(x)}
        return compiled(
            keras.Model(inputs, outputs),
            {"kind": "sparse_categorical_crossentropy", "size": keras.losses.Huber(0.5), "free": None},
            loss_weights={"kind": 0.3, "size": 2.0, "free": 0.0},
            metrics={"kind": ["accuracy"], "size": ["mae", "mse"]},
        )

    y = {"kind": classes(3, rows=UNEVEN), "size": floats(2, seed=8, rows=UNEVEN), "free": floats(1, rows=UNEVEN)}
    weights = {name: np.random.default_rng(i).uniform(0, 2, UNEVEN) for i, name in enumerate(y)}
    return p.fit(build, (floats(6, rows=UNEVEN), y, weights))[1]


@scenario
def fresh_recurrent(p):
    """Rows of different lengths through recurrent layers of several kinds, with bidirectional ones."""
    x = floats(6, 3, rows=UNEVEN)
    for i, row in enumerate(x):
        row[1 + i % 5 :] = 0

    def build():
        inputs = keras.Input((6, 3))
        x = layers.Masking()(inputs)
        x = layers.Bidirectional(layers.GRU(3, return_sequences=True))(x)
        x = layers.TimeDistributed(layers.Dense(3, "tanh"))(x)
        return compiled(keras.Model(inputs, layers.Dense(2)(layers.SimpleRNN(4)(x))))

    return p.fit(build, (x, floats(2, seed=8, rows=UNEVEN)))[1]


class GradNorm(Own):
    """Weights of two losses, which follow the norms of their gradients."""

    def __init__(self):
        super().__init__()
        self.shares = self.add_weight(shape=(2,), initializer="ones", name="shares", trainable=False)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            predicted = self(x, training=True)
            losses = [ops.mean(ops.square(y - predicted)), ops.mean(ops.abs(y - predicted))]
            total = losses[0] * self.shares[0] + losses[1] * self.shares[1]
        norms = [ops.sqrt(ops.sum(ops.square(tape.gradient(one, self.hidden.kernel)))) for one in losses]
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(total, variables), variables)
        self.shares.assign(2 * ops.stack(norms[::-1]) / (norms[0] + norms[1]))
        return self.compute_metrics(x, y, predicted) | {"a": norms[0], "share": self.shares[0]}


@scenario
def fresh_gradnorm(p):
    return with_states(p.fit(own(GradNorm, loss="mse"), pairs()))


class Target(Own):
    """A target network that every third step copies, as deep Q-learning's."""

    def __init__(self):
        super().__init__()
        self.target = dense(8, 2, inputs=6)
        self.target.trainable = False
        self.online = dense(8, 2, inputs=6)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count", dtype="int64")

    def call(self, x):
        return self.online(x)

    def train_step(self, data):
        x, y = data
        best = ops.max(self.target(x), -1, keepdims=True)
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.online(x) - y - 0.9 * best))
        variables = self.online.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.count.assign_add(1)

        def copy():
            for old, new in zip(self.target.weights, self.online.weights, strict=True):
                old.assign(new)
            return 0

        tf.cond(self.count.value % 3 == 0, copy, lambda: 0)
        return {"loss": loss}


@scenario
def fresh_target_network(p):
    return with_states(p.fit(own(Target), pairs()))


@scenario
def fresh_ema_weights(p):
    """Averaged weights, swapped in for the validation, with a constraint and penalties."""

    def build():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, kernel_constraint=keras.constraints.MaxNorm(0.5), activity_regularizer="l2"),
                layers.Dense(2, kernel_regularizer=keras.regularizers.L1L2(0.01, 0.01)),
            ]
        )
        optimizer = lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=3, clipnorm=0.1)
        return compiled(model, "mse", optimizer)

    calls = [keras.callbacks.SwapEMAWeights()]
    return p.fit(build, pairs(), validation_data=p.data(pairs(VALIDATION)), callbacks=calls)[1]


class Finder(keras.callbacks.Callback):
    """Looks for a rate: it rises with each batch, until the loss does."""

    def on_train_begin(self, logs=None):
        self.best, self.rate = 1e9, 0.01

    def on_train_batch_end(self, batch, logs=None):
        self.best = min(self.best, logs["loss"])
        self.rate *= 1.5
        self.model.optimizer.learning_rate.assign(self.rate)
        if logs["loss"] > 1.5 * self.best:
            self.model.stop_training = True


@scenario
def fresh_rate_finder(p):
    found = p.fit(lambda: compiled(dense(8, 2, inputs=6)), pairs(), epochs=4, callbacks=[Finder()])
    return found[1] | {"rate": np.asarray(found[0].optimizer.learning_rate)}


class Balancing(keras.callbacks.Callback):
    """Weights of losses by how they fell, once an epoch."""

    def on_epoch_end(self, epoch, logs=None):
        ratio = logs["a_loss"] / (logs["a_loss"] + logs["b_loss"])
        self.model.share.assign(ratio)


class Balanced(keras.Model):
    def __init__(self):
        inputs = keras.Input((6,))
        x = layers.Dense(8, "tanh")(inputs)
        super().__init__(inputs, {"a": layers.Dense(2, name="a")(x), "b": layers.Dense(2, name="b")(x)})
        self.share = self.add_weight(shape=(), initializer="ones", trainable=False, name="share")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight) * self.share


@scenario
def fresh_balance_of_losses(p):
    x, y = pairs()
    build = lambda: compiled(Balanced(), {"a": "mse", "b": "mae"})
    return with_states(p.fit(build, (x, {"a": y, "b": y[:, ::-1].copy()}), epochs=3, callbacks=[Balancing()]))


class Variance(keras.metrics.Metric):
    """By Welford's way of joining batches."""

    def __init__(self, name="variance"):
        super().__init__(name=name)
        self.count = self.add_weight(shape=(), initializer="zeros", name="count")
        self.mean = self.add_weight(shape=(), initializer="zeros", name="mean")
        self.squares = self.add_weight(shape=(), initializer="zeros", name="squares")

    def update_state(self, y_true, y_pred, sample_weight=None):
        values = ops.reshape(y_pred - y_true, (-1,))
        rows = ops.cast(ops.size(values), values.dtype)
        mean = ops.mean(values)
        apart, total = mean - self.mean, self.count + rows
        squares = ops.sum(ops.square(values - mean)) + ops.square(apart) * self.count * rows / total
        self.squares.assign_add(squares)
        self.mean.assign(self.mean + apart * rows / total)
        self.count.assign(total)

    def result(self):
        return self.squares / self.count


@scenario
def fresh_metric_of_welford(p):
    return p.fit(lambda: compiled(dense(8, 2, inputs=6), metrics=[Variance()]), pairs())[1]


class Last(keras.metrics.Metric):
    """What the last batch had: its largest error, and how many rows."""

    def __init__(self, name="last"):
        super().__init__(name=name)
        self.error = self.add_weight(shape=(), initializer="zeros", name="error")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.error.assign(ops.max(ops.abs(y_true - y_pred)))

    def result(self):
        return self.error


@scenario
def fresh_metric_of_the_last_batch(p):
    return p.fit(lambda: compiled(dense(8, 2, inputs=6), metrics=[Last()]), pairs())[1]


@scenario
def fresh_triplets_of_one_input(p):
    """Anchor, positive and negative along an axis, a margin, and a mean over those that matter."""

    def loss(y_true, y_pred):
        anchor, near, far = ops.unstack(y_pred, 3, axis=1)
        margin = ops.relu(ops.sum(ops.square(anchor - near) - ops.square(anchor - far), -1) + 0.5)
        hard = ops.cast(margin > 0, margin.dtype)
        return ops.sum(margin) / (ops.sum(hard) + 1e-9)

    def build():
        inputs = keras.Input((3, 6))
        return compiled(keras.Model(inputs, layers.TimeDistributed(dense(8, 4, inputs=6))(inputs)), loss)

    return p.fit(build, (floats(3, 6, rows=UNEVEN), np.zeros((UNEVEN, 1))))[1]


class Virtual(Own):
    """Virtual adversarial training: a direction by power iteration, and a divergence."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        if not training:
            return loss
        direction = ops.ones_like(x) / 6
        with tf.GradientTape() as tape:
            tape.watch(direction)
            apart = ops.mean(ops.square(self(x + 0.1 * direction) - ops.stop_gradient(y_pred)))
        direction = ops.normalize(tape.gradient(apart, direction), axis=-1)
        return loss + ops.mean(ops.square(self(x + 0.5 * ops.stop_gradient(direction)) - ops.stop_gradient(y_pred)))


@scenario
def fresh_virtual_adversary(p):
    return p.fit(own(Virtual, loss="mse"), pairs(), validation_data=p.data(pairs(VALIDATION)))[1]


class Curriculum(Own):
    """The easier half of a batch counts."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        losses = ops.mean(ops.square(y - y_pred), -1)
        return ops.mean(ops.sort(losses)[: ops.shape(losses)[0] // 2 + 1])


@scenario
def fresh_easier_half(p):
    return p.fit(own(Curriculum), pairs())[1]


@scenario
def fresh_easier_half_as_a_loss(p):
    def loss(y_true, y_pred):
        losses = ops.mean(ops.square(y_true - y_pred), -1)
        kept, _ = ops.top_k(-losses, k=3)
        return -ops.mean(kept)

    return p.fit(lambda: compiled(dense(8, 2, inputs=6), loss), pairs())[1]


class Reset(Own):
    """It looks into its metrics while it trains."""

    def train_step(self, data):
        logs = super().train_step(data)
        return logs | {"twice": 2 * logs["loss"], "rate": self.optimizer.learning_rate}


@scenario
def fresh_logs_of_logs(p):
    return p.fit(own(Reset, loss="mse", metrics=["mae"]), pairs())[1]


class Masked(layers.Layer):
    """Splits patches into those that an encoder sees and those that it has to guess, with their places."""

    def build(self, shape):
        self.token = self.add_weight(shape=(shape[-1],), initializer="random_normal", name="token")
        self.code, self.places = layers.Dense(4), layers.Embedding(shape[1], 4)

    def call(self, patches):
        places = self.places(ops.arange(ops.shape(patches)[1])[None]) + 0 * patches[..., :1]
        guessed = self.code(self.token[None, None]) + places[:, 3:]
        return self.code(patches[:, :3]) + places[:, :3], guessed


class MaskedAutoencoder(keras.Model):
    """As Keras' example has it: no `call`, and layers that only its own steps build, on shapes of their own."""

    def __init__(self):
        super().__init__()
        self.masked, self.encoder, self.decoder = Masked(), layers.Dense(4, "gelu"), layers.Dense(3)

    def _loss(self, patches):
        seen, guessed = self.masked(patches)
        found = self.decoder(guessed + ops.mean(self.encoder(seen), axis=1, keepdims=True))
        return self.compute_loss(y=patches[:, 3:], y_pred=found), patches[:, 3:], found

    def train_step(self, patches):
        with tf.GradientTape() as tape:
            loss, y, found = self._loss(patches)
        parts = [part.trainable_variables for part in (self.encoder, self.decoder, self.masked)]
        nested = zip(tape.gradient(loss, parts), parts, strict=True)
        self.optimizer.apply_gradients([pair for two in nested for pair in zip(*two, strict=True)])
        return self._logs(loss, y, found)

    def test_step(self, patches):
        return self._logs(*self._loss(patches))

    def _logs(self, loss, y, found):
        for metric in self.metrics:
            metric.update_state(*((loss,) if metric.name == "loss" else (y, found)))
        return {metric.name: metric.result() for metric in self.metrics}


@scenario
def fresh_masked_autoencoder(p):
    def build():
        return compiled(MaskedAutoencoder(), optimizer=lambda: keras.optimizers.Adam(0.01), metrics=["mae"])

    return p.fit(build, floats(6, 3, rows=UNEVEN))[1]


class Positions(layers.Layer):
    """Token and position embeddings, as Keras' Transformer examples have them."""

    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs)
        self.kind, self.tokens, self.places = kind, layers.Embedding(20, 4), layers.Embedding(8, 4)

    def call(self, x):
        places = {
            "once": lambda: ops.arange(0, ops.shape(x)[-1], 1),
            "rows": lambda: ops.tile(ops.arange(ops.shape(x)[1])[None], [ops.shape(x)[0], 1]),
            "folded": lambda: ops.arange(ops.shape(x)[1]) // 2,
        }[self.kind]()
        return self.tokens(x) + self.places(places)


def with_positions(kind, length, **kwargs):
    """Builds a model with a table of positions, whose optimizer squares the gradient of an id each time it is there."""

    def build():
        inputs = keras.Input((length,), dtype="int64")
        code = layers.GlobalAveragePooling1D()(Positions(kind)(inputs))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        adam = lambda: keras.optimizers.Adam(0.01)
        return compiled(keras.Model(inputs, layers.Dense(3)(code)), loss, adam, **kwargs)

    return build


def tokens():
    return np.random.default_rng(3).integers(0, 20, (UNEVEN, 6)), classes(3, rows=UNEVEN)


@scenario
def fresh_positions_by_adam(p):
    out = {}
    for kind, length in (("once", 6), ("once", None), ("rows", 6), ("folded", None)):
        found = p.fit(with_positions(kind, length), tokens())[1]
        out |= {f"{kind} {length} {name}": value for name, value in found.items()}
    return out


@scenario
def fresh_positions_run_eagerly(p):
    return p.fit(with_positions("once", 6, run_eagerly=True), tokens())[1]


@scenario
def fresh_positions_of_a_fixed_number_of_rows(p):
    """A number of rows that is known as a step is traced is in constants, as positions are."""
    out = {}
    for kind in ("once", "rows"):
        dataset = tf.data.Dataset.from_tensor_slices(tokens()).batch(24, drop_remainder=True)
        model = p._built(with_positions(kind, 6))
        found = results(model, model.fit(dataset, epochs=2, verbose=0))
        out |= {f"{kind} {name}": value for name, value in found.items()}
    return out


@scenario
def fresh_regularized_embedding(p):
    tokens = np.random.default_rng(3).integers(0, 20, (UNEVEN, 5))

    def build():
        inputs = keras.Input((5,), dtype="int64")
        x = layers.Embedding(20, 4, embeddings_regularizer="l2", embeddings_constraint="unit_norm")(inputs)
        model = keras.Model(inputs, layers.Dense(2)(layers.GlobalMaxPooling1D()(x)))
        return compiled(model, "mse", lambda: keras.optimizers.Adagrad(0.05, global_clipnorm=0.2))

    return p.fit(build, (tokens, floats(2, seed=8, rows=UNEVEN)))[1]


class Trainable(keras.losses.Loss):
    """Keeps a mean of what it saw in a variable."""

    def __init__(self):
        super().__init__()
        self.mean = keras.Variable(1.0, trainable=False, dtype="float64")

    def call(self, y_true, y_pred):
        errors = ops.mean(ops.square(y_true - y_pred), -1)
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(errors))
        return errors / self.mean


@scenario
def fresh_loss_with_a_memory(p):
    return p.fit(lambda: compiled(dense(8, 2, inputs=6), Trainable()), pairs())[1]


class Translator(keras.Model):
    """Its `call` takes no batch as it comes: only its step can build it. Tokens of padding weigh nothing."""

    def __init__(self):
        super().__init__()
        self.total = keras.metrics.Mean(name="loss")
        self.source, self.target = layers.Dense(8), layers.Embedding(9, 8)
        self.attention, self.kinds = layers.MultiHeadAttention(2, 4), layers.Dense(9)

    @property
    def metrics(self):
        return [self.total]

    def call(self, inputs):
        source, target = inputs
        known = self.target(target)
        return self.kinds(known + self.attention(known, self.source(source)))

    def loss_of(self, batch):
        predicted = self([batch["source"], batch["target"][:, :-1]])
        wanted = batch["target"][:, 1:]
        one_hot = tf.one_hot(wanted, 9, dtype=predicted.dtype)
        return self.compute_loss(None, one_hot, predicted, sample_weight=tf.not_equal(wanted, 0))

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = self.loss_of(batch)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.total.update_state(loss)
        return {"loss": self.total.result()}

    def test_step(self, batch):
        self.total.update_state(self.loss_of(batch))
        return {"loss": self.total.result()}


@scenario
def fresh_translator_built_by_its_step(p):
    def rows(count):
        target = np.random.default_rng(1).integers(1, 9, (count, 6))
        for i, row in enumerate(target):
            row[2 + i % 5 :] = 0
        return {"source": floats(5, 3, rows=count), "target": target}

    loss = lambda: keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    build = lambda: compiled(Translator(), loss(), lambda: keras.optimizers.Adam(0.01))
    return p.fit(build, rows(UNEVEN), in_step=True, validation_data=p.data(rows(VALIDATION)))[1]


class Private(Own):
    """DP-SGD: the gradient of each row is clipped."""

    def train_step(self, data):
        variables = self.trainable_variables

        def of_row(row):
            x, y = row
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(y[None] - self(x[None], training=True)))
            return tf.clip_by_global_norm(tape.gradient(loss, variables), 0.1)[0]

        self.optimizer.apply([tf.reduce_mean(g, 0) for g in self.mapped(of_row, data)], variables)
        return self.compute_metrics(*data, self(data[0]))

    def mapped(self, of_row, data):
        return tf.vectorized_map(of_row, data)


class PrivateOneByOne(Private):
    def mapped(self, of_row, data):
        specs = [tf.TensorSpec(v.shape, v.dtype) for v in self.trainable_variables]
        return tf.map_fn(of_row, data, fn_output_signature=specs)


@scenario
def fresh_gradients_of_single_rows(p):
    out = {}
    for kind in (Private, PrivateOneByOne):
        found = p.fit(own(kind, metrics=["mae"]), pairs())[1]
        out |= {f"{kind.__name__}:{k}": v for k, v in found.items()}
    return out


class Accumulated(Own):
    """Sums gradients in variables that do not say how workers join them, and need not."""

    def build(self, shape):
        self.hidden.build(shape)
        self.head.build((None, 8))
        add = lambda shape, **kwargs: self.add_weight(shape=shape, initializer="zeros", trainable=False, **kwargs)
        self.sums = [add(v.shape, name=f"sum_{i}") for i, v in enumerate(self.trainable_variables)]
        self.count = add((), dtype="int32", name="count")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        for total, gradient in zip(self.sums, tape.gradient(loss, self.trainable_variables), strict=True):
            total.assign_add(gradient)
        self.count.assign_add(1)
        ops.cond(self.count % 2 == 0, self.step, lambda: None)
        return self.compute_metrics(x, y, self(x))

    def step(self):
        for total, variable in zip(self.sums, self.trainable_variables, strict=True):
            variable.assign_sub(0.05 * total)
            total.assign(ops.zeros_like(total))


@scenario
def fresh_accumulation_without_aggregation(p):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = with_states(p.fit(own(Accumulated, loss="mse"), pairs()))
    assert not [w for w in caught if "aggregation" in str(w.message)], "equal sums were warned of"
    return out


class Attention(layers.Layer):
    """A graph's: sums over the edges of each node."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 5), name="kernel")
        self.score = self.add_weight(shape=(10, 1), name="score")

    def call(self, states, edges):
        nodes, (ends, begins) = tf.matmul(states, self.kernel), tf.unstack(edges, axis=1)
        both = tf.concat([tf.gather(nodes, ends), tf.gather(nodes, begins)], 1)
        scores = tf.exp(tf.tanh(tf.matmul(both, self.score)))
        add = lambda values: tf.math.unsorted_segment_sum(values, ends, tf.shape(states)[0])
        return add(scores * tf.gather(nodes, begins)) / (add(scores) + 1e-9)


class Nodes(keras.Model):
    """The graph is the model's, and a batch lists which nodes are looked at."""

    def __init__(self):
        super().__init__()
        self.states = tf.constant(floats(5, rows=30))
        self.edges = tf.constant(np.random.default_rng(2).integers(0, 30, (90, 2)))
        self.first, self.second, self.head = Attention(), Attention(), layers.Dense(3)

    def call(self, ids):
        return tf.gather(self.head(self.second(self.first(self.states, self.edges), self.edges)), ids)


@scenario
def fresh_one_graph(p):
    ids = np.random.default_rng(5).integers(0, 30, UNEVEN)
    loss = lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return p.fit(lambda: compiled(Nodes(), loss(), metrics=["accuracy"]), (ids, ids % 3))[1]


class Diffusion(keras.Model):
    """The noise comes with the data; a moving copy of the network is validated; the tape gets a loss for each pixel."""

    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.normalizer.adapt(3 * floats(4, 4, 1, seed=9, rows=40) + 1)
        normalized = layers.BatchNormalization(center=False, scale=False, synchronized=True)
        first, last = layers.Conv2D(3, 3, padding="same", activation="swish"), layers.Conv2D(1, 1)
        self.network = keras.Sequential([keras.Input((4, 4, 2)), first, normalized, last])
        self.copy = keras.models.clone_model(self.network)
        self.error = keras.metrics.Mean(name="error")

    @property
    def metrics(self):
        return [self.error]

    def errors(self, data, network, training):
        images, noise, times = data
        noisy = ops.cos(times) * self.normalizer(images) + ops.sin(times) * noise
        rates = ops.broadcast_to(ops.sin(times), ops.shape(noisy))
        return self.loss(noise, network(ops.concatenate([noisy, rates], -1), training=training))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            errors = self.errors(data, self.network, True)
        variables = self.network.trainable_variables
        self.optimizer.apply(tape.gradient(errors, variables), variables)
        self.error.update_state(errors)
        for copy, variable in zip(self.copy.weights, self.network.weights, strict=True):
            copy.assign(0.9 * copy + 0.1 * variable)
        return {"error": self.error.result()}

    def test_step(self, data):
        self.error.update_state(self.errors(data, self.copy, False))
        return {"error": self.error.result()}


@scenario
def fresh_diffusion(p):
    def rows(count):
        times = np.random.default_rng(3).uniform(0.2, 1.4, (count, 1, 1, 1))
        return 3 * floats(4, 4, 1, rows=count) + 1, floats(4, 4, 1, seed=2, rows=count), times

    build = lambda: compiled(Diffusion(), keras.losses.mean_absolute_error, lambda: keras.optimizers.AdamW(0.01))
    return with_states(p.fit(build, rows(UNEVEN), in_step=True, validation_data=p.data(rows(VALIDATION))))


class Noisy(Own):
    """Noise on gradients, as for privacy or in Langevin dynamics, and on a weight."""

    def __init__(self):
        super().__init__()
        self.draws = keras.random.SeedGenerator(3)

    def noise(self, like, scale):
        return scale * keras.random.normal(ops.shape(like), dtype=like.dtype, seed=self.draws)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        gradients = [g + self.noise(g, 0.1) for g in tape.gradient(loss, variables)]
        gradients[-1] += 1e-14 * tf.random.normal(tf.shape(gradients[-1]), dtype=gradients[-1].dtype)
        self.optimizer.apply(gradients, variables)
        self.hidden.kernel.assign_add(self.noise(self.hidden.kernel, 0.01))
        return {"loss": loss}


@scenario
def fresh_noise_on_gradients(p):
    return with_states(p.fit(lambda: compiled(Noisy(), optimizer=lambda: keras.optimizers.Adam(0.01)), pairs()))


def average(y_true, y_pred):
    return tf.nn.compute_average_loss(ops.mean(ops.square(y_true - y_pred), -1), global_batch_size=24)


class AsDistributed(Own):
    """A step as in TensorFlow's guide of distributed training: losses divided by the global batch, and by replicas."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            errors = ops.mean(ops.square(y - self(x, training=True)), -1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=24) + 0.1 * tf.nn.compute_average_loss(errors)
            weights = ops.sum(ops.square(self.head.kernel))
            loss += tf.nn.scale_regularization_loss([0.01 * weights])
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@scenario
def fresh_losses_of_distributed_training(p):
    out = p.fit(lambda: compiled(AsDistributed()), pairs())[1]
    return out | {
        f"loss:{k}": v for k, v in p.fit(lambda: compiled(dense(8, 2, inputs=6), average), pairs())[1].items()
    }


class Mixed(Own):
    """Labels that its own step makes: one-hot ones for two losses and for "accuracy", of class numbers."""

    def train_step(self, data):
        x, y = data
        return super().train_step((x * 1.1, ops.one_hot(y, 2, dtype=x.dtype) * 0.8 + 0.1))

    def test_step(self, data):
        x, y = data
        return super().test_step((x, ops.one_hot(y, 2, dtype=x.dtype)))


@scenario
def fresh_labels_of_the_step(p):
    rows = lambda count: (floats(6, rows=count), classes(2, rows=count))
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    build = lambda: compiled(Mixed(), loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    return p.fit(build, rows(UNEVEN), validation_data=p.data(rows(VALIDATION)))[1]


class Ensemble(Own):
    """Keeps its prediction of each row by the row's number; each row is one worker's, so changes add up."""

    def __init__(self):
        super().__init__()
        more = {"trainable": False, "aggregation": "sum"}
        self.kept = self.add_weight(shape=(UNEVEN, 2), initializer="zeros", name="kept", **more)

    def call(self, inputs):
        return super().call(inputs["x"])

    def train_step(self, data):
        inputs, y = data
        place = inputs["place"]
        old = ops.take(self.kept, place[:, 0], axis=0)
        with tf.GradientTape() as tape:
            predicted = self(inputs, training=True)
            loss = ops.mean(ops.square(y - predicted)) + ops.mean(ops.square(old - predicted))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.kept.assign(ops.scatter_update(self.kept, place, 0.6 * old + 0.4 * predicted))
        return {"loss": loss}


@scenario
def fresh_state_by_row(p):
    x, y = pairs()
    data = {"x": x, "place": np.arange(UNEVEN)[:, None]}, y
    return with_states(p.fit(lambda: compiled(Ensemble()), data))


class ByLayer(keras.optimizers.Optimizer):
    """An optimizer for the variables of each path."""

    def __init__(self, parts):
        super().__init__(learning_rate=0.01, name="by_layer")
        self.parts = parts

    def build(self, variables):
        super().build(variables)
        for name, optimizer in self.parts.items():
            optimizer.build([v for v in variables if name in v.path])

    def apply(self, grads, trainable_variables=None):
        pairs = list(zip(grads, trainable_variables, strict=True))
        for name, optimizer in self.parts.items():
            optimizer.apply_gradients([pair for pair in pairs if name in pair[1].path])
        self.iterations.assign_add(1)


@scenario
def fresh_optimizers_within_an_optimizer(p):
    def build():
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(8, "tanh", name="body"), layers.Dense(2, name="head")]
        )
        parts = {"body": keras.optimizers.Adam(0.01, clipnorm=0.1), "head": keras.optimizers.SGD(0.1, momentum=0.9)}
        return compiled(model, optimizer=lambda: ByLayer(parts))

    model, out = p.fit(build, pairs())
    inner = [v for optimizer in model.optimizer.parts.values() for v in optimizer.variables]
    return out | {f"o{i}": np.asarray(v) for i, v in enumerate(inner)}


NEW = [name for name in SCENARIOS if name not in BEFORE]
__all__ = ["NEW", "SCENARIOS"]
