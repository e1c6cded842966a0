"""Scenarios of the parity tests whose users do something to gradients between the tape and the optimizer."""

from __future__ import annotations

import functools
import warnings

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.processes.optimizer_scenarios import SCENARIOS, TwoOptimizers, apply, built, dense, points, with_optimizers
from tests.processes.scenarios import BATCH, classes, floats, results, scenario

# Batches of 11 rows, so that workers have 6 and 5; in the last batch one has a row, and the others have none.
ODD = 11
UNEVEN = 3 * ODD + 1


class Step(keras.Model):
    """A `train_step` that changes gradients by `change(gradients, variables)`; `loss(model, x, y)` is its loss."""

    def __init__(self, change=lambda gradients, variables: gradients, loss=None, body=None):
        super().__init__()
        self.body = body or dense(8, 4, inputs=6, activation="relu")
        self.change, self.loss_of = change, loss or mean_loss

    def call(self, x):
        return self.body(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, y)
        variables = self.trainable_variables
        gradients = self.change(tape.gradient(loss, variables), variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"given": ops.mean(loss)}


def mean_loss(model, x, y):
    return ops.mean(row_losses(model, x, y))


def row_losses(model, x, y):
    return keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)


def fit(p, make, data=None, optimizer=None, *, batch=ODD, epochs=2, **compiled):
    """Trains a model on uneven batches: the weights, and the variables of its optimizer."""

    def build():
        model = make()
        model.compile(optimizer() if optimizer else keras.optimizers.Adam(0.01), **compiled)
        return model

    data = (floats(6, rows=UNEVEN), classes(rows=UNEVEN)) if data is None else data
    model, out = p.fit(build, data, batch=batch, epochs=epochs)
    return out | {f"o{i}": np.asarray(v) for i, v in enumerate(model.optimizer.variables)}


def clipped(gradients, variables, norm=0.05):
    return tf.clip_by_global_norm(gradients, norm)[0]


def adaptive(gradients, variables):
    """Each gradient is at most a part of its weight's norm."""
    found = []
    for gradient, variable in zip(gradients, variables, strict=True):
        most = 0.02 * tf.maximum(tf.norm(tf.convert_to_tensor(variable)), 1e-3)
        found.append(gradient * tf.minimum(tf.ones((), most.dtype), most / (tf.norm(gradient) + 1e-12)))
    return found


def normalized(gradients, variables):
    return [gradient / (tf.norm(gradient) + 1e-6) for gradient in gradients]


def signs(gradients, variables):
    return [tf.sign(gradient) for gradient in gradients]


def conditional(gradients, variables):
    """In TensorFlow's control flow: a step whose gradients are large is halved."""
    norm = tf.linalg.global_norm(gradients)
    return tf.cond(norm > 0.2, lambda: [g / 2 for g in gradients], lambda: list(gradients))


@tf.function
def _clipped_in_a_function(*gradients):
    return tf.clip_by_global_norm(gradients, 0.05)[0]


CHANGES = {
    "clip_by_global_norm": clipped,
    "adaptive_clipping": adaptive,
    "normalized": normalized,
    "signs": signs,
    "halved_on_condition": conditional,
    "clipped_in_a_function": lambda gradients, variables: _clipped_in_a_function(*gradients),
    "decayed_by_hand": lambda gradients, variables: [g + 0.1 * v for g, v in zip(gradients, variables, strict=True)],
    "clipped_by_numpy": lambda gradients, variables: [
        tf.ensure_shape(tf.numpy_function(lambda g: np.clip(g, -0.01, 0.01), [g], g.dtype), g.shape) for g in gradients
    ],
}

for _name, _change in CHANGES.items():
    SCENARIOS[f"gradients_{_name}"] = lambda p, change=_change: fit(p, lambda: Step(change))


class CompiledStep(Step):
    """A step that is a `tf.function` of its own, with Python's `if` of a tensor."""

    @tf.function
    def train_step(self, data):
        logs = Step.train_step(self, data)
        if self.optimizer.iterations > 5:
            logs = {"given": logs["given"] + 1}
        return logs


