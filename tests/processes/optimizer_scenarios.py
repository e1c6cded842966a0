"""Scenarios of the parity tests whose `train_step` has several optimizers or losses of its own: GANs and the like.

Noise is part of the data, so that one process draws the same. Some models have no `call`, as in Keras' examples.
"""

from __future__ import annotations

import weakref

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from raytf.compat.patching import patched
from raytf.parallel import compiled_update, sparse_rows
from tests.processes.scenarios import BATCH, SCENARIOS, classes, floats, mlp, scenario, vectors

# In the last batch of an epoch one worker has one row, and the others have none.
FEW = 2 * BATCH + 1


def built(model):
    """A model whose optimizers have their variables, as after a restore: a step is then traced once."""
    model.d_optimizer.build(model.discriminator.trainable_variables)
    model.g_optimizer.build(model.generator.trainable_variables)
    return model


def with_optimizers(outcome, optimizers=("d_optimizer", "g_optimizer")):
    """What a scenario returns, with the variables of optimizers, and how many steps each made."""
    model, out = outcome
    for name in optimizers:
        optimizer = getattr(model, name)
        out |= {f"{name}{i}": np.asarray(v) for i, v in enumerate(optimizer.variables)}
    return out


def dense(*sizes, inputs, activation="tanh", **kwargs):
    return keras.Sequential(
        [keras.Input((inputs,)), *(layers.Dense(n, activation) for n in sizes[:-1]), layers.Dense(sizes[-1], **kwargs)]
    )


def apply(optimizer, tape, loss, variables):
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


class TwoOptimizers(keras.Model):
    """A discriminator and a generator with an optimizer each, and metrics kept by hand."""

    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.d_metric, self.g_metric = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn=None, **kwargs):
        super().compile(**kwargs)
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self):
        return [self.d_metric, self.g_metric]

    def logs(self, d_loss, g_loss):
        self.d_metric.update_state(d_loss)
        self.g_metric.update_state(g_loss)
        return {m.name: m.result() for m in self.metrics}


class DCGAN(TwoOptimizers):
    def train_step(self, data):
        noise, real = data
        fake = self.generator(noise)
        ones, zeros = ops.ones((ops.shape(real)[0], 1)), ops.zeros((ops.shape(real)[0], 1))
        with tf.GradientTape() as tape:
            predicted = self.discriminator(ops.concatenate([fake, real]))
            d_loss = self.loss_fn(ops.concatenate([ones, zeros]), predicted)
        apply(self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(zeros, self.discriminator(self.generator(noise)))
        apply(self.g_optimizer, tape, g_loss, self.generator.trainable_weights)
        return self.logs(d_loss, g_loss)


def dcgan(**kwargs):
    """As Keras' example: strided convolutions, LeakyReLU, no normalization."""
    discriminator = [layers.Conv2D(4, 3, 2, "same"), layers.LeakyReLU(0.2), layers.Flatten(), layers.Dense(1)]
    generator = [
        *(layers.Dense(4 * 4 * 2), layers.Reshape((4, 4, 2))),
        *(layers.Conv2DTranspose(3, 4, 2, "same"), layers.LeakyReLU(0.2), layers.Conv2D(1, 3, 1, "same", None, (1, 1))),
    ]
    model = DCGAN(
        keras.Sequential([keras.Input((8, 8, 1)), *discriminator]), keras.Sequential([keras.Input((5,)), *generator])
    )
    adam = lambda: keras.optimizers.Adam(0.005)
    model.compile(adam(), adam(), keras.losses.BinaryCrossentropy(from_logits=True), **kwargs)
    return model


def pictures(rows=FEW):
    return floats(5, rows=rows), floats(8, 8, 1, seed=1, rows=rows)


@scenario
def gan_dcgan(p):
    return with_optimizers(p.fit(dcgan, pictures()))


@scenario
def gan_in_long_executions(p):
    return with_optimizers(p.fit(lambda: built(dcgan(steps_per_execution=3)), pictures(5 * BATCH - 3)))


@scenario
def gan_run_eagerly(p):
    return with_optimizers(p.fit(lambda: dcgan(run_eagerly=True), pictures(), epochs=1))


class WGAN(TwoOptimizers):
    """With a gradient penalty, and two steps of the critic for each of the generator."""

    def penalty(self, noise, real, fake):
        share = ops.sigmoid(ops.mean(noise, axis=1, keepdims=True))
        between = share * real + (1 - share) * fake
        with tf.GradientTape() as tape:
            tape.watch(between)
            predicted = self.discriminator(between, training=True)
        norm = ops.sqrt(ops.sum(ops.square(tape.gradient(predicted, between)), axis=1))
        return ops.mean(ops.square(norm - 1))

    def critic_step(self, noise, real):
        with tf.GradientTape() as tape:
            fake = self.generator(noise, training=True)
            loss = ops.mean(self.discriminator(fake, training=True)) - ops.mean(self.discriminator(real, training=True))
            loss += 10 * self.penalty(noise, real, fake)
        apply(self.d_optimizer, tape, loss, self.discriminator.trainable_variables)
        return loss

    def generator_step(self, noise):
        with tf.GradientTape() as tape:
            loss = -ops.mean(self.discriminator(self.generator(noise, training=True), training=True))
        apply(self.g_optimizer, tape, loss, self.generator.trainable_variables)
        return loss

    def train_step(self, data):
        noise, real = data
        for i in range(2):
            d_loss = self.critic_step(noise * (1 + i), real)
        return self.logs(d_loss, self.generator_step(noise))


class ConditionalWGAN(WGAN):
    """The same in TensorFlow's control flow; the generator follows every second step, by a count of steps."""

    def __init__(self, *args):
        super().__init__(*args)
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="count")

    def train_step(self, data):
        noise, real = data

        def critic(i, _):
            return i + 1, self.critic_step(noise * ops.cast(1 + i, noise.dtype), real)

        _, d_loss = tf.while_loop(lambda i, _: i < 3, critic, (0, tf.zeros((), noise.dtype)))
        self.count.assign_add(1)
        due = tf.equal(self.count % 2, 0)
        return self.logs(d_loss, tf.cond(due, lambda: self.generator_step(noise), lambda: tf.zeros((), noise.dtype)))


