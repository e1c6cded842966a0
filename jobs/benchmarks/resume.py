"""Seconds from a command to the first new step of a run that was killed within an epoch, and the steps made twice.

python jobs/benchmarks/resume.py

A command trains; before a step in the middle of the second epoch its driver and its workers are killed (SIGKILL), and
the same command is given again, at once. "Fresh" is the first command's time to the end of its first step. Nothing but
the storage connects the second command with the first. In turn:

* raytf, two workers: `checkpoint_every=` each step and every 8 steps; and with its defaults, where its driver gets
  SIGTERM, as by `ray job stop` or a machine that is taken away.
* Ray's TensorflowTrainer, two workers (with tf_keras, its only way), saved and loaded as Ray's guide does: a checkpoint
  at the end of each epoch, and `ray.train.get_checkpoint()`.
* Keras' BackupAndRestore in one process without Ray: at the ends of epochs, and every 8 steps. The latter begins the
  epoch again with weights that hold most of it: those steps are not only made again, they count twice.

Ray runs already. A step is "repeated" if both commands made it; that all of them were made is checked.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time

import common
import ray_guide

WIDTH, BATCH = 32, 128
EPOCHS, STEPS = 3, 128  # of an epoch
EVERY = 8
# Between two checkpoints of every 8 steps.
END_AFTER = STEPS + 68


def _watch(keras, folder: str, rank: int = 0, ends: int = signal.SIGKILL):
    """A callback that notes the steps of the first worker, and ends the command within an epoch, the first time.

    Args:
        keras: `keras` or `tf_keras`.
        folder: holds "driver" with the driver's process, and gets a file of steps for each command.
        rank: of this worker.
        ends: SIGKILL kills workers and driver before the next step begins; SIGTERM only comes to the driver.
    """
    again = os.path.exists(os.path.join(folder, "ended"))
    left = [] if again or rank else [END_AFTER]  # no attribute of the callback, which a checkpoint may keep

    def process_of(who: str) -> int:
        with open(os.path.join(folder, who)) as file:
            return int(file.read())

    def end():
        open(os.path.join(folder, "ended"), "w").close()
        if ends == signal.SIGKILL:
            others = [name for name in os.listdir(folder) if name.startswith("worker") and name != f"worker{rank}"]
            for who in others:
                os.kill(process_of(who), ends)
        os.kill(process_of("driver"), ends)
        if ends == signal.SIGKILL:
            os.kill(os.getpid(), ends)

    class Watch(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            with open(os.path.join(folder, f"worker{rank}"), "w") as file:
                file.write(str(os.getpid()))

        def on_epoch_begin(self, epoch, logs=None):
            self.before = epoch * STEPS

        def on_train_batch_begin(self, batch, logs=None):
            self.first = self.before + batch
            if left and self.first >= left[0]:
                left.clear()
                end()

        def on_train_batch_end(self, batch, logs=None):
            if rank == 0:
                with open(os.path.join(folder, f"steps{int(again)}"), "a") as file:
                    file.write(f"{self.first} {self.before + batch} {time.time()!r}\n")

    Watch.raytf_local_batches = True
    return Watch()


def _raytf(folder: str, every: str = "auto", ends: int = signal.SIGKILL):
    from ray.train import RunConfig, ScalingConfig

    import raytf

    def build_model(config):
        import keras

        return ray_guide.model(keras, WIDTH)

    def callbacks(config):
        import keras
        import ray.train

        return [_watch(keras, folder, ray.train.get_context().get_world_rank(), ends)]

    raytf.KerasTrainer(
        build_model,
        config={"batch_size": BATCH, "epochs": EPOCHS},
        datasets={"train": common.vectors(BATCH * STEPS, WIDTH)},
        features="x",
        labels="y",
        callbacks=callbacks,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=folder),
        steps_per_execution=1,
        checkpoint_every=every,
        progress=False,
    ).fit()


def _ray(folder: str):
    watch = lambda keras, rank: _watch(keras, folder, rank)
    ray_guide.fit(folder, BATCH * STEPS, WIDTH, EPOCHS, STEPS, 2, BATCH // 2, watch)


def _keras(folder: str, save_freq: str | int):
    import keras
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(0)
    rows = rng.normal(size=(BATCH * STEPS, WIDTH)).astype("float32"), rng.integers(0, 10, BATCH * STEPS)
    dataset = tf.data.Dataset.from_tensor_slices(rows).batch(BATCH)
    backup = keras.callbacks.BackupAndRestore(os.path.join(folder, "backup"), save_freq=save_freq)
    ray_guide.model(keras, WIDTH).fit(dataset, epochs=EPOCHS, callbacks=[backup, _watch(keras, folder)], verbose=0)


WAYS = {
    "raytf, each step": functools.partial(_raytf, every="1 step"),
    "raytf, every 8 steps": functools.partial(_raytf, every=f"{EVERY} steps"),
    "raytf, SIGTERM": functools.partial(_raytf, ends=signal.SIGTERM),
    "Ray TensorflowTrainer": _ray,
    "BackupAndRestore, epoch": functools.partial(_keras, save_freq="epoch"),
    "BackupAndRestore, 8 steps": functools.partial(_keras, save_freq=EVERY),
}


def _needs_ray(way: str) -> bool:
    return not way.startswith("BackupAndRestore")


def command(way: str, folder: str, address: str) -> None:
    """The command: a driver, or the one process."""
    with open(os.path.join(folder, "driver"), "w") as file:
        file.write(str(os.getpid()))
    if address:
        common.connect(address)
    WAYS[way](folder)


def once(way: str, address: str, timeout: float = 600.0) -> dict:
    """One measurement: the command, its end within an epoch, the same command again.

    Args:
        way: a key of WAYS.
        address: of a Ray that runs; "" for a way that needs none.
        timeout: seconds for each command.

    Returns:
        See `figures`.

    Raises:
        RuntimeError: a command did not end as it should.
    """
    ended = -signal.SIGKILL if "SIGTERM" not in way else 128 + signal.SIGTERM
    with tempfile.TemporaryDirectory(prefix="raytf_resume_", ignore_cleanup_errors=True) as folder:
        given = []
        for code in (ended, 0):
            with open(os.path.join(folder, "printed"), "w+") as printed:
                words = [sys.executable, __file__, "--once", way, folder, address]
                given.append(time.time())
                with subprocess.Popen(words, env=common.environment(), stdout=printed, stderr=printed) as process:
                    try:
                        found = process.wait(timeout)
                    finally:
                        process.kill()
                if found != code:
                    printed.seek(0)
                    raise RuntimeError(f"{way}: exit code {found}, not {code}:\n{printed.read()[-4000:]}")
        return figures(given, [steps_of(os.path.join(folder, f"steps{i}")) for i in range(2)])


def steps_of(path: str) -> dict[int, float]:
    """When each step ended, by its number in the training."""
    found = {}
    with open(path) as file:
        for line in file:
            first, last, at = line.split()
            found |= dict.fromkeys(range(int(first), int(last) + 1), float(at))
    return found


def figures(given: list[float], steps: list[dict[int, float]]) -> dict:
    """What two commands say.

    Args:
        given: when each command was.
        steps: when each step ended, by its number, for each command.

    Returns:
        {"fresh", "first", "new": seconds of the first command to its first step, and of the second to its first step
        and to the first one that is new; "repeated": steps that both made}.

    Raises:
        RuntimeError: a step was left out, or none was left to make.
    """
    before, after = steps
    if missing := sorted(set(range(EPOCHS * STEPS)) - set(before) - set(after)):
        raise RuntimeError(f"steps that neither command has made: {missing}")
    new = [at for step, at in after.items() if step not in before]
    if not new:
        raise RuntimeError("the first command has made all steps")
    return {
        "fresh": min(before.values()) - given[0],
        "first": min(after.values()) - given[1],
        "new": min(new) - given[1],
        "repeated": len(set(before) & set(after)),
    }


def main(arguments=None):
    parser = common.parser(__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    options = parser.parse_args(arguments)
    repeats = 1 if options.smoke else options.repeats
    found = {way: [] for way in options.ways}
    with contextlib.ExitStack() as stack:
        needs_ray = any(map(_needs_ray, options.ways))
        cluster = stack.enter_context(common.ray_cluster()) if needs_ray else ""
        for _ in range(repeats):
            for way in options.ways:
                found[way].append(once(way, cluster if _needs_ray(way) else ""))
                print(f"{way}: {found[way][-1]}", file=sys.stderr, flush=True)
    rows = [_row(way, each) for way, each in found.items()]
    head = ["", "fresh start, s", "resumed: s to first step", "to first new step", "share of its fresh start's"]
    head += ["spread", "steps repeated"]
    title = f"Resume: killed within an epoch, the same command again, {repeats} times each (medians)"
    common.finish(options, "resume", common.table(title, head, rows), found)


def _row(way: str, found: list[dict]) -> list:
    seconds = [common.spread(one[name] for one in found)[0] for name in ("fresh", "first", "new")]
    share, least, most = common.spread(one["new"] / one["fresh"] for one in found)
    repeated = sorted({one["repeated"] for one in found})
    shown = str(repeated[0]) if len(repeated) == 1 else f"{repeated[0]} to {repeated[-1]}"
    return [way, *seconds, share, f"{least:.2f} to {most:.2f}", shown]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        command(*sys.argv[2:5])
    else:
        main()
