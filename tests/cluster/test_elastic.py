"""An elastic run has as many workers as there is room for, and its weights are those of one worker."""

from __future__ import annotations

import os

import numpy as np
import psutil
import pytest

from cluster import local
from tests.cluster.test_ended import drain, finished, noted, started, steps, until, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
EVERYTHING = [(epoch, batch) for epoch in range(3) for batch in range(14)]


@pytest.fixture
def one_place(warm_starts, monkeypatch):
    """A head that takes no workers, and a node with room for one; made anew for each try of a test."""
    with warm_starts(), local.local_cluster(nodes=2, cpus=1, options=[["--num-cpus=0"]]) as cluster:
        yield cluster
        monkeypatch.setattr(local, "GRACE_SECONDS", 2)  # a node that was drained does not end by itself


def test_it_grows_leaves_a_node_that_is_drained_and_goes_on_without_one_that_vanishes(tmp_path, one_place):
    """A node joins while the one worker stands behind step 19: from the next on there are two. Then the second one's
    node is drained, behind step 33 or 34. No step is lost or made twice. Another run loses a node without a word: it
    goes on with one worker, from the epoch's begin."""
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
    said = finished(driver)
    assert steps(tmp_path, "run", 0) == EVERYTHING, said
    made = steps(tmp_path, "run", 1)
    assert made == EVERYTHING[19 : 19 + len(made)] and made[-1] in ((2, 4), (2, 5)), made

    cluster = local.add(cluster)
    (tmp_path / "lost_hold").write_text("0 4")
    driver = started(tmp_path, "lost", "1-3", environment)
    until(lambda: steps(tmp_path, "lost", 1), driver)
    (tmp_path / "lost_hold").write_text("1 4")
    until(lambda: steps(tmp_path, "lost", 0)[-1:] == [(1, 4)], driver)
    raylet = psutil.Process(cluster.nodes[-1])
    for process in [*raylet.children(recursive=True), raylet]:
        process.kill()
    (tmp_path / "lost_hold").write_text("no more")
    finished(driver)
    assert sorted(set(steps(tmp_path, "lost", 0))) == EVERYTHING
    for name in ("run", "lost"):
        for mine, its in zip(weights(tmp_path, name), weights(tmp_path, "alone"), strict=True):
            np.testing.assert_allclose(mine, its, rtol=0, atol=1e-9)
