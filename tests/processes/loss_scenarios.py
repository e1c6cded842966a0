"""Scenarios of the parity tests with losses, metrics and logs as users write them: unreduced, uneven, comparing."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.processes.scenarios import BATCH, ROWS, by_branch, classes, dense_branch, floats, results, scenario
from tests.processes.state_scenarios import SCENARIOS

# The last batch of an epoch has 17 rows for several workers, and one in the last validation step.
UNEVEN, VALIDATION = 2 * BATCH + 17, BATCH + 1
BEFORE = list(SCENARIOS)


def rows_of(names, labels, rows=UNEVEN):
    """Inputs, and labels for each of the branches."""
    return floats(6, rows=rows), {name: labels(name, rows) for name in names}


def branches(losses, outputs=3, activation=None, **kwargs):
    """A model with a branch for each loss, which it alone trains."""
    inputs = keras.Input((6,))
    model = keras.Model(inputs, {name: dense_branch(inputs, outputs, activation, name) for name in losses})
    model.compile(keras.optimizers.SGD(0.05), losses, **kwargs)
    return model


# ------------------------------------------------------------------------------------- losses that compare rows


def contrastive(y_true, y_pred):
    """A value for each row, which depends on all."""
    unit = ops.normalize(y_pred, axis=-1)
    alike = ops.matmul(unit, ops.transpose(unit))
    same = ops.cast(ops.equal(ops.argmax(y_true, -1)[:, None], ops.argmax(y_true, -1)[None]), unit.dtype)
    return -ops.sum(same * ops.log_softmax(alike, axis=-1), axis=-1)


class Triplet(keras.losses.Loss):
    """The hardest of all other rows for each row, without a mean."""

    def call(self, y_true, y_pred):
        label = ops.argmax(y_true, axis=-1)
        apart = ops.sum(ops.square(y_pred[:, None] - y_pred[None]), axis=-1)
        same = ops.cast(ops.equal(label[:, None], label[None]), y_pred.dtype)
        return ops.relu(ops.max(apart * same, axis=1) - ops.min(apart + 1e3 * same, axis=1) + 1.0)


def of_a_part(y_true, y_pred):
    """As many values as rows of a kind; a worker may have none."""
    return tf.boolean_mask(ops.mean(ops.square(y_true - y_pred), axis=-1), y_true[:, 0] > 0.5)


def picked_out(y_true, y_pred):
    """A mean over rows of a kind, of which gradients are slices."""
    places = tf.where(y_true[:, 0] > 0.5)
    return tf.reduce_mean(tf.square(tf.gather_nd(y_true, places) - tf.gather_nd(y_pred, places)))


class OwnCall(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        centered = y_pred - ops.mean(y_pred, axis=0, keepdims=True)
        return ops.mean(ops.square(y_true - centered), axis=-1)


class Tempered(keras.losses.Loss):
    """Reduces by itself, with a weight of its own that is trained."""

    def __init__(self, log_scale):
        super().__init__()
        self.log_scale = log_scale

    def call(self, y_true, y_pred):
        scale = ops.exp(ops.cast(self.log_scale, y_pred.dtype))
        return ops.sqrt(ops.mean(ops.square(y_true - scale * y_pred))) / scale


COMPARING = {
    "contrastive": lambda: contrastive,
    "triplet": Triplet,
    "dice": lambda: keras.losses.Dice(axis=0),
    "tversky": lambda: keras.losses.Tversky(alpha=0.3, axis=0),
    "of_a_part": lambda: of_a_part,
    "picked_out": lambda: picked_out,
    "own_call": OwnCall,
    "unreduced": lambda: Triplet(reduction=None),
    "summed": lambda: Triplet(reduction="sum"),
    "row": lambda: keras.losses.KLDivergence(),
}


def one_hot(_, rows):
    return np.eye(3, dtype=keras.config.floatx())[classes(3, rows=rows)]


@scenario
def losses_that_compare_rows(p):
    build = lambda: branches({name: make() for name, make in COMPARING.items()}, activation="softmax")
    return by_branch(
        p.fit(build, rows_of(COMPARING, one_hot), validation_data=p.data(rows_of(COMPARING, one_hot, VALIDATION)))
    )


@scenario
def circle_loss_with_weights(p):
    """Keras' own, which compares the rows of a batch and gives a value for each."""
    names = ("circle", "unreduced")
    weights = np.random.default_rng(2).uniform(0, 2, UNEVEN).astype(keras.config.floatx())
    x, y = rows_of(names, lambda _, rows: classes(3, rows=rows))

    def build():
        inputs = keras.Input((6,))
        unit = {name: layers.UnitNormalization(name=name) for name in names}
        model = keras.Model(inputs, {n: unit[n](dense_branch(inputs, 3, None, f"{n}_code")) for n in names})
        losses = {"circle": keras.losses.Circle(gamma=2.0), "unreduced": keras.losses.Circle(1.5, reduction="none")}
        model.compile(keras.optimizers.SGD(0.05), losses, steps_per_execution=2)
        return model

    return p.fit(build, (x, y, dict.fromkeys(names, weights)))[1]


