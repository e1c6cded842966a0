"""What the parity tests run on one, two and three workers: each scenario trains and returns what must be equal.

A scenario is a function of `Place` that returns {name: array}. It builds its data and model from fixed seeds, and feeds
one process the same global batches as several workers.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from dataclasses import dataclass, field

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from raytf.collectives import exchange
from raytf.parallel import step as step_module
from raytf.worker.fit import build_from_data

SCENARIOS = {}
ROWS, BATCH = 96, 24


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


@dataclass
class Place:
    """Where a scenario runs."""

    strategy: object
    rank: int
    world: int
    folder: str
    _shared: tuple | None = field(default=None, repr=False)

    def data(self, arrays, batch=BATCH, drop=False):
        """This worker's part of the arrays in global batches of `batch` rows."""
        from raytf.data import worker_part
        from raytf.runtime.topology import shard_of_rank

        rows = len(tf.nest.flatten(arrays)[0])

        def part(step):
            start = step * batch
            lo, hi = shard_of_rank(min(rows, start + batch) - start, self.world, self.rank)
            return tf.nest.map_structure(lambda a: a[start + lo : start + hi], arrays)

        steps = rows // batch if drop else -(-rows // batch)
        spec = tf.nest.map_structure(lambda a: tf.TensorSpec((None, *a.shape[1:]), a.dtype), arrays)
        parts = [part(s) for s in range(steps)]
        dataset = tf.data.Dataset.from_generator(lambda: iter(parts), output_signature=spec)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
        return worker_part.mark_worker_part(dataset) if self.world > 1 else dataset

    def fit(self, build, arrays, *, epochs=2, batch=BATCH, in_step=False, **kwargs):
        """Trains a model; its optimizer and its metrics are built as a KerasTrainer does it, or by the first step.

        In the first step, as `model.fit` does it, TensorFlow traces that twice.
        """
        data = self.data(arrays, batch)
        model = self.plain() if build is plain else self._built(build, None if in_step else data)
        history = model.fit(data, epochs=epochs, verbose=0, **kwargs)
        return model, results(model, history)

    def plain(self):
        """The model of `plain`, as new: scenarios share it, so that TensorFlow traces its steps once for all of them.

        Each of its variables gets the value that it began with.
        """
        if self._shared is None:
            model = self._built(plain, self.data(vectors()))
            variables = [*model.variables, *model.optimizer.variables]
            self._shared = model, [(v, np.asarray(v)) for v in variables]
        model, values = self._shared
        keras.utils.set_random_seed(7)
        for variable, value in values:
            variable.assign(value)
        for metric in model.metrics:  # older versions of Keras count on from one `train_on_batch` to the next
            metric.reset_state()
        assert len(values) == len(model.variables) + len(model.optimizer.variables)
        return model

    def _built(self, build, data=None):
        with self.strategy.scope():
            keras.utils.set_random_seed(7)
            model = build()
            if data is not None:
                build_from_data(model, data)
        return model


def results(model, history=None):
    out = {f"w{i}": np.asarray(v) for i, v in enumerate(model.trainable_variables)}
    for name, values in (history.history if history else {}).items():
        if isinstance(values[0], dict):
            out |= {f"h:{name}:{k}": np.asarray([v[k] for v in values], np.float64) for k in values[0]}
        else:
            out[f"h:{name}"] = np.asarray(values, np.float64)
    return out


def by_branch(outcome):
    """What a scenario returns, with the weights by their layers' names, and the loss of all branches last."""
    model, out = outcome
    names = [layer.name for layer in model.layers for _ in layer.trainable_variables]
    named = {f"w{i}:{name}": out.pop(f"w{i}") for i, name in enumerate(names)}
    whole = {key: out.pop(key) for key in ("h:loss", "h:val_loss") if key in out}
    return named | out | whole


def floats(*shape, seed=0, rows=ROWS):
    return np.random.default_rng(seed).normal(size=(rows, *shape)).astype(keras.config.floatx())


def classes(count=4, seed=1, rows=ROWS):
    return np.random.default_rng(seed).integers(0, count, rows)


def images(rows=ROWS):
    return floats(8, 8, 1, rows=rows), classes(rows=rows)


def vectors(rows=ROWS):
    return floats(6, rows=rows), classes(rows=rows)


def mlp(optimizer=None, loss="sparse_categorical_crossentropy", outputs=4, activation="softmax", inputs=6, **kwargs):
    def build():
        model = keras.Sequential([keras.Input((inputs,)), layers.Dense(16, "relu"), layers.Dense(outputs, activation)])
        kwargs.setdefault("metrics", ["accuracy"])
        model.compile(optimizer() if optimizer else keras.optimizers.SGD(0.1, momentum=0.9), loss, **kwargs)
        return model

    return build


def plain():
    """What most scenarios of data and callbacks train."""
    return mlp()()


def optimizers():
    return {
        "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(0.01),
        "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.05),
    }


