"""Six ways in which a worker can hang: is the right one named, with the right cause, and after how long?

python jobs/benchmarks/hangs.py

A run of two workers for each seed, in which all six happen, one in each epoch, in an order, to a rank and before a step
that the seed draws. After each the run is restarted from the last epoch, and the next one follows. "Reported" are
seconds from the fault to the driver's message, "ended" to the end of the workers by it; what is stopped ends at once.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import pathlib
import random
import re
import sys
import tempfile
import threading
import time

import common
from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback

import raytf

STEPS = 10
ROWS = 200
# The cause that the report of each must name.
CAUSES = {
    "stop": r"is stopped by a signal \(SIGSTOP\?\)",
    "input": r"waits for rows of its input in step \d+",
    "steps": r"it makes another number of steps",
    "collective": r"is in Planted.on_train_batch_end after step \d+",
    "deadlock": r"is in Planted.on_train_batch_end after step \d+",
    "disk": r"is in Planted.on_train_batch_end after step \d+",
}
# The ring's error for workers that make different exchanges.
_OTHER = "All workers must sum the same sizes in the same order"
# And what its stack shows, but for those that stop somewhere.
STACKS = {"input": "forever", "collective": "all_reduce", "deadlock": "lock", "disk": "open"}


@dataclasses.dataclass(frozen=True)
class Planted:
    """A fault.

    Args:
        kind: of `CAUSES`.
        epoch, step, rank: from 0; it happens after the step.
    """

    kind: str
    epoch: int
    step: int
    rank: int


def plan(seed: int, kinds: list[str]) -> list[Planted]:
    """The faults of a run."""
    source = random.Random(seed)
    kinds = source.sample(kinds, len(kinds))
    return [Planted(kind, i, source.randrange(2, STEPS - 3), source.randrange(2)) for i, kind in enumerate(kinds)]


def build_model(config):
    """A small network."""
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def waiting_map(features, labels, seeds):
    """Gives rows as they are, and none any more in a worker that is to hang so."""
    import tensorflow as tf

    def forever():
        while os.environ.get("HANGS_INPUT"):
            threading.Event().wait(3600)
        return 0

    with tf.control_dependencies([tf.py_function(forever, [], tf.int64)]):
        return tf.identity(features), labels


def callbacks(config):
    """What plants the faults."""
    import keras
    import tensorflow as tf

    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    folder = pathlib.Path(config["folder"])

    def hang(kind, model):
        if kind == "stop":
            os.kill(os.getpid(), 19)
        elif kind == "input":
            os.environ["HANGS_INPUT"] = "1"
        elif kind == "steps":
            model.stop_training = True
        elif kind == "collective":
            strategy = model.distribute_strategy
            all_reduce = lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.ones(()))
            strategy.run(tf.function(all_reduce))
        elif kind == "deadlock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        elif kind == "disk":
            os.mkfifo(folder / "disk")
            open(folder / "disk", "w")  # noqa: SIM115 - nobody reads: it never opens

    class Planted(keras.callbacks.Callback):
        raytf_local_batches = True

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            for kind, epoch, step, its in config["faults"]:
                happened = folder / f"happened_{kind}"
                if (self.epoch, batch, rank) == (epoch, step, its) and not happened.exists():
                    happened.write_text(repr(time.time()))
                    hang(kind, self.model)

    return [Planted()]


class Noted(UserCallback):
    """Writes down of what workers were ended."""

    def __init__(self, folder: str):
        self._folder = folder

    def after_exception(self, run_context, worker_exceptions):
        for rank, error in worker_exceptions.items():
            with open(os.path.join(self._folder, "ended"), "a") as file:
                frozen = "WorkerFrozenError" in repr(error)
                file.write(repr((time.time(), rank, frozen, str(error), getattr(error, "stack", ""))) + "\n")


class Heard:
    """The driver's stderr, and when its lines came."""

    def __init__(self, to):
        self._to, self.lines = to, []

    def write(self, text):
        self.lines.append((time.time(), text))
        return self._to.write(text)

    def __getattr__(self, name):
        return getattr(self._to, name)


