"""The report as HTML, made from kept rows alone: headlines, then a section for each benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from pagedkv.bench import memory_state
from pagedkv.bench.chart import Chart
from pagedkv.bench.chart.sheet import COLOURS, STYLE, figure
from pagedkv.bench.figures import Figure, figures
from pagedkv.bench.headlines import headlines
from pagedkv.bench.report.sections import ABOUT, About

Row = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """A benchmark with its words, charts, figures and runs."""

    name: str
    about: About
    charts: list[Markup]
    titles: list[str]
    figures: list[Figure]
    runs: list[dict[str, str]]


def page(rows: dict[str, list[Row]]) -> str:
    """Return the report of the rows of each benchmark, as `rows.read_all` gives them."""
    lines = headlines(row for some in rows.values() for row in some)
    environment = Environment(loader=PackageLoader("pagedkv.bench.report", "."), autoescape=True, trim_blocks=True)
    environment.filters["figure"] = lambda value: "" if value is None else figure(value)
    light, dark = (";".join(f"--{name}:{pair[i]}" for name, pair in COLOURS.items()) for i in range(2))
    colours = f":root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}{STYLE}"
    newest = max((some[-1] for some in rows.values()), key=lambda row: row["when"])
    return environment.get_template("page.html").render(
        headlines=lines, sections=[_section(name, some) for name, some in rows.items()], newest=newest,
        colours=Markup(colours),
    )  # fmt: skip


def charts_of(name: str, rows: Sequence[Row]) -> list[Chart]:
    """Return the charts of a benchmark; none if it draws none."""
    module = f"pagedkv.bench.{name}.plot"
    if find_spec(f"pagedkv.bench.{name}") is None or find_spec(module) is None:
        return []
    found: list[Chart] = import_module(module).charts(list(rows))
    return found


def _memory(run: Row, rows: list[Row]) -> str:
    """Return in words the states that memory had in a run."""
    return memory_state.of_rows(row for row in rows if row["when"] == run["when"])


def _section(name: str, rows: list[Row]) -> Section:
    charts = charts_of(name, rows)
    runs = {row["when"]: row for row in sorted(rows, key=lambda row: row["when"])}
    described = [
        {
            "command": row.get("command") or f"pagedkv bench {name}",
            "when": row["when"].replace("T", " ").removesuffix("Z") + " UTC",
            "commit": row.get("commit", ""),
            "machine": "; ".join(filter(None, (row["machine"], _memory(row, rows)))),
            "versions": ", ".join(f"{part} {number}" for part, number in row.get("versions", {}).items() if number),
        }
        for row in runs.values()
    ]
    svgs = [Markup(chart.svg()) for chart in charts]
    return Section(name, ABOUT[name], svgs, [chart.title for chart in charts], figures(rows), described)
