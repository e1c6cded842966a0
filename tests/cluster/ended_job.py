"""A training that is stopped, and saves its weights: python -m tests.cluster.ended_job FOLDER NAME WORKERS [NODE]

With the name "trial" it is the trial of a sweep. WORKERS may be "1-3": as many as there is room for, without Dropout.
NODE is Ray's id of the node that the trainer is to be on, or "head"; else it is on any node of this host. Each worker
notes its node, steps and process in NAME_RANK.txt; a run that ends by itself leaves its metrics in NAME.json.
FOLDER/NAME_hold may name an epoch and a batch in each line, after which the last worker (of an elastic run: the chief)
waits until it is asked to end, so that others may be one step ahead; then it removes that line, and a file
without others. It continues when the file names others, too.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time

import numpy as np

from tests.cluster import models

_HELD_SECONDS = 150.0


def noting(config):
    """A callback that notes each step, and holds one."""
    import keras
    import ray

    from raytf.worker import stop

    node = ray.get_runtime_context().get_node_id()

    class Note(keras.callbacks.Callback):
        raytf_local_batches = True

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            rank = models.rank() if config["workers"] else 0
            with open(f"{config['place']}_{rank}.txt", "a") as file:
                file.write(f"{node} {self.epoch} {batch} {os.getpid()}\n")
            hold = pathlib.Path(f"{config['place']}_hold")
            position = f"{self.epoch} {batch}"
            if rank == max(0, config["workers"] - 1) and hold.exists() and position in hold.read_text().splitlines():
                until = time.monotonic() + _HELD_SECONDS
                while (
                    stop.stop_barrier.why is None
                    and position in hold.read_text().splitlines()
                    and time.monotonic() < until
                ):
                    time.sleep(0.01)
                lines = hold.read_text().splitlines()
                if lines == [position]:
                    hold.unlink()
                elif position in lines:
                    hold.write_text("\n".join(line for line in lines if line != position))

        def on_train_end(self, logs=None):
            if not config["workers"] or models.rank() == 0:
                np.savez(f"{config['place']}.npz", *self.model.get_weights())

    return [Note()]


def main(folder: str, name: str, workers: int, node: str | None = None) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(log_to_driver=False)
    if node is None:
        train(folder, name, workers)
    else:
        if node == "head":
            (node,) = (one["NodeID"] for one in ray.nodes() if "node:__internal_head__" in one["Resources"])
        task = ray.remote(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))(stopped)
        code, output = ray.get(task.remote(folder, name, workers))
        print(output, file=sys.stderr)
        sys.exit(code)


def stopped(*arguments) -> tuple[int, str]:
    """Runs `train`, which is ended; returns (exit code, output)."""
    import raytf

    try:
        train(*arguments)
    except raytf.StoppedError as error:
        return error.code, str(error)
    return 0, ""


def train(folder: str, name: str, workers: int | tuple[int, int]) -> None:
    import ray.tune

    import raytf

    elastic = isinstance(workers, tuple)
    trainer = raytf.KerasTrainer(
        models.mlp,
        config={
            "batch_size": 7,
            "epochs": 3,
            "dropout": 0.0 if elastic else 0.2,
            "place": f"{folder}/{name}",
            "workers": 1 if elastic else workers,
        },
        datasets={"train": models.dataset(), "validation": models.dataset(41, 1)},
        features=models.FEATURES,
        labels="label",
        callbacks=noting,
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            name=name, storage_path=folder, failure_config=ray.train.FailureConfig(max_failures=int(elastic))
        ),
        progress=False,
        checkpoint_every="epoch" if elastic else "auto",
    )
    if name == "trial":
        raytf.sweep(trainer, {"dropout": ray.tune.grid_search([0.2])}, metric="loss", progress=False)
    else:
        trainer.fit().metrics_dataframe.to_json(f"{folder}/{name}.json", orient="records")


if __name__ == "__main__":
    least, _, most = sys.argv[3].partition("-")
    main(sys.argv[1], sys.argv[2], (int(least), int(most)) if most else int(least), *sys.argv[4:])