@scenario
def loss_with_a_trained_weight(p):
    """What a loss of the whole batch knows besides its rows counts once, not for each worker."""

    class Scaled(keras.layers.Layer):
        def build(self, shape):
            self.log_scale = self.add_weight(shape=(), initializer="zeros", name="log_scale")

        def call(self, x):
            return x

    def build():
        scaled = Scaled()
        model = keras.Sequential([keras.Input((6,)), layers.Dense(2), scaled])
        model.compile(keras.optimizers.SGD(0.1), Tempered(scaled.log_scale))
        return model

    return p.fit(build, (floats(6, rows=UNEVEN), floats(2, seed=1, rows=UNEVEN)))[1]


@scenario
def comparing_loss_of_masked_rows(p):
    """A loss that centers each place of a sequence over the batch; padding does not count."""

    def centered(y_true, y_pred):
        return ops.mean(ops.square(y_true - y_pred + ops.mean(y_pred, axis=0, keepdims=True)), axis=-1)

    tokens = np.random.default_rng(3).integers(1, 20, (UNEVEN, 6))
    for i, row in enumerate(tokens):
        row[1 + i * 5 // UNEVEN :] = 0

    def build():
        inputs = keras.Input((6,), dtype="int64")
        x = layers.LSTM(4, return_sequences=True)(layers.Embedding(20, 3, mask_zero=True)(inputs))
        model = keras.Model(inputs, layers.Dense(2)(x))
        model.compile(keras.optimizers.SGD(0.5), centered)
        return model

    return p.fit(build, (tokens, floats(6, 2, rows=UNEVEN)))[1]


# ------------------------------------------------------------------------------------- losses without a mean

UNREDUCED = {
    "plain": lambda: keras.losses.MeanSquaredError(reduction=None),
    "named": lambda: keras.losses.MeanAbsoluteError(reduction="none"),
}


@scenario
def unreduced_loss(p):
    """`reduction=None` in `compile`: the gradient is the sum over the batch, and the log its mean."""

    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError(reduction=None), metrics=["mae"])
        return model

    rows = lambda count: (floats(6, rows=count), floats(2, seed=8, rows=count))
    return p.fit(build, rows(UNEVEN), validation_data=p.data(rows(VALIDATION)))[1]


@scenario
def unreduced_losses_of_outputs(p):
    weights = np.random.default_rng(2).uniform(0, 2, UNEVEN).astype(keras.config.floatx())
    build = lambda: branches({name: make() for name, make in UNREDUCED.items()} | {"mean": "mse"}, 2)
    labels = lambda name, rows: floats(2, seed=len(name), rows=rows)
    x, y = rows_of([*UNREDUCED, "mean"], labels)
    return by_branch(p.fit(build, (x, y, weights)))


