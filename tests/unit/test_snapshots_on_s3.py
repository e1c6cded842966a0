"""Snapshots on an object store: moto's server on this machine, slow, failing, and with other keys. No Ray."""

import pathlib
import time

import pyarrow.fs
import pytest

from raytf.errors import ConfigError
from raytf.storage import checkpoint_files
from raytf.storage.run_lock import RunLock
from raytf.storage.snapshot_store import SnapshotStore
from raytf.storage.snapshots import NotWrittenError, SnapshotWriter
from raytf.storage.step_folders import folder_name
from tests.logged import warnings_logged
from tests.unit import object_store
from tests.unit.object_store import BUCKET
from tests.unit.test_snapshots import check, files_of, is_gone, parts_of
from tests.waiting import until

RUN = f"{BUCKET}/some/run"


@pytest.fixture
def storage():
    with object_store.serving() as made:
        yield made


@pytest.fixture
def writer(storage):
    made = SnapshotWriter(storage.filesystem(), RUN)
    yield made
    made.close()
    until(lambda: is_gone(made.pid))


def fetched(storage, step: int, folder: pathlib.Path) -> pathlib.Path:
    """The snapshot of a step on this machine."""
    target = folder / folder_name(step)
    target.mkdir()
    pyarrow.fs.copy_files(
        f"{RUN}/{folder_name(step)}",
        str(target),
        source_filesystem=storage.filesystem(),
        destination_filesystem=pyarrow.fs.LocalFileSystem(),
    )
    return target


def stored(storage) -> list[str]:
    found = storage.filesystem().get_file_info(pyarrow.fs.FileSelector(RUN, allow_not_found=True))
    return sorted(info.base_name for info in found)


@pytest.mark.slow
def test_a_large_one_goes_in_parts_and_the_manifest_comes_last(storage, writer, tmp_path):
    for step, size in ((1, 1000), (2, 1000), (3, 4_000_000)):  # of four bytes
        writer.write(folder_name(step), parts_of(step, size))
        writer.finish(100.0)
    assert stored(storage) == [folder_name(2), folder_name(3)]
    check(fetched(storage, 3, tmp_path), 3, 4_000_000)
    of_last = [(method, path) for method, path in storage.requests if f"/{folder_name(3)}/" in path]
    written = [path for method, path in of_last if method in ("PUT", "POST")]
    assert sum("partNumber" in path for path in written) >= 2
    assert all("manifest.json" in path for path in written[-3:]) and "manifest.json" not in written[-4]


@pytest.mark.slow
def test_an_error_in_the_middle_is_tried_again(storage, tmp_path):
    """A 503 at a part of the file, more often than pyarrow itself tries it, is reported, and the next try is whole."""
    count = [0]

    def fault(environ):
        if environ["REQUEST_METHOD"] == "PUT" and "model.keras" in environ["PATH_INFO"] and count[0] < 9:
            count[0] += 1
            return "503 Slow Down"
        return None

    storage.fault = fault
    writer = SnapshotWriter(storage.filesystem(), RUN)
    with warnings_logged(f"{folder_name(1)} could not be written: .*UploadPart.*It is retried"):
        writer.write(folder_name(1), parts_of(1, 3_000_000))
        writer.finish(200.0)
    check(fetched(storage, 1, tmp_path), 1, 3_000_000)
    writer.close()
    until(lambda: is_gone(writer.pid))


@pytest.mark.slow
def test_storage_that_is_down_is_reported_and_old_objects_stay(storage, tmp_path):
    writer = SnapshotWriter(storage.filesystem(), RUN)
    writer.write(folder_name(1), parts_of(1))
    writer.finish(100.0)
    storage.fault = lambda environ: "503 Down" if environ["REQUEST_METHOD"] in ("PUT", "POST") else None
    with warnings_logged(f"{folder_name(2)} could not be written.*SERVICE_UNAVAILABLE"):
        writer.write(folder_name(2), parts_of(2))
        with pytest.raises(NotWrittenError, match=f"{folder_name(2)} could not be saved: OSError"):
            writer.finish(3.0)
    assert checkpoint_files.check_stored(storage.filesystem(), f"{RUN}/{folder_name(1)}").step == 1
    with pytest.raises(checkpoint_files.DamagedCheckpointError):
        checkpoint_files.check_stored(storage.filesystem(), f"{RUN}/{folder_name(2)}")
    storage.fault = lambda environ: None
    writer.finish(100.0)
    check(fetched(storage, 2, tmp_path), 2)
    writer.close()
    until(lambda: is_gone(writer.pid))


@pytest.mark.slow
def test_a_slow_storage_holds_nobody_up(storage, writer, tmp_path):
    writer.write(folder_name(1), parts_of(1))
    writer.finish(100.0)
    storage.fault = lambda environ: time.sleep(0.05)  # several requests for each file
    with warnings_logged("slower than checkpoints come"):
        for step in range(2, 8):
            writer.write(folder_name(step), parts_of(step))
    writer.finish(100.0)
    assert 0 < writer.skipped < 6
    check(fetched(storage, 7, tmp_path), 7)


def test_wrong_keys_are_found_before_training(storage):
    with RunLock(storage.filesystem(), RUN):
        storage.require_known_keys()
        with pytest.raises(ConfigError, match="storage of a run must be one.*can write to.*(ACCESS_DENIED|INVALID_AC)"):
            RunLock(storage.filesystem(("other", "keys")), f"{BUCKET}/another").acquire()
        storage.tell("reset-auth", b"inf")


@pytest.mark.slow
def test_snapshot_does_not_exist_while_it_is_rewritten(storage):
    """Parts of two snapshots are never taken for one."""
    store = SnapshotStore(storage.filesystem(), RUN)
    store.put(folder_name(1), files_of(1))
    storage.fault = lambda environ: "403 No" if "model.keras" in environ["PATH_INFO"] else None
    with pytest.raises(OSError):
        store.put(folder_name(1), files_of(1))
    storage.fault = lambda environ: None
    with pytest.raises(checkpoint_files.DamagedCheckpointError):
        checkpoint_files.check_stored(storage.filesystem(), f"{RUN}/{folder_name(1)}")
