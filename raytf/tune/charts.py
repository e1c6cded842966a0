"""SVG charts within a page: lines, points and parallel coordinates, for laptops and phones. Pure.

The charts need no script: a page of a few kilobytes opens anywhere. Tooltips show names and values.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# Size of the picture in its own units; it is scaled to a column of the page.
_WIDTH, _HEIGHT = 460, 270
_LEFT_MARGIN, _RIGHT_MARGIN, _TOP_MARGIN, _BOTTOM_MARGIN = 62, 14, 26, 42
# Ratio of the largest to the smallest value from which on an axis is logarithmic.
_DECADES = 20.0
# Share of a logarithmic axis between zeros and the smallest other value.
_ZERO_SHARE = 0.1
_TICKS = 8
_AXIS_WIDTH = 120
COLORS = ("#2a78d6", "#d1652a", "#1b9e77", "#8e5bd0", "#c2427f", "#7a7f16", "#0f8fa3", "#96602d")
GREY = "#9aa5b1"


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve.

    Args:
        name: Name in the legend and the tooltip.
        x, y: Coordinates of its points; values that are not finite are gaps.
        width: Width of the line.
        dotted: Whether the line is dotted.
        detail: Further lines of the tooltip.
        named: Whether the legend contains it.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    width: float = 1.8
    dotted: bool = False
    detail: str = ""
    named: bool = True


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of a scatter chart; `value`, from 0 to 1, is its colour, and 1 is the best."""

    x: float
    y: float
    value: float
    detail: str


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis of parallel coordinates: the position of each line on it, from 0 to 1, and its ticks."""

    label: str
    positions: Sequence[float]
    ticks: Sequence[tuple[float, str]] = field(default=())


def format_number(value: float) -> str:
    """Returns a number as short text: 12.3k, 4.5M, 0.00012."""
    if value == 0:
        return "0"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * size or (unit != "k" and abs(value) >= size):
            return f"{value / size:.3g}{unit}"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.3g}"


def is_number(value) -> bool:
    """Returns whether a value is a number, finite or not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite(value) -> bool:
    """Returns whether a value is a number that a chart can show."""
    return is_number(value) and math.isfinite(value)


def spans_decades(values: Sequence[float]) -> bool:
    """Returns whether values need a logarithmic axis."""
    return bool(values) and min(values) > 0 and max(values) / min(values) >= _DECADES


def line_chart(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    zero: bool = False,
    show: Callable[[float], str] = format_number,
) -> str | None:
    """Returns a chart of curves, with a logarithmic axis if values span decades; None without values.

    On that axis zeros are at a tick of their own below all other values.

    Args:
        series: Curves, the most important first; at most as many named ones as there are `COLORS`.
        x_label, y_label: Labels of the axes.
        zero: Whether the axis of values begins at 0; it is linear then.
        show: Formats a value as a tick.
    """
    points = [
        (x, y) for curve in series for x, y in zip(curve.x, curve.y, strict=True) if is_finite(x) and is_finite(y)
    ]
    if not points:
        return None
    ys = [y for _, y in points]
    x_scale = _Scale([x for x, _ in points], (_LEFT_MARGIN, _WIDTH - _RIGHT_MARGIN), whole=True)
    log = not zero and min(ys) >= 0 and spans_decades([y for y in ys if y > 0])
    y_scale = _Scale([*ys, *([0.0] if zero else [])], (_HEIGHT - _BOTTOM_MARGIN, _TOP_MARGIN), log=log)
    body = [_frame(x_scale, y_scale, x_label, y_label, show)]
    named = [curve for curve in series if curve.named]
    colors = [COLORS[i % len(COLORS)] for i in range(len(named))]
    unnamed = [(curve, GREY) for curve in series if not curve.named]
    for curve, color in [*unnamed, *reversed(list(zip(named, colors, strict=True)))]:  # draws the first one on top
        body.append(_curve(curve, color, x_scale, y_scale, show))
    legend = [(color, curve.name, curve.dotted) for curve, color in zip(named, colors, strict=True)]
    return _figure("".join(body), _legend(legend) if len(legend) > 1 else "", f"{y_label} by {x_label}")