@scenario
def unreduced_loss_in_one_array(p):
    """Arrays given whole, in batches whose rows are known as the step is traced."""
    x, y = floats(6), floats(2, seed=8)

    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError(reduction=None))
        return model

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)
    model = p._built(build)
    return results(model, model.fit(dataset, epochs=2, verbose=0, class_weight=None))


class Own(keras.Model):
    """Two layers, for steps of one's own."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = layers.Dense(8, "tanh"), layers.Dense(2)

    def call(self, x):
        return self.head(self.hidden(x))

    def stepped(self, data, loss_of, persistent=False):
        x, y = data
        with tf.GradientTape(persistent=persistent) as tape:
            loss = loss_of(x, y, self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss


def own(kind, **kwargs):
    def build():
        model = kind()
        model.compile(keras.optimizers.SGD(0.02), **kwargs)
        model.build((None, 6))
        return model

    return build


def pairs(rows=UNEVEN):
    return floats(6, rows=rows), floats(2, seed=8, rows=rows)


def per_row(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


@scenario
def unreduced_loss_for_the_tape(p):
    """What TensorFlow's tape makes of a tensor is the gradient of its sum; that of inputs stays each row's own."""

    class Step(Own):
        def train_step(self, data):
            def loss(x, y, predicted):
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y_pred = self(x)
                slope = inner.gradient(y_pred, x)
                return per_row(y, predicted) + 0.1 * ops.sum(ops.square(slope), axis=-1)

            return {"value": ops.mean(self.stepped(data, loss))}

    class Several(Own):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                values = per_row(data[1], self(data[0]))
                both = [ops.mean(values), 0.5 * values]
            gradients = tape.gradient(both, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"value": both[0]}

    out = {f"one:{k}": v for k, v in p.fit(own(Step), pairs())[1].items()}
    return out | {f"two:{k}": v for k, v in p.fit(own(Several), pairs())[1].items()}


# ------------------------------------------------------------------------------------- add_loss and compute_loss


class Adds(layers.Layer):
    """Adds losses of several kinds, each with a weight of its own."""

    kinds = ("mean", "sum", "constant", "rows", "activity")

    def __init__(self, kind):
        super().__init__(activity_regularizer=keras.regularizers.L2(0.01) if kind == "activity" else None)
        self.kind = kind

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name=f"scale_{self.kind}")

    def call(self, x):
        out = x * self.scale
        if self.kind == "mean":
            self.add_loss(0.1 * ops.mean(ops.square(out)))
        elif self.kind == "sum":
            self.add_loss(0.01 * ops.sum(ops.square(out)))
            self.add_loss(0.02 * ops.mean(ops.abs(out)))
        elif self.kind == "constant":
            self.add_loss(0.1 * ops.sum(ops.square(self.scale)))
        elif self.kind == "rows":
            self.add_loss(0.01 * ops.sum(ops.square(out), axis=-1))
        return out


@scenario
def added_losses(p):
    """A mean, a sum over the batch, what does not depend on it, and a value for each row."""

    def build():
        inputs = keras.Input((6,))
        x = layers.Dense(5, "tanh")(inputs)
        for kind in Adds.kinds:
            x = Adds(kind)(x)
        model = keras.Model(inputs, layers.Dense(2)(x))
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        return model

    return p.fit(build, pairs(), validation_data=p.data(pairs(VALIDATION)))[1]


class OfAPart(Own):
    """A mean over the rows of a kind, of which a worker may have none, and a weight of its own."""

    def __init__(self):
        super().__init__()
        self.log_scale = self.add_weight(shape=(), initializer="zeros", name="log_scale")
        self.adds = Adds("sum")

    def call(self, x):
        return self.head(self.adds(self.hidden(x)))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        mask = ops.cast(y[:, 0] > 0.7, y_pred.dtype)
        scale = ops.exp(self.log_scale)
        mean = ops.sum(mask * per_row(y, scale * y_pred)) / ops.sum(mask)
        return mean / scale + 0.1 * ops.sum(self.losses)


class Joined(Own):
    """The compiled loss and something of all rows, with metrics of its own in between."""

    def __init__(self):
        super().__init__()
        self.spread, self.count = keras.metrics.Mean(name="spread"), keras.metrics.Sum(name="count")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        spread = ops.std(y_pred)
        self.spread.update_state(spread)
        self.count.update_state(ops.ones_like(y_pred[:, 0]))
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.3 * spread


class AsKeras(Own):
    """As Keras documents it: a mean, which needs no other worker's rows."""

    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean(name="loss")

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        loss = ops.mean((y_pred - y) ** 2) + 0.01 * ops.mean(ops.square(self.hidden(x)))
        self.tracker.update_state(loss)
        return loss

    @property
    def metrics(self):
        return [self.tracker]


