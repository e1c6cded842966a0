"""A temporary folder that is full, read-only or missing is named, with what is needed and the fix. No Ray."""

import contextlib
import errno
import io
import os
import subprocess
import tempfile
import zipfile

import pyarrow.fs
import pytest

from raytf.storage import checkpoint_files, scratch
from raytf.storage.scratch import ScratchError
from raytf.storage.snapshot_store import SnapshotStore
from tests.unit.test_snapshots import files_of


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The temporary folder of this process, a disk of eight megabytes."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "raytf_test", path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    monkeypatch.setenv("TMPDIR", str(path))
    yield path
    subprocess.run(["umount", path], check=True)


def test_one_that_is_too_small_is_named_before_anything_is_written(small):
    with pytest.raises(ScratchError) as caught:
        scratch.make_folder(20 << 20)
    text = str(caught.value)
    assert str(small) in text and "20 MB" in text and "of 8 MB are free" in text and "TMPDIR" in text
    assert os.listdir(small) == []


def test_one_that_becomes_full_is_named(small):
    with pytest.raises(ScratchError, match=f"{small}.*No space left.* of 8 MB are free.*TMPDIR"):
        with scratch.temporary_folder() as folder:
            with open(os.path.join(folder, "file"), "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 20))
    assert os.listdir(small) == [], "what was there is removed"


def test_one_that_is_read_only_is_named_and_so_is_one_that_is_missing(small, monkeypatch):
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    with pytest.raises(ScratchError, match=f"{small}.*Read-only file system"):
        scratch.make_folder()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(small)])
    monkeypatch.delenv("TMPDIR")
    with pytest.raises(ScratchError, match="Python finds no temporary folder"):
        scratch.make_folder()


def test_the_next_place_is_taken_where_one_has_no_room(small, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(other))  # as Ray's, whose folder comes after TMPDIR
    with scratch.temporary_folder(20 << 20) as folder:
        assert os.path.dirname(folder) == str(other)
    with scratch.temporary_folder() as folder:
        assert os.path.dirname(folder) == str(small)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_of_another_folder_is_left_alone(tmp_path, number):
    """A user's own disk may be full within a training that has a temporary folder, too."""
    with pytest.raises(OSError) as caught:
        with scratch.name_errors(str(tmp_path / "mine")):
            raise OSError(number, os.strerror(number), str(tmp_path / "mine_not"))
    assert type(caught.value) is OSError


def test_a_model_in_parts_needs_room_for_the_whole(small, set_timeouts, tmp_path):
    set_timeouts(checkpoint_parts=0.0)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("model.weights.h5", os.urandom(12 << 20))
    files = {**files_of(1), "model.keras": [content.getvalue()]}
    SnapshotStore(pyarrow.fs.LocalFileSystem(), str(tmp_path)).put("step_000000000001", files, 2)
    with pytest.raises(ScratchError, match="13 MB"), contextlib.ExitStack() as stack:
        stack.enter_context(checkpoint_files.whole_folder(str(tmp_path / "step_000000000001")))


def test_vocabulary_without_disk_space_is_reported(small, tmp_path):
    """Keras unpacks vocabularies into Python's temporary folder."""
    import keras

    from raytf.storage.checkpoint_files import CheckpointState
    from raytf.worker import checkpoint, model_loading

    words = keras.layers.TextVectorization(output_mode="multi_hot", split="whitespace")
    words.adapt(["a b c"])
    model = keras.Sequential([keras.Input((1,), dtype="string"), words, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    checkpoint.save(str(folder), model, CheckpointState(0, 1, 0, False, []))
    checkpoint.restore(str(folder), model)
    with open(small / "full", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass
    checkpoint.restore(str(folder), model)
    with pytest.raises(ScratchError, match=f"{small}.*TMPDIR"):
        model_loading.load_model(folder)
