"""Snapshots go to a process of their own, which writes them whole or not at all. Plain processes, no Ray."""

import contextlib
import dataclasses
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import zipfile

import numpy as np
import pyarrow.fs
import pytest

from raytf import procfs, timeouts
from raytf.errors import ConfigError
from raytf.storage import checkpoint_files, finishing, gather_io, priority, snapshot_writer
from raytf.storage.checkpoint_files import CheckpointState
from raytf.storage.file_template import FileTemplate, ZipTemplate
from raytf.storage.run_lock import RunLock
from raytf.storage.snapshot_store import SnapshotStore, removable
from raytf.storage.snapshots import NotWrittenError, SnapshotWriter, _WriterProcess, wait_for_writers
from raytf.storage.step_folders import folder_name, step_of_folder
from tests.logged import lines_logged, warnings_logged
from tests.waiting import until

LOCAL = pyarrow.fs.LocalFileSystem()


def parts_of(step: int, size: int = 1000) -> dict:
    """A snapshot whose every number is its step."""
    weights = np.full(size, step, np.float32)
    return {
        "state.json": CheckpointState(0, step, 0, False, []).to_json(),
        "seeds.npz": {"0": np.full(3, step), "one": np.float64(step), "none": np.empty((0, 2))},
        "model.keras": ZipTemplate([("config.json", b"{}"), ("model.weights.h5", image(size))], image(size), [weights]),
    }


_images: dict[int, FileTemplate] = {}


def image(size: int) -> FileTemplate:
    return _images.setdefault(size, FileTemplate.from_content(b"head" + bytes(4 * size) + b"tail", [(4, 4 * size)]))


def check(folder, step: int, size: int = 1000) -> None:
    """Fails unless a folder holds the whole snapshot of a step."""
    checkpoint_files.check_folder(str(folder))
    assert checkpoint_files.read_state(str(folder)).step == step
    with checkpoint_files.npz_arrays(str(folder), "seeds.npz") as found:
        np.testing.assert_array_equal(found["0"], np.full(3, step))
        assert found["one"] == step and found["none"].shape == (0, 2)
    checkpoint_files.check_archive(str(folder / "model.keras"), "")
    with zipfile.ZipFile(folder / "model.keras") as archive:
        found = archive.read("model.weights.h5")
        assert archive.testzip() is None and archive.namelist() == ["config.json", "model.weights.h5"]
    assert found == b"head" + np.full(size, step, np.float32).tobytes() + b"tail"


@pytest.fixture
def writer(tmp_path):
    made = SnapshotWriter(LOCAL, str(tmp_path / "run"))
    yield made
    made.close()
    if made.pid is not None:
        until(lambda: is_gone(made.pid))


def is_gone(pid: int) -> bool:
    seen = procfs.read_state(pid)
    if seen is None or seen.state != "Z":
        return seen is None
    # the first process of a container may reap nothing; and what is open stays so until the last thread goes
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(f"/proc/{pid}/task") == [str(pid)]
    return True


def test_the_last_ones_are_whole_and_older_ones_removed(writer, tmp_path):
    for step in range(1, 6):
        writer.write(folder_name(step), parts_of(step))
        writer.finish(60.0)
    assert writer.skipped == 0
    assert sorted(os.listdir(tmp_path / "run")) == [folder_name(4), folder_name(5)]
    check(tmp_path / "run" / folder_name(4), 4)
    check(tmp_path / "run" / folder_name(5), 5)
    assert [event["name"] for event in writer.written] == [folder_name(step) for step in range(1, 6)]
    assert not any("raytf" in name for name in os.listdir("/dev/shm"))


def test_writer_has_lower_priority_than_the_training(writer):
    writer.write(folder_name(1), parts_of(1))
    writer.finish(60.0)
    assert goes_last(writer.pid)
    group = pathlib.Path(f"/proc/{writer.pid}/autogroup")
    if group.exists():
        assert group.read_text().split()[-1] != "0", "of its own session, which Linux may take for a group"


BURNS = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
while True:
    pass