MISSING = -77.0


class OfKnownLabels(keras.Model):
    """A mean over the labels that are there, of which no worker's rows have as many."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        known = ops.cast(ops.not_equal(y, MISSING), y_pred.dtype)
        return ops.sum(known * ops.square(y - y_pred)) / ops.sum(known)


@scenario
def compute_loss_of_labels_that_are_there(p):
    x, y = floats(6, rows=UNEVEN), floats(2, seed=8, rows=UNEVEN)
    y[UNEVEN // 3 :: 3] = MISSING
    y[UNEVEN // 2 :: 5, 0] = MISSING

    def build():
        inputs = keras.Input((6,))
        model = OfKnownLabels(inputs, layers.Dense(2)(inputs))
        model.compile(keras.optimizers.SGD(0.05))
        return model

    return p.fit(build, (x, y))[1]


@scenario
def own_compute_loss(p):
    out = {}
    for kind, options in ((OfAPart, {}), (Joined, {"loss": "mse", "metrics": ["mae"]}), (AsKeras, {})):
        found = p.fit(own(kind, **options), pairs(), validation_data=p.data(pairs(VALIDATION + 30)))[1]
        out |= {f"{kind.__name__}:{k}": v for k, v in found.items()}
    return out


# ------------------------------------------------------------------------------------- metrics


def f1(y_true, y_pred):
    positive, true = ops.cast(y_pred > 0.5, y_pred.dtype), ops.cast(y_true, y_pred.dtype)
    hits = ops.sum(positive * true)
    return 2 * hits / (ops.sum(positive) + ops.sum(true) + 1e-7)


def rmse(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(ops.cast(y_true, y_pred.dtype) - y_pred)))


def from_mean(y_true, y_pred):
    """A value for each row that depends on all."""
    return ops.mean(ops.square(y_pred - ops.mean(y_pred, axis=0)), axis=-1)


class BatchF1(keras.metrics.Metric):
    """Averages over batches what is no mean over rows."""

    def __init__(self, name="batch_f1"):
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")
        self.steps = self.add_variable((), "zeros", name="steps")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.cast(f1(y_true, y_pred), self.total.dtype))
        self.steps.assign_add(1.0)

    def result(self):
        return self.total / self.steps


class Hits(keras.metrics.Metric):
    """Sums over rows."""

    def __init__(self, name="hits"):
        super().__init__(name=name)
        self.hits = self.add_variable((), "zeros", name="hits")

    def update_state(self, y_true, y_pred, sample_weight=None):
        value = ops.cast(ops.equal(y_pred > 0.5, y_true > 0.5), self.hits.dtype)
        self.hits.assign_add(ops.sum(value if sample_weight is None else value * sample_weight[:, None]))

    def result(self):
        return self.hits


@scenario
def metric_functions_that_reduce(p):
    """Functions and classes that are no means over rows, weighted and not, in validation and long executions, too."""
    y = lambda rows: classes(2, rows=rows)[:, None].astype(keras.config.floatx())
    weights = np.random.default_rng(2).uniform(0, 2, UNEVEN).astype(keras.config.floatx())

    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(1, "sigmoid")])
        metrics = [f1, rmse, from_mean, "mae", BatchF1(), Hits()]
        model.compile(
            *(keras.optimizers.SGD(0.1), "binary_crossentropy"),
            metrics=metrics,
            weighted_metrics=["mse", Hits("weighted")],
            steps_per_execution=2,
        )
        return model

    rows = lambda count: (floats(6, rows=count), y(count))
    return p.fit(build, (*rows(UNEVEN), weights), validation_data=p.data(rows(VALIDATION)))[1]


class MostOfRareRows(keras.metrics.Metric):
    """The largest error of rows that synthetic ones are not like, and how many rows there were."""

    def __init__(self):
        super().__init__(name="rare")
        self.most, self.count = (self.add_variable((), "zeros", name=name) for name in ("most", "count"))

    def update_state(self, y_true, y_pred, sample_weight=None):
        errors = ops.where(y_true > 4.0, ops.abs(y_true - y_pred), 0.0)
        self.most.assign(ops.maximum(self.most, ops.max(errors)))
        self.count.assign_add(ops.cast(ops.shape(y_true)[0], self.count.dtype))

    def result(self):
        return self.most + 100 * self.count


class RareRows(keras.Model):
    """Its loss is the largest error of rare rows."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(1)

    def call(self, x):
        return self.out(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.max(ops.where(y > 4.0, ops.abs(y - y_pred), 0.0))


@scenario
def what_counts_rare_rows(p):
    data = floats(6, rows=UNEVEN), 5 * floats(1, seed=4, rows=UNEVEN)
    out = {}
    for name, make in {"metric": lambda: keras.Sequential([layers.Dense(1)]), "loss": RareRows}.items():

        def build(make=make):
            model = make()
            model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[MostOfRareRows()])
            return model

        out |= {f"{name}:{key}": value for key, value in p.fit(build, data)[1].items()}
    return out


