"""Scenarios of the parity tests whose layers keep state of their own, and whose callbacks assign by chance."""

from __future__ import annotations

import logging
import warnings

import keras
import numpy as np
from keras import layers, ops

from raytf.compat.patching import patched
from tests.processes.gradient_scenarios import ODD, SCENARIOS, UNEVEN
from tests.processes.scenarios import classes, floats, scenario


class Keeps(layers.Layer):
    """Counts rows and steps, centers with a running mean, and counts its clusters."""

    def build(self, shape):
        add = lambda name, shape=(), **kwargs: self.add_weight(
            name=name, shape=shape, initializer="zeros", trainable=False, **kwargs
        )
        self.seen = add("seen", dtype="int64", aggregation="sum")
        self.total = add("total", aggregation="sum")
        self.mean = add("mean", (6,), aggregation="mean")
        self.clusters = add("clusters", (3,), aggregation="mean")
        self.first = add("first", (6,), aggregation="only_first_replica")
        self.steps = add("steps", dtype="int32")

    def call(self, x, training=False):
        centered = x - self.mean
        if training:
            near = ops.one_hot(ops.argmax(x[:, :3], axis=1), 3, dtype=x.dtype)
            self.seen.assign_add(ops.cast(ops.shape(x)[0], "int64"))
            self.total.assign_add(ops.sum(x[:, 0]))
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
            self.clusters.assign(0.5 * self.clusters + 0.5 * ops.mean(near, axis=0))
            self.first.assign(x[0])
            self.steps.assign_add(1)
        return centered * (1 + ops.sum(self.clusters * ops.arange(3, dtype=x.dtype)))


def with_states(outcome):
    model, out = outcome
    return out | {f"s:{v.name}": np.asarray(v) for v in model.non_trainable_variables}


