"""The position of a user's train loop in its rows: saved and restored at any batch, for any number of workers."""

import itertools
import json
import types

import numpy as np
import pyarrow as pa
import pytest
import ray.train
import ray.train.collective
import tensorflow as tf

from raytf import ConfigError, Position, get_dataset
from raytf.data import stored, streamed
from raytf.runtime.settings import WorkerSetup
from raytf.worker import context
from raytf.worker import dataset as dataset_module
from tests.unit.test_feed import ROWS, blocks, feed, numbers


def rows(**options):
    """What `get_dataset` gives, without a run around it."""
    made = feed(numbers(), "id", **options)
    given = made.dataset()
    dataset_module._feeds[given] = made
    return given


def read(position, epochs=3, stop=None):
    """Batches of each epoch that is left, by number; ends in the middle of a batch's step after `stop` batches."""
    found = {}
    for epoch in position.epochs(epochs):
        found[position.epoch] = []
        for batch in epoch:
            found[position.epoch].append(batch.numpy().tolist())
            if stop is not None and sum(map(len, found.values())) == stop:
                return found
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["full", "window", "none"])
def test_loop_resumes_after_any_batch(shuffle, tmp_path):
    options = {"shuffle": shuffle, "window": 50}
    whole = read(Position(rows(**options)))
    assert [len(batches) for batches in whole.values()] == [5, 5, 5]
    for epoch in whole.values():
        assert sorted(np.concatenate(epoch)) == list(range(ROWS))
    for stop in (1, 4, 5, 6, 14):
        position = Position(rows(**options))
        first = read(position, stop=stop)
        path = tf.train.Checkpoint(position=position).save(str(tmp_path / "saved"))
        again = Position(rows(**options))
        tf.train.Checkpoint(position=again).restore(path).assert_existing_objects_matched()
        assert again.get_state() == position.get_state() == json.loads(json.dumps(position.get_state()))
        rest = read(again)
        for epoch, batches in whole.items():
            assert first.get(epoch, []) + rest.get(epoch, []) == batches, f"epoch {epoch}, stopped after {stop} batches"


@pytest.mark.slow
def test_other_numbers_of_workers_resume_together():
    options = {"global_batch": 34, "shuffle": "full"}
    alone = read(Position(rows(**options)))
    position = Position(rows(**options))
    read(position, stop=6)
    parts = []
    for worker in range(3):
        restored = Position(rows(worker=worker, workers=3, **options))
        restored.set_state(position.get_state())
        parts.append(read(restored))
    for epoch, batches in {1: alone[1][2:], 2: alone[2]}.items():
        assert [[*itertools.chain(*step)] for step in zip(*(part[epoch] for part in parts), strict=True)] == batches


def test_an_epoch_that_ended_ends_once_more_without_a_batch():
    """The last batch was kept, and what comes after an epoch was not done."""
    position = Position(rows())
    read(position, stop=5)
    again = Position(rows())
    again.set_state(position.get_state())
    found = read(again)
    assert found[0] == [] and len(found[1]) == 5


def test_the_rest_of_an_epoch_is_a_dataset_of_that_many_batches():
    position = Position(rows())
    position.add(2)
    assert position.remaining().cardinality() == len(list(position.remaining())) == 3
    position.add(3)
    assert (position.epoch, position.step) == (1, 0)
    for steps in (6, -1, 1.0, True):
        with pytest.raises(ConfigError, match="steps must be 0 to 5, which are left"):
            position.add(steps)


def test_other_rows_are_refused():
    position = Position(rows())
    read(position, stop=3)
    other = Position(rows(global_batch=20, seed=3))
    with pytest.raises(ConfigError, match=r"step 3 of an epoch with batch_size 20, was 25, seed 3, was 0"):
        other.set_state(position.get_state())
    other.set_state({**position.get_state(), "step": 0})
    for nonsense in ({}, None, {"epoch": -1, "step": 0, "order": {}}, {"epoch": 0, "step": 1.5, "order": {}}):
        with pytest.raises(ConfigError, match="set_state takes what get_state gave"):
            other.set_state(nonsense)
    with pytest.raises(ConfigError, match=r"A Position is that of a dataset of raytf\.get_dataset"):
        Position(rows().map(lambda x: x))


def test_a_checkpoint_that_holds_something_else_is_refused():
    position = Position(rows())
    for text in ("", "{", "[1]", b"\xff"):
        with pytest.raises(ConfigError, match="what serialize wrote"):
            position.deserialize(text)


@pytest.mark.parametrize("epochs", [-1, "3", None, 1.5, True])
def test_epochs_that_are_no_number_are_refused_before_the_first_one(epochs):
    with pytest.raises(ConfigError, match="epochs must be an integer of at least 0; received"):
        Position(rows()).epochs(epochs)


def test_a_step_that_the_epoch_does_not_have_is_refused():
    """The epoch would be skipped without a word."""
    position = Position(rows())
    with pytest.raises(ConfigError, match="an epoch of 5 steps; received: step 6"):
        position.set_state({**position.get_state(), "step": 6})
    assert (position.epoch, position.step) == (0, 0)


def test_a_train_loop_gets_the_rows_of_its_own_trainer_and_reads_them_once(monkeypatch):
    """With num_workers=0 all loops of a notebook run in one process."""
    read = []
    monkeypatch.setattr(stored, "projected", lambda rows, specs: rows)
    monkeypatch.setattr(streamed, "materialized", lambda name, rows, specs: read.append(specs) or blocks(rows, (1, 3)))
    monkeypatch.setattr(ray.train.collective, "broadcast_from_rank_zero", lambda rows: rows)
    alone = types.SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)
    monkeypatch.setattr(ray.train, "get_context", lambda: alone)
    for day in (1, 2):
        setup = WorkerSetup(datasets={"train": pa.table({"x": [day] * 4, "y": [10 * day] * 4})})
        monkeypatch.setattr(context, "_context", [context.TrainContext(setup)])
        for feature, value in (("x", day), ("x", day), ("y", 10 * day), ("x", day)):
            (batch,) = get_dataset("train", batch_size=4, features=feature).as_numpy_iterator()
            assert batch.tolist() == [value] * 4
    assert [specs is None for specs in read] == [False, True] * 2, "all columns as soon as another one is used"