"""


def goes_last(pid: int) -> bool:
    """Whether a process does, in all of its threads; else it does so in none."""
    raised = os.getpriority(os.PRIO_PROCESS, 0) if priority._can_be_reverted() else -20
    last = {
        os.sched_getscheduler(thread) == os.SCHED_BATCH and os.getpriority(os.PRIO_PROCESS, thread) > raised
        for thread in map(int, os.listdir(f"/proc/{pid}/task"))
    }
    assert len(last) == 1
    return last.pop()


def test_writer_has_normal_priority_while_the_training_waits_for_it(writer):
    """Next to computing neighbours it would get a processor for some milliseconds after 13 s: so long all waited."""
    with writer.writer_priority():
        writer.write(folder_name(1), parts_of(1))  # before it is known who that is
        writer.finish(60.0)
        assert not goes_last(writer.pid)
        with writer.writer_priority():
            pass
        assert not goes_last(writer.pid), "one waits still"
    assert goes_last(writer.pid)
    writer.finish(60.0)
    assert goes_last(writer.pid), "others than the training wait so"


def test_writer_reports_how_long_it_had_no_processor(writer):
    """So that it is not taken for a hang of the worker that waits for it."""
    writer.write(folder_name(1), parts_of(1))
    writer.finish(60.0)
    cpu, before = min(os.sched_getaffinity(0)), writer.queued()
    others = [subprocess.Popen([sys.executable, "-c", BURNS, str(cpu)]) for _ in range(2)]
    try:
        os.sched_setaffinity(writer.pid, {cpu})
        for step in range(2, 1000):
            writer.write(folder_name(step), parts_of(step))
            writer.finish(60.0)
            if writer.queued() > before + 0.05:
                return
        pytest.fail(f"{writer.queued() - before} s")
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_writer_has_normal_priority_when_the_next_epoch_has_ended_before(writer, tmp_path):
    """On a worker that writes a part: it is the chief that waits, on another host."""
    writer.write(folder_name(1), parts_of(1), pinned=True)
    writer.finish(60.0)
    (tmp_path / "run").rename(tmp_path / "aside")
    (tmp_path / "run").write_text("in the way")
    with warnings_logged("could not be written"):
        for step in (2, 3):
            writer.write(folder_name(step), parts_of(step), pinned=True)
            until(lambda: writer._drain(0.01) or writer._failed)
            assert goes_last(writer.pid) == (step == 2)
    (tmp_path / "run").unlink()
    writer.finish(60.0)
    assert goes_last(writer.pid)


def test_one_that_has_another_ones_number_is_left_alone():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        other = _WriterProcess(process.pid, 19)
        other._seen = dataclasses.replace(other._seen, started=other._seen.started - 1)
        before = os.getpriority(os.PRIO_PROCESS, process.pid)
        os.sched_setscheduler(process.pid, os.SCHED_BATCH, os.sched_param(0))
        other.set_low_priority(False)
        assert os.sched_getscheduler(process.pid) == os.SCHED_BATCH
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == before
        process.stdin.close()


@pytest.mark.parametrize("privileged", [True, False])
def test_only_what_can_be_taken_back_is_given_away(privileged):
    if os.geteuid() != 0:
        pytest.skip("Who may take it back and who may not are told apart as root")
    code = (
        "import os, threading; from raytf.storage import priority as p;"
        f"{'' if privileged else 'os.setuid(65534);'} before = os.getpriority(0, 0);"
        "stays = threading.Event(); thread = threading.Thread(target=stays.wait); thread.start();"
        "threads = lambda: map(int, os.listdir('/proc/self/task'));"
        "state = lambda: {(os.sched_getscheduler(t), os.getpriority(0, t)) for t in threads()};"
        "n = p.set_lowest(); last = state(); p.set_normal(os.getpid()); alike = state();"
        "p.set_lowest_again(os.getpid(), n); assert state() == last; stays.set();"
        "print(*(len(found) == 1 for found in (last, alike)), *(f - before for _, f in [*last, *alike]),"
        "last.pop()[0] == os.SCHED_BATCH, alike.pop()[0] == os.SCHED_OTHER)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, start_new_session=True
    )  # else all of this session goes last from here on
    before = os.getpriority(os.PRIO_PROCESS, 0)
    if privileged and not priority._can_be_reverted():
        pytest.skip("this root may not lower niceness")
    raised = f"{min(19, before + 10) - before} {-before}" if privileged else "0 0"
    assert done.stdout == f"True True {raised} True True\n", done.stderr


def test_parts_grow_and_a_snapshot_replaces_another_of_the_same_name(writer, tmp_path):
    for size in (10, 1_000_000, 10):
        writer.write(folder_name(1), parts_of(1, size) | {"more.txt": "x" * size})
        writer.finish(60.0)
        check(tmp_path / "run" / folder_name(1), 1, size)
        assert os.listdir(tmp_path / "run") == [folder_name(1)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["../other", "a/b", "", ".", "..", ".hidden", "a\\b", "a\0", "x" * 300])
def test_a_name_that_climbs_out_of_the_storage_is_refused(writer, tmp_path, name):
    with pytest.raises(ConfigError, match="name of a snapshot"):
        writer.write(name, parts_of(1))
    with pytest.raises(ConfigError, match="name of a snapshot"):
        writer.write(folder_name(1), {name: b""})
    assert os.listdir(tmp_path) == []


def test_objects_and_a_manifest_of_others_are_refused(writer):
    with pytest.raises(ConfigError, match="hold numbers"):
        writer.write(folder_name(1), {"a.npz": {"a": np.array([{}], object)}})
    with pytest.raises(ConfigError, match="manifest"):
        writer.write(folder_name(1), {"manifest.json": b"{}"})


def test_a_file_system_that_cannot_travel_is_refused_at_once(tmp_path):
    class Handler(pyarrow.fs.FileSystemHandler):
        pass

    for method in Handler.__abstractmethods__:
        setattr(Handler, method, lambda self, *a: None)
    Handler.__abstractmethods__ = frozenset()
    with pytest.raises(ConfigError, match="can be pickled"):
        SnapshotWriter(pyarrow.fs.PyFileSystem(Handler()), str(tmp_path))


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: procfs.read_state(pid).state == "T")


def test_a_writer_that_is_slow_holds_nobody_up_and_the_newest_is_kept(writer, tmp_path):
    writer.write(folder_name(1), parts_of(1))
    writer.finish(60.0)
    stop(writer.pid)
    try:
        with warnings_logged("slower than checkpoints come") as seen:
            for step in range(2, 8):
                writer.write(folder_name(step), parts_of(step))
        assert len(seen) == 1 and writer.skipped == 3  # of six, three are in memory
        with pytest.raises(NotWrittenError, match=f"{folder_name(7)} could not be saved: timeout after 0 s"):
            writer.finish(0.01)
    finally:
        os.kill(writer.pid, signal.SIGCONT)
    writer.finish(60.0)
    assert writer.skipped == 5 and sorted(os.listdir(tmp_path / "run")) == [folder_name(1), folder_name(7)]
    check(tmp_path / "run" / folder_name(7), 7)


def test_a_writer_whose_storage_hangs_blocks_nobody_however_many_come(writer, tmp_path, set_timeouts):
    """It reads no messages meanwhile, and its socket takes some hundred."""
    set_timeouts(checkpoint_write=0.3)
    writer.write(folder_name(1), parts_of(1))
    writer.finish(60.0)
    stop(writer.pid)
    parts = parts_of(2)
    sending = threading.Thread(target=lambda: [writer.write(folder_name(2), parts, s % 2 == 0) for s in range(1000)])
    try:
        with warnings_logged("slower than checkpoints come"):
            sending.start()
            sending.join(60.0)
            assert not sending.is_alive()
        with pytest.raises(NotWrittenError, match="has not finished the one before"):
            writer.write(folder_name(3), parts_of(3), pinned=True)
    finally:
        os.kill(writer.pid, signal.SIGCONT)
    until(lambda: writer._drain(0.01) or not writer._has_backlog())
    writer.write(folder_name(4), parts_of(4))
    writer.finish(60.0)
    check(tmp_path / "run" / folder_name(4), 4)


@pytest.mark.parametrize("pinned", [3, 5])
def test_pinned_snapshot_is_written_whatever_comes_after_it(writer, tmp_path, pinned):
    writer.write(folder_name(1), parts_of(1))
    writer.finish(60.0)
    stop(writer.pid)
    try:
        with warnings_logged("slower than checkpoints come"):
            steps = range(2, 9)
            pin = {s: writer.write(folder_name(s), parts_of(s), pinned=s == pinned) for s in steps}[pinned]
        with pytest.raises(NotWrittenError, match=f"{folder_name(pinned)} could not be saved"):
            writer.finish(0.01, number=pin)
    finally:
        os.kill(writer.pid, signal.SIGCONT)
    writer.finish(60.0, number=pin)
    writer.finish(60.0)
    written = [its["name"] for its in writer.written]
    assert written[-2:] == [folder_name(pinned), folder_name(8)] and writer.skipped == 8 - len(written)
    check(tmp_path / "run" / folder_name(pinned), pinned)
    check(tmp_path / "run" / folder_name(8), 8)


def test_two_that_are_pinned_are_both_written(writer, tmp_path):
    """A signal that ends the run just after an epoch's end: the last step's is pinned, as the epoch's is."""
    writer.write(folder_name(1), parts_of(1))
    writer.finish(60.0)
    stop(writer.pid)
    first = writer.write(folder_name(2), parts_of(2), pinned=True)
    waiting = threading.Thread(target=writer.write, args=(folder_name(3), parts_of(3)), kwargs={"pinned": True})
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    os.kill(writer.pid, signal.SIGCONT)
    waiting.join(60.0)
    writer.finish(60.0)
    assert [its["name"] for its in writer.written] == [folder_name(1), folder_name(2), folder_name(3)] and first
    for step in (2, 3):
        check(tmp_path / "run" / folder_name(step), step)


