"""Horizontal bars in groups, each with its name before it and its figure behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pagedkv.bench.chart.sheet import WIDTH, Chart, escaped, figure, text, width_of

STEP: Final = 24
"""Pixels from one bar to the next."""
THICK: Final = 15
BOLD: Final = 1.16
"""A bold name is so many times as wide."""
HEADING: Final = 28
"""Pixels of the heading of a group."""


@dataclass(frozen=True)
class Bar:
    """A bar.

    kind:  its colour: "ours", "also" (a second one of ours), "peer".
    group: the heading under which it stands; bars of a group follow one another.
    note:  words behind its figure.
    label: words in place of its figure and unit.
    """

    name: str
    value: float
    kind: str = "peer"
    group: str = ""
    note: str = ""
    label: str = ""


def bars(
    title: str,
    given: Sequence[Bar],
    *,
    unit: str = "",
    bound: tuple[float, str] | None = None,
    is_scaled_by_group: bool = False,
    says: str = "",
) -> Chart:
    """Return a chart of bars.

    unit:  unit of the values, behind each figure: "µs", "×", "%"; "" if bars have labels.
    bound: a value that is marked by a dashed line, and its name.
    is_scaled_by_group: the longest bar of each group has full length; for groups that are not compared.
    says:  a sentence for readers who cannot see the chart; without one, the bars in words.
    """
    labels = {bar: _label(bar, unit) for bar in given}
    left = min(320.0, 16 + max(width_of(bar.name) * (BOLD if bar.kind == "ours" else 1.06) for bar in given))
    full = WIDTH - left - 12 - max(map(width_of, labels.values()))
    parts, top, group = [], 22.0 if bound else 4.0, ""
    words_at: list[tuple[float, float, float, float]] = []  # left, right, top and bottom of headings and labels
    for bar in given:
        if bar.group != group:
            group = bar.group
            top += 6 if parts else 0
            parts.append(text(0, top + 17, group, "head small"))
            words_at.append((0.0, width_of(group) * BOLD, top, top + HEADING - 4))
            top += HEADING
        beside = [other.value for other in given if other.group == group or not is_scaled_by_group]
        most = max([*beside, bound[0] if bound else 0]) or 1
        width = bar.value / most * full
        parts.append(_drawn(bar, labels[bar], left, width, top))
        ends = left + width, left + width + 14 + width_of(labels[bar]) * (BOLD if bar.kind == "ours" else 1.06)
        words_at.append((*ends, top + 4, top + STEP - 4))
        top += STEP
    if bound:
        x = left + bound[0] / max(bound[0], *(bar.value for bar in given)) * full
        end = "end" if x > WIDTH - width_of(bound[1]) else "mid" if x > width_of(bound[1]) / 2 else ""
        crossed = [(above, below) for first, last, above, below in words_at if first < x < last]
        parts.insert(0, f'<path class="bound" d="{_between(x, 22, top, crossed)}"/>')
        parts.insert(1, text(x, 13, bound[1], f"small {end}"))
    words = says or "; ".join(f"{bar.group + ', ' if bar.group else ''}{bar.name}: {labels[bar]}" for bar in given)
    return Chart(title, words, top + 4, "".join(parts))


def _between(x: float, top: float, bottom: float, gaps: Sequence[tuple[float, float]]) -> str:
    """Return a vertical path with gaps, which follow one another."""
    ends = [top, *(end for gap in gaps for end in gap), bottom]
    pairs = zip(ends[::2], ends[1::2], strict=True)
    return "".join(f"M{x:.1f} {above:.0f}V{below:.0f}" for above, below in pairs if above < below)


def _label(bar: Bar, unit: str) -> str:
    words = bar.label or f"{figure(bar.value)}{'' if unit in '%×' else ' '}{unit}"
    return f"{words}, {bar.note}" if bar.note else words


def _drawn(bar: Bar, label: str, left: float, width: float, top: float) -> str:
    width, base = max(2.0, width), top + STEP / 2 + 4.5
    tip = escaped(f"{bar.group + ', ' if bar.group else ''}{bar.name}: {label}")
    bold = " head" if bar.kind == "ours" else ""
    return (
        text(left - 10, base, bar.name, f"end{bold}")
        + f'<rect class="mark" x="{left:.1f}" y="{top + (STEP - THICK) / 2:.1f}" width="{width:.1f}" '
        f'height="{THICK}" rx="2" style="fill:var(--{bar.kind})"><title>{tip}</title></rect>'
        + text(left + width + 7, base, label, bold.strip())
    )