def run(folder: str, seed: int, kinds: list[str], limit: float) -> list[dict]:
    """Runs all faults of a seed and returns the report of each."""
    import ray

    faults = plan(seed, kinds)
    heard = sys.stderr = Heard(sys.stderr)
    ending = ""
    try:
        raytf.KerasTrainer(
            build_model,
            config={
                "batch_size": ROWS // STEPS,
                "epochs": len(faults) + 1,  # the rows of the last one with a fault may all be read ahead
                "folder": folder,
                "faults": [dataclasses.astuple(fault) for fault in faults],
            },
            datasets={"train": ray.data.from_items([{"x": float(i), "y": 1.0} for i in range(ROWS)])},
            features="x",
            labels="y",
            map=waiting_map,
            callbacks=callbacks,
            scaling_config=ScalingConfig(num_workers=2),
            steps_per_execution=1,
            checkpoint_every="epoch",
            tensorflow_config=raytf.TensorflowConfig(hang_timeout_s=limit, heal=False),  # what was ended is noted
            run_config=RunConfig(
                name="hangs",
                storage_path=folder,
                failure_config=FailureConfig(max_failures=3 * len(faults)),  # a start may fail, too
                callbacks=[Noted(folder)],
            ),
            progress=False,
        ).fit()
    except raytf.TrainingError as error:
        ending = str(error)
    finally:
        sys.stderr = heard._to
    noted = pathlib.Path(folder, "ended")
    ended = [ast.literal_eval(line) for line in noted.read_text().splitlines()] if noted.exists() else []
    return [_judged(fault, pathlib.Path(folder), ended, heard.lines) | {"ending": ending} for fault in faults]


def _judged(fault: Planted, folder: pathlib.Path, ended: list, lines: list) -> dict:
    began = folder / f"happened_{fault.kind}"
    if not began.exists():
        return {"kind": fault.kind, "right": False, "why": "it did not happen"}
    began = float(began.read_text())
    if fault.kind in ("steps", "collective"):
        return _refused(fault, began, ended)
    after = [each for each in ended if each[0] > began and each[2]]
    if not after:
        return {"kind": fault.kind, "right": False, "why": "nobody was named"}
    when, rank, _, text, stack = after[0]
    others = f"worker {1 - fault.rank} waits for it since step {fault.epoch * STEPS + fault.step + 2}"
    # rows that were read ahead are used up first
    expected = re.escape(others) if fault.kind != "input" else f"worker {1 - fault.rank} waits for it since step"
    right = rank == fault.rank and re.search(CAUSES[fault.kind], text) and re.search(expected, text)
    right = bool(right) and STACKS.get(fault.kind, "") in stack
    reported = [at - began for at, line in lines if at > began and "the other workers wait for" in line]
    return {
        "kind": fault.kind,
        "right": right,
        "why": "" if right else f"{fault}: worker {rank} {text}\n{stack}",
        "reported": (when - began) if fault.kind == "stop" or not reported else reported[0],
        "ended": when - began,
        "text": f"worker {rank}: {text}",
    }


def _refused(fault: Planted, began: float, ended: list) -> dict:
    """Judges a worker that makes another exchange: the ring raises at once, and names what each worker is at."""
    refused = next(((when, text) for when, _, _, text, _ in ended if when > began and _OTHER in text), None)
    if refused is None:
        return {"kind": fault.kind, "right": False, "why": "nobody was named"}
    seconds, text = refused[0] - began, refused[1]
    right = all(f"worker {rank}" in text for rank in range(2))
    found = {"kind": fault.kind, "right": right, "why": "" if right else f"{fault}: {text}", "reported": seconds}
    return found | {"ended": seconds, "text": text[text.index(_OTHER) :].splitlines()[0]}


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="how many, of this seed and those after it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=10.0, help="hang_timeout_s")
    parser.add_argument("--kinds", nargs="+", default=list(CAUSES), choices=list(CAUSES))
    options = parser.parse_args(arguments)
    import ray

    ray.init(
        **({} if os.environ.get("RAY_ADDRESS") else {"address": "local", "num_cpus": 4, "include_dashboard": False})
    )
    seeds, limit = (1, 4.0) if options.smoke else (options.seeds, options.limit)
    found = []
    for seed in range(options.seed, options.seed + seeds):
        with tempfile.TemporaryDirectory(prefix="hangs_", ignore_cleanup_errors=True) as folder:
            found += run(folder, seed, options.kinds, limit)
        print(f"seeds {options.seed} to {seed}: {sum(its['right'] for its in found)} of {len(found)}", flush=True)
    for its in found:
        if its["why"]:
            print(its["why"], its["ending"])
    rows = []
    for kind in options.kinds:
        its = [each for each in found if each["kind"] == kind]
        reported, ended = (sorted(each[name] for each in its if name in each) for name in ("reported", "ended"))
        middle = lambda values: f"{values[len(values) // 2]:.1f} ({values[-1]:.1f})" if values else ""
        rows.append([kind, f"{sum(each['right'] for each in its)} of {len(its)}", middle(reported), middle(ended)])
    head = ["fault", "right rank and cause", "reported after, s (worst)", "ended after, s (worst)"]
    common.finish(options, "hangs", common.table(f"Hangs, hang_timeout_s={limit:g}", head, rows), found)
    for kind in options.kinds:
        print(next((its["text"] for its in found if its["kind"] == kind and "text" in its), f"{kind}: nothing"))
    sys.exit(0 if all(its["right"] for its in found) else 1)


if __name__ == "__main__":
    main()
