"""The sheet below every chart: its width, its colours in light and dark, its texts; several charts as one file."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 720
SIZE: Final = 13
"""Pixels of a letter."""
COLOURS: Final = {
    "bg": ("#ffffff", "#14181e"), "text": ("#1c2128", "#e8edf2"), "dim": ("#5b6570", "#9aa5b1"),
    "grid": ("#e3e7eb", "#2c343d"), "ours": ("#0b5fc0", "#6cb2ff"), "also": ("#5b93d6", "#4a84c4"),
    "peer": ("#8a94a0", "#6a7684"), "a": ("#c2570c", "#f4a261"), "b": ("#0b7a6b", "#4fd1b5"),
    "c": ("#8250c4", "#c7a5f7"), "d": ("#8a6d00", "#e3c341"),
}  # fmt: skip
"""name: in light, in dark. The colours of series (ours, a, b, c, d) differ in lightness, too."""
STYLE: Final = """
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;\
fill:var(--text);\
font-variant-numeric:tabular-nums}
.dim{fill:var(--dim)}.small{font-size:12px}.head{font-weight:600}
.end{text-anchor:end}.mid{text-anchor:middle}
.grid{stroke:var(--grid);stroke-width:1}.axis{stroke:var(--dim);stroke-width:1}
.bound{stroke:var(--text);stroke-width:1.5;stroke-dasharray:5 4;fill:none}
.line{fill:none;stroke-width:2.25;stroke-linejoin:round;stroke-linecap:round}.mark:hover{opacity:.65}
"""


@dataclass(frozen=True)
class Chart:
    """A chart: its title, one sentence that says what it shows, its height, and the elements of its drawing."""

    title: str
    says: str
    height: float
    body: str

    def svg(self) -> str:
        """Return the chart as part of a page, which has the colours."""
        box = f'viewBox="0 0 {WIDTH} {self.height:.0f}" class="chart" role="img"'
        return f'<svg {box} aria-label="{escaped(f"{self.title}. {self.says}")}">{self.body}</svg>'


def stacked(charts: Sequence[Chart]) -> str:
    """Return the charts, one below the other, as a file that stands alone, light or dark as its reader is."""
    parts, top = [], 8.0
    for chart in charts:
        heading = text(0, top + 16, chart.title, "head")
        parts.append(f'{heading}<g transform="translate(0 {top + 28:.0f})">{chart.body}</g>')
        top += chart.height + 52
    light, dark = (";".join(f"--{name}:{pair[i]}" for name, pair in COLOURS.items()) for i in range(2))
    style = f"svg{{{light}}}@media (prefers-color-scheme: dark){{svg{{{dark}}}}}{STYLE}"
    title = escaped("; ".join(chart.title for chart in charts))
    says = escaped(" ".join(chart.says for chart in charts))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 0 {WIDTH + 24} {top:.0f}" role="img" '
        f'aria-labelledby="t d"><title id="t">{title}</title><desc id="d">{says}</desc><style>{style}</style>'
        f"{''.join(parts)}</svg>\n"
    )


def escaped(words: str) -> str:
    """Return a text that may stand in XML and in attributes."""
    return html.escape(words, quote=True)


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return a text whose baseline is at y."""
    return f'<text x="{x:.1f}" y="{y:.1f}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{escaped(words)}</text>'


def width_of(words: str, size: float = SIZE) -> float:
    """Return about how many pixels a text takes in a wide font: the reader's font is not known here."""
    narrow = sum(letter in "ijlt.,:;' |()fr1" for letter in words)
    wide = sum(letter in "mwMW@÷×→–" or letter.isupper() for letter in words)
    return size * (0.59 * len(words) - 0.22 * narrow + 0.14 * wide)


def figure(value: float) -> str:
    """Return a number for a person: three digits, and no more zeros than it has."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1e-3 or abs(value) >= 100 else f"{float(f'{value:.3g}'):g}"
