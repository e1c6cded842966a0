"""What is stopped within an epoch and resumes, on one, two and three workers: `fit.train` as a KerasTrainer runs it.

A scenario is named "case:stage". "quiet" trains as if nothing happened; "stopped" ends at a step, after a checkpoint;
"resumed" continues from it to the end, with as many workers; and "chain" resumes from one of another number of workers,
and is stopped again where the next one is to resume. Most cases are not stopped before they are first resumed: "quiet"
has kept the same checkpoint there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import warnings

import keras
import numpy as np
import pyarrow as pa
import tensorflow as tf
from keras import layers

from raytf.data.batch_spec import BatchSpec
from raytf.data.columns import Column
from raytf.data.sampling import Sampling
from raytf.data.stored import StoredDataset
from raytf.parallel import model_optimizers
from raytf.storage import step_folders
from raytf.worker import checkpoint, fit
from raytf.worker.checkpoint_every import parse_interval
from raytf.worker.job import TrainJob
from raytf.worker.session import Session
from tests.processes import optimizer_scenarios
from tests.processes.scenarios import Place

FEATURES = [f"x{i}" for i in range(6)]
# Which worker count resumes from whose checkpoint, in the chain, and at which epoch and step it is stopped.
CHAIN = [("2", None), ("1", "2"), ("3", "1"), ("2", "3")]
# Cases that are really stopped: at a step, and between an epoch's last step and its end.
STOPPED = ["plain", "last step"]
# Numbers of folders of checkpoints: of those that are stopped, that resume, and that run through; others of the chain.
_STOPPED, _RESUMED, _QUIET = 0, 8, 9


class Stopped(Exception):
    """Ends a training at its current step, on all workers."""


class Stop(keras.callbacks.Callback):
    """Ends a training after some step of an epoch."""

    raytf_local_batches = True

    def __init__(self, epoch, step):
        super().__init__()
        self.at = epoch, step

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == self.at[0] and batch + 1 >= self.at[1]:
            raise Stopped

    def on_test_begin(self, logs=None):
        if self.epoch == self.at[0] and self.at[1] == np.inf:
            raise Stopped  # the last step is made, and the epoch has not ended


class Counts(keras.callbacks.Callback):
    """A callback that counts from 0 in each epoch, and reports what it has seen."""

    raytf_local_batches = True

    def __init__(self):
        super().__init__()
        self.notes = None
        self.seen, self.batches, self.begun = 0, 0, False

    def on_epoch_begin(self, epoch, logs=None):
        self.seen, self.begun = 0, True

    def on_train_batch_begin(self, batch, logs=None):
        self.batches = batch
        self.begun = False

    def on_train_batch_end(self, batch, logs=None):
        self.seen += batch + 1 - self.batches

    def on_epoch_end(self, epoch, logs=None):
        self.notes = [epoch, self.seen, float(np.random.random()), *map(float, self.model.history.epoch)]


class Halve(keras.callbacks.Callback):
    """Halves the rate whenever an epoch begins: once for each, however often it is begun."""

    raytf_local_batches = True

    def on_epoch_begin(self, epoch, logs=None):
        if epoch:
            self.model.optimizer.learning_rate = 0.5 * float(self.model.optimizer.learning_rate)


@dataclasses.dataclass
class Case:
    """A training.

    Args:
        build: build(config) -> model.
        rows, batch: of an epoch, and of a step.
        every: checkpoint_every.
        stops: where the training, and those of the chain, are stopped: (epoch, steps).
        alike: whether other numbers of workers train alike.
        features, labels, map, shuffle, window, validation: of the data.
        execution: steps an execution.
    """

    build: object
    rows: int = 205
    batch: int = 20
    every: str = "3 steps"
    stops: tuple = ((1, 5), (1, 8), (2, 4))
    alike: bool = True
    features: object = dataclasses.field(default_factory=lambda: FEATURES)
    labels: object = "y"
    map: object = None
    shuffle: str = "full"
    window: int = 60
    validation: bool = True
    execution: int | str = 1
    callbacks: object = lambda: []


def table(rows, seed=0):
    random = np.random.default_rng(seed)
    columns = {name: random.normal(size=rows) for name in FEATURES}
    columns["y"] = (columns["x0"] > 0).astype(int) + 2 * (columns["x1"] > 0.3)
    columns["tokens"] = pa.array([[1 + i % 19] * (1 + i % 7) for i in range(rows)], pa.list_(pa.int64()))
    return pa.table(columns)


def stored(rows, seed=0):
    whole = table(rows, seed)
    cuts = [0, rows // 7, rows // 2, rows]
    blocks = [whole.slice(a, b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
    return StoredDataset(blocks, [len(b) for b in blocks], whole.column_names)


class Stored(Session):
    """The run around a training, in a folder."""

    def __init__(self, place: Place, begins: str | None, kept: str | None):
        super().__init__(place.rank, place.world)
        self._begins, self._kept, self.reports, self.saves = begins, kept, [], kept is not None

    @contextlib.contextmanager
    def checkpoint(self):
        if self._begins is not None:
            checkpoint.check_folder(self._begins)
        yield self._begins

    def report(self, metrics, moment, keep=False):
        self.reports.append(metrics)

    def save_step(self, name, model, parts, writers=1):
        folder = os.path.join(self._kept, name)
        os.makedirs(folder)
        checkpoint.write(folder, model, parts, 3)


def newest(folder: str, before: float = np.inf) -> str:
    """The last checkpoint in a folder, of those of fewer steps than `before`."""
    return os.path.join(folder, max(name for name in os.listdir(folder) if step_folders.step_of_folder(name) < before))


def train(
    place: Place,
    case: Case,
    begins: str | None = None,
    kept: str | None = None,
    stop: tuple | None = None,
    fewest: int | None = None,
):
    """What a training gives; None for one that was stopped."""
    models, counts = [], Counts()

    def build(config):
        models.append(case.build())
        return models[-1]

    def callbacks(config):
        return [counts, *case.callbacks(), *([Stop(*stop)] if stop else [])]

    session = Stored(place, begins, kept)
    datasets = {"train": stored(case.rows)} | ({"validation": stored(41, 1)} if case.validation else {})
    task = TrainJob(
        build_model=build,
        callbacks=callbacks,
        config={"batch_size": case.batch, "epochs": 3},
        batch=BatchSpec.parsed(case.features, case.labels, None, case.map),
        datasets=datasets,
        sampling=Sampling(global_batch=case.batch, seed=5, shuffle=case.shuffle, window=case.window),
        steps_per_execution=case.execution,
        board=None,
        checkpoint_every=parse_interval(case.every if kept else "epoch"),
        fewest=fewest,
    )
    try:
        fit.train(task, session)
    except Stopped:
        return None
    (model,) = models
    out = {f"w{i}": np.asarray(v) for i, v in enumerate(model.weights)}
    for name, optimizer in model_optimizers.optimizers_of(model).items():
        out |= {f"{name}{i}": np.asarray(v) for i, v in enumerate(optimizer.variables)}
    # a History begins with what a checkpoint knows; reports with what comes
    for name, values in model.history.history.items():
        out[f"h:{name}"] = np.asarray(values, np.float64)
    last = session.reports[-1]
    out |= {f"r:{name}": np.asarray(value, np.float64) for name, value in last.items()}
    return out | {"n:last": np.asarray(counts.notes)}


def shared(place: Place, case: str, world, number: int) -> str:
    """Where the checkpoints of a number of workers, or of the devices of one, are."""
    kind = "mirrored" if place.folder.endswith("mirrored") else world
    return os.path.join(os.path.dirname(place.folder), f"{case}_{kind}_{number}")


def quiet(place: Place, name: str):
    return train(place, CASES[name], kept=shared(place, name, place.world, _QUIET))


def stopped(place: Place, name: str):
    case = CASES[name]
    assert train(place, case, kept=shared(place, name, place.world, _STOPPED), stop=case.stops[0]) is None
    return {}


def left(place: Place, name: str, world) -> str:
    """Returns the checkpoint after which a training was stopped first, or would have been."""
    if name in STOPPED:
        return newest(shared(place, name, world, _STOPPED))
    epoch, step = CASES[name].stops[0]
    before = epoch * -(-CASES[name].rows // CASES[name].batch) + step
    return newest(shared(place, name, world, _QUIET), before)


def resumed(place: Place, name: str):
    begins = left(place, name, place.world)
    return train(place, CASES[name], begins=begins, kept=shared(place, name, place.world, _RESUMED))


def chain(place: Place, name: str, link: int):
    case, (_, before) = CASES[name], CHAIN[link]
    begins = newest(shared(place, name, before, link - 1)) if link > 1 else left(place, name, before)
    stop = case.stops[link] if link < len(case.stops) else None
    out = train(place, case, begins=begins, kept=shared(place, name, place.world, link), stop=stop)
    assert (out is None) == (stop is not None)
    return out or {}


def reordered(place: Place, name: str):
    """Resumes with other batches and metrics than those of the checkpoint: the epoch begins again."""
    case = dataclasses.replace(CASES[name], batch=25, every="epoch")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = train(place, case, begins=left(place, name, place.world))
    messages = [str(w.message) for w in caught if "restarts, with weights" in str(w.message)]
    assert len(messages) == 1 and "have seen 4 of its steps" in messages[0], messages
    assert "(batch_size 25, was 20)" in messages[0], messages
    return {"epochs": out["n:last"][3:], "seen": out["n:last"][1], "steps": out["optimizer0"]}


def scaled(place: Place, name: str):
    """Resumes with the batch, and the rate, of two workers where they were those of one, in an epoch of which 80 rows
    were taken: after these, with a step of the 10 that fill no whole one, all of which are the second worker's."""
    case = dataclasses.replace(CASES[name], batch=15, every="epoch", callbacks=list)
    begins = left(place, name, place.world)
    out = train(place, case, begins=begins, fewest=1)
    model = keras.saving.load_model(os.path.join(begins, "model.keras"))
    model.optimizer.learning_rate = 2 * float(model.optimizer.learning_rate)
    made, rows = int(model.optimizer.iterations), table(case.rows).to_pandas()
    assert made == 15
    for epoch, starts in ((1, [80, *range(90, 205, 30)]), (2, range(0, 205, 30))):
        order = Sampling(global_batch=30, seed=5).sampler(stored(case.rows).rows).epoch(epoch)
        numbers = order.row_numbers(order.positions(0))
        for start, stop in itertools.pairwise([*starts, 205]):
            part = rows.iloc[numbers[start:stop]]
            model.train_on_batch(part[FEATURES].to_numpy("float32"), part["y"].to_numpy())
    found = {f"w{i}": np.asarray(v) - out[f"w{i}"] for i, v in enumerate(model.weights)}
    return found | {f"o{i}": np.asarray(v) - out[f"optimizer{i}"] for i, v in enumerate(model.optimizer.variables)}


