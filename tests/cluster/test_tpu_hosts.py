"""A slice of two TPU hosts, as Ray schedules it, up to the calls into TensorFlow's TPU functions: no TPU is here."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from cluster import local
from tests import answers

LABELS = "ray.io/tpu-slice-name=slice,ray.io/tpu-pod-type=v4-16,ray.io/tpu-topology=2x2x2,ray.io/tpu-worker-id={}"


@pytest.mark.slow
def test_the_first_host_of_a_slice_trains_on_the_chips_of_all(tmp_path, monkeypatch):
    """One process connects to both hosts, is fed, reports and saves; the other holds its host until the end."""
    monkeypatch.setenv("TPU_NAME", "slice")  # as on such hosts; Ray's nodes look there
    chips = {"TPU": 4, "accelerator_type:TPU-V4": 1}
    resources = [chips | {"TPU-v4-16-head": 1}, chips]
    options = [(f"--resources={json.dumps(r)}", f"--labels={LABELS.format(i)}") for i, r in enumerate(resources)]
    with local.local_cluster(nodes=2, cpus=2, options=options) as cluster:
        done = subprocess.run(
            [sys.executable, "-m", "tests.cluster.tpu_job", tmp_path],
            env=os.environ | cluster.environment | {"RAY_ADDRESS": cluster.address},
            capture_output=True,
            text=True,
            timeout=200,
        )
    answer = answers.of(done.stdout, done.stderr)
    (seen,) = answer["seen"]
    (_, cluster), *others = seen["calls"]
    assert len(cluster["worker"]) == 2 and all(host.endswith(":8470") for host in cluster["worker"])
    first = f"grpc://{cluster['worker'][0]}"
    assert others == [["initialize", first], ["strategy", first]]
    assert seen["steps"] == 6 and answer["epochs"] == 3 and len(answer["weights"]) == 2