@pytest.mark.slow
def test_unpinned_snapshot_is_replaced_by_a_newer_one(writer, tmp_path):
    (tmp_path / "run").write_text("in the way")
    pin = writer.write(folder_name(1), parts_of(1), pinned=True)
    with pytest.raises(NotWrittenError), warnings_logged("retried"):
        writer.finish(60.0, 0.2, number=pin)
    writer.unpin(pin)
    writer.write(folder_name(2), parts_of(2))
    until(lambda: writer._drain(0.01) or writer.skipped)
    (tmp_path / "run").unlink()
    writer.finish(60.0)
    assert os.listdir(tmp_path / "run") == [folder_name(2)]


@pytest.mark.slow
def test_however_fast_they_come_none_is_torn_and_the_last_one_kept(writer, tmp_path):
    """The one who fills takes buffers back while the other one begins with them."""
    writer.write(folder_name(0), parts_of(0))
    writer.finish(60.0)
    for step in range(1, 400):
        writer.write(folder_name(step), parts_of(step, 30_000), pinned=step % 30 == 7)
        if step % 20 == 10:
            with contextlib.suppress(NotWrittenError):
                writer.finish(0.0)
        elif step % 20 == 0 or step == 399:
            writer.finish(60.0)  # what is there is removed by nobody meanwhile
            assert writer.written[-1]["name"] == folder_name(step)
            for found in check_all(tmp_path / "run"):
                check(tmp_path / "run" / folder_name(found), found, 30_000 if found else 1000)
    assert writer.skipped + len(writer.written) <= 400 and len(writer._names) <= 3


