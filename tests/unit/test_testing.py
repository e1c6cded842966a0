"""Plans of faults: pure parts from many seeds, and the callback in a real `fit`."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf import ConfigError
from raytf.data import sampling
from raytf.data.sampling import Sampler
from raytf.testing import Fail, FaultPlan, Kill, Slow, Stop

KINDS = ("Kill", "Stop", "Fail", "Slow")


@given(st.integers(0, 2**40), st.integers(1, 6), st.integers(1, 50), st.data())
@settings(max_examples=300)
def test_a_seed_gives_one_plan_within_the_run(seed, workers, steps, data):
    faults = data.draw(st.integers(0, min(workers * steps, 8)))
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, unique=True))
    made = [FaultPlan.random(seed, workers=workers, steps=steps, faults=faults, kinds=kinds) for _ in range(2)]
    assert made[0] == made[1] == FaultPlan.from_json(made[0].to_json())
    assert len(made[0].faults) == len({(f.rank, f.step) for f in made[0].faults}) == faults
    assert {type(f).__name__ for f in made[0].faults} <= set(kinds)
    assert all(f.rank < workers and f.step < steps for f in made[0].faults)
    made[0].check(workers)
    assert "\n" not in str(made[0])


@given(st.integers(0, 2**40), st.integers(1, 90), st.integers(1, 20), st.sampled_from(sampling.SHUFFLES))
@settings(max_examples=1000)
def test_rows_are_read_once_over_stops_at_planned_steps_and_other_numbers_of_workers(seed, rows, batch, shuffle):
    """At each planned step the run stops, and goes on there with as many workers as the fault's rank says."""
    order = Sampler(rows=(rows,), global_batch=batch, seed=seed % 2**32, shuffle=shuffle, window=30)
    steps = sampling.steps_per_epoch(rows, batch)
    plan = FaultPlan.random(seed, workers=4, steps=steps, faults=min(3, steps))
    stops = [0, *(fault.step for fault in plan.faults), steps]
    numbers = [2, *(fault.rank + 1 for fault in plan.faults)]
    read = [
        position
        for (first, last), workers in zip(itertools.pairwise(stops), numbers, strict=True)
        for position in positions(order, first, last, workers)
    ]
    assert read == positions(order, 0, steps, 1) and sorted(read) == list(range(rows))


def positions(order, first, last, workers):
    """Rows of the steps from `first` to `last`, as that many workers read them together."""
    plan, found = order.epoch(1), []
    for step in range(first, last):
        chunk, within = divmod(step, order.chunk_steps)
        for worker in range(workers):
            steps = slice(within, within + 1)
            found += sampling.worker_part(plan.positions(chunk), order.global_batch, worker, workers, steps).tolist()
    return found


def test_a_fault_is_due_at_its_step_or_behind():
    assert [Kill(rank=0, step=5).due(epoch, step, 4) for epoch, step in [(0, 3), (1, 0), (1, 1), (2, 0)]] == [
        0,
        0,
        1,
        1,
    ]
    fault = Kill(rank=0, step=2, epoch=1)
    assert [fault.due(*place, None) for place in [(0, 9), (1, 1), (1, 2), (2, 0)]] == [0, 0, 1, 1]


def test_a_plan_says_what_happens():
    plan = FaultPlan([Kill(rank=1, step=7), Slow(rank=0, step=2, epoch=1, seconds=0.5)])
    assert str(plan) == "kill worker 1 before step 7; slow worker 0 before step 2 of epoch 1 (seconds 0.5)"
    assert str(FaultPlan()) == "no faults"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Kill(rank=-1, step=0), "rank of a fault must be an integer of at least 0; received: -1"),
        (lambda: Stop(rank=0, step=1.5), "step of a fault must be"),
        (lambda: Kill(rank=0, step=0, epoch=True), "epoch of a fault must be"),
        (lambda: Slow(rank=0, step=0, seconds=0), "seconds of a fault must be a number above 0"),
        (lambda: FaultPlan(["kill"]), "A FaultPlan takes Kill, Stop, Fail, Slow"),
        (lambda: FaultPlan([Kill(rank=0, step=1)] * 2), "happen once"),
        (lambda: FaultPlan.random(0, workers=1, steps=2, faults=3), "at most workers \\* steps faults"),
        (lambda: FaultPlan.random(0, workers=1, steps=2, kinds=["Burn"]), "kinds must be one of"),
        (lambda: FaultPlan.from_json("[{}]"), "A plan is JSON of FaultPlan.to_json"),
        (lambda: FaultPlan.from_json("{"), "A plan is JSON of FaultPlan.to_json"),
        (lambda: FaultPlan([Kill(rank=2, step=0)]).check(2), "kill worker 2 before step 0, of 2 worker"),
        (lambda: FaultPlan([Kill(rank=2, step=0)]).callback("x", workers=2), "Name one of 0 to 1"),
    ],
)
def test_a_wrong_plan_is_refused(make, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make()


def fit(plan, folder, **options):
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    options = {"batch_size": 2, "epochs": 2, "verbose": 0} | options
    return model.fit(np.ones((8, 2)), np.ones((8, 1)), callbacks=[plan.callback(folder)], **options)


def test_a_fault_happens_once_over_restarts(tmp_path):
    plan = FaultPlan([Fail(rank=0, step=5, text="first"), Fail(rank=0, step=0, epoch=1, text="second")])
    for text in ("second", "first"):
        with pytest.raises(RuntimeError, match=text):
            fit(plan, tmp_path / "run")
    assert plan.happened(tmp_path / "run") == list(plan.faults) and plan.happened(tmp_path) == []
    assert len(fit(plan, tmp_path / "run").epoch) == 2


def test_a_rank_that_is_not_there_is_refused_before_the_first_step(tmp_path, monkeypatch):
    plan = FaultPlan([Kill(rank=1, step=0)])
    with pytest.raises(ConfigError, match=r"kill worker 1 before step 0, of 1 worker"):
        fit(plan, tmp_path)
    servers = {"cluster": {"worker": ["a:1"], "ps": ["a:2"]}, "task": {"type": "worker", "index": 0}}
    with monkeypatch.context() as patched, pytest.raises(ConfigError, match="parameter servers"):
        patched.setenv("TF_CONFIG", json.dumps(servers))
        plan.callback(tmp_path).on_train_begin()


def test_a_process_is_killed_and_goes_through_when_it_is_started_again(tmp_path):
    program = "from tests.unit.test_testing import *; import sys; fit(FaultPlan([Kill(rank=0, step=3)]), sys.argv[1])"
    codes = [subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=120).returncode for _ in range(2)]
    assert codes == [-signal.SIGKILL, 0]
