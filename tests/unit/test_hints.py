"""The error for a mistake names what is wrong with it, and a fix."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import io
import logging
import multiprocessing
import re
import threading
import types
import warnings

import keras
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rich.console
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle
from ray.train import CheckpointConfig, RunConfig

import raytf
from raytf import cli_options, validation
from raytf.console import phases
from raytf.data.batch_spec import BatchSpec
from raytf.data.stored import StoredDataset
from raytf.errors import ConfigError
from raytf.runtime import connection
from raytf.runtime.resources import count_fitting, suggest_workers
from raytf.storage import run_folder
from raytf.train import arguments, dry_run, run_list
from raytf.tune import sweep
from raytf.tune.sweep import check_metric
from raytf.tune.trial import UnknownMetricError
from raytf.worker import fit


@pytest.mark.parametrize(
    ("nodes", "each", "count", "message", "unsaid"),
    [
        (
            [{"CPU": 8}],
            {"CPU": 1, "GPU": 1},
            1,
            ["train on CPUs", "nodes with GPU"],
            ["ask for less of", "fewer workers"],
        ),
        ([{"CPU": 8, "GPU": 1}], {"CPU": 1, "GPU": 1}, 2, ["fewer workers", "fewer GPUs"], ["ask for less"]),
        ([{"CPU": 2}], {"CPU": 1}, 4, ["fewer workers", "--cpus-per-worker"], ["GPU", "with CPU"]),
        ([{"CPU": 8}], {"CPU": 1, "TPU": 4}, 1, ["less TPU", "nodes with TPU"], ["--cpus-per-worker", "GPU"]),
    ],
)
def test_advice_is_about_what_the_cluster_lacks(nodes, each, count, message, unsaid):
    text = suggest_workers(nodes, each, count)
    assert all(word.lower() in text.lower() for word in message), text
    assert not [word for word in unsaid if word.lower() in text.lower()], text


amounts = st.dictionaries(st.sampled_from(["CPU", "GPU", "TPU", "disk"]), st.integers(1, 4), min_size=1)


@given(st.lists(amounts, max_size=3), amounts, st.integers(1, 9))
def test_no_advice_about_what_there_is_enough_of(nodes, each, count):
    if count_fitting(nodes, each) >= count:
        return
    enough = [name for name in each if count_fitting(nodes, {name: each[name]}) >= count]
    text = suggest_workers(nodes, each, count)
    if len(enough) < len(each):
        assert not [name for name in enough if name in text.replace("CPUs (", "")], text


@pytest.mark.parametrize(
    ("metric", "mode", "doubted"),
    [
        ("accuracy", "min", True),
        ("val_sparse_categorical_accuracy", "min", True),
        ("head_auc_1", "min", True),
        ("val_loss", "max", True),
        ("mae", "max", True),
        ("loss", "min", False),
        ("accuracy", "max", False),
        ("dice_loss", "min", False),
        ("score", "min", False),
        ("place", "min", False),
    ],
)
def test_a_metric_that_is_better_the_other_way(metric, mode, doubted):
    assert (validation.mode_warning(metric, mode) is not None) == doubted


LOGS = ("loss", "mae", "val_loss", "val_mae")


def scored(config):
    class Scores(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["los"] = 1.0

    return [Scores()]


def test_a_metric_that_no_trial_reports():
    check_metric("val_mae", LOGS, validates=True, callbacks=None)
    with pytest.raises(ConfigError, match="Did you mean 'val_loss'?"):
        check_metric("val_los", LOGS, validates=True, callbacks=None)
    with pytest.raises(ConfigError, match="validation"):
        check_metric("val_loss", LOGS, validates=False, callbacks=None)
    with pytest.warns(UserWarning, match="a callback must add it"):
        check_metric("learning_rate", LOGS, validates=True, callbacks=lambda config: [])


def test_a_mistyped_metric_is_refused_although_there_are_callbacks():
    """Unless their code names it; Keras' own callbacks add no other metric than the rate."""
    of_keras = arguments.callbacks_function([keras.callbacks.EarlyStopping("loss")])
    for metric, callbacks in (
        ("los", of_keras),
        ("f1", of_keras),
        ("los", lambda config: [keras.callbacks.EarlyStopping("loss")]),
        ("val-loss", lambda config: []),
        ("val_lsos", lambda config: []),
    ):
        with pytest.raises(ConfigError, match="metric must be one that the trials report"):
            check_metric(metric, LOGS, validates=True, callbacks=callbacks)
    for metric, callbacks in (
        ("learning_rate", of_keras),
        ("los", scored),
        ("los", arguments.callbacks_function(scored({}))),
        ("val_f1", lambda config: []),
        ("val_mse", lambda config: []),
    ):
        with pytest.warns(UserWarning, match="a callback must add it"):
            check_metric(metric, LOGS, validates=True, callbacks=callbacks)


