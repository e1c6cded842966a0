"""An argument of another type than the documented one is refused by name, before anything starts."""

from __future__ import annotations

import numpy as np
import pytest
import ray.tune
from ray.train import RunConfig, ScalingConfig

import raytf
from raytf.errors import ConfigError

X, Y = np.zeros((8, 1)), np.zeros(8)


@pytest.fixture(scope="module")
def model():
    import keras

    made = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


def build(config):
    raise AssertionError("no model is built")


DATA = raytf.TFData(build)


def keras_trainer(**changes):
    return raytf.KerasTrainer(build, **{"datasets": {"train": DATA}} | changes)


def tensorflow_trainer(**changes):
    return raytf.TensorflowTrainer(build, **changes)


def sweep(**changes):
    return raytf.sweep(keras_trainer(), {"units": 1}, **changes)


OF_TRAINERS = {
    "a dataset": ({"datasets": DATA}, "datasets must be a dict; received: .*TFData.*train"),
    "names of datasets": ({"datasets": {1: DATA}}, "The keys of datasets must be names; received: 1"),
    "a number of workers": ({"scaling_config": 2}, "scaling_config must be a ray.train.ScalingConfig; received: 2"),
    "a dict of workers": ({"scaling_config": {"num_workers": 2}}, "scaling_config must be .*{'num_workers': 2}"),
    "words of resources": (
        {"scaling_config": ScalingConfig(resources_per_worker={"CPU": "2"})},
        "resources_per_worker must be numbers .*CPU='2'",
    ),
    "no resource": (
        {"scaling_config": ScalingConfig(resources_per_worker={"CPU": 0})},
        "A worker must request a resource of the cluster; received: .*{'CPU': 0}",
    ),
    "a folder": ({"run_config": "runs"}, "run_config must be a ray.train.RunConfig; received: 'runs'"),
    "Tune's": ({"run_config": ray.tune.RunConfig()}, "must be a ray.train.RunConfig; received: .*ray.tune.*RunConfig"),
    "a storage": ({"run_config": RunConfig(storage_path=5)}, "storage_path must be a path or a URI; received: 5"),
    "variables": ({"run_config": RunConfig(worker_runtime_env="A=1")}, "worker_runtime_env must be a dict"),
    "a dict of TensorFlow": ({"tensorflow_config": {"spares": 1}}, "tensorflow_config must be a raytf.Tensorflow"),
    "a validation": ({"validation_config": 5}, "validation_config must be a ray.train.ValidationConfig; received: 5"),
}


@pytest.mark.parametrize("trainer", [keras_trainer, tensorflow_trainer])
@pytest.mark.parametrize("kind", OF_TRAINERS)
def test_both_trainers_refuse(trainer, kind):
    arguments, message = OF_TRAINERS[kind]
    with pytest.raises(ConfigError, match=message):
        trainer(**arguments)


