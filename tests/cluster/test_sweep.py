"""Sweeps on a real Ray: trials in warm groups equal trials alone, fail alone, stop, resume, and share the data."""

from __future__ import annotations

import csv
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from ray import tune
from ray.train import FailureConfig, RunConfig, ScalingConfig

import raytf
from raytf.events import Kind
from raytf.worker import model_loading
from tests.cluster import models
from tests.cluster.test_graceful_stop import driver_of, finished, steps, stopped, told
from tests.cluster.test_graceful_stop import weights as noted_weights
from tests.waiting import until

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


def trainer(folder, workers=2, *, build=models.mlp, config=None, callbacks=None, failures=0, **kwargs):
    return raytf.KerasTrainer(
        build,
        config={"batch_size": 25, "epochs": 2} | (config or {}),
        datasets={"train": models.dataset(), "validation": models.dataset(41, 1)},
        features=models.FEATURES,
        labels="label",
        callbacks=callbacks,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=str(folder), failure_config=FailureConfig(max_failures=failures)),
        progress=False,
        **kwargs,
    )


def sweep(*args, **kwargs):
    return raytf.sweep(*args, **{"metric": "val_loss", "progress": False} | kwargs)


def by(grid, name):
    """Results by a value of their config."""
    return {result.config[name]: result for result in grid}


def weights(source):
    return [np.asarray(w) for w in raytf.load_model(source).get_weights()]


def test_the_best_checkpoint_of_a_trial_is_kept_also_of_a_short_one(tmp_path):
    def callbacks(config):
        import keras

        return [keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 if epoch < 2 else 1e4)]

    kept = tune.CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="val_loss", checkpoint_score_order="min")
    (result,) = sweep(
        trainer(tmp_path, 1, config={"epochs": 4}, callbacks=callbacks),
        {"dropout": 0.1},
        run_config=tune.RunConfig(storage_path=str(tmp_path), checkpoint_config=kept),
    )
    losses = list(result.metrics_dataframe["val_loss"])
    assert min(losses[:2]) < min(losses[2:])
    assert [metrics["val_loss"] for _, metrics in result.best_checkpoints] == [min(losses)]
    rows = models.rows(41, 1)
    x, y = np.stack([rows[name] for name in models.FEATURES], 1), rows["label"]
    found = raytf.load_model(result.path, which="best").evaluate(x, y, verbose=0, return_dict=True)["loss"]
    np.testing.assert_allclose(found, min(losses), rtol=1e-5)


def test_a_trial_is_the_same_first_later_and_alone(tmp_path, capfd):
    rates = [0.01, 0.05, 0.01, 0.002]
    table = tune.grid_search([{"learning_rate": rate, "place": place} for place, rate in enumerate(rates)])

    def build(config):
        return models.mlp({"learning_rate": config["point"]["learning_rate"], "dropout": 0.2})

    grid = sweep(trainer(tmp_path, build=build), {"point": table}, max_concurrent_trials=1, progress=True)
    assert not grid.errors and len({r.metrics["pid"] for r in grid}) == 1, "one worker group runs all trials"
    results = {r.config["point"]["place"]: r for r in grid}
    alone = trainer(tmp_path / "alone", build=build, config={"point": {"learning_rate": 0.01}}).fit()
    for place in (0, 2):
        for left, right in zip(weights(results[place]), weights(alone), strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=1e-9)
        for name in ("loss", "accuracy", "val_loss"):
            assert results[place].metrics[name] == pytest.approx(alone.metrics[name], abs=1e-9)
    assert results[1].metrics["val_loss"] != results[0].metrics["val_loss"]
    known = model_loading.columns_of(raytf.load_model(results[0]))
    assert known["features"] == models.FEATURES and known["labels"] == "label", "for raytf evaluate and predict"
    assert results[0].metrics["per_replica_batch"] == 13 and results[0].metrics["steps_per_epoch"] == 4
    out = capfd.readouterr().out
    assert len(re.findall(r"^trial \d/4  .*13 a replica, 4 steps an epoch", out, re.MULTILINE)) == 4
    assert re.search(r"^best val_loss ", out, re.MULTILINE) and 'raytf.load_model("' in out

    events = list(pathlib.Path(grid.experiment_path).rglob("events.out.tfevents*"))
    assert events and all(b"_hparams_" in p.read_bytes() for p in events)

    page = tmp_path / "report.html"
    command = [sys.executable, "-m", "raytf.cli", "report", grid.experiment_path, "-o", str(page)]
    subprocess.run(command, check=True, timeout=120)
    text = page.read_text()
    assert text.count("<svg") >= 1 and "Learning curves" in text and "val_loss" in text


