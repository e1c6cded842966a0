"""Which tasks there are, and which of their ends is the cause."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.errors import ConfigError
from raytf.runtime import roles
from raytf.runtime.roles import Task, TaskExit

SURVIVOR = "Traceback (most recent call last):\n  File 'x'\ntensorflow.UnavailableError: Socket closed\nmore of it"
CULPRIT = "Traceback (most recent call last):\n  File 'x'\nValueError: units must be odd\n{{node x}}"
NOISE = "I0000 CoordinationService agent is shutting down"


@given(st.integers(1, 5), st.integers(0, 3), st.booleans(), st.booleans())
def test_every_task_finds_itself_in_its_tf_config(workers, servers, chief, evaluator):
    tasks = roles.run_tasks(workers, num_ps=servers, chief=chief and not servers, evaluator=evaluator)
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
        roles.run_tasks(**wrong)


def test_the_cause_is_named_not_its_consequence():
    one, two = Task("worker", 0), Task("worker", 1)
    assert roles.first_failure({one: TaskExit(1, SURVIVOR), two: TaskExit(1, f"{CULPRIT}\n{NOISE}")}) == two
    assert roles.first_failure({one: TaskExit(1, SURVIVOR), two: TaskExit(-9)}) == two
    assert roles.first_failure({one: TaskExit(1, SURVIVOR), two: TaskExit(0)}) == one
    assert roles.first_failure({one: TaskExit(0), two: TaskExit(0)}) is None


def test_words_of_tensorflow_in_the_message_of_another_are_no_sign():
    message = "Traceback (most recent call last):\n  File 'x'\nRuntimeError: CancelledError in my own words"
    assert not TaskExit(1, message).is_consequence()
    assert not TaskExit(-9, NOISE).is_consequence(), "TensorFlow's log also holds what is no error"
    assert TaskExit(-6, f"F{NOISE[1:]}").is_consequence()


def test_a_reason_is_a_line_and_a_code_that_of_a_shell():
    assert TaskExit(1, CULPRIT).reason() == "exit code 1: ValueError: units must be odd"
    assert TaskExit(-9).reason() == "ended by signal 9" and TaskExit(-9).status == 137
    assert TaskExit(3, "usage: x\nx: error: no such option").reason() == "exit code 3: x: error: no such option"
    assert TaskExit(3).status == 3


def test_roles_that_end_by_themselves():
    plain, servers = roles.run_tasks(2, evaluator=True), roles.run_tasks(2, num_ps=1)
    assert roles.ends_run(plain) == {Task("worker", 0), Task("worker", 1)}
    assert roles.ends_run(servers) == {Task("chief", 0)}
    assert roles.can_restart_by_itself(Task("worker", 1), servers) and not roles.can_restart_by_itself(
        Task("worker", 1), plain
    )
    assert not roles.can_restart_by_itself(Task("ps", 0), servers) and roles.can_restart_by_itself(
        Task("evaluator", 0), plain
    )
