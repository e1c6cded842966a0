"""Scenarios of the parity tests after models, losses, metrics and callbacks of public repositories and examples."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.processes.gradient_scenarios import Step, fit, mean_loss
from tests.processes.loss_scenarios import UNEVEN, VALIDATION, Own, branches, one_hot, own, pairs, per_row, rows_of
from tests.processes.optimizer_scenarios import dense
from tests.processes.scenarios import SCENARIOS, by_branch, classes, floats, scenario
from tests.processes.state_scenarios import with_states

BEFORE = list(SCENARIOS)

# ------------------------------------------------------------------------------------- losses of a batch


def soft_dice(y_true, y_pred):
    """Segmentation's: one number of all that is in the batch."""
    y_true, y_pred = ops.reshape(y_true, (-1,)), ops.reshape(y_pred, (-1,))
    return 1 - (2 * ops.sum(y_true * y_pred) + 1) / (ops.sum(y_true) + ops.sum(y_pred) + 1)


def focal_tversky(y_true, y_pred):
    hits = ops.sum(y_true * y_pred, axis=0)
    missed, false = ops.sum(y_true * (1 - y_pred), axis=0), ops.sum((1 - y_true) * y_pred, axis=0)
    return ops.sum(ops.power(1 - (hits + 1) / (hits + 0.7 * missed + 0.3 * false + 1), 0.75))


def crossentropy_and_dice(y_true, y_pred):
    return keras.losses.binary_crossentropy(y_true, y_pred) + soft_dice(y_true, y_pred)


def nt_xent(y_true, y_pred):
    """SimCLR's, whose pairs are rows of one class."""
    unit = ops.normalize(y_pred, axis=-1)
    logits = ops.matmul(unit, ops.transpose(unit)) / 0.5 - 1e9 * ops.eye(ops.shape(unit)[0], dtype=unit.dtype)
    same = ops.cast(ops.matmul(y_true, ops.transpose(y_true)), unit.dtype)
    same = same * (1 - ops.eye(ops.shape(unit)[0], dtype=unit.dtype))
    logged = ops.sum(same * ops.log_softmax(logits, axis=1), axis=1) / ops.maximum(ops.sum(same, axis=1), 1.0)
    return -ops.mean(logged)


class BarlowTwins(keras.losses.Loss):
    """The correlation of two embeddings over the batch is to be the identity."""

    def call(self, y_true, y_pred):
        normal = lambda z: (z - ops.mean(z, axis=0)) / (ops.std(z, axis=0) + 1e-3)
        joint = ops.matmul(ops.transpose(normal(y_true)), normal(y_pred)) / ops.cast(ops.shape(y_pred)[0], y_pred.dtype)
        return ops.sum(ops.square(joint - ops.eye(3, dtype=joint.dtype)))


class VICReg(keras.losses.Loss):
    def call(self, y_true, y_pred):
        spread = ops.mean(ops.relu(1 - ops.sqrt(ops.var(y_pred, axis=0) + 1e-4)))
        centered = y_pred - ops.mean(y_pred, axis=0)
        cov = ops.matmul(ops.transpose(centered), centered) / (ops.cast(ops.shape(y_pred)[0], y_pred.dtype) - 1)
        apart = ops.sum(ops.square(cov)) - ops.sum(ops.square(ops.diagonal(cov)))
        return ops.mean(ops.square(y_true - y_pred)) + spread + apart / 3


def cox(y_true, y_pred):
    """Survival analysis': the risk of each row among those that lived as long."""
    time, event = y_true[:, 0], ops.cast(y_true[:, 1] > 0, y_pred.dtype)
    lived = ops.cast(time[None] >= time[:, None], y_pred.dtype)
    risk = y_pred[:, 0]
    return -ops.sum(event * (risk - ops.log(ops.sum(lived * ops.exp(risk)[None], axis=1)))) / (ops.sum(event) + 1e-7)


def concordance(y_true, y_pred):
    """Lin's coefficient."""
    mt, mp = ops.mean(y_true), ops.mean(y_pred)
    joint = ops.mean((y_true - mt) * (y_pred - mp))
    return 1 - 2 * joint / (ops.var(y_true) + ops.var(y_pred) + (mt - mp) ** 2 + 1e-7)


