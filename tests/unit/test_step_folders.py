"""Checkpoints within epochs as folders of a run: named by steps, whole or passed over, next to those of epochs."""

import json

import pyarrow.fs
import pytest

from raytf.storage import checkpoint_files, step_folders
from raytf.storage.checkpoint_files import CheckpointState


def kept(place, step, whole=True):
    folder = f"{place[1]}/{step_folders.folder_name(step)}"
    place[0].create_dir(folder)
    for name in ["manifest.json"] * whole + ["model.keras", "state.json"]:
        with place[0].open_output_stream(f"{folder}/{name}") as file:
            file.write(f"{name} of {step}".encode())


@pytest.mark.parametrize(
    "name", ["step_12", "step_00000000001a", "checkpoint_1", "step_", "xstep_000000000001", ".step_1"]
)
def test_other_names_are_none(name):
    assert step_folders.step_of_folder(name) is None


@pytest.mark.parametrize("step", [0, 7, 10**12 - 1, 10**12])
def test_names_contain_their_steps(step):
    assert step_folders.step_of_folder(step_folders.folder_name(step)) == step


def test_finished_ones_are_listed_newest_first(place):
    assert step_folders.finished_folders(*place) == []
    for step in (100, 7, 1_000_000):
        kept(place, step)
    kept(place, 2_000_000, whole=False)
    place[0].create_dir(f"{place[1]}/step_of_mine")
    found = step_folders.finished_folders(*place)
    assert found == [(step, step_folders.folder_name(step)) for step in (1_000_000, 100, 7)]
    with place[0].open_input_stream(f"{place[1]}/{found[0][1]}/model.keras") as file:
        assert file.read() == b"model.keras of 1000000"


class Stored:
    """A `ray.train.Checkpoint` of a folder of this machine."""

    def __init__(self, path):
        self.path, self.filesystem = str(path), pyarrow.fs.LocalFileSystem()


def test_the_newest_comes_first_whatever_it_is(tmp_path):
    """After as many steps that of the epoch is before that of the step; a damaged one keeps its place."""
    epochs, steps = [], []
    for step, epoch in ((30, 3), (20, 2), (10, 1)):
        folder = tmp_path / f"checkpoint_{epoch}"
        folder.mkdir()
        (folder / "state.json").write_text(CheckpointState(epoch, step, 0, False, []).to_json() if step != 20 else "")
        epochs.append(Stored(folder))
    for step in (35, 30, 25, 5):
        steps.append((step, Stored(tmp_path / step_folders.folder_name(step))))
    names = [c.path.rpartition("/")[2] for c in checkpoint_files.merge_newest_first(iter(epochs), steps)]
    within = {step: step_folders.folder_name(step) for step, _ in steps}
    assert names == [within[35], "checkpoint_3", "checkpoint_2", within[30], within[25], "checkpoint_1", within[5]]
    assert [c.path for c in checkpoint_files.merge_newest_first(iter(()), steps)] == [c.path for _, c in steps]


def test_a_state_within_an_epoch_is_of_a_newer_format():
    """Which an older raytf refuses by name, instead of beginning the epoch again."""
    ended, within = (
        CheckpointState(2, 8, 0, False, []),
        CheckpointState(2, 9, 0, False, [], epoch_step=1, logs={"loss": 0.5}),
    )
    assert (json.loads(ended.to_json())["version"], json.loads(within.to_json())["version"]) == (2, 3)
    for state in (ended, within):
        assert CheckpointState.from_dict(json.loads(state.to_json()), "it") == state
    for name, value in {"epoch_step": -1, "logs": [], "order": None}.items():
        with pytest.raises(checkpoint_files.DamagedCheckpointError, match=f"has no right '{name}'"):
            CheckpointState.from_dict(json.loads(within.to_json()) | {name: value}, "it")
