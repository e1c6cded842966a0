"""A page about a sweep: trials, learning curves, batch size against learning rate, parallel coordinates."""

from __future__ import annotations

import collections
import fnmatch
import html
import math
import os
import posixpath
import re
from dataclasses import dataclass
from typing import Any

from pyarrow import fs

from raytf.errors import ConfigError, first_line, one_line
from raytf.storage import stored_json
from raytf.train import run_list
from raytf.tune import charts, pages, run_report

SETTINGS = run_list.SWEEP
# Tune's line before each failure of a trial.
_FAILURE = re.compile(r"^Failure # \d+ \(occurred at .*\)$", re.MULTILINE)
# Largest number of values that an axis shows as its ticks.
_TICKS = 8
_AXES = ("batch_size", "learning_rate")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A trial of a sweep.

    Args:
        name: Its id.
        config: Its config.
        value: The metric at its last report, or None.
        curve: The metric at each report.
        error: The first line of its error, or "".
        seconds: Its duration in seconds, or None.
        throughput: Throughput of its steps as text, or "".
        end: Why it ended, as text.
    """

    name: str
    config: dict[str, Any]
    value: float | None
    curve: list[float]
    error: str
    seconds: float | None = None
    throughput: str = ""
    end: str = ""


def absolute_folder(folder: str | os.PathLike) -> str:
    """Returns a sweep's folder in Ray's notation: a URI unchanged, else an absolute path."""
    folder = os.fspath(folder)
    return folder if "://" in folder else os.path.abspath(os.path.expanduser(folder))


def read_settings(folder: str | os.PathLike) -> dict[str, Any]:
    """Returns the settings that `raytf.sweep` stored next to the trials: metric, mode, learning rate scaling.

    Args:
        folder: Path or URI of a sweep's folder.

    Raises:
        ConfigError: The folder is not a sweep's folder.
    """
    path = absolute_folder(folder)
    if "://" not in path and not os.path.isdir(path):
        raise ConfigError("A sweep is named by its folder", f"{os.fspath(folder)!r} (no such folder)", "Check the path")
    filesystem, root = fs.FileSystem.from_uri(path)
    path = f"{root}/{SETTINGS}"
    if filesystem.get_file_info(path).type != fs.FileType.File:
        raise ConfigError(
            f"The folder of a sweep holds {SETTINGS}", repr(str(folder)), "Name the folder that raytf.sweep printed"
        )
    try:
        return stored_json.read_object(filesystem, path)
    except stored_json.UnreadableError as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: str, why: str) -> ConfigError:
    return ConfigError(
        "A report is made from files that are what the sweep wrote",
        f"{path!r}, which {why}",
        "Bring it back from a copy, or run the sweep again",
    )


def read_entries(folder: str | os.PathLike, metric: str) -> list[Entry]:
    """Returns the trials of a sweep's folder from Tune's JSON; unpickles nothing.

    Raises:
        ConfigError: The folder is not a sweep's folder, or its files are damaged.
    """
    filesystem, root = fs.FileSystem.from_uri(absolute_folder(folder))
    files = filesystem.get_file_info(fs.FileSelector(root))
    states = sorted(f.path for f in files if fnmatch.fnmatch(f.base_name, "experiment_state-*.json"))
    if not states:
        raise ConfigError(
            "The folder of a sweep holds Tune's experiment_state-....json",
            repr(str(folder)),
            "Name the folder that raytf.sweep printed",
        )

    try:
        trials = [
            stored_json.parse_object(text) for text, _ in stored_json.read_object(filesystem, states[-1])["trial_data"]
        ]
        return [_entry(filesystem, root, trial, metric) for trial in trials]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _damaged(states[-1], f"is no state of Tune's: {one_line(error)}") from error


def _entry(filesystem, folder: str, trial: dict[str, Any], metric: str) -> Entry:
    trial_path = posixpath.join(folder, posixpath.basename(trial["relative_logdir"] or "-"))

    def read(name: str) -> bytes:
        try:
            return stored_json.read_bytes(filesystem, f"{trial_path}/{name}")
        except stored_json.UnreadableError as error:
            if error.missing:
                return b""
            raise _damaged(f"{trial_path}/{name}", str(error)) from error

    try:
        reports = [_flat(stored_json.parse_object(line)) for line in read("result.json").splitlines()]
        curve = [float(r[metric]) for r in reports if r.get(metric) is not None]
    except (ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _damaged(f"{trial_path}/result.json", f"holds a report that {error}") from error
    failure = first_line(_FAILURE.split(read("error.txt").decode(errors="replace"))[-1])
    return Entry(
        seconds=_seconds(reports),
        throughput=_throughput(reports, trial["config"]),
        end=_end(trial.get("status"), reports, failure),
        name=trial["trial_id"],
        config={k: "..." if _is_pickled(v) else v for k, v in trial["config"].items()},
        value=curve[-1] if curve else None,
        curve=curve,
        error=failure,
    )


def _seconds(reports: list[dict[str, Any]]) -> float | None:
    durations = [report["time_total_s"] for report in reports if charts.is_finite(report.get("time_total_s"))]
    return max(durations, default=None)


def _throughput(reports: list[dict[str, Any]], config: dict[str, Any]) -> str:
    """Returns the throughput of the epochs after the first, which compiles; of the first if there is no other."""
    known = [r for r in reports if charts.is_finite(r.get("epoch")) and charts.is_finite(r.get("time_total_s"))]
    if not known or not charts.is_finite(known[-1].get("steps_per_epoch")):
        return ""
    first = known[0] if known[-1]["epoch"] > known[0]["epoch"] else {"epoch": 0, "time_total_s": 0.0}
    seconds = known[-1]["time_total_s"] - first["time_total_s"]
    steps = (known[-1]["epoch"] - first["epoch"]) * known[-1]["steps_per_epoch"]
    if seconds <= 0 or steps <= 0:
        return ""
    batch = config.get("batch_size")
    if charts.is_finite(batch):
        return f"{steps * batch / seconds:,.0f} examples/s"
    return f"{steps / seconds:,.3g} steps/s"


def _end(status: Any, reports: list[dict[str, Any]], failure: str) -> str:
    """Returns why a trial ended. Tune marks the last report of a trial that it stops; others have one more report."""
    if status == "TERMINATED":
        return "stopped by the scheduler" if reports and reports[-1].get("done") else "came to its end"
    if status == "ERROR" or (status is None and failure):
        return "failed"
    known = {"RUNNING": "was running", "PAUSED": "was paused", "PENDING": "has not begun"}
    return known.get(status, "")


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flattened: dict[str, Any] = {}
    for name, value in values.items():
        flattened |= _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value}
    return flattened


def _is_pickled(value) -> bool:
    return isinstance(value, dict) and value.get("_type") == "CLOUDPICKLE_FALLBACK"


def write_report(folder: str, output: str) -> None:
    """Writes the page about a sweep, or about a single run.

    Args:
        folder: Path or URI of either.
        output: Path of the output file.

    Raises:
        ConfigError: The folder is of neither, or its content was not written by one.
    """
    if not os.path.isdir(os.path.dirname(os.path.abspath(output))):
        raise ConfigError("The page is written into a folder that exists", repr(output), "Make the folder")
    written = output if os.path.lexists(output) else os.path.dirname(os.path.abspath(output))
    if os.path.isdir(output) or not os.access(written, os.W_OK):
        raise ConfigError(
            "The page is written to a file that this process may write", repr(output), "Choose another path"
        )
    filesystem, path = run_list.located(folder)
    if run_list.SWEEP in {info.base_name for info in filesystem.get_file_info(fs.FileSelector(path))}:
        known = read_settings(folder)
        made = page(str(folder), known["metric"], known["mode"], read_entries(folder, known["metric"]))
    else:
        made = run_report.page(filesystem, path, str(folder))
    with open(output, "w", encoding="utf-8") as file:
        file.write(made)


def page(folder: str, metric: str, mode: str, trials: list[Entry]) -> str:
    """Returns the HTML page. Escapes the user's names and values.

    Args:
        folder: The sweep's folder, for the headline.
        metric, mode: The comparison of trials.
        trials: Trials in any order, with or without reports.
    """
    sign = 1 if mode == "min" else -1
    good = sorted((t for t in trials if charts.is_finite(t.value)), key=lambda t: sign * t.value)
    unreported = [t for t in trials if not charts.is_finite(t.value)]
    drawn = [_curves(good, unreported, metric), _batch_and_rate(good, metric)]
    body = pages.headline("Sweep", posixpath.basename(folder.rstrip("/")), folder)
    body += _summary(metric, mode, good, unreported) + pages.section("Learning curves", pages.charts(drawn))
    body += pages.section("Parallel coordinates", _parallel(good, metric))
    body += pages.section("Trials", _table(good, unreported, metric))
    return pages.page(f"Sweep {folder}", body)


def _summary(metric: str, mode: str, good: list[Entry], others: list[Entry]) -> str:
    trials = good + others
    ends = collections.Counter(t.end for t in trials if t.end)
    pairs = [("trials", str(len(trials))), *((end, str(count)) for end, count in ends.most_common())]
    spent = [t.seconds for t in trials if t.seconds is not None]
    pairs += [("time of all trials", pages.format_duration(sum(spent)))] if spent else []
    if good:
        pairs.insert(0, (f"best {metric} ({mode})", f"{good[0].value:.6g}"))
        config = ", ".join(f"{k} = {pages.format_value(v)}" for k, v in good[0].config.items())
        return pages.facts(pairs) + f"<p>Best: <b>{html.escape(good[0].name)}</b> with {html.escape(config)}</p>"
    return pages.facts(pairs)


def _table(good: list[Entry], others: list[Entry], metric: str) -> str:
    trials = good + others
    names = list(map(str, dict.fromkeys(name for t in trials for name in t.config)))
    rows = [
        [
            t.name,
            *(pages.format_value(t.config.get(n, "")) for n in names),
            pages.format_value(t.value),
            str(len(t.curve)),
            pages.format_duration(t.seconds),
            t.throughput,
            ": ".join(part for part in (t.end, t.error) if part),
        ]
        for t in trials
    ]
    columns = ["trial", *names, metric, "reports", "time", "throughput", "end"]
    return pages.table(columns, rows, texts=(0, len(columns) - 1), best=bool(good))


def _hover_text(trial: Entry) -> str:
    return "\n".join(f"{k} = {pages.format_value(v)}" for k, v in trial.config.items())


def _label(trial: Entry) -> str:
    """Returns a trial's name in a legend, with its config."""
    return (
        f"{trial.name}: {', '.join(f'{k}={pages.format_value(v)}' for k, v in trial.config.items())}"
        if trial.config
        else trial.name
    )


