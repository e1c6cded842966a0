"""`raytf.fit`, `evaluate` and `predict` against Keras' own here, in float64, with classes that no worker can import."""

from __future__ import annotations

import os
import pickle
import re
import signal
import threading
import time

import numpy as np
import psutil
import pytest

import raytf
from raytf.errors import ConfigError, TrainingError
from raytf.events import Kind
from raytf.fitting import call, warm
from raytf.train.worker_group import WorkerGroup
from raytf.worker import figures
from tests.cluster.test_graceful_stop import driver_of, finished, steps, told, weights
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("ray_cluster")
ROWS, BATCH = 37, 10
RNG = np.random.default_rng(0)
X = {"a": RNG.normal(size=(ROWS, 4)), "b": RNG.normal(size=(ROWS, 3))}
Y = {"p": RNG.normal(size=(ROWS, 1)), "q": RNG.integers(0, 3, ROWS)}
WEIGHTS = RNG.uniform(0, 2, ROWS)


def make():
    """Two inputs, two outputs, a layer and a loss of this function alone, and an optimizer with a memory."""
    import keras

    class Scale(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, x):
            return x * self.scale

    use(keras, "float64")
    keras.utils.set_random_seed(1)
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    x = keras.layers.Dense(6, "tanh")(keras.layers.Concatenate()([Scale()(a), b]))
    outputs = {"p": keras.layers.Dense(1, name="p")(x), "q": keras.layers.Dense(3, "softmax", name="q")(x)}
    model = keras.Model({"a": a, "b": b}, outputs)
    losses = {"p": lambda true, predicted: (true - predicted) ** 2, "q": "sparse_categorical_crossentropy"}
    model.compile(keras.optimizers.Adam(0.01, clipnorm=1.0), losses, metrics={"q": ["accuracy"]})
    return model


@pytest.fixture(scope="module", autouse=True)
def no_workers_stay():
    yield
    warm.end_group()


@pytest.fixture(autouse=True)
def in_float64(leaves_nothing_behind):
    import keras

    use(keras, "float64")
    yield
    use(keras, "float32")


def use(keras, floats):
    keras.config.set_floatx(floats)
    keras.config.set_dtype_policy(floats)


def stopping(keras):
    return keras.callbacks.EarlyStopping(monitor="loss", patience=9)


ARGUMENTS = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "sample_weight": WEIGHTS}


@pytest.fixture(scope="module")
def alone():
    """Keras' own: two epochs and a third, without Ray."""
    import keras

    model = make()
    calls = [
        model.fit(X, Y, epochs=epochs, initial_epoch=first, validation_data=(X, Y), **ARGUMENTS)
        for first, epochs in ((0, 2), (2, 3))
    ]
    yield model, calls
    use(keras, "float32")


@pytest.fixture(scope="module")
def trained(ray_cluster):
    """The same with two workers; where each of the calls ran."""
    import keras

    model, callback, places = make(), stopping(keras), [place(), place()]
    validated = {"validation_data": (X, Y), "num_workers": 2, **ARGUMENTS}
    calls = [raytf.fit(model, X, Y, epochs=2, callbacks=[callback, places[0]], **validated)]
    calls.append(raytf.fit(model, X, Y, epochs=3, initial_epoch=2, callbacks=[places[1]], **validated))
    return model, calls, callback, [one.where for one in places]


def place():
    """A callback that notes the chief's process, and the function that was traced in it."""
    import keras

    class Place(keras.callbacks.Callback):
        where = None

        def on_epoch_end(self, epoch, logs=None):
            self.where = os.getpid(), id(self.model.train_function)

    return Place()


def assert_same(model, other, tolerance=1e-9):
    for left, right in zip(model.weights, other.weights, strict=True):
        np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=0, atol=tolerance)
    for left, right in zip(model.optimizer.variables, other.optimizer.variables, strict=True):
        np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=0, atol=tolerance)


def assert_same_history(history, other):
    assert history.epoch == other.epoch and history.history.keys() == other.history.keys()
    for name, values in other.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=0, atol=1e-9)


def test_callback_may_recompile_the_model_and_the_next_equal_model_begins_as_it_came():
    import keras

    class FineTune(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.compile(keras.optimizers.SGD(0.1), {"p": "mae", "q": "sparse_categorical_crossentropy"})
                self.model.make_train_function(force=True)

    def named_alike():
        keras.utils.clear_session()
        return make()

    alone = named_alike()
    history = alone.fit(X, Y, epochs=2, callbacks=[FineTune()], **ARGUMENTS)
    for model in (named_alike(), named_alike()):
        with pytest.warns(UserWarning, match="The state of optimizer stays on the workers: a callback has compiled"):
            found = raytf.fit(model, X, Y, epochs=2, callbacks=[FineTune()], num_workers=2, verify=False, **ARGUMENTS)
        for left, right in zip(model.weights, alone.weights, strict=True):
            np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=0, atol=1e-9)
        assert_same_history(found, history)


