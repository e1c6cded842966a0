"""Checkpoints of a run are ordered by steps, whatever the clocks of the hosts were that named them. No Ray."""

import json
import random

import pyarrow.fs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.storage import checkpoint_files
from raytf.storage.checkpoint_files import CheckpointState
from raytf.storage.run_folder import RunFolder
from raytf.worker.checkpoint_selector import CheckpointSelector, list_checkpoints

LOCAL = pyarrow.fs.LocalFileSystem()
# Clocks that were put back, or of another host: the first epoch has the latest time.
NAMES = {step: f"checkpoint_2026-01-01_{hour}-00-00" for step, hour in ((30, "01"), (20, "02"), (10, "03"))}


@pytest.fixture
def run(tmp_path):
    for step, name in NAMES.items():
        folder = tmp_path / "run" / name
        folder.mkdir(parents=True)
        (folder / "model.keras").write_bytes(b"")
        (folder / "seeds.npz").write_bytes(b"")
        (folder / "state.json").write_text(
            CheckpointState(step // 10, step, 0, False, [{"epoch": step // 10}]).to_json()
        )
        checkpoint_files.write_manifest(str(folder))
    return tmp_path / "run"


def test_the_newest_is_that_of_most_steps_for_the_driver_and_for_load_model(run):
    assert [one.name for one in CheckpointSelector().ordered(list_checkpoints(LOCAL, str(run)), str(run))] == list(
        NAMES.values()
    )
    kept = list_checkpoints(LOCAL, str(run))
    random.Random(0).shuffle(kept)
    assert [one.name for one in checkpoint_files.newest_first([*kept, *kept])] == list(NAMES.values())
    made = RunFolder(LOCAL, str(run), "run")
    assert made._stored() == list(NAMES.values())
    assert made.last(finished=lambda last: False).step == 30


def test_checkpoint_without_a_step_comes_before_the_next_older_one(run):
    (run / NAMES[20] / "state.json").write_text(json.dumps([]))
    assert [one.name for one in list_checkpoints(LOCAL, str(run))] == [NAMES[20], NAMES[30], NAMES[10]]


@given(st.dictionaries(st.text(max_size=3), st.none() | st.integers(0, 5), max_size=8))
def test_each_is_there_once_and_steps_descend(steps):
    ordered = checkpoint_files.by_step(steps, str, steps.get)
    assert sorted(ordered) == sorted(steps)
    known = [steps[name] for name in ordered if steps[name] is not None]
    assert known == sorted(known, reverse=True)
