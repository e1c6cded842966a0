"""Names of runs, and the folder of one that is put aside. No Ray."""

from __future__ import annotations

import dataclasses
import json
import logging
import zlib

import fsspec
import pyarrow.fs
import pytest
from ray import tune
from ray.train import CheckpointConfig, RunConfig
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (
    _CheckpointManagerState,
    _TrainingResultState,
)

from raytf import validation
from raytf.errors import ConfigError
from raytf.storage import run_folder
from raytf.storage.run_folder import RunFolder
from raytf.train import keras_trainer
from tests.logged import warnings_logged

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
    names = [f"checkpoint_{i}" for i in range(epochs)]
    for i, name in enumerate(names):
        state = {"version": 2, "epoch": i + 1, "step": 4, "seed": 0, "stopped": False}
        whole(folder, name, state | {"history": [{"epoch": i + 1, "loss": 9.0 - i}], "identity": {"seed": i}})
    write(folder, SNAPSHOT, snapshot(names))


def whole(folder, name, state):
    """A checkpoint."""
    parts = {"model.keras": "weights", "seeds.npz": "seeds", "state.json": json.dumps(state)}
    for part, text in parts.items():
        write(folder, f"{name}/{part}", text)
    files = {part: {"bytes": len(text), "crc32": zlib.crc32(text.encode())} for part, text in parts.items()}
    write(folder, f"{name}/manifest.json", {"version": state["version"], "files": files})


def within(folder, step, epoch_step, **order):
    """A checkpoint within an epoch."""
    state = {"version": 3, "epoch": 2, "step": step, "epoch_step": epoch_step, "seed": 0, "stopped": False}
    whole(folder, f"step_{step:012d}", state | {"history": [], "identity": {"seed": "step"}, "order": order})


def test_run_is_at_its_newest_checkpoint(folder):
    within(folder, 2, 2)
    assert folder.last() == run_folder.LastCheckpoint(2, 2, 2, False, {"seed": "step"}), (
        "it ended within its first epoch"
    )
    trained(folder)
    assert folder.last() == run_folder.LastCheckpoint(2, 4, 0, False, {"seed": 1}), "that of the step is older"
    within(folder, 4, 4)
    assert folder.last().epoch_step == 0, "behind as many steps that of the epoch has its validation, too"
    within(folder, 6, 2)
    assert folder.last() == run_folder.LastCheckpoint(2, 6, 2, False, {"seed": "step"})
    within(folder, 9, 5)
    write(folder, "step_000000000009/model.keras", "w")
    with warnings_logged("Damaged: step_000000000009 .model.keras is 1 bytes.*step_000000000006 instead"):
        assert folder.last().step == 6
    write(folder, "checkpoint_1/model.keras", "w")
    with warnings_logged("Damaged"):
        found = folder.last()
    assert found.step == 6 and found.relisted == (("checkpoint_0",), ""), "Ray's list is made anew all the same"
    whole(folder, "checkpoint_1", {"version": 3, "epoch": 2, "step": 8, "stopped": False, "history": [], "seed": 0})
    with warnings_logged("Damaged: step_000000000009 .*Using the checkpoint checkpoint_1 instead"):
        assert folder.last().step == 8, "the end of an epoch is newer than the whole checkpoint of a step"
    aside = folder.archive()
    assert folder.last() is None and any(
        n.startswith("step_") for n in names(folder, f"{folder.path.rpartition('/')[0]}/{aside}")
    )


def test_warning_about_a_damaged_epoch_end_names_where_the_run_resumes(folder, capsys):
    within(folder, 6, 2)
    write(folder, "checkpoint_2026-01-01_00-00-00.000001/state.json", "torn")
    with warnings_logged("Damaged: checkpoint_2026.*Using the checkpoint step_000000000006 instead"):
        assert folder.last().step == 6
    assert "starts from scratch" not in capsys.readouterr().err


def snapshot(names):
    """Ray's list, as Ray writes it."""
    results = [_TrainingResultState(checkpoint_dir_name=n, metrics={"epoch": i + 1}) for i, n in enumerate(names)]
    return _CheckpointManagerState(
        checkpoint_results=results,
        checkpoint_report_indices=list(range(len(names))),
        latest_checkpoint_result=results[-1],
        pending_training_results=[],
        pending_validation_specs=[],
        current_report_index=len(names),
        validated_checkpoint_dir_names=[],
        timed_out_validation_checkpoint_dir_names=[],
        failed_validation_checkpoint_dir_names=[],
    ).model_dump_json()


