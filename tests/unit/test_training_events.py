"""What a training on workers has found reaches the driver: before its end, once, and with the right workers."""

from __future__ import annotations

import logging
import queue
import threading
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf import events
from raytf.events import Kind, RunEvent
from raytf.runtime.failures import user_error
from raytf.train import training_events
from raytf.train.group import LoopEnded, PeerLossNoticed
from raytf.train.run_worker import Channel, RunWorker
from raytf.train.session_functions import TrialSetup
from raytf.train.training_events import TrainingEvents
from raytf.train.worker_group import GroupWorker
from raytf.worker.trial_session import TrialSession


def loss(rank: int, step: int, workers: int = 2) -> RunEvent:
    why, more = f"since step {step} of epoch 1", "The training continues"
    return RunEvent(kind=Kind.LOSS_NOT_FINITE, ranks=(rank,), workers=workers, step=step, epoch=1, why=why, more=more)


@pytest.fixture
def emitted(monkeypatch):
    taken: list[RunEvent] = []
    monkeypatch.setattr(events, "_takers", [taken.append])
    return taken


@given(st.permutations(range(4)), st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_the_first_step_of_all_workers_is_emitted_once_with_the_workers_of_its_rows(order, steps):
    taken: list[RunEvent] = []
    with events.recorded(taken.append):
        merged = TrainingEvents()
        for rank in order:
            merged.take(loss(rank, steps[rank], workers=4))
        merged.take(loss(0, 9, workers=4))
        merged.flush()
    (event,) = taken
    assert event.step == min(steps)
    assert event.ranks == tuple(rank for rank in range(4) if steps[rank] == min(steps))


def test_workers_whose_loss_is_finite_are_not_waited_for(emitted):
    now = [0.0]
    merged = TrainingEvents(clock=lambda: now[0])
    merged.take(loss(1, 7))
    merged.check()
    assert not emitted, "another worker may have an earlier step"
    now[0] += training_events._OTHERS_INTERVAL
    merged.check()
    merged.take(loss(0, 8))
    merged.flush()
    assert [(event.ranks, event.step) for event in emitted] == [((1,), 7)]


def test_each_kind_is_emitted_once(emitted):
    """As a worker that replaces another one finds the same."""
    merged = TrainingEvents()
    for _ in range(2):
        merged.take(RunEvent(kind=Kind.VALIDATION_NOT_FINITE, name="val_loss", epoch=1))
        merged.take(RunEvent(kind=Kind.LOSS_NOT_FINITE, why="in epoch 1", more="It ends", epoch=1))
    assert [event.kind for event in emitted] == [Kind.VALIDATION_NOT_FINITE, Kind.LOSS_NOT_FINITE]


def test_a_worker_of_a_run_sends_an_event_without_waiting_and_before_its_end():
    channel = Channel(0, 1, "first")
    channel.send("report")
    found = loss(0, 1)
    channel.send_run_event(found)  # although the report was not taken
    channel.wake()
    ending = threading.Thread(target=channel.send, args=(LoopEnded(),), daemon=True)
    ending.start()
    assert [channel.take(), channel.take()] == ["report", found]
    assert channel.take(seconds=60) == LoopEnded()
    ending.join(60)
    channel.wake()
    channel.wake()
    assert isinstance(channel.take(), PeerLossNoticed)
    with pytest.raises(queue.Empty):
        channel.take()


def test_a_worker_of_a_trial_sends_an_event_before_its_report():
    worker = GroupWorker()
    worker._session = TrialSession(0, 1, None, "trial")
    found = loss(0, 1)
    worker._session.emit(found)
    worker._session.events.put(("report", {"loss": 1.0}))
    assert worker.next_event() == found and worker.next_event().metrics == {"loss": 1.0}


def test_an_error_before_the_loop_reaches_the_driver(tmp_path):
    """A full disk, here a file instead of a folder, is an error of the worker and not silence."""
    (tmp_path / "file").touch()
    storage = types.SimpleNamespace(local_working_directory=str(tmp_path / "file" / "run"))
    level = logging.getLogger("ray.train").level
    setup = TrialSetup(nodes=("a",))
    job = types.SimpleNamespace(name="run", level=level, storage=storage, trial_setup=setup, validates=False)
    channel = Channel(0, 1, "run")
    RunWorker()._run(job, channel)
    ended = channel.take()
    assert isinstance(ended, LoopEnded) and isinstance(user_error(ended.error), NotADirectoryError)
