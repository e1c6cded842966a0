"""What checkpoints cost a training: one every 100 steps, of 10 and 100 MB of state, on this machine.

python jobs/benchmarks/checkpoint.py

"raytf" copies its state into shared memory, and a process of its own writes it; "raytf, held" copies it, and nobody
writes it unless the training's process ends, as with `KerasTrainer(memory_every="100 steps")`; "ModelCheckpoint"
and "OrbaxCheckpoint" are Keras' callbacks with `save_freq=100`, the latter writing in the background; "none" writes
nothing. All in turn, each in a process of its own, on local disk. A stall is the time in which the callback holds the
training up; what a writer takes of the processors meanwhile shows in the steps a second. Orbax is measured where it is
installed (`pip install raytf[orbax]`).
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time

import common

EVERY = 100
BATCH = 128
MEGABYTES = (10, 100)
# Checkpoints in a measurement.
SAVES = {10: 10, 100: 3}
WAYS = ("none", "raytf", "raytf, held", "ModelCheckpoint", "OrbaxCheckpoint")


def _model(megabytes: int):
    """A network whose weights and Adam's two moments take so many megabytes, in twelve layers."""
    import keras

    width = round((megabytes * 1e6 / 4 / 3 / 12) ** 0.5)
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(12)]
    model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(1e-4), "mse")
    return model, width


def _raytf(folder: str, held: bool):
    """A callback that hands snapshots to raytf's writer, as `KerasTrainer(checkpoint_every="100 steps")` does."""
    import keras
    import pyarrow.fs

    from raytf.storage import checkpoint_files
    from raytf.storage.snapshots import SnapshotWriter
    from raytf.worker import checkpoint
    from raytf.worker.model_file import ModelFile

    class Snapshots(keras.callbacks.Callback):
        """Starts the writer before the first step."""

        def on_train_begin(self, logs=None):
            self.writer = SnapshotWriter(pyarrow.fs.LocalFileSystem(), folder)
            self.file = ModelFile(self.model)
            self.keep(0)
            self.writer.finish(60.0)
            self.idle = self.writer.written[-1]["cpu"]

        def on_train_batch_end(self, batch, logs=None):
            if (batch + 1) % EVERY == 0:
                self.keep(batch + 1)

        def keep(self, step):
            state = checkpoint_files.CheckpointState(0, step, 0, False, [])
            parts = checkpoint.checkpoint_parts(self.model, state)
            self.writer.write(f"step_{step:012d}", {"model.keras": self.file.content(), **parts}, held and step > 0)

        def on_train_end(self, logs=None):
            self.writer.flush()  # the last one is written, for its size
            self.writer.finish(60.0)

        def cpu(self):
            self.writer.close()
            return self.writer.written[-1]["cpu"] - self.idle

    return Snapshots()


def _callback(way: str, folder: str):
    import keras

    if way == "ModelCheckpoint":
        return keras.callbacks.ModelCheckpoint(os.path.join(folder, "model.keras"), save_freq=EVERY)
    if way == "OrbaxCheckpoint":
        return keras.callbacks.OrbaxCheckpoint(folder, save_freq=EVERY)
    return _raytf(folder, way != "raytf") if way.startswith("raytf") else keras.callbacks.Callback()


def once(way: str, megabytes: str, saves: str) -> None:
    """One way in this process; gives seconds, the stalls, the bytes of the last checkpoint and the writer's CPU."""
    import numpy as np
    import tensorflow as tf

    saves = int(saves)
    model, width = _model(int(megabytes))
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(BATCH, width)).astype("float32"), rng.normal(size=(BATCH, 1)).astype("float32")
    steps = EVERY * saves
    data = tf.data.Dataset.from_tensors(rows).repeat(steps + 20)
    model.fit(data, steps_per_epoch=20, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        callback = _callback(way, folder)
        stalls, original = [], callback.on_train_batch_end

        def timed(batch, logs=None):
            began = time.perf_counter()
            original(batch, logs)
            if (batch + 1) % EVERY == 0:
                stalls.append(time.perf_counter() - began)

        callback.on_train_batch_end = timed
        began = []
        clock = _clock(began)
        model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[callback, clock])
        seconds = began[1] - began[0]
        cpu = callback.cpu() if way.startswith("raytf") else None
        size = _bytes(folder, way)
    common.give({"seconds": seconds, "steps": steps, "stalls": stalls, "bytes": size, "cpu": cpu})


def _clock(times: list):
    """Notes when the first step begins and the last one ends: starts and ends of callbacks are no part of it."""
    import keras

    class Clock(keras.callbacks.Callback):
        """Comes after the other callback in the list."""

        def on_train_batch_begin(self, batch, logs=None):
            if not times:
                times.append(time.perf_counter())

        def on_train_batch_end(self, batch, logs=None):
            times[1:] = [time.perf_counter()]

    return Clock()


def _bytes(folder: str, way: str) -> int:
    """Bytes of one checkpoint."""
    if way.startswith("raytf"):
        folder = os.path.join(folder, max(os.listdir(folder)))
    return sum(os.path.getsize(os.path.join(where, name)) for where, _, names in os.walk(folder) for name in names)


def main(arguments=None):
    parser = common.parser(__doc__)
    parser.add_argument("--megabytes", nargs="+", type=int, choices=MEGABYTES, default=MEGABYTES)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY", help=", ".join(WAYS))
    options = parser.parse_args(arguments)
    repeats = 1 if options.smoke else options.repeats
    ways = [way for way in options.ways if way != "OrbaxCheckpoint" or importlib.util.find_spec("orbax")]
    figures, rows = {}, []
    for megabytes in options.megabytes[:1] if options.smoke else options.megabytes:
        saves = 2 if options.smoke else SAVES[megabytes]
        found = figures[megabytes] = {way: [] for way in ways}
        for _ in range(repeats):
            for way in ways:
                answer = common.measure(__file__, "--once", way, str(megabytes), str(saves))
                rate = answer["steps"] / answer["seconds"]
                print(f"{megabytes} MB {way}: {rate:.1f} steps/s, {sum(answer['stalls']):.3f} s", file=sys.stderr)
                found[way].append(answer)
        rows += [_row(f"{megabytes} MB", way, found[way]) for way in ways]
    title = f"Checkpoints: one every {EVERY} steps, median of {repeats}"
    head = ["state", "way", "steps/s", "stall ms", "worst ms", "share of training", "MB each", "writer's CPU ms each"]
    common.finish(options, "checkpoint", common.table(title, head, rows), figures)


def _row(state: str, way: str, found: list[dict]) -> list:
    rate = common.spread(one["steps"] / one["seconds"] for one in found)[0]
    if way == "none":
        return [state, way, rate, "", "", "", "", ""]
    stalls = [stall for one in found for stall in one["stalls"]]
    share = common.spread(sum(one["stalls"]) / one["seconds"] for one in found)[0]
    median, _, worst = common.spread(stalls)
    cpu = "in the training" if found[0]["cpu"] is None else common.spread(o["cpu"] / len(o["stalls"]) for o in found)[0]
    cpu = cpu if isinstance(cpu, str) else 1e3 * cpu
    return [state, way, rate, 1e3 * median, 1e3 * worst, f"{share:.2%}", found[0]["bytes"] / 1e6, cpu]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(*sys.argv[2:5])
    else:
        main()
