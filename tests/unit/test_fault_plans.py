"""A thousand seeded plans of faults for each part that is pure: order and position, the step after which all end, who
is waited for, and which checkpoint is taken. A failure names its seed, with which it is made again."""

from __future__ import annotations

import json
import os
import random
import shutil

import numpy as np
import pyarrow.fs
import pytest
from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem

from raytf import activity
from raytf.collectives import failure_notifier
from raytf.data import sampling
from raytf.data.sampling import Sampler
from raytf.runtime.hangs import HangDetector
from raytf.storage import checkpoint_files, snapshot_store, step_folders
from raytf.storage.checkpoint_files import MANIFEST, MODEL, SEEDS, STATE, CheckpointState, DamagedCheckpointError
from raytf.storage.run_folder import RunFolder
from raytf.storage.snapshot_store import SnapshotStore
from raytf.testing import Fail, FaultPlan
from raytf.worker import checkpoint_every
from raytf.worker.checkpoint_selector import CheckpointSelector, list_checkpoints
from raytf.worker.stop import DRAIN, STOP, StopBarrier
from tests.unit.test_hangs import Worker, seconds_until

PLANS = range(1000)
KINDS = ("Kill", "Stop", "Fail", "CutOff")


def global_batch(epochs, order, epoch, step, workers):
    """The rows of a step by number, as so many workers read them together."""
    one = epochs.setdefault(epoch, order.epoch(epoch))
    chunk, within = divmod(step, order.chunk_steps)
    whole = epochs.setdefault((epoch, chunk), one.positions(chunk)) if one.by_chunk else None
    parts = [one.part(chunk, slice(within, within + 1), worker, workers, whole) for worker in range(workers)]
    return one.row_numbers(np.concatenate(parts)).tolist()


@pytest.mark.slow
def test_a_run_makes_each_step_of_the_undisturbed_one_once_whatever_happens():
    """Before a fault's step the run breaks: it resumes from its last checkpoint, with another number of workers."""
    for seed in PLANS:
        source = random.Random(seed)
        pieces = (1, *(source.randint(0, 12) for _ in range(source.randint(0, 5))))
        order = Sampler(
            rows=pieces,
            global_batch=source.randint(1, 12),
            seed=source.randrange(2**63),
            shuffle=source.choice(sampling.SHUFFLES),
            window=source.randint(1, 40),
        )
        rest = source.random() < 0.7
        of_epoch = sampling.steps_per_epoch(order.total, order.global_batch, not rest)
        steps, every = 3 * of_epoch, source.randint(1, 6)
        if not of_epoch:
            continue
        plan = FaultPlan.random(seed, workers=5, steps=steps, faults=min(4, steps), kinds=KINDS)
        faults, epochs, made = sorted(plan.faults, key=lambda fault: fault.step), {}, []
        workers, latest = source.randint(1, 5), CheckpointState(0, 0, order.seed, False, []).to_json()
        kept = latest
        while len(made) < steps:
            if faults and faults[0].step <= len(made):
                # one that fails in its own code keeps the step that it was in, as one does that is stopped
                saved = latest if type(faults.pop(0)) is Fail else kept
                state = CheckpointState.from_dict(json.loads(saved), "checkpoint")
                made, workers = made[: state.step], source.randint(1, 5)
                assert (state.epoch, state.epoch_step) == divmod(len(made), of_epoch)
            made.append(global_batch(epochs, order, *divmod(len(made), of_epoch), workers))
            epoch, step = divmod(len(made), of_epoch)
            latest = CheckpointState(epoch, len(made), order.seed, False, [], epoch_step=step).to_json()
            if step == 0 or checkpoint_every.crosses_multiple(every, len(made) - 1, len(made)):
                kept = latest
        calm = [global_batch(epochs, order, *divmod(step, of_epoch), 1) for step in range(steps)]
        assert made == calm, f"seed {seed}: {plan}"
        for first in range(0, steps, of_epoch):
            rows = sorted(row for batch in made[first : first + of_epoch] for row in batch)
            assert len(set(rows)) == len(rows), f"seed {seed}: a row twice in an epoch"
            assert rows == list(range(order.total)) or not rest, f"seed {seed}: a row is missing"