def wgan(kind, normalization=layers.LayerNormalization, **kwargs):
    critic = [layers.Dense(8), normalization(), layers.LeakyReLU(0.2), layers.Dense(1)]
    model = kind(keras.Sequential([keras.Input((6,)), *critic]), dense(8, 6, inputs=3))
    model.compile(keras.optimizers.Adam(0.01, 0.5), keras.optimizers.Adam(0.02, 0.5), **kwargs)
    return model


def points(rows=FEW):
    return floats(3, rows=rows), floats(6, seed=3, rows=rows)


@scenario
def gan_wgan_gp(p):
    return with_optimizers(p.fit(lambda: built(wgan(WGAN)), points()))


@scenario
def gan_in_conditions(p):
    return with_optimizers(p.fit(lambda: wgan(ConditionalWGAN), points(), epochs=3))


@scenario
def gan_in_conditions_in_long_executions(p):
    make = lambda: built(wgan(ConditionalWGAN, steps_per_execution=4))
    return with_optimizers(p.fit(make, points(5 * BATCH - 3)))


@scenario
def gan_wgan_gp_synchronized(p):
    """Gradients of gradients through statistics of all rows, where workers have as many each."""
    make = lambda: built(wgan(WGAN, lambda: layers.BatchNormalization(synchronized=True)))
    return with_optimizers(p.fit(make, points(2 * BATCH)))


class RootMean(keras.losses.Loss):
    """Reduces its batch by itself."""

    def call(self, y_true, y_pred):
        return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


class Pix2Pix(TwoOptimizers):
    """The generator has two losses; the discriminator's is a function of all rows, of twice as many as the batch."""

    def train_step(self, data):
        given, wanted = data
        pair = lambda made: self.discriminator(ops.concatenate([given, made], axis=-1))
        with tf.GradientTape() as d_tape, tf.GradientTape() as g_tape:
            made = self.generator(given)
            real, fake = pair(wanted), pair(made)
            target = ops.concatenate([ops.ones_like(real), ops.zeros_like(fake)])
            d_loss = RootMean()(target, ops.concatenate([real, fake]))
            adversarial = keras.losses.BinaryCrossentropy(from_logits=True)(ops.ones_like(fake), fake)
            g_loss = adversarial + 100 * ops.mean(ops.abs(wanted - made))
        apply(self.d_optimizer, d_tape, d_loss, self.discriminator.trainable_variables)
        apply(self.g_optimizer, g_tape, g_loss, self.generator.trainable_variables)
        return self.logs(d_loss, g_loss)


