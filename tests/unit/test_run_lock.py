"""The lock of a run's folder, on a mounted file system and on an object store; owners that live, die and freeze."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import threading
import time

import pyarrow.fs
import pytest

from raytf.errors import ConfigError, TrainingError
from raytf.storage import lock_file, run_lock
from raytf.storage.run_lock import LOCK, RunLock
from tests.waiting import until


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(run_lock, "_BEAT_INTERVAL", 0.05)
    monkeypatch.setattr(lock_file, "SETTLE_INTERVAL", 0.2)
    yield
    assert not [t for t in threading.enumerate() if t.name == "raytf_heartbeat"], "a heartbeat goes on"


def owner(place):
    filesystem, folder = place
    with filesystem.open_input_stream(f"{folder}/{LOCK}") as file:
        return json.loads(file.read())


def left_by(place, **changes):
    """A stale lock of another process."""
    filesystem, folder = place
    stored = RunLock(filesystem, folder)._owner | {"id": "another"} | changes
    filesystem.create_dir(folder)
    with filesystem.open_output_stream(f"{folder}/{LOCK}") as file:
        file.write(json.dumps(stored).encode())


def test_one_driver_has_the_folder(place):
    with RunLock(*place) as lock:
        lock.confirm()
        beat = owner(place)["beat"]
        with pytest.raises(ConfigError, match=rf"held by process {os.getpid()} on .* heartbeat|held by process"):
            RunLock(*place).acquire()
        until(lambda: owner(place)["beat"] > beat)
    with RunLock(*place) as lock:
        lock.confirm()
    filesystem, folder = place
    left = filesystem.get_file_info(pyarrow.fs.FileSelector(folder, allow_not_found=True))
    assert not left, "files of the lock are left"


@pytest.mark.slow
def test_of_two_that_come_at_once_one_gets_it(place, monkeypatch, set_timeouts):
    # a busy machine may write late, and a file in memory is seen before it is written: its owner is waited for
    monkeypatch.setattr(lock_file, "SETTLE_INTERVAL", 2.0)
    set_timeouts(lock_silent=5.0)
    got, refused = [], []
    barrier = threading.Barrier(4, timeout=60)  # one that fails ends the others, and not with the whole suite

    def come():
        lock = RunLock(*place)
        barrier.wait()
        try:
            with lock:
                lock.confirm()
                barrier.wait()
                lock._file.wait_until_visible()  # on a store where two wrote at once, the one that lost it sees so
                barrier.wait()
            got.append(lock)
        except ConfigError as error:
            refused.append(error)
            barrier.wait()
            barrier.wait()
        except TrainingError as error:
            refused.append(error)

    threads = [threading.Thread(target=come, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(got), len(refused)) == (1, 3)


def killed_driver(folder):
    """The id of a process that held the lock and was killed."""
    program = (
        "import sys, pyarrow.fs\nfrom raytf.storage.run_lock import RunLock\n"
        "RunLock(pyarrow.fs.LocalFileSystem(), sys.argv[1]).acquire()\nprint('held', flush=True)\nsys.stdin.read()"
    )
    arguments = [sys.executable, "-c", program, folder]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"held by process {process.pid} on .*, whose last heartbeat is 0 s old"):
            RunLock(pyarrow.fs.LocalFileSystem(), folder).acquire()
        process.kill()
    return process.pid


def test_a_killed_driver_is_followed_at_once(tmp_path, capsys):
    pid = killed_driver(str(tmp_path / "run"))
    with RunLock(pyarrow.fs.LocalFileSystem(), str(tmp_path / "run")) as lock:
        lock.confirm()
    assert re.search(
        rf"the lock of process {pid} on \S+ \(since .*\), which is gone, is taken over", capsys.readouterr().err
    )


@pytest.mark.parametrize("changes", [{"started": "0"}, {"pid": 2**22 + 1}, {"pid": None}, {}])
def test_the_lock_of_a_process_that_is_no_more(place, changes):
    """Another process has its number, there is none, or it is this one, which does not know of it."""
    left_by(place, **changes)
    with RunLock(*place) as lock:
        lock.confirm()


def test_a_driver_on_another_machine_is_judged_by_its_heartbeat(place, monkeypatch, capsys, set_timeouts):
    left_by(place, machine="another", host="far")
    with pytest.raises(ConfigError, match=r"on far .*lapses after"):
        set_timeouts(lock_silent=60.0)
        lock = RunLock(*place)
        # a store without times is watched
        monkeypatch.setattr(lock, "_age", lambda owner, seen: 3.0)
        lock.acquire()
    set_timeouts(lock_silent=0.3)
    path = f"{place[1]}/{LOCK}"
    if isinstance(place[0], pyarrow.fs.LocalFileSystem):
        os.utime(path, (time.time() - 100, time.time() - 100))
    with RunLock(*place) as lock:
        lock.confirm()
    assert "sent no heartbeat for" in capsys.readouterr().err


@pytest.mark.parametrize("alive", [True, False])
def test_an_owner_whose_store_has_no_times_is_watched_for_as_long_as_it_may_be_silent(tmp_path, alive, set_timeouts):
    set_timeouts(lock_silent=0.5)
    lock, now, text = RunLock(pyarrow.fs.LocalFileSystem(), str(tmp_path), clock=lambda: now[0]), [0.0], "seen"

    class File:
        def age(self):
            return None

        def read(self):
            now[0] += 0.2
            return f"{text} {now[0]}" if alive and now[0] > 0.3 else text

    lock._file = File()
    assert lock._age({}, text) == (0.0 if alive else pytest.approx(0.6))


def test_a_driver_that_was_frozen_ends(place):
    """Its lock was taken over meanwhile: it reports that, and neither writes to it nor removes it."""
    calls = []
    lock = RunLock(*place, on_lost=lambda: calls.append(1))
    with pytest.raises(TrainingError, match="process .* on far .* has taken over .*run' while this driver"):
        with lock:
            lock.confirm()
            if isinstance(place[0], pyarrow.fs.LocalFileSystem):
                os.unlink(f"{place[1]}/{LOCK}")
            left_by(place, host="far")
            until(lambda: calls)
            lock.check()
    assert owner(place)["host"] == "far"


def test_a_lock_on_nfs_is_lost_if_another_host_has_replaced_the_file(tmp_path, monkeypatch):
    """The open file is no more on the server. It is so after a restart of the server, too: then it is retried."""

    def stale(_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    path = tmp_path / LOCK
    file = lock_file.MountedFile(None, str(path), "me")
    assert file.create('{"id": "me"}')
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", stale)
        with pytest.raises(OSError, match="[Ss]tale"):
            file.beat('{"id": "me"}')
        path.write_text('{"id": "another"}')
        assert not file.beat('{"id": "me"}')
    file.close()


def test_a_lock_that_is_gone_is_lost(place):
    with pytest.raises(TrainingError, match="another driver, which has ended since"):
        with RunLock(*place):
            place[0].delete_file(f"{place[1]}/{LOCK}")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"pid": "x"}'])
def test_what_cannot_be_read_is_held_until_it_is_old(tmp_path, text):
    (tmp_path / LOCK).write_text(text)
    place = pyarrow.fs.LocalFileSystem(), str(tmp_path)
    with pytest.raises(ConfigError, match="held by"):
        RunLock(*place).acquire()
    os.utime(tmp_path / LOCK, (0, 0))
    with RunLock(*place):
        pass


def test_who_holds_a_folder_is_described_without_a_write(place, monkeypatch):
    """The folder may be another user's, or be listed twice at once."""

    def refused(*_):
        raise PermissionError("only to be read")

    left_by(place, machine="another", host="far")
    monkeypatch.setattr(lock_file, "_exclusive", refused)
    monkeypatch.setattr(lock_file.StoredFile, "_write", refused)
    assert "on far" in run_lock.describe_holder(*place)
    if isinstance(place[0], pyarrow.fs.LocalFileSystem):  # the other one has no times
        os.utime(f"{place[1]}/{LOCK}", (time.time() - 100, time.time() - 100))
        assert run_lock.describe_holder(*place) is None


def test_unwritable_storage_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="The storage of a run must be one that this process can write to"):
        RunLock(pyarrow.fs.LocalFileSystem(), str(tmp_path / "file" / "run")).acquire()


def test_a_full_disk_leaves_no_lock_that_refuses_the_next_start(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match="can write to.*No space left"):
            RunLock(pyarrow.fs.LocalFileSystem(), str(tmp_path / "run")).acquire()
    assert os.listdir(tmp_path) == []


def test_a_late_takeover_leaves_the_file_to_the_faster_driver(tmp_path):
    path = tmp_path / LOCK
    path.write_text("dead")
    fast, late = (lock_file.MountedFile(None, str(path), name) for name in ("fast", "late"))
    assert fast.replace("of the fast one", "dead")
    assert not late.replace("of the late one", "dead")
    assert fast.beat("of the fast one") and path.read_text() == "of the fast one"
    assert os.listdir(tmp_path) == [LOCK]
    fast.close()
