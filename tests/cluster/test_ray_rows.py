"""Rows of docs/reference/ray-compatibility.md that need a cluster: each of these runs covers many of them."""

from __future__ import annotations

import os
import pathlib
import tempfile

import numpy as np
import pytest
import ray
from ray import tune
from ray.data import ExecutionOptions
from ray.train import Checkpoint, CheckpointConfig, CheckpointUploadMode, DataConfig, RunConfig, ScalingConfig

import raytf
from tests.cluster import models

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


def callbacks(config):
    """One that a tracker would bring, one that is kept to the chief, and one that runs on all; each writes a line."""
    import keras

    import raytf

    class Writes(keras.callbacks.Callback):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def on_train_batch_end(self, batch, logs=None):
            pass

        def on_epoch_end(self, epoch, logs=None):
            context = ray.train.get_context()
            with open(os.path.join(config["folder"], self.name), "a") as file:
                file.write(f"epoch {epoch} of {context.get_world_size()} on {context.get_world_rank()}\n")

    class Tracks(Writes):
        log_freq = None

    Writes.raytf_local_batches = True
    Tracks.__module__ = "wandb.integration.keras"
    return [Tracks("tracker"), raytf.on_chief(lambda: Writes("chief")), Writes("all")]


def keras_trainer(folder, epochs, scaling, name="run", **given):
    return raytf.KerasTrainer(
        models.mlp,
        config={"batch_size": 25, "epochs": epochs, "folder": str(folder)},
        datasets={"train": models.dataset(), "validation": models.dataset(41, 1)},
        features=models.FEATURES,
        labels="label",
        callbacks=callbacks,
        scaling_config=scaling,
        run_config=RunConfig(name=name, storage_path=str(folder)),
        progress=False,
        **given,
    )


def lines(folder, name):
    return (folder / name).read_text().splitlines()


def dashboard_run(name):
    """Returns what a run reports to Ray's dashboard."""
    from ray.train.v2._internal.state.state_actor import get_state_actor

    runs = ray.get(get_state_actor().get_train_runs.remote()).values()
    return next(run for run in runs if run.name == name)


def files_of(checkpoint, wanted):
    """Validates a checkpoint in a task of its own."""
    with checkpoint.as_directory() as folder:
        return {"files": float(sum(name.startswith(wanted) for name in os.listdir(folder)))}


def test_local_keras_run_resumes_with_available_workers(tmp_path, monkeypatch):
    """Two epochs here, and two on an elastic number of workers, are four epochs of one process."""
    monkeypatch.setenv("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")
    first = keras_trainer(tmp_path, 2, ScalingConfig(num_workers=0)).fit()
    assert first.metrics["epoch"] == 2 and len(first.metrics_dataframe) == 2
    assert lines(tmp_path, "all") == lines(tmp_path, "chief") == [f"epoch {e} of 1 on 0" for e in range(2)]
    result = keras_trainer(
        tmp_path,
        4,
        ScalingConfig(num_workers=(1, 8), resources_per_worker={"CPU": 2}),  # there are four
        dataset_config=DataConfig(execution_options=ExecutionOptions(verbose_progress=False)),
        validation_config=ray.train.ValidationConfig(
            files_of, ray.train.ValidationTaskConfig({"wanted": "model"}), {"num_cpus": 0}
        ),
    ).fit()
    assert result.metrics_dataframe["files"].dropna().tolist() == [1.0, 1.0]
    assert lines(tmp_path, "tracker")[2:] == lines(tmp_path, "chief")[2:] == [f"epoch {e} of 2 on 0" for e in (2, 3)]
    assert sorted(lines(tmp_path, "all")[2:]) == [f"epoch {e} of 2 on {rank}" for e in (2, 3) for rank in (0, 1)]

    run = dashboard_run("run")
    settings = run.run_settings
    assert settings.backend_config.framework.value == "tensorflow" and {"keras", "tensorflow"} <= set(
        run.framework_versions
    )
    assert settings.datasets == ["train", "validation"] and settings.train_loop_config["batch_size"] == 25
    assert settings.backend_config.config["communication"] == "auto"

    other = tmp_path / "other"
    other.mkdir()
    alone = keras_trainer(other, 4, ScalingConfig(num_workers=0)).fit()
    for left, right in zip(*(raytf.load_model(r).get_weights() for r in (result, alone)), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-9)


def trial(config):
    """Asks all that Ray Train offers to a loop; in a sweep the refusals are reported."""
    raytf.get_strategy()
    context = ray.train.get_context()
    rank = context.get_world_rank()
    seen = {
        name: getattr(context, f"get_{name}")()
        for name in ("world_size", "local_rank", "local_world_size", "node_rank", "experiment_name")
    }
    rows = sum(len(batch["x0"]) for batch in ray.train.get_dataset_shard("train").iter_batches())
    seen |= {"rows": rows, "folder": context.get_storage().experiment_fs_path}
    seen["preemption"] = ray.train.get_preemption_info()
    folder = tempfile.mkdtemp()
    pathlib.Path(folder, f"rank_{rank}").write_text(str(rank))
    named = {} if config["sweep"] else {"checkpoint_dir_name": "mine"}
    mode = CheckpointUploadMode.ASYNC
    ray.train.report({"loss": 1.0, **seen}, Checkpoint(folder), checkpoint_upload_mode=mode, **named)
    try:
        kept = [os.path.basename(one.checkpoint.path) for one in ray.train.get_all_reported_checkpoints()]
    except raytf.ConfigError as error:
        kept = str(error)
    assert not os.path.exists(folder), "ASYNC deletes the local files"
    ray.train.report({"loss": 0.5, "kept": kept, **seen})


def tensorflow_trainer(folder, sweep):
    return raytf.TensorflowTrainer(
        trial,
        train_loop_config={"sweep": sweep},
        datasets={"train": models.dataset()},
        dataset_config=DataConfig(datasets_to_split=[]),
        scaling_config=ScalingConfig(
            num_workers=2, label_selector={"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        ),
        run_config=RunConfig(
            name="tensorflow",
            storage_path=str(folder),
            checkpoint_config=CheckpointConfig(checkpoint_score_attribute="loss", checkpoint_score_order="min"),
        ),
    )


def test_loop_and_trial_get_the_same_context(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")
    result = tensorflow_trainer(tmp_path / "fit", False).fit()
    assert os.path.basename(result.checkpoint.path) == "mine"
    assert sorted(os.listdir(result.checkpoint.path)) == ["rank_0", "rank_1"]
    settings = dashboard_run("tensorflow").run_settings
    assert settings.backend_config.framework.value == "tensorflow" and settings.datasets == ["train"]
    assert settings.train_loop_config == {"sweep": False}
    grid = raytf.sweep(
        tensorflow_trainer(tmp_path / "sweep", True), {"a": tune.grid_search([1])}, metric="loss", progress=False
    )
    (one,) = grid
    assert one.error is None
    assert {"rank_0", "rank_1"} <= set(os.listdir(one.checkpoint.path))
    assert one.metrics["folder"] == one.path and "Result.best_checkpoints after the sweep" in one.metrics["kept"]
    for name, value in (("world_size", 2), ("local_rank", 0), ("local_world_size", 2), ("node_rank", 0), ("rows", 97)):
        assert one.metrics[name] == result.metrics[name] == value, name
    assert one.metrics["preemption"] is None