def test_others_see_that_a_writer_is_at_work_until_it_has_ended(tmp_path):
    run = str(tmp_path / "run")
    assert wait_for_writers(run, 0.0)
    writer = SnapshotWriter(LOCAL, run)
    assert not wait_for_writers(run, 0.0)  # though its process has hardly begun
    assert wait_for_writers(str(tmp_path / "other"), 0.0)
    writer.write(folder_name(1), parts_of(1))
    writer.close()
    assert wait_for_writers(run, 60.0) and wait_for_writers(run, 0.0)
    check(tmp_path / "run" / folder_name(1), 1)


def test_end_of_the_writer_is_reported(tmp_path):
    writer = SnapshotWriter(LOCAL, str(tmp_path / "run"))
    writer.write(folder_name(1), parts_of(1))
    writer.finish(60.0)
    os.kill(writer.pid, signal.SIGKILL)
    with pytest.raises(NotWrittenError, match="the process that writes checkpoints has ended"):
        writer.write(folder_name(2), parts_of(2))
        writer.finish(60.0)
    writer.close()
    check(tmp_path / "run" / folder_name(1), 1)


def test_a_writer_that_ends_while_it_is_closed_leaves_nothing_open(tmp_path):
    opened = len(os.listdir("/proc/self/fd"))
    writer = SnapshotWriter(LOCAL, str(tmp_path / "run"))
    writer.write(folder_name(1), parts_of(1))
    writer.finish(60.0)
    stop(writer.pid)
    writer.write(folder_name(2), parts_of(2))
    threading.Timer(0.3, os.kill, (writer.pid, signal.SIGKILL)).start()
    writer.close()
    assert len(os.listdir("/proc/self/fd")) == opened


