"""A Ray cluster of several hosts, which are network namespaces, of which some vanish."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cluster import local, namespaces
from tests import answers
from tests.waiting import until

WHY_NOT = namespaces.available()


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]


@pytest.fixture(scope="module")
def five_hosts():
    """(hosts, cluster): a head, and four hosts with a place for a worker, of which each test loses one."""
    with pytest.MonkeyPatch.context() as patched:
        # as Ray has them, a host that does not answer is dead after half a minute or more
        patched.setenv("RAY_health_check_period_ms", "1000")
        patched.setenv("RAY_health_check_timeout_ms", "3000")
        patched.setenv("RAY_health_check_failure_threshold", "3")
        options = [[], *[['--resources={"place": 1}', "--num-cpus=1"]] * 4]
        with (
            namespaces.hosts(5) as hosts,
            local.local_cluster(nodes=5, cpus=3, options=options, hosts=hosts) as cluster,
        ):
            yield hosts, cluster


def run(five_hosts, module: str, folder) -> tuple[str, dict]:
    """(address of the host that was cut off, what the driver answers)."""
    hosts, cluster = five_hosts
    driver = subprocess.Popen(
        hosts[0].command([sys.executable, "-m", module, folder]),
        env=os.environ | cluster.environment | {"RAY_ADDRESS": cluster.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until((folder / "victim").exists, driver)
        victim = (folder / "victim").read_text()
        for host in hosts:
            if host.address == victim:
                host.cut()
        (folder / "cut").touch()
        out, err = driver.communicate(timeout=240)
    finally:
        driver.kill()
        driver.wait()
    return victim, answers.of(out, err)


def test_a_worker_whose_host_vanishes_is_replaced_on_another(tmp_path, five_hosts):
    """Its connections are not closed; the others continue, and every step is made.

    Each worker has a host without a parameter server. As Ray may put the coordinator anywhere, one of the two has its
    host for itself.
    """
    victim, answer = run(five_hosts, "tests.cluster.host_job", tmp_path)
    assert victim not in {address.split(":")[0] for address in answer["workers"]}
    # a step that a worker had made when it vanished, but not reported, is made again
    assert answer["epochs"] == 3 and 3 * 24 <= answer["steps"] <= 3 * 24 + 3


def test_run_resumes_from_another_hosts_memory_after_the_chiefs_host_vanishes(tmp_path, five_hosts):
    """Within the second epoch, of which no checkpoint is on a disk: no step is lost, and none made twice."""
    victim, answer = run(five_hosts, "tests.cluster.memory_job", tmp_path)
    assert victim is not None
    # the chief held one of this very step, too; what it could have written to is not cut off here, as a host's would be
    assert "step_000000000017_copy" in answer["there"]
    assert answer["goes_on"] == [1, 5] and answer["kept"] == []
    assert answer["equal"] and answer["epochs"] == [1, 2, 3]
