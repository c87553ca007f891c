"""The charts of each benchmark, drawn from its rows by `--plot FILE`. A chart without rows is left out."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from pagedkv.bench.chart import Bar, Chart, Series, bars, lines
from pagedkv.bench.record import Row, axes_of, of_layers

SIZED: Final = re.compile(r"step of (\d+) sequences, ([\d,]+) (frames, free|frames, all cached|tokens of context)")
LINES: Final = {
    "frames, free": "free frames", "frames, all cached": "all cached: a page evicts one",
    "tokens of context": "pagedkv",
}  # fmt: skip


def charts(name: str, rows: Sequence[Row]) -> list[Chart]:
    """Return the charts of a benchmark for which there are rows."""
    measured = [row for row in rows if row["median"] is not None]
    return [chart for chart in CHARTS[name](measured) if chart]


def _bars(rows: Iterable[Row], title: str, *, value: str = "median", unit: str = "", bound: float | None = None) -> Any:
    """Return a chart of rows that have the field `value`, grouped by their axes."""
    given = [
        Bar(
            row["variant"], row[value], _kind(row["variant"]), group_of(row), f"{row[value]:,.3g} {unit or row['unit']}"
        )
        for row in rows
        if value in row
    ]
    return bars(title, given, unit=unit, bound=bound) if given else None


def _kind(variant: str) -> str:
    if variant in ("pagedkv", "pages", "cpu"):
        return "ours"
    return "also" if variant.startswith(("pagedkv", "pages", "numba")) else "peer"


def group_of(row: Row) -> str:
    """Return the axes of a row in words."""
    if "batch" in row:
        return f"{row['batch']} × {row['context']:,} tokens{of_layers(row)}"
    axes = (
        str(value) if isinstance(value, str) else f"{name.replace('_', ' ')} {value:,}"
        for name, value in axes_of(row).items()
    )
    return ", ".join(axes)


def _of(rows: Iterable[Row], case: str) -> list[Row]:
    return [row for row in rows if row["case"] == case]


def _series(found: dict[str, list[tuple[float, float]]]) -> list[Series]:
    return [Series(name, sorted(points), "ours" if name == "pagedkv" else "") for name, points in found.items()]


def _manager(rows: list[Row]) -> Iterable[Chart | None]:
    shared = {row["case"] for row in rows if row["variant"] != "pagedkv"}
    for unit, title in (("us", "A decode step"), ("ns", "One block"), ("bytes", "Memory of a block")):
        found = [row | {"unit": row["case"]} for row in rows if row["unit"] == unit and row["case"] in shared]
        given = [Bar(row["variant"], row["median"], _kind(row["variant"]), row["case"]) for row in found]
        yield bars(title, given, unit=unit) if given else None
    sizes: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if match := SIZED.match(row["case"]):
            sizes.setdefault(match[3], []).append((float(match[2].replace(",", "")), row["median"]))
    for x, names in (("frames in the pool", list(LINES)[:2]), ("tokens of context, each sequence", list(LINES)[2:])):
        given = _series({LINES[name]: sizes[name] for name in names if name in sizes})
        title = f"The cost of a decode step against {x}"
        yield lines(title, given, x=x, y="µs a step", is_log="x") if given else None


def _attention(rows: list[Row]) -> Iterable[Chart | None]:
    most = max((row["cell"]["threads"] for row in rows), default=0)
    rows = [row for row in rows if row["cell"]["threads"] == most]
    shown = [row for row in _of(rows, "decode") if row["variant"] in ("cpu", "sdpa", "vllm")]
    yield _bars(shown, "Decode: speed of reading KV over that of a bare read", value="efficiency", unit="×", bound=1)
    points: dict[str, list[tuple[float, float]]] = {}
    for row in _of(rows, "decode"):
        cell = row["cell"]
        flops = 4 * cell["heads"] * cell["head_dim"] * cell["batch"] * cell["context"]
        point = flops / (row["gb_per_s"] * row["median"] * 1e3), flops / row["median"] / 1e3
        points.setdefault(row["variant"], []).append(point)
    speeds = [row["gb_per_s"] for row in _of(rows, "decode") if row["variant"] == "ceiling"]
    points.pop("ceiling", None)
    yield _roofline("Roofline of decode attention", points, statistics.median(speeds) if speeds else None)


def _roofline(title: str, points: dict[str, list[tuple[float, float]]], speed: float | None) -> Chart | None:
    every = [x for some in points.values() for x, _ in some]
    if not every or speed is None:
        return None
    roof = Series(
        f"a bare read, {speed:.0f} GB/s", [(x, x * speed) for x in (min(every) / 1.1, max(every) * 1.1)], "bound"
    )
    marks = [
        Series(name, sorted(some), "ours" if name in ("cpu", "pagedkv") else "", False) for name, some in points.items()
    ]
    return lines(title, [roof, *marks], x="operations per byte that had to move", y="GFLOP/s", is_log="xy")


def _bandwidth(rows: list[Row]) -> Iterable[Chart | None]:
    most = max((row["threads"] for row in rows if "threads" in row), default=None)
    rows = [row for row in rows if row.get("threads") == most]
    shown = [
        row for row in rows if row["case"] not in ("state", "ceiling") and row["variant"] in ("pagedkv", "torch", "cpu")
    ]
    yield _bars(_of(rows, "ceiling"), "Speed of memory by access pattern")
    yield _bars(shown, "Operations over the speed of memory", value="efficiency", unit="×", bound=1)
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if "flop_per_byte" in row:
            points.setdefault(row["variant"], []).append((row["flop_per_byte"], row["flop_per_byte"] * row["median"]))
    speed = next((row["median"] for row in _of(rows, "state") if row["bound"] == "read"), None)
    yield _roofline("Roofline of decode attention and linear operations", points, speed)


def _fragmentation(rows: list[Row]) -> Iterable[Chart | None]:
    useful = [row for row in _of(rows, "useful") if "blocks of" not in row["variant"]]
    yield _bars(useful, "KV memory that holds tokens, while requests wait: more is better", unit="%")
    waste: dict[str, list[tuple[float, float]]] = {}
    for row in _of(rows, "waste"):
        size = float(re.sub(r"\D", "", row["variant"]) or 16)
        waste.setdefault(row["workload"], []).append((size, row["median"]))
    some = _series({name: points for name, points in waste.items() if len(points) > 1})
    title = "Slots of mapped frames that hold no token, against the block size"
    yield lines(title, some, x="tokens in a block", y="% of mapped slots", is_log="x") if some else None
    bursts = [row for row in _of(rows, "useful") if row["workload"] == "bursts"]
    over_time = _series({row["variant"]: [(at[0], at[1]) for at in row["over_time"]] for row in bursts})
    title = "Bursts of 40 requests: KV memory that holds tokens, over time"
    yield lines(title, over_time, x="steps", y="% of the memory") if over_time else None
    yield _bars(_of(rows, "saved"), "Frames that sharing saves, of those without sharing", unit="%")


def _tiers(rows: list[Row]) -> Iterable[Chart | None]:
    for way, title in (("store", "Pages stored"), ("load", "Pages loaded")):
        found: dict[str, list[tuple[float, float]]] = {}
        for row in _of(rows, way):
            found.setdefault(f"{row['tier']}: {row['variant']}", []).append((row["frame"] / 1024, row["median"]))
        yield lines(title, _series(found), x="KiB of a frame", y="GB/s", is_log="x") if found else None
    yield _bars(_of(rows, "first token"), "Seconds to the first token, by the place of the prefix")


def _generate(rows: list[Row]) -> Iterable[Chart | None]:
    title = "A decode step over the time in which memory gives its bytes"
    yield _bars(_of(rows, "decode"), title, value="over_bound", unit="×", bound=1)


def _by_case(rows: list[Row]) -> Iterable[Chart | None]:
    for case in dict.fromkeys(row["case"] for row in rows):
        yield _bars(_of(rows, case), f"{case}, {_of(rows, case)[0]['unit']}")


CHARTS: Final[dict[str, Callable[[list[Row]], Iterable[Chart | None]]]] = {
    "manager": _manager, "attention": _attention, "fragmentation": _fragmentation, "bandwidth": _bandwidth,
    "generate": _generate, "transformers": _by_case, "vllm": _by_case, "tiers": _tiers,
}  # fmt: skip
