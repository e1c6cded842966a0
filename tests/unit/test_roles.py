"""Which tasks there are, and which of their ends is the cause."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.errors import ConfigError
from raytf.runtime import roles
from raytf.runtime.roles import Exit, Task

SURVIVOR = "Traceback (most recent call last):\n  File 'x'\ntensorflow.UnavailableError: Socket closed\nmore of it"
CULPRIT = "Traceback (most recent call last):\n  File 'x'\nValueError: units must be odd\n{{node x}}"
NOISE = "I0000 CoordinationService agent is shutting down"


@given(st.integers(1, 5), st.integers(0, 3), st.booleans(), st.booleans())
def test_every_task_finds_itself_in_its_tf_config(workers, servers, chief, evaluator):
    tasks = roles.tasks(workers, num_ps=servers, chief=chief and not servers, evaluator=evaluator)
    assert len(set(tasks)) == len(tasks) == workers + servers + bool(servers) + evaluator
    addresses = {task: f"10.0.0.1:{2000 + i}" for i, task in enumerate(tasks)}
    for task, text in roles.environment(addresses).items():
        found = json.loads(text)
        assert found["task"] == {"type": task.role, "index": task.index}
        assert "evaluator" not in found["cluster"]
        if task.role != "evaluator":
            assert found["cluster"][task.role][task.index] == addresses[task]


@pytest.mark.parametrize(
    "wrong", [{"num_workers": 0}, {"num_workers": 1, "num_ps": -1}, {"num_workers": 2, "num_ps": 1, "chief": True}]
)
def test_mixes_that_tensorflow_does_not_have(wrong):
    with pytest.raises(ConfigError):
        roles.tasks(**wrong)


def test_the_cause_is_named_not_its_consequence():
    one, two = Task("worker", 0), Task("worker", 1)
    assert roles.first_failure({one: Exit(1, SURVIVOR), two: Exit(1, f"{CULPRIT}\n{NOISE}")}) == two
    assert roles.first_failure({one: Exit(1, SURVIVOR), two: Exit(-9)}) == two
    assert roles.first_failure({one: Exit(1, SURVIVOR), two: Exit(0)}) == one
    assert roles.first_failure({one: Exit(0), two: Exit(0)}) is None


def test_words_of_tensorflow_in_the_message_of_another_are_no_sign():
    said = "Traceback (most recent call last):\n  File 'x'\nRuntimeError: CancelledError in my own words"
    assert not Exit(1, said).is_consequence()
    assert not Exit(-9, NOISE).is_consequence(), "TensorFlow's log also holds what is no error"
    assert Exit(-6, f"F{NOISE[1:]}").is_consequence()


def test_a_reason_is_a_line_and_a_code_that_of_a_shell():
    assert Exit(1, CULPRIT).reason() == "exit code 1: ValueError: units must be odd"
    assert Exit(-9).reason() == "ended by signal 9" and Exit(-9).status == 137
    assert Exit(3, "usage: x\nx: error: no such option").reason() == "exit code 3: x: error: no such option"
    assert Exit(3).status == 3


def test_who_ends_by_himself():
    plain, servers = roles.tasks(2, evaluator=True), roles.tasks(2, num_ps=1)
    assert roles.decides_end(plain) == {Task("worker", 0), Task("worker", 1)}
    assert roles.decides_end(servers) == {Task("chief", 0)}
    assert roles.restarts_alone(Task("worker", 1), servers) and not roles.restarts_alone(Task("worker", 1), plain)
    assert not roles.restarts_alone(Task("ps", 0), servers) and roles.restarts_alone(Task("evaluator", 0), plain)
