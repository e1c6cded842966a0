"""What the benchmarks share: the machine in a line, a process of its own for each measurement, a table."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
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


def measure(script: str, *arguments: str, environment: Mapping[str, str] | None = None, timeout: int = 600) -> Any:
    """Runs `script` with `arguments` in a new process, and gives back what it hands to `give`.

    Raises:
        RuntimeError: the process failed; says the end of what it printed.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    variables = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    variables["PYTHONPATH"] = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env={**os.environ, **variables, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    if done.returncode or not answers:
        raise RuntimeError(f"{script} {' '.join(arguments)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return json.loads(answers[-1].removeprefix(_ANSWER))


def give(value: Any) -> None:
    """In a process that `measure` started: hands back a value that JSON can hold."""
    print(_ANSWER + json.dumps(value), flush=True)


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
    """Prints the table, and writes the figures where `--json` says."""
    print(shown)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"benchmark": name, "machine": machine(), "table": shown, "figures": figures}, file, indent=1)