def remeasured(place: Place, name: str):
    """Resumes with metrics that the checkpoint does not know: they count from here on."""
    case = dataclasses.replace(
        CASES[name], build=mlp(metrics=lambda: ["sparse_categorical_crossentropy"]), every="epoch"
    )
    begins = left(place, name, place.world)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = train(place, case, begins=begins)
    messages = [str(w.message) for w in caught if "count the steps after its first 4 alone" in str(w.message)]
    assert len(messages) == 1, messages
    return {key: value for key, value in out.items() if key.startswith("w")}


def mlp(optimizer=lambda: keras.optimizers.Adam(0.01), dropout=0.0, metrics=None, norm=None, **kwargs):
    def build():
        inputs = [keras.Input((6,)), layers.Dense(16, "relu")]
        model = keras.Sequential(
            [*inputs, *(norm() if norm else []), layers.Dropout(dropout), layers.Dense(4, "softmax")]
        )
        watched = metrics() if metrics else ["accuracy"]
        model.compile(optimizer(), "sparse_categorical_crossentropy", metrics=watched, **kwargs)
        return model

    return build


def renewed(build, features=None):
    """A builder of one model that is as new each time: a process trains it again without a trace of TensorFlow's.

    For cases whose variables are all there before the first step; what is stopped and restored has a new model.
    """

    @functools.cache
    def made():
        model = build()
        model_optimizers.build(
            model, (np.zeros((2, 6), "float32") if features is None else features, np.zeros(2, "int64"))
        )
        variables = [*model.variables, *model.optimizer.variables]
        return model, [(v, np.asarray(v)) for v in variables]

    def as_new():
        model, values = made()
        assert len(values) == len(model.variables) + len(model.optimizer.variables)
        for variable, value in values:
            variable.assign(value)
        return model

    return as_new


