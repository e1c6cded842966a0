"""Runs whose nodes come after them: pods of KubeRay, and nodes of an autoscaler."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from ray._private import services
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FakeMultiNodeProvider

import raytf
from cluster import local
from raytf.events import Kind
from tests.cluster.test_graceful_stop import drain, finished, started, steps, stopped, weights
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
EVERYTHING = [(epoch, batch) for epoch in range(3) for batch in range(14)]
NO_CPUS = ["--num-cpus=0"]


def of(cluster):
    return os.environ | cluster.environment | {"RAY_ADDRESS": cluster.address}


def kinds(folder):
    return {event.kind for event in raytf.run_events(folder)} if folder.exists() else set()


def test_run_starts_before_its_nodes_and_keeps_its_last_step_when_the_head_is_drained(tmp_path, monkeypatch):
    """As a RayJob in SidecarMode: its driver is on a head without CPUs. The head is drained after step 19; the same
    command resumes at the next step in another cluster."""
    monkeypatch.setenv("RAY_NODE_TYPE_NAME", "group")  # KubeRay sets it in all pods
    (tmp_path / "run_hold").write_text("1 4")
    with local.local_cluster(nodes=1, options=[NO_CPUS]) as cluster:
        cluster = local.add(cluster)
        driver = started(tmp_path, "run", 2, of(cluster), ["head"])
        until(lambda: Kind.RESOURCES_AWAITED in kinds(tmp_path / "run"), driver)
        cluster = local.add(cluster)
        until(lambda: steps(tmp_path, "run", 1)[-1:] == [(1, 4)], driver)
        drain(cluster, head_of(cluster), of(cluster))
        finished(driver, 143)
        assert "a node that it cannot leave is drained" in stopped(tmp_path / "run").more
        monkeypatch.setattr(local, "GRACE_SECONDS", 2)  # a node that was drained does not end by itself
    with local.local_cluster(nodes=3, options=[NO_CPUS]) as cluster:
        finished(started(tmp_path, "run", 2, of(cluster), ["head"]))
        finished(started(tmp_path, "quiet", 2, of(cluster), ["head"]))
    assert steps(tmp_path, "run", 0) == steps(tmp_path, "run", 1) == EVERYTHING
    for actual, reference in zip(weights(tmp_path, "run"), weights(tmp_path, "quiet"), strict=True):
        np.testing.assert_array_equal(actual, reference)


def head_of(cluster):
    """Ray's id of a cluster's head, as a driver there has noted it."""
    code = (
        "import ray; ray.init(log_to_driver=False); "
        "print(*(n['NodeID'] for n in ray.nodes() if 'node:__internal_head__' in n['Resources']))"
    )
    return subprocess.check_output([sys.executable, "-c", code], env=of(cluster), text=True).split()[-1]


@pytest.fixture
def autoscaled(tmp_path_factory, monkeypatch):
    """A head without CPUs, and an autoscaler that starts up to three nodes of a CPU each."""
    with socket.socket() as bound:
        bound.bind(("", 0))
        port = bound.getsockname()[1]
    node = {
        "resources": {"CPU": 1, "object_store_memory": 2**28},
        "node_config": {},
        "min_workers": 0,
        "max_workers": 3,
    }
    config = {
        "cluster_name": "autoscaled",
        "max_workers": 3,
        "idle_timeout_minutes": 5,
        "provider": {
            "type": "external",  # the default config of "fake_multinode" is not in Ray's wheel
            "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}",
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "gcs_address": f"{services.get_node_ip_address()}:{port}",
        },
        "auth": {},
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "cpu": node,
        },
        **{name: {} for name in ("docker", "file_mounts")},
        **{name: [] for name in ("cluster_synced_files", "initialization_commands", "setup_commands")},
        **{f"{role}_setup_commands": [] for role in ("head", "worker")},
        **{f"{role}_start_ray_commands": [] for role in ("head", "worker")},
    }
    path = tmp_path_factory.mktemp("autoscaler") / "config.json"
    path.write_text(json.dumps(config))
    for name, value in {
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        "RAY_NODE_TYPE_NAME": "ray.head.default",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with local.local_cluster(
        nodes=1, options=[[*NO_CPUS, f"--port={port}", f"--autoscaling-config={path}"]]
    ) as cluster:
        yield cluster


def test_elastic_run_grows_by_nodes_of_an_autoscaler(tmp_path, autoscaled):
    """It requests nodes for its most workers; its data needs two at most."""
    (tmp_path / "run_hold").write_text("1 4")  # until it grows
    finished(started(tmp_path, "run", "1-3", of(autoscaled)))
    assert steps(tmp_path, "run", 0) == EVERYTHING
    assert steps(tmp_path, "run", 2)[-1:] == EVERYTHING[-1:], raytf.run_events(tmp_path / "run")
