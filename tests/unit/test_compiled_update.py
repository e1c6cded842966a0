"""An optimizer's update that XLA compiles is Keras' own to 1e-9 in float64; what it cannot compile is left to Keras."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers
from keras.optimizers import schedules

from raytf.compat.patching import patched
from raytf.parallel import compiled_update, trainer

trainer.install()
SHAPES = {"kernel": (5, 3), "bias": (3,)}
STEPS = 9


def made(name, *args, **kwargs):
    return lambda: getattr(optimizers, name)(*(args or (0.05,)), **kwargs)


def without_bias(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


class Subclass(optimizers.Adam):
    """With an update of its own, and an `apply` that changes gradients."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(keras.ops.tanh(gradient), variable, learning_rate)

    def apply(self, grads, trainable_variables=None):
        super().apply([g - keras.ops.mean(g) for g in grads], trainable_variables)


class FromNothing(optimizers.Optimizer):
    """As the docstring of Keras' base class has it."""

    def build(self, variables):
        super().build(variables)
        self.seen = self.add_optimizer_variables(variables, "seen")

    def update_step(self, gradient, variable, learning_rate):
        seen = self.seen[self._get_variable_index(variable)]
        self.assign_add(seen, keras.ops.square(gradient))
        self.assign_sub(variable, gradient * keras.ops.cast(learning_rate, variable.dtype) / (1 + keras.ops.sqrt(seen)))


MADE = {
    **{name.lower(): made(name) for name in ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax")},
    **{name.lower(): made(name) for name in ("Adafactor", "Nadam", "Ftrl", "Lion", "Lamb", "Muon")},
    "schedule_free": made("ScheduleFreeAdamW") if hasattr(optimizers, "ScheduleFreeAdamW") else made("AdamW"),
    "momentum": made("SGD", 0.05, momentum=0.9),
    "nesterov": made("SGD", 0.05, momentum=0.9, nesterov=True),
    "centered": made("RMSprop", 0.05, momentum=0.8, centered=True),
    "amsgrad": made("Adam", 0.05, amsgrad=True),
    "adamw_amsgrad": made("AdamW", 0.05, amsgrad=True, weight_decay=0.1),
    "ftrl_regularized": made("Ftrl", 0.05, l1_regularization_strength=0.01, l2_shrinkage_regularization_strength=0.1),
    "adafactor_clipped": made("Adafactor", 0.05, clip_threshold=0.5),
    "muon_moonlight": made("Muon", 0.05, rms_rate=0.2, weight_decay=0.1, nesterov=False),
    "global_clipnorm": made("Adam", 0.05, global_clipnorm=0.5),
    "clipnorm": made("AdamW", 0.05, clipnorm=0.3),
    "clipvalue": made("SGD", 0.05, clipvalue=0.2),
    "ema": made("Adam", 0.05, use_ema=True, ema_momentum=0.9),
    "ema_overwrite": made("SGD", 0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
    "accumulation": made("AdamW", 0.05, gradient_accumulation_steps=2, global_clipnorm=0.5),
    "scale": made("Adam", 0.05, loss_scale_factor=8.0),
    "loss_scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.05), dynamic_growth_steps=2),
    "loss_scale_accumulation": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.05, gradient_accumulation_steps=2)
    ),
    "decay": made("SGD", 0.05, momentum=0.9, weight_decay=0.1),
    "decay_without_bias": lambda: without_bias(optimizers.AdamW(0.05, weight_decay=0.1)),
    "exponential": lambda: optimizers.Adam(schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True)),
    "cosine": lambda: optimizers.AdamW(schedules.CosineDecay(0.01, 5, warmup_target=0.1, warmup_steps=3)),
    "restarts": lambda: optimizers.SGD(schedules.CosineDecayRestarts(0.1, 3)),
    "piecewise": lambda: optimizers.Lion(schedules.PiecewiseConstantDecay([3, 5], [0.1, 0.05, 0.01])),
    "polynomial": lambda: optimizers.SGD(schedules.PolynomialDecay(0.1, 5, cycle=True)),
    "inverse_time": lambda: optimizers.Adam(schedules.InverseTimeDecay(0.1, 2, 0.5)),
    "callable": lambda: optimizers.Adam(lambda: 0.02),
    "subclass": lambda: Subclass(0.05),
    "from_nothing": lambda: FromNothing(0.05),
}


def variables(dtype="float64", **options):
    draw = np.random.default_rng(1)
    return [
        keras.Variable(draw.normal(size=shape), dtype=dtype, name=name, **options) for name, shape in SHAPES.items()
    ]


def gradients(step):
    draw = np.random.default_rng(100 + step)
    return [tf.constant(draw.normal(size=shape)) for shape in SHAPES.values()]


def compiled_calls(traced):
    return [op for op in traced.graph.get_operations() if "_XlaMustCompile" in op.node_def.attr]


def trained(make, compiled, draw=gradients, between=None, weights=variables):
    """(all variables after some steps, how many compiled calls a step has)."""
    with patched(compiled_update, "enabled", compiled):
        keras.backend.set_floatx("float64")
        try:
            trainable, optimizer = weights(), make()
            optimizer.build(trainable)
            step = tf.function(lambda *its: optimizer.apply(list(its), trainable), autograph=False)
            traced = step.get_concrete_function(*draw(0))
        finally:
            keras.backend.set_floatx("float32")
        for i in range(STEPS):
            traced(*draw(i))
            if between is not None:
                between(i, optimizer)
    return [np.asarray(v) for v in (*trainable, *optimizer.variables)], len(compiled_calls(traced))


