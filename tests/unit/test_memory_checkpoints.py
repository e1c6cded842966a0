"""Checkpoints that are held in memory are written when their process dies, and only then. Plain processes, no Ray."""

import os
import random
import subprocess
import sys
import threading

import numpy as np
import pyarrow.fs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.errors import ConfigError
from raytf.storage import finishing, snapshots
from raytf.storage.snapshots import SnapshotWriter, wait_for_writers
from raytf.storage.step_folders import finished_folders, folder_name, step_of_folder
from raytf.worker import checkpoint_every, snapshot_parts
from tests.unit.test_snapshots import check, is_gone, parts_of
from tests.waiting import until

LOCAL = pyarrow.fs.LocalFileSystem()


def written(run) -> list[str]:
    return sorted(name for name in os.listdir(run) if step_of_folder(name) is not None) if run.exists() else []


def gone(writer) -> None:
    writer.close()
    until(lambda: is_gone(writer.pid))


def test_held_snapshot_is_written_on_request_or_when_its_process_dies(tmp_path):
    ends = {
        "released": (SnapshotWriter.release, [folder_name(2)]),
        "promoted": (SnapshotWriter.flush, [folder_name(2), folder_name(5)]),
        "without a word": (lambda writer: None, [folder_name(2), folder_name(5)]),
    }
    for name, (end, expected) in ends.items():
        run = tmp_path / name
        writer = SnapshotWriter(LOCAL, str(run))
        for step, held in ((1, True), (2, False), (3, True), (4, True), (5, True)):
            writer.write(folder_name(step), parts_of(step), held)
        writer.finish(60.0)
        assert written(run) == [folder_name(2)], "those that are held are not"
        end(writer)
        writer.finish(60.0)
        gone(writer)
        assert written(run) == expected
        check(run / expected[-1], step_of_folder(expected[-1]))
        assert not writer.skipped


def test_one_that_is_kept_makes_the_held_one_needless(tmp_path):
    writer = SnapshotWriter(LOCAL, str(tmp_path / "run"))
    writer.write(folder_name(7), parts_of(7), True)
    writer.write(folder_name(8), parts_of(8))
    gone(writer)
    assert written(tmp_path / "run") == [folder_name(8)]


HOLDING = """
import itertools, random, sys
import pyarrow.fs
from raytf.storage.snapshots import SnapshotWriter
from raytf.storage.step_folders import folder_name
from tests.unit.test_snapshots import parts_of
writer, rng = SnapshotWriter(pyarrow.fs.LocalFileSystem(), sys.argv[1]), random.Random(sys.argv[2])
for step in itertools.count(1):
    writer.write(folder_name(step), parts_of(step, 200_000), rng.random() > 0.2)
    if writer.pid is None:
        writer._drain(60.0)
    print(step, writer.pid, flush=True)
"""


@pytest.mark.slow
def test_the_newest_is_written_whenever_its_process_is_killed(tmp_path):
    """Kept and held in any order, as fast as they come, and a kill at any moment, also in the middle of a copy."""
    rng = random.Random(0)
    for number in range(8):
        run = tmp_path / f"run_{number}"
        command = [sys.executable, "-c", HOLDING, str(run), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
            step, pid = 0, "None"
            for _ in range(rng.randrange(1, 80)):
                step, pid = parent.stdout.readline().split()
            parent.kill()
            rest = parent.communicate()[0].split()
        step, pid = (rest[-2], rest[-1]) if rest else (step, pid)
        assert wait_for_writers(str(run))
        until(lambda pid=pid: is_gone(int(pid)))
        last = step_of_folder(written(run)[-1])
        assert int(step) <= last <= int(step) + 1
        check(run / folder_name(last), last, 200_000)
        assert not [name for name in os.listdir(run) if name.startswith(".")], "its note is gone, too"


def test_a_start_on_another_host_waits_for_what_a_killed_workers_process_writes(tmp_path, monkeypatch):
    """The sign of a writer of another host is not seen here; its note in the run's folder is."""
    run = tmp_path / "run"
    monkeypatch.setattr(snapshots, "wait_for_writers", lambda folder, seconds: True)
    note = finishing.WriterNote(LOCAL, str(run))
    run.mkdir()
    note.write()
    ended = threading.Event()
    threading.Timer(0.5, lambda: (ended.set(), note.remove())).start()
    assert snapshots.wait_for_all(LOCAL, str(run), 60.0) and ended.is_set()
    note.write()
    assert not os.listdir(run), "who has finished begins no more"


def test_the_note_of_a_host_that_has_gone_is_waited_for_once(tmp_path):
    finishing.WriterNote(LOCAL, str(tmp_path)).write()
    assert not finishing.wait_for_notes(LOCAL, str(tmp_path), 0.3)
    assert finishing.wait_for_notes(LOCAL, str(tmp_path), 0.0) and not os.listdir(tmp_path)


@pytest.mark.slow
def test_writer_of_a_killed_worker_reports_a_slow_storage(tmp_path, monkeypatch):
    code = (
        "import raytf.storage.snapshot_writer as w, sys, time; put = w.SnapshotStore.put; "
        "w.SnapshotStore.put = lambda *a: (time.sleep(3), put(*a))[1]; w.main(sys.argv[1:])"
    )
    command, run = subprocess.Popen, tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", lambda c, **k: command([c[0], "-c", code, *c[3:]], **k))
        writer = SnapshotWriter(LOCAL, str(run))
    writer.write(folder_name(1), parts_of(1))
    until(lambda: writer._drain(0.01) or writer._begun)
    run.mkdir()
    pid, writer._writer_ended = writer.pid, True
    writer.close()
    until(lambda: any(name.startswith(".finishing_") for name in os.listdir(run)))
    assert finishing.wait_for_notes(LOCAL, str(run), 60.0)
    check(run / folder_name(1), 1)
    until(lambda: is_gone(pid))


def test_a_copy_of_another_worker_is_one_of_the_same_step(tmp_path):
    run = tmp_path / "run"
    writer = SnapshotWriter(LOCAL, str(run))
    for name in (folder_name(4), folder_name(5, copy=True)):
        writer.write(name, parts_of(step_of_folder(name)))
        writer.finish(60.0)
    gone(writer)
    assert finished_folders(LOCAL, str(run)) == [(5, "step_000000000005_copy"), (4, "step_000000000004")]
    assert step_of_folder("step_000000000005_copies") is None and step_of_folder("step_5_copy") is None


keys = st.text(min_size=1, max_size=8)
arrays = st.lists(st.floats(-1e9, 1e9), max_size=5).map(np.array)


@settings(deadline=None, max_examples=20)
@given(st.dictionaries(keys, st.text(max_size=30) | st.dictionaries(keys, arrays, max_size=3), max_size=4))
def test_parts_travel_as_they_are(parts):
    found = snapshot_parts.unpack_parts(snapshot_parts.pack_parts(parts))
    assert found.keys() == parts.keys()
    for name, part in parts.items():
        if isinstance(part, str):
            assert found[name] == part
            continue
        assert list(found[name]) == list(part)
        for key, value in part.items():
            np.testing.assert_array_equal(found[name][key], value)
            assert found[name][key].dtype == value.dtype


@pytest.mark.parametrize("given", [0, "0 steps", "auto", "epoch", "10 min", "1.5 steps", True, 10])
def test_memory_every_is_a_number_of_steps(given):
    with pytest.raises(ConfigError, match=r"memory_every must be.*received: .*10 steps"):
        checkpoint_every.parse_steps(given)
    assert checkpoint_every.parse_steps("10 steps") == 10 and checkpoint_every.parse_steps(None) is None
