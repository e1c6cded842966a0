"""A run whose driver gets a signal ends after a step, checkpoints it, logs that, and resumes at the next."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from ray.util.placement_group import placement_group_table

import raytf
from cluster import local
from raytf.compat import ray_core
from raytf.events import Kind
from tests.waiting import until

pytestmark = pytest.mark.slow


def started(tmp_path, name, workers, environment=None, node=()):
    arguments = ("-m", "tests.cluster.ended_job", tmp_path, name, workers, *node)
    return driver_of(*arguments, environment=environment)


def driver_of(*arguments, environment=None):
    """Starts Python with these arguments; on the common cluster, unless the environment names another."""
    environment = environment or os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    return subprocess.Popen([sys.executable, *map(str, arguments)], env=environment, stderr=subprocess.PIPE, text=True)


def finished(driver, code=0):
    _, output = driver.communicate(timeout=240)
    assert driver.returncode == code, output
    return output


def steps(tmp_path, name, rank):
    """(epoch, batch) of each step that a rank has made, in order."""
    return [tuple(map(int, line.split()[1:3])) for line in noted(tmp_path, name, rank)]


def told(tmp_path, name, rank):
    """Returns `steps`; a step whose end a replacement worker repeats to its callbacks is in it once."""
    made = steps(tmp_path, name, rank)
    return [place for before, place in zip([None, *made], made, strict=False) if place != before]


def stopped(folder):
    """The last event of a run's end by a signal, or by a drain."""
    return [event for event in raytf.run_events(folder) if event.kind is Kind.STOPPED][-1]


def nodes(tmp_path, name):
    """Where the chief has been."""
    return {line.split()[0] for line in noted(tmp_path, name, 0)}


def noted(tmp_path, name, rank):
    path = tmp_path / f"{name}_{rank}.txt"
    return path.read_text().splitlines() if path.exists() else []


def drain(cluster, node, environment):
    """Drains a node of Ray."""
    command = [pathlib.Path(sys.executable).with_name("ray"), "drain-node", "--address", cluster.address]
    command += ["--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    subprocess.run([*command, "--deadline-remaining-seconds", "120"], env=environment, check=True, timeout=60)


def weights(tmp_path, name):
    with np.load(tmp_path / f"{name}.npz") as file:
        return [file[key] for key in file]


@pytest.fixture(scope="module")
def quiet(ray_cluster, tmp_path_factory):
    """Weights of a run of two workers that nobody ends; Ray has started by then what it keeps for a first run."""
    folder = tmp_path_factory.mktemp("quiet")
    finished(started(folder, "quiet", 2))
    return weights(folder, "quiet")


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [2, 0])
def test_a_signal_to_the_driver_ends_the_run_after_a_step_that_is_kept(tmp_path, workers, request):
    """14 steps an epoch. SIGTERM comes when worker 0 is in step 20, for which it waits for worker 1, which is held
    after step 19; then, in the run that resumes, SIGINT; then nothing. No step is lost, and none is made twice."""
    if workers:
        expected = request.getfixturevalue("quiet")
    else:
        finished(started(tmp_path, "quiet", workers))
        expected = weights(tmp_path, "quiet")
    (tmp_path / "run_hold").write_text("1 4")
    driver = started(tmp_path, "run", workers)
    held = max(0, workers - 1)
    until(lambda: all(steps(tmp_path, "run", rank)[-1:] == [(1, 4)] for rank in (0, held)), driver)
    driver.send_signal(signal.SIGTERM)
    finished(driver, 143)
    asked = [event.why for event in raytf.run_events(tmp_path / "run") if event.kind is Kind.STOP_REQUESTED]
    assert asked == (["SIGTERM"] if workers else [])
    end = stopped(tmp_path / "run")
    step = end.step
    assert (tmp_path / "run" / f"step_{step:012d}" / "manifest.json").exists()
    made = steps(tmp_path, "run", 0)
    assert (
        len(made) == step
        and step in (19, 20)
        and f"(step {step - 14} of epoch 2); checkpoint of step {step} saved" in end.more
    )
    (tmp_path / "run_hold").write_text("2 13")  # the last step of all
    driver = started(tmp_path, "run", workers)
    until(lambda: steps(tmp_path, "run", held)[-1:] == [(2, 13)], driver)
    driver.send_signal(signal.SIGINT)
    finished(driver, 130)
    finished(started(tmp_path, "run", workers))
    everything = [(epoch, batch) for epoch in range(3) for batch in range(14)]
    for rank in range(max(1, workers)):
        assert steps(tmp_path, "run", rank) == everything
    for left, right in zip(weights(tmp_path, "run"), expected, strict=True):
        np.testing.assert_array_equal(left, right)
    finished(started(tmp_path, "run", workers))  # nothing is left to do


