"""Seconds from the death of a worker to the next new step, and the steps that are made again.

python jobs/benchmarks/recovery.py

A training of two workers, which are killed (SIGKILL) again and again, before steps that a seed has drawn. In turn:

* raytf, where the lost worker is replaced in place and the other one keeps its process;
* raytf with `TensorflowConfig(heal=False)`: both start anew from the last checkpoint within the epoch;
* Ray's TensorflowTrainer (with tf_keras, its only way), saved and loaded as Ray's guide does: a checkpoint at the end
  of each epoch, and `ray.train.get_checkpoint()`.

That every step was made in the end is checked.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import tempfile
import time

import common
import ray_guide

WIDTH, BATCH, WORKERS = 32, 128, 2
STEPS = 40  # of an epoch
# A kill in each so many steps, somewhere in the middle of them.
SPAN, MARGIN = 50, 15


def places(kills: int, seed: int) -> list[tuple[int, int]]:
    """(step, rank) of each kill, in the order in which they come."""
    source = random.Random(seed)
    return [(i * SPAN + source.randrange(MARGIN, SPAN - MARGIN), source.randrange(WORKERS)) for i in range(kills)]


def _watch(keras, folder: str, rank: int, kills: list[tuple[int, int]]):
    """A callback that notes when steps end, and kills its worker before some, each once over all restarts."""
    mine = [step for step, its in kills if its == rank]

    class Watch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.before = epoch * STEPS

        def on_train_batch_begin(self, batch, logs=None):
            step = self.before + batch
            marker = os.path.join(folder, f"killed_{step}")
            if step in mine and not os.path.exists(marker):
                with open(marker, "w") as file:
                    file.write(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_batch_end(self, batch, logs=None):
            with open(os.path.join(folder, f"steps_{rank}"), "a") as file:
                file.write(f"{self.before + batch} {time.time()!r}\n")

    Watch.raytf_local_batches = True
    return Watch()


def _raytf(folder: str, kills: list[tuple[int, int]], heal: bool = True):
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    import raytf

    def build_model(config):
        import keras

        return ray_guide.model(keras, WIDTH)

    def callbacks(config):
        import keras
        import ray.train

        return [_watch(keras, folder, ray.train.get_context().get_world_rank(), kills)]

    raytf.KerasTrainer(
        build_model,
        config={"batch_size": BATCH, "epochs": _epochs(kills)},
        datasets={"train": common.vectors(BATCH * STEPS, WIDTH)},
        features="x",
        labels="y",
        callbacks=callbacks,
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(name="run", storage_path=folder, failure_config=FailureConfig(max_failures=-1)),
        tensorflow_config=raytf.TensorflowConfig(heal=heal),
        steps_per_execution=1,
        progress=False,
    ).fit()


def _ray(folder: str, kills: list[tuple[int, int]]):
    from ray.train import FailureConfig

    ray_guide.fit(
        folder,
        BATCH * STEPS,
        WIDTH,
        _epochs(kills),
        STEPS,
        WORKERS,
        BATCH // WORKERS,
        watch=lambda keras, rank: _watch(keras, folder, rank, kills),
        failure_config=FailureConfig(max_failures=-1),
    )


WAYS = {
    "raytf": _raytf,
    "raytf, heal=False": functools.partial(_raytf, heal=False),
    "Ray TensorflowTrainer": _ray,
}


def _epochs(kills: list[tuple[int, int]]) -> int:
    return -(-(len(kills) + 1) * SPAN // STEPS)


def once(way: str, kills: list[tuple[int, int]]) -> list[dict]:
    """A training with kills; see `figures`."""
    with tempfile.TemporaryDirectory(prefix="raytf_recovery_", ignore_cleanup_errors=True) as folder:
        WAYS[way](folder, kills)
        made = []
        for rank in range(WORKERS):
            with open(os.path.join(folder, f"steps_{rank}")) as file:
                made += [(float(at), int(step)) for step, at in map(str.split, file)]
        killed = {}
        for step, _ in kills:
            with open(os.path.join(folder, f"killed_{step}")) as file:
                killed[step] = float(file.read())
    return figures(sorted(made), killed, _epochs(kills) * STEPS)


def figures(made: list[tuple[float, int]], killed: dict[int, float], steps: int) -> list[dict]:
    """What a training says of each kill.

    Args:
        made: (when, step) of each step that ended on a worker, in order.
        killed: when a worker was killed, by the step that it was about to begin.
        steps: that there are in all.

    Returns:
        {"seconds": from the kill to the end of the step that it was about to begin, "repeated": steps before that which
        ended once more} of each.

    Raises:
        RuntimeError: a step is missing.
    """
    if missing := sorted(set(range(steps)) - {step for _, step in made}):
        raise RuntimeError(f"steps that were not made: {missing}")
    found = []
    for place, at in sorted(killed.items()):
        new = min(when for when, step in made if step >= place and when > at)
        # what others ended in the moment of the kill was under way
        again = {step for when, step in made if at + 0.5 < when < new and step < place}
        found.append({"seconds": new - at, "repeated": len(again)})
    return found


def main(arguments=None):
    parser = common.parser(__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--kills", type=int, default=20, help="of each way")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    kills = places(2 if options.smoke else options.kills, options.seed)
    found = {}
    with common.ray_cluster():
        for way in options.ways:
            found[way] = once(way, kills)
            print(f"{way}: {found[way]}", file=sys.stderr, flush=True)
    rows = []
    for way, each in found.items():
        median, least, most = common.spread(one["seconds"] for one in each)
        repeated = [one["repeated"] for one in each]
        rows.append([way, median, least, most, f"{sum(repeated) / len(repeated):.1f} ({max(repeated)})"])
    head = ["", "death to next new step, s: median", "least", "worst", "steps made again: mean (most)"]
    title = f"Recovery: {len(kills)} kills each of {WORKERS} workers' processes"
    common.finish(options, "recovery", common.table(title, head, rows), found)


if __name__ == "__main__":
    main()
