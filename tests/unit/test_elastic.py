"""An elastic run's arguments: what is no range of workers, or has no row for each of the most, is refused."""

from __future__ import annotations

import pytest
from ray.train import ScalingConfig

from raytf.errors import ConfigError
from raytf.train import arguments


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
