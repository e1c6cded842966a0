"""Standby workers: how many there are, which are handed out, and the step that they make ahead."""

from __future__ import annotations

import functools
import itertools
import os
import signal

import pytest
import ray

from raytf import events
from raytf.data.stored import StoredDataset
from raytf.events import Kind
from raytf.runtime import processes
from raytf.runtime.processes import Process
from raytf.runtime.spares import StandbyPool
from raytf.train import entry
from tests.cluster import models
from tests.cluster.test_trainer import trainer
from tests.waiting import until

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]


class Started:
    """Starts processes, and knows them."""

    def __init__(self):
        self.actors = []

    def __call__(self, node):
        self.actors.append(processes.start_process(Process, node, {}))
        return self.actors[-1]


def nothing():
    return None


def less():
    return "a line"


def pid(actor):
    return actor.execute.remote(os.getpid)


def kept_of(each, start, preload):
    """Spares that look each time that they are kept: so much time has passed."""
    return StandbyPool(each, start, preload, functools.partial(next, itertools.count(0.0, 60.0)))


@pytest.fixture
def happened():
    """The events of this process."""
    found = []
    with events.recorded(found.append):
        yield found


def count(happened, kind):
    return sum(event.kind is kind for event in happened)


def test_one_that_was_used_or_died_is_followed_by_another_and_a_dead_one_is_not_handed_out(happened):
    node, started = ray.get_runtime_context().get_node_id(), Started()
    kept = kept_of(2, started, less)
    for _ in range(2):
        kept.keep({node})
        assert len(started.actors) == 2
    dead, alive = ray.get([pid(actor) for actor in started.actors])
    os.kill(dead, signal.SIGKILL)
    actor, its = kept.take(node, pid)
    assert (actor, its) == (started.actors[1], alive)
    assert kept.take(node, pid) is None
    assert kept.take("another node", pid) is None
    for _ in range(2):
        kept.keep({node})
        assert len(started.actors) == 4
    ray.get([pid(actor) for actor in started.actors[2:]])
    kept.keep({node})
    kept.keep(set())
    assert len(started.actors) == 4 and kept.take(node, pid) is None, "where no worker is, none is kept"
    (limited,) = [event for event in happened if event.kind is Kind.STANDBY_LIMITED]
    assert limited.why == "a line" and count(happened, Kind.STANDBY_STARTED) == 4
    assert count(happened, Kind.STANDBY_LOST) == 0, "a dead one was found as it was to be handed out"
    kept.close()
    assert ray.get(pid(actor)) == alive, "it is another's"
    ray.kill(actor)
    for other in started.actors[2:]:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(pid(other))


def test_failed_start_of_spares_is_logged_once_and_not_retried(happened):
    node, started = "a" * 56, Started()
    kept = kept_of(1, started, nothing)
    until(lambda: kept.keep({node}) or count(happened, Kind.STANDBY_GIVEN_UP))
    for _ in range(3):
        kept.keep({node})
    assert len(started.actors) == count(happened, Kind.STANDBY_STARTED) == count(happened, Kind.STANDBY_LOST) == 3
    assert count(happened, Kind.STANDBY_GIVEN_UP) == 1
    kept.close()


def with_sparse_gradients(config):
    """A model whose step gathers, too."""
    import keras
    from keras import layers

    rows = layers.Lambda(lambda x: keras.ops.clip(x, 0, 7))
    model = keras.Sequential(
        [keras.Input((6,)), rows, layers.Embedding(8, 4), layers.Flatten(), layers.Dense(4, "softmax")]
    )
    model.compile("adam", config["loss"], metrics=["accuracy"])
    return model


def left_behind():
    """What a step ahead must not leave."""
    from raytf.collectives import recovery_client
    from raytf.worker import context

    return os.environ.get("TF_CONFIG"), recovery_client.client.warms_up, context.setup()


def test_a_step_ahead_of_a_model_that_gathers_and_of_one_that_cannot_be_built(tmp_path):
    """The second is logged, and the process is of use all the same."""
    import pyarrow as pa

    table = pa.table(models.rows())
    reported = {}
    for loss in ("sparse_categorical_crossentropy", None):
        made = trainer(tmp_path, build=with_sparse_gradients, config={"loss": loss} if loss else {})
        task = made._task({"train": StoredDataset([ray.put(table)], [97], table.column_names)})
        reported[loss] = [ray.put((task, made._setup()))]
    actor = processes.start_process(Process, ray.get_runtime_context().get_node_id(), {})
    right, wrong = (actor.execute.remote(entry.warm_up_standby, its, 3, 1) for its in reported.values())
    assert ray.get(right) is None
    assert ray.get(wrong) == "KeyError: 'loss'"
    assert ray.get(actor.execute.remote(left_behind)) == (None, False, None)
    ray.kill(actor)