@scenario
def gradients_in_a_compiled_step(p):
    """Traced again within the training, as for other steps per execution."""

    class Again(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch:
                self.model.make_train_function(force=True)

    def build():
        model = CompiledStep(clipped)
        model.compile(keras.optimizers.Adam(0.01))
        return model

    return p.fit(build, (floats(6, rows=UNEVEN), classes(rows=UNEVEN)), batch=ODD, callbacks=[Again()])[1]


@scenario
def gradients_clipped_eagerly(p):
    return fit(p, lambda: Step(clipped), run_eagerly=True, epochs=1)


@scenario
def gradients_clipped_in_long_executions(p):
    return fit(p, lambda: Step(clipped), steps_per_execution=3)


@scenario
def gradients_of_an_embedding_clipped(p):
    """Gradients that are slices of a table, on workers with different numbers of them."""

    def make():
        body = keras.Sequential([keras.Input((5,), dtype="int64"), layers.Embedding(20, 6), layers.Flatten()])
        body.add(layers.Dense(4))
        return Step(functools.partial(clipped, norm=0.02), body=body)

    tokens = np.random.default_rng(3).integers(0, 20, (UNEVEN, 5))
    return fit(p, make, (tokens, classes(rows=UNEVEN)))


@scenario
def gradients_with_noise(p):
    """Each worker draws its own noise; all take one step."""

    def noisy(gradients, variables):
        return [g + tf.random.normal(g.shape, stddev=0.1, dtype=g.dtype) for g in clipped(gradients, variables)]

    return {f"bits:{k}": v for k, v in fit(p, lambda: Step(noisy)).items()}


class Sharp(Step):
    """Sharpness-aware minimization: the gradient where the weights are a little uphill."""

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables

        def gradients():
            with tf.GradientTape() as tape:
                loss = self.loss_of(self, x, y)
            return loss, tape.gradient(loss, variables)

        loss, uphill = gradients()
        scale = 0.1 / (tf.linalg.global_norm(uphill) + 1e-12)
        moves = [scale * g for g in uphill]
        before = [tf.identity(v) for v in variables]
        for variable, move in zip(variables, moves, strict=True):
            variable.assign(variable + move)
        _, found = gradients()
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        self.optimizer.apply(found, variables)
        return {"given": loss}


@scenario
def sharpness_aware(p):
    return fit(p, Sharp)


class Clipping(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        return super().apply(tf.clip_by_global_norm(grads, 0.05)[0], trainable_variables)


class ClippingPairs(keras.optimizers.Adam):
    def apply_gradients(self, grads_and_vars):
        grads, variables = zip(*grads_and_vars, strict=True)
        return super().apply_gradients(zip([tf.clip_by_norm(g, 0.01) for g in grads], variables, strict=True))


class Lookahead(keras.optimizers.SGD):
    """Normalizes in `update_step`, and steps twice."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient / (tf.norm(gradient) + 1e-6), variable, learning_rate)

    def apply(self, grads, trainable_variables=None):
        grads = [tf.tanh(10 * g) for g in grads]
        super().apply(grads, trainable_variables)
        return super().apply(grads, trainable_variables)


def plain_model():
    return dense(8, 4, inputs=6, activation="relu")


for _name, _optimizer in {
    "apply": lambda: Clipping(0.5, momentum=0.9),
    "apply_gradients": lambda: ClippingPairs(0.01),
    "update_step": lambda: Lookahead(0.01),
}.items():
    SCENARIOS[f"overridden_{_name}"] = lambda p, optimizer=_optimizer: fit(
        p, plain_model, optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )


class ClippedGAN(TwoOptimizers):
    """With clipped gradients and a penalty on the critic's, from one persistent tape and another."""

    def train_step(self, data):
        noise, real = data
        clip = lambda tape, loss, variables: tf.clip_by_global_norm(tape.gradient(loss, variables), 0.1)[0]
        d_variables = self.discriminator.trainable_variables
        g_variables = self.generator.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            fake = self.generator(noise)
            g_loss = -ops.mean(self.discriminator(fake))
            d_loss = -g_loss - ops.mean(self.discriminator(real))
            with tf.GradientTape() as inner:
                inner.watch(real)
                predicted = self.discriminator(real)
            d_loss += ops.mean(ops.square(inner.gradient(predicted, real)))
        d_gradients, g_gradients = clip(tape, d_loss, d_variables), clip(tape, g_loss, g_variables)
        del tape
        self.d_optimizer.apply_gradients(zip(d_gradients, d_variables, strict=True))
        self.g_optimizer.apply(g_gradients, g_variables)
        return self.logs(d_loss, g_loss)


@scenario
def gan_with_clip(p):
    def build():
        model = ClippedGAN(dense(8, 1, inputs=6), dense(8, 6, inputs=3))
        model.compile(keras.optimizers.Adam(0.01, 0.5), keras.optimizers.RMSprop(0.02))
        return built(model)

    return with_optimizers(p.fit(build, points(UNEVEN), batch=ODD))


class Penalized(Step):
    """The loss has the norm of its own gradient in it."""

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = self.loss_of(self, x, y)
            norm = tf.linalg.global_norm(inner.gradient(loss, variables))
            whole = loss + 0.5 * norm
        self.optimizer.apply(clipped(outer.gradient(whole, variables), variables, 0.2), variables)
        return {"given": loss, "norm": norm}


@scenario
def gradient_penalty(p):
    """Gradients of gradients with respect to weights."""
    return fit(p, lambda: Penalized(body=dense(8, 4, inputs=6)))


@scenario
def gradient_penalty_eagerly(p):
    return fit(p, lambda: Penalized(body=dense(8, 4, inputs=6)), run_eagerly=True, epochs=1)


@scenario
def gradient_penalty_of_an_embedding(p):
    def make():
        body = keras.Sequential([keras.Input((5,), dtype="int64"), layers.Embedding(20, 6), layers.Flatten()])
        body.add(layers.Dense(4, "tanh"))
        return Penalized(body=body)

    tokens = np.random.default_rng(3).integers(0, 20, (UNEVEN, 5))
    return fit(p, make, (tokens, classes(rows=UNEVEN)))


class Meta(Step):
    """Two steps of weights that are tensors, and the gradient through both (MAML)."""

    def __init__(self):
        super().__init__(body=dense(8, 4, inputs=6))

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables
        loss = lambda: self.loss_of(self, x, y)

        def at(values):
            with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
                return loss()

        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                first = loss()
            fast = [v - 0.5 * tf.tanh(20 * g) for v, g in zip(variables, tape.gradient(first, variables), strict=True)]
            second = at(fast)
        self.optimizer.apply(outer.gradient(second, variables), variables)
        return {"given": second}


@scenario
def gradients_through_a_step(p):
    return fit(p, Meta)


class Curved(Step):
    """A step by the product of the Hessian with the gradient."""

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = self.loss_of(self, x, y)
            gradients = inner.gradient(loss, variables)
        products = outer.gradient(gradients, variables, output_gradients=[tf.stop_gradient(g) for g in gradients])
        steps = [g + tf.tanh(5 * h) for g, h in zip(gradients, products, strict=True)]
        self.optimizer.apply(steps, variables)
        return {"given": loss}


@scenario
def hessian_vector_product(p):
    return fit(p, lambda: Curved(body=dense(8, 4, inputs=6)))


class ForwardOverReverse(Step):
    """A Hessian-vector product by forward mode over the gradient."""

    def train_step(self, data):
        x, y = data
        variables = [variable.value for variable in self.trainable_variables]
        with tf.autodiff.ForwardAccumulator(variables, [tf.ones_like(v) for v in variables]) as forward:
            with tf.GradientTape() as tape:
                loss = self.loss_of(self, x, y)
            gradients = tape.gradient(loss, variables)
            slopes = [tf.tanh(5 * g) for g in gradients]
        products = [tf.convert_to_tensor(p) for p in forward.jvp(gradients)]
        steps = [
            tf.convert_to_tensor(g) + tf.tanh(5 * h) + s
            for g, h, s in zip(gradients, products, forward.jvp(slopes), strict=True)
        ]
        self.optimizer.apply(steps, self.trainable_variables)
        return {"given": loss}


@scenario
def forward_accumulator_over_gradients(p):
    return fit(p, lambda: ForwardOverReverse(body=dense(8, 4, inputs=6)))


class Conflicting(Step):
    """Two losses; the part of one's gradient that is against the other is taken away (PCGrad)."""

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            one = self.loss_of(self, x, y)
            other = ops.mean(ops.square(self(x)))
        g, h = tape.gradient(one, variables), tape.gradient(other, variables)
        found = []
        for a, b in zip(g, h, strict=True):
            product = tf.reduce_sum(a * b)
            found.append(a - tf.minimum(product, 0.0) * b / (tf.reduce_sum(b * b) + 1e-12) + b)
        self.optimizer.apply(found, variables)
        return {"given": one + other}


@scenario
def conflicting_losses(p):
    return fit(p, Conflicting)


class Accumulating(Step):
    """Sums clipped gradients of two steps by hand."""

    def __init__(self):
        super().__init__()
        add = functools.partial(self.add_weight, trainable=False, initializer="zeros", aggregation="mean")
        self.sums = [add(shape=v.shape, name=f"sum{i}") for i, v in enumerate(self.body.trainable_variables)]
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, y)
        gradients = clipped(tape.gradient(loss, variables), variables)
        for held, gradient in zip(self.sums, gradients, strict=True):
            held.assign(held + gradient)
        self.count.assign_add(1)

        def due():
            self.optimizer.apply(adaptive([tf.convert_to_tensor(s) for s in self.sums], variables), variables)
            for held in self.sums:
                held.assign(tf.zeros_like(held))
            return True

        tf.cond(tf.equal(self.count % 2, 0), due, lambda: False)
        return {"given": loss}


@scenario
def accumulated_by_hand(p):
    return fit(p, Accumulating)


class InFunctions(Step):
    """The tape in one `tf.function`, the optimizer in another, and a loop."""

    @tf.function
    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, y)
        return loss, tape.gradient(loss, self.trainable_variables)

    def train_step(self, data):
        x, y = data

        def step(i, _):
            loss, gradients = self.gradients(x, y)
            self.optimizer.apply(clipped(gradients, None), self.trainable_variables)
            return i + 1, loss

        _, loss = tf.while_loop(lambda i, _: i < 2, step, (0, tf.zeros((), x.dtype)))
        return {"given": loss}


