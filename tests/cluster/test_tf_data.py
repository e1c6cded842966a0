"""`raytf.TFData` on a real Ray: a tf.data function trains alike on any number of workers, resumes, and is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
from ray import tune
from ray.train import FailureConfig, RunConfig, ScalingConfig

import raytf
from raytf.events import Kind
from tests.cluster import models

pytestmark = pytest.mark.usefixtures("ray_cluster")
CONFIG = {"batch_size": 25, "epochs": 3}


def pairs(rows, seed, classes=3, noise=0.01):
    """A pipeline as users write it: cached, shuffled, augmented, batched, prefetched."""

    def make(context):
        import tensorflow as tf

        random = np.random.default_rng(seed)
        x, y = random.normal(size=(rows, 3)).astype("float32"), random.integers(0, classes, rows)
        data = tf.data.Dataset.from_tensor_slices((x, y)).shard(context.num_shards, context.index)
        data = data.cache().shuffle(40).map(lambda x, y: (x + noise * tf.random.normal([3]), y))
        return data.batch(context.batch).prefetch(tf.data.AUTOTUNE)

    return make


def build(config):
    import keras

    keras.config.set_floatx("float64")
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(8, "tanh"),
            keras.layers.Dense(3, "softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def trainer(tmp_path, workers, name, callbacks=None, failures=0, **options):
    source = options.pop("source", {})
    config = CONFIG | options.pop("config", {})
    return raytf.KerasTrainer(
        options.pop("build", build),
        datasets=options.pop("datasets", None)
        or {"train": raytf.TFData(pairs(97, 0), **source), "validation": raytf.TFData(pairs(41, 1), **source)},
        config=config,
        callbacks=callbacks,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=name, storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=failures)
        ),
        verify=options.pop("verify", False),
        **options,
    )


def kinds(result):
    return [event.kind for event in raytf.run_events(result)]


def assert_equal(one, other):
    for left, right in zip(*(raytf.load_model(result).get_weights() for result in (one, other)), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-9)
    for column in ("loss", "accuracy", "val_loss", "val_accuracy"):
        np.testing.assert_allclose(one.metrics_dataframe[column], other.metrics_dataframe[column], atol=1e-9)


def test_two_workers_one_of_which_dies_train_as_one_does(tmp_path, capfd):
    alone = trainer(tmp_path, 1, "one").fit()
    assert "which takes its part of each batch; resumes at any step" in capfd.readouterr().out

    def kill(config):
        return [models.kill_once(str(tmp_path / "marker"), 1, 1, 2)]

    options = {"tensorflow_config": raytf.TensorflowConfig(heal=False), "checkpoint_every": "1 steps"}
    with pytest.raises(raytf.TrainingError):
        trainer(tmp_path, 2, "resumed", callbacks=kill, **options).fit()
    (tmp_path / "marker").rename(tmp_path / "marker of before")
    capfd.readouterr()
    resumed = trainer(tmp_path, 1, "resumed", **options).fit()
    assert re.search(r"resumed: resuming from step \d+ \(step [12] of epoch 2\)", capfd.readouterr().err)
    assert_equal(alone, resumed)
    together = trainer(tmp_path, 2, "two", callbacks=kill, failures=1).fit()
    assert Kind.WORKER_REPLACED in kinds(together)
    assert_equal(alone, together)
    assert trainer(tmp_path, 1, "two").fit().metrics == together.metrics, "the run has ended"
    with pytest.raises(raytf.ConfigError, match="other operations of datasets"):
        trainer(tmp_path, 1, "two", config={"epochs": 4}, source={"rows": False, "steps_per_epoch": 3}).fit()


def drawn(rows, folder):
    """Batches of Python code, of which nobody knows what it gives another time; notes how often it was asked."""

    def make(context):
        import tensorflow as tf

        def batches():
            with open(f"{folder}/epochs", "a") as file:
                print(context.epoch, file=file)
            random = np.random.default_rng([context.seed, context.epoch])
            for start in range(0, rows, context.batch):
                size = min(context.batch, rows - start)
                yield random.normal(size=(size, 3)).astype("float32"), random.integers(0, 3, size)

        specs = tf.TensorSpec((None, 3), tf.float32), tf.TensorSpec((None,), tf.int64)
        return tf.data.Dataset.from_generator(batches, output_signature=specs)

    return make


@pytest.mark.slow
def test_python_code_resumes_at_an_epoch_and_all_workers_restart(tmp_path, capfd):
    def kill(config):
        return [models.kill_once(str(tmp_path / "marker"), 1, 1, 2)] if "kill" in config else []

    results = []
    for name, config in (("whole", {}), ("killed", {"kill": True})):
        data = {"train": raytf.TFData(drawn(97, tmp_path)), "validation": raytf.TFData(drawn(41, tmp_path))}
        results.append(trainer(tmp_path, 2, name, kill, 1, config=config, datasets=data).fit())
    out = capfd.readouterr().out
    assert "resumes at epochs, and replaces no worker in place, as it may have a state of its own (" in out
    assert [kinds(result).count(Kind.WORKERS_STARTED) for result in results] == [1, 2]
    assert Kind.WORKER_REPLACED not in kinds(results[1])
    assert_equal(*results)


def test_what_cannot_be_trained_on_is_refused_before_workers_start(tmp_path):
    def rows(context):
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((np.zeros((9, 3)), np.zeros(9)))

    def nothing(context):
        return rows(context).take(0).batch(context.batch)

    fine = raytf.TFData(pairs(97, 0))
    for make, message in (
        (rows, "rows=True.*|.*from 'rows', of 'validation'"),
        (nothing, "without a batch; from 'nothing'"),
    ):
        with pytest.raises(raytf.ConfigError, match=message):
            trainer(tmp_path, 2, "refused", datasets={"train": fine, "validation": raytf.TFData(make)}).fit()
    with pytest.raises(raytf.ConfigError, match="Leave it out, and do it in the function"):
        trainer(tmp_path, 2, "refused", features="x")
    with pytest.raises(raytf.ConfigError, match="is not compiled|labels"):
        trainer(tmp_path, 2, "refused", datasets={"train": raytf.TFData(pairs(97, 0, 7))}).fit()


def test_a_plan_shows_it(tmp_path):
    lines = dict(raytf.plan(trainer(tmp_path, 2, "plan")).lines())
    assert lines["steps of an epoch"] == "4" and "resumes at any step" in lines["data"]


@pytest.mark.slow
def test_fit_trains_and_evaluates_on_functions(tmp_path):
    import keras

    keras.utils.set_random_seed(1)
    model = build({})
    history = raytf.fit(
        model,
        raytf.TFData(pairs(97, 0), shards_itself=True),
        batch_size=24,
        epochs=2,
        validation_data=raytf.TFData(pairs(41, 1, noise=0.0)),
        class_weight={0: 1.0, 1: 2.0, 2: 0.5},
        num_workers=2,
        verbose=0,
        name="functions",
        storage=tmp_path,
    )
    assert int(model.optimizer.iterations) == 2 * 5 and len(history.history["val_loss"]) == 2
    found = raytf.evaluate(model, raytf.TFData(pairs(41, 1, noise=0.0)), batch_size=24, num_workers=2, return_dict=True)
    assert abs(found["loss"] - history.history["val_loss"][-1]) < 1e-9


@pytest.mark.slow
def test_a_loop_and_a_sweep(tmp_path):
    def loop(config):
        import ray.train

        raytf.get_strategy()
        rows = raytf.get_dataset("train", batch_size=25, seed=3)
        position = raytf.Position(rows)
        seen = [np.concatenate([y.numpy() for _, y in epoch]).tolist() for epoch in position.epochs(2)]
        assert seen[0] != seen[1] and position.steps == 4
        (tmp_path / f"rows_{ray.train.get_context().get_world_rank()}").write_text(str(len(seen[0])))

    data = {"train": raytf.TFData(pairs(97, 0))}
    scaling = ScalingConfig(num_workers=2)
    run = RunConfig(name="loop", storage_path=str(tmp_path))
    raytf.TensorflowTrainer(loop, datasets=data, scaling_config=scaling, run_config=run).fit()
    assert sum(int((tmp_path / f"rows_{rank}").read_text()) for rank in range(2)) == 97
    tried = trainer(tmp_path, 1, "sweep", config={"epochs": 1})
    grid = raytf.sweep(tried, {"batch_size": tune.grid_search([25, 50])}, metric="val_loss", mode="min")
    assert sorted(one.metrics["epoch"] for one in grid) == [1, 1]


@pytest.mark.slow
def test_evaluator_comparison_and_spare_read_functions_too(tmp_path):
    """An evaluator, a comparison of two workers with one process, and a spare that makes a step ahead."""
    run = {"verify": "error", "failures": 1, "tensorflow_config": raytf.TensorflowConfig(spares=1)}
    result = trainer(tmp_path, 2, "beside", evaluator=True, config={"epochs": 1}, **run).fit()
    assert result.metrics_dataframe["eval_loss"].notna().all()
    local = trainer(tmp_path, 0, "here", config={"epochs": 1}).fit()
    np.testing.assert_allclose(local.metrics["loss"], result.metrics["loss"], atol=1e-9)
