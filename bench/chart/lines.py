"""Lines and points over two axes, linear or logarithmic, each series with its name at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pagedkv.bench.chart.sheet import WIDTH, Chart, escaped, figure, text, width_of

HEIGHT: Final = 300
"""Pixels of the area that holds the series."""
TOP: Final = 26
ROW: Final = 17
"""Pixels between the names of series at least."""
PALETTE: Final = ("a", "b", "c", "d", "peer")
"""The colours of series that are not ours, in their order."""


@dataclass(frozen=True)
class Axis:
    """An axis: its name with its unit, whether it is logarithmic, and its ends (None: those of the values)."""

    name: str
    log: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """A series of points (x, y).

    kind: its colour: "ours", "also", "peer"; "bound" is a dashed line without points; "" takes the next colour.
    drawn: "line" with points, or "points" alone.
    """

    name: str
    points: Sequence[tuple[float, float]]
    kind: str = ""
    drawn: str = "line"


@dataclass(frozen=True)
class _Scale:
    """A map from values of an axis to pixels between two ends."""

    axis: Axis
    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        low, high, value = (math.log(v) if self.axis.log else v for v in (self.low, self.high, value))
        return self.begin + (value - low) / ((high - low) or 1) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        if not self.axis.log:
            step = _round_step((self.high - self.low) / 5)
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            return [i * step for i in range(first, last + 1)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for digits in ((1,), (1, 3), (1, 2, 5)):
            values = (digit * 10.0**power for power in powers for digit in digits)
            found = [value for value in values if self.low * 0.999 <= value <= self.high * 1.001]
            if len(found) >= 3:
                return found
        return [self.low, self.high]


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return next(digit * power for digit in (1, 2, 2.5, 5, 10) if digit * power >= step * 0.999)


def lines(title: str, given: Sequence[Series], *, x: Axis, y: Axis, says: str = "") -> Chart:
    """Return a chart of lines or points. says: a sentence for those who cannot see it."""
    names = max(width_of(series.name) for series in given)
    right = WIDTH - min(220.0, names + 22)
    across = _scale(x, [px for series in given for px, _ in series.points], 54, right)
    up = _scale(y, [py for series in given for _, py in series.points], TOP + HEIGHT, TOP)
    colours = iter(PALETTE * len(given))
    kinds = {series.name: series.kind or next(colours) for series in given}
    shapes = {series.name: i for i, series in enumerate(s for s in given if s.kind != "bound")}
    body = [_grid(across, up), text(0, 12, y.name, "dim small")]
    body.append(text((across.begin + right) / 2, TOP + HEIGHT + 40, x.name, "dim small mid"))
    body += [_drawn(series, kinds[series.name], shapes.get(series.name, 0), across, up) for series in given]
    body += _names(given, kinds, across, up)
    words = says or "; ".join(_in_words(series, x, y) for series in given)
    return Chart(title, words, TOP + HEIGHT + 48, "".join(body))


def _in_words(series: Series, x: Axis, y: Axis) -> str:
    ends = [series.points[0], series.points[-1]]
    return f"{series.name}: " + ", ".join(f"{figure(py)} ({y.name}) at {figure(px)} ({x.name})" for px, py in ends)


def _scale(axis: Axis, values: Sequence[float], begin: float, end: float) -> _Scale:
    low = axis.low if axis.low is not None else min(values)
    high = axis.high if axis.high is not None else max(values)
    if axis.log and axis.low is None:
        low /= 1.15
    if axis.high is None:
        high = high * 1.15 if axis.log else high + (high - low) * 0.06
    return _Scale(axis, low, high, begin, end)


def _grid(across: _Scale, up: _Scale) -> str:
    parts = []
    for value in up.ticks():
        y = up.at(value)
        parts.append(f'<path class="grid" d="M{across.begin} {y:.1f}H{across.end:.1f}"/>')
        parts.append(text(across.begin - 8, y + 4, figure(value), "dim small end"))
    for value in across.ticks():
        x = across.at(value)
        parts.append(f'<path class="axis" d="M{x:.1f} {up.begin}v5"/>')
        parts.append(text(x, up.begin + 20, figure(value), "dim small mid"))
    return "".join([*parts, f'<path class="axis" d="M{across.begin} {up.begin}H{across.end:.1f}"/>'])


def _drawn(series: Series, kind: str, shape: int, across: _Scale, up: _Scale) -> str:
    places = [(across.at(px), up.at(py), px, py) for px, py in series.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y, _, _ in places)
    if kind == "bound":
        return f'<path class="bound" d="{path}"/>'
    line = f'<path class="line" style="stroke:var(--{kind})" d="{path}"/>' if series.drawn == "line" else ""
    parts = [line]
    for x, y, px, py in places:
        tip = escaped(f"{series.name}: {figure(py)} ({up.axis.name}) at {figure(px)} ({across.axis.name})")
        style = f"fill:var(--{kind});stroke:var(--bg);stroke-width:1"
        parts.append(f'<path class="mark" d="{_mark(shape, x, y)}" style="{style}"><title>{tip}</title></path>')
    return "".join(parts)


def _mark(shape: int, x: float, y: float) -> str:
    """Return a disc, a square, a diamond or a triangle around (x, y)."""
    if shape % 4 == 0:
        return f"M{x - 4.5:.1f} {y:.1f}a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z"
    if shape % 4 == 1:
        return f"M{x - 4:.1f} {y - 4:.1f}h8v8h-8z"
    if shape % 4 == 2:
        return f"M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z"
    return f"M{x:.1f} {y - 5:.1f}l5.5 9.5h-11z"


def _names(given: Sequence[Series], kinds: dict[str, str], across: _Scale, up: _Scale) -> list[str]:
    """Return the names of the series beside their last points, moved apart where they would overlap."""
    wanted = sorted((up.at(max(series.points)[1]), series.name) for series in given)
    places: list[float] = []
    for y, _ in wanted:
        places.append(max(y, places[-1] + ROW) if places else y)
    lowest = up.begin
    for i in reversed(range(len(places))):
        places[i] = min(places[i], lowest)
        lowest = places[i] - ROW
    colours = {name: "text" if kind in ("bound", "peer") else kind for name, kind in kinds.items()}
    return [
        f'<text x="{across.end + 12:.1f}" y="{place + 4:.1f}" style="fill:var(--{colours[name]})"'
        f"{' class=' + chr(34) + 'head' + chr(34) if kinds[name] == 'ours' else ''}>{escaped(name)}</text>"
        for place, (_, name) in zip(places, wanted, strict=True)
    ]