def test_failures_stay_with_their_trial(tmp_path):
    """One trial kills a worker once, which is replaced: the next one on these workers does not notice. Nor do others
    that one raises, and one has too small a batch."""
    marker = str(tmp_path / "killed")

    def build(config):
        if config["what"] == "raises":
            raise ValueError("units must be odd")
        return models.mlp(config)

    def callbacks(config):
        return [models.kill_once(marker, 1, 1, 2)] if config["what"] == "kills" else []

    space = {
        "what": tune.grid_search(["kills", "fine", "raises", "small"]),
        "batch_size": tune.sample_from(lambda spec: 1 if spec.config["what"] == "small" else 25),
    }
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    tried = trainer(tmp_path, build=build, callbacks=callbacks, failures=1)
    tried.run_config.worker_runtime_env = {"env_vars": {"TMPDIR": str(temporary)}}
    grid = sweep(tried, space, max_concurrent_trials=1)
    assert not list(temporary.glob("raytf_*")), "folders outlive their trials"
    results = by(grid, "what")
    assert "ValueError: units must be odd" in str(results["raises"].error)
    assert "at least one row for each replica" in str(results["small"].error)
    assert results["fine"].error is None and results["kills"].error is None and os.path.exists(marker)
    for left, right in zip(weights(results["kills"]), weights(results["fine"]), strict=True):
        np.testing.assert_array_equal(left, right)


def test_population_based_training_hands_weights_and_optimizer_on(tmp_path):
    from ray.tune.schedulers import PopulationBasedTraining

    pbt = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=4,
        hyperparam_mutations={"learning_rate": lambda: 0.02},
        quantile_fraction=0.5,
        resample_probability=1.0,
        synch=True,
    )
    grid = sweep(
        trainer(tmp_path, workers=1, config={"epochs": 6}, checkpoint_every="1 step"),
        {"learning_rate": tune.grid_search([1e-9, 0.03])},
        scheduler=pbt,
    )
    assert not grid.errors
    changed = [r for r in grid if r.config["learning_rate"] == 0.02]
    assert changed, [(r.config, r.metrics["val_loss"]) for r in grid]
    for result in grid:
        model = raytf.load_model(result)
        assert int(model.optimizer.iterations) == 6 * 4
        assert float(model.optimizer.learning_rate) == pytest.approx(result.config["learning_rate"])
        # Adam's moments came with the weights: a rate of 1e-9 alone would have left val_loss where it began
        assert result.metrics["val_loss"] < 1.2


def test_trials_that_do_badly_are_stopped(tmp_path):
    from ray.tune.schedulers import ASHAScheduler

    with pytest.warns(UserWarning, match=r"^Nothing read config\['drop_out'\].* Is a key misspelt"):
        grid = sweep(
            trainer(tmp_path, config={"epochs": 6}),
            {"learning_rate": tune.grid_search([0.05, 1e-7, 1e-8]), "drop_out": 0.1, "dropout": 0.0},
            scheduler=ASHAScheduler(max_t=6, grace_period=1, reduction_factor=2),
            max_concurrent_trials=1,
        )
    assert not grid.errors
    assert by(grid, "learning_rate")[0.05].metrics["training_iteration"] == 6
    assert by(grid, "learning_rate")[1e-8].metrics["training_iteration"] < 6


def test_two_trials_at_a_time_that_pause(tmp_path):
    """In all CPUs that the cluster has; HyperBand pauses trials and takes them up again."""
    learning = {"learning_rate": tune.loguniform(1e-3, 1e-1)}
    grid = sweep(trainer(tmp_path, config={"epochs": 4}), learning, num_samples=4, scheduler="hyperband")
    assert not grid.errors and len(grid) == 4
    assert max(r.metrics["training_iteration"] for r in grid) == 4


