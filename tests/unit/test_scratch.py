"""Temporary folders go with the process that made them, at the latest when another one makes one."""

import os
import signal
import subprocess
import sys
import tempfile

import pyarrow.fs
import pytest
import ray.train

from raytf.storage import scratch
from raytf.storage.folder_contents import local_folder, read_files

MAKES = "from raytf.storage import scratch; print(scratch.make_folder(), flush=True); input()"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_what_a_killed_process_left_is_removed(temporary):
    own = scratch.make_folder()
    process = subprocess.Popen([sys.executable, "-c", MAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    its = process.stdout.readline().strip()
    os.makedirs(os.path.join(its, "checkpoint"))
    assert scratch.remove_abandoned() == 0 and os.path.isdir(its), "its owner lives"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert scratch.remove_abandoned() == 1 and not os.path.exists(its) and os.path.isdir(own)


def test_what_others_have_is_left_alone(temporary):
    own = os.path.basename(scratch.make_folder())
    _, host, pid, started, _ = own.split("_", 4)
    names = ["raytf_x", f"raytf_elsewhere_{pid}_1_x", f"other_{host}_{pid}_1_x", f"raytf_{host}_{pid}", own]
    for name in names:
        (temporary / name).mkdir(exist_ok=True)
    (temporary / f"raytf_{host}_{pid}_{int(started) + 1}_x").mkdir()  # of an earlier process of this number
    assert scratch.remove_abandoned() == 1 and sorted(os.listdir(temporary)) == sorted(names)


def test_folder_is_removed_after_use(temporary):
    with scratch.temporary_folder() as path:
        assert os.path.isdir(path)
    assert not os.path.exists(path)


def test_a_checkpoint_of_an_object_store_alone_is_copied_for_a_block(temporary, place):
    filesystem, path = place
    files = {"model.keras": b"weights", "parts/1": b"rows"}
    filesystem.create_dir(f"{path}/parts")
    for name, content in files.items():
        with filesystem.open_output_stream(f"{path}/{name}") as file:
            file.write(content)
    before = set(os.listdir(temporary))
    with local_folder(ray.train.Checkpoint(path, filesystem=filesystem)) as folder:
        assert read_files(folder) == files
        assert (folder == path) == isinstance(filesystem, pyarrow.fs.LocalFileSystem)
        copies = set() if folder == path else {os.path.basename(folder)}
        assert set(os.listdir(temporary)) - before == copies, "no lock that another user cannot take"
    assert set(os.listdir(temporary)) == before
