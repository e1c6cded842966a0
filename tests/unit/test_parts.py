"""A training is a list of parts: which there are, in which order, and what the loop does with them."""

import contextlib
import inspect
import types

import keras
import pytest

from raytf.collectives import recovery_client
from raytf.fitting import fit_training
from raytf.worker import loop, parts
from raytf.worker.callbacks import StepReportCallback
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


def reporting(reported):
    """Returns the part that reports each 10 steps, in an epoch of 100 steps; it adds these to a list."""
    session = types.SimpleNamespace(report=lambda metrics, snapshot: reported.append(metrics["step"]))
    options = types.SimpleNamespace(report_steps=(10, "loss"))
    part = StepReportCallback(types.SimpleNamespace(options=options, session=session, history=[]))
    part.set_params({"steps": 100})
    part.set_model(types.SimpleNamespace(_get_metrics_result_or_logs=lambda logs: logs))
    return part


def executed(part, begins, steps=4):
    for begin in begins:
        part.on_train_batch_begin(begin)
        part.on_train_batch_end(begin + steps - 1, {"loss": 0.5})


@pytest.mark.parametrize("made", [0, 3])
def test_a_replacement_worker_reports_after_the_same_steps_as_the_others(made):
    """It joins in the execution of steps 25 to 28, of which `made` were made: the others report after 12, 24, 36."""
    by_other, by_joined = [], []
    other, joins = reporting(by_other), reporting(by_joined)
    other.on_epoch_begin(1)
    executed(other, range(0, 24, 4))
    other.on_train_batch_begin(24)
    joins.load_state_dict(other.state_dict())
    joins.on_epoch_begin(1)
    executed(joins, [24 + made], 4 - made)
    executed(joins, range(28, 100, 4))
    other.on_train_batch_end(27, {"loss": 0.5})
    executed(other, range(28, 100, 4))
    assert by_other == [12, 24, 36, 48, 60, 72, 84, 96] and by_joined == by_other[2:]
    for part in (other, joins):
        part.on_epoch_end(1, {"loss": 0.5})
        part.on_epoch_begin(2)
        executed(part, range(0, 100, 4))
    assert by_other == by_other[:8] * 2 and by_joined == by_other[2:]


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
