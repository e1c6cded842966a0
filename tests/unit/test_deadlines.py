"""Deadlines follow a model's bytes and its first step. No Ray."""

import ast
import pathlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import raytf
from raytf import testing, timeouts
from raytf.collectives import recovery_client as worker
from raytf.collectives.recovery_client import RecoveryClient
from raytf.errors import ConfigError
from raytf.storage import snapshots
from raytf.timeouts import Pace, Timeouts, deadline

numbers = st.integers(0, 1 << 45)
seconds = st.floats(0, 1e6)


@given(numbers, numbers, seconds, seconds, seconds)
def test_more_bytes_or_a_longer_first_step_are_waited_for_longer(few, more, short, long, least):
    few, more, short, long = min(few, more), max(few, more), min(short, long), max(short, long)
    assert least <= deadline(least, few, short) <= deadline(least, more, long)
    assert Pace.slowest([Pace(few, long), Pace(more, short)]) == Pace(more, long)


def test_a_large_model_has_the_time_that_a_slow_network_takes_for_it():
    """100 s for a process to come to its step would never do: 40 GB at 100 MB/s alone take 400 s."""
    pace = Pace(40 * 10**9, 300.0)
    assert pace.deadline(100.0, copies=1, first_steps=1) > 400.0 + 300.0
    assert pace.deadline(20.0) == 20.0, "what moves nothing has no more"


def test_worker_reports_its_pace_and_waits_no_shorter_than_the_driver_does():
    its = Timeouts()
    nothing = lambda: None
    healer = RecoveryClient()
    healer.arm(nothing, nothing, nothing, step=0, size=7)
    before = healer.pace()
    healer.steps_made()
    first = healer.pace()
    healer.steps_made()
    assert before.bytes == first.bytes == 7
    assert before.first_step_seconds <= first.first_step_seconds == healer.pace().first_step_seconds
    healer.disarm()
    for pace in (Pace(), Pace(10**11, 600.0)):
        waits = pace.deadline(its.recovery_plan, worker._WAIT_COPIES, worker._WAIT_STEPS)
        parts = [
            pace.deadline(its.recovery_break, first_steps=1),
            pace.deadline(its.recovery_answer, copies=1),
            its.replacement_start,
            pace.deadline(its.recovery_answer, copies=1),
            max(pace.deadline(its.replacement_location, 1, 1), pace.deadline(its.recovery_checkpoint, 1)),
        ]
        assert waits >= sum(parts)


SOURCES = {path: path.read_text() for path in pathlib.Path(raytf.__file__).parent.rglob("*.py")}


def test_no_file_has_a_deadline_of_its_own():
    """Not one that tests cannot scale: how often one looks is an `_INTERVAL`, what is waited for is in `Timeouts`."""
    for path, text in SOURCES.items():
        assert not re.search(r"\b[A-Z_]*_SECONDS\b", text), path


def test_no_deadline_is_looked_up_before_it_is_waited_for():
    """As a file is imported, or in a default, it would stay what it was then."""
    for path, text in SOURCES.items():
        tree = ast.parse(text if "timeouts.get()" in text else "")
        early = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.Lambda)):
                early += [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        assert not [node for node in early if "timeouts.get()" in ast.unparse(node)], path


def test_every_deadline_is_more_than_none_and_has_a_sentence():
    documentation = Timeouts.__doc__ or ""
    for name, seconds in vars(Timeouts()).items():
        assert seconds > 0 and f"\n        {name}: " in documentation, name


def test_what_waits_for_another_wait_waits_longer():
    its = Timeouts()
    assert its.model_answer > its.dry_run and its.verify_error > its.verify and its.far_stack > its.stack_dump
    assert its.report_taken > its.checkpoint_write and its.orphan_writer_at_most > its.orphan_writer
    assert snapshots._standalone_deadline() > its.orphan_writer_at_most


def test_deadlines_are_scaled_until_the_context_ends():
    before = timeouts.get()
    with testing.scale_timeouts(5):
        assert timeouts.get() == before.scaled(5) and timeouts.get().ring_join == 5 * before.ring_join
        with testing.scale_timeouts(0.5):
            assert timeouts.get() == before.scaled(2.5)
    assert timeouts.get() is before
    for times in (0, -1, True, "5", float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="times of scale_timeouts"), testing.scale_timeouts(times):
            pass