def left(tmp_path):
    """What there is of the drivers of this Ray: processes, which listen at ports, placement groups, and actors."""
    (raylet,) = [p for p in psutil.Process().children() if p.name() == "raylet"]
    (logs,) = [word.partition("=")[2] for word in raylet.cmdline() if word.startswith("--log_dir=")]
    found = set()
    for process in psutil.process_iter(["pid", "cmdline"]):
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.info["cmdline"] or ())
            # a worker's log file shows whose it is; its environment is that of the process it is a fork of
            worker = line.startswith("ray::") and any(file.path.startswith(logs) for file in process.open_files())
            if (worker or str(tmp_path) in line) and "IDLE" not in line:
                found.add(("process", process.pid))
    found |= {("group", key) for key, its in placement_group_table().items() if its["state"] != "REMOVED"}
    found |= {("actor", its.actor_id) for its in ray_core.living_actors()}
    return found


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(900)
def test_of_a_driver_that_is_killed_nothing_is_left(tmp_path, quiet):
    before = left(tmp_path)
    (tmp_path / "run_hold").write_text("1 4")
    driver = started(tmp_path, "run", 2)
    until(lambda: steps(tmp_path, "run", 1)[-1:] == [(1, 4)], driver)
    during = left(tmp_path) - before
    assert {kind for kind, *_ in during} == {"process", "group", "actor"}
    owners = [f"_{pid}_" for kind, pid, *_ in during if kind == "process"]
    driver.kill()
    driver.wait()
    until(lambda: not left(tmp_path) - before)
    for folder in (tempfile.gettempdir(), "/dev/shm"):
        assert not [name for name in os.listdir(folder) if any(owner in name for owner in owners)]
    (tmp_path / "run_hold").unlink()  # a worker that is killed leaves it
    finished(started(tmp_path, "run", 2))  # it resumes


@pytest.fixture
def three_hosts(monkeypatch):
    """A head that takes no workers, as heads of large clusters do, and three nodes with room for two each; created
    again for each try of a test, as a node that was drained takes nothing any more."""
    nodes = [["--num-cpus=0"], ["--node-name=one"], ["--node-name=two"], ["--node-name=three"]]
    with local.local_cluster(nodes=4, cpus=2, options=nodes) as cluster:
        yield cluster
        monkeypatch.setattr(local, "GRACE_SECONDS", 2)  # a node that was drained does not end by itself


POOL = """
import ray
from ray.train import RunConfig, ScalingConfig
from raytf.runtime.processes import Process, WarmPool

ray.init(log_to_driver=False)
pool = WarmPool(Process, ScalingConfig(num_workers=6), RunConfig(), 6, lambda: None)
here = lambda: ray.get_runtime_context().get_node_id()
found = [(ray.get(actor.execute.remote(here)), node) for node, actor in pool.members]
pool.cancel()
assert len(found) == 6 and all(is_on == said for is_on, said in found), found
"""


@pytest.mark.timeout(900)
def test_a_node_that_is_drained_costs_no_step(tmp_path, three_hosts, quiet):
    """Processes that start before their run are on the nodes that it names. Then both workers are on the node that is
    drained, after step 19 and in step 20. They end after it, and start again on another node; FailureConfig allows no
    failure, as this is none. So do those of a trial. Then the last node is drained, too, with the driver on it: its run
    ends as by SIGTERM."""
    environment = os.environ | three_hosts.environment | {"RAY_ADDRESS": three_hosts.address}

    def drained_in_step_20(name, node="head"):
        (tmp_path / f"{name}_hold").write_text("1 4")
        driver = started(tmp_path, name, 2, environment, [node])
        until(lambda: steps(tmp_path, name, 1)[-1:] == [(1, 4)], driver)
        (chief_node,) = nodes(tmp_path, name)
        drain(three_hosts, chief_node, environment)
        return driver, chief_node

    finished(driver_of("-c", POOL, environment=environment))
    everything = [(epoch, batch) for epoch in range(3) for batch in range(14)]
    for name in ("trial", "run"):
        driver, left = drained_in_step_20(name)
        output = finished(driver)
        assert len(nodes(tmp_path, name)) == 2, (left, noted(tmp_path, name, 0), noted(tmp_path, name, 1), output)
        (last,) = nodes(tmp_path, name) - {left}
        assert steps(tmp_path, name, 0) == steps(tmp_path, name, 1) == everything
        for actual, reference in zip(weights(tmp_path, name), quiet, strict=True):
            np.testing.assert_array_equal(actual, reference)
    driver, chief_node = drained_in_step_20("own", last)
    assert chief_node == last, f"of the driver: {last}, of its workers: {chief_node}"
    finished(driver, 143)
    end = stopped(tmp_path / "own")
    step = end.step
    assert "a node that it cannot leave is drained" in end.more
    assert (tmp_path / "own" / f"step_{step:012d}" / "manifest.json").exists()