def keeping(**kwargs):
    def build():
        model = keras.Sequential([keras.Input((6,)), Keeps(), layers.Dense(8, "tanh"), layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, **kwargs)
        return model

    return build


def rows():
    return floats(6, rows=UNEVEN), classes(rows=UNEVEN)


@scenario
def states_that_say_how_they_are_joined(p):
    return with_states(p.fit(keeping(), rows(), batch=ODD, validation_data=p.data(rows(), ODD)))


@scenario
def states_in_long_executions(p):
    return with_states(p.fit(keeping(steps_per_execution=3), rows(), batch=ODD))


@scenario
def states_eagerly(p):
    return with_states(p.fit(keeping(run_eagerly=True), rows(), batch=ODD, epochs=1))


@scenario
def states_that_do_not_say(p):
    """Those that follow the rows of a batch are named once, and no others."""

    class Silent(layers.Layer):
        def build(self, shape):
            add = lambda name, **kwargs: self.add_weight(name=name, initializer="zeros", trainable=False, **kwargs)
            self.centers, self.rows = add("centers", shape=(6,)), add("rows", shape=(), dtype="int64")
            self.steps, self.copy = add("steps", shape=(), dtype="int64"), add("copy", shape=(6,))
            self.scale = self.add_weight(name="scale", shape=(6,), initializer="ones")

        def call(self, x, training=False):
            if training:
                self.centers.assign(0.9 * self.centers + 0.1 * ops.mean(x, axis=0))
                self.rows.assign_add(ops.cast(ops.shape(x)[0], "int64"))
                self.steps.assign_add(1)
                self.copy.assign(0.9 * self.copy + 0.1 * self.scale)
            return x * self.scale

    def build():
        normalized = [layers.BatchNormalization(), layers.Dropout(0.5)]
        model = keras.Sequential([keras.Input((6,)), Silent(), *normalized, layers.Dense(4, "softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    expected, reported = ["centers", "rows"], []
    with (
        warnings.catch_warnings(record=True) as caught,
        patched(logging.getLogger("raytf.parallel.joined_state"), "handle", lambda record: reported.append(record)),
    ):
        warnings.simplefilter("always")
        p.fit(build, rows(), batch=ODD, epochs=1)
    lines = [text for text in (record.getMessage() for record in reported) if "BatchNormalization" in text]
    texts = [str(w.message) for w in caught if "add_weight" in str(w.message)]
    if p.strategy.num_replicas_in_sync == 1 or p.rank:
        assert not texts and not lines, (texts, lines)
    else:
        assert len(lines) == 1 and lines[0].startswith("BatchNormalization (1 in the model, such as 'batch_"), lines
        assert len(texts) == 2 and all(f"/{name}'" in text for name, text in zip(expected, texts, strict=True)), texts
    return {}


@scenario
def states_of_an_eager_step_without_rows(p):
    """The last batch has one row: a worker that has none names the state, which is one step older there."""

    class Counts(layers.Layer):
        def build(self, shape):
            self.seen = self.add_weight(name="seen", shape=(), initializer="zeros", trainable=False)

        def call(self, x, training=False):
            if training:
                self.seen.assign_add(1.0)
            return x

    def build():
        model = keras.Sequential([keras.Input((6,)), Counts(), layers.Dense(4, "softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
        return model

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        p.fit(build, (floats(6, rows=ODD + 1), classes(rows=ODD + 1)), batch=ODD, epochs=2)
    older = [str(w.message) for w in caught if "ran eagerly" in str(w.message)]
    has_none = p.rank > 0 if p.world > 1 else p.strategy.num_replicas_in_sync > 1
    assert ["/seen'" in text for text in older] == [True] * has_none, older
    return {}


class Drawing(keras.callbacks.Callback):
    """Assigns weights, a state and rates by chance, or on the chief or another worker alone."""

    def __init__(self, rank, hooks):
        super().__init__()
        self.rank = rank
        self.draw = np.random.default_rng(100 + rank)
        for hook in hooks:
            setattr(self, hook, lambda *args, hook=hook, **kwargs: self.assign(hook))

    def assign(self, hook):
        model, epoch = self.model, int(self.model.optimizer.iterations)
        model.optimizer.learning_rate = self.draw.uniform(0.001, 0.01)
        kernel, bias = model.layers[-1].trainable_variables
        if hook.endswith("begin"):
            kernel.assign(kernel + self.draw.normal(scale=0.1, size=kernel.shape))
        elif self.rank == epoch % 2:
            bias.assign(self.draw.normal(size=bias.shape))
        if self.draw.uniform() < 0.5:
            model.optimizer.variables[2].assign(model.optimizer.variables[2] * self.draw.uniform())
        model.layers[0].mean.assign(self.draw.normal(size=6))


def drawn(p, *hooks):
    callback = Drawing(p.rank, hooks)
    model, out = p.fit(keeping(), rows(), batch=ODD, epochs=3, callbacks=[callback])
    variables = [*model.variables, *model.optimizer.variables]
    out |= {f"v{i}": np.asarray(v) for i, v in enumerate(variables)}
    return {f"bits:{k}": v for k, v in out.items()}


for _name, _hooks in {
    "epochs": ["on_epoch_begin", "on_epoch_end"],
    "batches": ["on_train_batch_begin", "on_train_batch_end"],
    "validations": ["on_test_begin", "on_epoch_end"],
}.items():
    SCENARIOS[f"callbacks_draw_in_{_name}"] = lambda p, hooks=_hooks: drawn(p, *hooks)


@scenario
def the_chiefs_draw_counts(p):
    """A callback that draws on other workers trains as it does on the chief alone."""

    class Jitter(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.draw = np.random.default_rng(p.rank)

        def on_epoch_begin(self, epoch, logs=None):
            for variable in self.model.trainable_variables:
                variable.assign(variable + self.draw.normal(scale=0.05, size=variable.shape))

        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = self.draw.uniform(0.001, 0.02)
            if self.draw.uniform() < 0.5:
                self.model.layers[-1].set_weights(
                    [self.draw.normal(size=w.shape) for w in self.model.layers[-1].weights]
                )

    model, out = p.fit(keeping(), rows(), batch=ODD, epochs=4, callbacks=[Jitter()])
    return out | {"rate": np.asarray(model.optimizer.learning_rate)}


__all__ = ["SCENARIOS"]
