"""What the benchmarks share: the machine in a line, a process of its own for each measurement, a table."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_ANSWER = "answer: "


def parser(text: str) -> argparse.ArgumentParser:
    """The arguments of every benchmark."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--smoke", action="store_true", help="small and once, to see that everything runs")
    made.add_argument("--repeats", type=int, default=5, help="measurements of each alternative; the median counts")
    made.add_argument("--json", metavar="FILE", help="write the figures there, too")
    return made


def machine() -> str:
    """This machine and its versions in a line."""
    from importlib.metadata import version

    with open("/proc/meminfo") as file:
        gib = int(file.readline().split()[1]) / 2**20
    versions = ", ".join(f"{name} {version(name)}" for name in ("tensorflow", "keras", "ray", "pyarrow"))
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cores} cores ({platform.machine()}), {gib:.0f} GiB, no GPU; Python {platform.python_version()}, {versions}"
    )


@contextlib.contextmanager
def ray_cluster(cpus: int = 4, store_bytes: int | None = None):
    """A Ray of this benchmark's own; gives the address for `measure`."""
    import logging

    import ray

    context = ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=store_bytes,
    )
    try:
        yield context.address_info["address"]
    finally:
        ray.shutdown()


def connect(address: str) -> None:
    """Connects this process to a Ray that runs; nothing but errors is printed."""
    import logging

    import ray
    from ray.data import DataContext

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)


def small_cnn(keras) -> list:
    """Layers of a convolutional network of 0.12 million parameters for images of 28 x 28."""
    layers = keras.layers
    return [
        keras.Input((28, 28, 1)),
        layers.Conv2D(16, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(128, activation="relu"),
        layers.Dense(10),
    ]


def vectors(rows: int, width: int):
    """A Ray Dataset of float32 vectors "x" and labels "y" from 0 to 9."""
    import numpy as np
    import pyarrow as pa
    import ray

    rng = np.random.default_rng(0)
    x = pa.FixedShapeTensorArray.from_numpy_ndarray(rng.normal(size=(rows, width)).astype("float32"))
    return ray.data.from_arrow(pa.table({"x": x, "y": pa.array(rng.integers(0, 10, rows))}))


def count_rows(dataset) -> int:
    """Rows of a `tf.data` dataset of (features, labels), counted in TensorFlow's graph, as `fit` takes them."""
    import tensorflow as tf

    return int(dataset.reduce(tf.constant(0, tf.int64), lambda n, batch: n + tf.shape(batch[1], tf.int64)[0]))


def measure(script: str, *arguments: str, environment: Mapping[str, str] | None = None, timeout: int = 600) -> Any:
    """Runs `script` with `arguments` in a new process, and gives back what it hands to `give`.

    Raises:
        RuntimeError: the process failed; contains the end of its output.
    """
    return run_together([[sys.executable, script, *arguments]], [dict(environment or {})], timeout)[0]


def free_addresses(count: int) -> list[str]:
    """So many "host:port" of this machine at which nobody listens."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    return addresses


def measure_group(
    script: str, *arguments: str, workers: int, environment: Mapping[str, str] | None = None, together: bool = True
) -> list:
    """`measure` in `workers` processes, which know each other by a hand-set TF_CONFIG if `together`; all answers."""
    from raytf.runtime.topology import tf_config

    addresses = free_addresses(workers)
    environments = [dict(environment or {}) for _ in range(workers)]
    if workers > 1 and together:
        for rank, own in enumerate(environments):
            own["TF_CONFIG"] = tf_config({"worker": addresses}, "worker", rank)
    return run_together([[sys.executable, script, *arguments]] * workers, environments, 600)


def environment(own: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables of a process that is measured: no GPU, this tree first, and `own` above all."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    variables = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    variables["PYTHONPATH"] = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    return {**os.environ, **variables, **(own or {})}


def run_together(commands: list[list[str]], environments: list[dict[str, str]], timeout: int) -> list:
    """Runs commands at the same time; what each hands to `give`."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [
        subprocess.Popen(command, env=environment(own), **pipes)
        for command, own in zip(commands, environments, strict=True)
    ]
    try:
        with ThreadPoolExecutor(len(processes)) as pool:  # a pipe that nobody reads would stop its process
            texts = list(pool.map(lambda process: process.communicate(timeout=timeout)[0], processes))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = []
    for process, text, command in zip(processes, texts, commands, strict=True):
        answers = [line for line in text.splitlines() if line.startswith(_ANSWER)]
        if process.returncode or not answers:
            raise RuntimeError(f"{' '.join(command)} failed:\n{text[-4000:]}")
        found.append(json.loads(answers[-1].removeprefix(_ANSWER)))
    return found


def give(value: Any) -> None:
    """In a process that `measure` started: hands back a value that JSON can hold."""
    print(_ANSWER + json.dumps(value), flush=True)


def memory(pid: int | str = "self") -> dict[str, int]:
    """Bytes of a process: with what it shares, and of its own alone."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in list(file)[1:])}
    return {"rss": kib["Rss"] << 10, "own": kib["Private_Clean"] + kib["Private_Dirty"] << 10}


def spread(values: Iterable[float]) -> tuple[float, float, float]:
    """Median, least and most."""
    values = sorted(values)
    return statistics.median(values), values[0], values[-1]


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table below its title and the machine."""
    text = [[_cell(value) for value in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in text) for i in range(len(head))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in text]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join([f"### {title}", "", machine(), "", *lines, ""])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def finish(options: argparse.Namespace, name: str, shown: str, figures: Any) -> None:
    """Prints the table, and writes the figures to the file of `--json`."""
    print(shown)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"benchmark": name, "machine": machine(), "table": shown, "figures": figures}, file, indent=1)
