"""Charts of kept rows by matplotlib: bars in groups, and lines or points over two axes. Ours is blue everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagedkv.errors import InvalidRequest

COLOURS: Final = {"ours": "#0b5fc0", "also": "#5b93d6", "peer": "#8a94a0", "bound": "#1c2128"}
OTHERS: Final = ("#c2570c", "#0b7a6b", "#8250c4", "#8a6d00")
"""The colours of series that have no kind."""


@dataclass(frozen=True)
class Bar:
    """A bar. kind: its colour: "ours", "also" (a second one of ours), "peer". group: its heading. label: behind it."""

    name: str
    value: float
    kind: str = "peer"
    group: str = ""
    label: str = ""


@dataclass(frozen=True)
class Series:
    """A series of points (x, y). kind: a colour of COLOURS, or "" for the next one. is_line: points are joined."""

    name: str
    points: Sequence[tuple[float, float]]
    kind: str = ""
    is_line: bool = True


@dataclass(frozen=True)
class Chart:
    """A chart: its title, its height in inches, and the function that draws it on axes of matplotlib."""

    title: str
    height: float
    draw: Callable[[Any], None]


def bars(title: str, given: Sequence[Bar], *, unit: str = "", bound: float | None = None) -> Chart:
    """Return a chart of horizontal bars, each with its figure behind it. bound: a value marked by a dashed line."""
    places, at, group = list[float](), 0.0, None
    for bar in given:
        at += 1.7 if bar.group != group else 1
        group = bar.group
        places.append(at)

    def draw(axes: Any) -> None:
        axes.barh(places, [bar.value for bar in given], 0.7, color=[COLOURS[bar.kind] for bar in given])
        axes.set_yticks(places, [bar.name for bar in given])
        axes.set_ylim(at + 0.6, places[0] - (1.2 if given[0].group else 0.6))
        for place, bar, before in zip(places, given, (None, *given), strict=False):
            words = f" {bar.label or f'{bar.value:,.3g} {unit}'}"
            axes.annotate(words, (bar.value, place), va="center", size="small")
            if bar.group and bar.group != getattr(before, "group", None):
                axes.annotate(bar.group, (0, place - 0.75), va="center", size="small", weight="bold")
        if bound is not None:
            axes.axvline(bound, color=COLOURS["bound"], linestyle="--")
        axes.margins(x=0.2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel(unit)

    return Chart(title, 1 + 0.26 * at, draw)


def lines(title: str, given: Sequence[Series], *, x: str, y: str, is_log: str = "") -> Chart:
    """Return a chart of lines and points. x, y: names of the axes. is_log: "x", "y" or "xy"."""

    def draw(axes: Any) -> None:
        others, shapes = itertools.cycle(OTHERS), itertools.cycle("osD^v")
        for series in given:
            colour = COLOURS.get(series.kind) or next(others)
            style = "--" if series.kind == "bound" else "-" if series.is_line else ""
            mark = "" if series.kind == "bound" else next(shapes)
            axes.plot(*zip(*series.points, strict=True), color=colour, linestyle=style, marker=mark, label=series.name)
        for letter, scale in (("x", axes.set_xscale), ("y", axes.set_yscale)):
            if letter in is_log:
                scale("log")
        if "y" not in is_log:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")

    return Chart(title, 4, draw)


def write(charts: Sequence[Chart], path: Path) -> None:
    """Write the charts, one below the other, to a file of a format of matplotlib: .svg, .png, .pdf.

    Raises: InvalidRequest without matplotlib, or if the file cannot be written
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidRequest("--plot needs matplotlib; install pagedkv[plot]") from None
    figure = Figure(figsize=(9, sum(chart.height for chart in charts)), layout="constrained")
    every = figure.subplots(len(charts), squeeze=False, height_ratios=[chart.height for chart in charts])
    for chart, axes in zip(charts, every[:, 0], strict=True):
        chart.draw(axes)
        axes.set_title(chart.title, loc="left", size="medium", weight="bold")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as why:
        raise InvalidRequest(f"--plot {path}: the picture cannot be written: {why}; name another file") from None