def hardest(y_true, y_pred):
    """Online hard example mining: the mean of the five worst rows."""
    values = keras.losses.categorical_crossentropy(y_true, y_pred)
    return ops.mean(ops.top_k(values, k=ops.minimum(5, ops.shape(values)[0]))[0])


def balanced(y_true, y_pred):
    """Rows weigh by how rare their class is in the batch."""
    share = ops.mean(y_true, axis=0) + 0.1
    return keras.losses.categorical_crossentropy(y_true, y_pred) * ops.sum(y_true / share, axis=-1)


def ranked(y_true, y_pred):
    """Each row of the first class is to be above each other one."""
    first = y_true[:, 0]
    pairs = first[:, None] * (1 - first)[None]
    apart = ops.relu(1 - y_pred[:, :1] + ops.transpose(y_pred[:, :1]))
    return ops.sum(pairs * apart) / ops.maximum(ops.sum(pairs), 1.0)


def pinball(share):
    def loss(y_true, y_pred):
        error = y_true - y_pred
        return ops.mean(ops.maximum(share * error, (share - 1) * error), axis=-1)

    return loss


def gaussian(y_true, y_pred):
    return 0.5 * y_pred[:, 1] + 0.5 * ops.square(y_true[:, 0] - y_pred[:, 0]) * ops.exp(-y_pred[:, 1])


def known_rows(y_true, y_pred):
    """Labels that are not there are negative."""
    mask = ops.cast(y_true > 0, y_pred.dtype)
    return ops.sum(mask * ops.square(y_true - y_pred)) / ops.maximum(ops.sum(mask), 1.0)


OF_CLASSES = {
    "soft_dice": soft_dice,
    "focal_tversky": focal_tversky,
    "crossentropy_and_dice": crossentropy_and_dice,
    "nt_xent": nt_xent,
    "hardest": hardest,
    "balanced": balanced,
    "ranked": ranked,
    "focal": lambda y, p: keras.losses.categorical_focal_crossentropy(y, p, alpha=0.3, label_smoothing=0.1),
}


@scenario
def users_losses_of_classes(p):
    losses = dict(OF_CLASSES)
    rows = lambda count: rows_of(losses, one_hot, count)
    build = lambda: branches(losses, activation="softmax")
    return by_branch(p.fit(build, rows(UNEVEN), validation_data=p.data(rows(VALIDATION))))


@scenario
def users_losses_of_numbers(p):
    losses = {"barlow": BarlowTwins(), "vicreg": VICReg(), "cox": cox, "concordance": concordance}
    losses |= {
        "pinball": pinball(0.9),
        "gaussian": gaussian,
        "known_rows": known_rows,
        "huber": keras.losses.Huber(0.3),
    }
    labels = lambda name, rows: floats(3, seed=len(name), rows=rows)
    rows = lambda count: rows_of(losses, labels, count)
    # a variance of one row is none
    return by_branch(p.fit(lambda: branches(losses), rows(UNEVEN), validation_data=p.data(rows(VALIDATION + 5))))


@scenario
def users_losses_with_weights(p):
    """Outputs weigh differently, rows too, and weighted metrics follow."""
    names = ("dice", "balanced", "focal")
    losses = {"dice": soft_dice, "balanced": balanced, "focal": keras.losses.CategoricalFocalCrossentropy()}
    weights = {name: np.random.default_rng(len(name)).uniform(0, 2, UNEVEN) for name in names}
    x, y = rows_of(names, one_hot)
    build = lambda: branches(
        *(losses, 3, "softmax"),
        loss_weights={"dice": 0.5, "balanced": 2.0, "focal": 1.0},
        weighted_metrics={n: ["accuracy", keras.metrics.AUC(num_thresholds=9, name="auc")] for n in names},
    )
    return by_branch(p.fit(build, (x, y, weights)))


# ------------------------------------------------------------------------------------- metrics


def r2(y_true, y_pred):
    return 1 - ops.sum(ops.square(y_true - y_pred)) / (ops.sum(ops.square(y_true - ops.mean(y_true))) + 1e-7)


def pearson(y_true, y_pred):
    a, b = y_true - ops.mean(y_true), y_pred - ops.mean(y_pred)
    return ops.sum(a * b) / (ops.sqrt(ops.sum(ops.square(a)) * ops.sum(ops.square(b))) + 1e-7)