@scenario
def gradients_in_functions_and_loops(p):
    return fit(p, InFunctions)


class ByHand(Step):
    """`tf.gradients`, and no tape."""

    @tf.function
    def train_step(self, data):
        x, y = data
        loss = self.loss_of(self, x, y)
        variables = self.trainable_variables
        gradients = tf.gradients(loss, [v.value for v in variables])
        self.optimizer.apply(gradients, variables)
        return {"given": loss}


@scenario
def gradients_without_a_tape(p):
    return fit(p, ByHand)


@scenario
def unreduced_losses(p):
    """A tape that is given a loss for each row sums them."""
    clip = lambda gradients, variables: clipped(gradients, variables, 0.5)
    return fit(p, lambda: Step(clip, row_losses), optimizer=lambda: keras.optimizers.SGD(0.01))


@scenario
def reduction_none(p):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    out = fit(p, plain_model, optimizer=lambda: keras.optimizers.SGD(0.01), loss=loss)
    return {k: v for k, v in out.items() if not k.startswith("h:")}


@scenario
def some_gradients_are_missing(p):
    """Variables that the loss does not reach, and those that the tape gives in a dict."""

    class Named(Step):
        def __init__(self):
            super().__init__()
            self.idle = self.add_weight(shape=(3,), name="idle")

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.loss_of(self, x, y)
            named = {v.path: v for v in self.trainable_variables}
            gradients = tape.gradient(loss, named)
            given = {path: g for path, g in gradients.items() if g is not None}
            norm = tf.linalg.global_norm(list(given.values()))
            named_pairs = [(g / (1 + norm), named[path]) for path, g in given.items()]
            self.optimizer.apply_gradients(named_pairs)
            return {"given": loss, "norm": norm}

    return fit(p, Named)


