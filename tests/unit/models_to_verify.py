"""Models that two workers train as one process does, and others that they do not: prints what `verify` finds.

python -m tests.unit.models_to_verify FILE NAME ...
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

ROWS = 24


def plain(*between, optimizer=None, kind=None, metrics=("accuracy",), units=16):
    import keras

    inputs = keras.Input((6,))
    x = keras.layers.Dense(units, "relu")(inputs)
    for layer in between:
        x = layer(x)
    outputs = keras.layers.Dense(4, "softmax", dtype="float32")(x)
    model = (kind or keras.Model)(inputs, outputs)
    optimizer = optimizer or keras.optimizers.Adam(0.01)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=list(metrics))
    return model


def random_layers():
    import keras

    layers = keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.3), keras.layers.GaussianDropout(0.2)
    return plain(*layers)


def many_kinds():
    """Random layers, draws of its own in a step, statistics of batches and gradients that wait for the next step."""
    import keras
    import tensorflow as tf

    class Noisy(keras.Model):
        def train_step(self, data):
            x, y = data
            return super().train_step((x + tf.random.normal(tf.shape(x)), y))

    between = keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.3)
    return plain(*between, optimizer=keras.optimizers.Adam(0.01, gradient_accumulation_steps=2), kind=Noisy)


def normalized():
    import keras

    return plain(keras.layers.BatchNormalization())


def accumulated():
    import keras

    return plain(optimizer=keras.optimizers.Adam(0.01, gradient_accumulation_steps=2))


def half():
    import keras

    keras.mixed_precision.set_global_policy("mixed_float16")
    return plain()


def own_draws():
    """Draws by TensorFlow's own functions within a step."""
    import keras
    import tensorflow as tf

    class Noisy(keras.Model):
        def train_step(self, data):
            x, y = data
            return super().train_step((x + tf.random.normal(tf.shape(x)), y))

    return plain(kind=Noisy)


def random_numbers_of_numpy():
    import keras
    import numpy as np

    class Noisy(keras.Model):
        def train_step(self, data):
            x, y = data
            return super().train_step((x + np.random.normal(size=x.shape), y))

    return plain(kind=Noisy)


def own_generator():
    """Draws by a generator whose seed nothing sets."""
    import keras
    import tensorflow as tf

    generator = tf.random.Generator.from_seed(3)

    class Noisy(keras.Model):
        def train_step(self, data):
            x, y = data
            return super().train_step((x + generator.normal(tf.shape(x)), y))

    return plain(kind=Noisy)


def for_graphs_alone():
    import keras
    import tensorflow as tf

    class InGraph(keras.Model):
        def train_step(self, data):
            assert not tf.executing_eagerly()
            return super().train_step(data)

    return plain(kind=InGraph)


def counter():
    """A layer that counts rows in a variable without a declared aggregation."""
    import keras

    class Counter(keras.layers.Layer):
        def build(self, shape):
            self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

        def call(self, x, training=False):
            if training:
                self.seen.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "float32"))
            return x

    return plain(Counter())


