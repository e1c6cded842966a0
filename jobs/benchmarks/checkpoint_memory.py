"""What checkpoints take of memory, and of /tmp: two workers, one of which writes, on this machine.

python jobs/benchmarks/checkpoint_memory.py

Each worker notes its memory after some steps, without the buffer of snapshots, which exists before the first of them.
Then it notes the most of it while checkpoints are kept every few steps: as the kernel reports it of the process, with
shared memory (`Rss`), and of its own alone (`Private_*`). "writer" is the process that writes, without what it shares.
"stall" is the time between a step's callbacks and the next step. The temporary folder of the workers is one of their
own, whose most is noted.
"""

from __future__ import annotations

import glob
import json
import os
import sys
import tempfile
import threading
import time

import common

MEGABYTES = (96, 384)
LAYERS, BATCH, WORKERS = 4, 8, 2
# Steps before the first checkpoint, and from one to the next.
EVERY, SAVES = 12, 4
_LOOKS_SECONDS = 0.01


def _buffer() -> int:
    """Bytes of this process' memory that are the buffer of snapshots, which raytf touches before the first step."""
    found, inside = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            if not line.split(maxsplit=1)[0].endswith(":"):  # a mapping begins
                inside = line.rstrip().endswith("memfd:raytf_snapshot (deleted)")
            elif inside and line.startswith("Rss:"):
                found += int(line.split()[1]) << 10
    return found


def _bytes_below(folder: str) -> int:
    found = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                found += os.stat(os.path.join(where, name)).st_size
            except FileNotFoundError:
                continue
    return found


def _writer() -> int:
    """The bytes that are the writer's alone; 0 without one."""
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, "rb") as file:
                if b"raytf.storage.snapshot_writer" in file.read():
                    return common.memory(path.split("/")[2])["own"]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return 0


def _watch(keras, folder: str, temporary: str, rank: int):
    """Returns a callback that writes what this benchmark reports, into a file for each worker."""

    class Watch(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.steps, self.stalls, self.ended = 0, [], None
            self.most = {"rss": 0, "own": 0, "writer": 0, "temporary": 0}
            self.over = threading.Event()
            self.thread = threading.Thread(target=self.follow, daemon=True)

        def follow(self):
            while not self.over.wait(_LOOKS_SECONDS):
                now = {**common.memory(), "temporary": _bytes_below(temporary)}
                now["writer"] = _writer() if rank == 0 else 0
                self.most = {name: max(now[name], most) for name, most in self.most.items()}

        def on_train_batch_begin(self, batch, logs=None):
            if self.ended is not None and self.steps % EVERY == 0:
                self.stalls.append(time.perf_counter() - self.ended)

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            if self.steps == EVERY - 2:
                before = common.memory()
                self.before = before | {"rss": before["rss"] - _buffer()}
                self.thread.start()
            self.ended = time.perf_counter()

        def on_train_end(self, logs=None):
            self.over.set()
            self.thread.join()
            found = {"before": self.before, "most": self.most, "after": common.memory(), "stalls": self.stalls}
            with open(os.path.join(folder, f"memory_{rank}"), "w") as file:
                json.dump(found, file)

    Watch.raytf_local_batches = True
    return Watch()


def once(megabytes: str) -> None:
    """One training; gives what its workers have noted, and the bytes of a checkpoint's model."""
    import logging

    import ray
    from ray.train import RunConfig, ScalingConfig

    import raytf

    width = round((int(megabytes) * 1e6 / 4 / 3 / LAYERS) ** 0.5)

    def build_model(config):
        import keras

        layers = [keras.layers.Dense(width, activation="relu") for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(10)])
        model.compile(keras.optimizers.Adam(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    with tempfile.TemporaryDirectory() as folder:
        temporary = os.path.join(folder, "temporary")
        os.mkdir(temporary)

        def callbacks(config):
            import keras
            import ray.train

            return [_watch(keras, folder, temporary, ray.train.get_context().get_world_rank())]

        ray.init(
            address="local",
            num_cpus=WORKERS + 1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {"TMPDIR": temporary}},
        )
        steps = EVERY * SAVES + 4
        raytf.KerasTrainer(
            build_model,
            config={"batch_size": BATCH, "epochs": 1},
            datasets={"train": common.vectors(BATCH * steps, width)},
            features="x",
            labels="y",
            callbacks=callbacks,
            scaling_config=ScalingConfig(num_workers=WORKERS),
            run_config=RunConfig(name="run", storage_path=folder),
            steps_per_execution=1,
            checkpoint_every=f"{EVERY} steps",
            progress=False,
        ).fit()
        (model,) = glob.glob(os.path.join(folder, "run", "checkpoint_*", "model.keras"))
        common.give({"bytes": os.path.getsize(model), "workers": [_noted(folder, rank) for rank in range(WORKERS)]})


def _noted(folder: str, rank: int) -> dict:
    with open(os.path.join(folder, f"memory_{rank}")) as file:
        return json.load(file)


def main(arguments=None):
    parser = common.parser(__doc__)
    parser.add_argument("--megabytes", nargs="+", type=int, default=MEGABYTES)
    options = parser.parse_args(arguments)
    figures, rows = {}, []
    for megabytes in (8,) if options.smoke else options.megabytes:
        found = figures[megabytes] = common.measure(__file__, "--once", str(megabytes), timeout=1200)
        for rank, its in enumerate(found["workers"]):
            rows.append([f"{megabytes} MB", "chief" if rank == 0 else "other", *_cells(found["bytes"], its)])
    title = f"Memory of checkpoints: one every {EVERY} steps, in MB more than before the first"
    head = ["checkpoint", "worker", "most", "times the checkpoint", "of its own", "after", "writer's own", "temporary"]
    head += ["first stall ms", "others ms"]
    common.finish(options, "checkpoint_memory", common.table(title, head, rows), figures)


def _cells(size: int, found: dict) -> list:
    more = {name: (found["most"][name] - found["before"][name]) / 1e6 for name in ("rss", "own")}
    after = (found["after"]["rss"] - found["before"]["rss"]) / 1e6
    most, stalls = found["most"], [1e3 * seconds for seconds in found["stalls"]]
    others = common.spread(stalls[1:])[0] if stalls[1:] else ""
    return [
        more["rss"],
        more["rss"] * 1e6 / size,
        more["own"],
        after,
        most["writer"] / 1e6,
        most["temporary"] / 1e6,
        stalls[0] if stalls else "",
        others,
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(sys.argv[2])
    else:
        main()