def read(folder, name):
    with folder.filesystem.open_input_stream(f"{folder.path}/{name}") as file:
        return json.loads(file.read())


def epoch(folder, **arguments):
    """Returns the run's epoch, whatever is warned of."""
    return folder.last(**arguments).epoch


def test_fate_of_a_begun_epoch_is_logged(folder):
    within(folder, 6, 2, seed=3)
    last = folder.last()
    assert keras_trainer._describe_resume(last, {"seed": 3}) == "resuming from step 6 (step 2 of epoch 3)"
    again = "resuming from step 6; epoch 3 restarts at its first step, as its 2 step(s) would have other rows now"
    assert keras_trainer._describe_resume(last, {"seed": 4}) == f"{again} (seed 4, was 3)"
    complete = dataclasses.replace(last, epoch_step=0, order={})
    assert keras_trainer._describe_resume(complete, {}) == "resuming from step 6 (epoch 2 complete)"


def test_names_are_not_distinguished_by_a_clock():
    shared = RunConfig()
    given = shared.name
    made = {run_folder.with_name(shared, "keras").name for _ in range(50)}
    assert len(made) == 50 and shared.name == given, "the user's RunConfig stays as it is"
    assert run_folder.with_name(RunConfig(name=""), "keras").name.startswith("keras_2")
    named = RunConfig(name="mine")
    assert run_folder.with_name(named, "keras") is named
    assert run_folder.with_name(tune.RunConfig(), "sweep").name != run_folder.with_name(tune.RunConfig(), "sweep").name
    assert not run_folder.is_unnamed(RunConfig(name=made.pop())), "a run is found again by the name that it was given"


@pytest.mark.parametrize("name", ["..", "a/../../b", "/etc/run", "a//b", "a/", ".", " ", "a\\b", "a\0", 5, ["run"]])
def test_names_that_leave_the_storage_are_refused(name):
    with pytest.raises(ConfigError, match="must name a folder below its storage path"):
        validation.check_run_name(name)


@pytest.mark.parametrize("name", [None, "run", "team/run", "..run", "a.b c"])
def test_names_below_the_storage_are_taken(name):
    validation.check_run_name(name)


def test_unknown_storage_is_reported():
    with pytest.raises(ConfigError, match="storage_path must be a path, or the URI of a storage that pyarrow knows"):
        RunFolder.from_config(RunConfig(name="run", storage_path="nowhere://bucket"))


def test_last_checkpoint_of_a_run(folder):
    assert folder.last() is None
    trained(folder)
    assert folder.last() == run_folder.LastCheckpoint(2, 4, 0, False, {"seed": 1})
    write(folder, "checkpoint_1/model.keras", "wei")
    with warnings_logged("Damaged: checkpoint_1 .model.keras is 3 bytes.*checkpoint_0 instead"):
        assert folder.last().epoch == 1, "the checkpoint before one that was cut off"
    write(folder, "checkpoint_1/state.json", '{"epoch": 2, "sto')
    assert epoch(folder) == 1
    write(folder, "checkpoint_0/state.json", "")
    with pytest.raises(ConfigError, match="whole: checkpoint_1 .*; checkpoint_0 .state.json is empty.*resume=False"):
        folder.last()


def test_checkpoints_within_the_first_epoch_that_are_all_damaged_are_named(folder):
    """Before workers start, who would find it out."""
    within(folder, 2, 2)
    write(folder, "step_000000000002/model.keras", "w")
    with pytest.raises(ConfigError, match=r"none is whole: step_000000000002 \(model.keras is 1 bytes"):
        folder.last()


def test_newer_format_of_an_epoch_end_is_refused_next_to_a_readable_one(folder):
    trained(folder)
    within(folder, 6, 2)
    whole(folder, "checkpoint_1", {"version": 99})
    with pytest.raises(ConfigError, match="received: checkpoint_1 of format 99. Use the raytf that wrote it"):
        folder.last()