@scenario
def gan_pix2pix(p):
    def build():
        convolution = lambda channels: keras.Sequential(
            [keras.Input((6, 6, channels)), layers.Conv2D(4, 3, padding="same", activation="tanh"), layers.Conv2D(1, 1)]
        )
        model = Pix2Pix(convolution(2), convolution(1))
        model.compile(keras.optimizers.SGD(0.01), keras.optimizers.Adam(0.002))
        return built(model)

    return with_optimizers(p.fit(build, (floats(6, 6, 1, rows=FEW), floats(6, 6, 1, seed=1, rows=FEW))))


class ActorCritic(TwoOptimizers):
    """The generator is the actor, and the discriminator what estimates a state's value."""

    def train_step(self, data):
        x, reward = data
        state, following, action = x["state"], x["following"], ops.cast(x["action"], "int32")
        with tf.GradientTape(persistent=True) as tape:
            value = self.discriminator(state)[:, 0]
            advantage = reward + 0.9 * ops.stop_gradient(self.discriminator(following)[:, 0]) - value
            chosen = ops.log(ops.sum(self.generator(state) * ops.one_hot(action, 4), axis=1))
            d_loss = ops.mean(ops.square(advantage))
            g_loss = -ops.mean(chosen * ops.stop_gradient(advantage))
        apply(self.g_optimizer, tape, g_loss, self.generator.trainable_variables)
        apply(self.d_optimizer, tape, d_loss, self.discriminator.trainable_variables)
        return self.logs(d_loss, g_loss)


@scenario
def actor_critic(p):
    def build():
        model = ActorCritic(dense(8, 1, inputs=6), dense(8, 4, inputs=6, activation="relu"))
        model.generator.add(layers.Softmax())
        model.compile(keras.optimizers.RMSprop(0.01), keras.optimizers.Adam(0.01, global_clipnorm=0.1))
        return built(model)

    rows = FEW
    x = {"state": floats(6, rows=rows), "following": floats(6, seed=1, rows=rows), "action": classes(rows=rows)}
    return with_optimizers(p.fit(build, (x, floats(seed=2, rows=rows))))


class Tasks(keras.Model):
    """A trunk that all of three optimizers train, each with a head; one averages and accumulates, one steps thrice."""

    def __init__(self):
        super().__init__()
        self.trunk, self.heads = dense(8, 8, inputs=6), [dense(4, 4, inputs=8) for _ in range(3)]
        self.optimizers = [
            keras.optimizers.Adam(0.01),
            keras.optimizers.SGD(0.1, clipnorm=0.05, use_ema=True, gradient_accumulation_steps=2),
            keras.optimizers.Lion(0.001),
        ]

    def call(self, x):
        return self.heads[0](self.trunk(x))

    def train_step(self, data):
        x, y = data
        logs = {}
        for i, (head, optimizer) in enumerate(zip(self.heads, self.optimizers, strict=True)):
            for _ in range(3 if i == 2 else 1):
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(y=y, y_pred=head(self.trunk(x)))
                variables = [*self.trunk.trainable_variables, *head.trainable_variables]
                optimizer.apply(tape.gradient(loss, variables), variables)
            logs[f"loss{i}"] = loss
        return logs


@scenario
def three_optimizers_with_shared_variables(p):
    def build():
        model = Tasks()
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    model, out = p.fit(build, vectors(rows=FEW), epochs=3)
    for i, optimizer in enumerate(model.optimizers):
        out |= {f"o{i}:{j}": np.asarray(v) for j, v in enumerate(optimizer.variables)}
    return out


class Scaled(TwoOptimizers):
    def train_step(self, data):
        x, y = data
        for optimizer, part in ((self.d_optimizer, self.discriminator), (self.g_optimizer, self.generator)):
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(ops.cast(part(x), y.dtype) - y))
                scaled = optimizer.scale_loss(loss)
            apply(optimizer, tape, scaled, part.trainable_variables)
        return self.logs(loss, loss)


