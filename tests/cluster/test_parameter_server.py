"""Parameter servers on a real Ray cluster: what they compute, where rows are stored, and what a death does."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from ray.train import FailureConfig, RunConfig, ScalingConfig

import raytf
from tests.cluster import models, test_trainer

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


def table_model(config):
    """A float64 classifier of six numbers and a token."""
    import keras
    from keras import layers

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")  # another model of this process may have asked for it before
    numbers, token = keras.Input((6,), name="numbers"), keras.Input((), dtype="int64", name="token")
    x = layers.Concatenate()([layers.Dense(8, "relu")(numbers), layers.Embedding(301, 4)(token)])
    model = keras.Model(
        {"numbers": numbers, "token": token}, layers.Dense(4, "softmax")(layers.BatchNormalization()(x))
    )
    optimizer = keras.optimizers.Adam(config.get("learning_rate", 0.01))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy", "sparse_categorical_accuracy"])
    return model


def thirds(shape, dtype):
    return [3 if shape[0] == 301 else 1, *[1] * (len(shape) - 1)]


def trainer(tmp_path, name, *, workers=2, failures=0, build=table_model, **options):
    import pyarrow as pa
    import ray

    def dataset(count, seed):
        table = pa.table(models.rows(count, seed))
        token = np.random.default_rng(seed).integers(0, 301, count)
        return ray.data.from_arrow(table.append_column("token", pa.array(token)))

    usual = {
        "config": {"batch_size": 10, "epochs": 3},
        "datasets": {"train": dataset(97, 0), "validation": dataset(33, 1)},
        "features": {"numbers": models.FEATURES, "token": "token"},
        "labels": "label",
    }
    return raytf.KerasTrainer(
        build,
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(
            name=name, storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=failures)
        ),
        progress=False,
        **(usual | options),
    )


@pytest.fixture(scope="module")
def alone(ray_cluster, tmp_path_factory):
    """The result of one process without parameter servers."""
    return trainer(tmp_path_factory.mktemp("alone"), "alone", workers=0).fit()


def test_one_worker_makes_the_steps_of_one_process(tmp_path, alone):
    """Without others there is nothing asynchronous: weights, slots, statistics and metrics are those of `fit`."""
    served = trainer(
        tmp_path, "served", workers=1, strategy="parameter_server", num_ps=3, variable_partitioner=thirds
    ).fit()
    one, other = raytf.load_model(alone), raytf.load_model(served)
    for left, right in zip(other.variables, one.variables, strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-9, err_msg=right.path)
    for left, right in zip(other.optimizer.variables, one.optimizer.variables, strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-9, err_msg=right.path)
    assert list(served.metrics_dataframe) == list(alone.metrics_dataframe)
    np.testing.assert_allclose(served.metrics_dataframe, alone.metrics_dataframe, rtol=0, atol=1e-9)
    noted = [json.loads(line) for line in (tmp_path / "served/figures/worker_0.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line["steps"], line["input_wait"]) for line in noted] == [
        (1, 10, None),
        (2, 10, None),
        (3, 10, None),
    ]
    assert list((tmp_path / "served/tensorboard/system").glob("events*"))


def halves(shape, dtype):
    """Cuts each kernel in two."""
    return [2 if len(shape) > 1 else 1, *[1] * (len(shape) - 1)]


def test_one_worker_with_servers_equals_two_workers_without(tmp_path):
    undisturbed = test_trainer.trainer(tmp_path / "undisturbed", shuffle="window").fit()
    served = test_trainer.trainer(
        tmp_path / "served", 1, shuffle="window", strategy="parameter_server", num_ps=2, variable_partitioner=halves
    ).fit()
    test_trainer.assert_equal(undisturbed, served)


def test_dead_worker_is_replaced_while_the_others_continue(tmp_path):
    """Every step is made, and the last epoch's work is done by the one that came for the dead."""

    def callbacks(config):
        import keras

        from raytf.runtime.roles import Task
        from raytf.worker import context

        class Kill(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                if epoch in (1, 2):
                    context.servers().kill(Task("worker", epoch - 1))

        return [Kill()]

    options = {"strategy": "parameter_server", "num_ps": 1, "config": {"batch_size": 4, "epochs": 4}}
    result = trainer(tmp_path, "killed", callbacks=callbacks, **options).fit()
    history = result.metrics_dataframe
    assert list(history["epoch"]) == [1, 2, 3, 4] and history["loss"].iloc[-1] < history["loss"].iloc[0]
    # a step that a worker had made when it died, but not reported, is made again
    steps = int(raytf.load_model(result).optimizer.iterations)
    assert 4 * 25 <= steps <= 4 * 25 + 2 * 3


def test_a_dead_server_ends_in_a_restore_and_the_next_one_in_an_error(tmp_path, alone):
    """It dies after step 26, in the third epoch, of which the coordinator holds step 24 in memory: the epoch is that
    of an undisturbed run. It dies again before the fourth."""
    folder = str(tmp_path)

    def callbacks(config):
        import keras
        import tensorflow as tf

        from raytf.runtime.roles import Task
        from raytf.worker import context

        class Kill(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                if epoch == 2:
                    with open(os.path.join(folder, "begun"), "a") as file:
                        file.write(f"{int(self.model.optimizer.iterations)} ")
                    self.results, self.model.get_metrics_result = self.model.get_metrics_result, self.looked_at
                    self.looks = 0
                elif epoch == 3:
                    self.kill("killed_3")

            def looked_at(self):
                """As a copy is made, and before that, once its steps are: with 24 steps here after step 26, too."""
                if tf.executing_eagerly() and int(self.model.optimizer.iterations) == 24:
                    self.looks += 1
                    if self.looks == 2:
                        self.kill("killed_2")
                return self.results()

            def kill(self, marker):
                marker, servers = os.path.join(folder, marker), context.servers()
                if not os.path.exists(marker):
                    open(marker, "w").close()
                    servers.kill(Task("ps", 0))
                    assert servers.changed.wait(60)

            def on_epoch_end(self, epoch, logs=None):
                if epoch == 2:
                    np.savez(os.path.join(folder, "third.npz"), *self.model.get_weights())

        return [Kill()]

    options = {"strategy": "parameter_server", "num_ps": 1, "config": {"batch_size": 10, "epochs": 4}}
    kept = {"checkpoint_every": "epoch", "memory_every": "2 steps"}
    lost = (
        "ps 0 was lost, and with it the variables that it held. Other servers get them from the checkpoint of step 30"
    )
    with pytest.raises(raytf.errors.TrainingError, match=lost):
        trainer(tmp_path, "lost", workers=1, failures=1, callbacks=callbacks, **kept, **options).fit()
    assert (tmp_path / "begun").read_text().split() == ["20", "24"], "the second time from the coordinator's memory"
    assert sorted(path.name for path in tmp_path.glob("killed_*")) == ["killed_2", "killed_3"]
    with np.load(tmp_path / "third.npz") as third:
        found = [third[name] for name in third.files]
    for left, right in zip(found, raytf.load_model(alone).get_weights(), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-9)


def sums_model(config):
    """A regression on the numbers of rows, with metrics that are exact: each row counts, and counts once.

    They are looked at after each checkpoint: after that of step 36 the coordinator is killed, once 32 is saved.
    """
    import pathlib
    import signal
    import time

    import keras
    import tensorflow as tf

    keras.config.set_floatx("float64")
    place = pathlib.Path(config["place"])
    killed, kept = place.with_name("killed"), place / "step_000000000032" / "manifest.json"

    class Sum(keras.metrics.Metric):
        def __init__(self, power):
            super().__init__(name=f"sum_{power}", dtype="float64")
            self.power, self.total = power, self.add_weight(name="total", initializer="zeros", dtype="float64")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.total.assign_add(keras.ops.sum(keras.ops.cast(y_true, "float64") ** self.power))

        def result(self):
            behind = tf.executing_eagerly() and place.with_name("second").exists() and self.total.value >= 44
            if behind and self.power == 0 and not killed.exists():
                killed.touch()
                while not kept.exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            return self.total.value + 0.0

    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-6), "mse", metrics=[Sum(0), Sum(1), Sum(2)])
    return model


