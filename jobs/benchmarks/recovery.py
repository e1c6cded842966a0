"""Seconds from the death of a worker to the next new step, and the steps that are made again.

python jobs/benchmarks/recovery.py
python jobs/benchmarks/recovery.py --kills 25 --memory

A training of two workers, which are killed (SIGKILL) again and again, before steps that a seed has drawn. In turn:

* raytf, where the lost worker is replaced in place and the other one keeps its process;
* raytf with `TensorflowConfig(spares=1)`: a standby worker replaces the lost one. The steps before a kill take
  `--rest` seconds longer in all, in which the next standby worker gets ready;
* raytf with `TensorflowConfig(heal=False)`: both restart from the last checkpoint within the epoch;
* Ray's TensorflowTrainer (with tf_keras, its only way), saved and loaded as Ray's guide does: a checkpoint at the end
  of each epoch, and `ray.train.get_checkpoint()`.

That every step was made in the end is checked.

With `--memory` worker 1 alone is killed, and what is printed is the memory of worker 0, which lives through all deaths:
growth from the fifth death to the last one, next to that of a training in which nobody dies.
"""

from __future__ import annotations

import functools
import json
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
# The death from which on memory must not grow.
SETTLED = 5


def places(kills: int, seed: int) -> list[tuple[int, int]]:
    """(step, rank) of each kill, in the order in which they come."""
    source = random.Random(seed)
    return [(i * SPAN + source.randrange(MARGIN, SPAN - MARGIN), source.randrange(WORKERS)) for i in range(kills)]