def test_a_finished_run_is_compared_byte_by_byte(folder):
    trained(folder)
    write(folder, "checkpoint_1/model.keras", "weighTs")
    assert folder.last().epoch == 2, "by sizes; who goes on compares the rest"
    assert epoch(folder, finished=lambda last: last.epoch >= 2) == 1
    assert epoch(folder, finished=lambda last: True) == 1


def test_a_state_of_the_same_size_is_not_taken(folder):
    trained(folder)
    state = read(folder, "checkpoint_1/state.json")
    write(folder, "checkpoint_1/state.json", {**state, "epoch": 7})
    assert epoch(folder) == 1


def test_a_checkpoint_without_its_manifest_is_none(folder):
    trained(folder)
    folder.filesystem.delete_file(f"{folder.path}/checkpoint_1/manifest.json")
    assert epoch(folder) == 1


def files_of(part):
    deep = "[" * 100_000
    wrong = {"empty": "", "half": '{"a', "deep": deep, "a list": "[]", "a number": "3"}
    return [pytest.param(part, text, id=f"{part} {name}") for name, text in wrong.items()]


@pytest.mark.parametrize(("part", "text"), [*files_of("state.json"), *files_of("manifest.json")])
def test_json_that_cannot_be_read_is_a_damaged_checkpoint(folder, part, text):
    trained(folder)
    write(folder, f"checkpoint_1/{part}", text)
    assert epoch(folder) == 1


@pytest.mark.parametrize("files", [[], {"model.keras": 3}, 4, {"../x": {"bytes": 1, "crc32": 1}}])
def test_a_manifest_that_names_nothing_right_is_a_damaged_checkpoint(folder, files):
    trained(folder)
    known = read(folder, "checkpoint_1/manifest.json")["files"]
    write(
        folder, "checkpoint_1/manifest.json", {"version": 2, "files": known | files if type(files) is dict else files}
    )
    assert epoch(folder) == 1


def test_folder_instead_of_a_file_is_a_damaged_checkpoint(folder):
    for part in ("state.json", "manifest.json", "model.keras"):
        trained(folder)
        folder.filesystem.delete_file(f"{folder.path}/checkpoint_1/{part}")
        write(folder, f"checkpoint_1/{part}/x", "x")
        assert epoch(folder) == 1
        folder.filesystem.delete_dir(f"{folder.path}/checkpoint_1/{part}")


