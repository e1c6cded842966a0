"""What a run reports of itself: its folder and result, unread keys of its config, and a page about its workers."""

from __future__ import annotations

import os
import pathlib
import re

import keras
import pytest
import tensorflow as tf
from ray import tune

import raytf
from raytf.errors import ConfigError
from raytf.train import run_list
from raytf.tune import report
from tests.cluster import models
from tests.cluster.test_same_run import mlp_of, run
from tests.cluster.test_trainer import trainer

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


def test_a_run_of_two_workers(tmp_path, capfd):
    stopping = keras.callbacks.EarlyStopping("loss", patience=5)
    with pytest.warns(UserWarning, match=r"config\['epoch'\] \(did you mean 'epochs'\?\)"):
        made = run(tmp_path, 2, workers=2, config={"epoch": 3}, callbacks=[stopping])
        made.progress = True
        result = made.fit()
    out = capfd.readouterr().out
    assert re.search(rf"^run     {re.escape(result.path)}$", out, re.MULTILINE), out
    assert re.search(r"^result  epoch 2  .*loss \d", out, re.MULTILINE), out
    (loaded,) = re.findall(r'^model   raytf\.load_model\("(.*)"\)$', out, re.MULTILINE)
    assert loaded == result.path and raytf.load_model(loaded).count_params() > 0
    assert stopping.model is None, "workers train with copies"

    (found,) = run_list.listed(result.path)
    assert (found.state, found.epochs) == ("finished", "2/2")
    report.write_report(result.path, str(tmp_path / "page.html"))
    text = (tmp_path / "page.html").read_text()
    assert "worker 0" in text and "worker 1" in text and 'aria-label="communication' in text

    tags = {}
    for file in pathlib.Path(result.path, "tensorboard").rglob("events*"):
        for record in tf.data.TFRecordDataset(os.fspath(file)).as_numpy_iterator():
            for value in tf.compat.v1.Event.FromString(record).summary.value:
                tags.setdefault(file.parent.name, set()).add(value.tag)
    assert {"examples_per_second", "communication", "learning_rate"} <= tags["system"] and "epoch_loss" in tags["train"]


def test_a_key_that_the_model_needs_and_the_config_has_not(tmp_path):
    def build(config):
        return mlp_of()({"learning_rate": config["rate"]})

    datasets = {"train": models.dataset()}
    with pytest.raises(ConfigError, match=r"a config without 'rate' .*--set rate=VALUE"):
        trainer(tmp_path, 0, build=build, config={"epochs": 1}, datasets=datasets).fit()


@pytest.mark.parametrize("misspelt", ["metric", "checkpoint_score_attribute"])
def test_a_sweeps_metric_is_checked_before_a_trial_starts(tmp_path, misspelt):
    score = None if misspelt == "metric" else tune.CheckpointConfig(checkpoint_score_attribute="los")
    with pytest.raises(ConfigError, match=f"{misspelt} must be .* 'los' of loss.* Did you mean 'loss'?"):
        raytf.sweep(
            run(tmp_path, workers=1),
            {"learning_rate": tune.grid_search([0.1])},
            metric="los" if score is None else "loss",
            num_samples=1,
            run_config=tune.RunConfig(storage_path=str(tmp_path), checkpoint_config=score),
            progress=False,
        )
    assert not list(tmp_path.rglob("result.json"))