def test_writer_that_cannot_start_raises_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    writer = SnapshotWriter(LOCAL, str(tmp_path / "run"))
    with pytest.raises(NotWrittenError, match="the process that writes checkpoints has ended"):
        writer.write(folder_name(1), parts_of(1))
        writer.finish(60.0)
    writer.close()


WRITING = """
import itertools, os, random, signal, sys, time
import pyarrow.fs
from raytf.storage.snapshot_store import SnapshotStore
from raytf.storage.step_folders import folder_name
from tests.unit.test_snapshots import check_all, files_of
run, rng, step = sys.argv[1], random.Random(0), 1
began = time.monotonic()
SnapshotStore(pyarrow.fs.LocalFileSystem(), run).put(folder_name(0), files_of(0))
each = time.monotonic() - began
for _ in range(50):
    pid = os.fork()
    if pid == 0:
        store = SnapshotStore(pyarrow.fs.LocalFileSystem(), run)
        for one in itertools.count(step):
            store.put(folder_name(one), files_of(one))
            store.prune()
    time.sleep(rng.random() * 4 * each)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    step = check_all(run)[-1]  # the last one is written once more, in the place of what is there
print(step)
"""


def files_of(step: int) -> dict[str, list]:
    """A snapshot of a megabyte as its store takes it, all of it made of its step."""
    weights = np.full(130_000, step)
    seeds = gather_io.npz_pieces({"0": np.full(3, step), "one": np.float64(step), "none": np.empty((0, 2))})
    model = gather_io.zip_pieces([("config.json", b"{}"), ("model.weights.h5", b"head" + weights.tobytes() + b"tail")])
    return {"state.json": [parts_of(step)["state.json"].encode()], "seeds.npz": seeds, "model.keras": model}


def check_all(run) -> list[int]:
    """The steps of the snapshots that are there; fails unless each is whole."""
    steps = sorted(step for step in map(step_of_folder, os.listdir(run)) if step is not None)
    for step in steps:
        checkpoint_files.check_folder(os.path.join(run, folder_name(step)))
        assert checkpoint_files.read_state(os.path.join(run, folder_name(step))).step == step
    assert steps
    return steps