class Group:
    """Workers that train in step, each with its gate, and a driver that asks them to end.

    An execution ends when all have begun it. `moves` are those that may come next; any order of them is possible.
    """

    def __init__(self, workers):
        self.gates = [StopBarrier() for _ in range(workers)]
        self.made, self.ended = [0] * workers, [False] * workers
        self.asked: dict[int, int] = {}
        self.told: set[int] = set()
        for gate in self.gates:
            gate.begin()

    def moves(self):
        found = [("ask", i) for i in range(len(self.gates)) if i not in self.asked]
        if len(self.asked) == len(self.gates):
            found += [("tell", i) for i in range(len(self.gates)) if i not in self.told]
        for i, gate in enumerate(self.gates):
            waits = gate.why is not None and i not in self.told
            others = min(m for m, e in zip(self.made, self.ended, strict=True))
            if not self.ended[i] and not waits and self.made[i] == others:
                found.append(("step", i))
        return found

    def move(self, what, i):
        if what == "ask":
            self.asked[i] = self.gates[i].request(STOP)
        elif what == "tell":
            self.gates[i].stop_after(max(self.asked.values()))
            self.told.add(i)
        else:
            self.made[i] += 1
            self.ended[i] = self.gates[i].is_last()

    def check(self, way):
        assert all(self.ended), f"some wait for ever: {way}"
        assert set(self.made) == {max(self.asked.values())}, f"they end after {self.made}, asked {self.asked}: {way}"


def test_all_orders_of_messages_end_two_workers_after_the_same_step():
    """Model-checked: every order in which two workers step, are asked and get the stop step, within three steps."""
    ways = 0
    left = [[]]
    while left:
        way = left.pop()
        group = Group(2)
        for move in way:
            group.move(*move)
        moves = [move for move in group.moves() if move[0] != "step" or group.asked or max(group.made) < 3]
        left += [[*way, move] for move in moves]
        if not moves:
            group.check(way)
            ways += 1
    assert ways > 200


def test_any_order_of_messages_ends_all_workers_after_the_same_step():
    """In some plans a worker is killed meanwhile: the new group knows of nothing, and is asked again."""
    for seed in PLANS:
        source = random.Random(seed)
        workers = source.randint(2, 5)
        plan = FaultPlan.random(seed, workers=workers, steps=30, faults=source.randint(0, 1))
        group, way, number = Group(workers), [f"seed {seed}"], 0
        while moves := group.moves():
            move = source.choice([m for m in moves if m[0] == "step"] or moves if source.random() < 0.8 else moves)
            way.append(move)
            group.move(*move)
            number += 1
            if plan.faults and number == plan.faults[0].step and not all(group.ended):
                group = Group(workers)
                way.append("killed")
        group.check(way)


def test_worker_asked_twice_keeps_the_first_answer_and_cause():
    gate = StopBarrier()
    gate.begin()
    assert (gate.request(DRAIN), gate.request(STOP), gate.why) == (1, 1, DRAIN)


def test_a_cause_reaches_its_own_generation_alone():
    for seed in PLANS:
        source = random.Random(seed)
        why = "".join(source.choice("aä漢🙂 ") for _ in range(source.randint(0, 300)))
        cause = failure_notifier.Cause(source.randrange(2**32), source.randrange(2**32), why, source.random() < 0.5)
        generation, other = source.sample(range(2**32), 2)
        message = failure_notifier.pack(cause, generation)
        assert failure_notifier.unpack(message, other) is None
        found = failure_notifier.unpack(message, generation)
        assert (found.lost, found.seen_by, found.departed) == (cause.lost, cause.seen_by, cause.departed), (
            f"seed {seed}"
        )
        assert why.startswith(found.why) and (found.why == why or len(found.why.encode()) > 390), f"seed {seed}"


