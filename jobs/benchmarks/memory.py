"""Memory, open files and threads of processes that live long: their growth with each call, trial, epoch and loss.

python jobs/benchmarks/memory.py
python jobs/benchmarks/memory.py --only trials --smoke

Four soaks, each on a Ray of its own:

* `fits`: calls of `raytf.fit`, each with a new model, in the workers that stay between calls;
* `trials`: trials of a sweep in workers that stay between trials;
* `epochs`: short epochs of one training of two workers;
* `losses`: a worker that is killed and replaced in place, again and again.

After each iteration every process below the driver is looked at. Growth is the slope of a line through the figures
from iteration `SETTLED` on (Theil-Sen: the median of the slopes between all pairs, which single jumps do not move). A
process counts if it has lived for at least half of those iterations. The exit code is 1 if one grows by more than
`--most` MB an iteration, or gains more than one open file or thread in ten iterations. TensorFlow keeps some 0.3 MB of
each step that is traced with an update that XLA compiled, and 3 MB of an update of another shape;
`TensorflowConfig(renew_worker_mb=...)` limits what models leave in a process.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile

import common

# Iterations of a whole run, of `--short`, and of `--smoke`.
COUNTS = {"fits": (300, 60, 4), "trials": (200, 24, 4), "epochs": (3000, 240, 20), "losses": (50, 7, 2)}
# From this iteration on nothing is to grow: imports, pools and caches are there.
SETTLED = 20
WORKERS, WIDTH, ROWS, BATCH = 2, 16, 96, 32
LOOKS = 100  # of a soak, at most
# Ray's process that keeps up to 200 files of processes open that have ended.
LOG_MONITOR = "log_monitor"
# Python processes of Ray's own.
OF_RAY = (LOG_MONITOR, "monitor", "dashboard")
# MB that TensorFlow itself keeps of a traced step that calls an update compiled by XLA, on workers that stay.
TRACES_MB = {"ray::GroupWorker": 0.5}


class Samples:
    """Appends one line for each look at all processes below the driver.

    Args:
        path: of the file.
        root: process id of the driver.
    """

    def __init__(self, path: str, root: int):
        self.path, self.root = path, root

    def look(self, iteration: int) -> None:
        import psutil

        driver, found = psutil.Process(self.root), {}
        for process in [driver, *driver.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                with process.oneshot():
                    name = _kind(process, self.root)
                    found[process.pid] = [name, process.memory_info().rss, process.num_fds(), process.num_threads()]
        with open(self.path, "a") as file:
            file.write(json.dumps([iteration, found]) + "\n")

    def read(self) -> list[tuple[int, dict[str, list]]]:
        """[(iteration, {process id: [kind, bytes, open files, threads]}), ...]"""
        with open(self.path) as file:
            return [tuple(json.loads(line)) for line in file]


def _kind(process, root: int) -> str:
    if process.pid == root:
        return "driver"
    command = " ".join(process.cmdline())
    if "snapshot_writer" in command:
        return "writer"
    name = command.split()[0] if command else process.name()
    if name.startswith("ray::"):
        return name
    return next((part for part in OF_RAY if part in command), os.path.basename(name))


def model(keras, units: int = 8):
    """A small compiled model, with what usually leaks: a metric with state and an optimizer with slots."""
    made = keras.Sequential(
        [keras.Input((WIDTH,)), keras.layers.Dense(units, "relu"), keras.layers.Dropout(0.1), keras.layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return made


def build_model(config):
    import keras

    return model(keras, config.get("units", 8))


def _trainer(folder: str, epochs: int, callbacks=None, **options):
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

    import raytf

    return raytf.KerasTrainer(
        build_model,
        config={"batch_size": BATCH, "epochs": epochs},
        datasets={"train": common.vectors(ROWS, WIDTH)},
        features="x",
        labels="y",
        callbacks=callbacks,
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            name="run",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
        progress=False,
        **options,
    )


def _at_epoch_ends(samples: Samples, every: int):
    """`callbacks` of a trainer whose chief looks at all processes after every so many epochs."""

    def callbacks(config):
        import keras
        import ray.train

        def look(epoch, logs):
            if ray.train.get_context().get_world_rank() == 0 and epoch % every == 0:
                samples.look(epoch)

        return [keras.callbacks.LambdaCallback(on_epoch_end=look)]

    return callbacks


def fits(count: int, samples: Samples, folder: str) -> None:
    import keras
    import numpy as np

    import raytf

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, WIDTH)).astype("float32"), rng.integers(0, 10, ROWS)
    for number in range(count):
        keras.backend.clear_session()
        raytf.fit(model(keras), x, y, batch_size=BATCH, epochs=1, verbose=0, num_workers=WORKERS)
        samples.look(number)


def trials(count: int, samples: Samples, folder: str) -> None:
    from ray import tune

    import raytf

    class Look(tune.Callback):
        done = 0

        def on_trial_complete(self, iteration, trials, trial, **info):
            samples.look(self.done)
            self.done += 1

    grid = raytf.sweep(
        _trainer(folder, 1),
        {"units": tune.grid_search([4 + i % 8 for i in range(count)])},
        metric="loss",
        max_concurrent_trials=1,
        progress=False,
        run_config=tune.RunConfig(name="sweep", storage_path=folder, callbacks=[Look()]),
    )
    if grid.errors:
        raise grid.errors[0]


def epochs(count: int, samples: Samples, folder: str) -> None:
    _trainer(folder, count, _at_epoch_ends(samples, max(1, count // LOOKS))).fit()


def losses(count: int, samples: Samples, folder: str) -> None:
    """Rank 1 is killed in every fourth epoch; rank 0 lives through all of it, and looks."""
    from raytf.testing import FaultPlan, Kill

    steps, distance = ROWS // BATCH, 4
    plan = FaultPlan([Kill(rank=1, step=(1 + i) * distance * steps + 1) for i in range(count)])
    looks = _at_epoch_ends(samples, distance)

    def callbacks(config):
        return [*looks(config), plan.callback(os.path.join(folder, "faults"), workers=WORKERS)]

    os.makedirs(os.path.join(folder, "faults"))
    _trainer(folder, (count + 2) * distance, callbacks).fit()
    if plan.happened(os.path.join(folder, "faults")) != list(plan.faults):
        raise RuntimeError("not all workers were killed")


SOAKS = {"fits": fits, "trials": trials, "epochs": epochs, "losses": losses}


def growth(samples: list[tuple[int, dict[str, list]]], settled: int = SETTLED) -> list[dict]:
    """What each process that lived long gained with an iteration.

    Args:
        samples: of `Samples.read`.
        settled: iteration from which on figures count.

    Returns:
        One entry a process, by kind: {"kind", "pid", "first" and "last" (MB), "memory" (MB an iteration), "files" and
        "threads" (an iteration)}; the fastest growing first.
    """
    series = collections.defaultdict(list)
    late = [(i, found) for i, found in samples if i >= settled] or samples
    for iteration, found in late:
        for pid, (kind, *figures) in found.items():
            series[pid].append((iteration, kind, *figures))
    made = []
    for pid, points in series.items():
        if len(points) < max(2, len(late) / 2):
            continue
        places = [point[0] for point in points]
        memory, files, threads = (slope(places, [point[i] for point in points]) for i in (2, 3, 4))
        ends = {"first": points[0][2] / 1e6, "last": points[-1][2] / 1e6}
        made.append({"kind": points[-1][1], "pid": int(pid), **ends, "memory": memory / 1e6})
        made[-1] |= {"files": files, "threads": threads}
    return sorted(made, key=lambda one: -one["memory"])


def slope(places: list[float], values: list[float]) -> float:
    """The median of the slopes between all pairs (P. K. Sen, 1968, J. Am. Stat. Assoc. 63, p. 1379)."""
    points = sorted(zip(places, values, strict=True))
    return statistics.median((d - b) / (c - a) for (a, b), (c, d) in itertools.combinations(points, 2) if c != a)


def soak(name: str, count: int) -> list[dict]:
    """Runs one, in this process, on a Ray of its own; gives `growth`."""
    with tempfile.TemporaryDirectory(prefix="raytf_memory_", ignore_cleanup_errors=True) as folder:
        samples = Samples(os.path.join(folder, "samples"), os.getpid())
        with common.ray_cluster():
            SOAKS[name](count, samples, folder)
        read = samples.read()
    return growth(read, min(SETTLED, read[-1][0] // 4))


def main(arguments=None):
    parser = common.parser(__doc__)
    parser.add_argument("--only", choices=SOAKS, help="one of them; else each in a process of its own")
    parser.add_argument("--short", action="store_true", help="a few minutes in all")
    parser.add_argument("--most", type=float, default=0.2, help="MB that a process may gain with an iteration")
    options = parser.parse_args(arguments)
    column = 2 if options.smoke else 1 if options.short else 0
    if options.only:
        common.give(soak(options.only, COUNTS[options.only][column]))
        return
    flags = ["--smoke"] * options.smoke + ["--short"] * options.short
    rows, bad, found = [], [], {}
    for name, counts in COUNTS.items():
        found[name] = common.measure(__file__, "--only", name, *flags, timeout=20 * 60 + 60 * counts[column])
        for one in found[name]:
            most = max(options.most, TRACES_MB.get(one["kind"], 0.0))
            opens = one["files"] > 0.1 and one["kind"] != LOG_MONITOR
            grows = one["memory"] > most or opens or one["threads"] > 0.1
            bad += [f"{name}: {one['kind']}"] * (grows and not options.smoke)
            if grows or one["kind"] == "driver" or one["kind"].startswith("ray::") or one["kind"] == "writer":
                row = [name, counts[column], one["kind"], one["first"], one["last"]]
                rows.append([*row, round(one["memory"], 4), round(one["files"], 4), round(one["threads"], 4)])
    head = ["soak", "iterations", "process", "MB first", "MB last", "MB an iteration", "files", "threads"]
    common.finish(options, "memory", common.table("Memory of processes that live long", head, rows), found)
    if bad:
        sys.exit(f"grow by more than {options.most} MB an iteration, or gain files or threads: {', '.join(bad)}")


if __name__ == "__main__":
    main()