def _loop(config):
    import keras
    import ray.train.collective
    import tensorflow as tf

    # what a group built before must not be in the way of a loop that builds its own each time
    own = config["again"] and config["num_workers"] > 1
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if own else raytf.get_strategy()
    context = ray.train.get_context()
    with strategy.scope():
        model = models.mlp(config)
    dataset = raytf.get_dataset("train", batch_size=24, features=models.FEATURES, labels="label")
    assert ray.train.get_checkpoint() is None
    history = model.fit(dataset, epochs=2, verbose=0, callbacks=[raytf.ReportCallback()])
    ray.train.collective.barrier()
    assert ray.train.collective.broadcast_from_rank_zero(context.get_world_rank()) == 0
    assert context.get_world_size() == config["num_workers"] and isinstance(history, keras.callbacks.History)
    ray.train.report({"loss": history.history["loss"][-1], "size": context.get_world_size()})


def test_a_train_loop_and_numbers_of_workers(tmp_path):
    """`TensorflowTrainer` with two sizes of trials: the mean over rows does not depend on the number of workers."""
    loops = raytf.TensorflowTrainer(
        _loop,
        train_loop_config={"learning_rate": 0.01},
        datasets={"train": models.dataset(96)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
        tensorflow_config=raytf.TensorflowConfig(seed=1),
    )
    space = {"num_workers": tune.grid_search([2, 1]), "again": tune.grid_search([False, True])}
    grid = sweep(loops, space, metric="loss")
    assert not grid.errors
    losses = {(r.metrics["size"], r.config["again"]): r.metrics["loss"] for r in grid}
    assert set(losses) == {(1, False), (2, False), (1, True), (2, True)}
    assert max(losses.values()) - min(losses.values()) < 1e-9
    assert all(raytf.load_model(r).count_params() > 0 for r in grid)


def test_memory_is_bounded_over_many_trials(tmp_path):
    """25 trials in one worker group; what a worker holds grows at first, and then no more."""
    folder = str(tmp_path)

    def callbacks(config):
        import keras

        class Memory(keras.callbacks.Callback):
            raytf_local_batches = True

            def on_train_begin(self, logs=None):
                with open("/proc/self/statm") as file, open(os.path.join(folder, "memory"), "a") as out:
                    out.write(f"{int(file.read().split()[1]) * 4096}\n")

        return [Memory()]

    def build(config):
        import keras

        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1000, "relu"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(config["learning_rate"]), "mse")
        return model

    space = {"learning_rate": tune.loguniform(1e-4, 1e-2), "batch_size": tune.choice([25, 50])}
    small = trainer(tmp_path, workers=1, build=build, callbacks=callbacks, config={"epochs": 1})
    grid = sweep(small, space, num_samples=25, max_concurrent_trials=1, metric="loss")
    assert not grid.errors and len(grid) == 25
    with open(os.path.join(folder, "memory")) as file:
        used = [int(line) for line in file]
    assert len(used) == 25
    # graphs that stayed, of a model as small as this, are more than 1 MiB for each trial
    assert used[-1] - used[9] < 6 * 2**20, [round(u / 2**20) for u in used]


RESUMED = """
import json, logging, os, signal, sys

import ray
from ray import tune
from ray.train import RunConfig, ScalingConfig

import raytf
from tests.cluster import models

folder, resume = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None


def callbacks(config):
    import keras

    class Stands(keras.callbacks.Callback):
        raytf_local_batches = True

        def on_epoch_begin(self, epoch, logs=None):
            with open(os.path.join(folder, "epochs"), "a") as file:
                file.write(f"{config['dropout']} {epoch}\\n")
            if config["dropout"] == 0.1 and epoch == 1 and not os.path.exists(os.path.join(folder, "killed")):
                with open(os.path.join(folder, "killed"), "w"):
                    os.kill(int(os.environ["DRIVER"]), signal.SIGKILL)

    return [Stands()]


ray.init(
    log_to_driver=False, logging_level=logging.ERROR, runtime_env={"env_vars": {"DRIVER": str(os.getpid())}}
)
trainer = raytf.KerasTrainer(
    models.mlp,
    config={"batch_size": 25, "epochs": 2},
    datasets={"train": models.dataset()},
    features=models.FEATURES,
    labels="label",
    callbacks=callbacks,
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(storage_path=folder, name="interrupted"),
)
grid = raytf.sweep(
    trainer,
    None if resume else {"dropout": tune.grid_search([0.0, 0.1, 0.2])},
    max_concurrent_trials=1,
    metric="loss",
    resume=resume,
)
print(json.dumps({r.config["dropout"]: r.metrics["training_iteration"] for r in grid}))
"""


