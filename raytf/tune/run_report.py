"""A page about a single run: curves, and its workers over time. Reads only JSON; needs no Ray."""

from __future__ import annotations

import dataclasses
import datetime
import posixpath
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyarrow.fs import FileSelector, FileType

from raytf import events
from raytf.errors import ConfigError
from raytf.events import Kind, RunEvent
from raytf.storage import stored_json
from raytf.storage.checkpoint_files import CheckpointState
from raytf.train import run_list
from raytf.tune import charts, pages
from raytf.worker.checkpoint_selector import StoredCheckpoint, list_checkpoints

# In a run's folder, see `worker/figures.py`.
_FIGURES = "figures"
_VALIDATION = "val_"
# Keys that each line of figures must have, by kind.
_NUMBERS = (
    *("rank", "workers", "pid", "epoch", "step", "time", "seconds", "steps"),
    *("examples_per_second", "step_seconds", "checkpoint_seconds"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFigures:
    """The content of a run's folder.

    Args:
        run: The run's state, as in a list of runs.
        state: State of its newest checkpoint, or None.
        checkpoints: The kept checkpoints with their bytes, newest first.
        figures: Lines of each worker, ordered by time.
        events: Events of the run, ordered by time.
    """

    run: run_list.ListedRun
    state: CheckpointState | None
    checkpoints: Sequence[tuple[StoredCheckpoint, int]]
    figures: Sequence[Mapping[str, Any]]
    events: Sequence[RunEvent]


def page(filesystem, path: str, folder: str) -> str:
    """Returns the HTML page.

    Args:
        filesystem, path: The run's folder.
        folder: The folder in the user's notation.

    Raises:
        ConfigError: The folder is not a run's folder.
    """
    return draw_page(read_run(filesystem, path, folder), folder)


def read_run(filesystem, path: str, folder: str) -> RunFigures:
    """Reads a run's folder; see `page`."""
    checkpoints = list_checkpoints(filesystem, path)
    figures = read_figures(filesystem, path)
    runs = run_list.listed(folder)
    if len(runs) != 1 or not (checkpoints or figures or run_list.has_begun(filesystem, path)):
        detail = f"; it holds {len(runs)} runs" if len(runs) > 1 else ""
        raise ConfigError(
            "A report is about the folder of a run or of a sweep",
            f"{folder!r}{detail}",
            "Name the folder that it printed at its start; `raytf runs DIR` lists those below a folder",
        )
    sizes = [(checkpoint, _bytes_of(filesystem, checkpoint.path)) for checkpoint in checkpoints]
    run_events = events.read_events(filesystem, path)
    state = run_list.newest(filesystem, path)
    return RunFigures(run=runs[0], state=state, checkpoints=sizes, figures=figures, events=run_events)


def read_figures(filesystem, path: str) -> list[dict[str, Any]]:
    """Returns the lines of all workers ordered by time; skips truncated or crafted lines."""
    folder = posixpath.join(path, _FIGURES)
    infos = filesystem.get_file_info(FileSelector(folder, allow_not_found=True))
    lines = []
    for info in infos:
        if info.type != FileType.File or not info.base_name.endswith(".jsonl"):
            continue
        try:
            texts = stored_json.read_bytes(filesystem, info.path).splitlines()
        except stored_json.UnreadableError:
            continue
        for text in texts:
            try:
                line = stored_json.parse_object(text)
            except stored_json.UnreadableError:  # a killed worker may leave its last line unfinished
                continue
            if all(charts.is_finite(line.get(name)) for name in _NUMBERS):
                lines.append(line)
    return sorted(lines, key=lambda line: (line["time"], line["rank"]))


def draw_page(figures: RunFigures, folder: str) -> str:
    """Returns the page for a run's content."""
    history = figures.state.history if figures.state is not None else []
    curves = [_metric_chart(history, name) for name in _metrics(history)]
    body = pages.headline("Run", figures.run.name, folder) + _summary(figures)
    body += pages.section("Learning curves", _remarks(history) + pages.charts(curves))
    body += pages.section("Workers over time", pages.charts(_worker_charts(figures.figures)))
    body += pages.section("Events", _events(figures.events))
    body += pages.section("Checkpoints", _checkpoints(figures.checkpoints))
    body += pages.section("Epochs", _epochs(history))
    return pages.page(f"Run {figures.run.name}", body)


def _summary(figures: RunFigures) -> str:
    chief = [line for line in figures.figures if line["rank"] == 0]
    rates = [line["examples_per_second"] for line in chief[1:] or chief]
    _, state, epochs, best, last_time = figures.run.cells()
    pairs = [("state", state), ("epochs", epochs), ("best", best), ("last checkpoint", last_time)]
    if chief:
        pairs += [
            ("time of the epochs", pages.format_duration(sum(line["seconds"] for line in _last_of_epochs(chief)))),
            ("examples/s, median", f"{statistics.median(rates):,.0f}"),
            ("workers", str(int(chief[-1]["workers"]))),
            ("starts of all workers", str(_count(figures.events, Kind.WORKERS_STARTED))),
            ("replaced workers", str(_count(figures.events, Kind.WORKER_REPLACED))),
        ]
    pairs.append(
        ("checkpoints kept", f"{len(figures.checkpoints)}, {pages.format_size(sum(n for _, n in figures.checkpoints))}")
    )
    return pages.facts(pairs)


def _remarks(history: Sequence[Mapping[str, Any]]) -> str:
    """Returns what curves do not show: that there is no epoch, or where values are NaN or infinite."""
    if not history:
        return pages.paragraph("No epoch has ended.")
    remarks = []
    for name in dict.fromkeys(name for row in history for name in row):
        bad = [row["epoch"] for row in history if charts.is_number(row.get(name)) and not charts.is_finite(row[name])]
        if bad:
            extent = f"epoch {bad[0]}" if len(bad) == 1 else f"{len(bad)} epochs, the first of which is epoch {bad[0]}"
            remarks.append(pages.paragraph(f"{name} is NaN or infinite in {extent}."))
    return "".join(remarks)


def _metrics(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names of metrics, without the prefix of the validation."""
    names = dict.fromkeys(name for row in history for name, value in row.items() if charts.is_finite(value))
    return list(dict.fromkeys(n.removeprefix(_VALIDATION) for n in names if n not in ("epoch", "learning_rate")))


def _metric_chart(history: Sequence[Mapping[str, Any]], name: str) -> str | None:
    x = [row["epoch"] for row in history]
    kinds = [("training", name), ("validation", _VALIDATION + name)]
    known = [(kind, key) for kind, key in kinds if any(key in row for row in history)]
    series = [charts.Series(name=kind, x=x, y=[row.get(key) for row in history]) for kind, key in known]
    return charts.line_chart(series, "epoch", name if len(known) > 1 else known[0][1])


def _worker_charts(figures: Sequence[Mapping[str, Any]]) -> list[str | None]:
    percent = lambda value: f"{value:.0%}"
    per_worker = lambda name, label, **how: _worker_chart(figures, name, label, **how)
    chief = [line for line in figures if line["rank"] == 0]
    return [
        _worker_chart(chief, "learning_rate", "learning rate"),
        _worker_chart(chief, "examples_per_second", "examples/s, all workers", zero=True),
        per_worker("step_seconds", "time of a step", zero=True, show=pages.format_step_duration),
        per_worker("input_wait", "waiting for input, share of the time", zero=True, show=percent),
        per_worker("communication", "communication, share of the time", zero=True, show=percent),
        per_worker(
            "memory_bytes", "memory of the process", zero=True, show=lambda value: f"{charts.format_number(value)}B"
        ),
        per_worker("checkpoint_seconds", "standing still for checkpoints", zero=True, show=pages.format_step_duration),
    ]


def _worker_chart(
    figures: Sequence[Mapping[str, Any]],
    name: str,
    label: str,
    zero: bool = False,
    show: Callable = charts.format_number,
) -> str | None:
    """Draws a curve for each worker; with many workers, only the extreme ones have names."""
    ranks: dict[int, list[Mapping[str, Any]]] = {}
    for line in figures:
        ranks.setdefault(int(line["rank"]), []).append(line)
    rows = {rank: _last_of_epochs(of_rank) for rank, of_rank in sorted(ranks.items())}
    mean = {
        rank: statistics.fmean(values)
        for rank, lines in rows.items()
        if (values := [line[name] for line in lines if charts.is_finite(line.get(name))])
    }
    order = sorted(mean, key=lambda rank: mean[rank])
    most = len(charts.COLORS)
    named = set(order) if len(order) <= most else {*order[: most // 2], *order[-(most // 2) :]}
    series = [
        charts.Series(
            name=f"worker {rank}",
            x=[line["epoch"] for line in rows[rank]],
            y=[line.get(name) for line in rows[rank]],
            detail=str(rows[rank][-1].get("host", "")),
            named=rank in named,
        )
        for rank in sorted(mean)
    ]
    return charts.line_chart(series, "epoch", label, zero=zero, show=show)


def _last_of_epochs(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the last line of each epoch, as a repeated epoch has several."""
    return sorted({line["epoch"]: line for line in lines}.values(), key=lambda line: line["epoch"])


def _count(figures: Sequence[RunEvent], kind: Kind) -> int:
    return sum(event.kind is kind for event in figures)


def _events(figures: Sequence[RunEvent]) -> str:
    rows = [[_format_time(event.time), str(event).partition("\n")[0]] for event in figures]
    return pages.table(["time", "what"], rows, texts=(0, 1)) if rows else ""


def _checkpoints(sizes: Sequence[tuple[StoredCheckpoint, int]]) -> str:
    rows = []
    for checkpoint, count in sizes:
        state = checkpoint.state()
        progress = (
            "" if state is None else f"{state.epoch}" + (f" + {state.epoch_step} steps" if state.epoch_step else "")
        )
        rows.append(["" if state is None else f"{state.step:,}", progress, pages.format_size(count), checkpoint.name])
    # the long names are last, so that a narrow screen cuts nothing else
    return pages.table(["step", "epoch", "size", "checkpoint"], rows, texts=(3,)) if rows else ""


def _epochs(history: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in history for name in row))
    rows = [[pages.format_value(row.get(name)) for name in names] for row in history]
    made = pages.table(names, rows, texts=()) if rows else ""
    return f"<details><summary>metrics of {len(rows)} epochs</summary>{made}</details>" if made else ""


def _format_time(seconds: float) -> str:
    return f"{datetime.datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def _bytes_of(filesystem, path: str) -> int:
    infos = filesystem.get_file_info(FileSelector(path, recursive=True, allow_not_found=True))
    return sum(info.size or 0 for info in infos if info.type == FileType.File)