@scenario
def two_scaled_losses(p):
    """Gradients of one optimizer overflow in the rows of one worker: all skip its step, not the other's."""

    def build():
        part = lambda: keras.Sequential([keras.Input((6,)), layers.Dense(1, dtype="mixed_float16")])
        model = Scaled(part(), part())
        scaled = lambda scale: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-5), scale)
        model.compile(scaled(2.0**12), scaled(2.0))
        return model

    x = floats(6, rows=FEW)
    x[1] *= 150  # overflows with the large scale, also when it is halved, and never with the small one
    model, out = p.fit(build, (x, floats(1, seed=3, rows=FEW)))
    steps = [int(o.iterations) for o in (model.d_optimizer, model.g_optimizer)]
    assert steps == [4, 6], steps
    return {f"bits:{k}": v for k, v in out.items()} | {"steps": np.asarray(steps)}


@scenario
def scaled_loss_without_rounding(p):
    """What scaling does to the gradients is undone: they count once, as on one process."""
    make = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 8.0, dynamic_growth_steps=2)
    return p.fit(mlp(make), vectors(rows=FEW))[1]


@scenario
def vae_with_add_loss(p):
    class Sampling(layers.Layer):
        def call(self, mean, log_variance, noise):
            self.add_loss(-0.5 * ops.mean(1 + log_variance - ops.square(mean) - ops.exp(log_variance)))
            return mean + ops.exp(0.5 * log_variance) * noise

    def build():
        x, noise = keras.Input((6,), name="x"), keras.Input((2,), name="noise")
        hidden = layers.Dense(8, "tanh")(x)
        code = Sampling()(layers.Dense(2)(hidden), layers.Dense(2)(hidden), noise)
        model = keras.Model({"x": x, "noise": noise}, layers.Dense(6)(layers.Dense(8, "tanh")(code)))
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        return model

    x = floats(6, rows=FEW)
    return p.fit(build, ({"x": x, "noise": floats(2, seed=1, rows=FEW)}, x))[1]


class Distiller(keras.Model):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = dense(16, 4, inputs=6), dense(4, 4, inputs=6)
        self.teacher.trainable = False

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        soft = keras.losses.KLDivergence()(ops.softmax(self.teacher(x) / 3), ops.softmax(y_pred / 3))
        return 0.1 * super().compute_loss(x, y, y_pred, sample_weight, training) + 0.9 * 9 * soft


@scenario
def distillation(p):
    def build():
        model = Distiller()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
        return model

    return p.fit(build, vectors(rows=FEW))[1]


class Contrastive(keras.losses.Loss):
    """Each row's two views are to be nearer to each other than to those of all other rows of the batch."""

    def call(self, y_true, y_pred):
        a, b = (ops.normalize(part, axis=1) for part in ops.split(y_pred, 2, axis=1))
        near = ops.matmul(a, ops.transpose(b)) / 0.1
        own = ops.arange(ops.shape(near)[0])
        return ops.mean(keras.losses.sparse_categorical_crossentropy(own, near, from_logits=True))


@scenario
def in_batch_contrastive_loss(p):
    def build():
        views = keras.Input((2, 6))
        encoder = dense(8, 3, inputs=6)
        model = keras.Model(views, layers.Concatenate()([encoder(views[:, 0]), encoder(views[:, 1])]))
        model.compile(keras.optimizers.Adam(0.01), Contrastive())
        return model

    return p.fit(build, (floats(2, 6, rows=FEW), classes(rows=FEW)))[1]


class _Wide(layers.Dense):
    """Keras keeps LoRA's weights in float32 whatever the model's type is: their rounding hides all else."""

    def add_weight(self, *args, dtype=None, **kwargs):
        return super().add_weight(*args, **kwargs)


@scenario
def lora_frozen_accumulation_ema(p):
    def build():
        model = keras.Sequential([keras.Input((6,)), _Wide(16, "relu"), layers.Dense(8), layers.Dense(4, "softmax")])
        model.layers[0].enable_lora(2)
        model.layers[1].trainable = False
        optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=3, use_ema=True)
        model.compile(optimizer, "sparse_categorical_crossentropy")
        return model

    return p.fit(build, vectors(rows=FEW), epochs=3)[1]