CALLS = {
    "a config": (lambda: keras_trainer(config="epochs=3"), "config must be a dict; received: 'epochs=3'"),
    "a number as config": (lambda: keras_trainer(config=5), "config must be a dict; received: 5"),
    "no datasets": (lambda: keras_trainer(datasets=None), "datasets must hold 'train'"),
    "an evaluator": (lambda: keras_trainer(evaluator="yes"), "evaluator must be True or False; received: 'yes'"),
    "a progress": (lambda: keras_trainer(progress="no"), "progress must be True or False"),
    "no loop": (lambda: raytf.TensorflowTrainer(3), "train_loop_per_worker must be a function; received: 3"),
    "a loop's config": (lambda: tensorflow_trainer(train_loop_config=5), "train_loop_config must be a dict"),
    "a loop's rows": (lambda: tensorflow_trainer(datasets={"train": [1]}), "must be a ray.data.Dataset.*from_items"),
    "a loop's sharding": (lambda: tensorflow_trainer(dataset_config=5), "dataset_config must be a ray.train.DataConf"),
    "no trainer to plan": (lambda: raytf.plan(5), "trainer must be a raytf.KerasTrainer; received: 5"),
    "Train's for a sweep": (lambda: sweep(run_config=RunConfig()), "run_config must be a ray.tune.RunConfig; received"),
    "a sweep's folder": (lambda: sweep(run_config="sweeps"), "run_config must be a ray.tune.RunConfig"),
    "a sweep to resume": (lambda: sweep(resume=5), "resume must be a path or a URI; received: 5"),
    "a number of trials": (lambda: sweep(max_concurrent_trials="2"), "max_concurrent_trials must be an integer"),
    "steps of a report": (lambda: sweep(report_every_steps="100 steps"), "report_every_steps must be an integer"),
    "a search": (lambda: sweep(search_alg=5), "search_alg must be one of random, optuna"),
    "warm": (lambda: sweep(warm="yes"), "warm must be True or False"),
    "a size": (lambda: raytf.Column("x", image=224), "image of a Column must be a tuple of sizes; received: 224"),
    "sizes": (lambda: raytf.Column("x", image=("a", "b", "c")), "A size of a Column's image must be an integer"),
    "a number as column": (lambda: raytf.Column(5), "name of a Column must be a text; received: 5"),
    "a raw shape": (lambda: raytf.Column("x", shape=4, dtype="uint8"), "shape of a Column must be a tuple"),
    "ragged": (lambda: raytf.Column("x", ragged="no"), "ragged of a Column must be True or False"),
    "a text of seconds": (lambda: raytf.TensorflowConfig(hang_timeout_s="10"), "hang_timeout_s must be .*'10'"),
    "a text of bytes": (lambda: raytf.TensorflowConfig(bytes_per_pack="4MB"), "bytes_per_pack must be .*'4MB'"),
    "a text of megabytes": (lambda: raytf.TensorflowConfig(renew_worker_mb="4GB"), "renew_worker_mb must be .*'4GB'"),
    "no first timeout": (lambda: raytf.TensorflowConfig(first_step_timeout_s=None), "first_step_timeout_s must be"),
    "a text of threads": (lambda: raytf.TensorflowConfig(intra_op_threads="2"), "intra_op_threads must be an integer"),
    "a text of a choice": (lambda: raytf.TensorflowConfig(heal="no"), "heal must be True or False; received: 'no'"),
    "a text of a seed": (lambda: raytf.TensorflowConfig(seed="1"), "seed must be an integer"),
    "columns to keep": (lambda: raytf.Predictor("/", keep=5), "keep must be a list of columns' names; received: 5"),
    "a predictor's config": (lambda: raytf.Predictor("/", config=5), "config must be a dict"),
    "a metric": (lambda: raytf.Predictor("/", which="best", metric=5), "metric must be the name of a metric"),
    "a model's config": (lambda: raytf.load_model("/", config="units=3"), "config must be a dict"),
    "a model's function": (lambda: raytf.load_model("/", build_model=5), "build_model must be a function"),
    "a choice of compile": (lambda: raytf.load_model("/", compile="no"), "compile must be True or False"),
    "no run": (lambda: raytf.run_events(None), "run must be the Result of a run.*received: None"),
    "a URI of nothing": (lambda: raytf.run_events("x://y"), "a URI that pyarrow knows; received: 'x://y'"),
    "no result": (lambda: raytf.show_result(5), "takes the Result of a run; received: 5"),
    "a file system": (lambda: raytf.read_tfrecords("/", filesystem=5), "filesystem must be a pyarrow.fs.FileSystem"),
    "a report": (lambda: raytf.ReportCallback("no"), "checkpoint must be True or False"),
}


@pytest.mark.parametrize("kind", CALLS)
def test_refused(kind):
    call, message = CALLS[kind]
    with pytest.raises(ConfigError, match=message):
        call()


OF_MODELS = {
    "workers": (raytf.fit, {"scaling_config": 2}, "scaling_config must be a ray.train.ScalingConfig"),
    "a dict": (raytf.evaluate, {"run_config": {"name": "a"}}, "run_config must be a ray.train.RunConfig"),
    "Tune's": (raytf.predict, {"run_config": ray.tune.RunConfig()}, "run_config must be a ray.train.RunConfig"),
    "a storage": (raytf.fit, {"name": "a", "storage": 5}, "storage must be a path or a URI; received: 5"),
    "verbose": (raytf.evaluate, {"verbose": "x"}, 'verbose must be "auto", 0, 1 or 2'),
    "a matrix": (raytf.predict, {"verbose": X}, 'verbose must be "auto", 0, 1 or 2'),
    "return_dict": (raytf.evaluate, {"return_dict": "yes"}, "return_dict must be True or False"),
}


@pytest.mark.parametrize("kind", OF_MODELS)
def test_refused_for_a_model(model, kind):
    call, arguments, message = OF_MODELS[kind]
    with pytest.raises(ConfigError, match=message):
        call(model, X, *([] if call is raytf.predict else [Y]), **arguments)


def test_what_numpy_gives_is_taken():
    config = raytf.TensorflowConfig(hang_timeout_s=np.float32(20), intra_op_threads=np.int64(2), heal=np.True_)
    assert config.intra_op_threads == 2
    assert keras_trainer(progress=np.False_).progress == False  # noqa: E712