def kinds(optimizer):
    """Branches of four kinds, each with weights and a loss of its own."""
    of = {
        "image": [keras.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D()],
        "vector": [keras.Input((6,)), layers.Dense(16, "relu")],
        "sequence": [keras.Input((5, 3)), layers.LSTM(8)],
        "tokens": [keras.Input((5,), dtype="int64"), layers.Embedding(20, 6)],
    }
    inputs, outputs = {}, {}
    for kind, its in of.items():
        branch = keras.Sequential([*its, layers.Flatten(), layers.Dense(4, "softmax")], name=kind)
        inputs[kind] = keras.Input(branch.input_shape[1:], dtype=branch.input_dtype)
        outputs[kind] = branch(inputs[kind])
    model = keras.Model(inputs, outputs)
    same = lambda what: dict.fromkeys(outputs, what)
    model.compile(optimizer, same("sparse_categorical_crossentropy"), metrics=same("accuracy"))
    return model


def rows_of_kinds():
    tokens = np.random.default_rng(3).integers(0, 20, (ROWS, 5))
    x = {"image": floats(8, 8, 1), "vector": floats(6), "sequence": floats(5, 3), "tokens": tokens}
    return x, dict.fromkeys(x, classes())


for _name, _make in optimizers().items():
    SCENARIOS[f"kinds_{_name}"] = lambda p, make=_make: by_branch(p.fit(lambda: kinds(make()), rows_of_kinds()))


@scenario
def masked_tokens(p):
    """A loss over tokens, of which only the unmasked ones count; sequences differ in length between workers."""
    tokens = np.random.default_rng(3).integers(1, 20, (ROWS, 6))
    for i, row in enumerate(tokens):
        row[1 + i * 5 // ROWS :] = 0

    def build():
        inputs = keras.Input((6,), dtype="int64")
        x = layers.LSTM(8, return_sequences=True)(layers.Embedding(20, 6, mask_zero=True)(inputs))
        model = keras.Model(inputs, layers.Dense(20, "softmax")(x))
        model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    return p.fit(build, (tokens, tokens))[1]


@scenario
def metrics_that_are_no_averages(p):
    y = classes(2)[:, None].astype(keras.config.floatx())
    kinds = [
        keras.metrics.AUC(name="auc"),
        keras.metrics.Precision(name="precision"),
        keras.metrics.Recall(name="recall"),
        keras.metrics.F1Score(threshold=0.5, name="f1"),
        keras.metrics.R2Score(name="r2"),
        keras.metrics.RootMeanSquaredError(name="rmse"),
    ]
    names = ("loss", "auc", "precision", "recall", "f1", "r2", "rmse")
    build = lambda: mlp(loss="binary_crossentropy", outputs=1, activation="sigmoid", metrics=_fresh(kinds))()
    seen = []
    model, out = p.fit(
        build,
        (floats(6), y),
        in_step=True,
        validation_data=p.data((floats(6, seed=5), y)),
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=lambda e, logs: seen.append(dict(logs)))],
    )
    values = model.evaluate(p.data((floats(6, seed=5), y)), verbose=0, return_dict=True)
    for name in names:
        out[f"evaluate:{name}"] = np.asarray(values[name])
        out[f"callback:{name}"] = np.asarray([logs[name] for logs in seen])
        out[f"callback:val_{name}"] = np.asarray([logs[f"val_{name}"] for logs in seen])
    return out


def _fresh(kinds):
    return [k.__class__.from_config(k.get_config()) for k in kinds]


@scenario
def class_weight(p):
    return p.fit(plain, vectors(), class_weight={0: 1.0, 1: 3.0, 2: 0.5, 3: 2.0})[1]


@scenario
def sample_weight(p):
    """Losses that are divided by the rows, and by the sum of their weights."""
    weights = np.random.default_rng(2).uniform(0, 2, ROWS).astype(keras.config.floatx())
    x, y = vectors()

    def build():
        inputs = keras.Input((6,))
        outputs = {name: dense_branch(inputs, 4, "softmax", name) for name in ("rows", "weights")}
        losses = {
            "rows": "sparse_categorical_crossentropy",
            "weights": keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"),
        }
        model = keras.Model(inputs, outputs)
        weighted = {name: ["accuracy"] for name in outputs}
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), losses, weighted_metrics=weighted)
        return model

    return by_branch(p.fit(build, (x, {"rows": y, "weights": y}, weights), batch=20, in_step=True))


def dense_branch(inputs, outputs, activation, name):
    return layers.Dense(outputs, activation, name=name)(layers.Dense(16, "relu", name=f"{name}_hidden")(inputs))


@scenario
def several_inputs_and_outputs(p):
    def build():
        a, b = keras.Input((6,), name="a"), keras.Input((3,), name="b")
        x = layers.Dense(8, "relu")(layers.Concatenate()([a, b]))
        outputs = {
            "kind": layers.Dense(4, "softmax", name="kind")(x),
            "size": layers.Dense(1, name="size")(x),
        }
        model = keras.Model({"a": a, "b": b}, outputs)
        model.compile(
            keras.optimizers.Adam(0.01),
            {"kind": "sparse_categorical_crossentropy", "size": "mse"},
            loss_weights={"kind": 1.0, "size": 0.3},
            metrics={"kind": ["accuracy"], "size": ["mae"]},
        )
        return model

    inputs = {"a": floats(6), "b": floats(3, seed=4)}
    labels = {"kind": classes(), "size": floats(1, seed=6)}
    model, out = p.fit(build, (inputs, labels), validation_data=p.data((inputs, labels), 40))
    predicted = model.predict(p.data((inputs,), 36), verbose=0)
    return out | {f"predict:{k}": v for k, v in predicted.items()}


