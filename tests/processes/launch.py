"""Starts real TensorFlow processes with a TF_CONFIG of their own and waits for them."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

from raytf.topology import tf_config


def free_ports(count):
    """Different free ports of this machine."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def run_group(world, command, folder, timeout=600, env=None):
    """Runs `python *command` once for each of `world` workers; returns their logs, and raises if one failed."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(world)]
    processes, logs = [], []
    for rank in range(world):
        own = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", **(env or {})}
        own.pop("TF_CONFIG", None)
        if world > 1:
            own["TF_CONFIG"] = tf_config({"worker": addresses}, "worker", rank)
        logs.append(os.path.join(folder, f"log.{world}.{rank}"))
        with open(logs[-1], "a") as log:
            processes.append(subprocess.Popen([sys.executable, *command], env=own, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = [pathlib.Path(log).read_text() for log in logs]
    if any(codes):
        raise AssertionError(f"exit codes {codes}\n" + "\n".join(text[-4000:] for text in texts))
    return texts
