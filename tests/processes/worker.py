"""One TensorFlow process of a parity test: runs scenarios and writes what each returned, or how it failed."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import traceback


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--communication", default="auto")
    parser.add_argument("--place", required=True, help="a number of processes, or a strategy of two devices in one")
    options = parser.parse_args()
    task = json.loads(os.environ.get("TF_CONFIG", "{}"))
    rank = task.get("task", {}).get("index", 0)
    world = len(task.get("cluster", {}).get("worker", [None]))

    from raytf.compat.fast_import import import_keras

    import_keras()
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    if not options.place.isdigit():
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    import keras

    from raytf.collectives import ring
    from raytf.runtime.settings import TensorflowConfig, WorkerSetup
    from raytf.worker import context
    from tests.processes.optimizer_scenarios import SCENARIOS
    from tests.processes.scenarios import Place

    ring.keep_token(bytes(ring.TOKEN_BYTES))  # what starts processes gives them one; here nobody is to be kept out
    with context.prepared(WorkerSetup(config=TensorflowConfig(communication=options.communication))):
        distribution = tf.distribute.get_strategy()
        if world > 1:
            distribution = tf.distribute.MultiWorkerMirroredStrategy()
        elif options.place == "mirrored":
            distribution = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        elif options.place == "central_storage":
            distribution = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
        keras.config.set_floatx(options.dtype)
        place = Place(distribution, rank, world, options.folder)
        run(options, place, SCENARIOS, keras)


def run(options, place, scenarios, keras):
    for name in options.only or scenarios:
        path = os.path.join(options.folder, f"{name}.{options.dtype}.{options.place}.{place.rank}.pkl")
        try:
            result = scenarios[name](place)
        except Exception:
            result = traceback.format_exc()
            print(f"{name}: {result}", file=sys.stderr, flush=True)
        with open(path + ".tmp", "wb") as file:
            pickle.dump(result, file)
        os.replace(path + ".tmp", path)
        print(f"[{place.rank}] {name} done", flush=True)
        # without a look at every object for what may go: 0.1 s, and 0.5 s when many scenarios are behind
        keras.backend.clear_session(free_memory=False)


if __name__ == "__main__":
    main()
