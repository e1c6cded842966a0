"""What several tests of parts need."""

from __future__ import annotations

import fsspec
import pyarrow.fs
import pytest


@pytest.fixture(params=["mounted", "object store"])
def place(request, tmp_path):
    """(file system, folder): local, or one without exclusive creation and without times."""
    if request.param == "mounted":
        yield pyarrow.fs.LocalFileSystem(), str(tmp_path / "run")
        return
    memory = fsspec.filesystem("memory")
    folder = f"/bucket_{tmp_path.name}/run"
    yield pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(memory)), folder
    memory.rm(folder.rpartition("/")[0], recursive=True)