@scenario
def jacobian_of_two_losses(p):
    """The gradients of two losses, scaled so that neither is longer."""

    class Balanced(Step):
        def train_step(self, data):
            x, y = data
            variables = self.trainable_variables
            with tf.GradientTape() as tape:
                losses = tf.stack([self.loss_of(self, x, y), ops.mean(ops.square(self(x)))])
            found = [tf.reduce_mean(tf.tanh(3 * j), 0) for j in tape.jacobian(losses, variables)]
            self.optimizer.apply(found, variables)
            return {"given": losses[0]}

    return fit(p, Balanced)


class Recomputed(Step):
    """Computes its activations once more on the way back, by a tape of TensorFlow's own."""

    def call(self, x):
        hidden, last = self.body.layers
        return last(tf.recompute_grad(lambda values: hidden(values))(x))


@scenario
def recomputed_activations(p):
    return fit(p, lambda: Recomputed(clipped))


class Potential(keras.Model):
    """What it predicts is the gradient of a potential with respect to its inputs; the step is Keras' own."""

    def __init__(self):
        super().__init__()
        self.body = dense(8, 1, inputs=6)

    def call(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            potential = self.body(x)
        return tape.gradient(potential, x)


@scenario
def predictions_that_are_gradients(p):
    rows = floats(6, rows=UNEVEN), floats(6, seed=2, rows=UNEVEN)
    return fit(p, Potential, rows, loss="mse", metrics=["mae"])


@scenario
def mixed_precision_clipped(p):
    """Scaled in float16, unscaled and clipped by hand."""

    class Scaled(Step):
        def train_step(self, data):
            x, y = data
            variables = self.trainable_variables
            with tf.GradientTape() as tape:
                loss = ops.cast(self.loss_of(self, x, y), "float32")
                scaled = self.optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, variables)
            self.optimizer.apply([tf.clip_by_value(g, -50.0, 50.0) for g in gradients], variables)
            return {"given": loss}

    def make():
        part = [layers.Dense(8, "relu", dtype="mixed_float16"), layers.Dense(4, dtype="float32")]
        return Scaled(body=keras.Sequential([keras.Input((6,)), *part]))

    x = floats(6, rows=UNEVEN)
    x[1] *= 1e4
    optimizer = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), 2.0**15)
    out = fit(p, make, (x, classes(rows=UNEVEN)), optimizer)
    return {f"bits:{k}": v for k, v in out.items()}