# A model whose steps take their time until a file is there, and say that they do by another one.
SLOW = """
import os
import time


def build_model(config):
    import keras
    import tensorflow as tf

    def wait():
        if not os.path.exists(config["fast"]):
            open(config["fast"] + "_not_yet", "w").close()
            time.sleep(0.1)
        return 0

    class Slow(keras.Model):
        def train_step(self, data):
            with tf.control_dependencies([tf.py_function(wait, [], tf.int64)]):
                return super().train_step(data)

    x = keras.Input((1,))
    model = Slow(x, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.SGD(config.get("learning_rate", 0.1)), "mse")
    return model
"""


@pytest.fixture
def command_line(tmp_path):
    """Starts a command of raytf in a folder with a model and data, as it is typed there; as a fork by default."""
    (tmp_path / "slow.py").write_text(SLOW)
    pq.write_table(pa.table({"x": np.linspace(0, 1, 400), "y": np.linspace(0, 1, 400)}), tmp_path / "rows.parquet")
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    environment["PYTHONPATH"] = os.pathsep.join([str(pathlib.Path.cwd()), environment.get("PYTHONPATH", "")])
    raytf = pathlib.Path(sys.executable).with_name("raytf")

    def start(command, *arguments):
        known = ["slow:build_model", "--data", "rows.parquet", "--features", "x", "--labels", "y", "--storage", "runs"]
        known += ["--batch-size", "4", "--name", command, "--set", f"fast={tmp_path}/fast"]
        line = [raytf, command, *known, *arguments]
        return subprocess.Popen(line, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    return start


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(900)
def test_exit_codes_of_raytf_train(tmp_path, command_line):
    finished(command_line("train", "--no-such-option"), 2)
    assert "Error: batch_size is the global batch" in finished(command_line("train", "--num-workers=8"), 2)
    signals = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
    kept = 0
    for number, code in signals:
        driver = command_line("train", "--checkpoint-every", "1 step")
        until(lambda: any(step > kept for step in whole(tmp_path / "runs" / "train")), driver)  # noqa: B023
        driver.send_signal(number)
        finished(driver, code)
        end = stopped(tmp_path / "runs" / "train")
        step = end.step
        assert end.why == number.name and step > kept and step in whole(tmp_path / "runs" / "train")
        kept = step
    (tmp_path / "fast").touch()
    finished(command_line("train", "--checkpoint-every", "1 step"))


def whole(folder):
    """Steps of the checkpoints within epochs."""
    return [int(path.parent.name.removeprefix("step_")) for path in folder.glob("step_*/manifest.json")]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(900)
def test_stopped_sweep_resumes_by_the_same_command(tmp_path, command_line):
    arguments = ["learning_rate=choice([0.1,0.2])", "--num-samples", "2", "--max-concurrent-trials", "1"]
    driver = command_line("sweep", *arguments)
    until((tmp_path / "fast_not_yet").exists, driver)
    driver.send_signal(signal.SIGTERM)
    finished(driver, 143)
    assert "the sweep has ended with 0 of" in stopped(tmp_path / "runs" / "sweep").more
    before = set(tmp_path.glob("runs/sweep/Trial_*"))
    assert before
    output = finished(command_line("sweep", "learning_rate=choice([0.1,0.3])", *arguments[1:]), 2)
    assert "A sweep of a name that exists resumes as it was" in output
    (tmp_path / "slow.py").write_text(SLOW.replace("layers.Dense(1)", "layers.Dense(1, 'tanh')"))
    output = finished(command_line("sweep", *arguments), 2)
    assert "A sweep of a name that exists resumes as it was" in output and "tanh" in output
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "fast").touch()
    finished(command_line("sweep", *arguments))
    trials = list(tmp_path.glob("runs/sweep/Trial_*/result.json"))
    assert len(trials) == 2 and before <= {path.parent for path in trials}