@pytest.mark.parametrize(
    ("config", "doubt"),
    [
        ({"checkpoint_score_attribute": "val_loss"}, "'val_loss' is better .* is checkpoint_score_order='min' meant?"),
        ({"checkpoint_score_attribute": "accuracy", "checkpoint_score_order": "min"}, "checkpoint_score_order='max'"),
        ({"checkpoint_score_attribute": "val_loss", "checkpoint_score_order": "min"}, None),
        ({}, None),
    ],
)
def test_trainers_warn_where_the_worst_checkpoints_would_be_kept(config, doubt):
    run = RunConfig(name="a", checkpoint_config=CheckpointConfig(num_to_keep=2, **config))
    expected = contextlib.nullcontext() if doubt is None else pytest.warns(UserWarning, match=doubt)
    for make in (raytf.TensorflowTrainer, functools.partial(raytf.KerasTrainer, datasets=PIPELINE)):
        with expected, warnings.catch_warnings():
            warnings.filterwarnings("error" if doubt is None else "always", message=".*is better when")
            make(build, run_config=run)


PIPELINE = {"train": raytf.TFData(str)}


def test_a_score_that_no_checkpoint_has():
    def check(attribute, **more):
        config = CheckpointConfig(checkpoint_score_attribute=attribute)
        arguments.check_score(config, more.pop("logs", LOGS), **{"validates": True, "has_others": False} | more)

    for known in ("val_mae", "epoch", None):
        check(known)
    check("mine", logs=None)
    with pytest.raises(ConfigError, match="checkpoint_score_attribute must be .* 'val_los' of .*mean 'val_loss'?"):
        check("val_los")
    with pytest.raises(ConfigError, match="validation"):
        check("val_loss", validates=False)
    with pytest.warns(UserWarning, match="The model reports no 'f1', by which checkpoints are kept"):
        check("f1", has_others=True)


def test_a_callback_that_monitors_what_the_model_never_reports():
    stopping = lambda monitor: keras.callbacks.EarlyStopping(monitor=monitor, mode="max")
    saving = lambda **more: keras.callbacks.ModelCheckpoint("a.keras", monitor="val_f1", **more)
    added = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(f1=1.0))
    for callbacks, logs in (
        ([stopping("val_mae"), stopping("learning_rate"), stopping("epoch"), saving()], LOGS),
        ([stopping("f1"), added], LOGS),  # a function of the user's may add it
        ([stopping("f1")], None),  # a model with its own step
    ):
        validation.check_monitors(callbacks, logs, validates=True)
    validation.check_monitors([stopping("val_loss")], LOGS, validates=False)  # Keras warns, and trains
    expected = r"received: EarlyStopping\(monitor='val_los'\); the metrics are .*mean 'val_loss'"
    trained = [stopping("mae"), stopping("val_los")]
    with pytest.raises(ConfigError, match=expected):
        arguments.check_monitors(arguments.callbacks_function(trained), LOGS, True)
    with pytest.raises(ConfigError, match=r"ModelCheckpoint\(monitor='val_f1'\)"):
        validation.check_monitors([saving(save_best_only=True)], LOGS, validates=True)
    rows = np.ones((4, 1))
    with pytest.raises(ConfigError, match=r"EarlyStopping\(monitor='val_los'\).*metrics are loss, mae"):
        raytf.fit(build({}), rows, rows, batch_size=2, num_workers=2, callbacks=trained, verbose=0)