def _own_step(loss_of):
    import keras
    import tensorflow as tf

    class OwnStep(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = loss_of(self, x, y, y_pred)
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return self.compute_metrics(x, y, y_pred)

    return plain(kind=OwnStep)


def divides_by_its_rows():
    """A mean over some of the rows, which is that of a worker's own."""
    import keras
    import tensorflow as tf

    def loss_of(model, x, y, y_pred):
        counted = tf.cast(y > 0, y_pred.dtype)
        values = keras.losses.sparse_categorical_crossentropy(y, y_pred)
        return tf.reduce_sum(values * counted) / tf.reduce_sum(counted)

    return _own_step(loss_of)


def python_state():
    """A number that a step keeps in Python."""
    import tensorflow as tf

    def loss_of(model, x, y, y_pred):
        model.scale = getattr(model, "scale", 1.0) + float(tf.reduce_mean(x))
        return model.compute_loss(x, y, y_pred) * model.scale

    model = _own_step(loss_of)
    model.run_eagerly = True
    return model


def compares_rows():
    import keras
    from keras import ops

    class Contrast(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            alike = ops.matmul(y_pred, ops.transpose(y_pred))
            return ops.mean(ops.logsumexp(alike, -1) - ops.diagonal(alike))

    return plain(kind=Contrast)


def mixes_rows():
    """A layer, as mixup's, in which each row has something of another one."""
    import keras
    from keras import ops

    class Mixes(keras.layers.Layer):
        def call(self, x):
            return 0.7 * x + 0.3 * ops.roll(x, 1, axis=0)

    return plain(Mixes())


def compares_in_its_step():
    """SimCLR's loss within `train_step`, which sees a worker's rows alone."""
    from keras import ops

    def loss_of(model, x, y, y_pred):
        unit = ops.normalize(y_pred, axis=-1)
        logits = ops.matmul(unit, ops.transpose(unit)) / 0.1
        return ops.mean(ops.logsumexp(logits, axis=1) - ops.diagonal(logits))

    return _own_step(loss_of)


def rate_by_its_loss():
    """A rate that follows what a worker sees of the loss."""
    import keras

    class Bold(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = super().compute_loss(x, y, y_pred, sample_weight)
            if training:
                self.optimizer.learning_rate.assign(0.01 / (1 + keras.ops.cast(loss, "float32")))
            return loss

    return plain(kind=Bold)


def slow_weights():
    """An optimizer, as Lookahead's, that uses in its fifth step what it noted of the losses."""
    import keras

    class Cautious(keras.optimizers.SGD):
        def build(self, variables):
            super().build(variables)
            self.noted = self.add_variable((), name="noted", initializer="zeros")

        def update_step(self, gradient, variable, learning_rate):
            late = keras.ops.cast(self.iterations >= 4, "float32")
            super().update_step(gradient / (1 + late * self.noted), variable, learning_rate)

    class Noting(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = super().compute_loss(x, y, y_pred, sample_weight)
            if training:
                self.optimizer.noted.assign_add(keras.ops.cast(loss, "float32"))
            return loss

    return plain(kind=Noting, optimizer=Cautious(0.01))


def set_by_the_first_batch():
    """Weights that the first batch sets, as Glow's ActNorm has them."""
    import keras

    class ActNorm(keras.layers.Layer):
        def build(self, shape):
            self.shift = self.add_weight(shape=shape[1:], initializer="zeros", name="shift")
            self.known = self.add_weight(shape=(), initializer="zeros", trainable=False, name="known")

        def call(self, x, training=False):
            if training:
                self.shift.assign(self.shift - (1 - self.known) * keras.ops.mean(x, 0))
                self.known.assign(keras.ops.ones(()))
            return x + self.shift

    return plain(ActNorm())


def balances_experts():
    """A mixture of experts with the load-balancing loss of Switch transformers, a product of two means."""
    import keras
    from keras import ops

    class Experts(keras.layers.Layer):
        def build(self, shape):
            self.gate = keras.layers.Dense(4, "softmax")
            self.gate.build(shape)
            self.of_each = self.add_weight(shape=(4, shape[-1], 3), name="experts")

        def call(self, x):
            shares = self.gate(x)
            chosen = ops.one_hot(ops.argmax(shares, -1), 4, dtype=shares.dtype)
            self.add_loss(2.0 * ops.sum(ops.mean(chosen, 0) * ops.mean(shares, 0)))
            return ops.einsum("bi,eio,be->bo", x, self.of_each, chosen * shares)

    return plain(Experts())


def rate_by_rows():
    """A schedule whose rate falls after ten rows, of which each worker counts its own."""
    import keras
    import tensorflow as tf

    rows = tf.Variable(0, trainable=False)

    class ByRows(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return tf.where(rows >= 10, 0.001, 0.01)

    class Counting(keras.Model):
        def train_step(self, data):
            logs = super().train_step(data)
            rows.assign_add(tf.shape(data[0])[0])
            return logs

    return plain(kind=Counting, optimizer=keras.optimizers.SGD(ByRows()))


def numbers_of_a_clock():
    """What no seed sets, and each worker has for itself."""
    import os

    import keras

    class Drifting(keras.Model):
        def train_step(self, data):
            logs = super().train_step(data)
            weight = self.trainable_variables[0]
            weight.assign(weight * (1 + os.urandom(1)[0] / 1000))
            return logs

    return plain(kind=Drifting)


def _crossentropy(y, y_pred):
    import keras

    return keras.losses.sparse_categorical_crossentropy(y, y_pred)


def sum_of_halves():
    """A sum over the batch by a constant, from its two halves."""
    import tensorflow as tf

    def loss_of(model, x, y, y_pred):
        first = tf.reduce_sum(_crossentropy(y[:8], model(x[:8], training=True)))
        return (first + tf.reduce_sum(_crossentropy(y[8:], y_pred[8:]))) / 16

    return _own_step(loss_of)


def first_rows_of_a_step():
    """A slice that a step of few rows does not reach."""
    import tensorflow as tf

    return _own_step(lambda model, x, y, y_pred: tf.reduce_mean(_crossentropy(y, y_pred)[:8]))


def first_rows_of_a_layer():
    """A layer that changes the first rows of a batch alone."""
    import keras
    from keras import ops

    class Fixed(keras.layers.Layer):
        def call(self, x):
            return ops.concatenate([x[:9], 0.5 * x[9:]])

    return plain(Fixed())


def broken():
    raise RuntimeError("no such model")


def too_large():
    return plain(units=2_000_000)


def main(path: str, names: list[str]) -> None:
    from raytf.train import entry, verify

    entry.import_raytf()
    import numpy as np
    import pyarrow as pa

    from raytf.data.batch_spec import BatchSpec
    from raytf.data.stored import StoredDataset

    random = np.random.default_rng(0)
    x, y = random.normal(size=(ROWS, 6)).astype("float32"), random.integers(0, 4, ROWS)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 6), "y": y})
    batch = BatchSpec.parsed("x", "y")
    block = StoredDataset([table], [ROWS], ["x", "y"])
    (rows, first), whole = verify.few_rows(block), verify.whole_batch(block, 16)

    def trial(build):
        def made():
            from raytf.worker.verification import VerificationTask

            few = VerificationTask(build=build, batch=batch, rows=rows, validation=rows, global_batch=first)
            return few.with_whole_batch(whole, whole)

        return made

    found = {name: verify.outcome(verify.start_comparison(trial(globals()[name])), 250) for name in names}
    pathlib.Path(path).write_text(json.dumps({name: dataclasses.asdict(proof) for name, proof in found.items()}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
