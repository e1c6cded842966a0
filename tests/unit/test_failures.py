import os
import pickle

import pytest
from ray.train import TrainingFailedError

from raytf.errors import ConfigError, PeerLostError, definition_line, one_line
from raytf.runtime import failures


def tensorflow_error(name, message):
    """An error of a type that bears TensorFlow's name, without TensorFlow."""
    return type(name, (Exception,), {"__module__": "tensorflow.python.framework.errors_impl"})(message)


def test_the_cause_is_named_and_not_its_consequence():
    errors = {0: PeerLostError(0, "it hung up"), 1: ValueError("bad row\nmore"), 2: KeyError("late")}
    error = failures.first_cause(errors)
    assert isinstance(error, TrainingFailedError)
    assert error.rank == 1 and str(error) == "worker 1 failed: ValueError: bad row"
    assert pickle.loads(pickle.dumps(error)).rank == 1
    assert set(error.worker_failures) == {0, 1, 2}


@pytest.mark.parametrize(
    ("error", "consequence"),
    [
        (tensorflow_error("UnavailableError", "Graph execution error"), True),
        (tensorflow_error("InternalError", "x\nRPC: /tensorflow.WorkerService"), True),
        (tensorflow_error("UnknownError", "Graph execution error:\nPeerLostError: worker 0 lost a neighbour"), True),
        (tensorflow_error("InvalidArgumentError", "labels must be below 4"), False),
        (RuntimeError("CancelledError of our own, Connection reset by peer"), False),
        (type("UnavailableError", (Exception,), {"__module__": "mine"})("closed today"), False),
        (PeerLostError(0, "it hung up"), True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_consequence_is_known_by_its_type_and_words_count_in_those_of_tensorflow_only(error, consequence):
    assert failures.is_consequence(error) == consequence


def test_without_a_clear_cause_the_lowest_rank_is_named():
    assert failures.first_rank({2: PeerLostError(2, "a"), 1: PeerLostError(1, "b")}) == 1


def test_a_worker_that_died_is_named_with_what_ray_knows():
    from ray.exceptions import ActorDiedError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    died = WorkerHealthCheckFailedError("A worker health check failed.", ActorDiedError())
    errors = {0: PeerLostError(0, "Socket closed"), 1: died}
    assert failures.first_rank(errors) == 1
    assert "died" in failures._line(died)


def test_a_class_without_its_file_is_named_by_its_first_method():
    source = "class Own:\n    size = 1\n\n    def call(self):\n        return 1\n"
    names: dict = {"__name__": "a_module_that_is_elsewhere"}
    exec(compile(source, "/far/own_layers.py", "exec"), names)
    assert definition_line(names["Own"]) == "own_layers.py, line 4"
    assert definition_line(print) == "line unknown"


def test_a_dead_actor_is_described_by_how_its_process_ended():
    head = "The actor died unexpectedly before finishing this task.\n\tclass_name: A\n\tpid: 7\n\tip: 10.0.0.2\n"
    died = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
    for reason, expected in (
        (f"{died}Worker unexpectedly exits with a connection error code 2. End of file. Some ...", "it was killed"),
        (f"{died}Worker exits with an exit code 1.", "Worker exits with an exit code 1"),
        ("The actor is dead because it was killed by `ray.kill`.", "it was killed by `ray.kill`"),
    ):
        line = one_line(RuntimeError(head + reason))
        assert line.startswith(f"RuntimeError: process 7 on 10.0.0.2: {expected}") and "\n" not in line, line
    assert one_line(RuntimeError("another pid: 7")) == "RuntimeError: another pid: 7"


def test_a_frozen_worker_is_the_cause_and_its_sentence_survives_the_way_to_the_driver():
    frozen = failures.WorkerFrozenError("its process 7 on 10.0.0.2 is stopped by a signal (SIGSTOP?), for 10 s")
    errors = {0: tensorflow_error("UnavailableError", "Graph execution error"), 1: pickle.loads(pickle.dumps(frozen))}
    text = "worker 1 failed: WorkerFrozenError: its process 7 on 10.0.0.2 is stopped"
    assert str(failures.first_cause(errors)).startswith(text)


def test_a_rule_of_raytf_is_shown_without_its_own_lines_and_with_those_of_the_user():
    raytfs, users = os.path.join(os.path.dirname(failures.__file__), "hangs.py"), "/home/ann/train.py"

    def details(error, *files):
        error._traceback_str = "".join(f'  File "{file}", line 3, in read\n    x()\n' for file in files)
        return failures.first_cause({0: error}).details

    refused = lambda: ConfigError("Records must fit the schema", "'a': no feature 'x'", "Correct schema")
    assert details(refused(), raytfs) == ""
    assert users in details(refused(), users, raytfs)
    assert raytfs in details(ValueError("a defect"), raytfs)