def test_a_list_of_runs_doubts_the_mode_of_a_metric(tmp_path, monkeypatch):
    warned = []
    monkeypatch.setattr(run_list.logger, "warning", warned.append)
    run_list.listed(tmp_path, "val_accuracy", "max")
    assert not warned
    run_list.listed(tmp_path, "val_accuracy")
    assert len(warned) == 1 and "is mode='max' meant?" in warned[0]


def build(config):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


@pytest.fixture(scope="module")
def inspect():
    """`dry_run.inspect` in a process of its own, as it forks, which a process that has run TensorFlow must not do."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        processes.submit(str).result()  # its threads are the module's, not those of the first test
        yield lambda *args, **kwargs: processes.submit(dry_run.inspect, *args, **kwargs).result()


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        return {"mine": self.compute_loss(*data, self(data[0]))}


def build_own(config):
    model = Own()
    model.compile("sgd", "mse")
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("function", "logs"), [(build, LOGS), (build_own, None)])
def test_the_dry_run_knows_what_trials_report(inspect, function, logs):
    table = pa.table({"x": np.arange(4.0, dtype=np.float32), "y": np.arange(4.0, dtype=np.float32)})
    pickled = cloudpickle.dumps((function, {"batch_size": 2, "epochs": 1}, BatchSpec.parsed(["x"], "y"), [], None))
    tried = inspect(pickled, StoredDataset([table], [4], ["x", "y"]))
    assert isinstance(tried, dry_run.DryRunResult) and tried.logs == logs, tried


@pytest.mark.slow
@pytest.mark.parametrize(
    ("x", "y", "why"),
    [
        (np.ones((4, 2), np.float32), np.ones(4), "x: float32(None, 2) in 'validation', float32(None, 1) in 'train'"),
        (np.ones((4, 1), np.float32), ["a"] * 4, "y: string(None,) in 'validation', float32(None,) in 'train'"),
        (np.ones((4, 1), np.float32), np.ones(4), None),
    ],
)
def test_columns_of_the_validation_have_the_shapes_of_the_training(inspect, x, y, why):
    def block(x, y):
        table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), x.shape[1]), "y": y})
        return StoredDataset([table], [4], ["x", "y"])

    pickled = cloudpickle.dumps((build, {"batch_size": 2, "epochs": 1}, BatchSpec.parsed("x", "y"), [], None))
    train = block(np.ones((4, 1), np.float32), np.ones(4, np.float32))
    tried = inspect(pickled, train, validation=block(x, y))
    assert isinstance(tried, dry_run.DryRunResult) if why is None else why in str(tried), tried


def build_classifier(config):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", config["loss"])
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "train", "validation", "message"),
    [
        ("sparse_categorical_crossentropy", [0, 1, 2, 3], None, "sparse_categorical_crossentropy takes labels from 0"),
        ("sparse_categorical_crossentropy", [0, 1, 2, 2], [0, 3, 0, 0], "In the dataset 'validation' sparse_categor"),
        ("categorical_crossentropy", [0, 1, 2, 2], None, "Use sparse_categorical_crossentropy"),
        ("mse", [0, 1, 2, 2], None, "labels of shape (rows,) and outputs of shape (rows, 3)"),
    ],
)
def test_labels_that_do_not_fit_the_loss_are_refused_by_the_dry_run(inspect, loss, train, validation, message):
    def block(values):
        table = pa.table({"x": np.ones(4, np.float32), "y": np.array(values)})
        return StoredDataset([table], [4], ["x", "y"])

    config = {"batch_size": 2, "epochs": 1, "loss": loss}
    pickled = cloudpickle.dumps((build_classifier, config, BatchSpec.parsed(["x"], "y"), [], None))
    refused = inspect(pickled, block(train), validation=None if validation is None else block(validation))
    assert isinstance(refused, ConfigError) and message in str(refused), refused


def build_of_words(config):
    inputs = keras.Input((1,), dtype="string", name="words")
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Hashing(5, output_mode="one_hot")(inputs)))
    model.compile("sgd", "mse")
    return model


@pytest.mark.slow
def test_numbers_for_an_input_of_strings_are_refused_by_the_dry_run(inspect):
    table = pa.table({"length": np.ones(4, np.float32), "y": np.ones(4, np.float32)})
    batch = BatchSpec.parsed({"words": "length"}, "y")
    pickled = cloudpickle.dumps((build_of_words, {"batch_size": 2, "epochs": 1}, batch, [], None))
    refused = inspect(pickled, StoredDataset([table], [4], ["length", "y"]))
    assert isinstance(refused, ConfigError) and "float32 for 'words', which takes string" in str(refused), refused


def test_callbacks_may_be_a_list():
    stopping = keras.callbacks.EarlyStopping(patience=3)
    function = arguments.callbacks_function([stopping])
    first, second = function({})[0], cloudpickle.loads(cloudpickle.dumps(function))({})[0]
    assert first is not second is not stopping and first.patience == 3
    assert arguments.callbacks_function(None) is None
    assert [type(one) for one in arguments.callbacks_function(stopping)({})] == [type(stopping)], "as Keras takes one"
    for wrong in ([keras.callbacks.EarlyStopping], ["early"], 3):
        with pytest.raises(ConfigError, match="callbacks"):
            arguments.callbacks_function(wrong)
    lock = keras.callbacks.LambdaCallback()
    lock.lock = threading.Lock()
    with pytest.raises(ConfigError, match="lambda config"):
        arguments.callbacks_function([lock])


def test_a_relative_storage_path_is_below_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = RunConfig(name="a", storage_path="runs")
    assert run_folder.with_absolute_path(given).storage_path == str(tmp_path / "runs") and given.storage_path == "runs"
    assert run_folder.with_absolute_path(RunConfig(name="a", storage_path="s3://b/c")).storage_path == "s3://b/c"
    trainer = raytf.TensorflowTrainer(lambda: None, run_config=given)
    assert trainer.run_config.storage_path == str(tmp_path / "runs")


def test_metric_that_no_trial_reports_is_an_error_without_rays_traceback():
    """Where a loop is the user's, the first report shows it; Tune shows the traceback of each trial that fails."""

    def record(error):
        return logging.LogRecord("tune", logging.ERROR, "", 0, "Trial task failed", (), (type(error), error, None))

    unknown = UnknownMetricError("metric must be one that the trials report", "'los'", "Choose one of ['loss']")
    wrapped = types.SimpleNamespace(cause=unknown)
    assert not sweep._is_no_unknown_metric(record(unknown)) and not sweep._is_no_unknown_metric(record(wrapped))
    assert sweep._is_no_unknown_metric(record(ValueError("units"))) and sweep._is_no_unknown_metric(
        logging.makeLogRecord({})
    )