def _curves(good: list[Entry], others: list[Entry], metric: str) -> str | None:
    """Draws the curves: the best trials have colours and names; others are grey, with a tooltip."""
    series = []
    for n, trial in enumerate(good + others):
        named = n < len(charts.COLORS)
        series.append(
            charts.Series(
                name=_label(trial) if named else trial.name,
                x=range(1, len(trial.curve) + 1),
                y=trial.curve,
                width=3.0 if n == 0 and good else 1.8 if named else 1.0,
                dotted=not charts.is_finite(trial.value),
                detail=_hover_text(trial),
                named=named,
            )
        )
    return charts.line_chart(series, "report", metric)


def _ranks(good: list[Entry]) -> list[float]:
    """Returns colours of ordered trials by rank, as an outlier would leave no difference between the others."""
    return [1.0 if len(good) == 1 else 1 - i / (len(good) - 1) for i in range(len(good))]


def _batch_and_rate(good: list[Entry], metric: str) -> str | None:
    points = []
    for trial, value in zip(good, _ranks(good), strict=True):
        batch, rate = map(trial.config.get, _AXES)
        if all(charts.is_finite(v) and v > 0 for v in (batch, rate)):
            detail = f"{trial.name}\n{metric} = {pages.format_value(trial.value)}\n{_hover_text(trial)}"
            points.append(charts.Point(x=batch, y=rate, value=value, detail=detail))
    return charts.scatter_chart(points, "batch size (global)", "learning rate", metric)


