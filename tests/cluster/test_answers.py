"""Waits on several actors: in whatever order they answer, the first failure ends them, and so does a deadline."""

import os
import threading
import time

import pytest
import ray
from ray.exceptions import RayActorError

from raytf.runtime.answers import NoAnswerError, collect_answers, in_completion_order

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Actor:
    def __init__(self):
        self._told = threading.Event()

    def wait(self, what):
        self._told.wait()
        return what

    def tell(self, what):
        self._told.set()
        return what

    def fail(self):
        raise ValueError("no room")

    def die(self):
        os._exit(1)


@pytest.fixture(scope="module")
def actors():
    made = [ray.remote(Actor).options(num_cpus=0, max_concurrency=2).remote() for _ in range(3)]
    ray.get([actor.tell.remote(0) for actor in made])
    yield made
    for actor in made:
        ray.kill(actor)


@pytest.fixture
def silent(actors):
    """An actor that does not answer while the test runs."""
    actor = ray.remote(Actor).options(num_cpus=0, max_concurrency=2).remote()
    yield actor
    ray.kill(actor)


def test_answers_keep_their_order(actors, silent):
    refs = [silent.wait.remote("first"), *(actor.tell.remote(i) for i, actor in enumerate(actors))]
    ray.wait(refs[1:], num_returns=3)
    silent.tell.remote(0)
    assert collect_answers(refs, 60, "numbers") == ["first", 0, 1, 2]
    assert collect_answers([], 60, "nothing") == []


def test_the_first_failure_ends_the_wait(actors, silent):
    waits = silent.wait.remote(0)
    with pytest.raises(ValueError, match="no room") as caught:
        collect_answers([waits, actors[0].tell.remote(0), actors[1].fail.remote()], None, "their answers")
    assert "worker 2 failed first; waited for: their answers" in caught.value.__notes__
    made = {"names": ["ps 0", "worker 0"], "failure": lambda name, error: KeyError(f"{name}: {type(error).__name__}")}
    with pytest.raises(KeyError, match="worker 0: ActorDiedError") as caught:
        collect_answers([waits, actors.pop().die.remote()], None, "their answers", **made)
    assert isinstance(caught.value.__cause__, RayActorError)


def test_deadline_names_the_late_workers(actors, silent):
    refs = [actors[0].tell.remote(0), silent.wait.remote(0)]
    message = "timeout after 0.5 s: worker 1 did not answer; waited for: the workers' addresses"
    with pytest.raises(NoAnswerError, match=message):
        collect_answers(refs, 0.5, "the workers' addresses")


def test_poll_function_may_end_the_wait(silent):
    calls = []

    def look():
        calls.append(1)
        if len(calls) == 2:
            raise InterruptedError("worker 0 is frozen")

    with pytest.raises(InterruptedError, match="is frozen"):
        collect_answers([silent.wait.remote(0)], None, "a step", check=look)


@pytest.mark.parametrize("take", [collect_answers, lambda *of: list(in_completion_order(*of))])
def test_a_thousand_answers_cost_as_much_each_as_a_hundred(take):
    """Bookkeeping at a start: what one answer takes of the processor does not grow with their number."""

    def seconds(count):
        refs = [ray.put(i) for i in range(count)]
        began = time.process_time()
        take(refs, 60, "numbers")
        return (time.process_time() - began) / count

    seconds(10)
    few, many = (min(seconds(count) for _ in range(3)) for count in (100, 1000))
    assert many < 3 * few