def unlisted(how, text):
    """A list of Ray's that cannot be used."""
    if how == "deleted":
        return None
    listed = json.loads(text)
    if how == "another version":
        return json.dumps({**listed, "current_report_index": None})
    if how == "no name":
        del listed["checkpoint_results"][0]["checkpoint_dir_name"]
    elif how == "elsewhere":
        listed["checkpoint_results"][1]["checkpoint_dir_name"] = "../checkpoint_1"
    elif how == "what is gone":
        listed["checkpoint_results"][0]["checkpoint_dir_name"] = "checkpoint_9"
    else:
        return {"empty": "", "half": text[: len(text) // 2], "deep": "[" * 100_000}[how]
    return json.dumps(listed)


HOW = ["deleted", "empty", "half", "deep", "another version", "no name", "elsewhere", "what is gone"]


@pytest.mark.parametrize("how", HOW)
def test_a_list_that_cannot_be_used_is_made_again(folder, how, capsys):
    trained(folder, 3)
    before = snapshot([f"checkpoint_{i}" for i in range(3)])
    folder.filesystem.delete_file(f"{folder.path}/{SNAPSHOT}")
    if (text := unlisted(how, before)) is not None:
        write(folder, SNAPSHOT, text)
    write(folder, "checkpoint_1/model.keras", "")
    last = folder.last()
    assert last.epoch == 3
    if how != "deleted":
        with pytest.raises(ConfigError, match=SNAPSHOT):
            folder.check_list()
    folder.relist(last, CheckpointConfig())
    assert "lists 2 whole checkpoint(s) now" in capsys.readouterr().err
    folder.check_list()
    found = read(folder, SNAPSHOT)
    assert [entry["checkpoint_dir_name"] for entry in found["checkpoint_results"]] == ["checkpoint_0", "checkpoint_2"]
    assert found["latest_checkpoint_result"] == {
        "version": 0,
        "checkpoint_dir_name": "checkpoint_2",
        "metrics": {"epoch": 3, "loss": 7.0},
    }
    assert folder.last() == run_folder.LastCheckpoint(3, 4, 0, False, {"seed": 2}), "once"


def test_a_train_loops_own_checkpoints_are_missed_where_ray_has_lost_its_list(folder):
    for name in ("checkpoint_1", "checkpoint_2", "checkpoint_2026-11-22_21-57-44.678500"):
        write(folder, f"{name}/weights", "x")
    folder.check_list()
    write(folder, "checkpoint_2026-11-22_21-57-45.930770/weights", "x")
    with pytest.raises(ConfigError, match=f"{SNAPSHOT}, which is missing"):
        folder.check_list()


def test_folder_instead_of_the_list_is_reported(tmp_path):
    folder = RunFolder(pyarrow.fs.LocalFileSystem(), str(tmp_path / "run"), "run")
    trained(folder)
    (tmp_path / "run" / SNAPSHOT).unlink()
    (tmp_path / "run" / SNAPSHOT).mkdir()
    last = folder.last()
    assert last.epoch == 2
    with pytest.raises(ConfigError, match="must be a file that can be written.*Move what is there away"):
        folder.relist(last, CheckpointConfig())


def test_the_new_list_is_in_rays_order_of_scores(folder):
    trained(folder, 3)
    folder.filesystem.delete_file(f"{folder.path}/{SNAPSHOT}")
    config = CheckpointConfig(checkpoint_score_attribute="loss", checkpoint_score_order="max")
    folder.relist(folder.last(), config)
    found = read(folder, SNAPSHOT)
    assert [entry["metrics"]["epoch"] for entry in found["checkpoint_results"]] == [3, 2, 1]
    assert found["checkpoint_report_indices"] == [2, 1, 0] and folder.last().epoch == 3


def test_a_damaged_newest_checkpoint_leaves_the_list(folder):
    trained(folder)
    write(folder, "checkpoint_1/model.keras", "")
    with warnings_logged("Damaged: checkpoint_1"):
        last = folder.last()
    folder.relist(last, CheckpointConfig())
    assert read(folder, SNAPSHOT)["latest_checkpoint_result"]["metrics"] == {"epoch": 1}, "Ray's own metrics stay"
    assert folder.last() == run_folder.LastCheckpoint(1, 4, 0, False, {"seed": 0})


def test_run_that_ended_within_its_first_checkpoint_starts_from_scratch(folder, capsys):
    write(folder, "checkpoint_0/model.keras", "wei")
    assert folder.last() is None
    assert "none of its checkpoints is whole" in capsys.readouterr().err
    folder.check_list()
    write(folder, SNAPSHOT, "")
    with pytest.raises(ConfigError, match=f"{SNAPSHOT}, which lists them, is empty. Use resume=False"):
        folder.last()


def test_what_is_put_aside_is_a_run_of_its_own(folder):
    assert folder.archive() is None
    trained(folder)
    write(folder, "run.lock", "{}")
    write(folder, "tensorboard/train/events", "x")
    write(folder, f"inner/{SNAPSHOT}", {})  # the run "run/inner"
    before = names(folder, folder.path)
    aside = folder.archive()
    assert names(folder, folder.path) == [f"inner/{SNAPSHOT}", "run.lock"]
    archived = RunFolder(folder.filesystem, f"{folder.path.rpartition('/')[0]}/{aside}", aside)
    assert sorted([*names(folder, archived.path), f"inner/{SNAPSHOT}", "run.lock"]) == before
    assert archived.last().epoch == 2 and folder.last() is None
    assert folder.archive() is None


def test_ray_prints_no_advice_when_a_run_is_only_read(tmp_path, caplog):
    """It would say that the folder should be deleted, if a new run was meant."""
    from raytf.worker import model_loading

    folder = RunFolder(pyarrow.fs.LocalFileSystem(), str(tmp_path / "run"), "run")
    trained(folder)
    logger = logging.getLogger("ray.train")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger="ray.train"), pytest.raises(ConfigError, match="model.keras"):
            model_loading.load_model(folder.path)
    finally:
        logger.removeHandler(caplog.handler)
    assert "run snapshot was found" not in caplog.text
