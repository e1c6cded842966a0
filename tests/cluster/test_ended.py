"""A run whose driver gets a signal ends after a step, keeps it, says so, and goes on at the next."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import ray

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


def started(tmp_path, name, workers):
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "tests.cluster.ended_job", str(tmp_path), name, str(workers)]
    return subprocess.Popen(command, env=os.environ | {"RAY_ADDRESS": address}, stderr=subprocess.PIPE, text=True)


def finished(driver, code=0):
    _, said = driver.communicate(timeout=120)
    assert driver.returncode == code, said
    return said


def until(reached, driver, seconds=120):
    deadline = time.monotonic() + seconds
    while not reached():
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def steps(tmp_path, name, rank):
    """(epoch, batch) of each step that a rank has made, in order."""
    path = tmp_path / f"{name}_{rank}.txt"
    if not path.exists():
        return []
    return [tuple(map(int, line.split()[1:])) for line in path.read_text().splitlines()]


def weights(tmp_path, name):
    with np.load(tmp_path / f"{name}.npz") as file:
        return [file[key] for key in file]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("workers", [2, 0])
def test_a_signal_to_the_driver_ends_the_run_after_a_step_that_is_kept(tmp_path, workers):
    """14 steps an epoch. SIGTERM comes when worker 0 is in step 20, for which it waits for worker 1, which stands still
    behind step 19; then, in the run that goes on, SIGINT; then nothing. No step is lost, and none is made twice."""
    quiet = started(tmp_path, "quiet", workers)
    finished(quiet)
    hold = tmp_path / "run_hold"
    hold.touch()
    driver = started(tmp_path, "run", workers)
    held = max(0, workers - 1)
    until(lambda: steps(tmp_path, "run", held)[-1:] == [(1, 4)], driver)
    driver.send_signal(signal.SIGTERM)
    line = driver.stderr.readline()
    while "SIGTERM: ends after this step" not in line:
        assert line, "the driver has ended"
        line = driver.stderr.readline()
    hold.unlink()
    began = time.monotonic()
    said = finished(driver, 143)
    print("ended", time.monotonic() - began, said)
    (step,) = map(int, re.findall(r"has ended after step (\d+)", said))
    assert (tmp_path / "run" / f"step_{step:012d}" / "manifest.json").exists()
    made = steps(tmp_path, "run", 0)
    assert len(made) == step >= (20 if workers else 19)
    assert f"step {step - 14} of epoch 2" in said or "epoch 3" in said
    driver = started(tmp_path, "run", workers)
    until(lambda: len(steps(tmp_path, "run", 0)) > step, driver)
    driver.send_signal(signal.SIGINT)
    said = finished(driver, 130)
    finished(started(tmp_path, "run", workers))
    everything = [(epoch, batch) for epoch in range(3) for batch in range(14)]
    for rank in range(max(1, workers)):
        assert steps(tmp_path, "run", rank) == everything
    for mine, its in zip(weights(tmp_path, "run"), weights(tmp_path, "quiet"), strict=True):
        np.testing.assert_array_equal(mine, its)
    finished(started(tmp_path, "run", workers))  # nothing is left to do
