"""An HTML page with charts and tables: one file without network access, for laptops and phones. Pure."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1.2rem; max-width: 72rem; color: #222; }
h1 { font-size: 1.5rem; margin: .2rem 0; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 1.6rem 0 .4rem; }
p { margin: .3rem 0; overflow-wrap: anywhere; } .path { color: #666; font-size: .85rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem 1.5rem; }
.chart { overflow-x: auto; } .chart svg { width: 100%; height: auto; display: block; font-family: inherit; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .82rem; color: #444; }
.legend i { display: inline-block; width: 1.3rem; margin-right: .35rem; vertical-align: middle; }
svg path { fill: none; stroke-linejoin: round; } svg .c:hover { filter: brightness(.75); stroke-width: 3.5; }
svg .g { stroke: #e6e8eb; } svg .a { stroke: #888; } svg text { font-size: 13px; fill: #444; }
svg text { paint-order: stroke; stroke: #fff; stroke-width: 3px; }
svg .t { font-size: 12px; fill: #666; } svg .l { fill: #222; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .88rem; }
td, th { padding: .2rem .7rem; text-align: right; white-space: nowrap; } th { border-bottom: 1px solid #888; }
td.text, th.text { text-align: left; } td.long { white-space: normal; min-width: 14rem; }
.best { background: #e7f2e4; } summary { cursor: pointer; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .4rem 1rem; margin: .8rem 0; }
dt { color: #666; font-size: .8rem; } dd { margin: 0; font-size: 1.05rem; overflow-wrap: anywhere; }
"""


def page(title: str, body: str) -> str:
    """Returns an HTML page; `body` is HTML, `title` is text."""
    head = (
        f"<meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
    )
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>\n"


def headline(kind: str, name: str, path: str) -> str:
    """Returns the top of a page: its subject, name and path."""
    return f'<h1>{html.escape(kind)} {html.escape(name)}</h1><p class="path">{html.escape(path)}</p>'


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Returns name-value pairs as HTML; omits those without a value."""
    shown = "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in pairs if v)
    return f"<dl>{shown}</dl>" if shown else ""


def format_value(value: Any) -> str:
    """Returns a value of a config or a metric as text; None as no text."""
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def paragraph(text: str) -> str:
    """Returns a text as a paragraph."""
    return f"<p>{html.escape(text)}</p>"


def section(title: str, content: str) -> str:
    """Returns a section of the page, or nothing if it is empty."""
    return f"<h2>{html.escape(title)}</h2>{content}" if content else ""


def charts(drawn: Sequence[str | None]) -> str:
    """Returns charts next to each other, as many as fit; omits None."""
    shown = [chart for chart in drawn if chart]
    return f'<div class="charts">{"".join(shown)}</div>' if shown else ""


def table(names: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[int] = (0,), best: bool = False) -> str:
    """Returns a table, which scrolls if it is wide.

    Args:
        names: Names of the columns.
        rows: Texts of the cells.
        texts: Indices of left-aligned columns; only the last one may have several lines.
        best: Whether to mark the first row.
    """
    kinds = ["text" if i in texts else "" for i in range(len(names))]

    def cell(tag: str, text: str, i: int) -> str:
        kind = kinds[i] + (" long" if len(text) > 40 and i in texts else "")
        return f'<{tag} class="{kind}">{html.escape(text)}</{tag}>' if kind else f"<{tag}>{html.escape(text)}</{tag}>"

    head = "".join(cell("th", name, i) for i, name in enumerate(names))
    body = ""
    for n, row in enumerate(rows):
        kind = ' class="best"' if best and not n else ""
        body += f"<tr{kind}>{''.join(cell('td', text, i) for i, text in enumerate(row))}</tr>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def format_duration(seconds: float | None) -> str:
    """Returns a time as short text: 4.2 s, 3:05 min, 2:10 h."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def format_step_duration(seconds: float) -> str:
    """Returns a time as short text, also below a second: 0.25 ms, 12 ms, 1.2 s."""
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.3g} ms"


def format_size(count: float) -> str:
    """Returns a number of bytes as short text."""
    for unit, bytes_of in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= bytes_of:
            return f"{count / bytes_of:.1f} {unit}"
    return f"{count:.0f} B"
