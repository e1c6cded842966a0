"""When a checkpoint within an epoch is due."""

import hypothesis
import pytest
from hypothesis import strategies as st

from raytf.errors import ConfigError
from raytf.runtime.settings import TensorflowConfig
from raytf.train import arguments
from raytf.worker import checkpoint_every
from raytf.worker.checkpoint_every import CheckpointClock, CheckpointInterval, parse_interval


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("auto", CheckpointInterval(auto=True)),
        ("epoch", CheckpointInterval()),
        ("1 step", CheckpointInterval(steps=1)),
        ("100 steps", CheckpointInterval(steps=100)),
        ("100steps", CheckpointInterval(steps=100)),
        ("30 s", CheckpointInterval(seconds=30)),
        ("0.5 min", CheckpointInterval(seconds=30)),
        ("10 min", CheckpointInterval(seconds=600)),
        ("2 h", CheckpointInterval(seconds=7200)),
    ],
)
def test_checkpoint_every_is_parsed(text, every):
    assert parse_interval(text) == every
    assert every.is_within_epochs == (text != "epoch")


NONSENSE = [
    "",
    "0 steps",
    "-5 steps",
    "0",
    "0 s",
    "2.5 steps",
    "10",
    "steps",
    "nan s",
    "1e400 s",
    "10 parsecs",
    "often",
]


@pytest.mark.parametrize("text", [*NONSENSE, "10 min or so", 0, 5, None, True, 10.0, ["10 min"]])
def test_nonsense_is_refused(text):
    with pytest.raises(ConfigError, match=r"checkpoint_every must be .*above 0.*Use \"100 steps\""):
        parse_interval(text)


@hypothesis.given(st.integers(1, 50), st.lists(st.integers(1, 40), min_size=1))
def test_executions_of_any_length_meet_each_multiple_once(every, executions):
    step, met = 0, 0
    for length in executions:
        met += checkpoint_every.crosses_multiple(every, step, step + length)
        step += length
        assert met <= step // every
    if max(executions) <= every:
        assert met == step // every


def trained(every, seconds_a_step, cost, steps, check_seconds=0.0):
    """Returns (times of the checkpoints of a training, number of checks of `check_seconds`, seconds in all)."""
    now, clock, next_check, times, checks = 100.0, CheckpointClock(every, 100.0, 7), 8, [], 0
    for step in range(8, 8 + steps):
        now += seconds_a_step(step)
        if step >= next_check:
            checks += 1
            due, wait = clock.check(now, step)
            now += check_seconds
            clock.checked(check_seconds)
            next_check = step + wait
            if due:
                now += cost
                clock.made(now, cost)
                times.append(now)
    return times, checks, now - 100.0


@pytest.mark.parametrize("seconds_a_step", [0.001, 0.03, 1.0, 70.0])
def test_interval_is_kept_with_few_checks(seconds_a_step):
    steps = int(max(600 / seconds_a_step, 60))
    times, checks, _ = trained(CheckpointInterval(seconds=60), lambda step: seconds_a_step, 0.1, steps)
    between = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert all(60 <= seconds <= 62 + 2 * seconds_a_step for seconds in between) and len(between) >= 7
    assert checks <= steps and (seconds_a_step > 0.1 or checks < 30 * (len(times) + 1))


@pytest.mark.parametrize("check_seconds", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("cost", [0.005, 0.2, 3.0, 40.0])
def test_auto_costs_less_than_a_hundredth(cost, check_seconds):
    """With what it takes to look when one is due, where workers wait for each other."""
    times, checks, seconds = trained(CheckpointInterval(auto=True), lambda step: 0.05, cost, 400_000, check_seconds)
    assert len(times) * cost + checks * check_seconds <= 0.0101 * seconds + cost
    assert len(times) > 0.8 * min(seconds / 31, 0.01 * seconds / (cost + 8 * check_seconds)) - 1
    assert all(b - a >= 30 for a, b in zip(times, times[1:], strict=False))


def test_steps_that_become_slower_are_noticed():
    times, _, _ = trained(CheckpointInterval(seconds=60), lambda step: 0.01 if step < 3000 else 1.0, 0.1, 5000)
    assert max(b - a for a, b in zip(times, times[1:], strict=False)) < 62 + 5 / 0.01


@pytest.mark.parametrize(
    ("given", "sync_every", "named"),
    [("0 steps", 1, "above 0 of steps"), ("10 min", 4, 'With sync_every .*"1000 steps"')],
)
def test_where_it_means_nothing_it_is_refused(given, sync_every, named):
    with pytest.raises(ConfigError, match=named):
        arguments.checkpoint_interval(given, TensorflowConfig(sync_every=sync_every))


def test_auto_is_what_can_be():
    assert arguments.checkpoint_interval("auto", TensorflowConfig()) == CheckpointInterval(auto=True)
    assert arguments.checkpoint_interval("auto", TensorflowConfig(sync_every=4)) == CheckpointInterval()
    assert arguments.checkpoint_interval("100 steps", TensorflowConfig(sync_every=4)) == CheckpointInterval(steps=100)
