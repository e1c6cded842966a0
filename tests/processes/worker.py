"""The TensorFlow processes of the parity tests: runs scenarios and writes what each returned, or how it failed.

python -m tests.processes.worker '[{"folder": FOLDER, "dtype": "float64", "place": "2", ...}, ...]' ...

The groups of a further argument start when those of the one before have ended.

TensorFlow is imported once; each process of a group is a fork of the one that has it. A group's folder gets a file for
each scenario and rank, a log for each rank, and `codes.json` when its processes have ended.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pathlib
import pickle
import random
import signal
import socket
import sys
import time
import traceback

# So many groups run at a time.
AT_ONCE = 2
# Above the ports of raytf's own workers, below those that Linux hands out by itself.
_PORTS = range(32_000, 32_700)
_claims: list[socket.socket] = []


# Where the scenarios of a group are, unless it names another module.
_SCENARIOS = "tests.processes.all_scenarios"


def main(stages: list[list[dict]]) -> None:
    from raytf.compat.fast_import import import_keras

    import_keras()
    for group in (group for groups in stages for group in groups):
        importlib.import_module(group.setdefault("module", _SCENARIOS))  # all that a fork is to have
    gc.freeze()  # what was imported stays: no fork is to look through it for what may go
    gc.set_threshold(20_000, 50, 100)  # graphs are full of circles: to look for what may go took 7 % of the time
    for groups in stages:
        _run_groups(groups)


def _run_groups(groups: list[dict]) -> None:
    waiting, running = list(groups), []
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(_Running(waiting.pop(0)))
        pid, status = os.wait()
        for group in running:
            group.ended(pid, os.waitstatus_to_exitcode(status))
        running = [group for group in running if group.left]


class _Running:
    """A group whose processes run; one that fails ends the others."""

    def __init__(self, group: dict):
        self._folder = pathlib.Path(group["folder"])
        addresses = [f"127.0.0.1:{port}" for port in free_ports(group["world"])]
        self.left = {_fork(group, rank, addresses): rank for rank in range(group["world"])}
        self._codes = {}

    def ended(self, pid: int, code: int) -> None:
        if pid not in self.left:
            return
        self._codes[self.left.pop(pid)] = code
        if code != 0:
            for other in self.left:
                os.kill(other, signal.SIGKILL)
        if not self.left:
            (self._folder / "codes.new").write_text(json.dumps(self._codes))
            (self._folder / "codes.new").rename(self._folder / "codes.json")


def free_ports(count: int) -> list[int]:
    """Different free ports of this machine, which no other process that asks here is given while this one lives."""
    found = []
    for port in random.sample(_PORTS, len(_PORTS)):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0raytf-tests/{port}")
        except OSError:
            claim.close()
            continue
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
        _claims.append(claim)
        if len(found) == count:
            return found
    raise AssertionError(f"fewer than {count} ports of {_PORTS} are free")


def _fork(group: dict, rank: int, addresses: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(os.path.join(group["folder"], f"log.{rank}"), os.O_WRONLY | os.O_CREAT, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        _be_one_of(group, rank, addresses)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _be_one_of(group: dict, rank: int, addresses: list[str]) -> None:
    import keras
    import tensorflow as tf

    from raytf.collectives import ring_token
    from raytf.runtime.settings import TensorflowConfig, WorkerSetup
    from raytf.runtime.topology import tf_config
    from raytf.timeouts import Timeouts
    from raytf.worker import context
    from tests.processes.scenarios import Place

    world = len(addresses)
    if world > 1:
        os.environ["TF_CONFIG"] = tf_config({"worker": addresses}, "worker", rank)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    if not group["place"].isdigit():
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    # what starts processes gives them one; here nobody is to be kept out
    ring_token.keep_token(bytes(ring_token.TOKEN_BYTES))
    with context.prepared(
        WorkerSetup(
            config=TensorflowConfig(**{"communication": group["communication"]} | group.get("config", {})),
            timeouts=Timeouts().scaled(5),  # the machine may be busy
        )
    ):
        distribution = tf.distribute.get_strategy()
        if world > 1:
            distribution = tf.distribute.MultiWorkerMirroredStrategy()
        elif group["place"] == "mirrored":
            distribution = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        elif group["place"] == "central_storage":
            distribution = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
        keras.config.set_floatx(group["dtype"])
        _run(group, Place(distribution, rank, world, group["folder"]))


def _run(group: dict, place) -> None:
    scenarios = importlib.import_module(group["module"]).SCENARIOS
    for name in group["scenarios"]:
        path = os.path.join(place.folder, f"{name}.{place.rank}.pkl")
        began = time.process_time()
        try:
            result = scenarios[name](place)
        except Exception:
            result = traceback.format_exc()
            print(f"{name}: {result}", file=sys.stderr, flush=True)
        with open(path + ".tmp", "wb") as file:
            pickle.dump(result, file)
        os.replace(path + ".tmp", path)
        print(f"[{place.rank}] {name} done, {time.process_time() - began:.1f} s of a processor", flush=True)


if __name__ == "__main__":
    main([json.loads(groups) for groups in sys.argv[1:]])
