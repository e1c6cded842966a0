"""An elastic run has as many workers as there is room for, and its weights are those of one worker."""

from __future__ import annotations

import contextlib
import json
import os

import numpy as np
import psutil
import pytest

import raytf
from cluster import local
from raytf.events import Kind
from tests.cluster.test_graceful_stop import drain, finished, noted, started, steps, weights
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
EVERYTHING = [(epoch, batch) for epoch in range(3) for batch in range(14)]


@pytest.fixture
def one_place(monkeypatch):
    """A head that takes no workers, and a node with room for one; created again for each try of a test."""
    with local.local_cluster(nodes=2, cpus=1, options=[["--num-cpus=0"]]) as cluster:
        yield cluster
        monkeypatch.setattr(local, "GRACE_SECONDS", 2)  # a node that was drained does not end by itself


def processes(tmp_path, name):
    """The processes in which the chief has been."""
    return {line.split()[3] for line in noted(tmp_path, name, 0)}


def folder_of(cluster, node):
    """That of its logs, among others."""
    return f"{cluster.ray_folder}/{cluster.nodes.index(node)}"


def node_of(cluster, worker):
    """That of a worker's process: Ray may have put the chief on any."""
    files = [file.path for file in psutil.Process(worker).open_files()]
    (node,) = [node for node in cluster.nodes if any(path.startswith(folder_of(cluster, node) + "/") for path in files)]
    return node


def kill(cluster, node):
    """Ends all processes of a node, as when its host vanishes, the one that has started it last.

    Some arrive at their ends only when their memory is given back: after that nothing of them is at work."""
    members, folder = [], folder_of(cluster, node)
    for process in psutil.process_iter(["pid", "cmdline"]):
        with contextlib.suppress(psutil.Error):
            words = process.info["cmdline"] or ()
            if " ".join(words).startswith("ray::"):
                members += [process] * any(file.path.startswith(folder + "/") for file in process.open_files())
            else:
                members += [process] * any(word.endswith(folder) or folder + "/" in word for word in words)
    assert any(process.name() == "raylet" for process in members)
    for process in sorted(members, key=lambda process: process.pid == node):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs([process for process in members if process.pid != node], timeout=20)


def test_run_grows_leaves_a_drained_node_and_continues_without_a_vanished_one(tmp_path, one_place):
    """A node joins while the one worker waits after step 19: from the next on there are two. Then the second one's
    node is drained, after step 33 or 34. No step is lost or made twice. Another run loses a node without a notice: it
    continues with one worker, which makes no step again, though no checkpoint was due before. The chief keeps its
    process through all this."""
    environment = os.environ | one_place.environment | {"RAY_ADDRESS": one_place.address}
    finished(started(tmp_path, "alone", "1-1", environment))
    (tmp_path / "run_hold").write_text("1 4")
    driver = started(tmp_path, "run", "1-3", environment)
    until(lambda: steps(tmp_path, "run", 0)[-1:] == [(1, 4)], driver)
    cluster = local.add(one_place)
    until(lambda: steps(tmp_path, "run", 1), driver)
    (tmp_path / "run_hold").write_text("2 4")
    until(lambda: steps(tmp_path, "run", 0)[-1:] == [(2, 4)], driver)
    drain(cluster, noted(tmp_path, "run", 1)[-1].split()[0], environment)
    output = finished(driver)
    assert steps(tmp_path, "run", 0) == EVERYTHING, output
    made = steps(tmp_path, "run", 1)
    found = raytf.run_events(tmp_path / "run")
    (grown, *_) = [event for event in found if event.kind is Kind.RESIZED]
    joined, left = (event.step for event in found if event.kind is Kind.ENDED_AFTER_STEP)
    assert (grown.before, grown.workers) == (1, 2) and Kind.NODE_DRAINED in {event.kind for event in found}, found
    assert made == EVERYTHING[joined:left], found
    assert [event.workers for event in found if event.kind is Kind.WORKERS_STARTED] == [1, 2, 1], found
    assert len(processes(tmp_path, "run")) == 1, output

    cluster = local.add(cluster)
    (tmp_path / "lost_hold").write_text("0 4\n0 9")
    driver = started(tmp_path, "lost", "1-3", environment)
    until(lambda: steps(tmp_path, "lost", 1), driver)
    (tmp_path / "lost_hold").write_text("0 9")
    until(lambda: steps(tmp_path, "lost", 0)[-1:] == [(0, 9)], driver)
    kill(cluster, node_of(cluster, int(noted(tmp_path, "lost", 1)[-1].split()[3])))
    (tmp_path / "lost_hold").write_text("no more")
    output = finished(driver)
    found = raytf.run_events(tmp_path / "lost")
    (failed,) = [event for event in found if event.kind is Kind.RECOVERY_FAILED]
    assert failed.ranks == (1,) and failed.step == 10, "the other keeps the step that both have made"
    assert [event.workers for event in found if event.kind is Kind.WORKERS_STARTED] == [2, 1], found
    assert steps(tmp_path, "lost", 0) == EVERYTHING, output
    assert len(processes(tmp_path, "lost")) == 1, output
    expected = json.loads((tmp_path / "alone.json").read_text())
    for name in ("run", "lost"):
        for row, wanted in zip(json.loads((tmp_path / f"{name}.json").read_text()), expected, strict=True):
            assert row == pytest.approx(wanted, rel=0, abs=1e-9)
        for actual, reference in zip(weights(tmp_path, name), weights(tmp_path, "alone"), strict=True):
            np.testing.assert_allclose(actual, reference, rtol=0, atol=1e-9)