def test_the_worker_with_the_fault_is_the_one_that_is_named():
    """It hangs somewhere in its step, and all others come to wait for it, one after the other."""
    phases = [activity.INPUT, activity.CALLBACKS, activity.CHECKPOINT, activity.STEP]
    for seed in PLANS:
        source = random.Random(seed)
        workers, limit = source.randint(2, 6), source.randint(6, 20)
        (fault,) = FaultPlan.random(seed, workers=workers, steps=100, kinds=["Stop"]).faults
        group = []
        for rank in range(workers):
            where = {"phase": source.choice(phases)} if rank == fault.rank else {}
            if rank != fault.rank:
                where["collective"] = (source.choice([activity.SUM, activity.COLLECTIVE]), 18, source.uniform(0, 2))
            group.append(Worker(step=fault.step + 1, usual=source.uniform(0.001, 0.05), **where))
        second, hang = seconds_until(HangDetector(limit, 60), group)
        assert hang.rank == fault.rank, f"seed {seed}: {fault}, {hang}"
        assert limit - 2 <= second <= limit + 1, f"seed {seed}: after {second} s, {hang}"


ENDS, WITHIN = (4, 8), (3, 4, 7, 9)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder: {path of each file: its content}."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    for step in ENDS:
        write(folder / f"checkpoint_2026-01-01_00-00-{step:02d}.000000", step)
    for step in WITHIN:
        write(folder / step_folders.folder_name(step), step)
    files = {}
    for where, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(where, name), "rb") as file:
                files[os.path.join(where, name)] = file.read()
    return str(folder), files


def write(folder, step):
    folder.mkdir(parents=True)
    (folder / MODEL).write_bytes(bytes([step]) * 50)
    (folder / SEEDS).write_bytes(bytes([step]) * 20)
    epoch, within = divmod(step, 4)
    state = CheckpointState(epoch, step, 0, False, [], epoch_step=within)
    (folder / STATE).write_text(state.to_json())
    checkpoint_files.write_manifest(str(folder), state.version)


def tear(source, path, content):
    """Damages a file, as disks and killed processes do."""
    kind = source.choice(["empty", "cut", "bit", "gone", "folder", "zeros"])
    if kind in ("gone", "folder"):
        os.remove(path)
        if kind == "folder":
            os.mkdir(path)
        return
    at = source.randrange(len(content))
    flipped = content[:at] + bytes([content[at] ^ 1 << source.randrange(8)]) + content[at + 1 :]
    torn = {"empty": b"", "cut": content[:at], "bit": flipped, "zeros": bytes(len(content))}[kind]
    with open(path, "wb") as file:
        file.write(torn)


def mended(files, torn):
    for path in torn:
        if os.path.isdir(path):
            os.rmdir(path)
        with open(path, "wb") as file:
            file.write(files[path])


def is_manifest_alike(path, content):
    """Returns whether a bit that turned in a manifest, or nothing at all, has left its contents the same."""
    try:
        with open(path, "rb") as file:
            return json.loads(file.read()) == json.loads(content)
    except (OSError, ValueError):
        return False


@pytest.mark.slow
def test_of_torn_checkpoints_the_newest_whole_one_is_taken(run):
    """By the driver, by a worker that resumes, and by `load_model`; whichever files of the run are damaged."""
    folder, files = run
    local = LocalFileSystem()
    names = sorted({os.path.dirname(path) for path in files})
    step_of = {name: CheckpointState.from_dict(json.loads(files[f"{name}/{STATE}"]), name).step for name in names}
    for seed in PLANS:
        source = random.Random(seed)
        hurt = source.sample(names, source.randint(0, len(names) - (seed % 10 > 0)))
        torn = {}
        for name in hurt:
            for part in source.sample([MODEL, STATE, SEEDS, MANIFEST], source.choice([1, 1, 1, 2, 4])):
                torn[f"{name}/{part}"] = files[f"{name}/{part}"]
        for path, content in torn.items():
            tear(source, path, content)
        whole = [
            n for n in names if not any(p.startswith(f"{n}/") and not is_manifest_alike(p, c) for p, c in torn.items())
        ]
        newest = max((step_of[name] for name in whole), default=None)
        try:
            taken = {"driver": by_driver(folder), "worker": by_worker(local, folder)}
            if newest is not None:
                taken["load_model"] = by_load_model(local, folder)
            assert set(taken.values()) == {newest}, f"seed {seed}: {taken}, whole are {sorted(map(step_of.get, whole))}"
        finally:
            mended(files, torn)


