"""A checkpoint takes its own size of memory and no more, and nothing of its size passes through /tmp. No Ray."""

import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pyarrow.fs
import pytest

from raytf.storage import checkpoint_files, snapshot_buffers, snapshots
from raytf.storage.checkpoint_files import CheckpointState
from raytf.storage.snapshots import BufferFullError, NotWrittenError, SnapshotWriter
from raytf.storage.step_folders import folder_name
from raytf.worker import checkpoint
from raytf.worker.checkpoint_saver import CheckpointSaver
from raytf.worker.model_file import ModelFile
from tests.logged import warnings_logged
from tests.unit.test_checkpoint import functional, trained
from tests.unit.test_snapshots import check, is_gone, parts_of, stop
from tests.waiting import until

LOCAL = pyarrow.fs.LocalFileSystem()

MEASURED = """
import json, os, sys, tempfile
import keras, pyarrow.fs
from raytf.storage.checkpoint_files import CheckpointState
from raytf.storage.step_folders import folder_name
from raytf.worker import checkpoint
from raytf.worker.checkpoint_saver import CheckpointSaver
from raytf.worker.model_file import ModelFile

def kib(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name + ":"))

def most(function):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = kib("VmRSS")
    function()
    return (kib("VmHWM") - before) << 10

width = 2048
model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(width), keras.layers.Dense(width)])
model.compile("adam", "mse")
model.optimizer.build(model.trainable_variables)
tempfile.tempdir = os.path.join(sys.argv[1], "none")  # nothing at all is written there
keeper = CheckpointSaver(pyarrow.fs.LocalFileSystem(), os.path.join(sys.argv[1], "run"))

def keep():
    keeper.ready(model)
    for step in range(1, 4):
        parts = checkpoint.checkpoint_parts(model, CheckpointState(0, step, 0, False, []))
        keeper.save_async(folder_name(step), model, parts)
        keeper._writer.finish(60.0)

small = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
small.compile("adam", "mse")
small.optimizer.build(small.trainable_variables)
ModelFile(small)  # what is imported for the first one is no model's
found = {"size": ModelFile(small).size, "layout": most(lambda: ModelFile(model)), "chief": most(keep)}
found["size"] = ModelFile(model).size
os.makedirs(os.path.join(sys.argv[1], "saved"))
state = CheckpointState(0, 9, 0, False, [])
found["save"] = most(lambda: checkpoint.save(os.path.join(sys.argv[1], "saved"), model, state))
keeper.close()
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_large_one_takes_its_size_of_memory_and_its_layout_next_to_none(tmp_path):
    """By the kernel's figure of the most memory of this process, with what it shares."""
    done = subprocess.run([sys.executable, "-c", MEASURED, tmp_path], capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["size"] > 96 << 20
    assert found["chief"] <= 1.3 * found["size"], found
    assert found["layout"] <= 0.1 * found["size"], found
    assert found["save"] <= 0.1 * found["size"], found
    checkpoint_files.check_folder(str(tmp_path / "run" / folder_name(3)))
    checkpoint_files.check_folder(str(tmp_path / "saved"))


def test_all_that_the_first_one_needs_is_there_before_the_first_step(tmp_path, monkeypatch):
    model, _ = trained(functional)
    keeper = CheckpointSaver(LOCAL, str(tmp_path / "run"))
    keeper.ready(model)
    monkeypatch.setattr(ModelFile, "_lay_out", None)
    monkeypatch.setattr(snapshot_buffers.Buffer, "grow", None)
    monkeypatch.setattr(subprocess, "Popen", None)
    keeper.save_async(folder_name(1), model, checkpoint.checkpoint_parts(model, CheckpointState(0, 1, 0, False, [])))
    keeper._writer.finish(60.0)
    pid = keeper._writer.pid
    keeper.close()
    until(lambda: is_gone(pid))
    checkpoint_files.check_folder(str(tmp_path / "run" / folder_name(1)))


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A writer for which all snapshots are large."""
    monkeypatch.setattr(snapshots, "_FEW_BYTES", 0)
    made = SnapshotWriter(LOCAL, str(tmp_path / "run"))
    yield made
    made.close()
    if made.pid is not None:
        until(lambda: is_gone(made.pid))


def memory(writer) -> int:
    return sum(os.fstat(buffer.descriptor).st_size for buffer in writer._buffers)


def one(size: int = 100_000) -> int:
    plan = snapshot_buffers.SnapshotLayout(parts_of(1, size))
    plan.end(name=folder_name(1), writers=1, index=None)
    return plan.needs


def test_while_a_large_one_is_written_others_are_left_out_and_pinned_ones_wait(large, tmp_path):
    large.write(folder_name(1), parts_of(1, 100_000))
    large.finish(60.0)
    stop(large.pid)
    try:
        large.write(folder_name(2), parts_of(2, 100_000))
        with warnings_logged("slower than checkpoints come"):
            assert large.write(folder_name(3), parts_of(3, 100_000)) == 0
        assert large.write(folder_name(4), parts_of(4, 100_000), in_memory=True) > 0, "which has one more"
        assert memory(large) <= 2 * one()
        pinned = threading.Thread(
            target=large.write, args=(folder_name(5), parts_of(5, 100_000)), kwargs={"pinned": True}
        )
        pinned.start()
        until(lambda: large._waits)
    finally:
        os.kill(large.pid, signal.SIGCONT)
    pinned.join(60.0)
    assert not pinned.is_alive()
    large.finish(60.0)
    assert [its["name"] for its in large.written] == [folder_name(1), folder_name(2), folder_name(5)]
    check(tmp_path / "run" / folder_name(5), 5, 100_000)
    assert memory(large) <= 2 * one() and large.skipped == 1


@pytest.mark.parametrize("sizes", [[100_000, 10], [10, 100_000], [10, 100_000, 50_000, 200_000]])
def test_large_ones_that_grow_and_shrink_never_have_more_than_one(large, tmp_path, sizes):
    for step, size in enumerate(sizes):
        large.write(folder_name(step), parts_of(step, size))
        large.finish(60.0)
        check(tmp_path / "run" / folder_name(step), step, size)
        assert memory(large) <= one(max(sizes[: step + 1]))


def test_pinned_snapshot_replaces_one_that_the_storage_does_not_take(large, tmp_path):
    (tmp_path / "run").write_text("in the way")
    with warnings_logged("could not be written"):
        large.write(folder_name(1), parts_of(1, 100_000))
        large.write(folder_name(2), parts_of(2, 100_000), pinned=True)
    (tmp_path / "run").unlink()
    large.finish(60.0)
    assert os.listdir(tmp_path / "run") == [folder_name(2)]
    check(tmp_path / "run" / folder_name(2), 2, 100_000)


@pytest.mark.slow
def test_pinned_snapshot_without_a_free_buffer_raises_and_the_writer_stays(tmp_path, monkeypatch, set_timeouts):
    monkeypatch.setattr(snapshots, "_FEW_BYTES", 0)
    set_timeouts(checkpoint_write=0.5)
    model, _ = trained(functional)
    keeper = CheckpointSaver(LOCAL, str(tmp_path / "run"))
    parts = checkpoint.checkpoint_parts(model, CheckpointState(0, 1, 0, False, []))
    keeper.save_async(folder_name(1), model, parts)
    keeper._writer.finish(60.0)
    writer = keeper._writer
    stop(writer.pid)
    try:
        keeper.save_async(folder_name(2), model, parts)
        with pytest.raises(
            BufferFullError, match=f"{folder_name(3)} could not be saved: .*has not finished the one before"
        ):
            keeper.save_async(folder_name(3), model, parts, last=True)
        assert isinstance(BufferFullError("a", "b"), NotWrittenError) and keeper._writer is writer
    finally:
        os.kill(writer.pid, signal.SIGCONT)
    keeper.close()
    until(lambda: is_gone(writer.pid))
    assert np.all([checkpoint_files.check_folder(str(path)) is None for path in (tmp_path / "run").iterdir()])