def worst(y_true, y_pred):
    return ops.max(ops.abs(y_true - y_pred))


def median(y_true, y_pred):
    return ops.median(ops.abs(y_true - y_pred))


class ByColumn(keras.metrics.Metric):
    """Gives a dict."""

    def __init__(self, name="by_column"):
        super().__init__(name=name)
        self.total = self.add_variable((2,), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.cast(ops.sum(ops.square(y_true - y_pred), axis=0), self.total.dtype))
        self.count.assign_add(ops.cast(ops.shape(y_true)[0], self.count.dtype))

    def result(self):
        return {"first": self.total[0] / self.count, "second": self.total[1] / self.count}


class Extremes(keras.metrics.Metric):
    """What it keeps is neither a sum nor a mean."""

    def __init__(self, name="extremes"):
        super().__init__(name=name)
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(ops.maximum(self.most, ops.cast(ops.max(ops.abs(y_true - y_pred)), self.most.dtype)))

    def result(self):
        return self.most


@scenario
def users_metrics(p):
    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(2)])
        metrics = [r2, pearson, worst, median, ByColumn(), keras.metrics.R2Score(), keras.metrics.CosineSimilarity()]
        model.compile(keras.optimizers.Nadam(0.01), "mse", metrics=metrics)
        return model

    return p.fit(build, pairs(), validation_data=p.data(pairs(VALIDATION)))[1]


@scenario
def users_metrics_of_extremes(p):
    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[Extremes()])
        return model

    return p.fit(build, pairs(), validation_data=p.data(pairs(VALIDATION)))[1]


# ------------------------------------------------------------------------------------- layers that add losses


class CenterLoss(layers.Layer):
    """Embeddings are to be near the trained center of their class."""

    def build(self, shapes):
        self.centers = self.add_weight(shape=(4, shapes[0][-1]), initializer="zeros", name="centers")

    def call(self, inputs):
        code, label = inputs
        self.add_loss(0.1 * ops.mean(ops.sum(ops.square(code - ops.take(self.centers, label, axis=0)), axis=-1)))
        return code


@scenario
def users_center_loss(p):
    def build():
        x, label = keras.Input((6,), name="x"), keras.Input((), dtype="int64", name="label")
        code = CenterLoss()([layers.Dense(5, "tanh")(x), label])
        model = keras.Model({"x": x, "label": label}, layers.Dense(4)(code))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
        return model

    label = classes(rows=UNEVEN)
    return p.fit(build, ({"x": floats(6, rows=UNEVEN), "label": label}, label))[1]


class Codebook(layers.Layer):
    """VQ-VAE's, with a straight-through gradient."""

    def build(self, shape):
        self.codes = self.add_weight(shape=(shape[-1], 5), initializer="random_uniform", name="codes")

    def call(self, x):
        far = ops.sum(x**2, 1, keepdims=True) + ops.sum(self.codes**2, 0) - 2 * ops.matmul(x, self.codes)
        found = ops.matmul(ops.one_hot(ops.argmin(far, 1), 5, dtype=x.dtype), ops.transpose(self.codes))
        self.add_loss(0.25 * ops.mean((ops.stop_gradient(found) - x) ** 2))
        self.add_loss(ops.mean((found - ops.stop_gradient(x)) ** 2))
        return x + ops.stop_gradient(found - x)


@scenario
def users_codebook(p):
    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3), Codebook(), layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        return model

    return p.fit(build, pairs(), validation_data=p.data(pairs(VALIDATION)))[1]