def test_what_a_training_changes_of_a_models_attributes_does_not_stay_for_the_next_one_that_is_alike():
    import keras

    class Weighted(keras.Model):
        def compute_loss(self, *args, **kwargs):
            return self.share * super().compute_loss(*args, **kwargs)

    class Doubles(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.share *= 2
            self.model.make_train_function(force=True)

    def weighted():
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        model = Weighted(inputs, keras.layers.Dense(1)(inputs))
        model.share = 1.0
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    alone, rows = weighted(), (X["a"], Y["p"])
    history = alone.fit(*rows, epochs=2, callbacks=[Doubles()], **ARGUMENTS)
    for model in (weighted(), weighted()):
        found = raytf.fit(model, *rows, epochs=2, callbacks=[Doubles()], num_workers=2, verify=False, **ARGUMENTS)
        assert_same_history(found, history)


def test_two_calls_with_two_workers_are_what_keras_does(alone, trained):
    model, calls, callback, (first, second) = trained
    assert_same(model, alone[0])
    for left, right in zip(calls, alone[1], strict=True):
        assert_same_history(left, right)
    assert callback.best == calls[0].history["loss"][-1] and callback.model is model
    assert model.history is calls[1]
    assert first == second and first[0] != os.getpid()  # nothing starts, and nothing is traced, for the second call


def test_evaluate_and_predict(alone, trained, tmp_path):
    import ray

    model, keras_model = trained[0], alone[0]
    distributed = raytf.evaluate(model, X, Y, batch_size=BATCH, return_dict=True, num_workers=2)
    its = keras_model.evaluate(X, Y, batch_size=BATCH, return_dict=True, verbose=0)
    assert distributed.keys() == its.keys()
    np.testing.assert_allclose(list(distributed.values()), list(its.values()), atol=1e-9)
    listed = raytf.evaluate(model, X, Y, batch_size=BATCH, num_workers=2)
    np.testing.assert_allclose(listed, keras_model.evaluate(X, Y, batch_size=BATCH, verbose=0), atol=1e-9)
    expected = keras_model.predict(X, verbose=0)
    for batch in (2, 7, 64):
        found = raytf.predict(model, X, batch_size=batch, num_workers=2)
        for name in ("p", "q"):
            np.testing.assert_allclose(found[name], expected[name], atol=1e-12)
    rows = ray.data.from_items([{"a": a, "b": b} for a, b in zip(X["a"], X["b"], strict=True)])
    rows.write_parquet(str(tmp_path))
    for source in (rows, str(tmp_path)):
        found = raytf.predict(model, source, features={"a": "a", "b": "b"}, batch_size=BATCH, num_workers=2)
        assert isinstance(found, ray.data.Dataset) and found.count() == ROWS
        table = found.take_all()
        for name in ("p", "q"):
            np.testing.assert_allclose(np.stack([row[name] for row in table]), expected[name], atol=1e-12)


def test_other_numbers_of_workers_shuffle_alike(trained):
    """One worker, then three; fewer rows than a batch; workers of another number replace those that were kept."""
    import keras

    found = []
    for workers in (1, 3):
        model = make()
        keras.utils.set_random_seed(5)
        raytf.fit(model, X, Y, batch_size=BATCH, epochs=2, verbose=0, num_workers=workers)
        found.append(model)
    assert_same(*found)
    model, keras_model = make(), make()
    few = ({name: part[:7] for name, part in X.items()}, {name: part[:7] for name, part in Y.items()})
    raytf.fit(model, *few, shuffle=False, verbose=0, num_workers=3)
    keras_model.fit(*few, shuffle=False, verbose=0)
    assert_same(model, keras_model)


def fails_at(epoch_, marker=None):
    """A callback that raises as that epoch begins, or notes its process and waits."""
    import keras

    class At(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch != epoch_:
                return
            if marker is None:
                raise ValueError("as it was told to")
            with open(f"{marker}/{os.getpid()}", "w"):
                pass
            time.sleep(60)

    return At()


def test_an_error_and_an_interrupt_leave_the_last_epoch(alone, tmp_path):
    two = make()
    two.fit(X, Y, epochs=2, **ARGUMENTS)
    model = make()
    with pytest.raises(TrainingError, match="as it was told to"):
        raytf.fit(model, X, Y, epochs=3, callbacks=[fails_at(2)], num_workers=2, **ARGUMENTS)
    assert_same(model, two)
    model, at = make(), []
    # a shell that runs pytest in the background sets it to ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt():
        until(lambda: len(os.listdir(tmp_path)) == 2)
        at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt) as stopped:
            raytf.fit(model, X, Y, epochs=3, callbacks=[fails_at(2, str(tmp_path))], num_workers=2, **ARGUMENTS)
    finally:
        signal.signal(signal.SIGINT, before)
    assert isinstance(stopped.value, raytf.StoppedError) and stopped.value.code == 130
    processes = [psutil.Process(int(pid)) for pid in os.listdir(tmp_path) if psutil.pid_exists(int(pid))]
    _, alive = psutil.wait_procs(processes, timeout=max(0.1, 30 - (time.monotonic() - at[0])))
    assert not alive
    assert_same(model, two)


def test_weights_come_once_whatever_the_number_of_epochs(monkeypatch):
    """A worker's report of an epoch is not of a model's size; the counting changes nothing of it."""
    results, go_on = [], WorkerGroup.continue_trial

    def counted(group, why=None):
        reports = go_on(group, why)
        results.extend(reports or ())
        return reports

    monkeypatch.setattr(WorkerGroup, "continue_trial", counted)
    raytf.fit(make(), X, Y, epochs=3, num_workers=2, **ARGUMENTS)
    assert sum(bool(report.get("values")) for report in results) == 1 and results[-2]["values"]
    assert max(len(pickle.dumps(report)) for report in results if not report.get("ended")) < 1000


def test_the_death_of_a_chief_leaves_the_last_epoch(alone, monkeypatch):
    """The other worker has it, too."""
    two = make()
    two.fit(X, Y, epochs=2, **ARGUMENTS)
    model = make()
    monkeypatch.setattr(call, "_MAX_RECOVERIES", 0)
    with pytest.raises(TrainingError, match="could not be replaced|was lost"):
        raytf.fit(model, X, Y, epochs=3, callbacks=[dies_at(2)], num_workers=2, **ARGUMENTS)
    assert_same(model, two)


def dies_at(epoch):
    import keras

    class Dies(keras.callbacks.Callback):
        raytf_local_batches = True

        def on_epoch_begin(self, now, logs=None):
            import ray.train

            if now == epoch and ray.train.get_context().get_world_rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return Dies()


KEPT = """
import os
import sys

import keras
import numpy as np
import ray

import raytf
import raytf.testing
from tests.cluster import ended_job, models

folder, name = sys.argv[1:]
ray.init(log_to_driver=False)
keras.utils.set_random_seed(3)
model = models.mlp({"dropout": 0.2})
rows = models.rows()
x = np.stack([rows[column] for column in models.FEATURES], 1)
place = f"{folder}/{name}"
kills = [models.kill_once(f"{place}_killed_{rank}", rank, 1, 9 - rank, told=rank == 0) for rank in (0, 1)]
cut = raytf.testing.FaultPlan([raytf.testing.CutOff(rank=0, epoch=2, step=5)] if name == "run" else [])
os.makedirs(f"{place}_faults", exist_ok=True)
callbacks = [*kills, *ended_job.noting({"place": place, "workers": 2}), cut.callback(f"{place}_faults")]
history = raytf.fit(
    model, x, rows["label"], batch_size=7, epochs=3, verbose=0, callbacks=callbacks, num_workers=2,
    name=name, storage=folder, checkpoint_every="4 steps",
)
assert history.epoch == [0, 1, 2] and len(history.history["loss"]) == 3
np.savez(f"{place}.npz", *model.get_weights())
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_named_call_resumes_at_the_next_step(tmp_path):
    """14 steps an epoch. SIGTERM comes when worker 0 is in step 20, for which it waits for worker 1; the same call
    resumes after it. Worker 1 is killed before step 23, and the chief in `on_train_batch_end` of step 24, where
    callbacks look at batches: both are replaced. In step 5 of the last epoch both live, and lose each other."""

    def started(name):
        return driver_of("-c", KEPT, tmp_path, name)

    for rank in (0, 1):
        (tmp_path / f"quiet_killed_{rank}").touch()
    quiet = started("quiet")
    finished(quiet)
    (tmp_path / "run_hold").write_text("1 4")
    driver = started("run")
    until(lambda: all(steps(tmp_path, "run", rank)[-1:] == [(1, 4)] for rank in (0, 1)), driver)
    driver.send_signal(signal.SIGTERM)
    assert "The same call with name='run' resumes" in finished(driver, 143)
    finished(started("run"))
    found = raytf.run_events(tmp_path / "run")
    assert [event.ranks for event in found if event.kind is Kind.WORKER_REPLACED] == [(1,), (0,)]
    assert Kind.WORKERS_RECONNECTED in {event.kind for event in found}
    everything = [(epoch, batch) for epoch in range(3) for batch in range(14)]
    assert told(tmp_path, "run", 0) == told(tmp_path, "run", 1) == everything
    for left, right in zip(*(weights(tmp_path, name) for name in ("run", "quiet")), strict=True):
        np.testing.assert_array_equal(left, right)
    assert not list(tmp_path.glob("*/fit"))


def test_idle_workers_are_released_for_other_requests(trained):
    """To a task that needs every CPU, of which raytf knows nothing."""
    import ray

    model = make()
    raytf.fit(model, X, Y, num_workers=2, **ARGUMENTS)
    assert warm.has_group()
    task = ray.remote(num_cpus=4)(lambda: "ran")
    assert ray.get(task.remote(), timeout=60) == "ran"
    assert not warm.has_group()


def tags_of(folder) -> set[str]:
    """What events of a folder of TensorBoard show."""
    import tensorflow as tf

    records = [r for file in folder.rglob("events*") for r in tf.data.TFRecordDataset(os.fspath(file))]
    return {value.tag for r in records for value in tf.compat.v1.Event.FromString(r.numpy()).summary.value}


def test_tables_with_columns_and_many_workers(alone, tmp_path, capsys):
    """A frame and a dataset with columns; figures, folder and result of a call; what the cluster cannot hold."""
    import keras
    import pandas as pd
    import ray

    def build():
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    frame = pd.DataFrame({"u": X["a"][:, 0], "v": X["a"][:, 1], "y": Y["p"][:, 0], "w": WEIGHTS})
    named = {"features": ["u", "v"], "labels": "y", "sample_weight": "w", "shuffle": False, "verbose": 0}
    found = []
    board = keras.callbacks.TensorBoard(os.fspath(tmp_path / "events"), write_graph=False)
    options = {"callbacks": [board], "name": "told", "storage": tmp_path, "verbose": 2}
    for source, more in ((frame, options), (ray.data.from_pandas(frame), {})):
        model = build()
        raytf.fit(model, source, batch_size=BATCH, validation_data=source, num_workers=2, **named | more)
        found.append(model)
    assert tags_of(tmp_path / "events" / "system") == set(figures._SHOWN)
    out = capsys.readouterr().out
    assert f"run     {tmp_path}/told\n" in out and re.search(r"^result  epoch 1  .*loss \d", out, re.MULTILINE), out
    keras_model = build()
    x = frame[["u", "v"]].to_numpy("float32").astype("float64")
    keras_model.fit(x, frame["y"].to_numpy(), sample_weight=WEIGHTS, batch_size=BATCH, shuffle=False, verbose=0)
    for model in found:
        np.testing.assert_allclose(model.get_weights()[0], keras_model.get_weights()[0], atol=1e-7)
    with pytest.raises(ConfigError, match="room for 4"):
        raytf.fit(build(), frame, batch_size=BATCH, num_workers=5, **named)


def test_labels_of_another_rank_for_a_model_like_the_one_that_stays():
    """A graph of both would know no rank; a fresh model is like the last one where names and seeds begin again."""
    import keras
    import tensorflow as tf

    class SeesRanks(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = (1 + 0.1 * len(y.shape)) * self.compute_loss(x, y, self(x, training=True))
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": loss}

    x, y = np.random.default_rng(0).random((30, 5)), np.random.default_rng(1).random((30, 1))
    for labels in (y[:, 0], y):
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        inputs = keras.Input((5,))
        model = SeesRanks(inputs, keras.layers.Dense(1)(inputs))
        model.compile("adam", "mse")
        plain = keras.models.clone_model(model)
        plain.compile("adam", "mse")
        plain.set_weights(model.get_weights())
        options = {"batch_size": 7, "shuffle": False, "verbose": 0}
        raytf.fit(model, x, labels, num_workers=2, verify=False, **options)
        plain.fit(x, labels, **options)
        for left, right in zip(model.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(left, right, atol=1e-6)