@scenario
def metrics_of_keras_over_rows(p):
    """An axis of 0, and labels without a second dimension, whose last axis is the one of rows."""

    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(3)])
        kinds = (keras.metrics.PearsonCorrelation, keras.metrics.ConcordanceCorrelation, keras.metrics.CosineSimilarity)
        metrics = [kind(axis=axis, name=f"{kind.__name__}_{axis}") for kind in kinds for axis in (0, -1)]
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=metrics)
        return model

    def flat():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(1), layers.Flatten()])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[keras.metrics.PearsonCorrelation(name="flat")])
        return model

    rows = lambda count: (floats(6, rows=count), floats(3, seed=3, rows=count))
    out = p.fit(build, rows(UNEVEN), validation_data=p.data(rows(VALIDATION)))[1]
    inputs, labels = rows(UNEVEN)
    return out | {f"flat:{name}": value for name, value in p.fit(flat, (inputs, labels[:, 0]))[1].items()}


@scenario
def metrics_of_an_own_step(p):
    class Step(Own):
        def __init__(self):
            super().__init__()
            self.loss_tracker, self.batch = keras.metrics.Mean(name="loss"), BatchF1()
            self.error = keras.metrics.MeanMetricWrapper(rmse, name="error")

        @property
        def metrics(self):
            return [self.loss_tracker, self.batch, self.error]

        def noted(self, y, predicted, loss):
            self.loss_tracker.update_state(loss)
            self.batch.update_state(y > 0, predicted)
            self.error.update_state(y, predicted)
            return {m.name: m.result() for m in self.metrics}

        def train_step(self, data):
            loss = self.stepped(data, lambda x, y, predicted: ops.mean(per_row(y, predicted)))
            return self.noted(data[1], self(data[0]), loss)

        def test_step(self, data):
            predicted = self(data[0])
            return self.noted(data[1], predicted, ops.mean(per_row(data[1], predicted)))

    return p.fit(own(Step), pairs(), validation_data=p.data(pairs(VALIDATION)))[1]


# ------------------------------------------------------------------------------------- logs


class Plain(Own):
    """Returns tensors, under the names of metrics that nobody updates."""

    def train_step(self, data):
        loss = self.stepped(data, lambda x, y, predicted: ops.mean(per_row(y, predicted)))
        return {"loss": loss}

    def test_step(self, data):
        return {"loss": ops.mean(per_row(data[1], self(data[0])))}