def disturbed(config):
    """Returns callbacks that note when the second epoch begins, and stop the run in the third one."""
    import pathlib

    import keras

    from raytf.worker import stop

    place = pathlib.Path(config["place"])

    class Disturb(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            marker = place.with_name(["first", "second", "third"][epoch])
            if epoch == 2 and not marker.exists():
                stop.stop_barrier.stop_after(stop.stop_barrier.request(stop.DRAIN))
            marker.touch()

    return [Disturb()]


def test_within_an_epoch_every_row_counts_once(tmp_path):
    """25 steps an epoch, a checkpoint after every fourth. No row is lost and none is used twice: not in the epoch in
    which the coordinator is killed, not in that in which the run is stopped and another one resumes."""
    import pyarrow as pa
    import ray

    table = pa.table(models.rows(97, 0)).append_column("number", pa.array(np.arange(97.0)))
    made = trainer(
        tmp_path,
        "counted",
        failures=1,
        build=sums_model,
        callbacks=disturbed,
        strategy="parameter_server",
        num_ps=2,
        checkpoint_every="4 steps",
        config={"batch_size": 4, "epochs": 3, "place": str(tmp_path / "counted")},
        datasets={"train": ray.data.from_arrow(table)},
        features=models.FEATURES,
        labels="number",
    )
    with pytest.raises(raytf.StoppedError, match="a node that it cannot leave is drained.* of epoch 3") as caught:
        made.fit()
    assert caught.value.code == 143 and 2 * 25 < caught.value.step < 3 * 25 and (tmp_path / "killed").exists()
    result = made.fit()
    history = result.metrics_dataframe
    for power in range(3):
        assert set(history[f"sum_{power}"]) == {float(np.sum(np.arange(97.0) ** power))}
    assert int(raytf.load_model(result).optimizer.iterations) == 3 * 25


def _where(config):
    """A loop of a TensorflowTrainer, on the coordinator."""
    import tensorflow as tf

    from raytf.parameter_server.remote_model import RemoteModel

    strategy = raytf.get_strategy()
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(min_shard_bytes=4 << 10, max_shards=3)
    model = table_model({})
    remote = RemoteModel(model, strategy, partitioner)
    table = next(v for v in model.trainable_variables if v.shape == (301, 4))
    found = {f"part{i}": f"{p.value.device} {p.shape[0]}" for i, p in enumerate(remote.parts[id(table)])}
    with open(config["file"], "w") as file:
        json.dump(found, file)


def test_table_is_sharded_over_three_servers(tmp_path):
    file = tmp_path / "parts.json"
    raytf.TensorflowTrainer(
        _where,
        train_loop_config={"file": str(file)},
        strategy="parameter_server",
        num_ps=3,
        scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=str(tmp_path)),
    ).fit()
    parts = list(json.loads(file.read_text()).values())
    assert {part.partition("/replica")[2].split("/")[1] for part in parts} == {"task:0", "task:1", "task:2"}, parts
    assert sorted(part.split()[-1] for part in parts) == ["100", "100", "101"]
    assert all("/job:ps" in part for part in parts)
