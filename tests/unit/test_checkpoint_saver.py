"""Checkpoints within epochs are what Keras would have written, whatever happens to the process that writes. No Ray."""

import concurrent.futures
import contextlib
import os
import select
import signal
import threading
import types

import numpy as np
import pyarrow.fs
import pytest

from raytf import activity
from raytf.compat import ray_train
from raytf.storage import checkpoint_files
from raytf.storage.checkpoint_files import CheckpointState
from raytf.storage.snapshots import NotWrittenError
from raytf.storage.step_folders import folder_name
from raytf.worker import checkpoint
from raytf.worker.callbacks import ReportCallback
from raytf.worker.checkpoint_saver import CheckpointSaver
from raytf.worker.session import PendingCheckpoint, RaySession, ReportQueue
from tests.logged import lines_logged, warnings_logged
from tests.unit.test_checkpoint import functional, subclassed, trained
from tests.unit.test_snapshots import is_gone
from tests.waiting import until


@pytest.fixture
def keeper(tmp_path):
    made = CheckpointSaver(pyarrow.fs.LocalFileSystem(), str(tmp_path / "run"))
    yield made
    pid = made._writer and made._writer.pid
    made.close()
    if pid:
        until(lambda: is_gone(pid))


def keep(keeper, model, step):
    state = CheckpointState(1, step, 7, False, [{"epoch": 1}], epoch_step=2)
    keeper.save_async(
        folder_name(step), model, checkpoint.checkpoint_parts(model, state, build=(functional, {}, ((3,), "float32")))
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("build", [pytest.param(functional, marks=pytest.mark.slow), subclassed])
def test_what_is_kept_is_restored_to_the_bit(tmp_path, keeper, build):
    model, x = trained(build)
    for step in (3, 6):
        keep(keeper, model, step)
        kept = [np.array(v) for v in [*model.variables, *model.optimizer.variables]]
        model.fit(x, x[:, :1], epochs=3, batch_size=8, shuffle=False, verbose=0)
    keeper._writer.finish(60.0)
    folder = str(tmp_path / "run" / folder_name(6))
    checkpoint_files.check_folder(folder)
    assert checkpoint.read_state(folder).step == 6
    other, _ = trained(build, steps=1)
    checkpoint.restore(folder, other)
    for left, right in zip([*other.variables, *other.optimizer.variables], kept, strict=True):
        np.testing.assert_array_equal(np.asarray(left), right)
    other.fit(x, x[:, :1], epochs=3, batch_size=8, shuffle=False, verbose=0)
    for left, right in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(left, right)


def has_hung_up(writer) -> bool:
    """Whether the end of its process is to be seen here: its threads close what they share when the last one goes."""
    poll = select.poll()
    poll.register(writer._control, select.POLLHUP)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


@pytest.mark.slow
def test_a_process_that_was_killed_is_followed_by_another(tmp_path, keeper):
    model, _ = trained(functional)
    keep(keeper, model, 1)
    keeper._writer.finish(60.0)
    os.kill(keeper._writer.pid, signal.SIGKILL)
    until(lambda: has_hung_up(keeper._writer))
    with warnings_logged(f"{folder_name(2)} could not be saved.*has ended; another one is started"):
        keep(keeper, model, 2)
    keep(keeper, model, 3)
    keeper._writer.finish(60.0)
    assert os.listdir(tmp_path / "run")
    checkpoint_files.check_folder(str(tmp_path / "run" / folder_name(3)))


@pytest.mark.slow
def test_failed_checkpoint_at_the_end_is_reported(tmp_path, keeper, set_timeouts):
    set_timeouts(checkpoint_last=0.5)
    (tmp_path / "run").write_text("in the way")
    model, _ = trained(functional)
    keep(keeper, model, 1)
    pid = keeper._writer.pid
    with warnings_logged("could not be saved"):
        keeper.close()
    (tmp_path / "run").unlink()
    with lines_logged() as lines:
        keeper.close()
    assert not lines
    assert pid is None or until(lambda: is_gone(pid))


@pytest.mark.slow
def test_epoch_checkpoint_is_waited_for_separately_and_replaced_by_newer_ones_once_it_failed(
    tmp_path, keeper, set_timeouts
):
    set_timeouts(checkpoint_failing=0.5)
    model, _ = trained(functional)
    moment = checkpoint.CheckpointSnapshot(
        model, CheckpointState(1, 4, 7, False, [{"epoch": 1}]), build=(functional, {}, ((3,), "float32"))
    )
    one = keeper.save_epoch_end("checkpoint_one", moment)
    keep(keeper, model, 5)
    one()
    checkpoint_files.check_folder(str(tmp_path / "run" / "checkpoint_one"))
    os.rename(tmp_path / "run", tmp_path / "aside")
    (tmp_path / "run").write_text("in the way")
    with (
        pytest.raises(NotWrittenError, match="checkpoint_two could not be saved"),
        warnings_logged("could not be written"),
    ):
        keeper.save_epoch_end("checkpoint_two", moment)()
    keep(keeper, model, 6)
    writer = keeper._writer
    until(lambda: writer._drain(0.01) or writer._begun == writer._last)  # else it may still be trying the one before
    (tmp_path / "run").unlink()
    writer.finish(60.0)
    assert os.listdir(tmp_path / "run") == [folder_name(6)]


@pytest.mark.slow
def test_wait_for_an_epoch_checkpoint_ends_with_the_training(tmp_path, keeper, set_timeouts):
    set_timeouts(checkpoint_last=0.5)
    (tmp_path / "run").write_text("in the way")
    model, _ = trained(functional)
    moment = checkpoint.CheckpointSnapshot(
        model, CheckpointState(1, 4, 7, False, [{"epoch": 1}]), build=(functional, {}, ((3,), "float32"))
    )
    pending = PendingCheckpoint(keeper.save_epoch_end("checkpoint_one", moment), 1, keeper.writer_priority)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        settled = thread.submit(pending.wait_until_done)
        with warnings_logged("could not be saved"):
            keeper.close()
            assert not settled.result(30)
    assert isinstance(pending(), NotWrittenError) and "checkpoint_one could not be saved: " in str(pending())


def test_the_training_waits_for_its_checkpoint_and_not_for_the_thread_that_reports(tmp_path, keeper):
    """That one may not come to it for long: Ray Train's controller takes one report after the other."""
    model, _ = trained(functional)
    moment = checkpoint.CheckpointSnapshot(
        model, CheckpointState(1, 4, 7, False, [{"epoch": 1}]), build=(functional, {}, ((3,), "float32"))
    )
    pending = PendingCheckpoint(keeper.save_epoch_end("checkpoint_one", moment), 1, keeper.writer_priority)
    assert pending() is None
    checkpoint_files.check_folder(str(tmp_path / "run" / "checkpoint_one"))
    keeper.close()
    assert pending.wait_until_done(), "it was whole"


def test_a_replaced_chief_reports_what_the_lost_one_saved_once_and_then_the_weights_of_the_end(monkeypatch):
    """At the end of the training EarlyStopping may restore others: they are reported for the same epoch."""
    reported = []

    def report_later(metrics, checkpoint_and_validate):
        reported.append(os.path.basename(checkpoint_and_validate()[0].path))
        return concurrent.futures.Future()

    monkeypatch.setattr(ray_train, "report_later", report_later)
    session = object.__new__(RaySession)
    names = iter(["checkpoint_2", "checkpoint_3"])
    vars(session).update(
        rank=0,
        storage=types.SimpleNamespace(
            make_default_checkpoint_dir_name=lambda: next(names),
            experiment_fs_path="/run",
            storage_filesystem=pyarrow.fs.LocalFileSystem(),
        ),
        _whole=(1, "checkpoint_1"),
        _pending=None,
        _reports=ReportQueue(),
        _reported_ends=0,
        _validate=False,
        _saver=types.SimpleNamespace(writer_priority=contextlib.nullcontext),
        _save_epoch_end=lambda name, snapshot: lambda: None,
    )
    snapshot = types.SimpleNamespace(broadcast_name=None, state=types.SimpleNamespace(epoch=1))
    for _ in range(2):
        assert session.report({"loss": 0.5}, snapshot)() is None
    assert reported == ["checkpoint_1", "checkpoint_3"]


@pytest.mark.parametrize("old", [True, False])
def test_reports_are_waited_for_where_one_is_old_or_many_are_left(old, monkeypatch, set_timeouts):
    reports, one, two = ReportQueue(), concurrent.futures.Future(), concurrent.futures.Future()
    reports.wait()
    for report in (one, two):
        reports.add(report)
        reports.wait()
    if old:
        set_timeouts(report_old=0.0)
    else:
        monkeypatch.setattr("raytf.worker.session._MOST_REPORTS", 0)
    found = []
    thread = threading.Thread(target=lambda: found.append(reports.wait()))
    thread.start()
    until(lambda: activity.tracker.snapshot()["phase"] == activity.DRIVER)
    assert not found
    one.set_result(None)
    thread.join(30)
    assert found and activity.tracker.snapshot()["phase"] != activity.DRIVER
    set_timeouts(report_taken=0.01)
    with pytest.raises(TimeoutError, match="timeout after 0.01 s: the driver did not take a report"):
        reports.wait()
    set_timeouts(report_old=0.0)
    with warnings_logged("The training has ended, and 1 of its reports"):
        reports.end()
    two.set_result(None)
    with lines_logged() as lines:
        reports.end()
    assert not lines


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kept", [True, False])
def test_a_last_checkpoint_that_is_not_kept_is_tried_once_more_and_then_an_error(kept):
    model, x = trained(functional)
    failed = NotWrittenError("checkpoint_two", "No space left on device")
    answers = [None, failed, None if kept else failed]

    def report(metrics, moment):
        answer = answers.pop(0)
        return lambda: answer

    with contextlib.nullcontext() if kept else pytest.raises(NotWrittenError, match="two could not be saved: No space"):
        model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[ReportCallback(report=report)])
    assert not answers


@pytest.mark.parametrize("scale", [1.0, np.nan])
def test_the_last_epoch_is_reported_once_also_if_its_weights_are_nan(scale):
    model, x = trained(functional)
    reported = []

    def report(metrics, moment):
        reported.append(metrics["epoch"])
        return lambda: None

    model.fit(x * scale, x[:, :1], epochs=2, verbose=0, callbacks=[ReportCallback(report=report)])
    assert reported == [1, 2]