class Mixed(Plain):
    """Tensors next to results of metrics, and what follows from these."""

    def train_step(self, data):
        loss = super().train_step(data)["loss"]
        error = self(data[0]) - data[1]
        self.compute_metrics(data[0], data[1], self(data[0]))
        mae = next(m for m in self.get_metrics_result().items() if m[0] == "mean_absolute_error")[1]
        return {
            "loss": loss,
            "mean_absolute_error": mae,
            "decibel": 10 * ops.log10(mae),
            "nested": {"square": ops.mean(ops.square(error)), "float": 0.5},
            "rate": self.optimizer.learning_rate,
            "number": 3,
            "steps": self.optimizer.iterations,
            "rows": per_row(data[1], self(data[0])),
            "signs": data[1][:, 0] > 0,
        }

    def test_step(self, data):
        predicted = self(data[0])
        return super().test_step(data) | self.compute_metrics(data[0], data[1], predicted) | super().test_step(data)


class OwnMetrics(keras.Sequential):
    """`compute_metrics` adds a tensor to the results."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        return found | {"bias": ops.mean(y_pred - y), "twice": 2 * found["loss"]}


class Tracked(Plain):
    """Updates the model's own tracker, and returns the tensor: Keras gives the tracker's mean for an epoch."""

    def train_step(self, data):
        logs = super().train_step(data)
        for metric in self.metrics:
            metric.update_state(logs["loss"])
        return logs


@scenario
def logs_of_tensors(p):
    seen = {}

    def look(name):
        keep = lambda key: lambda _, logs: seen.setdefault(f"{name}:{key}", []).append(float(logs["loss"]))
        return keras.callbacks.LambdaCallback(on_epoch_end=keep("epoch"), on_train_batch_end=keep("batch"))

    out = {}
    sequential = lambda: OwnMetrics([keras.Input((6,)), layers.Dense(2)])
    cases = {
        "plain": (Plain, {"loss": "mse"}),
        "mixed": (Mixed, {"metrics": ["mean_absolute_error"], "steps_per_execution": 2}),
        "tracked": (Tracked, {"loss": "mse"}),
        "compute_metrics": (sequential, {"loss": "mse", "metrics": ["mae"]}),
    }
    for name, (kind, options) in cases.items():
        model, found = p.fit(
            own(kind, **options), pairs(), validation_data=p.data(pairs(VALIDATION)), callbacks=[look(name)]
        )
        assert not any((np.asarray(v) == 0).any() for k, v in found.items() if k.endswith("loss")), found
        evaluated = model.evaluate(p.data(pairs(UNEVEN)), verbose=0, return_dict=True)
        out |= {f"{name}:{k}": v for k, v in found.items()}
        out |= {f"{name}:evaluate:{k}": np.asarray(v) for k, v in evaluated.items()}
    return out | {name: np.asarray(values) for name, values in seen.items()}


@scenario
def early_stopping_by_a_tensor(p):
    """Stops, and keeps the best weights, by what a `test_step` returns."""

    class Worse(Plain):
        def test_step(self, data):
            loss = super().test_step(data)["loss"]
            return {"loss": loss + ops.cast(self.optimizer.iterations, loss.dtype) ** 2 / 100}

    stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    _, out = p.fit(
        own(Worse, loss="mse"), pairs(), epochs=6, validation_data=p.data(pairs(VALIDATION)), callbacks=[stop]
    )
    assert len(out["h:loss"]) < 6, "it has not stopped"
    return out


@scenario
def logs_run_eagerly(p):
    build = own(Mixed, metrics=["mean_absolute_error"], run_eagerly=True)
    return p.fit(build, pairs(BATCH + 1), epochs=1, validation_data=p.data(pairs(BATCH + 1)))[1]


NEW = [name for name in SCENARIOS if name not in BEFORE]
__all__ = ["NEW", "ROWS", "SCENARIOS"]
