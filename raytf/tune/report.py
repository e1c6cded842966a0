"""A page about a sweep: its trials, their learning curves, batch size against learning rate, parallel coordinates.

The pictures are SVG within the page, so that it opens without a network.
"""

from __future__ import annotations

import fnmatch
import html
import io
import math
import os
import posixpath
import re
from dataclasses import dataclass
from typing import Any

from raytf.errors import ConfigError, first_line, in_a_line
from raytf.storage import stored_json

SETTINGS = "sweep.json"
# Tune's line before each failure of a trial.
_FAILURE = re.compile(r"^Failure # \d+ \(occurred at .*\)$", re.MULTILINE)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; color: #222; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem; text-align: right; }
th { border-bottom: 1px solid #888; } tr.best { background: #e7f2e4; } td.text { text-align: left; }
svg { max-width: 100%; height: auto; }
"""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A trial of a sweep.

    Args:
        name: its id.
        config: what was tried.
        value: the metric at its last report, or None.
        curve: the metric at each report.
        error: the first line of what went wrong, or "".
    """

    name: str
    config: dict[str, Any]
    value: float | None
    curve: list[float]
    error: str


def located(folder: str | os.PathLike) -> str:
    """A sweep's folder as Ray takes it: a URI as it is, a path from the root."""
    folder = os.fspath(folder)
    return folder if "://" in folder else os.path.abspath(os.path.expanduser(folder))


def settings(folder: str | os.PathLike) -> dict[str, Any]:
    """What `raytf.sweep` wrote beside the trials: metric, mode, scaling of the learning rate.

    Args:
        folder: of a sweep, a path or URI.

    Raises:
        ConfigError: the folder is not that of a sweep.
    """
    path = located(folder)
    if "://" not in path and not os.path.isdir(path):
        raise ConfigError("A sweep is named by its folder", f"{os.fspath(folder)!r} (no such folder)", "Check the path")
    from pyarrow import fs

    filesystem, where = fs.FileSystem.from_uri(path)
    path = f"{where}/{SETTINGS}"
    if filesystem.get_file_info(path).type != fs.FileType.File:
        raise ConfigError(
            f"The folder of a sweep holds {SETTINGS}", repr(str(folder)), "Name the folder that raytf.sweep printed"
        )
    try:
        return stored_json.fetched(filesystem, path)
    except stored_json.UnreadableError as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: str, why: str) -> ConfigError:
    return ConfigError(
        "A report is made from files that are what the sweep wrote",
        f"{path!r}, which {why}",
        "Bring it back from a copy, or run the sweep again",
    )


def entries(folder: str | os.PathLike, metric: str) -> list[Entry]:
    """The trials of a sweep's folder, from what Tune wrote as JSON; what it pickled within that stays as it is.

    Raises:
        ConfigError: the folder is not that of a sweep, or its files are not what was written.
    """
    from pyarrow import fs

    filesystem, where = fs.FileSystem.from_uri(located(folder))
    files = filesystem.get_file_info(fs.FileSelector(where))
    states = sorted(f.path for f in files if fnmatch.fnmatch(f.base_name, "experiment_state-*.json"))
    if not states:
        raise ConfigError(
            "The folder of a sweep holds Tune's experiment_state-....json",
            repr(str(folder)),
            "Name the folder that raytf.sweep printed",
        )

    try:
        trials = [stored_json.parsed(one) for one, _ in stored_json.fetched(filesystem, states[-1])["trial_data"]]
        return [_entry(filesystem, where, trial, metric) for trial in trials]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _damaged(states[-1], f"is no state of Tune's: {in_a_line(error)}") from error


def _entry(filesystem, where: str, trial: dict[str, Any], metric: str) -> Entry:
    place = posixpath.join(where, posixpath.basename(trial["relative_logdir"] or "-"))

    def read(name: str) -> bytes:
        try:
            return stored_json.content(filesystem, f"{place}/{name}")
        except stored_json.UnreadableError as error:
            if error.missing:
                return b""
            raise _damaged(f"{place}/{name}", str(error)) from error

    try:
        reports = [_flat(stored_json.parsed(line)) for line in read("result.json").splitlines()]
        curve = [float(r[metric]) for r in reports if r.get(metric) is not None]
    except (ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _damaged(f"{place}/result.json", f"holds a report that {error}") from error
    return Entry(
        name=trial["trial_id"],
        config={k: "..." if _is_pickled(v) else v for k, v in trial["config"].items()},
        value=curve[-1] if curve else None,
        curve=curve,
        error=first_line(_FAILURE.split(read("error.txt").decode(errors="replace"))[-1]),
    )


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        found |= _flat(value, f"{before}{name}/") if isinstance(value, dict) else {before + name: value}
    return found


def _is_pickled(value) -> bool:
    return isinstance(value, dict) and value.get("_type") == "CLOUDPICKLE_FALLBACK"


def write(folder: str, output: str) -> None:
    """Writes the page.

    Args:
        folder: of a sweep, a path or URI.
        output: file to write.

    Raises:
        ConfigError: the folder is not that of a sweep, or matplotlib is not installed.
    """
    if not os.path.isdir(os.path.dirname(os.path.abspath(output))):
        raise ConfigError("The page is written into a folder that exists", repr(output), "Make the folder")
    known = settings(folder)
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "A report is drawn with matplotlib", "an environment without it", "pip install matplotlib"
        ) from error
    matplotlib.use("Agg")
    metric, mode = known["metric"], known["mode"]
    trials = entries(folder, metric)
    sign = 1 if mode == "min" else -1
    good = sorted((t for t in trials if _finite(t.value)), key=lambda t: sign * t.value)
    rest = [t for t in trials if not _finite(t.value)]
    parts = [_summary(folder, metric, good, rest)]
    if good:
        parts += [_section(title, draw(good, metric, mode)) for title, draw in _PICTURES]
    parts.append(f"<h2>Trials</h2>{_trials(good + rest, metric)}")
    page = f"<!doctype html><meta charset='utf-8'><title>Sweep</title><style>{_STYLE}</style>{''.join(parts)}"
    with open(output, "w", encoding="utf-8") as file:
        file.write(page)


