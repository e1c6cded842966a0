"""What the benchmark of resuming makes of the times of two commands' steps."""

from __future__ import annotations

import pathlib
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "jobs" / "benchmarks"


@pytest.fixture
def resume(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import resume

    monkeypatch.setattr(resume, "EPOCHS", 2)
    monkeypatch.setattr(resume, "STEPS", 4)
    yield resume
    assert all(sys.modules.pop(name) for name in ("resume", "ray_guide", "common"))


def test_steps_of_both_commands_are_repeated_and_the_first_of_one_is_new(resume):
    before, after = {i: 10.0 + i for i in range(6)}, {i: 30.0 + i for i in range(4, 8)}
    found = resume.figures([5.0, 20.0], [before, after])
    assert found == {"fresh": 5.0, "first": 14.0, "new": 16.0, "repeated": 2}


def test_a_step_that_nobody_made_is_no_resume(resume):
    before, after = dict.fromkeys(range(6), 10.0), {7: 30.0}
    with pytest.raises(RuntimeError, match=r"neither command has made: \[6\]"):
        resume.figures([5.0, 20.0], [before, after])


def test_a_command_that_was_not_ended_leaves_nothing_to_measure(resume):
    with pytest.raises(RuntimeError, match="has made all steps"):
        resume.figures([5.0, 20.0], [dict.fromkeys(range(8), 10.0), {7: 30.0}])


def test_steps_of_an_execution_end_together(resume, tmp_path):
    (tmp_path / "steps0").write_text("0 0 1.5\n1 3 2.5\n")
    assert resume.steps_of(str(tmp_path / "steps0")) == {0: 1.5, 1: 2.5, 2: 2.5, 3: 2.5}
