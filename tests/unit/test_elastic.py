"""An elastic run: what is no range of workers, or has no row for each of the most, is refused; a batch that follows the
workers takes each row once, with the rate of its size."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.train import ScalingConfig

from raytf.data import sampling
from raytf.data.batch_spec import BatchSpec
from raytf.data.columns import Column
from raytf.data.feed import Feed
from raytf.data.sampling import Sampling
from raytf.data.stored import StoredDataset
from raytf.errors import ConfigError
from raytf.runtime.settings import TensorflowConfig
from raytf.runtime.topology import Shard
from raytf.storage.checkpoint_files import CheckpointState
from raytf.train import arguments
from raytf.worker.job import TrainJob

FEATURES = {"a": "id", "b": Column("words", ragged=True)}


def scaling(workers, **more):
    """A ScalingConfig of numbers that Ray itself may refuse, in its own words."""
    made = ScalingConfig(**more)
    made.num_workers = workers
    return made


@pytest.mark.parametrize(
    "workers, rule",
    [
        (
            (3, 1),
            r"a most that is not below the fewest; received: \(3, 1\)\. Use ScalingConfig\(num_workers=\(1, 3\)\)",
        ),
        ((0, 2), r"num_workers must be at least 1; received: \(0, 2\)"),
        (-1, "num_workers must be at least 1; received: -1"),
        ((True, 2), r"must be an integer, or \(fewest, most\) of an elastic run; received: \(True, 2\)"),
        (True, "must be an integer, .* received: True"),
        ((1, 2.0), r"must be an integer, .* received: \(1, 2.0\)"),
        ((1, 2, 3), r"must be an integer, .* received: \(1, 2, 3\)"),
        ([1, 2], r"must be an integer, .* received: \[1, 2\]"),
        (None, "must be an integer, .* received: None"),
    ],
)
def test_what_is_no_number_of_workers_is_refused(workers, rule):
    with pytest.raises(ConfigError, match=rule):
        arguments.check_workers(scaling(workers))


def test_ray_itself_refuses_some_ranges_before():
    for workers in ((3, 1), (-1, 2), (1, 2.0), [1, 2]):
        with pytest.raises(ValueError, match="num_workers"):
            ScalingConfig(num_workers=workers)


def test_the_fewest_of_what_is_one():
    assert [arguments.check_workers(scaling(workers)) for workers in (0, 1, 5, (1, 1), (2, 8))] == [1, 1, 5, 1, 2]


def test_each_replica_of_the_most_workers_has_a_row():
    rule = r"a row for each replica of the most workers; received: batch_size=7 with num_workers=\(1, 8\), up to 8"
    with pytest.raises(ConfigError, match=rule):
        arguments.check_batch(7, scaling((1, 8)), 0)
    with pytest.raises(ConfigError, match=r"up to 16 replicas\. Use a batch_size of 16 or more"):
        arguments.check_batch(15, scaling((1, 8), use_gpu=True, resources_per_worker={"GPU": 2}), 0)
    arguments.check_batch(8, scaling((1, 8)), 0)
    arguments.check_batch(2, scaling(8), 3)  # with parameter servers each step is one worker's
    with pytest.raises(ConfigError, match="at least one row for each replica"):
        arguments.check_batch(7, scaling(8), 0)


@pytest.mark.parametrize(
    "word, batch, workers, more, rule",
    [
        ("grow", 8, (1, 4), {}, "elastic_batch must be one of keep, scale; received: 'grow'"),
        ("scale", 8, 4, {}, "of an elastic run, .* received: num_workers=4"),
        ("scale", 8, (1, 4), {"strategy": "parameter_server"}, "received: strategy='parameter_server'"),
        ("scale", 8, (1, 4), {"sync_every": 2}, "received: sync_every=2"),
        ("scale", 9, (2, 4), {}, r"batch_size=9, which the fewest of num_workers=\(2, 4\) do not divide"),
    ],
)
def test_where_a_batch_that_follows_the_workers_means_nothing(word, batch, workers, more, rule):
    strategy, config = more.pop("strategy", "auto"), TensorflowConfig(**more)
    with pytest.raises(ConfigError, match=rule):
        arguments.check_elastic_batch(word, batch, scaling(workers), config, strategy)


def test_where_it_means_something():
    for word, batch, workers in (("scale", 8, (2, 4)), ("keep", 9, (2, 4)), ("keep", 9, 3)):
        arguments.check_elastic_batch(word, batch, scaling(workers), TensorflowConfig(), "auto")
    arguments.check_batch(4, scaling((2, 8)), 0, scales=True)
    with pytest.raises(ConfigError, match=r"batch_size=2 with 4 replica\(s\)"):
        arguments.check_batch(2, scaling((2, 8), use_gpu=True, resources_per_worker={"GPU": 2}), 0, scales=True)


def test_a_rate_that_is_no_number_of_one_optimizer_is_refused():
    number, schedule = {"config": {"learning_rate": 0.1}}, {"config": {"learning_rate": {"class": "CosineDecay"}}}
    arguments.check_scalable({"optimizers": {"optimizer": number}})
    arguments.check_scalable({"optimizers": {"optimizer": {"inner": number}}})
    for optimizers in ({"optimizer": schedule}, {"optimizer": number, "other": number}, {"generator": number}):
        with pytest.raises(ConfigError, match="of one optimizer that has a number for it"):
            arguments.check_scalable({"optimizers": optimizers})


def job(batch, fewest):
    batch_spec = BatchSpec.parsed("id", None, None, None)
    options = {"build_model": None, "callbacks": None, "batch": batch_spec, "datasets": {}, "board": None}
    return TrainJob(
        config={"batch_size": batch, "epochs": 1},
        sampling=Sampling(global_batch=batch),
        steps_per_execution=1,
        fewest=fewest,
        **options,
    )


@given(st.integers(1, 8), st.integers(1, 20), st.lists(st.integers(1, 24), min_size=1))
def test_each_worker_has_as_many_rows_and_the_rate_is_that_of_the_batch(fewest, each, counts):
    """Through any changes of the number, as each restores the rate of the one before."""
    rate = before = 1.0
    for workers in counts:
        made = job(each * fewest, fewest).for_workers(workers)
        assert made.config["batch_size"] == each * workers and made.for_workers(workers + 1) is made
        rate, before = rate * (made.scale / before), made.scale
    assert rate == pytest.approx(counts[-1] / fewest, rel=1e-12)
    assert job(7, None).for_workers(3).config["batch_size"] == 7 and job(7, None).for_workers(3).scale == 1


def order(rows, batch, shuffle="full"):
    return BatchSpec.parsed("id", None, None, None).order(Sampling(global_batch=batch, shuffle=shuffle).sampler([rows]))


@given(st.integers(1, 200), st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=6))
def test_an_epoch_takes_each_row_once_however_its_batch_changes(rows, parts):
    """Of each part (rows of a step, steps that are made before it changes)."""
    taken, step, was = 0, 0, None
    for batch, count in parts:
        now, skip = order(rows, batch), 0
        if was is not None:
            step, skip = sampling.regrouped(was, now, step)
        for _ in range(count):
            if step == sampling.steps_per_epoch(rows, batch):
                assert taken == rows
                return
            assert step * batch + skip == taken
            taken, step, skip = min(rows, (step + 1) * batch), step + 1, 0
        was = now


def test_epoch_begins_again_where_the_order_of_rows_follows_the_batch():
    assert sampling.regrouped(order(60, 10), order(60, 20), 3) == (1, 10)
    assert sampling.regrouped(order(60, 10), order(60, 20), 6) == (3, 0)
    assert sampling.regrouped(order(60, 10, "window"), order(60, 20, "window"), 3) is None
    assert sampling.regrouped(order(60, 10), order(61, 20), 3) is None


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_first_step_of_the_rest_of_an_epoch(workers):
    """Workers together have the rows that are left of it, in their order, one or two of them none."""
    table = pa.table({"id": np.arange(103), "words": pa.array([[i] * (i % 4) for i in range(103)])})
    stored, spec = StoredDataset([table], [103], table.column_names), BatchSpec.parsed(FEATURES, "id")
    feeds = [Feed(stored, spec, Sampling(global_batch=30), Shard(rank, workers)) for rank in range(workers)]
    datasets = [feed.dataset() for feed in feeds]
    for step, skips in ((1, (1, 10, 29)), (3, (12,))):
        whole = []
        for feed, dataset in zip(feeds, datasets, strict=True):
            feed.set_epoch(2, step)
            whole.append(next(iter(dataset)))
        for skip in skips:
            rest = []
            for feed in feeds:
                feed.set_epoch(2, step)
                (found,) = list(feed.step_without(skip))
                rest.append(found)
            for take in (lambda one: one[0]["a"], lambda one: one[1], lambda one: one[0]["b"].row_lengths()):
                expected = np.concatenate([take(one).numpy() for one in whole])[skip:]
                assert np.concatenate([take(one).numpy() for one in rest]).tolist() == expected.tolist()
    shape = feeds[0].step_without(3).element_spec[1].shape
    assert shape[0] is None, "how many rows there are is no part of the graph"


def test_checkpoint_records_its_batch():
    text = CheckpointState(1, 10, 0, False, [], batch_scale=1.5).to_json()
    assert CheckpointState.from_dict(json.loads(text), "one").batch_scale == 1.5
    old = {name: value for name, value in json.loads(text).items() if name != "batch_scale"}
    assert CheckpointState.from_dict(old, "one").batch_scale == 1.0
    for wrong in (0, -1, True, float("nan"), "2"):
        with pytest.raises(ConfigError, match="no right 'batch_scale'"):
            CheckpointState.from_dict(old | {"batch_scale": wrong}, "one")