def scatter_chart(points: Sequence[Point], x_label: str, y_label: str, value_label: str) -> str | None:
    """Returns a chart of points with logarithmic axes if values span decades; None without points."""
    if not points:
        return None
    xs, ys = [p.x for p in points], [p.y for p in points]
    x_scale = _Scale(xs, (_LEFT_MARGIN + 8, _WIDTH - _RIGHT_MARGIN - 8), log=spans_decades(xs), ticks_at_values=True)
    y_scale = _Scale(ys, (_HEIGHT - _BOTTOM_MARGIN - 6, _TOP_MARGIN + 6), log=min(ys) > 0 and max(ys) / min(ys) > 5)
    body = [_frame(x_scale, y_scale, x_label, y_label, format_number)]
    for p in sorted(points, key=lambda p: p.value):
        position = f'cx="{x_scale(p.x):.1f}" cy="{y_scale(p.y):.1f}" r="6.5"'
        body.append(f'<circle {position} fill="{_shade(p.value)}" stroke="#fff">{_title(p.detail)}</circle>')
    legend = [(_shade(1.0), f"best {value_label}", False), (_shade(0.0), "worst", False)]
    return _figure("".join(body), _legend(legend), f"{y_label} by {x_label}")


def parallel_chart(axes: Sequence[Axis], values: Sequence[float], details: Sequence[str]) -> str:
    """Returns a chart in which each line crosses one axis for each name, at its value.

    Args:
        axes: At least two axes.
        values: The colour of each line, from 0 to 1, of which 1 is the best.
        details: The tooltip of each line.
    """
    width = max(_WIDTH, _AXIS_WIDTH * len(axes))
    step = (width - 130) / (len(axes) - 1)
    top, bottom = _TOP_MARGIN + 16, _HEIGHT - 16
    position = lambda i, tick: (65 + i * step, bottom - tick * (bottom - top))
    body = []
    for line in sorted(range(len(values)), key=lambda n: values[n]):
        points = [position(i, axis.positions[line]) for i, axis in enumerate(axes)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        color = _shade(values[line])
        body.append(f'<path class="c" d="{path}" stroke="{color}" stroke-width="1.8">{_title(details[line])}</path>')
    for i, axis in enumerate(axes):
        x, _ = position(i, 0)
        body.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" class="a"/>')
        body.append(_text(x, 16, _cut(axis.label, 18), "middle", "l", axis.label))
        for tick, text in axis.ticks:
            body.append(_text(x + 5, position(i, tick)[1] + 4, _cut(text, 16), "start", "t", text))
    wide = f' style="min-width:{width if width > _WIDTH else 0}px;max-width:{1.5 * width:.0f}px"'
    return _figure("".join(body), "", "parallel coordinates", width, wide)


class _Scale:
    """Maps values to positions on an axis.

    Args:
        values: At least one value, all finite.
        ends: Ends of the axis in the picture.
        log: Whether it is logarithmic; zeros are then at its begin.
        whole: Whether its ticks are whole numbers.
        ticks_at_values: Whether its ticks are the values themselves, if they are few.
    """

    def __init__(
        self, values, ends: tuple[float, float], log: bool = False, whole: bool = False, ticks_at_values: bool = False
    ):
        has_zero = log and min(values) == 0
        values = [value for value in values if value > 0] if has_zero else values
        low, high = min(values), max(values)
        self._log, (self._begin, self._end) = log, ends
        self._zero = self._begin
        if has_zero:
            self._begin += (self._end - self._begin) * _ZERO_SHARE
        few = sorted(set(values)) if ticks_at_values and len(set(values)) <= _TICKS else None
        if log:
            self.ticks = few or _log_ticks(low, high)
        elif few:
            self.ticks = few
        else:
            if low == high:
                low, high = (
                    (low - 0.5, high + 0.5) if whole or not low else (low - abs(low) / 10, high + abs(high) / 10)
                )
            if high - low < 1e-290:  # closer than floating-point numbers can resolve
                low, high = low - 1, high + 1
            self.ticks = [t for t in _linear_ticks(low, high) if not whole or float(t).is_integer()]
        if low == high:
            low, high = (low / 2, high * 2) if log else (low - 1, high + 1)
        self._low, self._high = (math.log10(low), math.log10(high)) if log else (low, high)
        if not whole:
            margin = (self._high - self._low) * 0.04
            self._low, self._high = self._low - margin, self._high + margin
        self.ticks = [0.0, *self.ticks] if has_zero else self.ticks

    def __call__(self, value: float) -> float:
        if self._log and not value:
            return self._zero
        value = math.log10(value) if self._log else value
        return self._begin + (value - self._low) / (self._high - self._low) * (self._end - self._begin)


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 6
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = max(1, round((last - first) / 6))
    powers = [10.0**i for i in range(first, last + 1) if (i - first) % decades == 0 and low <= 10.0**i <= high]
    if len(powers) >= 2:
        return powers
    return [m * 10.0**i for i in range(first, last + 1) for m in (1, 2, 5) if low <= m * 10.0**i <= high] or [low, high]


def _frame(x_scale: _Scale, y_scale: _Scale, x_label: str, y_label: str, show: Callable[[float], str]) -> str:
    parts, right, base = [], _WIDTH - _RIGHT_MARGIN, _HEIGHT - _BOTTOM_MARGIN
    for tick in y_scale.ticks:
        y = y_scale(tick)
        parts.append(f'<line x1="{_LEFT_MARGIN}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" class="g"/>')
        parts.append(_text(_LEFT_MARGIN - 6, y + 4, show(tick), "end", "t"))
    for tick in x_scale.ticks:
        parts.append(_text(x_scale(tick), base + 16, format_number(tick), "middle", "t"))
    parts.append(f'<line x1="{_LEFT_MARGIN}" y1="{base}" x2="{right}" y2="{base}" class="a"/>')
    parts.append(_text((_LEFT_MARGIN + right) / 2, _HEIGHT - 8, x_label, "middle", "l"))
    parts.append(_text(8, 14, _cut(y_label, 48), "start", "l", y_label))
    return "".join(parts)


def _curve(series: Series, color: str, x_scale: _Scale, y_scale: _Scale, show: Callable[[float], str]) -> str:
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(series.x, series.y, strict=True):
        if is_finite(x) and is_finite(y):
            runs[-1].append((x_scale(x), y_scale(y)))
        elif runs[-1]:
            runs.append([])
    last = next((y for y in reversed(series.y) if is_finite(y)), None)
    tooltip = "\n".join(
        part for part in (series.name, series.detail, "" if last is None else f"last: {show(last)}") if part
    )
    parts = []
    for run in runs:
        if len(run) > 1:
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in run)
            dots = ' stroke-dasharray="4 3"' if series.dotted else ""
            parts.append(f'<path d="{path}" stroke="{color}" stroke-width="{series.width}"{dots}/>')
        elif run:
            ((x, y),) = run
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>')
    return f'<g class="c">{_title(tooltip)}{"".join(parts)}</g>'