def by_driver(folder):
    """Returns the step from which it resumes the run, with every byte compared."""
    made = RunFolder(LocalFileSystem(), folder, "run")
    try:
        last = made.last(finished=lambda last: True)
    except DamagedCheckpointError:
        return None
    return None if last is None else last.step


def by_worker(local, folder):
    kept = list_checkpoints(local, folder)
    ends = checkpoint_files.newest_first(one for one in kept if not one.is_within_epoch)
    steps = [(step_folders.step_of_folder(one.name), one) for one in kept if one.is_within_epoch]
    candidates = checkpoint_files.merge_newest_first(ends, steps)
    try:
        taken, _ = checkpoint_files.first_whole(candidates, lambda kept: checkpoint_files.check_folder(kept.path))
    except DamagedCheckpointError:
        return None
    return checkpoint_files.read_state(taken.path).step


def by_load_model(local, folder):
    ordered = CheckpointSelector().ordered(list_checkpoints(local, folder), folder)
    taken, _ = checkpoint_files.first_whole(ordered, lambda kept: checkpoint_files.check_folder(kept.path))
    return checkpoint_files.read_state(taken.path).step


def test_what_is_removed_is_never_the_newest_whole_one():
    for seed in PLANS:
        source = random.Random(seed)
        steps = {step_folders.folder_name(step): step for step in source.sample(range(50), source.randint(0, 12))}
        whole = sorted(source.sample(sorted(steps), source.randint(0, len(steps))), reverse=True)
        epoch, keep = source.randint(-1, 50), source.randint(1, 4)
        removed = snapshot_store.removable(steps, whole, epoch, keep)
        left = [name for name in whole if name not in removed]
        best = max([steps[name] for name in whole] + [epoch])
        assert best in [*(steps[name] for name in left), epoch], f"seed {seed}"
        assert len(left) >= min(keep, sum(steps[name] >= epoch for name in whole)), f"seed {seed}"
        newest = steps[whole[0]] if whole else epoch
        assert all(steps[name] < max(newest, epoch) for name in removed), f"seed {seed}: one may be being written"


@pytest.mark.slow
@pytest.mark.parametrize("remote", [False, True])
def test_writes_that_fail_leave_the_last_whole_one(tmp_path, remote):
    """At each a planted error may end it when its bytes are there; it is then tried again, or left out."""
    import fsspec

    filesystem = PyFileSystem(FSSpecHandler(fsspec.filesystem("file"))) if remote else pyarrow.fs.LocalFileSystem()
    for seed in range(40):
        source, folder = random.Random(seed), str(tmp_path / "run")
        store, last = SnapshotStore(filesystem, folder, keep=source.randint(1, 2)), None
        for step in range(1, 5):
            store.fails = [source.choice([5, 28, 122])] * source.choice([0, 0, 1, 2])
            state = CheckpointState(0, step, 0, False, [], epoch_step=step).to_json().encode()
            for _ in range(2):
                try:
                    store.put(step_folders.folder_name(step), {MODEL: [b"m" * 9], STATE: [state], SEEDS: [b"s"]})
                    last = step
                    break
                except OSError as error:
                    assert os.strerror(error.errno) in str(error)
            store.prune()
            assert by_driver(folder) == last, f"seed {seed}, step {step}"
            assert remote or not [name for name in os.listdir(folder) if name.startswith(".")], f"seed {seed}"
        shutil.rmtree(folder)
