"""What becomes of checkpoints whose evaluator dies; the actor itself is in tests/cluster."""

import math
import types

from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError
from ray.train import Checkpoint, Result

from raytf import events
from raytf.storage.checkpoint_files import CheckpointState
from raytf.train import evaluator
from raytf.train.evaluator import EvaluationResults
from raytf.train.keras_trainer import KerasTrainer
from tests.logged import warnings_logged


class Memory(dict):
    """Entries without Ray."""

    put = dict.__setitem__
    names = dict.keys


def ask(monkeypatch, tmp_path, *calls):
    """The results, and the calls left, of as many checkpoints as there are lists of what each try comes to."""
    record, left = EvaluationResults(Memory()), [list(tries) for tries in calls]

    def evaluated(record, checkpoint):
        found = left[evaluator._epoch(checkpoint) - 1].pop(0)
        if isinstance(found, Exception):
            raise found
        return {"eval_loss": found}

    monkeypatch.setattr(evaluator, "_evaluated", evaluated)
    monkeypatch.setattr(evaluator, "_end", lambda record: record.entries.put("ended", True))
    for epoch, _ in enumerate(calls, 1):
        (tmp_path / "state.json").write_text(CheckpointState(epoch, 1, 0, False, []).to_json())
        evaluator._ask(record, Checkpoint.from_directory(tmp_path))
    assert bool(record.entries.get("ended")) == record.is_disabled()
    return *record.results(), [len(tries) for tries in left]


def test_a_checkpoint_is_tried_twice_and_after_two_in_a_row_none_is(monkeypatch, tmp_path):
    died = ActorDiedError()
    metrics, why, left = ask(
        monkeypatch, tmp_path, [died, 1.0], [died, died], [died, 3.0], [died, died], [died, died], [6.0]
    )
    assert metrics == {1: {"eval_loss": 1.0}, 3: {"eval_loss": 3.0}} and left == [0, 0, 0, 0, 0, 1]
    message = evaluator.sentence(why)
    assert "of epoch 2, 4, 5 (the evaluator's process was killed" in message
    assert "of epoch 6 (the evaluator was given up, as it died or did not start for 2 checkpoints in a row)" in message
    assert message.endswith("The training itself is complete") and len(message.splitlines()) == 1


def test_why_an_evaluation_is_missing(monkeypatch, tmp_path):
    full = OutOfMemoryError("Task was killed due to the node running low on memory.")
    wrong = RayTaskError("evaluate", "text", ValueError("labels must be below 4"))
    _, why, left = ask(monkeypatch, tmp_path, [full, full], [wrong, 1.0], [evaluator._NotStartedError("late"), 1.0])
    assert "its node was out of memory" in why[1]
    assert why[2] == "ValueError: labels must be below 4" and why[3] == "late"
    assert left == [0, 1, 1], "what would be the same again is not tried twice"


def test_record_lists_what_is_missing_and_forgets_all():
    record = EvaluationResults(Memory())
    record.put_metrics(1, {"eval_loss": 0.5})
    record.missing(2, "it rained")
    with warnings_logged(r"The evaluation is missing of epoch 2 \(it rained\)"):
        assert record.close() == {1: {"eval_loss": 0.5}}
    assert not record.entries


def test_the_first_epoch_whose_metrics_are_nan_is_an_event():
    taken: list[events.RunEvent] = []
    with events.recorded(taken.append):
        evaluator.report_not_finite({1: {"eval_loss": 1.0}})
        evaluator.report_not_finite({3: {"eval_loss": math.nan}, 1: {"eval_loss": 1.0}, 2: {"eval_loss": math.inf}})
    assert [(event.kind, event.epoch, event.name) for event in taken] == [("validation_not_finite", 2, "eval_loss")]


def test_complete_run_may_have_a_checkpoint_of_a_callbacks_own_report(monkeypatch):
    """Such a report need not name an epoch."""
    result = types.SimpleNamespace(best_checkpoints=[(None, {"loss": 1.0})], checkpoint=None)
    monkeypatch.setattr(Result, "from_path", lambda path, storage_filesystem: result)
    trainer = types.SimpleNamespace(_validated=lambda result: {})
    folder = types.SimpleNamespace(name="run", path="run", filesystem=None)
    assert KerasTrainer._ended(trainer, folder, types.SimpleNamespace(stopped=False, epoch=1)) is result
