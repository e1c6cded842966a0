import pickle
import subprocess
import sys

import pytest
from ray.exceptions import RayActorError

from raytf.errors import ConfigError, ResourceError, TrainingError, first_line, one_line, user_line
from raytf.train.run_worker import with_stack


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("A must be B", 3, "Use B"),
        ResourceError("The cluster must hold it", "2", "Add nodes"),
        TrainingError(1, "ValueError: x", "trace"),
    ],
)
def test_errors_pickle_unchanged(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)


def test_error_contains_rule_value_and_fix():
    assert str(ConfigError("A must be B", 3, "Use B")) == "A must be B; received: 3. Use B."
    assert str(TrainingError(1, "ValueError: x")) == "worker 1 failed: ValueError: x"


def test_importing_raytf_imports_neither_ray_nor_tensorflow():
    heavy = {"ray", "tensorflow", "keras", "numpy", "pandas", "plotly"}
    code = f"import sys, raytf; print(sorted({heavy!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_an_error_in_what_autograph_has_made_is_the_user_s_own():
    import tensorflow as tf

    def inner(x):
        raise KeyError(f"no {x.shape}\nhere")

    @tf.function
    def outer(x):
        return inner(x) + 1

    with pytest.raises(Exception, match="in user code") as caught:
        outer(tf.ones(3))
    line = r"KeyError: 'no (3,)\nhere' (test_errors.py, line "
    assert one_line(caught.value).startswith(line) and user_line(caught.value) in one_line(caught.value)


def test_an_error_in_a_function_given_to_map_names_the_users_line():
    import tensorflow as tf

    def fails(x):
        return x["none"]

    with pytest.raises(TypeError) as caught:
        tf.data.Dataset.range(3).map(fails)
    assert user_line(caught.value) == f" (test_errors.py, line {fails.__code__.co_firstlineno + 1})"
    with pytest.raises(tf.errors.OpError) as caught:
        list(tf.data.Dataset.range(3).map(lambda x: tf.py_function(lambda x: {}[int(x)], [x], tf.int64)))
    assert one_line(caught.value).startswith("KeyError: 0 (")


def test_what_keras_makes_bold_is_plain():
    assert first_line(ValueError("\x1b[1mInvalid input\x1b[0m\nmore")) == "Invalid input"


def test_a_worker_does_not_print_the_stack_of_its_error(caplog):
    """The driver shows that of the worker that failed first."""
    for error in (ConfigError("callbacks must be a list", "3", "Pass one"), RayActorError(), KeyError("a")):
        try:
            raise error
        except Exception as raised:
            assert with_stack(raised)._base_exc is error
    assert not caplog.messages


def test_the_line_of_a_task_is_that_of_the_error_that_it_raised():
    import ray.exceptions

    error = ray.exceptions.RayTaskError(
        "reserve", "a traceback", ConfigError("network must be here", "nope0", "Use eth0")
    )
    line = "ConfigError: network must be here; received: nope0. Use eth0."
    assert one_line(error) == one_line(error.as_instanceof_cause()) == line
