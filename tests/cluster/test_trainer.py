"""KerasTrainer on a real Ray: the same training with any number of workers, through failures, and from errors."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import subprocess

import numpy as np
import pytest
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

import raytf
from raytf.testing import CutOff, Fail, FailWrite, FaultPlan, FillDisk, Kill, Slow
from tests.cluster import models

pytestmark = pytest.mark.usefixtures("ray_cluster")
CONFIG = {"batch_size": 25, "epochs": 3}


def trainer(tmp_path, workers=2, *, name="run", build=models.mlp, failures=0, callbacks=None, keep=None, **kwargs):
    config = CONFIG | kwargs.pop("config", {})
    datasets = kwargs.pop("datasets", None) or {"train": models.dataset(), "validation": models.dataset(41, 1)}
    return raytf.KerasTrainer(
        build,
        config=config,
        datasets=datasets,
        features=kwargs.pop("features", models.FEATURES),
        labels=kwargs.pop("labels", "label"),
        callbacks=callbacks,
        scaling_config=ScalingConfig(num_workers=workers, **kwargs.pop("scaling", {})),
        run_config=RunConfig(
            name=name,
            storage_path=str(tmp_path),
            storage_filesystem=kwargs.pop("storage_filesystem", None),
            failure_config=FailureConfig(max_failures=failures),
            checkpoint_config=CheckpointConfig(num_to_keep=keep),
            callbacks=kwargs.pop("run_callbacks", None),
        ),
        progress=False,
        verify=kwargs.pop("verify", False),  # which takes a few seconds, and has tests of its own
        # a loss restarts all workers, but in the tests of healing
        tensorflow_config=raytf.TensorflowConfig(**{"heal": False} | kwargs.pop("tensorflow", {})),
        **kwargs,
    )


def weights(result):
    return [np.asarray(w) for w in raytf.load_model(result).get_weights()]


def assert_equal(result, other, tolerance=1e-9):
    for left, right in zip(weights(result), weights(other), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=tolerance)
    for column in ("loss", "accuracy", "val_loss", "val_accuracy"):
        np.testing.assert_allclose(result.metrics_dataframe[column], other.metrics_dataframe[column], atol=1e-9)


@pytest.fixture(scope="module")
def undisturbed(ray_cluster, tmp_path_factory):
    """Two workers, four epochs, nothing happens; callbacks with a memory, and one that reports where it computes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    config = {"epochs": 4, "dropout": 0.2, "told": str(folder)}
    return trainer(folder, config=config, callbacks=_plateau, tensorflow={"pin_cpus": "auto"}).fit()


def _plateau(config):
    import keras

    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.2)
    reporting = [models.tell_cores(config["told"])] if "told" in config else []
    return [plateau, *reporting, *(models.kill_once(**kill) for kill in config.get("kill", ()))]


@pytest.mark.slow
def test_one_two_and_three_workers_train_alike(tmp_path):
    """97 rows in batches of 25: neither 2 nor 3 divides them, and weights count. TensorFlow has no cluster there."""
    folder = str(tmp_path)

    def callbacks(config):
        return [models.tell_of_cluster(folder)]

    results = [
        trainer(
            tmp_path,
            n,
            name=f"w{n}",
            sample_weights="weight",
            keep=1,
            config={"weighted": True},
            callbacks=callbacks if n > 1 else None,
        ).fit()
        for n in (1, 2, 3)
    ]
    for rank, workers in ((0, 2), (1, 2), (0, 3), (1, 3), (2, 3)):
        status = json.loads((tmp_path / f"cluster_{rank}_of_{workers}").read_text())
        nothing = {"servers": ["None", "None"], "coordination": "None", "listens": False, "replicas": workers}
        assert status == nothing | {"devices": ["/device:CPU:0"]}
    one = results[0]
    assert one.metrics["epoch"] == 3
    assert len(one.metrics_dataframe) == 3, "a row for each epoch, although one checkpoint is kept"
    assert {"loss", "accuracy", "val_loss", "val_accuracy", "epoch"} <= set(one.metrics)
    for other in results[1:]:
        assert_equal(one, other)
    events = os.path.join(results[1].path, "tensorboard", "train")
    assert len([f for f in os.listdir(events) if "tfevents" in f]) == 1, "the chief alone writes events"


