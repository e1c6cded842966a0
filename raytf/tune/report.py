"""A page about a sweep: its trials, their learning curves, batch size against learning rate, parallel coordinates.

The pictures are plotly's, with plotly.js within the page, so that it opens without a network.
"""

from __future__ import annotations

import fnmatch
import html
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
th { border-bottom: 1px solid #888; } .trials td:last-child { text-align: left; }
.best-first tbody tr:first-child { background: #e7f2e4; }
"""
# An axis with no more values than these has them as its ticks.
_TICKS = 8
_AXES = ("batch_size", "learning_rate")


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
    found: dict[str, Any] = {}
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
        ConfigError: the folder is not that of a sweep, or what is in it was not written by one.
    """
    if not os.path.isdir(os.path.dirname(os.path.abspath(output))):
        raise ConfigError("The page is written into a folder that exists", repr(output), "Make the folder")
    known = settings(folder)
    made = page(str(folder), known["metric"], known["mode"], entries(folder, known["metric"]))
    with open(output, "w", encoding="utf-8") as file:
        file.write(made)


def page(folder: str, metric: str, mode: str, trials: list[Entry]) -> str:
    """The page in HTML. What the user's names and values hold is shown as text, whatever it is.

    Args:
        folder: of the sweep, for the headline.
        metric, mode: that trials are compared by.
        trials: in any order, with or without reports.
    """
    from plotly.offline import get_plotlyjs

    sign = 1 if mode == "min" else -1
    good = sorted((t for t in trials if _finite(t.value)), key=lambda t: sign * t.value)
    rest = [t for t in trials if not _finite(t.value)]
    figures = {title: draw(good, rest, metric, mode) for title, draw in _PICTURES.items()}
    shown = "".join(_section(title, figure) for title, figure in figures.items() if figure is not None)
    script = f"<script>{get_plotlyjs()}</script>" if shown else ""
    head = f"<meta charset='utf-8'><title>Sweep</title><style>{_STYLE}</style>{script}"
    body = f"{_summary(folder, metric, good, rest)}{shown}<h2>Trials</h2>{_table(good, rest, metric)}"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>\n"


def _finite(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _summary(folder: str, metric: str, good, rest) -> str:
    text = f"<h1>Sweep</h1><p>{html.escape(folder)}: {len(good) + len(rest)} trials</p>"
    if good:
        config = ", ".join(f"{k} = {_shown(v)}" for k, v in good[0].config.items())
        text += f"<p><b>Best {html.escape(metric)}: {good[0].value:.6g}</b> with {html.escape(config)}</p>"
    return text


def _section(title: str, figure) -> str:
    figure.update_layout(template="plotly_white", height=460, margin={"t": 45, "r": 40, "b": 60, "l": 80})
    name = title.lower().replace(" ", "-")
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config={"displaylogo": False})
    return f"<h2>{title}</h2>{drawn}"


def _table(good, rest, metric: str) -> str:
    import pandas as pd

    names = _names(good + rest)
    rows = [
        [t.name, *(_shown(t.config.get(n, "")) for n in names), _shown(t.value), str(len(t.curve)), t.error]
        for t in good + rest
    ]
    table = pd.DataFrame(rows, columns=["trial", *map(str, names), metric, "reports", ""])
    with pd.option_context("display.max_colwidth", None):
        return table.to_html(index=False, border=0, classes="trials best-first" if good else "trials")


def _names(trials) -> list[str]:
    return list(dict.fromkeys(name for t in trials for name in t.config))


def _shown(value) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _short(value, length: int = 24) -> str:
    text = _shown(value)
    return text if len(text) <= length else text[: length - 1] + "…"


def _label(value, length: int = 60) -> str:
    """A text for a picture: plotly would take a few tags and entities of HTML for what they say."""
    return html.escape(_short(value, length), quote=False)


def _hover(trial: Entry) -> str:
    return "<br>".join([_label(trial.name), *(f"{_label(k)} = {_label(v)}" for k, v in trial.config.items())])


def _batch_and_rate(good, rest, metric, mode):
    import plotly.express as px

    points = [t for t in good if all(_finite(v) and v > 0 for v in map(t.config.get, _AXES))]
    if not points:
        return None
    batch, rate = ([t.config[name] for t in points] for name in _AXES)
    figure = px.scatter(
        {"x": batch, "y": rate, "color": [t.value for t in points], "trial": [_hover(t) for t in points]},
        x="x",
        y="y",
        color="color",
        hover_name="trial",
        log_x=True,
        log_y=True,
        labels={"x": "batch size (global)", "y": "learning rate", "color": _label(metric)},
        color_continuous_scale=_colors(mode),
    )
    figure.update_traces(marker={"size": 12, "line": {"width": 0.5, "color": "#333"}})
    if len(set(batch)) <= _TICKS:
        figure.update_xaxes(tickvals=sorted(set(batch)))
    return figure


def _curves(good, rest, metric, mode):
    import plotly.graph_objects as go

    longest = max((len(t.curve) for t in good + rest), default=0)
    reports = {"title": "report", "tick0": 1, "dtick": max(1, round(longest / 10))}
    figure = go.Figure(layout={"xaxis": reports, "yaxis_title": _label(metric), "showlegend": False})
    for trial in reversed(good + rest):
        if not any(map(_finite, trial.curve)):
            continue
        best = bool(good) and trial is good[0]
        line = {"color": "#2a7f2a" if best else "#9aa5b1", "width": 2.5 if best else 1}
        figure.add_scatter(
            x=list(range(1, len(trial.curve) + 1)),
            y=trial.curve,
            mode="lines" if len(trial.curve) > 1 and all(map(_finite, trial.curve)) else "lines+markers",
            line=line | {"dash": "solid" if _finite(trial.value) else "dot"},
            name=_label(trial.name),
            hovertext=_hover(trial),
            hoverinfo="y+text",
        )
    return figure if figure.data else None


def _parallel(good, rest, metric, mode):
    import plotly.graph_objects as go

    names = [name for name in _names(good) if len({_shown(t.config.get(name)) for t in good}) > 1]
    if not names:
        return None
    values = [t.value for t in good]
    axes = [_axis(name, [t.config.get(name) for t in good]) for name in names] + [_axis(metric, values)]
    line = {"color": values, "colorscale": _colors(mode), "showscale": True, "colorbar": {"title": _label(metric)}}
    width = 125 * len(axes) if len(axes) > _TICKS else None
    return go.Figure(go.Parcoords(dimensions=axes, line=line), layout={"width": width})


def _axis(name: str, values: list) -> dict[str, Any]:
    """An axis of parallel coordinates: by logarithm over more than a power of ten, by order for what is no number."""
    label = _label(name, 24)
    if not all(map(_finite, values)):
        order = sorted({_shown(v) for v in values})
        texts = [_short(text) for text in order]  # plain text here, unlike labels
        places = [order.index(_shown(v)) for v in values]
        return {"label": label, "values": places, "tickvals": list(range(len(order))), "ticktext": texts}
    low, high = min(values), max(values)
    marks = sorted(set(values))
    if low > 0 and high / low > 10:
        marks = marks if len(marks) <= _TICKS else [low * (high / low) ** (i / 4) for i in range(5)]
        values, places = [math.log10(v) for v in values], [math.log10(v) for v in marks]
    elif len(marks) <= _TICKS:
        places = marks
    else:
        return {"label": label, "values": values}
    return {"label": label, "values": values, "tickvals": places, "ticktext": [f"{v:.3g}" for v in marks]}


def _colors(mode: str) -> str:
    return "Viridis_r" if mode == "min" else "Viridis"


_PICTURES = {
    "Batch size and learning rate": _batch_and_rate,
    "Learning curves": _curves,
    "Parallel coordinates": _parallel,
}
