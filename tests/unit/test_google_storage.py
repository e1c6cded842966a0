"""Data, locks and snapshots on Google's storage, as an emulator in this process has it. No Ray."""

import datetime
import socket

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from raytf.data.files import listed
from raytf.errors import RaytfError
from raytf.storage import checkpoint_files
from raytf.storage.run_lock import RunLock
from raytf.storage.snapshot_store import SnapshotStore
from raytf.storage.step_folders import folder_name
from tests.unit.test_snapshots import files_of

pytestmark = pytest.mark.slow
RUN = "bucket/some/run"


@pytest.fixture
def storage():
    from gcp_storage_emulator.server import create_server

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = create_server("127.0.0.1", port, in_memory=True)
    server.start()
    made = pyarrow.fs.GcsFileSystem(
        anonymous=True,
        scheme="http",
        endpoint_override=f"127.0.0.1:{port}",
        project_id="tests",
        retry_time_limit=datetime.timedelta(seconds=10),
    )
    try:
        made.create_dir("bucket")
        yield made
    finally:
        server.stop()


def test_snapshots_are_put_and_replaced(storage):
    """The emulator does not list folders as the service does, so that none is pruned."""
    store = SnapshotStore(storage, RUN)
    for step in (1, 2, 2, 3):
        store.put(folder_name(step), files_of(step))
        assert checkpoint_files.check_stored(storage, f"{RUN}/{folder_name(step)}").step == step


def test_one_driver_has_a_run(storage):
    with RunLock(storage, RUN):
        with pytest.raises(RaytfError):
            RunLock(storage, RUN).acquire()


def test_files_are_listed_and_read(storage):
    for name in ("b", "a"):
        with storage.open_output_stream(f"bucket/data/{name}.parquet") as file:
            pq.write_table(pa.table({"x": np.arange(10)}), file)
    files = listed("bucket/data/*.parquet", storage)
    assert files.paths == ("bucket/data/a.parquet", "bucket/data/b.parquet") and min(files.sizes) > 0
    assert pq.read_table(files.paths[0], filesystem=storage)["x"].to_pylist() == list(range(10))
