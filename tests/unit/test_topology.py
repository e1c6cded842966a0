import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.errors import ConfigError
from raytf.runtime.topology import is_chief, per_replica_batch, pick_strategy, shard_of_rank, tf_config


def test_tf_config_is_what_tensorflow_reads():
    text = tf_config({"worker": ["a:1", "b:2"]}, "worker", 1)
    assert json.loads(text) == {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}


@pytest.mark.parametrize(
    ("cluster", "role", "index", "rule"),
    [
        ({"worker": ["a:1"]}, "worker", 1, "must be in the cluster"),
        ({"worker": ["a:1", "a:1"]}, "worker", 0, "address of its own"),
        ({"wroker": ["a:1"]}, "worker", 0, "role must be one of"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(cluster, role, index, rule):
    with pytest.raises(ConfigError, match=rule):
        tf_config(cluster, role, index)


def test_chief():
    assert is_chief({"worker": ["a:1"]}, "worker", 0)
    assert not is_chief({"chief": ["c:1"], "worker": ["a:1"]}, "worker", 0)
    assert is_chief({"chief": ["c:1"], "worker": ["a:1"]}, "chief", 0)


@given(st.integers(0, 5000), st.integers(1, 64))
def test_shares_cover_all_rows_once_and_evenly(rows, parts):
    bounds = [shard_of_rank(rows, parts, i) for i in range(parts)]
    assert bounds[0][0] == 0 and bounds[-1][1] == rows
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 64), st.integers(0, 1000))
def test_every_replica_gets_rows(replicas, more):
    batches = per_replica_batch(replicas + more, replicas)
    assert sum(batches) == replicas + more and min(batches) >= 1


@pytest.mark.parametrize("batch", [0, 1, True, 2.5, "8", None])
def test_a_batch_without_a_row_for_each_replica_is_refused(batch):
    with pytest.raises(ConfigError, match="at least one row for each replica"):
        per_replica_batch(batch, 2)


@pytest.mark.parametrize(
    ("workers", "devices", "tpu", "picked"),
    [
        (1, 0, False, "default"),
        (1, 1, False, "default"),
        (1, 2, False, "mirrored"),
        (2, 0, False, "multi_worker_mirrored"),
        (2, 4, False, "multi_worker_mirrored"),
        (1, 0, True, "tpu"),
        (4, 0, True, "tpu"),
    ],
)
def test_auto(workers, devices, tpu, picked):
    assert pick_strategy("auto", workers=workers, devices=devices, tpu=tpu) == picked


@pytest.mark.parametrize(
    ("name", "workers", "reason"),
    [
        ("mirrored", 2, "trains in one process"),
        ("one_device", 2, "trains in one process"),
        ("central_storage", 3, "trains in one process"),
        ("tpu", 1, "needs workers that hold TPUs"),
        ("miror", 1, "must be one of"),
    ],
)
def test_a_strategy_that_does_not_fit_is_refused_with_the_reason(name, workers, reason):
    with pytest.raises(ConfigError, match=reason):
        pick_strategy(name, workers=workers, devices=0, tpu=False)