@pytest.mark.slow
def test_fifty_kills_at_random_moments_of_writing_leave_whole_ones(tmp_path):
    done = subprocess.run([sys.executable, "-c", WRITING, tmp_path], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 2


PARENT = """
import itertools, sys, time
import pyarrow.fs
from raytf.storage.snapshots import SnapshotWriter
from raytf.storage.step_folders import folder_name
from tests.unit.test_snapshots import parts_of
writer = SnapshotWriter(pyarrow.fs.LocalFileSystem(), sys.argv[1])
for step in itertools.count(int(sys.argv[2])):
    writer.write(folder_name(step), parts_of(step, 200_000))
    if writer.pid is None:
        writer.finish(60.0)
    print(step, writer.pid, flush=True)
    time.sleep(0.005)
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["who hands over", "who writes"])
def test_what_was_handed_over_is_kept_when_its_process_is_killed(tmp_path, killed):
    run, rng, step, whole = tmp_path / "run", random.Random(killed), 0, [0]
    for _ in range(3):
        command = [sys.executable, "-c", PARENT, str(run), str(step + 1)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
            pid = "None"
            while pid == "None" or rng.random() > 0.2:
                step, pid = parent.stdout.readline().split()
            time.sleep(rng.random() * 0.02)
            os.kill(parent.pid if killed == "who hands over" else int(pid), signal.SIGKILL)
            rest = parent.communicate()[0].split()
            assert wait_for_writers(str(run))
        step = int(rest[-2] if rest else step)
        until(lambda pid=pid: is_gone(int(pid)))
        before, whole = whole, check_all(run)
        assert whole[-1] >= step if killed == "who hands over" else whole[-1] > before[-1]


def test_nothing_is_left_of_a_writer_whose_storage_never_answers(tmp_path, monkeypatch, set_timeouts):
    """A FIFO instead of the folder holds each try up; the other side goes, and so does the writer."""
    set_timeouts(orphan_writer=0.5)
    code = (
        "import raytf.storage.snapshot_writer as w, sys; "
        "w.SnapshotStore.put = lambda *a: __import__('time').sleep(1000); w.main(sys.argv[1:])"
    )
    command = subprocess.Popen
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", lambda c, **k: command([c[0], "-c", code, *c[3:]], **k))
        writer = SnapshotWriter(LOCAL, str(tmp_path / "run"))
    writer.write(folder_name(1), parts_of(1))
    until(lambda: writer._drain(0.01) or writer.pid is not None)
    pid, writer._writer_ended = writer.pid, True
    writer.close()
    until(lambda: is_gone(pid))


@pytest.mark.parametrize(("starved", "least"), [(False, 0.1), (True, 0.4)])
def test_a_writer_that_is_alone_and_has_no_processor_has_more_time(monkeypatch, starved, least, set_timeouts):
    """What a busy machine keeps it from is not the storage's fault; its next run waits as long."""
    set_timeouts(orphan_writer=0.1, orphan_writer_at_most=0.4)
    monkeypatch.setattr(snapshot_writer, "_queued", time.monotonic if starved else lambda: 7.0)
    began = time.monotonic()
    snapshot_writer._wait_as_orphan(lambda: 0)
    assert time.monotonic() - began >= least


def test_a_writer_that_is_alone_with_many_bytes_has_more_time(monkeypatch, tmp_path, set_timeouts):
    """So has who waits for it."""
    set_timeouts(orphan_writer=0.1, writer_bytes_at_most=30.0)
    monkeypatch.setattr(snapshot_writer, "_queued", lambda: 7.0)
    size = int(0.3 * timeouts.BYTES_A_SECOND)
    began = time.monotonic()
    snapshot_writer._wait_as_orphan(lambda: size)
    assert time.monotonic() - began >= 0.4
    finishing.WriterNote(LOCAL, str(tmp_path)).write(size)
    assert finishing.seconds_more(LOCAL, str(tmp_path)) == pytest.approx(0.3)
    for other in (1 << 60, 10**400):  # not of a writer
        finishing.WriterNote(LOCAL, str(tmp_path)).write(other)
        assert finishing.seconds_more(LOCAL, str(tmp_path)) == 30.0


def limited(path, **limits):
    """Returns a writer whose process may write no larger files than `limits["bytes"]`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["bytes"], before[1]))
    try:
        return SnapshotWriter(LOCAL, str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_failing_storage_is_reported_retried_and_an_error_only_at_the_end(tmp_path):
    writer = limited(tmp_path / "run", bytes=100_000)
    writer.write(folder_name(1), parts_of(1))
    writer.finish(60.0)
    with warnings_logged(f"{folder_name(2)} could not be written.*File too large") as seen:
        writer.write(folder_name(2), parts_of(2, 100_000))
        until(lambda: writer._drain(0.01) or writer._failed)
    assert len(seen) == 1
    with pytest.raises(NotWrittenError, match=f"{folder_name(2)} could not be saved: OSError.*File too large"):
        writer.finish(2.0)
    with lines_logged() as lines:
        writer.write(folder_name(3), parts_of(3))  # a newer one, that fits, takes its place
        writer.finish(60.0)
        writer.close()
    assert not lines
    assert sorted(os.listdir(tmp_path / "run")) == [folder_name(1), folder_name(3)]
    check(tmp_path / "run" / folder_name(1), 1)
    check(tmp_path / "run" / folder_name(3), 3)
    until(lambda: is_gone(writer.pid))


@pytest.fixture
def small_disk(tmp_path):
    """A disk of three megabytes."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "raytf_test", path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


def test_full_disk_is_reported_and_written_again_once_there_is_room(small_disk):
    (small_disk / "others").write_bytes(bytes(2 << 20))
    writer = SnapshotWriter(LOCAL, str(small_disk / "run"))
    with warnings_logged(f"{folder_name(1)} could not be written.*No space left") as seen:
        writer.write(folder_name(1), parts_of(1, 500_000))
        until(lambda: writer._drain(0.01) or writer._failed)
        assert os.listdir(small_disk / "run") == []  # nothing half written takes room meanwhile
        (small_disk / "others").unlink()
        writer.finish(60.0)
    assert len(seen) == 1
    check(small_disk / "run" / folder_name(1), 1, 500_000)
    writer.close()
    until(lambda: is_gone(writer.pid))


def test_a_read_only_disk_is_found_before_training(small_disk):
    with RunLock(LOCAL, str(small_disk / "run")):
        pass
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(ConfigError, match="storage of a run must be one.*can write to.*Read-only file system"):
        RunLock(LOCAL, str(small_disk / "run")).acquire()


@pytest.mark.parametrize(
    "steps, whole, epoch, keep, removed",
    [
        ([1, 2, 3], [1, 2, 3], -1, 2, [1]),
        ([1, 2, 3], [1, 2, 3], 2, 2, [1]),
        ([1, 2, 3], [1, 2, 3], 3, 2, [1, 2]),
        ([1, 2, 3], [1, 2, 3], 4, 2, [1, 2, 3]),
        ([1, 2, 3], [1], -1, 2, []),
        ([1, 2, 3], [2], -1, 1, [1]),
        ([1, 2, 3], [], -1, 1, []),
        ([1, 2, 3, 4], [4, 2, 1], -1, 2, [1]),
        ([], [], 5, 1, []),
    ],
)
def test_what_is_removed(steps, whole, epoch, keep, removed):
    by_name = {folder_name(step): step for step in steps}
    newest_first = [folder_name(step) for step in sorted(whole, reverse=True)]
    assert removable(by_name, newest_first, epoch, keep) == [folder_name(step) for step in removed]


def test_only_what_is_whole_counts(tmp_path):
    store = SnapshotStore(LOCAL, str(tmp_path), keep=2)

    def put(name, step):
        files = {part: [content.encode()] for part, content in {"state.json": parts_of(step)["state.json"]}.items()}
        store.put(name, {**files, "seeds.npz": [b"seeds"], "model.keras": [b"model"]})

    for step in (1, 2, 3):
        put(folder_name(step), step)
    (tmp_path / folder_name(3) / "seeds.npz").write_bytes(b"")
    put("checkpoint_a", 2)
    (tmp_path / "checkpoint_a" / "manifest.json").unlink()
    fresh = SnapshotStore(LOCAL, str(tmp_path), keep=1)  # what it wrote itself a store believes
    assert fresh.prune() == [folder_name(1)]  # not 2, which is the newest whole one, whatever the torn 3 and epoch say
    put("checkpoint_b", 2)
    assert SnapshotStore(LOCAL, str(tmp_path), keep=1).prune() == []
    put("checkpoint_c", 4)
    assert SnapshotStore(LOCAL, str(tmp_path), keep=1).prune() == [folder_name(2), folder_name(3)]


@pytest.mark.parametrize("clock", [0, -180, 180])
def test_what_writers_left_half_written_is_removed_by_whose_it_is_and_not_by_a_clock(tmp_path, clock):
    """The clock of a file server may be minutes late, and a part takes minutes to be written."""

    def left(*names):
        for name in names:
            (tmp_path / name).mkdir()
            os.utime(tmp_path / name, (time.time() + clock, time.time() + clock))

    ends = "checkpoint_2026-01-01_00-00-00"
    before = [
        f".partial_{folder_name(7)}_0123abcd",
        f".parts_{folder_name(7)}",
        f".parts_{ends}1",
        f".partial_{ends}1_0123abcd",
    ]
    old = [
        f".partial_{folder_name(1)}_0123abcd",
        f".partial_{folder_name(1)}_0123abcd_before",
        f".parts_{folder_name(1)}",
    ]
    left(*before, *old)
    store = SnapshotStore(LOCAL, str(tmp_path), keep=2)
    store.prune()
    assert sorted(os.listdir(tmp_path)) == sorted([*before, *old]), "another one may be at it"
    store.put(folder_name(2), files_of(2))
    now = [f".parts_{folder_name(8)}", f".parts_{ends}2", f".partial_{ends}2_0123abcd"]
    left(*now)
    store.prune()
    assert sorted(os.listdir(tmp_path)) == sorted([*now, folder_name(2)])
    store.put(folder_name(9), files_of(9))
    left(f".parts_{folder_name(9)}")
    store.prune()
    assert sorted(os.listdir(tmp_path)) == sorted([*now[1:], folder_name(2), folder_name(9)])


def test_arrays_are_as_numpy_writes_them(tmp_path):
    found = {"a": np.arange(5000.0), "b": np.float32(2), "c": np.zeros((0, 3)), "d": np.arange(6).reshape(2, 3)}
    (tmp_path / "a.npz").write_bytes(b"".join(gather_io.npz_pieces(found)))
    with np.load(tmp_path / "a.npz", allow_pickle=False) as loaded:
        assert loaded.files == list(found)
        for key, value in found.items():
            np.testing.assert_array_equal(loaded[key], value)
            assert loaded[key].dtype == value.dtype