@scenario
def custom_loop_with_two_optimizers(p):
    """`strategy.run` with an optimizer that is built inside, and one in a `tf.cond`."""
    with p.strategy.scope():
        keras.utils.set_random_seed(7)
        parts = dense(8, 1, inputs=6), dense(4, 1, inputs=6)
        optimizers = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1)
    dataset = tf.data.Dataset.from_tensor_slices((floats(6), floats(1, seed=3))).batch(BATCH)

    def step(x, y):
        for i, (part, optimizer) in enumerate(zip(parts, optimizers, strict=True)):

            def apply_one(part=part, optimizer=optimizer):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.square(part(x) - y)) / BATCH
                apply(optimizer, tape, loss, part.trainable_variables)
                return True

            if i:
                tf.cond(tf.equal(optimizers[0].iterations % 2, 0), apply_one, lambda: False)
            else:
                apply_one()

    run = tf.function(lambda x, y: p.strategy.run(step, args=(x, y)))
    for _ in range(2):
        for x, y in p.strategy.experimental_distribute_dataset(dataset):
            run(x, y)
    return {f"w{i}{j}": np.asarray(v) for i, part in enumerate(parts) for j, v in enumerate(part.weights)}


__all__ = ["SCENARIOS"]


class Towers(keras.Model):
    """A tower for each of several optimizers, of which the first has a table."""

    def __init__(self):
        super().__init__()
        table = [keras.Input((5,), dtype="int64"), layers.Embedding(20, 4), layers.Flatten(), layers.Dense(4)]
        self.towers = [keras.Sequential(table), *(dense(8, 4, inputs=5) for _ in range(3))]
        self.optimizers = [
            keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=3),
            keras.optimizers.Lamb(0.01, clipnorm=0.1),
            keras.optimizers.Muon(0.01, weight_decay=0.1),
            keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(0.01, gradient_accumulation_steps=2)),
        ]

    def call(self, x):
        return ops.sum([tower(x) for tower in self.towers], axis=0)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
        for tower, optimizer in zip(self.towers, self.optimizers, strict=True):
            optimizer.apply(tape.gradient(loss, tower.trainable_variables), tower.trainable_variables)
        return {"loss": loss}


@scenario
def updates_are_compiled(p):
    def build():
        model = Towers()
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    tokens = np.random.default_rng(3).integers(0, 20, (FEW, 5))
    with patched(compiled_update, "_known", weakref.WeakValueDictionary()):
        model, out = p.fit(build, (tokens, classes(rows=FEW)), epochs=3)
        assert len(compiled_update._known) >= len(model.optimizers)
    for i, optimizer in enumerate(model.optimizers):
        out |= {f"optimizer{i}_{j}": np.asarray(v) for j, v in enumerate(optimizer.variables)}
    return out


class Tables(keras.Model):
    """Two tables and dense layers; ids come more than once in a batch."""

    def __init__(self):
        super().__init__()
        self.tables = [layers.Embedding(20, 4), layers.Embedding(20, 3, name="rare")]
        self.flat, self.out = layers.Flatten(), layers.Dense(4)

    def call(self, x):
        return self.out(ops.concatenate([self.flat(table(x)) for table in self.tables], axis=-1))


def _rows_only(p, make, rows=FEW, ids=20, **kwargs):
    """Trains `Tables` with lazy updates: weights, and the optimizer's variables."""

    def build():
        model = Tables()
        model.compile(make(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    tokens = np.random.default_rng(3).integers(0, ids, (rows, 5))
    with patched(sparse_rows, "lazy", True):
        model, out = p.fit(build, (tokens, classes(rows=rows)), epochs=2, **kwargs)
    return out | {f"o{i}": np.asarray(v) for i, v in enumerate(model.optimizer.variables)}


@scenario
def used_rows_by_adam(p):
    """In the last batch workers have no row, and their placeholder's id is not used."""
    return _rows_only(p, lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1, global_clipnorm=0.5), ids=12)


@scenario
def used_rows_by_adagrad(p):
    return _rows_only(p, lambda: keras.optimizers.Adagrad(0.5), batch=11)


@scenario
def all_rows_by_adagrad(p):
    """Exact: what Keras' Adagrad gives with dense gradients in one process."""
    make = lambda: keras.optimizers.Adagrad(0.5)
    if p.world > 1:
        return _rows_only(p, make, batch=11)

    class Dense(keras.optimizers.Adagrad):
        def apply(self, grads, trainable_variables=None):
            return super().apply([tf.convert_to_tensor(g) for g in grads], trainable_variables)

    return _rows_only(p, lambda: Dense(0.5), batch=11)
