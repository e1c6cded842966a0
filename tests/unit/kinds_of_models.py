"""Compiled models of many kinds, by name; `python kinds_of_models.py` prints what each is, from a copy anywhere."""

from __future__ import annotations

import functools


def functional(units=4, activation="relu", optimizer="adam", rate=0.01, dropout=0.1):
    import keras

    inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((3,), name="b")}
    x = keras.layers.Dense(units, activation)(inputs["a"]) * 2.0 + keras.layers.Dense(units)(inputs["b"])
    x = keras.layers.Dropout(dropout)(keras.ops.relu(x))
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile(
        keras.optimizers.get({"class_name": optimizer, "config": {"learning_rate": rate}}), "mse", metrics=["mae"]
    )
    return model


def sequential():
    import keras

    layers = [keras.Input((8,)), keras.layers.Embedding(20, 4), keras.layers.Bidirectional(keras.layers.LSTM(3))]
    model = keras.Sequential([*layers, keras.layers.LayerNormalization(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.Huber(delta=2.0))
    return model


def nested():
    import keras

    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(2)])
    inputs = keras.Input((5, 3))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.TimeDistributed(inner)(inputs)))
    model.compile("rmsprop", "mse")
    return model


def subclassed(config=None):
    import keras

    class Net(keras.Model):
        """Without get_config; takes the whole config."""

        def __init__(self, config, **kwargs):
            super().__init__(**kwargs)
            self.hidden = keras.layers.Dense(config["units"], config.get("activation", "relu"))
            self.head = keras.layers.Dense(1)

        def call(self, x):
            return self.head(keras.ops.tanh(self.hidden(x)))

    model = Net(config or {"units": 4, "epochs": 2})
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def without_config():
    import keras

    class Scale(keras.layers.Layer):
        def __init__(self, how):
            super().__init__()
            self.how = how

        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), name="scale")

        def call(self, x):
            return self.how(x) * self.scale

    model = keras.Sequential([keras.Input((3,)), Scale(lambda x: x + 1), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def custom_layer():
    import keras

    @keras.saving.register_keras_serializable("tests")
    class Block(keras.layers.Layer):
        def __init__(self, units=4, activation="relu", **kwargs):
            super().__init__(**kwargs)
            self.units, self.activation = units, keras.activations.get(activation)
            self.dense = keras.layers.Dense(units)

        def call(self, x):
            return self.activation(self.dense(x))

        def get_config(self):
            own = {"units": self.units, "activation": keras.activations.serialize(self.activation)}
            return {**super().get_config(), **own}

    model = keras.Sequential([keras.Input((3,)), Block(), keras.layers.Lambda(lambda x: x * 2), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def lora():
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
    model.layers[0].enable_lora(2)
    model.layers[1].trainable = False
    model.compile("adamw", "mse")
    return model


def mixed_precision():
    import keras

    policy = keras.DTypePolicy("mixed_float16")
    layers = [keras.layers.Dense(4, dtype=policy), keras.layers.BatchNormalization(dtype=policy)]
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1, dtype="float32")])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)), "mse")
    return model


def own_losses(power=2):
    import keras

    def loss(y, p):  # a comment
        return keras.ops.mean(keras.ops.abs(y - p) ** power)

    inputs = keras.Input((3,))
    outputs = {"u": keras.layers.Dense(1, name="u")(inputs), "v": keras.layers.Dense(1, name="v")(inputs)}
    model = keras.Model(inputs, outputs)
    losses = {"u": loss, "v": lambda y, p: keras.ops.mean(keras.ops.square(y - p))}

    class Weighted(keras.losses.Loss):
        def call(self, y, p):
            return 2 * loss(y, p)

    losses["v"] = [losses["v"], Weighted()][power % 2]
    metrics = {"u": [functools.partial(loss), keras.metrics.MeanAbsoluteError()], "v": ["mae"]}
    model.compile("sgd", losses, metrics=metrics)
    return model


def schedule():
    import keras

    class Own(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.1 / (1.0 + keras.ops.cast(step, "float32"))

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(Own()), "mse")
    return model


def known_schedule(rate=0.1):
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(rate, 10, 0.9)), "mse")
    return model


def vocabulary():
    import keras

    words = keras.layers.StringLookup(vocabulary=[f"word{i}" for i in range(2000)], output_mode="multi_hot")
    inputs = keras.Input((4,), dtype="string")
    model = keras.Model(inputs, keras.layers.Dense(1)(words(inputs)))
    model.compile("adam", "mse")
    return model


KINDS = (
    *(functional, sequential, nested, subclassed, without_config, custom_layer, lora, mixed_precision),
    *(own_losses, schedule, known_schedule, vocabulary),
)


def told(build, **arguments):
    """Returns what a model is, as it is after it was written next to a checkpoint."""
    import json

    import keras

    from raytf.identity import fingerprint

    model = build(**arguments)
    if not model.built:
        model(keras.ops.zeros((2, 3)))
    model.optimizer.build(model.trainable_variables)
    return json.loads(json.dumps(fingerprint.model_fingerprint(model)))


if __name__ == "__main__":
    import json
    import random

    import keras
    import numpy as np

    # what was made before must not count, nor what is drawn
    keras.utils.set_random_seed(random.randrange(2**31))
    np.random.seed()
    for _ in range(3):
        functional(), sequential(), subclassed()
    print(json.dumps({build.__name__: told(build) for build in KINDS}))