@pytest.mark.parametrize("made", [None, "early", keras.callbacks.EarlyStopping, [keras.callbacks.EarlyStopping]])
def test_a_function_of_callbacks_returns_some(made):
    task = types.SimpleNamespace(callbacks=lambda config: made, config={})
    session = types.SimpleNamespace(storage=None, rank=0)
    with pytest.raises(ConfigError, match=r"callbacks\(config\) must return a list of Keras callbacks"):
        fit.users_callbacks(task, session)
    stopping = keras.callbacks.EarlyStopping()
    for right in (stopping, [stopping], (one for one in [stopping])):
        task.callbacks = lambda config, right=right: right
        assert fit.users_callbacks(task, session) == [stopping]


def test_a_model_is_no_function_that_builds_one():
    with pytest.raises(ConfigError, match=r"a model, 'mine'\. .*raytf\.fit"):
        arguments.check_build(keras.Sequential(name="mine"))
    arguments.check_build(build)


@pytest.mark.parametrize("wrong", [lambda: None, lambda config, rows: None, lambda *, config: None])
def test_a_function_that_does_not_take_the_config_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"take one argument, the config; received: .*\. Define it as build_model\("):
        arguments.check_build(wrong)


def test_a_function_that_takes_the_config_is_taken():
    def wants_more(config, units):
        return build(config)

    @functools.wraps(wants_more)
    def wrapper(config):
        return wants_more(config, 8)

    for right in (lambda c, units=8: None, lambda *all: None, functools.partial(wants_more, units=8), wrapper, dict):
        arguments.check_build(right)


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        (pd.DataFrame({"a": [1]}), "ray.data.from_pandas"),
        (pa.table({"a": [1]}), "ray.data.from_arrow"),
        ("data", "ray.data.read_parquet"),
        ({"a": 1}, "raytf.fit"),
    ],
)
def test_what_makes_a_dataset_of_something_else(given, fix):
    assert fix in arguments.as_dataset(given)