@scenario
def users_spectral_and_weight_norm(p):
    """Layers whose kernels are normalized, by power iteration, and by a scale of their own."""

    class WeightNorm(layers.Layer):
        def build(self, shape):
            self.v = self.add_weight(shape=(shape[-1], 4), name="v")
            self.g = self.add_weight(shape=(4,), initializer="ones", name="g")

        def call(self, x):
            return ops.matmul(x, self.g * self.v / ops.norm(self.v, axis=0))

    def build():
        spectral = layers.SpectralNormalization(layers.Dense(5, "tanh"), power_iterations=2)
        model = keras.Sequential(
            [keras.Input((6,)), spectral, WeightNorm(), layers.UnitNormalization(), layers.Dense(2)]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    return with_states(p.fit(build, pairs()))


@scenario
def users_masked_pooling(p):
    """A mean over the places that are no padding, attention over them, and a gate."""

    class Pool(layers.Layer):
        supports_masking = True

        def call(self, x, mask=None):
            mask = ops.cast(mask, x.dtype)[..., None]
            return ops.sum(x * mask, axis=1) / ops.maximum(ops.sum(mask, axis=1), 1.0)

        def compute_mask(self, inputs, mask=None):
            return None

    tokens = np.random.default_rng(3).integers(1, 20, (UNEVEN, 6))
    for i, row in enumerate(tokens):
        row[1 + i * 5 // UNEVEN :] = 0

    def build():
        inputs = keras.Input((6,), dtype="int64")
        x = layers.Embedding(20, 4, mask_zero=True)(inputs)
        x = layers.Add()([x, layers.MultiHeadAttention(2, 2)(x, x)])
        model = keras.Model(inputs, layers.Dense(4, "softmax")(Pool()(x)))
        model.compile(keras.optimizers.Adafactor(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    return p.fit(build, (tokens, classes(rows=UNEVEN)))[1]


# ------------------------------------------------------------------------------------- optimizers


class Lookahead(keras.optimizers.Adam):
    """Every third step goes back half way to the slow weights."""

    def build(self, variables):
        super().build(variables)
        self.slow = [self.add_variable_from_reference(v, name="slow", initializer="zeros") for v in variables]

    def apply(self, grads, trainable_variables=None):
        iterations = super().apply(grads, trainable_variables)
        now = ops.equal(self.iterations % 3, 0)
        for slow, fast in zip(self.slow, self._trainable_variables, strict=True):
            slow.assign(ops.where(now, slow + 0.5 * (fast - slow), slow))
            fast.assign(ops.where(now, slow, fast))
        return iterations


class AdaptiveClip(keras.optimizers.SGD):
    """NFNets': by the ratio of the norms of each unit's gradient and weights."""

    def apply(self, grads, trainable_variables=None):
        of = trainable_variables or self._trainable_variables
        unit = lambda t: ops.sqrt(ops.sum(ops.square(t), axis=0, keepdims=len(t.shape) > 1))
        limits = [0.02 * ops.maximum(unit(v), 1e-3) for v in of]
        grads = [g * ops.minimum(1.0, m / ops.maximum(unit(g), 1e-6)) for g, m in zip(grads, limits, strict=True)]
        return super().apply(grads, trainable_variables)


class Centralized(keras.optimizers.RMSprop):
    def apply(self, grads, trainable_variables=None):
        grads = [g - ops.mean(g, axis=0, keepdims=True) if len(g.shape) > 1 else g for g in grads]
        return super().apply(grads, trainable_variables)


class Bold(keras.optimizers.SGD):
    """The rate follows the gradient's norm."""

    def apply(self, grads, trainable_variables=None):
        norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in grads))
        self.learning_rate.assign(0.9 * self.learning_rate + 0.01 / (1 + ops.cast(norm, self.learning_rate.dtype)))
        return super().apply(grads, trainable_variables)


for _name, _make in {
    "lookahead": lambda: Lookahead(0.01),
    "adaptive_clip": lambda: AdaptiveClip(0.5, momentum=0.9),
    "centralized": lambda: Centralized(0.01),
    "bold": lambda: Bold(0.1),
    "lion": lambda: keras.optimizers.Lion(0.01, clipnorm=0.1),
    "lamb": lambda: keras.optimizers.Lamb(0.01, weight_decay=0.01),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
}.items():
    SCENARIOS[f"users_optimizer_{_name}"] = lambda p, make=_make: fit(
        *(p, lambda: dense(8, 4, inputs=6, activation="relu"), None, make),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


class GSAM(Step):
    """The surrogate gap: the part of the first gradient that the second one has not is taken away."""

    def train_step(self, data):
        variables = self.trainable_variables

        def gradients():
            with tf.GradientTape() as tape:
                loss = self.loss_of(self, *data)
            return loss, tape.gradient(loss, variables)

        loss, first = gradients()
        scale = 0.1 / (tf.linalg.global_norm(first) + 1e-12)
        for v, g in zip(variables, first, strict=True):
            v.assign_add(scale * g)
        _, second = gradients()
        for v, g in zip(variables, first, strict=True):
            v.assign_sub(scale * g)
        dot = sum(ops.sum(a * b) for a, b in zip(first, second, strict=True))
        share = dot / (tf.linalg.global_norm(second) ** 2 + 1e-12)
        found = [b - 0.3 * (a - share * b) for a, b in zip(first, second, strict=True)]
        self.optimizer.apply_gradients(zip(found, variables, strict=True))
        return {"given": loss}


@scenario
def users_gsam(p):
    return fit(p, GSAM)


# ------------------------------------------------------------------------------------- steps of one's own


class VAE(keras.Model):
    """Keras' example, with the noise from the data."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = dense(8, 4, inputs=6), dense(8, 6, inputs=2)
        self.trackers = [keras.metrics.Mean(name=name) for name in ("total", "rebuilt", "kl")]

    @property
    def metrics(self):
        return self.trackers

    def losses_of(self, x, noise):
        mean, logvar = ops.split(self.encoder(x), 2, axis=1)
        rebuilt = ops.mean(ops.sum(ops.square(x - self.decoder(mean + ops.exp(0.5 * logvar) * noise)), axis=1))
        kl = ops.mean(ops.sum(-0.5 * (1 + logvar - ops.square(mean) - ops.exp(logvar)), axis=1))
        return rebuilt + kl, rebuilt, kl

    def noted(self, values):
        for tracker, value in zip(self.trackers, values, strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}

    def train_step(self, data):
        with tf.GradientTape() as tape:
            values = self.losses_of(*data)
        grads = tape.gradient(values[0], self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        return self.noted(values)

    def test_step(self, data):
        return self.noted(self.losses_of(*data))


@scenario
def users_vae(p):
    def build():
        model = VAE()
        model.compile(keras.optimizers.Adam(0.01))
        return model

    return p.fit(build, pairs(), validation_data=p.data(pairs(VALIDATION)))[1]


class MeanTeacher(Own):
    """The teacher follows the student's weights, and the student the teacher's predictions."""

    def __init__(self):
        super().__init__()
        self.teacher = dense(8, 2, inputs=6)
        self.teacher.trainable = False
        self.student = dense(8, 2, inputs=6)

    def call(self, x):
        return self.student(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self.student(x, training=True)
            loss = ops.mean(per_row(y, predicted)) + ops.mean(ops.square(predicted - self.teacher(x, training=False)))
        variables = self.student.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        for slow, fast in zip(self.teacher.variables, self.student.variables, strict=True):
            slow.assign(0.9 * slow + 0.1 * fast)
        return {"loss": loss}


@scenario
def users_mean_teacher(p):
    return with_states(p.fit(own(MeanTeacher), pairs()))


class Adversarial(Own):
    """FGSM, by the sign of the gradient with respect to the inputs."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = ops.mean(per_row(y, self(x, training=True)))
        moved = x + 0.1 * tf.sign(inner.gradient(loss, x))
        return {"loss": self.stepped((moved, y), lambda x, y, predicted: ops.mean(per_row(y, predicted)))}


@scenario
def users_adversarial_examples(p):
    return p.fit(own(Adversarial), pairs())[1]


class Saliency(Own):
    """The gradient of each row's own loss with respect to its inputs is penalized."""

    def train_step(self, data):
        def loss(x, y, predicted):
            with tf.GradientTape() as inner:
                inner.watch(x)
                values = ops.sum(per_row(y, self(x, training=True)))
            return ops.mean(per_row(y, predicted)) + 0.1 * ops.mean(ops.square(inner.gradient(values, x)))

        return {"loss": self.stepped(data, loss)}


@scenario
def users_saliency(p):
    return p.fit(own(Saliency), pairs())[1]


class AsDocumented(Own):
    """`train_step` of Keras' guide: compute_loss, and metrics by hand."""

    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weights)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted, sample_weight=weights)
        return {m.name: m.result() for m in self.metrics}


@scenario
def users_documented_step(p):
    weights = np.random.default_rng(5).uniform(0, 2, UNEVEN)
    return p.fit(own(AsDocumented, loss="mse", metrics=["mae"]), (*pairs(), weights))[1]


class Uncertainty(Own):
    """Kendall's: two tasks whose weights are trained."""

    def __init__(self):
        super().__init__()
        self.log_vars = self.add_weight(shape=(2,), initializer="zeros", name="log_vars")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        values = ops.stack([ops.mean(ops.square(y[:, i] - y_pred[:, i])) for i in range(2)])
        return ops.sum(ops.exp(-self.log_vars) * values + self.log_vars)


class Clustering(Own):
    """Deep embedded clustering: the target distribution is one of the whole batch."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        q = ops.softmax(y_pred, axis=-1)
        weight = q**2 / ops.sum(q, axis=0)
        target = ops.stop_gradient(weight / ops.sum(weight, axis=1, keepdims=True))
        return ops.mean(ops.sum(target * ops.log((target + 1e-9) / (q + 1e-9)), axis=1))


@scenario
def users_compute_losses(p):
    out = {}
    for kind in (Uncertainty, Clustering):
        found = p.fit(own(kind), pairs(), validation_data=p.data(pairs(VALIDATION)))[1]
        out |= {f"{kind.__name__}:{k}": v for k, v in found.items()}
    return out


# ------------------------------------------------------------------------------------- callbacks and schedules


class SWA(keras.callbacks.Callback):
    """Averages the weights of epochs, and gives the model the mean at the end."""

    def on_train_begin(self, logs=None):
        self.mean, self.count = None, 0

    def on_epoch_end(self, epoch, logs=None):
        now = self.model.get_weights()
        mean = now if self.mean is None else self.mean
        self.mean = [(m * self.count + w) / (self.count + 1) for m, w in zip(mean, now, strict=True)]
        self.count += 1

    def on_train_end(self, logs=None):
        self.model.set_weights(self.mean)


class Plateau(keras.callbacks.ReduceLROnPlateau):
    """With a jitter of its own."""

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        rate = float(self.model.optimizer.learning_rate)
        self.model.optimizer.learning_rate = rate * (1 + 0.1 * np.random.default_rng(epoch).normal())


class Warm(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        step = ops.cast(step, "float64")
        return 0.05 * ops.minimum(1.0, (step + 1) / 4) * 0.5 * (1 + ops.cos(0.1 * step))


@scenario
def users_callbacks(p):
    """Weights are averaged, rates fall, and a weight of the loss rises by the epoch and the batch."""
    strength = []

    class Annealed(Own):
        def __init__(self):
            super().__init__()
            self.strength = self.add_weight(shape=(), initializer="zeros", trainable=False, name="strength")

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return super().compute_loss(x, y, y_pred, sample_weight) + self.strength * ops.mean(ops.square(y_pred))

    class Anneal(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.strength.assign(self.model.strength + 0.01)

        def on_epoch_end(self, epoch, logs=None):
            strength.append(float(self.model.strength))

    calls = [SWA(), Plateau("loss", patience=0, min_delta=10.0), Anneal()]
    found = p.fit(own(Annealed, loss="mse"), pairs(), epochs=3, callbacks=calls)[1]
    return found | {"strength": np.asarray(strength)}


@scenario
def users_schedule(p):
    make = lambda: keras.optimizers.SGD(Warm(), momentum=0.9)
    body = lambda: dense(8, 4, inputs=6, activation="relu")
    return fit(p, body, None, make, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))


@scenario
def users_decay_in_a_step(p):
    """A penalty on the weights, which counts once."""

    def decayed(model, x, y):
        return mean_loss(model, x, y) + 1e-3 * sum(ops.sum(ops.square(v)) for v in model.trainable_variables)

    return fit(p, lambda: Step(loss=decayed))


# ------------------------------------------------------------------------------------- more of each


class SupCon(keras.losses.Loss):
    """A value for each row, which may weigh, and which all others change."""

    def call(self, y_true, y_pred):
        unit = ops.normalize(y_pred, axis=-1)
        same = ops.matmul(y_true, ops.transpose(y_true))
        return -ops.sum(same * ops.log_softmax(ops.matmul(unit, ops.transpose(unit)), axis=1), axis=1)


@scenario
def users_supcon_with_weights(p):
    losses = {"mean": SupCon(), "weighed": SupCon(reduction="mean_with_sample_weight"), "summed": SupCon("sum")}
    weights = np.random.default_rng(9).uniform(0, 2, UNEVEN)
    x, y = rows_of(losses, one_hot)
    return by_branch(p.fit(lambda: branches(losses), (x, y, dict.fromkeys(losses, weights))))


class MacroF1(keras.metrics.Metric):
    """Of metrics within it, of which it makes one number."""

    def __init__(self, name="macro_f1"):
        super().__init__(name=name)
        self.precision = [keras.metrics.Precision(class_id=i) for i in range(3)]
        self.recall = [keras.metrics.Recall(class_id=i) for i in range(3)]

    def update_state(self, y_true, y_pred, sample_weight=None):
        for one in (*self.precision, *self.recall):
            one.update_state(y_true, y_pred, sample_weight)

    def result(self):
        pairs = [(a.result(), b.result()) for a, b in zip(self.precision, self.recall, strict=True)]
        return sum(2 * a * b / (a + b + 1e-7) for a, b in pairs) / 3

    def reset_state(self):
        for one in (*self.precision, *self.recall):
            one.reset_state()


@scenario
def users_composed_metric(p):
    rows = lambda count: (floats(6, rows=count), one_hot(None, count))

    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3, "softmax")])
        model.compile(keras.optimizers.Adamax(0.05), "categorical_crossentropy", metrics=[MacroF1()])
        return model

    return p.fit(build, rows(UNEVEN), validation_data=p.data(rows(VALIDATION)))[1]


@scenario
def users_siamese_pairs(p):
    """Two inputs through one body; the margin loss of each pair, and a weight for each place of a sequence."""

    def margin(y_true, y_pred):
        apart = ops.squeeze(y_pred, -1)
        return y_true * ops.square(apart) + (1 - y_true) * ops.square(ops.relu(1 - apart))

    def build():
        a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
        body = dense(8, 3, inputs=6)
        apart = layers.Lambda(lambda ab: ops.sqrt(ops.sum(ops.square(ab[0] - ab[1]), -1, keepdims=True) + 1e-9))
        places = layers.Dense(1)(layers.LSTM(3, return_sequences=True)(layers.Reshape((3, 2))(a)))
        model = keras.Model({"a": a, "b": b}, {"apart": apart([body(a), body(b)]), "places": places})
        model.compile(
            keras.optimizers.SGD(0.1), {"apart": margin, "places": "mse"}, loss_weights={"apart": 1.0, "places": 0.3}
        )
        return model

    x = {"a": floats(6, rows=UNEVEN), "b": floats(6, seed=1, rows=UNEVEN)}
    y = {"apart": one_hot(None, UNEVEN)[:, 0], "places": floats(3, 1, rows=UNEVEN)}
    weights = {"apart": np.ones(UNEVEN), "places": np.random.default_rng(4).uniform(0, 2, (UNEVEN, 3))}
    return p.fit(build, (x, y, weights))[1]


class OneCycle(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.01 * (1 + (batch % 3))


class Averaged(keras.callbacks.Callback):
    """Validates with an average of the weights, and trains on with the weights."""

    def on_train_begin(self, logs=None):
        self.mean = self.model.get_weights()

    def on_train_batch_end(self, batch, logs=None):
        self.mean = [0.9 * m + 0.1 * w for m, w in zip(self.mean, self.model.get_weights(), strict=True)]

    def on_test_begin(self, logs=None):
        self.kept = self.model.get_weights()
        self.model.set_weights(self.mean)

    def on_test_end(self, logs=None):
        self.model.set_weights(self.kept)


@scenario
def users_averages_while_it_validates(p):
    calls = [OneCycle(), Averaged()]
    return p.fit(own(Own, loss="mse"), pairs(), validation_data=p.data(pairs(VALIDATION)), callbacks=calls)[1]


class Grouped(Own):
    """Each layer has a rate of its own, and noise that the data brings moves the inputs."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x, y, predicted)
        of = [*self.hidden.trainable_variables, *self.head.trainable_variables]
        grads = tape.gradient(loss, of)
        scaled = [g * (0.1 if i < 2 else 1.0) for i, g in enumerate(grads)]
        norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in scaled))
        self.optimizer.apply_gradients(zip(scaled, of, strict=True))
        return self.compute_metrics(x, y, predicted) | {"norm": norm}


@scenario
def users_rates_by_layer(p):
    """A log of the gradient's norm is that of the global batch."""
    return p.fit(own(Grouped, loss="mse", metrics=["mae"]), pairs())[1]


NEW = [name for name in SCENARIOS if name not in BEFORE]
__all__ = ["NEW", "SCENARIOS"]
