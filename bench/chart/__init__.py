"""Charts as SVG text: bars, and lines or points over two axes. They stand alone, or lie in the page of the report.

A chart is drawn by hand rather than by a library, because it has to be light and dark, small enough to lie in a page,
and to say a number when a mark is pointed at. Ours is blue everywhere; peers are grey in bars, and differ by colour
and by shape of mark in lines. Names stand beside the marks, so no legend and no colour has to be decoded.
"""

from __future__ import annotations

from pagedkv.bench.chart.bars import Bar, bars
from pagedkv.bench.chart.lines import Axis, Series, lines
from pagedkv.bench.chart.sheet import Chart, stacked

__all__ = ["Axis", "Bar", "Chart", "Series", "bars", "lines", "stacked"]
