"""Weak and strong scaling over workers, on one Ray node and on a cluster with a node for each worker.

python jobs/benchmarks/scaling.py                        # prints a table
python jobs/benchmarks/scaling.py --picture scaling.svg  # and draws it

Weak: each worker has a batch of its own, and the global batch grows. Strong: the global batch stays. The shares are of
the chief's time: input is what steps wait for rows, communication the time within sums of gradients (waiting for the
other workers included; it overlaps with the backward pass where there are several packs), compute the rest. Each
worker is kept on one core, as one alone would use two; nodes share this machine, and with more workers than cores each
computes more slowly.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import tempfile
import time

import common

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # for `cluster`, which is not installed

WORKERS = (1, 2, 3)
BATCH, GLOBAL_BATCH = 64, 192
KINDS = ("weak", "strong")
CLUSTERS = ("one node", "a node each")
EXECUTION, WARM_UP = 10, 20  # steps


def _loop(config):
    import keras
    import ray.train

    import raytf
    from raytf.collectives import gradient_ring
    from raytf.worker import input_wait

    cores = sorted(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {cores[ray.train.get_context().get_world_rank() % len(cores)]})
    strategy = raytf.get_strategy()
    with input_wait.measure_input_wait() as waited:
        dataset = raytf.get_dataset("train", batch_size=config["batch"], features="image", labels="label")
        with strategy.scope():
            model = keras.Sequential(common.small_cnn(keras))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
            # a KerasTrainer chooses such a number itself; here it must be the same in all runs
            model.compile(optimizer, loss, metrics=["accuracy"], steps_per_execution=EXECUTION)
        ring = gradient_ring.ring_of(strategy)

        def state():
            return {"time": time.perf_counter(), "input": waited(), "communication": ring.seconds if ring else 0.0}

        class Clock(keras.callbacks.Callback):
            raytf_local_batches = True

            def on_train_batch_end(self, batch, logs=None):
                if batch == WARM_UP - 1:
                    self.began = state()

            def on_epoch_end(self, epoch, logs=None):
                ended = state()
                spent = {name: ended[name] - self.began[name] for name in ended}
                steps = self.params["steps"] - WARM_UP
                answer = {"rows_per_s": steps * config["batch"] / spent["time"]}
                answer |= {name: spent[name] / spent["time"] for name in ("input", "communication")}
                if ray.train.get_context().get_world_rank() == 0:
                    with open(config["file"], "w") as file:
                        json.dump(answer, file)

        model.fit(dataset, epochs=1, callbacks=[Clock()], verbose=0)


def once(address: str, workers: str, batch: str, steps: str) -> None:
    """One measurement, in a driver of its own."""
    import numpy as np
    import pyarrow as pa
    import ray
    from ray.train import RunConfig, ScalingConfig

    import raytf

    workers, batch, steps = int(workers), int(batch), int(steps)
    common.connect(address)
    rng = np.random.default_rng(0)
    rows = batch * steps
    images = pa.FixedShapeTensorArray.from_numpy_ndarray(rng.integers(0, 256, (rows, 28, 28, 1)).astype("uint8"))
    table = pa.table({"image": images, "label": pa.array(rng.integers(0, 10, rows))})
    with tempfile.TemporaryDirectory(prefix="raytf_scaling_") as folder:
        file = os.path.join(folder, "answer.json")
        raytf.TensorflowTrainer(
            _loop,
            train_loop_config={"batch": batch, "file": file},
            tensorflow_config=raytf.TensorflowConfig(pin_cpus=False),  # the loop does
            datasets={"train": ray.data.from_arrow(table)},
            # on a cluster with a node of two CPUs for each worker this leaves no node with two workers
            scaling_config=ScalingConfig(num_workers=workers, placement_strategy="SPREAD"),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        with open(file) as seen:
            common.give(json.load(seen))


def _measure_all(options, steps: int) -> dict:
    found: dict = {}
    repeats = 1 if options.smoke else options.repeats
    for cluster in CLUSTERS:
        with _cluster(cluster) as (address, environment):
            for _ in range(repeats):
                for kind in KINDS:
                    for workers in WORKERS[:2] if options.smoke else WORKERS:
                        batch = BATCH * workers if kind == "weak" else GLOBAL_BATCH
                        arguments = ("--once", address, str(workers), str(batch), str(steps))
                        answer = common.measure(__file__, *arguments, environment=environment)
                        print(f"{cluster}, {kind}, {workers}: {answer['rows_per_s']:.0f} rows/s", file=sys.stderr)
                        found.setdefault((cluster, kind, workers), []).append(answer)
    return found


@contextlib.contextmanager
def _cluster(name: str):
    if name == "one node":
        with common.ray_cluster(cpus=2 * len(WORKERS)) as address:
            yield address, {}
    else:
        from cluster.local import local_cluster

        with local_cluster(nodes=len(WORKERS), cpus=2) as cluster:
            yield cluster.address, cluster.environment


def _picture(file: str, summary: dict) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {"compute": "#4c72b0", "communication": "#dd8452", "input": "#55a868"}
    figure, places = pyplot.subplots(1, len(summary), figsize=(3.2 * len(summary), 3.4), sharey=True)
    for place, ((cluster, kind), by_workers) in zip(places, summary.items(), strict=True):
        for x, (_, figures) in enumerate(by_workers.items()):
            bottom = 0.0
            for part, color in colors.items():
                height = figures["rows_per_s"] * figures[part]
                place.bar(x, height, bottom=bottom, color=color, width=0.6, label=part if x == 0 else None)
                bottom += height
        place.set_xticks(range(len(by_workers)), [str(w) for w in by_workers])
        place.set_xlabel("workers")
        place.set_title(f"{kind}, {cluster}", fontsize=10)
        place.spines[["top", "right"]].set_visible(False)
    places[0].set_ylabel("rows/s, by where the time goes")
    names = places[0].get_legend_handles_labels()
    figure.legend(*names, loc="upper right", ncols=len(colors), frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    figure.savefig(file)


def main(arguments=None):
    parser = common.parser(__doc__)
    parser.add_argument("--picture", metavar="FILE", help="draw the figures there (.svg or .png; needs matplotlib)")
    options = parser.parse_args(arguments)
    found = _measure_all(options, steps=60 if options.smoke else 120)
    rows, summary = [], {}
    for (cluster, kind, workers), answers in found.items():
        median, least, most = common.spread(a["rows_per_s"] for a in answers)
        parts = {p: common.spread(a[p] for a in answers)[0] for p in ("communication", "input")}
        parts["compute"] = max(0.0, 1 - sum(parts.values()))
        summary.setdefault((cluster, kind), {})[workers] = {"rows_per_s": median, **parts}
        against = median / summary[cluster, kind][1]["rows_per_s"]
        shares = [f"{100 * parts[p]:.0f} %" for p in ("compute", "communication", "input")]
        rows.append([kind, cluster, workers, median, f"{least:.0f} to {most:.0f}", f"{against:.2f}x", *shares])
    head = ["scaling", "cluster", "workers", "rows/s", "spread", "one worker", "compute", "communication", "input"]
    title = f"Scaling: small CNN, batch {BATCH} a worker (weak) or {GLOBAL_BATCH} in all (strong)"
    shown = common.table(title, head, sorted(rows, key=lambda row: (KINDS.index(row[0]), CLUSTERS.index(row[1]))))
    if options.picture:
        _picture(options.picture, summary)
    common.finish(options, "scaling", shown, {", ".join(map(str, key)): value for key, value in found.items()})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(*sys.argv[2:6])
    else:
        main()