def check(make, calls=1, **options):
    expected, without = trained(make, compiled=False, **options)
    found, its = trained(make, compiled=True, **options)
    assert (without, its) == (0, calls)
    for result, kerass in zip(found, expected, strict=True):
        np.testing.assert_allclose(result, kerass, rtol=0, atol=1e-9)


FAST = ("adamw", "loss_scale_accumulation", "ema_overwrite", "subclass")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in MADE])
def test_same_as_keras(name):
    check(MADE[name])


@pytest.mark.slow
def test_an_overflow_is_left_out():
    check(MADE["loss_scale"], draw=lambda step: [g * (np.inf if step == 4 else 1) for g in gradients(step)])


@pytest.mark.slow
def test_a_rate_that_callbacks_set_counts():
    def between(step, optimizer):
        optimizer.learning_rate = 0.1 / (step + 1)

    check(MADE["adam"], between=between)


@pytest.mark.slow
def test_constraints():
    check(
        MADE["sgd"], weights=lambda: [keras.Variable(np.eye(5, 3), "float64", constraint="unit_norm"), *variables()[1:]]
    )


def test_a_table_with_gradients_of_rows_is_left_to_keras():
    def draw(step):
        kernel, bias = gradients(step)
        return tf.IndexedSlices(kernel[:2], tf.constant([0, 3]), tf.constant([5, 3])), bias

    check(made("Adam", 0.05, global_clipnorm=0.5, weight_decay=0.1), draw=draw)


def test_variables_that_it_was_not_built_for_raise_as_in_keras():
    optimizer = optimizers.Adam(0.05)
    optimizer.build(variables()[:1])
    step = tf.function(lambda *its: optimizer.apply(list(its), variables()), autograph=False)
    with pytest.raises(ValueError, match="Unknown variable"):
        step.get_concrete_function(*gradients(0))


class OfPython(optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        (gradient,) = tf.numpy_function(lambda g: [np.tanh(g)], [gradient], [gradient.dtype])
        super().update_step(tf.ensure_shape(gradient, variable.shape), variable, learning_rate)


class ByChance(optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        noise = tf.random.stateless_normal(variable.shape, (1, 2), dtype=gradient.dtype)
        super().update_step(gradient + noise, variable, learning_rate)


class OfNoKnownShape(optimizers.SGD):
    """XLA has the operations, and not for a shape that is a gradient's value: only a trial shows it."""

    def update_step(self, gradient, variable, learning_rate):
        size = tf.cast(tf.reduce_sum(tf.abs(gradient)), tf.int32) * 0 + 1
        super().update_step(gradient + tf.fill([size], tf.cast(0.1, gradient.dtype)), variable, learning_rate)


class Printing(optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        tf.print("", end="")
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.parametrize(
    ("kind", "why"),
    [(OfPython, "PyFunc"), (ByChance, "Random"), (OfNoKnownShape, "compile-time constant"), (Printing, "Print")],
)
def test_what_cannot_be_compiled_is_left_to_keras(kind, why, caplog):
    with caplog.at_level(logging.DEBUG, compiled_update.__name__):
        check(lambda: kind(0.05), calls=0)
    (record,) = caplog.records
    assert "Keras' operations" in record.getMessage() and why in record.getMessage()


def test_the_trial_draws_no_random_number():
    tf.random.set_seed(7)
    expected = [float(tf.random.uniform(())) for _ in range(2)]
    tf.random.set_seed(7)
    found = [float(tf.random.uniform(()))]
    trained(MADE["global_clipnorm"], compiled=True)
    assert [*found, float(tf.random.uniform(()))] == expected


def test_a_step_that_is_traced_again_is_not_compiled_again():
    weights, optimizer = variables(), MADE["loss_scale_accumulation"]()
    optimizer.build(weights)
    step = tf.function(lambda rows, *its: optimizer.apply(list(its), weights), autograph=False)
    traced = [step.get_concrete_function(tf.zeros(rows), *gradients(0)) for rows in (1, 2)]
    optimizer.inner_optimizer.clipvalue = 0.5
    traced.append(step.get_concrete_function(tf.zeros(3), *gradients(0)))
    names = [[op.get_attr("f").name for op in compiled_calls(one)] for one in traced]
    assert names[0] == names[1] != names[2]


def test_what_was_used_last_is_kept_for_the_next_models():
    with patched(compiled_update, "_known", {}), patched(compiled_update, "_MOST_KNOWN", 2):
        for name in ("sgd", "momentum", "sgd"):
            trained(MADE[name], compiled=True)
        used_last = list(compiled_update._known)[-1]
        trained(MADE["adam"], compiled=True)
        assert len(compiled_update._known) == 2 and used_last in compiled_update._known


@pytest.mark.parametrize("name", [pytest.param("adamw", marks=pytest.mark.slow), "momentum"])
def test_many_variables_have_one_computation_for_each_shape(name):
    """XLA would take seconds for hundreds of variables."""
    count = compiled_update._MOST_AS_ONE
    weights = lambda: [v for _ in range(count) for v in variables()]
    draw = lambda step: [g * (i + 1) for i, g in enumerate(gradients(step) * count)]
    with patched(compiled_update, "_known", {}) as _:
        check(MADE[name], calls=2 * count, draw=draw, weights=weights)
        assert len(compiled_update._known) == len(SHAPES)