@scenario
def predict_all_rows_in_order(p):
    x, y = vectors(rows=49)
    model, out = p.fit(plain, (x, y))
    out["predict"] = model.predict(p.data((x,)), verbose=0)
    out["predict_one_row_left"] = model.predict(p.data((x,), 48), verbose=0)
    out["predict_arrays"] = model.predict(x, batch_size=24, verbose=0)
    return out


@scenario
def arrays(p):
    """NumPy arrays given whole to every worker; Keras cuts the global batches."""
    x, y = vectors(rows=90)
    model = p.plain()
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, validation_split=0.2)
    out = results(model, history)
    out["evaluate"] = np.asarray(model.evaluate(x, y, batch_size=50, verbose=0))
    return out


def aligned(values):
    """A copy whose memory TensorFlow takes as it is."""
    found = exchange.empty(values.size, values.dtype).reshape(values.shape)
    found[:] = values
    return found


@scenario
def arrays_of_python_functions(p):
    """Their memory is not written to, also where Keras hands parts of them to TensorFlow."""
    before = floats(8, rows=32), (floats(8, rows=32) > 0).astype(keras.config.floatx())
    x, y = map(aligned, before)
    part = lambda i: (x[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8])

    class Parts(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return part(i)

    def called(i):
        return tuple(tf.ensure_shape(t, (8, 8)) for t in tf.numpy_function(part, [i], [x.dtype, y.dtype]))

    spec = (tf.TensorSpec((None, 8), x.dtype), tf.TensorSpec((None, 8), y.dtype))
    generated = tf.data.Dataset.from_generator(lambda: map(part, range(4)), output_signature=spec)
    model = p._built(mlp(loss="binary_crossentropy", outputs=8, activation="sigmoid", inputs=8))
    changed = []
    for data in (Parts(), generated, tf.data.Dataset.range(4).map(called)):
        model.fit(data, epochs=2, verbose=0, shuffle=False)
        changed += [(now != was).sum() for now, was in zip((x, y), before, strict=True)]
    return {"changed": np.asarray(changed)}


@scenario
def global_dataset(p):
    """A tf.data pipeline of global batches, as TensorFlow's guides write it; TensorFlow shards it."""
    dataset = tf.data.Dataset.from_tensor_slices(vectors(rows=91)).batch(BATCH)
    model = p.plain()
    return results(model, model.fit(dataset, epochs=2, verbose=0, validation_data=dataset))


@scenario
def unsharded_dataset(p):
    """AutoShardPolicy.OFF: every worker brings rows of its own in batches of the global size; no row may be lost."""
    x, y = vectors()
    part = slice(p.rank, None, p.world)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = tf.data.Dataset.from_tensor_slices((x[part], y[part])).batch(BATCH).with_options(options)
    model = p.plain()
    model.fit(dataset, epochs=1, verbose=0)
    return {"steps": np.asarray(int(model.optimizer.iterations))}


@scenario
def batch_normalization(p):
    """Stock BatchNormalization normalizes with this worker's rows; statistics must be the same everywhere."""
    model, _ = p.fit(lambda: bn_model(False), vectors())
    same = {f"s{i}": np.asarray(v) for i, v in enumerate(model.non_trainable_variables)}
    path = os.path.join(p.folder, f"bn_{p.world}_{p.rank}.keras")
    model.save(path)
    saved = keras.saving.load_model(path, compile=False)
    for left, right in zip(model.non_trainable_variables, saved.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
    first = np.asarray(model.evaluate(p.data(vectors()), verbose=0))
    return {f"bits:{k}": v for k, v in same.items()} | {"bits:evaluate": first}


def bn_model(synchronized):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(16),
            layers.BatchNormalization(synchronized=synchronized, momentum=0.8),
            layers.ReLU(),
            layers.Dense(4, "softmax"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@scenario
def batch_normalization_synchronized_uneven(p):
    """Workers with different numbers of rows, and in the last step one that has none."""
    rows = vectors(rows=3 * BATCH + 1)
    model, out = p.fit(lambda: bn_model(True), rows, validation_data=p.data(vectors()))
    return out | {f"s{i}": np.asarray(v) for i, v in enumerate(model.non_trainable_variables)}


@scenario
def dropout(p):
    """Masks differ between replicas and repeat with the seed; the model trains on."""

    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dropout(0.5)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    def masks():
        with p.strategy.scope():
            keras.utils.set_random_seed(11)
            model = build()
        ones = np.ones((8, 6), keras.config.floatx())
        run = tf.function(lambda: p.strategy.run(lambda: model(ones, training=True)))
        return [np.asarray(run()) for _ in range(2)]

    first, again = masks(), masks()
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first[0], first[1])

    def by_tensorflow():
        with step_module.override_state(step=step_module.Step(tf.constant(8), False)):
            return [tf.nn.dropout(tf.ones((8, 6)), 0.5), tf.random.normal((8, 6)), tf.random.normal((6,))]

    tf.random.set_seed(11)
    mask, noise, of_a_weight = map(np.asarray, tf.function(lambda: p.strategy.run(by_tensorflow))())
    if p.world > 1:
        from raytf.collectives import communicator

        def of_others(own):
            places = np.zeros((p.world, *own.shape), own.dtype)
            places[p.rank] = own
            everyone = communicator.sum_over_workers(p.strategy, [places])[0]
            return [np.array_equal(everyone[0], other) for other in everyone[1:]]

        assert not any(of_others(first[0])), "the same mask on two workers"
        assert not any(of_others(mask)) and not any(of_others(noise)), "the same rows on two workers"
        assert all(of_others(of_a_weight)), "a weight's noise is one draw"

    def trained():
        model = keras.Sequential(
            [keras.Input((6,)), layers.GaussianNoise(0.1), layers.Dropout(0.3), layers.Dense(4, "softmax")]
        )
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        return model

    return {f"bits:{k}": v for k, v in p.fit(trained, vectors())[1].items()}


@scenario
def last_batch_smaller(p):
    return p.fit(plain, vectors(rows=ROWS - 5), validation_data=p.data(vectors(rows=31)))[1]


@scenario
def last_batch_of_one_row(p):
    return p.fit(plain, vectors(rows=4 * BATCH + 1), validation_data=p.data(vectors(rows=BATCH + 1)))[1]


@scenario
def odd_global_batch(p):
    return p.fit(plain, vectors(rows=95), batch=7)[1]


@scenario
def steps_per_execution(p):
    rows = vectors(rows=5 * BATCH - 3)
    return p.fit(mlp(steps_per_execution=3), rows, validation_data=p.data(vectors()))[1]


class _Busy(keras.callbacks.Callback):
    """Python that takes its time after each execution that is measured, of the chief alone; ends after some epochs.

    On a machine with other work it takes longer than the steps, so that it stays worth while to call it less often.
    """

    raytf_local_batches = True

    def __init__(self, place, epochs):
        super().__init__()
        self.place, self.epochs, self.executions, self.began = place, epochs, 0, 0.0
        self.seconds = []  # of each measured execution, with the time after it

    def on_train_batch_begin(self, batch, logs=None):
        self.began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.executions += 1
        if self.place.rank == 0 and self.executions <= 32:
            took = time.perf_counter() - self.began
            self.seconds.append(took + max(0.03, 2 * took))
            time.sleep(max(0.03, 2 * took))

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == self.epochs - 1

    def late(self, tensor):
        """A tensor that comes later than two such executions would need."""

        def wait(value):
            time.sleep(2 * statistics.median(self.seconds))
            return value

        late = tf.numpy_function(wait, [tensor], tensor.dtype)
        late.set_shape(tensor.shape)
        return late


def _fit_with_chosen_execution(p, build, busy):
    from raytf.worker.steps_per_execution import ExecutionCallback

    # many epochs are ahead, so that a new trace seems to pay
    model, out = p.fit(build, vectors(rows=61 * 4 - 1), batch=4, epochs=10_000, callbacks=[ExecutionCallback([]), busy])
    assert int(model.optimizer.iterations) == busy.epochs * 61
    return model, out


@scenario
def steps_per_execution_chosen_by_measurement(p):
    busy = _Busy(p, epochs=3)
    model, out = _fit_with_chosen_execution(p, mlp(), busy)
    assert model.steps_per_execution > 1
    assert 32 < busy.executions < 2 * 61, busy.executions
    return out


@scenario
def steps_per_execution_goes_back_where_it_does_not_help(p):
    busy = _Busy(p, epochs=4)

    class Slow(keras.Sequential):
        def train_step(self, data):
            if self.steps_per_execution > 1 and p.rank == 0:
                data = busy.late(data[0]), data[1]
            return super().train_step(data)

    def build():
        model = Slow([keras.Input((6,)), layers.Dense(4, "softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    model, out = _fit_with_chosen_execution(p, build, busy)
    assert model.steps_per_execution == 1
    assert busy.executions > 61 + 32
    return out


@scenario
def gradient_accumulation(p):
    make = lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3, clipnorm=0.5)
    return p.fit(mlp(make), vectors(), epochs=3, batch=16, in_step=True)[1]


@scenario
def accumulation_in_long_executions(p):
    make = lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=3)
    return p.fit(mlp(make, steps_per_execution=4), vectors(), epochs=3, batch=16)[1]


@contextlib.contextmanager
def _averaging(p, every):
    from raytf.parallel import local_sgd

    local_sgd.attach(p.strategy, every)
    try:
        yield
    finally:
        local_sgd._averaging_intervals.clear()


@scenario
def local_steps(p):
    """Three steps of each worker by itself, then the mean of their parameters; with one process, that by hand."""
    every, arrays, build = 3, vectors(), mlp(lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    if p.world > 1:
        with _averaging(p, every):
            return results(p.fit(build, arrays)[0])
    two = []
    for _ in range(2):
        keras.utils.set_random_seed(7)
        two.append(build())
    done = 0
    for _ in range(2):
        for start in range(0, ROWS, BATCH):
            for rank, model in enumerate(two):
                rows = slice(start + rank * BATCH // 2, start + (rank + 1) * BATCH // 2)
                model.train_on_batch(*[a[rows] for a in arrays])
            done += 1
            if done % every == 0:
                _average([model.trainable_variables for model in two])
        _average([[*m.trainable_variables, *m.optimizer.variables[2:]] for m in two])
    return results(two[0])


def _average(many):
    for same in zip(*many, strict=True):
        mean = np.mean([np.asarray(v) for v in same], 0)
        for variable in same:
            variable.assign(mean)


@scenario
def local_steps_that_cannot_work(p):
    """Workers must count alike when they average."""
    from raytf.errors import ConfigError

    if p.world == 1:
        return {"refused": np.asarray(True)}
    with _averaging(p, 2):
        try:
            p.fit(mlp(lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)), vectors())
        except ConfigError as error:
            return {"refused": np.asarray("gradient_accumulation_steps with sync_every=2" in str(error))}


@scenario
def run_eagerly(p):
    return p.fit(mlp(run_eagerly=True), vectors(rows=70), in_step=True, validation_data=p.data(vectors()))[1]


@scenario
def jit_compile(p):
    def build():
        inputs = {"tokens": keras.Input((5,), dtype="int64", name="tokens"), "vector": keras.Input((6,), name="vector")}
        x = layers.GlobalAveragePooling1D()(layers.Embedding(20, 6, mask_zero=True)(inputs["tokens"]))
        y = layers.Dense(8, "relu", kernel_regularizer="l2")(inputs["vector"])
        shared = layers.Concatenate()([x, y])
        outputs = {"a": layers.Dense(4, "softmax")(shared), "b": layers.LayerNormalization()(shared)}
        model = keras.Model(inputs, outputs)
        losses = {"a": "sparse_categorical_crossentropy", "b": "mse"}
        model.compile(keras.optimizers.Adam(0.01), losses, metrics={"a": ["accuracy"]}, jit_compile=True)
        return model

    rows = 2 * BATCH + 3
    tokens = np.random.default_rng(3).integers(0, 20, (rows, 5))
    y = {"a": classes(rows=rows), "b": floats(14, seed=4, rows=rows)}
    return p.fit(build, ({"tokens": tokens, "vector": floats(6, rows=rows)}, y), epochs=2)[1]


@scenario
def jit_compile_is_refused_where_calls_exchange_or_add_losses(p):
    if p.world == 1:
        return {}
    from raytf.errors import ConfigError

    for layer in (layers.BatchNormalization(synchronized=True), layers.ActivityRegularization(l2=0.1)):
        with p.strategy.scope():
            model = keras.Sequential([keras.Input((6,)), layer, layers.Dense(1)])
            model.compile("sgd", "mse", jit_compile=True)
        try:
            model.fit(p.data((floats(6), floats())), verbose=0)
        except ConfigError as error:
            assert "jit_compile" in str(error)
        else:
            raise AssertionError(f"jit_compile=True was not refused with {layer}")
    return {}


for _name, _options in {
    "global_clipnorm_and_ema": {"global_clipnorm": 0.1, "use_ema": True, "ema_momentum": 0.9},
    "clipnorm_ema_overwrite_and_weight_decay": {
        "clipnorm": 0.05,
        "use_ema": True,
        "ema_momentum": 0.9,
        "ema_overwrite_frequency": 3,
        "weight_decay": 0.1,
    },
}.items():
    SCENARIOS[_name] = lambda p, options=_options: p.fit(
        mlp(lambda: keras.optimizers.SGD(0.1, **options)), vectors(), in_step="global_clipnorm" in options
    )[1]


@scenario
def regularization_and_own_add_loss(p):
    class Penalty(layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * ops.mean(ops.square(x)))
            return x

    def build():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(16, "relu", kernel_regularizer="l2", kernel_constraint="max_norm"),
                layers.Dense(8, "relu", activity_regularizer=keras.regularizers.L2(0.01)),
                Penalty(),
                layers.Dense(4, "softmax"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    return p.fit(build, vectors(rows=90))[1]


@scenario
def mixed_bfloat16(p):
    return _mixed(p, "mixed_bfloat16", keras.optimizers.SGD(0.05))


@scenario
def mixed_float16(p):
    """An overflow on one worker alone: all skip the step, and continue."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=2.0**15)
    return _mixed(p, "mixed_float16", optimizer)


def _mixed(p, policy, optimizer):
    x, y = vectors()
    x[1] *= 1e4  # in the first worker's rows
    with p.strategy.scope():
        keras.utils.set_random_seed(7)
        keras.config.set_dtype_policy(policy)
        try:
            model = keras.Sequential(
                [
                    keras.Input((6,)),
                    layers.Dense(16, "relu"),
                    layers.Dense(4),
                    layers.Activation("linear", dtype="float32"),
                ]
            )
        finally:
            keras.config.set_dtype_policy(keras.config.floatx())
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(p.data((x, y)), epochs=3, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    out = {f"bits:{k}": v for k, v in results(model, history).items()}
    out["iterations"] = np.asarray(int(model.optimizer.iterations))
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        assert int(model.optimizer.iterations) < 3 * ROWS // BATCH, "no step overflowed"
        out["scale"] = np.asarray(model.optimizer.dynamic_scale)
    return out


class _StopAfter(keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self.step, self.seen = step, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.step:
            self.model.stop_training = True


class _ChiefStops(keras.callbacks.Callback):
    """Decides by something that only one process knows, as a time limit does."""

    def __init__(self, rank, at):
        super().__init__()
        self.rank, self.at = rank, at

    def on_epoch_end(self, epoch, logs=None):
        if self.rank == 0 and epoch == self.at:
            self.model.stop_training = True


@scenario
def early_stopping(p):
    stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    fast = keras.callbacks.LearningRateScheduler(lambda epoch: 2.0)
    data = p.data(vectors(49))
    _, out = p.fit(plain, vectors(), epochs=12, validation_data=data, callbacks=[fast, stop])
    assert 2 < len(out["h:loss"]) < 12, "it has not stopped"
    return out


@scenario
def reduce_lr_on_plateau(p):
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.1)
    model, out = p.fit(plain, vectors(), epochs=5, validation_data=p.data(vectors()), callbacks=[plateau])
    return out | {"rate": np.asarray(model.optimizer.learning_rate)}


@scenario
def learning_rate_scheduler(p):
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7)
    return p.fit(plain, vectors(), epochs=3, callbacks=[schedule])[1]


@scenario
def learning_rate_schedule_and_clipvalue(p):
    make = lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.05, 8), clipvalue=0.01)
    return p.fit(mlp(make), vectors(), epochs=3)[1]


@scenario
def terminate_on_nan(p):
    x, y = vectors()
    x[50] = np.nan
    model = p.plain()
    history = model.fit(p.data((x, y)), epochs=3, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()])
    return {"epochs": np.asarray(len(history.epoch)), "steps": np.asarray(int(model.optimizer.iterations))}


@scenario
def stop_between_batches(p):
    return p.fit(plain, vectors(), epochs=3, callbacks=[_StopAfter(6)])[1]


@scenario
def chief_decides(p):
    return p.fit(plain, vectors(), epochs=5, callbacks=[_ChiefStops(p.rank, 1)])[1]


@scenario
def batch_logs(p):
    """What a callback sees after each batch is the global running value."""
    seen = []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda b, logs: seen.append((float(logs["loss"]), float(logs["accuracy"])))
    )
    _, out = p.fit(plain, vectors(rows=77), callbacks=[callback])
    return out | {"seen": np.asarray(seen)}


@scenario
def batch_callback_of_the_chief_alone(p):
    """As in `callbacks = [...] if rank == 0 else []`: the others take part in what the chief's callback needs."""
    seen = []
    log = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: seen.append(float(logs["loss"])))
    _, out = p.fit(plain, vectors(rows=77), callbacks=[log] if p.rank == 0 else None)
    return out | ({"chief:seen": np.asarray(seen)} if p.rank == 0 else {})


@scenario
def files_by_the_chief(p):
    folder = os.path.join(p.folder, f"files_{p.world}")
    os.makedirs(folder, exist_ok=True)
    callbacks = [
        keras.callbacks.ModelCheckpoint(
            os.path.join(folder, "model_{epoch}.keras"), save_best_only=True, monitor="loss"
        ),
        keras.callbacks.ModelCheckpoint(os.path.join(folder, "step.weights.h5"), save_weights_only=True, save_freq=3),
        keras.callbacks.CSVLogger(os.path.join(folder, "log.csv")),
        keras.callbacks.TensorBoard(os.path.join(folder, "events")),
        keras.callbacks.BackupAndRestore(os.path.join(folder, "backup"), delete_checkpoint=False),
    ]
    _, out = p.fit(plain, vectors(), epochs=3, callbacks=callbacks)
    if p.rank == 0:
        with open(os.path.join(folder, "log.csv")) as log:
            assert len(log.read().splitlines()) == 4
        out["chief:models"] = np.asarray(sorted(os.listdir(folder)).__len__())
        events = os.listdir(os.path.join(folder, "events", "train"))
        assert len([e for e in events if "tfevents" in e]) == 1, events
    return out


@scenario
def backup_and_restore(p):
    """A run that stops after two epochs and is started again resumes there, on every worker."""
    backup = lambda: keras.callbacks.BackupAndRestore(
        os.path.join(p.folder, f"restore_{p.world}"), delete_checkpoint=False
    )

    class Broken(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("broken")

    with contextlib.suppress(RuntimeError):
        p.fit(plain, vectors(), epochs=4, callbacks=[backup(), Broken()])
    model, out = p.fit(mlp(), vectors(), epochs=4, callbacks=[backup()])
    assert int(model.optimizer.iterations) == 4 * ROWS // BATCH
    return out


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = layers.Dense(16, "relu"), layers.Dense(4, "softmax")

    def call(self, x):
        return self.head(self.hidden(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted)
        return {m.name: m.result() for m in self.metrics}


class OwnMean(OwnStep):
    """Takes the mean by hand and keeps a tracker of its own."""

    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean(name="own")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(y, self(x, training=True)))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.tracker.update_state(loss)
        return {"own": self.tracker.result()}


class BareLogs(OwnStep):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(y, self(x, training=True)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"bare": loss}


def _compiled(kind):
    def build():
        model = kind()
        metrics = ["accuracy"] if kind is OwnStep else None
        model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=metrics)
        return model

    return build


for _kind in (OwnStep, OwnMean, BareLogs):
    SCENARIOS[f"train_step_{_kind.__name__}"] = lambda p, kind=_kind: p.fit(
        _compiled(kind), vectors(rows=90), in_step=kind is OwnMean
    )[1]


@scenario
def not_built_before_fit(p):
    def build():
        model = keras.Sequential([layers.Dense(16, "relu"), layers.Dense(4, "softmax")])
        model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    return p.fit(build, vectors(), in_step=True)[1]


def _per_row(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


def _own_mean(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred))


def _own_sum(y_true, y_pred):
    return ops.sum(ops.abs(y_true - y_pred)) / 50


def _root_mean(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


class _LossClass(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.mean(ops.abs(y_true - y_pred), axis=-1)


class _LossClassOwnMean(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.mean(ops.abs(y_true - y_pred))


class _LossOverridesCall(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.mean(ops.square(ops.cast(y_true, y_pred.dtype) - y_pred))


LOSSES = {
    "per_row": lambda: _per_row,
    "own_mean": lambda: _own_mean,
    "own_sum": lambda: _own_sum,
    "root_mean": lambda: _root_mean,
    "class": _LossClass,
    "class_own_mean": _LossClassOwnMean,
    "overrides_call": _LossOverridesCall,
    "reduction_sum": lambda: keras.losses.MeanSquaredError(reduction="sum"),
}


@scenario
def losses(p):
    """Losses of all kinds, each with a branch of its own, which it alone trains."""

    def build():
        inputs = keras.Input((6,))
        model = keras.Model(inputs, {name: dense_branch(inputs, 2, None, name) for name in LOSSES})
        metrics = {name: ["mae"] for name in LOSSES}
        model.compile(keras.optimizers.SGD(0.01), {name: make() for name, make in LOSSES.items()}, metrics=metrics)
        return model

    def rows(count):
        return floats(6, rows=count), dict.fromkeys(LOSSES, floats(2, seed=8, rows=count))

    return by_branch(p.fit(build, rows(90), validation_data=p.data(rows(ROWS))))


@scenario
def one_own_loss(p):
    """A loss that is the only one, and reduces by itself."""
    make = lambda: keras.optimizers.SGD(0.01)
    build = mlp(make, loss=_root_mean, outputs=2, activation=None, metrics=["mae"])
    return p.fit(build, (floats(6, rows=90), floats(2, seed=8, rows=90)))[1]


@scenario
def custom_loop(p):
    """A loop as in TensorFlow's guide: `strategy.run`, a loss divided by the global batch, `strategy.reduce`."""
    with p.strategy.scope():
        keras.utils.set_random_seed(7)
        model = mlp()()
        optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.2)
        per_row = keras.losses.SparseCategoricalCrossentropy(reduction="none")
    dataset = tf.data.Dataset.from_tensor_slices(vectors()).batch(BATCH)
    distributed = p.strategy.experimental_distribute_dataset(dataset)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(per_row(y, model(x, training=True)), global_batch_size=BATCH)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    @tf.function
    def run(x, y):
        return p.strategy.reduce(tf.distribute.ReduceOp.SUM, p.strategy.run(step, args=(x, y)), axis=None)

    losses = [float(run(x, y)) for _ in range(2) for x, y in distributed]
    return results(model) | {"losses": np.asarray(losses)}


@scenario
def what_a_loop_exchanges(p):
    """All that `tf.distribute` reduces, gathers and broadcasts, eager and in graphs; one process computes it itself."""
    both, floatx = range(2), keras.config.floatx()
    slices = lambda r: tf.IndexedSlices(tf.ones((r + 1, 2), floatx) * (r + 1), tf.range(r + 1), tf.constant([4, 2]))
    rows = [np.arange(3 * (r + 2)).reshape(r + 2, 3).astype(floatx) + 100 * r for r in both]
    out = {
        "sum": 3,
        "mean": 1.5,
        "sum of rows": rows[0].sum(0) + rows[1].sum(0),
        "gathered": np.concatenate(rows),
        "gathered in a graph": np.concatenate([r.T for r in rows], 1),
        "sums": [3.0, 30.0],
        "means": [1.5, 15.0],
        "sparse": tf.convert_to_tensor(tf.concat([slices(r).values for r in both], 0)),
        "places": [0, 0, 1],
        "all gathered": [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]],
        "gradient": 2.0,
        "chiefs own": True,
        "on read": 3.0,
        "uneven": [list(range(7)), 2],
    }
    if p.world == 2:
        out |= _exchanged(p, slices, rows)
    flat = {name: tf.nest.flatten(value) for name, value in out.items()}
    return {name: np.concatenate([np.ravel(v) for v in its]).astype("float64") for name, its in flat.items()}


def _exchanged(p, slices, rows):
    """What `what_a_loop_exchanges` expects, through the strategy."""
    floatx, strategy, rank, sums = keras.config.floatx(), p.strategy, p.rank, tf.distribute.ReduceOp
    at = lambda values: values[rank]
    with strategy.scope():
        first = tf.Variable(np.random.default_rng().normal(size=(3, 2)), dtype=floatx)  # each its own
        flag = tf.Variable(rank == 0)
        read = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )
    strategy.run(lambda: read.assign(rank + 1.0))

    @tf.function
    def replica():
        context, each = tf.distribute.get_replica_context(), tf.constant(rank + 1.0)
        with tf.GradientTape() as tape:
            tape.watch(each)
            total = context.all_reduce(sums.SUM, each)
        sparse = context.all_reduce(sums.SUM, slices(rank))
        return {
            "sums": context.all_reduce(sums.SUM, [each, 10 * each]),
            "means": context.all_reduce(sums.MEAN, [each, 10 * each]),
            "sparse": sparse.values,
            "places": sparse.indices,
            "all gathered": context.all_gather(tf.fill((2, 2 - rank), float(rank)), 1),
            "gradient": tape.gradient(total, each),
        }

    dataset = tf.data.Dataset.range(7).batch(4)  # batches of 4 and 3 rows, which are cut in two

    @tf.function
    def all_rows():
        found, steps = tf.TensorArray(tf.int64, 0, dynamic_size=True, element_shape=[None], infer_shape=False), 0
        for batch in strategy.experimental_distribute_dataset(dataset):
            found = found.write(steps, strategy.gather(batch, 0))
            steps += 1
        return found.concat(), steps

    graph = tf.function(lambda value: strategy.gather(value, 1))
    return {
        "bits:first": first.numpy(),
        "chiefs own": flag.numpy(),
        "sum": strategy.reduce(sums.SUM, np.int64(rank + 1), axis=None),
        "mean": strategy.reduce(sums.MEAN, np.int64(rank + 1), axis=None),
        "sum of rows": strategy.reduce(sums.SUM, tf.constant(at(rows)), axis=0),
        "gathered": strategy.gather(tf.constant(at(rows)), 0),
        "gathered in a graph": graph(tf.constant(at(rows).T)),
        "on read": read.numpy(),
        "uneven": all_rows(),
        **strategy.run(replica),
    }


@scenario
def on_batch(p):
    """Each row counts once, whatever is summed or counted in it; the last batch has a row for one replica alone."""
    x, y = vectors()
    part = slice(p.rank * ROWS // p.world, (p.rank + 1) * ROWS // p.world)
    model = p.plain()
    logs = [model.train_on_batch(x[part], y[part], return_dict=True) for _ in range(3)]
    tested = model.test_on_batch(x[part], y[part], return_dict=True)
    out = results(model) | {f"log:{k}": np.asarray([line[k] for line in logs]) for k in logs[0]}
    out |= {f"test:{k}": np.asarray(v) for k, v in tested.items()}

    def build():
        inputs = {"a": keras.Input((6,)), "b": keras.Input((3,))}
        model = keras.Model(inputs, layers.Dense(1, "sigmoid")(layers.Concatenate()(list(inputs.values()))))
        counts = [keras.metrics.TruePositives(name="positives")]
        model.compile(keras.optimizers.SGD(0.01), keras.losses.BinaryCrossentropy(reduction="sum"), metrics=counts)
        return model

    model = p._built(build)
    rows = np.array_split(np.arange(7), p.world)[p.rank]
    for i, chosen in enumerate([rows, rows, rows[: p.rank == 0]]):
        inputs, labels = {"a": x[chosen], "b": floats(3)[chosen]}, (y[chosen] % 2)[:, None]
        logs = model.train_on_batch(inputs, labels, class_weight={0: 1.0, 1: 3.0}, return_dict=True)
        tested = model.test_on_batch(inputs, labels, np.full(len(chosen), 2.0), return_dict=True)
        out |= {f"counts:{i}:{k}": np.asarray([logs[k], tested[k]]) for k in logs}
    out["predicted"] = model.predict_on_batch({"a": x[rows], "b": floats(3)[rows]})
    return out | {f"counts:{k}": v for k, v in results(model).items()}
