"""`ray job submit` runs a training on a cluster started with cluster/local.py, as in docs/guides/cluster.md."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from cluster import local
from tests.cluster.test_graceful_stop import steps
from tests.jobs import test_output
from tests.waiting import until

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

# What the job is: its Python, its raytf and the files that came with it.
SHOW = (
    "import os, sys, raytf; print('PREFIX', sys.prefix); print('RAYTF', raytf.__file__); print('FILES', os.listdir())"
)

BROKEN = """
import logging, sys

import ray
from ray.train import RunConfig, ScalingConfig

import raytf


def build_model(config):
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def callbacks(config):
    import keras
    from ray.train import get_context

    class Breaks(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if get_context().get_world_rank() == 1:
                raise ValueError("broken on purpose")

    return [Breaks()]


if __name__ == "__main__":
    ray.init(logging_level=logging.ERROR, log_to_driver=False)
    raytf.KerasTrainer(
        build_model,
        config={"batch_size": 4},
        datasets={"train": ray.data.from_items([{"x": 0.0, "y": 0.0}] * 8)},
        features=["x"],
        labels="y",
        callbacks=callbacks,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=sys.argv[1]),
    ).fit()
"""


@pytest.fixture(scope="module")
def cluster():
    # Two workers, and CPUs for Ray Data in addition.
    with local.local_cluster(nodes=1, cpus=4) as cluster:
        yield cluster


def ray_job(cluster, *arguments, seconds=120) -> str:
    """What a command of `ray job` prints."""
    command = [pathlib.Path(sys.executable).with_name("ray"), "job", *arguments]
    environment = os.environ | cluster.environment
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=True)
    return run.stdout + run.stderr


def submit(cluster, working_dir, *entrypoint):
    """Submits a job, waits for its end and gives the exit code and the job's own output."""
    command = [pathlib.Path(sys.executable).with_name("ray"), "job", "submit", "--log-color=false"]
    command += ["--address", cluster.dashboard, "--working-dir", working_dir, "--", *entrypoint]
    run = subprocess.run(
        command,
        env=os.environ | cluster.environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    started = re.search(r"^Running entrypoint for job .*\n", run.stdout, re.MULTILINE)
    assert started, f"the job did not start:\n{run.stdout}\n{run.stderr}"
    # What follows the job's output comes from the command, and repeats the output of a job that failed.
    lines = run.stdout[started.end() :].splitlines()
    end = next((index for index, line in enumerate(lines) if " cli.py:" in line), len(lines))
    return run.returncode, "\n".join(lines[:end])


def test_a_job_has_the_python_and_the_files_of_its_submitter(cluster):
    code, log = submit(cluster, REPOSITORY, "python", "-c", SHOW)
    assert code == 0, log
    shown = dict(line.split(" ", 1) for line in log.splitlines())
    assert shown["PREFIX"] == sys.prefix
    assert shown["RAYTF"].startswith(cluster.ray_folder), "raytf must be the one of the working directory"
    assert "'raytf'" in shown["FILES"] and "'jobs'" in shown["FILES"]
    assert ".venv" not in shown["FILES"] and "'.git'" not in shown["FILES"]


def quiet(log):
    """Nothing is printed that is not for the user."""
    noise = [line for line in log.splitlines() if re.search(r"Traceback|Error|WARNING|INFO|pid=\d+", line)]
    # Ray warns every driver, whatever its settings, that a busy machine of few cores starts many workers.
    return not [line for line in noise if "worker processes have been started on node" not in line]


@pytest.mark.slow
def test_a_sweep_on_two_workers(cluster, tmp_path):
    command = ["python", "jobs/sweep_digits.py", "--num-workers", "2", "--smoke", "--storage", str(tmp_path)]
    code, log = submit(cluster, REPOSITORY, *command)
    assert code == 0 and quiet(log), log
    assert re.search(r"^trial 3/3 .* a replica, .*val_accuracy 0\.\d+", log, re.MULTILINE), log
    assert re.search(r"^best val_accuracy 0\.\d+: batch_size=\d+", log, re.MULTILINE), log
    assert list(tmp_path.iterdir())


@pytest.mark.slow
def test_raytf_run_is_a_job(cluster):
    """A script that knows nothing of Ray, with the module next to it, on two workers of the cluster."""
    scripts = pathlib.Path(REPOSITORY) / "tests" / "jobs" / "scripts"
    code, log = submit(cluster, scripts, "python", "-m", "raytf.cli", "run", "--num-workers", "2", "custom_loop.py")
    assert code == 0, log
    found = dict(re.findall(r"^\[(worker \d)\] weights: (.*)", log, re.MULTILINE))
    assert found["worker 0"] == found["worker 1"] and found["worker 0"].endswith("converged: True"), log
    assert "[worker 1] epoch 8: loss" in log


@pytest.mark.slow
def test_job_whose_training_fails_names_the_worker_and_the_cause(cluster, tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "broken.py").write_text(BROKEN)
    code, log = submit(cluster, folder, "python", "broken.py", str(tmp_path / "storage"))
    assert code == 1, log
    assert re.search(r"worker 1 failed: ValueError: broken on purpose", log), log


@pytest.mark.slow
def test_the_readmes_example_in_the_log_of_a_job(cluster, tmp_path):
    """To the last line."""
    address = ["--address", cluster.dashboard]
    variables = json.dumps({"env_vars": {"PYTHONPATH": str(REPOSITORY), "HOME": str(tmp_path)}})
    submitted = ["--submission-id=example", "--runtime-env-json", variables]
    example = test_output.example_of_the_readme(tmp_path)
    # the example's storage_path is relative, and a job begins in the folder in which Ray was started
    command = ["env", "-C", str(tmp_path), sys.executable, str(example)]
    ray_job(cluster, "submit", *address, *submitted, "--", *command, seconds=280)
    log = ray_job(cluster, "logs", "--log-color=false", *address, "example")
    # lines of Ray's before the job itself begins, and of the command around the log
    lines = [line for line in log.splitlines() if " job_manager.py:" not in line and " cli.py:" not in line]
    patterns = ["Running entrypoint for job example: .*", *test_output.README]
    test_output.check([line for line in lines if line], patterns)


@pytest.mark.slow
def test_a_job_that_is_stopped_loses_no_step(cluster, tmp_path):
    """`ray job stop` comes in step 20 of 42, with 3 s until it kills the job; the same submission makes the others."""
    command = ["python", "-m", "tests.cluster.ended_job", str(tmp_path), "run", "2"]
    (tmp_path / "run_hold").write_text("1 4")
    address = ["--address", cluster.dashboard]
    submitted = ["--no-wait", "--submission-id=stopped", "--working-dir", REPOSITORY]
    ray_job(cluster, "submit", *address, *submitted, "--", *command)
    until(lambda: steps(tmp_path, "run", 1)[-1:] == [(1, 4)])
    assert "was stopped" in ray_job(cluster, "stop", *address, "stopped")
    first = steps(tmp_path, "run", 0)
    code, log = submit(cluster, REPOSITORY, *command)  # waits for the process that writes, should it be at work
    assert code == 0, log
    assert not (tmp_path / "run" / "run.lock").exists()
    everything = [(epoch, batch) for epoch in range(3) for batch in range(14)]
    assert first == everything[: len(first)] and len(first) in (19, 20)
    assert steps(tmp_path, "run", 0) == steps(tmp_path, "run", 1) == everything