def _figure(body: str, legend: str, description: str, width: int = _WIDTH, style: str = "") -> str:
    label = html.escape(description)
    svg = f'<svg viewBox="0 0 {width} {_HEIGHT}" role="img" aria-label="{label}"{style}>{body}</svg>'
    return f'<div class="chart">{svg}{legend}</div>'


def _legend(entries: Sequence[tuple[str, str, bool]]) -> str:
    shown = ""
    for color, name, dotted in entries:
        style = f"border-top:3px {'dotted' if dotted else 'solid'} {color}"
        shown += f'<span><i style="{style}"></i>{html.escape(_cut(name, 60))}</span>'
    return f'<p class="legend">{shown}</p>'


def _text(x: float, y: float, text: str, anchor: str, kind: str, full: str = "") -> str:
    more = _title(full) if full and full != text else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{html.escape(text)}{more}</text>'


def _title(text: str) -> str:
    return f"<title>{html.escape(text)}</title>"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _shade(value: float) -> str:
    """Returns a colour from pale yellow (0) over green to dark blue (1), as viridis reversed."""
    stops = ((0.0, (238, 221, 110)), (0.35, (107, 190, 120)), (0.7, (43, 125, 142)), (1.0, (68, 20, 90)))
    value = min(1.0, max(0.0, value))
    for (low, first), (high, second) in zip(stops, stops[1:], strict=False):
        if value <= high:
            part = (value - low) / (high - low)
            return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(first, second, strict=True))
    return "#44145a"