@pytest.mark.slow
def test_workers_of_a_host_have_cores_of_their_own_and_what_writes_checkpoints_has_all(undisturbed):
    folder = pathlib.Path(undisturbed.path).parent
    statuses = [json.loads((folder / f"cores_{rank}.json").read_text()) for rank in range(2)]
    others = {core for its in statuses for core in its["claimed"]} - {core for its in statuses for core in its["own"]}
    if len(set(statuses[0]["before"]) - others) < 2:
        pytest.skip("this machine has no core for each of two workers, or others have claimed them")
    for left, right in (statuses, reversed(statuses)):
        assert len(left["own"]) == 1 and left["own"] != right["own"]
        assert all(set(left["own"]) <= set(mask) <= set(left["before"]) - set(right["own"]) for mask in left["threads"])
    assert all(writer == statuses[0]["before"] for writer in statuses[0]["writers"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kills_and_a_new_start_change_nothing(undisturbed, tmp_path):
    """A worker dies in the middle of an epoch; the run ends and is started again for more epochs; then the chief dies
    in the middle of an epoch, and once more while it writes a checkpoint. The weights are those of a quiet run."""

    def kill(rank, epoch, batch):
        return {"marker": str(tmp_path / f"killed_{epoch}"), "rank_": rank, "epoch": epoch, "batch": batch}

    config = {"dropout": 0.2, "kill": [kill(1, 1, 2), kill(0, 2, 1)], "kill_writing": str(tmp_path / "killed_writing")}
    first = trainer(tmp_path, config=config | {"epochs": 2}, callbacks=_plateau, failures=1).fit()
    assert first.metrics["epoch"] == 2 and os.listdir(tmp_path).count("killed_1") == 1
    killed = {"failures": 2, "build": models.mlp_killed_writing, "resume": True}  # its function reads a key more
    again = trainer(tmp_path, config=config | {"epochs": 4}, callbacks=_plateau, **killed).fit()
    assert {"killed_1", "killed_2", "killed_writing"} <= set(os.listdir(tmp_path)), "not all kills happened"
    assert_equal(again, undisturbed, 0)
    assert list(again.metrics_dataframe["epoch"]) == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_twenty_faults_of_a_plan_change_nothing(undisturbed, tmp_path):
    """Three of them end the workers, in the middle of epochs: one loses its connections, one is killed, one fails."""
    disk = tmp_path / "disk"
    disk.mkdir()
    kinds = [
        Slow(rank=0, step=0, seconds=0.05),
        FailWrite(rank=0, step=0, number=errno.ENOSPC),
        FillDisk(rank=0, step=0, folder=disk, size=1 << 20, steps=2),
    ]
    quiet = FaultPlan.random(0, workers=2, steps=16, faults=17, kinds=kinds).faults
    plan = FaultPlan([*quiet, CutOff(rank=1, step=6), Kill(rank=0, step=9), Fail(rank=1, step=2, epoch=3)])
    plan = FaultPlan.from_json(plan.to_json())

    def callbacks(config):
        return [*_plateau(config), plan.callback(tmp_path / "faults", workers=2)]

    options = {"config": {"epochs": 4, "dropout": 0.2}, "steps_per_execution": 1}
    result = trainer(tmp_path, callbacks=callbacks, failures=3, **options).fit()
    assert plan.happened(tmp_path / "faults") == list(plan.faults), "not all happened"
    assert_equal(result, undisturbed, 0)
    assert list(result.metrics_dataframe["epoch"]) == [1, 2, 3, 4] and os.listdir(disk) == []


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_end_of_an_epoch_holds_nothing_up(undisturbed, tmp_path, set_timeouts):
    """The chief's callback fills the disk before the first epoch's checkpoint, and makes room in the third epoch: that
    of the first is given up when the second ends, whose own is written then."""
    set_timeouts(checkpoint_failing=15.0)  # it is waited for that long
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "raytf_test", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    filled = str(disk / "others")

    def callbacks(config):
        return [*_plateau(config), models.full_disk(filled)]

    try:
        result = trainer(disk, config={"epochs": 4, "dropout": 0.2}, callbacks=callbacks).fit()
        assert_equal(result, undisturbed, 0)
        assert list(result.metrics_dataframe["epoch"]) == [1, 2, 3, 4]
        assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [2, 3, 4]
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
def test_early_stopping_leaves_the_best_weights(tmp_path):
    best = str(tmp_path / "best.npz")

    def callbacks(config):
        import keras

        def keep(epoch, logs):
            if epoch == 0 and models.rank() == 0:
                np.savez(best, *stop.model.get_weights())

        stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True, min_delta=10)
        return [stop, keras.callbacks.LambdaCallback(on_epoch_end=keep)]

    result = trainer(tmp_path, config={"epochs": 9}, callbacks=callbacks).fit()
    assert result.metrics["epoch"] == 2
    with np.load(best) as expected:
        for weight, name in zip(weights(result), expected.files, strict=True):
            np.testing.assert_array_equal(weight, expected[name])


@pytest.mark.slow
def test_an_error_in_a_worker_reaches_the_driver_with_its_rank(tmp_path):
    def callbacks(config):
        import keras

        def fail(batch, logs):
            if models.rank() == 1 and batch == 2:
                raise KeyError("broken on purpose")

        return [keras.callbacks.LambdaCallback(on_train_batch_begin=fail)]

    with pytest.raises(raytf.TrainingError) as caught:
        trainer(tmp_path, callbacks=callbacks).fit()
    assert caught.value.rank == 1
    assert str(caught.value).startswith("worker 1 failed: KeyError: 'broken on purpose'")
    assert "gRPC" not in str(caught.value) and len(str(caught.value)) < 4000
