"""Plans of faults: pure parts from many seeds, and the callback in a real `fit`."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow.fs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf import ConfigError, testing
from raytf.errors import PeerLostError
from raytf.storage import injected_faults
from raytf.storage.snapshots import NotWrittenError, SnapshotWriter
from raytf.storage.step_folders import folder_name
from raytf.testing import CutOff, Fail, FailWrite, FaultPlan, FillDisk, Kill, Slow, Stop
from raytf.worker.callback_state import CallbackStates
from tests.logged import warnings_logged
from tests.unit.test_ring import rings, together
from tests.unit.test_snapshots import check, parts_of
from tests.waiting import until

FILL = FillDisk(rank=0, step=0, folder="/disk", size=7, steps=2)
KINDS = ("Kill", "Stop", "Fail", "Slow", "CutOff", "FailWrite", FILL, FailWrite(rank=0, step=9, number=5, times=3))


@pytest.mark.slow
@given(st.integers(0, 2**40), st.integers(1, 6), st.integers(1, 50), st.data())
@settings(max_examples=300)
def test_a_seed_gives_one_plan_within_the_run(seed, workers, steps, data):
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, unique=True))
    names = {kind if isinstance(kind, str) else type(kind).__name__ for kind in kinds}
    faults = data.draw(st.integers(0, min(steps if names == {"FailWrite"} else workers * steps, 8)))
    made = [FaultPlan.random(seed, workers=workers, steps=steps, faults=faults, kinds=kinds) for _ in range(2)]
    assert made[0] == made[1] == FaultPlan.from_json(made[0].to_json())
    assert len(made[0].faults) == len({(f.rank, f.step) for f in made[0].faults}) == faults
    assert {type(f).__name__ for f in made[0].faults} <= names
    assert all(f.rank == 0 for f in made[0].faults if isinstance(f, FailWrite))
    assert all((f.folder, f.size, f.steps) == ("/disk", 7, 2) for f in made[0].faults if isinstance(f, FillDisk))
    assert all(f.rank < workers and f.step < steps for f in made[0].faults)
    made[0].check(workers)
    assert "\n" not in str(made[0])


def test_fault_is_due_at_its_step_or_after():
    assert [Kill(rank=0, step=5).due(epoch, step, 4) for epoch, step in [(0, 3), (1, 0), (1, 1), (2, 0)]] == [
        0,
        0,
        1,
        1,
    ]
    fault = Kill(rank=0, step=2, epoch=1)
    assert [fault.due(*place, None) for place in [(0, 9), (1, 1), (1, 2), (2, 0)]] == [0, 0, 1, 1]


def test_plan_describes_what_happens():
    plan = FaultPlan([Kill(rank=1, step=7), Slow(rank=0, step=2, epoch=1, seconds=0.5)])
    assert str(plan) == "kill worker 1 before step 7; slow worker 0 before step 2 of epoch 1 (seconds 0.5)"
    assert str(FaultPlan()) == "no faults"
    assert str(CutOff(rank=1, step=2)) == "cutoff worker 1 before step 2 (silent False)"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Kill(rank=-1, step=0), "rank of a fault must be an integer of at least 0; received: -1"),
        (lambda: Stop(rank=0, step=1.5), "step of a fault must be"),
        (lambda: Kill(rank=0, step=0, epoch=True), "epoch of a fault must be"),
        (lambda: Slow(rank=0, step=0, seconds=0), "seconds of a fault must be a number above 0"),
        (lambda: CutOff(rank=0, step=0, silent=1), "silent of a fault must be True or False; received: 1"),
        (lambda: FillDisk(rank=0, step=0, folder=""), "folder of a fault must be a path; received: ''"),
        (lambda: FillDisk(rank=0, step=0, folder=None), "folder of a fault must be a path; received: None"),
        (lambda: FillDisk(rank=0, step=0, folder="x", size=0), "size of a fault must be an integer of at least 1"),
        (lambda: FillDisk(rank=0, step=0, folder="x", steps=0), "steps of a fault must be an integer of at least 1"),
        (lambda: FillDisk(rank=0, step=0, folder="x", seconds=-1), "seconds of a fault must be a number above 0"),
        (lambda: FillDisk(rank=0, step=0, folder="x", steps=1, seconds=1), "steps=1 and seconds=1. Leave one"),
        (lambda: FillDisk(rank=0, step=0, folder="/x").happen(), "folder that is there; .* none on"),
        (lambda: FailWrite(rank=1, step=0), "A FailWrite is of rank 0, which writes the checkpoints; received: rank=1"),
        (lambda: FailWrite(rank=0, step=0, number=0), "one of the module errno; received: 0"),
        (lambda: FailWrite(rank=0, step=0, number=[5]), "one of the module errno; received: \\[5\\]"),
        (lambda: FailWrite(rank=0, step=0, times=0), "times of a fault must be an integer of at least 1"),
        (lambda: FailWrite(rank=0, step=0, times=1001), "times of a fault must be at most 1000"),
        (lambda: CutOff(rank=0, step=0).happen(), "raytf's ring, .* in a process without. Leave it out"),
        (lambda: FaultPlan(["kill"]), "A FaultPlan takes Kill, Stop, Fail, Slow, CutOff, FillDisk, FailWrite"),
        (lambda: FaultPlan.random(0, workers=3, steps=2, faults=3, kinds=["FailWrite"]), "at most workers"),
        (lambda: FaultPlan.random(0, workers=1, steps=2, kinds=["FillDisk"]), "kinds must be one of"),
        (lambda: FaultPlan([Kill(rank=0, step=1)] * 2), "happen once"),
        (lambda: FaultPlan.random(0, workers=1, steps=2, faults=3), "at most workers \\* steps faults"),
        (lambda: FaultPlan.random(0, workers=1, steps=2, kinds=["Burn"]), "kinds must be one of"),
        (lambda: FaultPlan.from_json("[{}]"), "A plan is JSON of FaultPlan.to_json"),
        (lambda: FaultPlan.from_json("{"), "A plan is JSON of FaultPlan.to_json"),
        (lambda: FaultPlan([Kill(rank=2, step=0)]).check(2), "kill worker 2 before step 0, of 2 worker"),
        (lambda: FaultPlan([Kill(rank=2, step=0)]).callback("x", workers=2), "Name one of 0 to 1"),
    ],
)
def test_a_wrong_plan_is_refused(make, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make()


def fit(plan, folder, others=(), **options):
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    options = {"batch_size": 2, "epochs": 2, "verbose": 0} | options
    return model.fit(np.ones((8, 2)), np.ones((8, 1)), callbacks=[plan.callback(folder), *others], **options)


@pytest.mark.slow
def test_a_fault_happens_once_over_restarts(tmp_path):
    plan = FaultPlan([Fail(rank=0, step=5, text="first"), Fail(rank=0, step=0, epoch=1, text="second")])
    for text in ("second", "first"):
        with pytest.raises(RuntimeError, match=text):
            fit(plan, tmp_path / "run")
    assert plan.happened(tmp_path / "run") == list(plan.faults) and plan.happened(tmp_path) == []
    assert len(fit(plan, tmp_path / "run").epoch) == 2


def test_a_checkpoint_does_not_bring_the_chiefs_faults_to_others(tmp_path, monkeypatch):
    """The chief has none; a worker that resumes from its checkpoint has its own still."""
    plan, config = FaultPlan([Fail(rank=1, step=0)]), {"cluster": {"worker": ["a:1", "a:2"]}}
    made = []
    for rank in (0, 1):
        monkeypatch.setenv("TF_CONFIG", json.dumps(config | {"task": {"type": "worker", "index": rank}}))
        made.append(plan.callback(tmp_path))
        made[-1].set_params({"steps": 4})
        states = CallbackStates(made[-1:])
        made[-1].on_train_begin()
        if rank == 0:
            entries, arrays = states.state()
        else:
            states.restore(json.loads(json.dumps(entries)), dict(enumerate(arrays)), chief=False)
        made[-1].on_epoch_begin(0)
    monkeypatch.delenv("TF_CONFIG")
    made[0].on_train_batch_begin(0)
    with pytest.raises(RuntimeError, match="injected by a FaultPlan"):
        made[1].on_train_batch_begin(0)


def test_a_rank_that_is_not_there_is_refused_before_the_first_step(tmp_path, monkeypatch):
    plan = FaultPlan([Kill(rank=1, step=0)])
    with pytest.raises(ConfigError, match=r"kill worker 1 before step 0, of 1 worker"):
        fit(plan, tmp_path)
    servers = {"cluster": {"worker": ["a:1"], "ps": ["a:2"]}, "task": {"type": "worker", "index": 0}}
    with monkeypatch.context() as patched, pytest.raises(ConfigError, match="parameter servers"):
        patched.setenv("TF_CONFIG", json.dumps(servers))
        plan.callback(tmp_path).on_train_begin()


@pytest.mark.slow
def test_a_process_is_killed_and_goes_through_when_it_is_started_again(tmp_path):
    program = "from tests.unit.test_testing import *; import sys; fit(FaultPlan([Kill(rank=0, step=3)]), sys.argv[1])"
    codes = [subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=120).returncode for _ in range(2)]
    assert codes == [-signal.SIGKILL, 0]


def test_cut_off_ring_names_the_lost_worker_at_once():
    places = rings(3)
    try:
        CutOff(rank=0, step=0).happen()  # all three are of this process
        errors = together(lambda place: place.all_reduce(np.ones(3)), places)
        assert [type(error) for error in errors] == [PeerLostError] * 3
    finally:
        for place in places:
            place.close()
    with pytest.raises(ConfigError, match="in a process without"):
        CutOff(rank=0, step=0).happen()


@pytest.mark.slow
def test_silence_lasts_until_the_kernel_gives_up(tmp_path):
    """What one sends no longer arrives, and is not acknowledged; the other side learns it from its kernel."""
    local_rings = rings(2)
    try:
        with pytest.raises(ConfigError, match="has a neighbour on its own host. Leave out silent, or use Stop"):
            CutOff(rank=0, step=0, silent=True).happen()
    finally:
        for place in local_rings:
            place.close()
    places = rings(2, "tcp", host_gone=2)
    try:
        CutOff(rank=0, step=0, silent=True).happen()
        errors = together(lambda place: place.all_reduce(np.ones(1 << 20)), places)
        assert [type(error) for error in errors] == [PeerLostError] * 2
        assert "does not answer any more" in str(errors[0])
    finally:
        for place in places:
            place.close()


def small_disk(path):
    """A disk of its own of 2 MiB, or None where none can be mounted."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "raytf_test", path], capture_output=True)
    return None if mounted.returncode else path


