"""Starts real TensorFlow processes with a TF_CONFIG of their own and waits for them."""

from __future__ import annotations

import os
import pathlib
import random
import socket
import subprocess
import sys

from raytf.runtime.topology import tf_config

# Above the ports of raytf's own workers, below those that Linux hands out by itself.
_PORTS = range(32_000, 32_700)


def free_ports(count):
    """Different free ports of this machine."""
    found = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"fewer than {count} ports of {_PORTS} are free")


def run_group(world, command, folder, timeout=600, env=None, behind=False, running=None, python=sys.executable):
    """Runs `python *command` once for each of `world` workers; returns their logs, and raises if one failed.

    `python` is that of this environment unless another is given.

    With `behind`, all else on the machine goes before it. The processes are in the set `running` as long as they run.
    """
    addresses = [f"127.0.0.1:{port}" for port in free_ports(world)]
    processes, logs = [], []
    for rank in range(world):
        own = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", **(env or {})}
        own.pop("TF_CONFIG", None)
        if world > 1:
            own["TF_CONFIG"] = tf_config({"worker": addresses}, "worker", rank)
        logs.append(os.path.join(folder, f"log.{world}.{rank}"))
        with open(logs[-1], "a") as log:
            processes.append(subprocess.Popen([python, *command], env=own, stdout=log, stderr=log))
        if behind:
            # Ray lowers the priority of its workers, so that a nice value would hardly be behind them
            os.sched_setscheduler(processes[-1].pid, os.SCHED_IDLE, os.sched_param(0))
    running = set() if running is None else running
    running.update(processes)
    try:
        codes = [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        running.difference_update(processes)
    texts = [pathlib.Path(log).read_text() for log in logs]
    if any(codes):
        raise AssertionError(f"exit codes {codes}\n" + "\n".join(text[-4000:] for text in texts))
    return texts
