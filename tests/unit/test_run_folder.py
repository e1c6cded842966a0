"""Names of runs, and the folder of one that is put aside. No Ray."""

from __future__ import annotations

import json

import fsspec
import pyarrow.fs
import pytest
from ray import tune
from ray.train import RunConfig

from raytf import run_folder
from raytf.errors import ConfigError
from raytf.run_folder import RunFolder

SNAPSHOT = "checkpoint_manager_snapshot.json"


@pytest.fixture(params=["mounted", "object store"])
def folder(request, tmp_path):
    if request.param == "mounted":
        yield RunFolder(pyarrow.fs.LocalFileSystem(), str(tmp_path / "run"), "run")
        return
    memory = fsspec.filesystem("memory")
    filesystem = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(memory))
    yield RunFolder(filesystem, f"/bucket_{tmp_path.name}/run", "run")
    memory.rm(f"/bucket_{tmp_path.name}", recursive=True)


def write(folder, name, value):
    path = f"{folder.path}/{name}"
    folder.filesystem.create_dir(path.rpartition("/")[0])
    with folder.filesystem.open_output_stream(path) as file:
        file.write((value if isinstance(value, str) else json.dumps(value)).encode())


def names(folder, path):
    found = folder.filesystem.get_file_info(pyarrow.fs.FileSelector(path, recursive=True))
    return sorted(i.path.removeprefix(f"{path}/") for i in found if i.type == pyarrow.fs.FileType.File)


def trained(folder, epochs=2):
    listed = [{"checkpoint_dir_name": f"checkpoint_{i}", "metrics": {}} for i in range(epochs)]
    indices = list(range(epochs))
    write(folder, SNAPSHOT, {"checkpoint_results": listed, "checkpoint_report_indices": indices})
    for i in range(epochs):
        state = {"epoch": i + 1, "step": 4, "seed": 0, "stopped": False, "history": [], "identity": {"seed": i}}
        write(folder, f"checkpoint_{i}/state.json", state)
        write(folder, f"checkpoint_{i}/model.keras", "weights")
        write(folder, f"checkpoint_{i}/manifest.json", {"version": 2, "files": {"model.keras": {"bytes": 7}}})


def test_names_are_not_told_apart_by_a_clock():
    shared = RunConfig()
    given = shared.name
    made = {run_folder.named(shared, "keras").name for _ in range(50)}
    assert len(made) == 50 and shared.name == given, "the user's RunConfig stays as it is"
    assert run_folder.named(RunConfig(name=""), "keras").name.startswith("keras_2")
    mine = RunConfig(name="mine")
    assert run_folder.named(mine, "keras") is mine
    assert run_folder.named(tune.RunConfig(), "sweep").name != run_folder.named(tune.RunConfig(), "sweep").name
    assert not run_folder.is_unnamed(RunConfig(name=made.pop())), "a run is found again by the name that it was given"


@pytest.mark.parametrize("name", ["..", "a/../../b", "/etc/run", "a//b", "a/", ".", " ", "a\\b", "a\0"])
def test_names_that_leave_the_storage_are_refused(name):
    with pytest.raises(ConfigError, match="must name a folder below its storage path"):
        run_folder.check_name(name)


@pytest.mark.parametrize("name", [None, "run", "team/run", "..run", "a.b c"])
def test_names_below_the_storage_are_taken(name):
    run_folder.check_name(name)


def test_a_storage_that_is_not_known_is_said():
    with pytest.raises(ConfigError, match="storage_path must be a path from the root"):
        RunFolder.of(RunConfig(name="run", storage_path="nowhere://bucket"))


def test_where_a_run_stands(folder):
    assert folder.last() is None
    trained(folder)
    assert folder.last() == run_folder.Last(2, False, {"seed": 1})
    write(folder, "checkpoint_1/model.keras", "wei")
    assert folder.last().epoch == 1, "the checkpoint before one that was cut off"
    write(folder, "checkpoint_1/state.json", '{"epoch": 2, "sto')
    assert folder.last().epoch == 1
    write(folder, "checkpoint_0/state.json", "")
    with pytest.raises(ConfigError, match="neither 'checkpoint_1' nor one before it is a whole one. Use resume=False"):
        folder.last()


def test_what_is_put_aside_is_a_run_of_its_own(folder):
    assert folder.put_aside() is None
    trained(folder)
    write(folder, "run.lock", "{}")
    write(folder, "tensorboard/train/events", "x")
    write(folder, f"inner/{SNAPSHOT}", {})  # the run "run/inner"
    before = names(folder, folder.path)
    aside = folder.put_aside()
    assert names(folder, folder.path) == [f"inner/{SNAPSHOT}", "run.lock"]
    there = RunFolder(folder.filesystem, f"{folder.path.rpartition('/')[0]}/{aside}", aside)
    assert sorted([*names(folder, there.path), f"inner/{SNAPSHOT}", "run.lock"]) == before
    assert there.last().epoch == 2 and folder.last() is None
    assert folder.put_aside() is None