def test_a_disk_is_full_to_its_last_block(tmp_path):
    disk = small_disk(tmp_path / "disk")
    if disk is None:
        pytest.skip("no disk can be mounted here")
    try:
        for size in (None, 1 << 40):
            fault = FillDisk(rank=0, step=0, folder=disk, size=size)
            fault.happen()
            assert os.path.getsize(fault.path) == 2 << 20 and os.statvfs(disk).f_bfree == 0
            with pytest.raises(OSError, match="No space left"), open(disk / "other", "wb", buffering=0) as file:
                file.write(b"x")
            os.remove(disk / "other")
            fault.remove()
            fault.remove()
            assert os.statvfs(disk).f_bfree > 0
    finally:
        subprocess.run(["umount", disk], check=True)


def fill(disk, **when):
    return FillDisk(rank=0, folder=disk, size=12_345, **when)


def test_a_disk_has_room_again_after_some_steps_or_seconds_or_at_the_end(tmp_path):
    import keras

    disk = tmp_path / "disk"
    disk.mkdir()
    faults = [fill(disk, step=1, steps=2), fill(disk, step=3, epoch=0, steps=2), fill(disk, step=4, seconds=1000)]
    stays, seen = fill(disk, step=5), []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append([os.path.exists(fault.path) for fault in faults])

    plan = FaultPlan([*faults, stays])
    fit(plan, tmp_path / "run", others=[Look()])
    assert seen == [[i in wanted for wanted in ({1, 2}, {3, 4}, {4, 5, 6, 7})] for i in range(8)]
    assert os.listdir(disk) == [os.path.basename(stays.path)] and os.path.getsize(stays.path) == 12_345
    stays.remove()