def _parallel(good: list[Entry], metric: str) -> str:
    names = list(dict.fromkeys(name for t in good for name in t.config))
    names = [name for name in names if len({pages.format_value(t.config.get(name)) for t in good}) > 1]
    if not names:
        return ""
    axes = [_axis(str(name), [t.config.get(name) for t in good]) for name in names]
    axes.append(_axis(metric, [t.value for t in good]))
    details = [f"{t.name}\n{metric} = {pages.format_value(t.value)}\n{_hover_text(t)}" for t in good]
    return charts.parallel_chart(axes, _ranks(good), details)


def _axis(name: str, values: list) -> charts.Axis:
    """Returns an axis of parallel coordinates: logarithmic beyond a factor of 10, by order for texts."""
    if not all(map(charts.is_finite, values)):
        order = sorted({pages.format_value(v) for v in values})
        position = {text: 0.5 if len(order) == 1 else i / (len(order) - 1) for i, text in enumerate(order)}
        ticks = [(position[text], text) for text in order]
        return charts.Axis(
            label=name, positions=[position[pages.format_value(v)] for v in values], ticks=_thin_ticks(ticks)
        )
    log = min(values) > 0 and max(values) / min(values) > 10
    scaled = [math.log10(v) for v in values] if log else [float(v) for v in values]
    low, high = min(scaled), max(scaled)
    scale = lambda v: 0.5 if high == low else (v - low) / (high - low)
    marks = sorted(set(scaled))
    marks = marks if len(marks) <= _TICKS else [low + (high - low) * i / 4 for i in range(5)]
    ticks = [(scale(mark), charts.format_number(10**mark if log else mark)) for mark in marks]
    return charts.Axis(label=name, positions=[scale(v) for v in scaled], ticks=ticks)


def _thin_ticks(ticks: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Reduces the ticks to those that fit on an axis."""
    stride = math.ceil(len(ticks) / (2 * _TICKS))
    return ticks[::stride]