def _finite(value) -> bool:
    return value is not None and math.isfinite(value)


def _summary(folder: str, metric: str, good, rest) -> str:
    text = f"<h1>Sweep</h1><p>{html.escape(str(folder))}: {len(good) + len(rest)} trials</p>"
    if good:
        config = ", ".join(f"{k} = {_shown(v)}" for k, v in good[0].config.items())
        text += f"<p><b>Best {html.escape(metric)}: {good[0].value:.6g}</b> with {html.escape(config)}</p>"
    return text


def _section(title: str, figure) -> str:
    from matplotlib import pyplot

    if figure is None:
        return ""
    written = io.StringIO()
    figure.savefig(written, format="svg", bbox_inches="tight")
    pyplot.close(figure)
    svg = written.getvalue()
    return f"<h2>{title}</h2>{svg[svg.index('<svg') :]}"


def _trials(trials, metric: str) -> str:
    names = list(dict.fromkeys(name for t in trials for name in t.config))
    head = "".join(f"<th>{html.escape(str(n))}</th>" for n in ("trial", *names, metric, "reports", ""))
    rows = []
    for i, trial in enumerate(trials):
        cells = [trial.name, *(_shown(trial.config.get(n, "")) for n in names), _shown(trial.value), len(trial.curve)]
        row = "".join(f"<td>{html.escape(str(c))}</td>" for c in cells)
        best = " class='best'" if i == 0 and trial.value is not None else ""
        rows.append(f"<tr{best}>{row}<td class='text'>{html.escape(trial.error)}</td></tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _shown(value) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _batch_and_rate(trials, metric, mode):
    from matplotlib import pyplot

    points = [t for t in trials if {"batch_size", "learning_rate"} <= set(t.config)]
    if not points:
        return None
    figure, place = pyplot.subplots(figsize=(6.5, 4))
    shown = place.scatter(
        [t.config["batch_size"] for t in points],
        [t.config["learning_rate"] for t in points],
        c=[t.value for t in points],
        cmap=_map(mode),
        s=70,
        edgecolors="#333",
        linewidths=0.5,
    )
    place.set_xscale("log", base=2)
    place.set_yscale("log")
    place.set_xlabel("batch size (global)")
    place.set_ylabel("learning rate")
    figure.colorbar(shown, label=metric)
    return figure


def _curves(trials, metric, mode):
    from matplotlib import pyplot

    figure, place = pyplot.subplots(figsize=(6.5, 4))
    for trial in reversed(trials):
        best = trial is trials[0]
        steps = range(1, len(trial.curve) + 1)
        marker = "o" if len(trial.curve) == 1 else None
        place.plot(steps, trial.curve, color="#2a7f2a" if best else "#9aa5b1", lw=2 if best else 0.9, marker=marker)
    place.set_xlabel("report")
    place.set_ylabel(metric)
    return figure


def _parallel(trials, metric, mode):
    from matplotlib import pyplot

    names = [
        n
        for n in dict.fromkeys(k for t in trials for k in t.config)
        if len({_shown(t.config.get(n)) for t in trials}) > 1
    ]
    if not names:
        return None
    axes = [[t.config.get(name) for t in trials] for name in names] + [[t.value for t in trials]]
    places = [_scaled(values) for values in axes]
    figure, place = pyplot.subplots(figsize=(1.8 * len(axes) + 2, 4))
    colors = pyplot.get_cmap(_map(mode))
    for i in reversed(range(len(trials))):
        heights = [place_[i] for place_ in places]
        place.plot(range(len(axes)), heights, color=colors(places[-1][i]), lw=2.2 if i == 0 else 0.9, alpha=0.9)
    for x, values in enumerate(axes):
        place.axvline(x, color="#444", lw=0.8)
        shown = sorted({(p, _shown(v)) for p, v in zip(places[x], values, strict=True)})
        for p, text in (shown[0], shown[-1]) if len(shown) > 6 else shown:
            place.annotate(text, (x, p), xytext=(4, 0), textcoords="offset points", fontsize=8, va="center")
    place.set_xticks(range(len(axes)), [*names, metric])
    place.set_yticks([])
    for spine in place.spines.values():
        spine.set_visible(False)
    return figure


def _scaled(values) -> list[float]:
    """Heights from 0 to 1: by logarithm where numbers span more than a power of ten, by order where they are none."""
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
        order = sorted({str(v) for v in values})
        return [order.index(str(v)) / max(1, len(order) - 1) for v in values]
    low, high = min(values), max(values)
    if low > 0 and high / low > 10:
        values, low, high = [math.log(v) for v in values], math.log(low), math.log(high)
    return [(v - low) / (high - low) if high > low else 0.5 for v in values]


def _map(mode: str) -> str:
    return "viridis_r" if mode == "min" else "viridis"


_PICTURES = (
    ("Batch size and learning rate", _batch_and_rate),
    ("Learning curves", _curves),
    ("Parallel coordinates", _parallel),
)