def test_resuming_worker_removes_what_it_had_filled_before(tmp_path):
    """It was killed; the time since then counts, and the disk has room although no step is made."""
    fault, later = fill(tmp_path, step=0, seconds=30), fill(tmp_path, step=1, steps=1)
    for one in (fault, later):
        one.happen()
    os.utime(fault.path, (time.time() - 29.9,) * 2)
    plan = FaultPlan([fault, later, Fail(rank=0, step=7)])
    for one in (fault, later):
        assert testing._mark_first(tmp_path / "run", one)
    with pytest.raises(RuntimeError, match="injected by"):
        fit(plan, tmp_path / "run")
    until(lambda: not os.path.exists(fault.path))
    assert not os.path.exists(later.path)


def test_write_that_nobody_makes_is_reported_at_the_end(tmp_path):
    plan = FaultPlan([FailWrite(rank=0, step=3, number=errno.ENOSPC)])
    with pytest.warns(UserWarning, match="after a FailWrite, which did nothing: inject it earlier"):
        fit(plan, tmp_path)
    assert injected_faults.take_faults() == []


@pytest.mark.slow
def test_planted_writes_fail_in_the_process_that_writes_and_are_tried_again(tmp_path):
    writer = SnapshotWriter(pyarrow.fs.LocalFileSystem(), str(tmp_path / "run"))
    try:
        FailWrite(rank=0, step=0, number=errno.ENOSPC, times=2).happen()
        with warnings_logged("could not be written: OSError: .*No space left.* It is retried"):
            writer.write(folder_name(1), parts_of(1))
            with pytest.raises(NotWrittenError, match=f"{folder_name(1)} could not be saved: OSError: .*No space left"):
                writer.finish(60.0, failing=0.0)
        writer.finish(60.0)
        check(tmp_path / "run" / folder_name(1), 1)
        assert injected_faults.take_faults() == []
        writer.write(folder_name(2), parts_of(2))
        writer.finish(60.0, failing=0.0)
        assert sorted(os.listdir(tmp_path / "run")) == [folder_name(1), folder_name(2)]
    finally:
        writer.close()
