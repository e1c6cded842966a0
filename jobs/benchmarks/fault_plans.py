"""Trainings under random plans of faults: does each end with the weights of the undisturbed run, or a clear error?

python jobs/benchmarks/fault_plans.py --plans 200 --seed 0

A run of two workers for each plan, with one to three faults that the seed draws: workers are killed, stopped, fail, are
slow or lose their connections, writes of checkpoints fail, the storage's disk is full for some steps. Most runs may be
restarted often enough. Their weights must be those of the undisturbed run to the bit. The others must end with an error
of raytf's own which names the worker of the fault that came last, and what happened to it. Neither may take longer than
`--limit`. With root the storage is a disk of its own (a tmpfs); without, no disk is full. The exit code is 1 if a plan
ended otherwise; `--seed S --plans 1` makes the plan of a seed again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

import common
import numpy as np
from ray.train import FailureConfig, RunConfig, ScalingConfig

import raytf
from raytf.testing import CutOff, Fail, FailWrite, FaultPlan, FillDisk, Kill, Slow, Stop

EPOCHS, STEPS, BATCH, WIDTH = 3, 8, 12, 8
WORKERS = 2
DISK = "32m"
# What ends a group of workers, and the cause that its error must name.
CAUSES = {
    Kill: r"killed|SIGKILL|died",
    Stop: r"stopped by a signal",
    Fail: r"planted by a FaultPlan",
    CutOff: r"is lost|left the ring",
}
RIGHT = ("same weights", "clear error")


class LateError(Exception):
    """A run took longer than it may."""


def build_model(config):
    """A network of which a checkpoint holds random masks, moving statistics and an optimizer's moments.

    Its gradients are so large that workers of one host read them in each other's memory.
    """
    import keras

    layers = keras.layers
    model = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(200, "relu"), layers.BatchNormalization()])
    model.add(layers.Dense(200, "relu"))
    model.add(layers.Dropout(0.2))
    model.add(layers.Dense(10, "softmax"))
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


def plan_of(seed: int, disk: str | None, most: int = 3) -> tuple[FaultPlan, int]:
    """(faults, restarts that the run may have).

    Args:
        seed: from 0.
        disk: a folder on the storage's disk; None leaves that alone.
        most: faults.
    """
    source = random.Random(seed)
    number, times = source.choice([errno.EIO, errno.ENOSPC, errno.EDQUOT]), source.randint(1, 3)
    kinds = ["Kill", "Stop", "Fail", "CutOff", Slow(rank=0, step=0, seconds=0.3)]
    kinds.append(FailWrite(rank=0, step=0, number=number, times=times))
    if disk is not None:
        kinds.append(FillDisk(rank=0, step=0, folder=disk, steps=source.randint(1, STEPS)))
    faults, steps = source.randint(1, most), EPOCHS * STEPS
    plan = FaultPlan.random(seed, workers=WORKERS, steps=steps, faults=faults, kinds=kinds)
    breaks = sum(type(fault) in CAUSES for fault in plan.faults)
    return plan, breaks - (breaks > 0 and source.random() < 0.3)


def weights(folder: str, plan: FaultPlan, restarts: int, notes: str) -> list[np.ndarray]:
    """Those with which a run ends."""
    import ray

    rng = np.random.default_rng(0)
    rows = [{"x": rng.normal(size=WIDTH).astype("float32"), "y": int(rng.integers(10))} for _ in range(BATCH * STEPS)]
    result = raytf.KerasTrainer(
        build_model,
        config={"batch_size": BATCH, "epochs": EPOCHS},
        datasets={"train": ray.data.from_items(rows)},
        features="x",
        labels="y",
        callbacks=lambda config: [plan.callback(notes, workers=WORKERS)],
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(name="run", storage_path=folder, failure_config=FailureConfig(max_failures=restarts)),
        tensorflow_config=raytf.TensorflowConfig(hang_timeout_s=5.0),
        steps_per_execution=1,
        checkpoint_every="3 steps",
        progress=False,
    ).fit()
    return [np.asarray(value) for value in raytf.load_model(result).get_weights()]


@contextlib.contextmanager
def storage():
    """(a folder for a run, whether it has a disk of its own)."""
    with tempfile.TemporaryDirectory(prefix="fault_plans_") as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "raytf_fault_plans", folder]
        own = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
        try:
            yield folder, own
        finally:
            if own:
                subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def limited(seconds: float):
    """Raises LateError in the main thread after so many seconds."""

    def late(number, frame):
        raise LateError(f"it did not end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(seed: int, calm: list[np.ndarray], limit: float, most: int) -> dict:
    """Runs a plan and returns how it ended: "end" is one of `RIGHT`, or names what is wrong."""
    with storage() as (folder, own), tempfile.TemporaryDirectory(prefix="fault_plans_notes_") as notes:
        plan, restarts = plan_of(seed, folder if own else None, most)
        began = time.monotonic()
        try:
            with limited(limit):
                found = weights(folder, plan, restarts, notes)
            same = all(np.array_equal(left, right) for left, right in zip(found, calm, strict=True))
            end, text = ("same weights" if same else "OTHER WEIGHTS"), ""
        except LateError as error:
            end, text = "HANGS", str(error)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            end = judged(error, plan, notes)
        happened = plan.happened(notes)
    return {
        "seed": seed,
        "plan": str(plan),
        "json": plan.to_json(),
        "restarts": restarts,
        "happened": [type(fault).__name__ for fault in happened],
        "end": end,
        "text": text,
        "seconds": time.monotonic() - began,
    }


def judged(error: Exception, plan: FaultPlan, notes: str) -> str:
    """Returns whether an error names what happened: its kind, the worker, the cause."""
    when = {fault: os.path.getmtime(pathlib.Path(notes, name)) for fault, name in noted(plan, notes)}
    breaking = [fault for fault in when if type(fault) in CAUSES]
    if not breaking:
        return "AN ERROR WITHOUT CAUSE"
    last = max(breaking, key=when.get)
    # of two workers that no longer reach each other each takes the other for lost
    ranks = range(WORKERS) if isinstance(last, CutOff) else [last.rank]
    if not isinstance(error, raytf.TrainingError):
        return "NOT RAYTF'S ERROR"
    if error.rank not in ranks:
        return "WRONG WORKER"
    return "clear error" if re.search(CAUSES[type(last)], error.cause) else "WRONG CAUSE"


def noted(plan: FaultPlan, notes: str):
    """Returns (fault, name of the file that records it) of each fault that has happened."""
    names = {pathlib.Path(notes, name).read_text().strip(): name for name in os.listdir(notes)}
    return [(fault, names[str(fault)]) for fault in plan.happened(notes)]


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--plans", type=int, default=200, help="how many, of this seed and those after it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds that a run may take")
    parser.add_argument("--seconds", type=float, help="begin no further plan after so many")
    options = parser.parse_args(arguments)
    plans, most = (2, 1) if options.smoke else (options.plans, 3)
    found, began = [], time.monotonic()
    with common.ray_cluster(), storage() as (folder, _), tempfile.TemporaryDirectory() as notes:
        calm = weights(folder, FaultPlan(), 0, notes)
        print(f"the undisturbed run took {time.monotonic() - began:.1f} s", flush=True)
        for seed in range(options.seed, options.seed + plans):
            if options.seconds is not None and time.monotonic() - began > options.seconds:
                break
            found.append(its := run(seed, calm, options.limit, most))
            print(
                f"seed {seed}, {its['seconds']:.1f} s, {its['end']}: {its['plan']}; {its['restarts']} restart(s)"
                + (f"; {its['text']}" if its["end"] != "same weights" else ""),
                flush=True,
            )
    rows = []
    for kind in ("Kill", "Stop", "Fail", "CutOff", "Slow", "FailWrite", "FillDisk"):
        its = [each for each in found if kind in each["happened"]]
        ends = [sum(each["end"] == end for each in its) for end in RIGHT]
        rows.append([kind, sum(each["happened"].count(kind) for each in its), *ends, len(its) - sum(ends)])
    ends = [sum(each["end"] == end for each in found) for end in RIGHT]
    rows.append(["all", sum(len(each["happened"]) for each in found), *ends, len(found) - sum(ends)])
    head = ["fault", "happened", "plans with it: same weights", "clear error", "else"]
    title = f"{len(found)} plans of faults from seed {options.seed}"
    common.finish(options, "fault_plans", common.table(title, head, rows), found)
    sys.exit(0 if found and all(each["end"] in RIGHT for each in found) else 1)


if __name__ == "__main__":
    main()
