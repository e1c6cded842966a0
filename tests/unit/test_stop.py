"""Workers that are asked to end do so after the same execution, wherever the question finds them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pickle
import random
import signal
import sys
import threading
import types

import pyarrow.fs
import pytest
import tensorflow as tf

from raytf.errors import StoppedError, TrainingError
from raytf.runtime import connection
from raytf.storage.run_folder import RunFolder
from raytf.train.graceful_stop import GracefulStop
from raytf.worker import step_checkpoints, stop
from raytf.worker.callbacks import EpochReports
from raytf.worker.checkpoint_every import CheckpointInterval
from raytf.worker.stop import DRAIN, RESIZE, STOP, StopBarrier, StoppedForRestartError, StopTraining


class Worker(threading.Thread):
    """Makes executions in step with others, until its gate marks one as the last."""

    def __init__(self, together, most):
        super().__init__(daemon=True)
        self.gate, self.together, self.most, self.made = StopBarrier(), together, most, 0

    def run(self):
        self.gate.begin()
        while self.made < self.most:
            self.together.wait(30)
            self.made += 1
            if self.gate.is_last():
                return


@pytest.mark.parametrize("seed", range(20))
def test_workers_in_step_end_after_the_same_execution(seed):
    """Each is asked at another time; a barrier replaces the collectives of a step."""
    chance = random.Random(seed)
    together = threading.Barrier(3)
    workers = [Worker(together, 1_000_000) for _ in range(3)]
    for worker in workers:
        worker.start()
    while workers[0].made < chance.randrange(1, 2000):
        pass
    begun = [worker.gate.request(STOP) for worker in chance.sample(workers, 3)]
    for worker in workers:
        worker.gate.stop_after(max(begun))
    for worker in workers:
        worker.join(30)
        assert not worker.is_alive()
    assert {worker.made for worker in workers} == {max(begun)}


@pytest.mark.parametrize("known", [False, True])
def test_one_that_joins_ends_after_the_same_execution(known):
    """It makes its first one with the third of the other, before or after that learned after which to end."""
    other, joins = StopBarrier(), StopBarrier()
    other.begin()
    assert not other.is_last() and not other.is_last()
    if known:
        other.stop_after(other.request(STOP))
    joins.reset()
    joins.begin(other.state())
    if not known:
        begun = max(gate.request(STOP) for gate in (other, joins))
        for gate in (other, joins):
            gate.stop_after(begun)
    assert other.is_last() and joins.is_last() and other.why == joins.why == STOP


def test_asked_before_the_first_execution_a_training_ends_after_it():
    gate = StopBarrier()
    assert gate.request(DRAIN) == 0
    gate.stop_after(0)
    gate.begin()
    assert not gate.is_over() and gate.is_last() and gate.is_over()


def test_asked_between_epochs_the_first_execution_of_the_next_is_the_last():
    gate = StopBarrier()
    gate.begin()
    assert not gate.is_last()
    assert gate.request(STOP) == 2 == gate.request(STOP)
    gate.stop_after(2)
    gate.stop_after(7)  # asked twice: the first answer holds
    assert not gate.is_over()
    assert gate.is_last()


@pytest.mark.parametrize(
    ("epoch", "stopped", "raises"), [(0, False, True), (0, True, False), (1, False, False)], ids=str
)
def test_a_stop_at_the_end_of_the_last_epoch_leaves_the_end_of_the_training_to_keras(
    epoch, stopped, raises, monkeypatch
):
    """It is reported as complete: no other start would call `on_train_end`."""
    gate = StopBarrier()
    monkeypatch.setattr(stop, "stop_barrier", gate)
    saver = step_checkpoints.StepCheckpointCallback
    monkeypatch.setattr(saver, "_are_alike", lambda self: False)  # as between two averages of sync_every
    training = types.SimpleNamespace(
        options=types.SimpleNamespace(checkpoint_every=CheckpointInterval(), memory_every=None),
        session=types.SimpleNamespace(shares_writing=False),
        position=types.SimpleNamespace(step=4, epoch_step=4),
        parts={EpochReports: None},
        order={},
        feeds={},
    )
    part = saver(training, step_checkpoints.NO_HOLDERS)
    part.set_params({"epochs": 2, "steps": 4})
    part.set_model(types.SimpleNamespace(distribute_strategy=tf.distribute.get_strategy(), stop_training=stopped))
    part.on_train_begin()
    gate.stop_after(gate.request(STOP))
    part.on_train_batch_end(3)
    with pytest.raises(StopTraining) if raises else contextlib.nullcontext():
        part.on_epoch_end(epoch)


def test_a_word_for_the_training_before_ends_no_other_one():
    """A process stays when its group ends, and learns late after which execution that was to end."""
    gate = StopBarrier()
    gate.request(DRAIN)
    gate.reset()
    gate.stop_after(1)
    gate.begin()
    assert not gate.is_last() and not gate.is_over()


def test_worker_that_gets_no_stop_step_does_not_wait_for_ever(set_timeouts):
    set_timeouts(stop_step=0.01)
    gate = StopBarrier()
    gate.begin()
    gate.request(STOP)
    with pytest.raises(stop.NoStopAnswerError, match="timeout after .* as another worker did not answer"):
        gate.is_last()


def test_a_question_that_is_taken_back_ends_nobody_and_another_one_still_does():
    gate = StopBarrier()
    gate.begin()
    gate.request(RESIZE)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        waits = threads.submit(gate.is_last)
        gate.withdraw(RESIZE)
        assert not waits.result(30)
    gate.request(RESIZE)
    begun = gate.request(STOP)
    gate.withdraw(RESIZE)
    gate.stop_after(begun)
    gate.withdraw(STOP)  # too late
    assert gate.is_last() and gate.why == STOP


def test_errors_travel_and_bear_their_exit_codes():
    error = pickle.loads(pickle.dumps(StoppedError(signal.SIGTERM, "it stands there", 7)))
    assert (error.code, error.step, str(error)) == (143, 7, "SIGTERM: it stands there")
    assert not isinstance(error, Exception), "a loop that catches Exception would go on to the next model"
    assert isinstance(error, SystemExit) and StoppedError(signal.SIGINT, "").code == 130
    drained = pickle.loads(pickle.dumps(StoppedForRestartError(7)))
    assert drained.preempted and "after step 7, from which the run resumes" in str(drained)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_training_ends_all_at_once_and_handlers_are_put_back(number, capsys):
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(StoppedError, match="ended at once") as caught, GracefulStop():
        os.kill(os.getpid(), number)
    assert caught.value.code == 128 + number
    assert f"raytf: {number.name}: ended at once" in capsys.readouterr().err
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


def test_in_this_process_a_signal_ends_after_the_execution_that_has_begun():
    def train():
        stop.stop_barrier.begin()
        assert not stop.stop_barrier.is_last()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # as `timeout` does: at once it is the same one
        assert stop.stop_barrier.is_last()
        return {"step": 2}

    with GracefulStop() as end:
        assert end.run_in_process(train) == {"step": 2}
    assert end.number == signal.SIGTERM
    stop.stop_barrier.reset()


def test_what_is_not_kept_is_an_error_and_what_has_ended_is_not(tmp_path):
    folder, end = RunFolder(pyarrow.fs.LocalFileSystem(), str(tmp_path), "run"), GracefulStop()
    end.check(types.SimpleNamespace(return_value=None), folder)
    end.number = signal.SIGTERM
    with pytest.raises(StoppedError, match="had made its last step; its last checkpoint is saved"):
        end.check(types.SimpleNamespace(return_value=None), folder)
    with pytest.raises(TrainingError, match="SIGTERM: it has stopped after step 7, .* is not saved; there is no"):
        end.check(types.SimpleNamespace(return_value={"step": 7}), folder)


def itself(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_where_nothing_can_be_asked_the_first_signal_ends_it_at_once(number, capfd):
    before = signal.getsignal(number)
    with pytest.raises(StoppedError) as stopped, GracefulStop(after_step=False, at_once="ended, and why") as ending:
        itself(number)
    assert stopped.value.code == 128 + number and ending.number == number
    assert capfd.readouterr().err == f"raytf: {signal.Signals(number).name}: ended, and why\n"
    assert signal.getsignal(number) == before


def test_what_ray_makes_of_it_while_it_waits_is_a_stop_all_the_same(capfd):
    with pytest.raises(StoppedError) as stopped, GracefulStop(at_once="ended, and why"):
        try:
            itself(signal.SIGTERM)
        except SystemExit:
            raise SystemExit(1) from None  # as `ray.get` does
    assert stopped.value.code == 143 and "SIGTERM: ended, and why" in capfd.readouterr().err
    with pytest.raises(SystemExit) as ended, GracefulStop():
        raise SystemExit(1)  # of the user's own
    assert not isinstance(ended.value, StoppedError)


def test_signal_raises_at_once_where_its_callback_returns_false():
    heard = []
    with GracefulStop() as ending, ending.calls(lambda: heard.append(1)):
        itself(signal.SIGINT)
    assert heard == [1] and ending.number == signal.SIGINT
    with pytest.raises(StoppedError), GracefulStop() as ending, ending.calls(lambda: False):
        itself(signal.SIGINT)


def test_sigint_stays_pythons_where_it_is_not_taken():
    with pytest.raises(KeyboardInterrupt), GracefulStop(signals=[signal.SIGTERM]):
        itself(signal.SIGINT)


def test_sigterm_is_whose_it_was_when_ray_has_started():
    """Ray's own handler ends a driver with 15, which no shell knows."""
    heard = []

    def as_ray():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))

    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with connection._sigterm_kept():
            as_ray()
        itself(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(SystemExit) as ended, connection._sigterm_kept():
            as_ray()
            itself(signal.SIGTERM)
        assert ended.value.code == 143
        with pytest.raises(SystemExit) as ended:
            itself(signal.SIGTERM)
        assert ended.value.code == 143
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_after_the_loop_waits_for_the_result(number):
    """Evaluations may still run then: all steps are made, and `check` reports what is saved."""
    future, asked = concurrent.futures.Future(), []

    def loop_has_ended():
        asked.append(True)
        threading.Timer(0.1, future.set_result, ["the result"]).start()

    with GracefulStop() as ending:
        ending.number = number
        ending._changed.set()
        assert ending.result_of(future, loop_has_ended) == "the result" and asked == [True]