def accumulating():
    return keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.02, 5, 0.9),
        gradient_accumulation_steps=4,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=5,
        global_clipnorm=0.5,
    )


def half():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.9), dynamic_growth_steps=4
        )
        return mlp(lambda: optimizer)()
    finally:
        keras.config.set_dtype_policy(policy)


class Bare(keras.Model):
    """A `train_step` that returns what no metric holds."""

    def __init__(self, metric):
        super().__init__()
        self.hidden, self.head = layers.Dense(8, "relu"), layers.Dense(4)
        self.metric = metric

    @property
    def metrics(self):
        return [self.metric]

    def call(self, x):
        return self.head(self.hidden(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, predicted, from_logits=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.metric.update_state(keras.ops.one_hot(y, 4), keras.ops.softmax(predicted))
        return {"mine": loss}

    def test_step(self, data):
        return {"mine": keras.ops.mean(self(data[0]))}


def bare(metric=lambda: keras.metrics.CategoricalAccuracy(name="right")):
    model = Bare(metric())
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    return model


def late():
    """A metric that gets its variables in the first step."""
    return bare(lambda: keras.metrics.F1Score(average="macro", name="f1"))


def gan():
    model = optimizer_scenarios.DCGAN(
        optimizer_scenarios.dense(8, 1, inputs=6), optimizer_scenarios.dense(8, 6, inputs=2)
    )
    adam = lambda: keras.optimizers.Adam(0.005)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(adam(), adam(), loss, steps_per_execution=3)
    return model


def tokens():
    inputs = keras.Input((None,), dtype="int64")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(20, 6, mask_zero=True)(inputs))
    model = keras.Model(inputs, layers.Dense(4, "softmax")(x))
    model.compile(keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def noisy(features, labels, seeds):
    noise = tf.map_fn(lambda s: tf.random.stateless_normal((6,), s, dtype=features.dtype), seeds, features.dtype)
    return features + 0.1 * noise, labels


def watched():
    return [
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.7, patience=1, min_delta=10),
        keras.callbacks.EarlyStopping("val_loss", patience=9),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        Halve(),
    ]


PLAIN = renewed(mlp())
CASES = {
    "plain": Case(mlp(), callbacks=watched),
    "dropout": Case(renewed(mlp(dropout=0.3)), alike=False),
    "accumulation": Case(
        renewed(mlp(accumulating)), rows=371, batch=7, every="9 steps", stops=((1, 30), (1, 50), (2, 11))
    ),
    "long executions": Case(
        renewed(mlp(steps_per_execution=7)), rows=1000, execution=7, every="10 steps", stops=((1, 21), (1, 42), (2, 14))
    ),
    "float16": Case(renewed(half), alike=False),
    "gan": Case(gan, features=FEATURES[:2], labels=FEATURES, validation=False, every="7 steps", batch=6),
    "bare": Case(late, validation=False),
    "last step": Case(bare, every="11 steps", stops=((0, np.inf), (1, np.inf), (2, np.inf))),
    "window": Case(PLAIN, shuffle="window", map=noisy),
    "bucketed": Case(renewed(tokens, np.ones((2, 7), "int64")), features=Column("tokens", pad="batch", bucket=True)),
    "synchronized": Case(renewed(mlp(norm=lambda: [layers.BatchNormalization(synchronized=True)]))),
    "own rows": Case(renewed(mlp(norm=lambda: [layers.BatchNormalization()])), alike=False),
    "local steps": Case(
        renewed(mlp(lambda: keras.optimizers.SGD(0.05, momentum=0.9))),
        every="3 steps",
        execution=2,
        stops=((1, 8),),
        alike=False,
    ),
    "by time": Case(PLAIN, every="0.001 s"),
}
STAGES = {
    "reordered": reordered,
    "scaled": scaled,
    "remeasured": remeasured,
    "quiet": quiet,
    "stopped": stopped,
    "resumed": resumed,
}
STAGES |= {f"chain{i}": functools.partial(chain, link=i) for i in range(1, len(CHAIN))}
SCENARIOS = {
    f"{name}:{stage}": functools.partial(function, name=name) for name in CASES for stage, function in STAGES.items()
}
