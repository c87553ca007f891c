"""Charts of level bars as SVG, light and dark, each bar with its spread and its figure.

A colour has one meaning in all charts: blue is ours, light blue is ours in a second form, grey is the work of others.
Figures stand in a column of their own, so that no line runs through them. A picture narrower than NARROW px has larger
letters, and the layout leaves room for these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

from pagedkv.errors import InvalidRequest

WIDTH: Final = 720
ROW: Final = 22
LETTER: Final = 10.6
"""The widest mean letter: that of a picture narrower than NARROW px."""
NARROW: Final = 480
MOST_TICKS: Final = 6
LONG: Final = 24
"""Letters of a name that has no room before its bar."""
STYLE: Final = f"""
:root{{--ink:#1c2128;--dim:#57606a;--grid:#d0d7de;--ours:#0b5fc0;--also:#79aeea;--peer:#959da6}}
@media (prefers-color-scheme: dark){{
:root{{--ink:#e6edf3;--dim:#9ea7b3;--grid:#343b44;--ours:#3d8bf0;--also:#2b5f9e;--peer:#6e7681}}}}
text{{font:15px ui-sans-serif,system-ui,"Segoe UI",Helvetica,Arial,sans-serif;fill:var(--ink)}}
@media (max-width:{NARROW}px){{text{{font-size:18px}}}}
.head{{font-weight:700}}.dim{{fill:var(--dim)}}.end{{text-anchor:end}}.mid{{text-anchor:middle}}
path{{fill:none;stroke:var(--ink)}}.grid{{stroke:var(--grid)}}.bound{{stroke-dasharray:5 4}}.mark{{stroke-width:2}}
.ours{{fill:var(--ours)}}.also{{fill:var(--also)}}.peer{{fill:var(--peer)}}
"""


@dataclass(frozen=True)
class Bar:
    """A bar from 0 to its value, with the ends of its spread.

    label: the figure in words. kind: "ours", "also" or "peer". group: its heading. published: a value of the
    literature, marked by a diamond
    """

    name: str
    value: float
    low: float
    high: float
    label: str
    kind: str = "peer"
    group: str = ""
    published: float | None = None


@dataclass(frozen=True)
class Chart:
    """A chart: its title, and SVG of a known height."""

    title: str
    height: float
    svg: str


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{escape(words)}</text>'


def _path(drawn: str, kind: str = "") -> str:
    return f'<path d="{drawn}" class="{kind}"/>'


def _column(words: str, top: float, kind: str) -> list[str]:
    """Return words in as many lines as they need, the first one below `top`."""
    lines = [""]
    for word in words.split():
        if LETTER * len(f"{lines[-1]} {word}") > WIDTH:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return [_text(0, top + ROW * (i + 1) - 6, line, kind) for i, line in enumerate(lines)]


def _ticks(most: float, width: float) -> list[float]:
    """Return round values from 0 to at most `most`, few enough for their names."""
    power = 10 ** math.floor(math.log10(most) - 1)
    for step in (factor * power for factor in (1, 2, 5, 10, 20, 50, 100)):
        ticks = [step * i for i in range(math.floor(most / step) + 1)]
        if len(ticks) <= MOST_TICKS and width * step / most > LETTER * max(len(short(value)) for value in ticks) + 12:
            break
    return ticks


def short(value: float) -> str:
    """Return a figure with three digits that count."""
    return f"{float(f'{value:.3g}'):,.10g}"


def bars(title: str, given: Sequence[Bar], *, unit: str, bound: tuple[str, float] | None = None) -> Chart:
    """Return a chart of bars. bound: the name and the value of a dashed line."""
    texts = _column(title, 0, "head")
    names = [words for bar in given for words in (bar.name, bar.group) if len(words) <= LONG or words == bar.name]
    left = 12 + LETTER * max(map(len, names))
    right = WIDTH - 18 - LETTER * max(len(bar.label) for bar in given)
    most = max([*(max(bar.high, bar.published or 0) for bar in given), bound[1] if bound else 0]) or 1
    top = ROW * len(texts) + (ROW if bound else 4)
    y, group, rows = float(top), "", list[str]()

    def at(value: float) -> float:
        return left + (right - left) * value / most

    for bar in given:
        if bar.group != group:
            y, group = y + (ROW + 4 if bar.group else 8), bar.group
            rows.append(_text(0, y - 6, group, "head"))
        rows += _row(bar, y, left, at)
        y += ROW
    ticks = _ticks(most, right - left)
    lines = [_path(f"M{at(value):.1f},{top}V{y + 4:.0f}", "grid") for value in ticks]
    rows += [_text(at(value), y + 20, short(value), "dim mid") for value in ticks]
    if bound:
        rows.append(_path(f"M{at(bound[1]):.1f},{top - 2}V{y + 4:.0f}", "bound"))
        rows.append(_text(at(bound[1]), top - 6, bound[0], "mid"))
    return Chart(title, y + 28, "\n".join([*texts, *lines, *rows, _text(WIDTH, y + 20, unit, "dim end")]))


def _row(bar: Bar, y: float, left: float, at: Callable[[float], float]) -> list[str]:
    """Return a bar at the height y, its name before it and its figure in the last column."""
    middle, width = y + ROW / 2, max(2, at(bar.value) - left)
    drawn = [
        _text(left - 8, middle + 5, bar.name, "end"),
        f'<rect x="{left:.0f}" y="{y + 3:.0f}" width="{width:.1f}" height="{ROW - 6}" class="{bar.kind}"/>',
        _path(f"M{at(bar.low):.1f},{middle - 4:.0f}v8m0,-4H{at(bar.high):.1f}m0,-4v8"),
        _text(WIDTH, middle + 5, bar.label, "end"),
    ]
    if bar.published is not None:
        drawn.append(_path(f"M{at(bar.published):.1f},{middle - 6:.0f}l6,6l-6,6l-6,-6z", "mark"))
    return drawn


def write(charts: Sequence[Chart], path: Path, caption: str) -> None:
    """Write the charts, one below the other, and a caption below them, to an SVG file.

    Raises: InvalidRequest if the file cannot be written
    """
    top, parts = 0.0, list[str]()
    for chart in charts:
        parts.append(f'<g transform="translate(0,{top:.0f})">{chart.svg}</g>')
        top += chart.height + 10
    below = _column(caption, top, "dim")
    height, title = top + ROW * len(below), escape("; ".join(chart.title for chart in charts))
    box = f"-8 0 {WIDTH + 16} {height:.0f}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img" aria-labelledby="t">'
    head += f'<title id="t">{title}</title><style>{STYLE}</style>'
    try:
        path.write_text("\n".join([head, *parts, *below, "</svg>\n"]), encoding="utf-8")
    except OSError as why:
        text = f"--plot {path}: the picture cannot be written: {why.strerror}; name another file"
        raise InvalidRequest(text) from None