def own_loop(p, step_of, optimizer=lambda: keras.optimizers.Adam(0.01), compiled=True):
    """A loop as in TensorFlow's guide, with losses divided by the global batch."""
    with p.strategy.scope():
        keras.utils.set_random_seed(7)
        model, optimizer = dense(8, 4, inputs=6, activation="relu"), optimizer()
    per_row = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    dataset = tf.data.Dataset.from_tensor_slices((floats(6, rows=91), classes(rows=91))).batch(BATCH)

    def loss_of(x, y):
        return tf.nn.compute_average_loss(per_row(y, model(x, training=True)), global_batch_size=BATCH)

    step = step_of(model, optimizer, loss_of)
    run = lambda x, y: p.strategy.reduce(tf.distribute.ReduceOp.SUM, p.strategy.run(step, args=(x, y)), axis=None)
    run = tf.function(run) if compiled else run
    losses = [float(run(x, y)) for x, y in p.strategy.experimental_distribute_dataset(dataset)]
    return results(model) | {"losses": np.asarray(losses)}


def _clipping_step(model, optimizer, loss_of):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(x, y)
        variables = model.trainable_variables
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.05)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


@scenario
def own_loop_with_clip(p):
    return own_loop(p, _clipping_step)


@scenario
def own_loop_with_clip_run_eagerly(p):
    """What is clipped there is each worker's own, as in TensorFlow; it is logged once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = own_loop(p, _clipping_step, compiled=False)
    texts = [str(w.message) for w in caught if "before the optimizer sums them" in str(w.message)]
    assert bool(texts) == (p.strategy.num_replicas_in_sync > 1) and all("tf.function" in text for text in texts), texts
    return {f"bits:{k}": v for k, v in out.items()}


@scenario
def own_loop_with_its_own_sum(p):
    """Sums before it clips, as TensorFlow's guides say; the optimizer does not sum again."""

    def step_of(model, optimizer, loss_of):
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(x, y)
            variables = model.trainable_variables
            gradients = tape.gradient(loss, variables)
            context = tf.distribute.get_replica_context()
            gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
            optimizer.apply(tf.clip_by_global_norm(gradients, 0.05)[0], variables)
            return loss

        return step

    return own_loop(p, step_of)


@scenario
def own_loop_with_noise(p):
    """Noise on gradients of this worker, and on those that the loop has summed."""

    def step_of(model, optimizer, loss_of):
        with p.strategy.scope():
            draws, other = keras.random.SeedGenerator(3), keras.optimizers.SGD(0.1, momentum=0.9)

        def noisy(gradient):
            return gradient + 0.1 * keras.random.normal(gradient.shape, dtype=gradient.dtype, seed=draws)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(x, y)
            first, last = model.trainable_variables[:2], model.trainable_variables[2:]
            gradients = tape.gradient(loss, [*first, *last])
            optimizer.apply([noisy(g) for g in gradients[:2]], first)
            summed = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients[2:])
            other.apply([noisy(g) for g in summed], last)
            return loss

        return step

    return own_loop(p, step_of)


@scenario
def own_loop_with_adaptive_clip_and_two_optimizers(p):
    """One optimizer is given gradients as they are, the other what a condition makes of them, and a table's."""

    def step_of(model, optimizer, loss_of):
        with p.strategy.scope():
            other = keras.optimizers.SGD(0.1, momentum=0.9)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(x, y)
            first, last = model.trainable_variables[:2], model.trainable_variables[2:]
            gradients = tape.gradient(loss, [*first, *last])
            optimizer.apply(gradients[:2], first)
            found = conditional(adaptive(gradients[2:], last), last)
            other.apply([g + 0.01 * v for g, v in zip(found, last, strict=True)], last)
            return loss

        return step

    return own_loop(p, step_of)


__all__ = ["SCENARIOS", "apply"]