def _watch(keras, folder: str, rank: int, kills: list[tuple[int, int | None]], rest: float = 0.0):
    """A callback that notes when steps end, and kills its worker before some, each once over all restarts.

    Args:
        rest: seconds that the steps before a kill take longer in all.
    """
    own = [step for step, its in kills if its == rank]
    after = {place + MARGIN - 1: number for number, (place, _) in enumerate(kills, 1)}
    slow = {place - i for place, _ in kills for i in range(2, MARGIN + 1)} if rest else ()

    class Watch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.before = epoch * STEPS

        def on_train_batch_begin(self, batch, logs=None):
            step = self.before + batch
            marker = os.path.join(folder, f"killed_{step}")
            if rank == 0 and step in after:
                with open(os.path.join(folder, f"memory_{after[step]}"), "w") as file:
                    json.dump(common.memory() | {"pid": os.getpid()}, file)
            if step in own and not os.path.exists(marker):
                with open(marker, "w") as file:
                    file.write(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_batch_end(self, batch, logs=None):
            with open(os.path.join(folder, f"steps_{rank}"), "a") as file:
                file.write(f"{self.before + batch} {time.time()!r}\n")
            if self.before + batch in slow:
                time.sleep(rest / (MARGIN - 1))

    Watch.raytf_local_batches = True
    return Watch()


def _raytf(folder: str, kills: list[tuple[int, int | None]], heal: bool = True, spares: int = 0, rest: float = 0.0):
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    import raytf

    def build_model(config):
        import keras

        return ray_guide.model(keras, WIDTH)

    def callbacks(config):
        import keras
        import ray.train

        return [_watch(keras, folder, ray.train.get_context().get_world_rank(), kills, rest)]

    raytf.KerasTrainer(
        build_model,
        config={"batch_size": BATCH, "epochs": _epochs(kills)},
        datasets={"train": common.vectors(BATCH * STEPS, WIDTH)},
        features="x",
        labels="y",
        callbacks=callbacks,
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(name="run", storage_path=folder, failure_config=FailureConfig(max_failures=-1)),
        tensorflow_config=raytf.TensorflowConfig(heal=heal, spares=spares),
        steps_per_execution=1,
        progress=False,
    ).fit()


def _ray(folder: str, kills: list[tuple[int, int | None]]):
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


SPARE = "raytf, with a spare"
WAYS = {
    "raytf": _raytf,
    SPARE: functools.partial(_raytf, spares=1),
    "raytf, heal=False": functools.partial(_raytf, heal=False),
    "Ray TensorflowTrainer": _ray,
}


def _epochs(kills: list[tuple[int, int | None]]) -> int:
    return -(-(len(kills) + 1) * SPAN // STEPS)


def once(way: str, kills: list[tuple[int, int | None]], rest: float) -> tuple[list[dict], list[dict]]:
    """Runs a training with kills; returns its `figures`, and worker 0's memory after each kill."""
    with tempfile.TemporaryDirectory(prefix="raytf_recovery_", ignore_cleanup_errors=True) as folder:
        WAYS[way](folder, kills, **({"rest": rest} if way == SPARE else {}))
        made = []
        for rank in range(WORKERS):
            with open(os.path.join(folder, f"steps_{rank}")) as file:
                made += [(float(at), int(step)) for step, at in map(str.split, file)]
        killed = {}
        for step in (step for step, rank in kills if rank is not None):
            with open(os.path.join(folder, f"killed_{step}")) as file:
                killed[step] = float(file.read())
        memory = []
        for number in range(1, len(kills) + 1):
            if os.path.exists(path := os.path.join(folder, f"memory_{number}")):
                with open(path) as file:
                    memory.append(json.load(file))
    return figures(sorted(made), killed, _epochs(kills) * STEPS), memory


def figures(made: list[tuple[float, int]], killed: dict[int, float], steps: int) -> list[dict]:
    """Returns the figures of each kill of a training.

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
    parser.add_argument("--rest", type=float, default=12.0, help="seconds before a kill, where there is a spare")
    parser.add_argument("--memory", action="store_true", help="what deaths leave in the memory of the survivor")
    options = parser.parse_args(arguments)
    kills = places(2 if options.smoke else options.kills, options.seed)
    found = {}
    with common.ray_cluster():
        if options.memory:
            found["raytf, nobody dies"] = once("raytf", [(step, None) for step, _ in kills], 0.0)[1]
            kills = [(step, 1) for step, _ in kills]
            options.ways = [way for way in options.ways if way in ("raytf", SPARE)]
        for way in options.ways:
            found[way], memory = once(way, kills, options.rest)
            print(f"{way}: {found[way]}", file=sys.stderr, flush=True)
            if options.memory:
                found[way] = memory
    shown = _memory_table(found) if options.memory else _recovery_table(len(kills), found)
    common.finish(options, "recovery", shown, found)


def _recovery_table(kills: int, found: dict[str, list[dict]]) -> str:
    rows = []
    for way, each in found.items():
        median, least, most = common.spread(one["seconds"] for one in each)
        repeated = [one["repeated"] for one in each]
        rows.append([way, median, least, most, f"{sum(repeated) / len(repeated):.1f} ({max(repeated)})"])
    head = ["", "death to next new step, s: median", "least", "worst", "steps made again: mean (most)"]
    return common.table(f"Recovery: {kills} kills each of {WORKERS} workers' processes", head, rows)


def _memory_table(found: dict[str, list[dict]]) -> str:
    """Raises RuntimeError where worker 0 did not keep its process."""
    rows = []
    for way, each in found.items():
        if len({one["pid"] for one in each}) != 1:
            raise RuntimeError(f"{way}: worker 0 was several processes: {each}")
        for name, kind in (("RSS", "rss"), ("USS", "own")):
            first, early, late = (each[min(i, len(each) - 1)][kind] / 2**20 for i in (0, SETTLED - 1, len(each) - 1))
            rows.append([f"{way}: {name}", first, early, late, f"{100 * (late / early - 1):+.2f} %"])
    deaths = len(next(iter(found.values())))
    head = ["", "MiB after the first death", f"after death {SETTLED}", f"after death {deaths}", "growth between these"]
    return common.table("Memory of the worker that lives through all deaths", head, rows)


if __name__ == "__main__":
    main()