def test_missing_column_of_the_validation_data_is_reported_as_such(tmp_path):
    pq.write_table(pa.table({"a": [1.0]}), tmp_path / "rows.parquet")
    for name, message in (("train", "^labels must"), ("validation", "^In the dataset 'validation' labels must")):
        with pytest.raises(ConfigError, match=message):
            cli_options.check_files(name, str(tmp_path), "auto", {"labels": "y"})


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [{"loss": "msee"}, {"loss": "mse", "metrics": ["acuracy"]}])
def test_a_loss_or_metric_that_keras_does_not_know(inspect, wrong):
    def misspelt(config):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("adam", **wrong)
        return model

    table = pa.table({"x": np.arange(4.0, dtype=np.float32), "y": np.arange(4.0, dtype=np.float32)})
    pickled = cloudpickle.dumps((misspelt, {"batch_size": 2, "epochs": 1}, BatchSpec.parsed(["x"], "y"), [], None))
    message = str(inspect(pickled, StoredDataset([table], [4], ["x", "y"])))
    assert re.match(r"compile must name losses and metrics that Keras has.*(msee|acuracy)", message), message


@pytest.mark.slow
def test_a_step_of_a_plan_that_fails_is_refused_with_its_cause(inspect):
    """`raytf.plan` measures steps; the model itself is in order."""

    def checked(config):
        import tensorflow as tf

        check = keras.layers.Lambda(lambda x: tf.debugging.check_numerics(x, "a bad row"))
        model = keras.Sequential([keras.Input((1,)), check, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    table = pa.table({"x": np.array([1.0, np.nan], "float32"), "y": np.ones(2, "float32")})
    pickled = cloudpickle.dumps((checked, {"batch_size": 2, "epochs": 1}, BatchSpec.parsed(["x"], "y"), [], None))
    error = inspect(pickled, StoredDataset([table], [2], ["x", "y"]), 2)
    assert error.rule == "A training step on the first rows must work"
    assert error.received.startswith("InvalidArgumentError: a bad row : Tensor had NaN values (operation "), error


@pytest.mark.slow
def test_a_long_phase_is_one_line_in_a_log():
    out = io.StringIO()
    with phases.Phases(rich.console.Console(file=out, width=40), "a phase " * 9) as shown:
        shown._thread.join(1.5)
    assert out.getvalue() == "a phase " * 9 + " ...\n"


def test_the_fix_for_a_refused_token_is_of_the_token_that_ray_took(monkeypatch):
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/a/file")
    error = connection._refused_error("head:6379")
    assert error.received == "another one, of /a/file" and "RAY_AUTH_TOKEN_PATH names" in error.fix
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123")
    error = connection._refused_error("head:6379")
    assert error.received == "another one, of RAY_AUTH_TOKEN" and error.fix.startswith("Set RAY_AUTH_TOKEN to")
