import pickle

from ray.train import TrainingFailedError, WorkerGroupError

from raytf import failures


class UnavailableError(Exception):
    pass


def test_the_cause_is_named_and_not_its_consequence():
    errors = {0: UnavailableError("Connection reset by peer"), 1: ValueError("bad row\nmore"), 2: KeyError("late")}
    try:
        with failures.first_cause():
            raise WorkerGroupError("text", errors)
    except TrainingFailedError as error:
        assert error.rank == 1 and str(error) == "worker 1 failed: ValueError: bad row"
        assert pickle.loads(pickle.dumps(error)).rank == 1
        assert set(error.worker_failures) == {0, 1, 2}


def test_without_a_clear_cause_the_lowest_rank_is_named():
    assert failures.first_rank({2: UnavailableError("a"), 1: UnavailableError("b")}) == 1


def test_a_worker_that_died_is_named_with_what_ray_knows():
    from ray.exceptions import ActorDiedError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    died = WorkerHealthCheckFailedError("A worker health check failed.", ActorDiedError())
    errors = {0: UnavailableError("Socket closed"), 1: died}
    assert failures.first_rank(errors) == 1
    assert "died" in failures._line(died)
