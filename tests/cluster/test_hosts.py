"""A Ray cluster of several hosts, which are network namespaces, of which one vanishes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from cluster import local, namespaces
from tests import answers

WHY_NOT = namespaces.available()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
def test_a_worker_whose_host_vanishes_is_replaced_on_another(tmp_path, monkeypatch):
    """Its connections are not closed; the others go on, and every step is made."""
    # as Ray has them, a host that does not answer is dead after half a minute or more
    monkeypatch.setenv("RAY_health_check_period_ms", "1000")
    monkeypatch.setenv("RAY_health_check_timeout_ms", "3000")
    monkeypatch.setenv("RAY_health_check_failure_threshold", "3")
    # Each worker has a host without a parameter server. As Ray may put the coordinator anywhere, one of the two has its
    # host for itself. A third host is left.
    options = [[], *[['--resources={"place": 1}', "--num-cpus=1"]] * 3]
    with (
        namespaces.hosts(4) as hosts,
        local.local_cluster(nodes=4, cpus=3, options=options, hosts=hosts) as cluster,
    ):
        driver = subprocess.Popen(
            hosts[0].command([sys.executable, "-m", "tests.cluster.host_job", str(tmp_path)]),
            env=os.environ | cluster.environment | {"RAY_ADDRESS": cluster.address},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            deadline = time.monotonic() + 240
            while not (tmp_path / "victim").exists() and driver.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            victim = (tmp_path / "victim").read_text() if (tmp_path / "victim").exists() else None
            for host in hosts:
                if host.address == victim:
                    host.cut()
            (tmp_path / "cut").touch()
            out, err = driver.communicate(timeout=240)
        finally:
            driver.kill()
            driver.wait()
    answer = answers.of(out, err)
    assert victim not in {address.split(":")[0] for address in answer["workers"]}
    # a step that a worker had made when it vanished, but not told of, is made again
    assert answer["epochs"] == 3 and 3 * 24 <= answer["steps"] <= 3 * 24 + 3
