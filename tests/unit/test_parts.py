"""A training is a list of parts: which there are, in which order, and what the loop does with them."""

import contextlib
import inspect
import types

import keras
import pytest

from raytf.collectives import recovery_client
from raytf.fitting import fit_training
from raytf.worker import loop, parts
from raytf.worker.part import TrainingPart
from raytf.worker.parts import PARTS


class Counting(TrainingPart):
    """A part that counts, as one that somebody adds."""

    def __init__(self, training):
        super().__init__()
        self.count, self.log = 0, training.log

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]

    @contextlib.contextmanager
    def running(self):
        self.log.append("begins")
        yield
        self.log.append("ends")


class Unneeded(TrainingPart):
    @classmethod
    def create(cls, training):
        assert Counting in training.parts, "those before it exist"


class Several(TrainingPart):
    @property
    def callbacks(self):
        return [keras.callbacks.History(), keras.callbacks.TerminateOnNaN()]


def trained(table):
    training = types.SimpleNamespace(parts={}, log=[])

    def fit(callbacks):
        training.log.append([type(callback).__name__ for callback in callbacks])

    training.fit = fit
    loop.run_training(training, table)
    return training


def test_the_loop_assembles_parts_in_the_order_of_the_table():
    training = trained([Counting, Unneeded, Several])
    assert list(training.parts) == [Counting, Several]
    assert training.log == ["begins", ["Counting", "History", "TerminateOnNaN"], "ends"]
    assert training.parts[Counting].count == 0


def test_a_replacement_worker_takes_over_the_state_of_its_parts(monkeypatch):
    place = types.SimpleNamespace(shared_state={"parts": {"Counting": {"count": 3}, "Another": {}}})
    monkeypatch.setattr(recovery_client.client, "replacement_state", place)
    assert trained([Counting, Several]).parts[Counting].count == 3


@pytest.mark.parametrize("table", [PARTS, fit_training.TABLE])
def test_a_part_has_one_place_and_raytf_reads_its_batches_without_an_exchange(table):
    assert len(set(table)) == len({kind.__name__ for kind in table}) == len(table)
    assert all(issubclass(kind, TrainingPart) and kind.raytf_local_batches for kind in table)
    assert [kind for kind in table if kind in PARTS] == list(PARTS)


def test_parts_after_the_agreement_are_last():
    """Keras gets them after the others whatever the table's order, which must be the same."""
    after = [getattr(kind, "raytf_after_agreement", False) for kind in PARTS]
    first = PARTS.index(parts.MidEpochResume)
    assert all(after[first:])


def test_the_loop_knows_no_part():
    code = inspect.getsource(loop)
    assert "isinstance" not in code and len(code.splitlines()) <= 50
    assert not any(kind.__name__ in code for kind in PARTS)