def test_sweep_resumes_after_its_driver_was_killed(tmp_path, ray_cluster):
    def run(*arguments):
        address = ray_cluster.get_runtime_context().gcs_address
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        environment = os.environ | {"RAY_ADDRESS": address, "PYTHONPATH": root}
        command = [sys.executable, "-c", RESUMED, tmp_path, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
        return (done.stdout, done.stderr), done.returncode

    output, code = run()
    assert code == -signal.SIGKILL, output
    state = tmp_path / "interrupted" / "tuner.pkl"
    state.chmod(0o646)
    with pytest.raises(raytf.ConfigError, match=r"kept as pickles, .*tuner.pkl', to which others than its owner"):
        raytf.sweep(trainer(tmp_path, workers=1), resume=state.parent)
    state.chmod(0o644)
    (out, err), code = run(tmp_path / "interrupted")
    assert code == 0, out + err
    assert json.loads(out.splitlines()[-1]) == {"0.0": 2, "0.1": 2, "0.2": 2}
    made = (tmp_path / "epochs").read_text().split("\n")
    assert made.count("0.0 0") == made.count("0.0 1") == 1, "a trial that had ended is not run again"
    assert made.count("0.2 1") == 1


ENDED = """
import sys

import ray
from ray import tune
from ray.train import FailureConfig, RunConfig, ScalingConfig

import raytf
from tests.cluster import ended_job, models

folder, name = sys.argv[1:]


def callbacks(config):
    place = f"{folder}/{name}_{config['dropout']}"
    made = ended_job.noting({"place": place, "workers": 2})
    if config["dropout"] == 0.2:
        kills = [((1, 0, 9), False), ((0, 2, 3), True)]
        return [*(models.kill_once(f"{place}_killed{told:d}", *at, told=told) for at, told in kills), *made]
    kept = f"{folder}/{name}/*dropout=0.1*/steps_*/step_*24/manifest.json"
    return [*made, models.kill_between_steps_once(f"{place}_killed", 1, 1, behind=kept)]


ray.init()
trainer = raytf.KerasTrainer(
    models.mlp,
    config={"batch_size": 7, "epochs": 3},
    datasets={"train": models.dataset()},
    features=models.FEATURES,
    labels="label",
    callbacks=callbacks,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=folder, name=name, failure_config=FailureConfig(max_failures=1)),
    checkpoint_every="4 steps",
)
raytf.sweep(trainer, {"dropout": tune.grid_search([0.1, 0.2])}, metric="loss", progress=False)
"""


@pytest.mark.timeout(900)
def test_stopped_or_killed_trials_resume_at_the_next_step(tmp_path):
    """14 steps an epoch, two trials at a time. Worker 1 of one trial is killed before step 10, and replaced.
    SIGTERM comes when both are in step 20, for which worker 0 waits for worker 1; the same command resumes after it.
    Then worker 1 of the other trial is killed between two epochs, which cannot be healed, and that trial resumes after
    step 24. Worker 0 of the first one is killed in a callback of a batch, and replaced. Weights are those of an
    undisturbed sweep, to the bit."""

    def started(name):
        return driver_of("-c", ENDED, tmp_path, name)

    for trial in ("0.1", "0.2"):
        for which in ("", "0", "1"):
            (tmp_path / f"quiet_{trial}_killed{which}").touch()
    quiet = started("quiet")
    finished(quiet)
    trials = ["run_0.1", "run_0.2"]
    for trial in trials:
        (tmp_path / f"{trial}_hold").write_text("1 4")
    driver = started("run")
    until(lambda: all(steps(tmp_path, trial, rank)[-1:] == [(1, 4)] for trial in trials for rank in (0, 1)), driver)
    driver.send_signal(signal.SIGTERM)
    finished(driver, 143)
    assert "the sweep has ended with 0 of 2 begun trials complete" in stopped(tmp_path / "run").more
    kept = [int(path.parent.name.removeprefix("step_")) for path in tmp_path.glob("run/*/steps_*/step_*/manifest.json")]
    made = [len(steps(tmp_path, trial, 0)) for trial in trials]
    assert set(made) <= set(kept) and set(made) <= {19, 20}
    finished(started("run"))
    of_trial = {rate: list(raytf.run_events(*tmp_path.glob(f"run/*dropout={rate}*"))) for rate in ("0.1", "0.2")}
    assert [event.ranks for event in of_trial["0.2"] if event.kind is Kind.WORKER_REPLACED] == [(1,), (0,)]
    (restarted,) = [event for event in of_trial["0.1"] if event.kind is Kind.TRIAL_RESTARTED]
    assert re.search(r"could not be replaced in place: .*worker 0", restarted.more), restarted
    everything = [(epoch, batch) for epoch in range(3) for batch in range(14)]

    assert told(tmp_path, "run_0.2", 0) == told(tmp_path, "run_0.2", 1) == everything
    killed = told(tmp_path, "run_0.1", 1)
    assert killed == everything[:28] + everything[24:], killed
    for trial in ("0.1", "0.2"):
        for left, right in zip(*(noted_weights(tmp_path, f"{name}_{trial}") for name in ("run", "quiet")), strict=True):
            np.testing.assert_array_equal(left, right)
    for path in tmp_path.glob("run/*/progress.csv"):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [(row["epoch"], row["training_iteration"]) for row in rows] == [(str(i), str(i)) for i in (1, 2, 3)]
    assert not list(tmp_path.glob("*/*/steps_*"))
    assert "run: all 2 trials have ended: nothing is trained" in finished(started("run"))


def test_rates_that_follow_the_batch_and_a_trial_of_one_worker_that_dies(tmp_path):
    """In step 5 of 6; no survivor could heal it, and it resumes after step 4, of which it has a checkpoint."""

    def callbacks(config):
        import keras

        kept = f"{tmp_path}/*/*batch_size=40*/steps_*/step_*4/manifest.json"
        die = [models.kill_once(str(tmp_path / "killed"), 0, 1, 1, behind=kept)] if config["batch_size"] == 40 else []

        class Rates(keras.callbacks.Callback):
            raytf_local_batches = True

            def on_train_batch_end(self, batch, logs=None):
                with open(os.path.join(tmp_path, str(config["batch_size"])), "a") as file:
                    file.write(f"{float(self.model.optimizer.learning_rate):.6f} ")

        return [Rates(), *die]

    options = {"callbacks": callbacks, "failures": 1, "checkpoint_every": "1 step"}
    grid = sweep(
        trainer(tmp_path, workers=1, config={"learning_rate": 0.01}, **options),
        {"batch_size": tune.grid_search([20, 40])},
        scale_learning_rate="linear",
        base_batch_size=20,
        warmup_steps=2,
        report_every_steps=2,
    )
    # the first epoch has no val_loss before its end; steps 2 and 4 of five, step 2 of three
    assert [by(grid, "batch_size")[size].metrics["training_iteration"] for size in (20, 40)] == [1 + 2 + 1, 1 + 1 + 1]
    assert [r.metrics["epoch"] for r in grid] == [2, 2] and all("step" not in r.metrics for r in grid)
    assert by(grid, "batch_size")[40].metrics["scaled_learning_rate"] == pytest.approx(0.02)
    assert (tmp_path / "20").read_text().split() == ["0.005000", *["0.010000"] * 9]
    assert (tmp_path / "40").read_text().split() == ["0.010000", *["0.020000"] * 5] and (tmp_path / "killed").exists()


def test_a_scheduler_lets_the_best_trial_train_all_epochs_with_reports_within_them(tmp_path):
    (result,) = sweep(
        trainer(tmp_path, workers=1, config={"epochs": 3}), {"batch_size": 25}, scheduler="asha", report_every_steps=1
    )
    assert result.metrics["epoch"] == 3


def test_wrong_sweeps_raise_with_the_reason(tmp_path):
    space = {"learning_rate": tune.loguniform(1e-4, 1e-1)}
    good = trainer(tmp_path, workers=1)
    for arguments, message in [
        ({"param_space": space, "num_samples": 0}, "num_samples must be at least 1"),
        ({"param_space": {}}, "param_space must be a dict of config keys"),
        ({"param_space": space, "mode": "best"}, "mode must be one of min, max"),
        ({"param_space": space, "scheduler": "best"}, "scheduler must be one of"),
        ({"param_space": {"num_workers": tune.choice([1, 50])}}, "hold the largest trial \\(50 worker"),
        ({"resume": tmp_path / "nowhere"}, "resumed from a path that exists"),
        ({"param_space": space, "metric": "auc"}, "metric must be one that the trials report.*'auc'.*val_accuracy"),
    ]:
        with pytest.raises(raytf.ConfigError, match=message):
            sweep(good, **arguments)
    with pytest.raises(raytf.ConfigError, match="A sweep runs a raytf.KerasTrainer"):
        sweep("trainer", space)
