"""Which checkpoint a trial resumes from, and how a sweep's end is agreed on. No Ray, no TensorFlow."""

from __future__ import annotations

import json
import os

import pyarrow.fs
import pytest
from ray.exceptions import RayActorError, RayTaskError

from raytf.storage import checkpoint_files
from raytf.storage.checkpoint_files import CheckpointState
from raytf.storage.step_folders import folder_name
from raytf.tune import sweep_end, trial_steps
from raytf.tune.sweep_end import SweepEnd, SweepStop
from raytf.worker.session import TRIAL
from raytf.worker.stop import StoppedForRestartError
from tests.logged import warnings_logged

LOCAL = pyarrow.fs.LocalFileSystem()
NOTE = {TRIAL: json.dumps({"begun_with": "other/checkpoint_000003"}).encode()}


@pytest.mark.parametrize(
    ("checkpoint", "files", "found"),
    [
        ("sweep/mine/checkpoint_000001", NOTE, "other/checkpoint_000003"),
        ("sweep/mine/checkpoint_000001", {}, "mine/checkpoint_000001"),  # of an older raytf
        ("sweep/other/checkpoint_000004", NOTE, "other/checkpoint_000004"),  # what it had begun with is its own
    ],
)
def test_what_a_trial_has_begun_with(checkpoint, files, found):
    assert trial_steps.initial_checkpoint(checkpoint, "sweep/mine/", files) == found


def test_folders_differ_by_config_and_by_the_start_of_a_trial():
    config = {"learning_rate": 0.1, "units": 3}
    names = [
        trial_steps.trial_folder(config, ""),
        trial_steps.trial_folder({**config, "learning_rate": 0.12}, ""),
        trial_steps.trial_folder(config, "other/checkpoint_000003"),
        trial_steps.trial_folder(config, "other/checkpoint_000004"),
    ]
    assert len(set(names)) == 4 and trial_steps.trial_folder(dict(reversed(config.items())), "") == names[0]


def test_rows_until_the_newest_checkpoint_within_an_epoch_are_kept(tmp_path):
    """Tune begins the files of a trial again if it has no checkpoint of its own."""
    trial = str(tmp_path)
    (tmp_path / "progress.csv").write_text("epoch,loss\n1,0.5\n2,0.25\n3,nan\n")
    (tmp_path / "result.json").write_text('{"epoch": 1}\n{"epoch": 2}\n{"epoch": 3}\n')
    assert trial_steps.reported_rows(trial, "progress.csv", LOCAL) is None, "it begins from scratch"
    keep(tmp_path / "steps_0123", 4, reports=1)
    keep(tmp_path / "steps_0123", 8, reports=2)
    assert trial_steps.reported_rows(trial, "progress.csv", LOCAL) == b"epoch,loss\n1,0.5\n2,0.25\n"
    assert trial_steps.reported_rows(trial, "result.json", LOCAL) == b'{"epoch": 1}\n{"epoch": 2}\n'
    assert trial_steps.reported_rows(trial, "params.json", LOCAL) is None
    keep(tmp_path / "steps_0123", 9, reports=0)
    assert trial_steps.reported_rows(trial, "progress.csv", LOCAL) == b""


def keep(folder, step, reports):
    """A checkpoint within an epoch, of which the model is none."""
    path = folder / folder_name(step)
    path.mkdir(parents=True)
    for part in (checkpoint_files.MODEL, checkpoint_files.SEEDS):
        (path / part).write_bytes(b"x" * 100)
    (path / checkpoint_files.STATE).write_text(
        CheckpointState(1, step, 7, False, [{"epoch": 1}], epoch_step=2).to_json()
    )
    (path / TRIAL).write_text(json.dumps({"reports": reports}))
    checkpoint_files.write_manifest(str(path))
    return path


def test_newest_whole_checkpoint_after_tunes(tmp_path):
    folder = tmp_path / "trial" / "steps_a"
    newest = lambda after: trial_steps.newest_checkpoint(LOCAL, str(folder), after)
    assert newest(0) is None, "there is no folder"
    first, second = keep(folder, 4, 1), keep(folder, 6, 2)
    files, reports = newest(5)
    assert reports == 2 and files[checkpoint_files.STATE] == (second / checkpoint_files.STATE).read_bytes()
    assert newest(6) is None, "Tune's own holds as much"
    os.truncate(second / checkpoint_files.MODEL, 10)
    with warnings_logged(f"Damaged: {second.name}.* Using the checkpoint {first.name} instead"):
        assert newest(0)[1] == 1
    with warnings_logged(r"Damaged: .* The trial resumes from step 4, that of Tune's checkpoint"):
        assert newest(4) is None
    (first / TRIAL).write_text(json.dumps({"reports": "1"}))
    (first / checkpoint_files.MANIFEST).unlink()
    checkpoint_files.write_manifest(str(first))
    with warnings_logged("does not say how many reports there were"):
        assert newest(0) is None


def test_what_nobody_will_read_is_removed(tmp_path):
    trials = [tmp_path / "one", tmp_path / "two"]
    for trial in trials:
        for step in (4, 6, 8):
            keep(trial / "steps_a", step, 1)
    (trials[0] / "checkpoint_000000").mkdir()
    trial_steps.remove_until(LOCAL, str(trials[0] / "steps_a"), 6)
    assert [path.name for path in (trials[0] / "steps_a").iterdir()] == [folder_name(8)]
    assert trial_steps.is_finished(LOCAL, str(trials[0] / "steps_a"), 8)
    assert not trial_steps.is_finished(LOCAL, str(trials[0] / "steps_a"), 6)
    trial_steps.remove_all_trials(LOCAL, str(tmp_path))
    assert [path.name for path in trials[0].iterdir()] == ["checkpoint_000000"] and not list(trials[1].iterdir())


class Entries(dict):
    """Replaces Ray's key-value store."""

    put = dict.__setitem__


def test_a_sweep_waits_for_the_trials_that_make_steps_and_for_no_others(set_timeouts):
    end, messages, ends = SweepEnd(Entries()), [], []
    asking = SweepStop(end, lambda: ends.append(True), messages.append)
    running = lambda: ["one", "two", "three"]
    end.record_begun("one")
    end.record_begun("two")
    asking.check(running)
    assert not end.is_requested(), "no signal came"
    asking.request()
    for _ in range(2):
        asking.check(running)
    assert end.is_requested() and len(messages) == 1 and not ends
    set_timeouts(run_end=-1.0)
    with pytest.raises(sweep_end.NotReleasedError, match="timeout after .* driver did not end"):
        end.ended("one", 7, is_saved=True)
    asking.check(running)
    assert not ends
    asking.check(lambda: ["one", "three"])  # the other one has come to its own end meanwhile
    asking.check(running)
    assert ends == [True] and asking.lost == []
    end.ended("three", None, is_saved=True)  # at once, as it is released


def test_to_tune_a_drained_node_is_no_failure():
    """It counts errors of an actor that are not `preempted`."""
    error = RayTaskError("step", "", StoppedForRestartError(7)).as_instanceof_cause()
    assert isinstance(error, RayActorError) and error.preempted and error.step == 7


def test_what_is_not_kept_is_named(set_timeouts):
    end = SweepEnd(Entries(over=True))
    asking = SweepStop(end, lambda: None, lambda text: None)
    set_timeouts(run_end=0.0)
    end.ended("one", 7, is_saved=False)
    end.record_begun("two")
    asking.request()
    asking.check(lambda: ["one", "two", "three"])
    assert asking.lost == [
        "trial two has not ended",
        "trial one has stopped after step 7, and its checkpoint is not saved",
    ]
